//! One controller at a time: a Lease in the controller's namespace, held by one replica.
//!
//! Only durations count that a replica measures itself, as in client-go's `tools/leaderelection`: a clock that is set
//! back or forward ends no leadership. A candidate takes the Lease once it has seen it unchanged for [`DURATION`];
//! the leader stops before that if it could not renew it.

use std::future::Future;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Client, ResourceExt};
use serde_json::json;
use tokio::sync::watch::{Receiver, channel};
use tokio::time::{Instant, timeout_at};
use tracing::{info, warn};

use crate::telemetry;
use crate::util::time::micro_time;

/// Name of the Lease.
const LEASE: &str = "evenkeel-controller";
/// Time without a change after which a candidate takes the Lease.
const DURATION: Duration = Duration::from_secs(15);
/// Time without a renewal after which the leader stops.
const RENEWED_WITHIN: Duration = Duration::from_secs(10);
/// Time between two rounds, and longest wait for an answer.
const ROUND: Duration = Duration::from_secs(2);

/// A replica that competes for the Lease.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Identity among the replicas.
    pub identity: String,
}

/// Competes for the Lease and renews it, as a task of the present runtime. The value tells whether this replica leads.
pub fn campaign(client: Client, candidate: &Candidate) -> Receiver<bool> {
    let (leads, led) = channel(false);
    let mut election = Election::new(client, candidate);
    info!(
        lease = LEASE,
        namespace = candidate.namespace,
        identity = candidate.identity,
        "waiting to lead"
    );
    tokio::spawn(async move {
        while !leads.is_closed() {
            let start = Instant::now();
            let answered_by = election
                .renewed
                .map_or(start + ROUND, |at| (at + RENEWED_WITHIN).min(start + ROUND));
            match timeout_at(answered_by, election.round(start)).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => warn!(%error, lease = LEASE, "cannot read or renew the Lease"),
                Err(_) => warn!(lease = LEASE, "no answer about the Lease"),
            }
            let holds = election.holds(Instant::now());
            leads.send_if_modified(|leads| std::mem::replace(leads, holds) != holds);
            if election.went_back {
                warn!(
                    "the API server has an older state than before; starting again with empty caches"
                );
                return;
            }
            tokio::time::sleep_until(start + ROUND).await;
        }
    });
    led
}

/// What a replica knows of the Lease.
struct Election {
    leases: Api<Lease>,
    identity: String,
    /// Resource version of the Lease, and the first time at which it was seen.
    seen: Option<(String, Instant)>,
    /// Highest resource version of the Lease.
    highest: u64,
    /// The API server had a newer Lease before: it was restored from an older copy of its data. Caches filled before
    /// that would wait for ever for changes that it has not made.
    went_back: bool,
    /// Start of the last successful renewal; `None` while another replica holds the Lease.
    renewed: Option<Instant>,
}

impl Election {
    fn new(client: Client, candidate: &Candidate) -> Election {
        Election {
            leases: Api::namespaced(client, &candidate.namespace),
            identity: candidate.identity.clone(),
            seen: None,
            highest: 0,
            went_back: false,
            renewed: None,
        }
    }

    fn holds(&self, now: Instant) -> bool {
        self.renewed.is_some_and(|at| now < at + RENEWED_WITHIN)
    }

    /// Renews the Lease, or takes it if it is free.
    async fn round(&mut self, now: Instant) -> Result<(), kube::Error> {
        let Some(lease) = self.leases.get_opt(LEASE).await? else {
            let lease = Lease {
                metadata: ObjectMeta {
                    name: Some(LEASE.to_owned()),
                    ..ObjectMeta::default()
                },
                spec: Some(self.taken(LeaseSpec::default())),
            };
            self.leases.create(&PostParams::default(), &lease).await?;
            self.renewed = Some(now);
            return Ok(());
        };
        let version = lease.resource_version().unwrap_or_default();
        self.compare(&version);
        let mut spec = lease.spec.unwrap_or_default();
        let holder = spec.holder_identity.as_deref().unwrap_or_default();
        if self.went_back || holder != self.identity {
            self.renewed = None;
            let held = !holder.is_empty();
            if self.went_back || held && !self.unchanged(&version, now) {
                return Ok(());
            }
            spec = self.taken(spec);
        }
        spec.renew_time = Some(micro_time(telemetry::now()));
        let written = write(&self.leases, &version, &spec).await?;
        self.compare(&written.resource_version().unwrap_or_default());
        self.renewed = Some(now);
        Ok(())
    }

    /// Resource versions are increasing numbers (KEP-5504).
    fn compare(&mut self, version: &str) {
        if let Ok(version) = version.parse() {
            self.went_back |= version < self.highest;
            self.highest = self.highest.max(version);
        }
    }

    /// Whether this version of the Lease was first seen [`DURATION`] ago.
    fn unchanged(&mut self, version: &str, now: Instant) -> bool {
        match &self.seen {
            Some((seen, since)) if *seen == version => now >= *since + DURATION,
            _ => {
                self.seen = Some((version.to_owned(), now));
                false
            }
        }
    }

    /// The Lease as this replica takes it. The times are for people.
    fn taken(&self, before: LeaseSpec) -> LeaseSpec {
        let now = micro_time(telemetry::now());
        let transitions = before.lease_transitions;
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            acquire_time: Some(now.clone()),
            renew_time: Some(now),
            lease_transitions: Some(transitions.map_or(0, |count| count.saturating_add(1))),
            ..before
        }
    }
}

