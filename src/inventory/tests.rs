use nvml_wrapper::error::NvmlError;

use super::*;

const GIB: u64 = 1 << 30;

/// One GPU of a DGX H100.
pub(crate) fn h100(index: u32) -> Gpu {
    Gpu {
        index,
        name: Some("NVIDIA H100 80GB HBM3".to_owned()),
        uuid: Some(format!("GPU-{index}f3c9d1e-7d11-4a3b-9e0c-2b9d6f6c8a10")),
        memory: memory(85_520_809_984, 634_060_800),
        mig: Some(Mig {
            enabled: false,
            pending: false,
            devices: Vec::new(),
        }),
        ecc: Some(Ecc {
            enabled: true,
            pending: true,
            uncorrected_volatile: Some(0),
            uncorrected_aggregate: Some(0),
        }),
        ..Gpu::default()
    }
}

fn memory(total: u64, used: u64) -> Option<GpuMemory> {
    Some(GpuMemory { total, used })
}

/// A card split into `slices` parts.
pub(crate) fn partitioned(index: u32, slices: u32) -> Gpu {
    let slice = |slice| MigDevice {
        index: slice,
        name: Some("NVIDIA A100-SXM4-40GB MIG 1g.5gb".to_owned()),
        uuid: Some(format!(
            "MIG-{index}{slice}84736-a75d-5eea-978f-d2b3004971fd"
        )),
        memory: memory(5_100_273_664, 0),
        visible: true,
    };
    Gpu {
        mig: Some(Mig {
            enabled: true,
            pending: true,
            devices: (0..slices).map(slice).collect(),
        }),
        name: Some("NVIDIA A100-SXM4-40GB".to_owned()),
        memory: memory(42_949_672_960, 0),
        ..h100(index)
    }
}

fn cpu() -> CpuReadings {
    CpuReadings {
        cpuinfo: Some(
            "processor\t: 0\nmodel name\t: AMD EPYC 9654 96-Core Processor\ncpu cores\t: 96\n\n\
             processor\t: 1\nmodel name\t: AMD EPYC 9654 96-Core Processor\n"
                .to_owned(),
        ),
        meminfo: Some(
            "MemTotal:       67108864 kB\nMemFree:        1024 kB\nMemAvailable:   33554432 kB\n"
                .to_owned(),
        ),
        cores: Some(2),
        cgroups: Vec::new(),
    }
}

pub(crate) fn readings(gpus: Vec<Gpu>) -> Readings {
    Readings {
        nvml: Ok(NvmlReadings {
            version: Some("570.86.15".to_owned()),
            cuda: Some(12080),
            gpus,
        }),
        cuda_visible_devices: None,
        cuda_device_order: None,
        cpu: cpu(),
    }
}

pub(crate) fn without_nvml(error: NvmlError, pci_gpus: Option<u32>) -> Inventory {
    without_driver(nvml::not_usable(&error, pci_gpus))
}

fn without_driver(driver: DriverState) -> Inventory {
    Inventory::from_readings(&Readings {
        nvml: Err(driver),
        ..readings(Vec::new())
    })
}

fn with_visible(value: &str, gpus: Vec<Gpu>) -> Inventory {
    Inventory::from_readings(&Readings {
        cuda_visible_devices: Some(value.to_owned()),
        ..readings(gpus)
    })
}

/// The ids of the ranks' devices, and the message.
fn seen(value: &str, gpus: Vec<Gpu>) -> (Vec<String>, Option<String>) {
    let inventory = with_visible(value, gpus);
    let ids = match inventory.devices() {
        Devices::Gpus { devices } => devices.into_iter().map(|device| device.id).collect(),
        Devices::CpuRanks { .. } => Vec::new(),
    };
    (ids, inventory.visibility.and_then(|v| v.message))
}

fn uuid(index: u32) -> String {
    format!("GPU-{index}f3c9d1e-7d11-4a3b-9e0c-2b9d6f6c8a10")
}

