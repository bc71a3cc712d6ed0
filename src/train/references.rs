//! The reference model's log-probabilities of the completions of a data set, as far as a run meets them. The start weights
//! give them, once, before the first step: all ranks together, a block of samples at a time. What is known lies beside the
//! prepared samples, so that a process that begins later, in another world, computes only the rest. The file: the fingerprint
//! of model and data (16 bytes), the values as f64 (little endian), and at the end their checksum (XXH3, 16 bytes).

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

use super::TrainError;
use super::message::exchange;
use super::mismatched::Mismatched;
use super::orders::report;
use super::preferences::Loss;
use super::run::Run;
use super::weights::{Hashed, hash_weights};
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
/// Bytes of the files of weights that enter the fingerprint, from each file's beginning.
const SAMPLED: u64 = 1 << 20;

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
    /// Identifies model and rows.
    fingerprint: [u8; 16],
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

    /// Identifies model and rows.
    fn fingerprint(&self, of_data: [u8; 16], spec: &Spec) -> [u8; 16] {
        let key = match self {
            Which::First(samples) => vec![*samples],
            Which::Consumed { order, positions } => vec![order.epoch_length(), *positions],
            Which::Mismatched(mismatched) => mismatched.key().to_vec(),
        };
        let order = [spec.seed, u64::from(spec.data.shuffle)];
        let mut hash = Xxh3::new();
        hash.update(&of_data);
        for number in key.into_iter().chain(order) {
            hash.update(&number.to_le_bytes());
        }
        hash.digest128().to_le_bytes()
    }
}

