//! `wgmma`: products of a warpgroup's four warps, whose factors lie in shared memory or registers.
//!
//! A warp computes its 16 rows when it issues the product, and the checks make this the same as any later time until
//! its wait: registers and shared memory of a product under way may not change. A product belongs to the group that
//! the warp commits next. Groups end in their order.

use std::collections::VecDeque;

use super::decode::Code;
use super::float::F32;
use super::instruction::{Index, Instruction, L32, LANES, Left, Op, Panel, Wgmma};
use super::matrix::multiply;
use super::run::{Fault, LaneFault, Machine};
use super::shared::{CHUNK, Shared};
use super::warp::Warp;

/// K of a product.
const K: usize = 16;
/// Rows of a warp.
const ROWS: usize = 16;

/// What `wgmma` knows of a 32-bit register.
#[derive(Debug, Clone, Copy, Default)]
struct Register {
    /// `wgmma.fence`s before the last write by another instruction.
    fences: u32,
    /// The number of groups up to the last product that has it in D, in A.
    d: u32,
    a: u32,
    /// N of the last product that has it in D.
    columns: u16,
}

/// The products of a warp.
#[derive(Default)]
pub struct Products {
    /// Empty in kernels without `wgmma`.
    registers: Vec<Register>,
    /// `wgmma.fence`s executed.
    fences: u32,
    /// Groups committed, and those that have ended.
    committed: u32,
    ended: u32,
    /// The number of groups up to the last product.
    last: u32,
    /// A register of a product under way that an instruction has written.
    pub overwritten: Option<Index>,
}

impl Products {
    pub fn new(code: &Code) -> Self {
        let registers = if code.has_wgmma {
            code.names[1].len()
        } else {
            0
        };
        Self {
            registers: vec![Register::default(); registers],
            ..Self::default()
        }
    }

    pub fn are_under_way(&self) -> bool {
        self.last > self.ended
    }

    /// An instruction other than `wgmma` writes a register.
    pub fn write(&mut self, d: Index) {
        if let Some(register) = self.registers.get_mut(d as usize) {
            register.fences = self.fences;
            if register.d.max(register.a) > self.ended {
                self.overwritten = Some(d);
            }
        }
    }
}

/// An instruction of a warpgroup, with the operands that must be the same in its warps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Event {
    pc: u32,
    descriptors: [u64; 2],
    accumulate: bool,
}

/// The instructions that the warps of a warpgroup must all execute, in their order.
#[derive(Debug, Clone, Default)]
pub struct Warpgroup {
    /// Those that some warp has yet to execute.
    events: VecDeque<Event>,
    /// Events before these.
    past: u64,
    /// Events of each warp.
    warps: [u64; 4],
}

impl Warpgroup {
    /// A warp executes an event. Gives the other warps' event there if it differs.
    fn execute(&mut self, warp: usize, event: Event) -> Result<(), Event> {
        let at = (self.warps[warp] - self.past) as usize;
        self.warps[warp] += 1;
        match self.events.get(at) {
            None => self.events.push_back(event),
            Some(other) if *other != event => return Err(*other),
            Some(_) => {}
        }
        let past = self.warps.iter().min().copied().unwrap_or(0);
        while self.past < past {
            self.events.pop_front();
            self.past += 1;
        }
        Ok(())
    }

    /// The first warp that has not executed all events, and the instruction it lacks.
    pub fn behind(&self) -> Option<(usize, u32)> {
        let event = self.events.front()?;
        let warp = self.warps.iter().position(|&warp| warp == self.past)?;
        Some((warp, event.pc))
    }
}

/// A descriptor of a matrix in shared memory with 128-byte swizzle; all in bytes.
struct Descriptor {
    start: u64,
    leading: u64,
    stride: u64,
}

impl Descriptor {
    fn new(descriptor: u64) -> Result<Self, Fault> {
        let field = |from: u32| (descriptor >> from & 0x3fff) << 4;
        let problem = if descriptor >> 62 != 1 {
            "has a swizzle other than that of 128 bytes, which is not implemented"
        } else if descriptor >> 49 & 7 != 0 {
            "has a base offset, which is not implemented"
        } else if descriptor & 0x3ff1_c000_c000_c000 != 0 {
            "has bits that must be 0"
        } else {
            return Ok(Self {
                start: field(0),
                leading: field(16),
                stride: field(32),
            });
        };
        Err(Fault::Descriptor {
            descriptor,
            problem,
        })
    }

