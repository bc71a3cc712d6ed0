//! Conflicting keys of a mapping: duplicates, and keys merged from an anchor.

use std::collections::HashSet;

use super::problem::{Problem, problem};
use crate::recipe::syntax::diagnostic::{Diagnostic, Severity};
use crate::recipe::syntax::node::{Entry, Node, Value};

/// A duplicate key: upstream loaders silently take the last, so a contradiction is refused.
pub(super) fn duplicate(first: &Entry, second: &Entry) -> Diagnostic {
    let same = first.value.same_value(&second.value);
    Diagnostic {
        rule: "duplicate-key".to_owned(),
        severity: if same {
            Severity::Warning
        } else {
            Severity::Error
        },
        message: format!(
            "`{}` is given twice, first on line {}{}",
            second.name,
            first.name_span.line,
            if same { ", with the same value" } else { "" }
        ),
        help: "remove one of them: loaders silently take the last".to_owned(),
        span: Some(second.name_span),
    }
}

/// Merges `<<` values below a mapping's own keys; the first mapping of a `<<` list wins.
pub(super) fn merge(own: Vec<Entry>, merges: Vec<Node>) -> Result<Vec<Entry>, Problem> {
    if merges.is_empty() {
        return Ok(own);
    }
    let mut names: HashSet<String> = own.iter().map(|e| e.name.clone()).collect();
    let mut entries = own;
    // Of several `<<` keys the last wins, as in PyYAML.
    for node in merges.into_iter().rev() {
        let sources = match node.value {
            Value::Sequence(items) => items,
            _ => vec![node],
        };
        for source in sources {
            let (kind, span) = (source.kind(), source.span);
            let Value::Mapping(merged) = source.value else {
                return Err(problem(
                    span,
                    format!("`<<` merges mappings, this is {kind}"),
                    "name an anchor of a mapping: `<<: *name`",
                ));
            };
            for entry in merged {
                if names.insert(entry.name.clone()) {
                    entries.push(entry);
                }
            }
        }
    }
    Ok(entries)
}
