//! The controller's metrics, in the Prometheus text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use kube::runtime::reflector::Store;

use crate::api::TrainingJob;

/// Counters of the controller process.
#[derive(Default)]
pub struct Metrics {
    reconciliations: AtomicU64,
    failed: AtomicU64,
    jobs: OnceLock<Store<TrainingJob>>,
}

impl Metrics {
    /// Records that this replica leads, with its cache of jobs.
    pub fn leads(&self, jobs: Store<TrainingJob>) {
        // A replica leads at most once: it exits when it loses the Lease.
        let _ = self.jobs.set(jobs);
    }

    pub fn count(&self, well: bool) {
        self.reconciliations.fetch_add(1, Ordering::Relaxed);
        if !well {
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// All metrics in the Prometheus text format.
    pub fn text(&self) -> String {
        let jobs = self.jobs.get();
        let mut phases: BTreeMap<String, u64> = BTreeMap::new();
        for job in jobs.map(Store::state).unwrap_or_default() {
            let phase = job
                .status
                .as_ref()
                .map(|status| status.phase)
                .unwrap_or_default();
            *phases.entry(format!("{phase:?}")).or_default() += 1;
        }
        let phases: Vec<(String, u64)> = phases
            .into_iter()
            .map(|(phase, count)| (format!("{{phase=\"{phase}\"}}"), count))
            .collect();
        let single = |value: u64| vec![(String::new(), value)];
        let families = [
            (
                "leader",
                "gauge",
                "Whether this replica leads.",
                single(jobs.is_some().into()),
            ),
            ("jobs", "gauge", "TrainingJobs by phase.", phases),
            (
                "reconciliations_total",
                "counter",
                "Reconciliations of jobs.",
                single(self.reconciliations.load(Ordering::Relaxed)),
            ),
            (
                "failed_reconciliations_total",
                "counter",
                "Reconciliations that failed and are retried.",
                single(self.failed.load(Ordering::Relaxed)),
            ),
        ];
        let mut text = String::new();
        for (name, kind, help, values) in families {
            let name = format!("evenkeel_controller_{name}");
            // Writing to a string does not fail.
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in values {
                let _ = writeln!(text, "{name}{labels} {value}");
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_count_reconciliations_and_show_the_leader() {
        let metrics = Metrics::default();
        metrics.count(true);
        metrics.count(false);
        let text = metrics.text();
        for line in [
            "controller_leader 0",
            "reconciliations_total 2",
            "failed_reconciliations_total 1",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{text}");
        }
    }
}
