//! The syntax tree of a script, by tree-sitter-bash, and how certainly each node runs. The grammar accepts more
//! than bash; what it skips between two nodes is checked.

use std::ops::{ControlFlow, Range};
use std::time::{Duration, Instant};

use tree_sitter::{Node, ParseOptions, ParseState, Parser, Tree};

use super::text::Text;

/// The most operators `|`, `(` and `<` in a script. After a syntax error the parser's time grows with the square
/// of their number; real scripts have dozens.
const MAX_OPERATORS: usize = 1000;

/// The longest time for a script. Real scripts take milliseconds.
const LONGEST: Duration = Duration::from_secs(2);

/// How certainly and how often a node runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Exactly once, whatever the exit status of others, in the script's own shell.
    pub certain: bool,
    /// In a loop or a function: later than its text, or more than once.
    pub repeated: bool,
    /// In an inline script.
    pub nested: bool,
}

/// The place of a script's first command.
pub(super) const START: Place = Place {
    certain: true,
    repeated: false,
    nested: false,
};

pub(super) fn children(node: Node<'_>) -> impl Iterator<Item = Node<'_>> + Clone {
    let mut cursor = node.walk();
    let children: Vec<Node<'_>> = node.children(&mut cursor).collect();
    children.into_iter()
}

/// The tree of a script, or the range of the first syntax error.
pub(super) fn parse(text: &str) -> Result<Tree, Range<usize>> {
    if let Some((at, operator)) = text.match_indices(['|', '(', '<']).nth(MAX_OPERATORS) {
        return Err(at..at + operator.len());
    }
    let mut parser = Parser::new();
    let deadline = Instant::now() + LONGEST;
    let mut in_time = |_: &ParseState| {
        if Instant::now() < deadline {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    };
    let options = ParseOptions::new().progress_callback(&mut in_time);
    let mut rest = |at: usize, _| text.as_bytes().get(at..).unwrap_or_default();
    let tree = parser
        .set_language(&tree_sitter_bash::LANGUAGE.into())
        .ok()
        .and_then(|()| parser.parse_with_options(&mut rest, None, Some(options)));
    let tree = tree.ok_or(0..0)?;
    let mut node = tree.root_node();
    if !node.has_error() {
        return Ok(tree);
    }
    while !node.is_error() && !node.is_missing() {
        let Some(inner) = children(node).find(|child| child.has_error() || child.is_missing())
        else {
            break;
        };
        node = inner;
    }
    Err(node.byte_range())
}

/// The places of a node's children.
pub(super) fn places<'t>(text: &Text, node: Node<'t>, place: Place) -> Vec<(Node<'t>, Place)> {
    let children: Vec<Node<'t>> = children(node).collect();
    let kind = node.kind();
    // `{ …; }` runs in the same shell, once.
    let is_group = kind == "compound_statement" && text.text[node.byte_range()].starts_with('{');
    let transparent = [
        "program",
        "variable_assignments",
        "redirected_statement",
        "declaration_command",
        "string",
        "concatenation",
    ];
    let repeats = [
        "for_statement",
        "c_style_for_statement",
        "while_statement",
        "function_definition",
    ];
    // The parser takes assignments on the lines above a command for its prefixes.
    let ends = |pair: &[Node<'t>]| ends_line(&text.text[pair[0].end_byte()..pair[1].start_byte()]);
    let above = children.windows(2).rposition(ends);
    let above = above.filter(|_| kind == "command");
    let mut found = Vec::with_capacity(children.len());
    for (index, child) in children.iter().enumerate() {
        let beside = children
            .get(index + 1)
            .is_some_and(|next| next.kind() == "&");
        // Its words are expanded once; an assignment before it is only for the command.
        let is_word = kind == "command" && child.kind() != "variable_assignment";
        let keeps = transparent.contains(&kind)
            || is_group
            || is_word
            || above.is_some_and(|last| index <= last);
        let mut inside = place;
        inside.certain &= keeps && !beside;
        inside.repeated |= repeats.contains(&kind);
        found.push((*child, inside));
    }
    found
}

/// Whether the text between two words ends the command.
pub(super) fn ends_line(gap: &str) -> bool {
    gap.replace("\\\n", "").contains('\n')
}

/// The parser skips `\ ` between two nodes, which is a word to bash.
pub(super) fn check_gap(text: &Text, gap: Range<usize>, quoted: bool) -> Result<(), Range<usize>> {
    let skipped = text.text[gap.start.min(gap.end)..gap.end].replace("\\\n", "");
    if skipped.contains('\\') && !quoted {
        Err(gap)
    } else {
        Ok(())
    }
}
