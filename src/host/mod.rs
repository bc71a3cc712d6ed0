//! A host's work on one generation: it starts its ranks, hears them, and ends them. The agent in a pod and the launcher
//! use it; they differ in where the generation comes from and in who decides. A launcher may have the ranks started on
//! other hosts (`remote`, `serve`).

mod generation;
mod gpus;
mod oom_killer;
pub mod own_disk;
mod program;
mod ranks;
mod remote;
mod serve;
mod silence;
mod stall;
mod tail;
mod wire;

pub use generation::{Followed, HostGeneration};
pub use oom_killer::OomKills;
pub use program::{Become, HOST_VARIABLE, KEY_VARIABLE, Start, become_program};
pub use ranks::{Event, News, events_into, last_lines};
pub use remote::{Remote, Share, Unreached};
pub use serve::{Host, Input, read};
pub use tail::shown;
pub use wire::{Facts, LOST, ToHost};
