//! `evenkeel host`: the process on another machine that starts ranks for `evenkeel launch --on`.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::sync::mpsc::channel;
use std::thread;

use anyhow::{Context, bail};
use signal_hook::consts::SIGTERM;

use super::processes::{DeviceChoice, Gpus};
use crate::host::{self, Facts, HOST_VARIABLE, Host, Input, ToHost};
use crate::inventory::Inventory;
use crate::util::input;

/// Longest first message, bytes.
const FIRST: usize = 4 << 20;

/// Start ranks for a launcher (started by `evenkeel launch --on`).
#[derive(clap::Args)]
pub struct Args {
    /// The launcher's directory and environment are taken.
    #[arg(long)]
    entered: bool,
}

pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let program = std::env::current_exe()?;
    if !args.entered {
        let ToHost::Enter {
            directory,
            environment,
        } = serde_json::from_slice(&first_line()?).context("no launcher is at the other end")?
        else {
            bail!("the launcher is of another version");
        };
        let mut again = Command::new(&program);
        again
            .args(["host", "--entered"])
            .envs(environment)
            .env(HOST_VARIABLE, "1");
        // A recipe with paths of the launcher's directory fails with these paths, if that is absent here.
        if directory.is_dir() {
            again.current_dir(directory);
        }
        return Err(again.exec()).context("cannot start again");
    }
    let inventory = Inventory::discover();
    let gpus = Gpus::of(&inventory, DeviceChoice::Auto);
    let host = Host {
        program: &program,
        cores: inventory.cpu.cores,
        facts: Facts {
            machine: machine(),
            inventory,
            problem: gpus.problem,
            problem_of_several: gpus.problem_of_several,
        },
    };
    let (inputs, received) = channel();
    let read = inputs.clone();
    thread::spawn(move || host::read(io::stdin(), &read));
    let terminate = inputs.clone();
    let mut signals = signal_hook::iterator::Signals::new([SIGTERM])?;
    thread::spawn(move || {
        for _ in signals.forever() {
            if terminate.send(Input::Terminate).is_err() {
                return;
            }
        }
    });
    host.serve(&received, &inputs, io::stdout())?;
    Ok(ExitCode::SUCCESS)
}

/// The first line of standard input. What follows stays there for the program that is started again.
fn first_line() -> io::Result<Vec<u8>> {
    let input = io::stdin();
    let (mut line, mut byte) = (Vec::new(), [0]);
    while line.len() < FIRST && rustix::io::read(&input, &mut byte)? == 1 && byte != *b"\n" {
        line.extend(byte);
    }
    Ok(line)
}

/// The same for all processes of a machine, or of a container with its own network.
fn machine() -> String {
    let boot = input::read(Path::new("/proc/sys/kernel/random/boot_id"), 64);
    let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let boot = boot.unwrap_or_default();
    format!(
        "{} {}",
        String::from_utf8_lossy(&boot).trim(),
        network.display()
    )
}
