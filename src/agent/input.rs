//! What an agent's loop reacts to.

use std::net::IpAddr;

use super::{Event, Membership};

/// An input of the loop.
#[derive(Debug)]
pub enum Input {
    /// The job, as just received from the API server.
    Job(Box<Membership>),
    /// The API server has no such job, or another one of its name.
    Gone,
    /// The controller has requested this agent's state.
    Polled,
    /// The agent of another pod has answered.
    Peer(Answer),
    /// A rank reported or ended.
    Rank(Box<Event>),
    /// SIGTERM: the pod is about to be deleted.
    Terminate,
}

/// The answer of another pod's agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Answer {
    /// Address of the agent.
    pub host: IpAddr,
    /// The newest generation whose ranks it has started.
    pub generation: u64,
}
