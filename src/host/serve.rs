//! `evenkeel host`: starts ranks for a launcher on another machine. It keeps no state: it ends with the connection, and
//! its ranks with it.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::Path;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use super::program::Start;
use super::ranks::{Event, News, RankGroup, Ranks, events_into};
use super::wire::{BEAT, CONNECT, FENCE, Facts, FromHost, StartRanks, ToHost};
use crate::external_trainer::{self, PostServer};
use crate::lifecycle::generation::Address;
use crate::lifecycle::protocol::{Ending, Report, exit};
use crate::util::{input, port};

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
    /// Serves one launcher until the connection ends or is silent for too long, or until this process must end and has no
    /// ranks any more.
    pub fn serve(
        &self,
        inputs: &Receiver<Input>,
        passed_on: &Sender<Input>,
        output: impl Write,
    ) -> io::Result<()> {
        let mut session = Session {
            host: self,
            output,
            events: events_into(passed_on, Input::Rank),
            listener: None,
            ranks: None,
            posts: None,
            generation: 0,
            running: BTreeSet::new(),
        };
        // A greeting of the login may lack its line end.
        session.output.write_all(b"\n")?;
        session.say(&FromHost::Here(Box::new(self.facts.clone())))?;
        let (mut silent, mut looked, mut beaten) = (Duration::ZERO, Instant::now(), Instant::now());
        let mut leaves = false;
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
                    session.take(message)?;
                }
                Some(Input::Rank(event)) => session.pass_on(event)?,
                Some(Input::Terminate) => {
                    leaves = true;
                    session.say(&FromHost::Leaving)?;
                }
                Some(Input::End) => return Ok(()),
                None => {}
            }
            if leaves && session.running.is_empty() {
                return Ok(());
            }
            if silent > FENCE {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("no message from the launcher for {} s", FENCE.as_secs()),
                ));
            }
            if beaten.elapsed() >= BEAT {
                beaten = Instant::now();
                session.pass_posts_on()?;
                session.say(&FromHost::Alive)?;
            }
        }
    }
}

/// What a host does for one launcher.
struct Session<'a, Output> {
    host: &'a Host<'a>,
    output: Output,
    /// Where ranks send their events.
    events: Sender<Event>,
    listener: Option<TcpListener>,
    ranks: Option<Ranks>,
    /// Takes what the ranks of an external trainer post.
    posts: Option<PostServer>,
    generation: u64,
    /// Ranks whose processes have not ended.
    running: BTreeSet<u64>,
}

