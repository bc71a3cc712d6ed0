//! The controller's metrics, in the OpenMetrics text format.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use kube::ResourceExt;
use kube::runtime::reflector::Store;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;
use tracing::{Instrument, error_span};

use crate::api::TrainingJob;
use crate::api::status::{RescaleStages, TrainingJobStatus};
use crate::lifecycle::Reason;
use crate::telemetry::now;
use crate::util::openmetrics;
use crate::util::time::seconds;

/// One label with its value.
type Label = [(&'static str, &'static str); 1];
type Durations = Family<Label, Histogram, fn() -> Histogram>;

/// All metrics of the controller process.
pub struct Metrics {
    registry: Registry,
    reconciles: Durations,
    steps: Durations,
    generations: Family<Label, Counter>,
    rescales: Durations,
    jobs: Jobs,
}

/// The results of a reconciliation. Conflict: an object has changed since the controller read it.
const RESULTS: [&str; 3] = ["ok", "conflict", "error"];

/// The steps of a reconciliation.
const STEPS: [&str; 6] = [
    "plan",
    "observe",
    "decide",
    "build",
    "write-status",
    "apply",
];

impl Default for Metrics {
    fn default() -> Self {
        let milliseconds: fn() -> Histogram =
            || Histogram::new(exponential_buckets(0.001, 2.0, 15));
        let seconds: fn() -> Histogram = || Histogram::new(exponential_buckets(0.25, 2.0, 12));
        let mut metrics = Metrics {
            registry: Registry::with_prefix("evenkeel"),
            reconciles: Family::new_with_constructor(milliseconds),
            steps: Family::new_with_constructor(milliseconds),
            generations: Family::default(),
            rescales: Family::new_with_constructor(seconds),
            jobs: Jobs::default(),
        };
        for (name, help, durations) in [
            (
                "controller_reconcile_duration_seconds",
                "Duration of a reconciliation by its result",
                &metrics.reconciles,
            ),
            (
                "controller_step_duration_seconds",
                "Duration of a step of a reconciliation",
                &metrics.steps,
            ),
            (
                "rescale_seconds",
                "Time from the cause of a rescale to the end of a stage",
                &metrics.rescales,
            ),
        ] {
            metrics.registry.register(name, help, durations.clone());
        }
        let help = "Published job generations by reason";
        let generations = metrics.generations.clone();
        metrics.registry.register("generations", help, generations);
        let jobs = Box::new(metrics.jobs.clone());
        metrics.registry.register_collector(jobs);
        metrics.start_at_zero();
        metrics
    }
}

impl Metrics {
    /// Creates the series of all label values. PromQL's `increase` counts only from the first sample of a series,
    /// so it would miss the first event of a series that appears with that event.
    fn start_at_zero(&self) {
        for result in RESULTS {
            drop(self.reconciles.get_or_create(&[("result", result)]));
        }
        for step in STEPS {
            drop(self.steps.get_or_create(&[("step", step)]));
        }
        for reason in Reason::NAMES {
            drop(self.generations.get_or_create(&[("reason", reason)]));
        }
        for (stage, _) in stages(&RescaleStages::default()) {
            drop(self.rescales.get_or_create(&[("stage", stage)]));
        }
    }

    /// Records that this replica leads, with its cache of jobs.
    pub fn leads(&self, jobs: Store<TrainingJob>) {
        // A replica leads at most once: it exits when it loses the Lease.
        let _ = self.jobs.0.set(jobs);
    }

    /// Records a reconciliation with one of [`RESULTS`].
    pub fn reconciled(&self, result: &'static str, took: Duration) {
        debug_assert!(RESULTS.contains(&result), "{result}");
        let durations = self.reconciles.get_or_create(&[("result", result)]);
        durations.observe(took.as_secs_f64());
    }

    /// Runs one of the [`STEPS`] of a reconciliation in its span, which each line of its log names, and measures it.
    pub async fn time<T>(&self, step: &'static str, work: impl Future<Output = T>) -> T {
        debug_assert!(STEPS.contains(&step), "{step}");
        let start = Instant::now();
        let done = work.instrument(error_span!("step", name = step)).await;
        let durations = self.steps.get_or_create(&[("step", step)]);
        durations.observe(start.elapsed().as_secs_f64());
        done
    }

