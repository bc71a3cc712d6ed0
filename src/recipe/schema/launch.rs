//! The settings of `accelerate launch`, as the user wrote them.

use super::tree::Given;
use crate::recipe::syntax::node::Node;

/// The options and the config of one `accelerate launch`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Launch {
    /// The options from left to right, each under its name with `_`. A switch has no value.
    pub options: Vec<Given<Option<String>>>,
    /// The config's file.
    pub config: Option<Node>,
    /// The distributed type that the options and the config choose.
    pub kind: String,
    /// accelerate passes the sizes of the parallelism axes on.
    pub passes_sizes: bool,
}
