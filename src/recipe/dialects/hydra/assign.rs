//! Overrides of values: `key=value` changes an existing key, `+` adds a new one, `++` does
//! either, `~` removes one.
//!
//! Upstream silently adds every key of `++` and `+`, so a typo there has no effect; this module
//! reports it.
//!
//! Source: Hydra 1.3, `_internal/config_loader_impl.py` (`_apply_overrides_to_config`).

use crate::recipe::schema::overrides::put;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::{Node, joined};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::util::suggest::nearest;

use super::Program;
use super::grammar::{Kind, Override};

/// Applies an override of a value.
pub(super) fn assign(config: &mut Node, line: Override, program: &Program, reading: &mut Reading) {
    let Override {
        kind,
        key,
        value,
        span,
    } = line;
    let present = config.get_path(&key);
    // `+` may replace null and `???`.
    let nothing = present.is_none_or(|present| {
        let resolved = present.resolve(Schema::OmegaConf);
        matches!(resolved, Some(Resolved::Null | Resolved::Missing))
    });
    let did_you_mean = |or: &str| match meant(config, &key) {
        Some(meant) => format!("did you mean `{meant}`?"),
        None => or.to_owned(),
    };
    let is_text = value.as_ref().is_some_and(|value| value.text().is_some());
    let (message, help) = match (kind, value) {
        _ if key.contains('/') => (
            format!("there is no config group `{key}`"),
            "only config groups have a `/`".to_owned(),
        ),
        (Kind::Change, _) if present.is_none() => {
            let adds = format!("`+{key}=…` would add a new key");
            let help = match meant(config, &key) {
                Some(meant) => format!("did you mean `{meant}`? {adds}"),
                None => format!("{adds}, which nothing upstream reads"),
            };
            (format!("there is no key `{key}` to change"), help)
        }
        (Kind::Add, _) if !nothing && is_text => (
            format!("`+{key}` adds a new key, but `{key}` exists already"),
            format!("write `{key}=…` to change it"),
        ),
        (Kind::Delete, _) if nothing => (
            format!("there is no key `{key}` to remove"),
            did_you_mean("remove the override"),
        ),
        (_, None) => return config.remove_path(&key),
        (_, Some(value)) => {
            let is_new = present.is_none() && !is_optional(&key, program);
            let help = is_new.then(|| did_you_mean("remove it, or check its spelling"));
            if let Err(problem) = put(config, &key, span, value) {
                problem
            } else {
                if let Some(help) = help {
                    let message = format!(
                        "`{key}` is a new key, which nothing upstream reads: it has no effect"
                    );
                    reading.warning("unknown-override", Some(span), message, help);
                }
                return;
            }
        }
    };
    reading.error("unknown-override", Some(span), message, help);
}

fn is_optional(key: &str, program: &Program) -> bool {
    program.optional.iter().any(|optional| {
        key.strip_prefix(optional)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    })
}

/// The existing key that `key` most likely means.
fn meant(root: &Node, key: &str) -> Option<String> {
    let mut known = Vec::new();
    list(root, "", &mut known);
    // Upstream's README writes `config.` before keys of the config.
    if let Some(rest) = key.strip_prefix("config.")
        && known.iter().any(|known| known == rest)
    {
        return Some(rest.to_owned());
    }
    let words: Vec<&str> = known.iter().map(String::as_str).collect();
    let near = nearest(key, &words).map(str::to_owned);
    near.or_else(|| {
        let last = key.rsplit('.').next()?;
        let mut same = words
            .iter()
            .filter(|known| known.rsplit('.').next() == Some(last));
        let first = same.next()?;
        same.next().is_none().then(|| (*first).to_owned())
    })
}

fn list(node: &Node, path: &str, found: &mut Vec<String>) {
    for entry in node.entries().unwrap_or_default() {
        let key = joined(path, &entry.name);
        list(&entry.value, &key, found);
        found.push(key);
    }
}
