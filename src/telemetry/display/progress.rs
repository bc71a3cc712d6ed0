//! Progress of a run, as its events report it.

use crate::telemetry::{Event, StepRecord};

/// Seconds over which rates are smoothed.
const SMOOTHING: f64 = 30.0;

/// Position and speed of a run. The clock is that of the steps.
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
    samples_per_second: Rate,
    tokens_per_second: Rate,
    /// When the last step of this generation ended.
    ended: Option<f64>,
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
                self.samples_per_second = Rate::default();
                self.tokens_per_second = Rate::default();
                self.ended = None;
            }
            Event::Step(step) => self.step(step),
            _ => {}
        }
    }

    fn step(&mut self, step: &StepRecord) {
        // The time left includes checkpoints and evaluations between steps; throughput does not.
        let since = self.ended.map_or(step.seconds, |ended| step.time - ended);
        self.samples_per_second
            .add(step.samples.saturating_sub(self.samples), since);
        self.tokens_per_second.add(step.tokens, step.seconds);
        if let Some(total) = step.external.and_then(|step| step.total_samples) {
            self.budget = total;
        }
        self.samples = step.samples;
        self.ended = Some(step.time);
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
        self.tokens_per_second.get()
    }

    /// Seconds until the budget is used up.
    pub fn seconds_left(&self) -> Option<f64> {
        let left = self.budget.saturating_sub(self.samples) as f64;
        let rate = self.samples_per_second.get()?;
        (self.budget > 0 && rate > 0.0).then(|| left / rate)
    }
}

/// A count per second, in which a value [`SMOOTHING`] seconds old has the weight 1/e.
#[derive(Debug, Default)]
struct Rate {
    count: f64,
    seconds: f64,
}

impl Rate {
    fn add(&mut self, count: u64, seconds: f64) {
        // A clock that was set back gives no rate.
        if seconds > 0.0 && seconds.is_finite() {
            let kept = (-seconds / SMOOTHING).exp();
            self.count = self.count * kept + count as f64;
            self.seconds = self.seconds * kept + seconds;
        }
    }

    fn get(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.count / self.seconds)
    }
}
