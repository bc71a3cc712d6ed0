//! Vector clocks and the accesses of each address, which find two unordered operations on the same bytes.
//!
//! Every stream is a lane of the clock. The host is ordered as one thread: an operation follows all that
//! any host thread has waited for. So a race between two host threads is not found.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::memory::words;

/// For each lane, how many of its operations are ordered before a point.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clock(Vec<u64>);

impl Clock {
    pub fn get(&self, lane: usize) -> u64 {
        self.0.get(lane).copied().unwrap_or(0)
    }

    /// Counts one more operation of the lane.
    pub fn tick(&mut self, lane: usize) {
        self.0.resize(self.0.len().max(lane + 1), 0);
        self.0[lane] += 1;
    }

    /// Orders everything before `other` before this point too.
    pub fn join(&mut self, other: &Clock) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        for (mine, theirs) in self.0.iter_mut().zip(&other.0) {
            *mine = (*mine).max(*theirs);
        }
    }
}

/// An operation as the history remembers it.
#[derive(Debug, Clone)]
pub struct Stamp {
    pub lane: usize,
    /// The operation's own count in its lane.
    pub time: u64,
    /// The operation for people.
    pub operation: Arc<str>,
}

impl Stamp {
    fn is_before(&self, clock: &Clock) -> bool {
        clock.get(self.lane) >= self.time
    }
}

/// Two operations on the same bytes, at least one of which writes, without an order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Race {
    /// The operation that the emulator happened to run first.
    pub first: Arc<str>,
    pub second: Arc<str>,
    /// What the second does after what the first does.
    pub kind: &'static str,
    pub bytes: Range<u64>,
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Range { start, end } = self.bytes;
        let (first, second, kind) = (&self.first, &self.second, self.kind);
        write!(
            f,
            "{first} and {second} are not ordered: {kind} of {} bytes at {start:#x}",
            end - start
        )
    }
}

/// The last write of every address and the reads since, as far as a later operation could race with them.
#[derive(Debug, Default)]
pub struct History(BTreeMap<u64, Cell>);

#[derive(Debug, Clone)]
struct Cell {
    end: u64,
    writer: Option<Stamp>,
    readers: Vec<Stamp>,
}

impl History {
    /// Forgets everything: all operations so far are ordered before all later ones.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Records a read, and returns a write that is not ordered before it.
    pub fn read(&mut self, range: Range<u64>, stamp: &Stamp, clock: &Clock) -> Option<Race> {
        self.split(range.start);
        self.split(range.end);
        let mut race = None;
        let mut gaps = Vec::new();
        let mut end = range.start;
        for (&start, cell) in self.0.range_mut(range.clone()) {
            if start > end {
                gaps.push(end..start);
            }
            end = cell.end;
            let unordered = cell.writer.iter().find(|writer| !writer.is_before(clock));
            race = race.or(unordered.map(|writer| Race {
                first: writer.operation.clone(),
                second: stamp.operation.clone(),
                kind: "read after write",
                bytes: start..cell.end,
            }));
            cell.readers.retain(|reader| !reader.is_before(clock));
            cell.readers.push(stamp.clone());
        }
        if end < range.end {
            gaps.push(end..range.end);
        }
        for gap in gaps {
            let cell = Cell {
                end: gap.end,
                writer: None,
                readers: vec![stamp.clone()],
            };
            self.0.insert(gap.start, cell);
        }
        race
    }

    /// Records a write, and returns a read or a write that is not ordered before it.
    pub fn write(&mut self, range: Range<u64>, stamp: &Stamp, clock: &Clock) -> Option<Race> {
        self.split(range.start);
        self.split(range.end);
        let mut race = None;
        let mut old = Vec::new();
        for (&start, cell) in self.0.range(range.clone()) {
            let unordered = |stamps: &[Stamp], kind| {
                let earlier = stamps.iter().find(|earlier| !earlier.is_before(clock))?;
                Some(Race {
                    first: earlier.operation.clone(),
                    second: stamp.operation.clone(),
                    kind,
                    bytes: start..cell.end,
                })
            };
            race = race
                .or_else(|| unordered(cell.writer.as_slice(), "write after write"))
                .or_else(|| unordered(&cell.readers, "write after read"));
            old.push(start);
        }
        for start in old {
            self.0.remove(&start);
        }
        let cell = Cell {
            end: range.end,
            writer: Some(stamp.clone()),
            readers: Vec::new(),
        };
        self.0.insert(range.start, cell);
        race
    }

    /// Divides the cell that contains the address, so that a cell starts there.
    fn split(&mut self, at: u64) {
        let Some((_, cell)) = self.0.range_mut(..at).next_back() else {
            return;
        };
        if cell.end > at {
            let tail = cell.clone();
            cell.end = at;
            self.0.insert(at, tail);
        }
    }
}

/// Bytes of a [`Page`].
const PAGE: u64 = 4096;
/// Pages that are found without the hash map.
const RECENT: usize = 64;

/// The bytes that one operation reads and writes.
#[derive(Debug)]
pub struct Touched(RefCell<Pages>);

