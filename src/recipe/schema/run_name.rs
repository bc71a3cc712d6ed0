//! Names of runs. A name becomes a directory below `runs/` and part of the names of Kubernetes objects, so it
//! must be a DNS label of RFC 1123 (`apimachinery/pkg/util/validation`, `IsDNS1123Label`).

use std::path::Path;

use super::dialect::RESERVED;
use super::reading::Reading;
use super::tree::{Given, Tree};
use crate::util::suggest::short;

/// Maximum characters of a DNS label.
const MAX: usize = 63;

/// Why a text is not a DNS label; `None` if it is one.
pub(crate) fn flaw(text: &str) -> Option<String> {
    let fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    if text.is_empty() {
        return Some("it is empty".to_owned());
    }
    if let Some(odd) = text.chars().find(|&c| !fits(c)) {
        return Some(format!("it contains {odd:?}"));
    }
    if text.starts_with('-') {
        return Some("it begins with `-`".to_owned());
    }
    if text.ends_with('-') {
        return Some("it ends with `-`".to_owned());
    }
    (text.len() > MAX).then(|| format!("it has {} characters, the limit is {MAX}", text.len()))
}

/// Converts a text to a DNS label: lower case, `-` for other characters, `run` if nothing remains.
pub(crate) fn label(text: &str) -> String {
    let mut label = String::new();
    for c in text.chars().map(|c| c.to_ascii_lowercase()) {
        if c.is_ascii_lowercase() || c.is_ascii_digit() {
            label.push(c);
        } else if !label.is_empty() && !label.ends_with('-') {
            label.push('-');
        }
        if label.len() == MAX {
            break;
        }
    }
    let label = label.trim_end_matches('-');
    match label {
        "" => "run".to_owned(),
        label => label.to_owned(),
    }
}

/// The label of a file's name without its extension.
pub(crate) fn of_file(path: &Path) -> String {
    label(&path.file_stem().unwrap_or_default().to_string_lossy())
}

/// Sets the run's name to the DNS label of an arbitrary upstream name. A note reports a changed name.
pub(crate) fn put(given: &Given<String>, tree: &mut Tree, reading: &mut Reading) {
    let label = label(&given.value);
    // A variable of a script that is not resolved is no name.
    if label != given.value && !given.value.contains('$') {
        reading.note(
            "run-name",
            Some(given.span),
            format!(
                "the run is called `{label}`: `{}` is no DNS label",
                short(&given.value)
            ),
            format!("nothing to do; `{RESERVED}.name=…` sets another name"),
        );
    }
    tree.text("name", &given.with(label));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn paths_and_invalid_characters_are_refused() {
        for text in [
            "", ".", "..", "../../x", "/etc/x", "a/b", "-a", "a-", "A", "a_b", "a b", "ä", "a\0",
        ] {
            assert!(flaw(text).is_some(), "{text:?}");
        }
        assert!(flaw(&"a".repeat(64)).is_some());
        for text in ["a", "0", "zephyr-7b-sft-full", &"a".repeat(63)] {
            assert_eq!(flaw(text), None);
        }
    }

    #[test]
    fn a_label_keeps_letters_and_digits() {
        assert_eq!(label("zephyr-7b-sft-full"), "zephyr-7b-sft-full");
        assert_eq!(label("SmolLM2-1.7B_sft"), "smollm2-1-7b-sft");
        assert_eq!(label("../../x"), "x");
        assert_eq!(label("…"), "run");
    }

    proptest! {
        #[test]
        fn a_label_is_valid_and_idempotent(text in any::<String>()) {
            let named = label(&text);
            prop_assert_eq!(flaw(&named), None);
            prop_assert_eq!(label(&named), named);
        }
    }
}
