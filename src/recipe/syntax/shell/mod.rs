//! Shell commands as text: words, quoting, variables and arithmetic. Nothing here knows a trainer.

pub(crate) mod arithmetic;
pub(crate) mod assign;
pub(crate) mod expansion;
pub(crate) mod inner;
pub(crate) mod scan;
pub(crate) mod variables;
pub(crate) mod word;

use crate::recipe::syntax::source::FileId;
use scan::Form;

pub(crate) use inner::{is_script_option, is_shell};
pub(crate) use word::join;

/// The commands of a text and their words, split as a shell does, without expanding variables.
pub(crate) fn commands(text: &str) -> Vec<Vec<String>> {
    let commands = scan::commands(text, FileId(0), Form::Script).into_iter();
    commands
        .map(|line| line.words.into_iter().map(|word| word.text).collect())
        .collect()
}
