//! Executes PTX: parses a module, decodes its kernels and runs them warp by warp.
//!
//! A module is decoded completely when it is loaded, so a form that is not implemented is an error of the
//! load. `run` describes how blocks and warps are ordered; `warp` how lanes diverge and reconverge.

mod access;
mod barrier;
mod convert;
mod copies;
mod counters;
mod decode;
mod exchange;
mod execute;
mod float;
mod instruction;
mod lexer;
mod matrix;
mod module;
mod parser;
mod run;
mod shared;
mod warp;
mod wgmma;

pub use counters::{ByClass, Class, Counters};
pub use module::{Kernel, LoadError, Module, Parameter};
pub use parser::Variable;
pub use run::{ExecutionError, Fault, LaunchError, Limits, RunError};
