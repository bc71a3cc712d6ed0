//! The controller of TrainingJobs: plan → observe → decide → build the next status → write it → apply it.
//!
//! [`crate::lifecycle::placement`] decides without access to the API server. This module collects its input
//! and applies its decisions. The status is written before any object is created, and it names all
//! objects: a controller that is killed between the two steps continues from the status.

mod agent_answer;
mod agents;
mod apply;
mod build;
mod companions;
mod conditions;
mod context;
mod controller;
mod decide;
mod error;
mod events;
mod faults;
mod in_place;
mod keys;
mod leader;
mod leases;
mod ledger;
mod liveness;
mod metrics;
mod observe;
mod outcome;
mod ownership;
mod pace;
mod planning;
mod pod_index;
mod recipe_source;
mod recipes;
mod reconcile;
mod reservations;
mod status;
mod stores;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod turns;
mod unreadable;
mod vital;

pub use build::{AGENT_PORT, JOB_LABEL, SLOT_LABEL, run_directory};
pub use controller::{Options, run};
// For tests that measure its memory.
pub use stores::jobs as watched_jobs;