/// Gives the Lease back at the end of the process, so that the next leader need not wait.
pub async fn release(client: Client, candidate: &Candidate) -> Result<(), kube::Error> {
    let leases: Api<Lease> = Api::namespaced(client, &candidate.namespace);
    let Some(lease) = leases.get_opt(LEASE).await? else {
        return Ok(());
    };
    let version = lease.resource_version().unwrap_or_default();
    let mut spec = lease.spec.unwrap_or_default();
    if spec.holder_identity.as_ref() != Some(&candidate.identity) {
        return Ok(());
    }
    spec.holder_identity = Some(String::new());
    write(&leases, &version, &spec).await?;
    Ok(())
}

/// Changes the Lease; the API server refuses it if another replica has done so since this version.
async fn write(leases: &Api<Lease>, version: &str, spec: &LeaseSpec) -> Result<Lease, kube::Error> {
    let change = json!({"metadata": {"resourceVersion": version}, "spec": spec});
    let parameters = PatchParams::default();
    leases
        .patch(LEASE, &parameters, &Patch::Merge(change))
        .await
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::operator::testing::{ApiServer, NAMESPACE};

    fn candidate(identity: &str) -> Candidate {
        Candidate {
            namespace: NAMESPACE.to_owned(),
            identity: identity.to_owned(),
        }
    }

    fn election(server: &Arc<ApiServer>, identity: &str) -> Election {
        Election::new(server.client(), &candidate(identity))
    }

    fn holder(server: &ApiServer) -> String {
        let lease = server.get("leases", LEASE).unwrap();
        lease["spec"]["holderIdentity"]
            .as_str()
            .unwrap_or("none")
            .to_owned()
    }

    #[tokio::test]
    async fn a_lease_is_taken_only_after_it_was_seen_unchanged() {
        let server = Arc::<ApiServer>::default();
        let (mut a, mut b) = (election(&server, "a"), election(&server, "b"));
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        a.round(at(0)).await.unwrap();
        assert!(a.holds(at(9)) && !a.holds(at(10)), "the leader stops first");
        for second in 0..14 {
            b.round(at(second)).await.unwrap();
        }
        // The clock of the leader was set back by a year.
        server.change(
            "leases",
            LEASE,
            json!({"spec": {"renewTime": "2025-01-01T00:00:00.000000Z"}}),
        );
        a.round(at(14)).await.unwrap();
        for second in 15..30 {
            b.round(at(second)).await.unwrap();
            assert!(!b.holds(at(second)), "second {second}");
        }
        b.round(at(30)).await.unwrap();
        assert!(b.holds(at(30)));
        assert_eq!(holder(&server), "b");
        a.round(at(31)).await.unwrap();
        assert!(!a.holds(at(31)));
        let lease = server.get("leases", LEASE).unwrap();
        assert_eq!(lease["spec"]["leaseTransitions"], 1);
    }

    #[tokio::test]
    async fn an_api_server_with_an_older_state_ends_the_leadership() {
        let server = Arc::<ApiServer>::default();
        let mut a = election(&server, "a");
        let start = Instant::now();
        a.round(start).await.unwrap();
        let older = server.get("leases", LEASE).unwrap();
        a.round(start).await.unwrap();
        assert!(a.holds(start) && !a.went_back);
        server.restore("leases", LEASE, older);
        a.round(start).await.unwrap();
        assert!(a.went_back && !a.holds(start));
        let mut leads = campaign(server.client(), &candidate("a"));
        leads.wait_for(|leads| *leads).await.unwrap();
    }

    #[tokio::test]
    async fn a_released_lease_is_taken_at_once_and_only_its_holder_releases_it() {
        let server = Arc::<ApiServer>::default();
        let (mut a, mut b) = (election(&server, "a"), election(&server, "b"));
        let start = Instant::now();
        a.round(start).await.unwrap();
        release(server.client(), &candidate("b")).await.unwrap();
        b.round(start).await.unwrap();
        assert_eq!(holder(&server), "a");
        release(server.client(), &candidate("a")).await.unwrap();
        b.round(start).await.unwrap();
        assert_eq!(holder(&server), "b");
    }

    #[tokio::test]
    async fn of_two_that_take_a_free_lease_one_holds_it() {
        let server = Arc::<ApiServer>::default();
        let (mut a, mut b) = (election(&server, "a"), election(&server, "b"));
        let start = Instant::now();
        let (first, second) = tokio::join!(a.round(start), b.round(start));
        assert_ne!(first.is_ok(), second.is_ok());
        assert_ne!(a.holds(start), b.holds(start));
    }

    #[tokio::test]
    async fn a_leader_that_cannot_renew_stops_before_another_may_begin() {
        let server = Arc::<ApiServer>::default();
        let mut a = election(&server, "a");
        let start = Instant::now();
        a.round(start).await.unwrap();
        server.refuse_writes("leases", LEASE);
        assert!(a.round(start + ROUND).await.is_err());
        assert!(a.holds(start + ROUND), "one refusal ends nothing");
        assert!(!a.holds(start + RENEWED_WITHIN));
        server.accept_writes("leases", LEASE);
        a.round(start + RENEWED_WITHIN).await.unwrap();
        assert!(a.holds(start + RENEWED_WITHIN));
    }
}
