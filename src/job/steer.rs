//! What a job on a cluster does next. [`decide`] moves ranks from one generation to the next; here
//! is what a cluster adds to it: seats, which pods fill, and waiting for them.
//!
//! Pure, and level-triggered: it looks at the pool, the seats and the ranks as they are, so that a
//! controller that was killed at any point goes on from what stands in the status.

use std::ops::RangeInclusive;

use super::api::status::Seat;
use super::decide::{Action, End, Observed, Ranks, decide};
use super::generation::Reason;

/// How things are.
pub struct View<'a> {
    /// Nodes that somebody asks for.
    pub desired: u32,
    /// Nodes that the job allows itself.
    pub bounds: RangeInclusive<u32>,
    /// Ranks on a node.
    pub ranks_per_node: u64,
    /// Whether a plan without errors exists for so many nodes.
    pub feasible: &'a dyn Fn(u32) -> bool,
    /// Seats that pods are made for; those it has count where they can stay.
    pub pool: u32,
    /// Those of them that the nodes have room for now: an autoscaler may bring the others.
    pub placeable: u32,
    /// The seats it has.
    pub seats: &'a [SeatSeen],
    /// Seats of the newest generation, in the order of its members.
    pub members: &'a [Seat],
    /// The newest generation's ranks.
    pub ranks: Ranks,
    /// Somebody wants it to stop for now.
    pub suspend: bool,
    /// Failures of the program that are still forgiven.
    pub restarts_left: u64,
    /// What keeps the ranks from starting in any world, if something does.
    pub problem: Option<String>,
    /// Pods' names used so far.
    pub attempts: u32,
    /// Since when a larger world has been possible.
    pub larger_since: Option<f64>,
    /// Since when pods are being placed.
    pub placing_since: Option<f64>,
    /// A larger world must have been possible for so long, seconds.
    pub grow_delay: f64,
    /// Pods may take so long, seconds; then those that are ready go on.
    pub placement: f64,
    /// Nothing is published before, seconds since the Unix epoch.
    pub not_before: f64,
    /// No new pod is made before, seconds since the Unix epoch.
    pub no_pod_before: f64,
    /// Seconds since the Unix epoch.
    pub now: f64,
}

/// A seat and the pod that fills it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeatSeen {
    /// Which.
    pub seat: Seat,
    /// How its pod does.
    pub pod: PodSeen,
}

/// How a pod does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PodSeen {
    /// Not there yet, not scheduled, or its agent does not answer yet.
    Coming,
    /// Its agent answers, and has the GPUs that the plan counts on.
    Ready,
    /// It runs, but will not for long: its node is cordoned or tainted, or it is being deleted.
    Leaving,
    /// Its place is good, but it was made before the job's image or `podTemplate` was edited.
    Outdated,
    /// Gone, failed, or cut off.
    Lost,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// The pods that should exist; all others of the job are to be deleted.
    pub seats: Vec<Seat>,
    /// Pods' names used so far.
    pub attempts: u32,
    /// Since when a larger world has been possible.
    pub larger_since: Option<f64>,
    /// Since when pods are being placed.
    pub placing_since: Option<f64>,
    /// What to do with the ranks.
    pub act: Act,
}

/// What to do with the ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Act {
    /// Nothing.
    Stay,
    /// Pods are being placed.
    Place,
    /// Tell the ranks to commit and leave.
    Drain,
    /// The reason to drain is gone: tell them to stay.
    Recall,
    /// Publish the next generation.
    Publish {
        /// Its members.
        members: Vec<Seat>,
        /// Why.
        reason: Reason,
        /// The micro-batch must not be above this any more.
        micro_limit: Option<u64>,
    },
    /// No feasible world fits: wait, with no pods.
    Wait {
        /// What is missing.
        why: String,
    },
    /// Suspended: no pods.
    Suspend,
    /// It is over.
    End(End),
}

impl Act {
    /// In one word.
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

/// Decides.
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

    fn pod(&self, seat: Seat) -> &PodSeen {
        let seen = self.seats.iter().find(|s| s.seat == seat);
        seen.map_or(&PodSeen::Lost, |s| &s.pod)
    }

    fn is_ready(&self, seat: Seat) -> bool {
        *self.pod(seat) == PodSeen::Ready
    }

    /// What the ranks should do when `ready` nodes can be counted on.
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

