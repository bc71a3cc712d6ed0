//! Hosts that the system's `ssh` reaches, with the user's own configuration, keys and agent. The program is copied there
//! once, below a name with its checksum.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use super::list::Listed;
use crate::host::{Remote, ToHost, Unreached};
use crate::util::format::bytes;
use crate::util::{input, key};

/// Exit code of a shell that cannot run the program.
const CANNOT_RUN: i32 = 126;
/// Exit code of the script that finds no whole program.
const ABSENT: i32 = 127;
/// Exit code of `ssh` itself, which has not reached the host.
const OF_SSH: i32 = 255;
/// Largest program, bytes.
const PROGRAM_BYTES: u64 = 1 << 30;

/// A host that `ssh` reaches.
pub struct Login<'a>(pub &'a Listed);

/// The program that hosts run.
pub struct Program {
    pub path: PathBuf,
    /// Read once, by the first host that needs a copy of it.
    content: OnceLock<Result<Content, String>>,
}

struct Content {
    /// SHA-256, in hexadecimal digits.
    checksum: String,
    /// Bytes.
    size: u64,
}

impl Program {
    pub fn at(path: &Path) -> Program {
        Program {
            path: path.to_owned(),
            content: OnceLock::new(),
        }
    }

    fn content(&self) -> Result<&Content, Unreached> {
        let read = || {
            let bytes = input::read(&self.path, PROGRAM_BYTES);
            let bytes = bytes.map_err(|error| format!("{}: {error}", self.path.display()))?;
            Ok(Content {
                checksum: key::sha256(&bytes),
                size: bytes.len() as u64,
            })
        };
        let content = self.content.get_or_init(read).as_ref();
        content.map_err(|problem| Unreached::Unstarted(problem.clone()))
    }
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

    /// Connects, and copies the program before that if it is not there, or is damaged. `note` takes what takes long.
    pub fn connect(
        &self,
        program: &Program,
        first: &ToHost,
        note: &dyn Fn(String),
    ) -> Result<Remote, Unreached> {
        let content = program.content()?;
        let place = place(content);
        let script = format!(
            "p=\"{place}/evenkeel\"; [ -x \"$p\" ] && [ $(wc -c <\"$p\") -eq {} ] || exit {ABSENT}; exec \"$p\" host",
            content.size
        );
        let run = || {
            let mut command = ssh(self.0, &[]);
            command.arg(shell(&script));
            Remote::connect(command, first)
        };
        match run() {
            Err(Unreached::Ended {
                code: Some(code), ..
            }) if code != OF_SSH => {
                note(format!(
                    "copying the program to {} ({})",
                    self.0,
                    bytes(content.size)
                ));
                self.copy(program, content.size, &place)?;
                run()
            }
            reached => reached,
        }
    }

    fn copy(&self, program: &Program, size: u64, place: &str) -> Result<(), Unreached> {
        let failed = |code, said: String| Unreached::Ended { code, said };
        let file = input::open(&program.path);
        let file =
            file.map_err(|error| failed(None, format!("{}: {error}", program.path.display())))?;
        // A connection that ends early leaves nothing. Hosts may share the directory and copy at once: a whole program stays,
        // since ranks of another host may start from it.
        let script = format!(
            "p=\"{place}/evenkeel\"; c=\"{place}/copy.$(uname -n).$$\"; trap \"rm -f \\\"$c\\\"\" EXIT; trap \"exit 1\" HUP INT TERM PIPE; \
             is() {{ [ -f \"$1\" ] && [ $(wc -c <\"$1\") -eq {size} ]; }}; mkdir -p \"{place}\" && cat >\"$c\" && is \"$c\" && \
             chmod 755 \"$c\" && sync && {{ ln \"$c\" \"$p\" 2>/dev/null || is \"$p\" || mv -f \"$c\" \"$p\"; }}"
        );
        let copied = ssh(self.0, &[])
            .arg(shell(&script))
            .stdin(file)
            .stdout(Stdio::null())
            .output()
            .map_err(|error| failed(None, error.to_string()))?;
        if copied.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&copied.stderr);
        let last = said.lines().rev().find(|line| !line.trim().is_empty());
        let last = last.unwrap_or("the connection was closed").trim();
        Err(failed(
            copied.status.code(),
            format!("cannot copy the program there: {last}"),
        ))
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
        let says = |text: &str| *code == Some(OF_SSH) && said.contains(text);
        if says("Host key verification failed") {
            format!("run `{by_hand}` once, and compare the host's key")
        } else if says("Permission denied (") {
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
fn place(content: &Content) -> String {
    let digits = content.checksum.get(..16).unwrap_or(&content.checksum);
    format!("${{XDG_CACHE_HOME:-$HOME/.cache}}/evenkeel/bin/{digits}")
}

/// A script for any login shell to pass on to `sh`. It has no single quotes.
fn shell(script: &str) -> String {
    format!("exec sh -c '{script}'")
}

/// `ssh` for a host. It never asks anything, and it notices a network that is gone.
fn ssh(host: &Listed, options: &[&str]) -> Command {
    let mut command = Command::new("ssh");
    // Ctrl-C in the terminal reaches only the launcher.
    command.process_group(0);
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
