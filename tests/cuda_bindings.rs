//! The bindings of CUDA's libraries on emulated GPUs (`emulated-gpu/`). Each test runs in child processes,
//! because a process loads the libraries and their settings once.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use evenkeel::engine::cuda::Precision;
use evenkeel::engine::cuda::compiler::{Compiler, Source};
use evenkeel::engine::cuda::cublaslt::{Blas, Operand, Product};
use evenkeel::engine::cuda::driver::{Argument, Device, Driver, Grid, Memory, Pinned, Stream};
use evenkeel::engine::cuda::error::CudaError;
use evenkeel::engine::cuda::measured::Measured;
use evenkeel::engine::cuda::nvrtc::Nvrtc;
use half::bf16;
use serde_json::Value;

/// The test that a child process runs.
const CHILD: &str = "EVENKEEL_TEST_CHILD";
/// File for the text that the child returns.
const SAID: &str = "EVENKEEL_TEST_SAID";
/// Directories of CUDA's libraries.
const LIBRARIES: &str = "EVENKEEL_CUDA_LIBRARIES";

/// What a child did.
struct Outcome {
    /// Lines of the emulated GPUs' report.
    report: Vec<Value>,
    /// What the body returned.
    said: String,
}

impl Outcome {
    fn of_kind(&self, kind: &str) -> Vec<&Value> {
        let lines = self.report.iter();
        lines.filter(|line| line["kind"] == kind).collect()
    }

    /// Fails if the emulated GPUs found a mistake, a leak included.
    fn clean(&self) {
        let summary = self.of_kind("summary");
        assert_eq!(summary.len(), 1, "{:?}", self.report);
        assert_eq!(summary[0]["findings"], 0, "{:?}", self.report);
    }
}

/// Runs the body in a child process on emulated GPUs with these settings. In the child nothing is returned.
fn on_gpus(
    name: &str,
    settings: &[(&str, &str)],
    body: impl FnOnce() -> String,
) -> Option<Outcome> {
    let directory = tempfile::tempdir().unwrap();
    emulated_gpu::install(directory.path()).unwrap();
    in_child(name, directory.path(), settings, body)
}

/// Runs the body in a child process with the libraries of a directory.
fn in_child(
    name: &str,
    directory: &Path,
    settings: &[(&str, &str)],
    body: impl FnOnce() -> String,
) -> Option<Outcome> {
    if std::env::var(CHILD).as_deref() == Ok(name) {
        let said = body();
        std::fs::write(std::env::var_os(SAID).unwrap(), said).unwrap();
        return None;
    }
    let files = tempfile::tempdir().unwrap();
    let [report, said] = ["report", "said"].map(|name| files.path().join(name));
    let mut command = Command::new(std::env::current_exe().unwrap());
    for (variable, _) in std::env::vars_os() {
        if variable.as_encoded_bytes().starts_with(b"EMULATED_GPU_") {
            command.env_remove(variable);
        }
    }
    let output = command
        .args([name, "--exact", "--nocapture"])
        .env_remove("CUDA_VISIBLE_DEVICES")
        .env_remove("VIRTUAL_ENV")
        .env(CHILD, name)
        .env(SAID, &said)
        .env(LIBRARIES, directory)
        .env("LD_LIBRARY_PATH", directory)
        .env("EMULATED_GPU_REPORT", &report)
        .envs(settings.iter().copied())
        .output()
        .unwrap();
    let [out, error] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    assert!(output.status.success(), "{}: {out}\n{error}", output.status);
    assert!(out.contains("1 passed"), "no test is named {name}");
    let lines = std::fs::read_to_string(report).unwrap_or_default();
    let lines = lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    Some(Outcome {
        report: lines.collect(),
        said: std::fs::read_to_string(said).unwrap(),
    })
}

fn device(ordinal: usize) -> Arc<Device> {
    Device::open(&Driver::load().unwrap(), ordinal).unwrap()
}

/// The kernels of the emulated driver that need no compiler.
fn scripted(device: &Arc<Device>) -> evenkeel::engine::cuda::driver::Module {
    let image = emulated_gpu::scripted::MARK.as_bytes();
    device.module(image, "scripted kernels").unwrap()
}

fn grid(threads: u32) -> Grid {
    Grid {
        blocks: (1, 1, 1),
        threads,
        shared: 0,
    }
}

/// `out[i] = value` for 32 elements.
fn fill(stream: &Stream, module: &evenkeel::engine::cuda::driver::Module, out: u64, value: f32) {
    let function = module.function("fill").unwrap();
    let arguments = [
        Argument::Address(out),
        Argument::Float(value),
        Argument::Int(32),
    ];
    // SAFETY: the arguments are those of the kernel; the caller keeps the memory.
    unsafe { stream.launch(&function, grid(32), &arguments) }.unwrap();
}

