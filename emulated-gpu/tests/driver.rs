//! The driver's C interface: what programs see, and what the emulator reports of them.

mod common;

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};

use common::*;

#[test]
fn devices_have_names_uuids_memory_and_attributes() {
    let settings = [
        ("EMULATED_GPU_DEVICES", "3"),
        ("EMULATED_GPU_MEMORY", "4096"),
    ];
    in_child(
        "devices_have_names_uuids_memory_and_attributes",
        &settings,
        || {
            let cuda = Cuda::open();
            assert_eq!(cuda.cuDeviceGetCount(&mut 0), 3, "not initialised");
            assert_eq!(cuda.cuInit(1), INVALID_VALUE);
            assert_eq!(cuda.cuInit(0), 0);
            assert_eq!(cuda.out(|count| cuda.cuDeviceGetCount(count)), 3);
            let uuids = [0, 1].map(|device| cuda.out(|uuid| cuda.cuDeviceGetUuid_v2(uuid, device)));
            assert_ne!(uuids[0], uuids[1]);
            assert_eq!(cuda.out(|bytes| cuda.cuDeviceTotalMem_v2(bytes, 2)), 4096);
            let major = cuda.out(|value| cuda.cuDeviceGetAttribute(value, 75, 0));
            assert_eq!(major, 9);
            assert_eq!(cuda.cuDeviceGetAttribute(&mut 0, 75, 3), 101);
            assert_eq!(cuda.cuMemAlloc_v2(&mut 0, 1), 201, "no current context");
            let context = cuda.enter(1);
            assert_eq!(cuda.out(|current| cuda.cuCtxGetCurrent(current)), context);
            assert_eq!(cuda.out(|device| cuda.cuCtxGetDevice(device)), 1);
        },
    );
}

#[test]
fn functions_are_found_by_name_and_errors_have_names() {
    in_child(
        "functions_are_found_by_name_and_errors_have_names",
        &[],
        || {
            let cuda = Cuda::open();
            let find = |name: &str| {
                let (mut function, mut status) = (null(), 0);
                let name = CString::new(name).unwrap();
                let code =
                    cuda.cuGetProcAddress_v2(name.as_ptr(), &mut function, 13000, 0, &mut status);
                (code, function.is_null(), status)
            };
            assert_eq!(find("cuMemAlloc"), (0, false, 0));
            assert_eq!(find("cuLaunchKernel"), (0, false, 0));
            assert_eq!(find("cuNothing"), (500, true, 1));
            let mut name = null();
            assert_eq!(cuda.cuGetErrorName(700, &mut name), 0);
            // SAFETY: the driver returned a text.
            let name = unsafe { std::ffi::CStr::from_ptr(name) };
            assert_eq!(name, c"CUDA_ERROR_ILLEGAL_ADDRESS");
            assert_eq!(cuda.cuGetErrorName(12345, &mut null()), INVALID_VALUE);
        },
    );
}

#[test]
fn copies_and_sets_arrive() {
    let report = in_child("copies_and_sets_arrive", &[], || {
        let cuda = Cuda::start();
        let stream = cuda.stream();
        let a = cuda.put(&[1.0, 2.0, 3.0, 4.0]);
        let b = cuda.alloc(16);
        assert_eq!(cuda.cuMemcpyDtoDAsync_v2(b, a, 16, stream), 0);
        assert_eq!(cuda.cuMemsetD32Async(b + 4, 5f32.to_bits(), 1, stream), 0);
        assert_eq!(cuda.cuMemsetD8Async(b + 12, 0, 4, stream), 0);
        assert_eq!(cuda.cuMemsetD32Async(b + 2, 0, 1, stream), INVALID_VALUE);
        let from = cuda.pinned(&[9.0]);
        assert_eq!(
            cuda.cuMemcpyHtoDAsync_v2(b, from.as_ptr().cast(), 4, stream),
            0
        );
        let to = cuda.pinned(&[0.0; 4]);
        assert_eq!(
            cuda.cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), b, 16, stream),
            0
        );
        assert_eq!(cuda.cuStreamSynchronize(stream), 0);
        assert_eq!(to, [9.0, 5.0, 3.0, 0.0]);
        assert_eq!(cuda.cuMemFreeHost(to.as_mut_ptr().cast()), 0);
    });
    if let Some(report) = report {
        assert_eq!(of_kind(&report, "summary").len(), 1);
        assert_eq!(of_kind(&report, "summary")[0]["findings"], 0);
    }
}

