//! Settings of the emulated GPUs: environment variables, read at the first call.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::time::Duration;

use crate::memory::MAX_DEVICES;

/// Settings of this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Devices of the machine, as NVML counts them.
    pub devices: usize,
    /// The driver's devices, by their indices among all: `CUDA_VISIBLE_DEVICES`.
    pub visible: Vec<usize>,
    /// Bytes of each device.
    pub memory: u64,
    /// Bytes of each device as NVML counts them: with those that the driver keeps for itself.
    pub nvml_memory: u64,
    /// Orders operations, blocks and warps.
    pub seed: u64,
    /// Allocations that succeed before one fails.
    pub fail_after: Option<u64>,
    /// Models of the devices, by their indices among all; the last is that of all further devices.
    pub models: Vec<Model>,
    /// The newest CUDA that the driver supports, as `cuDriverGetVersion` returns it.
    pub driver: i32,
    /// Waits of streams for events that are kept before one is ignored.
    pub drop_wait_after: Option<u64>,
    /// File of the report.
    pub report: Option<PathBuf>,
    /// File of the faults that NVML and the driver read at each call.
    pub faults: Option<PathBuf>,
    /// Write the start and the end of each operation to the report.
    pub timeline: bool,
    pub nccl: NcclConfig,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NcclConfig {
    /// As `ncclGetVersion` returns it.
    pub version: i32,
    /// After this time, an operation or an initialisation without its peers is a finding.
    pub timeout: Duration,
    /// The least duration of an operation.
    pub delay: Duration,
    /// The operation of the process that fails, counted from 1; 0 for none.
    pub fail: u64,
    /// The only rank whose operation fails; -1 for every one.
    pub fail_rank: i64,
    /// The initialisation of the process that fails, counted from 1; 0 for none.
    pub fail_init: u64,
    /// The loss of a peer gives no error.
    pub silent_loss: bool,
    /// Several ranks may use one device, from NCCL 2.30 on.
    pub multi_rank: bool,
    /// On which the process listens for the other ranks.
    pub address: Ipv4Addr,
}

/// Name and compute capability of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Model {
    pub name: String,
    /// Major and minor.
    pub capability: (i32, i32),
}

impl Model {
    fn new(name: &str, capability: u64) -> Model {
        Model {
            name: name.to_owned(),
            capability: ((capability / 10) as i32, (capability % 10) as i32),
        }
    }
}

/// The name of every device, unless a setting names them.
const NAME: &str = "Emulated GPU";

impl Default for Config {
    fn default() -> Config {
        Config {
            devices: 1,
            visible: vec![0],
            memory: 1 << 30,
            nvml_memory: 1 << 30,
            seed: 0,
            fail_after: None,
            models: vec![Model::new(NAME, 90)],
            driver: 13000,
            drop_wait_after: None,
            report: None,
            faults: None,
            timeline: false,
            nccl: NcclConfig::default(),
        }
    }
}

