//! What a dialect has to offer.
//!
//! A new dialect is one file with a [`Reader`] in it and one line in [`super::readers`].

use std::path::Path;

use super::dialect::Dialect;
use super::node::Node;
use super::origin::Origin;
use super::overrides;
use super::reading::Reading;
use super::source::FileId;

/// How sure a reader is that a file is its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Confidence {
    /// Some keys fit.
    Possible,
    /// Keys that only this dialect has.
    Likely,
    /// The file says so itself.
    Certain,
}

/// Why a reader takes a file for its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detected {
    /// How sure it is.
    pub confidence: Confidence,
    /// One line for the user.
    pub reason: String,
}

/// What was asked for beside the file itself.
#[derive(Debug, Clone, Copy)]
pub struct Asked<'a> {
    /// The file.
    pub path: &'a Path,
    /// The overrides of the command line.
    pub overrides: &'a [String],
    /// The virtual file that they stand in, when there are any.
    pub command_line: Option<FileId>,
    /// The version of the dialect, where it was named.
    pub version: Option<&'a str>,
}

/// How a trainer goes on from one of its checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// The key that takes the checkpoint's directory.
    pub key: &'static str,
    /// The key of the directory that all of them are in.
    pub output: &'static str,
    /// Its checkpoints.
    pub checkpoints: Checkpoints,
}

impl Resume {
    /// `TrainingArguments.resume_from_checkpoint` of transformers, which its scripts and TRL's hand to
    /// `Trainer.train`.
    pub const TRANSFORMERS: Resume = Resume {
        key: "resume_from_checkpoint",
        output: "output_dir",
        checkpoints: Checkpoints::TRANSFORMERS,
    };
}

/// What the checkpoints of a trainer are called: `PREFIX` and a number that grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpoints {
    /// What stands before the number.
    pub prefix: &'static str,
    /// Files without which one is not whole.
    pub needs: &'static [&'static str],
    /// A file that says that one is not whole.
    pub unless: Option<&'static str>,
}

impl Checkpoints {
    /// Those of a program of which nothing is known.
    pub const ANY: Checkpoints = Checkpoints {
        prefix: "",
        needs: &[],
        unless: None,
    };

    /// Those of transformers' `Trainer` (5.23.0): `trainer_state.json` is written after weights and
    /// optimiser, and a checkpoint made on SIGTERM has a marker while it is written.
    pub const TRANSFORMERS: Checkpoints = Checkpoints {
        prefix: "checkpoint-",
        needs: &["trainer_state.json"],
        unless: Some("checkpoint-is-incomplete.txt"),
    };
}

impl Asked<'_> {
    /// Puts the overrides into a file of plain keys. `path_of` turns an override's key into a path
    /// from the file's root.
    pub(super) fn put_into(
        &self,
        root: &mut Node,
        path_of: impl Fn(&str) -> String,
        reading: &mut Reading,
    ) {
        if let Some(file) = self.command_line {
            let diagnostics = &mut reading.diagnostics;
            overrides::apply(root, self.overrides, file, path_of, diagnostics);
        }
    }
}

/// A file that was read.
#[derive(Debug, Clone, PartialEq)]
pub struct Translated {
    /// The file's own tree under the overrides.
    pub source: Node,
    /// The same with native keys ([`super::Spec`]'s). Values that a person wrote keep their places
    /// and their upstream keys ([`Node::key`]); the dialect's own defaults have no key.
    pub native: Node,
    /// Which version of the dialect it was taken for, and why, where it has several.
    pub version: Option<String>,
    /// Whether it is a part of a recipe only: what it lacks stands elsewhere.
    pub part: bool,
}

impl Translated {
    /// A whole recipe of a dialect that has one version only.
    pub(super) fn whole(source: Node, native: Node) -> Translated {
        Translated {
            source,
            native,
            version: None,
            part: false,
        }
    }
}

/// One dialect.
pub trait Reader: Sync {
    /// Its name.
    fn dialect(&self) -> Dialect;

    /// Whether a file looks like this dialect; others of its tree stand at the same origin.
    fn detect(&self, root: &Node, path: &Path, origin: &Origin) -> Option<Detected>;

    /// What `--dialect-version` takes; empty where there is only one version.
    fn versions(&self) -> &'static [&'static str] {
        &[]
    }

    /// Reads a file under the overrides. Problems go to `reading`; errors among them end the
    /// reading.
    fn read(&self, root: Node, asked: &Asked<'_>, reading: &mut Reading) -> Translated;

    /// The key that holds the value of a native path which a plan may change (`batch.micro`,
    /// `batch.accumulation`, `generation.steps_per_generation`); `None` where the dialect has none.
    fn upstream_key(&self, _path: &str) -> Option<&'static str> {
        None
    }

    /// Older keys for the same, which stand over the newer one where both are given.
    fn older_keys(&self, _path: &str) -> &'static [&'static str] {
        &[]
    }

    /// The key by which the trainer is told to go on from a checkpoint, and what its checkpoints are
    /// called; `None` where it cannot, or where that is the script's own business.
    fn resume(&self) -> Option<Resume> {
        None
    }

    /// A key and its value as the trainer takes them on its command line, word by word.
    fn argument(&self, key: &str, value: &str) -> Vec<String> {
        vec![format!("{key}={value}")]
    }
}

/// The name of a dialect that is known but not read yet, for the message that refuses it.
pub(super) fn others(root: &Node) -> Option<&'static str> {
    if root
        .get("defaults")
        .is_some_and(|list| list.items().is_some())
    {
        return Some("a Hydra config, and not one of HALOs or of direct-preference-optimization");
    }
    None
}
