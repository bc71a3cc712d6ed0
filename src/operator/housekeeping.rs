//! What is done beside the looks at jobs, once a second, for all of them together.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;

use super::context::Context;
use super::locked::locked;

/// Between two rounds.
const ROUND: Duration = Duration::from_secs(1);

/// Goes round until the controller ends.
pub async fn keep(context: Arc<Context>) {
    loop {
        tokio::time::sleep(ROUND).await;
        context.forget_deleted();
        look_at_leases(&context).await;
    }
}

/// Reads the Leases of nodes that are suspected, or whose pods fell silent. A suspected one whose kubelet
/// has renewed its Lease since is trusted again.
async fn look_at_leases(context: &Context) {
    let suspects: BTreeMap<String, SystemTime> =
        locked(&context.ledger).suspects().into_iter().collect();
    let silent = context.leases.wanted();
    let nodes: BTreeSet<&String> = suspects.keys().chain(&silent).collect();
    let leases: Api<Lease> = Api::namespaced(context.client.clone(), "kube-node-lease");
    for node in nodes {
        // Without an answer the suspicion stays until it is old.
        let Ok(Some(lease)) = leases.get_opt(node).await else {
            continue;
        };
        let renewed = lease.spec.and_then(|spec| spec.renew_time);
        let renewed = renewed.map(|at| SystemTime::from(at.0));
        context.leases.read(node, renewed);
        if suspects
            .get(node)
            .is_some_and(|since| renewed > Some(*since))
        {
            locked(&context.ledger).trust(node);
        }
    }
}
