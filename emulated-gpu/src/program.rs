//! Joins the driver and the PTX interpreter.

use crate::launch::{
    Counts, Failure, Global, GlobalMemory, Kernel, Launch, LaunchError, LoadError, Parameter,
    Program,
};
use crate::ptx::{ExecutionError, Fault, Limits, Module, RunError};

/// Registers of a thread of a kernel that states no limit; the interpreter allocates none.
const REGISTERS: u32 = 32;

/// A module of PTX as the driver sees it.
struct Ptx {
    module: Module,
    kernels: Vec<Kernel>,
    globals: Vec<Global>,
}

pub fn load(text: &str) -> Result<Box<dyn Program>, LoadError> {
    Ptx::load(text)
}

impl Program for Ptx {
    fn load(text: &str) -> Result<Box<dyn Program>, LoadError> {
        let module = Module::load(text).map_err(|error| LoadError::Invalid(error.to_string()))?;
        let kernels = module.kernels().iter().map(|kernel| Kernel {
            name: kernel.name.clone(),
            parameters: kernel
                .parameters
                .iter()
                .map(|parameter| Parameter {
                    offset: parameter.offset as u32,
                    bytes: parameter.bytes as u32,
                })
                .collect(),
            static_shared: kernel.static_shared as u32,
            local: kernel.local_bytes as u32,
            registers: kernel.max_registers.unwrap_or(REGISTERS),
            max_threads: kernel.max_threads.map_or(1024, |threads| threads as u32),
        });
        let globals = module.variables().iter().map(|variable| Global {
            name: variable.name.clone(),
            initial: variable.initial.clone(),
        });
        Ok(Box::new(Ptx {
            kernels: kernels.collect(),
            globals: globals.collect(),
            module,
        }))
    }

    fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    fn globals(&self) -> &[Global] {
        &self.globals
    }

    fn place(&mut self, global: usize, address: u64) {
        self.module.place(global, address);
    }

    fn run(
        &self,
        kernel: &str,
        launch: &Launch<'_>,
        memory: &mut dyn GlobalMemory,
    ) -> Result<Counts, LaunchError> {
        let ran = self.module.run(kernel, launch, &Limits::default(), memory);
        let counters = ran.map_err(|error| LaunchError::new(failure(&error), error))?;
        Ok(Counts::from([
            ("instructions", counters.instructions.total()),
            ("mma", counters.mma),
            ("bank_conflicts", counters.bank_conflicts),
            ("global_requests", counters.global_requests),
            ("idle_blocks", counters.idle_blocks),
            ("global_sectors", counters.global_sectors),
            ("global_sectors_ideal", counters.global_sectors_ideal),
        ]))
    }
}

fn failure(error: &RunError) -> Failure {
    let RunError::Execution(error) = error else {
        return Failure::Resources;
    };
    let ExecutionError { fault, .. } = &**error;
    match fault {
        Fault::Global(fault) => (*fault).into(),
        Fault::OutOfWindow { .. } => Failure::Address,
        Fault::Misaligned { .. } => Failure::Misaligned,
        _ => Failure::Launch,
    }
}