/// A program that forgets to wait sees neither its data on the device nor on the host.
#[test]
fn pinned_memory_is_used_when_the_copy_runs_and_pageable_memory_at_the_call() {
    let name = "pinned_memory_is_used_when_the_copy_runs_and_pageable_memory_at_the_call";
    in_child(name, &[], || {
        let cuda = Cuda::start();
        let stream = cuda.stream();
        let a = cuda.alloc(8);
        let pinned = cuda.pinned(&[1.0]);
        let mut pageable = [1f32];
        assert_eq!(
            cuda.cuMemcpyHtoDAsync_v2(a, pinned.as_ptr().cast(), 4, stream),
            0
        );
        assert_eq!(
            cuda.cuMemcpyHtoDAsync_v2(a + 4, pageable.as_ptr().cast(), 4, stream),
            0
        );
        pinned[0] = 2.0;
        *std::hint::black_box(&mut pageable) = [2.0];
        assert_eq!(cuda.cuStreamSynchronize(stream), 0);
        assert_eq!(cuda.get(a, 2), [2.0, 1.0]);
        let pinned = cuda.pinned(&[0.0]);
        let mut pageable = [0f32];
        assert_eq!(
            cuda.cuMemcpyDtoHAsync_v2(pinned.as_mut_ptr().cast(), a, 4, stream),
            0
        );
        assert_eq!(pinned, [0.0]);
        assert_eq!(
            cuda.cuMemcpyDtoHAsync_v2(pageable.as_mut_ptr().cast(), a + 4, 4, stream),
            0
        );
        assert_eq!((pinned[0], pageable[0]), (2.0, 1.0));
    });
}

#[test]
fn invalid_ranges_and_frees_are_refused_at_the_call() {
    let report = in_child(
        "invalid_ranges_and_frees_are_refused_at_the_call",
        &[],
        || {
            let cuda = Cuda::start();
            let a = cuda.put(&[1.0; 4]);
            let mut host = [0f32; 8];
            let to: *mut c_void = host.as_mut_ptr().cast();
            assert_eq!(cuda.cuMemcpyDtoH_v2(to, a + 4, 16), INVALID_VALUE);
            assert_eq!(cuda.cuMemcpyDtoH_v2(null_mut(), a, 16), INVALID_VALUE);
            assert_eq!(cuda.cuMemFree_v2(a + 4), INVALID_VALUE);
            assert_eq!(cuda.cuMemFree_v2(0), 0);
            assert_eq!(cuda.cuMemFree_v2(a), 0);
            assert_eq!(cuda.cuMemcpyDtoH_v2(to, a, 16), INVALID_VALUE);
            assert_eq!(cuda.cuMemFree_v2(a), INVALID_VALUE);
            assert_eq!(cuda.cuCtxSynchronize(), 0, "these errors are not sticky");
        },
    );
    if let Some(report) = report {
        let misuse = of_kind(&report, "misuse");
        let said = misuse.iter().map(|line| line["message"].as_str().unwrap());
        let said: Vec<&str> = said.collect();
        assert_eq!(
            said,
            [
                "no allocation contains 16 bytes at 0x800000000104",
                "no allocation starts at 0x800000000104",
                "16 bytes at 0x800000000100 were freed",
                "0x800000000100 is freed twice",
            ]
        );
    }
}

#[test]
fn a_wrong_kernel_breaks_the_context_until_it_is_destroyed() {
    let report = in_child(
        "a_wrong_kernel_breaks_the_context_until_it_is_destroyed",
        &[],
        || {
            let cuda = Cuda::start();
            let fill = cuda.function(cuda.load(), "fill");
            let a = cuda.alloc(16);
            assert_eq!(
                cuda.fill(fill, 0, a, 1.0, 5),
                0,
                "the launch itself succeeds"
            );
            assert_eq!(cuda.cuCtxSynchronize(), ILLEGAL_ADDRESS);
            assert_eq!(cuda.cuMemAlloc_v2(&mut 0, 4), ILLEGAL_ADDRESS);
            assert_eq!(cuda.fill(fill, 0, a, 1.0, 1), ILLEGAL_ADDRESS);
            assert_eq!(cuda.cuStreamSynchronize(0), ILLEGAL_ADDRESS);
            assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(0), 0);
            cuda.enter(0);
            assert_eq!(cuda.cuMemAlloc_v2(&mut 0, 4), 0);
        },
    );
    if let Some(report) = report {
        let fault = of_kind(&report, "fault");
        assert_eq!(
            fault[0]["message"],
            "kernel fill (stream 0, operation 1): no allocation contains 4 bytes at 0x800000200110"
        );
    }
}

