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
    let present = find(config, &key);
    let nothing = present.is_none_or(is_nothing);
    let did_you_mean = |or: &str| match meant(config, &key) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => or.to_owned(),
    };
    let value = value.as_ref();
    let (message, help) = match kind {
        _ if package.is_some() || key.contains('/') => (
            format!("there is no config group `{key}`"),
            "only config groups take a package `@…` and `/`".to_owned(),
        ),
        Kind::Change if present.is_none() => {
            let adds = format!("`+{key}=…` would add a new key");
            let help = match meant(config, &key) {
                Some(meant) => format!("did you mean `{meant}`? {adds}"),
                None => format!("{adds}, which nothing upstream reads"),
            };
            (format!("there is no key `{key}` to change"), help)
        }
        Kind::Add if !nothing && value.is_some_and(|v| v.text().is_some()) => (
            format!("`+{key}` adds a new key, but `{key}` exists already"),
            format!("write `{key}=…` to change it"),
        ),
        Kind::Delete if nothing => (
            format!("there is no key `{key}` to remove"),
            did_you_mean("remove the override"),
        ),
        Kind::Delete if value.is_some_and(|v| !present.is_some_and(|p| same(p, v))) => (
            format!("`{key}` has another value than the one to remove"),
            format!("write `~{key}` to remove any value"),
        ),
        Kind::Delete => return config.remove_path(&key),
        Kind::Change | Kind::Add | Kind::Force => {
            let Some(value) = value else { return };
            if present.is_none() && !is_optional(&key, program) {
                let help = did_you_mean("remove it, or check its spelling");
                let message =
                    format!("`{key}` is a new key, which nothing upstream reads: it has no effect");
                reading.warning("unknown-override", Some(span), message, help);
            }
            if put(config, &key, span, value.clone()) {
                return;
            }
            (
                format!("`{key}` is outside of a list"),
                "set the whole list, `KEY=[…]`".to_owned(),
            )
        }
    };
    reading.error("unknown-override", Some(span), message, help);
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
