//! The list of supported dialects.

use std::path::Path;
use std::str::FromStr;

use super::accelerate::Accelerate;
use super::deepspeed::Deepspeed;
use super::dpo::Dpo;
use super::halos::Halos;
use super::handbook::Handbook;
use super::native::Native;
use super::transformers::Transformers;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::reader::Reader;
use crate::recipe::syntax::node::Node;
use crate::util::suggest;

/// The readers of all supported dialects. Among equally confident readers the first wins.
pub const READERS: &[&dyn Reader] = &[
    &Native,
    &Transformers,
    &Handbook,
    &Halos,
    &Dpo,
    &Accelerate,
    &Deepspeed,
];

/// The reader of a dialect; every dialect has one.
pub(crate) fn of(dialect: Dialect) -> Option<&'static dyn Reader> {
    READERS.iter().copied().find(|r| r.dialect() == dialect)
}

/// Whether a reader takes a file given alone. An empty file is taken: the command holds everything.
pub(crate) fn detects(root: &Node, path: &Path, origin: &Origin) -> bool {
    let mut readers = READERS.iter();
    root.entries().is_some_and(<[_]>::is_empty)
        || readers.any(|reader| reader.detect(root, path, origin).is_some())
}

/// Whether a file given alone is read as arguments of a `Trainer`, TRL's or transformers'. An empty file is:
/// the command holds everything.
pub(crate) fn is_trainers(root: &Node, path: &Path, origin: &Origin) -> bool {
    let trainers: [&dyn Reader; 2] = [&Transformers, &Handbook];
    let mut trainers = trainers.into_iter();
    root.entries().is_some_and(<[_]>::is_empty)
        || trainers.any(|reader| reader.detect(root, path, origin).is_some())
}

impl FromStr for Dialect {
    type Err = suggest::UnknownName;

    fn from_str(name: &str) -> Result<Self, suggest::UnknownName> {
        suggest::by_name(name, READERS.iter().map(|reader| reader.dialect()))
    }
}
