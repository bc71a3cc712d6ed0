//! Whether a text with commands still says the same once numbers were written into it. What is written
//! behind a word may become its value, and a word that looked like nothing may be an option of whatever
//! starts the program: reading what was written is the only proof that nothing else changed.

use std::path::Path;

use super::{Command, parse};
use crate::recipe::diagnostic::Severity;
use crate::recipe::handbook;
use crate::recipe::node::{Node, Value};
use crate::recipe::source::FileId;

/// Whether `after` starts the same program as `before` with the same arguments, but for those in
/// `numbers`, which have these values.
pub(in crate::recipe) fn only_numbers_changed(
    path: &Path,
    before: &str,
    after: &str,
    numbers: &[(String, u64)],
) -> bool {
    let read = |text: &str| {
        let mut told = Vec::new();
        let command = parse(path, text, FileId(0), handbook::is_switch, &mut told)?;
        let errors = told.iter().filter(|d| d.severity == Severity::Error);
        (errors.count() == 0).then_some(command)
    };
    let (Some(before), Some(after)) = (read(before), read(after)) else {
        return false;
    };
    let said = |(key, number): &(String, u64)| {
        let text = after.arguments.get(key).and_then(Node::text);
        text.and_then(|text| text.parse().ok()) == Some(*number)
    };
    let rest = |command: &Command| {
        let mut arguments = command.arguments.clone();
        if let Value::Mapping(entries) = &mut arguments.value {
            entries.retain(|entry| !numbers.iter().any(|(key, _)| *key == entry.name));
        }
        arguments
    };
    let script = |command: &Command| command.script.as_ref().map(|script| script.value.clone());
    numbers.iter().all(said)
        && rest(&before).same_value(&rest(&after))
        && script(&before) == script(&after)
        && before.config == after.config
}
