//! The controller of TrainingJobs: observe → decide → build → apply → write status, one file each.
//!
//! [`crate::job::steer`] decides without access to the API server. This module collects its input
//! and applies its decisions. The status is written before any object is created, and it names all
//! objects: a controller that is killed between the two steps continues from the status.

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

pub use build::{AGENT_PORT, JOB_LABEL, SLOT_LABEL, run_directory};
pub use controller::{Options, run};
