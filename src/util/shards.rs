//! The names of weight files in Hugging Face's layout, and the index that assigns each tensor to its shard.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

use super::format::shortened;
use super::input::{self, STATE_BYTES};

/// All weights in one file.
pub const WHOLE: &str = "model.safetensors";
/// The index of shards.
pub const INDEX: &str = "model.safetensors.index.json";

/// An index of shards.
#[derive(Debug, Deserialize)]
pub struct Index {
    /// The file of each tensor.
    pub weight_map: BTreeMap<String, String>,
}

/// Why an index cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum IndexError {
    #[error("{0}")]
    Read(#[from] std::io::Error),
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    #[error("`{}` is not the name of a file", shortened(.0))]
    Name(String),
}

impl Index {
    /// Reads an index. The names of its shards are names of files in its own directory.
    pub fn read(path: &Path) -> Result<Index, IndexError> {
        let index: Index = serde_json::from_slice(&input::read(path, STATE_BYTES)?)?;
        if let Some(name) = index.weight_map.values().find(|name| !is_file_name(name)) {
            return Err(IndexError::Name(name.clone()));
        }
        Ok(index)
    }

    pub fn files(&self) -> BTreeSet<&str> {
        self.weight_map.values().map(String::as_str).collect()
    }
}

/// Whether a directory has all files of its weights.
pub fn are_complete(directory: &Path) -> bool {
    let has = |name: &str| directory.join(name).is_file();
    has(WHOLE)
        || Index::read(&directory.join(INDEX)).is_ok_and(|index| index.files().into_iter().all(has))
}

/// Whether a text is the name of a file, and no path to another directory.
pub fn is_file_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..")
        && !name.contains(['/', '\\'])
        && !name.contains(char::is_control)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_complete_with_their_last_shard() {
        let place = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| std::fs::write(place.path().join(name), text).unwrap();
        assert!(!are_complete(place.path()));
        write(
            INDEX,
            r#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#,
        );
        write("1.safetensors", "");
        assert!(!are_complete(place.path()));
        write("2.safetensors", "");
        assert!(are_complete(place.path()));
        write(INDEX, r#"{"weight_map": {"a": "../1.safetensors"}}"#);
        assert!(!are_complete(place.path()));
        write(WHOLE, "");
        assert!(are_complete(place.path()));
    }
}
