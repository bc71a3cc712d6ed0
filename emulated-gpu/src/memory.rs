//! Memory of several devices, at addresses that the host cannot dereference.
//!
//! An address is never used twice, so an access to freed memory is always found. Fresh memory holds
//! [`POISON`], and every byte knows whether it was written.

use std::ops::Range;

use crate::launch::MemoryFault;

/// Devices that the address space has room for.
pub const MAX_DEVICES: usize = 16;
/// Bytes of fresh memory: NaN as f32, bf16 and f16, -1 as an integer.
pub const POISON: u8 = 0xff;

/// The first device address. x86-64's user space ends here, so the host faults on a dereference.
const FIRST: u64 = 1 << 47;
/// Addresses of one device.
const SPAN: u64 = 1 << 43;
/// Unmapped bytes after an allocation, so that an index out of bounds does not hit the next one.
const GAP: u64 = 1 << 20;

/// What the driver guarantees of an address, and no more.
const ALIGNMENT: u64 = 256;

/// Memory of all devices.
#[derive(Debug)]
pub struct Memory {
    devices: Vec<Device>,
    /// Allocations until one fails, counted over all devices.
    fail_after: Option<u64>,
}

#[derive(Debug)]
struct Device {
    capacity: u64,
    next: u64,
    /// Live and freed allocations, in the order of their addresses.
    allocations: Vec<Allocation>,
    statistics: Statistics,
    /// The first address.
    first: u64,
    /// For each [`GAP`] addresses, the index of the allocation that they belong to.
    places: Vec<usize>,
}

#[derive(Debug)]
struct Allocation {
    address: u64,
    bytes: u64,
    /// `None` once freed.
    contents: Option<Contents>,
}

#[derive(Debug)]
struct Contents {
    bytes: Vec<u8>,
    written: Bits,
}

/// Counters of one device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Statistics {
    pub allocations: u64,
    pub live_allocations: u64,
    pub live_bytes: u64,
    pub peak_bytes: u64,
}

/// Why memory cannot be allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AllocationError {
    #[error("{bytes} bytes do not fit: {free} bytes are free")]
    OutOfMemory { bytes: u64, free: u64 },
    #[error("the allocation fails because the test asks for it")]
    Injected,
}

/// Why memory cannot be freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FreeError {
    #[error("{address:#x} is freed twice")]
    Twice { address: u64 },
    #[error("no allocation starts at {address:#x}")]
    NoAllocation { address: u64 },
}

/// Bytes and which of them are initialised, taken out of an allocation.
#[derive(Debug)]
pub struct Snapshot {
    bytes: Vec<u8>,
    written: Vec<bool>,
}

impl Memory {
    /// `fail_after` is the number of allocations that succeed before one fails.
    pub fn new(devices: usize, capacity: u64, fail_after: Option<u64>) -> Memory {
        let devices = (0..devices.min(MAX_DEVICES) as u64).map(|device| Device {
            capacity,
            next: FIRST + device * SPAN + ALIGNMENT,
            allocations: Vec::new(),
            statistics: Statistics::default(),
            first: FIRST + device * SPAN,
            places: Vec::new(),
        });
        Memory {
            devices: devices.collect(),
            fail_after,
        }
    }

    /// Allocates bytes of a device.
    pub fn allocate(&mut self, device: usize, bytes: u64) -> Result<u64, AllocationError> {
        if let Some(left) = &mut self.fail_after {
            if *left == 0 {
                self.fail_after = None;
                return Err(AllocationError::Injected);
            }
            *left -= 1;
        }
        let device = &mut self.devices[device];
        let free = device.capacity - device.statistics.live_bytes;
        let last = device.next.saturating_add(bytes);
        if bytes > free || (last - FIRST) / SPAN != (device.next - FIRST) / SPAN {
            return Err(AllocationError::OutOfMemory { bytes, free });
        }
        let address = device.next;
        device.next = last.next_multiple_of(GAP) + GAP + ALIGNMENT;
        let places = ((device.next - device.first) / GAP) as usize;
        device.places.resize(places, device.allocations.len());
        device.allocations.push(Allocation {
            address,
            bytes,
            contents: Some(Contents {
                bytes: vec![POISON; bytes as usize],
                written: Bits::new(bytes as usize),
            }),
        });
        let statistics = &mut device.statistics;
        statistics.allocations += 1;
        statistics.live_allocations += 1;
        statistics.live_bytes += bytes;
        statistics.peak_bytes = statistics.peak_bytes.max(statistics.live_bytes);
        Ok(address)
    }

