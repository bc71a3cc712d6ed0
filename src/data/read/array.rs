//! A file of JSON that is one array: each of its objects is a document. Only one object is in memory at a time.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use super::super::error::DataError;
use super::lines::{LONGEST, TO_UTF8};
use super::{Bytes, Content, Document};

/// Whether a file of JSON begins an array, after blanks and a byte-order mark.
pub(super) fn begins(name: &Path, file: &mut BufReader<Bytes>) -> Result<bool, DataError> {
    let start = file
        .fill_buf()
        .map_err(|error| DataError::read(name, error))?;
    let start = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start);
    let first = start.iter().find(|byte| !byte.is_ascii_whitespace());
    Ok(first == Some(&b'['))
}

/// The objects of the array.
pub(super) struct Objects {
    name: PathBuf,
    file: BufReader<Bytes>,
    /// Number of the line, counted from 1.
    line: u64,
    /// Brackets that are open.
    depth: u64,
    /// Whether the array has ended.
    is_over: bool,
}

impl Objects {
    pub fn of(name: &Path, file: BufReader<Bytes>) -> Objects {
        Objects {
            name: name.to_path_buf(),
            file,
            line: 1,
            depth: 0,
            is_over: false,
        }
    }

    fn fault(&self, line: u64, problem: &str, help: &str) -> DataError {
        DataError::record(&format!("{}:{line}", self.name.display()), problem, help)
    }

    fn next_object(&mut self) -> Result<Option<Document>, DataError> {
        let mut object = Vec::new();
        let (mut begin, mut bytes) = (self.line, 0);
        let (mut in_text, mut is_escaped) = (false, false);
        loop {
            let buffer = self.file.fill_buf();
            let buffer = buffer.map_err(|error| DataError::read(&self.name, error))?;
            if buffer.is_empty() {
                if self.is_over {
                    return Ok(None);
                }
                let problem = "the file ends within its array";
                return Err(self.fault(self.line, problem, "copy the file again"));
            }
            let mut used = 0;
            let mut is_whole = false;
            let mut fault = None;
            for &byte in buffer {
                used += 1;
                self.line += u64::from(byte == b'\n');
                if self.depth > 1 {
                    object.push(byte);
                }
                if in_text {
                    in_text = is_escaped || byte != b'"';
                    is_escaped = !is_escaped && byte == b'\\';
                    continue;
                }
                match byte {
                    b'"' if self.depth > 1 => in_text = true,
                    b'[' | b'{' if !self.is_over => {
                        if self.depth == 1 {
                            object.push(byte);
                            begin = self.line;
                        }
                        self.depth += 1;
                    }
                    b']' | b'}' if self.depth > 0 => {
                        self.depth -= 1;
                        self.is_over = self.depth == 0;
                        is_whole = self.depth == 1;
                    }
                    b',' | b' ' | b'\t' | b'\r' | b'\n' => {}
                    // A byte-order mark.
                    b'\xef' | b'\xbb' | b'\xbf' if self.depth == 0 && !self.is_over => {}
                    _ if self.depth > 1 => {}
                    _ => fault = Some("only objects may be in the array"),
                }
                if object.len() > LONGEST {
                    fault = Some("an object is too long");
                }
                if is_whole || fault.is_some() {
                    break;
                }
            }
            self.file.consume(used);
            bytes += used as u64;
            if let Some(problem) = fault {
                return Err(self.fault(self.line, problem, "repair the file"));
            }
            if is_whole {
                let Ok(text) = String::from_utf8(object) else {
                    return Err(self.fault(begin, "the object is not valid UTF-8", TO_UTF8));
                };
                return Ok(Some(Document {
                    place: format!("{}:{begin}", self.name.display()),
                    content: Content::Json(text),
                    continues: false,
                    bytes,
                }));
            }
        }
    }
}

impl Iterator for Objects {
    type Item = Result<Document, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_object().transpose()
    }
}
