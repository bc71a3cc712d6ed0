//! NVML as `nvml-wrapper` and thereby `evenkeel` use it.

mod common;

use std::path::PathBuf;

use common::*;
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::event::EventData;

/// The file of faults of a child.
fn faults() -> PathBuf {
    std::env::var_os("EMULATED_GPU_FAULTS").unwrap().into()
}

fn in_child_with_faults(name: &str, body: impl FnOnce()) {
    let directory = tempfile::tempdir().unwrap();
    let faults = directory.path().join("faults");
    let settings = [
        ("EMULATED_GPU_DEVICES", "2"),
        ("EMULATED_GPU_MEMORY", "7000"),
        ("EMULATED_GPU_FAULTS", faults.to_str().unwrap()),
    ];
    in_child(name, &settings, body);
}

#[test]
fn devices_are_listed_and_agree_with_the_driver() {
    let settings = [
        ("EMULATED_GPU_DEVICES", "3"),
        ("EMULATED_GPU_MEMORY", "7000"),
        ("CUDA_VISIBLE_DEVICES", "2,1"),
    ];
    in_child(
        "devices_are_listed_and_agree_with_the_driver",
        &settings,
        || {
            let nvml = Nvml::init().unwrap();
            assert_eq!(nvml.device_count().unwrap(), 3);
            assert_eq!(nvml.sys_cuda_driver_version().unwrap(), 13000);
            assert!(nvml.sys_driver_version().unwrap().starts_with("580."));
            let device = nvml.device_by_index(2).unwrap();
            let uuid = device.uuid().unwrap();
            assert_eq!(uuid, "GPU-02000000-656d-756c-6174-656467707500");
            assert_eq!(nvml.device_by_uuid(uuid).unwrap().index().unwrap(), 2);
            let pci = device.pci_info().unwrap();
            assert_eq!(pci.bus_id, "00000000:03:00.0");
            assert_eq!(
                nvml.device_by_pci_bus_id(pci.bus_id)
                    .unwrap()
                    .index()
                    .unwrap(),
                2
            );
            assert!(matches!(
                nvml.device_by_index(3),
                Err(NvmlError::InvalidArg)
            ));
            assert_eq!(device.name().unwrap(), "Emulated GPU");
            assert_eq!(device.mig_mode().unwrap().current, 0);
            assert!(device.is_ecc_enabled().unwrap().currently_enabled);
            assert_eq!(device.utilization_rates().unwrap().gpu, 0);
            assert_eq!(device.temperature(TemperatureSensor::Gpu).unwrap(), 40);

            let cuda = Cuda::start();
            assert_eq!(cuda.out(|count| cuda.cuDeviceGetCount(count)), 2);
            let bytes = cuda.out(|uuid: &mut [u8; 16]| cuda.cuDeviceGetUuid_v2(uuid, 0));
            assert_eq!(bytes[0], 2);
            cuda.alloc(1000);
            let memory = device.memory_info().unwrap();
            assert_eq!((memory.total, memory.used), (7000, 1000));
        },
    );
}

#[test]
fn a_device_can_be_lost_and_return_while_a_program_runs() {
    in_child_with_faults(
        "a_device_can_be_lost_and_return_while_a_program_runs",
        || {
            let nvml = Nvml::init().unwrap();
            let cuda = Cuda::start();
            let device = nvml.device_by_index(0).unwrap();
            assert!(device.name().is_ok());
            std::fs::write(faults(), r#"{"0": {"lost": true}}"#).unwrap();
            assert!(matches!(device.name(), Err(NvmlError::GpuLost)));
            assert!(matches!(nvml.device_by_index(0), Err(NvmlError::GpuLost)));
            assert!(nvml.device_by_index(1).is_ok());
            assert_eq!(cuda.cuCtxSynchronize(), 999);
            std::fs::write(faults(), "{}").unwrap();
            assert!(device.name().is_ok());
            assert_eq!(cuda.cuCtxSynchronize(), 999, "the context stays broken");
        },
    );
}

#[test]
fn ecc_errors_are_counted_and_break_the_context() {
    in_child_with_faults("ecc_errors_are_counted_and_break_the_context", || {
        let nvml = Nvml::init().unwrap();
        let cuda = Cuda::start();
        let device = nvml.device_by_index(0).unwrap();
        let count = |kind| device.total_ecc_errors(kind, EccCounter::Volatile).unwrap();
        assert_eq!(count(MemoryError::Uncorrected), 0);
        let faulty = r#"{"0": {"ecc_corrected": 5, "ecc_uncorrected": 2}}"#;
        std::fs::write(faults(), faulty).unwrap();
        assert_eq!(count(MemoryError::Corrected), 5);
        assert_eq!(count(MemoryError::Uncorrected), 2);
        assert_eq!(cuda.cuMemAlloc_v2(&mut 0, 4), 214);
        cuda.cuCtxSetCurrent(0);
        let context = cuda.out(|context| cuda.cuDevicePrimaryCtxRetain(context, 1));
        assert_eq!(cuda.cuCtxSetCurrent(context), 0);
        assert_eq!(cuda.cuMemAlloc_v2(&mut 0, 4), 0, "the other device works");
    });
}

#[test]
fn xids_are_events() {
    in_child_with_faults("xids_are_events", || {
        let nvml = Nvml::init().unwrap();
        let device = nvml.device_by_index(1).unwrap();
        let set = nvml.create_event_set().unwrap();
        let set = device.register_events(EventTypes::CRITICAL_XID_ERROR, set);
        let set = set.map_err(|error| error.error).unwrap();
        assert!(matches!(set.wait(1), Err(NvmlError::Timeout)));
        std::fs::write(faults(), r#"{"1": {"xid": 79, "lost": true}}"#).unwrap();
        let EventData { event_data, .. } = set.wait(1000).unwrap();
        assert_eq!(event_data, Some(XidError::Value(79)));
        assert!(matches!(set.wait(1), Err(NvmlError::Timeout)));
    });
}

#[test]
fn mig_devices_are_listed() {
    in_child_with_faults("mig_devices_are_listed", || {
        std::fs::write(faults(), r#"{"1": {"mig_devices": 2}}"#).unwrap();
        let nvml = Nvml::init().unwrap();
        let device = nvml.device_by_index(1).unwrap();
        assert_eq!(device.mig_mode().unwrap().current, 1);
        let slots = 0..device.mig_device_count().unwrap();
        let found: Vec<_> = slots
            .filter_map(|slot| device.mig_device_by_index(slot).ok())
            .collect();
        assert_eq!(found.len(), 2);
        let uuid = found[1].uuid().unwrap();
        assert_eq!(uuid, "MIG-01000000-656d-756c-6174-656467707502");
        assert_eq!(found[1].memory_info().unwrap().total, 3500);
        assert!(found[1].mig_is_mig_device_handle().unwrap());
        assert_eq!(nvml.device_by_uuid(uuid).unwrap().index().unwrap(), 1);
    });
}
