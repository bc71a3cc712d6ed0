//! Reads the events of a job's generations by position: each once and in order, whatever connections, clocks
//! and kubelets do.
//!
//! The log of rank 0's pod brings new events. What it lacks is asked of the agents, which serve the event log
//! on the run's volume also for generations whose pods are gone, and else read again from the start of the
//! pod's log. What neither has is reported as gone.

use std::collections::BTreeMap;
use std::future::Future;
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};

use crate::lifecycle::event_log::{LogLine, Position};
use crate::lifecycle::files;
use crate::telemetry::Event;
use crate::util::format::count;

/// Pause before a log that ended is opened again.
pub(super) const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// A line of a pod's log with the kubelet's time.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PodLine {
    pub time: Option<Timestamp>,
    pub line: LogLine,
}

/// Why a log could not be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unreadable {
    /// The volume has no event log of the generation, whose ranks were never started.
    Absent,
    Failed,
}

/// The logs of a cluster.
pub(super) trait Source: Send + Sync + 'static {
    /// Lines that agents have printed in a pod, from `since` on; with `follow` until the pod or the connection
    /// ends.
    fn log(
        &self,
        pod: &str,
        since: Option<Timestamp>,
        follow: bool,
    ) -> impl Future<Output = Result<BoxStream<'static, PodLine>, Unreadable>> + Send;

    /// Events from a position on, served by the agent of `pod`; empty at the end of the generation's log.
    fn events(
        &self,
        pod: &str,
        from: Position,
    ) -> impl Future<Output = Result<Vec<LogLine>, Unreadable>> + Send;
}

/// A generation to read.
#[derive(Debug, Clone)]
pub(super) struct World {
    pub generation: u64,
    /// The pod of its rank 0.
    pub pod: String,
    /// No event of the generation is older.
    pub created: Option<Timestamp>,
    /// Shown before its first event.
    pub announcement: Option<Event>,
}

/// What the follower knows of the job.
#[derive(Debug)]
pub(super) enum Command {
    /// A newer generation trains; the older ones have ended.
    World(Box<World>),
    /// The job is over: what is left in the log is read, then the task ends.
    Over {
        /// Samples of the last step.
        samples: u64,
    },
}

/// Pauses of the reader.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pauses {
    /// Before a log that ended is opened again.
    pub retry: Duration,
    /// Longest wait for each remaining line after the job has ended: a busy kubelet delivers them late.
    pub silence: Duration,
}

/// Reads the generations that `commands` name, until the job is over.
pub(super) async fn read_events<S: Source>(
    source: S,
    mut commands: UnboundedReceiver<Command>,
    heard: UnboundedSender<Event>,
    pauses: Pauses,
) {
    let Some(Command::World(world)) = commands.recv().await else {
        return;
    };
    let mut reader = Reader::new(source, heard, *world);
    while reader.over.is_none() {
        let opened = reader.source.log(&reader.pod, reader.since, true).await;
        let mut log = opened.unwrap_or_else(|_| futures::stream::empty().boxed());
        loop {
            tokio::select! {
                command = commands.recv(), if reader.over.is_none() => {
                    if reader.obey(command).await {
                        break;
                    }
                }
                line = log.next() => match line {
                    Some(line) => reader.line(line).await,
                    None => break,
                },
                () = tokio::time::sleep(pauses.silence), if reader.over.is_some() => break,
            }
        }
        if reader.over.is_none() {
            // A new world need not wait for the old pod's log.
            tokio::select! {
                () = tokio::time::sleep(pauses.retry) => {}
                command = commands.recv() => drop(reader.obey(command).await),
            }
        }
    }
    reader.read_to_end(pauses).await;
}

/// The events of a generation so far; `false` if the pod's log cannot be read.
pub(super) async fn read_so_far<S: Source>(
    source: S,
    world: World,
    heard: UnboundedSender<Event>,
) -> bool {
    let mut reader = Reader::new(source, heard, world);
    reader.read_again(None).await
}

/// What was read of the current generation and pod.
struct Reader<S> {
    source: S,
    heard: UnboundedSender<Event>,
    pod: String,
    /// Start of the next read of the pod's log: only to read less, since positions decide.
    since: Option<Timestamp>,
    /// Index of the next line of the pod's log.
    next_seq: u64,
    next: Position,
    /// Samples of the last step that was shown.
    samples: u64,
    /// The samples of the job's last step, once it is over.
    over: Option<u64>,
}

