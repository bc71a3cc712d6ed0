//! Proves the sample ledger: compares the digests recorded in the forward passes with digests
//! recomputed offline from the data sources.

use std::fmt;

use super::request::data_of;
use super::{LaunchError, RunDir};
use crate::data::{self, DataError};
use crate::engine::IGNORE;
use crate::samples::{self, Digest, Fault, Proof};
use crate::train::{Setup, TrainState, checkpoint_ref};
use crate::util::durable::FileError;
use crate::util::format::count;

/// Result of [`prove`].
pub struct LedgerProof {
    /// The checkpoint whose lineage was checked.
    pub checkpoint: String,
    /// Samples in an epoch.
    pub epoch_length: u64,
    /// The proof that every sample was consumed exactly once, or the first fault.
    pub result: Result<Proof, Fault<DataError>>,
}

impl LedgerProof {
    /// Whether every sample was consumed exactly once.
    pub fn is_proved(&self) -> bool {
        self.result.is_ok()
    }

    /// Samples of the proved history; 0 after a fault.
    pub fn samples(&self) -> u64 {
        self.result.as_ref().map_or(0, |proof| proof.samples)
    }
}

impl fmt::Display for LedgerProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.result {
            Ok(proof) => write!(
                f,
                "{} consumed samples 0..{} of the one global order exactly once ({:.2} epochs); \
                 the forward passes received exactly these data",
                count(proof.steps, "step"),
                proof.samples,
                proof.epochs(self.epoch_length)
            ),
            Err(fault) => write!(f, "{fault}"),
        }
    }
}

/// Proves the committed history of a run. Prepares the data again from its sources in a temporary
/// directory, because the run's prepared data are not trusted.
pub fn prove(
    run: &RunDir,
    progress: &mut dyn FnMut(data::Progress),
) -> Result<LedgerProof, LaunchError> {
    let setup = run.setup()?;
    let model = setup.model()?;
    let recipe = setup.recipe();
    let checkpoint_ref = run
        .state()?
        .and_then(|state| state.checkpoint_ref)
        .ok_or_else(|| LaunchError::Usage {
            message: format!(
                "{}: no checkpoint is committed yet, so no history can be proved; wait for the \
                 first one ({}), or stop the run, which commits one",
                run.path().display(),
                recipe.key("checkpoint.every_samples")
            ),
        })?;
    let state = TrainState::from_checkpoint(&checkpoint_ref::open(run.path(), &checkpoint_ref)?)?;

    let directory = tempfile::tempdir()
        .map_err(|error| FileError::from_io("write in", &std::env::temp_dir(), 0, error))?;
    let data = Setup::data(directory.path());
    let key = recipe.keys();
    let request = data_of(&recipe, &key, Some(model), &setup.base, &data);
    data::prepare(&request, progress)?;
    let dataset = setup.training_data(directory.path())?;
    let order = setup.order(dataset.len())?;
    let result = samples::verify(Vec::from(state.ledger), |positions| {
        let mut digest = Digest::default();
        for position in positions {
            let collated = dataset.collate([order.at(position).index])?;
            let (tokens, targets) = collated.row(0);
            digest += Digest::of(position, tokens, targets, IGNORE);
        }
        Ok::<_, DataError>(digest)
    });
    Ok(LedgerProof {
        checkpoint: checkpoint_ref.path,
        epoch_length: order.epoch_length(),
        result,
    })
}
