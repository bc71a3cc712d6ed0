//! The list of supported dialects.

use std::str::FromStr;

use super::accelerate::Accelerate;
use super::deepspeed::Deepspeed;
use super::dpo::Dpo;
use super::halos::Halos;
use super::handbook::Handbook;
use super::native::Native;
use super::transformers::Transformers;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::reader::Reader;
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

impl FromStr for Dialect {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let mut read = READERS.iter().map(|r| r.dialect());
        read.find(|d| d.name() == name)
            .ok_or_else(|| suggest::did_you_mean(name, READERS.iter().map(|r| r.dialect().name())))
    }
}
