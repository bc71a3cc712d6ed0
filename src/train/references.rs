//! The reference model's log-probabilities of the completions of a data set, as far as a run meets them. The start weights
//! give them, once, before the first step: all ranks together, a block of samples at a time. What is known lies beside the
//! prepared samples, so that a process that begins later, in another world, computes only the rest. The file: a
//! [`Fingerprint`], the values as f64 (little endian), and at the end their checksum, as text.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::TrainError;
use super::message::exchange;
use super::mismatched::Mismatched;
use super::orders::report;
use super::preferences::Loss;
use super::run::Run;
use crate::checkpoint::Checksum;
use crate::comm::Collective;
use crate::data::{Collated, DataError, Dataset};
use crate::engine::{Engine, IGNORE};
use crate::lifecycle::protocol::Report;
use crate::objective::Kl;
use crate::plan::Plan;
use crate::recipe::Spec;
use crate::samples::Order;
use crate::util::durable::{self, FileError};
use crate::util::input;

/// Directory within the prepared data.
const DIRECTORY: &str = "reference";
/// Micro-batches of each rank in a block.
const BLOCK: u64 = 4;
/// Time between two lines on the progress.
const SAID: Duration = Duration::from_secs(30);
/// Bytes of a checksum in a file.
const DIGITS: usize = 32;

/// What the values of a file follow from: a checksum of each of [`PARTS`].
type Fingerprint = [Checksum; 3];
const PARTS: [&str; 3] = ["model", "data or chat template", "choice of rows"];

/// The values of a file, as a checkpoint states them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Pin {
    fingerprint: Fingerprint,
    values: Checksum,
}

/// The values of a run, by the names of files.
pub type Pins = BTreeMap<String, Pin>;

/// The log-probabilities, nats: the rows of a sample one after the other.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct References {
    values: Vec<f64>,
    rows: usize,
    /// Where the rows of a sample are; `None`: by its number.
    places: Option<HashMap<u64, u64>>,
}

impl References {
    /// Those of the rows of these samples, in their order.
    pub fn of(&self, samples: impl IntoIterator<Item = u64>) -> Vec<f64> {
        let rows = |sample: u64| {
            let place = match &self.places {
                None => sample,
                Some(places) => places[&sample],
            };
            let first = place as usize * self.rows;
            &self.values[first..first + self.rows]
        };
        samples.into_iter().flat_map(rows).copied().collect()
    }
}

/// What the reference model says of a data set.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Compared {
    pub samples: References,
    /// Of mismatched rows, by position, where the loss has a KL estimate.
    pub mismatched: Option<(Mismatched, References)>,
}

/// A data set for which a run needs the reference model.
pub struct Source<'a> {
    samples: Rows<'a>,
    mismatched: Option<Rows<'a>>,
}

/// Rows and where their log-probabilities are kept.
struct Rows<'a> {
    path: PathBuf,
    fingerprint: Fingerprint,
    /// The values that the start checkpoint states for this fingerprint.
    pinned: Option<Checksum>,
    dataset: &'a Dataset,
    which: Which,
}

/// The rows of a data set for which log-probabilities are needed.
#[derive(Clone)]
enum Which {
    /// Those of the first samples, this many.
    First(u64),
    /// Those of the samples at the first positions of an order, which are less than an epoch.
    Consumed { order: Order, positions: u64 },
    /// Mismatched ones, by position.
    Mismatched(Mismatched),
}

impl Which {
    /// Those of the samples that training consumes.
    fn consumed(run: &Run, samples: u64) -> Result<Which, TrainError> {
        let order = run.order(samples)?;
        let positions = run.most_samples()?;
        Ok(match positions < order.epoch_length() {
            true => Which::Consumed { order, positions },
            false => Which::First(samples),
        })
    }

    /// Number of samples, or of positions.
    fn len(&self) -> u64 {
        match self {
            Which::First(samples) => *samples,
            Which::Consumed { positions, .. } => *positions,
            Which::Mismatched(mismatched) => mismatched.len(),
        }
    }

