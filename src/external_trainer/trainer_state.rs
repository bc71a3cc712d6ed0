//! The per-device batch in a checkpoint of transformers. Versions up to 5.1 resume with it, whatever the arguments
//! state (`Trainer.train`), and would train another global batch in another world.

use std::path::{Path, PathBuf};

use crate::util::input::{self, STATE_BYTES};

/// The line of the batch. transformers indents by 2, so the key is one of the state itself.
const KEY: &str = "\n  \"train_batch_size\": ";

/// The state's file with this batch; `None` if it states no other batch.
pub fn with_batch(checkpoint: &Path, batch: u64) -> Option<(PathBuf, String)> {
    let path = checkpoint.join("trainer_state.json");
    // The rest is not interpreted: Python writes numbers such as NaN, which JSON does not have.
    let text = String::from_utf8(input::read(&path, STATE_BYTES).ok()?).ok()?;
    let (before, rest) = text.split_once(KEY)?;
    let (digits, after) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
    let other = !digits.is_empty() && digits != batch.to_string();
    other.then(|| (path, format!("{before}{KEY}{batch}{after}")))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_checkpoint_gets_the_batch_of_the_new_world_and_nothing_else_changes() {
        let place = tempfile::tempdir().unwrap();
        let state = |batch: &str| {
            format!(
                "{{\n  \"global_step\": 20,\n  \"log_history\": [\n    {{\n      \"grad_norm\": NaN,\n      \
                 \"train_batch_size\": 1\n    }}\n  ],\n  \"train_batch_size\": {batch},\n  \"trial_name\": null\n}}\n"
            )
        };
        let changed = |batch: &str| {
            fs::write(place.path().join("trainer_state.json"), state(batch)).unwrap();
            with_batch(place.path(), 3).map(|(_, text)| text)
        };
        assert_eq!(changed("6"), Some(state("3")));
        assert_eq!(changed("3"), None);
        assert_eq!(changed("null"), None);
        fs::remove_file(place.path().join("trainer_state.json")).unwrap();
        assert_eq!(with_batch(place.path(), 3), None);
    }
}
