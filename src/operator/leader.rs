//! One controller at a time: a Lease in the controller's namespace, held by one replica.

use std::future::Future;

use kube::Client;
use kube_lease_manager::LeaseManagerBuilder;
use tokio::sync::watch::Receiver;
use tracing::{info, warn};

/// Name of the Lease.
const LEASE: &str = "evenkeel-controller";
/// Seconds without renewal after which a replica stops leading.
const DURATION: u64 = 15;
/// Seconds before expiry at which the leader renews.
const GRACE: u64 = 10;

/// A replica that competes for the Lease.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Identity among the replicas.
    pub identity: String,
}

/// Competes for the Lease and renews it. The value tells whether this replica leads. It must be polled on the
/// runtime that renews the Lease.
pub async fn campaign(client: Client, candidate: &Candidate) -> anyhow::Result<Receiver<bool>> {
    let Candidate {
        namespace,
        identity,
    } = candidate;
    let manager = LeaseManagerBuilder::new(client, LEASE)
        .with_namespace(namespace)
        .with_identity(identity)
        .with_duration(DURATION)
        .with_grace(GRACE)
        .build()
        .await?;
    let (leads, _renewing) = manager.watch().await;
    info!(lease = LEASE, namespace, identity, "waiting to lead");
    Ok(leads)
}

/// Waits for leadership, then runs `work` until it ends or the Lease is lost. Work in progress is
/// dropped when the Lease is lost: its writes would be refused, since the next leader has written
/// the same objects meanwhile.
///
/// `leads` is `None` without leader election.
pub async fn lead<F>(leads: Option<Receiver<bool>>, work: F) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>>,
{
    let Some(mut leads) = leads else {
        return work.await;
    };
    leads.wait_for(|leads| *leads).await?;
    info!("leading");
    tokio::select! {
        ended = work => ended,
        lost = leads.wait_for(|leads| !*leads) => {
            warn!("lost the Lease, exiting");
            lost.map(|_| ()).map_err(anyhow::Error::from)
        }
    }
}
