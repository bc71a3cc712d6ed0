//! Copies a rank's output from its log to the pod's log. The rank writes the log file itself, on
//! the run's volume, so the file outlives the pod and the agent.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::lifecycle::files;
use crate::util::input;

/// Bytes copied per pass. A rank that prints more in a tenth of a second is copied late, but no
/// output is lost.
const AT_ONCE: usize = 64 << 10;
/// Longer lines are copied in pieces, bytes.
const LONGEST: usize = 16 << 10;

/// Read position in a rank's log.
#[derive(Debug)]
pub struct Tail {
    rank: u64,
    path: PathBuf,
    file: Option<File>,
    /// A line without its end so far.
    begun: Vec<u8>,
}

impl Tail {
    /// The log of a rank of a generation, from its beginning.
    pub fn of(run: &Path, generation: u64, rank: u64) -> Tail {
        Tail {
            rank,
            path: run.join(files::rank_log(generation, rank)),
            file: None,
            begun: Vec::new(),
        }
    }

    /// The rank that writes the log.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// New lines since the last call. A failed read is retried later, because a log must not
    /// disturb training.
    pub fn lines(&mut self) -> Vec<String> {
        if self.file.is_none() {
            self.file = input::open(&self.path).ok();
        }
        let Some(file) = &mut self.file else {
            return Vec::new();
        };
        // Bytes read before an error are kept.
        let _ = file.take(AT_ONCE as u64).read_to_end(&mut self.begun);
        let mut lines = Vec::new();
        while let Some(end) = end_of_line(&self.begun) {
            let rest = self.begun.split_off(end);
            let line = std::mem::replace(&mut self.begun, rest);
            lines.push(shown(&String::from_utf8_lossy(&line)));
        }
        lines
    }

    /// The remaining lines, including an unterminated last one, after the rank ended.
    pub fn rest(&mut self) -> Vec<String> {
        let mut rest = Vec::new();
        loop {
            let lines = self.lines();
            if lines.is_empty() {
                break;
            }
            rest.extend(lines);
        }
        let last = std::mem::take(&mut self.begun);
        rest.extend((!last.is_empty()).then(|| shown(&String::from_utf8_lossy(&last))));
        rest
    }
}

/// A line as a terminal shows it: text that a progress bar has overwritten is dropped.
pub fn shown(line: &str) -> String {
    let text = line.trim_end_matches(['\n', '\r']);
    text.rsplit('\r').next().unwrap_or_default().to_owned()
}

fn end_of_line(bytes: &[u8]) -> Option<usize> {
    let newline = bytes.iter().position(|byte| *byte == b'\n');
    match newline {
        Some(at) => Some((at + 1).min(LONGEST)),
        None => (bytes.len() >= LONGEST).then_some(LONGEST),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn every_line_is_copied_once_and_complete() {
        let run = tempfile::tempdir().unwrap();
        let mut tail = Tail::of(run.path(), 2, 5);
        assert_eq!(tail.lines(), Vec::<String>::new(), "no file yet");
        let path = run.path().join(files::rank_log(2, 5));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut log = File::create(path).unwrap();
        log.write_all(b"one\ntwo\r\nthr").unwrap();
        assert_eq!(tail.lines(), ["one", "two"]);
        assert_eq!(tail.lines(), Vec::<String>::new());
        log.write_all(b"ee \xff\n").unwrap();
        assert_eq!(tail.lines(), ["three \u{fffd}"]);
    }

    #[test]
    fn a_progress_bar_keeps_its_final_text_and_the_last_line_needs_no_newline() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join(files::rank_log(1, 0));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, " 1%\r 50%\r100%\ndone").unwrap();
        let mut tail = Tail::of(run.path(), 1, 0);
        assert_eq!(tail.lines(), ["100%"]);
        assert_eq!(tail.rest(), ["done"]);
        assert_eq!(tail.rest(), Vec::<String>::new());
    }

    #[test]
    fn an_endless_line_is_copied_in_pieces() {
        let run = tempfile::tempdir().unwrap();
        let path = run.path().join(files::rank_log(1, 0));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, vec![b'x'; 3 * LONGEST + 7]).unwrap();
        let mut tail = Tail::of(run.path(), 1, 0);
        let lines = tail.lines();
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| line.len() == LONGEST));
    }
}
