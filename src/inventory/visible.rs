//! `CUDA_VISIBLE_DEVICES`, parsed as CUDA does (CUDA C++ Programming Guide, "CUDA Environment Variables").
//!
//! The value is a comma-separated list of indices, of UUIDs or their unambiguous prefixes, and of MIG UUIDs.
//! CUDA takes entries up to the first invalid one and silently ignores the rest; this module reports it.
//! Empty and `-1` hide every GPU.

use serde::{Deserialize, Serialize};

use super::Gpu;

/// The effect of the variable on the GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Visibility {
    /// Value of the variable.
    pub value: String,
    /// The devices visible to CUDA, in the order of its numbering.
    pub order: Vec<DeviceIndex>,
    /// A problem of the value, or a note on it, one line.
    pub message: Option<String>,
}

/// A GPU or a MIG device on it, by NVML's indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceIndex {
    /// Index of the GPU.
    pub gpu: u32,
    /// Index of the MIG device on it, if any.
    pub mig: Option<u32>,
}

/// Every GPU, and of partitioned ones every MIG device. A run starts one process for each, so CUDA's limit of
/// one MIG device per process does not matter.
pub(super) fn everything(gpus: &[Gpu]) -> Vec<DeviceIndex> {
    let mut places = Vec::new();
    for gpu in gpus {
        match gpu.mig.as_ref().filter(|mig| mig.enabled) {
            Some(mig) => places.extend(mig.devices.iter().map(|slice| on(gpu, Some(slice.index)))),
            None => places.push(on(gpu, None)),
        }
    }
    places
}

fn on(gpu: &Gpu, mig: Option<u32>) -> DeviceIndex {
    DeviceIndex {
        gpu: gpu.index,
        mig,
    }
}

/// Parses the variable and marks the GPUs and MIG devices that it leaves visible.
pub(super) fn apply(value: &str, device_order: Option<&str>, gpus: &mut [Gpu]) -> Visibility {
    let (order, message) = select(value, gpus);
    let counts = |entry: &str| entry.trim().parse::<u32>().is_ok();
    let alike = gpus.windows(2).all(|pair| pair[0].name == pair[1].name);
    let ambiguous = value.split(',').any(counts) && !alike && device_order != Some("PCI_BUS_ID");
    let message = message.or_else(|| {
        ambiguous.then(|| {
            format!(
                "CUDA_VISIBLE_DEVICES={value} counts unlike GPUs fastest first, this list counts \
                 them by PCI bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID or name UUIDs"
            )
        })
    });
    for gpu in gpus {
        gpu.visible = order.iter().any(|place| place.gpu == gpu.index);
        let index = gpu.index;
        for slice in gpu.mig.iter_mut().flat_map(|mig| &mut mig.devices) {
            let mig = Some(slice.index);
            slice.visible = order.contains(&DeviceIndex { gpu: index, mig });
        }
    }
    Visibility {
        value: value.to_owned(),
        order,
        message,
    }
}

fn select(value: &str, gpus: &[Gpu]) -> (Vec<DeviceIndex>, Option<String>) {
    let mut order: Vec<DeviceIndex> = Vec::new();
    if value.trim().is_empty() || value.trim() == "-1" {
        return (order, None);
    }
    for entry in value.split(',').map(str::trim) {
        let place = match find(entry, gpus) {
            Ok(place) => place,
            Err(why) => {
                let rest = if order.is_empty() {
                    "CUDA sees no GPU".to_owned()
                } else {
                    format!("CUDA sees only the {} before it", order.len())
                };
                let message = format!("CUDA_VISIBLE_DEVICES={value}: {why}; {rest}");
                return (order, Some(message));
            }
        };
        if order.contains(&place) {
            let message =
                format!("CUDA_VISIBLE_DEVICES={value} names `{entry}` twice; CUDA sees no GPU");
            return (Vec::new(), Some(message));
        }
        order.push(place);
    }
    (order, None)
}

/// The one device that an entry selects; the error says why there is none.
fn find(entry: &str, gpus: &[Gpu]) -> Result<DeviceIndex, String> {
    if let Ok(index) = entry.parse::<i64>() {
        let gpu = gpus.iter().find(|gpu| i64::from(gpu.index) == index);
        return match (gpu, gpus.len()) {
            (Some(gpu), _) => whole(gpu),
            (None, 0) => Err(format!("there is no GPU {index}, nor any other")),
            (None, 1) => Err(format!("there is no GPU {index}, only GPU 0")),
            (None, n) => Err(format!("there is no GPU {index}, only 0 to {}", n - 1)),
        };
    }
    let mut matches = Vec::new();
    for gpu in gpus {
        if begins(&gpu.uuid, entry, "GPU-") {
            matches.push(whole(gpu)?);
        }
        for slice in gpu.mig.iter().flat_map(|mig| &mig.devices) {
            if begins(&slice.uuid, entry, "MIG-") {
                matches.push(on(gpu, Some(slice.index)));
            }
        }
    }
    match matches[..] {
        [place] => Ok(place),
        [] => Err(format!("`{entry}` is no GPU here")),
        _ => Err(format!("`{entry}` begins more than one UUID")),
    }
}

/// Whether `entry` is a prefix of the UUID and long enough.
fn begins(uuid: &Option<String>, entry: &str, prefix: &str) -> bool {
    let long_enough = entry.starts_with(prefix) && entry.len() > prefix.len();
    long_enough && uuid.as_ref().is_some_and(|uuid| uuid.starts_with(entry))
}

/// The whole GPU; of a partitioned one CUDA uses the first MIG device.
fn whole(gpu: &Gpu) -> Result<DeviceIndex, String> {
    let places = everything(std::slice::from_ref(gpu));
    let none = || format!("GPU {} is in MIG mode and has no MIG device", gpu.index);
    places.first().copied().ok_or_else(none)
}
