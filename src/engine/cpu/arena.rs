//! Memory of one rank: every large buffer counts against the rank's limit before it is allocated.
//!
//! With a limit, running out of memory is an ordinary error, known before the first step, and testable
//! without exhausting the machine.

use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::engine::EngineError;

/// A rank's memory; clones share the counters.
#[derive(Debug, Clone)]
pub struct Arena(Arc<Counters>);

#[derive(Debug)]
struct Counters {
    limit: u64,
    used: AtomicU64,
    peak: AtomicU64,
}

impl Arena {
    /// An arena of at most `limit` bytes; `None` means the machine's physical memory.
    pub fn new(limit: Option<u64>) -> Arena {
        Arena(Arc::new(Counters {
            limit: limit.unwrap_or_else(physical_memory),
            used: AtomicU64::new(0),
            peak: AtomicU64::new(0),
        }))
    }

    /// A zeroed buffer of `len` elements; `what` names it in the error.
    pub fn buffer(&self, len: usize, what: &str) -> Result<Buffer, EngineError> {
        self.zeroed(len, what)
    }

    /// As [`Arena::buffer`], of integers.
    pub fn integers(&self, len: usize, what: &str) -> Result<Buffer<i64>, EngineError> {
        self.zeroed(len, what)
    }

    fn zeroed<T: Clone + Default>(&self, len: usize, what: &str) -> Result<Buffer<T>, EngineError> {
        let bytes = len as u64 * size_of::<T>() as u64;
        let used = self.used();
        let needed = used.saturating_add(bytes);
        let refused = |limit| EngineError::OutOfMemory {
            needed,
            limit,
            what: what.to_owned(),
        };
        if needed > self.0.limit {
            return Err(refused(self.0.limit));
        }
        let mut data = Vec::new();
        // The system has a lower limit (`ulimit -v`, a full machine): it allows no more than what is used.
        data.try_reserve_exact(len).map_err(|_| refused(used))?;
        data.resize(len, T::default());
        let used = self.0.used.fetch_add(bytes, Relaxed) + bytes;
        self.0.peak.fetch_max(used, Relaxed);
        Ok(Buffer {
            data,
            bytes,
            arena: self.clone(),
        })
    }

    pub fn used(&self) -> u64 {
        self.0.used.load(Relaxed)
    }

    /// Most bytes allocated so far.
    pub fn peak(&self) -> u64 {
        self.0.peak.load(Relaxed)
    }
}

/// A counted vector; dropping it releases the bytes.
#[derive(Debug)]
pub struct Buffer<T = f32> {
    data: Vec<T>,
    bytes: u64,
    arena: Arena,
}

impl<T: Clone + Default> Buffer<T> {
    /// Lends the elements to a collective. They stay counted; the buffer is empty until [`Buffer::restore`].
    pub fn lend(&mut self) -> Vec<T> {
        std::mem::take(&mut self.data)
    }

    /// Puts lent elements back.
    pub fn restore(&mut self, data: Vec<T>) {
        self.data = data;
    }

    /// Replaces elements that a failed collective did not return by zeros.
    pub fn replace_lost(&mut self) {
        let len = (self.bytes / size_of::<T>() as u64) as usize;
        if self.data.len() != len {
            self.data = vec![T::default(); len];
        }
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.data
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        self.arena.0.used.fetch_sub(self.bytes, Relaxed);
    }
}

/// Physical memory of the machine, in bytes.
fn physical_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_over_the_limit_is_refused_with_its_size() {
        let arena = Arena::new(Some(1000));
        let held = arena.buffer(200, "weights").unwrap();
        let error = arena.buffer(51, "gradients").unwrap_err();
        insta::assert_snapshot!(error, @"out of memory: 1004 bytes needed for gradients, 1000 allowed per rank");
        assert_eq!((arena.used(), arena.peak()), (800, 800));
        drop(held);
        assert!(arena.buffer(250, "gradients").is_ok());
        assert_eq!((arena.used(), arena.peak()), (0, 1000));
    }

    #[test]
    fn a_size_beyond_the_machine_is_an_error() {
        assert!(matches!(
            Arena::new(None).buffer(1 << 50, "logits"),
            Err(EngineError::OutOfMemory { .. })
        ));
    }

    #[test]
    fn a_size_that_the_system_refuses_names_what_it_allows() {
        let arena = Arena::new(Some(u64::MAX));
        let _held = arena.buffer(10, "weights").unwrap();
        let error = arena.buffer(1 << 58, "logits").unwrap_err();
        insta::assert_snapshot!(error, @"out of memory: 1152921504606847016 bytes needed for logits, 40 allowed per rank");
    }

    #[test]
    fn lent_elements_stay_counted() {
        let arena = Arena::new(Some(1000));
        let mut buffer = arena.buffer(10, "gradients").unwrap();
        let lent = buffer.lend();
        assert_eq!(arena.used(), 40);
        buffer.restore(lent);
        assert_eq!(buffer.len(), 10);
    }
}
