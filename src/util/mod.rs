//! Helpers that every module may use and that import no other module.

#[cfg(test)]
pub mod allocations;
pub mod allocator;
pub mod causes;
pub mod child;
pub mod durable;
pub mod format;
pub mod hex128;
pub mod http;
pub mod input;
pub mod key;
pub mod large_stack;
pub mod lock;
pub mod memory;
pub mod model_keys;
pub mod openmetrics;
pub mod port;
pub mod priority;
pub mod random;
pub mod serve;
pub mod shards;
pub mod size;
pub mod stderr;
pub mod suggest;
#[cfg(test)]
pub mod testing;
pub mod time;
pub mod tls;
pub mod tree;
pub mod wrap;
