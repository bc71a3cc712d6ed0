//! Data: from the files that a recipe names to micro-batches of token ids.
//!
//! The launcher calls [`prepare()`] once, before any rank starts. It reads, tokenises and packs the sources
//! and writes them as an indexed token store with a manifest, completely or not at all. Ranks open the store
//! with [`Dataset::train`] and read samples by index, so this module does not define the order of samples. The
//! data is never held in memory. The synthetic language needs no files: the same [`Dataset`] generates its
//! samples on demand.
//!
//! `docs/data.md` is the user's page.

mod build;
mod chat;
mod chosen;
mod conversion;
mod dataset;
mod decoded;
mod encode;
mod error;
mod files;
mod fit;
mod kind;
mod manifest;
mod names;
mod pack;
mod preference;
mod preflight;
mod prepare;
mod prompt;
mod publish;
mod read;
mod record;
mod remote;
mod replies;
mod repository;
mod request;
mod sources;
mod synthetic;
mod token;
mod tokenizer;

pub use dataset::{Collated, Dataset, Sample};
pub use error::DataError;
pub use files::{is_model_on_hub, is_on_hub};
pub use kind::Kind;
pub use manifest::Manifest;
pub use preflight::{few_rows, find_problems, needs_tokenizer};
pub use prepare::{Prepared, prepare};
pub use prompt::Prompter;
pub use publish::draft;
pub use remote::directory as cache;
pub use repository::{Card, Held, Unchosen, choose, held};
pub use request::{Phase, PrepareRequest, Progress, Stopped};
pub use synthetic::Language;
pub use tokenizer::{BYTE, Tokenizer};

/// Refuses `tokens` ids of `what` if the model has embeddings for fewer.
pub fn check_vocabulary(what: &str, tokens: u64, vocab_size: u64) -> Result<(), DataError> {
    if tokens <= vocab_size {
        return Ok(());
    }
    Err(DataError::Vocabulary {
        problem: format!("{what} has {tokens} token ids, the model's vocab_size is {vocab_size}"),
        help: format!("use the model's own tokenizer, or set vocab_size to at least {tokens}"),
    })
}
