//! Metrics on disk: one JSON object a line, one file per generation, and the committed history of several
//! generations.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::tensorboard::EventFile;
use super::{EvaluationRecord, Metric, StepRecord};
use crate::util::input;

/// Bytes read from the end of a file; they hold some hundred lines of any length.
const TAIL: u64 = 256 << 10;

#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// The file cannot be opened or written.
    #[error(
        "cannot write metrics to {}: {error}; free some space or allow writing there, and resume the run",
        path.display()
    )]
    Write { path: PathBuf, error: io::Error },
    /// The file cannot be read.
    #[error(
        "cannot read metrics from {}: {error}; allow reading it, or restore a copy",
        path.display()
    )]
    Read { path: PathBuf, error: io::Error },
}

/// Appends metrics to a file. A crash of the machine may leave half a line, which [`read`] skips.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: File,
    /// A copy of all metrics for TensorBoard.
    events: Option<EventFile>,
}

impl Writer {
    /// Opens a file and creates it if it is absent. Half a line of a crashed writer stays on a separate line.
    pub fn append_to(path: impl Into<PathBuf>) -> Result<Writer, MetricsError> {
        let path = path.into();
        match open(&path) {
            Ok(file) => Ok(Writer {
                path,
                file,
                events: None,
            }),
            Err(error) => Err(MetricsError::Write { path, error }),
        }
    }

    /// Also writes all metrics into a file for TensorBoard.
    pub fn with_events(self, events: EventFile) -> Writer {
        Writer {
            events: Some(events),
            ..self
        }
    }

    pub fn write(&mut self, metric: &Metric) -> Result<(), MetricsError> {
        let written = serde_json::to_string(metric)
            .map_err(io::Error::from)
            // One write per line, so that readers see whole lines.
            .and_then(|json| self.file.write_all(format!("{json}\n").as_bytes()))
            .and_then(|()| {
                self.events
                    .as_mut()
                    .map_or(Ok(()), |events| events.write(metric))
            });
        written.map_err(|error| MetricsError::Write {
            path: self.path.clone(),
            error,
        })
    }
}

fn open(path: &Path) -> io::Result<File> {
    let mut file = OpenOptions::new()
        .create(true)
        .read(true)
        .append(true)
        .open(path)?;
    if file.seek(SeekFrom::End(0))? > 0 {
        file.seek(SeekFrom::End(-1))?;
        let mut last = [0];
        file.read_exact(&mut last)?;
        if last != *b"\n" {
            file.write_all(b"\n")?;
        }
    }
    Ok(file)
}

/// Appends a step to the file of a writer that died after the step and before it recorded it. Returns false
/// without a write if the file has the step.
pub fn append_missing(path: &Path, step: &StepRecord) -> Result<bool, MetricsError> {
    if last_step(path).is_some_and(|last| last.step >= step.step) {
        return Ok(false);
    }
    Writer::append_to(path)?.write(&Metric::Step(step.clone()))?;
    Ok(true)
}

/// The content of a metrics file.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Recorded {
    /// Metrics in the order of writing.
    pub metrics: Vec<Metric>,
    /// Invalid lines, for example half a line from a crash.
    pub skipped: Vec<Skipped>,
}

/// A line that could not be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    /// Line number, counted from 1.
    pub line: usize,
    /// The reason, for people.
    pub message: String,
}

/// Reads a generation's metrics file.
pub fn read(path: &Path) -> Result<Recorded, MetricsError> {
    let cannot = |error| MetricsError::Read {
        path: path.to_owned(),
        error,
    };
    let mut bytes = Vec::new();
    let mut file = input::open(path).map_err(cannot)?;
    file.read_to_end(&mut bytes).map_err(cannot)?;
    let mut recorded = Recorded::default();
    for (nth, line) in bytes.split(|&byte| byte == b'\n').enumerate() {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match serde_json::from_slice(line) {
            Ok(metric) => recorded.metrics.push(metric),
            Err(error) => recorded.skipped.push(Skipped {
                line: nth + 1,
                message: error.to_string(),
            }),
        }
    }
    Ok(recorded)
}

/// The newest step of a file, of which only the end is read; `None` without any step.
pub fn last_step(path: &Path) -> Option<StepRecord> {
    let end = end(path)?;
    newest_steps(&end).next()
}

/// The newest steps of a file, of which only the end is read; the newest first.
pub fn last_steps(path: &Path) -> Vec<StepRecord> {
    let end = end(path).unwrap_or_default();
    newest_steps(&end).collect()
}

fn end(path: &Path) -> Option<Vec<u8>> {
    let mut file = input::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL)))
        .ok()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

fn newest_steps(end: &[u8]) -> impl Iterator<Item = StepRecord> {
    // The first line may lack its beginning, and the last its end.
    let lines = end.rsplit(|&byte| byte == b'\n');
    let metrics = lines.filter_map(|line| serde_json::from_slice(line).ok());
    metrics.filter_map(|metric| match metric {
        Metric::Step(step) => Some(step),
        Metric::Evaluation(_) => None,
    })
}

