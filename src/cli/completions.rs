//! `evenkeel completions`: shell completions for evenkeel's arguments.

use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;

use super::output::print_as_is;

/// Print shell completions.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel completions bash \\
    > ~/.local/share/bash-completion/completions/evenkeel
  evenkeel completions zsh > \"${fpath[1]}/_evenkeel\"
  evenkeel completions fish > ~/.config/fish/completions/evenkeel.fish")]
pub struct Args {
    /// Shell to complete for
    shell: Shell,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(
        args.shell,
        &mut super::Cli::command(),
        "evenkeel",
        &mut script,
    );
    print_as_is(String::from_utf8_lossy(&script))?;
    Ok(ExitCode::SUCCESS)
}
