//! A run of the user's own program: what can be refused before it is started, and how it goes on.
//! Data, model and checkpoints are the program's business; the batch is ours.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::{LaunchError, Planned, Prepared, Request, RunDir, begin, place, resume};
use crate::agent::{Call, Foreign};
use crate::batch::Plan;
use crate::recipe::spec::Trainer;
use crate::recipe::{self, Recipe, Spec, own_command, placeholder};
use crate::train::Setup;

/// Prepares a new run in the directory, or an old one to go on. The caller holds its lock.
pub(super) fn prepare(
    run: &RunDir,
    recipe: &Recipe,
    planned: &Planned,
    request: &Request,
) -> Result<Prepared, LaunchError> {
    refuse_lost_override(recipe, &request.overrides)?;
    let setup = match request.resume {
        true => again(run, recipe)?,
        false => begin::begin(recipe, planned, request, None)?,
    };
    let place = absolute(run.path())?;
    let foreign = Foreign {
        recipe,
        run: &place,
        base: Some(&setup.base),
    };
    let call = foreign.call(0, &planned.plan, foreign.newest())?;
    refuse_unknown_program(&call, &setup.base)?;
    let state = match request.resume {
        true => {
            let state = run.state()?;
            if let Some(state) = &state {
                resume::refuse_finished(run, &setup, state)?;
            }
            resume::wait_for_old_ranks(run, state.as_ref(), request)?;
            state
        }
        false => {
            refuse_what_is_left(recipe, &call)?;
            None
        }
    };
    run.write_setup(&setup)?;
    Ok(Prepared {
        setup,
        state,
        own: Some(recipe.clone()),
        notes: notes(recipe, call),
    })
}

/// Refuses a command of the user's own that a pod would have to refuse, too; what people should know
/// of one that is not refused, a line each.
pub fn check_own(
    recipe: &Recipe,
    plan: &Plan,
    overrides: &[String],
) -> Result<Vec<String>, LaunchError> {
    refuse_lost_override(recipe, overrides)?;
    if let Some(lost) = recipe::resume::lost_checkpoints(recipe) {
        return Err(usage(lost));
    }
    let foreign = Foreign {
        recipe,
        run: Path::new("."),
        base: None,
    };
    let call = foreign.call(0, plan, None)?;
    Ok(notes(recipe, call))
}

/// How the user's own program was started in the run that is to be resumed; `None` where the
/// built-in trainer was, or nobody.
pub fn own_trainer(out: Option<&Path>, spec: &Spec) -> Result<Option<Trainer>, LaunchError> {
    // Such a run stands elsewhere than one of the built-in trainer.
    let looking = Spec {
        trainer: Trainer {
            command: vec![String::new()],
            ..Trainer::default()
        },
        ..spec.clone()
    };
    let Ok(run) = place::choose(out, &looking, true) else {
        return Ok(None);
    };
    let trainer = run.setup()?.spec.trainer;
    Ok(trainer.is_own().then_some(trainer))
}

/// The run of a program that is to go on, with the command that it has now.
fn again(run: &RunDir, recipe: &Recipe) -> Result<Setup, LaunchError> {
    let mut setup = resume::setup_of(run, recipe)?;
    let directory = |setup: &Setup| recipe::resume::directory(setup.dialect, &setup.spec);
    let before = directory(&setup);
    setup.spec.trainer.clone_from(&recipe.spec.trainer);
    let now = directory(&setup);
    if before != now {
        let said = |directory: Option<String>| {
            directory.map_or("in the run's directory".to_owned(), |path| {
                format!("in {path}")
            })
        };
        return Err(usage(format!(
            "{} has its checkpoints {}, and now they are said to be {}: resume it with the place that \
             it began with, or start a new run with another --out",
            run.path().display(),
            said(before),
            said(now)
        )));
    }
    if !setup.base.is_dir() {
        return Err(usage(format!(
            "{}, where the program was started and its relative paths begin, is not there any more: \
             put it back, or start a new run with another --out",
            setup.base.display()
        )));
    }
    Ok(setup)
}

/// A path that means the same to a program that changes its directory.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, LaunchError> {
    std::path::absolute(path).map_err(|error| {
        usage(format!(
            "{} has no absolute path: {error}; give another --out",
            path.display()
        ))
    })
}

fn usage(message: String) -> LaunchError {
    LaunchError::Usage { message }
}

fn refuse_lost_override(recipe: &Recipe, overrides: &[String]) -> Result<(), LaunchError> {
    own_command::lost_override(recipe, overrides).map_or(Ok(()), |lost| Err(usage(lost)))
}

/// Refuses checkpoints of somebody else's run, from which a new one would go on.
fn refuse_what_is_left(recipe: &Recipe, call: &Call) -> Result<(), LaunchError> {
    let Some(left) = &call.checkpoint else {
        return Ok(());
    };
    Err(usage(format!(
        "{} is there already, and a new run would go on from it: give the program another place for \
         its checkpoints ({}), remove it, or go on with its run (--resume)",
        left.display(),
        recipe.key("trainer.checkpoint_dir")
    )))
}

/// Refuses a program that is not there: started for every rank it would fail for every rank. `base`:
/// where it is started.
fn refuse_unknown_program(call: &Call, base: &Path) -> Result<(), LaunchError> {
    let program = call.command.first().map_or("", String::as_str);
    let runs = |path: &Path| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    let found = match program.contains('/') {
        true => runs(&base.join(program)),
        false => {
            let path = std::env::var_os("PATH").unwrap_or_default();
            std::env::split_paths(&path).any(|directory| runs(&directory.join(program)))
        }
    };
    if found {
        return Ok(());
    }
    Err(usage(format!(
        "there is no program `{program}` that can be run{}: give its path",
        if program.contains('/') {
            ""
        } else {
            " in PATH"
        }
    )))
}

/// What people should know of a command that is not refused.
fn notes(recipe: &Recipe, call: Call) -> Vec<String> {
    let command = &recipe.spec.trainer.command;
    let mut notes = Vec::new();
    if !placeholder::takes_numbers(command) {
        notes.push(
            "the command has none of the plan's numbers ({args}, {recipe}, {per_device_batch_size}): \
             the global batch stays the same only if the program reads \
             EVENKEEL_PER_DEVICE_BATCH_SIZE and EVENKEEL_GRADIENT_ACCUMULATION_STEPS"
                .to_owned(),
        );
    }
    let elsewhere = "it begins at step 0 again whenever the world changes";
    let looked_for = call.checkpoint_dir.display();
    if !placeholder::is_used(command, placeholder::RESUME_ARGS) {
        notes.push(format!(
            "the command does not say {{resume_args}}: unless the program finds its checkpoints by \
             itself or reads EVENKEEL_CHECKPOINT, {elsewhere}"
        ));
    } else if !placeholder::is_used(command, placeholder::CHECKPOINT_DIR)
        && recipe::resume::directory(recipe.dialect, &recipe.spec).is_none()
    {
        notes.push(format!(
            "nobody says where the program keeps its checkpoints ({{checkpoint_dir}}): they are looked \
             for in {looked_for}, and unless it writes them there, {elsewhere}"
        ));
    }
    notes.extend(call.remarks);
    notes
}

#[cfg(test)]
mod tests;
