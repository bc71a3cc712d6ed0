//! Placement of a job on a cluster. [`decide`] moves ranks from one generation to the next; this
//! module adds what a cluster needs: slots, the pods that fill them, and waiting for these pods.
//!
//! It is pure and level-triggered: it depends on the current pool, slots and ranks, so a controller
//! that was killed at any point continues from the status.

use std::ops::RangeInclusive;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::lifecycle::transition::{End, RankAction, Ranks, TransitionInput, decide};

/// A numbered place for a pod. A slot is not a rank: every generation numbers its ranks from 0.
#[derive(
    JsonSchema, Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize,
)]
pub struct Slot {
    /// The slot's number, from 0. Pods have it in the label `evenkeel.dev/slot`.
    pub number: u32,
    /// The attempt that fills the slot. The pod's name is `JOB-NUMBER-ATTEMPT`.
    pub attempt: u32,
}

impl Slot {
    /// The name of the pod that fills it.
    pub fn pod(&self, job: &str) -> String {
        format!("{job}-{}-{}", self.number, self.attempt)
    }
}

/// Input of a placement decision: the pool, the slots and the ranks.
pub struct PlacementInput<'a> {
    pub desired: u32,
    /// Numbers of nodes that the job allows.
    pub bounds: RangeInclusive<u32>,
    pub ranks_per_node: u64,
    /// Whether a plan without errors exists for a number of nodes.
    pub feasible: &'a dyn Fn(u32) -> bool,
    /// Slots for which pods are made, including the job's slots whose pods can stay.
    pub pool: u32,
    /// Slots of `pool` that fit on the present nodes; an autoscaler may add nodes for the others.
    pub placeable: u32,
    /// The most devices that a node of the pool has, held ones included. Only a message asks for it.
    pub largest_node: &'a dyn Fn() -> u64,
    /// Existing slots, each with the state of its pod.
    pub slots: &'a [SlotState],
    /// Slots of the newest generation, in the order of its members.
    pub members: &'a [Slot],
    /// Ranks of the newest generation.
    pub ranks: Ranks,
    /// Some of these ranks wait to continue in the next generation with their processes.
    pub waits: bool,
    /// `spec.suspend`.
    pub suspend: bool,
    /// Message that the job has reached its active deadline: it ends once its ranks have left.
    pub overdue: Option<String>,
    /// Remaining restarts after failures of the program.
    pub restarts_left: u64,
    /// A problem that keeps ranks from starting in any world.
    pub problem: Option<String>,
    /// Pod attempts used so far.
    pub attempts: u32,
    /// Start of the period in which a larger world is possible, seconds since the Unix epoch.
    pub scale_up_pending_since: Option<f64>,
    /// Start of the current placement of pods, seconds since the Unix epoch; while a generation runs, of those that take the
    /// place of others.
    pub placement_since: Option<f64>,
    /// Seconds for which a larger world must be possible before a scale-up.
    pub scale_up_delay: f64,
    /// Time limit for placing pods, seconds; after it the ready pods form the world.
    pub placement: f64,
    /// Earliest time of the next generation, seconds since the Unix epoch.
    pub not_before: f64,
    /// Earliest time of the next new pod, seconds since the Unix epoch.
    pub no_pod_before: f64,
    /// Seconds since the Unix epoch.
    pub now: f64,
}

/// A slot and the state of its pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotState {
    pub slot: Slot,
    pub pod: PodState,
}

/// State of a slot's pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodState {
    /// Not created, not scheduled, or its agent does not answer yet.
    Pending,
    /// Its agent answers and has the GPUs that the plan needs.
    Ready,
    /// It runs on a cordoned node, and leaves it when other pods can take its place.
    Cordoned,
    /// It runs and will end soon: its node is tainted, or it is being deleted.
    Leaving,
    /// It was created before an edit of the job's image or `podTemplate`.
    Outdated,
    /// Deleted, failed, or unreachable.
    Lost,
}

/// Result of a placement decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Placement {
    /// Slots whose pods should exist; all other pods of the job are deleted.
    pub slots: Vec<Slot>,
    /// Pod attempts used so far.
    pub attempts: u32,
    /// Start of the period in which a larger world is possible, seconds since the Unix epoch.
    pub scale_up_pending_since: Option<f64>,
    /// Start of the current placement of pods, seconds since the Unix epoch.
    pub placement_since: Option<f64>,
    pub action: PlacementAction,
}