#[test]
fn every_gpu_is_a_device() {
    let inventory = Inventory::from_readings(&readings((0..8).map(h100).collect()));
    let devices = inventory.devices();
    assert_eq!(devices.count(), 8);
    assert_eq!(devices.memory(), Some(85_520_809_984));
    assert_eq!(devices.to_string(), "8 × NVIDIA H100 80GB HBM3");
    assert_eq!(
        inventory.driver,
        DriverState::Present {
            version: Some("570.86.15".to_owned()),
            cuda: Some("12.8".to_owned())
        }
    );
    assert_eq!(inventory.visibility, None);
}

#[test]
fn a_card_without_any_answer_is_still_listed_and_used() {
    let mute = Gpu {
        index: 1,
        ..Gpu::default()
    };
    let inventory = Inventory::from_readings(&readings(vec![h100(0), mute]));
    assert_eq!(inventory.gpus.len(), 2);
    assert_eq!(inventory.gpus[1].ecc, None);
    let devices = inventory.devices();
    assert_eq!(
        devices.to_string(),
        "1 × NVIDIA H100 80GB HBM3, 1 × unnamed GPU"
    );
    // An unknown size cannot be relied on.
    assert_eq!(devices.memory(), None);
}

#[test]
fn a_lost_card_is_listed_and_not_used() {
    let lost = Gpu {
        index: 1,
        problem: Some("device fell off the bus".to_owned()),
        ..Gpu::default()
    };
    let inventory = Inventory::from_readings(&readings(vec![h100(0), lost.clone()]));
    assert_eq!(inventory.gpus.len(), 2);
    assert_eq!(inventory.devices().count(), 1);

    let alone = Inventory::from_readings(&readings(vec![lost]));
    let Devices::CpuRanks { why, .. } = alone.devices() else {
        panic!("a lost GPU was used");
    };
    assert_eq!(why, "no GPU can be used");
}

#[test]
fn every_mig_device_is_a_device() {
    let inventory = Inventory::from_readings(&readings(vec![partitioned(0, 3), h100(1)]));
    let devices = inventory.devices();
    assert_eq!(devices.count(), 4);
    assert_eq!(devices.memory(), Some(5_100_273_664));
    assert_eq!(
        devices.to_string(),
        "3 × NVIDIA A100-SXM4-40GB MIG 1g.5gb, 1 × NVIDIA H100 80GB HBM3"
    );
}

#[test]
fn a_partitioned_card_without_partitions_is_not_a_device() {
    let (ids, message) = seen("0", vec![partitioned(0, 0)]);
    assert!(ids.is_empty());
    assert_eq!(
        message.as_deref(),
        Some(
            "CUDA_VISIBLE_DEVICES=0: GPU 0 is in MIG mode and has no MIG device; CUDA sees no GPU"
        )
    );
}

#[test]
fn visible_devices_keep_their_order() {
    let gpus = || (0..4).map(h100).collect::<Vec<_>>();
    assert_eq!(seen("2,0", gpus()), (vec![uuid(2), uuid(0)], None));
    assert_eq!(seen(" 3 , 1 ", gpus()), (vec![uuid(3), uuid(1)], None));
    let inventory = with_visible("2,0", gpus());
    let visible: Vec<bool> = inventory.gpus.iter().map(|gpu| gpu.visible).collect();
    assert_eq!(visible, [true, false, true, false]);
}

#[test]
fn visible_devices_may_be_uuids_or_their_prefixes() {
    let gpus = || (0..4).map(h100).collect::<Vec<_>>();
    assert_eq!(seen(&uuid(3), gpus()), (vec![uuid(3)], None));
    assert_eq!(seen("GPU-1f3c,0", gpus()), (vec![uuid(1), uuid(0)], None));
}

#[test]
fn visible_devices_may_be_mig_devices() {
    let gpus = || vec![h100(0), partitioned(1, 2)];
    let slice = |n: u32| format!("MIG-1{n}84736-a75d-5eea-978f-d2b3004971fd");
    assert_eq!(seen(&slice(1), gpus()), (vec![slice(1)], None));
    let inventory = with_visible(&slice(1), gpus());
    assert!(!inventory.gpus[0].visible);
    let mig = inventory.gpus[1].mig.as_ref().expect("a MIG card");
    assert!(inventory.gpus[1].visible && !mig.devices[0].visible && mig.devices[1].visible);
    // An index of a partitioned card selects its first MIG device.
    assert_eq!(seen("1", gpus()).0, [slice(0)]);
}

