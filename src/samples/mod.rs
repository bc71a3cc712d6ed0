//! The sample consumed at each position, as a pure function of (seed, consumed count), and the ledger that
//! proves it. This module does not depend on the number of ranks.
//!
//! A *position* counts the samples consumed since the run began, over all epochs. [`Order`] maps a position
//! to a sample of the data, [`micro_batches`] maps each micro-batch of a step to positions, and [`ledger`] records the
//! samples fed.

pub mod deal;
pub mod digest;
pub mod ledger;
pub mod order;

pub use deal::micro_batches;
pub use digest::Digest;
pub use ledger::{Fault, Ledger, Proof, Row, verify};
pub use order::{Order, OrderError};
