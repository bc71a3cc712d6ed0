use super::*;
use crate::engine::cuda::libraries::Problem;
use crate::inventory::tests::{h100, partitioned, readings, without_nvml};
use crate::inventory::{GpuReadings, NvmlFailure, Readings};

/// The terminal output without colours.
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
fn hidden_gpus_are_marked_and_a_bad_value_is_reported() {
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
fn each_cuda_library_is_listed_with_its_version_or_install_command() {
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
    searched EVENKEEL_CUDA_LIBRARIES, the active virtual environment and the loader's search path
    the built-in trainer runs on CPUs and does not use these libraries yet
    ");
    // The search path is not shown if all libraries work.
    insta::assert_snapshot!(shown(&libraries[1..3]), @r"
    CUDA LIBRARY  FILE               VERSION
    NVML          libnvidia-ml.so.1  found
    NVRTC         libnvrtc.so.12     12.9 (/wheels/nvidia/cuda_nvrtc/lib/libnvrtc.so.12)
    the built-in trainer runs on CPUs and does not use these libraries yet
    ");
}
