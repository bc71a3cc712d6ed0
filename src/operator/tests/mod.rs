//! Tests of the steps of a reconciliation, with an API server in memory. The scheduler and the kubelets start all
//! pods at once, and agents answer what a test says.

mod chart;
mod events;
mod failures;
mod forged;
mod in_place;
mod ledger;
mod lifecycle;
mod memory;
mod names;
mod observe;
mod planning;
mod restored;
mod stalls;

pub use lifecycle::checkpoint;
