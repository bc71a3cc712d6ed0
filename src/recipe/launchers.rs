//! Launchers before an external trainer's command: the program without them, and what they give to its ranks.

use std::collections::BTreeMap;

use super::batch_arguments::argument_keys;
use super::dialects::accelerate::environment;
use super::dialects::command::alone::{self, Split, assigned};
use super::schema::dialect::Dialect;
use super::{Diagnostic, ReadError, Recipe, Request, trainer_command};

pub use super::dialects::accelerate::environment::deepspeed_config;

/// Reads a recipe with `read`. A launcher at the start of the external trainer's command is replaced: the recipe
/// gets its settings, and the command becomes that of one rank.
pub(super) fn replace(
    request: &Request,
    read: impl Fn(&Request) -> Result<Recipe, ReadError>,
) -> Result<Recipe, ReadError> {
    let mut request = request.clone();
    request.environment.extend(&assigned(&request.command));
    request
        .environment
        .extend(&assigned(&request.trainer_command));
    let recipe = read(&request)?;
    let own = &recipe.spec.trainer.command;
    if own.is_empty() || request.starts_command || !request.trainer_command.is_empty() {
        return Ok(recipe);
    }
    request.environment.extend(&assigned(own));
    request.trainer_command.clone_from(own);
    read(&request).map_err(|error| error.of_command_in(&recipe))
}

/// Makes a [`Split`] the external trainer of a recipe: its program, and its environment. A launcher's variables win over
/// those that it was started with. `is_job`: the command is the job, whose batch numbers become placeholders.
pub(super) fn take_over(
    mut recipe: Recipe,
    split: Split,
    is_job: bool,
) -> Result<Recipe, ReadError> {
    let Split {
        launcher,
        program,
        environment: mut of_launcher,
        mut assigned,
        ignored,
    } = split;
    recipe.launcher_replaced = launcher.is_some() && !is_job;
    recipe.spec.trainer.command = if is_job {
        // A program takes what its command states, whatever its text says.
        let without = alone::without_numbers(program.clone(), &argument_keys(&recipe), false);
        recipe.lacks_batch_arguments &= without == program;
        without_numbers(&recipe, program)
    } else {
        program
    };
    if launcher.is_some() && !assigned.is_empty() {
        of_launcher.extend(environment(&recipe)?);
    }
    // A launcher appends its path.
    if let (Some(path), Some(first)) = (of_launcher.get_mut(PATHS), assigned.get(PATHS)) {
        *path = format!("{first}:{path}");
    }
    assigned.extend(of_launcher);
    recipe.spec.trainer.add_environment(assigned);
    if !ignored.is_empty() {
        recipe.diagnostics.push(Diagnostic::note(
            "external-trainer",
            None,
            format!("options of the launcher without effect: `{}`", ignored.join("`, `")),
            "nothing to do; evenkeel itself connects and restarts the ranks, and writes their output to the run's directory",
        ));
    }
    Ok(recipe)
}

/// Python's folders of modules.
const PATHS: &str = "PYTHONPATH";

/// The environment variables that `accelerate launch` gives to every rank, with the numbers that its options and
/// its config state. Empty: it does not start the program. Fails for a setting that accelerate would drop.
pub fn stated_environment(recipe: &Recipe) -> Result<BTreeMap<String, String>, ReadError> {
    let mut diagnostics = Vec::new();
    let launch = recipe.accelerate.as_ref();
    let found = launch.map(|launch| environment::environment(launch, &mut diagnostics));
    if !diagnostics.is_empty() {
        return Err(ReadError {
            sources: recipe.sources.clone(),
            diagnostics,
            rest: None,
        });
    }
    Ok(found.unwrap_or_default())
}

/// As [`stated_environment`], with placeholders for the numbers that depend on the world.
pub fn environment(recipe: &Recipe) -> Result<BTreeMap<String, String>, ReadError> {
    stated_environment(recipe).map(environment::with_placeholders)
}

