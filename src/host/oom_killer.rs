//! Detects kills by the kernel's out-of-memory killer in this cgroup. Such a rank ends with SIGKILL
//! like any other; only the cgroup's counter tells them apart.

use std::fs;
use std::path::{Path, PathBuf};

use crate::inventory::cgroup::{self, Version};

/// The counter of kills in this process's cgroup, if it exists, and its former value.
pub struct OomKills(Option<(PathBuf, u64)>);

impl OomKills {
    /// Finds the counter (cgroup v2 `memory.events`, v1 `memory.oom_control`) and records its
    /// current value.
    pub fn watch() -> OomKills {
        OomKills::of(cgroup::memory_cgroups().into_iter().map(|level| {
            level.directory.join(match level.version {
                Version::V1 => "memory.oom_control",
                Version::V2 => "memory.events",
            })
        }))
    }

    fn of(files: impl IntoIterator<Item = PathBuf>) -> OomKills {
        let mut counts = files.into_iter().map(|file| (count(&file), file));
        OomKills(counts.find_map(|(kills, file)| Some((file, kills?))))
    }

    /// Whether the counter has increased since [`Self::watch`].
    pub fn raised(&self) -> bool {
        let Some((file, before)) = &self.0 else {
            return false;
        };
        count(file).is_some_and(|now| now > *before)
    }
}

fn count(file: &Path) -> Option<u64> {
    fs::read_to_string(file)
        .ok()?
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "))?
        .trim()
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_is_reported_only_if_the_watch_began_before_it() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("memory.events");
        fs::write(&file, "low 0\noom 1\noom_kill 1\noom_group_kill 0\n").unwrap();
        let absent = directory.path().join("absent");
        let kills = OomKills::of([absent, file.clone()]);
        assert!(!kills.raised());
        fs::write(&file, "oom_kill 2\n").unwrap();
        assert!(kills.raised() && kills.raised());
        assert!(!OomKills::of([file]).raised());
    }

    #[test]
    fn without_a_counter_no_kill_is_reported() {
        assert!(!OomKills::of([]).raised());
    }
}
