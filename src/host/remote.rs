//! Another host, for a launcher: the command that reaches it runs `evenkeel host` there, whose standard input and output
//! are the connection.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::ops::Range;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::program::{ExternalProgram, Start};
use super::ranks::{Event, RankGroup};
use super::wire::{BEAT, Facts, FromHost, LOST, StartRanks, ToHost};
use crate::lifecycle::generation::Address;
use crate::lifecycle::protocol::Order;
use crate::util::child::ended_within;
use crate::util::format::shorten;
use crate::util::lock::lock;

/// Longest wait for the first message, which follows a login and the search for the host's GPUs.
const GREETING: Duration = Duration::from_secs(60);
/// Time in which the connecting command ends after its host.
const FAREWELL: Duration = Duration::from_secs(2);
/// Bytes of the connecting command's error output that messages may show.
const ERRORS: usize = 4096;
/// Longest wait for a test of a bucket, whose requests are repeated for some time.
const CHECK: Duration = Duration::from_secs(120);
/// Longest line of it in a message, bytes.
const LINE: usize = 200;

/// A host that does not answer, or does not any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unreached {
    /// The connecting command ended with this exit code, and said this.
    #[error("{said}")]
    Ended { code: Option<i32>, said: String },
    #[error("no answer for {0} s")]
    Silent(u64),
    /// The connecting command cannot be started here.
    #[error("{0}")]
    Unstarted(String),
}

/// A host and the connection to it. Dropping this ends the connection, and the ranks there with it.
pub struct Remote {
    facts: Facts,
    /// Runs `evenkeel host` there.
    child: Arc<Mutex<Child>>,
    said: Arc<Said>,
    /// `None` once the connection is given up.
    messages: Option<Sender<ToHost>>,
    answers: Mutex<Receiver<FromHost>>,
    shared: Arc<Shared>,
}

/// What the thread that reads a connection writes.
struct Shared {
    heard: Mutex<Instant>,
    state: Mutex<State>,
    /// Where the events of ranks go.
    events: Mutex<Option<Sender<Event>>>,
    /// The gate of the newest generation, if the hosts have their own disks.
    gate: Mutex<Option<Arc<Gate>>>,
    /// The kernel has killed processes there since the ranks were started.
    oom_killed: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Connected,
    Leaving,
    Ended,
}

