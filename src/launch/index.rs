//! The index of runs outside of `runs/`, so that they are listed and found by name: a file in the user's state
//! directory, one JSON line for each run.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::RunDir;
use super::run_path::RUNS;
use crate::util::input;

/// A run, and the folder from which it was launched. Both are absolute.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Line {
    run: PathBuf,
    from: PathBuf,
}

/// The file: `evenkeel/runs.jsonl` below `$XDG_STATE_HOME`, by default `~/.local/state`.
fn file() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let state = set("XDG_STATE_HOME").map(PathBuf::from);
    let state = state.or_else(|| Some(PathBuf::from(set("HOME")?).join(".local/state")))?;
    Some(state.join("evenkeel/runs.jsonl"))
}

/// Adds a run that was launched from the working directory, unless it is in its `runs/`. The index is a convenience:
/// without a writable state directory there is none.
pub fn add(run: &RunDir) {
    if let (Some(file), Ok(from)) = (file(), std::env::current_dir()) {
        add_to(&file, &from, run.path());
    }
}

fn add_to(file: &Path, from: &Path, run: &Path) {
    let run = from.join(run);
    if run.parent() == Some(&from.join(RUNS)) {
        return;
    }
    let line = Line {
        run,
        from: from.to_path_buf(),
    };
    let Ok(mut text) = serde_json::to_string(&line) else {
        return;
    };
    text.push('\n');
    if let Some(folder) = file.parent() {
        let _ = std::fs::create_dir_all(folder);
    }
    // One write of a short line to a file that is only appended to.
    let opened = File::options().create(true).append(true).open(file);
    let _ = opened.and_then(|mut opened| opened.write_all(text.as_bytes()));
}

/// The runs that were launched from the working directory and still exist, by path.
pub fn launched_here() -> Vec<RunDir> {
    match (file(), std::env::current_dir()) {
        (Some(file), Ok(here)) => runs(&file, |line| line.from == here),
        _ => Vec::new(),
    }
}

/// The runs with this directory name that still exist.
pub fn named(name: &Path) -> Vec<RunDir> {
    let is_named = |line: &Line| line.run.file_name() == Some(name.as_os_str());
    file().map_or_else(Vec::new, |file| runs(&file, is_named))
}

fn runs(file: &Path, wanted: impl Fn(&Line) -> bool) -> Vec<RunDir> {
    let Ok(file) = input::open(file) else {
        return Vec::new();
    };
    let lines = BufReader::new(file).lines().map_while(Result::ok);
    let lines = lines.filter_map(|line| serde_json::from_str::<Line>(&line).ok());
    let found: BTreeSet<PathBuf> = lines.filter(wanted).map(|line| line.run).collect();
    let found = found.into_iter().map(RunDir::at);
    found.filter(RunDir::contains_run).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_elsewhere_are_listed_once_while_they_exist() {
        let place = tempfile::tempdir().unwrap();
        let (file, here) = (
            place.path().join("state/runs.jsonl"),
            place.path().join("here"),
        );
        let exists = |run: &str| {
            std::fs::create_dir_all(here.join(run)).unwrap();
            std::fs::write(here.join(run).join("run.json"), "{}").unwrap();
        };
        for run in [
            "runs/inside",
            "../elsewhere",
            "data/zephyr",
            "data/zephyr",
            "data/removed",
        ] {
            exists(run);
            add_to(&file, &here, Path::new(run));
        }
        std::fs::remove_dir_all(here.join("data/removed")).unwrap();
        let of = |from: &Path| {
            let found = runs(&file, |line| line.from == from);
            found
                .iter()
                .map(|run| run.path().to_path_buf())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            of(&here),
            [here.join("../elsewhere"), here.join("data/zephyr")]
        );
        assert_eq!(of(place.path()), [] as [PathBuf; 0]);
        // A line that was cut off by a full disk is left out.
        std::fs::write(&file, "{\"run\": \"/a").unwrap();
        assert_eq!(of(&here), [] as [PathBuf; 0]);
    }
}