    fn collate(&self, dataset: &Dataset, range: Range<u64>) -> Result<Collated, DataError> {
        match self {
            Which::First(_) => dataset.collate(range),
            Which::Consumed { order, .. } => dataset.collate(range.map(|at| order.at(at))),
            Which::Mismatched(mismatched) => mismatched.collate(dataset, range),
        }
    }

    /// Where each sample is in this order; `None`: by its number.
    fn places(&self) -> Option<HashMap<u64, u64>> {
        let Which::Consumed { order, positions } = self else {
            return None;
        };
        Some((0..*positions).map(|at| (order.at(at), at)).collect())
    }

    /// Identifies the rows of a data set.
    fn checksum(&self, spec: &Spec) -> Checksum {
        let key = match self {
            Which::First(samples) => vec![*samples],
            Which::Consumed { order, positions } => vec![order.epoch_length(), *positions],
            Which::Mismatched(mismatched) => mismatched.key().to_vec(),
        };
        let order = [spec.seed, u64::from(spec.data.shuffle)];
        let numbers: Vec<u64> = key.into_iter().chain(order).collect();
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
        Checksum::of(&bytes.collect::<Vec<u8>>())
    }
}

/// The data sets of a run, the training data first; none for a loss without a reference model.
pub fn sources<'a>(
    run_dir: &Path,
    run: &Run,
    plan: &Plan,
    training: &'a Dataset,
    evaluation: Option<&'a Dataset>,
    pins: &Pins,
) -> Result<Vec<Source<'a>>, TrainError> {
    let Some(loss) = Loss::of(&run.spec).filter(Loss::has_reference) else {
        return Ok(Vec::new());
    };
    let directory = Run::data(run_dir).join(DIRECTORY);
    let [model, data] = model_and_data(run)?;
    let rows = |name: &str, dataset, which: Which| {
        let fingerprint = [model, data, which.checksum(&run.spec)];
        let pin = pins.get(name).filter(|pin| pin.fingerprint == fingerprint);
        Rows {
            path: directory.join(name),
            fingerprint,
            pinned: pin.map(|pin| pin.values),
            dataset,
            which,
        }
    };
    let completions = run.spec.preference.kl_completions;
    let pairs = |order, block, positions| {
        Mismatched::new(order, block, positions, completions).map(Which::Mismatched)
    };
    let mut mismatched = None;
    if let Some(kl) = loss.kl() {
        let block = match kl {
            Kl::Global => run.global_batch_size,
            Kl::MicroBatch => plan.per_device_batch_size,
        };
        mismatched = pairs(run.order(training.len())?, block, run.budget()?);
    }
    let consumed = Which::consumed(run, training.len())?;
    let mut sources = vec![Source {
        samples: rows("train.bin", training, consumed),
        mismatched: mismatched.map(|which| rows("train-mismatched.bin", training, which)),
    }];
    if let Some(dataset) = evaluation {
        let samples = run.evaluated_samples(dataset.len());
        // Evaluations have one estimate over all of their samples.
        let mut mismatched = None;
        if loss.kl().is_some()
            && let Ok(order) = Order::new(run.spec.seed, dataset.len(), false)
        {
            mismatched = pairs(order, samples, samples);
        }
        sources.push(Source {
            samples: rows("evaluation.bin", dataset, Which::First(samples)),
            mismatched: mismatched.map(|which| rows("evaluation-mismatched.bin", dataset, which)),
        });
    }
    Ok(sources)
}

