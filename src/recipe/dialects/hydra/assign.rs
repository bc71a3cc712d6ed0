//! Overrides of values: `key=value` changes an existing key, `+` adds a new one, `++` does
//! either, `~` removes one.
//!
//! Upstream silently adds every key of `++` and `+`, so a typo there has no effect; this module
//! reports it.
//!
//! Source: Hydra 1.3, `_internal/config_loader_impl.py` (`_apply_overrides_to_config`).

use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::cut;

use super::Program;
use super::grammar::{Kind, Override};
use super::known::{find, meant};
use super::layer::merge;

/// Applies an override of a value.
pub(super) fn assign(config: &mut Node, line: Override, program: &Program, reading: &mut Reading) {
    let Override {
        kind,
        key,
        package,
        value,
        span,
    } = line;
    let mut refuse = |message: String, help: String| {
        reading.error("unknown-override", Some(span), message, help);
    };
    if package.is_some() || key.contains('/') {
        let message = format!("there is no config group `{key}`");
        refuse(
            message,
            "only config groups take a package `@…` and `/`".to_owned(),
        );
        return;
    }
    let present = find(config, &key);
    let nothing = present.is_none_or(is_nothing);
    match kind {
        Kind::Change if present.is_none() => {
            let help = match meant(config, &key) {
                Some(meant) => format!("did you mean `{meant}`? `+{key}=…` would add a new key"),
                None => format!("`+{key}=…` would add a new key, which nothing upstream reads"),
            };
            refuse(format!("there is no key `{key}` to change"), help);
        }
        Kind::Add if !nothing && value.as_ref().is_some_and(|v| v.text().is_some()) => {
            refuse(
                format!("`+{key}` adds a new key, but `{key}` exists already"),
                format!("write `{key}=…` to change it"),
            );
        }
        Kind::Delete if nothing => {
            let help = match meant(config, &key) {
                Some(meant) => format!("did you mean `{meant}`?"),
                None => "remove the override".to_owned(),
            };
            refuse(format!("there is no key `{key}` to remove"), help);
        }
        Kind::Delete => {
            let differs = value.filter(|value| !present.is_some_and(|p| same(p, value)));
            match differs {
                Some(_) => refuse(
                    format!("`{key}` has another value than the one to remove"),
                    format!("write `~{key}` to remove any value"),
                ),
                None => config.remove_path(&key),
            }
        }
        Kind::Change | Kind::Add | Kind::Force => {
            let Some(value) = value else { return };
            if present.is_none() && !is_optional(&key, program) {
                let help = match meant(config, &key) {
                    Some(meant) => format!("did you mean `{meant}`?"),
                    None => "remove it, or check its spelling".to_owned(),
                };
                let message =
                    format!("`{key}` is a new key, which nothing upstream reads: it has no effect");
                reading.warning("unknown-override", Some(span), message, help);
            }
            if !put(config, &key, span, value) {
                let message = format!("`{key}` is outside of a list");
                let help = "set the whole list, `KEY=[…]`";
                reading.error("unknown-override", Some(span), message, help);
            }
        }
    }
}

/// Applies an override without findings, to a config that lacks whole groups.
pub(super) fn quietly(config: &mut Node, line: Override) {
    match (line.kind, line.value) {
        (Kind::Delete, _) => config.remove_path(&line.key),
        (_, Some(value)) => {
            put(config, &line.key, line.span, value);
        }
        (_, None) => {}
    }
}

/// Null and `???`, which `+` may replace.
fn is_nothing(node: &Node) -> bool {
    matches!(
        node.resolve(Schema::OmegaConf),
        Some(Resolved::Null | Resolved::Missing)
    )
}

fn same(a: &Node, b: &Node) -> bool {
    match (a.resolve(Schema::OmegaConf), b.resolve(Schema::OmegaConf)) {
        (Some(a), Some(b)) => a == b,
        (None, None) => a.same_value(b),
        _ => false,
    }
}

fn is_optional(key: &str, program: &Program) -> bool {
    program.optional.iter().any(|optional| {
        key.strip_prefix(optional)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

/// Sets a key and creates its parent mappings. Returns false if the
/// key cannot exist.
fn put(config: &mut Node, key: &str, span: Span, value: Node) -> bool {
    // Like upstream, a mapping replaces a value that is not one.
    if config.text().is_some() {
        config.value = Value::Mapping(Vec::new());
    }
    let (head, rest) = cut(key, '.');
    let below = match &mut config.value {
        Value::Scalar(_) => return false,
        Value::Sequence(items) => {
            let index = head.parse::<usize>().ok();
            match index.and_then(|index| items.get_mut(index)) {
                Some(item) => item,
                None => return false,
            }
        }
        Value::Mapping(entries) => match entries.iter().position(|e| e.name == head) {
            Some(at) => {
                entries[at].name_span = span;
                &mut entries[at].value
            }
            None if rest.is_none() => {
                config.set(head, span, value);
                return true;
            }
            None => {
                config.set(head, span, Node::mapping(value.span));
                return put(config, key, span, value);
            }
        },
    };
    match rest {
        Some(rest) => put(below, rest, span, value),
        None if value.resolve(Schema::OmegaConf) == Some(Resolved::Missing) => {
            *below = value;
            true
        }
        None => {
            merge(below, value);
            true
        }
    }
}
