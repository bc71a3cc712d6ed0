//! The command line: parses arguments and prints results as text or JSON. One file per command.

mod agent;
mod check;
mod cluster;
mod completions;
mod controller;
mod crd;
mod doctor;
mod explain;
mod export;
mod generate;
mod gpus;
mod host;
mod install;
mod launch;
mod list;
mod logging;
mod logs;
mod man;
mod next_command;
mod output;
mod place;
mod plan;
mod prepare;
mod processes;
mod prove;
mod rank;
pub mod recipe_args;
pub mod render;
mod report;
mod resize;
mod run_arg;
mod schema;
mod setup;
mod signals;
mod slurm;
mod status;
mod status_external;
mod suggestions;
mod suspend;
mod table;

use std::io::Write;
use std::process::ExitCode;

use anyhow::bail;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::recipe::ReadError;
use output::{Unprinted, say};

/// Exit code of a command that cannot do its work: invalid arguments, or a file or cluster that cannot be
/// used.
pub const EXIT_USAGE: u8 = 2;
/// Exit code for a recipe or plan that a rule refuses, a failed run, and a ledger that is not proved.
pub const EXIT_REFUSED: u8 = 1;
/// Exit code of a run that was drained by a signal and can be resumed.
pub const EXIT_DRAINED: u8 = 143;

/// The exit codes in `evenkeel --help`; docs/guide.md has the same table.
const EXIT_CODES: &str = "\
Exit codes:
  0    success
  1    a rule refuses the recipe or the plan, a run or job failed or was
       cancelled, or a ledger is not proved
  2    invalid arguments, or a file, run or cluster that cannot be used
  130  Ctrl-C stopped following a job on a cluster; the job continues
  143  drained by a signal or `evenkeel suspend`; `evenkeel resume` continues it";

#[derive(Parser)]
#[command(name = "evenkeel", version, about, max_term_width = 80, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Plan(plan::Args),
    Check(check::Args),
    Explain(explain::Args),
    Gpus(gpus::Args),
    Doctor(doctor::Args),
    Launch(Box<launch::Args>),
    List(list::Args),
    Status(status::Args),
    Logs(logs::Args),
    #[command(alias = "scale")]
    Resize(resize::Args),
    /// Make a run or TrainingJob commit a checkpoint and stop until it is resumed.
    #[command(alias = "stop")]
    Suspend(suspend::SuspendArgs),
    /// Continue a stopped run, with the recipe and options of its launch, or a suspended TrainingJob.
    Resume(suspend::ResumeArgs),
    /// Stop a run permanently, or delete a TrainingJob and its pods. Checkpoints stay.
    Cancel(suspend::SuspendArgs),
    Report(report::Args),
    Generate(generate::Args),
    Export(export::Args),
    Schema(schema::Args),
    Completions(completions::Args),
    Man(man::Args),
    Controller(controller::Args),
    Crd(crd::Args),
    #[command(hide = true)]
    Agent(agent::Args),
    #[command(hide = true)]
    Host(host::Args),
    #[command(hide = true)]
    Install(install::Args),
    #[command(hide = true)]
    Prepare(prepare::Args),
    #[command(hide = true)]
    Prove(prove::Args),
    #[command(hide = true)]
    Setup(setup::Args),
    #[command(hide = true)]
    Rank(rank::Args),
}

/// Parses the arguments, runs the command and prints its error.
pub fn main() -> ExitCode {
    if let Err(error) = signals::fail_writes_that_are_too_large() {
        return failed(&error.into());
    }
    let mut command = Cli::command();
    if is_kubectl_plugin() {
        command = command.bin_name("kubectl evenkeel");
    }
    let parsed = command
        .try_get_matches()
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let is_told = match &parsed {
        Ok(_) => true,
        Err(stopped) => stopped.use_stderr(),
    };
    if is_told && let Some(message) = suggestions::of_program(Cli::command, &typed()) {
        say(message);
        return ExitCode::from(EXIT_USAGE);
    }
    let cli = match parsed {
        Ok(cli) => cli,
        Err(stopped) => return clap_exit(&stopped),
    };
    let result = match cli.command {
        Command::Plan(args) => plan::run(args),
        Command::Check(args) => check::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Gpus(args) => gpus::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Launch(args) => launch::run(*args),
        Command::List(args) => list::run(args),
        Command::Status(args) => status::run(args),
        Command::Logs(args) => logs::run(args),
        Command::Resize(args) => resize::run(args),
        Command::Suspend(args) => suspend::suspend(args),
        Command::Resume(args) => suspend::resume(args),
        Command::Cancel(args) => suspend::cancel(args),
        Command::Report(args) => report::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Export(args) => export::run(args),
        Command::Schema(args) => schema::run(args),
        Command::Completions(args) => completions::run(args),
        Command::Man(args) => man::run(args),
        Command::Controller(args) => controller::run(args),
        Command::Crd(args) => crd::run(args),
        Command::Agent(args) => agent::run(args),
        Command::Host(args) => host::run(&args),
        Command::Install(args) => install::run(args),
        Command::Prepare(args) => prepare::run(args),
        Command::Prove(args) => prove::run(args),
        Command::Setup(args) => setup::run(args),
        Command::Rank(args) => rank::run(args),
    };
    result.unwrap_or_else(|error| failed(&error))
}