/// Whether every rank has all log-probabilities of all data sets. Rank 0 reports why those that a file had are computed again.
/// Collective.
pub fn are_known(sources: &[Source<'_>], world: &dyn Collective) -> Result<bool, TrainError> {
    let mut are_known = true;
    let mut lost = Vec::new();
    for source in sources {
        for rows in [Some(&source.samples), source.mismatched.as_ref()] {
            let Some(rows) = rows else { continue };
            let known = rows.known();
            let is_whole = known.as_ref().is_ok_and(|known| known.len() == rows.len());
            let everyones = exchange(world, &is_whole)?;
            are_known &= everyones.iter().all(|is_whole| *is_whole);
            if let (Err(reason), false) = (known, everyones.contains(&true)) {
                lost.push(format!("{} {reason}", rows.path.display()));
            }
        }
    }
    if world.rank() == 0 && !lost.is_empty() {
        let message = format!(
            "the reference log-probabilities are computed again: {}",
            lost.join("; ")
        );
        report(&Report::Warning { message });
    }
    Ok(are_known)
}

impl Source<'_> {
    /// All log-probabilities. The engine has the start weights unless [`are_known`]. Collective; one rank of each host
    /// `writes`. `pins` get the values.
    pub fn complete(
        &self,
        engine: &mut dyn Engine,
        world: &dyn Collective,
        micro_batch: u64,
        writes: bool,
        pins: &mut Pins,
    ) -> Result<Compared, TrainError> {
        let samples = (self.samples).complete(engine, world, micro_batch, writes, pins)?;
        let mut mismatched = None;
        if let Some(rows) = &self.mismatched {
            let references = rows.complete(engine, world, micro_batch, writes, pins)?;
            if let Which::Mismatched(pairs) = &rows.which {
                mismatched = Some((pairs.clone(), references));
            }
        }
        Ok(Compared {
            samples,
            mismatched,
        })
    }
}

