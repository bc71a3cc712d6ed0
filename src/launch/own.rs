//! A run of the user's own program: what can be refused before it is started, and how it goes on.
//! Data, model and checkpoints are the program's business; the batch is ours.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use super::{LaunchError, Planned, Prepared, Request, RunDir, place, prepare, resume};
use crate::agent::{Call, Foreign};
use crate::batch::{self, Plan};
use crate::recipe::spec::{BatchSchedule, Remainder, Trainer};
use crate::recipe::{self, Recipe, Spec, emit, placeholder};
use crate::train::Setup;

/// Programs that start processes, each for as many as there are devices: so does this one.
const LAUNCHERS: [&str; 8] = [
    "torchrun",
    "trl",
    "accelerate",
    "accelerate-launch",
    "deepspeed",
    "mpirun",
    "mpiexec",
    "srun",
];

/// The same as modules of Python.
const MODULES: [&str; 5] = [
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate.commands.launch",
    "accelerate",
    "deepspeed",
];

/// Programs that start the one behind them as it is.
const WRAPPERS: [&str; 9] = [
    "env", "exec", "nice", "nohup", "numactl", "pdm", "poetry", "run", "uv",
];

/// Prepares a new run in the directory, or an old one to go on. The caller holds its lock.
pub(super) fn prepare(
    run: &RunDir,
    recipe: &Recipe,
    planned: &Planned,
    request: &Request,
) -> Result<Prepared, LaunchError> {
    let place = absolute(run.path())?;
    let base = prepare::base()?;
    let foreign = Foreign {
        recipe,
        run: &place,
        base: Some(&base),
    };
    let plan = &planned.plan;
    refuse(recipe, plan, &request.overrides)?;
    let call = foreign.call(0, plan)?;
    refuse_unknown_program(&call)?;
    let mut notes = notes(recipe, &call);
    let (setup, state) = match request.resume {
        true => {
            let mut setup = resume::setup_of(run, recipe)?;
            let state = run.state()?;
            if let Some(state) = &state {
                resume::refuse_finished(run, &setup, state)?;
            }
            resume::wait_for_old_ranks(run, state.as_ref(), request)?;
            setup.spec.trainer.clone_from(&recipe.spec.trainer);
            (setup, state)
        }
        false => {
            if let Some(left) = &call.checkpoint {
                return Err(usage(format!(
                    "{} is there already, and a new run would go on from it: give the program another \
                     place for its checkpoints ({}), remove it, or go on with its run (--resume)",
                    left.display(),
                    recipe.key("trainer.checkpoint_dir")
                )));
            }
            (new(recipe, planned, request, base), None)
        }
    };
    run.write_setup(&setup)?;
    notes.extend(call.remarks);
    Ok(Prepared {
        setup,
        state,
        own: Some(recipe.clone()),
        notes,
    })
}

/// Refuses a command of the user's own that another machine would have to refuse, too.
pub fn check_own(recipe: &Recipe, plan: &Plan, overrides: &[String]) -> Result<(), LaunchError> {
    refuse(recipe, plan, overrides)?;
    let foreign = Foreign {
        recipe,
        run: Path::new("."),
        base: None,
    };
    foreign.call(0, plan)?;
    Ok(())
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

/// The run of a program that was never started.
fn new(recipe: &Recipe, planned: &Planned, request: &Request, base: PathBuf) -> Setup {
    let spec = &recipe.spec;
    let global_batch_size = planned.plan.global_batch_size;
    let horizon = batch::horizon(spec, global_batch_size, None);
    Setup {
        job: prepare::uid(),
        name: spec.name.clone(),
        recipe_path: request.recipe_path.clone(),
        dialect: recipe.dialect,
        base,
        overrides: request.overrides.clone(),
        spec: spec.clone(),
        global_batch_size,
        model: None,
        model_config: planned.request.model_config.clone(),
        weights: None,
        companions: Vec::new(),
        data_samples: None,
        data_fingerprint: None,
        budget_samples: horizon.budget_samples,
        horizon,
        rank_memory: None,
        entropy: None,
    }
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

/// Refuses what would train on another batch than the plan says, or would start nothing.
fn refuse(recipe: &Recipe, plan: &Plan, overrides: &[String]) -> Result<(), LaunchError> {
    let trainer = &recipe.spec.trainer;
    let command = &trainer.command;
    if let Some((key, problem)) = placeholder::flaw(trainer) {
        return Err(usage(format!("`{key}` {problem}")));
    }
    if let Some(launcher) = launcher_of(command) {
        return Err(usage(format!(
            "`{launcher}` starts a process for every device, and so does evenkeel: give what it \
             would start, as `-- python train.py …`"
        )));
    }
    if plan.outline.remainder == Remainder::Uneven {
        return Err(usage(format!(
            "micro-batches are dealt unevenly, {}, which only the built-in trainer can do: ask for \
             one of {:?} processes, without {}=uneven",
            plan.proof,
            plan.outline.feasible_gpu_counts,
            recipe.key("batch.remainder")
        )));
    }
    if recipe.spec.schedule != BatchSchedule::Constant {
        return Err(usage(format!(
            "the batch of a program of your own stays as it is, and {} wants to change it: leave it \
             out, or use the built-in trainer",
            recipe.key("schedule")
        )));
    }
    if let Some((word, placeholder)) = typed_number(recipe, command) {
        return Err(usage(format!(
            "the command says `{word}` itself, which would stay the same in every world: write \
             `{placeholder}` there"
        )));
    }
    if let Some(lost) = placeholder::lost_override(command, overrides) {
        return Err(usage(lost));
    }
    Ok(())
}

/// The launcher that a command begins with, behind what only starts it.
fn launcher_of(command: &[String]) -> Option<String> {
    let mut words = command.iter();
    while let Some(word) = words.next() {
        let name = Path::new(word).file_name()?.to_str()?;
        if word == "-m" {
            let module = words.next()?;
            return MODULES
                .contains(&module.as_str())
                .then(|| format!("-m {module}"));
        }
        let starts = WRAPPERS.contains(&name) || name.starts_with("python");
        if !(starts || word.starts_with('-') || word.contains('=')) {
            return LAUNCHERS.contains(&name).then(|| name.to_owned());
        }
    }
    None
}

/// A number of the batch that stands in a command as it is, and what should stand there.
fn typed_number<'a>(recipe: &Recipe, command: &'a [String]) -> Option<(&'a str, &'static str)> {
    let keys = [
        ("batch.micro", "{per_device_batch_size}"),
        ("batch.accumulation", "{gradient_accumulation_steps}"),
    ];
    keys.into_iter().find_map(|(path, placeholder)| {
        let key = emit::upstream_key(recipe, path)?;
        let (word, value) = placeholder::typed(command, key)?;
        value.parse::<u64>().is_ok().then_some((word, placeholder))
    })
}

/// Refuses a program that is not there: started for every rank it would fail for every rank.
fn refuse_unknown_program(call: &Call) -> Result<(), LaunchError> {
    let program = call.command.first().map_or("", String::as_str);
    let runs = |path: &Path| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    let found = match program.contains('/') {
        true => runs(Path::new(program)),
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
fn notes(recipe: &Recipe, call: &Call) -> Vec<String> {
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
        && recipe::resume::directory(recipe).is_none()
    {
        notes.push(format!(
            "nobody says where the program keeps its checkpoints ({{checkpoint_dir}}): they are looked \
             for in {looked_for}, and unless it writes them there, {elsewhere}"
        ));
    }
    notes
}

#[cfg(test)]
mod tests;