#[derive(Debug)]
struct Pages {
    pages: Vec<Page>,
    index: HashMap<u64, usize>,
    recent: [(u64, usize); RECENT],
}

#[derive(Debug)]
struct Page {
    number: u64,
    read: [u64; PAGE as usize / 64],
    written: [u64; PAGE as usize / 64],
}

impl Default for Touched {
    fn default() -> Touched {
        Touched(RefCell::new(Pages {
            pages: Vec::new(),
            index: HashMap::new(),
            recent: [(u64::MAX, 0); RECENT],
        }))
    }
}

impl Touched {
    pub fn read(&self, address: u64, bytes: u64) {
        self.mark(address, bytes, |page| &mut page.read);
    }

    pub fn write(&self, address: u64, bytes: u64) {
        self.mark(address, bytes, |page| &mut page.written);
    }

    fn mark(
        &self,
        address: u64,
        bytes: u64,
        bits: fn(&mut Page) -> &mut [u64; PAGE as usize / 64],
    ) {
        let mut pages = self.0.borrow_mut();
        let end = address + bytes;
        let mut start = address;
        while start < end {
            let stop = end.min((start / PAGE + 1) * PAGE);
            let low = (start % PAGE) as usize;
            let bits = bits(pages.page(start / PAGE));
            for (word, mask) in words(low..low + (stop - start) as usize) {
                bits[word] |= mask;
            }
            start = stop;
        }
    }

    /// The ranges that were read and those that were written.
    pub fn ranges(&self) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        let pages = self.0.borrow();
        let mut sorted: Vec<&Page> = pages.pages.iter().collect();
        sorted.sort_by_key(|page| page.number);
        let (mut reads, mut writes) = (Vec::new(), Vec::new());
        for page in sorted {
            runs(page.number, &page.read, &mut reads);
            runs(page.number, &page.written, &mut writes);
        }
        (reads, writes)
    }
}

impl Pages {
    fn page(&mut self, number: u64) -> &mut Page {
        // Allocations start at equal low bits, so the higher ones take part.
        let slot = (number ^ number >> 8) as usize % RECENT;
        if self.recent[slot].0 != number {
            let next = self.pages.len();
            let index = *self.index.entry(number).or_insert(next);
            if index == next {
                self.pages.push(Page {
                    number,
                    read: [0; PAGE as usize / 64],
                    written: [0; PAGE as usize / 64],
                });
            }
            self.recent[slot] = (number, index);
        }
        &mut self.pages[self.recent[slot].1]
    }
}

/// Appends the runs of set bits of a page, and joins a run that continues the last one.
fn runs(page: u64, bits: &[u64], into: &mut Vec<Range<u64>>) {
    for (word, &bits) in bits.iter().enumerate() {
        let base = page * PAGE + word as u64 * 64;
        let mut from = 0;
        while from < 64 && bits >> from != 0 {
            let start = from + (bits >> from).trailing_zeros();
            let length = (bits >> start).trailing_ones();
            from = start + length;
            let run = base + u64::from(start)..base + u64::from(from);
            match into.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                _ => into.push(run),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn stamp(lane: usize, clock: &mut Clock) -> Stamp {
        clock.tick(lane);
        Stamp {
            lane,
            time: clock.get(lane),
            operation: format!("operation {} of lane {lane}", clock.get(lane)).into(),
        }
    }

    #[test]
    fn a_race_names_both_operations_and_an_order_removes_it() {
        let mut history = History::default();
        let (mut one, mut two) = (Clock::default(), Clock::default());
        let write = stamp(0, &mut one);
        assert_eq!(history.write(100..200, &write, &one), None);
        let read = stamp(1, &mut two);
        let race = history.read(150..160, &read, &two).unwrap();
        assert_eq!(
            race.to_string(),
            "operation 1 of lane 0 and operation 1 of lane 1 are not ordered: read after write of 10 \
             bytes at 0x96"
        );
        two.join(&one);
        let read = stamp(1, &mut two);
        assert_eq!(history.read(150..250, &read, &two), None);
        let write = stamp(0, &mut one);
        assert_eq!(history.write(100..150, &write, &one), None);
        let race = history.write(100..151, &write, &one).unwrap();
        assert_eq!(
            (race.kind, race.bytes.clone()),
            ("write after read", 150..151)
        );
        assert!(history.write(200..201, &write, &one).is_some());
    }

    proptest! {
        /// The pages of an operation give exactly the bytes that it marked.
        #[test]
        fn touched_ranges_are_exact(marks in proptest::collection::vec((0u64..20_000, 0u64..9_000), 0..20)) {
            let touched = Touched::default();
            let mut bytes = vec![false; 30_000];
            for &(address, length) in &marks {
                touched.write(address, length);
                bytes[address as usize..(address + length) as usize].fill(true);
            }
            let (reads, writes) = touched.ranges();
            prop_assert!(reads.is_empty());
            prop_assert!(writes.windows(2).all(|pair| pair[0].end < pair[1].start));
            let mut found = vec![false; 30_000];
            for range in writes {
                found[range.start as usize..range.end as usize].fill(true);
            }
            prop_assert_eq!(bytes, found);
        }
    }
}
