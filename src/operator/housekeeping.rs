//! What is done beside the looks at jobs, once a second, for all of them together.

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
        trust_again(&context).await;
        read_leases(&context).await;
    }
}

/// Reads the Leases of nodes whose pods fell silent.
async fn read_leases(context: &Context) {
    let leases: Api<Lease> = Api::namespaced(context.client.clone(), "kube-node-lease");
    for node in context.leases.wanted() {
        let Ok(Some(lease)) = leases.get_opt(&node).await else {
            continue;
        };
        let renewed = lease.spec.and_then(|spec| spec.renew_time);
        let renewed = renewed.map_or_else(String::new, |at| at.0.to_string());
        context.leases.read(&node, renewed);
    }
}

/// A suspected node whose kubelet has renewed its Lease since is trusted again.
async fn trust_again(context: &Context) {
    let suspects = locked(&context.ledger).suspects();
    let leases: Api<Lease> = Api::namespaced(context.client.clone(), "kube-node-lease");
    for (node, since) in suspects {
        // Without an answer the suspicion stays until it is old.
        let Ok(Some(lease)) = leases.get_opt(&node).await else {
            continue;
        };
        let renewed = lease.spec.and_then(|spec| spec.renew_time);
        if renewed.is_some_and(|at| SystemTime::from(at.0) > since) {
            locked(&context.ledger).trust(&node);
        }
    }
}