/// Makes a rank use the file of [`deepspeed_config`] instead; false if accelerate does not start DeepSpeed.
pub fn use_deepspeed_file(environment: &mut BTreeMap<String, String>) -> bool {
    let starts = deepspeed_config(environment).is_some();
    if starts {
        let variables = environment::FILE_VARIABLES;
        environment.extend(variables.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
    starts
}

/// A program's words with `{args}` and `{resume_args}` in place of the batch numbers. DeepSpeed's own configs
/// state the numbers in a file, and their programs have no common arguments. A command that has
/// placeholders for the numbers does not change.
fn without_numbers(recipe: &Recipe, program: Vec<String>) -> Vec<String> {
    if trainer_command::has_numbers(&program) {
        return program;
    }
    let by_arguments = recipe.dialect != Dialect::Deepspeed;
    alone::without_numbers(program, &argument_keys(recipe), by_arguments)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::Arc;

    use super::*;
    use crate::recipe::{Origin, Setting, read_text};

    #[test]
    fn a_command_with_placeholders_for_the_numbers_does_not_change() {
        let of = |line: &str| {
            let batch = Setting {
                flag: "--global-batch-size",
                path: "batch.global",
                value: "16".to_owned(),
            };
            let request = Request {
                command: line.split(' ').map(str::to_owned).collect(),
                starts_command: true,
                settings: vec![batch],
                ..Request::default()
            };
            let recipe = crate::recipe::read(&request).unwrap();
            recipe.spec.trainer.command.join(" ")
        };
        let program = "torchrun --nproc_per_node 4 ift.py --batch_size";
        assert_eq!(
            of(&format!("{program} {{per_device_batch_size}}")),
            "python3 -u ift.py --batch_size {per_device_batch_size}"
        );
        assert_eq!(
            of(&format!("{program} 2")),
            "python3 -u ift.py --batch_size 2 {args} {resume_args}"
        );
    }

    #[test]
    fn a_program_takes_the_numbers_that_its_command_states() {
        let lacks = |text: &str, numbers: &str| {
            let line = format!("torchrun --nproc_per_node 2 train.py {numbers}");
            let program = (PathBuf::from("train.py"), text.to_owned());
            let batch = Setting {
                flag: "--global-batch-size",
                path: "batch.global",
                value: "12".to_owned(),
            };
            let request = Request {
                origin: Origin::Snapshot(Arc::new([program].into())),
                command: line.split(' ').map(str::to_owned).collect(),
                starts_command: true,
                settings: vec![batch],
                ..Request::default()
            };
            crate::recipe::read(&request).unwrap().lacks_batch_arguments
        };
        let defines = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--width')\np.parse_args()\n";
        assert!(lacks(defines, "--width 6"));
        assert!(!lacks(defines, "--per_device_train_batch_size 6"));
        // It may hand its arguments to another file.
        assert!(!lacks("from a.cli import main\nmain()\n", "--width 6"));
    }

    #[test]
    fn a_launcher_in_the_recipes_command_is_replaced_and_gives_its_world() {
        let read = |command: &str| {
            let text = format!(
                "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nevenkeel:\n  \
                 objective: sft\n  trainer: {{command: {command}}}\n"
            );
            let request = Request {
                path: "sft.yaml".into(),
                ..Request::default()
            };
            read_text(&request, text)
        };
        let recipe = read("[deepspeed, --num_gpus, '8', train.py, '{args}']").unwrap();
        assert_eq!(recipe.spec.batch.gpus, Some(8));
        assert!(recipe.launcher_replaced);
        let trainer = recipe.spec.trainer;
        assert_eq!(
            trainer.command.join(" "),
            "python3 -u train.py --local_rank={local_rank} {args}"
        );
        assert_eq!(trainer.environment["LOCAL_SIZE"], "{local_world_size}");
        let variables = "[A=1, FSDP_VERSION=1, accelerate, launch, --use_fsdp, --fsdp_version, '2', \
                         train.py]";
        let trainer = read(variables).unwrap().spec.trainer;
        assert_eq!(trainer.command.join(" "), "python3 -u train.py");
        for (name, value) in [("A", "1"), ("FSDP_VERSION", "2")] {
            assert_eq!(trainer.environment[name], value);
        }
        let paths =
            read("[PYTHONPATH=src, accelerate, launch, --use_deepspeed, train.py]").unwrap();
        let paths = &paths.spec.trainer.environment["PYTHONPATH"];
        assert_eq!(paths, "src:{working_directory}");
        let ignored = read("[torchrun, --max_restarts, '3', --role, mine, train.py]").unwrap();
        let note = ignored
            .diagnostics
            .iter()
            .find(|d| d.rule == "external-trainer");
        insta::assert_snapshot!(note.unwrap().message, @"options of the launcher without effect: `--max_restarts`");
        assert_eq!(ignored.spec.trainer.environment["ROLE_NAME"], "mine");
        let trainer = read("[env, A=1, sh, train.sh]").unwrap().spec.trainer;
        assert_eq!(trainer.command.join(" "), "sh train.sh");
        assert_eq!(trainer.environment["A"], "1");
        let world = read("[PET_NPROC_PER_NODE=8, torchrun, train.py]").unwrap();
        assert_eq!(world.spec.batch.gpus, Some(8));
        // The rule external-trainer refuses it.
        let shell = read("[bash, -c, torchrun train.py]").unwrap();
        assert_eq!(shell.spec.trainer.command.len(), 3);
        insta::assert_snapshot!(read("[torchrun, --run_path, a, train.py]").unwrap_err(), @"sft.yaml:5:22: `--run_path` of torchrun has no counterpart in evenkeel, which starts the ranks itself; remove it (docs/external-trainer.md lists what evenkeel replaces)");
        insta::assert_snapshot!(read("[srun, -N2, torchrun, train.py]").unwrap_err(), @"sft.yaml:5:22: `-N 2` of srun starts the launcher more than once, but evenkeel starts every rank itself; remove `srun` with its options, and give the nodes of a cluster with `evenkeel launch --nodes` (docs/external-trainer.md lists what evenkeel replaces)");
    }
}
