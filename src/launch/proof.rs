//! Proves the sample ledger: compares the digests recorded in the forward passes with digests
//! recomputed offline from the data sources.

use std::fmt;

use tempfile::TempDir;

use super::checkpoints::Checkpoints;
use super::{LaunchError, RunDir};
use crate::checkpoint::Checksum;
use crate::data::{self, DataError, Dataset, PrepareRequest};
use crate::lifecycle::verdict::Verdict;
use crate::lifecycle::{files, generation};
use crate::samples::{self, Digest, Fault, Proof};
use crate::train::{BuiltIn, Run, TrainState, checkpoint_ref};
use crate::util::durable::{self, FileError};
use crate::util::format::count;

pub struct LedgerProof {
    /// The checkpoint whose lineage was checked.
    pub checkpoint: String,
    /// Of the weights in it, if they were at hand.
    pub weights: Option<Checksum>,
    /// Samples in an epoch.
    pub epoch_length: u64,
    /// Samples of the data that the history never consumed; no digest covers them.
    pub untrained: u64,
    /// The proof that every sample was consumed exactly once, or the first fault.
    pub result: Result<Proof, Unproved>,
}

/// The first fault of a run's history.
#[derive(Debug, thiserror::Error)]
pub enum Unproved {
    /// The record of a generation is not what was written.
    #[error("{0}")]
    Record(String),
    #[error("{0}")]
    Ledger(Fault<DataError>),
}

impl LedgerProof {
    /// Whether every sample was consumed exactly once.
    pub fn is_proved(&self) -> bool {
        self.result.is_ok()
    }

    pub fn verdict(&self) -> Verdict {
        let proof = self.result.as_ref().ok();
        Verdict {
            proved: proof.is_some(),
            checkpoint: self.checkpoint.clone(),
            verdict: self.to_string(),
            samples: proof.map_or(0, |proof| proof.samples),
            digest: proof.map_or(String::new(), |proof| proof.digest.to_string()),
            weights: self.weights.map(|weights| weights.to_string()),
        }
    }
}

impl fmt::Display for LedgerProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.result {
            Ok(proof) => {
                write!(
                    f,
                    "{} consumed samples 0..{} of the one global order exactly once ({:.2} epochs); \
                     the forward passes received exactly these data",
                    count(proof.steps, "step"),
                    proof.samples,
                    proof.epochs(self.epoch_length)
                )?;
                match self.untrained {
                    0 => Ok(()),
                    untrained => write!(
                        f,
                        "; not covered: {} that the run never trained on",
                        count(untrained, "sample")
                    ),
                }
            }
            Err(fault) => write!(f, "{fault}"),
        }
    }
}

/// Proves the committed history of a run. Prepares the data again from its sources in a temporary
/// directory, because the run's prepared data are not trusted. Sources and settings that have changed since the
/// run began are refused as by a resume.
pub fn prove(
    run_dir: &RunDir,
    progress: &mut dyn FnMut(data::Progress),
) -> Result<LedgerProof, LaunchError> {
    let run = run_dir.run()?;
    // An external trainer has no ledger.
    run.built_in()?;
    let checkpoints = Checkpoints::of(run_dir, &run)?;
    let checkpoint_ref = match run_dir.state()? {
        Some(state) => state.checkpoint_ref,
        // A job on a cluster has its state in the API server.
        None => {
            let newest = checkpoints.latest()?;
            let newest = newest.map(|newest| checkpoints.refer(&newest));
            newest.transpose()?
        }
    };
    let checkpoint_ref = checkpoint_ref.ok_or_else(|| {
        LaunchError::usage(format!(
            "{}: no checkpoint is committed yet, so no history can be proved; wait for the \
             first one ({}), or stop the run, which commits one",
            run_dir.path().display(),
            run.recipe().key("checkpoint.every_samples")
        ))
    })?;
    let (state, weights) = match run.bucket {
        // The weights stay there: each reader compares them with their checksums.
        Some(_) => (checkpoints.read(&checkpoint_ref)?, None),
        None => {
            let checkpoint = checkpoint_ref::open(run_dir.path(), &checkpoint_ref)?;
            let weights = checkpoint.weights_checksum()?;
            (TrainState::from_checkpoint(&checkpoint)?, Some(weights))
        }
    };
    let proof = prove_history(run_dir, &checkpoint_ref.path, state, progress)?;
    Ok(LedgerProof { weights, ..proof })
}

/// As [`prove`], of the history in the state of one checkpoint.
pub fn prove_history(
    run_dir: &RunDir,
    checkpoint: &str,
    state: TrainState,
    progress: &mut dyn FnMut(data::Progress),
) -> Result<LedgerProof, LaunchError> {
    let run = run_dir.run()?;
    let built_in = run.built_in()?;
    let directory = data_again(run_dir, &run, built_in, progress)?;
    let dataset = Dataset::train(&Run::data(directory.path()))?;
    let order = run.order(dataset.len())?;
    let samples = usize::try_from(dataset.len()).unwrap_or(usize::MAX);
    let mut trained = vec![false; samples];
    let result = samples::verify(Vec::from(state.ledger), |positions| {
        let mut digest = Digest::default();
        for position in positions {
            let index = order.at(position);
            if let Some(trained) = usize::try_from(index).ok().and_then(|i| trained.get_mut(i)) {
                *trained = true;
            }
            let collated = dataset.collate([index])?;
            digest += collated.digest(0, position);
        }
        Ok::<_, DataError>(digest)
    });
    let result = match damaged_record(run_dir)? {
        Some(damaged) => Err(Unproved::Record(damaged)),
        None => result.map_err(Unproved::Ledger),
    };
    Ok(LedgerProof {
        checkpoint: checkpoint.to_owned(),
        weights: None,
        epoch_length: order.epoch_length(),
        untrained: trained.iter().filter(|trained| !**trained).count() as u64,
        result,
    })
}

