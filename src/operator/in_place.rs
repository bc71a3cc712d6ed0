//! Ranks continue in the next generation with their processes, where they hold the whole state and wait. Otherwise they
//! commit it, and new processes start.

use kube::ResourceExt;

use super::context::Reconciliation;
use super::observe::ClusterState;
use super::recipes::reached;
use super::status::members;
use crate::api::status::{Current, Slot, TrainingJobStatus};
use crate::lifecycle::generation::{Carried, Member};
use crate::lifecycle::in_place::{self, Terms};
use crate::lifecycle::placement::{Placement, PlacementAction, PodState};
use crate::lifecycle::rank_status::{self, RankStatus, Stage};
use crate::lifecycle::{Outcome, RankAction};
use crate::recipe::schema::spec::Strategy;

impl Reconciliation<'_> {
    /// The status as if the ranks that wait had left. `None`: no rank can continue, or some are still part of the world.
    pub fn left(
        &self,
        status: &TrainingJobStatus,
        cluster: &ClusterState,
    ) -> Option<TrainingJobStatus> {
        let current = self.continuable(status, cluster)?;
        let wait =
            current.after_loss.is_none() && !rank_status::carriers(&cluster.ranks).is_empty();
        let left = cluster.ranks.iter().map(RankStatus::as_left);
        let left: Vec<RankStatus> = left.collect::<Option<_>>().filter(|_| wait)?;
        let left = self.with_outcome(status.clone(), cluster, &left, |_, _| None);
        let outcome = left.generation.as_ref()?.outcome.as_ref()?;
        matches!(outcome, Outcome::Lost { .. } | Outcome::Drained).then_some(left)
    }

    /// Whether ranks wait although the generation counts as ended ([`Reconciliation::left`]).
    pub fn waits(status: &TrainingJobStatus, cluster: &ClusterState) -> bool {
        let current = status.generation.as_ref();
        let has_ended = current.is_some_and(|current| current.outcome.is_some());
        has_ended && !rank_status::carriers(&cluster.ranks).is_empty()
    }

    /// Whether the ranks, which are to leave their world, wait in place of a commit.
    pub fn pauses(&self, status: &TrainingJobStatus, cluster: &ClusterState) -> bool {
        let stops = self.job.spec.suspend || self.overdue(status).is_some();
        let is_ready = |rank: &RankStatus| rank.stage == Stage::Ready;
        let is_replaced = |slot: &Slot| {
            let mut slots = cluster.slots.iter();
            slots.any(|state| state.slot == *slot && state.pod == PodState::Outdated)
        };
        let members = members(status, &self.job.name_any());
        let is_whole = |current: &&Current| current.record.plan.facts.strategy == Strategy::Ddp;
        let can = self.continuable(status, cluster).filter(is_whole).is_some();
        can && !stops && cluster.ranks.iter().all(is_ready) && !members.iter().any(is_replaced)
    }

    /// The generation, if its agents know how ranks continue.
    fn continuable<'s>(
        &self,
        status: &'s TrainingJobStatus,
        cluster: &ClusterState,
    ) -> Option<&'s Current> {
        let current = status
            .generation
            .as_ref()
            .filter(|it| it.outcome.is_none())?;
        let is_built_in = status.command(&self.job.spec).is_empty();
        let agents = cluster.states_of(Some(current.record.number));
        let can = agents.into_iter().all(|agent| agent.continues);
        (is_built_in && can).then_some(current)
    }

    /// Whether a placement lets ranks that wait continue.
    pub fn continues(
        &self,
        left: &TrainingJobStatus,
        placement: &Placement,
        cluster: &ClusterState,
    ) -> bool {
        let PlacementAction::Ranks(RankAction::Publish {
            world,
            per_device_batch_size_limit: None,
            ..
        }) = &placement.action
        else {
            return false;
        };
        let members = self.members_in(world, cluster);
        members.is_some_and(|members| self.continued(left, cluster, &members).is_some())
    }

    /// The members of the next generation with the processes that continue in it. `status`: that of the generation before.
    pub fn continued(
        &self,
        status: &TrainingJobStatus,
        cluster: &ClusterState,
        members: &[Member],
    ) -> Option<(Vec<Member>, Carried)> {
        let before = &status.generation.as_ref()?.record;
        let terms = Terms {
            committed: status.checkpoint.as_ref().map_or(0, |it| it.samples),
            batch: reached(status).batch,
            apart: self.job.spec.checkpoint.bucket().is_some(),
        };
        let agent = |member: &Member| cluster.agent(&member.pod.as_ref()?.name);
        let know = members
            .iter()
            .all(|it| agent(it).is_some_and(|agent| agent.continues));
        in_place::continued(before, &cluster.ranks, members.to_vec(), &terms).filter(|_| know)
    }
}
