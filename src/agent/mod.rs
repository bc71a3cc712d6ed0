//! The agent starts the ranks of a generation on this host, passes control messages to them,
//! forwards their reports and records how they end. The local launcher and pods use the same agent;
//! only the source of the generation record differs.

mod bucket_run;
mod event_log;
mod follow;
mod input;
mod later;
mod metrics;
mod mirror;
mod oom_killer;
mod peers;
mod pod;
mod preparation;
mod ranks;
mod retention;
mod serve;
pub mod silence;
mod stall;
mod tail;
mod volume;

pub use event_log::EventLog;
pub use follow::follow;
pub use input::{Answer, Identity, Input, Membership};
pub use oom_killer::OomKills;
pub use peers::Peers;
pub use pod::PodAgent;
use preparation::Preparation;
pub use ranks::{Event, News, Ranks, last_lines};
use retention::Retention;
pub use serve::{Service, listen, serve, serve_metrics};
pub use silence::Silence;
pub use stall::ExternalStall;
pub use tail::{Tail, new_output, shown};