    /// Frees the allocation that starts at the address; its contents are gone.
    pub fn free(&mut self, address: u64) -> Result<(), FreeError> {
        let none = FreeError::NoAllocation { address };
        let device = self.device_of(address).ok_or(none)?;
        let device = &mut self.devices[device];
        let index = device.index(address).ok_or(none)?;
        let allocation = &mut device.allocations[index];
        if allocation.address != address {
            return Err(none);
        }
        if allocation.contents.take().is_none() {
            return Err(FreeError::Twice { address });
        }
        device.statistics.live_allocations -= 1;
        device.statistics.live_bytes -= allocation.bytes;
        Ok(())
    }

    /// Frees all memory of a device and returns what was live: the leaks of its context.
    pub fn reset(&mut self, device: usize) -> Vec<Range<u64>> {
        let device = &mut self.devices[device];
        let mut leaks = Vec::new();
        for allocation in &mut device.allocations {
            if allocation.contents.take().is_some() {
                leaks.push(allocation.address..allocation.address + allocation.bytes);
            }
        }
        device.statistics.live_allocations = 0;
        device.statistics.live_bytes = 0;
        leaks
    }

    /// The device whose addresses contain this one.
    pub fn device_of(&self, address: u64) -> Option<usize> {
        let device = (address.checked_sub(FIRST)? / SPAN) as usize;
        (device < self.devices.len()).then_some(device)
    }

    /// The live allocation that contains the address.
    pub fn range_of(&self, address: u64) -> Option<Range<u64>> {
        let (device, index, _) = self.locate(address, 1).ok()?;
        let allocation = &self.devices[device].allocations[index];
        Some(allocation.address..allocation.address + allocation.bytes)
    }

    pub fn statistics(&self, device: usize) -> Statistics {
        self.devices[device].statistics
    }

    /// Bytes of a device, and those that are free.
    pub fn capacity(&self, device: usize) -> (u64, u64) {
        let device = &self.devices[device];
        let free = device.capacity - device.statistics.live_bytes;
        (device.capacity, free)
    }

    /// Checks that the range lies in one live allocation.
    pub fn check(&self, address: u64, bytes: u64) -> Result<(), MemoryFault> {
        self.locate(address, bytes).map(|_| ())
    }

