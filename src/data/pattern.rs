//! Globs: `*` and `?` within a name, `**` for any directories.

/// Whether the parts of a path match those of a pattern, in which `**` matches any directories.
pub(super) fn fits(pattern: &[&str], path: &[&str]) -> bool {
    let part = |pattern: &&str, name: &&str| matches(pattern.as_bytes(), name.as_bytes());
    glob(pattern, path, |part| *part == "**", part)
}

/// Whether a name matches a pattern of `*` and `?`.
pub(super) fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let byte = |pattern: &u8, byte: &u8| *pattern == b'?' || pattern == byte;
    glob(pattern, name, |byte| *byte == b'*', byte)
}

/// Whether a text matches a pattern. An element of the pattern matches any number of the text's if `is_star`, otherwise
/// one that it `fits`.
fn glob<E>(
    pattern: &[E],
    text: &[E],
    is_star: impl Fn(&E) -> bool,
    fits: impl Fn(&E, &E) -> bool,
) -> bool {
    let (mut at, mut read) = (0, 0);
    // After the last star, and where the text continues after what the star has taken.
    let mut star: Option<(usize, usize)> = None;
    while read < text.len() {
        match pattern.get(at) {
            Some(element) if is_star(element) => {
                at += 1;
                star = Some((at, read));
            }
            Some(element) if fits(element, &text[read]) => {
                at += 1;
                read += 1;
            }
            // Only the last star needs to take more: the earlier ones have matched what is between.
            _ => match &mut star {
                Some((after, taken)) => {
                    *taken += 1;
                    (at, read) = (*after, *taken);
                }
                None => return false,
            },
        }
    }
    pattern[at..].iter().all(is_star)
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
        assert!(!fit(&("**/a/".repeat(100) + "b"), &"a/".repeat(200)));
    }
}
