//! What C passes: pointers to results, to texts and to memory of the host.
//!
//! The types of this module can only come from C, whose contract is that a pointer is null or valid for the
//! call. Memory of an asynchronous copy stays valid until the copy is done.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::status::Status;

/// Runs a function that C calls. A panic must not unwind into C, so it is the code `panicked`.
pub fn guard(panicked: c_int, call: impl FnOnce() -> c_int) -> c_int {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or(panicked)
}

/// A pointer to a value that the function writes.
#[repr(transparent)]
pub struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Writes the value; fails for null.
    pub fn put(self, value: T) -> Result<(), Status> {
        if self.0.is_null() {
            return Err(Status::InvalidValue);
        }
        self.put_if_wanted(value);
        Ok(())
    }

    /// Writes the value unless the pointer is null.
    pub fn put_if_wanted(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: C passes null or a valid pointer to a `T`, which needs no drop. The pointer may be
            // unaligned, as a field of a packed buffer is.
            unsafe { self.0.write_unaligned(value) }
        }
    }

    /// Writes at most `limit` values from the pointer on.
    pub fn put_all(self, values: Vec<T>, limit: usize) -> Result<(), Status> {
        if self.0.is_null() {
            return Err(Status::InvalidValue);
        }
        for (index, value) in values.into_iter().take(limit).enumerate() {
            // SAFETY: C passes an array of at least `limit` values.
            unsafe { self.0.add(index).write_unaligned(value) }
        }
        Ok(())
    }

    /// The value that is there, for structs whose version the caller sets.
    pub fn get(&self) -> Result<T, Status>
    where
        T: Copy,
    {
        In(self.0.cast_const()).get()
    }
}

impl Out<c_char> {
    /// Writes a text and its final zero; fails if the buffer of `bytes` is too short.
    pub fn put_text(self, text: &str, bytes: usize) -> Result<(), Status> {
        if text.len() + 1 > bytes {
            return Err(Status::InvalidValue);
        }
        let text = text.bytes().chain([0]);
        self.put_all(text.map(|byte| byte as c_char).collect(), bytes)
    }
}

/// A pointer to a value that the function reads.
#[repr(transparent)]
pub struct In<T>(*const T);

impl<T: Copy> In<T> {
    pub fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub fn get(&self) -> Result<T, Status> {
        self.at(0)
    }

    /// A value of an array.
    pub fn at(&self, index: usize) -> Result<T, Status> {
        if self.0.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: C passes a valid pointer to as many values as the function's contract says.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

impl In<c_char> {
    /// The text, if it is UTF-8.
    pub fn text(&self) -> Result<&str, Status> {
        if self.0.is_null() {
            return Err(Status::InvalidValue);
        }
        // SAFETY: C passes a text that ends with zero and lives as long as the call.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str().map_err(|_| Status::InvalidValue)
    }
}

/// A range of the host's memory.
#[derive(Debug, Clone, Copy)]
pub struct HostRange {
    pub address: u64,
    pub bytes: u64,
}

impl HostRange {
    pub fn new(pointer: *const c_void, bytes: usize) -> Result<HostRange, Status> {
        if pointer.is_null() && bytes > 0 {
            return Err(Status::InvalidValue);
        }
        Ok(HostRange {
            address: pointer as u64,
            bytes: bytes as u64,
        })
    }

    pub fn read(self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes as usize];
        // SAFETY: C keeps the range valid and unchanged until the copy from it is done.
        unsafe {
            std::ptr::copy_nonoverlapping(
                self.address as *const u8,
                bytes.as_mut_ptr(),
                bytes.len(),
            )
        }
        bytes
    }

    /// Writes bytes; the range must have as many.
    pub fn write(self, bytes: &[u8]) {
        let count = bytes.len().min(self.bytes as usize);
        // SAFETY: C keeps the range valid, and does not use it, until the copy to it is done.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.address as *mut u8, count) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_code() {
        assert_eq!(guard(999, || panic!("inside")), 999);
        assert_eq!(guard(999, || 0), 0);
    }

    #[test]
    fn null_is_an_error() {
        assert_eq!(
            Out::<u32>(std::ptr::null_mut()).put(1),
            Err(Status::InvalidValue)
        );
        assert_eq!(In::<u32>(std::ptr::null()).get(), Err(Status::InvalidValue));
        assert!(HostRange::new(std::ptr::null(), 1).is_err());
        assert!(HostRange::new(std::ptr::null(), 0).is_ok());
    }
}
