//! What a user of other launchers may have meant by an unknown command or option.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use crate::recipe::syntax::shell;
use crate::util::suggest::did_you_mean;

/// Other words for a command, of other launchers and of kubectl.
const COMMANDS: [(&str, &str); 14] = [
    ("apply", "launch"),
    ("continue", "resume"),
    ("delete", "cancel"),
    ("get", "list"),
    ("kill", "cancel"),
    ("ls", "list"),
    ("pause", "suspend"),
    ("ps", "list"),
    ("rm", "cancel"),
    ("run", "launch"),
    ("start", "launch"),
    ("submit", "launch"),
    ("train", "launch"),
    ("validate", "check"),
];

/// Other launchers' options, of torchrun, accelerate, deepspeed and srun.
const OPTIONS: [(&str, &str); 14] = [
    ("--config", "the recipe, without an option"),
    ("--config-file", "--accelerate"),
    ("--nnodes", "--nodes"),
    ("--nproc", "--procs"),
    ("--nproc-per-node", "--procs"),
    ("--ntasks", "--procs"),
    ("--ntasks-per-node", "--gpus-per-node"),
    ("--num-gpus", "--gpus"),
    ("--num-machines", "--nodes"),
    ("--num-nodes", "--nodes"),
    ("--num-processes", "--procs"),
    ("--output-dir", "--out"),
    ("--resume-from-checkpoint", "--resume"),
    ("--world-size", "--gpus"),
];

/// The message for a Python program in place of a recipe or of a command. `typed`: the words after the program's name.
/// `evenkeel`: makes the program's command line, which takes time at each start. `None`: no word of them is one.
pub fn of_program(evenkeel: impl FnOnce() -> clap::Command, typed: &[String]) -> Option<String> {
    if !typed.iter().any(|word| is_program(word)) {
        return None;
    }
    let (first, rest) = typed.split_first()?;
    let (verb, words) = match is_program(first) {
        true => ("launch", typed),
        false => match first.as_str() {
            "run" | "train" | "start" => ("launch", rest),
            "check" => ("plan", rest),
            "launch" | "plan" => (first.as_str(), rest),
            _ => return None,
        },
    };
    let evenkeel = evenkeel();
    let options = evenkeel.find_subcommand(verb)?;
    let Words { own, program } = sorted(options, words);
    let script = program.iter().find(|word| is_program(word))?;
    let line = |more: &[&str]| {
        let mut line = vec!["evenkeel".to_owned(), verb.to_owned()];
        line.extend(own.iter().cloned());
        line.extend(more.iter().map(|word| (*word).to_owned()));
        line.push("--".to_owned());
        line.extend(is_program(&program[0]).then(|| "python".to_owned()));
        line.extend(program.iter().cloned());
        shell::join(&line)
    };
    let mut next = vec![line(&[])];
    if !own
        .iter()
        .any(|word| word.starts_with("--global-batch-size"))
    {
        let given = line(&["--global-batch-size", "B"]);
        next.push(format!(
            "{given}   # if its arguments do not state the batch"
        ));
    }
    Some(format!(
        "error: `{script}` is a Python program, not a recipe; its command follows `--`\nnext:\n  {}\n",
        next.join("\n  ")
    ))
}

fn is_program(word: &str) -> bool {
    word.ends_with(".py") && !word.starts_with('-') && !word.contains('=')
}

/// The words of a command line with a Python program.
struct Words {
    /// evenkeel's options, with a recipe and overrides.
    own: Vec<String>,
    /// The program's command. Empty: no word is a Python program.
    program: Vec<String>,
}

/// Sorts words by whether a command of evenkeel has them as its options.
fn sorted(options: &clap::Command, words: &[String]) -> Words {
    let end = words
        .iter()
        .position(|word| word == "--")
        .unwrap_or(words.len());
    let (before, after) = words.split_at(end);
    let (mut own, mut program) = (Vec::new(), Vec::new());
    let mut before = before.iter().peekable();
    while let Some(word) = before.next() {
        let option = options.get_arguments().find(|of| is_option(of, word));
        match option {
            Some(option) => {
                own.push(word.clone());
                let value = option.get_action().takes_values() && !word.contains('=');
                own.extend(before.next_if(|_| value).cloned());
            }
            None if program.is_empty() && !is_program(word) => own.push(word.clone()),
            None if !word.starts_with('-') && word.contains('=') => own.push(word.clone()),
            None => {
                program.push(word.clone());
                let value = before.next_if(|next| word.starts_with('-') && !next.starts_with('-'));
                program.extend(value.cloned());
            }
        }
    }
    if !program.is_empty() {
        let after = after.get(1..).unwrap_or_default();
        // A whole command, or only the program's arguments.
        match after.first() {
            Some(word) if !word.starts_with('-') => program = after.to_vec(),
            _ => program.extend_from_slice(after),
        }
    }
    Words { own, program }
}

