//! Loads, stores and atomics.

use half::{bf16, f16};

use super::counters::Counters;
use super::instruction::{Access, Address, Atomic, AtomicOp, L64, LANES, Space};
use super::run::{Fault, LOCAL_WINDOW, LaneFault, Machine, PARAMETER_WINDOW, SHARED_WINDOW, lanes};
use super::warp::Warp;
use crate::launch::GlobalMemory;

/// The bytes of an access: those of lane i begin at i times the access's size.
type Bytes = [u8; 16 * LANES];

impl Warp {
    /// The address of every lane.
    pub fn addresses(&self, address: Address) -> L64 {
        let mut addresses = [0; LANES];
        match address.base.bits {
            64 => {
                let base = &self.r64[address.base.index as usize];
                for lane in 0..LANES {
                    addresses[lane] = base[lane].wrapping_add_signed(address.offset);
                }
            }
            _ => {
                let base = &self.r32[address.base.index as usize];
                for lane in 0..LANES {
                    addresses[lane] = u64::from(base[lane]).wrapping_add_signed(address.offset);
                }
            }
        }
        addresses
    }

    /// Splits generic addresses by their window; the addresses become offsets in it.
    fn resolve(space: Space, addresses: &mut L64, active: u32) -> [(Space, u32); 4] {
        if space != Space::Generic {
            let none = (Space::Generic, 0);
            return [(space, active), none, none, none];
        }
        let mut parts = [
            (Space::Global, 0),
            (Space::Shared, 0),
            (Space::Local, 0),
            (Space::Param, 0),
        ];
        for lane in lanes(active) {
            let window = match addresses[lane] >> 56 {
                1 => (1, SHARED_WINDOW),
                2 => (2, LOCAL_WINDOW),
                3 => (3, PARAMETER_WINDOW),
                _ => (0, 0),
            };
            parts[window.0].1 |= 1 << lane;
            addresses[lane] -= window.1;
        }
        parts
    }

    pub fn load(
        &mut self,
        machine: &mut Machine<'_>,
        access: &Access,
        active: u32,
    ) -> Result<(), LaneFault> {
        let mut addresses = self.addresses(access.address);
        let size = usize::from(access.size) * usize::from(access.elements);
        let mut bytes: Bytes = [0; 16 * LANES];
        for (space, mask) in Self::resolve(access.space, &mut addresses, active) {
            if mask == 0 {
                continue;
            }
            match space {
                Space::Shared => {
                    self.load_shared(machine, &addresses, mask, size, access.strong, &mut bytes)?;
                }
                Space::Local => self.load_local(&addresses, mask, size, &mut bytes)?,
                Space::Param => {
                    for lane in lanes(mask) {
                        let into = &mut bytes[lane * size..(lane + 1) * size];
                        read_parameter(machine.parameters, addresses[lane], into)
                            .map_err(|fault| LaneFault::new(lane, fault))?;
                    }
                }
                Space::Global | Space::Generic => {
                    count(machine, &addresses, mask, size);
                    machine.counters.global_bytes_read +=
                        u64::from(mask.count_ones()) * size as u64;
                    read_global(machine.memory, &addresses, mask, size, &mut bytes)?;
                }
            }
        }
        let element = usize::from(access.size);
        for (at, register) in access.registers[..usize::from(access.elements)]
            .iter()
            .enumerate()
        {
            let Some(register) = register else { continue };
            if element == 4 && register.bits == 32 {
                let mut out = [0; LANES];
                for (lane, out) in out.iter_mut().enumerate() {
                    let from = lane * size + at * 4;
                    let word = bytes[from..from + 4].try_into().unwrap_or_default();
                    *out = u32::from_le_bytes(word);
                }
                self.put32(register.index, active, &out);
                continue;
            }
            let mut out = [0; LANES];
            for lane in lanes(active) {
                let from = lane * size + at * element;
                let value = value_of(&bytes[from..from + element]);
                let unused = 64 - 8 * u32::from(access.size);
                out[lane] = if access.signed {
                    ((value << unused) as i64 >> unused) as u64
                } else {
                    value
                };
            }
            self.put(*register, active, &out);
        }
        Ok(())
    }