/// `out[i] = factor * out[i] + add[i]` for 32 elements.
fn step(
    stream: &Stream,
    module: &evenkeel::engine::cuda::driver::Module,
    [out, add]: [u64; 2],
    factor: f32,
) {
    let function = module.function("step").unwrap();
    let arguments = [
        Argument::Address(out),
        Argument::Address(add),
        Argument::Float(factor),
        Argument::Int(32),
    ];
    // SAFETY: the arguments are those of the kernel; the caller keeps the memory.
    unsafe { stream.launch(&function, grid(32), &arguments) }.unwrap();
}

fn upload(device: &Arc<Device>, stream: &Stream, bytes: &[u8], what: &str) -> Memory {
    let memory = device.allocate(bytes.len() as u64, what).unwrap();
    let mut pinned = device.pinned(bytes.len(), what).unwrap();
    pinned.bytes_mut().copy_from_slice(bytes);
    // SAFETY: both live until the stream is synchronised.
    unsafe { stream.upload(memory.address(), &pinned, 0..bytes.len()) }.unwrap();
    stream.synchronize().unwrap();
    memory
}

fn download(device: &Arc<Device>, stream: &Stream, memory: &Memory) -> Pinned {
    let bytes = memory.bytes() as usize;
    let mut pinned = device.pinned(bytes, "download").unwrap();
    // SAFETY: both live until the stream is synchronised.
    unsafe { stream.download(&mut pinned, 0, memory.address(), bytes) }.unwrap();
    stream.synchronize().unwrap();
    pinned
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    let chunks = bytes.chunks_exact(4);
    chunks
        .map(|chunk| f32::from_le_bytes(chunk.try_into().unwrap()))
        .collect()
}

#[test]
fn a_device_has_its_properties() {
    let name = "a_device_has_its_properties";
    let settings = [
        ("EMULATED_GPU_DEVICES", "2"),
        ("EMULATED_GPU_MODELS", "NVIDIA A100:80,NVIDIA H100:90"),
        ("EMULATED_GPU_MEMORY", "1048576"),
        ("EMULATED_GPU_DRIVER", "12080"),
    ];
    let outcome = on_gpus(name, &settings, || {
        let driver = Driver::load().unwrap();
        assert_eq!(driver.version.to_string(), "12.8");
        assert_eq!(driver.device_count().unwrap(), 2);
        let device = Device::open(&driver, 1).unwrap();
        assert_eq!(
            (device.name.as_str(), device.capability),
            ("NVIDIA H100", (9, 0))
        );
        assert_eq!(device.uuid, "GPU-01000000-656d-756c-6174-656467707500");
        assert_eq!(device.multiprocessors, 4);
        assert_eq!(device.total_memory, 1 << 20);
        let memory = device.allocate(1 << 18, "a test").unwrap();
        assert_eq!(memory.bytes(), 1 << 18);
        assert_eq!(device.free_memory().unwrap(), 3 << 18);
        drop(memory);
        assert_eq!(device.free_memory().unwrap(), 1 << 20);
        String::new()
    });
    if let Some(outcome) = outcome {
        outcome.clean();
    }
}

#[test]
fn work_of_a_stream_runs_in_order() {
    let name = "work_of_a_stream_runs_in_order";
    let outcome = on_gpus(name, &[], || {
        let device = device(0);
        let module = scripted(&device);
        let stream = device.stream().unwrap();
        let [a, b] = ["a", "b"].map(|what| device.allocate(32 * 4, what).unwrap());
        // SAFETY: the memory lives until the stream is synchronised, and the ranges are within it.
        unsafe {
            stream.fill_zero(a.address(), 32 * 4).unwrap();
            stream.copy(b.address(), a.address(), 32 * 4).unwrap();
        }
        fill(&stream, &module, a.address(), 2.0);
        step(&stream, &module, [b.address(), a.address()], 3.0);
        step(&stream, &module, [b.address(), a.address()], 3.0);
        assert_eq!(floats(download(&device, &stream, &b).bytes()), [8.0; 32]);
        String::new()
    });
    if let Some(outcome) = outcome {
        outcome.clean();
    }
}

#[test]
fn events_order_two_streams() {
    let name = "events_order_two_streams";
    for seed in ["1", "2", "3"] {
        let outcome = on_gpus(name, &[("EMULATED_GPU_SEED", seed)], || {
            let device = device(0);
            let module = scripted(&device);
            let streams = [0, 1].map(|_| device.stream().unwrap());
            let event = device.event().unwrap();
            let [a, b] = ["a", "b"].map(|what| device.allocate(32 * 4, what).unwrap());
            fill(&streams[0], &module, a.address(), 5.0);
            streams[0].record(&event).unwrap();
            fill(&streams[1], &module, b.address(), 1.0);
            streams[1].wait(&event).unwrap();
            step(&streams[1], &module, [b.address(), a.address()], 2.0);
            assert_eq!(
                floats(download(&device, &streams[1], &b).bytes()),
                [7.0; 32]
            );
            String::new()
        });
        let Some(outcome) = outcome else { return };
        outcome.clean();
    }
}