impl Remote {
    /// Connects by a command that runs `evenkeel host`. `first`: the message [`ToHost::Enter`].
    pub fn connect(mut command: Command, first: &ToHost) -> Result<Remote, Unreached> {
        let unstarted = |error: io::Error| Unreached::Unstarted(error.to_string());
        let program = command.get_program().to_string_lossy().into_owned();
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // Ctrl-C in the terminal reaches only the launcher.
            .process_group(0)
            .spawn()
            .map_err(|error| Unreached::Unstarted(format!("cannot start `{program}`: {error}")))?;
        let (Some(mut input), Some(output), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(Unreached::Unstarted(format!("`{program}` has no pipes")));
        };
        let said = Arc::new(Said::default());
        let kept = Arc::clone(&said);
        let reading = thread::Builder::new().spawn(move || kept.read(errors));
        reading.map_err(unstarted)?;
        // One that has ended says why below.
        let _ = line(&mut input, first);
        let shared = Arc::new(Shared {
            heard: Mutex::new(Instant::now()),
            state: Mutex::new(State::Connected),
            events: Mutex::new(None),
            gate: Mutex::new(None),
            oom_killed: AtomicBool::new(false),
        });
        let (answer, answers) = channel();
        let heard = Arc::clone(&shared);
        let reading = thread::Builder::new().spawn(move || heard.read(output, &answer));
        reading.map_err(unstarted)?;
        let facts = match answers.recv_timeout(GREETING) {
            Ok(FromHost::Here(facts)) => {
                // What the login said has nothing to do with what follows.
                lock(&said.text).clear();
                *facts
            }
            Ok(_) | Err(RecvTimeoutError::Disconnected) => return Err(ended(&mut child, &said)),
            Err(RecvTimeoutError::Timeout) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Unreached::Silent(GREETING.as_secs()));
            }
        };
        let (messages, sent) = channel();
        let writing = thread::Builder::new().spawn(move || write(input, &sent));
        writing.map_err(unstarted)?;
        Ok(Remote {
            facts,
            child: Arc::new(Mutex::new(child)),
            said,
            messages: Some(messages),
            answers: Mutex::new(answers),
            shared,
        })
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Why no rank can run there any more; `None`: it is there.
    pub fn loss(&self) -> Option<Unreached> {
        if *lock(&self.shared.state) == State::Ended {
            return Some(ended(&mut lock(&self.child), &self.said));
        }
        let silent = lock(&self.shared.heard).elapsed() > LOST;
        silent.then(|| Unreached::Silent(LOST.as_secs()))
    }

    /// When it has stopped its ranks after losing the launcher: [`LOST`] after its last message. Not if `evenkeel host` was
    /// killed there.
    pub fn fenced(&self) -> Instant {
        *lock(&self.shared.heard) + LOST
    }

    /// Whether it is there and has not announced its end.
    pub fn stays(&self) -> bool {
        *lock(&self.shared.state) == State::Connected
    }

    /// Whether it has announced its end.
    pub fn is_leaving(&self) -> bool {
        *lock(&self.shared.state) == State::Leaving
    }

    /// Whether a file there has this text; `None`: it does not answer.
    pub fn reads(&self, file: &Path, text: &str) -> Option<bool> {
        let asked = ToHost::Read {
            file: file.to_owned(),
            text: text.to_owned(),
        };
        match self.ask(asked)? {
            FromHost::Read { same } => Some(same),
            _ => None,
        }
    }

    /// Why this program cannot be started there in this directory; `None`: it can, or the host does not answer.
    pub fn lacks(&self, directory: &Path, program: &str) -> Option<String> {
        let asked = ToHost::Find {
            directory: directory.to_owned(),
            program: program.to_owned(),
        };
        match self.ask(asked)? {
            FromHost::Found { problem } => problem,
            _ => None,
        }
    }

    /// A port that is free there, the named one if it is; `None`: it does not answer, or has none.
    pub fn port(&self, named: Option<u16>) -> Option<u16> {
        match self.ask(ToHost::Port { named })? {
            FromHost::Port { port } => Some(port).filter(|port| *port != 0),
            _ => None,
        }
    }

    /// For each address, why it is not reached from there; `None`: the host does not answer.
    pub fn connects(&self, addresses: Vec<Address>) -> Option<Vec<Option<String>>> {
        match self.ask(ToHost::Connect { addresses })? {
            FromHost::Connected { problems } => Some(problems),
            _ => None,
        }
    }

    /// Why ranks there cannot use a bucket that has this text under this key; `None`: they can.
    pub fn check(&self, url: &str, key: &str, text: &str) -> Option<String> {
        let asked = ToHost::Check {
            url: url.to_owned(),
            key: key.to_owned(),
            text: text.to_owned(),
        };
        match self.ask_within(CHECK, asked) {
            Some(FromHost::Checked { problem }) => problem,
            _ => Some("it does not answer".to_owned()),
        }
    }

    /// Removes a run from the host's own disk.
    pub fn clear(&self, run_dir: &Path) {
        let run_dir = run_dir.to_owned();
        // A host that is lost meanwhile keeps its copy.
        let _ = self.ask(ToHost::Clear { run_dir });
    }

    fn ask(&self, message: ToHost) -> Option<FromHost> {
        self.ask_within(LOST, message)
    }

    /// The answer to a question; `None` if the connection ends, or after this time.
    fn ask_within(&self, longest: Duration, message: ToHost) -> Option<FromHost> {
        let answers = lock(&self.answers);
        // An answer that came too late is not the next question's.
        while answers.try_recv().is_ok() {}
        self.say(message);
        answers.recv_timeout(longest).ok()
    }

    fn say(&self, message: ToHost) {
        if let Some(messages) = &self.messages {
            // A connection that has ended is found by `loss`.
            let _ = messages.send(message);
        }
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        // The input is closed, so the host ends, and the connecting command after it.
        self.messages = None;
        let child = Arc::clone(&self.child);
        thread::spawn(move || {
            // How it ended does not matter any more.
            let _ = end(&mut lock(&child));
        });
    }
}

impl Shared {
    /// Reads a connection until it ends.
    fn read(&self, output: ChildStdout, answer: &Sender<FromHost>) {
        for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
            // A login may print a greeting.
            let Ok(message) = serde_json::from_slice(&line) else {
                continue;
            };
            *lock(&self.heard) = Instant::now();
            match message {
                FromHost::Rank(event) => {
                    if let Some(events) = &*lock(&self.events) {
                        let _ = events.send(event);
                    }
                }
                FromHost::OomKilled => self.oom_killed.store(true, Ordering::Release),
                FromHost::Leaving => *lock(&self.state) = State::Leaving,
                FromHost::Alive => {}
                FromHost::Brought { generation } => {
                    let gate = lock(&self.gate).clone();
                    if let Some(gate) = gate.filter(|gate| gate.generation == generation) {
                        gate.arrive();
                    }
                }
                FromHost::Here(_)
                | FromHost::Checked { .. }
                | FromHost::Cleared
                | FromHost::Read { .. }
                | FromHost::Found { .. }
                | FromHost::Port { .. }
                | FromHost::Connected { .. } => {
                    let _ = answer.send(message);
                }
            }
        }
        *lock(&self.state) = State::Ended;
    }
}

