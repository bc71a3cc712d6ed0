//! Priorities of threads.

/// Lets other threads go first from now on. On Linux the nice value belongs to the thread.
pub fn lower() {
    // A failure only costs the others some speed.
    let _ = rustix::process::setpriority_process(None, 10);
}
