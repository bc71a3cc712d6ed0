//! The program's allocator: the system's, and words for an allocation that fails while the memory for what a stranger
//! wrote is limited ([`super::memory`]).

use std::alloc::{GlobalAlloc, Layout, System};

use super::memory;

/// Ends the program with its exit code for a file that cannot be used, where an allocation would abort it.
pub struct Reporting;

/// `EXIT_USAGE` of the command line.
const UNUSABLE: i32 = 2;

fn reported(pointer: *mut u8) -> *mut u8 {
    if pointer.is_null() && memory::is_limited() {
        memory::say_exhausted();
        std::process::exit(UNUSABLE);
    }
    pointer
}

// SAFETY: every call is passed on to the system's allocator with the caller's promises.
unsafe impl GlobalAlloc for Reporting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        reported(unsafe { System.alloc(layout) })
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        reported(unsafe { System.alloc_zeroed(layout) })
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        reported(unsafe { System.realloc(pointer, layout, size) })
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}
