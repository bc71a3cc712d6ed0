//! Placement of a job on a cluster. [`decide`] moves ranks from one generation to the next; this
//! module adds what a cluster needs: slots, the pods that fill them, and waiting for these pods.
//!
//! It is pure and level-triggered: it depends on the current pool, slots and ranks, so a controller
//! that was killed at any point continues from the status.

use std::ops::RangeInclusive;

use super::api::status::Slot;
use super::decide::{Action, End, Observed, Ranks, decide};
use super::generation::Reason;

/// Input of a placement decision: the pool, the slots and the ranks.
pub struct View<'a> {
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
    /// Existing slots, each with the state of its pod.
    pub slots: &'a [SlotSeen],
    /// Slots of the newest generation, in the order of its members.
    pub members: &'a [Slot],
    /// Ranks of the newest generation.
    pub ranks: Ranks,
    /// `spec.suspend`.
    pub suspend: bool,
    /// Remaining restarts after failures of the program.
    pub restarts_left: u64,
    /// A problem that keeps ranks from starting in any world.
    pub problem: Option<String>,
    /// Pod attempts used so far.
    pub attempts: u32,
    /// Start of the period in which a larger world is possible, seconds since the Unix epoch.
    pub scale_up_pending_since: Option<f64>,
    /// Start of the current placement of pods, seconds since the Unix epoch.
    pub placement_since: Option<f64>,
    /// Seconds for which a larger world must be possible before a scale up.
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
pub struct SlotSeen {
    pub slot: Slot,
    pub pod: PodSeen,
}

/// State of a slot's pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodSeen {
    /// Not created, not scheduled, or its agent does not answer yet.
    Coming,
    /// Its agent answers and has the GPUs that the plan needs.
    Ready,
    /// It runs and will end soon: its node is cordoned or tainted, or it is being deleted.
    Leaving,
    /// It was created before an edit of the job's image or `podTemplate`.
    Outdated,
    /// Deleted, failed, or unreachable.
    Lost,
}

/// Result of a placement decision.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Slots whose pods should exist; all other pods of the job are deleted.
    pub slots: Vec<Slot>,
    /// Pod attempts used so far.
    pub attempts: u32,
    /// Start of the period in which a larger world is possible, seconds since the Unix epoch.
    pub scale_up_pending_since: Option<f64>,
    /// Start of the current placement of pods, seconds since the Unix epoch.
    pub placement_since: Option<f64>,
    pub act: Act,
}

/// Next action for the job's ranks and pods.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    /// The ranks continue unchanged.
    Stay,
    /// Wait for pods that are being placed.
    Place,
    /// Order the ranks to commit and exit.
    Drain,
    /// Cancel the drain because its reason is gone.
    Recall,
    /// Publish the next generation.
    Publish {
        /// Its members, in the order of their ranks.
        members: Vec<Slot>,
        reason: Reason,
        /// Upper limit of the micro-batch after an out-of-memory error.
        micro_limit: Option<u64>,
    },
    /// No feasible world fits: wait without pods.
    Wait {
        /// Names the missing resources.
        why: String,
    },
    /// Suspended: delete all pods.
    Suspend,
    End(End),
}

impl Act {
    /// Name in fault points and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Act::Stay => "stay",
            Act::Place => "place",
            Act::Drain => "drain",
            Act::Recall => "recall",
            Act::Publish { .. } => "publish",
            Act::Wait { .. } => "wait",
            Act::Suspend => "suspend",
            Act::End(_) => "end",
        }
    }
}

/// Next placement for the observed state.
pub fn steer(view: &View<'_>) -> Decision {
    if let Some(why) = &view.problem {
        return view.without_pods(Act::End(End::Failed { why: why.clone() }));
    }
    match &view.ranks {
        Ranks::Running { .. } => view.running(),
        Ranks::None { .. } | Ranks::Ended { .. } => view.between(),
    }
}