#[test]
fn a_missing_event_is_a_race() {
    let name = "a_missing_event_is_a_race";
    let outcome = on_gpus(name, &[], || {
        let device = device(0);
        let module = scripted(&device);
        let streams = [0, 1].map(|_| device.stream().unwrap());
        let a = device.allocate(32 * 4, "a").unwrap();
        for stream in &streams {
            fill(stream, &module, a.address(), 5.0);
        }
        let errors = streams
            .iter()
            .filter_map(|stream| stream.synchronize().err());
        errors.map(|error| format!("{error}\n")).collect()
    });
    if let Some(outcome) = outcome {
        assert_eq!(outcome.of_kind("race").len(), 1, "{:?}", outcome.report);
        insta::assert_snapshot!(outcome.said);
    }
}

#[test]
fn a_graph_repeats_the_work_of_two_streams() {
    let name = "a_graph_repeats_the_work_of_two_streams";
    let outcome = on_gpus(name, &[], || {
        let device = device(0);
        let module = scripted(&device);
        let streams = [0, 1].map(|_| device.stream().unwrap());
        let [forked, joined] = [0, 1].map(|_| device.event().unwrap());
        let [a, b] = ["a", "b"].map(|what| device.allocate(32 * 4, what).unwrap());
        fill(&streams[0], &module, a.address(), 1.0);
        streams[0].begin_capture().unwrap();
        streams[0].record(&forked).unwrap();
        streams[1].wait(&forked).unwrap();
        fill(&streams[1], &module, b.address(), 1.0);
        streams[1].record(&joined).unwrap();
        streams[0].wait(&joined).unwrap();
        step(&streams[0], &module, [a.address(), b.address()], 2.0);
        let graph = streams[0].end_capture().unwrap();
        for _ in 0..3 {
            streams[0].launch_graph(&graph).unwrap();
        }
        // 1, 3, 7, 15
        assert_eq!(
            floats(download(&device, &streams[0], &a).bytes()),
            [15.0; 32]
        );

        // What is not allowed in a capture ends it with an error, and the stream is usable afterwards.
        streams[0].begin_capture().unwrap();
        assert!(streams[0].synchronize().is_err());
        assert!(streams[0].end_capture().is_err());
        fill(&streams[0], &module, a.address(), 9.0);
        assert_eq!(
            floats(download(&device, &streams[0], &a).bytes()),
            [9.0; 32]
        );
        String::new()
    });
    if let Some(outcome) = outcome {
        assert!(outcome.of_kind("leak").is_empty(), "{:?}", outcome.report);
    }
}

#[test]
fn dynamic_shared_memory_needs_a_permission() {
    let name = "dynamic_shared_memory_needs_a_permission";
    let outcome = on_gpus(name, &[], || {
        let device = device(0);
        let stream = device.stream().unwrap();
        let function = scripted(&device).function("dynamic_shared").unwrap();
        let out = device.allocate(4, "bytes of shared memory").unwrap();
        let launch = || {
            let grid = Grid {
                shared: 100_000,
                ..grid(1)
            };
            // SAFETY: the kernel has one parameter, and the memory lives until the download.
            unsafe { stream.launch(&function, grid, &[Argument::Address(out.address())]) }
        };
        assert!(launch().is_err());
        function.allow_shared(100_000).unwrap();
        launch().unwrap();
        let bytes = download(&device, &stream, &out);
        assert_eq!(bytes.bytes(), 100_000u32.to_le_bytes());
        let too_much = function.allow_shared(1 << 20).unwrap_err();
        let unknown = scripted(&device).function("unknown").err().unwrap();
        format!("{too_much}\n{unknown}\n")
    });
    if let Some(outcome) = outcome {
        outcome.clean();
        insta::assert_snapshot!(outcome.said);
    }
}

#[test]
fn ranges_outside_of_pinned_memory_are_refused() {
    let name = "ranges_outside_of_pinned_memory_are_refused";
    let outcome = on_gpus(name, &[], || {
        let device = device(0);
        let stream = device.stream().unwrap();
        let memory = device.allocate(64, "a test").unwrap();
        let mut pinned = device.pinned(16, "a test").unwrap();
        // SAFETY: what is accepted lives until the stream is synchronised.
        unsafe {
            assert!(stream.upload(memory.address(), &pinned, 8..17).is_err());
            assert!(
                stream
                    .download(&mut pinned, 8, memory.address(), 9)
                    .is_err()
            );
            let far = usize::MAX;
            assert!(
                stream
                    .download(&mut pinned, far, memory.address(), 9)
                    .is_err()
            );
            // Nothing to do is no error, whatever the address is.
            stream.upload(0, &pinned, 16..16).unwrap();
            stream.download(&mut pinned, 16, 0, 0).unwrap();
            stream.copy(0, 0, 0).unwrap();
            stream.fill_zero(0, 0).unwrap();
            stream.upload(memory.address(), &pinned, 8..16).unwrap();
        }
        stream.synchronize().unwrap();
        assert_eq!(device.allocate(0, "nothing").unwrap().bytes(), 0);
        assert!(device.pinned(0, "nothing").unwrap().bytes().is_empty());
        String::new()
    });
    if let Some(outcome) = outcome {
        outcome.clean();
    }
}