    /// The chunk with this element along M or N, and along K.
    fn chunk(&self, transposed: bool, at: usize, k: usize) -> u64 {
        let (at, k) = (at as u64, k as u64);
        let offset = if transposed {
            at % 64 * 2 + at / 64 * self.leading + k % 8 * 128 + k / 8 * self.stride
        } else {
            at % 8 * 128 + at / 8 * self.stride + k * 2
        };
        let address = (self.start + offset) & !(CHUNK - 1);
        address ^ (address >> 7 & 7) << 4
    }
}

/// The factors of a warp in f32: rows of A, and B by eight columns and then by k.
struct Factors {
    a: [[f32; K]; ROWS],
    b: Vec<[[f32; 8]; K]>,
}

impl Warp {
    /// Checks that the warps of the warpgroup execute the same, and gives the number of the warp in it.
    fn of_warpgroup(
        &self,
        machine: &mut Machine<'_>,
        descriptors: [u64; 2],
        accumulate: bool,
    ) -> Result<usize, LaneFault> {
        let threads = machine.block.count();
        let (group, warp) = (self.index / 4, self.index % 4);
        if ((group + 1) * 4 * LANES) as u64 > threads {
            return Err(LaneFault::new(0, Fault::NoWarpgroup { threads }));
        }
        let event = Event {
            pc: self.pc(),
            descriptors,
            accumulate,
        };
        let executed = machine.warpgroups[group].execute(warp, event);
        executed.map_err(|other| {
            let line = machine.kernel.code.instructions[other.pc as usize].line;
            LaneFault::new(0, Fault::WarpgroupDiffers { line })
        })?;
        Ok(warp)
    }

    pub fn fence_products(&mut self, machine: &mut Machine<'_>) -> Result<(), LaneFault> {
        self.of_warpgroup(machine, [0; 2], false)?;
        self.products.fences += 1;
        Ok(())
    }

    pub fn commit_products(&mut self, machine: &mut Machine<'_>) -> Result<(), LaneFault> {
        self.of_warpgroup(machine, [0; 2], false)?;
        self.products.committed += 1;
        Ok(())
    }

    pub fn wait_for_products(
        &mut self,
        machine: &mut Machine<'_>,
        groups: u32,
    ) -> Result<(), LaneFault> {
        self.of_warpgroup(machine, [0; 2], false)?;
        let ended = self.products.committed.saturating_sub(groups);
        if ended > self.products.ended {
            self.products.ended = ended;
            machine.shared.end_products(self.index, ended);
        }
        Ok(())
    }

    /// Copies a register. The compiler copies sums that are under way where the hardware's code has one register,
    /// so the copy is under way too.
    pub fn move32(&mut self, d: Index, a: Index, active: u32) {
        let values = self.r32[a as usize];
        let before = self.products.registers.get(d as usize).copied();
        let source = self.products.registers.get(a as usize).copied();
        self.put32(d, active, &values);
        let (Some(before), Some(source)) = (before, source) else {
            return;
        };
        let ended = self.products.ended;
        let register = &mut self.products.registers[d as usize];
        register.fences = source.fences;
        if source.d > ended {
            (register.d, register.columns) = (source.d, source.columns);
            if before.a <= ended {
                self.products.overwritten = None;
            }
        }
    }

    /// Makes a register count as written, without a write.
    pub fn define(&mut self, d: Index, active: u32) {
        let under_way = self.products.registers.get(d as usize);
        if under_way.is_some_and(|register| register.d.max(register.a) > self.products.ended) {
            return;
        }
        let fences = under_way.map(|register| register.fences);
        self.put32(d, active, &[0xdead_beef; LANES]);
        if let Some(fences) = fences {
            self.products.registers[d as usize].fences = fences;
        }
    }