#[test]
fn empty_and_minus_one_hide_every_gpu() {
    for value in ["", " ", "-1"] {
        let inventory = with_visible(value, vec![h100(0)]);
        let Devices::CpuRanks { why, .. } = inventory.devices() else {
            panic!("CUDA_VISIBLE_DEVICES={value} left a GPU visible");
        };
        assert_eq!(
            why,
            format!("CUDA_VISIBLE_DEVICES=\"{value}\" hides every GPU")
        );
        assert_eq!(inventory.visibility.and_then(|v| v.message), None);
    }
}

#[test]
fn values_that_name_no_device_are_reported() {
    let gpus = || vec![h100(0), h100(1)];
    let summary = |value: &str| {
        let (ids, message) = seen(value, gpus());
        (ids.len(), message.expect("a message"))
    };
    assert_eq!(
        summary("0,7,1"),
        (
            1,
            "CUDA_VISIBLE_DEVICES=0,7,1: there is no GPU 7, only 0 to 1; CUDA sees only the 1 \
             before it"
                .to_owned()
        )
    );
    assert_eq!(
        summary("all"),
        (
            0,
            "CUDA_VISIBLE_DEVICES=all: `all` is no GPU here; CUDA sees no GPU".to_owned()
        )
    );
    assert_eq!(summary("1,1").0, 0);
    assert_eq!(summary("GPU-").0, 0);
    assert_eq!(summary(",0").0, 0);
    let (_, ambiguous) = seen("GPU-0", vec![h100(0), h100(0)]);
    assert_eq!(
        ambiguous.as_deref(),
        Some("CUDA_VISIBLE_DEVICES=GPU-0: `GPU-0` begins more than one UUID; CUDA sees no GPU")
    );
}

#[test]
fn indices_of_unlike_cards_are_ambiguous_unless_the_order_is_set() {
    let unlike = Gpu {
        name: Some("NVIDIA GeForce RTX 4090".to_owned()),
        ..h100(1)
    };
    let gpus = || vec![h100(0), unlike.clone()];
    assert!(
        seen("1", gpus())
            .1
            .is_some_and(|m| m.contains("CUDA_DEVICE_ORDER=PCI_BUS_ID"))
    );
    assert_eq!(seen(&uuid(1), gpus()).1, None);
    let ordered = Inventory::from_readings(&Readings {
        cuda_visible_devices: Some("1".to_owned()),
        cuda_device_order: Some("PCI_BUS_ID".to_owned()),
        ..readings(gpus())
    });
    assert_eq!(ordered.visibility.and_then(|v| v.message), None);
}

#[test]
fn without_a_driver_the_cpu_trains_and_the_reason_is_reported() {
    let missing = |failure, pci| match without_nvml(failure, pci).driver {
        DriverState::Absent { missing, .. } => missing,
        other => panic!("{other:?} is not absent"),
    };
    assert_eq!(
        missing(NvmlError::LibraryNotFound, Some(0)),
        "no NVIDIA GPU on this machine"
    );
    assert_eq!(
        missing(NvmlError::LibraryNotFound, Some(2)),
        "2 NVIDIA GPUs, but no driver (libnvidia-ml.so.1)"
    );
    assert_eq!(
        missing(NvmlError::LibraryNotFound, None),
        "no NVIDIA driver (libnvidia-ml.so.1)"
    );
    assert!(missing(NvmlError::DriverNotLoaded, None).contains("kernel module is not loaded"));

    let devices = without_nvml(NvmlError::LibraryNotFound, Some(0)).devices();
    assert_eq!(devices.count(), 1);
    assert_eq!(devices.memory(), Some(32 * GIB));
    assert_eq!(devices.to_string(), "1 CPU rank with 2 threads");
}