fn is_option(option: &clap::Arg, word: &str) -> bool {
    let name = word.split('=').next().unwrap_or_default();
    let long = name
        .strip_prefix("--")
        .is_some_and(|name| option.get_long() == Some(name));
    let short = option
        .get_short()
        .is_some_and(|short| name == format!("-{short}"));
    long || short
}

/// An unknown option that has the form of a recipe's key, as an override.
fn as_override(option: &str, words: &[String]) -> Option<String> {
    let command = words.first()?;
    let takes_keys = ["plan", "check", "launch"].contains(&command.as_str());
    let key = option.strip_prefix("--")?;
    if !takes_keys || !key.contains(['_', '.']) {
        return None;
    }
    let at = words.iter().position(|word| word.starts_with(option))?;
    let value = match words[at].split_once('=') {
        Some((_, value)) => value,
        None => words
            .get(at + 1)
            .filter(|next| !next.starts_with('-'))
            .map_or("true", String::as_str),
    };
    Some(format!("{key}={value}"))
}

fn suggestion(meant: &str) -> String {
    match meant.contains(' ') {
        true => format!("did you mean {meant}?"),
        false => format!("did you mean `{meant}`?"),
    }
}

/// The message for an unknown command or option, in place of clap's, which also suggests hidden commands. `commands`: the
/// public ones. `words`: those after the program's name. `None`: clap's is right.
pub fn message<'c>(
    error: &clap::Error,
    commands: impl Iterator<Item = &'c str>,
    words: &[String],
) -> Option<String> {
    let typed = |kind| match error.get(kind) {
        Some(ContextValue::String(word)) => Some(word.as_str()),
        _ => None,
    };
    match error.kind() {
        ErrorKind::InvalidSubcommand => {
            let word = typed(ContextKind::InvalidSubcommand)?;
            let meant = COMMANDS.iter().find(|(other, _)| *other == word);
            let help = match meant {
                Some((_, command)) => suggestion(command),
                None => did_you_mean(word, commands),
            };
            Some(format!(
                "error: there is no command `{word}`; {help}\n\n`evenkeel --help` lists the commands.\n"
            ))
        }
        ErrorKind::UnknownArgument => {
            let word = typed(ContextKind::InvalidArg)?;
            let option = word.split('=').next()?.replace('_', "-");
            let Some((_, meant)) = OPTIONS.iter().find(|(other, _)| *other == option) else {
                let is_known = error.get(ContextKind::SuggestedArg).is_some();
                let meant = as_override(word, words).filter(|_| !is_known)?;
                return Some(format!(
                    "error: there is no option `{word}`; a key of the recipe has no dashes: `{meant}`\n"
                ));
            };
            // Only a launch starts processes; what is planned for is GPUs.
            let usage = error.get(ContextKind::Usage).map(ToString::to_string);
            let launches = usage.is_some_and(|usage| usage.contains("launch"));
            let meant = match *meant {
                "--procs" if !launches => "--gpus",
                meant => meant,
            };
            Some(format!(
                "error: there is no option `{word}`; {}\n",
                suggestion(meant)
            ))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, public_commands};
    use clap::{CommandFactory, Parser};

    fn said(line: &str) -> Option<String> {
        let error = Cli::try_parse_from(line.split(' ')).err()?;
        let words: Vec<String> = line.split(' ').skip(1).map(str::to_owned).collect();
        message(&error, public_commands().iter().map(String::as_str), &words)
    }

    #[test]
    fn words_of_other_launchers_have_an_answer() {
        for (line, expected) in [
            (
                "evenkeel run recipe.yaml",
                "no command `run`; did you mean `launch`?",
            ),
            (
                "evenkeel pln recipe.yaml",
                "no command `pln`; did you mean `plan`?",
            ),
            ("evenkeel ps", "no command `ps`; did you mean `list`?"),
            (
                "evenkeel launch recipe.yaml --nproc_per_node 2",
                "no option `--nproc_per_node`; did you mean `--procs`?",
            ),
            (
                "evenkeel plan recipe.yaml --nproc_per_node 2",
                "no option `--nproc_per_node`; did you mean `--gpus`?",
            ),
            (
                "evenkeel launch --config recipe.yaml",
                "no option `--config`; did you mean the recipe, without an option?",
            ),
            (
                "evenkeel plan recipe.yaml --schedule.kind=constant",
                "no option `--schedule.kind`; a key of the recipe has no dashes: `schedule.kind=constant`",
            ),
            (
                "evenkeel launch recipe.yaml --learning_rate 1e-4 --procs 2",
                "no option `--learning_rate`; a key of the recipe has no dashes: `learning_rate=1e-4`",
            ),
        ] {
            let message = said(line).unwrap_or_default();
            assert!(message.contains(expected), "{line}: {message}");
        }
        // clap knows what is near to its own options.
        assert_eq!(said("evenkeel launch recipe.yaml --proc 2"), None);
        assert_eq!(said("evenkeel launch recipe.yaml --recipe_gpus 2"), None);
        let hidden = said("evenkeel rnk").unwrap();
        assert!(!hidden.contains("`rank`"), "{hidden}");
    }

    #[test]
    fn a_program_in_place_of_a_recipe_is_answered_with_its_command() {
        let answers: Vec<String> = [
            "plan train.py",
            "launch src/train.py --procs 2 --learning_rate 1e-4 --bf16",
            "launch --gpus 2 train.py -- --learning_rate 1e-4",
            "launch train.py --gpus 2 -- torchrun --nproc_per_node 8 train.py",
            "launch recipe.yaml --name a train.py seed=1 --global-batch-size 8",
            "check train.py",
            "train.py --procs 2",
            "run train.py",
        ]
        .iter()
        .map(|line| {
            let typed: Vec<String> = line.split(' ').map(str::to_owned).collect();
            let answer = of_program(Cli::command, &typed);
            format!("{line}\n{}", answer.unwrap_or_default())
        })
        .collect();
        insta::assert_snapshot!(answers.join("\n"), @"
        plan train.py
        error: `train.py` is a Python program, not a recipe; its command follows `--`
        next:
          evenkeel plan -- python train.py
          evenkeel plan --global-batch-size B -- python train.py   # if its arguments do not state the batch

        launch src/train.py --procs 2 --learning_rate 1e-4 --bf16
        error: `src/train.py` is a Python program, not a recipe; its command follows `--`
        next:
          evenkeel launch --procs 2 -- python src/train.py --learning_rate 1e-4 --bf16
          evenkeel launch --procs 2 --global-batch-size B -- python src/train.py --learning_rate 1e-4 --bf16   # if its arguments do not state the batch

        launch --gpus 2 train.py -- --learning_rate 1e-4
        error: `train.py` is a Python program, not a recipe; its command follows `--`
        next:
          evenkeel launch --gpus 2 -- python train.py --learning_rate 1e-4
          evenkeel launch --gpus 2 --global-batch-size B -- python train.py --learning_rate 1e-4   # if its arguments do not state the batch

        launch train.py --gpus 2 -- torchrun --nproc_per_node 8 train.py
        error: `train.py` is a Python program, not a recipe; its command follows `--`
        next:
          evenkeel launch --gpus 2 -- torchrun --nproc_per_node 8 train.py
          evenkeel launch --gpus 2 --global-batch-size B -- torchrun --nproc_per_node 8 train.py   # if its arguments do not state the batch

        launch recipe.yaml --name a train.py seed=1 --global-batch-size 8
        error: `train.py` is a Python program, not a recipe; its command follows `--`
        next:
          evenkeel launch recipe.yaml --name a seed=1 --global-batch-size 8 -- python train.py

        check train.py
        error: `train.py` is a Python program, not a recipe; its command follows `--`
        next:
          evenkeel plan -- python train.py
          evenkeel plan --global-batch-size B -- python train.py   # if its arguments do not state the batch

        train.py --procs 2
        error: `train.py` is a Python program, not a recipe; its command follows `--`
        next:
          evenkeel launch --procs 2 -- python train.py
          evenkeel launch --procs 2 --global-batch-size B -- python train.py   # if its arguments do not state the batch

        run train.py
        error: `train.py` is a Python program, not a recipe; its command follows `--`
        next:
          evenkeel launch -- python train.py
          evenkeel launch --global-batch-size B -- python train.py   # if its arguments do not state the batch
        ");
        for line in [
            "launch recipe.yaml -- python train.py",
            "launch -- train.py",
            "plan recipe.yaml script=train.py",
            "explain train.py",
            "launch --out a.py recipe.yaml",
        ] {
            let typed: Vec<String> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(of_program(Cli::command, &typed), None, "{line}");
        }
    }

    #[test]
    fn every_answer_exists() {
        let command = Cli::command();
        let launch = command.find_subcommand("launch").unwrap();
        for (_, name) in COMMANDS {
            assert!(public_commands().contains(&name.to_owned()), "{name}");
        }
        for (_, option) in OPTIONS
            .iter()
            .filter(|(_, option)| option.starts_with("--"))
        {
            let name = option.trim_start_matches('-');
            assert!(
                launch.get_arguments().any(|of| of.get_long() == Some(name)),
                "{option}"
            );
        }
    }
}
