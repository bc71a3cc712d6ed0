use super::*;
use crate::engine::cuda::libraries::Problem;
use crate::inventory::tests::{h100, partitioned, readings, without_nvml};
use crate::inventory::{GpuReadings, NvmlFailure, Readings};

/// What stands on a terminal, without its colours.
fn shown(inventory: &Inventory) -> String {
    anstream::adapter::strip_str(&text(inventory)).to_string()
}

#[test]
fn gpus_are_a_table() {
    let sick = GpuReadings {
        index: 2,
        ecc_uncorrected_volatile: Some(3),
        ecc_uncorrected_aggregate: Some(14),
        mig_mode: Some((false, true)),
        ..h100(2)
    };
    let old = GpuReadings {
        index: 3,
        name: Some("Tesla K20c".to_owned()),
        ..GpuReadings::default()
    };
    let lost = GpuReadings {
        index: 4,
        problem: Some("device fell off the bus or has otherwise become inacessible".to_owned()),
        ..GpuReadings::default()
    };
    let gpus = vec![h100(0), partitioned(1, 2), sick, old, lost];
    insta::assert_snapshot!(shown(&Inventory::from_readings(&readings(gpus))));
}

#[test]
fn hidden_gpus_are_marked_and_a_bad_value_is_said() {
    let readings = Readings {
        cuda_visible_devices: Some("1,9".to_owned()),
        ..readings(vec![h100(0), h100(1)])
    };
    insta::assert_snapshot!(shown(&Inventory::from_readings(&readings)));
}

#[test]
fn a_machine_without_gpus_shows_its_cpu() {
    insta::assert_snapshot!(shown(&without_nvml(NvmlFailure::NoLibrary, Some(0))));
}

#[test]
fn hiding_every_gpu_leaves_the_cpu() {
    let readings = Readings {
        cuda_visible_devices: Some(String::new()),
        ..readings(vec![h100(0)])
    };
    insta::assert_snapshot!(shown(&Inventory::from_readings(&readings)));
}

#[test]
fn each_cuda_library_has_a_line_with_its_version_or_the_way_to_get_it() {
    let found = |name, file| Found {
        name,
        file,
        path: None,
        version: None,
        problem: None,
    };
    let libraries = [
        Found {
            problem: Some(Problem::TooOld {
                version: "11.8".to_owned(),
                needed: "12.0".to_owned(),
                install: "install NVIDIA's driver 525 or newer",
            }),
            ..found("driver", "libcuda.so.1")
        },
        found("NVML", "libnvidia-ml.so.1"),
        Found {
            version: Some("12.9".to_owned()),
            path: Some("/wheels/nvidia/cuda_nvrtc/lib/libnvrtc.so.12".into()),
            ..found("NVRTC", "libnvrtc.so.12")
        },
        Found {
            problem: Some(Problem::Missing {
                install: "pip install nvidia-nccl-cu12",
            }),
            ..found("NCCL", "libnccl.so.2")
        },
    ];
    let shown = |libraries: &[Found]| anstream::adapter::strip_str(&cuda(libraries)).to_string();
    insta::assert_snapshot!(shown(&libraries), @r"
    CUDA LIBRARY  FILE               VERSION
    driver        libcuda.so.1       11.8 is too old, 12.0 is needed: install NVIDIA's driver 525 or newer
    NVML          libnvidia-ml.so.1  found
    NVRTC         libnvrtc.so.12     12.9 (/wheels/nvidia/cuda_nvrtc/lib/libnvrtc.so.12)
    NCCL          libnccl.so.2       missing: pip install nvidia-nccl-cu12
    looked for in EVENKEEL_CUDA_LIBRARIES, in the active virtual environment and where the loader looks
    the built-in trainer computes on CPUs and needs none of them yet
    ");
    // Where nothing is wrong, nobody asks where it was looked for.
    insta::assert_snapshot!(shown(&libraries[1..3]), @r"
    CUDA LIBRARY  FILE               VERSION
    NVML          libnvidia-ml.so.1  found
    NVRTC         libnvrtc.so.12     12.9 (/wheels/nvidia/cuda_nvrtc/lib/libnvrtc.so.12)
    the built-in trainer computes on CPUs and needs none of them yet
    ");
}