#[test]
fn reads_of_uninitialised_memory_and_use_after_free_are_found() {
    let report = in_child(
        "reads_of_uninitialised_memory_and_use_after_free_are_found",
        &[],
        || {
            let cuda = Cuda::start();
            let step = cuda.function(cuda.load(), "step");
            let a = cuda.put(&[1.0; 2]);
            let b = cuda.alloc(8);
            assert_eq!(cuda.step(step, 0, a, b, 1.0, 2), 0);
            assert_eq!(cuda.cuCtxSynchronize(), LAUNCH_FAILED);
            assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(0), 0);
            cuda.enter(0);
            let fill = cuda.function(cuda.load(), "fill");
            assert_eq!(cuda.fill(fill, 0, a, 1.0, 2), 0);
            assert_eq!(cuda.cuCtxSynchronize(), ILLEGAL_ADDRESS);
        },
    );
    if let Some(report) = report {
        let faults = of_kind(&report, "fault");
        let ends = ["are read before they are written", "were freed"];
        for (fault, end) in faults.iter().zip(ends) {
            let message = fault["message"].as_str().unwrap();
            assert!(message.ends_with(end), "{message}");
        }
        assert_eq!(of_kind(&report, "leak").len(), 2, "a and b");
    }
}

/// The same program without and with the event between its streams.
#[test]
fn a_missing_event_is_a_race_that_names_both_operations() {
    let report = in_child(
        "a_missing_event_is_a_race_that_names_both_operations",
        &[],
        || {
            let cuda = Cuda::start();
            let (one, two) = (cuda.stream(), cuda.stream());
            for event in [Some(cuda.event()), None] {
                let module = cuda.load();
                let [fill, step] = ["fill", "step"].map(|name| cuda.function(module, name));
                let a = cuda.put(&[0.0; 4]);
                let b = cuda.put(&[1.0; 4]);
                assert_eq!(cuda.fill(fill, one, a, 2.0, 4), 0);
                if let Some(event) = event {
                    assert_eq!(cuda.cuEventRecord(event, one), 0);
                    assert_eq!(cuda.cuStreamWaitEvent(two, event, 0), 0);
                }
                assert_eq!(cuda.step(step, two, b, a, 3.0, 4), 0);
                let code = cuda.cuCtxSynchronize();
                if event.is_some() {
                    assert_eq!(code, 0);
                    assert_eq!(cuda.get(b, 4), [5.0; 4]);
                } else {
                    assert_eq!(code, LAUNCH_FAILED);
                }
            }
        },
    );
    if let Some(report) = report {
        let races = of_kind(&report, "race");
        assert_eq!(races.len(), 1);
        let mut names =
            [&races[0]["first"], &races[0]["second"]].map(|name| name.as_str().unwrap());
        names.sort_unstable();
        assert_eq!(
            names,
            [
                "kernel fill (stream 1, operation 3)",
                "kernel step (stream 2, operation 3)"
            ]
        );
    }
}

/// Two waits of which both are needed: either one is dropped, then neither.
#[test]
fn a_dropped_wait_is_a_race() {
    for dropped in ["1", "2", "3"] {
        let settings = [("EMULATED_GPU_DROP_WAIT", dropped)];
        let report = in_child("a_dropped_wait_is_a_race", &settings, || {
            let cuda = Cuda::start();
            let (one, two, event) = (cuda.stream(), cuda.stream(), cuda.event());
            let module = cuda.load();
            let [fill, step] = ["fill", "step"].map(|name| cuda.function(module, name));
            let [a, b] = [0.0, 1.0].map(|value| cuda.put(&[value; 4]));
            assert_eq!(cuda.fill(fill, one, a, 2.0, 4), 0);
            assert_eq!(cuda.cuEventRecord(event, one), 0);
            assert_eq!(cuda.cuStreamWaitEvent(two, event, 0), 0);
            assert_eq!(cuda.step(step, two, b, a, 3.0, 4), 0);
            assert_eq!(cuda.cuEventRecord(event, two), 0);
            assert_eq!(cuda.cuStreamWaitEvent(one, event, 0), 0);
            assert_eq!(cuda.fill(fill, one, a, 4.0, 4), 0);
            let dropped = std::env::var("EMULATED_GPU_DROP_WAIT").unwrap();
            let expected = if dropped == "3" { 0 } else { LAUNCH_FAILED };
            assert_eq!(cuda.cuCtxSynchronize(), expected);
        });
        let Some(report) = report else { return };
        let races = of_kind(&report, "race").len();
        assert_eq!(races > 0, dropped != "3", "wait {dropped}: {races} races");
        assert_eq!(of_kind(&report, "summary")[0]["waits"], 2);
    }
}

