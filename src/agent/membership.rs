//! What an agent wants to know of its TrainingJob, and how it hears of it: the only place where the
//! agent knows Kubernetes.

use std::sync::mpsc::Sender;
use std::time::Duration;

use futures::StreamExt;
use kube::api::Api;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch};
use kube::{Client, ResourceExt};
use tokio::time::{Interval, MissedTickBehavior};

use super::pod::Input;
use crate::job::Pin;
use crate::job::api::status::{Current, RecipeSnapshot, State};
use crate::job::api::{RemainderPolicy, TrainingJob};

/// How often the API server is asked for a sign of life when the watch says nothing; more often
/// where ranks are stopped soon.
const CONTACT: Duration = Duration::from_secs(5);

/// A TrainingJob as its pods see it.
#[derive(Debug, Clone, PartialEq)]
pub struct Membership {
    /// The recipe.
    pub recipe: RecipeSnapshot,
    /// What happens to a batch that no number of ranks splits exactly.
    pub remainder: RemainderPolicy,
    /// The job's name, for the run's name.
    pub name: String,
    /// Bytes that a rank may use.
    pub rank_memory: Option<String>,
    /// The user's own program; empty: the built-in trainer.
    pub command: Vec<String>,
    /// The newest generation.
    pub generation: Option<Current>,
    /// The newest committed checkpoint of the lineage that counts.
    pub checkpoint: Option<Pin>,
    /// Without the API server and without peers, ranks are stopped after this.
    pub fence_after: Duration,
    /// The job has ended, one way or the other.
    pub over: bool,
}

impl Membership {
    /// What a TrainingJob says; `None` before it was planned.
    pub fn of(job: &TrainingJob) -> Option<Membership> {
        let status = job.status.as_ref()?;
        Some(Membership {
            recipe: status.recipe.clone()?,
            remainder: job.spec.elasticity.remainder,
            name: job.name_any(),
            rank_memory: job.spec.trainer.rank_memory.clone(),
            command: status.command(&job.spec).to_vec(),
            generation: status.generation.clone(),
            checkpoint: status.checkpoint.clone(),
            fence_after: Duration::from_secs(job.spec.elasticity.fence_after_seconds.into()),
            over: matches!(status.state, State::Complete | State::Failed),
        })
    }
}

/// Follows one TrainingJob for ever. Every sign of life of the API server becomes an input, so that
/// the loop knows when it was last heard from.
pub async fn follow(client: Client, namespace: &str, name: &str, inputs: Sender<Input>) {
    let jobs: Api<TrainingJob> = Api::namespaced(client, namespace);
    // A Role that names the job lets it be watched only by that name.
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
                // Not longer than the beat itself: a cut network answers nothing at all.
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

/// A few times before ranks would be stopped for want of a sign.
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
    fn several_signs_fit_into_the_time_after_which_ranks_are_stopped() {
        assert_eq!(beat(Duration::from_secs(30)), CONTACT);
        for seconds in 5..=3600 {
            let fence_after = Duration::from_secs(seconds);
            assert!(beat(fence_after) * 4 < fence_after, "{seconds}");
        }
    }
}
