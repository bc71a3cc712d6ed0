//! All-reduce, reduce-scatter, all-gather and broadcast of vectors, directly between all pairs.
//!
//! The vector has one part per rank. To reduce, every rank sends its addend of a part to the part's owner.
//! The owner adds them up in rank order, whatever the order of their arrival: each sum is computed once, in
//! one place, so the result is bitwise equal on every rank and in every run. To gather, owners send their
//! parts to every rank. An all-reduce does both and sends reduced elements while the rest still arrives.
//! In a broadcast only ranks that hold the vector have a part, and only the others gather.
//! Every byte crosses the network once, as in a ring, without the ring's world − 1 hops.

use std::ops::Range;

use bytemuck::Pod;
use cpu_kernels::{fixed, vector};

use super::wire::Flow;
use crate::comm::{Kind, Operation};

/// Elements that are added up at a time: few enough to stay in a core's cache.
const CHUNK: usize = 1 << 15;

/// Announces the next operation: kind, number, elements, each as eight little-endian bytes.
const HEADER: usize = 24;

/// Buffers for incoming addends, one per rank, reused by the next operation.
pub(super) type Scratch<T> = Vec<Vec<T>>;

/// Those of each kind of elements.
#[derive(Default)]
pub(super) struct Scratches {
    floats: Scratch<f32>,
    integers: Scratch<i64>,
}

/// What a vector consists of.
pub(super) trait Element: Pod + Default + Send {
    /// Added to the number of a kind of operation in its header.
    const NUMBER: u64;

    fn scratch(scratches: &mut Scratches) -> &mut Scratch<Self>;

    /// sum += x, on this thread.
    fn accumulate(sum: &mut [Self], x: &[Self]);

    /// sum = a + b, on this thread.
    fn add(sum: &mut [Self], a: &[Self], b: &[Self]);
}

impl Element for f32 {
    const NUMBER: u64 = 0;

    fn scratch(scratches: &mut Scratches) -> &mut Scratch<f32> {
        &mut scratches.floats
    }

    fn accumulate(sum: &mut [f32], x: &[f32]) {
        vector::accumulate_on_this_thread(sum, x);
    }

    fn add(sum: &mut [f32], a: &[f32], b: &[f32]) {
        vector::add_on_this_thread(sum, a, b);
    }
}

impl Element for i64 {
    const NUMBER: u64 = 4;

    fn scratch(scratches: &mut Scratches) -> &mut Scratch<i64> {
        &mut scratches.integers
    }

    fn accumulate(sum: &mut [i64], x: &[i64]) {
        fixed::accumulate_on_this_thread(sum, x);
    }

    fn add(sum: &mut [i64], a: &[i64], b: &[i64]) {
        sum.copy_from_slice(a);
        fixed::accumulate_on_this_thread(sum, b);
    }
}

/// One operation in progress.
pub(super) struct Transfer<'a, T> {
    rank: usize,
    world: usize,
    header: [u8; HEADER],
    data: &'a mut [T],
    /// The part of each rank.
    parts: Vec<Range<usize>>,
    part: OwnPart<'a, T>,
    reduce: bool,
    /// Whether a rank receives the parts of the others.
    gathers: Vec<bool>,
    /// Elements of this rank's own part that are final.
    ready: usize,
    scratch: &'a mut Scratch<T>,
    progress: Vec<Progress>,
}

