//! The syntax of interpolations: their bounds and their contents.

/// A part of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part<'t> {
    /// Text, with its escapes resolved.
    Text(String),
    /// The text between `${` and `}`.
    Interpolation(&'t str),
}

/// The length of the interpolation at the start of a text, bytes; `None`: it is not closed.
pub fn length(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    let mut quote = None;
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\\' => {
                bytes.next();
            }
            _ if quote == Some(byte) => quote = None,
            _ if quote.is_some() => {}
            b'\'' | b'"' if depth > 0 => quote = Some(byte),
            b'{' => depth += 1,
            b'}' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
    }
    None
}

/// The parts of a text; `None`: an interpolation is not closed. `\${` is no interpolation.
pub(super) fn parts(text: &str) -> Option<Vec<Part<'_>>> {
    let mut parts = Vec::new();
    let mut plain = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        let before = &rest[..at];
        let slashes = before.bytes().rev().take_while(|b| *b == b'\\').count();
        plain += &before[..at - slashes];
        // Before an interpolation two backslashes are one.
        plain += &"\\".repeat(slashes / 2);
        if slashes % 2 == 1 {
            plain += "${";
            rest = &rest[at + 2..];
            continue;
        }
        if !plain.is_empty() {
            parts.push(Part::Text(std::mem::take(&mut plain)));
        }
        let length = length(&rest[at..])?;
        parts.push(Part::Interpolation(&rest[at + 2..at + length - 1]));
        rest = &rest[at + length..];
    }
    plain += rest;
    if !plain.is_empty() {
        parts.push(Part::Text(plain));
    }
    Some(parts)
}

/// The name and the arguments of a resolver call; `None` for other interpolations.
pub(super) fn resolver(inner: &str) -> Option<(&str, Vec<&str>)> {
    let (name, arguments) = inner.split_once(':')?;
    let name = name.trim();
    let fits = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
    if name.is_empty() || !name.chars().all(fits) {
        return None;
    }
    if arguments.trim().is_empty() {
        return Some((name, Vec::new()));
    }
    let mut found = Vec::new();
    let (mut from, mut depth, mut quote) = (0, 0_usize, None);
    for (at, byte) in arguments.bytes().enumerate() {
        match byte {
            _ if quote == Some(byte) => quote = None,
            _ if quote.is_some() => {}
            b'\'' | b'"' => quote = Some(byte),
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => {
                found.push(arguments[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    found.push(arguments[from..].trim());
    Some((name, found))
}

/// An argument without its quotes.
pub(super) fn unquoted(argument: &str) -> &str {
    let argument = argument.trim();
    ['\'', '"']
        .iter()
        .find_map(|quote| argument.strip_prefix(*quote)?.strip_suffix(*quote))
        .unwrap_or(argument)
}

/// The keys of a path: `a.b[0].c`, `a[b]`.
pub(super) fn keys(path: &str) -> Vec<String> {
    let parts = path.split(['.', '[']);
    let keys = parts.map(|part| part.strip_suffix(']').unwrap_or(part));
    keys.filter(|key| !key.is_empty())
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interpolations_end_at_their_closing_brace() {
        assert_eq!(length("${a.b}/c"), Some(6));
        assert_eq!(length("${f:${a},'}'}x"), Some(13));
        assert_eq!(length("${a"), None);
        let inner = |text| match parts(text).unwrap().as_slice() {
            [Part::Interpolation(inner)] => Some(inner.to_string()),
            _ => None,
        };
        assert_eq!(inner("${a}").as_deref(), Some("a"));
        assert_eq!(inner("\\${a}"), None);
        assert_eq!(parts("\\${a}").unwrap(), [Part::Text("${a}".to_owned())]);
    }

    #[test]
    fn commas_outside_of_brackets_separate_arguments() {
        let (name, arguments) = resolver("f:${g:1,2}, 'a,b',c").unwrap();
        assert_eq!((name, arguments), ("f", vec!["${g:1,2}", "'a,b'", "c"]));
        assert_eq!(resolver("a.b"), None);
        assert_eq!(resolver("${a}:b"), None);
        assert_eq!(keys("a.b[0].c"), ["a", "b", "0", "c"]);
    }
}
