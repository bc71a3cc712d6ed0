//! Shared memory of a block, with the last accesses to every granule, so that races and uninitialised reads
//! are found.
//!
//! Every warp has a vector clock over the block's warps. A barrier joins the clocks of its warps. Two
//! accesses race if one of them writes, their threads differ and neither thread's clock covers the other's
//! access. Lanes of one warp are ordered by `bar.warp.sync` and by barriers, not by running in lockstep.

use super::run::Fault;
use crate::launch::Dim;

/// An access: the warp's clock, flags and the thread. 0 is none.
type Stamp = u64;

/// The access was atomic, volatile or otherwise strong: such accesses do not race with each other.
const STRONG: u64 = 1 << 10;
/// The write is an asynchronous copy that is not yet complete.
const PENDING: u64 = 1 << 11;

fn thread_of(stamp: Stamp) -> u32 {
    (stamp & 0x3ff) as u32
}

fn clock_of(stamp: Stamp) -> u64 {
    stamp >> 12
}

/// The last accesses to a granule.
#[derive(Debug, Clone, Copy, Default)]
struct Shadow {
    write: Stamp,
    /// The last two readers that differ.
    reads: [Stamp; 2],
}

/// Shared memory.
pub struct Shared {
    data: Vec<u8>,
    shadow: Vec<Shadow>,
    granule: u64,
    /// By warp: for each warp the latest of its clocks that is ordered before.
    clocks: Vec<Vec<u64>>,
    /// Clocks up to here belong to earlier blocks.
    floor: u64,
}

/// A conflict without the coordinates of the other thread.
#[derive(Debug)]
pub enum Conflict {
    Fault(Fault),
    Race {
        address: u64,
        access: &'static str,
        other_access: &'static str,
        other: u32,
    },
}

impl Conflict {
    pub fn with(self, thread: impl Fn(u32) -> Dim) -> Fault {
        match self {
            Self::Fault(fault) => fault,
            Self::Race {
                address,
                access,
                other_access,
                other,
            } => Fault::Race {
                address,
                access,
                other_access,
                other: thread(other),
            },
        }
    }
}

impl Shared {
    pub fn new(bytes: u64, granule: u64, warps: usize) -> Self {
        let granules = bytes.div_ceil(granule) as usize;
        Self {
            data: vec![0; bytes as usize],
            shadow: vec![Shadow::default(); granules],
            granule,
            clocks: vec![vec![0; warps]; warps],
            floor: 0,
        }
    }

    /// Begins a block: nothing is initialised.
    pub fn begin(&mut self) {
        let latest = self.clocks.iter().flatten().max().copied().unwrap_or(0);
        self.floor = latest + 1;
        for clocks in &mut self.clocks {
            clocks.fill(self.floor);
        }
    }

    /// A warp arrives at a barrier: gives what it has done, and all that is ordered before that.
    pub fn release(&mut self, warp: usize) -> Vec<u64> {
        self.clocks[warp][warp] += 1;
        self.clocks[warp].clone()
    }

    /// Orders what a warp has released before what another one does next.
    pub fn acquire(&mut self, warp: usize, released: &[u64]) {
        for (clock, &released) in self.clocks[warp].iter_mut().zip(released) {
            *clock = released.max(*clock);
        }
    }

    fn now(&self, thread: u32) -> Stamp {
        let warp = thread as usize / 32;
        (self.clocks[warp][warp] + 1) << 12 | u64::from(thread)
    }

    /// Whether an earlier access by another thread is not ordered before this thread's next one.
    fn is_concurrent(&self, stamp: Stamp, thread: u32) -> bool {
        let other = thread_of(stamp);
        other != thread && clock_of(stamp) > self.clocks[thread as usize / 32][other as usize / 32]
    }

    fn granules(&self, address: u64, bytes: u64) -> std::ops::Range<usize> {
        let first = address / self.granule;
        first as usize..(address + bytes).div_ceil(self.granule) as usize
    }

