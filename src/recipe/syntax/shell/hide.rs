//! What bash accepts and tree-sitter-bash 0.25 does not: comments that end in a backslash or are within backquotes or
//! between the elements of an array, escaped blanks as words, quotes in the default or the pattern of a parameter, and a
//! redirection on the line after a pipeline of three commands. They are hidden from the parser; every byte keeps its
//! offset.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.2 (quoting), 2.3 (comments), 2.6.2 (parameter expansion); the results
//! of bash 5.2.

use std::ops::Range;

use super::text::Text;

/// A text for the parser in place of one that it refuses.
pub(super) struct Hidden {
    /// The script without its comments.
    pub text: Text,
    /// What the parser reads of it.
    pub parsed: String,
}

/// What a character may be a part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Within {
    /// Commands up to a `)`.
    Parentheses,
    /// Commands up to a backquote.
    Backquotes,
    DoubleQuotes,
    /// `${…}`
    Parameter,
}

/// The text without what the parser refuses. `None`: there is nothing of this kind in it.
pub(super) fn hide(text: &Text) -> Option<Hidden> {
    let source = text.text.as_str();
    let Found {
        comments,
        words,
        pipelines,
    } = find(source);
    if comments.is_empty() && words.is_empty() && pipelines.is_empty() {
        return None;
    }
    let text = text.blanked(&comments);
    let mut parsed = text.text.clone();
    for word in words {
        let hidden = "x".repeat(word.len());
        parsed.replace_range(word, &hidden);
    }
    for end in pipelines {
        parsed.replace_range(end..end + 1, ";");
    }
    Some(Hidden { text, parsed })
}

#[derive(Default)]
struct Found {
    /// Comments, and backquotes around nothing else.
    comments: Vec<Range<usize>>,
    /// Parts of words with characters that the parser takes for its own syntax.
    words: Vec<Range<usize>>,
    /// The line ends after pipelines of three or more commands.
    pipelines: Vec<usize>,
}

fn find(source: &str) -> Found {
    let mut found = Found::default();
    let mut within: Vec<(Within, usize)> = Vec::new();
    let mut documents: Vec<Delimiter> = Vec::new();
    let mut at = 0;
    // Blanks and operators, after which a word begins.
    let mut begins = true;
    // The pipes of the command, outside of brackets and quotes.
    let mut pipes = 0;
    while let Some(c) = source[at..].chars().next() {
        let rest = &source[at..];
        let top = within.last().map(|(top, _)| *top);
        let of_commands = matches!(
            top,
            None | Some(Within::Parentheses) | Some(Within::Backquotes)
        );
        let mut bytes = c.len_utf8();
        let begun = std::mem::replace(&mut begins, false);
        match c {
            '\\' => {
                let next = rest[1..].chars().next();
                bytes += next.map_or(0, char::len_utf8);
                if of_commands && begun && matches!(next, Some(' ' | '\t')) {
                    let end =
                        rest[2..].find(|c: char| c.is_whitespace() || ";&|()<>\"'`$\\".contains(c));
                    bytes = 2 + end.unwrap_or(rest.len() - 2);
                    found.words.push(at..at + bytes);
                }
                begins = begun && next == Some('\n');
            }
            '$' if of_commands && rest.starts_with("$'") => {
                let Some(length) = escaped_quotes(&rest[2..]) else {
                    break;
                };
                bytes = 2 + length;
            }
            '\'' if !is_double(&within) => {
                let Some(end) = rest[1..].find('\'') else {
                    break;
                };
                bytes = end + 2;
            }
            '"' if top == Some(Within::DoubleQuotes) => drop(within.pop()),
            '"' => within.push((Within::DoubleQuotes, at)),
            '`' if within.iter().any(|(part, _)| *part == Within::Backquotes) => {
                while let Some((part, start)) = within.pop() {
                    if part == Within::Backquotes {
                        let is_comment = |comment: &Range<usize>| {
                            let before = source.get(start + 1..comment.start);
                            before.is_some_and(|blank| blank.trim().is_empty()) && comment.end == at
                        };
                        if let Some(comment) =
                            found.comments.last_mut().filter(|last| is_comment(last))
                        {
                            *comment = start..at + 1;
                            begins = true;
                        }
                        break;
                    }
                }
            }
            '`' => {
                within.push((Within::Backquotes, at));
                begins = true;
            }
            '$' if rest.starts_with("${") => {
                within.push((Within::Parameter, at));
                bytes = 2;
            }
            '$' if rest.starts_with("$(") => {
                within.push((Within::Parentheses, at));
                bytes = 2;
                begins = true;
            }
            '}' if top == Some(Within::Parameter) => {
                if let Some((_, start)) = within.pop() {
                    found.words.extend(quoted_default(source, start..at));
                }
            }
            '(' if of_commands => {
                within.push((Within::Parentheses, at));
                begins = true;
            }
            ')' if top == Some(Within::Parentheses) => {
                // A substitution, also of a process, and the values of an array are parts of a word.
                let ends_group = |(_, start)| {
                    source[start..].starts_with('(') && !source[..start].ends_with(['<', '>', '='])
                };
                begins = within.pop().is_some_and(ends_group);
            }
            '#' if of_commands && begun => {
                // A backquote ends a comment.
                let ends = |c| c == '\n' || (c == '`' && top == Some(Within::Backquotes));
                bytes = rest.find(ends).unwrap_or(rest.len());
                found.comments.push(at..at + bytes);
            }
            '<' if of_commands && rest.starts_with("<<") && !rest.starts_with("<<<") => {
                let (delimiter, length) = Delimiter::of(&rest[2..]);
                documents.push(delimiter);
                bytes = 2 + length;
            }
            '<' if rest.starts_with("<<<") => bytes = 3,
            '\n' if of_commands => {
                begins = true;
                let before = source[..at].trim_end();
                let ends_word = !before.ends_with(['|', '&', ';', '(', '{']);
                if within.is_empty() && documents.is_empty() && pipes > 1 && ends_word {
                    found.pipelines.push(at);
                }
                if !before.ends_with('|') {
                    pipes = 0;
                }
                for document in documents.drain(..) {
                    bytes += document.length(&rest[bytes..]);
                }
            }
            '|' if of_commands => {
                begins = true;
                let of_two = rest.starts_with("||");
                bytes += usize::from(of_two);
                if within.is_empty() {
                    pipes = if of_two { 0 } else { pipes + 1 };
                }
            }
            ' ' | '\t' | ';' | '&' if of_commands => {
                begins = true;
                if c == ';' || rest.starts_with("&&") {
                    pipes = 0;
                }
            }
            _ => {}
        }
        at += bytes;
    }
    found
}

