//! Logs of a job's pods. An agent prints the events of the training as JSON, one a line, and the lines of its ranks
//! as text or as such events.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{AsyncBufReadExt, AsyncReadExt, StreamExt};
use k8s_openapi::api::core::v1::{Pod, Secret};
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, LogParams};
use kube::{Resource, ResourceExt};
use tokio::sync::mpsc::unbounded_channel;

use super::event_reader::{self, PodLine, RETRY_PAUSE, Source, Unreadable, World};
use super::{ClientError, Cluster, names_an_object};
use crate::api::TrainingJob;
use crate::lifecycle::authentication::{self, QUESTION, Question};
use crate::lifecycle::event_log::{self, AGENT_PORT, LogLine, Position, RESPONSE_BYTES};
use crate::lifecycle::{Generation, files};
use crate::telemetry::Event;
use crate::util::format::count;
use crate::util::key::Key;
use crate::util::lock::lock;

/// Container of the agent.
const CONTAINER: &str = "trainer";
/// Longest wait for an agent's answer through the API server.
const ANSWER: Duration = Duration::from_secs(10);
/// Most bytes read of an agent's answer; the image is the user's.
const ANSWER_BYTES: u64 = 4 * RESPONSE_BYTES as u64;

/// The logs of a cluster's pods.
#[derive(Clone)]
pub(super) struct PodLogs {
    cluster: Cluster,
    /// Keys of the agents, by the names of their pods.
    keys: Arc<Mutex<HashMap<String, Key>>>,
}

impl PodLogs {
    pub fn of(cluster: &Cluster) -> PodLogs {
        PodLogs {
            cluster: cluster.clone(),
            keys: Arc::default(),
        }
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.cluster.client.clone(), &self.cluster.namespace)
    }

    /// The key of a pod's agent, from the Secret of its job; `None` if the user may not read that.
    async fn key(&self, pod: &str) -> Option<Key> {
        if let Some(key) = lock(&self.keys).get(pod) {
            return Some(key.clone());
        }
        let found = self.pods().get_opt(pod).await.ok()??;
        let job = found
            .owner_references()
            .iter()
            .find(|owner| owner.kind == TrainingJob::kind(&()))?;
        let client = self.cluster.client.clone();
        let secrets: Api<Secret> = Api::namespaced(client, &self.cluster.namespace);
        let name = authentication::secret_name(&job.uid);
        let secret = secrets.get(&name).await.ok()?;
        let text = secret.data?.remove(authentication::KEY_FILE)?;
        let job_key: Key = str::from_utf8(&text.0).ok()?.parse().ok()?;
        let key = authentication::agent_key(&job_key, &found.uid()?);
        lock(&self.keys).insert(pod.to_owned(), key.clone());
        Some(key)
    }

    async fn lines(
        &self,
        pod: &str,
        since: Option<Timestamp>,
        follow: bool,
    ) -> Result<BoxStream<'static, PodLine>, kube::Error> {
        let wanted = LogParams {
            container: Some(CONTAINER.into()),
            follow,
            // kube rounds to the nearest second, which would skip lines of the first half second.
            since_time: since.map(whole_second),
            timestamps: true,
            ..LogParams::default()
        };
        let log = self.pods().log_stream(pod, &wanted).await?;
        // A line that cannot be read ends the log, which is then read again.
        let lines = log.lines();
        let lines = lines.take_while(|line| std::future::ready(line.is_ok()));
        Ok(lines
            .filter_map(|line| async move { parse_line(&line.ok()?) })
            .boxed())
    }

    /// Asks through the API server, which is all that a user's machine reaches.
    async fn answer(&self, pod: &str, from: Position) -> Result<String, Unreadable> {
        let query = event_log::query(from);
        let path = format!(
            "/api/v1/namespaces/{}/pods/{pod}:{AGENT_PORT}/proxy{query}",
            self.cluster.namespace,
        );
        let key = self.key(pod).await.ok_or(Unreadable::Failed)?;
        let question = Question::new(key).map_err(failed)?;
        let request = hyper::Request::get(path).header(QUESTION, question.header(&query));
        let request = request.body(Vec::new()).map_err(failed)?;
        let body = self.cluster.client.request_stream(request).await;
        let body = body.map_err(|error| match error {
            // Of the agent, not about the pod.
            kube::Error::Api(status) if status.code == 404 && !names_an_object(&status) => {
                Unreadable::Absent
            }
            _ => Unreadable::Failed,
        })?;
        let mut text = String::new();
        let mut body = pin!(body.take(ANSWER_BYTES));
        body.read_to_string(&mut text).await.map_err(failed)?;
        Ok(text)
    }

    /// Whether a pod's containers have ended, so that its log is complete.
    async fn has_ended(&self, pod: &str) -> bool {
        match self.pods().get_opt(pod).await {
            Ok(Some(pod)) => {
                let phase = pod.status.and_then(|status| status.phase);
                matches!(phase.as_deref(), Some("Succeeded" | "Failed"))
            }
            Ok(None) => true,
            Err(_) => false,
        }
    }
}

