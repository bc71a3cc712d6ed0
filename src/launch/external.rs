//! Prepares a run of an external trainer: the refusals before its start, and its resume. The
//! trainer handles data, model and checkpoints; Evenkeel handles the batch.

use std::path::{Path, PathBuf};

use super::{LaunchError, Planned, Prepared, Request, RunDir, RunOptions, begin, port, resume};
use crate::external_trainer::{self, Call, ExternalTrainer};
use crate::launch::run_path;
use crate::recipe::schema::spec::Trainer;
use crate::recipe::{Recipe, Spec};
use crate::train::Run;

/// Prepares a new run in the directory, or resumes an existing one. The caller holds the run lock.
pub(super) fn prepare(
    run_dir: &RunDir,
    recipe: &Recipe,
    planned: &Planned,
    request: &Request,
) -> Result<Prepared, LaunchError> {
    external_trainer::check::overrides(recipe, &request.overrides)?;
    port::named(&recipe.spec.trainer)?;
    let run = if request.resume {
        Run {
            device: request.runner.device(),
            ..resumed(run_dir, recipe)?
        }
    } else {
        begin::begin(recipe, &recipe.spec, planned, request, None)?
    };
    let place = absolute(run_dir.path())?;
    let trainer = ExternalTrainer {
        recipe,
        run_dir: &place,
        base: Some(&run.base),
        most_on_a_host: request.most_on_a_host,
    };
    let call = trainer.call(0, &planned.plan, trainer.newest())?;
    refuse_unknown_program(&call, &run.base)?;
    let state = if request.resume {
        let state = run_dir.state()?;
        if let Some(state) = &state {
            resume::refuse_ended(run_dir, &run, state)?;
        }
        resume::wait_for_old_ranks(run_dir, state.as_ref(), request)?;
        state
    } else {
        refuse_existing_checkpoint(recipe, &call)?;
        None
    };
    run_dir.write_run(&run)?;
    Ok(Prepared {
        worlds: planned.of_run(&run),
        run,
        state,
        external: Some(recipe.clone()),
        notes: external_trainer::check::notes(recipe, call),
        facts: Vec::new(),
    })
}

/// A recipe with the command of the run to resume, and with what its launcher set and the recipe does not state. `None`:
/// the built-in trainer ran there or the run does not exist.
pub fn with_command_of_run(
    options: &RunOptions<'_>,
    recipe: &Recipe,
) -> Result<Option<Recipe>, LaunchError> {
    let spec = &recipe.spec;
    // Such a run has a different default directory than one of the built-in trainer.
    let defaults = Spec {
        trainer: Trainer {
            command: vec![String::new()],
            ..Trainer::default()
        },
        ..spec.clone()
    };
    let Ok(run_dir) = run_path::choose(options, &defaults) else {
        return Ok(None);
    };
    let of_run = run_dir.run()?.spec;
    if !of_run.trainer.is_external() {
        return Ok(None);
    }
    let mut recipe = recipe.clone();
    let spec = &mut recipe.spec;
    spec.trainer.command = of_run.trainer.command;
    spec.trainer.deepspeed_config = of_run.trainer.deepspeed_config;
    if recipe.accelerate.is_some() {
        return Ok(Some(recipe));
    }
    spec.trainer.environment = of_run.trainer.environment;
    let sources = &recipe.value_sources;
    let states = |path: &str| sources.keys().any(|key| key.starts_with(path));
    if !states("batch.gpus") {
        spec.batch.gpus = of_run.batch.gpus;
    }
    if !states("parallel.") {
        spec.parallel = of_run.parallel;
    }
    if !states("model.precision") {
        spec.model.precision = of_run.model.precision;
    }
    if !states("model.activation_checkpointing") {
        spec.model.activation_checkpointing = of_run.model.activation_checkpointing;
    }
    Ok(Some(recipe))
}

/// The run to resume, with its current command.
fn resumed(run_dir: &RunDir, recipe: &Recipe) -> Result<Run, LaunchError> {
    let mut run = resume::run_of(run_dir, recipe)?;
    let directory = |run: &Run| external_trainer::resume::directory(run.dialect, &run.spec);
    let before = directory(&run);
    run.spec.trainer.clone_from(&recipe.spec.trainer);
    let now = directory(&run);
    if before != now {
        let describe = |directory: Option<String>| {
            directory.map_or("the run's directory".to_owned(), |path| format!("`{path}`"))
        };
        return Err(LaunchError::usage(format!(
            "{} keeps its checkpoints in {}, but the recipe now sets {}: resume with the \
             original directory, or start a new run with another --out",
            run_dir.path().display(),
            describe(before),
            describe(now)
        )));
    }
    if !run.base.is_dir() {
        return Err(LaunchError::usage(format!(
            "{}, the trainer's working directory, no longer exists: \
             restore it, or start a new run with another --out",
            run.base.display()
        )));
    }
    Ok(run)
}

/// A path that stays valid when the program changes its working directory.
pub(super) fn absolute(path: &Path) -> Result<PathBuf, LaunchError> {
    std::path::absolute(path).map_err(|error| {
        LaunchError::usage(format!(
            "{} has no absolute path: {error}; give another --out",
            path.display()
        ))
    })
}

