//! One controller at a time: a Lease in the controller's namespace, held by one replica.

use std::future::Future;

use kube::Client;
use kube_lease_manager::LeaseManagerBuilder;
use tracing::{info, warn};

/// The Lease's name.
const LEASE: &str = "evenkeel-controller";
/// A replica that has not renewed for so long is no leader any more, seconds.
const DURATION: u64 = 15;
/// It renews so long before that, seconds.
const GRACE: u64 = 10;

/// Waits to be the leader, then runs `work` until it ends or the Lease is lost. What the work was
/// doing when the Lease is lost is dropped: its writes would be refused, since the next leader has
/// written the same objects meanwhile.
pub async fn lead<F>(client: Client, namespace: &str, identity: &str, work: F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    let manager = LeaseManagerBuilder::new(client, LEASE)
        .with_namespace(namespace)
        .with_identity(identity)
        .with_duration(DURATION)
        .with_grace(GRACE)
        .build()
        .await?;
    let (mut leads, _renewing) = manager.watch().await;
    info!(lease = LEASE, namespace, identity, "waiting to lead");
    leads.wait_for(|leads| *leads).await?;
    info!(identity, "leading");
    tokio::select! {
        ended = work => ended,
        lost = leads.wait_for(|leads| !*leads) => {
            warn!(identity, "the lease is lost: leaving");
            lost.map(|_| ()).map_err(anyhow::Error::from)
        }
    }
}
