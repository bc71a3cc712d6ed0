//! The places of values: files, spans and the map from native paths to both.
//!
//! Values from the command line are in a virtual file called `command line`, one override a line. Every
//! value from the user therefore has a place that a message can show.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A file, or the virtual file with the command line's overrides.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// The path as the user wrote it.
    pub path: PathBuf,
    /// The whole text, for messages that show the line.
    pub text: String,
}

/// An index into [`Sources`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct FileId(pub usize);

/// All files of a recipe, in the order of reading.
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

    /// The file of an id. The id must come from [`Sources::add`] of the same value.
    pub fn get(&self, id: FileId) -> Option<&SourceFile> {
        self.0.get(id.0)
    }

    /// Drops the texts, after which findings still have their places.
    pub fn forget_texts(&mut self) {
        for file in &mut self.0 {
            file.text = String::new();
        }
    }

    /// The bytes of all texts.
    pub(crate) fn bytes(&self) -> usize {
        self.0.iter().map(|file| file.text.len()).sum()
    }

    /// All files in the order of reading.
    pub fn iter(&self) -> impl Iterator<Item = &SourceFile> {
        self.0.iter()
    }
}

/// A range of bytes in a source file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Span {
    /// The file that holds the bytes.
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

impl Span {
    /// The span of a byte range in the text of a file.
    pub fn of(text: &str, range: Range<usize>, file: FileId) -> Span {
        let before = &text[..range.start];
        let number = |count: usize| u32::try_from(count + 1).unwrap_or(u32::MAX);
        let line = before.rsplit('\n').next().unwrap_or_default();
        Span {
            file,
            start: range.start,
            end: range.end,
            line: number(before.matches('\n').count()),
            column: number(line.chars().count()),
        }
    }
}

/// The start of a piece of a virtual file.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    pub offset: usize,
    pub line: u32,
    pub column: u32,
}

impl Position {
    /// The start of the file.
    pub const START: Position = Position {
        offset: 0,
        line: 1,
        column: 1,
    };

    /// The position after the text.
    pub fn after(self, text: &str) -> Position {
        let lines = text.matches('\n').count() as u32;
        let tail = text.rsplit('\n').next().unwrap_or(text).chars().count() as u32;
        Position {
            offset: self.offset + text.len(),
            line: self.line + lines,
            column: if lines == 0 {
                self.column + tail
            } else {
                tail + 1
            },
        }
    }

    /// The span of a text that begins here.
    pub fn span(self, file: FileId, text: &str) -> Span {
        Span {
            file,
            start: self.offset,
            end: self.offset + text.len(),
            line: self.line,
            column: self.column,
        }
    }
}

/// The upstream key of a value and the value's span.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ValueSource {
    /// The upstream key, for example `per_device_train_batch_size`.
    pub key: String,
    pub span: Span,
}

/// Maps a native path (`batch.per_device_batch_size`) to the place that sets it. Absent paths have defaults.
pub type ValueSources = BTreeMap<String, ValueSource>;
