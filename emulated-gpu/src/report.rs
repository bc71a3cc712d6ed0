//! The report: one JSON object a line, appended as findings occur and at exit.
//!
//! Findings also go to standard error, so that a failed test shows its reason. Several processes may share
//! one file: every line names its process, and is written by one call.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::PathBuf;

use serde_json::{Value, json};

/// Where findings are written.
#[derive(Debug)]
pub struct Report {
    file: Option<PathBuf>,
    findings: u64,
}

impl Report {
    pub fn new(file: Option<PathBuf>) -> Report {
        Report { file, findings: 0 }
    }

    pub fn findings(&self) -> u64 {
        self.findings
    }

    /// Writes something that a correct program does not do.
    pub fn finding(&mut self, kind: &str, message: &str, details: Value) {
        self.findings += 1;
        eprintln!("emulated GPU: {kind}: {message}");
        let mut details = details;
        details["message"] = json!(message);
        self.line(kind, details);
    }

    /// Writes a line. A report that cannot be written goes to standard error, and the program continues as
    /// on a GPU.
    pub fn line(&self, kind: &str, details: Value) {
        let Some(path) = &self.file else {
            return;
        };
        let mut line = details;
        line["kind"] = json!(kind);
        line["pid"] = json!(std::process::id());
        let mut options = OpenOptions::new();
        let file = options.append(true).create(true).open(path);
        let written = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes()));
        if let Err(error) = written {
            eprintln!("emulated GPU: cannot write {}: {error}", path.display());
        }
    }
}