/// Sends messages, and heartbeats between them. Closes the input with its channel.
fn write(mut input: ChildStdin, messages: &Receiver<ToHost>) {
    loop {
        let message = match messages.recv_timeout(BEAT) {
            Ok(message) => message,
            Err(RecvTimeoutError::Timeout) => ToHost::Alive,
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if line(&mut input, &message).is_err() {
            return;
        }
    }
}

fn line(input: &mut ChildStdin, message: &ToHost) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    input.write_all(&line)
}

/// The last of what a connecting command says on its error output.
#[derive(Default)]
struct Said {
    text: Mutex<Vec<u8>>,
    /// Nothing follows.
    whole: AtomicBool,
}

impl Said {
    fn read(&self, mut errors: impl Read) {
        let mut part = [0; 1024];
        while let Ok(read @ 1..) = errors.read(&mut part) {
            let mut text = lock(&self.text);
            text.extend_from_slice(&part[..read]);
            let excess = text.len().saturating_sub(ERRORS);
            text.drain(..excess);
        }
        self.whole.store(true, Ordering::Release);
    }

    /// The last line, once the command has ended. A process that it has left behind may keep the output open.
    fn last(&self) -> Option<String> {
        let begun = Instant::now();
        while !self.whole.load(Ordering::Acquire) && begun.elapsed() < FAREWELL {
            thread::sleep(Duration::from_millis(10));
        }
        let text = String::from_utf8_lossy(&lock(&self.text)).into_owned();
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let mut last = lines.next_back()?.to_owned();
        shorten(&mut last, LINE);
        Some(last)
    }
}

/// Waits for the connecting command, which ends with its host, and kills one that does not.
fn end(child: &mut Child) -> Option<ExitStatus> {
    match ended_within(child, FAREWELL) {
        Ok(Some(status)) => Some(status),
        Ok(None) | Err(_) => {
            let _ = child.kill();
            child.wait().ok()
        }
    }
}

/// How a connecting command has ended.
fn ended(child: &mut Child, said: &Said) -> Unreached {
    let code = end(child).as_ref().and_then(ExitStatus::code);
    let closed = || "the connection was closed".to_owned();
    let said = said.last().unwrap_or_else(closed);
    Unreached::Ended { code, said }
}

/// Starts the ranks of a generation on all of its hosts once each host has what they read: a rank waits only for some time
/// for the others.
pub struct Gate {
    generation: u64,
    /// Hosts that still bring their files.
    missing: Mutex<usize>,
    hosts: Vec<Weak<Remote>>,
}

impl Gate {
    pub fn of(generation: u64, shares: &[Share]) -> Arc<Gate> {
        Arc::new(Gate {
            generation,
            missing: Mutex::new(shares.len()),
            // A gate keeps no connection open.
            hosts: (shares.iter().map(|share| Arc::downgrade(&share.host))).collect(),
        })
    }

    /// One more host has its files.
    fn arrive(&self) {
        let mut missing = lock(&self.missing);
        *missing = missing.saturating_sub(1);
        if *missing == 0 {
            let generation = self.generation;
            for host in self.hosts.iter().filter_map(Weak::upgrade) {
                host.say(ToHost::Begin { generation });
            }
        }
    }
}

/// The ranks of a generation for one host.
pub struct Share {
    /// The number of the host, as in [`crate::lifecycle::Member::slot`].
    pub slot: u64,
    pub host: Arc<Remote>,
    /// The run directory on its own disk, if the hosts share none.
    pub own_disk: PathBuf,
    pub count: u64,
    /// `CUDA_VISIBLE_DEVICES` of each rank; empty if they compute on the CPU.
    pub gpus: Vec<String>,
}

/// The ranks of a generation on another host. Dropping this kills those that still run, and those that stand by.
pub struct RemoteRanks {
    slot: u64,
    host: Arc<Remote>,
    ranks: Range<u64>,
    /// Numbers of the processes that stand by.
    spares: Vec<u64>,
    /// Whether the host has its own disk.
    own_disk: bool,
    /// Whether dropping this kills them.
    owned: bool,
}