/// The caller's buffer for this rank's part.
enum OwnPart<'a, T> {
    InPlace,
    Into(&'a mut [T]),
    From(&'a [T]),
}

/// Bytes sent to and received from one peer so far.
#[derive(Clone, Default)]
struct Progress {
    sent: usize,
    received: usize,
    header: [u8; HEADER],
}

impl<'a, T: Element> Transfer<'a, T> {
    /// Bytes of an element.
    const SIZE: usize = size_of::<T>();

    /// `number` counts the operations of this world; the caller has checked the sizes.
    pub fn new(
        rank: usize,
        world: usize,
        number: u64,
        operation: &'a mut Operation<T>,
        scratch: &'a mut Scratch<T>,
    ) -> Self {
        let Operation { kind, data, shard } = operation;
        let all = vec![true; world];
        let (number_of_kind, part, reduce, gathers, owns) = match kind {
            Kind::AllReduce => (1, OwnPart::InPlace, true, all.clone(), all),
            Kind::ReduceScatter => (2, OwnPart::Into(shard), true, vec![false; world], all),
            Kind::AllGather => (3, OwnPart::From(shard), false, all.clone(), all),
            Kind::Broadcast { holders } => {
                let gathers = holders.iter().map(|holds| !holds).collect();
                (4, OwnPart::InPlace, false, gathers, holders.clone())
            }
        };
        let mut header = [0; HEADER];
        let fields = [T::NUMBER + number_of_kind, number, data.len() as u64];
        for (place, field) in header.chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&u64::to_le_bytes(field));
        }
        if reduce {
            scratch.resize(world, Vec::new());
            for (peer, buffer) in scratch.iter_mut().enumerate() {
                if peer != rank {
                    buffer.resize(CHUNK, T::default());
                }
            }
        }
        Transfer {
            rank,
            world,
            header,
            parts: parts(data.len(), &owns),
            data,
            part,
            reduce,
            gathers,
            ready: 0,
            scratch,
            progress: vec![Progress::default(); world],
        }
    }

    fn peers(&self) -> impl Iterator<Item = usize> {
        let own = self.rank;
        (0..self.world).filter(move |&peer| peer != own)
    }

    /// Bytes to send to and to receive from `peer` in total.
    fn totals(&self, peer: usize) -> (usize, usize) {
        let own = Self::SIZE * self.parts[self.rank].len();
        let theirs = Self::SIZE * self.parts[peer].len();
        let reduce = usize::from(self.reduce);
        let gathers = |rank: usize| usize::from(self.gathers[rank]);
        (
            HEADER + reduce * theirs + gathers(peer) * own,
            HEADER + reduce * own + gathers(self.rank) * theirs,
        )
    }

    /// Adds up the next `chunk` elements of all addends, in rank order.
    fn add_up(&mut self, chunk: usize) {
        let start = self.parts[self.rank].start + self.ready;
        let own = &mut self.data[start..start + chunk];
        let (below, above) = self.scratch.split_at_mut(self.rank);
        if let Some((first, others)) = below.split_first_mut() {
            for other in others {
                T::accumulate(&mut first[..chunk], &other[..chunk]);
            }
        }
        let addends = below.first().into_iter().chain(&above[1..]);
        let mut addends = addends.map(|addend| &addend[..chunk]);
        let sum = match &mut self.part {
            OwnPart::Into(shard) => {
                let sum = &mut shard[self.ready..self.ready + chunk];
                match addends.next() {
                    Some(addend) => T::add(sum, own, addend),
                    None => sum.copy_from_slice(own),
                }
                sum
            }
            OwnPart::InPlace | OwnPart::From(_) => own,
        };
        for addend in addends {
            T::accumulate(sum, addend);
        }
    }
}