    /// Reads initialised bytes.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        let bytes = into.len() as u64;
        let (contents, range) = self.contents(address, bytes)?;
        if let Some(first) = contents.written.first_clear(range.clone()) {
            let address = address + (first - range.start) as u64;
            let bytes = (range.end - first) as u64;
            return Err(MemoryFault::Uninitialised { address, bytes });
        }
        into.copy_from_slice(&contents.bytes[range]);
        Ok(())
    }

    pub fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryFault> {
        let (contents, range) = self.contents_mut(address, bytes.len() as u64)?;
        contents.bytes[range.clone()].copy_from_slice(bytes);
        contents.written.set(range);
        Ok(())
    }

    /// Writes the pattern again and again, `count` times.
    pub fn fill(&mut self, address: u64, pattern: &[u8], count: u64) -> Result<(), MemoryFault> {
        let total = (pattern.len() as u64).saturating_mul(count);
        let (contents, range) = self.contents_mut(address, total)?;
        for chunk in contents.bytes[range.clone()].chunks_exact_mut(pattern.len()) {
            chunk.copy_from_slice(pattern);
        }
        contents.written.set(range);
        Ok(())
    }

    /// The bytes of a range, initialised or not.
    pub fn snapshot(&self, address: u64, bytes: u64) -> Result<Snapshot, MemoryFault> {
        let (contents, range) = self.contents(address, bytes)?;
        Ok(Snapshot {
            bytes: contents.bytes[range.clone()].to_vec(),
            written: range.map(|at| contents.written.get(at)).collect(),
        })
    }

    /// Writes a snapshot: bytes that were not initialised are not afterwards.
    pub fn restore(&mut self, address: u64, snapshot: &Snapshot) -> Result<(), MemoryFault> {
        let (contents, range) = self.contents_mut(address, snapshot.bytes.len() as u64)?;
        contents.bytes[range.clone()].copy_from_slice(&snapshot.bytes);
        for (at, &written) in range.zip(&snapshot.written) {
            contents.written.put(at, written);
        }
        Ok(())
    }

    /// Device, index and offset of a range in one live allocation.
    fn locate(&self, address: u64, bytes: u64) -> Result<(usize, usize, usize), MemoryFault> {
        let outside = MemoryFault::OutOfBounds { address, bytes };
        let device = self.device_of(address).ok_or(outside)?;
        let index = self.devices[device].index(address).ok_or(outside)?;
        let allocation = &self.devices[device].allocations[index];
        let offset = address - allocation.address;
        if bytes > allocation.bytes - offset {
            return Err(outside);
        }
        if allocation.contents.is_none() {
            return Err(MemoryFault::Freed { address, bytes });
        }
        Ok((device, index, offset as usize))
    }

    fn contents(&self, address: u64, bytes: u64) -> Result<(&Contents, Range<usize>), MemoryFault> {
        let (device, index, start) = self.locate(address, bytes)?;
        let contents = &self.devices[device].allocations[index].contents;
        let freed = MemoryFault::Freed { address, bytes };
        let contents = contents.as_ref().ok_or(freed)?;
        Ok((contents, start..start + bytes as usize))
    }

    fn contents_mut(
        &mut self,
        address: u64,
        bytes: u64,
    ) -> Result<(&mut Contents, Range<usize>), MemoryFault> {
        let (device, index, start) = self.locate(address, bytes)?;
        let contents = &mut self.devices[device].allocations[index].contents;
        let freed = MemoryFault::Freed { address, bytes };
        let contents = contents.as_mut().ok_or(freed)?;
        Ok((contents, start..start + bytes as usize))
    }
}

impl Device {
    /// Index of the allocation, live or freed, that contains the address or ends at it.
    fn index(&self, address: u64) -> Option<usize> {
        let place = ((address - self.first) / GAP) as usize;
        let index = *self.places.get(place)?;
        let allocation = &self.allocations[index];
        let offset = address.checked_sub(allocation.address)?;
        (offset <= allocation.bytes).then_some(index)
    }
}

/// One bit for each byte of an allocation.
#[derive(Debug)]
struct Bits(Vec<u64>);

impl Bits {
    fn new(bits: usize) -> Bits {
        Bits(vec![0; bits.div_ceil(64)])
    }

    fn get(&self, at: usize) -> bool {
        self.0[at / 64] >> (at % 64) & 1 == 1
    }

    fn put(&mut self, at: usize, value: bool) {
        let bit = 1 << (at % 64);
        if value {
            self.0[at / 64] |= bit;
        } else {
            self.0[at / 64] &= !bit;
        }
    }

    fn set(&mut self, range: Range<usize>) {
        for (word, mask) in words(range) {
            self.0[word] |= mask;
        }
    }

    fn first_clear(&self, range: Range<usize>) -> Option<usize> {
        words(range).find_map(|(word, mask)| {
            let clear = !self.0[word] & mask;
            (clear != 0).then(|| word * 64 + clear.trailing_zeros() as usize)
        })
    }
}