    /// Checks alignment and bounds.
    pub fn check(&self, address: u64, bytes: u64) -> Result<(), Fault> {
        if !address.is_multiple_of(bytes) {
            return Err(Fault::Misaligned { address, bytes });
        }
        let size = self.data.len() as u64;
        if address.checked_add(bytes).is_none_or(|end| end > size) {
            return Err(Fault::OutOfWindow {
                space: "shared",
                address,
                bytes,
                size,
            });
        }
        Ok(())
    }

    /// Reads checked bytes for a thread.
    pub fn read(
        &mut self,
        thread: u32,
        address: u64,
        into: &mut [u8],
        strong: bool,
    ) -> Result<(), Conflict> {
        let bytes = into.len() as u64;
        let flags = if strong { STRONG } else { 0 };
        let now = self.now(thread) | flags;
        for granule in self.granules(address, bytes) {
            let Shadow { write, reads } = self.shadow[granule];
            let address = granule as u64 * self.granule;
            self.check_initialised(write, address)?;
            if self.is_concurrent(write, thread) && write & flags & STRONG == 0 {
                return Err(Conflict::Race {
                    address,
                    access: "read",
                    other_access: "write",
                    other: thread_of(write),
                });
            }
            let reads = if thread_of(reads[0]) == thread {
                [now, reads[1]]
            } else {
                [now, reads[0]]
            };
            self.shadow[granule].reads = reads;
        }
        into.copy_from_slice(&self.data[address as usize..(address + bytes) as usize]);
        Ok(())
    }

    fn check_initialised(&self, write: Stamp, address: u64) -> Result<(), Conflict> {
        if clock_of(write) <= self.floor {
            return Err(Conflict::Fault(Fault::UninitialisedMemory {
                space: "shared",
                address,
            }));
        }
        if write & PENDING != 0 {
            return Err(Conflict::Fault(Fault::PendingCopy { address }));
        }
        Ok(())
    }

    /// Records a write of checked bytes by a thread. `same` says whether another thread of the warp writes
    /// the same bytes with the same instruction, which is no race.
    fn stamp(
        &mut self,
        thread: u32,
        address: u64,
        bytes: u64,
        flags: u64,
        same: &dyn Fn(u32) -> bool,
    ) -> Result<(), Conflict> {
        let now = self.now(thread) | flags;
        for granule in self.granules(address, bytes) {
            let Shadow { write, reads } = self.shadow[granule];
            let address = granule as u64 * self.granule;
            if write & PENDING != 0 && clock_of(write) > self.floor {
                return Err(Conflict::Fault(Fault::PendingCopy { address }));
            }
            let others = [(write, "write"), (reads[0], "read"), (reads[1], "read")];
            for (stamp, other_access) in others {
                let both_strong = stamp & flags & STRONG != 0;
                if self.is_concurrent(stamp, thread)
                    && !both_strong
                    && !(other_access == "write" && same(thread_of(stamp)))
                {
                    return Err(Conflict::Race {
                        address,
                        access: "write",
                        other_access,
                        other: thread_of(stamp),
                    });
                }
            }
            self.shadow[granule].write = now;
        }
        Ok(())
    }

    /// Writes checked bytes for a thread.
    pub fn write(
        &mut self,
        thread: u32,
        address: u64,
        bytes: &[u8],
        strong: bool,
        same: &dyn Fn(u32) -> bool,
    ) -> Result<(), Conflict> {
        let flags = if strong { STRONG } else { 0 };
        self.stamp(thread, address, bytes.len() as u64, flags, same)?;
        self.data[address as usize..address as usize + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Begins an asynchronous copy to checked bytes.
    pub fn begin_copy(&mut self, thread: u32, address: u64, bytes: u64) -> Result<(), Conflict> {
        self.stamp(thread, address, bytes, PENDING, &|_| false)
    }

    /// Completes an asynchronous copy: the thread that began it sees the bytes.
    pub fn end_copy(&mut self, thread: u32, address: u64, bytes: &[u8]) {
        let now = self.now(thread);
        for granule in self.granules(address, bytes.len() as u64) {
            self.shadow[granule].write = now;
        }
        self.data[address as usize..address as usize + bytes.len()].copy_from_slice(bytes);
    }

    /// Orders what the lanes of a warp did before what they do next.
    pub fn join_lanes(&mut self, warp: usize) {
        self.clocks[warp][warp] += 1;
    }
}
