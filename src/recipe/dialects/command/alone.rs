//! A command without its launcher, for an environment that starts the processes itself (Kubernetes) and sets
//! the batch numbers of each world: `train.py …` of `torchrun … train.py …`.

use super::launcher;
use crate::recipe::schema::placeholder::{ARGS, RESUME_ARGS};
use crate::recipe::syntax::shell::scan::{self, Form, Shell};
use crate::recipe::syntax::shell::variables::Variables;
use crate::recipe::syntax::shell::word;
use crate::recipe::syntax::source::FileId;

/// The program and its arguments, with placeholders instead of the batch numbers. `numbers`: the keys to
/// remove. `None`: the command does not begin with Python or torchrun; other launchers do more than start
/// processes.
pub fn without_launcher(command: &[String], numbers: &[&str]) -> Option<Vec<String>> {
    let text = word::join(command);
    let commands = scan::commands(&text, FileId(0), Form::Typed);
    // A command in an inline script is refused: the shell may do more than start it.
    let line = commands.first().filter(|line| line.shell == Shell::Own)?;
    let words = &line.words;
    let launched = launcher::find(words, &Variables::default())?;
    let (mut alone, script) = (launched.alone?, launched.script?);
    let launcher = words.len() - launched.arguments.len() - 1;
    // Refuses a wrapper or a variable assignment before the launcher.
    let begins = words.first().is_some_and(|first| {
        let name = first.text.rsplit('/').next().unwrap_or_default();
        launcher == 0 || name == "torchrun" || name.starts_with("python")
    });
    if !begins {
        return None;
    }
    alone.push(script.text.clone());
    let mut arguments = launched.arguments.iter();
    while let Some(word) = arguments.next() {
        let option = word.text.strip_prefix("--");
        let (name, attached) = match option.map(|option| option.split_once('=')) {
            Some(Some((name, _))) => (Some(name), true),
            Some(None) => (option, false),
            None => (None, false),
        };
        let name = name.map(|name| name.replace('-', "_"));
        if name.is_some_and(|name| numbers.contains(&name.as_str())) {
            if !attached {
                arguments.next();
            }
            continue;
        }
        alone.push(word.text.clone());
    }
    alone.extend([ARGS, RESUME_ARGS].map(|name| format!("{{{name}}}")));
    Some(alone)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_words_end_in_placeholders_or_are_refused(words in prop::collection::vec(
            prop_oneof![any::<String>(), "torchrun|python3?|-m|train.py|--[a-z]{1,3}(=[0-9])?"],
            0..8,
        )) {
            if let Some(alone) = without_launcher(&words, &["a", "b"]) {
                prop_assert_eq!(alone.last().map(String::as_str), Some("{resume_args}"));
            }
        }
    }

    fn stripped(command: &str) -> Option<String> {
        let words: Vec<String> = command.split(' ').map(str::to_owned).collect();
        let numbers = ["per_device_train_batch_size", "gradient_accumulation_steps"];
        without_launcher(&words, &numbers).map(|words| words.join(" "))
    }

    #[test]
    fn torchrun_and_the_batch_numbers_are_removed() {
        for (command, expected) in [
            (
                "torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 8 --lr 1e-4",
                "python3 train.py --lr 1e-4 {args} {resume_args}",
            ),
            (
                "/venv/bin/torchrun --standalone -m my.train --gradient-accumulation-steps=2 --x",
                "/venv/bin/python3 -m my.train --x {args} {resume_args}",
            ),
            (
                "python -u -m torch.distributed.run --nproc-per-node=2 train.py --x",
                "python train.py --x {args} {resume_args}",
            ),
            (
                "torchrun --no_python ./train --x",
                "./train --x {args} {resume_args}",
            ),
            (
                "python3.11 -u train.py --x 1",
                "python3.11 -u train.py --x 1 {args} {resume_args}",
            ),
            (
                "python -m my.train --x",
                "python -m my.train --x {args} {resume_args}",
            ),
        ] {
            assert_eq!(stripped(command).as_deref(), Some(expected), "{command}");
        }
    }

    #[test]
    fn launchers_that_do_more_than_start_processes_are_refused() {
        for command in [
            "accelerate launch --config_file fsdp.yaml train.py --x",
            "deepspeed --num_gpus 2 train.py --deepspeed ds.json",
            "trl sft --model_name_or_path m",
            "srun torchrun train.py",
            "bash -c torchrun",
            "torchrun",
        ] {
            assert_eq!(stripped(command), None, "{command}");
        }
    }
}
