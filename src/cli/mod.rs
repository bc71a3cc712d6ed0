//! The command line: arguments to calls, results to text or JSON. One file a command.

mod bytes;
mod check;
mod explain;
mod gpus;
mod launch;
mod output;
mod plan;
mod rank;
pub mod recipe_args;
pub mod render;
mod report;
mod resize;
mod run_arg;
mod status;
mod table;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Exit code for a call or a file that cannot be used.
pub const EXIT_USAGE: u8 = 2;
/// Exit code for a rule or a training run that says no.
pub const EXIT_REFUSED: u8 = 1;
/// Exit code of a run that was drained by a signal and can be resumed.
pub const EXIT_DRAINED: u8 = 143;

#[derive(Parser)]
#[command(name = "evenkeel", version, about, max_term_width = 100)]
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
    Launch(launch::Args),
    Resize(resize::Args),
    Status(status::Args),
    Report(report::Args),
    #[command(hide = true)]
    Rank(rank::Args),
}

/// Parses the process's arguments, runs the command, prints an error if there is one.
pub fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Plan(args) => plan::run(args),
        Command::Check(args) => check::run(args),
        Command::Explain(args) => explain::run(args),
        Command::Gpus(args) => gpus::run(args),
        Command::Launch(args) => launch::run(args),
        Command::Resize(args) => resize::run(args),
        Command::Status(args) => status::run(args),
        Command::Report(args) => report::run(args),
        Command::Rank(args) => rank::run(args),
    };
    result.unwrap_or_else(|error| {
        anstream::eprintln!("error: {error:#}");
        ExitCode::from(EXIT_USAGE)
    })
}
