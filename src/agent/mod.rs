//! The agent: starts the ranks of a generation on this host, passes orders and reports on, sees
//! how they end. The same one under the local launcher and in a pod; only where the generation
//! record comes from differs.

mod oom_killer;
mod ranks;

pub use oom_killer::OomKills;
pub use ranks::{Ending, Event, Ranks, Start};
