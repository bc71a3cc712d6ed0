//! Heartbeats of a rank, sent to its agent by a separate thread: while it waits for the others, who cannot
//! watch it before they have connected, and as long as it trains alone. Later reports come after the last one.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::every_second::EverySecond;
use super::orders::Reports;
use crate::lifecycle::protocol::{Report, exit};
use crate::util::stderr;

/// Of a rank that waits for the others. Ends the process when `agent_is_gone`: there is no state to
/// commit yet.
pub fn while_connecting(reports: Reports, agent_is_gone: Arc<AtomicBool>) -> EverySecond {
    EverySecond::start(move || {
        if agent_is_gone.load(Ordering::Relaxed) {
            stderr::line(format_args!("the agent left before the ranks had met"));
            std::process::exit(exit::DRAINED.into());
        }
        reports.send(&Report::Connecting);
    })
}

/// Of the only rank of a world.
pub fn alone(reports: Reports) -> EverySecond {
    EverySecond::start(move || reports.send(&Report::Alive))
}
