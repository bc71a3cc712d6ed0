//! Helpers that every module may use and that import no other module.

pub mod durable;
pub mod format;
pub mod http;
pub mod input;
pub mod lock;
pub mod memory;
pub mod random;
pub mod suggest;
pub mod time;