    /// Records what changed in the status of a job.
    pub fn changed(&self, before: &TrainingJobStatus, next: &TrainingJobStatus) {
        if let Some(current) = &next.generation
            && before.number() != next.number()
        {
            let reason = current.record.reason.name();
            self.generations.get_or_create(&[("reason", reason)]).inc();
        }
        for change in &next.history {
            let mut earlier = before.history.iter();
            let earlier = earlier.find(|c| c.generation == change.generation);
            let earlier = earlier.map(|change| stages(&change.stages));
            for (at, (stage, seconds)) in stages(&change.stages).into_iter().enumerate() {
                let known = earlier.is_some_and(|earlier| earlier[at].1.is_some());
                if let Some(seconds) = seconds.filter(|_| !known) {
                    let durations = self.rescales.get_or_create(&[("stage", stage)]);
                    durations.observe(seconds);
                }
            }
        }
    }

    /// All metrics in the OpenMetrics text format.
    pub fn text(&self) -> String {
        openmetrics::encode(&self.registry)
    }
}

/// The stages of a rescale with their ends.
fn stages(stages: &RescaleStages) -> [(&'static str, Option<f64>); 5] {
    [
        ("drained", stages.drained_seconds),
        ("published", stages.published_seconds),
        ("started", stages.started_seconds),
        ("restored", stages.restored_seconds),
        ("first-step", stages.first_step_seconds),
    ]
}

/// The cache of the jobs, whose numbers are read when they are asked for. Unset while another replica leads.
#[derive(Debug, Clone, Default)]
struct Jobs(Arc<OnceLock<Store<TrainingJob>>>);

/// A number of one job: its name, its description and its value.
type Gauge = (
    &'static str,
    &'static str,
    fn(&TrainingJob, &TrainingJobStatus) -> Option<f64>,
);

/// The numbers of each job that is not over.
const GAUGES: [Gauge; 12] = [
    (
        "job_nodes",
        "Nodes of the newest generation",
        |_, status| Some(f64::from(status.nodes)),
    ),
    (
        "job_desired_nodes",
        "Nodes that the job asks for",
        |job, _| Some(f64::from(job.spec.nodes)),
    ),
    (
        "job_generation",
        "Number of the newest generation",
        |_, status| status.number().map(|number| number as f64),
    ),
    (
        "job_restarts",
        "Failures of the trainer since the last progress",
        |_, status| Some(f64::from(status.restarts)),
    ),
    (
        "job_disruptions",
        "Nodes and pods lost over the life of the job",
        |_, status| Some(f64::from(status.disruptions)),
    ),
    ("job_step", "Optimiser steps taken", |_, status| {
        Some(status.progress.as_ref()?.step as f64)
    }),
    ("job_samples", "Samples consumed", |_, status| {
        Some(status.progress.as_ref()?.samples as f64)
    }),
    (
        "job_progress_ratio",
        "Samples consumed as a share of the budget",
        |_, status| {
            let progress = status.progress.as_ref()?;
            Some(progress.samples as f64 / progress.budget.filter(|budget| *budget > 0)? as f64)
        },
    ),
    (
        "job_global_batch_samples",
        "Global batch of the newest step",
        |_, status| Some(status.progress.as_ref()?.batch as f64),
    ),
    (
        "job_loss",
        "Training loss of the newest step, nats per target token",
        |_, status| status.progress.as_ref()?.loss.parse().ok(),
    ),
    (
        "job_tokens_per_second",
        "Target tokens per second over all ranks",
        |_, status| Some(status.progress.as_ref()?.tokens_per_second as f64),
    ),
    (
        "job_checkpoint_age_seconds",
        "Time since the newest checkpoint",
        |_, status| checkpoint_age(status),
    ),
];

/// Seconds since the newest checkpoint of a job. A checkpoint of an external trainer may have its own time.
fn checkpoint_age(status: &TrainingJobStatus) -> Option<f64> {
    let external = status.external_checkpoint.as_ref();
    let changed = external.and_then(|checkpoint| checkpoint.changed.as_ref());
    let at = changed.or(status.checkpoint_time.as_ref())?;
    Some((now() - seconds(at)).max(0.0))
}

impl Collector for Jobs {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Jobs(known) = self;
        let leads = known.get().is_some();
        let help = "Whether this replica leads";
        let mut leader =
            encoder.encode_descriptor("controller_leader", help, None, MetricType::Gauge)?;
        leader.encode_gauge(&u32::from(leads))?;
        let all = known.get().map(Store::state).unwrap_or_default();
        let mut phases: BTreeMap<String, u64> = BTreeMap::new();
        let mut running = Vec::new();
        for job in &all {
            let status = job.status.clone().unwrap_or_default();
            let phase = format!("{:?}", status.phase);
            *phases.entry(phase.clone()).or_default() += 1;
            if !status.is_over() {
                let namespace = job.namespace().unwrap_or_default();
                let labels = [("namespace", namespace), ("job", job.name_any())];
                running.push((job, status, phase, labels));
            }
        }
        let help = "TrainingJobs by phase";
        let mut metric = encoder.encode_descriptor("jobs", help, None, MetricType::Gauge)?;
        for (phase, count) in phases {
            let labels = [("phase", phase)];
            let mut series = metric.encode_family(&labels)?;
            series.encode_gauge(&(count as f64))?;
        }
        let help = "Phase of the job that is not over; the value is 1";
        let mut metric = encoder.encode_descriptor("job_phase", help, None, MetricType::Gauge)?;
        for (_, _, phase, [namespace, job]) in &running {
            let labels = [namespace.clone(), job.clone(), ("phase", phase.clone())];
            metric.encode_family(&labels)?.encode_gauge(&1_u32)?;
        }
        for (name, help, value) in GAUGES {
            let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (job, status, _, labels) in &running {
                if let Some(value) = value(job, status) {
                    metric.encode_family(labels)?.encode_gauge(&value)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use kube::runtime::reflector;
    use kube::runtime::watcher::Event;
    use serde_json::json;

    use super::*;
    use crate::operator::testing::{Cluster, job};
    use crate::operator::tests::checkpoint;
    use crate::util::time::micro_time;

    /// The metrics that a text names. A histogram or counter is named once, without the suffix of its samples.
    fn metric_names(text: &str) -> BTreeSet<&str> {
        let words = text.split(|c: char| !c.is_ascii_lowercase() && c != '_');
        let samples = words.filter(|word| word.starts_with("evenkeel_"));
        let suffixes = ["_bucket", "_count", "_sum", "_total"];
        samples
            .map(|sample| {
                let family = suffixes
                    .iter()
                    .find_map(|suffix| sample.strip_suffix(suffix));
                family.unwrap_or(sample)
            })
            .collect()
    }

    fn read(path: &str) -> String {
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
    }

    #[test]
    fn the_dashboard_and_the_alerts_name_exported_metrics() {
        let text = Metrics::default().text();
        let exported = metric_names(&text);
        for file in ["dashboards/evenkeel.json", "alerts.yaml"] {
            let content = read(&format!("charts/evenkeel/{file}"));
            let used = metric_names(&content);
            assert!(!used.is_empty(), "{file} names no metric");
            let unknown: Vec<_> = used.difference(&exported).collect();
            assert!(unknown.is_empty(), "{file}: not exported: {unknown:?}");
        }
    }

    #[test]
    fn the_documentation_names_every_metric() {
        let text = Metrics::default().text();
        let page = read("docs/kubernetes.md");
        assert_eq!(metric_names(&page), metric_names(&text));
    }

    #[test]
    fn counters_and_histograms_start_at_zero() {
        let text = Metrics::default().text();
        let has = |zero: &str| text.lines().any(|line| line == zero);
        for zero in [
            "evenkeel_controller_reconcile_duration_seconds_count{result=\"conflict\"} 0",
            "evenkeel_controller_reconcile_duration_seconds_count{result=\"error\"} 0",
            "evenkeel_controller_step_duration_seconds_count{step=\"apply\"} 0",
            "evenkeel_rescale_seconds_count{stage=\"first-step\"} 0",
        ] {
            assert!(has(zero), "no {zero} in\n{text}");
        }
        for reason in Reason::NAMES {
            let zero = format!("evenkeel_generations_total{{reason=\"{reason}\"}} 0");
            assert!(has(&zero), "no {zero} in\n{text}");
        }
    }

    /// The lines of metrics whose names start with `evenkeel_` and one of `names`, without `# EOF` and descriptions.
    fn lines(text: &str, names: &[&str]) -> Vec<String> {
        let lines = text.lines().filter(|line| {
            let name = line.strip_prefix("evenkeel_");
            name.is_some_and(|name| names.iter().any(|start| name.starts_with(start)))
        });
        let mut lines: Vec<String> = lines.map(str::to_owned).collect();
        lines.sort();
        lines
    }

    #[test]
    fn each_job_that_is_not_over_has_its_numbers() {
        let metrics = Metrics::default();
        assert_eq!(
            lines(&metrics.text(), &["controller_leader"]),
            ["evenkeel_controller_leader 0"]
        );
        let (known, mut writer) = reflector::store();
        let statuses = [
            json!({"phase": "Running", "nodes": 2, "disruptions": 1, "restarts": 0, "progress": {
                "samples": 40, "budgetSamples": 80, "percent": "50 %", "step": 5, "loss": "2.5000", "batch": 8,
                "tokensPerSecond": 512, "timeLeft": "3 s"}}),
            json!({"phase": "Complete", "nodes": 2}),
            json!({"phase": "Waiting"}),
        ];
        for (index, status) in statuses.into_iter().enumerate() {
            let mut job = job(&format!("j{index}"), &format!("u{index}"));
            job.status = Some(serde_json::from_value(status).unwrap());
            writer.apply_watcher_event(&Event::Apply(job));
        }
        metrics.leads(known);
        let found = lines(&metrics.text(), &["controller_leader", "jobs", "job_"]);
        insta::assert_snapshot!(found.join("\n"));
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_checkpoint_ages_until_the_next_one_also_under_another_leader() {
        let mut cluster = Cluster::running().await;
        assert_eq!(checkpoint_age(&cluster.status()), None, "no checkpoint yet");
        let commit = |cluster: &Cluster, step| {
            let committed = checkpoint(1, step);
            let state =
                json!({"generation": 1, "ranks": [{"ready": true}], "committed": committed});
            cluster.agent("x-0-1", state);
        };
        commit(&cluster, 3);
        cluster.reconcile().await.unwrap();
        let first = cluster.status().checkpoint_time.unwrap();
        let mut earlier = cluster.status();
        earlier.checkpoint_time = Some(micro_time(seconds(&first) - 60.0));
        assert!(checkpoint_age(&earlier).unwrap() >= 60.0);
        cluster.restart_controller();
        commit(&cluster, 3);
        cluster.reconcile().await.unwrap();
        assert_eq!(cluster.status().checkpoint_time.as_ref(), Some(&first));
        commit(&cluster, 4);
        cluster.reconcile().await.unwrap();
        assert!(cluster.status().checkpoint_time.unwrap() > first);
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn steps_generations_and_the_stages_of_a_rescale_are_counted_once() {
        let mut cluster = Cluster::running().await;
        let published =
            json!({"generation": 1, "ranks": [{"ready": true}], "started": 1e10, "ready": 1e10});
        for pod in ["x-0-1", "x-1-2"] {
            cluster.agent(pod, published.clone());
        }
        for _ in 0..3 {
            cluster.reconcile().await.unwrap();
        }
        let text = cluster.context.metrics.text();
        let mut found = lines(&text, &["generations_total", "rescale_seconds_count"]);
        found.retain(|line| !line.ends_with(" 0"));
        let stage = |stage: &str| format!("evenkeel_rescale_seconds_count{{stage=\"{stage}\"}} 1");
        assert_eq!(found.len(), 4, "{found:?}");
        assert!(found.contains(&"evenkeel_generations_total{reason=\"started\"} 1".into()));
        for name in ["published", "started", "restored"] {
            assert!(found.contains(&stage(name)), "{name}: {found:?}");
        }
        let durations = [
            "controller_step_duration_seconds_count",
            "controller_reconcile_duration_seconds_count",
        ];
        let steps = lines(&text, &durations[..1]);
        let counts: BTreeSet<&str> = steps
            .iter()
            .filter_map(|line| line.rsplit(' ').next())
            .collect();
        assert_eq!((steps.len(), counts.len()), (6, 1), "once each: {steps:?}");
        let mut unused = lines(&text, &durations);
        unused.retain(|line| line.ends_with(" 0"));
        let zero = |result: &str| {
            format!("evenkeel_controller_reconcile_duration_seconds_count{{result=\"{result}\"}} 0")
        };
        assert_eq!(unused, [zero("conflict"), zero("error")]);
    }
}
