//! The agent starts the ranks of a generation on this host, passes control messages to them,
//! forwards their reports and records how they end. The local launcher and pods use the same agent;
//! only the source of the generation record differs.

mod become_program;
mod checkpoints;
mod foreign;
mod identity;
mod membership;
mod oom_killer;
mod oom_words;
mod own_call;
mod peers;
mod pod;
mod preparation;
mod program;
mod ranks;
mod retention;
mod serve;
pub mod silence;
mod tail;
mod volume;

pub use become_program::{Become, become_program};
pub use foreign::{Call, Foreign, ForeignError};
pub use identity::Identity;
pub use membership::{Membership, follow};
pub use oom_killer::OomKills;
pub use peers::{Answer, Peers};
pub use pod::{Input, PodAgent};
use preparation::Preparation;
pub use program::{Program, Start};
pub use ranks::{Event, Ranks, last_lines};
use retention::Retention;
pub use serve::{listen, serve};
pub use silence::Silence;
pub use tail::{Tail, shown};
