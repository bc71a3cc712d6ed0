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
    print_as_is(script(args.shell))?;
    Ok(ExitCode::SUCCESS)
}

/// The program with its public commands only. clap's generators would offer the hidden ones too.
pub fn public() -> clap::Command {
    let all = super::Cli::command();
    let public = all.get_subcommands().filter(|of| !of.is_hide_set());
    let about = all.get_about().cloned().unwrap_or_default();
    clap::Command::new("evenkeel")
        .version(env!("CARGO_PKG_VERSION"))
        .about(about)
        .after_help(super::EXIT_CODES)
        .subcommands(public.cloned())
}

/// The completions of a shell.
fn script(shell: Shell) -> String {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut public(), "evenkeel", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hidden_commands_are_not_completed() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let script = script(shell);
            for (command, is_offered) in [("launch", true), ("prepare", false)] {
                let word = |c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_';
                let mut words = script.split(word);
                assert_eq!(
                    words.any(|word| word == command),
                    is_offered,
                    "{shell}: {command}"
                );
            }
        }
    }
}