impl<S: Source> Reader<S> {
    fn new(source: S, heard: UnboundedSender<Event>, world: World) -> Reader<S> {
        let mut reader = Reader {
            source,
            heard,
            pod: String::new(),
            since: None,
            next_seq: 0,
            next: Position::first(world.generation),
            samples: 0,
            over: None,
        };
        reader.attach(world);
        reader
    }

    fn attach(&mut self, world: World) {
        if world.pod != self.pod {
            self.pod = world.pod;
            self.since = world.created;
            self.next_seq = 0;
        }
        if let Some(event) = world.announcement {
            self.send(event);
        }
    }

    /// A closed channel means that the follower is gone, which also ends this task.
    fn send(&self, event: Event) {
        let _ = self.heard.send(event);
    }

    /// Follows a command. Returns whether the next generation is in another pod.
    async fn obey(&mut self, command: Option<Command>) -> bool {
        match command {
            Some(Command::World(world)) => return self.change(*world).await,
            Some(Command::Over { samples }) => self.over = Some(samples),
            None => self.over = Some(0),
        }
        false
    }

    /// Moves to a newer generation after the rest of the older ones. Returns whether it is in another pod.
    async fn change(&mut self, world: World) -> bool {
        let moves = world.pod != self.pod;
        if !self.catch_up(&world.pod, u64::MAX).await {
            let from = self.next;
            self.gone(format!(
                "events of generation {} from position {} on",
                from.generation, from.index
            ));
        }
        // The follower may have missed whole generations.
        for generation in self.next.generation + 1..world.generation {
            self.next = Position::first(generation);
            let mut found = BTreeMap::new();
            let served = self.ask(&world.pod, u64::MAX, &mut found).await;
            self.take_all(found);
            if served == Err(Unreadable::Failed) {
                self.gone(format!("events of generation {generation}"));
            }
        }
        self.next = Position::first(world.generation);
        self.attach(world);
        if !moves {
            // Its agent may have printed events before the follower heard of the generation.
            let pod = self.pod.clone();
            self.catch_up(&pod, u64::MAX).await;
        }
        moves
    }

    /// Takes a line of the pod's log.
    async fn line(&mut self, PodLine { time, line }: PodLine) {
        self.since = time.or(self.since);
        let known = line.seq.is_some_and(|seq| seq < self.next_seq);
        if let Some(seq) = line.seq {
            self.next_seq = self.next_seq.max(seq + 1);
        }
        match line.position {
            // Read again when the follower hears of this generation.
            Some(position) if position.generation > self.next.generation => {}
            Some(position) => {
                if position > self.next {
                    // First those that are missing before it.
                    let pod = self.pod.clone();
                    self.catch_up(&pod, position.index).await;
                    self.skip_to(position);
                }
                self.take(position, line.event);
            }
            None if !known => self.send(line.event),
            None => {}
        }
    }

    /// Shows an event unless it was shown.
    fn take(&mut self, position: Position, event: Event) {
        if position >= self.next {
            self.next = Position {
                index: position.index + 1,
                ..position
            };
            if let Event::Step(step) = &event {
                self.samples = step.samples;
            }
            self.send(event);
        }
    }

    /// Shows the events of the current generation below an index that the agent of the pod `asked` or the
    /// pod's log has. Returns whether one of them could be read.
    async fn catch_up(&mut self, asked: &str, to: u64) -> bool {
        let mut found = BTreeMap::new();
        let served = self.ask(asked, to, &mut found).await.is_ok();
        let last = found.last_key_value().map(|(index, _)| index + 1);
        let wanted = match to {
            u64::MAX => self.next.index..last.unwrap_or(self.next.index),
            to => self.next.index..to,
        };
        let has_all = found.len() as u64 == wanted.end - wanted.start;
        // Each alone may be impossible: the agent may not be reachable, the pod's log may be gone.
        let searched = !(served && has_all) && self.search_log(to, &mut found).await;
        self.take_all(found);
        served || searched
    }

    /// Takes events of the current generation by index.
    fn take_all(&mut self, found: BTreeMap<u64, Event>) {
        let generation = self.next.generation;
        for (index, event) in found {
            let position = Position { generation, index };
            self.skip_to(position);
            self.take(position, event);
        }
    }