impl Source for PodLogs {
    async fn log(
        &self,
        pod: &str,
        since: Option<Timestamp>,
        follow: bool,
    ) -> Result<BoxStream<'static, PodLine>, Unreadable> {
        self.lines(pod, since, follow).await.map_err(failed)
    }

    async fn events(&self, pod: &str, from: Position) -> Result<Vec<LogLine>, Unreadable> {
        let answer = tokio::time::timeout(ANSWER, self.answer(pod, from)).await;
        let text = answer.map_err(failed)??;
        Ok(text.lines().filter_map(LogLine::parse).collect())
    }
}

fn failed<E>(_: E) -> Unreadable {
    Unreadable::Failed
}

/// The time without its fraction of a second.
fn whole_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

/// `None` for lines that no agent printed.
fn parse_line(line: &str) -> Option<PodLine> {
    let (time, text) = line.split_once(' ')?;
    Some(PodLine {
        time: time.parse().ok(),
        line: LogLine::parse(text)?,
    })
}

/// The pod that runs a rank of a generation.
pub(super) fn pod_of(record: &Generation, rank: u64) -> Option<&str> {
    let mut shares = record.shares();
    let its = shares.find(|(first, member)| (*first..first + member.ranks).contains(&rank));
    its.and_then(|(_, member)| Some(member.pod.as_ref()?.name.as_str()))
}

fn generation(job: &TrainingJob) -> Option<&Generation> {
    let status = job.status.as_ref()?;
    status.generation.as_ref().map(|current| &current.record)
}

