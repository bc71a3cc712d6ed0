//! A warp: its registers, and the groups into which its lanes have diverged.
//!
//! Lanes at the same instruction form a group. The group with the lowest instruction runs, so lanes that
//! diverged meet again where the branches of compiled code join. A group that reaches an instruction that
//! other lanes must execute too waits there until they come; if none can come, the instruction is at fault.

use super::copies::Copies;
use super::decode::Code;
use super::instruction::{Constant, Index, L32, L64, LANES, Op, Predicate, Register, Special};
use super::module::Kernel;
use super::run::{Fault, LaneFault, Machine, Stop, lanes};
use super::wgmma::Products;
use crate::launch::Dim;

/// Lanes at one instruction.
#[derive(Debug, Clone, Copy)]
struct Group {
    pc: u32,
    mask: u32,
    /// Waits for other lanes.
    parked: bool,
}

/// A warp of a block.
pub struct Warp {
    /// In its block.
    pub index: usize,
    /// Lanes that have a thread.
    pub exists: u32,
    pub exited: u32,
    pub r32: Vec<L32>,
    pub r64: Vec<L64>,
    /// One bit per lane.
    pub predicates: Vec<u32>,
    /// Lanes that have written a register, by file (predicates, up to 32 bits, 64 bits).
    pub written: [Vec<u32>; 3],
    groups: Vec<Group>,
    /// The instruction being executed.
    pc: u32,
    /// Local memory of all lanes, one lane after the other, and which bytes were written.
    pub local: Vec<u8>,
    pub local_written: Vec<bool>,
    pub copies: Copies,
    pub products: Products,
}

/// What an instruction with a mask of lanes may do now.
pub enum Ready {
    /// The lanes it needs are here.
    Yes,
    /// Others have yet to come.
    Park,
}

impl Warp {
    pub fn new(kernel: &Kernel, threads: u64, index: usize) -> Self {
        let code = &kernel.code;
        let here = (threads - (index * LANES) as u64).min(LANES as u64);
        let [names1, names32, names64] = &code.names;
        Self {
            index,
            exists: (u64::MAX >> (64 - here)) as u32,
            exited: 0,
            r32: vec![[0; LANES]; names32.len() + code.constants32.len()],
            r64: vec![[0; LANES]; names64.len() + code.constants64.len()],
            // The last one is always false.
            predicates: vec![0; names1.len() + 1],
            written: [names1.len(), names32.len(), names64.len()].map(|len| vec![0; len]),
            groups: Vec::new(),
            pc: 0,
            local: vec![0; kernel.local_bytes as usize * LANES],
            local_written: vec![false; kernel.local_bytes as usize * LANES],
            copies: Copies::default(),
            products: Products::default(),
        }
    }

    pub fn begin(&mut self, code: &Code, block: Dim) {
        for written in &mut self.written {
            written.fill(0);
        }
        self.local_written.fill(false);
        self.exited = 0;
        self.copies = Copies::default();
        self.products = Products::new(code);
        self.groups = vec![Group {
            pc: 0,
            mask: self.exists,
            parked: false,
        }];
        self.pc = 0;
        for (i, constant) in code.constants32.iter().enumerate() {
            if let Constant::Special(Special::Ctaid(axis)) = constant {
                let value = [block.x, block.y, block.z][usize::from(*axis).min(2)];
                self.r32[code.names[1].len() + i] = [value; LANES];
            }
        }
    }

    pub fn pc(&self) -> u32 {
        self.pc
    }

    /// Blames the instruction before.
    pub fn step_back(&mut self) {
        if let Some(group) = self.groups.first() {
            self.pc = group.pc.saturating_sub(1);
        }
    }

    pub fn thread(&self, lane: usize) -> u32 {
        (self.index * LANES + lane) as u32
    }

    /// The value of the lowest lane.
    pub fn uniform(&self, index: Index) -> u32 {
        self.r32[index as usize][self.exists.trailing_zeros() as usize % LANES]
    }

    pub fn predicate(&self, p: Predicate) -> u32 {
        let bits = self.predicates[p.index as usize];
        if p.negated { !bits } else { bits }
    }

    pub fn put32(&mut self, d: Index, mask: u32, values: &L32) {
        let register = &mut self.r32[d as usize];
        if mask == u32::MAX {
            *register = *values;
        } else {
            for lane in 0..LANES {
                if mask >> lane & 1 == 1 {
                    register[lane] = values[lane];
                }
            }
        }
        self.written[1][d as usize] |= mask;
        self.products.write(d);
    }

    pub fn put64(&mut self, d: Index, mask: u32, values: &L64) {
        let register = &mut self.r64[d as usize];
        if mask == u32::MAX {
            *register = *values;
        } else {
            for lane in 0..LANES {
                if mask >> lane & 1 == 1 {
                    register[lane] = values[lane];
                }
            }
        }
        self.written[2][d as usize] |= mask;
    }