/// Every pair is two operations on the same bytes. Each fails in every order without an event, and works with
/// one.
#[test]
fn every_operation_needs_an_order() {
    in_child("every_operation_needs_an_order", &[], || {
        let cuda = Cuda::start();
        let host = std::cell::Cell::new(null_mut::<c_void>());
        type Call<'a> = &'a dyn Fn(u64, u64, usize) -> i32;
        let fill: Call<'_> = &|a, _, stream| {
            let fill = cuda.function(cuda.load(), "fill");
            cuda.fill(fill, stream, a, 1.0, 4)
        };
        let set: Call<'_> = &|a, _, stream| cuda.cuMemsetD32Async(a, 0, 4, stream);
        let upload: Call<'_> = &|a, _, stream| cuda.cuMemcpyHtoDAsync_v2(a, host.get(), 16, stream);
        let download: Call<'_> =
            &|a, _, stream| cuda.cuMemcpyDtoHAsync_v2(host.get(), a, 16, stream);
        let store: Call<'_> = &|_, b, stream| cuda.cuMemcpyDtoHAsync_v2(host.get(), b, 16, stream);
        let copy: Call<'_> = &|a, b, stream| cuda.cuMemcpyDtoDAsync_v2(b, a, 16, stream);
        let free: Call<'_> = &|a, _, stream| cuda.cuMemFreeAsync(a, stream);
        let pairs = [
            (set, download),
            (upload, fill),
            (copy, fill),
            (copy, store),
            (upload, store),
            (fill, free),
            (copy, free),
        ];
        for (index, (first, second)) in pairs.into_iter().enumerate() {
            for round in 0..8 {
                assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(0), 0);
                cuda.enter(0);
                let [a, b] = [0, 1].map(|_| cuda.put(&[1.0; 4]));
                let [one, two] = [0, 1].map(|_| cuda.stream());
                assert_eq!(cuda.cuCtxSynchronize(), 0);
                host.set(cuda.pinned(&[1.0; 4]).as_mut_ptr().cast());
                assert_eq!(first(a, b, one), 0);
                if round == 0 {
                    let event = cuda.event();
                    assert_eq!(cuda.cuEventRecord(event, one), 0);
                    assert_eq!(cuda.cuStreamWaitEvent(two, event, 0), 0);
                }
                assert_eq!(second(a, b, two), 0);
                let code = cuda.cuCtxSynchronize();
                let failed = [LAUNCH_FAILED, ILLEGAL_ADDRESS].contains(&code);
                assert_eq!(failed, round > 0, "pair {index}, round {round}: {code}");
            }
        }
    });
}

/// An operation that ran by chance during a wait for something else is not ordered before later ones.
#[test]
fn a_wait_for_one_stream_does_not_order_another() {
    in_child("a_wait_for_one_stream_does_not_order_another", &[], || {
        let cuda = Cuda::start();
        for _ in 0..16 {
            assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(0), 0);
            cuda.enter(0);
            let fill = cuda.function(cuda.load(), "fill");
            let [a, b] = [0, 1].map(|_| cuda.alloc(4));
            let [one, two] = [0, 1].map(|_| cuda.stream());
            assert_eq!(cuda.fill(fill, one, a, 1.0, 1), 0);
            assert_eq!(cuda.fill(fill, two, b, 1.0, 1), 0);
            assert_eq!(cuda.cuStreamSynchronize(two), 0);
            assert_eq!(cuda.fill(fill, two, a, 1.0, 1), 0);
            assert_eq!(cuda.cuCtxSynchronize(), LAUNCH_FAILED);
        }
    });
}

#[test]
fn waits_of_the_host_order_streams() {
    let report = in_child("waits_of_the_host_order_streams", &[], || {
        let cuda = Cuda::start();
        let fill = cuda.function(cuda.load(), "fill");
        let [one, two, busy] = [0, 1, 2].map(|_| cuda.stream());
        let [a, b] = [0, 1].map(|_| cuda.alloc(4));
        let event = cuda.event();
        for wait in 0..4 {
            // Work that the host does not wait for keeps the history of accesses.
            assert_eq!(cuda.fill(fill, busy, b, 1.0, 1), 0);
            let (from, to) = if wait % 2 == 0 {
                (one, two)
            } else {
                (two, one)
            };
            assert_eq!(cuda.fill(fill, from, a, 1.0, 1), 0);
            assert_eq!(cuda.cuEventRecord(event, from), 0);
            match wait {
                0 => assert_eq!(cuda.cuStreamSynchronize(from), 0),
                1 => assert_eq!(cuda.cuEventSynchronize(event), 0),
                2 => while cuda.cuEventQuery(event) == NOT_READY {},
                _ => while cuda.cuStreamQuery(from) == NOT_READY {},
            }
            assert_eq!(cuda.fill(fill, to, a, 1.0, 1), 0);
        }
        assert_eq!(cuda.cuCtxSynchronize(), 0);
    });
    if let Some(report) = report {
        assert_eq!(of_kind(&report, "race").len(), 0);
    }
}

#[test]
fn copies_race_for_pinned_memory() {
    let report = in_child("copies_race_for_pinned_memory", &[], || {
        let cuda = Cuda::start();
        let a = cuda.put(&[1.0; 4]);
        let to = cuda.pinned(&[0.0; 4]).as_mut_ptr();
        for stream in [cuda.stream(), cuda.stream()] {
            assert_eq!(cuda.cuMemcpyDtoHAsync_v2(to.cast(), a, 16, stream), 0);
        }
        assert_eq!(cuda.cuCtxSynchronize(), LAUNCH_FAILED);
    });
    if let Some(report) = report {
        assert_eq!(of_kind(&report, "race")[0]["access"], "write after write");
    }
}