/// A matrix of small integers, which bf16 and sums of few products hold exactly.
fn values(count: usize, salt: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 7 + salt * 5) % 11) as f32 - 5.0;
    (0..count).map(value).collect()
}

fn encode(values: &[f32], element: Precision) -> Vec<u8> {
    let bytes = values.iter().map(|&value| match element {
        Precision::F32 => value.to_le_bytes().to_vec(),
        Precision::Bf16 => bf16::from_f32(value).to_le_bytes().to_vec(),
    });
    bytes.flatten().collect()
}

fn decode(bytes: &[u8], element: Precision) -> Vec<f32> {
    match element {
        Precision::F32 => floats(bytes),
        Precision::Bf16 => {
            let chunks = bytes.chunks_exact(2);
            chunks
                .map(|chunk| bf16::from_le_bytes(chunk.try_into().unwrap()).to_f32())
                .collect()
        }
    }
}

/// A matrix as it lies in memory: `rows` of `columns` elements, `gap` elements apart.
struct Stored {
    transposed: bool,
    stride: usize,
    values: Vec<f32>,
}

impl Stored {
    fn new(rows: usize, columns: usize, transposed: bool, gap: usize, salt: usize) -> Stored {
        let (rows, columns) = if transposed {
            (columns, rows)
        } else {
            (rows, columns)
        };
        let stride = columns + gap;
        Stored {
            transposed,
            stride,
            values: values(rows * stride, salt),
        }
    }

    /// Index of the element that the product sees at this row and column.
    fn index(&self, row: usize, column: usize) -> usize {
        if self.transposed {
            column * self.stride + row
        } else {
            row * self.stride + column
        }
    }

    fn at(&self, row: usize, column: usize) -> f32 {
        self.values[self.index(row, column)]
    }
}

#[test]
fn products_agree_with_plain_loops() {
    let name = "products_agree_with_plain_loops";
    let outcome = on_gpus(name, &[], || {
        let device = device(0);
        let stream = device.stream().unwrap();
        let blas = Blas::new(&device).unwrap();
        let workspace = device.allocate(Blas::WORKSPACE, "workspace").unwrap();
        let workspace = (workspace.address(), workspace.bytes(), workspace);
        let (rows, columns, inner) = (5, 7, 6);
        let elements = [
            (Precision::F32, Precision::F32),
            (Precision::Bf16, Precision::F32),
            (Precision::Bf16, Precision::Bf16),
        ];
        let mut cases = 0;
        for case in 0..elements.len() * 4 * 3 {
            let (input, output) = elements[case / 12];
            let [a_transposed, b_transposed] = [1, 2].map(|bit| case & bit != 0);
            let adds = case / 4 % 3;
            let a = Stored::new(rows, inner, a_transposed, 3, 1);
            let b = Stored::new(inner, columns, b_transposed, 3, 2);
            let (factor, gap) = [(1.0, 0), (0.5, 2), (-1.0, 1)][case % 3];
            let other = Stored::new(rows, columns, false, gap, 3);
            let mut result = Stored::new(rows, columns, false, gap, 4);
            let send = |values: &[f32], element, what| {
                upload(&device, &stream, &encode(values, element), what)
            };
            let [on_a, on_b] =
                [(&a, "a"), (&b, "b")].map(|(matrix, what)| send(&matrix.values, input, what));
            let [on_other, on_result] = [(&other, "added"), (&result, "result")]
                .map(|(matrix, what)| send(&matrix.values, output, what));
            let operand = |matrix: &Stored, memory: &Memory, element| Operand {
                address: memory.address(),
                element,
                stride: matrix.stride,
                transposed: matrix.transposed,
            };
            let product = Product {
                rows,
                columns,
                inner,
                a: operand(&a, &on_a, input),
                b: operand(&b, &on_b, input),
                added: [None, Some(on_other.address()), Some(on_result.address())][adds],
                factor,
                result: on_result.address(),
                stride: result.stride,
                element: output,
            };
            for algorithm in 0..2 {
                let again = upload(&device, &stream, &encode(&result.values, output), "copy");
                let workspace = (workspace.0, workspace.1);
                let proposed = blas.choose(&product, workspace, algorithm).unwrap();
                assert!(algorithm < proposed, "{proposed} algorithms");
                // SAFETY: the memory lives until the stream is synchronised, and nothing overlaps.
                unsafe {
                    let bytes = again.bytes() as usize;
                    stream
                        .copy(on_result.address(), again.address(), bytes)
                        .unwrap();
                    blas.multiply(&stream, &product, workspace).unwrap();
                }
                stream.synchronize().unwrap();
            }
            for row in 0..rows {
                for column in 0..columns {
                    let terms = (0..inner).map(|k| a.at(row, k) * b.at(k, column));
                    let added = match adds {
                        0 => 0.0,
                        1 => other.at(row, column),
                        _ => result.at(row, column),
                    };
                    let index = result.index(row, column);
                    result.values[index] = factor * terms.sum::<f32>() + added;
                }
            }
            let got = download(&device, &stream, &on_result);
            assert_eq!(decode(got.bytes(), output), result.values, "{product:?}");
            cases += 1;
        }
        format!("{cases} cases")
    });
    if let Some(outcome) = outcome {
        outcome.clean();
        assert_eq!(outcome.said, "36 cases");
    }
}