    pub fn store(
        &mut self,
        machine: &mut Machine<'_>,
        access: &Access,
        active: u32,
    ) -> Result<(), LaneFault> {
        let mut addresses = self.addresses(access.address);
        let element = usize::from(access.size);
        let size = element * usize::from(access.elements);
        let mut bytes: Bytes = [0; 16 * LANES];
        for (at, register) in access.registers.iter().flatten().enumerate() {
            for lane in lanes(active) {
                let value = self.get(*register, lane).to_le_bytes();
                let to = lane * size + at * element;
                bytes[to..to + element].copy_from_slice(&value[..element]);
            }
        }
        for (space, mask) in Self::resolve(access.space, &mut addresses, active) {
            if mask == 0 {
                continue;
            }
            match space {
                Space::Shared => {
                    self.store_shared(machine, &addresses, mask, size, access.strong, &bytes)?;
                }
                Space::Local => self.store_local(&addresses, mask, size, &bytes)?,
                Space::Param => {
                    let lane = mask.trailing_zeros() as usize;
                    let fault = Fault::OutOfWindow {
                        space: "writable parameter",
                        address: addresses[lane],
                        bytes: size as u64,
                        size: 0,
                    };
                    return Err(LaneFault::new(lane, fault));
                }
                Space::Global | Space::Generic => {
                    count(machine, &addresses, mask, size);
                    machine.counters.global_bytes_written +=
                        u64::from(mask.count_ones()) * size as u64;
                    write_global(machine.memory, &addresses, mask, size, &bytes)?;
                }
            }
        }
        Ok(())
    }

    fn load_shared(
        &self,
        machine: &mut Machine<'_>,
        addresses: &L64,
        mask: u32,
        size: usize,
        strong: bool,
        bytes: &mut Bytes,
    ) -> Result<(), LaneFault> {
        banks(machine, addresses, mask, size);
        for lane in lanes(mask) {
            let into = &mut bytes[lane * size..(lane + 1) * size];
            machine
                .shared
                .check(addresses[lane], size as u64)
                .map_err(|fault| LaneFault::new(lane, fault))?;
            let read = machine
                .shared
                .read(self.thread(lane), addresses[lane], into, strong);
            read.map_err(|conflict| {
                LaneFault::new(lane, conflict.with(|other| machine.thread(other)))
            })?;
        }
        Ok(())
    }

    fn store_shared(
        &self,
        machine: &mut Machine<'_>,
        addresses: &L64,
        mask: u32,
        size: usize,
        strong: bool,
        bytes: &Bytes,
    ) -> Result<(), LaneFault> {
        banks(machine, addresses, mask, size);
        for lane in lanes(mask) {
            let from = &bytes[lane * size..(lane + 1) * size];
            machine
                .shared
                .check(addresses[lane], size as u64)
                .map_err(|fault| LaneFault::new(lane, fault))?;
            // Lanes that write one value to one address do not conflict.
            let same = |other: u32| {
                let (warp, other) = (other as usize / LANES, other as usize % LANES);
                warp == self.index
                    && mask >> other & 1 == 1
                    && addresses[other] == addresses[lane]
                    && bytes[other * size..(other + 1) * size] == *from
            };
            let write =
                machine
                    .shared
                    .write(self.thread(lane), addresses[lane], from, strong, &same);
            write.map_err(|conflict| {
                LaneFault::new(lane, conflict.with(|other| machine.thread(other)))
            })?;
        }
        Ok(())
    }

    /// The place of a lane's local bytes.
    fn local_at(&self, lane: usize, address: u64, size: usize) -> Result<usize, LaneFault> {
        let limit = (self.local.len() / LANES) as u64;
        let bytes = size as u64;
        let fault = if !address.is_multiple_of(bytes) {
            Fault::Misaligned { address, bytes }
        } else if address.checked_add(bytes).is_none_or(|end| end > limit) {
            Fault::OutOfWindow {
                space: "local",
                address,
                bytes,
                size: limit,
            }
        } else {
            return Ok(lane * limit as usize + address as usize);
        };
        Err(LaneFault::new(lane, fault))
    }

    fn load_local(
        &self,
        addresses: &L64,
        mask: u32,
        size: usize,
        bytes: &mut Bytes,
    ) -> Result<(), LaneFault> {
        for lane in lanes(mask) {
            let at = self.local_at(lane, addresses[lane], size)?;
            if self.local_written[at..at + size].contains(&false) {
                let fault = Fault::UninitialisedMemory {
                    space: "local",
                    address: addresses[lane],
                };
                return Err(LaneFault::new(lane, fault));
            }
            bytes[lane * size..(lane + 1) * size].copy_from_slice(&self.local[at..at + size]);
        }
        Ok(())
    }

