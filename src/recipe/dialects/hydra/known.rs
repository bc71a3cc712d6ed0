//! The keys of a config, for suggestions about an unknown one.

use crate::recipe::syntax::node::{Node, joined};
use crate::util::suggest::nearest;

/// The child of a node: under a key, or at a position of a list.
pub(super) fn child<'n>(node: &'n Node, key: &str) -> Option<&'n Node> {
    match node.items() {
        Some(items) => items.get(key.parse::<usize>().ok()?),
        None => node.get(key),
    }
}

/// The node at a key with dots and list positions.
pub(super) fn find<'n>(root: &'n Node, key: &str) -> Option<&'n Node> {
    key.split('.').try_fold(root, child)
}

/// The existing key that `key` most likely means.
pub(super) fn meant(root: &Node, key: &str) -> Option<String> {
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