/// Runs of all products together.
fn products(outcome: &Outcome) -> u64 {
    let counts = outcome.of_kind("summary")[0]["counts"].as_object().unwrap();
    let products = counts
        .iter()
        .filter(|(operation, _)| operation.starts_with("matrix product"));
    products
        .map(|(_, counts)| counts["runs"].as_u64().unwrap())
        .sum()
}

#[test]
fn algorithms_are_measured_once_and_remembered() {
    let name = "algorithms_are_measured_once_and_remembered";
    let outcome = on_gpus(name, &[], || {
        let device = device(0);
        let stream = device.stream().unwrap();
        let scratch = device.allocate(Blas::WORKSPACE, "workspace").unwrap();
        let workspace = (scratch.address(), scratch.bytes());
        let ones = encode(&[1.0; 64], Precision::F32);
        let memory = upload(&device, &stream, &ones, "matrices");
        let operand = |at: u64, stride| Operand {
            address: memory.address() + at,
            element: Precision::F32,
            stride,
            transposed: false,
        };
        let product = Product {
            rows: 2,
            columns: 3,
            inner: 4,
            a: operand(0, 4),
            b: operand(0, 3),
            added: None,
            factor: 1.0,
            result: memory.address() + 128,
            stride: 3,
            element: Precision::F32,
        };
        let in_place = Product {
            added: Some(product.result),
            ..product
        };
        let folder = tempfile::tempdir().unwrap();
        let files =
            ["run/products.json", "cache/products.json"].map(|name| folder.path().join(name));
        let measured = |least_flops| Measured::read(files.to_vec(), least_flops);
        let run = |blas: &Blas, product: &Product| {
            // SAFETY: the memory lives until the stream is synchronised, and nothing overlaps.
            unsafe { blas.multiply(&stream, product, workspace) }.unwrap();
            stream.synchronize().unwrap();
            let all = download(&device, &stream, &memory);
            decode(all.bytes(), Precision::F32)[32]
        };
        let blas = || Blas::new(&device).unwrap();

        // Too small to be worth it.
        assert_eq!(run(&blas().measuring(measured(100.0)), &product), 4.0);
        assert!(!files[0].exists());
        let first = blas().measuring(measured(0.0));
        // A repetition would add once more.
        assert_eq!(run(&first, &in_place), 8.0);
        assert!(!files[0].exists());
        assert_eq!(run(&first, &product), 4.0);
        assert_eq!(run(&first, &in_place), 8.0);
        let [of_run, of_cache] = [0, 1].map(|file| std::fs::read_to_string(&files[file]).unwrap());
        assert_eq!(of_run, of_cache);
        assert!(of_run.contains("Emulated GPU, cuBLASLt "), "{of_run}");
        // Known, also where the run's file is damaged.
        assert_eq!(run(&blas().measuring(measured(0.0)), &product), 4.0);
        std::fs::write(&files[0], "damaged").unwrap();
        assert_eq!(run(&blas().measuring(measured(0.0)), &product), 4.0);
        // A run keeps what it took from the user's cache.
        assert_eq!(std::fs::read_to_string(&files[0]).unwrap(), of_run);
        // An algorithm that cuBLASLt does not propose is measured again.
        let mut all: serde_json::Map<String, Value> = serde_json::from_str(&of_run).unwrap();
        for algorithm in all.values_mut() {
            *algorithm = vec![7; 8].into();
        }
        std::fs::write(&files[0], serde_json::to_vec(&all).unwrap()).unwrap();
        assert_eq!(run(&blas().measuring(measured(0.0)), &product), 4.0);
        assert_eq!(std::fs::read_to_string(&files[0]).unwrap(), of_run);
        String::new()
    });
    if let Some(outcome) = outcome {
        outcome.clean();
        // Seven calls, and two measurements of two algorithms with eight repetitions in four rounds.
        assert_eq!(products(&outcome), 7 + 2 * 2 * 8 * 4);
    }
}

