//! Watches the TrainingJob of this pod: the only place where the agent knows Kubernetes.

use std::sync::mpsc::Sender;
use std::time::Duration;

use futures::StreamExt;
use kube::api::Api;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Client, ResourceExt};
use tokio::time::{Interval, MissedTickBehavior};

use super::{Input, Membership};
use crate::api::TrainingJob;

/// Longest period between two liveness checks of the API server while the watch is silent. A short
/// `fence_after` shortens it.
const CONTACT: Duration = Duration::from_secs(5);

/// Follows the TrainingJob with this name and uid forever. Every contact with the API server becomes an input, so
/// the loop knows the time of the last contact.
pub async fn follow(client: Client, namespace: &str, name: &str, uid: &str, inputs: Sender<Input>) {
    let jobs: Api<TrainingJob> = Api::namespaced(client, namespace);
    // A Role with `resourceNames` allows a watch only with this field selector.
    let one = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut events = watch(jobs.clone(), one).default_backoff().boxed();
    let mut contact = beats(CONTACT);
    loop {
        let found = tokio::select! {
            event = events.next() => match event {
                Some(Ok(Event::Apply(job) | Event::InitApply(job))) => Some(job),
                Some(Ok(Event::Delete(_))) => {
                    // A watch may be late; the answer to a request is not.
                    contact.reset_immediately();
                    continue;
                }
                Some(_) => continue,
                None => return,
            },
            _ = contact.tick() => {
                // A partitioned network never answers; wait at most one heartbeat period.
                match tokio::time::timeout(contact.period(), jobs.get_opt(name)).await {
                    Ok(Ok(found)) => found,
                    Ok(Err(_)) | Err(_) => continue,
                }
            }
        };
        let Some(job) = found.filter(|job| job.uid().as_deref() == Some(uid)) else {
            if inputs.send(Input::Gone).is_err() {
                return;
            }
            continue;
        };
        let Some(membership) = Membership::of(&job) else {
            continue;
        };
        let beat = beat(membership.fence_after);
        if contact.period() != beat {
            contact = beats(beat);
        }
        if inputs.send(Input::Job(Box::new(membership))).is_err() {
            return;
        }
    }
}

/// Heartbeat period: several fit into `fence_after`.
fn beat(fence_after: Duration) -> Duration {
    (fence_after / 5).clamp(Duration::from_secs(1), CONTACT)
}

fn beats(period: Duration) -> Interval {
    let mut beats = tokio::time::interval(period);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    beats
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use serde_json::{Value, json};

    use super::*;
    use crate::util::http::testing::serve;

    /// What an agent of the job with the uid `u` hears first, if the API server answers its requests so.
    async fn heard(status: &'static str, answer: Value) -> Input {
        let server = serve(move |reply| {
            if reply.path.ends_with("/first") {
                reply.response(status, "", &answer.to_string())
            } else {
                let none = json!({"metadata": {"resourceVersion": "1"}, "items": []});
                reply.body(&none.to_string())
            }
        });
        let url = format!("http://{}", server.address).parse().unwrap();
        let client = Client::try_from(kube::Config::new(url)).unwrap();
        let (inputs, received) = channel();
        tokio::spawn(async move { follow(client, "team", "first", "u", inputs).await });
        let first = move || received.recv_timeout(Duration::from_secs(60)).unwrap();
        tokio::task::spawn_blocking(first).await.unwrap()
    }

    fn job(uid: &str) -> Value {
        let recipe = json!({"inline": "x"});
        json!({
            "apiVersion": "evenkeel.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": "first", "uid": uid},
            "spec": {"recipe": recipe, "nodes": 1, "gpusPerNode": 1, "image": "i", "checkpoint": {"path": "/c"}},
            "status": {"recipe": {"text": "x", "hash": "h"}},
        })
    }

    #[tokio::test]
    async fn a_job_that_does_not_exist_or_has_another_uid_is_gone() {
        let missing =
            json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
        assert!(matches!(heard("404 Not Found", missing).await, Input::Gone));
        assert!(matches!(heard("200 OK", job("x")).await, Input::Gone));
        assert!(matches!(heard("200 OK", job("u")).await, Input::Job(_)));
    }

    #[test]
    fn several_heartbeats_fit_into_fence_after() {
        assert_eq!(beat(Duration::from_secs(30)), CONTACT);
        for seconds in 5..=3600 {
            let fence_after = Duration::from_secs(seconds);
            assert!(beat(fence_after) * 4 < fence_after, "{seconds}");
        }
    }
}
