//! Globs: `*` and `?` within a name, `**` for any directories.

/// Whether the parts of a path match those of a pattern, in which `**` matches any directories.
pub(super) fn fits(pattern: &[&str], path: &[&str]) -> bool {
    match (pattern, path) {
        ([], path) => path.is_empty(),
        (["**", rest @ ..], _) => {
            fits(rest, path)
                || path
                    .split_first()
                    .is_some_and(|(_, path)| fits(pattern, path))
        }
        ([name, rest @ ..], [first, path @ ..]) => {
            matches(name.as_bytes(), first.as_bytes()) && fits(rest, path)
        }
        (_, []) => false,
    }
}

/// Whether a name matches a pattern of `*` and `?`.
pub(super) fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut at, mut read) = (0, 0);
    // After the last `*`, and where the name continues after the bytes that the `*` has taken.
    let mut star: Option<(usize, usize)> = None;
    while read < name.len() {
        match pattern.get(at) {
            Some(b'*') => {
                at += 1;
                star = Some((at, read));
            }
            Some(&byte) if byte == b'?' || byte == name[read] => {
                at += 1;
                read += 1;
            }
            // Only the last `*` needs to take more: the earlier ones have matched what is between.
            _ => match &mut star {
                Some((after, taken)) => {
                    *taken += 1;
                    (at, read) = (*after, *taken);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_in_time_even_with_many_stars() {
        for (pattern, name, fits) in [
            ("", "", true),
            ("*", "", true),
            ("a*b?d", "axxbcd", true),
            ("*ab", "aab", true),
            ("a*", "b", false),
            ("?", "", false),
            ("**a", "ba", true),
        ] {
            assert_eq!(
                matches(pattern.as_bytes(), name.as_bytes()),
                fits,
                "{pattern}"
            );
        }
        let fit = |pattern: &str, path: &str| {
            let parts = |text: &'static str| text.split('/').collect::<Vec<_>>();
            fits(
                &parts(pattern.to_owned().leak()),
                &parts(path.to_owned().leak()),
            )
        };
        assert!(fit("**/*.txt", "a.txt") && fit("**/*.txt", "x/y/a.txt") && fit("x/*/a", "x/y/a"));
        assert!(!fit("*.txt", "x/a.txt") && !fit("x/**/b", "x/a") && !fit("a", "a/b"));
        let many = "*a".repeat(100) + "b";
        assert!(!matches(many.as_bytes(), "a".repeat(200).as_bytes()));
    }
}