/// Next action for the job's ranks and pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlacementAction {
    /// Wait for pods that are being placed.
    Place,
    /// The action of the ranks. A world to publish is given by its members, in the order of their ranks. A job that waits
    /// or ends has no pods; the one that ends drained is suspended.
    Ranks(RankAction<Vec<Slot>>),
}

impl PlacementAction {
    /// Name in fault points and logs.
    pub fn name(&self) -> &'static str {
        match self {
            PlacementAction::Place => "place",
            PlacementAction::Ranks(action) => match action {
                RankAction::Keep => "keep",
                RankAction::Drain => "drain",
                RankAction::CancelDrain => "cancel-drain",
                RankAction::Publish { .. } => "publish",
                RankAction::Wait { .. } => "wait",
                RankAction::End(End::Drained) => "suspend",
                RankAction::End(End::Finished | End::Failed { .. }) => "end",
            },
        }
    }

    /// Whether the job is over. A suspended job is not.
    pub fn ends_job(&self) -> bool {
        matches!(
            self,
            PlacementAction::Ranks(RankAction::End(End::Finished | End::Failed { .. }))
        )
    }
}

/// Next placement for the observed state.
pub fn decide_placement(input: &PlacementInput<'_>) -> Placement {
    if let Some(message) = &input.problem {
        return input.without_pods(RankAction::End(End::Failed {
            message: message.clone(),
        }));
    }
    match &input.ranks {
        Ranks::Running { .. } => input.with_generation(),
        Ranks::None { .. } | Ranks::Ended { .. } => input.without_generation(),
    }
}

