//! A device memory for tests and a shorthand for launches.

#![allow(dead_code, reason = "each test program uses a part")]

use std::collections::BTreeMap;
use std::ops::Deref;

use emulated_gpu::launch::{Dim, GlobalMemory, Launch, MemoryFault};
use emulated_gpu::ptx::{Counters, Fault, Limits, Module, RunError};

/// The address of the first allocation.
const BASE: u64 = 0x7f00_0000_0000;

/// Device memory of buffers, 4 KiB of unmapped addresses between them.
#[derive(Clone, Default)]
pub struct Memory {
    buffers: Vec<(u64, Vec<u8>)>,
    /// For each byte of a buffer that [`Memory::forget`] has forgotten whether it was written since.
    forgotten: BTreeMap<usize, Vec<bool>>,
    next: u64,
}

impl Memory {
    /// Allocates a buffer with the bytes and gives its address.
    pub fn put(&mut self, bytes: &[u8]) -> u64 {
        let address = BASE + self.next;
        self.next += (bytes.len() as u64).next_multiple_of(256) + 4096;
        self.buffers.push((address, bytes.to_vec()));
        address
    }

    /// The bytes of the buffer at the address.
    pub fn get(&self, address: u64) -> &[u8] {
        let buffer = self.buffers.iter().find(|buffer| buffer.0 == address);
        &buffer.expect("a buffer begins there").1
    }

    /// Makes a buffer uninitialised.
    pub fn forget(&mut self, address: u64) {
        let at = self.buffers.iter().position(|buffer| buffer.0 == address);
        let at = at.expect("a buffer begins there");
        let bytes = self.buffers[at].1.len();
        self.forgotten.insert(at, vec![false; bytes]);
    }

    fn find(&self, address: u64, bytes: usize) -> Result<(usize, usize), MemoryFault> {
        let fault = MemoryFault::OutOfBounds {
            address,
            bytes: bytes as u64,
        };
        let after = self.buffers.partition_point(|buffer| buffer.0 <= address);
        let at = after.checked_sub(1).ok_or(fault)?;
        let offset = (address - self.buffers[at].0) as usize;
        if offset + bytes > self.buffers[at].1.len() {
            return Err(fault);
        }
        Ok((at, offset))
    }
}

impl GlobalMemory for Memory {
    fn read(&self, address: u64, into: &mut [u8]) -> Result<(), MemoryFault> {
        let (at, offset) = self.find(address, into.len())?;
        let written = self.forgotten.get(&at);
        if written.is_some_and(|written| written[offset..offset + into.len()].contains(&false)) {
            return Err(MemoryFault::Uninitialised {
                address,
                bytes: into.len() as u64,
            });
        }
        into.copy_from_slice(&self.buffers[at].1[offset..offset + into.len()]);
        Ok(())
    }

    fn write(&mut self, address: u64, bytes: &[u8]) -> Result<(), MemoryFault> {
        let (at, offset) = self.find(address, bytes.len())?;
        if let Some(written) = self.forgotten.get_mut(&at) {
            written[offset..offset + bytes.len()].fill(true);
        }
        self.buffers[at].1[offset..offset + bytes.len()].copy_from_slice(bytes);
        Ok(())
    }
}

pub fn x(x: u32) -> Dim {
    Dim { x, y: 1, z: 1 }
}

/// A module of one kernel `k` with the parameters `arg0`, `arg1`, … of 64 bits and the usual registers.
pub fn kernel(parameters: usize, body: &str) -> String {
    let list: Vec<String> = (0..parameters)
        .map(|i| format!(".param .u64 arg{i}"))
        .collect();
    let list = list.join(", ");
    format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k({list})\n{{\n\
         .reg .pred %p<16>;\n.reg .b16 %rs<32>;\n.reg .b32 %r<64>;\n.reg .f32 %f<64>;\n\
         .reg .b64 %rd<32>;\n.reg .f64 %fd<16>;\n{body}\n}}\n"
    )
}

