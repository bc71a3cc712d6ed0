//! Data: from the files a recipe names to micro-batches of token ids.
//!
//! The launcher calls [`prepare()`] once, before any rank starts: sources are read, tokenised,
//! packed and written as an indexed token store, whole or not at all, with a manifest. Ranks open
//! it with [`Dataset::open`] and read samples by index, so the order of samples is nobody's
//! business here. Nothing holds the data in memory. The synthetic language needs no files: its
//! samples are made when they are asked for, behind the same [`Dataset`].
//!
//! `docs/data.md` is the user's page.

mod build;
mod chat;
mod dataset;
mod encode;
mod error;
mod files;
mod hold_out;
mod look;
mod manifest;
mod pack;
mod prepare;
mod publish;
mod random;
mod read;
mod record;
mod request;
mod selection;
mod sources;
mod store;
mod synthetic;
mod tokenizer;
mod writer;

pub use dataset::{Collated, Dataset, Part, Sample};
pub use error::{DataError, Place, Unit};
pub use files::is_hub_model;
pub use look::{About, Finding, look};
pub use manifest::{FileRecord, Manifest, PartRecord, Skipped, SourceRecord};
pub use prepare::{Prepared, prepare};
pub use publish::draft;
pub use request::{Phase, PrepareRequest, Progress, Stopped};
pub use synthetic::Language;
pub use tokenizer::Tokenizer;

/// Refuses `tokens` ids of `what` when the model has an embedding for fewer.
pub fn check_vocabulary(what: &str, tokens: u64, vocab_size: u64) -> Result<(), DataError> {
    if tokens <= vocab_size {
        return Ok(());
    }
    Err(DataError::Vocabulary {
        problem: format!("{what} has {tokens} token ids, the model's vocab_size is {vocab_size}"),
        help: format!("use the model's own tokenizer, or set vocab_size to at least {tokens}"),
    })
}