/// `cuMemcpyHtoD` from pageable memory returns before the copy is on the device.
#[test]
fn a_default_stream_copy_races_with_a_non_blocking_stream() {
    let name = "a_default_stream_copy_races_with_a_non_blocking_stream";
    let report = in_child(name, &[], || {
        let cuda = Cuda::start();
        let fill = cuda.function(cuda.load(), "fill");
        let a = cuda.alloc(4);
        assert_eq!(cuda.cuMemcpyHtoD_v2(a, pointer(&1f32), 4), 0);
        assert_eq!(cuda.fill(fill, cuda.stream(), a, 2.0, 1), 0);
        assert_eq!(cuda.cuCtxSynchronize(), LAUNCH_FAILED);
    });
    if let Some(report) = report {
        assert_eq!(of_kind(&report, "race").len(), 1);
    }
}

#[test]
fn events_order_streams_and_have_times() {
    in_child("events_order_streams_and_have_times", &[], || {
        let cuda = Cuda::start();
        let fill = cuda.function(cuda.load(), "fill");
        let stream = cuda.stream();
        let a = cuda.alloc(4);
        let [start, end] = [0, 1].map(|_| cuda.event());
        assert_eq!(
            cuda.cuEventQuery(start),
            0,
            "an event without a record is complete"
        );
        assert_eq!(cuda.cuEventElapsedTime(&mut 0.0, start, end), 400);
        assert_eq!(cuda.cuEventRecord(start, stream), 0);
        for _ in 0..20 {
            assert_eq!(cuda.fill(fill, stream, a, 2.0, 1), 0);
        }
        assert_eq!(cuda.cuEventRecord(end, stream), 0);
        assert_eq!(cuda.cuEventElapsedTime(&mut 0.0, start, end), NOT_READY);
        let mut polls = 0;
        while cuda.cuEventQuery(end) == NOT_READY {
            polls += 1;
        }
        assert!((4..22).contains(&polls), "{polls}");
        let time = cuda.out(|time| cuda.cuEventElapsedTime(time, start, end));
        assert!((time - 0.021).abs() < 1e-6, "{time}");
        assert_eq!(cuda.cuStreamQuery(stream), 0);
        assert_eq!(cuda.cuEventDestroy_v2(end), 0);
        assert_eq!(cuda.cuEventSynchronize(end), 400);
        assert_eq!(cuda.cuStreamDestroy_v2(stream), 0);
        assert_eq!(cuda.cuStreamSynchronize(stream), 400);
    });
}

#[test]
fn memory_runs_out_by_capacity_and_by_order_and_leaks_are_reported() {
    let settings = [
        ("EMULATED_GPU_MEMORY", "1000"),
        ("EMULATED_GPU_FAIL_ALLOC", "3"),
    ];
    let name = "memory_runs_out_by_capacity_and_by_order_and_leaks_are_reported";
    let report = in_child(name, &settings, || {
        let cuda = Cuda::start();
        let a = cuda.alloc(600);
        assert_eq!(cuda.cuMemAlloc_v2(&mut 0, 401), OUT_OF_MEMORY);
        assert_eq!(cuda.cuMemAlloc_v2(&mut 0, 1), OUT_OF_MEMORY, "the third");
        let b = cuda.alloc(400);
        let free = cuda.out(|free| cuda.cuMemGetInfo_v2(free, &mut 0));
        assert_eq!(free, 0);
        assert_eq!(cuda.cuMemFree_v2(a), 0);
        assert!(b > a);
        cuda.pinned(&[0.0; 2]);
        assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(0), 0);
        assert_eq!(cuda.cuMemAlloc_v2(&mut 0, 1), 201);
    });
    if let Some(report) = report {
        assert_eq!(of_kind(&report, "out_of_memory").len(), 2);
        let leaks = of_kind(&report, "leak");
        let bytes: Vec<_> = leaks.iter().map(|leak| &leak["bytes"]).collect();
        assert_eq!(bytes, [400, 8], "of the device and of the host");
        let device = &of_kind(&report, "summary")[0]["devices"][0];
        assert_eq!(
            (&device["peak_bytes"], &device["live_bytes"]),
            (&1000.into(), &0.into())
        );
    }
}