/// A module whose launches are compared with a device, see [`device`].
pub struct Loaded {
    module: Module,
    text: String,
    variables: Vec<u64>,
}

impl Deref for Loaded {
    type Target = Module;

    fn deref(&self) -> &Module {
        &self.module
    }
}

impl Loaded {
    pub fn run(
        &self,
        kernel: &str,
        launch: &Launch<'_>,
        limits: &Limits,
        memory: &mut Memory,
    ) -> Result<Counters, RunError> {
        if !device::compares() {
            return self.module.run(kernel, launch, limits, memory);
        }
        let before = memory.clone();
        let counters = self.module.run(kernel, launch, limits, memory)?;
        let of = (self.text.as_str(), &self.module, &self.variables[..]);
        device::compare(of, kernel, launch, before, memory);
        Ok(counters)
    }
}

/// Loads a module, fills and places its variables.
pub fn load(text: &str, memory: &mut Memory) -> Loaded {
    let mut module = Module::load(text).unwrap_or_else(|error| panic!("{error}"));
    let mut variables = Vec::new();
    for index in 0..module.variables().len() {
        let initial = module.variables()[index].initial.clone();
        let address = memory.put(&initial);
        module.place(index, address);
        variables.push(address);
    }
    Loaded {
        module,
        text: text.to_owned(),
        variables,
    }
}

/// Runs the kernel `k` with parameters of 64 bits.
pub fn run(
    text: &str,
    memory: &mut Memory,
    (grid, block): (u32, u32),
    parameters: &[u64],
    seed: u64,
) -> Result<Counters, RunError> {
    let parameters: Vec<u8> = parameters.iter().flat_map(|p| p.to_le_bytes()).collect();
    let launch = Launch {
        grid: x(grid),
        block: x(block),
        dynamic_shared: 0,
        parameters: &parameters,
        seed,
    };
    load(text, memory).run("k", &launch, &Limits::default(), memory)
}

/// The fault of a launch that must fail, and the thread's x.
pub fn fault_of(result: Result<Counters, RunError>) -> (Fault, u32) {
    match result {
        Err(RunError::Execution(error)) => (error.fault.clone(), error.thread.x),
        other => panic!("{other:?}"),
    }
}

pub fn f32s(bytes: &[u8]) -> Vec<f32> {
    u32s(bytes).into_iter().map(f32::from_bits).collect()
}

pub fn u32s(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.chunks_exact(4);
    words
        .map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]]))
        .collect()
}

pub fn u64s(bytes: &[u8]) -> Vec<u64> {
    let pairs = u32s(bytes);
    let pairs = pairs.chunks_exact(2);
    pairs
        .map(|pair| u64::from(pair[0]) | u64::from(pair[1]) << 32)
        .collect()
}

pub fn bytes_of<T: Copy>(values: &[T], bytes: impl Fn(T) -> Vec<u8>) -> Vec<u8> {
    values.iter().flat_map(|&value| bytes(value)).collect()
}

pub fn of_f32(values: &[f32]) -> Vec<u8> {
    bytes_of(values, |value| value.to_le_bytes().to_vec())
}

pub fn of_u32(values: &[u32]) -> Vec<u8> {
    bytes_of(values, |value| value.to_le_bytes().to_vec())
}

pub fn of_u64(values: &[u64]) -> Vec<u8> {
    bytes_of(values, |value| value.to_le_bytes().to_vec())
}

/// Splitmix64, the same numbers in every run.
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// In [−scale, scale).
    pub fn float(&mut self, scale: f32) -> f32 {
        ((self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    }

    pub fn floats(&mut self, len: usize, scale: f32) -> Vec<f32> {
        (0..len).map(|_| self.float(scale)).collect()
    }
}

pub mod attention;
pub mod caught;
pub mod device;
pub mod exact;
pub mod kernels;
pub mod lanes;
pub mod nvrtc;
