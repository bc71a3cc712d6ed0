//! The keys of one file, merged over those of others.
//!
//! Source: OmegaConf 2.3, `basecontainer.py` (`_map_merge`): mappings merge, lists and scalars
//! replace, `???` replaces nothing.

use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};

/// The keys of one file, with their package.
pub(super) struct Layer {
    /// The package of the keys, dotted.
    pub package: String,
    pub node: Node,
}

impl Layer {
    /// Merges the keys over a config.
    pub fn lay(self, config: &mut Node) {
        let Layer { package, node } = self;
        let mut at = config;
        for part in package.split('.').filter(|part| !part.is_empty()) {
            if at.get(part).is_none_or(|below| below.entries().is_none()) {
                at.set(part, node.span, Node::mapping(node.span));
            }
            let Some(below) = at.get_mut(part) else {
                return;
            };
            at = below;
        }
        merge(at, node);
    }
}

/// Merges a tree over another like OmegaConf.
pub(super) fn merge(into: &mut Node, over: Node) {
    if over.resolve(Schema::OmegaConf) == Some(Resolved::Missing) && is_given(into) {
        return;
    }
    match (&mut into.value, over.value) {
        (Value::Mapping(own), Value::Mapping(entries)) => {
            for entry in entries {
                match own.iter_mut().find(|e| e.name == entry.name) {
                    Some(present) => {
                        present.name_span = entry.name_span;
                        merge(&mut present.value, entry.value);
                    }
                    None => own.push(entry),
                }
            }
        }
        (_, value) => {
            into.value = value;
            into.span = over.span;
        }
    }
}

fn is_given(node: &Node) -> bool {
    node.resolve(Schema::OmegaConf) != Some(Resolved::Missing)
}
