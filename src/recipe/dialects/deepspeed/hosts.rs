//! DeepSpeed's device filters: `host:0,1@other:2,3`.
//!
//! Source: DeepSpeed edaa722, `launcher/runner.py` (`parse_node_config_list`).

use std::collections::BTreeSet;

/// The number of devices in a filter. `None` for a host without a list, which means all of its
/// devices; only the hostfile knows their number.
pub(crate) fn device_count(filter: &str) -> Option<u64> {
    let mut devices = BTreeSet::new();
    for host in filter.split('@') {
        let (host, slots) = host.split_once(':')?;
        for slot in slots.split(',') {
            devices.insert((host, slot.trim().parse::<u64>().ok()?));
        }
    }
    Some(devices.len() as u64)
}

#[cfg(test)]
mod tests {
    use super::device_count;

    #[test]
    fn each_listed_device_counts_once_and_whole_hosts_have_no_count() {
        assert_eq!(device_count("a:0,1@b:2"), Some(3));
        assert_eq!(device_count("a:0,0@a:0"), Some(1));
        assert_eq!(device_count("a:0,1@b"), None);
        assert_eq!(device_count("a:0-3"), None);
    }
}
