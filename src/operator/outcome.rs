//! Decides and counts the outcome of a generation: failures count against the budget and cause a pause;
//! lost nodes and pods never count.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;

use super::observe::ClusterState;
use super::pace::back_off;
use crate::api::TrainingJob;
use crate::api::status::{Current, PodFailures, TrainingJobStatus};
use crate::lifecycle::Outcome;
use crate::lifecycle::rank_status::{self, ANSWER, COMMIT, Fault, RankStatus};
use crate::util::time::{micro_time, seconds};

/// First pause after a failure, seconds; it doubles with each failure.
const BACK_OFF: f64 = 2.0;
/// Upper limit of the pause, seconds.
pub const LONGEST_BACK_OFF: f64 = 300.0;

/// The outcome of the newest generation; `None` while its ranks may still report or commit.
///
/// `ranks`: those of the generation. `waited`: seconds since the cause of the change. `smaller`: the next micro-batch after an
/// out-of-memory error.
pub fn decide(
    job: &TrainingJob,
    current: &Current,
    cluster: &ClusterState,
    ranks: &[RankStatus],
    waited: f64,
    smaller: impl FnMut() -> Option<u64>,
) -> Option<Outcome> {
    let micro_batch = current.record.plan.per_device_batch_size;
    // The agents report kills for memory as out-of-memory errors.
    let of_ranks = rank_status::outcome(ranks, micro_batch, smaller, || false);
    match of_ranks {
        Some(outcome) => Some(without_lost_member(outcome, cluster)),
        None => timed_out(job, current, cluster, waited),
    }
}

/// The loss of a pod or node is not a failure of the program.
fn without_lost_member(outcome: Outcome, cluster: &ClusterState) -> Outcome {
    let failed = |fault: &Option<Fault>| matches!(fault, Some(Fault::Failed { .. }));
    match (&cluster.lost_member, outcome) {
        (Some((rank, message)), Outcome::Failed { .. } | Outcome::Lost { .. })
            if !cluster.ranks.iter().any(|rank| failed(&rank.fault)) =>
        {
            Outcome::Lost {
                rank: *rank,
                message: message.clone(),
            }
        }
        (_, outcome) => outcome,
    }
}

/// The outcome of ranks that did not end in time after a drain or a loss.
fn timed_out(
    job: &TrainingJob,
    current: &Current,
    cluster: &ClusterState,
    waited: f64,
) -> Option<Outcome> {
    // An external trainer in a silent pod may still commit: then no time limit applies.
    if cluster.may_commit {
        return None;
    }
    let number = current.record.number;
    // A new controller process knows nothing of an agent that it has not polled yet.
    let started = |pod: &String| {
        let agent = cluster.agent(pod);
        agent.is_none_or(|agent| agent.generation >= number)
    };
    let mut members = current.record.pods();
    let never_started =
        !members.any(|pod| cluster.pods.contains_key(&pod.name) && started(&pod.name));
    let drain_seconds = f64::from(job.spec.elasticity.drain_seconds);
    if current.drain && (never_started || waited > drain_seconds) {
        return Some(Outcome::Drained);
    }
    let late = current.after_loss.is_some() && waited > (ANSWER + COMMIT).as_secs_f64();
    late.then(|| Outcome::Lost {
        rank: 0,
        message: "the survivors of a loss did not exit in time".into(),
    })
}

/// The outcome of a generation with what it counts.
#[derive(Debug)]
pub struct Counted {
    /// Repeated kills of a rank in a living pod are a failure.
    pub outcome: Outcome,
    pub restarts: u32,
    pub disruptions: u32,
    pub restart_not_before: Option<MicroTime>,
}

