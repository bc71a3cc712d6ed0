//! Output for people and machines: progress bars, metrics, events, the report.
//!
//! Three outputs use one set of types: [`Display`] shows [`Event`]s during a run, [`metrics`] stores
//! [`Metric`]s, and [`report`] draws them afterwards. `docs/telemetry.md` describes the schemas. Numbers that
//! are not finite are `null` in JSON.

pub mod display;
pub mod divergence;
pub mod event;
pub mod human;
pub mod metrics;
mod nan;
mod pace;
pub mod report;
pub mod tensorboard;

pub use display::{Display, Mode};
pub use event::Event;
pub use pace::Pace;

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// The clock of records: seconds since the Unix epoch.
pub fn now() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |elapsed| elapsed.as_secs_f64())
}

/// One optimiser step as a log record (one JSON line in `gen-N/metrics.jsonl`).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepRecord {
    /// Generation that ran it.
    pub generation: u64,
    /// Optimiser steps so far, from 1, over all generations.
    pub step: u64,
    /// Samples consumed after it.
    pub samples: u64,
    /// Global batch of this step, samples.
    pub batch: u64,
    pub world: u64,
    /// Mean cross-entropy per target token, nats; the mean loss of a pair, of an objective over preferences.
    #[serde(deserialize_with = "nan::from_null")]
    pub loss: f64,
    /// Target tokens in the step.
    pub tokens: u64,
    /// Learning rate of the step.
    #[serde(deserialize_with = "nan::from_null")]
    pub learning_rate: f64,
    /// ‖gradient of the mean loss‖ before clipping.
    #[serde(deserialize_with = "nan::from_null")]
    pub gradient_norm: f64,
    /// Wall-clock seconds of the step.
    pub seconds: f64,
    /// Seconds since the Unix epoch at the step's end.
    pub time: f64,
    /// The norm test, when this step ran it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub norm_test: Option<NormTestRecord>,
    /// The coordinate-wise test, when this step ran it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub coordinate_test: Option<CoordinateTestRecord>,
    /// Means over the step's preference pairs.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub preferences: Option<Box<PreferenceRecord>>,
    /// Set if an external trainer reported the step. The record then covers all steps since the previous report. A value
    /// that the trainer did not report is NaN, or 0 tokens.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub external: Option<ExternalStep>,
}

/// Means over the preferences of a step, as TRL reports them. A step of single completions may have none that is desirable.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct PreferenceRecord {
    /// β · log-ratio of the chosen, or desirable, completions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_chosen: Option<f64>,
    /// The same of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reward_rejected: Option<f64>,
    /// Share of pairs whose chosen completion has the larger reward.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accuracy: Option<f64>,
    /// KTO's estimate of the KL, nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// Log-probability of the chosen, or desirable, completions, nats.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logps_chosen: Option<f64>,
    /// The same of the others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logps_rejected: Option<f64>,
}

impl PreferenceRecord {
    /// The mean difference of the rewards.
    pub fn margin(&self) -> Option<f64> {
        Some(self.reward_chosen? - self.reward_rejected?)
    }

    /// The measures that people watch, most important first: `margin 0.4210`, `accuracy 0.75`.
    pub fn measures(&self) -> impl Iterator<Item = String> {
        let accuracy = self.accuracy.map(|share| format!("accuracy {share:.2}"));
        let shown = |value: f64| match value.abs() {
            1e-3.. | 0.0 => format!("{value:.4}"),
            _ => format!("{value:.2e}"),
        };
        let margin = self
            .margin()
            .map(|margin| format!("margin {}", shown(margin)));
        let kl = self.kl.map(|kl| format!("KL {}", shown(kl)));
        [accuracy, margin, kl].into_iter().flatten()
    }
}

/// The part of a report that only external trainers make.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExternalStep {
    /// Samples after which the trainer ends, if it says so.
    pub total_samples: Option<u64>,
}

/// One run of the norm test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NormTestRecord {
    /// r; the test fails, and the batch grows, when it is above η².
    #[serde(deserialize_with = "nan::from_null")]
    pub ratio: f64,
    /// η², the limit of r.
    pub threshold: f64,
    /// B_simple = V/|grad|², samples; `None` when infinite.
    pub noise_scale: Option<f64>,
    /// T, the batch that the test requires, in samples, before any rounding or limit; `None` when infinite or
    /// undefined.
    pub target: Option<f64>,
    /// The next step's batch, in samples.
    pub next_batch: u64,
    /// Why the batch has this size, for example `grew ×2 (cap)`, `warming up`.
    pub reason: String,
}

/// One run of the coordinate-wise test.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CoordinateTestRecord {
    /// Share of the model's coordinates that pass, 0 to 1; `None` when it is undefined.
    pub share: Option<f64>,
    /// Why the share is undefined.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub undefined: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EvaluationRecord {
    /// Generation that ran it.
    pub generation: u64,
    /// Samples consumed when it ran.
    pub samples: u64,
    /// Mean cross-entropy per target token, nats.
    #[serde(deserialize_with = "nan::from_null")]
    pub loss: f64,
    pub tokens: u64,
    /// Seconds since the Unix epoch.
    pub time: f64,
    /// Of losses over preferences.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preferences: Option<Box<PreferenceRecord>>,
}

/// One line of a generation's metrics file.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Metric {
    Step(StepRecord),
    Evaluation(EvaluationRecord),
}

#[cfg(test)]
mod tests;
