//! Hosts that the system's `ssh` reaches, with the user's own configuration, keys and agent. The program is copied there
//! once, below a name with its checksum.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::list::Listed;
use crate::host::{Remote, ToHost, Unreached};
use crate::util::{input, key};

/// Exit codes of a shell that cannot run the program, and that finds none.
const CANNOT_RUN: i32 = 126;
const NOT_FOUND: i32 = 127;
/// Largest program, bytes.
const PROGRAM_BYTES: u64 = 1 << 30;

/// A host that `ssh` reaches.
pub struct Login<'a>(pub &'a Listed);

/// The program that hosts run.
#[derive(Debug, Clone)]
pub struct Program {
    pub path: PathBuf,
    /// Its SHA-256, in hexadecimal digits.
    pub checksum: String,
    /// Bytes.
    pub size: u64,
}

impl Login<'_> {
    /// The address that `ssh` connects to by the user's configuration.
    pub fn address(host: &Listed) -> String {
        let asked = ssh(host, &["-G"]).stderr(Stdio::null()).output();
        let said = asked.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
        let said = said.unwrap_or_default();
        let address = said.lines().find_map(|line| line.strip_prefix("hostname "));
        let named = host.destination.rsplit('@').next().unwrap_or_default();
        address.unwrap_or(named).to_owned()
    }

    /// Connects, and copies the program before that if it is not there.
    pub fn connect(&self, program: &Program, first: &ToHost) -> Result<Remote, Unreached> {
        let place = place(program);
        let run = || {
            let mut command = ssh(self.0, &[]);
            command.arg(shell(&format!("exec \"{place}/evenkeel\" host")));
            Remote::connect(command, first)
        };
        match run() {
            Err(Unreached::Ended {
                code: Some(NOT_FOUND),
                ..
            }) => {
                self.copy(program, &place)?;
                run()
            }
            reached => reached,
        }
    }

    fn copy(&self, program: &Program, place: &str) -> Result<(), Unreached> {
        let failed = |said: String| Unreached::Ended { code: None, said };
        let file = input::open(&program.path);
        let file = file.map_err(|error| failed(format!("{}: {error}", program.path.display())))?;
        // A connection that ends early leaves no program.
        let script = format!(
            "mkdir -p \"{place}\" && cat >\"{place}/copy.$$\" && [ $(wc -c <\"{place}/copy.$$\") -eq {} ] && chmod 755 \
             \"{place}/copy.$$\" && mv \"{place}/copy.$$\" \"{place}/evenkeel\"",
            program.size
        );
        let copied = ssh(self.0, &[])
            .arg(shell(&script))
            .stdin(file)
            .stdout(Stdio::null())
            .output()
            .map_err(|error| failed(error.to_string()))?;
        if copied.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&copied.stderr).trim().to_owned();
        Err(failed(format!("cannot copy the program there: {said}")))
    }

    /// What the user can do about a host that is not reached.
    pub fn remedy(&self, why: &Unreached) -> String {
        let host = self.0;
        let by_hand = match host.port {
            Some(port) => format!("ssh -p {port} {}", host.destination),
            None => format!("ssh {}", host.destination),
        };
        let Unreached::Ended { code, said } = why else {
            return format!("see what `{by_hand}` does");
        };
        let says = |text: &str| said.contains(text);
        if says("Host key verification failed") {
            format!("run `{by_hand}` once, and compare the host's key")
        } else if says("Permission denied") {
            let copy = by_hand.replacen("ssh", "ssh-copy-id", 1);
            format!("run `{copy}`, or add the key to ssh's agent")
        } else if says("Could not resolve hostname") {
            "correct the name, or describe the host in ~/.ssh/config".to_owned()
        } else if *code == Some(CANNOT_RUN) {
            "its processor or its system cannot run this program; install Evenkeel for it, and launch from such a host"
                .to_owned()
        } else {
            format!("see what `{by_hand}` does")
        }
    }
}

/// Where a host has the program, for its shell.
fn place(program: &Program) -> String {
    let digits = program.checksum.get(..16).unwrap_or(&program.checksum);
    format!("${{XDG_CACHE_HOME:-$HOME/.cache}}/evenkeel/bin/{digits}")
}

/// A script for any login shell to pass on to `sh`. It has no single quotes.
fn shell(script: &str) -> String {
    format!("exec sh -c '{script}'")
}

/// `ssh` for a host. It never asks anything, and it notices a network that is gone.
fn ssh(host: &Listed, options: &[&str]) -> Command {
    let mut command = Command::new("ssh");
    command.args(options).args([
        "-T",
        "-o",
        "BatchMode=yes",
        "-o",
        "ConnectTimeout=10",
        "-o",
        "ServerAliveInterval=3",
        "-o",
        "ServerAliveCountMax=4",
    ]);
    if let Some(port) = host.port {
        command.args(["-p", &port.to_string()]);
    }
    command.arg("--").arg(&host.destination);
    command
}

/// The program at a path.
pub fn program(path: &Path) -> std::io::Result<Program> {
    let bytes = input::read(path, PROGRAM_BYTES)?;
    Ok(Program {
        path: path.to_owned(),
        checksum: key::sha256(&bytes),
        size: bytes.len() as u64,
    })
}