    /// Asks the agent of a pod for events of the current generation.
    async fn ask(
        &self,
        pod: &str,
        to: u64,
        found: &mut BTreeMap<u64, Event>,
    ) -> Result<(), Unreadable> {
        let mut next = self.next;
        while next.index < to {
            let lines = self.source.events(pod, next).await?;
            let before = next;
            for line in lines {
                if let Some(position) = line.position
                    && position >= next
                    && self.lacks(position, to)
                {
                    next.index = position.index + 1;
                    found.insert(position.index, line.event);
                }
            }
            if next == before {
                break;
            }
        }
        Ok(())
    }

    /// Reads the pod's log from its start for events of the current generation. Returns whether it exists.
    async fn search_log(&self, to: u64, found: &mut BTreeMap<u64, Event>) -> bool {
        let Ok(mut log) = self.source.log(&self.pod, None, false).await else {
            return false;
        };
        while let Some(PodLine { line, .. }) = log.next().await {
            if let Some(position) = line.position.filter(|&position| self.lacks(position, to)) {
                found.insert(position.index, line.event);
            }
        }
        true
    }

    /// Whether an event of the current generation below an index was not shown yet.
    fn lacks(&self, position: Position, to: u64) -> bool {
        position.generation == self.next.generation
            && (self.next.index..to).contains(&position.index)
    }

    /// Reports the events before a position of the current generation as gone.
    fn skip_to(&mut self, to: Position) {
        let missing = to.index.saturating_sub(self.next.index);
        if missing > 0 {
            let first = self.next.index;
            self.gone(format!(
                "{} of generation {} from position {first} on",
                count(missing, "event"),
                to.generation
            ));
            self.next = to;
        }
    }

    fn gone(&self, what: String) {
        self.send(Event::Warning {
            message: format!(
                "{what} cannot be read: not from pod {}, which may be deleted or have a rotated log, and not from \
                 an agent (this needs the right to get pods/proxy); the checkpoint volume has them in {}",
                self.pod,
                files::events(self.next.generation).display()
            ),
        });
    }

    /// Reads the logs to the last step, again and again: a busy kubelet delivers the end late.
    async fn read_to_end(&mut self, pauses: Pauses) {
        let samples = self.over.unwrap_or_default();
        let begun = Instant::now();
        loop {
            // From the start: a clock that was set back has made the newest lines older than `since`.
            let since = self.since.filter(|_| self.next_seq == 0);
            self.read_again(since).await;
            if self.samples < samples {
                let pod = self.pod.clone();
                self.catch_up(&pod, u64::MAX).await;
            }
            if self.samples >= samples || begun.elapsed() > pauses.silence {
                return;
            }
            tokio::time::sleep(pauses.retry).await;
        }
    }

    /// Reads the pod's log once, to its present end. Returns whether it exists.
    async fn read_again(&mut self, since: Option<Timestamp>) -> bool {
        let Ok(mut log) = self.source.log(&self.pod, since, false).await else {
            return false;
        };
        while let Some(line) = log.next().await {
            self.line(line).await;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, VecDeque};
    use std::sync::{Arc, Mutex};

    use proptest::prelude::*;
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    /// Logs of a job, and what readers get of them.
    #[derive(Default)]
    struct Job {
        /// Lines of each pod; a pod without an entry is gone.
        pods: BTreeMap<String, Vec<LogLine>>,
        /// Indices of the lines that the next followed logs deliver, in this order; then all lines.
        followed: VecDeque<Vec<usize>>,
        /// Event logs on the volume, by generation.
        volume: BTreeMap<u64, Vec<LogLine>>,
        /// Whether the user may reach the agents.
        proxy: bool,
        /// Largest number of events in one answer of an agent.
        answer: usize,
        /// Reads of whole logs that end too early.
        late: usize,
    }

    struct Fake(Arc<Mutex<Job>>);

    impl Source for Fake {
        async fn log(
            &self,
            pod: &str,
            _since: Option<Timestamp>,
            follow: bool,
        ) -> Result<BoxStream<'static, PodLine>, Unreadable> {
            let mut job = self.0.lock().unwrap();
            let mut all = job.pods.get(pod).ok_or(Unreadable::Failed)?.clone();
            if !follow && job.late > 0 {
                job.late -= 1;
                all.truncate(5);
            }
            let chosen = match job.followed.pop_front().filter(|_| follow) {
                Some(indices) => indices
                    .into_iter()
                    .filter_map(|i| all.get(i).cloned())
                    .collect(),
                None => all,
            };
            let lines = chosen.into_iter().map(|line| PodLine { time: None, line });
            Ok(futures::stream::iter(lines).boxed())
        }

        async fn events(&self, pod: &str, from: Position) -> Result<Vec<LogLine>, Unreadable> {
            let job = self.0.lock().unwrap();
            if !job.proxy || !job.pods.contains_key(pod) {
                return Err(Unreadable::Failed);
            }
            let log = job.volume.get(&from.generation);
            let log = log.ok_or(Unreadable::Absent)?.iter();
            let newer = log.filter(|line| line.position >= Some(from));
            Ok(newer.take(job.answer).cloned().collect())
        }
    }