impl Rows<'_> {
    /// Rows of a sample.
    fn rows(&self) -> usize {
        self.dataset.kind().rows() as usize
    }

    fn len(&self) -> usize {
        self.which.len() as usize * self.rows()
    }

    /// Length of the complete file.
    fn bytes(&self) -> u64 {
        (PARTS.len() * DIGITS + self.len() * size_of::<f64>() + DIGITS) as u64
    }

    /// The beginning of the file.
    fn header(&self) -> String {
        self.fingerprint.map(|part| part.to_string()).concat()
    }

    /// Those that the file holds for this model and these rows: of whole samples, from the first on. If the start checkpoint
    /// states the values, only those. An error says why the values that were computed are lost.
    fn known(&self) -> Result<Vec<f64>, String> {
        let incomplete = "is missing or incomplete".to_owned();
        let bytes = input::read(&self.path, self.bytes()).unwrap_or_default();
        let header = self.header();
        let Some((begin, values)) = bytes.split_at_checked(header.len()) else {
            return self.pinned.map_or(Ok(Vec::new()), |_| Err(incomplete));
        };
        let parts = PARTS.into_iter().zip(begin.chunks(DIGITS));
        let same = parts.zip(header.as_bytes().chunks(DIGITS));
        let changed = same.filter(|((_, found), expected)| found != expected);
        let changed: Vec<&str> = changed.map(|((part, _), _)| part).collect();
        if !changed.is_empty() {
            return Err(format!("is of another {}", changed.join(" and ")));
        }
        match values.split_at_checked(self.len() * size_of::<f64>()) {
            None if self.pinned.is_some() => Err(incomplete),
            None => {
                let mut values = values_of(values);
                values.truncate(values.len() / self.rows() * self.rows());
                Ok(values)
            }
            Some((all, end)) => {
                let checksum = Checksum::of(all);
                if end != checksum.to_string().as_bytes() {
                    Err("is damaged".to_owned())
                } else if self.pinned.is_some_and(|pinned| pinned != checksum) {
                    Err("has other values than the checkpoint".to_owned())
                } else {
                    Ok(values_of(all))
                }
            }
        }
    }

    fn complete(
        &self,
        engine: &mut dyn Engine,
        world: &dyn Collective,
        micro_batch: u64,
        writes: bool,
        pins: &mut Pins,
    ) -> Result<References, TrainError> {
        let mut values = self.known().unwrap_or_default();
        let writes = writes && values.len() < self.len();
        // The ranks go on from what one of them knows.
        let known: Vec<u64> = exchange(world, &(values.len() as u64))?;
        let most = known.iter().copied().max().unwrap_or(0);
        if known.iter().any(|&len| len < most) {
            let first = known.iter().position(|&len| len == most).unwrap_or(0);
            let sent = match world.rank() == first {
                true => bytes_of(&values),
                false => Vec::new(),
            };
            values = values_of(&world.exchange(&sent)?[first]);
        }
        let mut file = match writes {
            true => Some(self.begin(&values)?),
            false => None,
        };
        let rows = self.rows();
        let mut said = Instant::now();
        while values.len() < self.len() {
            let begin = (values.len() / rows) as u64;
            if world.rank() == 0 && said.elapsed() > SAID {
                said = Instant::now();
                let message = format!(
                    "the reference log-probabilities of {begin} of {} samples are computed",
                    self.which.len()
                );
                report(&Report::Warning { message });
            }
            let of_block = self.block(begin, engine, world, micro_batch)?;
            if let Some(file) = &mut file {
                let written = file.write_all(&bytes_of(&of_block));
                written.map_err(|error| self.failed(error))?;
            }
            values.extend(of_block);
        }
        let checksum = Checksum::of(&bytes_of(&values));
        if let Some(mut file) = file {
            let written = file.write_all(checksum.to_string().as_bytes());
            let written = written.and_then(|()| file.sync_all());
            written.map_err(|error| self.failed(error))?;
        }
        if world.rank() == 0 && self.pinned.is_some_and(|pinned| pinned != checksum) {
            let message = format!(
                "{} differs from the values of the checkpoint: this machine rounds otherwise, or has other start weights",
                self.path.display()
            );
            report(&Report::Warning { message });
        }
        let name = self.path.file_name().unwrap_or_default();
        let pin = Pin {
            fingerprint: self.fingerprint,
            values: checksum,
        };
        pins.insert(name.to_string_lossy().into_owned(), pin);
        Ok(References {
            values,
            rows,
            places: self.which.places(),
        })
    }

    /// The next block of samples: each rank computes its micro-batches, in the order of the ranks.
    fn block(
        &self,
        begin: u64,
        engine: &mut dyn Engine,
        world: &dyn Collective,
        micro_batch: u64,
    ) -> Result<Vec<f64>, TrainError> {
        let end = self.which.len();
        let mut own = Vec::new();
        for nth in 0..BLOCK {
            world.check()?;
            let place = world.rank() as u64 * BLOCK + nth;
            let first = (begin + place * micro_batch).min(end);
            let last = (first + micro_batch).min(end);
            if first == last {
                engine.join_evaluation()?;
                continue;
            }
            own.extend(answers(
                engine,
                &self.which.collate(self.dataset, first..last)?,
            )?);
        }
        let all = world.exchange(&bytes_of(&own))?;
        Ok(all.iter().flat_map(|bytes| values_of(bytes)).collect())
    }

    /// The file with the known values, to be continued.
    fn begin(&self, values: &[f64]) -> Result<File, TrainError> {
        if let Some(directory) = self.path.parent() {
            durable::create_directory(directory)?;
        }
        let mut bytes = self.header().into_bytes();
        bytes.extend(bytes_of(values));
        durable::write_atomically(&self.path, &bytes)?;
        let file = OpenOptions::new().append(true).open(&self.path);
        Ok(file.map_err(|error| self.failed(error))?)
    }

    /// The error of a file that cannot be finished, which is removed.
    fn failed(&self, error: std::io::Error) -> FileError {
        let error = FileError::from_io("write", &self.path, self.bytes(), error);
        // The first error is the one to report.
        let _ = durable::remove(&self.path);
        error
    }
}

/// The log-probabilities of the completions of a micro-batch's rows, nats.
pub fn answers(engine: &mut dyn Engine, collated: &Collated) -> Result<Vec<f64>, TrainError> {
    let losses = engine.losses(collated.micro_batch())?;
    let (losses, targets) = (
        losses.chunks(collated.seq_len),
        collated.targets.chunks(collated.seq_len),
    );
    let of_row = |(losses, targets): (&[f64], &[u32])| {
        let cells = losses.iter().zip(targets);
        let answer = cells.filter(|(_, target)| **target != IGNORE);
        -answer.map(|(loss, _)| loss).sum::<f64>()
    };
    Ok(losses.zip(targets).map(of_row).collect())
}