    /// A generation runs: its pods stay until it has ended, whatever became of them. A larger world
    /// is placed beside it first, so that it trains on meanwhile.
    fn running(&self) -> Decision {
        let members = self.members.to_vec();
        let now = u32::try_from(members.len()).unwrap_or(u32::MAX);
        let more = self
            .nodes(self.pool)
            .filter(|target| *target > now && !self.suspend)
            .map(|target| target - now);
        let larger_since = more.map(|_| self.larger_since.unwrap_or(self.now));
        let due = larger_since.is_some_and(|since| self.now - since >= self.grow_delay);
        let mut attempts = self.attempts;
        let mut seats = members.clone();
        if let Some(more) = more {
            // Pods that are on their way may arrive; new ones are worth it only after the delay.
            self.keep(&mut seats, now + more);
            if due && self.now >= self.no_pod_before {
                self.add(&mut seats, now + more, &mut attempts);
            }
        }
        let extra: Vec<Seat> = seats
            .iter()
            .copied()
            .filter(|s| !members.contains(s))
            .collect();
        let staying = members.iter().filter(|seat| self.is_ready(**seat)).count();
        let arrived = extra.iter().filter(|seat| self.is_ready(**seat)).count();
        // One that does not come holds up the others no longer than when a world is placed anew.
        let late =
            larger_since.is_some_and(|since| self.now - since >= self.grow_delay + self.placement);
        let ready = staying
            + match arrived == extra.len() || late {
                true => arrived,
                false => 0,
            };
        // Pods that run may hold more than the pool still offers: fewer devices are advertised.
        let ready = u32::try_from(ready).unwrap_or(u32::MAX).min(self.placeable);
        // An edit is taken up at once: new pods are made in the old ones' places.
        let outdated = members
            .iter()
            .any(|seat| *self.pod(*seat) == PodSeen::Outdated);
        let act = match self.decide(ready) {
            _ if outdated => Act::Drain,
            Action::Drain => Act::Drain,
            Action::Stay => Act::Recall,
            _ => Act::Stay,
        };
        Decision {
            attempts,
            larger_since,
            placing_since: None,
            act,
            seats,
        }
    }

    /// No generation runs: give back what the next one does not need, fill what it does, and
    /// publish it once it is there.
    fn between(&self) -> Decision {
        // What ends the job ends it whatever the pool looks like.
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
        let mut seats = Vec::new();
        self.keep(&mut seats, target);
        if self.now >= self.no_pod_before {
            self.add(&mut seats, target, &mut attempts);
        }
        let ready: Vec<Seat> = seats
            .iter()
            .copied()
            .filter(|s| self.is_ready(*s))
            .collect();
        let placing_since = self.placing_since.unwrap_or(self.now);
        // Nobody waits for nodes that are not there yet: the job grows when they are.
        let soon = self.nodes(self.placeable).unwrap_or(target);
        let all = ready.len() >= soon as usize;
        let late = self.now - placing_since >= self.placement;
        let mut decision = Decision {
            seats,
            attempts,
            larger_since: None,
            placing_since: Some(placing_since),
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
            let members: Vec<Seat> = ready.into_iter().take(nodes).collect();
            decision.placing_since = None;
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
            seats: Vec::new(),
            attempts: self.attempts,
            larger_since: None,
            placing_since: None,
            act,
        }
    }

    /// What is missing for any world.
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

    /// Brings `seats` up to `target` with pods that are there: first those that are ready, then
    /// those that are coming.
    fn keep(&self, seats: &mut Vec<Seat>, target: u32) {
        let target = usize::try_from(target).unwrap_or(usize::MAX);
        for wanted in [PodSeen::Ready, PodSeen::Coming] {
            let more = self.seats.iter().filter(|seen| seen.pod == wanted);
            let more: Vec<Seat> = more
                .map(|seen| seen.seat)
                .filter(|s| !seats.contains(s))
                .collect();
            seats.extend(more.into_iter().take(target.saturating_sub(seats.len())));
        }
        seats.sort_by_key(|seat| seat.number);
    }

    /// Brings `seats` up to `target` with new pods, whose names no pod had before.
    fn add(&self, seats: &mut Vec<Seat>, target: u32, attempts: &mut u32) {
        let target = usize::try_from(target).unwrap_or(usize::MAX);
        while seats.len() < target {
            let taken = |number: &u32| {
                let held = self.seats.iter().filter(|seen| seen.pod != PodSeen::Lost);
                seats
                    .iter()
                    .chain(held.map(|seen| &seen.seat))
                    .any(|s| s.number == *number)
            };
            let number = (0..).find(|number| !taken(number)).unwrap_or(0);
            *attempts += 1;
            seats.push(Seat {
                number,
                attempt: *attempts,
            });
        }
        seats.sort_by_key(|seat| seat.number);
    }
}

#[cfg(test)]
mod tests;