/// One generation's metrics and its starting point.
#[derive(Debug, Clone, PartialEq)]
pub struct Generation {
    /// Samples consumed at the checkpoint that it started from.
    pub start_samples: u64,
    pub metrics: Vec<Metric>,
}

/// The committed history: steps in the order of training, and evaluations in the order of their samples.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct History {
    /// Every committed step once.
    pub steps: Vec<StepRecord>,
    /// At most one evaluation for each count of samples.
    pub evaluations: Vec<EvaluationRecord>,
}

/// The committed history of generations, given in their order.
///
/// A generation's steps count only up to the start of a later one: the steps after that checkpoint were
/// repeated. Of evaluations repeated at the same sample, the later one counts.
pub fn committed(generations: &[Generation]) -> History {
    let mut steps: Vec<StepRecord> = Vec::new();
    let mut evaluations: BTreeMap<u64, EvaluationRecord> = BTreeMap::new();
    for generation in generations {
        let start = generation.start_samples;
        steps.retain(|step| step.samples <= start);
        evaluations.retain(|&samples, _| samples <= start);
        for metric in &generation.metrics {
            match metric {
                Metric::Step(step) => {
                    // The checkpoint already holds the step, or the step was written twice.
                    let counted = steps.last().map_or(start, |last| last.samples.max(start));
                    if step.samples > counted {
                        steps.push(step.clone());
                    }
                }
                Metric::Evaluation(evaluation) => {
                    evaluations.insert(evaluation.samples, evaluation.clone());
                }
            }
        }
    }
    History {
        steps,
        evaluations: evaluations.into_values().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(generation: u64, samples: u64) -> StepRecord {
        StepRecord {
            generation,
            step: samples / 8,
            samples,
            batch: 8,
            world: 2,
            loss: 2.5,
            tokens: 512,
            learning_rate: 3e-4,
            gradient_norm: 0.7,
            seconds: 0.25,
            time: 1.7e9 + samples as f64,
            norm_test: None,
            coordinate_test: None,
            preferences: None,
            external: None,
        }
    }

    #[test]
    fn a_survivor_appends_only_the_step_that_is_missing() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("metrics.jsonl");
        let samples = || -> Vec<u64> {
            let recorded = read(&path).unwrap().metrics.into_iter();
            let samples = recorded.map(|metric| match metric {
                Metric::Step(step) => step.samples,
                Metric::Evaluation(evaluation) => evaluation.samples,
            });
            samples.collect()
        };
        // Rank 0 died before its first record.
        assert!(append_missing(&path, &step(1, 8)).unwrap());
        assert!(!append_missing(&path, &step(1, 8)).unwrap());
        assert_eq!(samples(), [8]);
        // Rank 0 died while it wrote the record.
        let mut file = OpenOptions::new().append(true).open(&path).unwrap();
        file.write_all(b"{\"kind\":\"step\",\"gener").unwrap();
        assert!(append_missing(&path, &step(1, 16)).unwrap());
        assert_eq!(samples(), [8, 16]);
    }

    fn evaluation(generation: u64, samples: u64) -> Metric {
        Metric::Evaluation(EvaluationRecord {
            generation,
            samples,
            loss: 2.0,
            tokens: 4096,
            time: 1.7e9,
            preferences: None,
        })
    }

    fn generation(number: u64, start_samples: u64, end: u64) -> Generation {
        Generation {
            start_samples,
            metrics: (start_samples / 8 + 1..=end / 8)
                .map(|nth| Metric::Step(step(number, nth * 8)))
                .collect(),
        }
    }

    /// (generation, samples) of every step that counts.
    fn lineage(generations: &[Generation]) -> Vec<(u64, u64)> {
        committed(generations)
            .steps
            .iter()
            .map(|step| (step.generation, step.samples))
            .collect()
    }

    #[test]
    fn what_is_written_is_read_back() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.jsonl");
        let metrics = [Metric::Step(step(1, 8)), evaluation(1, 8)];
        for metric in &metrics {
            // A new writer each time: a restarted process appends.
            let mut writer = Writer::append_to(&path).expect("a metrics file");
            writer.write(metric).expect("a metric is written");
        }
        let recorded = read(&path).expect("a metrics file");
        assert_eq!(recorded.metrics, metrics);
        assert_eq!(recorded.skipped, []);
    }

    #[test]
    fn a_half_line_is_skipped_and_named_without_losing_later_lines() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.jsonl");
        let whole = serde_json::to_string(&Metric::Step(step(1, 8))).expect("JSON");
        std::fs::write(&path, format!("{whole}\n{}", &whole[..40])).expect("a half line");
        let mut writer = Writer::append_to(&path).expect("a metrics file");
        writer.write(&Metric::Step(step(1, 16))).expect("a metric");

        let recorded = read(&path).expect("a metrics file");
        let samples: Vec<u64> = recorded
            .metrics
            .iter()
            .map(|metric| match metric {
                Metric::Step(step) => step.samples,
                Metric::Evaluation(evaluation) => evaluation.samples,
            })
            .collect();
        assert_eq!(samples, [8, 16]);
        assert_eq!(recorded.skipped.len(), 1);
        assert_eq!(recorded.skipped[0].line, 2);
    }

    #[test]
    fn the_newest_step_is_found_at_the_end() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.jsonl");
        assert_eq!(last_step(&path), None);
        let mut writer = Writer::append_to(&path).expect("a metrics file");
        for nth in 1..=2000 {
            writer
                .write(&Metric::Step(step(1, 8 * nth)))
                .expect("a metric");
        }
        writer.write(&evaluation(1, 16_000)).expect("a metric");
        let whole = std::fs::read(&path).expect("a file");
        assert!(whole.len() as u64 > TAIL);
        std::fs::write(&path, [&whole[..], b"{\"kind\":\"st"].concat()).expect("a half line");
        assert_eq!(last_step(&path), Some(step(1, 16_000)));
    }

    #[test]
    fn a_nan_loss_survives_the_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("metrics.jsonl");
        let lost = StepRecord {
            loss: f64::NAN,
            gradient_norm: f64::INFINITY,
            ..step(1, 8)
        };
        let mut writer = Writer::append_to(&path).expect("a metrics file");
        writer.write(&Metric::Step(lost)).expect("a metric");
        let recorded = read(&path).expect("a metrics file");
        let [Metric::Step(step)] = &recorded.metrics[..] else {
            panic!("{recorded:?} is not one step");
        };
        assert!(step.loss.is_nan() && step.gradient_norm.is_nan());
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = read(Path::new("nowhere/metrics.jsonl")).expect_err("no such file");
        assert!(
            error
                .to_string()
                .starts_with("cannot read metrics from nowhere/metrics.jsonl: ")
        );
        let error = Writer::append_to("nowhere/metrics.jsonl").expect_err("no such directory");
        assert!(
            error
                .to_string()
                .starts_with("cannot write metrics to nowhere/metrics.jsonl: ")
        );
    }

    #[test]
    fn steps_after_the_checkpoint_of_the_next_generation_do_not_count() {
        let generations = [generation(1, 0, 40), generation(2, 24, 48)];
        assert_eq!(
            lineage(&generations),
            [(1, 8), (1, 16), (1, 24), (2, 32), (2, 40), (2, 48)]
        );
    }

    #[test]
    fn a_generation_that_falls_back_further_takes_back_all_before_it() {
        let generations = [
            generation(1, 0, 40),
            generation(2, 32, 56),
            generation(3, 16, 32),
        ];
        assert_eq!(lineage(&generations), [(1, 8), (1, 16), (3, 24), (3, 32)]);
    }

    #[test]
    fn a_step_that_is_written_twice_counts_once() {
        let mut twice = generation(1, 0, 16);
        twice.metrics.extend(generation(1, 8, 24).metrics);
        assert_eq!(lineage(&[twice]), [(1, 8), (1, 16), (1, 24)]);
    }

    #[test]
    fn a_generation_without_steps_changes_nothing() {
        let generations = [
            generation(1, 0, 16),
            generation(2, 16, 16),
            generation(3, 16, 24),
        ];
        assert_eq!(lineage(&generations), [(1, 8), (1, 16), (3, 24)]);
        assert_eq!(committed(&[]), History::default());
    }

    #[test]
    fn an_evaluation_at_the_seam_counts_once() {
        let mut generations = [generation(1, 0, 32), generation(2, 16, 32)];
        generations[0]
            .metrics
            .extend([evaluation(1, 16), evaluation(1, 32)]);
        generations[1]
            .metrics
            .extend([evaluation(2, 16), evaluation(2, 32)]);
        let counted: Vec<(u64, u64)> = committed(&generations)
            .evaluations
            .iter()
            .map(|evaluation| (evaluation.generation, evaluation.samples))
            .collect();
        assert_eq!(counted, [(2, 16), (2, 32)]);
    }

    proptest::proptest! {
        /// For any starts of the generations, steps of the same size follow each other without a gap and
        /// without a step that counts twice.
        #[test]
        fn committed_steps_are_gapless(restarts in proptest::collection::vec((0u64..=8, 0u64..8), 1..6)) {
            let mut generations: Vec<Generation> = Vec::new();
            let mut reached = 0;
            for (number, (back, on)) in restarts.into_iter().enumerate() {
                // It starts from a checkpoint of the committed history.
                let start = reached - back.min(reached);
                reached = start + on;
                generations.push(generation(number as u64 + 1, start * 8, reached * 8));
            }
            let samples: Vec<u64> = committed(&generations).steps.iter().map(|s| s.samples).collect();
            let expected: Vec<u64> = (1..=reached).map(|nth| nth * 8).collect();
            proptest::prop_assert_eq!(samples, expected);
        }
    }
}
