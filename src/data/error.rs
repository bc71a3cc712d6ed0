//! Data errors: the problem, its place (file and line or row) and the remedy.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::bucket::BucketError;
use crate::util::durable::FileError;

/// Why data could not be prepared or read.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A setting of the recipe is invalid.
    #[error("{key}: {problem}; {help}")]
    Setting {
        /// The key as the recipe's dialect spells it.
        key: String,
        /// The problem, with the value and the limit.
        problem: String,
        help: String,
    },
    /// A file or directory is not usable as data, a tokenizer or a template, or a record of it is malformed.
    #[error("{place}: {problem}; {help}")]
    Source {
        /// The path, with the position of the record in it.
        place: String,
        problem: String,
        help: String,
    },
    /// The model has no embedding for some token ids.
    #[error("{problem}; {help}")]
    Vocabulary {
        /// The problem, with both numbers.
        problem: String,
        help: String,
    },
    /// The prepared store does not match its manifest.
    #[error(
        "{}: the prepared data is damaged: {problem}; launch again with the sources in place, which \
         prepares it again",
        path.display()
    )]
    Store { path: PathBuf, problem: String },
    /// A sample index is too large.
    #[error("sample {index} was asked for, the data set has {samples}")]
    OutOfRange { index: u64, samples: u64 },
    /// A stop was requested during the preparation.
    #[error("stopped while the data was prepared; the same call begins again")]
    Stopped,
    /// The system gives no threads for the encoding.
    #[error("cannot start threads to prepare the data: {0}")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// A file operation failed, for example on a full disk.
    #[error(transparent)]
    File(#[from] FileError),
    /// A bucket with data cannot be read.
    #[error(transparent)]
    Bucket(#[from] BucketError),
}

impl DataError {
    /// The problem and the remedy, one line each, without the key of a setting.
    pub fn problem_and_help(&self) -> (String, String) {
        match self {
            DataError::Setting { problem, help, .. } | DataError::Vocabulary { problem, help } => {
                (problem.clone(), help.clone())
            }
            DataError::Source {
                place,
                problem,
                help,
            } => (format!("{place}: {problem}"), help.clone()),
            DataError::Bucket(error) => (
                error.to_string(),
                "name an object, a prefix or a glob of a bucket, or a file".to_owned(),
            ),
            other => (
                other.to_string(),
                "make it readable, or name another".to_owned(),
            ),
        }
    }

    /// An unusable file or directory.
    pub(super) fn source(path: &Path, problem: impl fmt::Display, help: impl fmt::Display) -> Self {
        DataError::record(&path.display().to_string(), problem, help)
    }

    /// A malformed record at a position of a file.
    pub(super) fn record(place: &str, problem: impl fmt::Display, help: impl fmt::Display) -> Self {
        DataError::Source {
            place: place.to_owned(),
            problem: problem.to_string(),
            help: help.to_string(),
        }
    }

    /// A store that does not match its manifest.
    pub(super) fn store(path: &Path, problem: impl fmt::Display) -> Self {
        DataError::Store {
            path: path.to_path_buf(),
            problem: problem.to_string(),
        }
    }

    pub(super) fn read(path: &Path, source: std::io::Error) -> Self {
        FileError::from_io("read", path, 0, source).into()
    }
}