impl PlacementInput<'_> {
    /// The largest feasible number of nodes up to `most`.
    fn nodes(&self, most: u32) -> Option<u32> {
        let most = most.min(self.desired).min(*self.bounds.end());
        (*self.bounds.start()..=most)
            .rev()
            .find(|&nodes| (self.feasible)(nodes))
    }

    /// Whether the ranks must leave and no others start.
    fn stops(&self) -> bool {
        self.suspend || self.overdue.is_some()
    }

    fn pod(&self, slot: Slot) -> &PodState {
        let state = self.slots.iter().find(|s| s.slot == slot);
        state.map_or(&PodState::Lost, |s| &s.pod)
    }

    fn is_ready(&self, slot: Slot) -> bool {
        *self.pod(slot) == PodState::Ready
    }

    /// The ranks' action if `ready` nodes are usable.
    fn decide(&self, ready: u32) -> RankAction {
        let ranks = |nodes: u32| u64::from(nodes) * self.ranks_per_node;
        let whole = |world: u64| {
            world.is_multiple_of(self.ranks_per_node)
                && u32::try_from(world / self.ranks_per_node).is_ok_and(|n| (self.feasible)(n))
        };
        decide(&TransitionInput {
            desired: ranks(self.desired),
            capacity: ranks(ready),
            bounds: ranks(*self.bounds.start())..=ranks(*self.bounds.end()),
            feasible: &whole,
            refusal: &|_| None,
            stop: self.stops(),
            restarts_left: self.restarts_left,
            ranks: self.ranks.clone(),
        })
    }

    /// Decides while a generation runs. It keeps its pods until it has ended, in whatever state they
    /// are. Pods of a larger world are placed first, while the current world trains.
    fn with_generation(&self) -> Placement {
        let members = self.members.to_vec();
        let now = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let larger = self.nodes(self.pool);
        let larger = larger.filter(|target| *target > now && !self.stops());
        let scale_up_pending_since =
            larger.map(|_| self.scale_up_pending_since.unwrap_or(self.now));
        let pending_for =
            |limit: f64| scale_up_pending_since.is_some_and(|since| self.now - since >= limit);
        let mut attempts = self.attempts;
        let mut slots = members.clone();
        let cordoned = || {
            members
                .iter()
                .filter(|slot| *self.pod(**slot) == PodState::Cordoned)
        };
        let replaced = u32::try_from(cordoned().count()).unwrap_or(u32::MAX);
        let replacing = self.replacements(&members, replaced);
        let placement_since = (replacing > 0).then(|| self.placement_since.unwrap_or(self.now));
        if replacing > 0 {
            let most = now + replacing;
            self.keep_pods(&mut slots, most);
            if self.now >= self.no_pod_before {
                self.add_pods(&mut slots, most, &mut attempts);
            }
        } else if let Some(target) = larger {
            // Pods under way may still become ready; new ones are made only after the delay.
            self.keep_pods(&mut slots, target);
            if pending_for(self.scale_up_delay) && self.now >= self.no_pod_before {
                self.add_pods(&mut slots, target, &mut attempts);
            }
        }
        let mut ready = members.iter().filter(|slot| self.is_ready(**slot)).count();
        let extra = slots.iter().filter(|slot| !members.contains(slot));
        let arrived = extra.filter(|slot| self.is_ready(**slot)).count();
        // A missing pod delays the others no longer than in the placement of a first world.
        let late = pending_for(self.scale_up_delay + self.placement);
        if arrived == slots.len() - members.len() || late {
            ready += arrived;
        }
        // Running pods may hold more devices than the nodes still advertise.
        let ready = u32::try_from(ready).unwrap_or(u32::MAX).min(self.placeable);
        // They train on while the pods for their ranks start.
        let is_overdue = placement_since.is_some_and(|since| self.now - since >= self.placement);
        let has_replacements = replacing > 0 && arrived == slots.len() - members.len();
        let ready = if replacing > 0 && !(has_replacements || is_overdue) {
            ready + replaced
        } else {
            ready
        };
        // An edit takes effect at once: new pods replace the outdated ones.
        let outdated = members
            .iter()
            .any(|slot| *self.pod(*slot) == PodState::Outdated);
        let action = match self.decide(ready) {
            _ if outdated || has_replacements => RankAction::Drain,
            RankAction::Drain => RankAction::Drain,
            RankAction::CancelDrain => RankAction::CancelDrain,
            _ => RankAction::Keep,
        };
        Placement {
            attempts,
            scale_up_pending_since,
            placement_since,
            action: PlacementAction::Ranks(action),
            slots,
        }
    }

    /// How many pods take the place of members on cordoned nodes (`replaced` of them): as many as the next world has
    /// besides the other members. They are not worth a wait if another member leaves.
    fn replacements(&self, members: &[Slot], replaced: u32) -> u32 {
        let stays = |slot: &&Slot| self.is_ready(**slot);
        let staying = u32::try_from(members.iter().filter(stays).count()).unwrap_or(u32::MAX);
        let all = u32::try_from(members.len()).unwrap_or(u32::MAX);
        if replaced == 0 || self.stops() || staying + replaced != all {
            return 0;
        }
        let next = self.nodes(self.pool.min(self.placeable)).unwrap_or(0);
        next.min(all).saturating_sub(staying)
    }

    /// Decides while no generation runs: release slots that the next one does not need, fill the
    /// others, and publish the generation once their pods are ready.
    fn without_generation(&self) -> Placement {
        // The end of a job does not depend on the pool.
        if let RankAction::End(end) = self.decide(u32::MAX) {
            let overdue = self.overdue.clone().filter(|_| end == End::Drained);
            let end = overdue.map_or(end, |message| End::Failed { message });
            return self.without_pods(RankAction::End(end));
        }
        let Some(target) = self.nodes(self.pool) else {
            return self.without_pods(RankAction::Wait {
                message: self.missing_resources(),
            });
        };
        let mut attempts = self.attempts;
        let mut slots = Vec::new();
        self.keep_pods(&mut slots, target);
        if self.now >= self.no_pod_before {
            self.add_pods(&mut slots, target, &mut attempts);
        }
        let mut ready = slots.clone();
        ready.retain(|slot| self.is_ready(*slot));
        let placement_since = self.placement_since.unwrap_or(self.now);
        // The job does not wait for future nodes; it scales up when they exist.
        let soon = self.nodes(self.placeable).unwrap_or(target);
        let all = ready.len() >= soon as usize;
        let late = self.now - placement_since >= self.placement;
        let mut decision = Placement {
            slots,
            attempts,
            scale_up_pending_since: None,
            placement_since: Some(placement_since),
            action: PlacementAction::Place,
        };
        // Ranks that wait train on without the pods that are under way, and with them as a larger world.
        if !(all || late || self.waits) || self.now < self.not_before {
            return decision;
        }
        if let RankAction::Publish {
            world,
            reason,
            per_device_batch_size_limit,
        } = self.decide(u32::try_from(ready.len()).unwrap_or(u32::MAX))
        {
            ready.truncate(usize::try_from(world / self.ranks_per_node).unwrap_or(usize::MAX));
            decision.placement_since = None;
            decision.action = PlacementAction::Ranks(RankAction::Publish {
                world: ready,
                reason,
                per_device_batch_size_limit,
            });
        }
        decision
    }

    fn without_pods(&self, action: RankAction<Vec<Slot>>) -> Placement {
        Placement {
            slots: Vec::new(),
            attempts: self.attempts,
            scale_up_pending_since: None,
            placement_since: None,
            action: PlacementAction::Ranks(action),
        }
    }

    /// Message that names the missing resources.
    fn missing_resources(&self) -> String {
        let most = self.desired.min(*self.bounds.end());
        let would: Vec<String> = (*self.bounds.start()..=most)
            .filter(|nodes| (self.feasible)(*nodes))
            .map(|nodes| nodes.to_string())
            .collect();
        let gpus = self.ranks_per_node;
        if would.is_empty() {
            format!(
                "no number of nodes from {} to {most}, with {gpus} GPUs each, splits the global batch: \
                 change nodes, gpusPerNode or elasticity.remainder",
                self.bounds.start(),
            )
        } else if let Some(largest) = Some((self.largest_node)()).filter(|most| *most < gpus) {
            let largest = match largest {
                0 => "none of them has any that suits this job".to_owned(),
                devices => format!("the largest has {devices}"),
            };
            format!(
                "no node of the pool has {gpus} GPUs, {largest}: change gpusPerNode in a new job, or add nodes"
            )
        } else {
            format!(
                "{} of the pool's nodes have {gpus} GPUs free for this job, which needs {} of them",
                self.pool,
                would.join(" or "),
            )
        }
    }

    /// Fills the slots up to `target` with existing pods: ready ones first, then those under way.
    fn keep_pods(&self, slots: &mut Vec<Slot>, target: u32) {
        let target = usize::try_from(target).unwrap_or(usize::MAX);
        for wanted in [PodState::Ready, PodState::Pending] {
            for state in self.slots.iter().filter(|state| state.pod == wanted) {
                if slots.len() < target && !slots.contains(&state.slot) {
                    slots.push(state.slot);
                }
            }
        }
        slots.sort_by_key(|slot| slot.number);
    }

    /// Fills the slots up to `target` with new pods; each gets a name that no earlier pod had.
    fn add_pods(&self, slots: &mut Vec<Slot>, target: u32, attempts: &mut u32) {
        let target = usize::try_from(target).unwrap_or(usize::MAX);
        while slots.len() < target {
            let taken = |number: &u32| {
                let held = self
                    .slots
                    .iter()
                    .filter(|state| state.pod != PodState::Lost);
                let mut taken = held.map(|state| &state.slot).chain(&*slots);
                taken.any(|slot| slot.number == *number)
            };
            let number = (0..).find(|number| !taken(number)).unwrap_or(0);
            *attempts += 1;
            slots.push(Slot {
                number,
                attempt: *attempts,
            });
        }
        slots.sort_by_key(|slot| slot.number);
    }
}