    fn numbered(generation: u64, index: u64) -> Event {
        Event::Warning {
            message: format!("{generation}.{index}"),
        }
    }

    impl Job {
        /// Prints events of a generation in a pod, each after a line of output.
        fn train(&mut self, pod: &str, generation: u64, events: u64) {
            let lines = self.pods.entry(pod.to_owned()).or_default();
            let log = self.volume.entry(generation).or_default();
            for _ in 0..events {
                let index = log.len() as u64;
                lines.push(LogLine {
                    seq: Some(lines.len() as u64),
                    position: None,
                    event: Event::Output {
                        rank: 0,
                        line: "words".into(),
                    },
                });
                let line = LogLine {
                    seq: Some(lines.len() as u64),
                    position: Some(Position { generation, index }),
                    event: numbered(generation, index),
                };
                lines.push(line.clone());
                log.push(line);
            }
        }
    }

    fn world(generation: u64, pod: &str) -> Box<World> {
        Box::new(World {
            generation,
            pod: pod.to_owned(),
            created: None,
            announcement: Some(Event::Waiting {
                message: format!("generation {generation}"),
            }),
        })
    }

    const PAUSES: Pauses = Pauses {
        retry: Duration::from_millis(1),
        silence: Duration::from_millis(500),
    };

    /// Messages of everything shown but ranks' output. `worlds`: the job's generations, of which the reader
    /// learns while it reads.
    async fn followed(job: Job, worlds: &[(u64, &str)]) -> Vec<String> {
        followed_to(job, worlds, 0).await
    }

