//! Whether a loss can still be that of a language model that learns.
//!
//! A model that knows nothing at all gives each of V tokens the probability 1/V, a loss of ln V. At
//! [`FACTOR`] times that it gives the right token V^−2 on (geometric) average: it is sure of the
//! wrong ones. No usual initialisation does that, and no data can teach it; a learning rate that is
//! far too large can, and gradient clipping keeps such a loss finite for as long as one likes. It is
//! no reason to end a run that may recover, but one to speak up.

/// A loss is absurd above this many times ln V.
const FACTOR: f64 = 2.0;
/// A single step may be a bad batch; so many in a row are not.
const STEPS: u32 = 10;

/// The loss above which a model of so many tokens has diverged, nats.
pub fn limit(vocabulary: u64) -> f64 {
    FACTOR * (vocabulary.max(2) as f64).ln()
}

/// Watches the losses of a run and says once when they have become absurd; again only after they
/// have been below the limit.
#[derive(Debug, Clone)]
pub struct LossWatch {
    vocabulary: u64,
    /// Steps in a row above the limit.
    above: u32,
    said: bool,
}

impl LossWatch {
    /// For a model of so many tokens.
    pub fn new(vocabulary: u64) -> LossWatch {
        LossWatch {
            vocabulary,
            above: 0,
            said: false,
        }
    }

    /// Takes in a step's loss; returns what there is to say about it.
    pub fn step(&mut self, loss: f64) -> Option<String> {
        if loss <= limit(self.vocabulary) {
            *self = LossWatch::new(self.vocabulary);
            return None;
        }
        self.above += 1;
        self.say(self.above >= STEPS, loss)
    }

    /// Takes in an evaluation's loss, or the last one of the run: it speaks for many samples.
    pub fn evaluation(&mut self, loss: f64) -> Option<String> {
        self.say(loss > limit(self.vocabulary), loss)
    }

    fn say(&mut self, absurd: bool, loss: f64) -> Option<String> {
        if !absurd || std::mem::replace(&mut self.said, true) {
            return None;
        }
        Some(warning(loss, self.vocabulary))
    }
}

/// What there is to say about an absurd loss.
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
    fn an_absurd_loss_is_told_once_it_lasts_and_not_again() {
        // 2 ln 64 is 8.3.
        let mut watch = LossWatch::new(64);
        assert!((0..9).all(|_| watch.step(31.0).is_none()));
        let said = watch.step(31.0).unwrap();
        assert!(
            said.starts_with("the loss is 31.00, and guessing evenly among 64 tokens gives 4.16")
        );
        assert!((0..100).all(|_| watch.step(31.0).is_none()));
        assert_eq!(watch.evaluation(31.0), None);
        // It recovered, and went astray again.
        assert_eq!(watch.step(5.0), None);
        assert!((0..9).all(|_| watch.step(9.0).is_none()));
        assert!(watch.step(9.0).is_some());
    }

    #[test]
    fn a_spike_and_an_untrained_model_are_nothing_to_talk_about() {
        let mut watch = LossWatch::new(64);
        for _ in 0..30 {
            assert!((0..5).all(|_| watch.step(40.0).is_none()));
            assert_eq!(watch.step(4.3), None);
        }
        assert_eq!(watch.evaluation(4.2), None);
        assert!(watch.evaluation(40.0).is_some());
    }
}