#[test]
fn an_old_driver_and_a_broken_one_are_distinct_states() {
    let old = without_nvml(
        NvmlError::FailedToLoadSymbol("nvmlInit_v2".to_owned()),
        None,
    );
    assert!(
        matches!(old.driver, DriverState::TooOld { message } if message.contains("nvmlInit_v2"))
    );
    let mismatch = without_nvml(NvmlError::LibRmVersionMismatch, None);
    assert!(
        matches!(mismatch.driver, DriverState::Broken { message } if message.contains("reboot"))
    );
    let junk = nvml::not_opened("libnvidia-ml.so.1: file too short", None);
    let junk = without_driver(junk);
    assert!(
        matches!(junk.driver, DriverState::Broken { message } if message.contains("too short"))
    );
    let missing = nvml::not_opened("libnvidia-ml.so.1: No such file or directory", Some(0));
    assert!(matches!(missing, DriverState::Absent { .. }));
    let other = without_nvml(NvmlError::Timeout, None);
    assert!(
        matches!(other.driver, DriverState::Broken { message } if message.starts_with("the NVIDIA driver does not answer"))
    );
}

#[test]
fn cpu_ranks_share_cores_and_memory() {
    let inventory = without_nvml(NvmlError::DriverNotLoaded, None);
    let four = inventory.cpu_ranks(4);
    assert_eq!(four.count(), 4);
    assert_eq!(four.memory(), Some(8 * GIB));
    assert_eq!(four.to_string(), "4 CPU ranks with 1 thread each");
    assert_eq!(
        inventory.cpu_ranks(2).to_string(),
        "2 CPU ranks with 1 thread each"
    );
}

#[test]
fn the_tightest_cgroup_limits_memory() {
    let cgroup = |limit, used, reclaimable| CgroupMemory {
        limit,
        used,
        reclaimable,
    };
    let mut cpu = cpu();
    cpu.cores = Some(1);
    cpu.cgroups = vec![
        cgroup(8 * GIB, 5 * GIB, GIB),
        cgroup(16 * GIB, 14 * GIB, GIB),
        cgroup(1 << 62, 14 * GIB, 0),
    ];
    let summary = cpu.summary();
    assert_eq!(summary.memory_total, Some(8 * GIB));
    // The level above has less free memory than this one.
    assert_eq!(summary.memory_available, Some(3 * GIB));
    assert_eq!(summary.cores, 1);
    assert_eq!(summary.cores_of_machine, Some(2));
    assert_eq!(
        summary.model.as_deref(),
        Some("AMD EPYC 9654 96-Core Processor")
    );
}

#[test]
fn an_unreadable_machine_still_has_one_core() {
    let summary = CpuReadings::default().summary();
    assert_eq!(summary.cores, 1);
    assert_eq!(summary.memory_total, None);
    assert_eq!(summary.cores_of_machine, None);
}

#[test]
fn recorded_readings_read_back_the_same() {
    let readings = readings(vec![h100(0), partitioned(1, 2)]);
    let recorded = serde_json::to_string(&readings).expect("readings become JSON");
    let back: Readings = serde_json::from_str(&recorded).expect("readings are read back");
    assert_eq!(back, readings);
}

#[test]
fn this_machine_has_cores_and_memory() {
    let inventory = Inventory::discover();
    assert!(inventory.cpu.cores >= 1);
    if let (Some(total), Some(available)) =
        (inventory.cpu.memory_total, inventory.cpu.memory_available)
    {
        assert!(available <= total, "{available} of {total} bytes available");
    }
    assert!(inventory.devices().count() >= 1);
}

#[test]
fn a_card_that_fell_off_the_bus_is_reported() {
    let lost = Gpu {
        problem: Some("GPU is lost".into()),
        ..h100(1)
    };
    let found = Inventory::from_readings(&readings(vec![h100(0), lost]));
    assert_eq!(found.device_shortfall(1), None);
    let words = found.device_shortfall(2).unwrap();
    assert!(
        words.contains("2 GPUs were reserved, NVML shows 1"),
        "{words}"
    );
    assert!(
        words.contains("GPU-1f3c9d1e") && words.contains("GPU is lost"),
        "{words}"
    );
}

#[test]
fn without_a_driver_no_shortfall_is_reported() {
    let absent = without_nvml(NvmlError::LibraryNotFound, None);
    assert_eq!(absent.device_shortfall(8), None);
}
