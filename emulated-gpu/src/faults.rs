//! Faults of devices: a JSON file that is read at each call, so that a test breaks a device of another
//! process.
//!
//! `{"0": {"lost": true}, "1": {"ecc_uncorrected": 3}}`; see [`DeviceFaults`] for the keys.

use std::path::Path;

use serde_json::Value;

/// The content of the file.
#[derive(Debug, Clone, Default)]
pub struct Faults(Value);

/// Faults of one device; the keys of the file are the names of the fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DeviceFaults {
    /// The device fell off the bus.
    pub lost: bool,
    /// ECC errors since the driver was loaded.
    pub ecc_corrected: u64,
    /// A driver call after an uncorrected error fails.
    pub ecc_uncorrected: u64,
    /// The last XID; 0 for none.
    pub xid: u64,
    /// MIG devices of equal size; 0 means that MIG is off.
    pub mig_devices: u64,
    /// MIG is on without a MIG device, so the driver does not show the device.
    pub mig_empty: bool,
    /// The device is in exclusive-process mode, and another process uses it.
    pub exclusive: bool,
    /// Degrees Celsius.
    pub temperature: u64,
    /// Percent.
    pub utilization: u64,
    /// Bytes that other processes use.
    pub used: u64,
}

impl Faults {
    /// Reads the file. A missing or half-written file has no faults.
    pub fn read(path: &Path) -> Faults {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        Faults(serde_json::from_str(&text).unwrap_or_default())
    }

    pub fn device(&self, index: usize) -> DeviceFaults {
        let device = &self.0[index.to_string()];
        let flag = |key: &str| device[key].as_bool().unwrap_or(false);
        let number = |key: &str, default| device[key].as_u64().unwrap_or(default);
        DeviceFaults {
            lost: flag("lost"),
            mig_empty: flag("mig_empty"),
            exclusive: flag("exclusive"),
            ecc_corrected: number("ecc_corrected", 0),
            ecc_uncorrected: number("ecc_uncorrected", 0),
            xid: number("xid", 0),
            mig_devices: number("mig_devices", 0),
            temperature: number("temperature", 40),
            utilization: number("utilization", 0),
            used: number("used", 0),
        }
    }
}
