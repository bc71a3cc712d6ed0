//! Why data cannot be used: what, where (file and line or row) and what to do instead.

use std::fmt;
use std::path::{Path, PathBuf};

use crate::durable::FileError;

/// Why data could not be prepared or read.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// A setting of the recipe cannot be used.
    #[error("{key}: {problem}; {help}")]
    Setting {
        /// The key as the recipe's dialect spells it.
        key: String,
        /// What is wrong, with the value and the limit.
        problem: String,
        /// What to do.
        help: String,
    },
    /// A file or directory cannot be used as data, a tokenizer or a template.
    #[error("{}: {problem}; {help}", path.display())]
    Source {
        /// The file or directory.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        help: String,
    },
    /// One record of a source is malformed.
    #[error("{place}: {problem}; {help}")]
    Record {
        /// Where it stands.
        place: Place,
        /// What is wrong with it.
        problem: String,
        /// What to do.
        help: String,
    },
    /// Token ids that the model has no embedding for.
    #[error("{problem}; {help}")]
    Vocabulary {
        /// What is wrong, with both numbers.
        problem: String,
        /// What to do.
        help: String,
    },
    /// The prepared store does not hold what its manifest says.
    #[error(
        "{}: the prepared data is damaged: {problem}; launch again with the sources in place, which \
         makes it anew",
        path.display()
    )]
    Store {
        /// The file of the store.
        path: PathBuf,
        /// What does not fit.
        problem: String,
    },
    /// A sample that is not there was asked for.
    #[error("sample {index} was asked for, the data set has {samples}")]
    OutOfRange {
        /// Which one.
        index: u64,
        /// How many there are.
        samples: u64,
    },
    /// Somebody wants the preparation to stop.
    #[error("stopped while the data was prepared; the same call begins again")]
    Stopped,
    /// The system says no: a disk that is full, a file that cannot be opened.
    #[error(transparent)]
    File(#[from] FileError),
}

impl DataError {
    /// What is wrong and what to do about it, one line each; without the key of a setting.
    pub fn told(&self) -> (String, String) {
        match self {
            DataError::Setting { problem, help, .. } | DataError::Vocabulary { problem, help } => {
                (problem.clone(), help.clone())
            }
            DataError::Source {
                path,
                problem,
                help,
            } => (format!("{}: {problem}", path.display()), help.clone()),
            DataError::Record {
                place,
                problem,
                help,
            } => (format!("{place}: {problem}"), help.clone()),
            other => (
                other.to_string(),
                "make it readable, or name another".to_owned(),
            ),
        }
    }

    /// A file or directory that cannot be used.
    pub(super) fn source(path: &Path, problem: impl fmt::Display, help: impl fmt::Display) -> Self {
        DataError::Source {
            path: path.to_path_buf(),
            problem: problem.to_string(),
            help: help.to_string(),
        }
    }

    /// A record that cannot be used.
    pub(super) fn record(
        place: Place,
        problem: impl fmt::Display,
        help: impl fmt::Display,
    ) -> Self {
        DataError::Record {
            place,
            problem: problem.to_string(),
            help: help.to_string(),
        }
    }

    /// A store that is not what its manifest says.
    pub(super) fn store(path: &Path, problem: impl fmt::Display) -> Self {
        DataError::Store {
            path: path.to_path_buf(),
            problem: problem.to_string(),
        }
    }

    /// Reading `path` failed.
    pub(super) fn read(path: &Path, source: std::io::Error) -> Self {
        FileError::from_io("read", path, 0, source).into()
    }
}

/// Where a record stands in a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// In what the number counts.
    pub unit: Unit,
    /// Line or row, counted from 1; bytes from 0.
    pub number: u64,
}

/// In what a place within a file is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unit {
    /// Lines of a text file.
    Line,
    /// Rows of a Parquet file.
    Row,
    /// Bytes of a binary file.
    Byte,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match self.unit {
            Unit::Line => write!(f, "{path}:{}", self.number),
            Unit::Row => write!(f, "{path}: row {}", self.number),
            Unit::Byte => write!(f, "{path}: byte {}", self.number),
        }
    }
}
