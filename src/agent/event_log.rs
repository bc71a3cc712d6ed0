//! Writes a pod's log and, on rank 0's pod, the event log of the generation; serves the latter from a position.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::api::LogFormat;
use crate::lifecycle::event_log::{LogLine, Position, RESPONSE_BYTES, text_of_rank};
use crate::lifecycle::files;
use crate::telemetry::Event;
use crate::util::input;

/// Part of an event log that is searched line by line, bytes.
const BLOCK: u64 = 64 << 10;

/// The log of a pod, and the event log of the generation that it writes, if any. A failed write never disturbs
/// training: readers notice a missing position.
pub struct EventLog {
    out: Box<dyn Write + Send>,
    format: LogFormat,
    /// Number of lines in the pod's log.
    lines: u64,
    /// The next event of the generation.
    next: Option<Position>,
    file: Option<File>,
}

impl EventLog {
    /// A pod's log on standard output.
    pub fn stdout(format: LogFormat) -> EventLog {
        EventLog::on(Box::new(io::stdout()), format)
    }

    fn on(out: Box<dyn Write + Send>, format: LogFormat) -> EventLog {
        EventLog {
            out,
            format,
            lines: 0,
            next: None,
            file: None,
        }
    }

    /// Starts the event log of a generation; `writes`: this pod has rank 0 and writes it.
    pub fn begin(&mut self, run: &Path, generation: u64, writes: bool) {
        self.next = writes.then(|| Position::first(generation));
        // One generation has one writer, which starts it once.
        let create = |_| File::create(run.join(files::events(generation))).ok();
        self.file = self.next.and_then(create);
    }

    /// Writes a line that a rank printed.
    pub fn of_rank(&mut self, rank: u64, line: String) {
        match self.format {
            LogFormat::Text => {
                self.lines += 1;
                self.put(&text_of_rank(rank, &line));
            }
            LogFormat::Json => self.print(None, Event::Output { rank, line }),
        }
    }

    /// Writes an event of the training.
    pub fn of_training(&mut self, event: Event) {
        let position = self.next;
        if let Some(next) = &mut self.next {
            next.index += 1;
        }
        self.print(position, event);
    }

    fn print(&mut self, position: Option<Position>, event: Event) {
        let line = LogLine {
            seq: Some(self.lines),
            position,
            event,
        };
        self.lines += 1;
        let Ok(mut json) = serde_json::to_string(&line) else {
            return;
        };
        json.push('\n');
        if let (Some(file), Some(_)) = (&mut self.file, position) {
            // One write a line, so that readers see whole lines.
            let _ = file.write_all(json.as_bytes());
        }
        self.put(&json);
    }

    /// Writes whole lines to the pod's log.
    fn put(&mut self, lines: &str) {
        let written = self.out.write_all(lines.as_bytes());
        let _ = written.and_then(|()| self.out.flush());
    }
}

/// The events of a generation from a position on, as lines of JSON; empty beyond its end. A line that is
/// incomplete, because it is being written, ends the response.
pub fn read_from(run: &Path, from: Position) -> io::Result<String> {
    let path: PathBuf = run.join(files::events(from.generation));
    let mut file = input::open(&path)?;
    let start = start_of(&mut file, from)?;
    file.seek(SeekFrom::Start(start))?;
    let mut lines = BufReader::new(file);
    let mut found = String::new();
    let mut bytes = Vec::new();
    loop {
        bytes.clear();
        if lines.read_until(b'\n', &mut bytes)? == 0 || bytes.last() != Some(&b'\n') {
            return Ok(found);
        }
        let Some((line, _)) = event(&bytes).filter(|(_, position)| *position >= from) else {
            continue;
        };
        if !found.is_empty() && found.len() + line.len() > RESPONSE_BYTES {
            return Ok(found);
        }
        found.push_str(line);
    }
}

/// A line and its position. A failed write leaves positions out, so lines cannot be counted, and some are torn.
fn event(line: &[u8]) -> Option<(&str, Position)> {
    let line = std::str::from_utf8(line).ok()?;
    Some((line, LogLine::parse(line)?.position?))
}

/// Offset of a line at or before the first event from `from` on, found by bisection: followers ask for the end
/// of long logs again and again.
fn start_of(file: &mut File, from: Position) -> io::Result<u64> {
    let (mut start, mut end) = (0, file.metadata()?.len());
    while end - start > BLOCK {
        let middle = start + (end - start) / 2;
        match first_after(file, middle)? {
            Some((offset, position)) if offset < end && position < from => start = offset,
            _ => end = middle,
        }
    }
    Ok(start)
}

