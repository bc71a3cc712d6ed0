//! Validates the answers of agents. A job runs the user's image, so any program may answer on the agent's port. With
//! hostNetwork the agent of another pod may answer. A false answer can mislead the controller about one job only, and
//! only about a generation that this job has published.

use std::net::{IpAddr, SocketAddr};

use crate::api::condition::ConditionReason;
use crate::lifecycle::agent_state::{self, AgentState, LaterGeneration, Problem};
use crate::lifecycle::generation::{CheckpointRef, LARGEST_COUNT};
use crate::lifecycle::protocol::HeldState;
use crate::lifecycle::{ExternalCheckpoint, Generation, files};
use crate::plan::MAX_BATCH;
use crate::telemetry::StepRecord;
use crate::util::hex128;

/// Largest answer, bytes. An agent with 64 ranks sends about 30 KiB at most, since [`AgentState::bound`] limits texts.
pub const ANSWER: usize = 64 << 10;
/// Largest accepted difference between the number of a later generation and the published number.
const LATER: u64 = 1 << 20;
/// Longest estimate of the time left, seconds.
const LONGEST_ESTIMATE: f64 = 1e10;
/// Reason of the [`Problem`] that the controller ignores an answer, or a part of it.
pub const ANSWER_REFUSED: &str = ConditionReason::AnswerRefused.name();
/// Replaces a reason that is not one CamelCase word: the API server would refuse a condition with it.
const NO_REASON: &str = ConditionReason::CannotStart.name();

/// The pod that the controller polls.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sender {
    /// Uid of the job.
    pub job: String,
    /// Uid of the pod.
    pub pod: String,
    pub address: SocketAddr,
    /// Ranks per pod (`spec.gpusPerNode`); an answer with more is rejected.
    pub ranks: usize,
}

/// Why the controller ignores an answer. An ignored answer counts as silence.
#[derive(Debug, thiserror::Error)]
pub enum Rejection {
    #[error("the answer at {address} is not one of an agent: {reason}")]
    NoAgent { address: SocketAddr, reason: String },
    #[error(
        "the agent of another pod answers at {address}; with hostNetwork a node has room for one agent only: remove \
         hostNetwork from podTemplate, or keep the pods on different nodes"
    )]
    AnotherPod { address: SocketAddr },
    #[error(
        "the agent at {address} has another key: with hostNetwork it may be that of another job (remove hostNetwork from \
         podTemplate, or keep the pods on different nodes); otherwise the Secret {secret} is not the one that the controller \
         made: delete it and the job's pods, and both are created again"
    )]
    AnotherKey { address: SocketAddr, secret: String },
    #[error("the answer at {address} does not prove that it is the pod's agent")]
    NoProof { address: SocketAddr },
    #[error("the agent at {address} reports {ranks} ranks, but gpusPerNode is {limit}")]
    Ranks {
        address: SocketAddr,
        ranks: usize,
        limit: usize,
    },
    #[error("the pod's address {0} is not polled: no pod of another host has such an address")]
    Address(String),
}

/// The address to poll. Rejects loopback, link-local and similar addresses, which would reach the controller's host or a
/// metadata service.
pub fn agent_address(ip: &str, port: u16) -> Result<SocketAddr, Rejection> {
    let of_a_pod = |ip: &IpAddr| match ip.to_canonical() {
        IpAddr::V4(ip) => {
            let special = ip.is_loopback() || ip.is_link_local() || ip.is_broadcast();
            !(special || ip.is_multicast() || ip.octets()[0] == 0)
        }
        IpAddr::V6(ip) => {
            let special = ip.is_loopback() || ip.is_unicast_link_local() || ip.is_unspecified();
            !(special || ip.is_multicast())
        }
    };
    let address = ip.parse().ok().filter(of_a_pod);
    address
        .map(|ip| SocketAddr::new(ip, port))
        .ok_or_else(|| Rejection::Address(ip.chars().take(64).collect()))
}

