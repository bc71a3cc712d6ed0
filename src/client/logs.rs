//! Logs of a job's pods. An agent prints one JSON event a line: training progress and the output of
//! its ranks.

use futures::{AsyncBufReadExt, Stream, StreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, LogParams};

use super::{ClientError, Cluster};
use crate::api::TrainingJob;
use crate::lifecycle::Generation;
use crate::telemetry::Event;

/// One line of a pod's log.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct LogLine {
    /// Timestamp of the kubelet; later lines compare as greater.
    pub time: String,
    /// The event; `None` for lines that no agent printed.
    pub event: Option<Event>,
}

/// A pod's log from `since` on.
pub(super) async fn read(
    cluster: &Cluster,
    pod: &str,
    since: Option<Timestamp>,
    follow: bool,
) -> Result<impl Stream<Item = LogLine> + Send + use<>, kube::Error> {
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let wanted = LogParams {
        container: Some("trainer".into()),
        follow,
        // kube rounds to the nearest second, which would skip lines of the first half second.
        since_time: since.map(whole_second),
        timestamps: true,
        ..LogParams::default()
    };
    let log = pods.log_stream(pod, &wanted).await?;
    Ok(log
        .lines()
        .filter_map(|line| async move { parse_line(&line.ok()?) }))
}

/// The time without its fraction of a second.
fn whole_second(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

fn parse_line(line: &str) -> Option<LogLine> {
    let (time, text) = line.split_once(' ')?;
    Some(LogLine {
        time: time.to_owned(),
        event: serde_json::from_str(text).ok(),
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

/// Passes the output of a rank of the newest generation to `each`, line by line. With `follow` it
/// continues until the pod ends.
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
    let log = read(cluster, pod, None, follow).await;
    let mut log = Box::pin(log.map_err(|error| missing_pod(cluster, pod, error))?);
    while let Some(line) = log.next().await {
        if let Some(Event::Output { rank: who, line }) = line.event
            && who == rank
            && !each(&line)
        {
            break;
        }
    }
    Ok(())
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
    let log = read(cluster, pod, None, false).await;
    let mut log = Box::pin(log.map_err(|error| missing_pod(cluster, pod, error))?);
    while let Some(line) = log.next().await {
        if let Some(event) = line.event {
            each(&event);
        }
    }
    Ok(())
}

fn started<'a>(job: &'a TrainingJob, name: &str) -> Result<&'a Generation, ClientError> {
    generation(job).ok_or_else(|| {
        let message = job
            .status
            .as_ref()
            .map_or("", |status| status.message.as_str());
        let message = match message {
            "" => String::new(),
            message => format!(": {message}"),
        };
        ClientError::Usage(format!("{name} has not started ranks yet{message}"))
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
    use super::*;

    #[test]
    fn a_log_begins_no_later_than_asked() {
        let asked: Timestamp = "2026-01-01T00:00:07.9Z".parse().unwrap();
        assert_eq!(whole_second(asked).to_string(), "2026-01-01T00:00:07Z");
    }

    #[test]
    fn log_lines_of_other_programs_have_no_event() {
        let said = parse_line(
            r#"2026-01-01T00:00:00.000000001Z {"event":"output","rank":3,"line":"a b"}"#,
        );
        let expected = LogLine {
            time: "2026-01-01T00:00:00.000000001Z".into(),
            event: Some(Event::Output {
                rank: 3,
                line: "a b".into(),
            }),
        };
        assert_eq!(said, Some(expected));
        assert_eq!(
            parse_line("2026-01-01T00:00:00Z plain words")
                .unwrap()
                .event,
            None
        );
        assert_eq!(parse_line(""), None);
    }
}
