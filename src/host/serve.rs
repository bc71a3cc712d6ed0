//! `evenkeel host`: starts ranks for a launcher on another machine. It keeps no state: it ends with the connection, and
//! its ranks with it.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, BufRead, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::own_disk::{self, Done, NotBrought, Task};
use super::program::Start;
use super::ranks::{Event, News, RankGroup, Ranks, STANDING_BY, events_into};
use super::tail::{Tail, new_output};
use super::wire::{BEAT, CONNECT, FENCE, Facts, FromHost, StartRanks, ToHost};
use crate::external_trainer::{self, PostServer};
use crate::lifecycle::files;
use crate::lifecycle::generation::Address;
use crate::lifecycle::protocol::{Ending, Order, Report, exit};
use crate::util::key::Key;
use crate::util::{input, port};

/// Time after which the user learns that a host still copies files.
const LONG_COPY: Duration = Duration::from_secs(10);
/// Largest file of stacks, bytes.
const STACKS: u64 = 4 << 20;

/// An input of the loop.
pub enum Input {
    Message(ToHost),
    Rank(Event),
    /// Work for a run on this host's own disk has ended.
    Done(Done),
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
        let (tasks, taken) = channel();
        own_disk::start(taken, events_into(passed_on, Input::Done))?;
        let mut session = Session {
            host: self,
            output,
            events: events_into(passed_on, Input::Rank),
            tasks,
            waiting: None,
            tails: Vec::new(),
            own: None,
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
                Some(Input::Done(done)) => session.take_done(done)?,
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
                session.pass_output_on(None)?;
                session.report_wait()?;
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
    /// Work that waits for a bucket.
    tasks: Sender<Task>,
    /// Ranks that are not started yet.
    waiting: Option<Waiting>,
    /// The logs of the ranks, if the launcher does not share this disk.
    tails: Vec<(u64, Tail)>,
    /// The run directory on this host's own disk, and the checkpoint from which the ranks started.
    own: Option<(PathBuf, Option<String>)>,
    listener: Option<TcpListener>,
    ranks: Option<Ranks>,
    /// Takes what the ranks of an external trainer post.
    posts: Option<PostServer>,
    generation: u64,
    /// Ranks whose processes have not ended.
    running: BTreeSet<u64>,
}

/// Ranks that start when all hosts of the generation have what they read.
struct Waiting {
    start: Box<StartRanks>,
    since: Instant,
    /// This host has it.
    is_brought: bool,
    /// The user knows that this takes long.
    is_known: bool,
    orders: Vec<(u64, Order)>,
}

impl Waiting {
    fn ranks(&self) -> std::ops::Range<u64> {
        self.start.first..self.start.first + self.start.count
    }

    fn event(&self, rank: u64, news: News) -> FromHost {
        FromHost::Rank(Event {
            generation: self.start.generation.number,
            rank,
            news,
        })
    }
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
            ToHost::Check { url, key, text } => self.work(Task::Check { url, key, text }),
            ToHost::Start(start) => self.start(start),
            ToHost::StandBy { number, start } => self.stand_by(number, &start),
            ToHost::Dismiss { number } => {
                if let Some(ranks) = &mut self.ranks {
                    ranks.dismiss(number);
                }
                Ok(())
            }
            ToHost::Begin { generation } => {
                let of_this = |waiting: &mut Waiting| waiting.start.generation.number == generation;
                match self.waiting.take_if(of_this) {
                    Some(Waiting { start, orders, .. }) => {
                        self.begin(&start, None)?;
                        for (rank, order) in orders {
                            if let Some(ranks) = &mut self.ranks {
                                ranks.order(rank, order);
                            }
                        }
                        Ok(())
                    }
                    None => Ok(()),
                }
            }
            ToHost::Committed { path } => match self.own.clone() {
                Some((run_dir, start)) => self.work(Task::RemoveCopies {
                    run_dir,
                    newest: path,
                    start,
                }),
                None => Ok(()),
            },
            ToHost::Clear { run_dir } => {
                self.ranks = None;
                self.waiting = None;
                let run_dir = own_disk::directory(&run_dir)?;
                self.work(Task::Clear { run_dir })
            }
            ToHost::Order { rank, order } => {
                if let Some(waiting) = &mut self.waiting {
                    waiting.orders.push((rank, order));
                } else if let Some(ranks) = &mut self.ranks {
                    ranks.order(rank, order);
                }
                Ok(())
            }
            ToHost::Kill { .. } if self.waiting.is_some() => self.give_up_waiting(),
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

    fn work(&self, task: Task) -> io::Result<()> {
        let ended = |_| io::Error::other("the thread of this host's disk has ended");
        self.tasks.send(task).map_err(ended)
    }