#[test]
fn stream_ordered_memory_is_checked_like_a_write() {
    let report = in_child("stream_ordered_memory_is_checked_like_a_write", &[], || {
        let cuda = Cuda::start();
        let fill = cuda.function(cuda.load(), "fill");
        let (one, two) = (cuda.stream(), cuda.stream());
        let a = cuda.out(|pointer| cuda.cuMemAllocAsync(pointer, 4, one));
        assert_eq!(cuda.fill(fill, one, a, 1.0, 1), 0);
        assert_eq!(cuda.cuMemFreeAsync(a, one), 0);
        assert_eq!(cuda.cuCtxSynchronize(), 0);
        let b = cuda.out(|pointer| cuda.cuMemAllocAsync(pointer, 4, one));
        assert_eq!(cuda.fill(fill, two, b, 1.0, 1), 0);
        assert_eq!(cuda.cuCtxSynchronize(), LAUNCH_FAILED);
    });
    if let Some(report) = report {
        assert_eq!(of_kind(&report, "race").len(), 1);
        assert_eq!(of_kind(&report, "fault").len(), 0);
    }
}

#[test]
fn devices_are_apart_and_copies_connect_them() {
    let settings = [("EMULATED_GPU_DEVICES", "2")];
    in_child(
        "devices_are_apart_and_copies_connect_them",
        &settings,
        || {
            let cuda = Cuda::start();
            let a = cuda.put(&[1.0]);
            let stream = cuda.stream();
            let event = cuda.event();
            let second = cuda.enter(1);
            let b = cuda.alloc(4);
            let other = cuda.stream();
            assert_eq!(cuda.cuMemcpyDtoDAsync_v2(b, a, 4, stream), 0);
            assert_eq!(
                cuda.cuEventRecord(event, other),
                400,
                "another device's event"
            );
            assert_eq!(cuda.cuEventRecord(event, stream), 0);
            assert_eq!(cuda.cuStreamWaitEvent(other, event, 0), 0);
            let fill = cuda.function(cuda.load(), "fill");
            assert_eq!(
                cuda.fill(fill, stream, b, 1.0, 1),
                400,
                "another device's stream"
            );
            assert_eq!(cuda.fill(fill, other, b, 3.0, 1), 0);
            assert_eq!(cuda.cuStreamSynchronize(other), 0);
            assert_eq!(cuda.get(b, 1), [3.0]);
            assert_eq!(cuda.fill(fill, other, a, 3.0, 1), 0, "no peer access");
            assert_eq!(cuda.cuCtxSynchronize(), ILLEGAL_ADDRESS);
            cuda.enter(0);
            assert_eq!(cuda.get(a, 1), [1.0], "the first device still works");
            assert_eq!(cuda.cuCtxSetCurrent(second), 0);
            assert_eq!(cuda.cuCtxSynchronize(), ILLEGAL_ADDRESS);
        },
    );
}

#[test]
fn modules_are_ptx_with_functions_globals_and_limits() {
    in_child(
        "modules_are_ptx_with_functions_globals_and_limits",
        &[],
        || {
            let cuda = Cuda::start();
            let elf: *const c_void = c"\x7fELF and more".as_ptr().cast();
            assert_eq!(cuda.cuModuleLoadData(&mut 0, elf), 209);
            assert_eq!(cuda.cuModuleLoadData(&mut 0, c"x".as_ptr().cast()), 218);
            let module = cuda.load();
            let missing = cuda.cuModuleGetFunction(&mut 0, module, c"missing".as_ptr());
            assert_eq!(missing, 500);
            let count = cuda.function(module, "count");
            assert_eq!(cuda.function(module, "count"), count);
            for _ in 0..3 {
                assert_eq!(cuda.launch(count, 1, 0, &[]), 0);
            }
            let name = c"counter".as_ptr();
            let (mut counter, mut bytes) = (0, 0);
            assert_eq!(
                cuda.cuModuleGetGlobal_v2(&mut counter, &mut bytes, module, name),
                0
            );
            assert_eq!((cuda.get(counter, 1)[0].to_bits(), bytes), (3, 4));

            let shared = cuda.function(module, "dynamic_shared");
            let out = cuda.alloc(4);
            let parameters = [pointer(&out)];
            let launch = |bytes| {
                let parameters = parameters.as_ptr();
                cuda.cuLaunchKernel(shared, 1, 1, 1, 1, 1, 1, bytes, 0, parameters, null())
            };
            assert_eq!(launch(48 << 10), 0);
            assert_eq!(launch(100 << 10), INVALID_VALUE);
            assert_eq!(cuda.cuFuncSetAttribute(shared, 8, 228 << 10), INVALID_VALUE);
            assert_eq!(cuda.cuFuncSetAttribute(shared, 8, 100 << 10), 0);
            assert_eq!(
                cuda.out(|value| cuda.cuFuncGetAttribute(value, 8, shared)),
                100 << 10
            );
            assert_eq!(launch(100 << 10), 0);
            assert_eq!(cuda.get(out, 1)[0].to_bits(), 100 << 10);
            let blocks = cuda.out(|blocks| {
                cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, shared, 256, 100 << 10)
            });
            assert_eq!(blocks, 2);
            assert_eq!(cuda.launch(shared, 1025, 0, &parameters), INVALID_VALUE);
            assert_eq!(cuda.launch(shared, 0, 0, &parameters), INVALID_VALUE);
            let wide = cuda.function(module, "wide");
            assert_eq!(cuda.launch(wide, 512, 0, &[]), 0);
            assert_eq!(cuda.launch(wide, 513, 0, &[]), 701, "registers");
            assert_eq!(cuda.cuModuleUnload(module), 0);
            assert_eq!(cuda.launch(count, 1, 0, &[]), 400);
        },
    );
}

