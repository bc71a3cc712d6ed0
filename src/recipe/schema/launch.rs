//! The options of launchers, and the settings of `accelerate launch`, as the user wrote them.

use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::shell::word::Word;
use crate::recipe::syntax::source::Span;

/// An option of a launcher.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Opt {
    /// The name, with `_` for every `-`.
    pub name: String,
    pub at: Span,
    /// The value; `None` for switches.
    pub value: Option<Word>,
}

impl Opt {
    /// The option with its dashes.
    pub fn written(&self) -> String {
        let dashes = if self.name.len() == 1 { "-" } else { "--" };
        format!("{dashes}{}", self.name)
    }
}

/// The options and the config of one `accelerate launch`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AccelerateLaunch {
    /// The options from left to right.
    pub(crate) options: Vec<Opt>,
    pub(crate) config: Option<Node>,
    /// The distributed type that the options and the config choose.
    pub(crate) kind: String,
    /// accelerate passes the sizes of the parallelism axes on.
    pub(crate) passes_sizes: bool,
}
