//! What a user of other launchers may have meant by an unknown command or option.

use clap::error::{ContextKind, ContextValue, ErrorKind};

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

fn suggestion(meant: &str) -> String {
    match meant.contains(' ') {
        true => format!("did you mean {meant}?"),
        false => format!("did you mean `{meant}`?"),
    }
}

/// The message for an unknown command or option, in place of clap's, which also suggests hidden commands. `commands`: the
/// public ones. `None`: clap's is right.
pub fn message<'c>(error: &clap::Error, commands: impl Iterator<Item = &'c str>) -> Option<String> {
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
            let (_, meant) = OPTIONS.iter().find(|(other, _)| *other == option)?;
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
        message(&error, public_commands().iter().map(String::as_str))
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
        ] {
            let message = said(line).unwrap_or_default();
            assert!(message.contains(expected), "{line}: {message}");
        }
        // clap knows what is near to its own options.
        assert_eq!(said("evenkeel launch recipe.yaml --proc 2"), None);
        let hidden = said("evenkeel rnk").unwrap();
        assert!(!hidden.contains("`rank`"), "{hidden}");
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