    /// Takes what has become of a task.
    fn take_done(&mut self, done: Done) -> io::Result<()> {
        let (generation, result) = match done {
            Done::Checked { problem } => return self.say(&FromHost::Checked { problem }),
            Done::Cleared => return self.say(&FromHost::Cleared),
            Done::Brought { generation, result } => (generation, result),
        };
        let of_this = |waiting: &&mut Waiting| waiting.start.generation.number == generation;
        let Some(waiting) = self.waiting.as_mut().filter(of_this) else {
            return Ok(());
        };
        let report = match result {
            Ok(()) => {
                waiting.is_brought = true;
                return self.say(&FromHost::Brought { generation });
            }
            // The run continues on hosts that reach the bucket. This one is tested before it is used again.
            Err(NotBrought::Bucket(error)) => return Err(io::Error::other(error)),
            Err(NotBrought::Damaged(message)) => Report::Failed {
                message,
                deterministic: true,
            },
            Err(NotBrought::Disk(error)) => Report::VolumeFailed {
                message: error.to_string(),
            },
        };
        let failed = self.waiting.take().map(|waiting| waiting.start);
        let events = failed.into_iter().flat_map(|start| ended(&start, &report));
        (events.collect::<Vec<_>>().into_iter())
            .try_for_each(|event| self.say(&FromHost::Rank(event)))
    }

    /// Ends ranks that are not started, as if they were killed.
    fn give_up_waiting(&mut self) -> io::Result<()> {
        let Some(waiting) = self.waiting.take() else {
            return Ok(());
        };
        let killed = Ending::Signal(rustix::process::Signal::KILL.as_raw());
        waiting
            .ranks()
            .map(|rank| waiting.event(rank, News::Exited(killed)))
            .try_for_each(|event| self.say(&event))
    }

    /// Ranks that are not started send no heartbeat.
    fn report_wait(&mut self) -> io::Result<()> {
        let Some(waiting) = &mut self.waiting else {
            return Ok(());
        };
        let connecting = |rank| waiting.event(rank, News::Report(Box::new(Report::Connecting)));
        let mut said: Vec<FromHost> = waiting.ranks().map(connecting).collect();
        if !waiting.is_brought && !waiting.is_known && waiting.since.elapsed() > LONG_COPY {
            let url = waiting.start.bucket.as_deref().unwrap_or_default();
            let first = waiting.start.first;
            let message = format!("the host of rank {first} copies the run's files from {url}");
            let warning = News::Report(Box::new(Report::Warning { message }));
            said.push(waiting.event(first, warning));
            waiting.is_known = true;
        }
        said.iter().try_for_each(|said| self.say(said))
    }

    /// Passes on what ranks have written to their logs; `ended`: this rank has exited, so that is all.
    fn pass_output_on(&mut self, ended: Option<u64>) -> io::Result<()> {
        let mut lines = Vec::new();
        for (rank, tail) in &mut self.tails {
            let is_last = ended == Some(*rank);
            if ended.is_none() || is_last {
                let tail = std::slice::from_mut(tail);
                new_output(tail, None, is_last, |rank, line| lines.push((rank, line)));
            }
        }
        for (rank, line) in lines {
            self.say_of(rank, News::Printed(line))?;
        }
        Ok(())
    }

    /// Passes on the stacks of a rank that makes no progress.
    fn pass_stacks_on(&mut self, rank: u64) -> io::Result<()> {
        let Some((run_dir, _)) = &self.own else {
            return Ok(());
        };
        let file = run_dir.join(files::stacks(self.generation, rank));
        match input::read(&file, STACKS) {
            Ok(stacks) => {
                let stacks = String::from_utf8_lossy(&stacks).into_owned();
                self.say_of(rank, News::Stacks(stacks))
            }
            // The report says what it does.
            Err(_) => Ok(()),
        }
    }

    fn say_of(&mut self, rank: u64, news: News) -> io::Result<()> {
        self.say(&FromHost::Rank(Event {
            generation: self.generation,
            rank,
            news,
        }))
    }

    /// Leaves the ranks of a generation for another one.
    fn enter(&mut self, generation: u64) {
        self.posts = None;
        self.running.clear();
        self.waiting = None;
        self.tails.clear();
        self.own = None;
        self.ranks = None;
        self.generation = generation;
    }

    /// Starts the ranks of a generation, or first brings what they read. Those of an earlier one are killed, except for those
    /// that it carries, and those that stand by and become ranks.
    fn start(&mut self, mut start: Box<StartRanks>) -> io::Result<()> {
        let carried = start.generation.carried;
        let continues = carried.is_some_and(|carried| carried.from == self.generation);
        let has_more = !start.spares.is_empty();
        let carries = has_more || !start.generation.carries(start.first).is_empty();
        let earlier = self.ranks.take().filter(|_| continues && carries);
        self.enter(start.generation.number);
        let Some(url) = start.bucket.clone() else {
            return self.begin(&start, earlier);
        };
        start.run_dir = own_disk::directory(&start.run_dir)?;
        let checkpoint = start.generation.start.as_ref();
        self.own = Some((
            start.run_dir.clone(),
            checkpoint.map(|start| start.path.clone()),
        ));
        if earlier.is_some() {
            return self.begin(&start, earlier);
        }
        let bring = Task::Bring {
            url,
            run_dir: start.run_dir.clone(),
            generation: Box::new(start.generation.clone()),
        };
        self.waiting = Some(Waiting {
            start,
            since: Instant::now(),
            is_brought: false,
            is_known: false,
            orders: Vec::new(),
        });
        self.work(bring)
    }

