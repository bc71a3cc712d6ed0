//! Speed of a generation, from its steps.

use super::StepRecord;

/// Seconds over which rates are smoothed.
const SMOOTHING: f64 = 30.0;

/// Samples and tokens per second of one generation. The clock is that of the steps.
#[derive(Debug, Default)]
pub struct Pace {
    samples: Rate,
    tokens: Rate,
    /// Samples after the last step, and when it ended.
    last: Option<(u64, f64)>,
}

impl Pace {
    /// Counts a step of the generation.
    pub fn step(&mut self, step: &StepRecord) {
        // The time left includes checkpoints and evaluations between steps; throughput does not.
        let (samples, seconds) = match self.last.replace((step.samples, step.time)) {
            Some((samples, time)) => (step.samples.saturating_sub(samples), step.time - time),
            // An external trainer's first report covers the steps of earlier generations.
            None if step.external.is_some() => return,
            None => (step.batch, step.seconds),
        };
        self.samples.add(samples, seconds);
        self.tokens.add(step.tokens, step.seconds);
    }

    /// Target tokens per second within steps.
    pub fn tokens_per_second(&self) -> Option<f64> {
        self.tokens.get()
    }

    /// Seconds until `budget` samples are consumed. `None` while the speed is unknown.
    pub fn seconds_left(&self, budget: u64) -> Option<f64> {
        let (samples, _) = self.last?;
        let rate = self.samples.get().filter(|rate| *rate > 0.0)?;
        Some(budget.saturating_sub(samples) as f64 / rate)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::ExternalStep;

    fn step(number: u64, time: f64, external: bool) -> StepRecord {
        StepRecord {
            generation: 2,
            step: number,
            samples: 16 * number,
            batch: 16,
            world: 2,
            loss: 2.0,
            tokens: 100,
            learning_rate: 1e-4,
            gradient_norm: 1.0,
            seconds: 2.0,
            time,
            norm_test: None,
            coordinate_test: None,
            preferences: None,
            external: external.then_some(ExternalStep {
                total_samples: Some(16_000),
            }),
        }
    }

    #[test]
    fn steps_before_a_resume_give_an_external_trainer_no_speed() {
        let mut pace = Pace::default();
        pace.step(&step(900, 10.0, true));
        // The 900 steps did not take 2 s.
        assert_eq!(
            (pace.seconds_left(16_000), pace.tokens_per_second()),
            (None, None)
        );
        pace.step(&step(910, 30.0, true));
        assert_eq!(pace.seconds_left(16_000), Some(180.0));
    }

    #[test]
    fn the_first_step_of_the_built_in_trainer_is_a_speed() {
        let mut pace = Pace::default();
        pace.step(&step(900, 10.0, false));
        assert_eq!(pace.seconds_left(16_000), Some(200.0));
        assert_eq!(pace.tokens_per_second(), Some(50.0));
        // The budget is used up.
        assert_eq!(pace.seconds_left(0), Some(0.0));
    }
}
