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
    /// An assignment in front of a command.
    pub prefix: bool,
    /// In a loop or a function: later than its text, or more than once.
    pub repeated: bool,
    pub context: Context,
}

/// The place of a script's first command.
pub(super) const START: Place = Place {
    certain: true,
    prefix: false,
    repeated: false,
    context: Context {
        nested: false,
        in_function: false,
    },
};

pub(super) fn children(node: Node<'_>) -> impl Iterator<Item = Node<'_>> + Clone {
    let mut cursor = node.walk();
    let children: Vec<Node<'_>> = node.children(&mut cursor).collect();
    children.into_iter()
}

/// The children of a node, each with the name of its field.
pub(super) fn fields(node: Node<'_>) -> Vec<(Option<&'static str>, Node<'_>)> {
    let mut cursor = node.walk();
    let mut fields = Vec::new();
    let mut more = cursor.goto_first_child();
    while more {
        fields.push((cursor.field_name(), cursor.node()));
        more = cursor.goto_next_sibling();
    }
    fields
}

/// The tree of a script, or the range of the first syntax error.
pub(super) fn parse(text: &str) -> Result<Tree, Range<usize>> {
    if let Some((at, operator)) = text.match_indices(['|', '(', '<']).nth(MAX_OPERATORS) {
        return Err(at..at + operator.len());
    }
    let mut parser = Parser::new();
    let deadline = Instant::now() + LONGEST;
    let mut in_time = |_: &ParseState| match Instant::now() < deadline {
        true => ControlFlow::Continue(()),
        false => ControlFlow::Break(()),
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

/// Where a word is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Context {
    /// In an inline script.
    pub nested: bool,
    /// In a function, which runs later than its text.
    pub in_function: bool,
}

/// The places of a node's children.
pub(super) fn places<'t>(text: &Text, node: Node<'t>, place: Place) -> Vec<(Node<'t>, Place)> {
    let children: Vec<Node<'t>> = children(node).collect();
    let loops = ["for_statement", "c_style_for_statement", "while_statement"];
    let kind = node.kind();
    let transparent = [
        "program",
        "variable_assignments",
        "redirected_statement",
        "declaration_command",
    ];
    let in_loop = loops.contains(&kind);
    let function = kind == "function_definition";
    let mut found = Vec::with_capacity(children.len());
    for (index, child) in children.iter().enumerate() {
        let next = children.get(index + 1);
        let beside = next.is_some_and(|next| next.kind() == "&");
        // The parser takes assignments on the line above a command for its prefixes.
        let gap = next.map_or("", |next| &text.text[child.end_byte()..next.start_byte()]);
        let alone = kind == "command" && ends_line(gap);
        let mut inside = place;
        inside.certain &= !beside && (transparent.contains(&kind) || alone);
        inside.prefix = kind == "command" && !alone;
        inside.repeated |= in_loop || function;
        inside.context.in_function |= function;
        found.push((*child, inside));
    }
    // `A=1 B=2`, on the line above: all of its assignments are alone.
    if let Some(last) = found
        .iter()
        .rposition(|(_, inside)| kind == "command" && !inside.prefix)
    {
        for (_, inside) in &mut found[..last] {
            (inside.certain, inside.prefix) = (place.certain, false);
        }
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
    match skipped.contains('\\') && !quoted {
        true => Err(gap),
        false => Ok(()),
    }
}
