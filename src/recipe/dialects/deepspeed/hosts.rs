//! DeepSpeed's device filters: `host:0,1@other:2,3`.
//!
//! Source: DeepSpeed edaa722, `launcher/runner.py` (`parse_node_config_list`).

use std::collections::{BTreeMap, BTreeSet};

/// The devices that a filter lists, by host. A host without a list, which means all of its devices, has none here.
/// `None`: DeepSpeed cannot parse the filter.
pub(crate) fn devices(filter: &str) -> Option<BTreeMap<&str, BTreeSet<u64>>> {
    let mut hosts: BTreeMap<&str, BTreeSet<u64>> = BTreeMap::new();
    for host in filter.split('@') {
        let (host, slots) = match host.split_once(':') {
            Some((host, slots)) => (host, Some(slots)),
            None => (host, None),
        };
        let listed = hosts.entry(host).or_default();
        for slot in slots.into_iter().flat_map(|slots| slots.split(',')) {
            listed.insert(slot.trim().parse().ok()?);
        }
    }
    Some(hosts)
}

/// The number of devices in a filter. `None`: it names a whole host, and only the hostfile knows the number of its
/// devices.
pub(crate) fn device_count(filter: &str) -> Option<u64> {
    let hosts = devices(filter)?;
    let listed = hosts.values().all(|devices| !devices.is_empty());
    listed.then(|| hosts.values().map(|devices| devices.len() as u64).sum())
}

#[cfg(test)]
mod tests {
    use super::device_count;

    #[test]
    fn each_listed_device_counts_once_and_whole_hosts_have_no_count() {
        assert_eq!(device_count("a:0,1@b:2"), Some(3));
        assert_eq!(device_count("a:0,0@a:0"), Some(1));
        assert_eq!(device_count("a:0,1@b"), None);
        assert_eq!(device_count("a@a:0"), Some(1));
        assert_eq!(device_count("a:0-3"), None);
    }
}