/// Counts the outcome of a generation whose ranks have all ended. `killed`: no pod or node was lost, so a lost rank
/// crashed or was killed in a living pod. `budget`: allowed failures without progress between them.
pub fn count(
    status: &TrainingJobStatus,
    outcome: Outcome,
    killed: bool,
    budget: u32,
    now: f64,
) -> Counted {
    let (failed, lost) = match &outcome {
        Outcome::Failed { .. } => (true, false),
        Outcome::Lost { .. } => (false, true),
        Outcome::Finished | Outcome::Drained | Outcome::OutOfMemory { .. } => (false, false),
    };
    let before = status.restarts;
    let counts = failed || (lost && killed);
    let restarts = before + u32::from(counts);
    // The first loss restarts without a pause.
    let pauses = counts && (failed || before > 0);
    Counted {
        outcome: match outcome {
            Outcome::Lost { rank, message } if killed && restarts > budget => Outcome::Failed {
                rank,
                message,
                deterministic: false,
            },
            outcome => outcome,
        },
        restarts,
        disruptions: status.disruptions + u32::from(lost && !killed),
        restart_not_before: if pauses {
            Some(micro_time(now + pause(before, now)))
        } else {
            status.restart_not_before.clone()
        },
    }
}

/// Counts a round of pods that ended before they could train; the next round starts after a pause.
/// Pods that end during the pause belong to the same round.
pub fn count_pods(earlier: Option<&PodFailures>, last: &str, now: f64) -> PodFailures {
    let message = last.to_owned();
    match earlier {
        Some(earlier) if now < seconds(&earlier.retry_not_before) => PodFailures {
            message,
            ..earlier.clone()
        },
        _ => {
            let count = earlier.map_or(0, |earlier| earlier.count);
            PodFailures {
                count: count.saturating_add(1),
                message,
                retry_not_before: micro_time(now + pause(count, now)),
            }
        }
    }
}

