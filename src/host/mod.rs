//! A host's work on one generation: it starts its ranks, hears them, and ends them. The agent in a pod and the local
//! launcher use it; they differ in where the generation comes from and in who decides.

mod generation;
mod oom_killer;
mod program;
mod ranks;
mod silence;
mod stall;
mod tail;

pub use generation::{Followed, HostGeneration};
pub use oom_killer::OomKills;
pub use program::{Become, KEY_VARIABLE, Start, become_program};
pub use ranks::{Event, News, last_lines};
pub use tail::shown;
