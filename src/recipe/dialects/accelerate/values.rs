//! Typed values of an accelerate config; accelerate does not convert the values of the YAML reader.

use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};

/// An integer; any other type is reported.
pub(super) fn int(root: &Node, key: &str, reading: &mut Reading) -> Option<Given<i128>> {
    let node = root.get(key)?;
    match node.resolve(Schema::PyYaml) {
        Some(Resolved::Int(value)) => Some(Given::new(key, value, node.span)),
        Some(Resolved::Null) => None,
        _ => {
            let found = node.text().unwrap_or(node.kind());
            reading.error(
                "wrong-type",
                Some(node.span),
                format!("`{key}` takes a whole number, this is `{found}`"),
                "give a whole number without quotes",
            );
            None
        }
    }
}