#[cfg(test)]
mod tests {
    //! Drives the placement through random histories of a pool. Every published generation must be
    //! valid, and once the pool is stable the job must reach the largest feasible world size.

    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::lifecycle::Outcome;

    const SCALE_UP_DELAY: f64 = 5.0;
    const PLACEMENT: f64 = 20.0;

    /// A simulated job in a pool, as the controller observes it.
    struct Simulation {
        now: f64,
        desired: u32,
        pool: u32,
        /// Nodes that an autoscaler would have to add.
        missing: u32,
        no_pod_before: f64,
        batch: u64,
        suspend: bool,
        slots: Vec<SlotState>,
        members: Vec<Slot>,
        ranks: Ranks,
        waits: bool,
        attempts: u32,
        scale_up_pending_since: Option<f64>,
        placement_since: Option<f64>,
        names: BTreeSet<(u32, u32)>,
        over: bool,
    }

    /// A change of the pool, the job or its pods.
    #[derive(Debug, Clone)]
    enum PoolEvent {
        Pool(u32),
        Missing(u32),
        Pause(f64),
        Desired(u32),
        Suspend(bool),
        Waits(bool),
        Ready(usize),
        Leave(usize),
        Cordon(usize),
        Edit,
        Lose(usize),
        RanksEnd(u8),
        Time(f64),
    }