impl<T: Element> Flow for Transfer<'_, T> {
    fn outgoing(&self, peer: usize) -> &[u8] {
        let mut at = self.progress[peer].sent;
        if at < HEADER {
            return &self.header[at..];
        }
        at -= HEADER;
        if self.reduce {
            let addend: &[u8] = bytemuck::cast_slice(&self.data[self.parts[peer].clone()]);
            if at < addend.len() {
                return &addend[at..];
            }
            at -= addend.len();
        }
        if self.gathers[peer] {
            let own: &[u8] = bytemuck::cast_slice(&self.data[self.parts[self.rank].clone()]);
            return &own[at..Self::SIZE * self.ready];
        }
        &[]
    }

    fn sent(&mut self, peer: usize, bytes: usize) {
        self.progress[peer].sent += bytes;
    }

    fn incoming(&mut self, peer: usize) -> &mut [u8] {
        let own = self.parts[self.rank].clone();
        let theirs = self.parts[peer].clone();
        let mut at = self.progress[peer].received;
        if at < HEADER {
            return &mut self.progress[peer].header[at..];
        }
        at -= HEADER;
        if self.reduce {
            if at < Self::SIZE * own.len() {
                let chunk = CHUNK.min(own.len() - self.ready);
                let buffer: &mut [u8] = bytemuck::cast_slice_mut(&mut self.scratch[peer][..chunk]);
                return &mut buffer[at - Self::SIZE * self.ready..];
            }
            at -= Self::SIZE * own.len();
        }
        if self.gathers[self.rank] {
            // The owner reduced this part after it had this rank's addend, so the addend is sent.
            return &mut bytemuck::cast_slice_mut(&mut self.data[theirs])[at..];
        }
        &mut []
    }

    fn received(&mut self, peer: usize, bytes: usize) -> Result<(), String> {
        let progress = &mut self.progress[peer];
        progress.received += bytes;
        if progress.received != HEADER || progress.header == self.header {
            return Ok(());
        }
        Err(format!(
            "rank {} runs {}, rank {peer} runs {}",
            self.rank,
            describe(&self.header),
            describe(&progress.header)
        ))
    }

    fn advance(&mut self) {
        loop {
            let chunk = CHUNK.min(self.parts[self.rank].len() - self.ready);
            let until = HEADER + Self::SIZE * (self.ready + chunk);
            let started = HEADER + Self::SIZE * self.ready;
            if chunk == 0 {
                return;
            }
            if self.reduce {
                if self
                    .peers()
                    .any(|peer| self.progress[peer].received < until)
                {
                    return;
                }
                self.add_up(chunk);
            } else if let OwnPart::From(shard) = self.part {
                // Copies just before sending, while the data is in the cache.
                if self.world > 1 && self.peers().all(|peer| self.progress[peer].sent < started) {
                    return;
                }
                let start = self.parts[self.rank].start + self.ready;
                self.data[start..start + chunk]
                    .copy_from_slice(&shard[self.ready..self.ready + chunk]);
            }
            self.ready += chunk;
        }
    }

    fn done(&self) -> bool {
        self.ready == self.parts[self.rank].len()
            && self.peers().all(|peer| {
                let progress = &self.progress[peer];
                (progress.sent, progress.received) == self.totals(peer)
            })
    }

    fn late(&self) -> Vec<usize> {
        let silent = |peer: &usize| self.progress[*peer].received < HEADER;
        let late: Vec<usize> = self.peers().filter(silent).collect();
        if !late.is_empty() {
            return late;
        }
        let behind = |peer: &usize| self.progress[*peer].received < self.totals(*peer).1;
        self.peers().filter(behind).collect()
    }
}

/// Splits a vector evenly between the ranks that own a part of it.
fn parts(len: usize, owns: &[bool]) -> Vec<Range<usize>> {
    let owners = owns.iter().filter(|owns| **owns).count();
    let start = |before: usize| (len as u128 * before as u128 / owners as u128) as usize;
    let mut before = 0;
    let part = owns.iter().map(|owns| {
        let first = before;
        before += usize::from(*owns);
        start(first)..start(before)
    });
    part.collect()
}

fn describe(header: &[u8; HEADER]) -> String {
    let field = |index: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&header[8 * index..8 * index + 8]);
        u64::from_le_bytes(bytes)
    };
    let (kind, elements) = match field(0) {
        kind if kind > i64::NUMBER => (kind - i64::NUMBER, "integers"),
        kind => (kind, "elements"),
    };
    let name = match kind {
        1 => Kind::AllReduce.name(),
        2 => Kind::ReduceScatter.name(),
        3 => Kind::AllGather.name(),
        4 => "broadcast",
        _ => "an unknown operation",
    };
    format!("{name} (operation {}) of {} {elements}", field(1), field(2))
}
