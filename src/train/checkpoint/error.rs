//! What can go wrong with a checkpoint, in words for the user.

use std::fmt;
use std::path::PathBuf;

use super::history::Committed;
use super::verified::Damage;
use crate::comm::CommError;
use crate::durable::FileError;
use crate::engine::EngineError;
use crate::words::count;

/// Why a checkpoint was not written, or not read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Writing failed; nothing of it is visible, and what was committed before is as it was.
    #[error("{cause}; {}", last_good(last.as_deref()))]
    NotWritten {
        /// What failed.
        cause: FileError,
        /// The newest checkpoint of the run.
        last: Option<Box<Committed>>,
    },
    /// Another rank could not write its part, so that nobody's counts.
    #[error("rank {rank} stopped the checkpoint: {reason}")]
    OtherRank {
        /// Who.
        rank: usize,
        /// In its own words.
        reason: String,
    },
    /// A peer failed while the ranks agreed on a checkpoint.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A programming error: the parts do not make a checkpoint.
    #[error("checkpoint misuse: {0}")]
    Misuse(String),
    /// There is no manifest: it never was committed, or is something else.
    #[error("{} is no checkpoint: {reason}", path.display())]
    NotCommitted {
        /// The directory.
        path: PathBuf,
        /// What is missing.
        reason: &'static str,
    },
    /// The manifest was edited, damaged or written by another version.
    #[error("the manifest of checkpoint {} cannot be trusted: {reason}", path.display())]
    Manifest {
        /// The checkpoint.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A whole checkpoint, but not the one that was pinned.
    #[error(
        "checkpoint {} has checksum {found}, and {expected} was pinned: it is not the one that \
         this generation starts from",
        path.display()
    )]
    NotThePinned {
        /// The checkpoint.
        path: PathBuf,
        /// Its manifest's checksum.
        found: super::Checksum,
        /// What was asked for.
        expected: super::Checksum,
    },
    /// Files are missing or differ from what was written.
    #[error("checkpoint {} is damaged: {}", path.display(), joined(damage))]
    Damaged {
        /// The checkpoint.
        path: PathBuf,
        /// Every file that is not what was written.
        damage: Vec<Damage>,
    },
    /// The checkpoint is of another model.
    #[error("checkpoint {} is of another model: {difference}", path.display())]
    Shape {
        /// The checkpoint.
        path: PathBuf,
        /// The first difference, with both shapes.
        difference: String,
    },
    /// The engine did not take a unit.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The system does not let it be read or removed.
    #[error(transparent)]
    File(#[from] FileError),
}

fn last_good(last: Option<&Committed>) -> String {
    match last {
        Some(last) => format!(
            "the last good checkpoint is {} ({})",
            last.path.display(),
            count(last.samples, "sample")
        ),
        None => "there is no earlier checkpoint of this run".to_string(),
    }
}

fn joined<T: fmt::Display>(items: &[T]) -> String {
    let items: Vec<String> = items.iter().map(T::to_string).collect();
    items.join("; ")
}