    /// Starts the ranks of a generation. `earlier`: those of which some continue in it.
    fn begin(&mut self, start: &StartRanks, earlier: Option<Ranks>) -> io::Result<()> {
        // Rank 0 takes the port.
        self.listener = None;
        if start.bucket.is_some() {
            let ranks = start.first..start.first + start.count;
            let tail = |rank| Tail::of(&start.run_dir, start.generation.number, rank);
            self.tails = ranks.map(|rank| (rank, tail(rank))).collect();
        }
        match self.started(start, earlier) {
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

    fn started(&mut self, ranks: &StartRanks, earlier: Option<Ranks>) -> io::Result<Ranks> {
        let key = self.prepare(ranks)?;
        let start = of_host(self.host, ranks, &key);
        if let Some(mut earlier) = earlier {
            let kept = ranks.generation.carries(ranks.first);
            earlier.carry_on(&start, kept, &ranks.spares, &self.events)?;
            return Ok(earlier);
        }
        let external = ranks.external.clone().map(|program| {
            let number = ranks.generation.number;
            self.posts = PostServer::start(&ranks.run_dir, number, ranks.first);
            program.with(self.posts.iter().flat_map(PostServer::variables))
        });
        Ranks::start(&start, external.as_ref(), &self.events)
    }

    /// Writes what processes read of their generation, and returns its key.
    fn prepare(&self, ranks: &StartRanks) -> io::Result<Key> {
        // Other hosts write the same.
        let written = ranks.generation.write(&ranks.run_dir);
        written.map_err(|error| io::Error::other(error.to_string()))?;
        let key = ranks.key.parse();
        key.map_err(|_| io::Error::other("the key of the generation is damaged"))
    }

    /// Starts a process that stands by, also where no rank of its generation is. One that cannot be started ends.
    fn stand_by(&mut self, number: u64, start: &StartRanks) -> io::Result<()> {
        if self.generation != start.generation.number {
            self.enter(start.generation.number);
        }
        let key = self.prepare(start);
        let ranks = self.ranks.get_or_insert_with(|| Ranks::none(start.first));
        let started = key
            .and_then(|key| ranks.stand_by(&of_host(self.host, start, &key), number, &self.events));
        match started {
            Ok(()) => Ok(()),
            Err(_) => self.say(&FromHost::Rank(Event {
                generation: STANDING_BY,
                rank: number,
                news: News::Exited(Ending::Code(exit::FAILED)),
            })),
        }
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
            self.pass_output_on(Some(event.rank))?;
            self.running.remove(&event.rank);
            let is_oom_killed = self.ranks.as_ref().is_some_and(Ranks::is_oom_killed);
            if ending == Ending::Signal(9) && is_oom_killed {
                self.say(&FromHost::OomKilled)?;
            }
        }
        if let News::Report(report) = &event.news
            && matches!(**report, Report::Stalled { .. })
            && event.generation == self.generation
        {
            self.pass_stacks_on(event.rank)?;
        }
        self.say(&FromHost::Rank(event))
    }
}

/// The start of these ranks on a host.
fn of_host<'a>(host: &'a Host<'_>, ranks: &'a StartRanks, key: &'a Key) -> Start<'a> {
    Start {
        evenkeel: host.program,
        run_dir: &ranks.run_dir,
        generation: &ranks.generation,
        first: ranks.first,
        count: ranks.count,
        cores: host.cores,
        gpus: &ranks.gpus,
        key,
        progress_deadline: ranks.progress_deadline,
        bucket: ranks.bucket.as_deref(),
        shows_built_in: false,
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
    let report = Report::Failed {
        message: format!("cannot start: {error}"),
        deterministic: false,
    };
    ended(start, &report)
}

/// The events of ranks that end with this report before they start.
fn ended(start: &StartRanks, report: &Report) -> Vec<Event> {
    let event = |rank, news| Event {
        generation: start.generation.number,
        rank,
        news,
    };
    let failed = |rank| {
        [
            event(rank, News::Report(Box::new(report.clone()))),
            event(rank, News::Exited(Ending::Code(exit::FAILED))),
        ]
    };
    let ranks = start.first..start.first + start.count;
    ranks.flat_map(failed).collect()
}