/// The words after the program's name. Those that are not UTF-8 are shown only.
fn typed() -> Vec<String> {
    let words = std::env::args_os().skip(1);
    words
        .map(|word| word.to_string_lossy().into_owned())
        .collect()
}

/// The arguments of a launch that were typed before, after the program's name.
fn parse_launch(typed: &[String]) -> anyhow::Result<launch::Args> {
    let words = std::iter::once("evenkeel").chain(typed.iter().map(String::as_str));
    match Cli::try_parse_from(words)?.command {
        Command::Launch(args) => Ok(*args),
        _ => bail!("the recorded command is not `evenkeel launch`"),
    }
}

/// Whether kubectl called this executable as a plugin (`kubectl-evenkeel`).
fn is_kubectl_plugin() -> bool {
    let name = std::env::args_os().next().map(std::path::PathBuf::from);
    let name = name.as_ref().and_then(|path| path.file_name());
    name.is_some_and(|name| name == "kubectl-evenkeel")
}

/// The first flag that is set.
fn first_set(flags: &[(&'static str, bool)]) -> Option<&'static str> {
    flags.iter().find(|(_, set)| *set).map(|(name, _)| *name)
}

/// Refuses a flag without the flag that gives it a meaning.
fn needs(flag: Option<&str>, needed: &str) -> anyhow::Result<()> {
    match flag {
        Some(flag) => bail!("`{flag}` needs `{needed}`"),
        None => Ok(()),
    }
}

/// Prints why a recipe was not read, and returns the exit code. `quiet`: without notes.
fn refuse_unread(error: &ReadError, quiet: bool) -> ExitCode {
    render::print_for(quiet, &error.diagnostics, &error.sources);
    say(render::closing(&error.diagnostics));
    ExitCode::from(unread(error))
}

/// Exit code for a recipe that was not read: 2 if a file cannot be read at all, 1 if a rule refuses it.
fn unread(error: &ReadError) -> u8 {
    if error.is_unreadable() {
        EXIT_USAGE
    } else {
        EXIT_REFUSED
    }
}

/// Ends a failed command. A reader that has closed the pipe is not an error.
fn failed(error: &anyhow::Error) -> ExitCode {
    let unprinted = error.downcast_ref::<Unprinted>();
    if unprinted.is_some_and(Unprinted::reader_left) {
        return ExitCode::SUCCESS;
    }
    say(format_args!("error: {}\n", with_causes(error)));
    ExitCode::from(EXIT_USAGE)
}

/// An error with its causes, without repeating a cause that its text contains.
fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text += &format!(": {cause}");
        }
    }
    text
}

/// The names of the commands in `--help`.
fn public_commands() -> Vec<String> {
    let command = Cli::command();
    let all = command
        .get_subcommands()
        .filter(|command| !command.is_hide_set());
    all.map(|command| command.get_name().to_owned()).collect()
}

/// Handles clap's output: help and versions on standard output, argument errors on standard error.
fn clap_exit(stopped: &clap::Error) -> ExitCode {
    let public = public_commands();
    let commands = public.iter().map(String::as_str);
    if let Some(message) = suggestions::message(stopped, commands, &typed()) {
        say(message);
        return ExitCode::from(EXIT_USAGE);
    }
    if stopped.use_stderr() {
        say(stopped.render().ansi());
        return ExitCode::from(EXIT_USAGE);
    }
    // clap breaks the lines of its help itself.
    let printed = stopped.print().and_then(|()| std::io::stdout().flush());
    match printed {
        Err(error) => failed(&Unprinted(error).into()),
        Ok(()) => ExitCode::SUCCESS,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;
    use crate::util::durable::read_json;

    #[test]
    fn a_cause_is_printed_once() {
        let file = tempfile::tempdir().unwrap();
        let path = file.path().join("state.json");
        let absent = || read_json::<u64>(&path).unwrap_err();
        let cause = "No such file or directory (os error 2)";
        let cannot = format!("cannot read {}: {cause}", path.display());
        assert_eq!(with_causes(&absent().into()), cannot);
        let because = Err::<u64, _>(absent()).context("no state").unwrap_err();
        assert_eq!(with_causes(&because), format!("no state: {cannot}"));
    }

    #[test]
    fn arguments_of_all_commands_are_consistent() {
        Cli::command().debug_assert();
    }
}
