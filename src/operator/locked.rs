//! What several looks share, behind locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// The value behind a lock, also after a thread that held it panicked.
pub fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