/// Whether single quotes are ordinary characters.
fn is_double(within: &[(Within, usize)]) -> bool {
    let mut parts = within.iter().rev().map(|(part, _)| *part);
    parts.find(|part| *part != Within::Parameter) == Some(Within::DoubleQuotes)
}

/// The bytes up to the end of `$'…'`.
fn escaped_quotes(rest: &str) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in rest.char_indices() {
        if c == '\'' && !escaped {
            return Some(at + 1);
        }
        escaped = c == '\\' && !escaped;
    }
    None
}

/// The default in `${NAME:-default}` or the pattern in `${NAME/pattern/text}`, if it has quotes.
fn quoted_default(source: &str, parameter: Range<usize>) -> Option<Range<usize>> {
    let inside = &source[parameter.start + 2..parameter.end];
    let name = super::word::identifier(inside).len();
    let operator = ["-", ":-", "=", ":=", "//", "/", "##", "#", "%%", "%"];
    let operator = operator
        .iter()
        .find(|text| inside[name..].starts_with(**text))?;
    let start = parameter.start + 2 + name + operator.len();
    let default = &source[start..parameter.end];
    let has_quotes = default.contains(['\'', '"']) && !default.contains(['\n', '$', '`']);
    (name > 0 && has_quotes).then_some(start..parameter.end)
}

/// The end of a here-document.
struct Delimiter {
    word: String,
    /// Tabs before it are skipped (`<<-`).
    indented: bool,
}

impl Delimiter {
    /// The delimiter after `<<`, and the bytes that it takes.
    fn of(rest: &str) -> (Delimiter, usize) {
        let indented = rest.starts_with('-');
        let from = &rest[usize::from(indented)..];
        let blanks = from.len() - from.trim_start_matches([' ', '\t']).len();
        let written = &from[blanks..];
        let end = written.find(|c: char| c.is_whitespace() || ";&|<>()".contains(c));
        let written = &written[..end.unwrap_or(written.len())];
        let delimiter = Delimiter {
            word: written.replace(['\'', '"', '\\'], ""),
            indented,
        };
        (delimiter, usize::from(indented) + blanks + written.len())
    }

    /// The bytes of the document, with the line of its end.
    fn length(&self, rest: &str) -> usize {
        let mut length = 0;
        for line in rest.split_inclusive('\n') {
            length += line.len();
            let text = line.strip_suffix('\n').unwrap_or(line);
            let text = if self.indented {
                text.trim_start_matches('\t')
            } else {
                text
            };
            if text == self.word {
                break;
            }
        }
        length
    }
}
