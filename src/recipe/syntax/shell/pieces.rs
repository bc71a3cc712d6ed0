//! A word in pieces: its characters without quotes and escapes, and its expansions.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.2.

use std::ops::Range;

/// The quotes around a character.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quote {
    None,
    /// A backslash before it.
    Escape,
    Single,
    Double,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Piece {
    /// A character at a byte offset.
    Char(char, usize, Quote),
    /// An expansion. `node`: its index among the parser's; `None`: the parser has none here.
    Expansion {
        at: Range<usize>,
        node: Option<usize>,
        quoted: bool,
    },
}

/// The pieces of a word. `expansions`: the ranges of its expansions, in order. `None`: a quote is not closed,
/// or a character cannot be part of one word, so the range is no word.
pub(super) fn pieces(
    text: &str,
    word: Range<usize>,
    expansions: &[Range<usize>],
) -> Option<Vec<Piece>> {
    let mut pieces = Vec::new();
    let mut quote = Quote::None;
    let mut next = 0;
    let mut at = word.start;
    while let Some(c) = text[at..word.end].chars().next() {
        while expansions.get(next).is_some_and(|range| range.start < at) {
            next += 1;
        }
        if quote != Quote::Single
            && let Some(range) = expansions.get(next).filter(|range| range.start == at)
        {
            // The name of `$NAME` continues after a continued line, which the parser does not see.
            let bare = !text[at..range.end].ends_with(['}', ')', ']', '`']);
            if bare && text[range.end..].starts_with("\\\n") {
                return None;
            }
            pieces.push(Piece::Expansion {
                at: range.clone(),
                node: Some(next),
                quoted: quote == Quote::Double,
            });
            at = range.end;
            continue;
        }
        let rest = &text[at + c.len_utf8()..word.end];
        let mut put = |c, quote| pieces.push(Piece::Char(c, at, quote));
        let mut bytes = c.len_utf8();
        match (quote, c) {
            (Quote::None, '\'') => quote = Quote::Single,
            (Quote::Single, '\'') | (Quote::Double, '"') => quote = Quote::None,
            (Quote::None, '"') => quote = Quote::Double,
            // `$'…'` and `$"…"` are not read.
            (Quote::None, '$') if rest.starts_with(['"', '\'']) => return None,
            (Quote::Single, c) => put(c, Quote::Single),
            (_, '\\') => {
                let escaped = rest.chars().next()?;
                let removed = quote == Quote::None || matches!(escaped, '"' | '\\' | '$' | '`');
                if escaped == '\n' {
                    bytes += 1;
                } else if removed {
                    bytes += escaped.len_utf8();
                    pieces.push(Piece::Char(escaped, at, Quote::Escape));
                } else {
                    put('\\', quote);
                }
            }
            (_, '$' | '`') if c == '`' || begins_expansion(rest) => {
                pieces.push(Piece::Expansion {
                    at: at..word.end,
                    node: None,
                    quoted: quote == Quote::Double,
                });
                return Some(pieces);
            }
            (Quote::None, ' ' | '\t' | '\n' | ';' | '&' | '|' | '<' | '>' | '(' | ')') => {
                return None;
            }
            (_, c) => put(c, quote),
        }
        at += bytes;
    }
    (quote == Quote::None).then_some(pieces)
}

/// Whether an expansion may follow a `$`.
pub(super) fn begins_expansion(rest: &str) -> bool {
    let special = |c: char| c.is_ascii_alphanumeric() || "_{([@*#?$!-".contains(c);
    rest.starts_with(special)
}
