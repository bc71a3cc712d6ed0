//! Shared memory of a block, with the last accesses to every granule, so that races and uninitialised reads
//! are found.
//!
//! Every warp has a vector clock over the block's warps. A barrier joins the clocks of its warps. Two
//! accesses race if one of them writes, their threads differ and neither thread's clock covers the other's
//! access. Lanes of one warp are ordered by `bar.warp.sync` and by barriers, not by running in lockstep.
//!
//! A `wgmma` reads when it is issued; until its warp waits for it, a write to what it reads is an error. It
//! then counts as a read by the whole warp at the time of the wait. It reads through the asynchronous proxy:
//! the writer must have fenced the write, and the fence must be ordered before the `wgmma`.

use super::instruction::LANES;
use super::run::Fault;
use crate::launch::Dim;

/// An access: the warp's clock, flags and the thread. 0 is none.
type Stamp = u64;

/// The access was atomic, volatile or otherwise strong: such accesses do not race with each other.
const STRONG: u64 = 1 << 10;
/// The write is an asynchronous copy that is not yet complete.
const PENDING: u64 = 1 << 11;
/// The access is one of all lanes of the thread's warp.
const WARP: u64 = 1 << 12;
const CLOCK_SHIFT: u32 = 13;

/// Bytes that a `wgmma` reads at a time.
pub const CHUNK: u64 = 16;

fn thread_of(stamp: Stamp) -> u32 {
    (stamp & 0x3ff) as u32
}

fn clock_of(stamp: Stamp) -> u64 {
    stamp >> CLOCK_SHIFT
}

/// The last accesses to a granule.
#[derive(Debug, Clone, Copy, Default)]
struct Shadow {
    write: Stamp,
    /// The last two readers that differ.
    reads: [Stamp; 2],
    /// Proxy fences that the writer had executed before the write.
    fences: u32,
    /// Products under way that read the granule.
    products: u32,
}

/// A product under way.
struct Product {
    group: u32,
    /// Addresses of what it reads.
    chunks: Vec<u64>,
}

/// What `wgmma` needs beside the shadow.
struct Proxy {
    /// By thread: its warp's clock at each of its proxy fences.
    fences: Vec<Vec<u64>>,
    /// By warp.
    products: Vec<Vec<Product>>,
}

pub struct Shared {
    data: Vec<u8>,
    shadow: Vec<Shadow>,
    granule: u64,
    /// By warp: for each warp the latest of its clocks that is ordered before.
    clocks: Vec<Vec<u64>>,
    /// Clocks up to here belong to earlier blocks.
    floor: u64,
    /// `None` for kernels without `wgmma`.
    proxy: Option<Proxy>,
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
    /// A write to what a product under way reads.
    UnderWay {
        address: u64,
        other: u32,
    },
    /// A product reads a write without a proxy fence.
    Unfenced {
        address: u64,
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
            Self::UnderWay { address, other } => Fault::OperandUnderWay {
                address,
                other: thread(other),
            },
            Self::Unfenced { address, other } => Fault::NoProxyFence {
                address,
                other: thread(other),
            },
        }
    }
}

impl Shared {
    pub fn new(bytes: u64, granule: u64, warps: usize, has_wgmma: bool) -> Self {
        let granules = bytes.div_ceil(granule) as usize;
        let proxy = has_wgmma.then(|| Proxy {
            fences: vec![Vec::new(); warps * LANES],
            products: (0..warps).map(|_| Vec::new()).collect(),
        });
        Self {
            data: vec![0; bytes as usize],
            shadow: vec![Shadow::default(); granules],
            granule,
            clocks: vec![vec![0; warps]; warps],
            floor: 0,
            proxy,
        }
    }

