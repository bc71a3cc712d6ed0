//! Processes that this one started.

use std::io;
use std::process::{Child, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

/// The time between two looks.
const LOOK: Duration = Duration::from_millis(50);

/// Waits for the end of a process; `None`: it runs on after `limit`.
pub fn ended_within(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let deadline = Instant::now() + limit;
    loop {
        match child.try_wait()? {
            Some(ended) => return Ok(Some(ended)),
            None if Instant::now() > deadline => return Ok(None),
            None => thread::sleep(LOOK),
        }
    }
}