/// The first record of a generation that is not what was written. A generation that has not begun has none.
fn damaged_record(run_dir: &RunDir) -> Result<Option<String>, LaunchError> {
    for number in run_dir.generations()? {
        let path = run_dir.generation(number).join(files::RECORD);
        let text = match durable::read(&path) {
            Err(error) if error.is_absent() => continue,
            read => read?,
        };
        if let Some(damage) = generation::damage(&text) {
            return Ok(Some(format!("{} is damaged: {damage}", path.display())));
        }
    }
    Ok(None)
}

/// Prepares the data again in a temporary directory.
fn data_again(
    run_dir: &RunDir,
    run: &Run,
    built_in: &BuiltIn,
    progress: &mut dyn FnMut(data::Progress),
) -> Result<TempDir, LaunchError> {
    let directory = tempfile::tempdir()
        .map_err(|error| FileError::from_io("write in", &std::env::temp_dir(), 0, error))?;
    let (began_in, again) = (Run::data(run_dir.path()), Run::data(directory.path()));
    let recipe = run.recipe();
    let key = recipe.keys();
    let request = PrepareRequest {
        began_in: Some(&began_in),
        fingerprint: built_in.data_fingerprint.as_deref(),
        ..PrepareRequest::of(&recipe.spec, &key, Some(&built_in.model), &run.base, &again)
    };
    data::prepare(&request, progress)?;
    Ok(directory)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::launch::testing::Launched;
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::{self, Request};

    #[test]
    fn changed_sources_are_named_as_by_a_resume() {
        let place = tempfile::tempdir().unwrap();
        let corpus = place.path().join("corpus.jsonl");
        std::fs::write(&corpus, "{\"text\": \"abcdefgh\"}\n".repeat(102)).unwrap();
        let lines = format!(
            "batch: {{global: 12, per_device_batch_size: 2}}\ntokenizer: {{path: byte}}\n\
             data: {{sequence_length: 8, train: [{{path: {}}}]}}",
            corpus.display()
        );
        let launched = Launched::at(place.path(), &lines, &[]);
        let run = &launched.prepared.run;
        let built_in = run.built_in().unwrap();
        assert!(data_again(&launched.run_dir, run, built_in, &mut |_| {}).is_ok());
        std::fs::write(&corpus, "{\"text\": \"abcdefgh\"}\n".repeat(101)).unwrap();
        let error = data_again(&launched.run_dir, run, built_in, &mut |_| {})
            .err()
            .unwrap();
        let message = error.to_string();
        let place = place.path().display().to_string();
        insta::assert_snapshot!(message.replace(&place, "[place]"), @"[place]/run/data: the run began with other data: changed: training data; undo the change, or start a new run");
        assert_eq!(message, launched.resume(|_| {}).err().unwrap());
    }

    #[test]
    fn a_flipped_byte_in_a_record_is_found() {
        let place = tempfile::tempdir().unwrap();
        let run_dir = RunDir::at(place.path());
        let text = "per_device_train_batch_size: 4\nevenkeel: {objective: sft, batch: {gpus: 2}}\n";
        let read = recipe::read_text(&Request::default(), text.to_owned()).unwrap();
        let plan = plan(&read, &PlanRequest::gpus(2)).unwrap();
        let record = generation::testing::record(3, Vec::new(), plan);
        record.write(place.path()).unwrap();
        assert_eq!(damaged_record(&run_dir).unwrap(), None);
        assert_eq!(run_dir.record(3).unwrap(), record);
        let path = run_dir.generation(3).join(files::RECORD);
        let whole = std::fs::read(&path).unwrap();
        let sealed: Value = serde_json::from_slice(&whole).unwrap();
        let mut keys: Vec<&String> = sealed.as_object().unwrap().keys().collect();
        keys.pop();
        assert_eq!(keys, generation::FIELDS);
        for place in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[place] ^= 1;
            std::fs::write(&path, flipped).unwrap();
            assert!(damaged_record(&run_dir).unwrap().is_some(), "byte {place}");
        }
    }

    #[test]
    fn samples_never_trained_on_are_named_in_the_proof() {
        let proof = |untrained| LedgerProof {
            weights: None,
            checkpoint: "gen-1/step-0000002".to_owned(),
            epoch_length: 100,
            untrained,
            result: Ok(Proof {
                steps: 2,
                samples: 24,
                digest: Digest::default(),
            }),
        };
        insta::assert_snapshot!(proof(76), @"2 steps consumed samples 0..24 of the one global order exactly once (0.24 epochs); the forward passes received exactly these data; not covered: 76 samples that the run never trained on");
        insta::assert_snapshot!(proof(0), @"2 steps consumed samples 0..24 of the one global order exactly once (0.24 epochs); the forward passes received exactly these data");
        let damaged = LedgerProof {
            result: Err(Unproved::Record("a record is damaged".to_owned())),
            ..proof(0)
        };
        assert!(proof(0).is_proved() && !damaged.is_proved());
        let verdict = damaged.verdict();
        assert_eq!((verdict.proved, verdict.samples), (false, 0));
        assert_eq!(verdict.verdict, "a record is damaged");
    }
}