/// The data sets of a run, the training data first; none for a loss without a reference model.
pub fn sources<'a>(
    run_dir: &Path,
    run: &Run,
    plan: &Plan,
    training: &'a Dataset,
    evaluation: Option<&'a Dataset>,
) -> Result<Vec<Source<'a>>, TrainError> {
    let Some(loss) = Loss::of(&run.spec).filter(Loss::has_reference) else {
        return Ok(Vec::new());
    };
    let directory = Run::data(run_dir).join(DIRECTORY);
    let of_data = fingerprint(run)?;
    let rows = |name: &str, dataset, which: Which| Rows {
        path: directory.join(name),
        fingerprint: which.fingerprint(of_data, &run.spec),
        dataset,
        which,
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

/// Whether every rank has all log-probabilities of all data sets. Collective.
pub fn are_known(sources: &[Source<'_>], world: &dyn Collective) -> Result<bool, TrainError> {
    let mut are_known = true;
    for source in sources {
        for rows in [Some(&source.samples), source.mismatched.as_ref()] {
            are_known &= rows.map_or(Ok(true), |rows| rows.are_known(world))?;
        }
    }
    Ok(are_known)
}

impl Source<'_> {
    /// All log-probabilities. The engine has the start weights unless [`are_known`]. Collective; one rank of each host
    /// `writes`.
    pub fn complete(
        &self,
        engine: &mut dyn Engine,
        world: &dyn Collective,
        micro_batch: u64,
        writes: bool,
    ) -> Result<Compared, TrainError> {
        let samples = self.samples.complete(engine, world, micro_batch, writes)?;
        let mut mismatched = None;
        if let Some(rows) = &self.mismatched {
            let references = rows.complete(engine, world, micro_batch, writes)?;
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

    /// Number of values.
    fn len(&self) -> usize {
        self.which.len() as usize * self.rows()
    }

    /// Those that the file holds for this model and these data: of whole samples, from the first on. None of a file that is
    /// complete and damaged.
    fn known(&self) -> Vec<f64> {
        let all = (self.len() * size_of::<f64>()) as u64;
        let bytes = input::read(&self.path, all + 32).unwrap_or_default();
        let Some(values) = bytes.strip_prefix(&self.fingerprint) else {
            return Vec::new();
        };
        let values = match values.split_at_checked(self.len() * size_of::<f64>()) {
            None => values,
            Some((all, end)) if end == xxh3_128(all).to_le_bytes() => all,
            Some(_) => return Vec::new(),
        };
        let mut values = values_of(values);
        values.truncate(self.len());
        values.truncate(values.len() / self.rows() * self.rows());
        values
    }

    /// Whether every rank has all of them. Collective.
    fn are_known(&self, world: &dyn Collective) -> Result<bool, TrainError> {
        let known = self.known().len() == self.len();
        Ok(exchange(world, &known)?.into_iter().all(|known| known))
    }

    fn complete(
        &self,
        engine: &mut dyn Engine,
        world: &dyn Collective,
        micro_batch: u64,
        writes: bool,
    ) -> Result<References, TrainError> {
        let mut values = self.known();
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
        if let Some(mut file) = file {
            let checksum = xxh3_128(&bytes_of(&values)).to_le_bytes();
            let written = file.write_all(&checksum).and_then(|()| file.sync_all());
            written.map_err(|error| self.failed(error))?;
        }
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
        let mut bytes = self.fingerprint.to_vec();
        bytes.extend(bytes_of(values));
        durable::write_atomically(&self.path, &bytes)?;
        let file = OpenOptions::new().append(true).open(&self.path);
        Ok(file.map_err(|error| self.failed(error))?)
    }

    fn failed(&self, error: std::io::Error) -> FileError {
        FileError::from_io("write", &self.path, 0, error)
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

/// Identifies the start weights and the prepared data.
fn fingerprint(run: &Run) -> Result<[u8; 16], TrainError> {
    let built_in = run.built_in()?;
    let mut hash = Xxh3::new();
    hash.update(built_in.model.to_json().to_string().as_bytes());
    hash.update(
        built_in
            .data_fingerprint
            .as_deref()
            .unwrap_or_default()
            .as_bytes(),
    );
    if built_in.weights.is_none() {
        hash.update(&run.spec.seed.to_le_bytes());
    }
    hash_weights(&mut hash, &built_in.weight_folders(), |bytes| Hashed {
        stretch: bytes.max(1),
        part: SAMPLED,
    })?;
    Ok(hash.digest128().to_le_bytes())
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
        let data = spec::Data {
            train: vec![DataSource {
                path: "pairs.jsonl".to_owned(),
                ..DataSource::default()
            }],
            sequence_length: 16,
            ..spec::Data::default()
        };
        let tokenizer = spec::Tokenizer {
            path: Some("byte".to_owned()),
            chat_template: None,
        };
        let directory = folder.path().join("data");
        let request = PrepareRequest {
            data: &data,
            tokenizer: &tokenizer,
            objective: Objective::Dpo,
            seed: 1,
            model: None,
            vocab_size: None,
            base: folder.path(),
            directory: &directory,
            began_in: None,
            fingerprint: None,
            key: &str::to_owned,
            stopped: &|| false,
        };
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

    #[test]
    fn what_a_file_holds_is_not_computed_again_and_a_damaged_one_is() {
        let (folder, dataset) = pairs();
        let source = |fingerprint| Rows {
            path: folder.path().join("reference/train.bin"),
            fingerprint,
            dataset: &dataset,
            which: Which::First(dataset.len()),
        };
        let complete = |seed, fingerprint| {
            let source = source(fingerprint);
            source.complete(&mut engine(seed), &Solo, 3, true).unwrap()
        };
        let known = |fingerprint| source(fingerprint).are_known(&Solo).unwrap();
        assert!(!known([1; 16]));
        let first = complete(1, [1; 16]);
        assert!(known([1; 16]) && !known([2; 16]));
        let of_one = first.of([7]);
        assert!(of_one.len() == 2 && of_one.iter().all(|value| *value < 0.0));

        // Another engine computes nothing of a complete file, and the rest of an interrupted one.
        assert_eq!(complete(2, [1; 16]), first);
        let path = source([1; 16]).path;
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..16 + 8 * 25]).unwrap();
        assert!(!known([1; 16]));
        let continued = complete(2, [1; 16]);
        assert_eq!(continued.values[..24], first.values[..24]);
        assert_ne!(continued.values[24..], first.values[24..]);
        std::fs::write(&path, &whole[..16 + 8 * 25 + 3]).unwrap();
        assert_eq!(complete(1, [1; 16]), first);
        assert_eq!(std::fs::read(&path).unwrap(), whole);

        let mut damaged = whole.clone();
        damaged[100] ^= 1;
        std::fs::write(&path, damaged).unwrap();
        assert!(!known([1; 16]));
        assert_eq!(complete(1, [1; 16]), first);
        // Other weights or data.
        assert_ne!(complete(2, [2; 16]), first);
    }

    #[test]
    fn only_the_samples_that_a_run_consumes_are_computed() {
        let (folder, dataset) = pairs();
        let complete = |name: &str, which| {
            let rows = Rows {
                path: folder.path().join(name),
                fingerprint: [1; 16],
                dataset: &dataset,
                which,
            };
            rows.complete(&mut engine(1), &Solo, 3, true).unwrap()
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