    pub fn put_predicate(&mut self, d: Index, mask: u32, values: u32) {
        let register = &mut self.predicates[d as usize];
        *register = *register & !mask | values & mask;
        self.written[0][d as usize] |= mask;
    }

    /// One lane of a register of 16 to 64 bits.
    pub fn get(&self, register: Register, lane: usize) -> u64 {
        match register.bits {
            64 => self.r64[register.index as usize][lane],
            _ => u64::from(self.r32[register.index as usize][lane]),
        }
    }

    /// Writes a register of 16 to 64 bits; drops the bits beyond it.
    pub fn put(&mut self, d: Register, mask: u32, values: &L64) {
        match d.bits {
            64 => self.put64(d.index, mask, values),
            16 => self.put32(d.index, mask, &values.map(|value| value as u32 & 0xffff)),
            _ => self.put32(d.index, mask, &values.map(|value| value as u32)),
        }
    }

    /// Runs up to this number of instructions.
    pub fn run(&mut self, machine: &mut Machine<'_>, turn: u64) -> Result<Stop, LaneFault> {
        let kernel = machine.kernel;
        let code = &kernel.code;
        let mut left = turn;
        loop {
            self.merge();
            let ready = (0..self.groups.len()).filter(|&group| !self.groups[group].parked);
            let Some(at) = ready.min_by_key(|&group| self.groups[group].pc) else {
                return self.finished(machine);
            };
            let Group { mut pc, mask, .. } = self.groups[at];
            // Where another group waits or would have to run.
            let others = self.groups.iter().filter(|group| group.pc > pc);
            let limit = others.map(|group| group.pc).min().unwrap_or(u32::MAX);
            loop {
                if pc >= limit {
                    self.groups[at].pc = pc;
                    break;
                }
                if left == 0 {
                    self.groups[at].pc = pc;
                    return Ok(Stop::Turn);
                }
                left -= 1;
                self.pc = pc;
                if machine.budget == 0 {
                    return Err(LaneFault::lowest(mask, Fault::Budget { instructions: 0 }));
                }
                machine.budget -= 1;
                machine.clock += 1;
                let instruction = &code.instructions[pc as usize];
                machine.counters.instructions.count(instruction.class);
                let active = match instruction.guard {
                    None => mask,
                    Some(p) => {
                        self.check_read(code, p.index << 2, mask)?;
                        mask & self.predicate(p)
                    }
                };
                if active == 0 {
                    pc += 1;
                    continue;
                }
                let (from, to) = instruction.reads;
                for &read in &code.reads[from as usize..to as usize] {
                    self.check_read(code, read, active)?;
                }
                if self.products.are_under_way() {
                    self.check_products(code, instruction, active)?;
                }
                match &instruction.op {
                    Op::Branch(target) => {
                        if active == mask {
                            pc = *target;
                            if self.groups.len() > 1 {
                                self.groups[at].pc = pc;
                                break;
                            }
                        } else {
                            self.split(at, pc + 1, mask & !active, *target, active);
                            break;
                        }
                    }
                    Op::BranchIndexed(index, targets) => {
                        self.branch_indexed(at, pc, active, *index, targets)?;
                        break;
                    }
                    Op::Exit => {
                        self.exited |= active;
                        self.groups[at].pc = pc + 1;
                        self.groups[at].mask &= !active;
                        if self.groups[at].mask == 0 {
                            self.groups.swap_remove(at);
                        }
                        // Instructions no longer wait for the lanes that exited.
                        for group in &mut self.groups {
                            group.parked = false;
                        }
                        break;
                    }
                    Op::Barrier(barrier) => {
                        let needed = self.exists;
                        match self.converged(active, mask, needed) {
                            Ok(Ready::Yes) => {}
                            Ok(Ready::Park) => {
                                self.park(at, pc);
                                break;
                            }
                            Err(missing) => {
                                let fault = Fault::DivergentBarrier { missing };
                                return Err(LaneFault::lowest(active, fault));
                            }
                        }
                        self.check_uniform(barrier.id, active)?;
                        if let Some(threads) = barrier.threads {
                            self.check_uniform(threads, active)?;
                        }
                        self.groups[at].pc = pc + 1;
                        let votes = barrier.source.map_or(0, |p| self.predicate(p) & active);
                        return Ok(Stop::Barrier {
                            barrier: *barrier,
                            pc,
                            votes,
                        });
                    }
                    op => {
                        let needed = self.needed(op, active)?;
                        let missing = needed & !active;
                        if missing != 0 {
                            if missing & mask != 0 || missing & (self.exited | !self.exists) != 0 {
                                let mask = needed;
                                let fault = Fault::InactiveLanes { mask, missing };
                                return Err(LaneFault::lowest(active, fault));
                            }
                            self.park(at, pc);
                            break;
                        }
                        self.execute(machine, op, active)?;
                        if let Some(d) = self.products.overwritten.take() {
                            let name = code.names[1][d as usize].clone();
                            let fault = Fault::RegisterUnderWay { name };
                            return Err(LaneFault::lowest(active, fault));
                        }
                        pc += 1;
                    }
                }
            }
        }
    }