/// Seconds to wait after a failure that follows `before` others.
fn pause(before: u32, now: f64) -> f64 {
    back_off(BACK_OFF, LONGEST_BACK_OFF, before, now)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::api::status::AfterLoss;
    use crate::operator::testing::Cluster;

    const NOW: f64 = 1000.0;

    /// Ends `times` generations in the same way; returns the last outcome and the pause after it.
    fn after(times: u32, outcome: &Outcome, killed: bool) -> (TrainingJobStatus, Outcome, f64) {
        let mut status = TrainingJobStatus::default();
        let mut last = Outcome::Drained;
        for _ in 0..times {
            status.restart_not_before = None;
            let counted = count(&status, outcome.clone(), killed, 3, NOW);
            status.restarts = counted.restarts;
            status.disruptions = counted.disruptions;
            status.restart_not_before = counted.restart_not_before;
            last = counted.outcome;
        }
        let pause = status
            .restart_not_before
            .as_ref()
            .map_or(0.0, |at| seconds(at) - NOW);
        (status, last, pause)
    }

    fn lost() -> Outcome {
        Outcome::Lost {
            rank: 1,
            message: "killed by signal 11".into(),
        }
    }

    #[test]
    fn lost_nodes_neither_count_nor_pause() {
        let (status, last, pause) = after(20, &lost(), false);
        assert_eq!((status.restarts, status.disruptions, pause), (0, 20, 0.0));
        assert_eq!(last, lost());
    }

    #[test]
    fn repeated_crashes_in_a_living_pod_become_a_failure() {
        let (status, last, pause) = after(1, &lost(), true);
        assert_eq!(
            (status.restarts, pause),
            (1, 0.0),
            "at once, the first time"
        );
        assert_eq!(last, lost());
        let (_, last, pause) = after(3, &lost(), true);
        assert!((4.0..=8.0).contains(&pause), "{pause}");
        assert_eq!(last, lost());
        let (_, last, _) = after(4, &lost(), true);
        assert!(
            matches!(&last, Outcome::Failed { rank: 1, message, .. } if message == "killed by signal 11"),
            "{last:?}"
        );
    }

    #[test]
    fn pods_that_end_during_a_pause_belong_to_the_same_round() {
        let mut earlier = None;
        for (now, count) in [(NOW, 1), (NOW + 0.9, 1), (NOW + 2.1, 2), (NOW + 3.9, 2)] {
            let failures = count_pods(earlier.as_ref(), &format!("at {now}"), now);
            assert_eq!(
                (failures.count, &*failures.message),
                (count, &*format!("at {now}"))
            );
            earlier = Some(failures);
        }
    }

    #[test]
    fn pauses_after_failures_double_up_to_five_minutes() {
        let failed = Outcome::Failed {
            rank: 0,
            message: "exit code 3".into(),
            deterministic: false,
        };
        for (times, longest) in [(1, 2.0), (2, 4.0), (5, 32.0), (30, 300.0)] {
            let (status, last, pause) = after(times, &failed, true);
            assert_eq!(status.restarts, times);
            assert_eq!(last, failed);
            assert!(
                (longest / 2.0..=longest).contains(&pause),
                "{times}: {pause}"
            );
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn ranks_that_do_not_end_in_time_end_the_generation() {
        let mut cluster = Cluster::running().await;
        let (job, mut current) = (cluster.job(), cluster.status().generation.unwrap());
        let mut observed = cluster.observed();
        let decide = |current: &Current, observed: &ClusterState, waited: u32| {
            decide(
                &job,
                current,
                observed,
                &observed.ranks,
                waited.into(),
                || None,
            )
        };
        assert_eq!(
            decide(&current, &observed, 100_000),
            None,
            "nothing is to end"
        );
        current.drain = true;
        let limit = job.spec.elasticity.drain_seconds;
        assert_eq!(decide(&current, &observed, limit), None);
        assert_eq!(
            decide(&current, &observed, limit + 1),
            Some(Outcome::Drained)
        );
        // A checkpoint may still come from a silent pod of an external trainer.
        observed.may_commit = true;
        assert_eq!(decide(&current, &observed, limit + 1), None);
        observed.may_commit = false;
        current.drain = false;
        current.after_loss = Some(AfterLoss { commit: None });
        let limit = (ANSWER + COMMIT).as_secs() as u32;
        assert_eq!(decide(&current, &observed, limit), None);
        let late = decide(&current, &observed, limit + 1);
        assert!(matches!(late, Some(Outcome::Lost { .. })), "{late:?}");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn ranks_that_never_started_are_drained_at_once() {
        let mut cluster = Cluster::running().await;
        let (job, mut current) = (cluster.job(), cluster.status().generation.unwrap());
        current.drain = true;
        for pod in ["x-0-1", "x-1-2"] {
            cluster.agent(pod, json!({}));
        }
        let observed = cluster.observed();
        let outcome = decide(&job, &current, &observed, &observed.ranks, 0.0, || None);
        assert_eq!(outcome, Some(Outcome::Drained));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn the_loss_of_a_node_explains_the_failure_of_its_peers() {
        let mut cluster = Cluster::running().await;
        let (job, current) = (cluster.job(), cluster.status().generation.unwrap());
        cluster.ranks(|_| json!({"ending": {"code": 3}}));
        cluster.remove_node("b");
        let observed = cluster.observed();
        let of = |observed: &ClusterState| {
            decide(&job, &current, observed, &observed.ranks, 0.0, || None)
        };
        assert!(
            matches!(of(&observed), Some(Outcome::Failed { .. })),
            "its rank has ended before"
        );
        cluster.agent(
            "x-1-2",
            json!({"generation": 1, "ranks": [{"ready": true}]}),
        );
        let message = "node b was deleted".to_owned();
        let lost = Outcome::Lost { rank: 1, message };
        assert_eq!(of(&cluster.observed()), Some(lost));
        let failed = json!({"failed": ["loss is NaN", true], "ending": {"code": 1}});
        cluster.agent("x-0-1", json!({"generation": 1, "ranks": [failed]}));
        let outcome = of(&cluster.observed());
        assert!(
            matches!(outcome, Some(Outcome::Failed { rank: 0, .. })),
            "{outcome:?}"
        );
    }
}