impl Default for NcclConfig {
    fn default() -> NcclConfig {
        NcclConfig {
            version: 22803,
            timeout: Duration::from_secs(60),
            delay: Duration::ZERO,
            fail: 0,
            fail_rank: -1,
            fail_init: 0,
            silent_loss: false,
            multi_rank: false,
            address: Ipv4Addr::LOCALHOST,
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

    /// The model of a device, by its index among all.
    pub fn model(&self, device: usize) -> &Model {
        &self.models[device.min(self.models.len() - 1)]
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
        let nvml_memory = number(
            "EMULATED_GPU_NVML_MEMORY",
            "bytes, at most 2^40",
            memory,
            0,
            1 << 40,
        )?;
        let fail = number("EMULATED_GPU_FAIL_ALLOC", "a number", 0, 0, u64::MAX)?;
        let drop_wait = number("EMULATED_GPU_DROP_WAIT", "a number", 0, 0, u64::MAX)?;
        let capability = number("EMULATED_GPU_CAPABILITY", "80 to 121", 90, 80, 121)?;
        let models = match get("EMULATED_GPU_MODELS") {
            None => vec![Model::new(NAME, capability)],
            Some(list) => models(&list).ok_or(ConfigError {
                variable: "EMULATED_GPU_MODELS",
                value: list,
                expected: "names and capabilities, for example NVIDIA H100:90,NVIDIA A100:80",
            })?,
        };
        let flag = |variable| number(variable, "0 or 1", 0, 0, 1).map(|value| value == 1);
        let nccl = NcclConfig {
            version: number(
                "EMULATED_NCCL_VERSION",
                "20000 to 29999",
                22803,
                20000,
                29999,
            )? as i32,
            timeout: seconds(&get, "EMULATED_NCCL_TIMEOUT", default.nccl.timeout)?,
            delay: Duration::from_micros(number(
                "EMULATED_NCCL_DELAY_US",
                "microseconds",
                0,
                0,
                u64::MAX,
            )?),
            fail: number("EMULATED_NCCL_FAIL", "a number", 0, 0, u64::MAX)?,
            fail_rank: match get("EMULATED_NCCL_FAIL_RANK") {
                None => -1,
                Some(value) => value.parse().map_err(|_| ConfigError {
                    variable: "EMULATED_NCCL_FAIL_RANK",
                    value,
                    expected: "a rank",
                })?,
            },
            fail_init: number("EMULATED_NCCL_FAIL_INIT", "a number", 0, 0, u64::MAX)?,
            silent_loss: flag("EMULATED_NCCL_SILENT_LOSS")?,
            multi_rank: get("NCCL_MULTI_RANK_GPU_ENABLE").as_deref() == Some("1"),
            address: match get("EMULATED_NCCL_ADDRESS") {
                None => default.nccl.address,
                Some(value) => value.parse().map_err(|_| ConfigError {
                    variable: "EMULATED_NCCL_ADDRESS",
                    value,
                    expected: "an IPv4 address of this machine",
                })?,
            },
        };
        let driver = number("EMULATED_GPU_DRIVER", "10000 to 19000", 13000, 10000, 19000)?;
        Ok(Config {
            devices: devices as usize,
            visible: match get("CUDA_VISIBLE_DEVICES") {
                None => (0..devices as usize).collect(),
                Some(list) => visible(&list, devices as usize),
            },
            memory,
            nvml_memory,
            seed: number("EMULATED_GPU_SEED", "a number", 0, 0, u64::MAX)?,
            fail_after: fail.checked_sub(1),
            models,
            driver: driver as i32,
            drop_wait_after: drop_wait.checked_sub(1),
            report: get("EMULATED_GPU_REPORT").map(PathBuf::from),
            faults: get("EMULATED_GPU_FAULTS").map(PathBuf::from),
            timeline: flag("EMULATED_GPU_TIMELINE")?,
            nccl,
        })
    }
}

/// A duration in seconds, with a fraction.
fn seconds(
    get: impl Fn(&str) -> Option<String>,
    variable: &'static str,
    default: Duration,
) -> Result<Duration, ConfigError> {
    let Some(value) = get(variable) else {
        return Ok(default);
    };
    let parsed = value.parse().ok().map(Duration::try_from_secs_f64);
    parsed.and_then(Result::ok).ok_or(ConfigError {
        variable,
        value,
        expected: "seconds",
    })
}

/// The models of a list, `name:capability` each.
fn models(list: &str) -> Option<Vec<Model>> {
    let mut entries = list.split(',').map(str::trim);
    entries.try_fold(Vec::new(), |mut models, entry| {
        let (name, capability) = entry.rsplit_once(':')?;
        models.push(Model::new(name, capability.parse().ok()?));
        Some(models)
    })
}

/// The devices of a list of indices and UUIDs. As in the driver, an invalid entry ends the list, and a device
/// that is listed twice leaves none.
fn visible(list: &str, devices: usize) -> Vec<usize> {
    let mut visible = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let by_uuid = |&device: &usize| {
            let prefix = entry.strip_prefix("GPU-");
            prefix.is_some_and(|prefix| uuid_text(device, 0).starts_with(prefix))
        };
        let device = match entry.parse() {
            Ok(index) => Some(index).filter(|&index: &usize| index < devices),
            Err(_) => (0..devices).find(by_uuid),
        };
        let Some(device) = device else { break };
        if visible.contains(&device) {
            return Vec::new();
        }
        visible.push(device);
    }
    visible
}

/// The bytes of a UUID, the same in all processes; `part` is 0 for a GPU and counts its MIG devices from 1.
pub fn uuid(device: usize, part: usize) -> [u8; 16] {
    let mut uuid = *b"\0\0\0\0emulatedgpu\0";
    // The start differs between devices, so that a prefix is enough.
    uuid[0] = device as u8;
    uuid[15] = part as u8;
    uuid
}

/// A UUID as text, in groups of 8, 4, 4, 4 and 12 digits.
pub fn uuid_text(device: usize, part: usize) -> String {
    let mut text = String::new();
    for (index, byte) in uuid(device, part).into_iter().enumerate() {
        if [4, 6, 8, 10].contains(&index) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
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
            "EMULATED_GPU_DROP_WAIT" => Some("1".to_owned()),
            _ => None,
        };
        let config = Config::read(get).unwrap();
        assert_eq!((config.devices, config.fail_after), (4, Some(2)));
        assert_eq!(config.drop_wait_after, Some(0));
        assert_eq!(config.visible, [0, 1, 2, 3]);
        let error = Config::read(|_| Some("99".into())).unwrap_err();
        assert_eq!(
            error.to_string(),
            "invalid EMULATED_GPU_DEVICES=99: expected 0 to 16"
        );
    }

    #[test]
    fn durations_are_seconds_with_a_fraction() {
        let read = |value: &'static str| {
            Config::read(|variable| (variable == "EMULATED_NCCL_TIMEOUT").then(|| value.to_owned()))
        };
        assert_eq!(
            read("0.5").unwrap().nccl.timeout,
            Duration::from_millis(500)
        );
        for invalid in ["-1", "NaN", "soon"] {
            assert!(read(invalid).is_err());
        }
    }

    #[test]
    fn devices_have_the_models_of_the_list_and_then_its_last() {
        let get = |variable: &str| match variable {
            "EMULATED_GPU_MODELS" => Some("NVIDIA H100:90, Tesla V100: SXM2:70".to_owned()),
            _ => None,
        };
        let config = Config::read(get).unwrap();
        let model = |device| {
            (
                config.model(device).name.as_str(),
                config.model(device).capability,
            )
        };
        assert_eq!(model(0), ("NVIDIA H100", (9, 0)));
        assert_eq!(model(1), ("Tesla V100: SXM2", (7, 0)));
        assert_eq!(model(1), model(5));
        assert_eq!(models(""), None);
        assert_eq!(models("NVIDIA H100"), None);
    }

    #[test]
    fn visible_devices_are_indices_or_uuids_up_to_the_first_invalid_one() {
        assert_eq!(visible("2, 0", 3), [2, 0]);
        assert_eq!(visible("1,3,0", 3), [1]);
        assert!(visible("", 3).is_empty());
        assert!(visible("1,1", 3).is_empty());
        let uuid = format!("GPU-{},GPU-00", uuid_text(1, 0));
        assert_eq!(visible(&uuid, 3), [1, 0]);
        assert_eq!(uuid_text(1, 2), "01000000-656d-756c-6174-656467707502");
    }
}
