//! Settings of the emulated GPUs: environment variables, read at the first call.

use std::path::PathBuf;

use crate::memory::MAX_DEVICES;

/// Settings of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub devices: usize,
    /// Bytes of each device.
    pub memory: u64,
    /// Orders operations, blocks and warps.
    pub seed: u64,
    /// Allocations that succeed before one fails.
    pub fail_after: Option<u64>,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// File of the report.
    pub report: Option<PathBuf>,
    /// File of the faults that NVML and the driver read at each call.
    pub faults: Option<PathBuf>,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            devices: 1,
            memory: 1 << 30,
            seed: 0,
            fail_after: None,
            capability: (9, 0),
            report: None,
            faults: None,
        }
    }
}

/// A setting that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("invalid {variable}={value}: expected {expected}")]
pub struct ConfigError {
    variable: &'static str,
    value: String,
    expected: &'static str,
}

impl Config {
    pub fn from_environment() -> Result<Config, ConfigError> {
        Config::read(|variable| std::env::var_os(variable)?.into_string().ok())
    }

    fn read(get: impl Fn(&str) -> Option<String>) -> Result<Config, ConfigError> {
        let number = |variable, expected, default: u64, least, most| match get(variable) {
            None => Ok(default),
            Some(value) => match value.parse() {
                Ok(number) if (least..=most).contains(&number) => Ok(number),
                _ => Err(ConfigError {
                    variable,
                    value,
                    expected,
                }),
            },
        };
        let default = Config::default();
        let most = MAX_DEVICES as u64;
        let devices = number("EMULATED_GPU_DEVICES", "0 to 16", 1, 0, most)?;
        let memory = number(
            "EMULATED_GPU_MEMORY",
            "bytes, at most 2^40",
            default.memory,
            0,
            1 << 40,
        )?;
        let fail = number("EMULATED_GPU_FAIL_ALLOC", "a number", 0, 0, u64::MAX)?;
        let capability = number("EMULATED_GPU_CAPABILITY", "80 to 121", 90, 80, 121)?;
        Ok(Config {
            devices: devices as usize,
            memory,
            seed: number("EMULATED_GPU_SEED", "a number", 0, 0, u64::MAX)?,
            fail_after: fail.checked_sub(1),
            capability: ((capability / 10) as i32, (capability % 10) as i32),
            report: get("EMULATED_GPU_REPORT").map(PathBuf::from),
            faults: get("EMULATED_GPU_FAULTS").map(PathBuf::from),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_have_defaults_and_invalid_ones_are_named() {
        assert_eq!(Config::read(|_| None), Ok(Config::default()));
        let get = |variable: &str| match variable {
            "EMULATED_GPU_DEVICES" => Some("4".to_owned()),
            "EMULATED_GPU_FAIL_ALLOC" => Some("3".to_owned()),
            _ => None,
        };
        let config = Config::read(get).unwrap();
        assert_eq!((config.devices, config.fail_after), (4, Some(2)));
        let error = Config::read(|_| Some("99".into())).unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid EMULATED_GPU_DEVICES=99: expected 0 to 16"
        );
    }
}