/// The values as files and messages hold them.
fn bytes_of(values: &[f64]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect()
}

/// The values of [`bytes_of`], without an unfinished last one.
fn values_of(bytes: &[u8]) -> Vec<f64> {
    let (values, _) = bytes.as_chunks();
    values.iter().copied().map(f64::from_le_bytes).collect()
}

/// Identifies the start weights, by what the launch has found in their files, and the prepared data.
fn model_and_data(run: &Run) -> Result<[Checksum; 2], TrainError> {
    let built_in = run.built_in()?;
    let of_files = built_in.frozen_digest.as_deref().unwrap_or_default();
    let mut model = format!("{} {of_files}", built_in.model.to_json());
    if built_in.weights.is_none() {
        model += &format!(" {}", run.spec.seed);
    }
    let data = built_in.data_fingerprint.as_deref().unwrap_or_default();
    Ok([model.as_str(), data].map(|text| Checksum::of(text.as_bytes())))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;
    use crate::comm::solo::Solo;
    use crate::data::{PrepareRequest, prepare};
    use crate::engine::ModelConfig;
    use crate::engine::cpu::{CpuEngine, CpuOptions};
    use crate::recipe::schema::spec::{self, DataSource, Objective};

    /// 40 pairs, prepared.
    fn pairs() -> (TempDir, Dataset) {
        let folder = tempfile::tempdir().unwrap();
        let pair = |i| {
            format!(
                "{{\"prompt\": \"{i}+1=\", \"chosen\": \"{}\", \"rejected\": \"{i}\"}}",
                i + 1
            )
        };
        let rows: Vec<String> = (0..40).map(pair).collect();
        std::fs::write(folder.path().join("pairs.jsonl"), rows.join("\n")).unwrap();
        let spec = Spec {
            data: spec::Data {
                train: vec![DataSource {
                    path: "pairs.jsonl".to_owned(),
                    ..DataSource::default()
                }],
                sequence_length: 16,
                ..spec::Data::default()
            },
            tokenizer: spec::Tokenizer {
                path: Some("byte".to_owned()),
                chat_template: None,
            },
            objective: Objective::Dpo,
            seed: 1,
            ..Spec::default()
        };
        let directory = folder.path().join("data");
        let request = PrepareRequest::of(&spec, &str::to_owned, None, folder.path(), &directory);
        prepare(&request, &mut |_| {}).unwrap();
        let dataset = Dataset::train(&directory).unwrap();
        (folder, dataset)
    }

    fn engine(seed: u64) -> CpuEngine {
        let config = ModelConfig {
            hidden_size: 16,
            intermediate_size: 24,
            num_hidden_layers: 1,
            num_attention_heads: 2,
            num_key_value_heads: 2,
            head_dim: 8,
            vocab_size: 259,
            max_position_embeddings: 32,
            norm_eps: 1e-5,
            rope_theta: 10_000.0,
            initializer_range: 0.5,
            ..ModelConfig::default()
        };
        CpuEngine::new(config, CpuOptions::default(), None, Some(seed)).unwrap()
    }

    /// Values of a fingerprint, which depend on nothing else than the engine.
    fn rows<'a>(path: PathBuf, model: u8, dataset: &'a Dataset, which: Which) -> Rows<'a> {
        Rows {
            path,
            fingerprint: [Checksum::of(&[model]), Checksum::of(b""), Checksum::of(b"")],
            pinned: None,
            dataset,
            which,
        }
    }

    #[test]
    fn what_a_file_holds_is_not_computed_again_and_a_damaged_one_is() {
        let (folder, dataset) = pairs();
        let path = folder.path().join("reference/train.bin");
        let source = |model| rows(path.clone(), model, &dataset, Which::First(dataset.len()));
        let complete = |seed, model| {
            let (source, mut pins) = (source(model), Pins::new());
            let completed = source.complete(&mut engine(seed), &Solo, 3, true, &mut pins);
            completed.unwrap()
        };
        let known = |model| source(model).known().map(|known| known.len());
        assert_eq!(known(1), Ok(0));
        let first = complete(1, 1);
        assert_eq!(known(1), Ok(80));
        assert_eq!(known(2), Err("is of another model".to_owned()));
        let of_one = first.of([7]);
        assert!(of_one.len() == 2 && of_one.iter().all(|value| *value < 0.0));

        // Another engine computes nothing of a complete file, and the rest of an interrupted one.
        assert_eq!(complete(2, 1), first);
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(whole.len() as u64, source(1).bytes());
        std::fs::write(&path, &whole[..96 + 8 * 25]).unwrap();
        assert_eq!(known(1), Ok(24));
        let continued = complete(2, 1);
        assert_eq!(continued.values[..24], first.values[..24]);
        assert_ne!(continued.values[24..], first.values[24..]);
        std::fs::write(&path, &whole[..96 + 8 * 25 + 3]).unwrap();
        assert_eq!(complete(1, 1), first);
        assert_eq!(std::fs::read(&path).unwrap(), whole);

        let mut damaged = whole.clone();
        damaged[200] ^= 1;
        std::fs::write(&path, damaged).unwrap();
        assert_eq!(known(1), Err("is damaged".to_owned()));
        assert_eq!(complete(1, 1), first);
        // Other weights or data.
        assert_ne!(complete(2, 2), first);
    }

    #[test]
    fn values_that_a_checkpoint_does_not_state_are_computed_again() {
        let (folder, dataset) = pairs();
        let path = folder.path().join("reference/train.bin");
        let complete = |seed, pinned, pins: &mut Pins| {
            let rows = Rows {
                pinned,
                ..rows(path.clone(), 1, &dataset, Which::First(dataset.len()))
            };
            let known = rows.known().map(|known| known.len());
            let completed = rows.complete(&mut engine(seed), &Solo, 3, true, pins);
            (known, completed.unwrap().values)
        };
        let mut pins = Pins::new();
        let (_, first) = complete(1, None, &mut pins);
        let pinned = pins["train.bin"].values;
        assert_eq!(
            complete(2, Some(pinned), &mut pins),
            (Ok(80), first.clone())
        );

        // A whole file of other values, an interrupted one, and none.
        std::fs::remove_file(&path).unwrap();
        let (_, second) = complete(2, None, &mut Pins::new());
        assert_ne!(second, first);
        let refused = Err("has other values than the checkpoint".to_owned());
        assert_eq!(
            complete(1, Some(pinned), &mut pins),
            (refused, first.clone())
        );
        let lost = Err("is missing or incomplete".to_owned());
        std::fs::write(&path, &std::fs::read(&path).unwrap()[..96 + 8 * 25]).unwrap();
        assert_eq!(
            complete(1, Some(pinned), &mut pins),
            (lost.clone(), first.clone())
        );
        std::fs::remove_file(&path).unwrap();
        assert_eq!(complete(1, Some(pinned), &mut pins), (lost, first));
        assert_eq!(pins["train.bin"].values, pinned);
    }

    #[test]
    fn only_the_samples_that_a_run_consumes_are_computed() {
        let (folder, dataset) = pairs();
        let complete = |name: &str, which| {
            let rows = rows(folder.path().join(name), 1, &dataset, which);
            let mut pins = Pins::new();
            let completed = rows.complete(&mut engine(1), &Solo, 3, true, &mut pins);
            completed.unwrap()
        };
        let all = complete("all.bin", Which::First(dataset.len()));
        let order = Order::new(5, dataset.len(), true).unwrap();
        let which = Which::Consumed {
            order: order.clone(),
            positions: 8,
        };
        let consumed = complete("consumed.bin", which);
        assert_eq!(consumed.values.len(), 16);
        for sample in (0..8).map(|at| order.at(at)) {
            // The rows beside a row change the last bits.
            let (found, expected) = (consumed.of([sample]), all.of([sample]));
            let mut both = found.iter().zip(&expected);
            assert!(both.all(|(found, expected)| (found - expected).abs() < 1e-5));
        }
    }
}
