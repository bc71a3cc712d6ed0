//! `srun` before a launcher: Evenkeel starts the ranks on this machine itself, so only its counts matter.

use super::known::SRUN;
use super::options::{Given, options};
use crate::recipe::syntax::shell::word::Word;
use crate::recipe::syntax::words::Words;

/// Options that count machines or tasks. One of each is what Evenkeel starts instead.
const COUNTS: Words = Words("N nodes n ntasks ntasks_per_node");

/// An option of `srun` that evenkeel refuses.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::recipe::dialects::command) enum Refused {
    /// It starts more than one launcher.
    Count(String),
    /// It has no counterpart.
    Unknown(String),
}

/// The words after `srun` and its options. Words without `srun` stay.
pub(in crate::recipe::dialects::command) fn without(words: &[Word]) -> Result<&[Word], Refused> {
    let after = match words.split_first() {
        Some((first, after)) if first.text.rsplit('/').next() == Some("srun") => after,
        _ => return Ok(words),
    };
    let Given {
        options,
        rest,
        refused,
        ..
    } = options(after, &SRUN);
    if refused.is_some() {
        let option = rest.first().map(|word| word.text.clone());
        return Err(Refused::Unknown(option.unwrap_or_default()));
    }
    for option in options.iter().filter(|option| COUNTS.has(&option.name)) {
        let count = option
            .value
            .as_ref()
            .map_or("", |value| value.text.as_str());
        if count != "1" {
            let dashes = if option.name.len() == 1 { "-" } else { "--" };
            let name = option.name.replace('_', "-");
            return Err(Refused::Count(format!("{dashes}{name} {count}")));
        }
    }
    Ok(rest)
}
