//! Plain text: a document per block between blank lines, or the whole file as one.

use std::path::Path;

use super::super::error::DataError;
use super::lines::{LONGEST, Line, Lines};
use super::{Content, Document, Documents, SEGMENT};

/// Makes a document of every block of lines between blank lines.
pub(super) fn blocks(path: &Path) -> Result<Documents, DataError> {
    let mut lines = Lines::open(path)?;
    Ok(Box::new(std::iter::from_fn(move || {
        let mut block = Block::default();
        for line in lines.by_ref() {
            let line = match line {
                Ok(line) => line,
                Err(error) => return Some(Err(error)),
            };
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
                return Some(Err(DataError::record(
                    lines.place(block.first),
                    format!("a block of more than {LONGEST} bytes begins here"),
                    "put blank lines between documents, or set packing=true to read the file as \
                     a stream",
                )));
            }
        }
        if block.text.is_empty() {
            return None;
        }
        Some(Ok(Document {
            place: lines.place(block.first),
            content: Content::Text(block.text.trim_matches(['\n', '\r']).to_string()),
            continues: false,
            bytes: block.bytes,
        }))
    })))
}

/// Makes one document of the file, in segments that end at line breaks.
pub(super) fn stream(path: &Path) -> Result<Documents, DataError> {
    let mut lines = Lines::open(path)?;
    let mut continues = false;
    Ok(Box::new(std::iter::from_fn(move || {
        let mut block = Block::default();
        while block.text.len() < SEGMENT {
            match lines.next() {
                Some(Ok(line)) => block.push(line),
                Some(Err(error)) => return Some(Err(error)),
                None => break,
            }
        }
        if block.text.is_empty() {
            return None;
        }
        Some(Ok(Document {
            place: lines.place(block.first),
            content: Content::Text(block.text),
            continues: std::mem::replace(&mut continues, true),
            bytes: block.bytes,
        }))
    })))
}

/// Consecutive lines of one block.
#[derive(Default)]
struct Block {
    first: u64,
    text: String,
    bytes: u64,
}

impl Block {
    fn push(&mut self, line: Line) {
        if self.text.is_empty() {
            self.first = line.number;
        }
        self.text.push_str(&line.text);
        self.bytes += line.bytes;
    }
}
