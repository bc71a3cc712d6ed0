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
            Some(mig) => places.extend(mig.devices.iter().map(|slice| DeviceIndex {
                gpu: gpu.index,
                mig: Some(slice.index),
            })),
            None => places.push(DeviceIndex {
                gpu: gpu.index,
                mig: None,
            }),
        }
    }
    places
}

/// Parses the variable and marks the GPUs and MIG devices that it leaves visible.
pub(super) fn apply(value: &str, device_order: Option<&str>, gpus: &mut [Gpu]) -> Visibility {
    let (order, message) = select(value, gpus);
    let mut indices = value
        .split(',')
        .filter_map(|entry| entry.trim().parse::<u32>().ok());
    let message = message.or_else(|| {
        let alike = gpus.windows(2).all(|pair| pair[0].name == pair[1].name);
        (indices.next().is_some() && !alike && device_order != Some("PCI_BUS_ID")).then(|| {
            format!(
                "CUDA_VISIBLE_DEVICES={value} counts unlike GPUs fastest first, this list counts \
                 them by PCI bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID or name UUIDs"
            )
        })
    });
    for gpu in gpus {
        let on_it = |place: &&DeviceIndex| place.gpu == gpu.index;
        gpu.visible = order.iter().any(|place| on_it(&place));
        for slice in gpu.mig.iter_mut().flat_map(|mig| &mut mig.devices) {
            slice.visible = order
                .iter()
                .filter(on_it)
                .any(|place| place.mig == Some(slice.index));
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
        if gpu
            .uuid
            .as_deref()
            .is_some_and(|id| begins(id, entry, "GPU-"))
        {
            matches.push(whole(gpu)?);
        }
        for slice in gpu.mig.iter().flat_map(|mig| &mig.devices) {
            if slice
                .uuid
                .as_deref()
                .is_some_and(|id| begins(id, entry, "MIG-"))
            {
                matches.push(DeviceIndex {
                    gpu: gpu.index,
                    mig: Some(slice.index),
                });
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
fn begins(uuid: &str, entry: &str, prefix: &str) -> bool {
    entry.starts_with(prefix) && entry.len() > prefix.len() && uuid.starts_with(entry)
}

/// The whole GPU; of a partitioned one CUDA uses the first MIG device.
fn whole(gpu: &Gpu) -> Result<DeviceIndex, String> {
    everything(std::slice::from_ref(gpu))
        .first()
        .copied()
        .ok_or_else(|| format!("GPU {} is in MIG mode and has no MIG device", gpu.index))
}