    fn store_local(
        &mut self,
        addresses: &L64,
        mask: u32,
        size: usize,
        bytes: &Bytes,
    ) -> Result<(), LaneFault> {
        for lane in lanes(mask) {
            let at = self.local_at(lane, addresses[lane], size)?;
            self.local_written[at..at + size].fill(true);
            self.local[at..at + size].copy_from_slice(&bytes[lane * size..(lane + 1) * size]);
        }
        Ok(())
    }

    /// Lanes operate one after the other, the lowest first.
    pub fn atomic(
        &mut self,
        machine: &mut Machine<'_>,
        atomic: &Atomic,
        active: u32,
    ) -> Result<(), LaneFault> {
        let mut addresses = self.addresses(atomic.address);
        let element = usize::from(atomic.size);
        let size = element * usize::from(atomic.elements);
        let mut old = [[0; LANES]; 4];
        for (space, mask) in Self::resolve(atomic.space, &mut addresses, active) {
            if mask == 0 {
                continue;
            }
            if space == Space::Global {
                count(machine, &addresses, mask, size);
                let bytes = u64::from(mask.count_ones()) * size as u64;
                machine.counters.global_bytes_read += bytes;
                machine.counters.global_bytes_written += bytes;
            }
            for lane in lanes(mask) {
                let address = addresses[lane];
                let mut bytes = [0; 16];
                let bytes = &mut bytes[..size];
                let fail = |fault| LaneFault::new(lane, fault);
                let thread = self.thread(lane);
                match space {
                    Space::Shared => {
                        machine.shared.check(address, size as u64).map_err(fail)?;
                        let read = machine.shared.read(thread, address, bytes, true);
                        read.map_err(|c| fail(c.with(|other| machine.thread(other))))?;
                    }
                    Space::Global => {
                        aligned(address, size).map_err(fail)?;
                        machine
                            .memory
                            .read(address, bytes)
                            .map_err(|fault| fail(fault.into()))?;
                    }
                    _ => {
                        return Err(fail(Fault::OutOfWindow {
                            space: "atomic",
                            address,
                            bytes: size as u64,
                            size: 0,
                        }));
                    }
                }
                for (at, bytes) in bytes.chunks_exact_mut(element).enumerate() {
                    old[at][lane] = value_of(bytes);
                    let a = self.get(atomic.a[at], lane);
                    let b = atomic.b.map_or(0, |b| self.get(b, lane));
                    let new = apply(atomic.op, atomic.size, old[at][lane], a, b);
                    bytes.copy_from_slice(&new.to_le_bytes()[..element]);
                }
                if space == Space::Shared {
                    let write = machine
                        .shared
                        .write(thread, address, bytes, true, &|_| false);
                    write.map_err(|c| fail(c.with(|other| machine.thread(other))))?;
                } else {
                    machine
                        .memory
                        .write(address, bytes)
                        .map_err(|fault| fail(fault.into()))?;
                }
            }
        }
        for (destination, old) in atomic.destinations.iter().zip(&old) {
            if let Some(d) = destination {
                self.put(*d, active, old);
            }
        }
        Ok(())
    }
}

/// The new value of an atomic operation.
fn apply(op: AtomicOp, size: u8, old: u64, a: u64, b: u64) -> u64 {
    let signed = |value: u64| match size {
        4 => i64::from(value as u32 as i32),
        _ => value as i64,
    };
    let (old32, a32) = (old as u32, a as u32);
    let pair = |add: fn(u16, u16) -> u16| {
        let low = add(old32 as u16, a32 as u16);
        let high = add((old32 >> 16) as u16, (a32 >> 16) as u16);
        u64::from(low) | u64::from(high) << 16
    };
    match op {
        AtomicOp::AddInteger => old.wrapping_add(a),
        AtomicOp::AddF32 => u64::from((f32::from_bits(old32) + f32::from_bits(a32)).to_bits()),
        AtomicOp::AddF64 => (f64::from_bits(old) + f64::from_bits(a)).to_bits(),
        AtomicOp::AddF16x2 => pair(|x, y| (f16::from_bits(x) + f16::from_bits(y)).to_bits()),
        AtomicOp::AddBf16x2 => pair(|x, y| (bf16::from_bits(x) + bf16::from_bits(y)).to_bits()),
        AtomicOp::MinUnsigned => old.min(a),
        AtomicOp::MaxUnsigned => old.max(a),
        AtomicOp::MinSigned => signed(old).min(signed(a)) as u64,
        AtomicOp::MaxSigned => signed(old).max(signed(a)) as u64,
        AtomicOp::And => old & a,
        AtomicOp::Or => old | a,
        AtomicOp::Xor => old ^ a,
        AtomicOp::Exchange => a,
        AtomicOp::CompareAndSwap if old == a => b,
        AtomicOp::CompareAndSwap => old,
        AtomicOp::Increment if old >= a => 0,
        AtomicOp::Increment => old + 1,
        AtomicOp::Decrement if old == 0 || old > a => a,
        AtomicOp::Decrement => old - 1,
    }
}

