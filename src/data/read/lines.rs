//! Lines of a text file, with their numbers, checked to be UTF-8.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use super::super::error::{DataError, RecordPosition, Unit};
use crate::util::input;

/// Longest line or block of text, in bytes; a longer one is a mistake.
pub(super) const LONGEST: usize = 256 << 20;

/// One line of a file.
pub(super) struct Line {
    /// Line number, counted from 1.
    pub number: u64,
    /// The text with its line break, without a byte-order mark.
    pub text: String,
    /// Length in the file, in bytes.
    pub bytes: u64,
}

pub(super) struct Lines {
    path: PathBuf,
    file: BufReader<File>,
    number: u64,
}

impl Lines {
    pub fn open(path: &Path) -> Result<Lines, DataError> {
        let file = input::open(path).map_err(|error| DataError::read(path, error))?;
        Ok(Lines {
            path: path.to_path_buf(),
            file: BufReader::with_capacity(1 << 20, file),
            number: 0,
        })
    }

    pub fn place(&self, number: u64) -> RecordPosition {
        RecordPosition {
            path: self.path.clone(),
            unit: Unit::Line,
            number,
        }
    }

    fn read(&mut self) -> Result<Option<Line>, DataError> {
        let mut bytes = Vec::new();
        let read = (&mut self.file)
            .take(LONGEST as u64 + 1)
            .read_until(b'\n', &mut bytes)
            .map_err(|error| DataError::read(&self.path, error))?;
        if read == 0 {
            return Ok(None);
        }
        self.number += 1;
        let place = || self.place(self.number);
        if read > LONGEST {
            return Err(DataError::record(
                place(),
                format!("the line is longer than {LONGEST} bytes"),
                "break it up, or set the source's format if this is no text",
            ));
        }
        let mut text = String::from_utf8(bytes).map_err(|error| {
            let at = error.utf8_error().valid_up_to();
            DataError::record(
                place(),
                format!("byte {} of the line is not valid UTF-8", at + 1),
                "convert the file to UTF-8, for example with iconv",
            )
        })?;
        if self.number == 1 && text.starts_with('\u{feff}') {
            text.remove(0);
        }
        Ok(Some(Line {
            number: self.number,
            text,
            bytes: read as u64,
        }))
    }
}

impl Iterator for Lines {
    type Item = Result<Line, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read().transpose()
    }
}