    /// Checks that an instruction reads no register of a product under way.
    pub fn check_products(
        &self,
        code: &Code,
        instruction: &Instruction,
        active: u32,
    ) -> Result<(), LaneFault> {
        // A product has its own check.
        if matches!(instruction.op, Op::Move(..) | Op::Wgmma(_)) {
            return Ok(());
        }
        let (from, to) = instruction.reads;
        for &read in &code.reads[from as usize..to as usize] {
            if read & 3 != 1 {
                continue;
            }
            let index = read >> 2;
            let register = self.products.registers.get(index as usize);
            if register.is_some_and(|register| register.d.max(register.a) > self.products.ended) {
                let name = code.names[1][index as usize].clone();
                return Err(LaneFault::lowest(active, Fault::RegisterUnderWay { name }));
            }
        }
        Ok(())
    }

    /// Checks a register of a product, which has it in D or in A.
    fn use_register(
        &mut self,
        code: &Code,
        index: Index,
        columns: Option<u16>,
    ) -> Result<(), LaneFault> {
        let products = &mut self.products;
        let (fences, ended, group) = (products.fences, products.ended, products.committed + 1);
        // A constant is in no register.
        let Some(register) = products.registers.get_mut(index as usize) else {
            return Ok(());
        };
        let name = || code.names[1][index as usize].clone();
        let under_way = match columns {
            Some(columns) => {
                register.a > ended || register.d > ended && register.columns != columns
            }
            None => register.d > ended,
        };
        if under_way {
            let name = name();
            return Err(LaneFault::new(0, Fault::RegisterUnderWay { name }));
        }
        if register.fences >= fences {
            let name = name();
            return Err(LaneFault::new(0, Fault::NoRegisterFence { name }));
        }
        match columns {
            Some(columns) => (register.d, register.columns) = (group, columns),
            None => register.a = group,
        }
        products.last = group;
        Ok(())
    }

    fn uniform64(&self, index: Index) -> Result<u64, LaneFault> {
        let values = &self.r64[index as usize];
        match values.iter().position(|value| *value != values[0]) {
            None => Ok(values[0]),
            Some(lane) => Err(LaneFault::new(lane, Fault::NotUniform)),
        }
    }

    /// The chunks of a factor with `count` elements along M or N from `first` on: those of each such element, or
    /// of each k if it is transposed.
    fn chunks(
        machine: &Machine<'_>,
        panel: Panel,
        descriptor: u64,
        (first, count): (usize, usize),
        into: &mut Vec<u64>,
    ) -> Result<(), Fault> {
        let of = Descriptor::new(descriptor)?;
        let begin = into.len();
        if panel.transposed {
            for k in 0..K {
                let groups = (first..first + count).step_by(8);
                into.extend(groups.map(|at| of.chunk(true, at, k)));
            }
        } else {
            for at in first..first + count {
                into.extend([0, 8].map(|k| of.chunk(false, at, k)));
            }
        }
        for &chunk in &into[begin..] {
            machine.shared.check(chunk, CHUNK)?;
        }
        Ok(())
    }

