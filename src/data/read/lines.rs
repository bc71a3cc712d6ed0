//! Text files: JSON lines, blocks between blank lines, or the whole file as one document.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::super::error::DataError;
use super::{Bytes, Content, Document, Documents, SEGMENT};
use crate::util::format;

/// Longest line or block of text, in bytes; a longer one is a mistake.
pub(super) const LONGEST: usize = 256 << 20;

/// What helps against text that is not UTF-8.
pub(super) const TO_UTF8: &str = "convert the file to UTF-8, for example with iconv";

/// JSON lines: one object a line; blank lines are ignored.
pub(super) fn jsonl(name: &Path, file: BufReader<Bytes>) -> Documents {
    let mut lines = Lines::of(name, file);
    documents(move || {
        while let Some(line) = lines.read()? {
            if !line.text.trim().is_empty() {
                return Ok(Some(line.document(&lines, Content::Json, false)));
            }
        }
        Ok(None)
    })
}

/// Makes a document of every block of lines between blank lines.
pub(super) fn blocks(name: &Path, file: Bytes) -> Documents {
    let mut lines = Lines::of(name, buffered(file));
    documents(move || {
        let mut block = Text::default();
        while let Some(line) = lines.read()? {
            let blank = line.text.trim().is_empty();
            if blank && block.text.is_empty() {
                block.bytes += line.bytes;
                continue;
            }
            block.push(line);
            if blank {
                break;
            }
            if block.text.len() > LONGEST {
                return Err(DataError::record(
                    &lines.place(block.line),
                    format!(
                        "a block of more than {} begins here",
                        format::bytes(LONGEST as u64)
                    ),
                    "put blank lines between documents, or set packing=true to read the file as \
                     a stream",
                ));
            }
        }
        let trimmed = |text: String| Content::Text(text.trim_matches(['\n', '\r']).to_string());
        Ok((!block.text.is_empty()).then(|| block.document(&lines, trimmed, false)))
    })
}

/// Makes one document of the file, in segments that end at line breaks.
pub(super) fn stream(name: &Path, file: Bytes) -> Documents {
    let mut lines = Lines::of(name, buffered(file));
    let mut continues = false;
    documents(move || {
        let mut segment = Text::default();
        while segment.text.len() < SEGMENT {
            let Some(line) = lines.read()? else { break };
            segment.push(line);
        }
        if segment.text.is_empty() {
            return Ok(None);
        }
        let continues = std::mem::replace(&mut continues, true);
        Ok(Some(segment.document(&lines, Content::Text, continues)))
    })
}

pub(super) fn buffered(file: Bytes) -> BufReader<Bytes> {
    BufReader::with_capacity(1 << 20, file)
}

fn documents(mut next: impl FnMut() -> Result<Option<Document>, DataError> + 'static) -> Documents {
    Box::new(std::iter::from_fn(move || next().transpose()))
}

/// Consecutive lines of a file.
#[derive(Default)]
struct Text {
    /// Number of the first line, counted from 1.
    line: u64,
    /// The text with its line breaks, without a byte-order mark.
    text: String,
    /// Length in the file, in bytes.
    bytes: u64,
}

impl Text {
    fn push(&mut self, line: Text) {
        if self.text.is_empty() {
            self.line = line.line;
        }
        self.text.push_str(&line.text);
        self.bytes += line.bytes;
    }

    fn document(
        self,
        lines: &Lines,
        content: impl FnOnce(String) -> Content,
        continues: bool,
    ) -> Document {
        Document {
            place: lines.place(self.line),
            content: content(self.text),
            continues,
            bytes: self.bytes,
        }
    }
}

/// Lines of a text file, checked to be UTF-8.
struct Lines {
    name: PathBuf,
    file: BufReader<Bytes>,
    number: u64,
}

impl Lines {
    fn of(name: &Path, file: BufReader<Bytes>) -> Lines {
        Lines {
            name: name.to_path_buf(),
            file,
            number: 0,
        }
    }

    fn place(&self, number: u64) -> String {
        format!("{}:{number}", self.name.display())
    }

    fn read(&mut self) -> Result<Option<Text>, DataError> {
        let mut bytes = Vec::new();
        let read = (&mut self.file)
            .take(LONGEST as u64 + 1)
            .read_until(b'\n', &mut bytes)
            .map_err(|error| DataError::read(&self.name, error))?;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        let place = || self.place(self.number);
        if read > LONGEST {
            return Err(DataError::record(
                &place(),
                format!("the line is longer than {}", format::bytes(LONGEST as u64)),
                "break it up, or set the source's format if this is no text",
            ));
        }
        let mut text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            DataError::record(
                &place(),
                format!("byte {} of the line is not valid UTF-8", at + 1),
                TO_UTF8,
            )
        })?;
        if self.number == 1 && text.starts_with('\u{feff}') {
            text.remove(0);
        }
        Ok(Some(Text {
            line: self.number,
            text,
            bytes: read as u64,
        }))
    }
}
