//! Checkpoints: the state that one generation saves and the next one starts from.
//!
//! A checkpoint is a directory `gen-<generation>/step-<step>` in the run directory. It has Hugging Face's
//! layout, with the optimiser's states, the training loop's state and a manifest beside the weights
//! (`docs/checkpoints.md`). It guarantees three properties:
//!
//! - It appears completely or not at all: it is written under a `.partial` name, fsynced, and renamed.
//! - Reading verifies it by checksum, and a generation's record holds a reference with the checksum.
//! - Any world can read a checkpoint of any other world: its files follow the model's units, and the
//!   number of ranks only decides which rank writes which file.
//!
//! Every rank hands its units to a [`Writer`] and continues to train. When all of them are on disk, the ranks
//! meet in [`finish_together`] and the coordinator commits the checkpoint.

mod agreement;
pub mod bucket_copy;
mod checksum;
mod commit;
mod error;
mod history;
pub mod lineage;
mod manifest;
mod names;
mod reader;
mod retention;
pub mod tensor_file;
mod unit_file;
mod verified;
mod writer;

#[cfg(test)]
mod tests;

pub use agreement::finish_together;
pub use checksum::{Checksum, FileEntry};
pub use commit::{Contents, abandon, commit};
pub use error::CheckpointError;
pub use history::{History, latest, list, newest, remove_copies, retain_in_run, sweep};
pub use manifest::{Manifest, Part};
pub use names::{ADAPTER_CONFIG, ADAPTER_MODEL, Committed, STATE, Target, is_evenkeel_checkpoint};
pub use reader::Checkpoint;
pub use retention::Retention;
pub use unit_file::{TensorShape, UnitShape};
pub use verified::Damage;
pub use writer::Writer;
