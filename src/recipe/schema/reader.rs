//! The interface of a dialect.
//!
//! A new dialect needs one file with a [`Reader`] and one line in [`crate::recipe::dialects::readers`].

use std::path::Path;

use super::dialect::Dialect;
use super::origin::Origin;
use super::overrides;
use super::reading::Reading;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::FileId;

/// How sure a reader is that a file has its dialect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Confidence {
    /// Some keys fit the dialect.
    Possible,
    /// Some keys exist only in this dialect.
    Likely,
    /// The file names its dialect.
    Certain,
}

impl Confidence {
    /// The result of detection, with its reason.
    pub fn because(self, reason: impl Into<String>) -> Detected {
        Detected {
            confidence: self,
            reason: reason.into(),
        }
    }
}

/// The result of detection for one dialect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Detected {
    pub confidence: Confidence,
    /// The reason, one line for the user.
    pub reason: String,
}

/// The user's options for reading a file.
#[derive(Debug, Clone, Copy)]
pub struct ReadOptions<'a> {
    pub path: &'a Path,
    /// The overrides of the command line.
    pub overrides: &'a [String],
    /// The virtual file with the overrides, if there are any.
    pub command_line: Option<FileId>,
    /// The version of the dialect, if the user names one.
    pub version: Option<&'a str>,
}

/// How a trainer resumes from one of its checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resume {
    /// The key for the checkpoint's directory.
    pub key: &'static str,
    /// The key for the directory of all checkpoints.
    pub output: &'static str,
    /// How its checkpoints are named and recognized.
    pub checkpoints: Checkpoints,
}

impl Resume {
    /// `TrainingArguments.resume_from_checkpoint` of transformers. Its scripts and TRL's pass it to
    /// `Trainer.train`.
    pub const TRANSFORMERS: Resume = Resume {
        key: "resume_from_checkpoint",
        output: "output_dir",
        checkpoints: Checkpoints::TRANSFORMERS,
    };
}

/// The names of a trainer's checkpoints: a prefix and an increasing number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checkpoints {
    /// The text before the number.
    pub prefix: &'static str,
    /// Files that a complete checkpoint has.
    pub needs: &'static [&'static str],
    /// A file that marks an incomplete checkpoint.
    pub unless: Option<&'static str>,
}

impl Checkpoints {
    /// Checkpoints of an unknown program: any number, without a prefix.
    pub const ANY: Checkpoints = Checkpoints {
        prefix: "",
        needs: &[],
        unless: None,
    };

    /// Checkpoints of transformers' `Trainer` (5.23.0). It writes `trainer_state.json` after weights and
    /// optimiser. On SIGTERM it marks the checkpoint as incomplete while writing it.
    pub const TRANSFORMERS: Checkpoints = Checkpoints {
        prefix: "checkpoint-",
        needs: &["trainer_state.json"],
        unless: Some("checkpoint-is-incomplete.txt"),
    };
}

impl ReadOptions<'_> {
    /// Applies the overrides to a file with plain keys. `path_of` maps an override's key to a path from the
    /// file's root.
    pub(crate) fn put_into(
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

/// The version of its dialect that a file is read as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadAs {
    pub name: String,
    /// Why this one, a clause.
    pub reason: String,
}

/// A file's tree, as written and with native keys.
#[derive(Debug, Clone, PartialEq)]
pub struct Translated {
    /// The file's tree with the overrides applied.
    pub source: Node,
    /// The tree with native keys ([`crate::recipe::schema::spec::Spec`]'s). Values from the user keep their places and their
    /// upstream keys ([`Node::key`]); defaults of the dialect have no key.
    pub native: Node,
    /// The version of the dialect, if it has several.
    pub version: Option<ReadAs>,
    /// The file is only a part of a recipe; other files hold the rest.
    pub part: bool,
}

impl Translated {
    /// A whole recipe of a dialect with one version.
    pub(crate) fn whole(source: Node, native: Node) -> Translated {
        Translated {
            source,
            native,
            version: None,
            part: false,
        }
    }
}

/// The reader of one dialect.
pub trait Reader: Sync {
    /// The dialect that this reader reads.
    fn dialect(&self) -> Dialect;

    /// Checks whether a file has this dialect. Other files of its tree are at the same origin.
    fn detect(&self, root: &Node, path: &Path, origin: &Origin) -> Option<Detected>;

    /// Whether `--dialect-version` has a meaning.
    fn has_versions(&self) -> bool {
        false
    }

    /// Reads a file and applies the overrides. Problems go to `reading`; an error ends reading.
    fn read(&self, root: Node, asked: &ReadOptions<'_>, reading: &mut Reading) -> Translated;

    /// The upstream keys of the native paths that a plan may change (`batch.per_device_batch_size`,
    /// `batch.accumulation`, `generation.steps_per_generation`). Of several keys of a path the first is the current
    /// one; older ones win if both are given.
    fn batch_keys(&self) -> &'static [(&'static str, &'static str)] {
        &[]
    }

    /// The keys of a native path, the current one first.
    fn keys_of(&self, path: &str) -> Vec<&'static str> {
        let keys = self.batch_keys().iter().filter(|(_, of)| *of == path);
        keys.map(|(key, _)| *key).collect()
    }

    /// The current key of a native path. `None`: the dialect has no such key.
    fn upstream_key(&self, path: &str) -> Option<&'static str> {
        self.keys_of(path).first().copied()
    }

    /// How the trainer resumes from a checkpoint. `None`: it cannot, or that depends on the script.
    fn resume(&self) -> Option<Resume> {
        None
    }

    /// The words of a key and its value on the trainer's command line.
    fn argument(&self, key: &str, value: &str) -> Vec<String> {
        vec![format!("{key}={value}")]
    }
}

/// The name of a recognized but unsupported dialect, for the message that refuses it.
pub(crate) fn others(root: &Node) -> Option<&'static str> {
    if root
        .get("defaults")
        .is_some_and(|list| list.items().is_some())
    {
        return Some("a Hydra config, and not one of HALOs or of direct-preference-optimization");
    }
    if root.get("log_history").is_some() {
        return Some("the `trainer_state.json` of a run, and no recipe");
    }
    None
}
