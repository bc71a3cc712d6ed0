//! Assignments in arithmetic: `((N *= 4))`, `let N++`, `$((GA = 4))`. Expressions are not evaluated; a
//! variable that they may change becomes unresolved.
//!
//! Source: bash 5.2, Shell Arithmetic; POSIX.1-2024, Shell Command Language, 2.6.4.

/// The variables that an expression may assign.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Assigns<'t> {
    /// These variables, from left to right.
    Names(Vec<&'t str>),
    /// A variable whose name is unresolved (`$NAME = 4`).
    Anything,
}

/// Finds the assignments in an expression.
pub(crate) fn assigns(expression: &str) -> Assigns<'_> {
    let mut names = Vec::new();
    for (at, c) in expression.char_indices() {
        let (before, rest) = (&expression[..at], &expression[at..]);
        let changed = match c {
            '=' if !rest.starts_with("==")
                && !before.ends_with(['=', '!'])
                && !compares(before) =>
            {
                name_before(before.trim_end_matches(|c: char| "*/%+-<>&^|".contains(c)))
            }
            '+' | '-' if rest.starts_with("++") || rest.starts_with("--") => {
                let operand = |c: char| is_of_name(c) || "]}".contains(c);
                if before.trim_end().ends_with(operand) {
                    name_before(before)
                } else if rest[2..].trim_start().starts_with('$') {
                    None
                } else {
                    match name_after(&rest[2..]) {
                        Some(name) => Some(name),
                        None => continue,
                    }
                }
            }
            _ => continue,
        };
        match changed {
            Some(name) => names.push(name),
            None => return Assigns::Anything,
        }
    }
    Assigns::Names(names)
}

/// Whether a `=` after this text completes `<=` or `>=`, not `<<=` or `>>=`.
fn compares(before: &str) -> bool {
    before.ends_with(['<', '>']) && !before.ends_with("<<") && !before.ends_with(">>")
}

/// The variable at the end of a text, with or without an index.
fn name_before(text: &str) -> Option<&str> {
    let text = text.trim_end();
    let text = match text.strip_suffix(']') {
        Some(inside) => inside[..inside.rfind('[')?].trim_end(),
        None => text,
    };
    let start = text.rfind(|c| !is_of_name(c)).map_or(0, |at| at + 1);
    // `rfind` may stop at a multi-byte character, where `start` is no character boundary.
    let name = text.get(start..)?;
    let dollar = text[..start].ends_with(['$', '{']);
    (!name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit()) && !dollar).then_some(name)
}

/// The variable at the start of a text.
fn name_after(text: &str) -> Option<&str> {
    let text = text.trim_start();
    let end = text.find(|c| !is_of_name(c)).unwrap_or(text.len());
    let name = &text[..end];
    (!name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit())).then_some(name)
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments_are_found_and_comparisons_are_not() {
        for (expression, expected) in [
            ("N*=4", &["N"][..]),
            (" WORLD = GPUS * NODES ", &["WORLD"]),
            ("N++", &["N"]),
            ("++N", &["N"]),
            ("N - --M", &["M"]),
            ("N <<= 2, M >>= 1, K |= 1", &["N", "M", "K"]),
            ("A[1] = 4", &["A"]),
            ("i=0;i<4;N*=2,i++", &["i", "N", "i"]),
            ("N == 4 || N <= 4 || N >= 4 || N != 4", &[]),
            ("N * GPUS - 1", &[]),
            ("$N / 2", &[]),
        ] {
            let names = Assigns::Names(expected.to_vec());
            assert_eq!(assigns(expression), names, "{expression}");
        }
        for expression in ["$N = 4", "${N} += 1", "ü=4", "$N++", "++$N"] {
            assert_eq!(assigns(expression), Assigns::Anything, "{expression}");
        }
    }
}
