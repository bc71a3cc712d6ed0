//! The resolved sources of a recipe: the files of each part, and notes about them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};

use crate::bucket::is_url;
use crate::recipe::schema::spec::{DataFormat, DataSource, SYNTHETIC};

use super::error::DataError;
use super::files::{self, Place, Resolved, SourceFile};
use super::in_bucket;
use super::manifest::{FileRecord, Manifest, SourceRecord};
use super::remote::Cache;
use super::request::{Phase, PrepareRequest, Progress, Stopped, check_stopped};

/// A source and its settings.
pub(super) struct Source {
    pub files: Vec<SourceFile>,
    /// The columns that the recipe names.
    pub columns: Vec<String>,
    /// Share of the documents; `None` for all of them.
    pub weight: Option<f64>,
}

/// The sources of one part.
pub(super) struct Sources {
    /// Key that separates the random numbers of the parts.
    pub key: u64,
    pub list: Vec<Source>,
}

/// The sources of both parts.
pub(super) struct AllSources {
    pub train: Sources,
    /// Empty if the recipe names none.
    pub evaluation: Sources,
    pub notes: Vec<String>,
}

/// Resolves all files. A file is read once even if the recipe names it several times. Evaluation excludes
/// files of the training data, because the loss on them is meaningless.
pub(super) fn resolve(request: &PrepareRequest<'_>) -> Result<AllSources, DataError> {
    let mut notes = Vec::new();
    let mut seen = BTreeSet::new();
    let cache = Cache::of(request.directory);
    let train = part(
        request,
        &cache,
        "data.train",
        &request.data.train,
        &mut seen,
        &mut notes,
    )?;
    let evaluation = &request.data.evaluation;
    let evaluation = Sources {
        key: 1,
        list: part(
            request,
            &cache,
            "data.evaluation",
            evaluation,
            &mut seen,
            &mut notes,
        )?,
    };
    if !request.data.evaluation.is_empty() && evaluation.is_empty() {
        notes.push(format!(
            "no evaluation is made: every file of `{}` is also training data, on which a loss means \
             nothing; name other files, or hold samples out with `{}`",
            (request.key)("data.evaluation"),
            (request.key)("data.held_out")
        ));
    }
    Ok(AllSources {
        train: Sources {
            key: 0,
            list: train,
        },
        evaluation,
        notes,
    })
}

fn part(
    request: &PrepareRequest<'_>,
    cache: &Arc<Cache>,
    name: &str,
    sources: &[DataSource],
    seen: &mut BTreeSet<PathBuf>,
    notes: &mut Vec<String>,
) -> Result<Vec<Source>, DataError> {
    let mut list = Vec::new();
    for (i, source) in sources.iter().enumerate() {
        let path = format!("{name}.{i}");
        if source.path == SYNTHETIC {
            return Err(mixed(request, &path));
        }
        let weight = source.weight.unwrap_or(1.0);
        if !(0.0..=1.0).contains(&weight) {
            return Err(request.setting(
                &format!("{path}.weight"),
                format!("a share of {weight}"),
                "give a share of 0 to 1",
            ));
        }
        let Resolved { mut files, note } = if is_url(&source.path) {
            in_bucket::resolve(request, source, &path, cache)?
        } else {
            files::resolve(request, source, &path)?
        };
        notes.extend(note);
        files.retain(|file| {
            let new = seen.insert(file.identity());
            if !new {
                notes.push(format!(
                    "{}: {} is named by an earlier source and read only once",
                    (request.key)(&format!("{path}.path")),
                    file.name.display()
                ));
            }
            new
        });
        list.push(Source {
            files: if weight > 0.0 { files } else { Vec::new() },
            columns: source.columns.clone(),
            weight: (weight < 1.0).then_some(weight),
        });
    }
    Ok(list)
}

/// The error for a synthetic language mixed with files.
pub(super) fn mixed(request: &PrepareRequest<'_>, path: &str) -> DataError {
    request.setting(
        &format!("{path}.path"),
        "the synthetic language is mixed with other sources",
        "make it the only training source; held_out gives it samples for evaluation",
    )
}

/// The objects that earlier preparations of the run have read.
pub(super) struct Earlier(BTreeMap<(PathBuf, String), FileRecord>);

impl Earlier {
    /// Those of the manifests in these directories.
    pub fn of<'a>(directories: impl IntoIterator<Item = &'a Path>) -> Earlier {
        let manifests = directories
            .into_iter()
            .filter_map(|directory| Manifest::read(directory).ok());
        let sources = manifests.flat_map(|manifest| manifest.sources);
        Earlier(
            sources
                .filter_map(|source| Some(((source.path, source.etag?), source.content)))
                .collect(),
        )
    }

    fn record(&self, file: &SourceFile) -> Option<&FileRecord> {
        let etag = file.etag()?.to_owned();
        self.0.get(&(file.name.clone(), etag))
    }
}

impl Sources {
    /// Whether there are no files.
    pub fn is_empty(&self) -> bool {
        self.files().next().is_none()
    }

    /// The files of all sources.
    pub fn files(&self) -> impl Iterator<Item = &SourceFile> {
        self.list.iter().flat_map(|source| &source.files)
    }

    /// Whether every file holds token ids, so that no tokenizer is needed.
    pub fn only_ids(&self) -> bool {
        self.files().all(|file| file.format == DataFormat::Bin)
    }

    /// Sizes and checksums of all files. An object that an earlier preparation has read is not read again.
    pub fn records(
        &self,
        earlier: &Earlier,
        state: &mut Progress,
        report: &mut dyn FnMut(Progress),
        stopped: Stopped<'_>,
    ) -> Result<Vec<SourceRecord>, DataError> {
        let mut records = Vec::new();
        for file in self.files() {
            let phase = match file.place {
                Place::Disk(_) => Phase::Checksums,
                Place::Bucket(_) => Phase::Downloading,
            };
            let mut progress = |bytes: u64| {
                state.phase = phase;
                state.bytes = (state.bytes + bytes).min(state.total);
                report(*state);
                check_stopped(stopped)
            };
            let content = match earlier.record(file) {
                Some(known) => {
                    file.expect(known);
                    progress(known.bytes)?;
                    known.clone()
                }
                None => file.record(&mut progress)?,
            };
            if content.bytes == 0 {
                return Err(DataError::source(
                    file.shown(),
                    "it is empty",
                    "put data into it or leave it out",
                ));
            }
            records.push(SourceRecord {
                path: file.name.clone(),
                etag: file.etag().map(str::to_owned),
                content,
            });
        }
        Ok(records)
    }

    /// Size of all files, in bytes.
    pub fn bytes(&self) -> Result<u64, DataError> {
        self.files().map(SourceFile::bytes).sum()
    }

    /// The part of the identity that determines their content: everything but their paths.
    pub fn identity(&self, records: &[SourceRecord]) -> Value {
        let mut records = records.iter();
        let mut source = |source: &Source| {
            let files: Vec<Value> = source
                .files
                .iter()
                .zip(&mut records)
                .map(|(file, record)| json!([file.format, record.content]))
                .collect();
            json!({ "columns": source.columns, "weight": source.weight, "files": files })
        };
        self.list.iter().map(&mut source).collect()
    }
}
