//! Decides which slots a job has, from what was observed and what fits into the pool.

use std::collections::BTreeSet;
use std::time::Instant;

use kube::ResourceExt;

use super::context::Reconciliation;
use super::observe::ClusterState;
use super::planning::{Planning, Unplanned, World};
use super::reservations::Pool;
use super::status;
use crate::api::Capacity;
use crate::api::condition::ConditionReason;
use crate::api::status::{Slot, TrainingJobStatus};
use crate::inventory::kubernetes::largest_node;
use crate::lifecycle::placement::{
    Placement, PlacementAction, PlacementInput, PodState, SlotState, decide_placement,
};
use crate::lifecycle::{RankAction, Ranks};
use crate::util::lock::lock;
use crate::util::time::seconds;

/// A decision about a job, with all that the next status needs of the plans.
pub struct Decision {
    pub placement: Placement,
    /// The world that the placement publishes, if it has a plan.
    pub world: Option<World>,
    /// Number of slots that fit on the present nodes.
    pub placeable: u32,
    pub planned: Planning,
}

impl Reconciliation<'_> {
    /// Decides on the slots, and plans the world that they publish. `feasible`: the feasible numbers of nodes,
    /// ascending.
    pub fn decide(
        &self,
        status: &TrainingJobStatus,
        cluster: &ClusterState,
        planned: Planning,
        feasible: &[u32],
    ) -> Result<Decision, Unplanned> {
        let (placement, placeable) = self.place(status, cluster, &planned, feasible);
        Ok(match self.world(status, &placement, &planned) {
            Ok(world) => Decision {
                placement,
                world,
                placeable,
                planned,
            },
            Err(unplanned) => Decision {
                placement: drain_only(placement, status),
                world: None,
                placeable,
                planned: self.without_plan(status, planned, unplanned)?,
            },
        })
    }

    /// Decides on the slots. Also returns the number of slots that fit on the present nodes.
    ///
    /// Holds the lock of the reservations, so that the devices of this job are reserved before the next job decides.
    fn place(
        &self,
        status: &TrainingJobStatus,
        cluster: &ClusterState,
        planned: &Planning,
        feasible: &[u32],
    ) -> (Placement, u32) {
        let Reconciliation { job, context, now } = *self;
        let name = job.name_any();
        let members = status::members(status, &name);
        let namespace = job.namespace().unwrap_or_default();
        let excluded: BTreeSet<String> = status.excluded_nodes.iter().cloned().collect();
        let leases = &context.leases;
        leases.suspect(&namespace, &cluster.suspects);
        let lost = cluster.suspects.union(&excluded).cloned().collect();
        // What the merged podTemplate asks for; until the job is planned, what the spec does.
        let request = self.reserved_request();
        let request = request.as_ref().unwrap_or(&cluster.resource_request);
        let mut reservations = lock(&context.reservations);
        let pod_index = context.stores.pod_index();
        let pool_nodes = context.stores.nodes.state();
        let pool = Pool {
            nodes: &pool_nodes,
            pod_index: &pod_index,
            lost: &lost,
            avoid: &|node| leases.is_suspected(&namespace, node) || excluded.contains(node),
        };
        let started = Instant::now();
        let free = reservations.slots(&pool, job, request, started);
        let placeable = free + cluster.staying;
        let pool = if planned.is_unbuildable {
            let stays = |state: &&SlotState| {
                matches!(state.pod, PodState::Ready | PodState::Pending)
                    && cluster.pods.contains_key(&state.slot.pod(&name))
            };
            u32::try_from(cluster.slots.iter().filter(stays).count()).unwrap_or(u32::MAX)
        } else {
            match job.spec.elasticity.capacity {
                Capacity::Request => job.spec.nodes,
                Capacity::Discovered => placeable,
            }
        };
        let restarts = status.restarts.saturating_sub(1);
        let failures = status.pod_failures.as_ref();
        let problem = cluster.problem.as_ref().filter(|p| p.deterministic);
        let placement = decide_placement(&PlacementInput {
            desired: job.spec.nodes,
            bounds: self.bounds(),
            ranks_per_node: job.spec.gpus_per_node.into(),
            feasible: &|nodes| nodes <= job.spec.nodes && feasible.binary_search(&nodes).is_ok(),
            pool,
            placeable,
            largest_node: &|| largest_node(pool_nodes.iter().map(AsRef::as_ref), request),
            slots: &cluster.slots,
            members: &members,
            ranks: status::ranks(status),
            waits: Reconciliation::waits(status, cluster),
            suspend: job.spec.suspend,
            overdue: self.overdue(status).map(|overdue| overdue.message),
            restarts_left: job.spec.budgets.restarts.saturating_sub(restarts).into(),
            problem: problem.map(|problem| problem.message.clone()),
            attempts: status.attempts,
            scale_up_pending_since: status.scale_up_pending_since.as_ref().map(seconds),
            placement_since: status.placement_since.as_ref().map(seconds),
            scale_up_delay: f64::from(job.spec.elasticity.scale_up_delay_seconds),
            placement: f64::from(job.spec.elasticity.placement_seconds),
            not_before: status.restart_not_before.as_ref().map_or(0.0, seconds),
            no_pod_before: failures.map_or(0.0, |f| seconds(&f.retry_not_before)),
            now,
        });
        let placement = match planned.waits {
            Some(_) => drain_only(placement, status),
            None => placement,
        };
        let waits = matches!(
            placement.action,
            PlacementAction::Ranks(RankAction::Wait { .. })
        );
        let placement = match &planned.verdict {
            // No pool would suffice.
            Some(Err(refusal)) if planned.is_unbuildable && waits => {
                let message = refusal.message.clone();
                Placement {
                    action: PlacementAction::Ranks(RankAction::Wait { message }),
                    ..placement
                }
            }
            _ => placement,
        };
        let pods = placement.slots.iter().map(|slot: &Slot| slot.pod(&name));
        // The API server refuses new pods, so only existing ones may get a node. A new leader knows it from the status.
        let refuses = ConditionReason::Refused.name();
        let refused = context.state(job, |state| state.blocked.is_some())
            || status.conditions.iter().any(|c| c.reason == refuses);
        let exists = |pod: &String| cluster.pods.contains_key(pod);
        // The pod of a member is never created again.
        let gone: BTreeSet<String> = members.iter().map(|slot| slot.pod(&name)).collect();
        let reserved = pods.filter(|pod| exists(pod) || !(refused || gone.contains(pod)));
        reservations.reserve(job, request, reserved.collect(), &pod_index, started);
        (placement, placeable)
    }
}

/// The decision for a job that waits for its turn to plan: slots and pods remain, and running ranks may be drained.
/// A drain is not cancelled, since its reason may be an edit that is not planned yet.
fn drain_only(placement: Placement, status: &TrainingJobStatus) -> Placement {
    let runs = matches!(status::ranks(status), Ranks::Running { .. });
    Placement {
        slots: status.slots.clone(),
        attempts: status.attempts,
        scale_up_pending_since: status.scale_up_pending_since.as_ref().map(seconds),
        placement_since: status.placement_since.as_ref().map(seconds),
        action: PlacementAction::Ranks(match placement.action {
            PlacementAction::Ranks(RankAction::Drain) if runs => RankAction::Drain,
            _ => RankAction::Keep,
        }),
    }
}
