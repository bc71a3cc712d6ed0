//! Tabs outside quotes, block scalars and comments. YAML 1.2 allows some of them; PyYAML, which reads every
//! upstream file, refuses them all.
//!
//! Source: PyYAML 6.0.3 `scanner.py` (`scan_to_next_token`, `fetch_more_tokens`, `scan_plain`).

use super::problem::{Problem, problem};
use crate::recipe::syntax::source::{FileId, Span};

/// The first tab that PyYAML refuses. `quoted`: the byte ranges of scalars that are quoted or blocks.
pub(super) fn find(text: &str, file: FileId, quoted: &[(usize, usize)]) -> Option<Problem> {
    if !text.contains('\t') {
        return None;
    }
    let mut quoted = quoted.iter().copied().peekable();
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let mut blank = true;
        for (at, c) in line.char_indices() {
            let here = start + at;
            while quoted.next_if(|(_, end)| *end <= here).is_some() {}
            if quoted.peek().is_some_and(|(begin, _)| *begin <= here) {
                blank = false;
                continue;
            }
            match c {
                '#' if blank => break,
                '\t' => {
                    return Some(problem(
                        Span::of(text, here..here + 1, file),
                        "a tab separates tokens here, and PyYAML, upstream's parser, refuses it",
                        "write a space instead of the tab",
                    ));
                }
                _ => blank = c.is_whitespace(),
            }
        }
        start += line.len();
    }
    None
}

#[cfg(test)]
mod tests {
    use crate::recipe::syntax::source::FileId;
    use crate::recipe::syntax::yaml::parse_as_pyyaml;

    /// Each result is that of PyYAML 6.0.3.
    #[test]
    fn tabs_are_refused_where_pyyaml_refuses_them() {
        let reads = |text: &str| parse_as_pyyaml(text, FileId(0), &mut Vec::new()).is_some();
        for refused in [
            "a:\t1",
            "a: \t1",
            "a: 1\t",
            "a: 1\t# c",
            "a: b\tc",
            "a: [1,\t2]",
            "a\t: 1",
            "a: 'x'\t",
            "a: 1\n\t\nb: 2",
            "a: 1\n\t# c\nb: 2",
        ] {
            assert!(!reads(refused), "{refused:?}");
        }
        for read in [
            "a: 1 # b\tc",
            "a: |\n  x\ty\nb: 1",
            "a: \"x\ty\"",
            "a: 'x\ty'",
            "# \t\na: 1",
            "a: >-\n  x\ty\n  \tz\nb: '#'",
        ] {
            assert!(reads(read), "{read:?}");
        }
    }
}
