//! Executes every instruction but branches and barriers.

use super::barrier::first_different;
use super::instruction::{Comparison, LANES, Logic, Op, Register};
use super::run::{Fault, LaneFault, Machine, lanes};
use super::warp::Warp;

impl Warp {
    /// Executes an instruction for the active lanes.
    pub fn execute(
        &mut self,
        machine: &mut Machine<'_>,
        op: &Op,
        active: u32,
    ) -> Result<(), LaneFault> {
        let (mut out32, mut out64) = ([0; LANES], [0; LANES]);
        let r32 = |index: u32| &self.r32[index as usize];
        let r64 = |index: u32| &self.r64[index as usize];
        match op {
            Op::Move(d, a) => self.move32(*d, *a, active),
            Op::Unary32(f, d, a) => {
                f(r32(*a), &mut out32);
                self.put32(*d, active, &out32);
            }
            Op::Binary32(f, d, [a, b]) => {
                f(r32(*a), r32(*b), &mut out32);
                self.put32(*d, active, &out32);
            }
            Op::Ternary32(f, d, [a, b, c]) => {
                f(r32(*a), r32(*b), r32(*c), &mut out32);
                self.put32(*d, active, &out32);
            }
            Op::Unary64(f, d, a) => {
                f(r64(*a), &mut out64);
                self.put64(*d, active, &out64);
            }
            Op::Binary64(f, d, [a, b]) => {
                f(r64(*a), r64(*b), &mut out64);
                self.put64(*d, active, &out64);
            }
            Op::Ternary64(f, d, [a, b, c]) => {
                f(r64(*a), r64(*b), r64(*c), &mut out64);
                self.put64(*d, active, &out64);
            }
            Op::Shift64(f, d, a, by) => {
                f(r64(*a), r32(*by), &mut out64);
                self.put64(*d, active, &out64);
            }
            Op::Wide(f, d, [a, b]) => {
                f(r32(*a), r32(*b), &mut out64);
                self.put64(*d, active, &out64);
            }
            Op::WideAdd(f, d, [a, b], c) => {
                f(r32(*a), r32(*b), r64(*c), &mut out64);
                self.put64(*d, active, &out64);
            }
            Op::Widen(f, d, a) => {
                f(r32(*a), &mut out64);
                self.put64(*d, active, &out64);
            }
            Op::Narrow(f, d, a) => {
                f(r64(*a), &mut out32);
                self.put32(*d, active, &out32);
            }
            Op::Any(f, d, sources) => {
                for lane in lanes(active) {
                    let value = |source: Option<Register>| source.map_or(0, |s| self.get(s, lane));
                    out64[lane] = f(sources.map(value));
                }
                self.put(*d, active, &out64);
            }
            Op::Convert(convert, d, a) => {
                for lane in lanes(active) {
                    out64[lane] = convert.apply(self.get(*a, lane));
                }
                self.put(*d, active, &out64);
            }
            Op::Compare {
                compare,
                d,
                q,
                combine,
            } => {
                let result = self.compare(compare);
                let combined = |result: u32| match combine {
                    None => result,
                    Some((Logic::And, p)) => result & self.predicate(*p),
                    Some((Logic::Or, p)) => result | self.predicate(*p),
                    Some((Logic::Xor, p)) => result ^ self.predicate(*p),
                };
                let (holds, opposite) = (combined(result), combined(!result));
                if let Some(d) = d {
                    self.put_predicate(*d, active, holds);
                }
                if let Some(q) = q {
                    self.put_predicate(*q, active, opposite);
                }
            }
            Op::Set(compare, d, [if_true, if_false]) => {
                let holds = self.compare(compare);
                for (lane, out) in out32.iter_mut().enumerate() {
                    *out = if holds >> lane & 1 == 1 {
                        *if_true
                    } else {
                        *if_false
                    };
                }
                self.put32(*d, active, &out32);
            }
            Op::Select32(d, [a, b], p) => {
                let (a, b, chosen) = (r32(*a), r32(*b), self.predicate(*p));
                for lane in 0..LANES {
                    out32[lane] = if chosen >> lane & 1 == 1 {
                        a[lane]
                    } else {
                        b[lane]
                    };
                }
                self.put32(*d, active, &out32);
            }
            Op::Select64(d, [a, b], p) => {
                let (a, b, chosen) = (r64(*a), r64(*b), self.predicate(*p));
                for lane in 0..LANES {
                    out64[lane] = if chosen >> lane & 1 == 1 {
                        a[lane]
                    } else {
                        b[lane]
                    };
                }
                self.put64(*d, active, &out64);
            }
            Op::Predicates(table, d, [a, b]) => {
                let (a, b) = (self.predicate(*a), self.predicate(*b));
                let cases = [!a & !b, a & !b, !a & b, a & b];
                let holds = (0..4).filter(|case| table >> case & 1 == 1);
                let value = holds.fold(0, |value, case| value | cases[case]);
                self.put_predicate(*d, active, value);
            }
            Op::Unpack(bits, to, a) => {
                for (part, to) in to.iter().enumerate() {
                    let Some(to) = to else { continue };
                    for lane in lanes(active) {
                        out64[lane] = self.get(*a, lane) >> (part as u32 * bits);
                    }
                    self.put(*to, active, &out64);
                }
            }
            // The compiler says only that the value does not matter.
            Op::Define(d) if d.bits <= 32 && d.bits > 1 => self.define(d.index, active),
            Op::Define(d) if d.bits == 1 => self.put_predicate(d.index, active, 0),
            Op::Define(d) => self.put(*d, active, &[0xdead_beef_dead_beef; LANES]),
            Op::Trap => return Err(LaneFault::lowest(active, Fault::Trap)),
            Op::Clock(d) => self.put(*d, active, &[machine.clock; LANES]),
            Op::Load(access) => self.load(machine, access, active)?,
            Op::Store(access) => self.store(machine, access, active)?,
            Op::Atomic(atomic) => self.atomic(machine, atomic, active)?,
            Op::WarpBarrier(_) => machine.shared.join_lanes(self.index),
            Op::Shuffle(shuffle) => self.shuffle(shuffle, active),
            Op::Vote(kind, d, p, mask) => self.vote(*kind, *d, *p, *mask, active),
            Op::ActiveMask(d) => self.put32(*d, active, &[active; LANES]),
            Op::Match(all, d, p, a, mask) => self.match_lanes(*all, (*d, *p), *a, *mask, active),
            Op::Reduce(op, d, a, mask) => self.reduce(*op, *d, *a, *mask, active),
            Op::Elect(d, p, mask) => self.elect(*d, *p, *mask, active),
            Op::Mma(mma) => {
                machine.counters.mma += 1;
                self.mma(mma);
            }
            Op::Matrices(matrices) if matrices.store => self.store_matrices(machine, matrices)?,
            Op::Matrices(matrices) => self.load_matrices(machine, matrices)?,
            Op::Wgmma(wgmma) => {
                machine.counters.mma += wgmma.d.len() as u64 / 4;
                self.begin_product(machine, wgmma)?;
            }
            Op::WgmmaFence => self.fence_products(machine)?,
            Op::WgmmaCommit => self.commit_products(machine)?,
            Op::WgmmaWait(groups) => self.wait_for_products(machine, *groups)?,
            Op::ProxyFence => {
                for lane in lanes(active) {
                    machine.shared.fence_proxy(self.thread(lane));
                }
            }
            Op::Copy(copy) => self.copy(machine, copy, active)?,
            Op::CopyCommit => self.copies.commit(active),
            Op::CopyWait(groups) => self.wait_for_copies(machine, *groups, active),
            // `Warp::run` executes these.
            Op::Branch(_)
            | Op::BranchIndexed(..)
            | Op::Exit
            | Op::Barrier(_)
            | Op::Nothing
            | Op::SetRegisters => {}
        }
        Ok(())
    }

    fn compare(&self, comparison: &Comparison) -> u32 {
        match comparison {
            Comparison::B32(f, [a, b]) => f(&self.r32[*a as usize], &self.r32[*b as usize]),
            Comparison::B64(f, [a, b]) => f(&self.r64[*a as usize], &self.r64[*b as usize]),
        }
    }

    /// Fails unless all active lanes have one value.
    pub fn check_uniform(&self, index: u32, active: u32) -> Result<(), LaneFault> {
        match first_different(&self.r32[index as usize], active) {
            None => Ok(()),
            Some(lane) => Err(LaneFault::new(lane, Fault::NotUniform)),
        }
    }
}
