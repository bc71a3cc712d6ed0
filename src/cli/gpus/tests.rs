use super::*;
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