impl<Output: Write> Session<'_, Output> {
    fn say(&mut self, message: &FromHost) -> io::Result<()> {
        serde_json::to_writer(&mut self.output, message)?;
        self.output.write_all(b"\n")?;
        self.output.flush()
    }

    fn take(&mut self, message: ToHost) -> io::Result<()> {
        match message {
            ToHost::Enter { .. } | ToHost::Alive => Ok(()),
            ToHost::Read { file, text } => {
                // Listing a directory refreshes a network file system's cache.
                drop(file.parent().map(fs::read_dir));
                let found = input::read(&file, text.len() as u64);
                let same = found.is_ok_and(|found| found == text.as_bytes());
                self.say(&FromHost::Read { same })
            }
            ToHost::Find { directory, program } => {
                let problem = external_trainer::cannot_start(&directory, &program);
                self.say(&FromHost::Found { problem })
            }
            ToHost::Port { named } => {
                let all = Ipv4Addr::UNSPECIFIED;
                let named = named.and_then(|port| TcpListener::bind((all, port)).ok());
                self.listener = named.or_else(|| port::free(all).ok());
                let address = self.listener.as_ref().map(TcpListener::local_addr);
                let port = address.and_then(Result::ok).map_or(0, |it| it.port());
                self.say(&FromHost::Port { port })
            }
            ToHost::Connect { addresses } => {
                let problems = thread::scope(|all| {
                    let reach = |address| all.spawn(move || unreached(address));
                    let reached: Vec<_> = addresses.iter().map(reach).collect();
                    let join = |reached: thread::ScopedJoinHandle<_>| reached.join().ok().flatten();
                    reached.into_iter().map(join).collect()
                });
                self.say(&FromHost::Connected { problems })
            }
            ToHost::Start(start) => self.start(&start),
            ToHost::Order { rank, order } => {
                if let Some(ranks) = &mut self.ranks {
                    ranks.order(rank, order);
                }
                Ok(())
            }
            ToHost::Kill { rank } => {
                if let Some(ranks) = &mut self.ranks {
                    let all = ranks.ranks();
                    for rank in all.filter(|it| rank.is_none_or(|rank| rank == *it)) {
                        ranks.kill_one(rank);
                    }
                }
                Ok(())
            }
            ToHost::Abort => {
                self.ranks.iter_mut().for_each(RankGroup::abort);
                Ok(())
            }
        }
    }

    /// Starts the ranks of a generation. Those of an earlier one are killed.
    fn start(&mut self, start: &StartRanks) -> io::Result<()> {
        self.ranks = None;
        self.posts = None;
        // Rank 0 takes the port.
        self.listener = None;
        self.running.clear();
        self.generation = start.generation.number;
        match self.started(start) {
            Ok(ranks) => {
                self.running = ranks.ranks().collect();
                self.ranks = Some(ranks);
                Ok(())
            }
            Err(error) => {
                let events = unstarted(start, &error);
                events
                    .into_iter()
                    .try_for_each(|event| self.say(&FromHost::Rank(event)))
            }
        }
    }

    fn started(&mut self, ranks: &StartRanks) -> io::Result<Ranks> {
        // The ranks read it. Other hosts write the same.
        let written = ranks.generation.write(&ranks.run_dir);
        written.map_err(|error| io::Error::other(error.to_string()))?;
        let key = ranks.key.parse();
        let start = Start {
            evenkeel: self.host.program,
            run_dir: &ranks.run_dir,
            generation: &ranks.generation,
            first: ranks.first,
            count: ranks.count,
            cores: self.host.cores,
            gpus: &ranks.gpus,
            key: &key.map_err(|_| io::Error::other("the key of the generation is damaged"))?,
            progress_deadline: ranks.progress_deadline,
            bucket: None,
            shows_built_in: false,
        };
        let external = ranks.external.clone().map(|program| {
            let number = ranks.generation.number;
            self.posts = PostServer::start(&ranks.run_dir, number, ranks.first);
            program.with(self.posts.iter().flat_map(PostServer::variables))
        });
        Ranks::start(&start, external.as_ref(), &self.events)
    }

    /// Passes on what rank 0 of an external trainer has posted.
    fn pass_posts_on(&mut self) -> io::Result<()> {
        let Some(progress) = self.posts.as_ref().and_then(PostServer::newest) else {
            return Ok(());
        };
        self.say(&FromHost::Rank(Event {
            generation: self.generation,
            rank: 0,
            news: News::Posted(progress),
        }))
    }

    /// Passes an event of a rank on, after the news that the kernel has killed processes here.
    fn pass_on(&mut self, event: Event) -> io::Result<()> {
        if let News::Exited(ending) = event.news
            && event.generation == self.generation
        {
            self.pass_posts_on()?;
            self.running.remove(&event.rank);
            let is_oom_killed = self.ranks.as_ref().is_some_and(Ranks::is_oom_killed);
            if ending == Ending::Signal(9) && is_oom_killed {
                self.say(&FromHost::OomKilled)?;
            }
        }
        self.say(&FromHost::Rank(event))
    }
}

/// Why a listener is not reached from here; `None`: it is.
fn unreached(address: &Address) -> Option<String> {
    let found = match (address.host.as_str(), address.port).to_socket_addrs() {
        Ok(found) => found,
        Err(error) => return Some(error.to_string()),
    };
    let mut problem = "it has no address".to_owned();
    for address in found {
        match TcpStream::connect_timeout(&address, CONNECT) {
            Ok(_) => return None,
            Err(error) => problem = error.to_string(),
        }
    }
    Some(problem)
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