    /// The warp's part of a product.
    pub fn begin_product(
        &mut self,
        machine: &mut Machine<'_>,
        wgmma: &Wgmma,
    ) -> Result<(), LaneFault> {
        let code = &machine.kernel.code;
        let fail = |fault| LaneFault::new(0, fault);
        let columns = wgmma.d.len() * 2;
        let accumulate = match self.predicate(wgmma.accumulate) {
            0 => false,
            u32::MAX => true,
            _ => return Err(fail(Fault::NotUniform)),
        };
        let of_b = self.uniform64(wgmma.b.descriptor)?;
        let of_a = match wgmma.a {
            Left::Registers(_) => 0,
            Left::Shared(panel) => self.uniform64(panel.descriptor)?,
        };
        let warp = self.of_warpgroup(machine, [of_a, of_b], accumulate)?;

        if let Left::Registers(a) = wgmma.a {
            for index in a {
                self.use_register(code, index, None)?;
            }
        }
        for &index in &wgmma.d {
            if accumulate {
                self.check_read(code, index << 2 | 1, u32::MAX)?;
            }
            self.use_register(code, index, Some(columns as u16))?;
        }

        let mut chunks = Vec::with_capacity(2 * columns + 2 * ROWS);
        Self::chunks(machine, wgmma.b, of_b, (0, columns), &mut chunks).map_err(fail)?;
        let chunks_of_b = chunks.len();
        if let Left::Shared(panel) = wgmma.a {
            Self::chunks(machine, panel, of_a, (warp * ROWS, ROWS), &mut chunks).map_err(fail)?;
        }
        let mut factors = Factors {
            a: [[0.0; K]; ROWS],
            b: vec![[[0.0; 8]; K]; columns / 8],
        };
        let (from_b, from_a) = chunks.split_at(chunks_of_b);
        let shared = &machine.shared;
        fill(
            wgmma.b.transposed,
            columns,
            from_b,
            shared,
            |at, k, value| {
                factors.b[at / 8][k][at % 8] = value;
            },
        );
        match wgmma.a {
            Left::Registers(registers) => self.fill_from_registers(registers, &mut factors.a),
            Left::Shared(panel) => {
                fill(panel.transposed, ROWS, from_a, shared, |at, k, value| {
                    factors.a[at][k] = value;
                });
            }
        }
        if wgmma.negated {
            for a in factors.a.as_flattened_mut() {
                *a = -*a;
            }
        }
        let group = self.products.committed;
        let begun = machine.shared.begin_product(self.index, group, chunks);
        begun.map_err(|conflict| fail(conflict.with(|other| machine.thread(other))))?;
        self.multiply(wgmma, accumulate, &factors);
        Ok(())
    }

    fn fill_from_registers(&self, registers: [Index; 4], a: &mut [[f32; K]; ROWS]) {
        for (i, register) in registers.into_iter().enumerate() {
            for (lane, value) in self.r32[register as usize].into_iter().enumerate() {
                let (row, column) = (lane / 4 + 8 * (i % 2), 8 * (i / 2) + 2 * (lane % 4));
                a[row][column] = f32::from_bits(value << 16);
                a[row][column + 1] = f32::from_bits(value & 0xffff_0000);
            }
        }
    }

    /// Adds the products in the order of k with one rounding to f32 each; hardware has another order and other
    /// roundings.
    fn multiply(&mut self, wgmma: &Wgmma, accumulate: bool, factors: &Factors) {
        let place = |i: usize, lane: usize| {
            let (row, column) = (lane / 4 + 8 * (i % 4 / 2), 2 * (lane % 4) + i % 2);
            (row, column)
        };
        for (b, registers) in factors.b.iter().zip(wgmma.d.chunks_exact(4)) {
            let mut sums = [[0f32; 8]; ROWS];
            if accumulate {
                for (i, &register) in registers.iter().enumerate() {
                    for (lane, &value) in self.r32[register as usize].iter().enumerate() {
                        let (row, column) = place(i, lane);
                        sums[row][column] = f32::from_bits(value);
                    }
                }
            }
            multiply(&factors.a, b, K, &mut sums);
            for (i, &register) in registers.iter().enumerate() {
                let mut out: L32 = [0; LANES];
                for (lane, out) in out.iter_mut().enumerate() {
                    let (row, column) = place(i, lane);
                    let sum = sums[row][column];
                    *out = if sum.is_nan() { F32.nan } else { sum.to_bits() };
                }
                self.r32[register as usize] = out;
                self.written[1][register as usize] = u32::MAX;
            }
        }
    }
}

/// Fills a factor from its chunks of eight elements: neighbours along K, or along M or N if it is transposed.
fn fill(
    transposed: bool,
    count: usize,
    chunks: &[u64],
    shared: &Shared,
    mut set: impl FnMut(usize, usize, f32),
) {
    let groups = count / 8;
    for (i, &chunk) in chunks.iter().enumerate() {
        let bytes = shared.chunk(chunk);
        let (at, k) = if transposed {
            (i % groups * 8, i / groups)
        } else {
            (i / 2, i % 2 * 8)
        };
        for j in 0..8 {
            let value = u16::from_le_bytes([bytes[2 * j], bytes[2 * j + 1]]);
            let value = f32::from_bits(u32::from(value) << 16);
            if transposed {
                set(at + j, k, value);
            } else {
                set(at, k + j, value);
            }
        }
    }
}