    pub fn check_read(&self, code: &Code, read: u32, mask: u32) -> Result<(), LaneFault> {
        let (file, index) = ((read & 3) as usize, (read >> 2) as usize);
        // The predicate behind the registers is a constant.
        let Some(&written) = self.written[file].get(index) else {
            return Ok(());
        };
        let missing = mask & !written;
        if missing == 0 {
            return Ok(());
        }
        let name = code.names[file][index].clone();
        Err(LaneFault::lowest(
            missing,
            Fault::UninitialisedRegister { name },
        ))
    }

    /// Whether all the needed lanes are active; the missing ones if they cannot come.
    fn converged(&self, active: u32, mask: u32, needed: u32) -> Result<Ready, u32> {
        let missing = needed & !active;
        if missing == 0 {
            Ok(Ready::Yes)
        } else if missing & (mask | self.exited | !self.exists) != 0 {
            Err(missing)
        } else {
            Ok(Ready::Park)
        }
    }

    fn park(&mut self, at: usize, pc: u32) {
        self.groups[at].pc = pc;
        self.groups[at].parked = true;
    }

    fn split(&mut self, at: usize, pc: u32, stay: u32, target: u32, taken: u32) {
        self.groups[at].pc = pc;
        self.groups[at].mask = stay;
        self.groups.push(Group {
            pc: target,
            mask: taken,
            parked: false,
        });
    }

    fn branch_indexed(
        &mut self,
        at: usize,
        pc: u32,
        active: u32,
        index: Index,
        targets: &[u32],
    ) -> Result<(), LaneFault> {
        self.groups[at].pc = pc + 1;
        self.groups[at].mask &= !active;
        for lane in lanes(active) {
            let index = self.r32[index as usize][lane];
            let Some(&target) = targets.get(index as usize) else {
                let targets = targets.len() as u32;
                return Err(LaneFault::new(lane, Fault::BranchIndex { index, targets }));
            };
            self.groups.push(Group {
                pc: target,
                mask: 1 << lane,
                parked: false,
            });
        }
        if self.groups[at].mask == 0 {
            self.groups.swap_remove(at);
        }
        Ok(())
    }

    /// Joins groups at the same instruction.
    fn merge(&mut self) {
        if self.groups.len() < 2 {
            return;
        }
        self.groups.sort_unstable_by_key(|group| group.pc);
        self.groups.dedup_by(|next, kept| {
            let same = next.pc == kept.pc;
            if same {
                kept.mask |= next.mask;
                kept.parked = false;
            }
            same
        });
    }

    /// No group can run: the warp is done, or groups wait for lanes that do not come.
    fn finished(&mut self, machine: &Machine<'_>) -> Result<Stop, LaneFault> {
        let Some(&Group { pc, mask, .. }) = self.groups.first() else {
            return Ok(Stop::Done);
        };
        self.pc = pc;
        let op = &machine.kernel.code.instructions[pc as usize].op;
        let fault = match op {
            Op::Barrier(_) => Fault::DivergentBarrier {
                missing: self.exists & !mask,
            },
            op => {
                let needed = self.needed(op, mask)?;
                Fault::InactiveLanes {
                    mask: needed,
                    missing: needed & !mask,
                }
            }
        };
        Err(LaneFault::lowest(mask, fault))
    }

    /// Lanes that an instruction needs beside those that execute it.
    fn needed(&self, op: &Op, active: u32) -> Result<u32, LaneFault> {
        let mask = match op {
            Op::Shuffle(shuffle) => shuffle.mask,
            Op::Vote(_, _, _, mask)
            | Op::Match(_, _, _, _, mask)
            | Op::Reduce(_, _, _, mask)
            | Op::Elect(_, _, mask)
            | Op::WarpBarrier(mask) => *mask,
            Op::Mma(_)
            | Op::Matrices(_)
            | Op::Wgmma(_)
            | Op::WgmmaFence
            | Op::WgmmaCommit
            | Op::WgmmaWait(_)
            | Op::SetRegisters => return Ok(u32::MAX),
            _ => return Ok(0),
        };
        let masks = &self.r32[mask as usize];
        let mut needed = 0;
        for lane in lanes(active) {
            let mask = masks[lane];
            if mask >> lane & 1 == 0 {
                return Err(LaneFault::new(lane, Fault::NotInMask { mask }));
            }
            needed |= mask;
        }
        // Masks may name lanes that have exited.
        Ok(needed & self.exists & !self.exited)
    }
}
