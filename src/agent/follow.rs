//! Watches the TrainingJob of this pod: the only place where the agent knows Kubernetes.

use std::sync::mpsc::Sender;
use std::time::Duration;

use futures::StreamExt;
use kube::Client;
use kube::api::Api;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use tokio::time::{Interval, MissedTickBehavior};

use super::input::Input;
use super::membership::Membership;
use crate::api::TrainingJob;

/// Longest period between two liveness checks of the API server while the watch is silent. A short
/// `fence_after` shortens it.
const CONTACT: Duration = Duration::from_secs(5);

/// Follows one TrainingJob forever. Every contact with the API server becomes an input, so the loop
/// knows the time of the last contact.
pub async fn follow(client: Client, namespace: &str, name: &str, inputs: Sender<Input>) {
    let jobs: Api<TrainingJob> = Api::namespaced(client, namespace);
    // A Role with `resourceNames` allows a watch only with this field selector.
    let one = watcher::Config::default().fields(&format!("metadata.name={name}"));
    let mut events = watch(jobs.clone(), one).default_backoff().boxed();
    let mut contact = beats(CONTACT);
    loop {
        let job = tokio::select! {
            event = events.next() => match event {
                Some(Ok(Event::Apply(job) | Event::InitApply(job))) => Some(job),
                Some(_) => None,
                None => return,
            },
            _ = contact.tick() => {
                // A partitioned network never answers; wait at most one heartbeat period.
                let asked = tokio::time::timeout(contact.period(), jobs.get(name));
                asked.await.ok().and_then(Result::ok)
            }
        };
        let Some(membership) = job.as_ref().and_then(Membership::of) else {
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
    use super::*;

    #[test]
    fn several_heartbeats_fit_into_fence_after() {
        assert_eq!(beat(Duration::from_secs(30)), CONTACT);
        for seconds in 5..=3600 {
            let fence_after = Duration::from_secs(seconds);
            assert!(beat(fence_after) * 4 < fence_after, "{seconds}");
        }
    }
}