    /// Begins a block: nothing is initialised.
    pub fn begin(&mut self) {
        let latest = self.clocks.iter().flatten().max().copied().unwrap_or(0);
        self.floor = latest + 1;
        for clocks in &mut self.clocks {
            clocks.fill(self.floor);
        }
        if let Some(proxy) = &mut self.proxy {
            proxy.fences.iter_mut().for_each(Vec::clear);
            proxy.products.iter_mut().for_each(Vec::clear);
            for shadow in &mut self.shadow {
                (shadow.fences, shadow.products) = (0, 0);
            }
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
        (self.clocks[warp][warp] + 1) << CLOCK_SHIFT | u64::from(thread)
    }

    /// Whether an earlier access by another thread is not ordered before this thread's next one.
    fn is_concurrent(&self, stamp: Stamp, thread: u32) -> bool {
        let other = thread_of(stamp);
        if stamp & WARP != 0 && other / LANES as u32 == thread / LANES as u32 {
            return false;
        }
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
            let Shadow { write, reads, .. } = self.shadow[granule];
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
        let fences = self.fences(thread);
        for granule in self.granules(address, bytes) {
            let Shadow {
                write,
                reads,
                products,
                ..
            } = self.shadow[granule];
            let address = granule as u64 * self.granule;
            if products > 0 {
                return Err(Conflict::UnderWay {
                    address,
                    other: self.reader(address),
                });
            }
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
            self.shadow[granule].fences = fences;
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
        let fences = self.fences(thread);
        for granule in self.granules(address, bytes.len() as u64) {
            self.shadow[granule].write = now;
            self.shadow[granule].fences = fences;
        }
        self.data[address as usize..address as usize + bytes.len()].copy_from_slice(bytes);
    }

    /// Orders what the lanes of a warp did before what they do next.
    pub fn join_lanes(&mut self, warp: usize) {
        self.clocks[warp][warp] += 1;
    }

    /// Proxy fences that a thread has executed.
    fn fences(&self, thread: u32) -> u32 {
        let proxy = self.proxy.as_ref();
        proxy.map_or(0, |proxy| proxy.fences[thread as usize].len() as u32)
    }

    /// A thread orders its writes before what products read.
    pub fn fence_proxy(&mut self, thread: u32) {
        let clock = clock_of(self.now(thread));
        if let Some(proxy) = &mut self.proxy {
            proxy.fences[thread as usize].push(clock);
        }
    }

    /// The first thread of a warp whose product reads the address.
    fn reader(&self, address: u64) -> u32 {
        let of = |product: &Product| {
            let mut chunks = product.chunks.iter();
            chunks.any(|&chunk| (chunk..chunk + CHUNK).contains(&address))
        };
        let warps = self.proxy.iter().flat_map(|proxy| &proxy.products);
        let warp = warps.into_iter().position(|warp| warp.iter().any(of));
        (warp.unwrap_or(0) * LANES) as u32
    }

    /// Begins to read checked chunks for a warp's product of a group.
    pub fn begin_product(
        &mut self,
        warp: usize,
        group: u32,
        chunks: Vec<u64>,
    ) -> Result<(), Conflict> {
        for &chunk in &chunks {
            let mut checked = (0, 0);
            for granule in self.granules(chunk, CHUNK) {
                let Shadow { write, fences, .. } = self.shadow[granule];
                self.shadow[granule].products += 1;
                if checked != (write, fences) {
                    let address = granule as u64 * self.granule;
                    self.check_product(warp, address, write, fences)?;
                    checked = (write, fences);
                }
            }
        }
        if let Some(proxy) = &mut self.proxy {
            proxy.products[warp].push(Product { group, chunks });
        }
        Ok(())
    }

    /// Checks that a write is ordered before a product and that its proxy fence is.
    fn check_product(
        &self,
        warp: usize,
        address: u64,
        write: Stamp,
        fences: u32,
    ) -> Result<(), Conflict> {
        self.check_initialised(write, address)?;
        let other = thread_of(write);
        let of = other as usize / LANES;
        let is_ordered = |clock: u64| of == warp || clock <= self.clocks[warp][of];
        if !is_ordered(clock_of(write)) {
            return Err(Conflict::Race {
                address,
                access: "read by wgmma",
                other_access: "write",
                other,
            });
        }
        let fenced = self.proxy.as_ref().and_then(|proxy| {
            let fences_of_writer = &proxy.fences[other as usize];
            fences_of_writer.get(fences as usize).copied()
        });
        if fenced.is_some_and(is_ordered) {
            Ok(())
        } else {
            Err(Conflict::Unfenced { address, other })
        }
    }

    /// The bytes of a checked chunk.
    #[inline]
    pub fn chunk(&self, address: u64) -> [u8; CHUNK as usize] {
        let bytes = &self.data[address as usize..(address + CHUNK) as usize];
        bytes.try_into().unwrap_or_default()
    }

    /// Ends the products of a warp's groups before the given one: their reads count as reads now.
    pub fn end_products(&mut self, warp: usize, before: u32) {
        let now = self.now((warp * LANES) as u32) | WARP;
        let Some(proxy) = &mut self.proxy else { return };
        let products = &mut proxy.products[warp];
        let ended = products.partition_point(|product| product.group < before);
        let ended: Vec<Product> = products.drain(..ended).collect();
        for chunk in ended.into_iter().flat_map(|product| product.chunks) {
            for granule in self.granules(chunk, CHUNK) {
                let shadow = &mut self.shadow[granule];
                shadow.products -= 1;
                if thread_of(shadow.reads[0]) != thread_of(now) {
                    shadow.reads[1] = shadow.reads[0];
                }
                shadow.reads[0] = now;
            }
        }
    }
}
