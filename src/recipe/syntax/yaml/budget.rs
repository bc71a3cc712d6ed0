//! The limits of a file: its nesting, and its size after alias
//! expansion.

use crate::recipe::syntax::node::{Node, Value};

/// The deepest nesting of lists and mappings.
pub const MAX_DEPTH: usize = 64;
/// The most nodes after alias expansion.
pub const MAX_NODES: usize = 100_000;
/// The most bytes of scalars and keys after alias expansion.
pub const MAX_TEXT: usize = 8 << 20;

/// The size of a subtree, for comparison with the budgets.
#[derive(Clone, Copy, Default)]
pub(crate) struct Weight {
    pub nodes: usize,
    pub text: usize,
    /// Levels of nesting, 1 for a scalar.
    pub height: usize,
}

impl Weight {
    /// The weight of one node with a text of some bytes.
    pub fn leaf(text: usize) -> Weight {
        Weight {
            nodes: 1,
            text,
            height: 1,
        }
    }

    /// The sum with more nodes and text; `None` beyond the budgets.
    pub fn with(self, more: Weight) -> Option<Weight> {
        let sum = Weight {
            nodes: self.nodes + more.nodes,
            text: self.text + more.text,
            ..self
        };
        (sum.nodes <= MAX_NODES && sum.text <= MAX_TEXT).then_some(sum)
    }
}

/// The weight of a whole subtree.
pub(crate) fn weigh(node: &Node) -> Weight {
    let mut weight = Weight::leaf(0);
    let mut add = |child: Weight| {
        weight.nodes += child.nodes;
        weight.text += child.text;
        weight.height = weight.height.max(child.height + 1);
    };
    match &node.value {
        Value::Scalar(scalar) => return Weight::leaf(scalar.text.len()),
        Value::Sequence(items) => items.iter().map(weigh).for_each(add),
        Value::Mapping(entries) => {
            for entry in entries {
                let mut child = weigh(&entry.value);
                child.nodes += 1;
                child.text += entry.name.len();
                add(child);
            }
        }
    }
    weight
}
