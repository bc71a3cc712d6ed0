//! `poll(2)` with [`Duration`]s; it tolerates signals.

use std::io;
use std::time::Duration;

use rustix::event::{PollFd, Timespec, poll};

/// Waits until one of `fds` is ready or `limit` has passed; a signal ends the wait early.
pub(super) fn wait(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<()> {
    let limit = limit.map(|limit| Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    match poll(fds, limit.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
