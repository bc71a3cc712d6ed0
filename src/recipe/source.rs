//! Where a value stood: files, spans and the map from native paths to both.
//!
//! Values given on the command line stand in a virtual file called `command line`, one override
//! a line, so that every value that a person wrote has a place that a message can point at.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// One file that was read, or the virtual one that holds the command line's overrides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// As the user named it.
    pub path: PathBuf,
    /// The whole text, for messages that show the line.
    pub text: String,
}

/// An index into [`Sources`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FileId(pub usize);

/// Every file that a recipe was read from, in the order of reading.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sources(Vec<SourceFile>);

impl Sources {
    /// Adds a file and returns its id.
    pub fn add(&mut self, path: impl Into<PathBuf>, text: impl Into<String>) -> FileId {
        self.0.push(SourceFile {
            path: path.into(),
            text: text.into(),
        });
        FileId(self.0.len() - 1)
    }

    /// The file behind an id; ids come only from [`Sources::add`] of the same value.
    pub fn get(&self, id: FileId) -> Option<&SourceFile> {
        self.0.get(id.0)
    }

    /// All files in the order of reading.
    pub fn iter(&self) -> impl Iterator<Item = &SourceFile> {
        self.0.iter()
    }
}

/// A stretch of a source file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Span {
    /// Which file.
    pub file: FileId,
    /// Byte offset of the first byte.
    pub start: usize,
    /// Byte offset after the last byte.
    pub end: usize,
    /// Line, counted from 1.
    pub line: u32,
    /// Column in characters, counted from 1.
    pub column: u32,
}

/// A place in the recipe: the key as its own dialect spells it, and where its value stood.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The upstream key, for example `per_device_train_batch_size`.
    pub key: String,
    /// Where the value stood.
    pub span: Span,
}

/// Native path (`batch.micro`) to the place that set it; a path that is absent holds a default.
pub type Places = BTreeMap<String, Place>;