impl View<'_> {
    /// The largest feasible number of nodes up to `most`.
    fn nodes(&self, most: u32) -> Option<u32> {
        let most = most.min(self.desired).min(*self.bounds.end());
        (*self.bounds.start()..=most)
            .rev()
            .find(|&nodes| (self.feasible)(nodes))
    }

    fn pod(&self, slot: Slot) -> &PodSeen {
        let seen = self.slots.iter().find(|s| s.slot == slot);
        seen.map_or(&PodSeen::Lost, |s| &s.pod)
    }

    fn is_ready(&self, slot: Slot) -> bool {
        *self.pod(slot) == PodSeen::Ready
    }

    /// The ranks' action if `ready` nodes are usable.
    fn decide(&self, ready: u32) -> Action {
        let ranks = |nodes: u32| u64::from(nodes) * self.ranks_per_node;
        let whole = |world: u64| {
            world.is_multiple_of(self.ranks_per_node)
                && u32::try_from(world / self.ranks_per_node).is_ok_and(|n| (self.feasible)(n))
        };
        decide(&Observed {
            desired: ranks(self.desired),
            capacity: ranks(ready),
            bounds: ranks(*self.bounds.start())..=ranks(*self.bounds.end()),
            feasible: &whole,
            stop: self.suspend,
            restarts_left: self.restarts_left,
            ranks: self.ranks.clone(),
        })
    }

    /// Decides while a generation runs. It keeps its pods until it has ended, in whatever state they
    /// are. Pods of a larger world are placed first, while the current world trains.
    fn running(&self) -> Decision {
        let members = self.members.to_vec();
        let now = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let more = self
            .nodes(self.pool)
            .filter(|target| *target > now && !self.suspend)
            .map(|target| target - now);
        let scale_up_pending_since = more.map(|_| self.scale_up_pending_since.unwrap_or(self.now));
        let due =
            scale_up_pending_since.is_some_and(|since| self.now - since >= self.scale_up_delay);
        let mut attempts = self.attempts;
        let mut slots = members.clone();
        if let Some(more) = more {
            // Pods under way may still become ready; new ones are made only after the delay.
            self.keep(&mut slots, now + more);
            if due && self.now >= self.no_pod_before {
                self.add(&mut slots, now + more, &mut attempts);
            }
        }
        let extra: Vec<Slot> = slots
            .iter()
            .copied()
            .filter(|s| !members.contains(s))
            .collect();
        let staying = members.iter().filter(|slot| self.is_ready(**slot)).count();
        let arrived = extra.iter().filter(|slot| self.is_ready(**slot)).count();
        // A missing pod delays the others no longer than in the placement of a first world.
        let late = scale_up_pending_since
            .is_some_and(|since| self.now - since >= self.scale_up_delay + self.placement);
        let ready = staying
            + match arrived == extra.len() || late {
                true => arrived,
                false => 0,
            };
        // Running pods may hold more devices than the nodes still advertise.
        let ready = u32::try_from(ready).unwrap_or(u32::MAX).min(self.placeable);
        // An edit takes effect at once: new pods replace the outdated ones.
        let outdated = members
            .iter()
            .any(|slot| *self.pod(*slot) == PodSeen::Outdated);
        let act = match self.decide(ready) {
            _ if outdated => Act::Drain,
            Action::Drain => Act::Drain,
            Action::Stay => Act::Recall,
            _ => Act::Stay,
        };
        Decision {
            attempts,
            scale_up_pending_since,
            placement_since: None,
            act,
            slots,
        }
    }

    /// Decides while no generation runs: release slots that the next one does not need, fill the
    /// others, and publish the generation once their pods are ready.
    fn between(&self) -> Decision {
        // The end of a job does not depend on the pool.
        match self.decide(u32::MAX) {
            Action::End(End::Drained) => return self.without_pods(Act::Suspend),
            Action::End(end) => return self.without_pods(Act::End(end)),
            _ => {}
        }
        let Some(target) = self.nodes(self.pool) else {
            return self.without_pods(Act::Wait {
                why: self.nowhere(),
            });
        };
        let mut attempts = self.attempts;
        let mut slots = Vec::new();
        self.keep(&mut slots, target);
        if self.now >= self.no_pod_before {
            self.add(&mut slots, target, &mut attempts);
        }
        let ready: Vec<Slot> = slots
            .iter()
            .copied()
            .filter(|s| self.is_ready(*s))
            .collect();
        let placement_since = self.placement_since.unwrap_or(self.now);
        // The job does not wait for future nodes; it scales up when they exist.
        let soon = self.nodes(self.placeable).unwrap_or(target);
        let all = ready.len() >= soon as usize;
        let late = self.now - placement_since >= self.placement;
        let mut decision = Decision {
            slots,
            attempts,
            scale_up_pending_since: None,
            placement_since: Some(placement_since),
            act: Act::Place,
        };
        if !(all || late) || self.now < self.not_before {
            return decision;
        }
        if let Action::Start {
            world,
            reason,
            micro_limit,
        } = self.decide(u32::try_from(ready.len()).unwrap_or(u32::MAX))
        {
            let nodes = usize::try_from(world / self.ranks_per_node).unwrap_or(usize::MAX);
            let members: Vec<Slot> = ready.into_iter().take(nodes).collect();
            decision.placement_since = None;
            decision.act = Act::Publish {
                members,
                reason,
                micro_limit,
            };
        }
        decision
    }

    fn without_pods(&self, act: Act) -> Decision {
        Decision {
            slots: Vec::new(),
            attempts: self.attempts,
            scale_up_pending_since: None,
            placement_since: None,
            act,
        }
    }

    /// Message that names the missing resources.
    fn nowhere(&self) -> String {
        let most = self.desired.min(*self.bounds.end());
        let would: Vec<String> = (*self.bounds.start()..=most)
            .filter(|nodes| (self.feasible)(*nodes))
            .map(|nodes| nodes.to_string())
            .collect();
        let gpus = self.ranks_per_node;
        match would.is_empty() {
            true => format!(
                "no number of nodes from {} to {most}, with {gpus} GPUs each, splits the global batch: \
                 change nodes, gpusPerNode or elasticity.remainder",
                self.bounds.start(),
            ),
            false => format!(
                "{} of the pool's nodes have {gpus} GPUs free for this job, which needs {} of them",
                self.pool,
                would.join(" or "),
            ),
        }
    }

    /// Fills the slots up to `target` with existing pods: ready ones first, then those under way.
    fn keep(&self, slots: &mut Vec<Slot>, target: u32) {
        let target = usize::try_from(target).unwrap_or(usize::MAX);
        for wanted in [PodSeen::Ready, PodSeen::Coming] {
            let more = self.slots.iter().filter(|seen| seen.pod == wanted);
            let more: Vec<Slot> = more
                .map(|seen| seen.slot)
                .filter(|s| !slots.contains(s))
                .collect();
            slots.extend(more.into_iter().take(target.saturating_sub(slots.len())));
        }
        slots.sort_by_key(|slot| slot.number);
    }

    /// Fills the slots up to `target` with new pods; each gets a name that no earlier pod had.
    fn add(&self, slots: &mut Vec<Slot>, target: u32, attempts: &mut u32) {
        let target = usize::try_from(target).unwrap_or(usize::MAX);
        while slots.len() < target {
            let taken = |number: &u32| {
                let held = self.slots.iter().filter(|seen| seen.pod != PodSeen::Lost);
                slots
                    .iter()
                    .chain(held.map(|seen| &seen.slot))
                    .any(|s| s.number == *number)
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
mod tests;