/// Parses an answer. Rejects it if another agent sent it. Shortens texts to the limits of [`agent_state`], and drops
/// numbers and paths that the status cannot hold.
pub fn receive(body: &[u8], sender: &Sender) -> Result<AgentState, Rejection> {
    let address = sender.address;
    let state = serde_json::from_slice(body).map_err(|error| Rejection::NoAgent {
        address,
        reason: error.to_string(),
    });
    let mut state: AgentState = state?;
    // A pod that an earlier controller created does not know its job's uid. Its own uid is unique too.
    let of_job = state.job == sender.job || state.job.is_empty();
    if state.pod != sender.pod || !of_job {
        return Err(Rejection::AnotherPod { address });
    }
    let (ranks, limit) = (state.ranks.len(), sender.ranks);
    if ranks > limit {
        return Err(Rejection::Ranks {
            address,
            ranks,
            limit,
        });
    }
    state.bound();
    if let Some(problem) = state.problem.as_mut()
        && !is_camel_case(&problem.reason)
    {
        problem.reason = NO_REASON.into();
    }
    if let Some(step) = &mut state.step {
        // Only the agent's own metrics use these.
        (step.norm_test, step.coordinate_test) = (None, None);
    }
    // The API server would refuse the whole status for one of these.
    state.step = state.step.filter(is_plausible_step);
    state.budget = state.budget.filter(|budget| *budget <= LARGEST_COUNT);
    let estimate = 0.0..=LONGEST_ESTIMATE;
    state.seconds_left = state.seconds_left.filter(|left| estimate.contains(left));
    state.external_checkpoint = state.external_checkpoint.filter(is_plausible_path);
    Ok(state)
}

fn is_camel_case(reason: &str) -> bool {
    reason.starts_with(|c: char| c.is_ascii_uppercase())
        && reason.chars().all(|c| c.is_ascii_alphanumeric())
}

fn is_plausible_step(step: &StepRecord) -> bool {
    step.step.max(step.samples).max(step.tokens) <= LARGEST_COUNT
        && (1..=MAX_BATCH).contains(&step.batch)
}

/// Whether the path is absolute and fits into the status. An external trainer chooses its directory.
fn is_plausible_path(checkpoint: &ExternalCheckpoint) -> bool {
    let path = &checkpoint.path;
    path.is_absolute()
        && path.as_os_str().len() <= agent_state::PATH
        && !path.to_string_lossy().contains(char::is_control)
}

/// What the job has published. The controller checks the states of agents against it.
#[derive(Debug, Clone, Copy)]
pub struct Published<'a> {
    /// The newest generation; `None` before the first.
    pub record: Option<&'a Generation>,
    /// The newest committed checkpoint.
    pub checkpoint: Option<&'a CheckpointRef>,
    /// Upper limit of the samples that the recipe's budget allows; `None` while it is unknown, for
    /// example because the budget has epochs.
    pub most_samples: Option<u64>,
    /// Seconds since the Unix epoch.
    pub now: f64,
}

