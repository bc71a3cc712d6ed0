//! The agent: starts the ranks of a generation on this host, passes orders and reports on, sees
//! how they end. The same one under the local launcher and in a pod; only where the generation
//! record comes from differs.

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