fn value_of(bytes: &[u8]) -> u64 {
    let mut value = [0; 8];
    value[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(value)
}

pub fn aligned(address: u64, size: usize) -> Result<(), Fault> {
    let bytes = size as u64;
    if address.is_multiple_of(bytes) {
        Ok(())
    } else {
        Err(Fault::Misaligned { address, bytes })
    }
}

fn read_parameter(parameters: &[u8], address: u64, into: &mut [u8]) -> Result<(), Fault> {
    aligned(address, into.len())?;
    let from = usize::try_from(address).ok();
    let bytes = from.and_then(|from| parameters.get(from..from.checked_add(into.len())?));
    match bytes {
        Some(bytes) => {
            into.copy_from_slice(bytes);
            Ok(())
        }
        None => Err(Fault::OutOfWindow {
            space: "parameter",
            address,
            bytes: into.len() as u64,
            size: parameters.len() as u64,
        }),
    }
}

fn count(machine: &mut Machine<'_>, addresses: &L64, mask: u32, size: usize) {
    machine.scratch.clear();
    machine
        .scratch
        .extend(lanes(mask).map(|lane| addresses[lane]));
    machine.counters.global(&mut machine.scratch, size as u64);
}

fn banks(machine: &mut Machine<'_>, addresses: &L64, mask: u32, size: usize) {
    machine.scratch.clear();
    machine
        .scratch
        .extend(lanes(mask).map(|lane| addresses[lane]));
    let counters: &mut Counters = &mut machine.counters;
    counters.banks(&machine.scratch, size as u64);
}

/// The last lane of the run of lanes with consecutive addresses that begins at a lane.
fn run_end(addresses: &L64, mask: u32, size: usize, first: usize) -> usize {
    let mut last = first;
    while last + 1 < LANES
        && mask >> (last + 1) & 1 == 1
        && addresses[last + 1] == addresses[last].wrapping_add(size as u64)
    {
        last += 1;
    }
    last
}

/// Reads the bytes of the lanes, those with consecutive addresses at once.
fn read_global(
    memory: &dyn GlobalMemory,
    addresses: &L64,
    mask: u32,
    size: usize,
    bytes: &mut Bytes,
) -> Result<(), LaneFault> {
    let mut lane = 0;
    let mut read: Option<usize> = None;
    while lane < LANES {
        if mask >> lane & 1 == 0 {
            lane += 1;
            continue;
        }
        if let Some(read) = read
            && addresses[read] == addresses[lane]
        {
            bytes.copy_within(read * size..(read + 1) * size, lane * size);
            lane += 1;
            continue;
        }
        aligned(addresses[lane], size).map_err(|fault| LaneFault::new(lane, fault))?;
        let last = run_end(addresses, mask, size, lane);
        let into = &mut bytes[lane * size..(last + 1) * size];
        if memory.read(addresses[lane], into).is_err() {
            for lane in lane..=last {
                let into = &mut bytes[lane * size..(lane + 1) * size];
                memory
                    .read(addresses[lane], into)
                    .map_err(|fault| LaneFault::new(lane, fault.into()))?;
            }
        }
        read = Some(last);
        lane = last + 1;
    }
    Ok(())
}

fn write_global(
    memory: &mut dyn GlobalMemory,
    addresses: &L64,
    mask: u32,
    size: usize,
    bytes: &Bytes,
) -> Result<(), LaneFault> {
    let mut lane = 0;
    while lane < LANES {
        if mask >> lane & 1 == 0 {
            lane += 1;
            continue;
        }
        aligned(addresses[lane], size).map_err(|fault| LaneFault::new(lane, fault))?;
        let last = run_end(addresses, mask, size, lane);
        let from = &bytes[lane * size..(last + 1) * size];
        if memory.write(addresses[lane], from).is_err() {
            for lane in lane..=last {
                let from = &bytes[lane * size..(lane + 1) * size];
                memory
                    .write(addresses[lane], from)
                    .map_err(|fault| LaneFault::new(lane, fault.into()))?;
            }
        }
        lane = last + 1;
    }
    Ok(())
}