/// Refuses a new run that would resume from another run's checkpoint.
fn refuse_existing_checkpoint(recipe: &Recipe, call: &Call) -> Result<(), LaunchError> {
    let Some(left) = &call.checkpoint else {
        return Ok(());
    };
    Err(LaunchError::usage(format!(
        "{} already exists, and a new run would resume from it: set another directory for the \
         checkpoints ({}), remove it, or resume its run (--resume)",
        left.display(),
        recipe.key("trainer.checkpoint_dir")
    )))
}

/// Refuses a missing program, because every rank would fail to start it. `base` is its working
/// directory.
fn refuse_unknown_program(call: &Call, base: &Path) -> Result<(), LaunchError> {
    let program = call.command.first().map_or("", String::as_str);
    match external_trainer::cannot_start(base, program) {
        None => Ok(()),
        Some(problem) => Err(LaunchError::usage(format!("{problem}; give its path"))),
    }
}

/// What every host must have to run an external trainer.
pub struct Requirements {
    /// Its working directory.
    pub base: PathBuf,
    pub program: String,
    /// Where it writes its checkpoints.
    pub checkpoint_dir: PathBuf,
}

/// The requirements of a recipe with an external trainer, in a new run or one that is resumed.
pub fn requirements(
    run_dir: &RunDir,
    recipe: &Recipe,
    resume: bool,
) -> Result<Requirements, LaunchError> {
    let base = match resume {
        true => run_dir.run()?.base,
        false => begin::base()?,
    };
    let run_dir = absolute(run_dir.path())?;
    let trainer = ExternalTrainer {
        recipe,
        run_dir: &run_dir,
        base: Some(&base),
        most_on_a_host: u64::MAX,
    };
    Ok(Requirements {
        checkpoint_dir: trainer.checkpoint_dir(),
        program: (recipe.spec.trainer.command.first().cloned()).unwrap_or_default(),
        base,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::Hub;
    use crate::launch::prepare;
    use crate::launch::testing::recipe_of;
    use crate::plan::{AskedRunner, DeviceKind, Reached, Runner};

    /// The refusal of a command; `None` if it is accepted.
    fn refused(command: &[&str], more: &str, overrides: &[&str]) -> Option<String> {
        let place = tempfile::tempdir().unwrap();
        let text = format!(
            "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n\
         evenkeel: {{objective: sft, batch: {{gpus: 2}}{more}}}\n"
        );
        let (mut recipe, request) = recipe_of(place.path(), &text, overrides);
        recipe.spec.trainer.command = command.iter().map(|&word| word.to_owned()).collect();
        let run_dir = RunDir::at(place.path().join("run"));
        let runner = Runner::of(&recipe.spec, AskedRunner::Launch, DeviceKind::Cpu, None);
        let plan = |ranks| {
            prepare::plan(
                &recipe,
                ranks,
                Reached::default(),
                runner,
                (None, request.oom_policy),
                &Hub::none(),
            )
        };
        let planned = match plan(3).or_else(|_| plan(2)) {
            Ok(planned) => planned,
            Err(error) => return Some(error.to_string()),
        };
        std::fs::create_dir_all(run_dir.path()).unwrap();
        let error = super::prepare(&run_dir, &recipe, &planned, &request).err();
        assert_eq!(run_dir.contains_run(), error.is_none());
        error.map(|error| error.to_string())
    }

    #[test]
    fn a_command_that_would_change_the_batch_is_refused() {
        assert_eq!(refused(&["sh", "train.sh", "{args}"], "", &[]), None);
        let typed = ["sh", "train.sh", "--per_device_train_batch_size", "8"];
        let typed = refused(&typed, "", &[]).unwrap();
        assert!(typed.contains("does not follow the world"), "{typed}");
        // Two processes split the batch, three do not, with any remainder policy.
        let uneven = ["evenkeel.batch.remainder=uneven"];
        let uneven = refused(&["sh", "{args}"], "", &uneven);
        assert_eq!(uneven, None);
        let over = refused(&["sh", "{recipe}"], "", &["max_seq_length=128"]).unwrap();
        assert!(
            over.contains("`max_seq_length=128` would not be in `{recipe}`"),
            "{over}"
        );
    }

    #[test]
    fn a_command_without_an_executable_program_is_refused() {
        let refusal = |command: &[&str]| refused(command, "", &[]).unwrap();
        let absent = refusal(&["no-such-program", "{args}"]);
        assert_eq!(
            absent,
            "`no-such-program` is not an executable program in PATH; give its path"
        );
        let absent = refusal(&["/nowhere/python", "{args}"]);
        assert!(
            absent.ends_with("`/nowhere/python` is not an executable program; give its path"),
            "{absent}"
        );
    }

    #[test]
    fn a_new_run_does_not_resume_from_checkpoints_of_another_run() {
        let place = tempfile::tempdir().unwrap();
        let old = place.path().join("old/checkpoint-4");
        std::fs::create_dir_all(&old).unwrap();
        std::fs::write(old.join("trainer_state.json"), "{}").unwrap();
        let more = format!(
            ", trainer: {{checkpoint_dir: {}}}",
            place.path().join("old").display()
        );
        let message = refused(&["sh", "{args}"], &more, &[]).unwrap();
        assert!(message.contains("checkpoint-4 already exists"), "{message}");
    }
}
