//! Exchanges between the lanes of a warp: shuffles, votes, matches and reductions.

use super::instruction::{
    Index, LANES, Predicate, ReduceOp, Register, Shuffle, ShuffleMode, VoteKind,
};
use super::run::lanes;
use super::warp::Warp;

impl Warp {
    /// A lane that reads from a lane which does not execute the shuffle gets an undefined value: its
    /// register counts as never written.
    pub fn shuffle(&mut self, shuffle: &Shuffle, active: u32) {
        let (a, b, c) = (
            self.r32[shuffle.a as usize],
            self.r32[shuffle.b as usize],
            self.r32[shuffle.c as usize],
        );
        let (mut out, mut in_range, mut undefined) = ([0; LANES], 0, 0);
        for lane in lanes(active) {
            let this = lane as u32;
            let (b, clamp, segment) = (b[lane] & 31, c[lane] & 31, c[lane] >> 8 & 31);
            let first = this & segment;
            let last = first | clamp & !segment;
            let (from, holds) = match shuffle.mode {
                ShuffleMode::Up => {
                    let from = this as i32 - b as i32;
                    (from, from >= last as i32)
                }
                ShuffleMode::Down => {
                    let from = this + b;
                    (from as i32, from <= last)
                }
                ShuffleMode::Butterfly => {
                    let from = this ^ b;
                    (from as i32, from <= last)
                }
                ShuffleMode::Indexed => {
                    let from = first | b & !segment;
                    (from as i32, from <= last)
                }
            };
            let from = if holds { from as usize % LANES } else { lane };
            in_range |= u32::from(holds) << lane;
            out[lane] = a[from];
            undefined |= u32::from(active >> from & 1 == 0) << lane;
        }
        self.put32(shuffle.d, active, &out);
        self.written[1][shuffle.d as usize] &= !undefined;
        if let Some(p) = shuffle.in_range {
            self.put_predicate(p, active, in_range);
        }
    }

    /// Calls a function with the lanes that exchange, for each set of them.
    fn for_masks(&self, mask: Index, active: u32) -> Vec<u32> {
        let masks = &self.r32[mask as usize];
        let mut sets: Vec<u32> = lanes(active).map(|lane| masks[lane] & active).collect();
        sets.sort_unstable();
        sets.dedup();
        sets
    }

    pub fn vote(&mut self, kind: VoteKind, d: Register, p: Predicate, mask: Index, active: u32) {
        let votes = self.predicate(p);
        for set in self.for_masks(mask, active) {
            let ayes = votes & set;
            let holds = match kind {
                VoteKind::All => ayes == set,
                VoteKind::Any => ayes != 0,
                VoteKind::Uniform => ayes == set || ayes == 0,
                VoteKind::Ballot => {
                    self.put32(d.index, set, &[ayes; LANES]);
                    continue;
                }
            };
            self.put_predicate(d.index, set, if holds { u32::MAX } else { 0 });
        }
    }

    pub fn match_lanes(
        &mut self,
        all: bool,
        (d, p): (Index, Option<Index>),
        a: Register,
        mask: Index,
        active: u32,
    ) {
        for set in self.for_masks(mask, active) {
            let mut out = [0; LANES];
            for lane in lanes(set) {
                let equal = lanes(set).filter(|&other| self.get(a, other) == self.get(a, lane));
                out[lane] = equal.fold(0, |equal, lane| equal | 1 << lane);
            }
            if all {
                let holds = lanes(set).all(|lane| out[lane] == set);
                if !holds {
                    out = [0; LANES];
                }
                if let Some(p) = p {
                    self.put_predicate(p, set, if holds { u32::MAX } else { 0 });
                }
            }
            self.put32(d, set, &out);
        }
    }

    pub fn reduce(&mut self, op: ReduceOp, d: Index, a: Index, mask: Index, active: u32) {
        for set in self.for_masks(mask, active) {
            let values = self.r32[a as usize];
            let combine = |x: u32, y: u32| match op {
                ReduceOp::Add => x.wrapping_add(y),
                ReduceOp::MinUnsigned => x.min(y),
                ReduceOp::MaxUnsigned => x.max(y),
                ReduceOp::MinSigned => (x as i32).min(y as i32) as u32,
                ReduceOp::MaxSigned => (x as i32).max(y as i32) as u32,
                ReduceOp::And => x & y,
                ReduceOp::Or => x | y,
                ReduceOp::Xor => x ^ y,
            };
            let result = lanes(set).map(|lane| values[lane]).reduce(combine);
            self.put32(d, set, &[result.unwrap_or(0); LANES]);
        }
    }

    /// The lowest lane of the mask is elected.
    pub fn elect(&mut self, d: Option<Index>, p: Index, mask: Index, active: u32) {
        for set in self.for_masks(mask, active) {
            let leader = set.trailing_zeros();
            if let Some(d) = d {
                self.put32(d, set, &[leader; LANES]);
            }
            self.put_predicate(p, set, 1 << leader);
        }
    }
}
