//! Words in messages: suggestions for unknown words ("did you mean") and shortening of long texts.

/// Help for an unknown word: the nearest known word, or the list of up to 24 known words.
pub fn did_you_mean<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    if let Some(nearest) = nearest(word, &known) {
        return format!("did you mean `{nearest}`?");
    }
    match known.len() {
        0 => "remove it".to_owned(),
        1..=24 => {
            let quoted: Vec<String> = known.iter().map(|k| format!("`{k}`")).collect();
            format!("expected one of {}", quoted.join(", "))
        }
        _ => "remove it, or check its spelling".to_owned(),
    }
}

/// A name that no value has, with the help of [`did_you_mean`].
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct UnknownName(String);

/// The value with this name.
pub fn by_name<T: ToString>(
    name: &str,
    all: impl IntoIterator<Item = T>,
) -> Result<T, UnknownName> {
    let mut names = Vec::new();
    for value in all {
        let known = value.to_string();
        if known == name {
            return Ok(value);
        }
        names.push(known);
    }
    let names = names.iter().map(String::as_str);
    Err(UnknownName(did_you_mean(name, names)))
}

/// A text for a message, shortened to 40 characters.
pub fn short(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// The nearest known word within a third of the word's length in edits. A swap counts as one edit.
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    // No key is that long, and comparing long words is slow.
    if word.len() > 80 {
        return None;
    }
    let limit = (word.chars().count() / 3).max(1);
    within(word, known.iter().copied(), limit)
}

/// The most known words that a word is compared with: a recipe's own keys may be many and alike.
const MAX_KNOWN: usize = 1000;

/// The nearest known word within `limit` edits, of the first 1000. Case is ignored.
pub fn within<'a>(
    word: &str,
    known: impl IntoIterator<Item = &'a str>,
    limit: usize,
) -> Option<&'a str> {
    let lower = word.to_lowercase();
    let (length, letters) = (lower.chars().count(), Letters::of(&lower));
    known
        .into_iter()
        .take(MAX_KNOWN)
        // Cheap checks first: a file may have thousands of unknown keys.
        .filter(|known| known.chars().count().abs_diff(length) <= limit)
        .filter(|known| letters.edits(Letters::of(known)) <= limit)
        .map(|known| {
            let edits = strsim::damerau_levenshtein(&lower, &known.to_lowercase());
            (edits, known)
        })
        .filter(|(edits, _)| *edits <= limit)
        .min()
        .map(|(_, known)| known)
}

/// The number of each letter in a word, indexed by its code modulo 64.
struct Letters([u8; 64]);

impl Letters {
    fn of(word: &str) -> Letters {
        let mut counts = [0_u8; 64];
        for c in word.chars() {
            let count = &mut counts[c.to_ascii_lowercase() as usize % 64];
            *count = count.saturating_add(1);
        }
        Letters(counts)
    }

    /// A lower bound of the edits between two words: one edit removes and adds at most one letter.
    fn edits(&self, other: Letters) -> usize {
        let (mut more, mut less) = (0, 0);
        for (count, other) in self.0.iter().zip(other.0) {
            more += usize::from(count.saturating_sub(other));
            less += usize::from(other.saturating_sub(*count));
        }
        more.max(less)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_suggests_its_key() {
        let known = ["per_device_train_batch_size", "per_device_eval_batch_size"];
        assert_eq!(
            did_you_mean("per_device_train_batchsize", known),
            "did you mean `per_device_train_batch_size`?"
        );
    }

    #[test]
    fn words_within_the_edit_limit_are_found() {
        for (word, known, limit, near) in [
            ("abcd", "abdc", 1, true),
            ("abcd", "badc", 1, false),
            ("sead", "seed", 1, true),
            ("größe", "grösse", 2, true),
            ("Seed", "seed", 0, true),
            ("a", "aaaa", 3, true),
            ("a", "aaaa", 2, false),
        ] {
            let found = within(word, [known], limit);
            assert_eq!(found.is_some(), near, "{word} {known}");
        }
    }

    #[test]
    fn an_unknown_word_lists_the_known_ones() {
        assert_eq!(
            did_you_mean("zebra", ["cosine", "linear"]),
            "expected one of `cosine`, `linear`"
        );
    }
}