impl Published<'_> {
    /// Reduces an agent's state to the part that agrees with what the job has published. The rest of the controller
    /// uses only this part.
    pub fn admit(&self, mut state: AgentState) -> AgentState {
        let record = self.record.filter(|it| it.number == state.generation);
        let share = record.and_then(|record| Some((record, record.ranks_of_pod(&state.pod)?)));
        let Some((record, (first, count))) = share else {
            // The generation is older, or not published, or it does not contain this pod.
            let newest = self.record.map_or(0, |record| record.number);
            return AgentState {
                generation: if state.generation > newest {
                    0
                } else {
                    state.generation
                },
                version: state.version,
                job: state.job,
                pod: state.pod,
                devices: state.devices,
                continues: state.continues,
                prepares: state.prepares,
                problem: state.problem,
                waiting_for: state.waiting_for,
                log_tail: state.log_tail,
                ..AgentState::default()
            };
        };
        state.first = first;
        let count = usize::try_from(count).unwrap_or(0);
        state.ranks.resize_with(count, Default::default);
        let world = record.world();
        for rank in &mut state.ranks {
            rank.loss.take_if(|loss| loss.rank >= world);
            let doubtful = |held: &mut HeldState| !self.may_be_held(held, record);
            rank.kept.take_if(doubtful);
            if let Some(loss) = &mut rank.loss {
                loss.held.take_if(doubtful);
            }
        }
        // Another member may have committed a newer one.
        let newest = self.checkpoint.map_or(0, |newest| newest.samples);
        let committed = &mut state.committed;
        committed.take_if(|committed| committed.samples < newest);
        let doubtful = committed.take_if(|committed| !self.may_be_committed(committed, record));
        if let Some(refused) = doubtful {
            let problem = &mut state.problem;
            problem.get_or_insert_with(|| refused_checkpoint(&refused));
        }
        state.step = state.step.filter(|step| {
            step.generation == record.number && self.may_be_reached(step.samples, record)
        });
        // The agent's clock may be fast, but it reports nothing of the future.
        for time in [&mut state.started, &mut state.ready, &mut state.first_step] {
            let finite = time.filter(|at| at.is_finite());
            *time = finite.map(|at| at.clamp(0.0, self.now));
        }
        state
    }

    /// The later generation or checkpoint that an agent reports. It exists if the API server was restored from an older
    /// copy of its data, or if ranks committed without a report. The sender of `state` must be proven.
    pub fn later(&self, state: &AgentState) -> Option<LaterGeneration> {
        let newest = self.record.map_or(0, |record| record.number);
        // Only a search of the volume tells which checkpoint is the newest.
        let mut later = state.later.clone()?;
        // Its ranks may have committed since the search.
        if state.generation == later.number
            && state.committed.as_ref().map(|found| found.samples) > later.samples()
        {
            later.checkpoint.clone_from(&state.committed);
        }
        let checkpoint = &mut later.checkpoint;
        checkpoint.take_if(|found| !self.may_be_reached_later(found));
        // The volume may have another generation of the published number.
        let numbers = newest.max(1)..=newest.saturating_add(LATER);
        let start = self.record.map(Generation::start_samples);
        let starts_before = later.number < newest && later.samples() > start;
        (numbers.contains(&later.number) || starts_before).then_some(later)
    }

    /// Whether a generation that is not published may have committed the checkpoint.
    fn may_be_reached_later(&self, committed: &CheckpointRef) -> bool {
        let start = self.record.and_then(|record| record.start.as_ref());
        let older = [start, self.checkpoint];
        follows(committed, older.into_iter().flatten())
            && is_plausible_reference(committed)
            && committed.samples <= self.most_samples.unwrap_or(LARGEST_COUNT)
    }

    /// Whether a rank of this generation may have committed the checkpoint. The path must name the generation and the
    /// step, and the counts must neither decrease nor exceed the budget.
    fn may_be_committed(&self, committed: &CheckpointRef, record: &Generation) -> bool {
        let path = files::checkpoint_path(record.number, committed.step);
        let older = [record.start.as_ref(), self.checkpoint];
        follows(committed, older.into_iter().flatten())
            && committed.path == path
            && is_plausible_reference(committed)
            && self.may_be_reached(committed.samples, record)
    }

    fn may_be_held(&self, held: &HeldState, record: &Generation) -> bool {
        held.step <= held.samples
            && held.batch <= MAX_BATCH
            && self.may_be_reached(held.samples, record)
    }

    fn may_be_reached(&self, samples: u64, record: &Generation) -> bool {
        let start = record.start_samples();
        (start..=self.most_samples.unwrap_or(LARGEST_COUNT).max(start)).contains(&samples)
    }
}

/// Whether the counts of a checkpoint are at least those of older checkpoints.
fn follows<'a>(committed: &CheckpointRef, older: impl Iterator<Item = &'a CheckpointRef>) -> bool {
    older.into_iter().all(|older| {
        let samples = committed.samples.checked_sub(older.samples);
        let steps = committed.step.checked_sub(older.step);
        // Each step consumes at least one sample.
        let progress = samples.zip(steps);
        progress.is_some_and(|(samples, steps)| steps <= samples && (steps > 0 || samples == 0))
    })
}

fn is_plausible_reference(committed: &CheckpointRef) -> bool {
    let path = files::parse_checkpoint_path(&committed.path);
    path.is_some_and(|(_, step)| step == committed.step)
        && committed.flaw().is_none()
        && hex128::parse(&committed.checksum).is_ok()
}

