//! Lists of upstream's names, and texts of two parts.

/// The text before a mark, and the text after it if the text has one: `key`, `value` of `key=value`.
pub(crate) fn cut(text: &str, mark: char) -> (&str, Option<&str>) {
    match text.split_once(mark) {
        Some((before, after)) => (before, Some(after)),
        None => (text, None),
    }
}

/// Names, separated by white space.
#[derive(Clone, Copy)]
pub(crate) struct Words(pub &'static str);

impl Words {
    pub fn iter(self) -> impl Iterator<Item = &'static str> + Clone {
        self.0.split_whitespace()
    }

    pub fn has(self, name: &str) -> bool {
        self.iter().any(|word| word == name)
    }
}
