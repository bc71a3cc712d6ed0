//! Errors of checkpoints, with messages for the user.

use std::fmt;
use std::path::PathBuf;

use super::names::Committed;
use super::verified::Damage;
use crate::bucket::BucketError;
use crate::comm::CommError;
use crate::engine::EngineError;
use crate::util::durable::FileError;
use crate::util::format::count;

/// Why a checkpoint could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// Writing failed; the new checkpoint is invisible, and earlier ones are unchanged.
    #[error("{cause}; {}", last_good(last.as_deref()))]
    NotWritten {
        /// The error of the file operation.
        cause: FileError,
        /// The newest checkpoint of the run.
        last: Option<Box<Committed>>,
    },
    /// Another rank could not write its part, so the checkpoint of all ranks failed.
    #[error("rank {rank} stopped the checkpoint: {reason}")]
    OtherRank {
        /// The rank that failed.
        rank: usize,
        /// The reason as that rank reported it.
        reason: String,
    },
    /// A peer failed while the ranks agreed on a checkpoint.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// The bucket did not take or give an object. An unfinished checkpoint stays invisible.
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// A programming error: the parts do not make a checkpoint.
    #[error("checkpoint misuse: {0}")]
    Misuse(String),
    /// The directory has no manifest: it was never committed, or is not a checkpoint.
    #[error("{} is not a checkpoint: {reason}", path.display())]
    NotCommitted { path: PathBuf, reason: &'static str },
    /// The manifest was edited, damaged or written by another version.
    #[error("the manifest of checkpoint {} cannot be trusted: {reason}", path.display())]
    Manifest {
        path: PathBuf,
        /// The reason, with the found and the expected value.
        reason: ManifestError,
    },
    /// A complete checkpoint that is not the referenced one.
    #[error(
        "checkpoint {} has checksum {found}, but the checkpoint reference has {expected}: it is \
         not the one that this generation starts from",
        path.display()
    )]
    NotThePinned {
        path: PathBuf,
        /// Checksum of its manifest.
        found: super::Checksum,
        /// Checksum in the checkpoint reference.
        expected: super::Checksum,
    },
    /// Files are missing or changed after they were written.
    #[error("checkpoint {} is damaged: {}", path.display(), joined(damage))]
    Damaged {
        path: PathBuf,
        /// Every damaged file, with the reason.
        damage: Vec<Damage>,
    },
    /// The checkpoint belongs to another model.
    #[error("checkpoint {} is of another model: {difference}", path.display())]
    Shape {
        path: PathBuf,
        /// The first difference, with both shapes.
        difference: String,
    },
    /// The world has continued without the generation that wants to commit.
    #[error(
        "the checkpoint of generation {generation} does not count and is not committed: generation {successor} replaces it"
    )]
    Superseded { generation: u64, successor: u64 },
    /// The engine did not accept a unit.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The file system did not allow a read or a removal.
    #[error(transparent)]
    File(#[from] FileError),
}

impl CheckpointError {
    /// Whether the volume or the bucket did not give a file, which says nothing about the file.
    pub fn is_unread(&self) -> bool {
        match self {
            CheckpointError::File(_) | CheckpointError::Bucket(_) => true,
            CheckpointError::Damaged { damage, .. } => damage.iter().any(|file| file.is_unread),
            _ => false,
        }
    }
}

/// Why a manifest cannot be trusted.
#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    /// It is no JSON, or lacks a field.
    #[error("it cannot be parsed: {0}")]
    Json(#[from] serde_json::Error),
    /// Another version wrote it.
    #[error("it has format {found}, and this version of Evenkeel reads format {read}")]
    Format { found: u64, read: u64 },
    /// It was edited or damaged.
    #[error("its seal is {found}, its content gives {expected}: it was edited or damaged")]
    Seal { found: String, expected: String },
    /// It lists a file outside the checkpoint.
    #[error("it lists `{0}`, which no checkpoint has")]
    Outside(String),
    /// It lacks a file that the units need.
    #[error("it does not list `{0}`")]
    Unlisted(String),
    /// A file is too small for its unit.
    #[error("it lists `{name}` with {bytes} bytes, which cannot hold unit `{unit}`")]
    Short {
        name: String,
        bytes: u64,
        unit: String,
    },
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
