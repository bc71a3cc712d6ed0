//! Finds the end of a variable or a substitution: `$NAME`, `${NAME:-x}`, `$(command)`, `$((1 + 1))`, `$[1 + 1]`,
//! `` `x` ``.
//!
//! Source: POSIX.1-2024, Shell Command Language, 2.6.

/// A variable or a substitution at the start of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expansion<'t> {
    pub bytes: usize,
    /// The variable, if the expansion is exactly its value. `${NAME:-x}` has a name as well: it is the value
    /// of a variable that is set.
    pub name: Option<&'t str>,
    /// `$@`, `$*` or `${NAME[@]}`: expands to any number of words.
    pub all: bool,
    /// The bracket or backtick is closed.
    pub closed: bool,
}

/// The expansion at the start of a text. `None`: the `$` is literal.
pub(crate) fn at(text: &str) -> Option<Expansion<'_>> {
    let mut found = Expansion {
        bytes: text.len(),
        name: None,
        all: false,
        closed: true,
    };
    if let Some(inner) = text.strip_prefix('`') {
        let end = backtick(inner);
        found.closed = end.is_some();
        found.bytes = end.map_or(text.len(), |end| end + 1);
        return Some(found);
    }
    let rest = text.strip_prefix('$')?;
    let close = match rest.chars().next()? {
        '{' => '}',
        '(' => ')',
        // The older bash syntax of `$((…))`.
        '[' => ']',
        c if c.is_ascii_alphabetic() || c == '_' => {
            let end = rest.find(|c| !is_of_name(c)).unwrap_or(rest.len());
            found.name = Some(&rest[..end]);
            found.bytes = 1 + end;
            return Some(found);
        }
        c if c.is_ascii_digit() || "@*#?$!-".contains(c) => {
            found.all = matches!(c, '@' | '*');
            found.bytes = 2;
            return Some(found);
        }
        _ => return None,
    };
    let end = bracketed(rest, close);
    found.closed = end.is_some();
    found.bytes = end.map_or(text.len(), |end| end + 1);
    if close == '}' && found.closed {
        let inside = &rest[1..found.bytes - 2];
        let end = inside.find(|c| !is_of_name(c)).unwrap_or(inside.len());
        let (name, more) = inside.split_at(end);
        found.all = ["[@]", "[*]"].contains(&more) || ["@", "*"].contains(&inside);
        let or_else = [":-", "-", ":=", "="].iter().any(|op| more.starts_with(op));
        let as_it_is = more.is_empty() || found.all || or_else;
        found.name = Some(name).filter(|name| is_name(name) && as_it_is);
    }
    Some(found)
}

/// Whether a text can be a variable's name.
pub(crate) fn is_name(text: &str) -> bool {
    text.starts_with(|c: char| !c.is_ascii_digit()) && text.chars().all(is_of_name)
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

/// Bytes up to and including the next unescaped backtick.
fn backtick(text: &str) -> Option<usize> {
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => {
                chars.next();
            }
            '`' => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Bytes up to and including the bracket that closes the one at the start of a text.
pub(crate) fn bracketed(text: &str, close: char) -> Option<usize> {
    let open = text.chars().next()?;
    let (mut depth, mut quote) = (0_usize, None);
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match (quote, c) {
            (Some('\''), '\'') => quote = None,
            (Some('\''), _) => {}
            (_, '\\') => {
                chars.next();
            }
            (Some(_), '"') => quote = None,
            (None, '"' | '\'') => quote = Some(c),
            (None, c) if c == open => depth += 1,
            (None, c) if c == close => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expansion_ends_at_its_closing_bracket() {
        for (text, bytes, name, all) in [
            ("$N/x", 2, Some("N"), false),
            ("${N}8", 4, Some("N"), false),
            ("${N:-a b}", 9, Some("N"), false),
            ("${N%.*}x", 7, None, false),
            ("${A[@]} b", 7, Some("A"), true),
            ("${#A[@]} b", 8, None, false),
            ("$@", 2, None, true),
            ("${@}", 4, None, true),
            ("$1x", 2, None, false),
            ("$(a \")\" (b)) c", 12, None, false),
            ("$((1 + (2))) c", 12, None, false),
            ("`a \\` b` c", 8, None, false),
        ] {
            let found = at(text).unwrap();
            assert!(found.closed, "{text}");
            assert_eq!(
                (found.bytes, found.name, found.all),
                (bytes, name, all),
                "{text}"
            );
        }
        assert_eq!(at("$ 5"), None);
        assert!(!at("$(a 'b)").unwrap().closed);
    }
}