#[test]
fn a_captured_graph_replays_its_operations_in_their_order() {
    let report = in_child(
        "a_captured_graph_replays_its_operations_in_their_order",
        &[],
        || {
            let cuda = Cuda::start();
            let module = cuda.load();
            let step = cuda.function(module, "step");
            let (one, two) = (cuda.stream(), cuda.stream());
            let [fork, join] = [0, 1].map(|_| cuda.event());
            let [a, b, c] = [1.0, 10.0, 100.0].map(|value| cuda.put(&[value]));
            assert_eq!(cuda.cuStreamBeginCapture_v2(one, 0), 0);
            assert_eq!(cuda.step(step, one, a, c, 2.0, 1), 0);
            assert_eq!(cuda.cuEventRecord(fork, one), 0);
            assert_eq!(cuda.cuStreamWaitEvent(two, fork, 0), 0);
            assert_eq!(cuda.step(step, two, b, a, 1.0, 1), 0);
            assert_eq!(cuda.cuEventRecord(join, two), 0);
            assert_eq!(cuda.cuStreamWaitEvent(one, join, 0), 0);
            assert_eq!(cuda.step(step, one, a, b, 1.0, 1), 0);
            assert_eq!(cuda.out(|status| cuda.cuStreamIsCapturing(two, status)), 1);
            let graph = cuda.out(|graph| cuda.cuStreamEndCapture(one, graph));
            assert_eq!(cuda.cuCtxSynchronize(), 0);
            assert_eq!(cuda.get(a, 1), [1.0], "a capture runs nothing");
            let executable = cuda.out(|e| cuda.cuGraphInstantiateWithFlags(e, graph, 0));
            assert_eq!(cuda.cuGraphDestroy(graph), 0);
            for _ in 0..2 {
                assert_eq!(cuda.cuGraphLaunch(executable, two), 0);
            }
            assert_eq!(cuda.cuStreamSynchronize(two), 0);
            // 102, 112, 214; 528, 640, 1168
            assert_eq!((cuda.get(a, 1)[0], cuda.get(b, 1)[0]), (1168.0, 640.0));
            assert_eq!(cuda.cuGraphExecDestroy(executable), 0);
            assert_eq!(cuda.cuGraphLaunch(executable, two), INVALID_VALUE);
        },
    );
    if let Some(report) = report {
        assert_eq!(of_kind(&report, "summary")[0]["launches"]["graph"], 2);
        assert_eq!(of_kind(&report, "race").len(), 0);
    }
}

