//! Copies a rank's output from its log to the pod's log. The rank writes the log file itself, on
//! the run's volume, so the file outlives the pod and the agent.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use crate::external_trainer::ProgressWatch;
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
    bytes_read: u64,
}

impl Tail {
    /// The log of a rank of a generation, from its beginning.
    pub fn of(run_dir: &Path, generation: u64, rank: u64) -> Tail {
        Tail {
            rank,
            path: run_dir.join(files::rank_log(generation, rank)),
            file: None,
            begun: Vec::new(),
            bytes_read: 0,
        }
    }

    /// Bytes of output so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// New lines since the last call, with their line endings. A failed read is retried later, because a log must not
    /// disturb training.
    fn lines(&mut self) -> Vec<String> {
        if self.file.is_none() {
            self.file = input::open(&self.path).ok();
        }
        let Some(file) = &mut self.file else {
            return Vec::new();
        };
        let before = self.begun.len();
        // Bytes read before an error are kept.
        let _ = file.take(AT_ONCE as u64).read_to_end(&mut self.begun);
        self.bytes_read += (self.begun.len() - before) as u64;
        let mut lines = Vec::new();
        while let Some(end) = end_of_line(&self.begun) {
            let rest = self.begun.split_off(end);
            let line = std::mem::replace(&mut self.begun, rest);
            lines.push(String::from_utf8_lossy(&line).into_owned());
        }
        lines
    }

    /// The unterminated last line, after the rank ended.
    fn last_line(&mut self) -> Option<String> {
        let last = std::mem::take(&mut self.begun);
        (!last.is_empty()).then(|| String::from_utf8_lossy(&last).into_owned())
    }

    /// The last complete text of a progress bar in the unterminated line.
    fn progress_bar(&self) -> String {
        let text = self.begun.rsplit(|byte| *byte == b'\r').nth(1);
        String::from_utf8_lossy(text.unwrap_or_default()).into_owned()
    }
}

/// Shows the ranks' new output, and searches it for the progress. `ended`: the ranks have exited, so all of the rest
/// is shown.
pub fn new_output(
    tails: &mut [Tail],
    mut progress: Option<&mut ProgressWatch>,
    ended: bool,
    mut show: impl FnMut(u64, String),
) {
    for tail in tails {
        let rank = tail.rank;
        let mut progress = progress.as_deref_mut().filter(|_| rank == 0);
        let mut take = |line: String| {
            if let Some(progress) = &mut progress {
                progress.search(&line);
            }
            show(rank, shown(&line));
        };
        loop {
            let lines = tail.lines();
            let more = ended && !lines.is_empty();
            lines.into_iter().for_each(&mut take);
            if !more {
                break;
            }
        }
        if ended {
            tail.last_line().into_iter().for_each(take);
        } else if let Some(progress) = progress {
            progress.search(&tail.progress_bar());
        }
    }
}

/// A line as a terminal shows it: text that a progress bar has overwritten is dropped.
pub fn shown(line: &str) -> String {
    let text = line.trim_end_matches(['\n', '\r']);
    text.rsplit('\r').next().unwrap_or_default().to_owned()
}

fn end_of_line(bytes: &[u8]) -> Option<usize> {
    let start = &bytes[..bytes.len().min(LONGEST)];
    if let Some(at) = start.iter().position(|byte| *byte == b'\n') {
        return Some(at + 1);
    }
    // A piece of a progress bar ends with one of its texts.
    let last = |piece: &[u8]| piece.iter().rposition(|byte| *byte == b'\r');
    (start.len() == LONGEST).then(|| last(start).map_or(LONGEST, |at| at + 1))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn output(tail: &mut Tail, ended: bool) -> Vec<String> {
        let mut output = Vec::new();
        new_output(std::slice::from_mut(tail), None, ended, |_, line| {
            output.push(line);
        });
        output
    }

    #[test]
    fn every_line_is_copied_once_and_complete() {
        let run_dir = tempfile::tempdir().unwrap();
        let mut tail = Tail::of(run_dir.path(), 2, 5);
        assert_eq!(
            output(&mut tail, false),
            Vec::<String>::new(),
            "no file yet"
        );
        let path = run_dir.path().join(files::rank_log(2, 5));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut log = File::create(path).unwrap();
        log.write_all(b"one\ntwo\r\nthr").unwrap();
        assert_eq!(output(&mut tail, false), ["one", "two"]);
        assert_eq!(output(&mut tail, false), Vec::<String>::new());
        log.write_all(b"ee \xff\n").unwrap();
        assert_eq!(output(&mut tail, false), ["three \u{fffd}"]);
    }

    #[test]
    fn a_progress_bar_keeps_its_final_text_and_the_last_line_needs_no_newline() {
        let run_dir = tempfile::tempdir().unwrap();
        let path = run_dir.path().join(files::rank_log(1, 0));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, " 1%\r 50%\r100%\ndone").unwrap();
        let mut tail = Tail::of(run_dir.path(), 1, 0);
        assert_eq!(output(&mut tail, false), ["100%"]);
        assert_eq!(output(&mut tail, true), ["done"]);
        assert_eq!(output(&mut tail, true), Vec::<String>::new());
    }

    #[test]
    fn an_endless_line_is_copied_in_pieces() {
        let run_dir = tempfile::tempdir().unwrap();
        let path = run_dir.path().join(files::rank_log(1, 0));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, vec![b'x'; 3 * LONGEST + 7]).unwrap();
        let mut tail = Tail::of(run_dir.path(), 1, 0);
        let lines = output(&mut tail, false);
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| line.len() == LONGEST));
    }

    #[test]
    fn a_long_progress_bar_is_cut_between_its_texts() {
        let run_dir = tempfile::tempdir().unwrap();
        let path = run_dir.path().join(files::rank_log(1, 0));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        let text: String = (0..LONGEST / 8)
            .map(|step| format!("{step}/99999\r"))
            .collect();
        std::fs::write(&path, text).unwrap();
        let mut tail = Tail::of(run_dir.path(), 1, 0);
        let lines = output(&mut tail, true);
        assert_eq!(lines.len(), 2);
        assert!(
            lines.iter().all(|line| line.ends_with("/99999")),
            "{lines:?}"
        );
    }

    #[test]
    fn the_progress_is_searched_in_rank_0_and_in_a_progress_bar_that_has_not_ended() {
        let run_dir = tempfile::tempdir().unwrap();
        let path = run_dir.path().join(files::rank_log(1, 0));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(run_dir.path().join(files::rank_log(1, 1)), "step 9\n").unwrap();
        let mut tails = [0, 1].map(|rank| Tail::of(run_dir.path(), 1, rank));
        let mut searched = |text: &str, ended| {
            std::fs::write(&path, text).unwrap();
            let mut progress =
                ProgressWatch::start(run_dir.path(), 1, Some("step (?<step>[0-9]+)"), None);
            new_output(&mut tails, Some(&mut progress), ended, |_, _| ());
            progress.printed_step()
        };
        assert_eq!(searched("step 1\nother\n", false), Some(1));
        assert_eq!(searched("step 1\nother\n\r step 2\r st", false), Some(2));
        assert_eq!(searched("step 1\nother\n\r step 2\r step 3", true), Some(3));
    }
}
