//! The resolved sources of a recipe: the files of each part, and notes about them.

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde_json::{Value, json};

use crate::recipe::schema::spec::{DataFormat, DataSource, SYNTHETIC};

use super::error::DataError;
use super::files::{self, Resolved, SourceFile};
use super::manifest::{FileRecord, SourceRecord};
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
    let train = part(
        request,
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
        let Resolved {
            mut files, note, ..
        } = files::resolve(request, source, &path)?;
        notes.extend(note);
        files.retain(|file| {
            let real = file
                .path
                .canonicalize()
                .unwrap_or_else(|_| file.path.clone());
            let new = seen.insert(real);
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

    /// Sizes and checksums of all files.
    pub fn records(
        &self,
        state: &mut Progress,
        report: &mut dyn FnMut(Progress),
        stopped: Stopped<'_>,
    ) -> Result<Vec<SourceRecord>, DataError> {
        let mut records = Vec::new();
        for file in self.files() {
            let content = FileRecord::of(&file.path, &mut |bytes| {
                state.phase = Phase::Checksums;
                state.bytes = (state.bytes + bytes).min(state.total);
                report(*state);
                check_stopped(stopped)
            })?;
            if content.bytes == 0 {
                return Err(DataError::source(
                    &file.path,
                    "it is empty",
                    "put data into it or leave it out",
                ));
            }
            records.push(SourceRecord {
                path: file.name.clone(),
                content,
            });
        }
        Ok(records)
    }

    /// Size of all files, in bytes.
    pub fn bytes(&self) -> Result<u64, DataError> {
        self.files()
            .map(|file| {
                std::fs::metadata(&file.path)
                    .map(|metadata| metadata.len())
                    .map_err(|error| DataError::read(&file.path, error))
            })
            .sum()
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
