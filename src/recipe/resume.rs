//! How the trainer of a recipe is told to go on from one of its own checkpoints.

use std::path::Path;

use super::placeholder::Value;
use super::reader::{Checkpoints, Reader, Resume};
use super::readers;
use super::{Dialect, Recipe, Spec, own_command, placeholder};

/// The arguments for a checkpoint: the recipe's own (`trainer.resume`), else those of its dialect;
/// `None` where neither says how.
pub fn arguments(recipe: &Recipe, checkpoint: &Path) -> Option<Vec<String>> {
    let checkpoint = checkpoint.to_string_lossy();
    let own = &recipe.spec.trainer.resume;
    if !own.is_empty() {
        let stands_for = |name: &str| {
            (name == placeholder::CHECKPOINT).then(|| Value::Word(checkpoint.clone().into_owned()))
        };
        return Some(placeholder::fill(own, stands_for));
    }
    let (reader, resume) = of(recipe.dialect)?;
    Some(reader.argument(resume.key, &checkpoint))
}

/// What the checkpoints of a dialect's trainer are called.
pub fn checkpoints(dialect: Dialect) -> Checkpoints {
    of(dialect).map_or(Checkpoints::ANY, |(_, resume)| resume.checkpoints)
}

/// Where the recipe's trainer keeps its checkpoints, as the user says it: in the recipe's own section,
/// in the command, or where the recipe's output goes.
pub fn directory(dialect: Dialect, spec: &Spec) -> Option<String> {
    // A native recipe's output is the run's directory itself.
    let output = || spec.output.clone().filter(|_| dialect != Dialect::Native);
    if let Some(said) = &spec.trainer.checkpoint_dir {
        return Some(said.clone());
    }
    let typed = of(dialect)
        .and_then(|(_, resume)| own_command::typed(&spec.trainer.command, resume.output));
    match typed {
        None => output(),
        Some((_, value)) if own_command::says_checkpoint_dir(std::slice::from_ref(&value)) => {
            output()
        }
        // What a shell makes of it is not known here.
        Some((_, value)) if value.contains(['$', '`']) || value.starts_with('~') => None,
        Some((_, value)) => placeholder::is_plain(&value).then_some(value),
    }
}

/// In a container, of which nothing is left once it ends: checkpoints that would be lost, and why.
pub fn lost_checkpoints(recipe: &Recipe) -> Option<String> {
    let directory = directory(recipe.dialect, &recipe.spec)?;
    let command = &recipe.spec.trainer.command;
    if Path::new(&directory).is_absolute() || own_command::says_checkpoint_dir(command) {
        return None;
    }
    Some(format!(
        "checkpoints would go to `{directory}`, in a container, of which nothing is left once it ends: \
         say `{{checkpoint_dir}}` in the command (`--output_dir {{checkpoint_dir}}`), or give a place on \
         the volume by its absolute path"
    ))
}

fn of(dialect: Dialect) -> Option<(&'static dyn Reader, Resume)> {
    let reader = readers::of(dialect)?;
    Some((reader, reader.resume()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{Request, read_text};

    fn resumed(path: &str, text: &str) -> Option<String> {
        let request = Request {
            path: path.into(),
            ..Request::default()
        };
        let recipe = read_text(&request, text.to_owned()).unwrap();
        Some(arguments(&recipe, Path::new("out/checkpoint-40"))?.join(" "))
    }

    #[test]
    fn every_trainer_is_told_in_its_own_words() {
        let handbook = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                        evenkeel: {objective: sft, batch: {gpus: 2}}\n";
        assert_eq!(
            resumed("sft.yaml", handbook).unwrap(),
            "--resume_from_checkpoint out/checkpoint-40"
        );
        let native = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  \
                      batch: {global: 8, micro: 2}\n";
        assert_eq!(resumed("own.yaml", native), None);
        let native =
            format!("{native}  trainer: {{resume: ['--from={{checkpoint}}', --strict]}}\n");
        assert_eq!(
            resumed("own.yaml", &native).unwrap(),
            "--from=out/checkpoint-40 --strict"
        );
    }

    #[test]
    fn checkpoints_in_a_container_are_told() {
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
            let said = lost(command).unwrap();
            assert!(said.starts_with("checkpoints would go to `"), "{said}");
        }
        for command in [
            "train --output_dir {checkpoint_dir}",
            "train --output_dir $EVENKEEL_CHECKPOINT_DIR",
            "train --output_dir /volume/out",
            // Nobody knows, and a note says so.
            "train --output_dir $SCRATCH/out",
        ] {
            assert_eq!(lost(command), None, "{command}");
        }
    }
}
