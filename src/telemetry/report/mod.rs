//! A run's report: one HTML page that needs nothing but a browser.
//!
//! Plots are inline SVG of our own. A plotting library writes its colours and its text into the
//! drawing: such a picture cannot follow a dark page, and its labels shrink with it on a phone. Here the drawing stretches, the labels are HTML beside it, and the
//! colours are the page's. What comes from a recipe is escaped; the page's content security policy
//! forbids every request.

mod axis;
mod chart;
mod charts;
mod html;
mod page;
mod series;

use serde::{Deserialize, Serialize};

use super::{EvaluationRecord, StepRecord};

/// Everything that a report shows.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ReportInput {
    /// The run's name.
    pub title: String,
    /// What the head of the page says.
    pub facts: Facts,
    /// In their order.
    pub generations: Vec<GenerationFacts>,
    /// The committed steps, in the order of training.
    pub steps: Vec<StepRecord>,
    /// The committed evaluations, in the order of their samples.
    pub evaluations: Vec<EvaluationRecord>,
    /// The lowest loss that can be had, nats per token, when the data's entropy is known.
    pub floor: Option<f64>,
    /// Tokens that the model tells apart, for a word about a loss that cannot be; 0: unknown.
    pub vocabulary: u64,
    /// What the ledger says, when it was asked.
    pub ledger: Option<LedgerVerdict>,
}

/// What the head of the page says beside what follows from the steps.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Facts {
    /// The plan's batch arithmetic, for example `8 × 16 × 1 = 128`.
    pub proof: String,
    /// The budget, samples.
    pub budget: Option<u64>,
    /// Whatever else is worth knowing, for example the recipe, the model, the devices.
    pub details: Vec<Fact>,
}

/// A labelled line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fact {
    /// For example `Model`.
    pub label: String,
    /// For example `8.43M parameters, 8 layers of width 256`.
    pub value: String,
}

/// One generation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GenerationFacts {
    /// Its number.
    pub generation: u64,
    /// Ranks.
    pub world: u64,
    /// Its batch arithmetic.
    pub proof: String,
    /// Why it was started.
    pub reason: String,
    /// Samples consumed before it.
    pub start_samples: u64,
    /// From its start (of the change that made it, where there was one) to the end of its first
    /// step, seconds.
    pub seconds_to_first_step: Option<f64>,
}

/// Whether every sample was consumed exactly once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerVerdict {
    /// Whether that is proven.
    pub proven: bool,
    /// What was found, one line.
    pub text: String,
}

/// The report as one HTML page.
pub fn render(input: &ReportInput) -> String {
    page::render(input)
}

#[cfg(test)]
mod tests;