    fn events() -> impl Strategy<Value = PoolEvent> {
        prop_oneof![
            (0..6u32).prop_map(PoolEvent::Pool),
            (0..3u32).prop_map(PoolEvent::Missing),
            (0.0..60.0f64).prop_map(PoolEvent::Pause),
            (0..6u32).prop_map(PoolEvent::Desired),
            any::<bool>().prop_map(PoolEvent::Suspend),
            any::<bool>().prop_map(PoolEvent::Waits),
            (0..6usize).prop_map(PoolEvent::Ready),
            (0..6usize).prop_map(PoolEvent::Leave),
            (0..6usize).prop_map(PoolEvent::Cordon),
            Just(PoolEvent::Edit),
            (0..6usize).prop_map(PoolEvent::Lose),
            (0..3u8).prop_map(PoolEvent::RanksEnd),
            (0.5..30.0f64).prop_map(PoolEvent::Time),
        ]
    }

    impl Simulation {
        fn new(batch: u64) -> Simulation {
            Simulation {
                now: 0.0,
                desired: 3,
                pool: 3,
                missing: 0,
                no_pod_before: 0.0,
                batch,
                suspend: false,
                slots: Vec::new(),
                members: Vec::new(),
                ranks: Ranks::None { resuming: false },
                waits: false,
                attempts: 0,
                scale_up_pending_since: None,
                placement_since: None,
                names: BTreeSet::new(),
                over: false,
            }
        }

        fn feasible(batch: u64, nodes: u32) -> bool {
            nodes > 0 && batch.is_multiple_of(u64::from(nodes) * 2)
        }

        fn input<'a>(&'a self, feasible: &'a dyn Fn(u32) -> bool) -> PlacementInput<'a> {
            PlacementInput {
                desired: self.desired,
                bounds: 1..=5,
                ranks_per_node: 2,
                feasible,
                pool: self.pool,
                placeable: self.pool - self.missing.min(self.pool),
                largest_node: &|| 64,
                slots: &self.slots,
                members: &self.members,
                ranks: self.ranks.clone(),
                waits: self.waits,
                suspend: self.suspend,
                overdue: None,
                restarts_left: 1000,
                problem: None,
                attempts: self.attempts,
                scale_up_pending_since: self.scale_up_pending_since,
                placement_since: self.placement_since,
                scale_up_delay: SCALE_UP_DELAY,
                placement: PLACEMENT,
                not_before: 0.0,
                no_pod_before: self.no_pod_before,
                now: self.now,
            }
        }

        /// One reconciliation; checks the invariants of every decision.
        fn reconcile(&mut self) {
            let batch = self.batch;
            let feasible = move |nodes| Simulation::feasible(batch, nodes);
            let decision = decide_placement(&self.input(&feasible));
            let running = matches!(self.ranks, Ranks::Running { .. });
            for slot in &decision.slots {
                let known = self.slots.iter().any(|state| state.slot == *slot);
                let new = self.names.insert((slot.number, slot.attempt));
                assert!(known || new, "the pod {slot:?} existed before");
                assert!(
                    known || self.now >= self.no_pod_before,
                    "pod made during a pause"
                );
            }
            let numbers: BTreeSet<u32> = decision.slots.iter().map(|slot| slot.number).collect();
            if !running {
                assert_eq!(numbers.len(), decision.slots.len(), "two pods for one slot");
                let most = self.desired.min(self.pool).min(5) as usize;
                assert!(
                    decision.slots.len() <= most,
                    "more pods than the pool holds"
                );
            } else {
                let kept = |member: &Slot| decision.slots.contains(member);
                assert!(
                    self.members.iter().all(kept),
                    "the pod of a running member was released"
                );
            }
            self.over |= decision.action.ends_job();
            let action = match &decision.action {
                PlacementAction::Place => &RankAction::Keep,
                PlacementAction::Ranks(action) => action,
            };
            match action {
                RankAction::Publish { world: members, .. } => {
                    assert!(!running && !self.suspend);
                    assert!(feasible(members.len() as u32));
                    assert!(members.len() as u32 <= self.desired);
                    for member in members {
                        let state = self.slots.iter().find(|state| state.slot == *member);
                        assert_eq!(state.map(|state| &state.pod), Some(&PodState::Ready));
                    }
                    self.members.clone_from(members);
                    self.ranks = Ranks::Running {
                        world: members.len() as u64 * 2,
                        draining: false,
                    };
                }
                RankAction::Drain | RankAction::CancelDrain => {
                    let Ranks::Running { draining, .. } = &mut self.ranks else {
                        panic!("no ranks run that could drain or cancel a drain");
                    };
                    *draining = *action == RankAction::Drain;
                }
                RankAction::End(End::Drained) => self.ranks = Ranks::None { resuming: true },
                RankAction::End(_) | RankAction::Keep | RankAction::Wait { .. } => {}
            }
            self.attempts = decision.attempts;
            self.scale_up_pending_since = decision.scale_up_pending_since;
            self.placement_since = decision.placement_since;
            let state = |slot: &Slot| {
                let known = self.slots.iter().find(|state| state.slot == *slot);
                known.map_or(PodState::Pending, |state| state.pod.clone())
            };
            self.slots = decision
                .slots
                .iter()
                .map(|slot| SlotState {
                    slot: *slot,
                    pod: state(slot),
                })
                .collect();
        }