/// Each illegal call returns its error, and the capture is invalid from then on.
#[test]
fn illegal_calls_invalidate_a_capture() {
    in_child("illegal_calls_invalidate_a_capture", &[], || {
        let cuda = Cuda::start();
        let fill = cuda.function(cuda.load(), "fill");
        let a = cuda.put(&[1.0]);
        let (one, two) = (cuda.stream(), cuda.stream());
        let blocking = cuda.out(|stream| cuda.cuStreamCreate(stream, 0));
        let [event, outside] = [0, 1].map(|_| cuda.event());
        assert_eq!(cuda.cuEventRecord(outside, two), 0);
        let mut host = 0f32;
        let to: *mut c_void = (&raw mut host).cast();
        type Call<'a> = &'a dyn Fn() -> i32;
        let calls: [(i32, Call<'_>); 8] = [
            (900, &|| cuda.cuStreamSynchronize(one)),
            (900, &|| cuda.cuStreamQuery(one)),
            (900, &|| cuda.cuCtxSynchronize()),
            (900, &|| cuda.cuMemAlloc_v2(&mut 0, 4)),
            (900, &|| cuda.cuMemcpyDtoHAsync_v2(to, a, 4, one)),
            (900, &|| cuda.cuMemcpyDtoH_v2(to, a, 4)),
            (905, &|| cuda.cuStreamWaitEvent(one, outside, 0)),
            (907, &|| {
                assert_eq!(cuda.cuEventRecord(event, one), 0);
                cuda.cuEventSynchronize(event)
            }),
        ];
        for (index, (code, call)) in calls.into_iter().enumerate() {
            assert_eq!(cuda.cuStreamBeginCapture_v2(one, 0), 0);
            assert_eq!(call(), code, "call {index}");
            assert_eq!(cuda.fill(fill, one, a, 1.0, 1), 901, "call {index}");
            let mut graph = 1;
            assert_eq!(cuda.cuStreamEndCapture(one, &mut graph), 901);
            assert_eq!(graph, 0);
            assert_eq!(cuda.cuStreamSynchronize(one), 0);
        }
        assert_eq!(cuda.cuStreamEndCapture(one, &mut 0), 401);
        assert_eq!(
            cuda.cuStreamBeginCapture_v2(0, 0),
            900,
            "the default stream"
        );

        // The default stream waits for blocking streams only.
        assert_eq!(cuda.cuStreamBeginCapture_v2(one, 0), 0);
        assert_eq!(cuda.fill(fill, 0, a, 1.0, 1), 0);
        assert_eq!(cuda.cuStreamEndCapture(one, &mut 0), 0);
        assert_eq!(cuda.cuStreamBeginCapture_v2(blocking, 0), 0);
        assert_eq!(cuda.fill(fill, 0, a, 1.0, 1), 906);
        assert_eq!(cuda.cuStreamEndCapture(blocking, &mut 0), 901);

        // A fork that does not join; the wrong stream; two captures that would merge.
        assert_eq!(cuda.cuStreamBeginCapture_v2(one, 0), 0);
        assert_eq!(cuda.cuEventRecord(event, one), 0);
        assert_eq!(cuda.cuStreamWaitEvent(two, event, 0), 0);
        assert_eq!(cuda.fill(fill, two, a, 1.0, 1), 0);
        assert_eq!(cuda.cuStreamEndCapture(two, &mut 0), 903);
        assert_eq!(cuda.cuStreamEndCapture(one, &mut 0), 904);
        assert_eq!(cuda.cuStreamBeginCapture_v2(one, 0), 0);
        assert_eq!(cuda.cuStreamBeginCapture_v2(two, 0), 0);
        assert_eq!(cuda.cuEventRecord(event, one), 0);
        assert_eq!(cuda.cuStreamWaitEvent(two, event, 0), 902);
        assert_eq!(cuda.cuStreamEndCapture(one, &mut 0), 901);
        assert_eq!(cuda.cuStreamEndCapture(two, &mut 0), 901);

        // A thread that did not begin the capture; a relaxed capture allows both.
        assert_eq!(cuda.cuStreamBeginCapture_v2(one, 1), 0);
        std::thread::scope(|scope| {
            scope.spawn(|| assert_eq!(cuda.cuStreamEndCapture(one, &mut 0), 908));
        });
        assert_eq!(cuda.cuStreamEndCapture(one, &mut 0), 0);
        assert_eq!(cuda.cuStreamBeginCapture_v2(one, 2), 0);
        assert_eq!(cuda.cuMemAlloc_v2(&mut 0, 4), 0);
        assert_eq!(cuda.cuStreamEndCapture(one, &mut 0), 0);
    });
}

/// Threads use the driver at once, each with separate streams, on two devices.
#[test]
fn threads_share_the_driver() {
    let settings = [("EMULATED_GPU_DEVICES", "2")];
    let report = in_child("threads_share_the_driver", &settings, || {
        let cuda = Cuda::start();
        let work = |device: i32| {
            cuda.enter(device);
            let step = cuda.function(cuda.load(), "step");
            let stream = cuda.stream();
            let one = cuda.put(&[1.0; 8]);
            for round in 0..20 {
                let a = cuda.put(&[0.0; 8]);
                for _ in 0..round {
                    assert_eq!(cuda.step(step, stream, a, one, 1.0, 8), 0);
                }
                assert_eq!(cuda.cuStreamSynchronize(stream), 0);
                assert_eq!(cuda.get(a, 8), [round as f32; 8]);
                assert_eq!(cuda.cuMemFree_v2(a), 0);
            }
        };
        std::thread::scope(|scope| {
            for thread in 0..4 {
                scope.spawn(move || work(thread % 2));
            }
        });
    });
    if let Some(report) = report {
        let summary = of_kind(&report, "summary")[0];
        assert_eq!(
            (&summary["findings"], &summary["unfinished"]),
            (&0.into(), &0.into())
        );
        let launches = 4 * (0..20).sum::<i32>();
        assert_eq!(summary["launches"]["step"], launches);
        assert_eq!(summary["counts"]["kernel step"]["threads"], 8 * launches);
    }
}

#[test]
fn a_trap_is_a_launch_failure() {
    in_child("a_trap_is_a_launch_failure", &[], || {
        let cuda = Cuda::start();
        let trap = cuda.function(cuda.load(), "trap");
        assert_eq!(cuda.launch(trap, 1, 0, &[]), 0);
        assert_eq!(cuda.cuCtxSynchronize(), LAUNCH_FAILED);
    });
}
