//! Arguments with which a recipe's trainer resumes from one of its checkpoints.

use std::path::Path;

use crate::recipe::dialects::readers;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::placeholder::{self, Value};
use crate::recipe::schema::reader::{Checkpoints, Reader, Resume};
use crate::recipe::schema::spec::Spec;
use crate::recipe::{Recipe, trainer_command};

/// The arguments for a checkpoint: the recipe's `trainer.resume`, else those of its dialect; `None`
/// if neither has any.
pub fn arguments(recipe: &Recipe, checkpoint: &Path) -> Option<Vec<String>> {
    let checkpoint = checkpoint.to_string_lossy();
    let arguments = &recipe.spec.trainer.resume;
    if !arguments.is_empty() {
        let value_of = |name: &str| {
            (name == placeholder::CHECKPOINT).then(|| Value::Word(checkpoint.clone().into_owned()))
        };
        return Some(placeholder::fill(arguments, value_of));
    }
    let (reader, resume) = of(recipe.dialect)?;
    Some(reader.argument(resume.key, &checkpoint))
}

/// The names of the checkpoints of a dialect's trainer.
pub fn checkpoints(dialect: Dialect) -> Checkpoints {
    of(dialect).map_or(Checkpoints::ANY, |(_, resume)| resume.checkpoints)
}

/// The directory of the trainer's checkpoints, as the user writes it: `trainer.checkpoint_dir`,
/// else the option of the command, else the recipe's output.
pub fn directory(dialect: Dialect, spec: &Spec) -> Option<String> {
    // The output of a native recipe is the run's directory.
    let output = || spec.output.clone().filter(|_| dialect != Dialect::Native);
    if let Some(directory) = &spec.trainer.checkpoint_dir {
        return Some(directory.clone());
    }
    let typed = of(dialect)
        .and_then(|(_, resume)| trainer_command::typed(&spec.trainer.command, resume.output));
    match typed {
        None => output(),
        Some((_, value)) if trainer_command::says_checkpoint_dir(std::slice::from_ref(&value)) => {
            output()
        }
        // Only the shell can expand this value.
        Some((_, value)) if value.contains(['$', '`']) || value.starts_with('~') => None,
        Some((_, value)) => placeholder::is_plain(&value).then_some(value),
    }
}

/// The warning for checkpoints in the filesystem of a container, which are lost when it ends.
pub fn lost_checkpoints(recipe: &Recipe) -> Option<String> {
    let directory = directory(recipe.dialect, &recipe.spec)?;
    let command = &recipe.spec.trainer.command;
    if Path::new(&directory).is_absolute() || trainer_command::says_checkpoint_dir(command) {
        return None;
    }
    Some(format!(
        "the trainer writes checkpoints to `{directory}`, which is lost when the container ends: \
         use `{{checkpoint_dir}}` in the command (`--output_dir {{checkpoint_dir}}`), or an absolute path \
         on the volume"
    ))
}

fn of(dialect: Dialect) -> Option<(&'static dyn Reader, Resume)> {
    let reader = readers::of(dialect)?;
    Some((reader, reader.resume()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::read_text;
    use crate::recipe::schema::request::Request;

    fn resumed(path: &str, text: &str) -> Option<String> {
        let request = Request {
            path: path.into(),
            ..Request::default()
        };
        let recipe = read_text(&request, text.to_owned()).unwrap();
        Some(arguments(&recipe, Path::new("out/checkpoint-40"))?.join(" "))
    }

    #[test]
    fn resume_arguments_are_those_of_the_dialect_or_the_recipe() {
        let handbook = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                        evenkeel: {objective: sft, batch: {gpus: 2}}\n";
        assert_eq!(
            resumed("sft.yaml", handbook).unwrap(),
            "--resume_from_checkpoint out/checkpoint-40"
        );
        let native = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  \
                      batch: {global: 8, per_device_batch_size: 2}\n";
        assert_eq!(resumed("own.yaml", native), None);
        let native =
            format!("{native}  trainer: {{resume: ['--from={{checkpoint}}', --strict]}}\n");
        assert_eq!(
            resumed("own.yaml", &native).unwrap(),
            "--from=out/checkpoint-40 --strict"
        );
    }

    #[test]
    fn checkpoints_in_a_container_yield_a_warning() {
        let text = "per_device_train_batch_size: 8\noutput_dir: out\n\
                    evenkeel: {objective: sft, batch: {gpus: 2}}\n";
        let request = Request {
            path: "sft.yaml".into(),
            ..Request::default()
        };
        let mut recipe = read_text(&request, text.to_owned()).unwrap();
        let mut lost = |command: &str| {
            recipe.spec.trainer.command = command.split(' ').map(str::to_owned).collect();
            lost_checkpoints(&recipe)
        };
        for command in ["train {recipe}", "train {args} --output_dir mine"] {
            let warning = lost(command).unwrap();
            assert!(
                warning.starts_with("the trainer writes checkpoints to `"),
                "{warning}"
            );
        }
        for command in [
            "train --output_dir {checkpoint_dir}",
            "train --output_dir $EVENKEEL_CHECKPOINT_DIR",
            "train --output_dir /volume/out",
            // Only the shell knows the directory; a note says so.
            "train --output_dir $SCRATCH/out",
        ] {
            assert_eq!(lost(command), None, "{command}");
        }
    }
}