        fn apply(&mut self, what: &PoolEvent) {
            match what {
                PoolEvent::Pool(slots) => self.pool = *slots,
                PoolEvent::Missing(nodes) => self.missing = *nodes,
                PoolEvent::Pause(seconds) => self.no_pod_before = self.now + seconds,
                PoolEvent::Desired(nodes) => self.desired = *nodes,
                PoolEvent::Suspend(suspend) => self.suspend = *suspend,
                PoolEvent::Waits(waits) => self.waits = *waits,
                PoolEvent::Ready(nth) => self.change_pod(*nth, PodState::Pending, PodState::Ready),
                PoolEvent::Leave(nth) => self.change_pod(*nth, PodState::Ready, PodState::Leaving),
                PoolEvent::Cordon(nth) => {
                    self.change_pod(*nth, PodState::Ready, PodState::Cordoned);
                }
                PoolEvent::Edit => {
                    for nth in 0..self.slots.len() {
                        self.change_pod(nth, PodState::Ready, PodState::Outdated);
                        self.change_pod(nth, PodState::Pending, PodState::Outdated);
                    }
                }
                PoolEvent::Lose(nth) => {
                    if let Some(state) = self.slots.get_mut(*nth) {
                        state.pod = PodState::Lost;
                        let member = self.members.contains(&state.slot);
                        if let (Ranks::Running { world, .. }, true) = (&self.ranks, member) {
                            let outcome = Outcome::Lost {
                                rank: 0,
                                message: "gone".into(),
                            };
                            self.ranks = Ranks::Ended {
                                world: *world,
                                outcome,
                            };
                        }
                    }
                }
                PoolEvent::RanksEnd(how) => self.end_ranks(*how),
                PoolEvent::Time(seconds) => self.now += seconds,
            }
        }

        fn change_pod(&mut self, nth: usize, from: PodState, to: PodState) {
            if let Some(state) = self.slots.get_mut(nth).filter(|state| state.pod == from) {
                state.pod = to;
            }
        }

        /// Ends draining ranks as drained and fails others if `how` is 0.
        fn end_ranks(&mut self, how: u8) {
            let Ranks::Running { world, draining } = self.ranks else {
                return;
            };
            let outcome = match (draining, how) {
                (true, _) => Outcome::Drained,
                (false, 0) => Outcome::Failed {
                    rank: 0,
                    message: "failed".into(),
                    deterministic: false,
                },
                (false, _) => return,
            };
            self.ranks = Ranks::Ended { world, outcome };
        }
    }

    proptest! {
        #[test]
        fn a_job_reaches_the_largest_feasible_world_after_any_history(
            events in prop::collection::vec(events(), 0..80),
            batch in prop::sample::select(vec![8u64, 12, 24, 48, 96]),
        ) {
            let mut simulation = Simulation::new(batch);
            for event in &events {
                simulation.reconcile();
                simulation.apply(event);
            }
            prop_assert!(!simulation.over, "no event in this test ends a job");
            // The pool is stable from here: pods become ready, drains end, time passes.
            (simulation.suspend, simulation.missing) = (false, 0);
            for _ in 0..40 {
                simulation.reconcile();
                for nth in 0..simulation.slots.len() {
                    simulation.change_pod(nth, PodState::Pending, PodState::Ready);
                    if !simulation.members.contains(&simulation.slots[nth].slot) {
                        continue;
                    }
                    // Nodes of the pool remain.
                    simulation.change_pod(nth, PodState::Leaving, PodState::Ready);
                    simulation.change_pod(nth, PodState::Cordoned, PodState::Ready);
                }
                simulation.end_ranks(1);
                simulation.now += SCALE_UP_DELAY;
            }
            let most = simulation.desired.min(simulation.pool).min(5);
            let best = (1..=most).rev().find(|nodes| Simulation::feasible(batch, *nodes));
            match (best, &simulation.ranks) {
                (Some(nodes), Ranks::Running { world: ranks, .. }) => {
                    prop_assert!(*ranks == u64::from(nodes) * 2, "{ranks} ranks, not {nodes} nodes");
                }
                // A running job keeps its world when no other is feasible.
                (None, _) => {}
                (Some(nodes), other) => prop_assert!(false, "{other:?} instead of {nodes} nodes"),
            }
        }
    }

