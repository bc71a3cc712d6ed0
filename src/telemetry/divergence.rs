//! Detects a loss that a language model cannot have while it learns, and a model that cannot learn.
//!
//! A model without any knowledge gives each of V tokens the probability 1/V, a loss of ln V. At [`FACTOR`]
//! times that loss it gives the right token V^−2 on (geometric) average: it is sure of the wrong ones. No
//! usual initialisation does that, and no data can teach it. A learning rate that is far too large can do it,
//! and gradient clipping keeps such a loss finite indefinitely. The run may still recover, so this is a
//! warning and does not end the run.
//!
//! A gradient of 0 changes nothing but by weight decay. One step may have it, many in a row are a dead model:
//! for example weights that are all 0, or activations that a far too large learning rate has saturated.

/// A loss is absurd above this many times ln V.
const FACTOR: f64 = 2.0;
/// Steps in a row before a warning; a single step may be a bad batch.
const STEPS: u32 = 10;
/// The gradient norm up to which a gradient counts as 0; those of learning models are many orders larger.
const ZERO: f64 = 1e-12;

/// The loss, in nats, above which a model with a vocabulary of this size has diverged.
pub fn limit(vocabulary: u64) -> f64 {
    FACTOR * (vocabulary.max(2) as f64).ln()
}

/// Watches the losses and gradients of a run. It warns once when the losses exceed the limit, and again only
/// after they have been below it; likewise for gradients of 0.
#[derive(Debug, Clone)]
pub struct LossWatch {
    vocabulary: u64,
    /// Steps in a row above the limit.
    above: u32,
    warned: bool,
    /// Steps in a row with a gradient of 0.
    dead: u32,
}

impl LossWatch {
    /// For a model with a vocabulary of this size.
    pub fn new(vocabulary: u64) -> LossWatch {
        LossWatch {
            vocabulary,
            above: 0,
            warned: false,
            dead: 0,
        }
    }

    /// Records a step's loss and gradient norm (before clipping); returns a warning if it is due.
    pub fn step(&mut self, loss: f64, gradient_norm: f64) -> Option<String> {
        let dead = self.gradient(loss, gradient_norm);
        if loss <= limit(self.vocabulary) {
            self.above = 0;
            self.warned = false;
            return dead;
        }
        self.above += 1;
        dead.or_else(|| self.say(self.above >= STEPS, loss))
    }

    fn gradient(&mut self, loss: f64, norm: f64) -> Option<String> {
        if norm > ZERO {
            self.dead = 0;
            return None;
        }
        self.dead = self.dead.saturating_add(1);
        (self.dead == STEPS).then(|| {
            format!(
                "the gradient has been 0 for {STEPS} steps at a loss of {loss:.2}, and guessing evenly among {} \
                 tokens gives {:.2}: the model does not learn; check the initial weights, lower the learning \
                 rate, and start again",
                self.vocabulary,
                (self.vocabulary.max(2) as f64).ln()
            )
        })
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
        assert!((0..9).all(|_| watch.step(31.0, 1.0).is_none()));
        let warning = watch.step(31.0, 1.0).unwrap();
        assert!(
            warning
                .starts_with("the loss is 31.00, and guessing evenly among 64 tokens gives 4.16")
        );
        assert!((0..100).all(|_| watch.step(31.0, 1.0).is_none()));
        assert_eq!(watch.evaluation(31.0), None);
        // The run recovers and diverges again.
        assert_eq!(watch.step(5.0, 1.0), None);
        assert!((0..9).all(|_| watch.step(9.0, 1.0).is_none()));
        assert!(watch.step(9.0, 1.0).is_some());
    }

    #[test]
    fn a_model_without_gradient_is_reported_once() {
        let mut watch = LossWatch::new(300);
        assert!((0..9).all(|_| watch.step(5.7, 0.0).is_none()));
        insta::assert_snapshot!(watch.step(5.7, 0.0).unwrap(), @"the gradient has been 0 for 10 steps at a loss of 5.70, and guessing evenly among 300 tokens gives 5.70: the model does not learn; check the initial weights, lower the learning rate, and start again");
        assert!((0..100).all(|_| watch.step(5.7, 0.0).is_none()));
        // A single batch without gradient is no dead model.
        for _ in 0..30 {
            assert_eq!(watch.step(5.7, 1e-3), None);
            assert!((0..5).all(|_| watch.step(5.7, 0.0).is_none()));
        }
    }

    #[test]
    fn a_spike_and_an_untrained_model_give_no_warning() {
        let mut watch = LossWatch::new(64);
        for _ in 0..30 {
            assert!((0..5).all(|_| watch.step(40.0, 1.0).is_none()));
            assert_eq!(watch.step(4.3, 1.0), None);
        }
        assert_eq!(watch.evaluation(4.2), None);
        assert!(watch.evaluation(40.0).is_some());
    }
}
