//! A host's work on one generation: it starts its ranks, hears them, and ends them. The agent in a pod and the local
//! launcher use it; they differ in where the generation comes from and in who decides.

mod oom_killer;
mod program;
mod ranks;
mod silence;
mod stall;
mod tail;

pub use oom_killer::OomKills;
pub use program::{Become, KEY_VARIABLE, Program, Start, become_program};
pub use ranks::{Event, News, Ranks, last_lines};
pub use silence::Silence;
pub use stall::ExternalStall;
pub use tail::{Tail, new_output, shown};
