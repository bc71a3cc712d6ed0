//! What a launch did.

use std::ops::Index;

/// Kinds of instructions that are counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Class {
    /// Integer arithmetic and logic.
    Integer,
    /// f32 arithmetic.
    Single,
    /// f16 and bf16 arithmetic.
    Half,
    /// f64 arithmetic.
    Double,
    /// `.approx` functions.
    Approximate,
    Convert,
    Move,
    /// Comparisons, selections and logic of predicates.
    Predicate,
    /// Branches and exits.
    Control,
    GlobalMemory,
    SharedMemory,
    LocalMemory,
    /// Loads of parameters.
    Parameter,
    Atomic,
    /// Barriers, fences and waits.
    Synchronise,
    /// Shuffles, votes, matches and reductions of a warp.
    Exchange,
    /// `ldmatrix` and `stmatrix`.
    Matrices,
    /// `mma` and `wgmma`.
    Mma,
    /// `cp.async`.
    Copy,
    /// Hints.
    Nothing,
}

const CLASSES: usize = Class::Nothing as usize + 1;

/// Warp instructions by class.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ByClass([u64; CLASSES]);

impl Index<Class> for ByClass {
    type Output = u64;

    fn index(&self, class: Class) -> &u64 {
        &self.0[class as usize]
    }
}

impl ByClass {
    pub(super) fn count(&mut self, class: Class) {
        self.0[class as usize] += 1;
    }

    /// Warp instructions of all classes.
    pub fn total(&self) -> u64 {
        self.0.iter().sum()
    }
}

/// What a launch did, summed over its blocks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Instructions that a warp executed, also those whose predicate was false in every lane.
    pub instructions: ByClass,
    /// Warp-wide products of `mma`, and those of 16 × 8 × 16 that `wgmma` is made of.
    pub mma: u64,
    /// Accesses to shared memory that bank conflicts repeat.
    pub bank_conflicts: u64,
    /// Loads, stores, atomics and asynchronous copies of global memory, per warp.
    pub global_requests: u64,
    /// 32-byte sectors that these requests touch.
    pub global_sectors: u64,
    /// Sectors if the distinct bytes of each request were contiguous and aligned.
    pub global_sectors_ideal: u64,
    /// Bytes that lanes read from global memory; a broadcast counts once per lane.
    pub global_bytes_read: u64,
    /// Bytes that lanes wrote to global memory.
    pub global_bytes_written: u64,
    /// Blocks that wrote none.
    pub idle_blocks: u64,
}

impl Counters {
    /// Counts a request of a warp to global memory: elements of `bytes` bytes at the addresses.
    pub(super) fn global(&mut self, addresses: &mut Vec<u64>, bytes: u64) {
        if addresses.is_empty() {
            return;
        }
        self.global_requests += 1;
        if !addresses.is_sorted() {
            addresses.sort_unstable();
        }
        addresses.dedup();
        let mut next = 0;
        for &address in addresses.iter() {
            let (first, last) = (address / 32, address.saturating_add(bytes - 1) / 32);
            self.global_sectors += (last + 1).saturating_sub(first.max(next));
            next = next.max(last + 1);
        }
        self.global_sectors_ideal += (addresses.len() as u64 * bytes).div_ceil(32);
    }

    /// Counts bank conflicts of one access to shared memory: each lane accesses `bytes` bytes at its
    /// address. The hardware serves 128 bytes at a time, so wider accesses take several turns.
    pub(super) fn banks(&mut self, addresses: &[u64], bytes: u64) {
        if addresses
            .array_windows()
            .all(|[a, b]| *b == a.wrapping_add(bytes))
        {
            return;
        }
        let words = bytes.div_ceil(4).max(1);
        let lanes_a_turn = (32 / words).max(1) as usize;
        for turn in addresses.chunks(lanes_a_turn) {
            self.bank_conflicts += extra_accesses(turn, words);
        }
    }
}

/// The number of distinct words in the fullest of the 32 banks, less one.
fn extra_accesses(addresses: &[u64], words: u64) -> u64 {
    let (mut word_of, mut used, mut conflict) = ([0u64; 32], 0u32, false);
    for &address in addresses {
        for word in address / 4..address / 4 + words {
            let bank = (word % 32) as usize;
            conflict |= used >> bank & 1 == 1 && word_of[bank] != word;
            used |= 1 << bank;
            word_of[bank] = word;
        }
    }
    if !conflict {
        return 0;
    }
    let all = addresses
        .iter()
        .flat_map(|address| address / 4..address / 4 + words);
    let mut all: Vec<u64> = all.collect();
    all.sort_unstable();
    all.dedup();
    let mut in_bank = [0u64; 32];
    for word in all {
        in_bank[(word % 32) as usize] += 1;
    }
    in_bank.iter().max().map_or(0, |&most| most - 1)
}
