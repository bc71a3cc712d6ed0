//! A run's report: one HTML page that needs only a browser.
//!
//! Plots are hand-written inline SVG. A plotting library writes colours and text into the drawing: such a
//! picture cannot follow a dark page, and its labels shrink with it on a phone. Here the drawing stretches,
//! the labels are HTML beside it, and the colours are the page's. Text from a recipe is escaped; the page's
//! content security policy forbids every request.

mod axis;
mod chart;
mod charts;
mod page;
mod series;

pub use page::render;

use serde::Serialize;

use super::{EvaluationRecord, StepRecord};

/// What the losses of steps and evaluations are means of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LossOf {
    /// Cross-entropies of target tokens, nats.
    #[default]
    CrossEntropy,
    /// Another loss of target tokens, which has no perplexity.
    Tokens,
    /// Sums over the target tokens of samples, which have no perplexity.
    Samples,
    /// A loss over preferences, of samples.
    Preferences,
}

/// Content of a report.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ReportInput {
    /// Name of the run.
    pub title: String,
    /// The plan's batch arithmetic, for example `8 × 16 × 1 = 128`.
    pub formula: String,
    /// The budget, in samples.
    pub budget: Option<u64>,
    /// Other facts, for example the recipe, the model, the devices.
    pub details: Vec<Fact>,
    /// The generations in their order.
    pub generations: Vec<GenerationFacts>,
    /// The committed steps, in the order of training.
    pub steps: Vec<StepRecord>,
    /// The committed evaluations, in the order of their samples.
    pub evaluations: Vec<EvaluationRecord>,
    /// The lowest possible loss, nats per token, if the data's entropy is known.
    pub floor: Option<f64>,
    /// The model's vocabulary size, for the warning about an absurd loss; 0 if unknown.
    pub vocabulary: u64,
    pub loss_of: LossOf,
    /// Texts of the data, continued by the newest checkpoint.
    pub continuations: Vec<Continuation>,
    /// The result of the ledger's verification, if it ran.
    pub ledger: Option<LedgerVerdict>,
}

impl ReportInput {
    /// Whether an external trainer reported the steps.
    fn is_external(&self) -> bool {
        let last = self.steps.last();
        last.is_some_and(|step| step.external.is_some())
    }
}

/// A fact with a label.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Fact {
    /// The label, for example `Model`.
    pub label: String,
    /// The value, for example `8.43M parameters, 8 layers of width 256`.
    pub value: String,
}

/// The beginning of a sample, and two continuations of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Continuation {
    pub begin: String,
    /// What the model says, greedily.
    pub model: String,
    /// What the data say.
    pub data: String,
}

/// One generation of the run.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationFacts {
    /// Job generation, counted from 1.
    pub generation: u64,
    pub world: u64,
    /// The batch arithmetic, as in [`ReportInput::formula`].
    pub formula: String,
    /// Why the generation was started.
    pub reason: String,
    /// Samples consumed before it.
    pub start_samples: u64,
    /// Seconds from its start (or the start of the change that made it) to the end of its first step.
    pub seconds_to_first_step: Option<f64>,
}

/// Whether every sample was consumed exactly once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LedgerVerdict {
    /// Whether the ledger proves that.
    pub proven: bool,
    /// The result, one line.
    pub text: String,
}

#[cfg(test)]
mod tests;
