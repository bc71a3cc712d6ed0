//! Test helpers for the upstream recipes and golden tables, which are not part of this repository.

use std::path::PathBuf;

/// The corpus directory: `EVENKEEL_RECIPES`, or `../shared/recipes` beside the crate. `None`: it is missing;
/// prints a message.
pub fn root() -> Option<PathBuf> {
    let path = std::env::var_os("EVENKEEL_RECIPES").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../shared/recipes"),
        PathBuf::from,
    );
    if path.is_dir() {
        return Some(path);
    }
    eprintln!("skipped: no upstream recipes at {}", path.display());
    None
}

/// The rows of a CSV file with quoted fields.
pub fn csv(text: &str) -> impl Iterator<Item = Vec<String>> {
    text.lines().map(|line| {
        let mut fields = vec![String::new()];
        let mut quoted = false;
        let mut chars = line.chars().peekable();
        while let Some(c) = chars.next() {
            match c {
                '"' if quoted && chars.peek() == Some(&'"') => {
                    chars.next();
                    fields.last_mut().unwrap().push('"');
                }
                '"' => quoted = !quoted,
                ',' if !quoted => fields.push(String::new()),
                c => fields.last_mut().unwrap().push(c),
            }
        }
        fields
    })
}
