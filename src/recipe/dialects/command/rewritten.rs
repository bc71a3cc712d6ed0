//! Checks that writing a plan's numbers into a text with commands changed nothing else. An added word may
//! become another option's value or an option of the launcher, so the changed text is parsed again.

use std::path::{Path, PathBuf};

use super::{Command, parse};
use crate::recipe::dialects::handbook;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::diagnostic::Severity;
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::source::FileId;

/// Whether `after` starts the same program as `before` with the same arguments, except that the keys in
/// `numbers` have the given values.
pub(crate) fn only_numbers_changed(
    path: &Path,
    before: &str,
    after: &str,
    numbers: &[(String, u64)],
) -> bool {
    let read = |text: &str| {
        let mut diagnostics = Vec::new();
        let is_switch = handbook::is_switch;
        let command = parse(path, text, FileId(0), is_switch, &mut diagnostics)?;
        let errors = diagnostics.iter().filter(|d| d.severity == Severity::Error);
        (errors.count() == 0).then_some(command)
    };
    let (Some(before), Some(after)) = (read(before), read(after)) else {
        return false;
    };
    let has = |(key, number): &(String, u64)| {
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
    let path = |file: &Option<Given<PathBuf>>| file.as_ref().map(|file| file.value.clone());
    numbers.iter().all(has)
        && rest(&before).same_value(&rest(&after))
        && path(&before.script) == path(&after.script)
        && path(&before.config) == path(&after.config)
}
