//! Progress of a run, as its events report it.

use crate::telemetry::{Event, Pace, StepRecord};

/// Position and speed of a run.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The budget, samples; 0 until it is known.
    pub budget: u64,
    /// Samples consumed so far.
    pub samples: u64,
    /// The data's entropy, nats per token; `None` when it is unknown.
    pub floor: Option<f64>,
    pub step: Option<StepRecord>,
    /// r/η² of the last norm test.
    pub ratio: Option<f64>,
    /// Share of coordinates that passed the last coordinate-wise test.
    pub coordinate_share: Option<f64>,
    pace: Pace,
}

impl Progress {
    /// Updates the progress from an event.
    pub fn take(&mut self, event: &Event) {
        match event {
            Event::Planned { budget, floor, .. } => {
                self.budget = *budget;
                self.floor = *floor;
            }
            Event::GenerationStarted { start_samples, .. } => {
                self.samples = *start_samples;
                // Speed depends on the world, so rates start again.
                self.pace = Pace::default();
            }
            Event::Step(step) => self.step(step),
            _ => {}
        }
    }

    fn step(&mut self, step: &StepRecord) {
        self.pace.step(step);
        if let Some(total) = step.external.and_then(|step| step.total_samples) {
            self.budget = total;
        }
        self.samples = step.samples;
        if let Some(test) = &step.norm_test {
            self.ratio = Some(test.ratio / test.threshold).filter(|ratio| ratio.is_finite());
        }
        if let Some(test) = &step.coordinate_test {
            self.coordinate_share = test.share;
        }
        self.step = Some(step.clone());
    }

    /// Consumed share of the budget, 0 to 1.
    pub fn share(&self) -> f64 {
        if self.budget == 0 {
            return 0.0;
        }
        (self.samples as f64 / self.budget as f64).min(1.0)
    }

    /// Target tokens per second within steps.
    pub fn tokens_per_second(&self) -> Option<f64> {
        self.pace.tokens_per_second()
    }

    /// Seconds until the budget is used up.
    pub fn seconds_left(&self) -> Option<f64> {
        let budget = Some(self.budget).filter(|budget| *budget > 0)?;
        self.pace.seconds_left(budget)
    }
}
