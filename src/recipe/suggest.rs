//! Words in messages: the known one nearest to one that is not known ("did you mean"), and long
//! ones cut short.

/// A help line for an unknown word: the nearest known one, or all of them when they are few.
pub fn did_you_mean<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    if let Some(nearest) = nearest(word, &known) {
        return format!("did you mean `{nearest}`?");
    }
    match known.len() {
        0 => "remove it".to_owned(),
        1..=24 => {
            let quoted: Vec<String> = known.iter().map(|k| format!("`{k}`")).collect();
            format!("known are {}", quoted.join(", "))
        }
        _ => "remove it, or check its spelling".to_owned(),
    }
}

/// A text for a message: its start, where it is long.
pub fn short(text: &str) -> String {
    match text.char_indices().nth(40) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

/// The known word within a third of the word's length in edits (a swap counts as one).
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    // Long words cannot be keys, and comparing them costs time.
    if word.len() > 80 {
        return None;
    }
    let length = word.chars().count();
    let limit = (length / 3).max(1);
    let lower = word.to_lowercase();
    known
        .iter()
        // No fewer edits than letters more or less; most words are never compared.
        .filter(|k| k.len().abs_diff(length) <= limit)
        .map(|k| (strsim::damerau_levenshtein(&lower, &k.to_lowercase()), *k))
        .filter(|(distance, _)| *distance <= limit)
        .min()
        .map(|(_, k)| k)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_typo_finds_its_key() {
        let known = ["per_device_train_batch_size", "per_device_eval_batch_size"];
        assert_eq!(
            did_you_mean("per_device_train_batchsize", known),
            "did you mean `per_device_train_batch_size`?"
        );
    }

    #[test]
    fn a_stranger_gets_the_list() {
        assert_eq!(
            did_you_mean("zebra", ["cosine", "linear"]),
            "known are `cosine`, `linear`"
        );
    }
}