impl RemoteRanks {
    /// Starts the ranks from `first` on, or lets those continue that the generation carries, and these `spares`. One that
    /// cannot be started fails.
    pub fn start(
        start: &Start<'_>,
        external: Option<ExternalProgram>,
        (share, first): (&Share, u64),
        spares: Vec<u64>,
        gate: Option<Arc<Gate>>,
        events: &Sender<Event>,
    ) -> RemoteRanks {
        let ranks = first..first + share.count;
        let remote = RemoteRanks::of(share, ranks, start.bucket.is_some(), gate, events);
        let run_dir = if remote.own_disk {
            share.own_disk.clone()
        } else {
            shared(start.run_dir)
        };
        let part = Start {
            first,
            count: share.count,
            gpus: &share.gpus,
            ..*start
        };
        remote.host.say(ToHost::Start(Box::new(StartRanks {
            external,
            spares,
            ..message(&part, run_dir)
        })));
        remote
    }

    /// A host without ranks, on which processes can stand by.
    pub fn none(share: &Share, events: &Sender<Event>) -> RemoteRanks {
        RemoteRanks::of(share, 0..0, false, None, events)
    }

    fn of(
        share: &Share,
        ranks: Range<u64>,
        own_disk: bool,
        gate: Option<Arc<Gate>>,
        events: &Sender<Event>,
    ) -> RemoteRanks {
        let shared = &share.host.shared;
        *lock(&shared.gate) = gate;
        *lock(&shared.events) = Some(events.clone());
        shared.oom_killed.store(false, Ordering::Release);
        RemoteRanks {
            slot: share.slot,
            host: Arc::clone(&share.host),
            ranks,
            spares: Vec::new(),
            own_disk,
            owned: true,
        }
    }
}

/// The path of a run directory that hosts share.
fn shared(run_dir: &Path) -> PathBuf {
    std::path::absolute(run_dir).unwrap_or_else(|_| run_dir.to_owned())
}

/// What a host reads of the ranks that it starts there.
fn message(start: &Start<'_>, run_dir: PathBuf) -> StartRanks {
    StartRanks {
        run_dir,
        bucket: start.bucket.map(str::to_owned),
        generation: start.generation.clone(),
        first: start.first,
        count: start.count,
        gpus: start.gpus.to_vec(),
        key: start.key.reveal(),
        progress_deadline: start.progress_deadline,
        external: None,
        spares: Vec::new(),
    }
}

impl RankGroup for RemoteRanks {
    fn is_oom_killed(&self) -> bool {
        self.host.shared.oom_killed.load(Ordering::Acquire)
    }

    fn slot(&self) -> u64 {
        self.slot
    }

    fn ranks(&self) -> Range<u64> {
        self.ranks.clone()
    }

    fn release(&mut self) {
        self.owned = false;
    }

    fn stand_by(&mut self, start: &Start<'_>, number: u64, _: &Sender<Event>) -> io::Result<()> {
        self.spares.push(number);
        let start = Box::new(message(start, shared(start.run_dir)));
        self.host.say(ToHost::StandBy { number, start });
        Ok(())
    }

    fn dismiss(&mut self, number: u64) {
        let dismissed = self.spares.extract_if(.., |it| *it == number);
        dismissed.for_each(|number| self.host.say(ToHost::Dismiss { number }));
    }

    fn order(&mut self, rank: u64, order: Order) {
        self.host.say(ToHost::Order { rank, order });
    }

    fn committed(&mut self, path: &str) {
        if self.own_disk {
            let path = path.to_owned();
            self.host.say(ToHost::Committed { path });
        }
    }

    fn kill_one(&mut self, rank: u64) {
        self.host.say(ToHost::Kill { rank: Some(rank) });
    }

    fn kill(&mut self) {
        self.host.say(ToHost::Kill { rank: None });
    }

    fn abort(&mut self) {
        self.host.say(ToHost::Abort);
    }
}

impl Drop for RemoteRanks {
    fn drop(&mut self) {
        if self.owned {
            self.kill();
            for number in self.spares.drain(..) {
                self.host.say(ToHost::Dismiss { number });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first() -> ToHost {
        ToHost::Enter {
            directory: "/".into(),
            environment: std::collections::BTreeMap::new(),
        }
    }

    fn refused(script: &str) -> String {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Remote::connect(command, &first())
            .err()
            .unwrap()
            .to_string()
    }

    #[test]
    fn a_command_that_reaches_no_host_is_reported_with_its_errors() {
        let said = refused("echo a greeting; echo 'Permission denied (publickey).' >&2; exit 255");
        insta::assert_snapshot!(said, @"Permission denied (publickey).");
        insta::assert_snapshot!(refused("exit 0"), @"the connection was closed");
        let absent = Remote::connect(Command::new("/nowhere/ssh"), &first());
        insta::assert_snapshot!(absent.err().unwrap(), @"cannot start `/nowhere/ssh`: No such file or directory (os error 2)");
    }
}