fn refused_checkpoint(refused: &CheckpointRef) -> Problem {
    let (path, step, samples) = (&refused.path, refused.step, refused.samples);
    let message = format!(
        "the checkpoint {path} of step {step} and {samples} samples, which an agent reports, cannot \
         be one of this generation and is ignored; check the program in the image"
    );
    Problem::new(ANSWER_REFUSED, message)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::api::recipe_snapshot::RecipeSnapshot;
    use crate::lifecycle::Reason;
    use crate::lifecycle::generation::{Address, Member, PodRef};
    use crate::lifecycle::rank_status::Stage;
    use crate::plan::{self, PlanRequest};
    use crate::recipe;
    use crate::recipe::schema::spec::Remainder;

    const NOW: f64 = 1_763_866_800.0;

    fn sender() -> Sender {
        Sender {
            job: "job".into(),
            pod: "uid-1".into(),
            address: SocketAddr::from(([10, 0, 0, 1], 8471)),
            ranks: 2,
        }
    }

    /// Receives the state of the pod `uid-1` with these fields changed.
    fn received(changes: Value) -> Result<AgentState, Rejection> {
        let mut state = json!({"job": "job", "pod": "uid-1", "version": 1, "generation": 3});
        for (field, value) in changes.as_object().unwrap() {
            state[field] = value.clone();
        }
        receive(&serde_json::to_vec(&state).unwrap(), &sender())
    }

    fn checkpoint_ref(path: &str, step: u64, samples: u64) -> CheckpointRef {
        CheckpointRef {
            path: path.into(),
            step,
            samples,
            batch: 16,
            checksum: "0123456789abcdef0123456789ABCDEF".into(),
        }
    }

    /// Generation 3 of a job with two pods of two ranks each; it started at step 10.
    fn record() -> Generation {
        let snapshot = RecipeSnapshot {
            text: "per_device_train_batch_size: 2\ngradient_accumulation_steps: 2\n\
                   evenkeel: {objective: sft, batch: {gpus: 4}}\n"
                .into(),
            ..RecipeSnapshot::default()
        };
        let recipe = recipe::read(&snapshot.request(Remainder::Exact, &[]).unwrap()).unwrap();
        let members = (0..2).map(|slot| Member {
            slot,
            ranks: 2,
            carries: Vec::new(),
            pod: Some(PodRef {
                name: format!("j-{slot}-1"),
                uid: format!("uid-{slot}"),
                ip: format!("10.0.0.{slot}"),
                node: "node".into(),
            }),
        });
        Generation {
            job: "job".into(),
            number: 3,
            reason: Reason::Started,
            members: members.collect(),
            plan: plan::plan(&recipe, &PlanRequest::gpus(4)).unwrap(),
            start: Some(checkpoint_ref("gen-1/step-0000010", 10, 160)),
            carried: None,
            lost: Vec::new(),
            master: Address {
                host: String::new(),
                port: 0,
            },
            created: NOW - 60.0,
        }
    }

    /// Receives a state and admits it, with a budget of 320 samples.
    fn admitted(changes: Value) -> AgentState {
        let (record, newest) = (record(), checkpoint_ref("gen-3/step-0000012", 12, 192));
        let published = Published {
            record: Some(&record),
            checkpoint: Some(&newest),
            most_samples: Some(320 + 32),
            now: NOW,
        };
        published.admit(received(changes).unwrap())
    }

    #[test]
    fn only_addresses_that_a_pod_can_have_are_polled() {
        for ip in [
            "10.1.2.3",
            "192.168.0.1",
            "100.64.0.1",
            "fd00::1",
            "2001:db8::1",
        ] {
            assert_eq!(agent_address(ip, 8471).unwrap().port(), 8471, "{ip}");
        }
        for ip in [
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "169.254.169.254",
            "224.0.0.1",
            "255.255.255.255",
            "::1",
            "::",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "::ffff:169.254.169.254",
            "",
            "localhost",
            "10.0.0.1:80/?",
        ] {
            assert!(agent_address(ip, 8471).is_err(), "{ip}");
        }
    }

    #[test]
    fn an_answer_of_another_pod_or_job_or_with_too_many_ranks_is_rejected() {
        let rejection = |changes| received(changes).unwrap_err().to_string();
        insta::assert_snapshot!(rejection(json!({"pod": "uid-2"})), @"the agent of another pod answers at 10.0.0.1:8471; with hostNetwork a node has room for one agent only: remove hostNetwork from podTemplate, or keep the pods on different nodes");
        for changes in [
            json!({"job": "other"}),
            json!({"pod": ""}),
            json!({"job": "", "pod": "uid-2"}),
            json!({"job": "", "pod": ""}),
        ] {
            assert!(rejection(changes).starts_with("the agent of another pod answers"));
        }
        insta::assert_snapshot!(rejection(json!({"ranks": [{}, {}, {}]})), @"the agent at 10.0.0.1:8471 reports 3 ranks, but gpusPerNode is 2");
    }

    #[test]
    fn a_pod_of_an_earlier_controller_answers_without_its_job() {
        let ready = json!({"job": "", "ranks": [{"ready": true}, {"ready": true}]});
        let state = admitted(ready);
        assert_eq!((state.generation, state.ranks.len()), (3, 2));
        assert!(state.ranks.iter().all(|rank| rank.stage == Stage::Ready));
    }

    #[test]
    fn an_agent_of_another_version_is_understood_or_rejected() {
        let newer = received(json!({"fresh": {"field": [1]}, "ranks": [{"fresh": true}]}));
        assert_eq!(newer.unwrap().ranks.len(), 1);
        for changes in [
            json!({"ranks": [{"ending": "vanished"}]}),
            json!({"version": -1}),
            json!({"generation": 1.5}),
            json!({"step": {"step": 1}}),
        ] {
            assert!(matches!(received(changes), Err(Rejection::NoAgent { .. })));
        }
        let deep = "[".repeat(60_000);
        let deep = format!("{{\"fresh\":{deep}");
        assert!(receive(deep.as_bytes(), &sender()).is_err());
    }

    #[test]
    fn texts_are_shortened_and_terminals_execute_none() {
        let long = "ü\u{1b}[31m".repeat(5000);
        let rank = json!({
            "lost": {"rank": 1, "message": long, "samples": 1, "whole": true},
            "detected_loss": [1, long], "out_of_memory": long, "failed": [long, false],
            "kill_reason": long,
        });
        let state = received(json!({
            "ranks": [rank, rank], "waiting_for": long, "log_tail": long, "step": step(1),
            "problem": {"reason": "no reason", "message": long, "deterministic": false},
            "committed": checkpoint_ref(&long, 1, 1),
        }));
        let state = state.unwrap();
        let size = serde_json::to_vec(&state).unwrap().len();
        let limit = agent_state::RANK_MESSAGES + agent_state::LOG_TAIL + 8 * agent_state::MESSAGE;
        assert!(size < limit, "{size}");
        let problem = state.problem.unwrap();
        assert_eq!(problem.reason, "CannotStart");
        assert!(problem.message.len() <= agent_state::MESSAGE);
        assert!(
            problem.message.starts_with("ü [31mü"),
            "{}",
            problem.message
        );
        assert!(state.log_tail.ends_with("ü [31m"));
        let volume = received(json!({
            "problem": {"reason": "VolumeFull", "message": "full", "deterministic": false},
        }));
        assert_eq!(volume.unwrap().problem.unwrap().reason, "VolumeFull");
    }

    fn step(samples: u64) -> Value {
        json!({
            "generation": 3, "step": 20, "samples": samples, "batch": 16, "world": 4, "loss": null,
            "tokens": 100, "learning_rate": 0.1, "gradient_norm": 1.0, "seconds": 1.0, "time": NOW,
        })
    }

    #[test]
    fn only_checkpoints_of_the_generation_are_accepted() {
        let good = checkpoint_ref("gen-3/step-0000014", 14, 224);
        let state = admitted(json!({"committed": good}));
        assert_eq!((state.committed, state.problem), (Some(good.clone()), None));
        let with = |path: &str, step, samples| checkpoint_ref(path, step, samples);
        let bad = [
            with("/etc/step-0000014", 14, 224),
            with("/run/gen-3/step-0000014", 14, 224),
            with("gen-3/../gen-3/step-0000014", 14, 224),
            with("gen-3/step-14", 14, 224),
            with("gen-3/step-0000014/", 14, 224),
            with("gen-4/step-0000014", 14, 224),
            with("gen-2/step-0000014", 14, 224),
            // The step of another checkpoint.
            with("gen-3/step-0000014", 15, 224),
            // Beyond the budget.
            with("gen-3/step-0000014", 14, 353),
            with("gen-3/step-0000014", 14, u64::MAX),
            // Samples and steps do not agree.
            with("gen-3/step-0000012", 12, 224),
            with("gen-3/step-0000011", 11, 224),
            with("gen-3/step-0009000", 9000, 224),
            CheckpointRef {
                batch: 0,
                ..good.clone()
            },
            CheckpointRef {
                batch: u64::MAX,
                ..good.clone()
            },
            CheckpointRef {
                checksum: "../".into(),
                ..good.clone()
            },
        ];
        for committed in bad {
            let state = admitted(json!({"committed": committed}));
            assert_eq!(state.committed, None, "{committed:?}");
            assert_eq!(state.problem.unwrap().reason, "AnswerRefused");
        }
        let state = admitted(json!({"committed": with("gen-3/step-0009000", 9000, 224)}));
        insta::assert_snapshot!(state.problem.unwrap().message, @"the checkpoint gen-3/step-0009000 of step 9000 and 224 samples, which an agent reports, cannot be one of this generation and is ignored; check the program in the image");
        // Another member has committed a newer one.
        let older = admitted(json!({"committed": with("gen-3/step-0000011", 11, 176)}));
        assert_eq!((older.committed, older.problem), (None, None));
    }

    #[test]
    fn a_generation_that_the_job_has_not_published_is_ignored() {
        let all = |generation: u64, pod: &str| {
            let record = record();
            let published = Published {
                record: Some(&record),
                checkpoint: None,
                most_samples: None,
                now: NOW,
            };
            let good = checkpoint_ref(&format!("gen-{generation}/step-0000014"), 14, 224);
            let mut state = received(json!({
                "generation": generation, "ranks": [{"ready": true}], "committed": good,
                "step": step(200), "started": NOW, "devices": 2, "log_tail": "last line",
            }))
            .unwrap();
            state.pod = pod.into();
            published.admit(state)
        };
        let known = all(3, "uid-1");
        assert!(known.committed.is_some() && known.step.is_some());
        // Ranks and their numbers are those of the record.
        assert_eq!(
            (known.first, known.ranks.len(), known.generation),
            (2, 2, 3)
        );
        for (generation, pod, admitted) in [(4, "uid-1", 0), (2, "uid-1", 2), (3, "uid-9", 3)] {
            let state = all(generation, pod);
            assert_eq!((state.generation, state.devices), (admitted, 2));
            assert_eq!(
                (state.committed, state.step, state.started),
                (None, None, None)
            );
            assert!(state.ranks.is_empty());
            assert_eq!(state.log_tail, "last line");
        }
        let before_the_first = Published {
            record: None,
            checkpoint: None,
            most_samples: None,
            now: NOW,
        };
        let state = received(json!({"ranks": [{"ready": true}]})).unwrap();
        assert_eq!(before_the_first.admit(state).generation, 0);
    }

    #[test]
    fn numbers_that_the_status_cannot_hold_are_ignored_or_limited() {
        let state = admitted(json!({
            "started": 1e300, "ready": -5.0, "first_step": NOW + 1e6, "budget": u64::MAX,
            "seconds_left": 1e300,
        }));
        assert_eq!(state.started, Some(NOW));
        assert_eq!(state.ready, Some(0.0));
        assert_eq!(state.first_step, Some(NOW));
        assert_eq!((state.budget, state.seconds_left), (None, None));
        let with = |field: &str, value: Value| {
            let mut step = step(200);
            step[field] = value;
            admitted(json!({"step": step})).step
        };
        assert!(with("samples", json!(200)).is_some());
        for (field, value) in [
            ("samples", json!(159)),
            ("samples", json!(353)),
            ("step", json!(u64::MAX)),
            ("tokens", json!(u64::MAX)),
            ("batch", json!(0)),
            ("batch", json!(u64::MAX)),
            ("generation", json!(2)),
        ] {
            assert_eq!(with(field, value), None, "{field}");
        }
        let lost = json!({"rank": 99, "message": "gone", "samples": 1, "whole": true});
        for loss in [json!({"lost": lost}), json!({"detected_loss": [4, "gone"]})] {
            let state = admitted(json!({"ranks": [loss]}));
            assert_eq!(
                state.ranks[0],
                Default::default(),
                "the world has four ranks"
            );
        }
    }

    #[test]
    fn an_external_checkpoint_is_an_absolute_path_of_limited_length() {
        let path = |path: &str| {
            let state = received(json!({"external_checkpoint": {"path": path}})).unwrap();
            state.external_checkpoint.is_some()
        };
        assert!(path("/checkpoints/out/checkpoint-40"));
        for bad in [
            "checkpoint-40",
            "",
            "/a\n/b",
            &format!("/{}", "a".repeat(5000)),
        ] {
            assert!(!path(bad));
        }
    }
}
