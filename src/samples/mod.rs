//! Which sample is consumed when, as a pure function of (seed, consumed count), and the ledger
//! that proves it. Nothing here knows how many ranks there are.
//!
//! A *position* counts the samples consumed since the run began, over all epochs. [`Order`] says
//! which sample of the data stands at a position, [`Deal`] which positions each micro-batch of a
//! step holds, and [`ledger`] what was really fed.

pub mod deal;
pub mod digest;
pub mod ledger;
pub mod order;

pub use deal::Deal;
pub use digest::Digest;
pub use ledger::{Fault, Ledger, Proof, Row, verify};
pub use order::{At, Order, OrderError};
