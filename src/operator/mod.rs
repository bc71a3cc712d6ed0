//! The controller of TrainingJobs: observe → decide → build → apply → write status, one file each.
//!
//! [`crate::job::steer`] decides, without knowing the API server; here is what it is told and what
//! becomes of its decisions. The status is written before anything is made, and everything that is
//! made is named by it: a controller that is killed between the two goes on from the status.

mod agents;
mod announce;
mod apply;
mod build;
mod conditions;
mod context;
mod controller;
mod ended;
mod faults;
mod gather;
mod holdings;
mod housekeeping;
mod leader;
mod leases;
mod ledger;
mod locked;
mod metrics;
mod observe;
mod planning;
mod reconcile;
mod silence;
mod status;
mod stores;
mod unreadable;

pub use build::{AGENT_PORT, JOB_LABEL, SEAT_LABEL, run_directory};
pub use controller::{Options, run};
