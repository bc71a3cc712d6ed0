//! The resolved sources of a recipe: the files of each part, and notes about them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::bucket::is_url;
use crate::recipe::schema::spec::{Conversion, DataFormat, SYNTHETIC};

use super::error::DataError;
use super::files::{self, Place, Resolved, SourceFile};
use super::kind::Kind;
use super::manifest::{FileRecord, Manifest, SourceRecord};
use super::record::{Fault, choose_columns};
use super::remote::{self, Cache};
use super::request::{Meter, Phase, PrepareRequest};

/// A source and its settings.
pub(super) struct Source {
    pub files: Vec<SourceFile>,
    /// The columns that the recipe names.
    pub columns: Vec<String>,
    /// Share of the documents; `None` for all of them.
    pub weight: Option<f64>,
    /// The split of HALOs' feedback that is read.
    pub feedback_split: Option<String>,
    /// How prompts and completions are made of its rows.
    pub conversion: Option<Conversion>,
}

impl Source {
    /// The columns of a table that are read for samples of this kind.
    pub fn columns_of(&self, available: &[&str], kind: Kind) -> Result<Vec<String>, Fault> {
        match self.conversion {
            // A column that is missing is found in the first row.
            Some(conversion) => Ok(conversion.columns().map(str::to_owned).collect()),
            None => choose_columns(&self.columns, available, kind),
        }
    }
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
    let data = request.data;
    let mut all = AllSources {
        train: Sources::of(0),
        evaluation: Sources::of(1),
        notes: Vec::new(),
    };
    let mut seen = BTreeSet::new();
    let cache = Cache::at(remote::directory(request.directory), None);
    for (part, sources, list) in [
        ("data.train", &data.train, &mut all.train.list),
        (
            "data.evaluation",
            &data.evaluation,
            &mut all.evaluation.list,
        ),
    ] {
        for (i, source) in sources.iter().enumerate() {
            let path = format!("{part}.{i}");
            if source.path == SYNTHETIC {
                return Err(mixed(request, &path));
            }
            let weight = source.weight.unwrap_or(1.0);
            if !(0.0..=1.0).contains(&weight) && (weight < 0.0 || weight.fract() != 0.0) {
                return Err(request.setting(
                    &format!("{path}.weight"),
                    format!("a share of {weight}"),
                    "give a share of 0 to 1, or a number of samples",
                ));
            }
            let Resolved { mut files, note } = if is_url(&source.path) {
                files::resolve_in_bucket(request, source, &path, &cache)?
            } else {
                files::resolve(request, source, &path)?
            };
            all.notes.extend(note);
            files.retain(|file| {
                let new = seen.insert((file.identity(), source.feedback_split.clone()));
                if !new {
                    all.notes.push(format!(
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
                weight: (weight != 1.0).then_some(weight),
                feedback_split: source.feedback_split.clone(),
                conversion: source.conversion,
            });
        }
    }
    if !data.evaluation.is_empty() && all.evaluation.is_empty() {
        all.notes.push(format!(
            "no evaluation is made: every file of `{}` is also training data, on which a loss means \
             nothing; name other files, or hold samples out with `{}`",
            (request.key)("data.evaluation"),
            (request.key)("data.held_out")
        ));
    }
    Ok(all)
}

/// The error for a synthetic language mixed with files.
pub(super) fn mixed(request: &PrepareRequest<'_>, path: &str) -> DataError {
    request.setting(
        &format!("{path}.path"),
        "the synthetic language is mixed with other sources",
        "make it the only training source; held_out gives it samples for evaluation",
    )
}

/// The objects that earlier preparations of the run have read, by path and ETag.
pub(super) type Earlier = BTreeMap<(PathBuf, String), FileRecord>;

/// The objects in the manifests of these directories.
pub(super) fn earlier<'a>(directories: impl IntoIterator<Item = &'a Path>) -> Earlier {
    let manifests = directories.into_iter().flat_map(Manifest::read);
    let sources = manifests.flat_map(|manifest| manifest.sources);
    sources
        .filter_map(|source| Some(((source.path, source.etag?), source.content)))
        .collect()
}

impl Sources {
    fn of(key: u64) -> Sources {
        Sources {
            key,
            list: Vec::new(),
        }
    }

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
        meter: &mut Meter<'_>,
    ) -> Result<Vec<SourceRecord>, DataError> {
        let mut records = Vec::new();
        for file in self.files() {
            let etag = file.etag().map(str::to_owned);
            let known = etag
                .clone()
                .and_then(|etag| earlier.get(&(file.name.clone(), etag)));
            let content = match (&file.place, known) {
                (Place::Bucket(remote), Some(known)) => {
                    remote.expect(known);
                    meter.add(Phase::Downloading, known.bytes, 0)?;
                    known.clone()
                }
                (Place::Bucket(remote), None) => {
                    remote.download(&mut |bytes| meter.add(Phase::Downloading, bytes, 0))?
                }
                (Place::Disk(path), _) => {
                    FileRecord::of(path, &mut |bytes| meter.add(Phase::Checksums, bytes, 0))?
                }
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
                etag,
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
            let mut all =
                json!({ "columns": source.columns, "weight": source.weight, "files": files });
            if let Some(split) = &source.feedback_split {
                all["feedback_split"] = json!(split);
            }
            if let Some(conversion) = source.conversion {
                all["conversion"] = json!(conversion);
            }
            all
        };
        self.list.iter().map(&mut source).collect()
    }
}