/// Passes the output of a rank of the newest generation to `each`, line by line, until it returns false.
/// With `follow` it continues until the pod ends, over as many connections as it takes.
pub async fn rank(
    cluster: &Cluster,
    name: &str,
    rank: u64,
    follow: bool,
    each: &mut (dyn FnMut(&str) -> bool + Send),
) -> Result<(), ClientError> {
    let job = cluster.job(name).await?;
    let record = started(&job, name)?;
    let pod = pod_of(record, rank).ok_or_else(|| {
        ClientError::Usage(format!(
            "{name} has no rank {rank}; its generation {} has ranks 0 to {}",
            record.number,
            record.world().saturating_sub(1)
        ))
    })?;
    let logs = PodLogs::of(cluster);
    let mut output = Output::new(rank, files::rank_log(record.number, rank));
    let mut read = Read::default();
    let mut opened = false;
    loop {
        // Before the log is opened: what is printed before the end is then in it.
        let ended = !follow || logs.has_ended(pod).await;
        let since = read.reopen();
        match logs.lines(pod, since, !ended).await {
            Ok(mut log) => {
                opened = true;
                while let Some(PodLine { time, line }) = log.next().await {
                    if !read.is_new(time, &line) {
                        continue;
                    }
                    if output.lacks_lines_before(&line) {
                        let whole = logs.lines(pod, None, false).await;
                        let whole = whole.unwrap_or_else(|_| futures::stream::empty().boxed());
                        let whole: Vec<PodLine> = whole.collect().await;
                        output.fill(whole.into_iter().map(|line| line.line), &line);
                    }
                    output.take(line);
                    if !output.lines.drain(..).all(|line| each(&line)) {
                        return Ok(());
                    }
                }
            }
            Err(error) if !opened || ended => return Err(missing_pod(cluster, pod, error)),
            Err(_) => {}
        }
        if ended {
            return Ok(());
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

/// What was read of a log that is opened again and again, from whole seconds on. Lines with an index do not need it.
#[derive(Default)]
struct Read {
    /// The time of the last line, and the lines without an index that had it: one read of a container's output may have
    /// one time.
    last: (Option<Timestamp>, usize),
    /// The same when the log was opened, less the lines that were skipped.
    before: (Option<Timestamp>, usize),
}

impl Read {
    /// The time from which the log is read next.
    fn reopen(&mut self) -> Option<Timestamp> {
        self.before = self.last;
        self.last.0
    }

    /// Whether a line was not read before the log was opened.
    fn is_new(&mut self, time: Option<Timestamp>, line: &LogLine) -> bool {
        let counts = line.seq.is_none();
        let (before, skipped) = &mut self.before;
        if counts && time.is_some() && time < *before {
            return false;
        }
        if counts && time.is_some() && time == *before && *skipped > 0 {
            *skipped -= 1;
            return false;
        }
        if time.is_some() && time != self.last.0 {
            self.last = (time, 0);
        }
        self.last.1 += usize::from(counts);
        true
    }
}

/// The output of a rank in its pod's log, each line once.
struct Output {
    rank: u64,
    /// Path of its log below the run directory.
    file: PathBuf,
    /// Index of the next line of the pod's log.
    next: u64,
    lines: Vec<String>,
}

impl Output {
    fn new(rank: u64, file: PathBuf) -> Output {
        Output {
            rank,
            file,
            next: 0,
            lines: Vec::new(),
        }
    }

    fn lacks_lines_before(&self, line: &LogLine) -> bool {
        line.seq.is_some_and(|seq| seq > self.next)
    }

    /// Takes the lines before `line` from the whole log, and says how many it does not have.
    fn fill(&mut self, whole: impl IntoIterator<Item = LogLine>, line: &LogLine) {
        let Some(to) = line.seq else { return };
        let mut next = 0;
        let numbered = whole.into_iter().map(|line| {
            let seq = line.seq.unwrap_or(next);
            next = seq + 1;
            let seq = Some(seq);
            (next - 1, LogLine { seq, ..line })
        });
        let lacking = numbered.filter(|(seq, _)| (self.next..to).contains(seq));
        let whole: BTreeMap<u64, LogLine> = lacking.collect();
        let missing = (to - self.next) - whole.len() as u64;
        if missing > 0 {
            self.lines.push(format!(
                "evenkeel: {} of the pod's log cannot be read any more; the checkpoint volume has all output of \
                 rank {} in {}",
                count(missing, "line"),
                self.rank,
                self.file.display()
            ));
        }
        whole.into_values().for_each(|line| self.take(line));
    }

    fn take(&mut self, line: LogLine) {
        let seq = line.seq.unwrap_or(self.next);
        if seq < self.next {
            return;
        }
        self.next = seq + 1;
        if let Event::Output { rank, line } = line.event
            && rank == self.rank
        {
            self.lines.push(line);
        }
    }
}

/// Passes the training events of the newest generation so far to `each`.
pub async fn training(
    cluster: &Cluster,
    name: &str,
    each: &mut (dyn FnMut(&Event) + Send),
) -> Result<(), ClientError> {
    let job = cluster.job(name).await?;
    let record = started(&job, name)?;
    let Some(pod) = pod_of(record, 0) else {
        return Ok(());
    };
    let logs = PodLogs::of(cluster);
    if let Err(error) = logs.lines(pod, Some(Timestamp::now()), false).await {
        return Err(missing_pod(cluster, pod, error));
    }
    let world = World {
        generation: record.number,
        pod: pod.to_owned(),
        created: None,
        announcement: None,
    };
    let (heard, mut events) = unbounded_channel();
    event_reader::read_so_far(logs, world, heard).await;
    while let Some(event) = events.recv().await {
        if !matches!(event, Event::Output { .. }) {
            each(&event);
        }
    }
    Ok(())
}

fn started<'a>(job: &'a TrainingJob, name: &str) -> Result<&'a Generation, ClientError> {
    generation(job).ok_or_else(|| {
        let mut message = format!("{name} has not started ranks yet");
        if let Some(status) = job
            .status
            .as_ref()
            .filter(|status| !status.message.is_empty())
        {
            message = format!("{message}: {}", status.message);
        }
        ClientError::Usage(message)
    })
}

/// Error for a pod that the status names but that no longer exists.
fn missing_pod(cluster: &Cluster, pod: &str, error: kube::Error) -> ClientError {
    match &error {
        kube::Error::Api(status) if status.code == 404 => ClientError::Usage(format!(
            "pod {pod} and its log no longer exist; the logs of the ranks are on the checkpoint volume in \
            gen-N/logs"
        )),
        _ => cluster.error(None, error),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use k8s_openapi::ByteString;
    use serde_json::json;

    use super::*;
    use crate::util::http::testing::{Server, serve};

    #[test]
    fn a_log_begins_no_later_than_asked() {
        let asked: Timestamp = "2026-01-01T00:00:07.9Z".parse().unwrap();
        assert_eq!(whole_second(asked).to_string(), "2026-01-01T00:00:07Z");
    }

    /// Logs of a cluster whose API server is this server.
    fn logs_of(server: &Server) -> PodLogs {
        let url = format!("http://{}", server.address);
        let config = kube::Config::new(url.parse().unwrap());
        PodLogs::of(&Cluster {
            client: kube::Client::try_from(config).unwrap(),
            namespace: "team".into(),
            url,
        })
    }

    #[tokio::test]
    async fn events_are_asked_of_the_agent_through_the_api_server() {
        const PODS: &str = "/api/v1/namespaces/team/pods/";
        const PROXY: &str = "first-0-1:8471/proxy";
        let job_key = Key::random().unwrap();
        let agent_key = authentication::agent_key(&job_key, "uid");
        let server = serve(move |reply| {
            if reply.path == format!("{PODS}first-0-1") {
                let owner =
                    json!({"kind": "TrainingJob", "name": "first", "uid": "u", "apiVersion": "x"});
                let pod = json!({"metadata": {"uid": "uid", "ownerReferences": [owner]}});
                return reply.body(&pod.to_string());
            }
            if reply.path == "/api/v1/namespaces/team/secrets/evenkeel-u" {
                let key = ByteString(job_key.reveal().into_bytes());
                return reply.body(&json!({"data": {"key": key}}).to_string());
            }
            let path = reply.path.strip_prefix(PODS);
            let query = path.and_then(|path| path.strip_prefix(PROXY));
            if let Some(query) = query {
                let header = reply.header(QUESTION).unwrap();
                assert!(Question::verified(&agent_key, query, header).is_some());
            }
            match query.and_then(|query| query.strip_prefix("/events?generation=")) {
            Some("2&from=5") => reply.body(
                "{\"seq\":9,\"position\":{\"generation\":2,\"index\":5},\"event\":\"warning\",\"message\":\"a\"}\n",
            ),
            Some("2&from=6") => reply.body(""),
            Some(_) => write!(reply, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"),
            None => {
                let status = "{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"status\":\"Failure\",\"reason\":\"NotFound\",\
                              \"message\":\"pods not found\",\"details\":{\"name\":\"gone\",\"kind\":\"pods\"},\"code\":404}";
                let length = status.len();
                write!(reply, "HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{status}")
            }
        }
        });
        let logs = logs_of(&server);
        let events = async |pod: &str, generation, index| {
            logs.events(pod, Position { generation, index }).await
        };
        let found = events("first-0-1", 2, 5).await.unwrap();
        assert_eq!((found.len(), found[0].seq), (1, Some(9)));
        assert_eq!(events("first-0-1", 2, 6).await, Ok(Vec::new()));
        assert_eq!(events("first-0-1", 3, 0).await, Err(Unreadable::Absent));
        assert_eq!(events("gone", 2, 0).await, Err(Unreadable::Failed));
    }

    #[tokio::test]
    async fn a_followed_job_survives_broken_and_unordered_logs() {
        // The kubelet's clock stands still and is set back; its log breaks off, then starts again.
        let opened = AtomicUsize::new(0);
        let line = |index: u64| {
            let time = ["2026-01-01T00:00:05Z", "2026-01-01T00:00:03Z"][usize::from(index > 4)];
            let position = format!("{{\"generation\":1,\"index\":{index}}}");
            format!(
                "{time} {{\"seq\":{index},\"position\":{position},\"event\":\"warning\",\"message\":\"{index}\"}}\n"
            )
        };
        let server = serve(move |reply| {
            if !reply
                .path
                .starts_with("/api/v1/namespaces/team/pods/first-0-1/log?")
            {
                return write!(reply, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n");
            }
            let lines: Vec<u64> = match opened.fetch_add(1, Ordering::Relaxed) {
                0 => vec![2, 3],
                1 => (0..5).collect(),
                2 => vec![3, 6, 7],
                _ => (0..10).collect(),
            };
            reply.body(&lines.into_iter().map(line).collect::<String>())
        });
        let (sends, commands) = unbounded_channel();
        let (heard, mut events) = unbounded_channel();
        let world = World {
            generation: 1,
            pod: "first-0-1".into(),
            created: None,
            announcement: None,
        };
        sends
            .send(event_reader::Command::World(Box::new(world)))
            .unwrap();
        let pauses = event_reader::Pauses {
            retry: Duration::from_millis(1),
            silence: Duration::from_secs(5),
        };
        let reading = tokio::spawn(event_reader::read_events(
            logs_of(&server),
            commands,
            heard,
            pauses,
        ));
        let mut shown = Vec::new();
        while let Some(Event::Warning { message }) = events.recv().await {
            shown.push(message);
            if shown.len() == 8 {
                sends
                    .send(event_reader::Command::Over { samples: 0 })
                    .unwrap();
            }
        }
        reading.await.unwrap();
        let all: Vec<String> = (0..10).map(|index| index.to_string()).collect();
        assert_eq!(shown, all);
    }

    fn output(seq: u64, rank: u64) -> LogLine {
        LogLine {
            seq: Some(seq),
            position: None,
            event: Event::Output {
                rank,
                line: format!("line {seq}"),
            },
        }
    }

    #[test]
    fn output_of_a_rank_is_shown_once_whatever_the_log_delivers() {
        let all = || (0..20).map(|seq| output(seq, seq % 2));
        let mut shown = Output::new(1, files::rank_log(1, 1));
        for seq in [0, 1, 1, 0, 7, 6, 7, 19, 2] {
            let line = output(seq, seq % 2);
            if shown.lacks_lines_before(&line) {
                shown.fill(all(), &line);
            }
            shown.take(line);
        }
        let expected: Vec<String> = (0..10).map(|n| format!("line {}", 2 * n + 1)).collect();
        assert_eq!(shown.lines, expected);
        // The kubelet has rotated the first ten lines away.
        let mut shown = Output::new(1, files::rank_log(1, 1));
        let line = output(13, 1);
        assert!(shown.lacks_lines_before(&line));
        shown.fill(all().skip(10), &line);
        shown.take(line);
        insta::assert_snapshot!(shown.lines.join("\n"), @"
        evenkeel: 10 lines of the pod's log cannot be read any more; the checkpoint volume has all output of rank 1 in gen-1/logs/rank-1.log
        line 11
        line 13
        ");
    }

    #[test]
    fn lines_of_one_time_are_each_read_once() {
        let at = |second: i64| Some(Timestamp::from_second(second).unwrap());
        let text = LogLine::parse("[0] words").unwrap();
        let mut read = Read::default();
        let news = |read: &mut Read, times: &[i64]| -> Vec<bool> {
            times
                .iter()
                .map(|time| read.is_new(at(*time), &text))
                .collect()
        };
        assert_eq!(read.reopen(), None);
        // A burst has one time, and the clock may be set back.
        assert_eq!(news(&mut read, &[5, 5, 5, 3, 7, 7]), [true; 6]);
        assert_eq!(read.reopen(), at(7));
        assert_eq!(
            news(&mut read, &[5, 7, 7, 7, 8]),
            [false, false, false, true, true]
        );
        assert_eq!(read.reopen(), at(8));
        assert_eq!(news(&mut read, &[7, 8, 8]), [false, false, true]);
    }

    #[test]
    fn lines_as_text_count_like_events() {
        let text = |line: &str| LogLine::parse(line).unwrap();
        let event = |seq: u64| LogLine {
            seq: Some(seq),
            ..output(seq, 0)
        };
        let log = [
            text("[1] a"),
            text("[0] b"),
            event(2),
            text("[1] c"),
            event(4),
        ];
        let mut shown = Output::new(1, files::rank_log(1, 1));
        for line in log.clone() {
            assert!(!shown.lacks_lines_before(&line));
            shown.take(line);
        }
        assert_eq!(shown.lines, ["a", "c"]);
        // A connection that broke after the first line.
        let mut shown = Output::new(1, files::rank_log(1, 1));
        let [first, .., last] = log.clone();
        shown.take(first);
        assert!(shown.lacks_lines_before(&last));
        shown.fill(log, &last);
        shown.take(last);
        assert_eq!(shown.lines, ["a", "c"]);
    }

    #[test]
    fn log_lines_of_other_programs_have_no_event() {
        let said = parse_line(
            r#"2026-01-01T00:00:00.000000001Z {"event":"output","rank":3,"line":"a b"}"#,
        );
        let line = said.unwrap();
        assert_eq!(
            line.time.unwrap().to_string(),
            "2026-01-01T00:00:00.000000001Z"
        );
        assert_eq!(line.line.seq, None);
        assert_eq!(parse_line("2026-01-01T00:00:00Z plain words"), None);
        assert_eq!(parse_line(""), None);
    }
}
