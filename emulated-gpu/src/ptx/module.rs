//! A loaded module.

use super::decode::{self, Code};
use super::parser::{self, Variable};
use crate::launch::Dim;

/// PTX that cannot be loaded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}: `{text}`")]
pub struct LoadError {
    pub line: u32,
    /// The line.
    pub text: String,
    pub problem: String,
}

impl LoadError {
    pub(super) fn new(module: &str, line: u32, problem: impl Into<String>) -> Self {
        Self {
            line,
            text: text_of(module, line),
            problem: problem.into(),
        }
    }
}

fn text_of(module: &str, line: u32) -> String {
    let text = module.lines().nth(line.saturating_sub(1) as usize);
    text.unwrap_or_default().trim().to_owned()
}

/// A parameter's place in the parameter space, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parameter {
    pub offset: u64,
    pub bytes: u64,
}

#[derive(Debug, Clone)]
pub struct Kernel {
    pub name: String,
    pub parameters: Vec<Parameter>,
    /// Bytes of the parameter space.
    pub parameter_bytes: u64,
    /// Bytes of shared memory without those that the launch adds.
    pub static_shared: u64,
    /// `.maxntid` and `.reqntid`: an upper bound on the threads of a block.
    pub max_threads: Option<u64>,
    /// `.reqntid`.
    pub required_threads: Option<Dim>,
    /// `.maxnreg`.
    pub max_registers: Option<u32>,
    /// Bytes of local memory of a thread.
    pub local_bytes: u64,
    pub(super) code: Code,
}

/// A module: kernels and variables.
#[derive(Debug, Clone)]
pub struct Module {
    text: String,
    kernels: Vec<Kernel>,
    variables: Vec<Variable>,
    /// Device addresses of the variables.
    addresses: Vec<Option<u64>>,
}

impl Module {
    /// Parses and decodes a module. NVRTC's PTX may end with a zero byte.
    pub fn load(text: &str) -> Result<Self, LoadError> {
        let source = parser::parse(text)?;
        let kernels = source.entries.iter();
        let kernels = kernels.map(|entry| decode::kernel(text, &source, entry));
        Ok(Self {
            kernels: kernels.collect::<Result<_, _>>()?,
            addresses: vec![None; source.variables.len()],
            variables: source.variables,
            text: text.to_owned(),
        })
    }

    pub fn kernels(&self) -> &[Kernel] {
        &self.kernels
    }

    pub fn kernel(&self, name: &str) -> Option<&Kernel> {
        self.kernels.iter().find(|kernel| kernel.name == name)
    }

    /// Variables in global and constant memory. The caller allocates and fills each of them in global memory
    /// and calls [`Module::place`] before a launch of a kernel that uses it.
    pub fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// Sets the device address of a variable.
    pub fn place(&mut self, variable: usize, address: u64) {
        if let Some(place) = self.addresses.get_mut(variable) {
            *place = Some(address);
        }
    }

    pub(super) fn address(&self, variable: usize) -> Option<u64> {
        self.addresses.get(variable).copied().flatten()
    }

    /// A line of the module.
    pub(super) fn line(&self, line: u32) -> String {
        text_of(&self.text, line)
    }
}
