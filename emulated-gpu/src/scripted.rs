//! Kernels written in Rust, so that tests of the driver need no compiler and no PTX.
//!
//! A module whose text starts with [`MARK`] has all of them.

use crate::launch::{
    Counts, Failure, Global, GlobalMemory, Kernel, Launch, LaunchError, LoadError, Parameter,
    Program,
};

/// The first line of a module of scripted kernels.
pub const MARK: &str = "// emulated-gpu: scripted kernels";

/// The module of scripted kernels.
pub struct Scripted {
    kernels: Vec<Kernel>,
    globals: Vec<Global>,
    /// Address of the global `counter`, a u32.
    counter: u64,
}

/// Names, and the bytes of each parameter.
const KERNELS: [(&str, &[u32]); 6] = [
    // out: u64, value: f32, count: u32; out[i] = value
    ("fill", &[8, 4, 4]),
    // out: u64, in: u64, factor: f32, count: u32; out[i] = factor * out[i] + in[i]
    ("step", &[8, 8, 4, 4]),
    // counter += 1
    ("count", &[]),
    // out: u64; out[0] = bytes of dynamic shared memory
    ("dynamic_shared", &[8]),
    ("trap", &[]),
    // Nothing, with 128 registers a thread.
    ("wide", &[]),
];

impl Program for Scripted {
    fn load(text: &str) -> Result<Box<dyn Program>, LoadError> {
        if !text.starts_with(MARK) {
            return Err(LoadError::Invalid(format!("expected {MARK:?}")));
        }
        let kernels = KERNELS.map(|(name, sizes)| {
            let mut end = 0;
            let parameters = sizes.iter().map(|&bytes| {
                let offset = u32::next_multiple_of(end, bytes);
                end = offset + bytes;
                Parameter { offset, bytes }
            });
            Kernel {
                name: name.into(),
                parameters: parameters.collect(),
                static_shared: 0,
                local: 0,
                registers: if name == "wide" { 128 } else { 32 },
                max_threads: 1024,
            }
        });
        let counter = Global {
            name: "counter".into(),
            initial: vec![0; 4],
        };
        Ok(Box::new(Scripted {
            kernels: kernels.into(),
            globals: vec![counter],
            counter: 0,
        }))
    }

    fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    fn globals(&self) -> &[Global] {
        &self.globals
    }

    fn place(&mut self, _: usize, address: u64) {
        self.counter = address;
    }

    fn run(
        &self,
        kernel: &str,
        launch: &Launch<'_>,
        memory: &mut dyn GlobalMemory,
    ) -> Result<Counts, LaunchError> {
        let parameters = launch.parameters;
        let pointer = |at| u64::from_le_bytes(bytes(parameters, at));
        let number = |at| u32::from_le_bytes(bytes(parameters, at));
        let float = |at| f32::from_le_bytes(bytes(parameters, at));
        let threads = launch.grid.count() * launch.block.count();
        match kernel {
            "fill" => {
                for i in 0..threads.min(number(12).into()) {
                    memory.write(pointer(0) + 4 * i, &float(8).to_le_bytes())?;
                }
            }
            "step" => {
                let mut value = [0; 4];
                for i in 0..threads.min(number(20).into()) {
                    memory.read(pointer(8) + 4 * i, &mut value)?;
                    let add = f32::from_le_bytes(value);
                    memory.read(pointer(0) + 4 * i, &mut value)?;
                    let sum = float(16) * f32::from_le_bytes(value) + add;
                    memory.write(pointer(0) + 4 * i, &sum.to_le_bytes())?;
                }
            }
            "count" => {
                let mut value = [0; 4];
                memory.read(self.counter, &mut value)?;
                let next = u32::from_le_bytes(value).wrapping_add(1);
                memory.write(self.counter, &next.to_le_bytes())?;
            }
            "dynamic_shared" => memory.write(pointer(0), &launch.dynamic_shared.to_le_bytes())?,
            "wide" => {}
            _ => return Err(LaunchError::new(Failure::Launch, "the kernel trapped")),
        }
        Ok(Counts::from([("threads", threads)]))
    }
}

/// The bytes of a parameter; the driver packs as many as the kernel declares.
fn bytes<const N: usize>(parameters: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&parameters[at..at + N]);
    value
}
