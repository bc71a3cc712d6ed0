//! Whether the kernel's out-of-memory killer struck in this cgroup: a rank that it kills ends like
//! any other SIGKILL, only the counter tells the two apart.

use std::fs;
use std::path::{Path, PathBuf};

/// The counter of kills in this process's cgroup, if there is one.
pub struct OomKills {
    file: Option<PathBuf>,
    seen: u64,
}

impl OomKills {
    /// Finds the counter (cgroup v2 `memory.events`, v1 `memory.oom_control`) and its value now.
    pub fn watch() -> OomKills {
        let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let file = candidates(&cgroups)
            .into_iter()
            .find(|file| count(file).is_some());
        let seen = file.as_deref().and_then(count).unwrap_or(0);
        OomKills { file, seen }
    }

    /// Whether the counter was raised since the last call.
    pub fn raised(&mut self) -> bool {
        let now = self.file.as_deref().and_then(count).unwrap_or(0);
        let raised = now > self.seen;
        self.seen = now;
        raised
    }
}

fn candidates(cgroups: &str) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for line in cgroups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let path = path.trim_start_matches('/');
        if controllers.is_empty() {
            let root = Path::new("/sys/fs/cgroup");
            files.push(root.join(path).join("memory.events"));
            files.push(root.join("memory.events"));
        } else if controllers.split(',').any(|c| c == "memory") {
            let root = Path::new("/sys/fs/cgroup/memory");
            files.push(root.join(path).join("memory.oom_control"));
            files.push(root.join("memory.oom_control"));
        }
    }
    files
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
    fn both_cgroup_versions_are_looked_for() {
        let files = candidates("0::/user.slice/job\n4:cpu,memory:/docker/x\n3:pids:/y\n");
        let expected = [
            "/sys/fs/cgroup/user.slice/job/memory.events",
            "/sys/fs/cgroup/memory.events",
            "/sys/fs/cgroup/memory/docker/x/memory.oom_control",
            "/sys/fs/cgroup/memory/memory.oom_control",
        ];
        assert_eq!(files, expected.map(PathBuf::from));
    }

    #[test]
    fn a_raised_counter_is_reported_once() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("memory.events");
        fs::write(&file, "low 0\noom 1\noom_kill 1\noom_group_kill 0\n").unwrap();
        let mut kills = OomKills {
            file: Some(file.clone()),
            seen: 1,
        };
        assert!(!kills.raised());
        fs::write(&file, "oom_kill 2\n").unwrap();
        assert!(kills.raised());
        assert!(!kills.raised());
    }
}
