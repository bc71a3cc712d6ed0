//! Helpers that every module may use and that import no other module.

pub mod durable;
pub mod format;
pub mod http;
pub mod lock;
pub mod random;
pub mod suggest;
pub mod time;