    #[test]
    fn an_edited_job_replaces_its_pods() {
        let mut simulation = settled(3);
        let old = simulation.members.clone();
        simulation.apply(&PoolEvent::Edit);
        simulation.reconcile();
        assert_eq!(simulation.members, old, "the ranks commit first");
        simulation.end_ranks(1);
        for _ in 0..3 {
            simulation.reconcile();
            for nth in 0..simulation.slots.len() {
                simulation.change_pod(nth, PodState::Pending, PodState::Ready);
            }
        }
        assert_eq!(simulation.members.len(), 3);
        assert!(simulation.members.iter().all(|slot| !old.contains(slot)));
    }

    fn settled(pool: u32) -> Simulation {
        let mut simulation = Simulation::new(24);
        simulation.pool = pool;
        for _ in 0..3 {
            simulation.reconcile();
            for nth in 0..simulation.slots.len() {
                simulation.change_pod(nth, PodState::Pending, PodState::Ready);
            }
        }
        simulation
    }

    #[test]
    fn members_on_cordoned_nodes_train_until_other_pods_can_take_their_place() {
        let mut simulation = settled(3);
        simulation.apply(&PoolEvent::Cordon(1));
        let members = simulation.members.clone();
        let left = members[1];
        // Another node is free.
        simulation.reconcile();
        assert_eq!(simulation.slots.len(), 4);
        let runs = |draining| Ranks::Running { world: 6, draining };
        assert_eq!(simulation.ranks, runs(false));
        simulation.change_pod(3, PodState::Pending, PodState::Ready);
        simulation.reconcile();
        assert_eq!(
            (&simulation.members, &simulation.ranks),
            (&members, &runs(true))
        );
        simulation.end_ranks(1);
        simulation.reconcile();
        assert_eq!(
            (simulation.members.len(), &simulation.ranks),
            (3, &runs(false))
        );
        assert!(!simulation.members.contains(&left));
        // No node is free: the others continue without it.
        simulation.apply(&PoolEvent::Cordon(0));
        simulation.pool = 2;
        simulation.reconcile();
        assert_eq!(
            (simulation.slots.len(), &simulation.ranks),
            (3, &runs(true))
        );
    }

    #[test]
    fn a_pod_that_does_not_start_keeps_no_member_on_a_cordoned_node() {
        let mut simulation = settled(3);
        simulation.apply(&PoolEvent::Cordon(1));
        simulation.reconcile();
        simulation.now += PLACEMENT;
        simulation.reconcile();
        let drains = Ranks::Running {
            world: 6,
            draining: true,
        };
        assert_eq!(simulation.ranks, drains);
    }

    #[test]
    fn scale_up_places_pods_while_the_current_world_runs() {
        let mut simulation = settled(2);
        assert_eq!(simulation.members.len(), 2);
        simulation.pool = 3;
        simulation.reconcile();
        assert_eq!(simulation.slots.len(), 2, "not before the delay");
        simulation.now += SCALE_UP_DELAY;
        simulation.reconcile();
        assert_eq!(simulation.slots.len(), 3);
        assert!(matches!(
            simulation.ranks,
            Ranks::Running {
                draining: false,
                ..
            }
        ));
        simulation.change_pod(2, PodState::Pending, PodState::Ready);
        simulation.reconcile();
        assert!(matches!(
            simulation.ranks,
            Ranks::Running { draining: true, .. }
        ));
    }

