//! The agent of a pod starts the ranks of its generations ([`crate::host`]), reports their state to the controller,
//! and stops them when the pod is cut off.

mod bucket_run;
mod event_log;
mod external;
mod follow;
mod input;
mod later;
mod metrics;
mod mirror;
mod peers;
mod pod;
mod preparation;
mod retention;
mod serve;
mod volume;

pub use event_log::EventLog;
pub use follow::follow;
pub use input::{Answer, Identity, Input, Membership};
pub use peers::Peers;
pub use pod::PodAgent;
use preparation::Preparation;
pub use serve::{Service, listen, serve, serve_metrics};
