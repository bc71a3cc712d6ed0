//! The memory cgroups of this process.

use std::path::{Path, PathBuf};

/// One level of the hierarchy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryCgroup {
    pub version: Version,
    /// Directory of its files.
    pub directory: PathBuf,
}

/// The cgroup version, which decides the names of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Version {
    /// `memory.limit_in_bytes`, `memory.oom_control`.
    V1,
    /// `memory.max`, `memory.events`.
    V2,
}

/// The levels from this process's own up to the root; some may not be mounted here.
pub fn memory_cgroups() -> Vec<MemoryCgroup> {
    parse(&std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default())
}

/// `0::/path` under cgroup v2, `N:memory:/path` under v1.
fn parse(text: &str) -> Vec<MemoryCgroup> {
    let mut levels = Vec::new();
    for line in text.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        let (root, version) = match controllers {
            "" => ("/sys/fs/cgroup", Version::V2),
            c if c.split(',').any(|c| c == "memory") => ("/sys/fs/cgroup/memory", Version::V1),
            _ => continue,
        };
        // In a container the path may be the host's, of which only the root is mounted.
        let own = Path::new(path.trim_start_matches('/'));
        levels.extend(own.ancestors().map(|level| MemoryCgroup {
            version,
            directory: if level == Path::new("") {
                root.into()
            } else {
                Path::new(root).join(level)
            },
        }));
    }
    levels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_list_the_levels_from_the_process_to_the_root() {
        let levels =
            parse("0::/user.slice/job\n4:cpu,memory:/docker\n3:pids:/y\nnonsense\n1:memory:/\n");
        let found: Vec<(Version, &str)> = levels
            .iter()
            .map(|level| (level.version, level.directory.to_str().unwrap()))
            .collect();
        let expected = [
            (Version::V2, "/sys/fs/cgroup/user.slice/job"),
            (Version::V2, "/sys/fs/cgroup/user.slice"),
            (Version::V2, "/sys/fs/cgroup"),
            (Version::V1, "/sys/fs/cgroup/memory/docker"),
            (Version::V1, "/sys/fs/cgroup/memory"),
            (Version::V1, "/sys/fs/cgroup/memory"),
        ];
        assert_eq!(found, expected);
    }
}