#[test]
fn impossible_products_are_refused_with_their_shape() {
    let name = "impossible_products_are_refused_with_their_shape";
    let outcome = on_gpus(name, &[], || {
        let device = device(0);
        let stream = device.stream().unwrap();
        let blas = Blas::new(&device).unwrap();
        let memory = device.allocate(1024, "matrices").unwrap();
        let operand = |at: u64, element, stride| Operand {
            address: memory.address() + at,
            element,
            stride,
            transposed: false,
        };
        let product = Product {
            rows: 2,
            columns: 3,
            inner: 4,
            a: operand(0, Precision::F32, 4),
            b: operand(256, Precision::F32, 3),
            added: None,
            factor: 1.0,
            result: memory.address() + 512,
            stride: 3,
            element: Precision::F32,
        };
        let narrow = Product {
            a: operand(0, Precision::F32, 3),
            ..product
        };
        let mixed = Product {
            b: operand(256, Precision::Bf16, 3),
            ..product
        };
        let narrower = Product {
            element: Precision::Bf16,
            ..product
        };
        let mut messages = String::new();
        for product in [narrow, mixed, narrower] {
            // SAFETY: the memory lives; the products are refused.
            let error = unsafe { blas.multiply(&stream, &product, (0, 0)) }.unwrap_err();
            messages += &format!("{error}\n");
        }
        let empty = Product { rows: 0, ..product };
        // SAFETY: there is nothing to do.
        unsafe { blas.multiply(&stream, &empty, (0, 0)) }.unwrap();
        messages
    });
    if let Some(outcome) = outcome {
        outcome.clean();
        insta::assert_snapshot!(outcome.said);
    }
}

#[test]
fn every_allocation_may_fail_and_nothing_leaks() {
    let name = "every_allocation_may_fail_and_nothing_leaks";
    let allocate = || -> Result<(), CudaError> {
        let device = Device::open(&Driver::load()?, 0)?;
        let image = emulated_gpu::scripted::MARK.as_bytes();
        // A module has a variable in the device's memory.
        let module = device.module(image, "scripted kernels")?;
        let stream = device.stream()?;
        let a = device.allocate(128, "the arena")?;
        let b = device.allocate(128, "the weights")?;
        fill(&stream, &module, a.address(), 1.0);
        fill(&stream, &module, b.address(), 1.0);
        let c = device.allocate(128, "the gradients")?;
        step(&stream, &module, [a.address(), b.address()], 1.0);
        stream.synchronize()?;
        drop(c);
        Ok(())
    };
    let mut messages = String::new();
    for nth in 1..=5 {
        let nth = nth.to_string();
        let outcome = on_gpus(
            name,
            &[("EMULATED_GPU_FAIL_ALLOC", &nth)],
            || match allocate() {
                Ok(()) => "no error".to_owned(),
                Err(error @ CudaError::OutOfMemory { .. }) => error.to_string(),
                Err(error) => panic!("{error}"),
            },
        );
        let Some(outcome) = outcome else { return };
        assert!(outcome.of_kind("leak").is_empty(), "{:?}", outcome.report);
        assert!(outcome.of_kind("misuse").is_empty(), "{:?}", outcome.report);
        messages += &format!("{nth}: {}\n", outcome.said);
    }
    insta::assert_snapshot!(messages);
}

/// A kernel for the compiler's tests.
const SOURCE: Source = Source {
    file: "twice.cu",
    text: "#include \"factor.cuh\"\n\
           extern \"C\" __global__ void twice(float *x, int count) {\n\
               int i = blockIdx.x * blockDim.x + threadIdx.x;\n\
               if (i < count) x[i] = FACTOR * x[i];\n\
           }\n",
    headers: &[(
        "factor.cuh",
        "#ifndef FACTOR\n#define FACTOR 2.0f\n#endif\n",
    )],
};

/// The directories of NVRTC; `None`, after printing the reason, where it is missing.
fn nvrtc() -> Option<String> {
    let found = std::env::var(LIBRARIES)
        .ok()
        .filter(|list| !list.is_empty());
    let problem = match (Nvrtc::load(None), found) {
        (Ok(_), Some(found)) => return Some(found),
        (Ok(_), None) => "it is on the loader's search path only".to_owned(),
        (Err(problem), _) => problem.to_string(),
    };
    assert_ne!(std::env::var("CI").as_deref(), Ok("true"), "{problem}");
    eprintln!("skipped: no kernel is compiled, {problem} (set {LIBRARIES})");
    None
}

/// Whether this process has loaded NVRTC.
fn has_loaded_nvrtc() -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.contains("libnvrtc")
}

