//! `evenkeel host`: starts ranks for a launcher on another machine. It has no state of its own: it ends with the
//! connection, and its ranks with it.

use std::fs;
use std::io::{self, BufRead, Write};
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::OomKills;
use super::program::Start;
use super::ranks::{Event, News, RankGroup, Ranks};
use super::wire::{BEAT, FENCE, Facts, FromHost, StartRanks, ToHost};
use crate::lifecycle::protocol::{Ending, Report, exit};
use crate::util::{input, port};

/// Variable of the ranks that a host starts for a launcher on another machine.
pub const HOST_VARIABLE: &str = "EVENKEEL_HOST";

/// An input of the loop.
pub enum Input {
    Message(ToHost),
    Rank(Event),
    /// SIGTERM: the machine is about to end this process.
    Terminate,
    /// The connection has ended.
    End,
}

/// What a host serves with.
pub struct Host<'a> {
    /// Path of the `evenkeel` executable.
    pub program: &'a Path,
    pub facts: Facts,
    /// CPU cores shared by the ranks.
    pub cores: u64,
}

/// Reads the messages of a launcher.
pub fn read(from: impl io::Read, inputs: &Sender<Input>) {
    for line in io::BufReader::new(from).split(b'\n').map_while(Result::ok) {
        let message = serde_json::from_slice(&line);
        let Ok(message) = message else { break };
        if inputs.send(Input::Message(message)).is_err() {
            return;
        }
    }
    let _ = inputs.send(Input::End);
}

impl Host<'_> {
    /// Serves one launcher until the connection ends or is silent for too long.
    pub fn serve(
        &self,
        inputs: &Receiver<Input>,
        passed_on: &Sender<Input>,
        mut output: impl Write,
    ) -> io::Result<()> {
        let mut say = |message: &FromHost| -> io::Result<()> {
            serde_json::to_writer(&mut output, message)?;
            output.write_all(b"\n")?;
            output.flush()
        };
        say(&FromHost::Here(Box::new(self.facts.clone())))?;
        let events = events(passed_on);
        let mut ranks: Option<Ranks> = None;
        let oom_kills = OomKills::watch();
        // Ranks that were killed on request.
        let mut killed = Vec::new();
        let (mut silent, mut looked, mut beaten) = (Duration::ZERO, Instant::now(), Instant::now());
        loop {
            let input = match inputs.recv_timeout(BEAT) {
                Ok(input) => Some(input),
                Err(RecvTimeoutError::Timeout) => None,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            };
            // After a suspension of this process the launcher's messages still wait to be read.
            silent += looked.elapsed().min(FENCE / 2);
            looked = Instant::now();
            match input {
                Some(Input::Message(message)) => {
                    silent = Duration::ZERO;
                    match message {
                        ToHost::Read { file, text } => {
                            // Listing a directory refreshes a network file system's cache.
                            drop(file.parent().map(fs::read_dir));
                            let found = input::read(&file, text.len() as u64);
                            let same = found.is_ok_and(|found| found == text.as_bytes());
                            say(&FromHost::Read { same })?;
                        }
                        ToHost::Port => {
                            let listener = port::free(Ipv4Addr::UNSPECIFIED);
                            let address = listener.and_then(|listener| listener.local_addr());
                            let port = address.map_or(0, |address| address.port());
                            say(&FromHost::Port { port })?;
                        }
                        ToHost::Start(start) => {
                            ranks = None;
                            killed.clear();
                            match self.start(&start, &events) {
                                Ok(started) => ranks = Some(started),
                                Err(error) => {
                                    for event in unstarted(&start, &error) {
                                        say(&FromHost::Rank(event))?;
                                    }
                                }
                            }
                        }
                        ToHost::Order { rank, order } => {
                            if let Some(ranks) = &mut ranks {
                                ranks.order(rank, order);
                            }
                        }
                        ToHost::Kill { rank } => {
                            if let Some(ranks) = &mut ranks {
                                let all = ranks.ranks();
                                for rank in all.filter(|it| rank.is_none_or(|rank| rank == *it)) {
                                    killed.push(rank);
                                    ranks.kill_one(rank);
                                }
                            }
                        }
                        ToHost::Enter { .. } | ToHost::Alive => {}
                    }
                }
                Some(Input::Rank(event)) => {
                    if event.news == News::Exited(Ending::Signal(9))
                        && !killed.contains(&event.rank)
                        && oom_kills.raised()
                    {
                        let rank = event.rank;
                        let message =
                            format!("rank {rank} was killed by the kernel's out-of-memory killer");
                        let report = News::Report(Box::new(Report::OutOfMemory { message }));
                        say(&FromHost::Rank(Event {
                            news: report,
                            ..event
                        }))?;
                    }
                    say(&FromHost::Rank(event))?;
                }
                Some(Input::Terminate) => say(&FromHost::Leaving)?,
                Some(Input::End) => return Ok(()),
                None => {}
            }
            if silent > FENCE {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no message from the launcher for {} s", FENCE.as_secs()),
                ));
            }
            if beaten.elapsed() >= BEAT {
                beaten = Instant::now();
                say(&FromHost::Alive)?;
            }
        }
    }

    fn start(&self, ranks: &StartRanks, events: &Sender<Event>) -> io::Result<Ranks> {
        // The ranks read it. Other hosts write the same.
        let written = ranks.generation.write(&ranks.run_dir);
        written.map_err(|error| io::Error::other(error.to_string()))?;
        let start = Start {
            evenkeel: self.program,
            run_dir: &ranks.run_dir,
            generation: &ranks.generation,
            first: ranks.first,
            count: ranks.count,
            cores: self.cores,
            gpus: &ranks.gpus,
            key: &ranks
                .key
                .parse()
                .map_err(|_| io::Error::other("the key of the generation is damaged"))?,
            external: None,
            progress_deadline: ranks.progress_deadline,
            bucket: None,
            shows_built_in: false,
        };
        Ranks::start(&start, None, events)
    }
}

/// The events of ranks that could not be started.
fn unstarted(start: &StartRanks, error: &io::Error) -> Vec<Event> {
    let event = |rank, news| Event {
        generation: start.generation.number,
        rank,
        news,
    };
    let failed = |rank| {
        let report = Report::Failed {
            message: format!("cannot start: {error}"),
            deterministic: false,
        };
        [
            event(rank, News::Report(Box::new(report))),
            event(rank, News::Exited(Ending::Code(exit::FAILED))),
        ]
    };
    let ranks = start.first..start.first + start.count;
    ranks.flat_map(failed).collect()
}

/// Where ranks send their events, which become inputs.
fn events(inputs: &Sender<Input>) -> Sender<Event> {
    let (events, happened) = channel();
    let inputs = inputs.clone();
    thread::spawn(move || {
        for event in happened {
            if inputs.send(Input::Rank(event)).is_err() {
                return;
            }
        }
    });
    events
}
