//! Detects a loss that a language model cannot have while it learns.
//!
//! A model without any knowledge gives each of V tokens the probability 1/V, a loss of ln V. At [`FACTOR`]
//! times that loss it gives the right token V^−2 on (geometric) average: it is sure of the wrong ones. No
//! usual initialisation does that, and no data can teach it. A learning rate that is far too large can do it,
//! and gradient clipping keeps such a loss finite indefinitely. The run may still recover, so this is a
//! warning and does not end the run.

/// A loss is absurd above this many times ln V.
const FACTOR: f64 = 2.0;
/// Steps in a row above the limit before the warning; a single step may be a bad batch.
const STEPS: u32 = 10;

/// The loss, in nats, above which a model with a vocabulary of this size has diverged.
pub fn limit(vocabulary: u64) -> f64 {
    FACTOR * (vocabulary.max(2) as f64).ln()
}

/// Watches the losses of a run and warns once when they exceed the limit; it warns again only after they have
/// been below it.
#[derive(Debug, Clone)]
pub struct LossWatch {
    vocabulary: u64,
    /// Steps in a row above the limit.
    above: u32,
    warned: bool,
}

impl LossWatch {
    /// For a model with a vocabulary of this size.
    pub fn new(vocabulary: u64) -> LossWatch {
        LossWatch {
            vocabulary,
            above: 0,
            warned: false,
        }
    }

    /// Records a step's loss; returns a warning if it is due.
    pub fn step(&mut self, loss: f64) -> Option<String> {
        if loss <= limit(self.vocabulary) {
            *self = LossWatch::new(self.vocabulary);
            return None;
        }
        self.above += 1;
        self.say(self.above >= STEPS, loss)
    }

    /// Records the loss of an evaluation, or the last one of the run, which averages many samples and needs
    /// no confirmation.
    pub fn evaluation(&mut self, loss: f64) -> Option<String> {
        self.say(loss > limit(self.vocabulary), loss)
    }

    fn say(&mut self, absurd: bool, loss: f64) -> Option<String> {
        if !absurd || std::mem::replace(&mut self.warned, true) {
            return None;
        }
        Some(warning(loss, self.vocabulary))
    }
}

/// The warning about a loss above the limit.
pub fn warning(loss: f64, vocabulary: u64) -> String {
    format!(
        "the loss is {loss:.2}, and guessing evenly among {vocabulary} tokens gives {:.2}: the \
         training has diverged; lower the learning rate or clip the gradient, and start again",
        (vocabulary.max(2) as f64).ln()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lasting_absurd_loss_is_reported_once() {
        // 2 ln 64 is 8.3.
        let mut watch = LossWatch::new(64);
        assert!((0..9).all(|_| watch.step(31.0).is_none()));
        let warning = watch.step(31.0).unwrap();
        assert!(
            warning
                .starts_with("the loss is 31.00, and guessing evenly among 64 tokens gives 4.16")
        );
        assert!((0..100).all(|_| watch.step(31.0).is_none()));
        assert_eq!(watch.evaluation(31.0), None);
        // The run recovers and diverges again.
        assert_eq!(watch.step(5.0), None);
        assert!((0..9).all(|_| watch.step(9.0).is_none()));
        assert!(watch.step(9.0).is_some());
    }

    #[test]
    fn a_spike_and_an_untrained_model_give_no_warning() {
        let mut watch = LossWatch::new(64);
        for _ in 0..30 {
            assert!((0..5).all(|_| watch.step(40.0).is_none()));
            assert_eq!(watch.step(4.3), None);
        }
        assert_eq!(watch.evaluation(4.2), None);
        assert!(watch.evaluation(40.0).is_some());
    }
}