/// Compiles and runs [`SOURCE`] with a cache; returns whether NVRTC was loaded, and the factor.
fn twice(cache: &Path, options: &[String]) -> String {
    let device = device(0);
    let stream = device.stream().unwrap();
    let compiler = Compiler::new(Some(cache.to_path_buf()));
    let module = compiler.load(&device, &SOURCE, options).unwrap();
    let function = module.function("twice").unwrap();
    let x = upload(&device, &stream, &encode(&[1.0; 40], Precision::F32), "x");
    let grid = Grid {
        blocks: (2, 1, 1),
        ..grid(32)
    };
    let arguments = [Argument::Address(x.address()), Argument::Int(40)];
    // SAFETY: the arguments are those of the kernel, and the memory lives until the download.
    unsafe { stream.launch(&function, grid, &arguments) }.unwrap();
    let values = floats(download(&device, &stream, &x).bytes());
    assert!(values.iter().all(|&value| value == values[0]), "{values:?}");
    let source = if has_loaded_nvrtc() {
        "compiled"
    } else {
        "cached"
    };
    format!("{source} {}", values[0])
}

#[test]
fn kernels_are_compiled_once() {
    let name = "kernels_are_compiled_once";
    if std::env::var(CHILD).as_deref() != Ok(name) && nvrtc().is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    emulated_gpu::install(directory.path()).unwrap();
    let cache = directory.path().join("cache");
    let libraries = format!(
        "{}:{}",
        directory.path().display(),
        std::env::var(LIBRARIES).unwrap_or_default()
    );
    let run = |cache: &Path, option: &str, capability: &str| {
        let settings = [
            (LIBRARIES, libraries.as_str()),
            ("EVENKEEL_TEST_CACHE", cache.to_str().unwrap()),
            ("EVENKEEL_TEST_OPTION", option),
            ("EMULATED_GPU_CAPABILITY", capability),
        ];
        let outcome = in_child(name, directory.path(), &settings, || {
            let cache = PathBuf::from(std::env::var_os("EVENKEEL_TEST_CACHE").unwrap());
            let option = std::env::var("EVENKEEL_TEST_OPTION").unwrap();
            let options: Vec<String> = option.split_whitespace().map(str::to_owned).collect();
            twice(&cache, &options)
        })?;
        outcome.clean();
        Some(outcome.said)
    };
    let Some(first) = run(&cache, "", "90") else {
        return;
    };
    let run = |option, capability| run(&cache, option, capability).unwrap();
    assert_eq!(first, "compiled 2");
    assert_eq!(run("", "90"), "cached 2");
    // Whatever the code depends on is part of the key.
    assert_eq!(run("-DFACTOR=3.0f", "90"), "compiled 3");
    assert_eq!(run("", "80"), "compiled 2");
    assert_eq!(run("-DFACTOR=3.0f", "90"), "cached 3");
    let files = || {
        let entries = std::fs::read_dir(&cache).unwrap();
        let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    };
    let known = files();
    assert_eq!(known.len(), 3);

    // A damaged, a short and an empty file are replaced.
    let good: Vec<Vec<u8>> = known
        .iter()
        .map(|file| std::fs::read(file).unwrap())
        .collect();
    for damage in [
        |bytes: &mut Vec<u8>| {
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
        },
        |bytes: &mut Vec<u8>| bytes.truncate(bytes.len() - 1),
        |bytes: &mut Vec<u8>| bytes.truncate(30),
        |bytes: &mut Vec<u8>| bytes.clear(),
    ] {
        for (file, bytes) in known.iter().zip(&good) {
            let mut bytes = bytes.clone();
            damage(&mut bytes);
            std::fs::write(file, bytes).unwrap();
        }
        assert_eq!(run("", "90"), "compiled 2");
        assert_eq!(run("", "90"), "cached 2");
    }
    assert_eq!(files(), known, "temporary files are left");
}

#[test]
fn an_unwritable_cache_is_no_error() {
    let name = "an_unwritable_cache_is_no_error";
    if std::env::var(CHILD).as_deref() != Ok(name) && nvrtc().is_none() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    emulated_gpu::install(directory.path()).unwrap();
    let libraries = format!(
        "{}:{}",
        directory.path().display(),
        std::env::var(LIBRARIES).unwrap_or_default()
    );
    let file = directory.path().join("file");
    std::fs::write(&file, "").unwrap();
    // A folder in a file cannot be created, by root neither; /proc is read-only.
    for cache in [file.join("cache"), PathBuf::from("/proc/evenkeel")] {
        let settings = [
            (LIBRARIES, libraries.as_str()),
            ("EVENKEEL_TEST_CACHE", cache.to_str().unwrap()),
        ];
        let outcome = in_child(name, directory.path(), &settings, || {
            let cache = PathBuf::from(std::env::var_os("EVENKEEL_TEST_CACHE").unwrap());
            twice(&cache, &[])
        });
        let Some(outcome) = outcome else { return };
        outcome.clean();
        assert_eq!(outcome.said, "compiled 2");
    }
}

/// Uses every library in the order of the engine; returns the first problem.
fn start() -> Result<(), CudaError> {
    let driver = Driver::load()?;
    let count = driver.device_count()?;
    let devices: Vec<Arc<Device>> = (0..count)
        .map(|ordinal| Device::open(&driver, ordinal))
        .collect::<Result<_, _>>()?;
    let _arena = devices[0].allocate(3 << 20, "the arena")?;
    Blas::new(&devices[0]).map(|_| ())
}