    /// The same of a job whose last step has these samples.
    async fn followed_to(job: Job, worlds: &[(u64, &str)], samples: u64) -> Vec<String> {
        let (sends, commands) = unbounded_channel();
        let (heard, mut shown) = unbounded_channel();
        let job = Arc::new(Mutex::new(job));
        let reading = tokio::spawn(read_events(Fake(Arc::clone(&job)), commands, heard, PAUSES));
        for (generation, pod) in worlds {
            sends.send(Command::World(world(*generation, pod))).unwrap();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        sends.send(Command::Over { samples }).unwrap();
        reading.await.unwrap();
        let mut messages = Vec::new();
        while let Some(event) = shown.recv().await {
            match event {
                Event::Warning { message } | Event::Waiting { message } => messages.push(message),
                _ => {}
            }
        }
        messages
    }

    fn expected(generations: &[(u64, u64)]) -> Vec<String> {
        let mut all = Vec::new();
        for (generation, events) in generations {
            all.push(format!("generation {generation}"));
            all.extend((0..*events).map(|index| format!("{generation}.{index}")));
        }
        all
    }

    fn trained(proxy: bool, answer: usize) -> Job {
        let mut job = Job {
            proxy,
            answer,
            ..Job::default()
        };
        job.train("a", 1, 20);
        job
    }

    #[tokio::test]
    async fn lines_that_a_log_drops_repeats_or_reorders_are_shown_once_in_order() {
        for proxy in [false, true] {
            let mut job = trained(proxy, 3);
            job.followed = [
                // Steps 1 and 2 and 11 to 14 of the log are missing.
                [5, 7, 9, 11, 13, 15, 17, 19, 29, 31].into(),
                [29, 27, 33, 33, 1].into(),
                vec![],
            ]
            .into();
            assert_eq!(followed(job, &[(1, "a")]).await, expected(&[(1, 20)]));
        }
    }

    #[tokio::test]
    async fn a_log_whose_end_comes_late_is_read_again_until_the_last_step() {
        let mut job = trained(false, 0);
        let log = job.pods.get_mut("a").unwrap();
        let step = serde_json::json!({
            "event": "step", "generation": 1, "step": 1, "samples": 8, "batch": 8, "world": 1, "loss": 1.0,
            "tokens": 1, "learning_rate": 0.1, "gradient_norm": 1.0, "seconds": 1.0, "time": 1.0,
        });
        let mut last = log.last().unwrap().clone();
        last.event = serde_json::from_value(step).unwrap();
        last.seq = last.seq.map(|seq| seq + 1);
        last.position = last.position.map(|position| Position {
            index: position.index + 1,
            ..position
        });
        log.push(last);
        job.followed = [vec![1, 3]].into();
        job.late = 4;
        assert_eq!(followed_to(job, &[(1, "a")], 8).await, expected(&[(1, 20)]));
    }

    #[tokio::test]
    async fn the_rest_of_a_generation_comes_from_the_volume_when_its_pod_is_gone() {
        let mut job = trained(true, 3);
        job.train("b", 2, 10);
        job.train("b", 3, 5);
        job.pods.remove("a");
        let worlds = [(1, "a"), (2, "b"), (3, "b")];
        assert_eq!(
            followed(job, &worlds).await,
            expected(&[(1, 20), (2, 10), (3, 5)])
        );
    }

    #[tokio::test]
    async fn a_generation_that_the_follower_missed_is_read_from_the_volume() {
        let mut job = trained(true, 3);
        job.train("b", 2, 4);
        // The ranks of generation 3 were never started.
        job.train("c", 4, 5);
        let shown = followed(job, &[(1, "a"), (4, "c")]).await;
        let mut all = expected(&[(1, 20), (2, 4), (4, 5)]);
        all.retain(|line| line != "generation 2");
        assert_eq!(shown, all);
    }

    #[tokio::test]
    async fn without_access_to_agents_the_log_of_the_former_pod_is_read_to_its_end() {
        let mut job = trained(false, 0);
        job.train("b", 2, 10);
        job.followed = [vec![1, 3]].into();
        let worlds = [(1, "a"), (2, "b")];
        assert_eq!(followed(job, &worlds).await, expected(&[(1, 20), (2, 10)]));
    }

    #[tokio::test]
    async fn events_that_nothing_holds_are_reported_as_gone() {
        let mut job = trained(false, 0);
        // The kubelet has rotated the log.
        job.pods.get_mut("a").unwrap().drain(..30);
        insta::assert_snapshot!(followed(job, &[(1, "a")]).await.join("\n"), @"
        generation 1
        15 events of generation 1 from position 0 on cannot be read: not from pod a, which may be deleted or have a rotated log, and not from an agent (this needs the right to get pods/proxy); the checkpoint volume has them in gen-1/events.jsonl
        1.15
        1.16
        1.17
        1.18
        1.19
        ");
        let mut job = trained(false, 0);
        job.train("b", 2, 1);
        job.pods.remove("a");
        let worlds = [(1, "a"), (2, "b")];
        insta::assert_snapshot!(followed(job, &worlds).await.join("\n"), @"
        generation 1
        events of generation 1 from position 0 on cannot be read: not from pod a, which may be deleted or have a rotated log, and not from an agent (this needs the right to get pods/proxy); the checkpoint volume has them in gen-1/events.jsonl
        generation 2
        2.0
        ");
    }

    #[tokio::test]
    async fn a_follower_that_joins_late_starts_at_the_newest_generation() {
        let mut job = trained(true, 3);
        job.train("a", 2, 4);
        assert_eq!(followed(job, &[(2, "a")]).await, expected(&[(2, 4)]));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn every_event_is_shown_once_in_order_whatever_the_logs_deliver(
            delivered in proptest::collection::vec(proptest::collection::vec(0..60usize, 0..40), 0..4),
            proxy: bool,
            answer in 1..7usize,
            // Without the last one, nothing shows that the generation has another event.
            lost in proptest::collection::vec(0..19usize, 0..5),
        ) {
            let mut job = trained(proxy, answer);
            job.train("a", 2, 5);
            job.train("b", 3, 5);
            job.followed = delivered.into();
            // Failed writes of the event log; the pods' logs have these events.
            for index in lost {
                let log = job.volume.get_mut(&1).unwrap();
                log.retain(|line| line.position.is_none_or(|position| position.index != index as u64));
            }
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let shown = runtime.block_on(followed(job, &[(1, "a"), (2, "a"), (3, "b")]));
            prop_assert_eq!(shown, expected(&[(1, 20), (2, 5), (3, 5)]));
        }
    }
}
