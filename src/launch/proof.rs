//! The ledger's proof: the digests of what really entered the forward passes, recorded while
//! training, against the same digests recomputed offline from the sources of the data.

use super::{LaunchError, RunDir};
use crate::engine::IGNORE;
use crate::samples::{self, Digest, Fault, Proof};
use crate::train::data::{self, DataError};
use crate::train::{Setup, TrainState, pin};

/// What the proof came to.
pub struct Verdict {
    /// The checkpoint whose lineage was proved.
    pub checkpoint: String,
    /// Samples in an epoch.
    pub epoch_length: u64,
    /// Every sample exactly once, or the first fault.
    pub result: Result<Proof, Fault<DataError>>,
}

/// Proves the committed history of a run. The data is prepared again from its sources, into a
/// temporary directory: what the run prepared for itself is not trusted.
pub fn prove(
    run: &RunDir,
    progress: &mut dyn FnMut(data::Progress),
) -> Result<Verdict, LaunchError> {
    let setup = run.setup()?;
    let pin = run
        .state()?
        .and_then(|state| state.pin)
        .ok_or_else(|| LaunchError::Usage {
            message: "no checkpoint is committed yet: there is no history to prove".into(),
        })?;
    let state = TrainState::from_checkpoint(&pin::open(run.path(), &pin)?)?;

    let directory = tempfile::tempdir().map_err(|error| LaunchError::Directory {
        path: std::env::temp_dir(),
        error,
    })?;
    let data = Setup::data(directory.path());
    super::prepare::data(&setup, &data, false, progress)?;
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
    Ok(Verdict {
        checkpoint: pin.path,
        epoch_length: order.epoch_length(),
        result,
    })
}