/// Compiles a shared object that imitates the library of this name; `false` without a C compiler.
fn imitate(path: &Path, source: &str) -> bool {
    let text = path.with_extension("c");
    std::fs::write(&text, source).unwrap();
    let mut cc = Command::new("cc");
    let made = cc
        .args(["-shared", "-fPIC", "-o"])
        .arg(path)
        .arg(&text)
        .status();
    made.is_ok_and(|status| status.success())
}

#[test]
fn every_problem_has_one_clear_message() {
    let name = "every_problem_has_one_clear_message";
    let is_child = std::env::var(CHILD).as_deref() == Ok(name);
    let say = || match start() {
        Ok(()) => "no problem".to_owned(),
        Err(error) => error.to_string(),
    };
    if is_child {
        in_child(name, Path::new("/"), &[], say);
        return;
    }
    // SAFETY: opening the driver runs its initialisation only.
    if unsafe { libloading::Library::new("libcuda.so.1") }.is_ok() {
        eprintln!("skipped: this machine has a driver, so it cannot be missing");
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let folder = |folder: &str| {
        let path = home.path().join(folder);
        std::fs::create_dir(&path).unwrap();
        path
    };
    let all = folder("all");
    emulated_gpu::install(&all).unwrap();
    // A folder with some of the emulated libraries.
    let some = |name: &str, files: &[&str]| {
        let path = folder(name);
        for file in files {
            symlink(all.join(file), path.join(file)).unwrap();
        }
        path
    };
    let faults = |text: &str| {
        let path = home.path().join(format!("faults-{}", text.len()));
        std::fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let run = |directory: &Path, settings: &[(&str, &str)]| {
        let outcome = in_child(name, directory, settings, || {
            unreachable!("runs in the child")
        });
        let outcome = outcome.unwrap();
        assert!(outcome.of_kind("leak").is_empty(), "{:?}", outcome.report);
        outcome.said.replace(all.to_str().unwrap(), "[all]")
    };

    let mut messages = String::new();
    let mut add = |case: &str, directory: &Path, settings: &[(&str, &str)]| {
        messages += &format!("== {case}\n{}\n", run(directory, settings));
    };

    add("nothing wrong", &all, &[]);
    add("no driver", &folder("none"), &[]);
    add("old driver", &all, &[("EMULATED_GPU_DRIVER", "11080")]);

    let without_blas = some("without-blas", &["libcuda.so.1"]);
    add("no cuBLASLt", &without_blas, &[]);
    for version in [11, 14] {
        std::fs::write(without_blas.join(format!("libcublasLt.so.{version}")), "").unwrap();
    }
    add("cuBLASLt of other versions", &without_blas, &[]);
    let only_13 = some("only-13", &["libcuda.so.1", "libcublasLt.so.13"]);
    let for_12 = [("EMULATED_GPU_DRIVER", "12080")];
    add(
        "driver for CUDA 12 and cuBLASLt of CUDA 13",
        &only_13,
        &for_12,
    );
    add("driver for CUDA 12 and cuBLASLt of both", &all, &for_12);

    let faulty = faults(r#"{"0": {"exclusive": true}}"#);
    add(
        "exclusive process",
        &all,
        &[("EMULATED_GPU_FAULTS", &faulty)],
    );
    let faulty = faults(r#"{"0": {"mig_empty": true}, "1": {"mig_empty": true}}"#);
    let settings = [
        ("EMULATED_GPU_FAULTS", faulty.as_str()),
        ("EMULATED_GPU_DEVICES", "2"),
    ];
    add("MIG without instances", &all, &settings);
    let faulty = faults(r#"{"0": {"lost": true}}"#);
    add("lost", &all, &[("EMULATED_GPU_FAULTS", &faulty)]);

    add("hidden by an index", &all, &[("CUDA_VISIBLE_DEVICES", "7")]);
    add(
        "hidden by an empty list",
        &all,
        &[("CUDA_VISIBLE_DEVICES", "")],
    );
    add("no GPU", &all, &[("EMULATED_GPU_DEVICES", "0")]);

    let old_model = "Tesla V100-SXM2-16GB:70";
    add("old GPU", &all, &[("EMULATED_GPU_MODELS", old_model)]);
    add("little memory", &all, &[("EMULATED_GPU_MEMORY", "2097152")]);

    let old = folder("old");
    let source = "int cuDriverGetVersion(int *version) { *version = 12040; return 0; }";
    if imitate(&old.join("libcuda.so.1"), source) {
        add("missing function", &old, &[]);
    } else {
        eprintln!("skipped: no C compiler (cc) to make a library without functions");
        return;
    }
    insta::assert_snapshot!(messages);
}
