//! Checkpoints: what a generation leaves behind and the next one starts from.
//!
//! A checkpoint is a directory `gen-<generation>/step-<step>` under the run's, in Hugging Face's
//! layout, with the optimiser's states, the training loop's state and a manifest beside the
//! weights (`docs/checkpoints.md`). Three promises:
//!
//! - It appears whole or not at all: it is written under a `.partial` name, fsynced, and renamed.
//! - It is verified by checksum when it is read, and a generation's record pins the checksum.
//! - What any world wrote, any other world reads: its files follow the model's units, and the
//!   number of ranks only decides who writes which.
//!
//! Every rank hands its units to a [`Writer`] and goes on training; when all of them are on the
//! disk, the ranks meet in [`finish_together`] and the coordinator makes a checkpoint of them.

mod agreement;
mod checksum;
mod commit;
mod error;
mod history;
mod manifest;
mod names;
mod reader;
mod shape;
mod unit_file;
mod verified;
mod writer;

#[cfg(test)]
mod tests;

pub use agreement::finish_together;
pub use checksum::{Checksum, FileEntry, NoChecksum};
pub use commit::{Contents, abandon, commit};
pub use error::CheckpointError;
pub use history::{Committed, History, latest, list, retain_in_run, sweep};
pub use manifest::{Manifest, Part};
pub use names::{Target, is_ours};
pub use reader::Checkpoint;
pub use shape::{TensorShape, UnitShape};
pub use verified::Damage;
pub use writer::Writer;
