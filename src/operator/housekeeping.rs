//! Periodic work for all jobs together, once a second, beside their reconciliations.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::Api;

use super::context::Context;
use crate::util::lock::lock;

/// Interval between two rounds.
const ROUND: Duration = Duration::from_secs(1);

/// Runs until the controller ends.
pub async fn keep(context: Arc<Context>) {
    loop {
        tokio::time::sleep(ROUND).await;
        context.forget_deleted();
        read_leases(&context).await;
    }
}

/// Reads the Leases of suspected nodes and of nodes with silent pods. The suspicion of a node ends
/// when its kubelet renews the Lease.
async fn read_leases(context: &Context) {
    let mut nodes = lock(&context.suspects).nodes();
    nodes.extend(context.leases.wanted());
    let leases: Api<Lease> = Api::namespaced(context.client.clone(), "kube-node-lease");
    for node in nodes {
        // Without an answer the suspicion lasts until it expires.
        let Ok(Some(lease)) = leases.get_opt(&node).await else {
            continue;
        };
        let renewed = lease.spec.and_then(|spec| spec.renew_time);
        let renewed = renewed.map(|at| SystemTime::from(at.0));
        context.leases.read(&node, renewed);
        if let Some(renewed) = renewed {
            lock(&context.suspects).renewed(&node, renewed);
        }
    }
}