    #[test]
    fn a_loss_does_not_wait_for_an_autoscaler() {
        let mut simulation = settled(3);
        let before = simulation.members.clone();
        simulation.apply(&PoolEvent::Lose(1));
        simulation.missing = 1;
        simulation.reconcile();
        assert_eq!(simulation.members, [before[0], before[2]], "at once");
        assert_eq!(
            simulation.slots.len(),
            3,
            "the autoscaler sees a pod that waits"
        );
        simulation.reconcile();
        assert_eq!(simulation.slots.len(), 3);
    }

    #[test]
    fn pods_that_ended_early_are_replaced_after_a_pause() {
        let mut simulation = Simulation::new(24);
        simulation.reconcile();
        assert_eq!(simulation.slots.len(), 3);
        (0..3).for_each(|nth| simulation.apply(&PoolEvent::Lose(nth)));
        simulation.no_pod_before = simulation.now + 10.0;
        simulation.reconcile();
        assert_eq!(simulation.slots, []);
        simulation.now += 10.0;
        simulation.reconcile();
        let attempts: Vec<u32> = simulation
            .slots
            .iter()
            .map(|state| state.slot.attempt)
            .collect();
        assert_eq!(attempts, [4, 5, 6]);
    }

    #[test]
    fn survivors_of_a_loss_keep_their_pods() {
        let mut simulation = settled(3);
        let before = simulation.members.clone();
        simulation.apply(&PoolEvent::Lose(1));
        simulation.pool = 2;
        simulation.reconcile();
        assert_eq!(simulation.members, [before[0], before[2]]);
        assert!(matches!(simulation.ranks, Ranks::Running { world: 4, .. }));
    }

    #[test]
    fn a_job_that_does_not_fit_names_the_missing_nodes() {
        let mut simulation = Simulation::new(8);
        simulation.desired = 5;
        simulation.pool = 0;
        let feasible = |nodes| Simulation::feasible(8, nodes);
        let decision = decide_placement(&simulation.input(&feasible));
        let PlacementAction::Ranks(RankAction::Wait { message }) = decision.action else {
            panic!("{decision:?}")
        };
        assert_eq!(
            message,
            "0 of the pool's nodes have 2 GPUs free for this job, which needs 1 or 2 or 4 of them"
        );
    }

    #[test]
    fn a_job_whose_nodes_exist_nowhere_names_the_largest_one() {
        let mut simulation = Simulation::new(8);
        simulation.pool = 0;
        let feasible = |nodes| Simulation::feasible(8, nodes);
        let messages = [0, 1].map(|largest| {
            let input = PlacementInput {
                largest_node: &|| largest,
                ..simulation.input(&feasible)
            };
            match decide_placement(&input).action {
                PlacementAction::Ranks(RankAction::Wait { message }) => message,
                other => panic!("{other:?}"),
            }
        });
        insta::assert_snapshot!(messages.join("\n"), @"
        no node of the pool has 2 GPUs, none of them has any that suits this job: change gpusPerNode in a new job, or add nodes
        no node of the pool has 2 GPUs, the largest has 1: change gpusPerNode in a new job, or add nodes
        ");
    }

    #[test]
    fn late_pods_do_not_delay_a_smaller_ready_world() {
        let mut simulation = Simulation::new(24);
        simulation.reconcile();
        for nth in 0..2 {
            simulation.change_pod(nth, PodState::Pending, PodState::Ready);
        }
        simulation.reconcile();
        assert_eq!(simulation.ranks, Ranks::None { resuming: false });
        simulation.now += PLACEMENT;
        simulation.reconcile();
        assert!(matches!(simulation.ranks, Ranks::Running { world: 4, .. }));
        simulation.reconcile();
        assert_eq!(simulation.slots.len(), 3, "the third may still arrive");
    }

    #[test]
    fn scale_up_uses_the_ready_pods_when_another_is_late() {
        let mut simulation = settled(1);
        simulation.pool = 3;
        simulation.reconcile();
        simulation.now += SCALE_UP_DELAY;
        simulation.reconcile();
        assert_eq!(simulation.slots.len(), 3);
        simulation.change_pod(1, PodState::Pending, PodState::Ready);
        simulation.reconcile();
        assert!(matches!(
            simulation.ranks,
            Ranks::Running {
                draining: false,
                ..
            }
        ));
        simulation.now += PLACEMENT;
        simulation.reconcile();
        assert!(matches!(
            simulation.ranks,
            Ranks::Running { draining: true, .. }
        ));
    }
}
