//! The processor and the memory that this process may use.
//!
//! A container or a batch system gives a process less than the whole machine: cores by affinity and cgroup
//! quota (the standard library considers both), memory by cgroup limits at any level above it.

use serde::{Deserialize, Serialize};

use super::cgroup::{self, MemoryCgroup, Version};

/// Readings from the kernel.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuReadings {
    pub cpuinfo: Option<String>,
    pub meminfo: Option<String>,
    /// Cores allowed by affinity and cgroup quota.
    pub cores: Option<u64>,
    /// The memory cgroups from this process's own up to the root.
    pub cgroups: Vec<CgroupMemory>,
}

/// One level of memory limits, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupMemory {
    /// The limit, in bytes.
    pub limit: u64,
    /// Bytes in use, including the page cache.
    pub used: u64,
    /// Page cache that the kernel can reclaim.
    pub reclaimable: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpu {
    /// Model name, for example `AMD EPYC 9654 96-Core Processor`.
    pub model: Option<String>,
    /// Logical cores that this process may use.
    pub cores: u64,
    /// Logical cores of the machine.
    pub cores_of_machine: Option<u64>,
    /// Memory that this process may use, bytes: the machine's or the tightest cgroup's.
    pub memory_total: Option<u64>,
    /// The part of it that is free or can be reclaimed, in bytes.
    pub memory_available: Option<u64>,
}

impl CpuReadings {
    /// Reads this machine's state.
    pub(super) fn take() -> CpuReadings {
        let read = |path: &str| std::fs::read_to_string(path).ok();
        CpuReadings {
            cpuinfo: read("/proc/cpuinfo"),
            meminfo: read("/proc/meminfo"),
            cores: std::thread::available_parallelism()
                .ok()
                .map(|n| n.get() as u64),
            cgroups: cgroup::memory_cgroups()
                .iter()
                .filter_map(CgroupMemory::read)
                .collect(),
        }
    }

    pub(super) fn summary(&self) -> Cpu {
        let cpuinfo = self.cpuinfo.as_deref().unwrap_or_default();
        let meminfo = self.meminfo.as_deref().unwrap_or_default();
        let of_machine = cpuinfo
            .lines()
            .filter(|line| field(line, "processor").is_some())
            .count() as u64;
        let mut total = kibibytes(meminfo, "MemTotal");
        let mut available = kibibytes(meminfo, "MemAvailable");
        for cgroup in &self.cgroups {
            let free = cgroup
                .limit
                .saturating_sub(cgroup.used.saturating_sub(cgroup.reclaimable));
            total = Some(total.map_or(cgroup.limit, |bytes| bytes.min(cgroup.limit)));
            available = Some(available.map_or(free, |bytes| bytes.min(free)));
        }
        Cpu {
            model: cpuinfo
                .lines()
                .find_map(|line| field(line, "model name"))
                .map(str::to_owned),
            cores: self.cores.unwrap_or(of_machine).max(1),
            cores_of_machine: Some(of_machine).filter(|&n| n > 0),
            memory_total: total,
            memory_available: available,
        }
    }
}

/// The value of a `key : value` line.
fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let (name, value) = line.split_once(':')?;
    (name.trim() == key).then(|| value.trim())
}

/// The bytes of a `Key:  123 kB` line in `/proc/meminfo`.
fn kibibytes(meminfo: &str, key: &str) -> Option<u64> {
    let value = meminfo.lines().find_map(|line| field(line, key))?;
    let number: u64 = value.strip_suffix("kB")?.trim().parse().ok()?;
    number.checked_mul(1024)
}

impl CgroupMemory {
    /// The limit of one level; `None` if there is none (`max` under v2; under v1 a number near 2⁶³, which
    /// exceeds the memory of every machine and so changes nothing).
    fn read(level: &MemoryCgroup) -> Option<CgroupMemory> {
        // The line of `memory.stat` counts reclaimable page cache.
        let [limit, used, line] = match level.version {
            Version::V1 => [
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            ],
            Version::V2 => ["memory.max", "memory.current", "inactive_file"],
        };
        let read = |file: &str| std::fs::read_to_string(level.directory.join(file)).ok();
        let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
        let stat = read("memory.stat").unwrap_or_default();
        let mut lines = stat.lines();
        let reclaimable = lines.find_map(|text| text.strip_prefix(line)?.trim().parse().ok());
        Some(CgroupMemory {
            limit: number(limit)?,
            used: number(used)?,
            reclaimable: reclaimable.unwrap_or(0),
        })
    }
}
