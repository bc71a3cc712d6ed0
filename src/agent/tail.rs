//! What a rank prints, read along from its log for those who watch the pod's. The rank writes the
//! file itself, on the run's volume: its last words outlive the pod, and the agent.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::job::files;

/// Bytes that are passed on at a time. A rank that prints more than so much in a tenth of a second
/// is passed on late, never lost.
const AT_ONCE: usize = 64 << 10;
/// A line longer than this is passed on in pieces, bytes.
const LONGEST: usize = 16 << 10;

/// Where the reading of a rank's log stands.
#[derive(Debug)]
pub struct Tail {
    rank: u64,
    path: PathBuf,
    file: Option<File>,
    /// A line that has not ended yet.
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

    /// Whose log it is.
    pub fn rank(&self) -> u64 {
        self.rank
    }

    /// The lines that came since the last call. What cannot be read now is read later; a log is no
    /// reason to disturb training.
    pub fn lines(&mut self) -> Vec<String> {
        if self.file.is_none() {
            self.file = File::open(&self.path).ok();
        }
        let Some(file) = &mut self.file else {
            return Vec::new();
        };
        // What was read before an error counts.
        let _ = file.take(AT_ONCE as u64).read_to_end(&mut self.begun);
        let mut lines = Vec::new();
        while let Some(end) = end_of_line(&self.begun) {
            let rest = self.begun.split_off(end);
            let line = std::mem::replace(&mut self.begun, rest);
            lines.push(shown(&String::from_utf8_lossy(&line)));
        }
        lines
    }

    /// All that is left, be its last line ended or not: the rank has.
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

/// A line as a terminal would come to show it: what a progress bar has drawn over is gone.
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
    fn lines_are_passed_on_once_and_whole() {
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
    fn a_bar_is_shown_as_it_ended_and_the_last_line_needs_no_end() {
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
    fn endless_line_comes_in_pieces() {
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