/// Offset and position of the first whole event that begins after an offset.
fn first_after(file: &mut File, offset: u64) -> io::Result<Option<(u64, Position)>> {
    file.seek(SeekFrom::Start(offset))?;
    let mut lines = BufReader::new(file);
    let mut line = Vec::new();
    // The rest of a line that began before.
    let mut at = offset + lines.read_until(b'\n', &mut line)? as u64;
    loop {
        line.clear();
        let length = lines.read_until(b'\n', &mut line)?;
        if length == 0 {
            return Ok(None);
        }
        if let Some((_, position)) = event(&line) {
            return Ok(Some((at, position)));
        }
        at += length as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn warning(number: u64) -> Event {
        Event::Warning {
            message: number.to_string(),
        }
    }

    /// Index and message of every line.
    fn read(run: &Path, generation: u64, index: u64) -> Vec<(u64, String)> {
        let text = read_from(run, Position { generation, index }).unwrap();
        let lines = text.lines().map(|line| LogLine::parse(line).unwrap());
        lines
            .map(|line| match line.event {
                Event::Warning { message } => (line.position.unwrap().index, message),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn events_are_served_from_any_position_and_output_is_not_among_them() {
        let run = tempfile::tempdir().unwrap();
        std::fs::create_dir(run.path().join("gen-3")).unwrap();
        let mut log = EventLog::on(Box::new(io::sink()), LogFormat::Text);
        log.of_training(warning(0));
        log.begin(run.path(), 3, true);
        for number in 0..5 {
            log.of_training(warning(number));
            log.of_rank(0, "words".into());
        }
        let all = read(run.path(), 3, 0);
        let expected: Vec<(u64, String)> = (0..5).map(|n| (n, n.to_string())).collect();
        assert_eq!(all, expected);
        assert_eq!(read(run.path(), 3, 4), expected[4..]);
        assert_eq!(read(run.path(), 3, 5), []);
        assert!(
            read_from(
                run.path(),
                Position {
                    generation: 4,
                    index: 0
                }
            )
            .is_err()
        );
        // Half a line is not served before it is whole.
        let path = run.path().join(files::events(3));
        let mut file = File::options().append(true).open(&path).unwrap();
        file.write_all(b"{\"seq\":9,\"pos").unwrap();
        assert_eq!(read(run.path(), 3, 0).len(), 5);
    }

    #[test]
    fn every_position_of_a_long_log_is_found() {
        let run = tempfile::tempdir().unwrap();
        std::fs::create_dir(run.path().join("gen-1")).unwrap();
        let mut log = EventLog::on(Box::new(io::sink()), LogFormat::Text);
        log.begin(run.path(), 1, true);
        for number in 0..5000_u64 {
            // Lines of up to some kilobytes.
            let message = "x".repeat((number * number % 997) as usize);
            log.of_training(Event::Warning { message });
        }
        let path = run.path().join(files::events(1));
        assert!(std::fs::metadata(&path).unwrap().len() > 20 * BLOCK);
        for index in (0..5000).step_by(123).chain([4999]) {
            let from = Position {
                generation: 1,
                index,
            };
            let text = read_from(run.path(), from).unwrap();
            let first = LogLine::parse(text.lines().next().unwrap()).unwrap();
            assert_eq!(first.position, Some(from));
        }
        let beyond = Position {
            generation: 1,
            index: 5000,
        };
        assert_eq!(read_from(run.path(), beyond).unwrap(), "");
    }

    #[test]
    fn a_long_log_is_served_in_parts() {
        let run = tempfile::tempdir().unwrap();
        std::fs::create_dir(run.path().join("gen-1")).unwrap();
        let mut log = EventLog::on(Box::new(io::sink()), LogFormat::Text);
        log.begin(run.path(), 1, true);
        let long = RESPONSE_BYTES / 3;
        for _ in 0..10 {
            log.of_training(Event::Warning {
                message: "x".repeat(long),
            });
        }
        let (mut next, mut parts) = (0, 0);
        while let Some((last, _)) = read(run.path(), 1, next).pop() {
            assert!(last >= next);
            next = last + 1;
            parts += 1;
        }
        assert_eq!((next, parts), (10, 5));
    }
}