/// The words of a bitmap that a range of bits touches, and its bits of each.
pub fn words(range: Range<usize>) -> impl Iterator<Item = (usize, u64)> {
    let Range { start, end } = range;
    (start / 64..end.div_ceil(64)).map(move |word| {
        let low = start.saturating_sub(word * 64);
        let high = (end - word * 64).min(64);
        let below = if high == 64 {
            u64::MAX
        } else {
            (1 << high) - 1
        };
        (word, below & (u64::MAX << low))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Memory {
        Memory::new(2, 1 << 20, None)
    }

    #[test]
    fn fresh_memory_is_uninitialised_until_each_byte_is_written() {
        let mut memory = memory();
        let a = memory.allocate(0, 200).unwrap();
        memory.write(a, &[1; 100]).unwrap();
        memory.write(a + 101, &[1; 99]).unwrap();
        let mut all = [0; 200];
        let fault = memory.read(a, &mut all).unwrap_err();
        let (address, bytes) = (a + 100, 100);
        assert_eq!(fault, MemoryFault::Uninitialised { address, bytes });
        memory.write(a + 100, &[1]).unwrap();
        memory.read(a, &mut all).unwrap();
        assert_eq!(all, [1; 200]);
    }

    #[test]
    fn accesses_outside_an_allocation_and_after_its_end_fault() {
        let mut memory = memory();
        let a = memory.allocate(0, 16).unwrap();
        let b = memory.allocate(0, 16).unwrap();
        assert!(a >= 1 << 47 && b > a);
        assert_eq!([a, b].map(|address| address % 512), [256; 2]);
        for (address, bytes) in [(a + 16, 1), (a + 8, 9), (a - 1, 1), (8, 4), (u64::MAX, 4)] {
            let fault = memory.write(address, &vec![0; bytes as usize]).unwrap_err();
            assert_eq!(fault, MemoryFault::OutOfBounds { address, bytes });
        }
        memory.write(a + 16, &[]).unwrap();
        memory.free(a).unwrap();
        let fault = memory.read(a + 4, &mut [0; 4]).unwrap_err();
        let (address, bytes) = (a + 4, 4);
        assert_eq!(fault, MemoryFault::Freed { address, bytes });
        assert_eq!(memory.free(a), Err(FreeError::Twice { address: a }));
        let address = b + 4;
        assert_eq!(
            memory.free(address),
            Err(FreeError::NoAllocation { address })
        );
    }

    #[test]
    fn a_copy_keeps_which_bytes_are_initialised() {
        let mut memory = memory();
        let a = memory.allocate(0, 8).unwrap();
        let b = memory.allocate(1, 8).unwrap();
        memory.write(a + 4, &[7; 4]).unwrap();
        memory.write(b, &[1; 8]).unwrap();
        let snapshot = memory.snapshot(a, 8).unwrap();
        memory.restore(b, &snapshot).unwrap();
        let mut tail = [0; 4];
        memory.read(b + 4, &mut tail).unwrap();
        assert_eq!(tail, [7; 4]);
        assert!(memory.read(b + 3, &mut tail).is_err());
        assert_eq!(snapshot.bytes[..4], [POISON; 4]);
    }

    #[test]
    fn capacity_is_per_device_and_the_nth_allocation_can_fail() {
        let mut memory = Memory::new(2, 100, Some(2));
        let a = memory.allocate(0, 60).unwrap();
        let (bytes, free) = (60, 40);
        assert_eq!(
            memory.allocate(0, 60),
            Err(AllocationError::OutOfMemory { bytes, free })
        );
        assert_eq!(memory.allocate(1, 60), Err(AllocationError::Injected));
        memory.allocate(1, 60).unwrap();
        memory.free(a).unwrap();
        memory.allocate(0, 30).unwrap();
        let expected = Statistics {
            allocations: 2,
            live_allocations: 1,
            live_bytes: 30,
            peak_bytes: 60,
        };
        assert_eq!(memory.statistics(0), expected);
        assert_eq!(memory.reset(0).len(), 1);
        assert_eq!(memory.capacity(0), (100, 100));
    }
}
