//! `evenkeel doctor`: what of this machine, its hub, a bucket and a cluster works, and for the rest the next command.

mod cluster;
mod machine;
mod remote;

use std::process::ExitCode;

use serde::Serialize;

use super::cluster::ClusterArgs;
use super::output::{self, Format};
use super::{EXIT_REFUSED, needs};
use crate::util::wrap;

/// Check what works here: training, GPUs, disk, hub, bucket, cluster.
#[derive(clap::Args)]
#[command(after_help = "\
Examples:
  evenkeel doctor                        this machine, the hub and the cluster
  evenkeel doctor --gpus                 fails unless GPUs train
  evenkeel doctor --cluster -n team-a    what `launch --nodes` needs there
  evenkeel doctor --bucket s3://checkpoints/team-a
  evenkeel doctor --hub mistralai/Mistral-7B-v0.1

Training is checked by two steps of a tiny model in two processes, on the GPUs if
they can train. The exit code is 0 if that works, and 1 if it does not, or
something that an option asks for does not.")]
pub struct Args {
    /// Require GPUs that train
    #[arg(long)]
    gpus: bool,
    /// Require all that `launch --nodes` needs of a cluster
    #[arg(long)]
    cluster: bool,
    /// Require a bucket: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX
    #[arg(long, value_name = "URL")]
    bucket: Option<String>,
    /// Require the hub, and access to a model of it
    #[arg(long, value_name = "MODEL", num_args = 0..=1, default_missing_value = "")]
    hub: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Text)]
    output: Format,
    #[command(flatten)]
    selected: ClusterArgs,
}

/// The answer to one question.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    state: State,
    /// What was found.
    found: String,
    /// What to type or do next.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<Next>,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Next {
    /// A command to type.
    Command(String),
    Advice(String),
}

impl From<&str> for Next {
    fn from(advice: &str) -> Next {
        Next::Advice(advice.to_owned())
    }
}

impl Next {
    fn command(command: impl Into<String>) -> Next {
        Next::Command(command.into())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum State {
    Works,
    Fails,
    /// It does not work or is not here, and nothing asked for it.
    Absent,
}

impl Check {
    fn works(name: &'static str, found: impl Into<String>) -> Check {
        Check {
            name,
            state: State::Works,
            found: found.into(),
            next: None,
        }
    }

    fn fails(name: &'static str, found: impl Into<String>, next: impl Into<Next>) -> Check {
        Check {
            state: State::Fails,
            next: Some(next.into()),
            ..Check::works(name, found)
        }
    }

    /// Something that is not here: a failure only if it is asked for.
    fn absent(
        name: &'static str,
        found: impl Into<String>,
        next: Option<Next>,
        is_asked: bool,
    ) -> Check {
        let state = match is_asked {
            true => State::Fails,
            false => State::Absent,
        };
        Check {
            state,
            next,
            ..Check::works(name, found)
        }
    }

    /// The lines of a terminal: the next command is below what was found.
    fn text(&self, width: Option<usize>) -> String {
        const INDENT: usize = 18;
        let mark = match self.state {
            State::Works => "ok",
            State::Fails => "NO",
            State::Absent => "--",
        };
        let room = width.map_or(usize::MAX, |width| width.saturating_sub(INDENT).max(20));
        let mut lines = wrap::cell(&self.found, room);
        match &self.next {
            Some(Next::Advice(next)) => lines.extend(wrap::cell(&format!("next: {next}"), room)),
            Some(Next::Command(next)) => {
                let command = wrap::command(&format!("next: {next}"), 0, room);
                lines.extend(command.lines().map(str::to_owned));
            }
            None => {}
        }
        let mut text = String::new();
        for (at, line) in lines.iter().enumerate() {
            let head = match at {
                0 => format!("{mark:<4}{:<14}", self.name),
                _ => " ".repeat(INDENT),
            };
            text += &format!("{head}{line}\n");
        }
        text
    }
}

/// The checks in their order. Each is shown as soon as it is answered, since some take seconds.
struct Checks {
    done: Vec<Check>,
    format: Format,
}

impl Checks {
    fn add(&mut self, check: Check) -> anyhow::Result<()> {
        if self.format == Format::Text {
            output::print_as_is(check.text(output::width()))?;
        }
        self.done.push(check);
        Ok(())
    }
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    if !args.cluster {
        needs(args.selected.flag(), "--cluster")?;
    }
    let mut checks = Checks {
        done: Vec::new(),
        format: args.output,
    };
    machine::check(args.gpus, &mut checks)?;
    remote::hub(args.hub.as_deref(), &mut checks)?;
    if let Some(url) = &args.bucket {
        remote::bucket(url, &mut checks)?;
    }
    cluster::check(&args.selected, args.cluster, &mut checks)?;
    let failed = checks
        .done
        .iter()
        .filter(|check| check.state == State::Fails);
    let mut failed = failed.map(|check| check.name).collect::<Vec<_>>();
    failed.dedup();
    match args.output {
        Format::Text if failed.is_empty() => output::line("training on this machine works")?,
        Format::Text if failed.contains(&machine::TRAINING) => {
            output::line(format_args!(
                "training on this machine does not work: {}",
                failed.join(", ")
            ))?;
        }
        Format::Text => output::line(format_args!(
            "training on this machine works; what was asked for does not: {}",
            failed.join(", ")
        ))?,
        format => format.print(&checks.done)?,
    }
    Ok(match failed.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_REFUSED),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fit_a_terminal_and_commands_can_be_copied() {
        let next = "kubectl create role trainingjobs --verb='*' --resource=trainingjobs.evenkeel.dev -n team-a";
        let found = "you may not create trainingjobs (launch), get trainingjobs (status), list trainingjobs (list)";
        let check = Check::fails("rights", found, Next::command(next));
        insta::assert_snapshot!(check.text(Some(80)), @r"
        NO  rights        you may not create trainingjobs (launch), get trainingjobs
                          (status), list trainingjobs (list)
                          next: kubectl create role trainingjobs --verb='*' \
                              --resource=trainingjobs.evenkeel.dev -n team-a
        ");
    }
}
