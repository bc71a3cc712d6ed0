//! NCCL between processes: one child process for each rank, each with its own device.

mod common;

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use common::{Cuda, Handle, libraries, of_kind, pointer};
use half::{bf16, f16};
use libloading::{Library, Symbol};
use serde_json::{Value, json};

const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const SYSTEM_ERROR: c_int = 2;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

const SUM: c_int = 0;
const F32: c_int = 7;

/// A hang is a failure after this time. A good run never waits for it.
const PATIENCE: Duration = Duration::from_secs(120);

// Processes

const CHILD: &str = "EMULATED_GPU_TEST_CHILD";
const RANK: &str = "EMULATED_GPU_TEST_RANK";
const SHARED: &str = "EMULATED_GPU_TEST_SHARED";

struct Outcome {
    report: Vec<Value>,
    status: ExitStatus,
}

impl Outcome {
    fn findings(&self) -> Vec<&str> {
        let kinds = self.report.iter().filter_map(|line| line["kind"].as_str());
        kinds
            .filter(|kind| !["summary", "timeline"].contains(kind))
            .collect()
    }

    fn summary(&self) -> &Value {
        of_kind(&self.report, "summary")[0]
    }
}

/// Runs the body in one process for each rank, and returns what each did; in a child nothing is returned.
/// Without settings of a device, rank n has device n of as many as there are ranks.
fn in_ranks(
    name: &str,
    world: usize,
    settings: &[(&str, &str)],
    body: impl FnOnce(usize, usize),
) -> Option<Vec<Outcome>> {
    if std::env::var(CHILD).as_deref() == Ok(name) {
        let rank = std::env::var(RANK).unwrap();
        let (rank, world) = rank.split_once('/').unwrap();
        body(rank.parse().unwrap(), world.parse().unwrap());
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    emulated_gpu::install(directory.path()).unwrap();
    let children = (0..world).map(|rank| {
        let output = std::fs::File::create(directory.path().join(format!("output{rank}"))).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args([name, "--exact", "--nocapture"])
            .env(CHILD, name)
            .env(RANK, format!("{rank}/{world}"))
            .env(SHARED, directory.path())
            .env("EMULATED_GPU_TEST_LIBRARIES", directory.path())
            .env("EMULATED_GPU_DEVICES", world.to_string())
            .env("CUDA_VISIBLE_DEVICES", rank.to_string())
            .env(
                "EMULATED_GPU_REPORT",
                directory.path().join(format!("report{rank}")),
            )
            .envs(settings.iter().copied())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn();
        child.unwrap()
    });
    let children: Vec<_> = children.collect();
    let outcomes = children.into_iter().enumerate().map(|(rank, mut child)| {
        let status = child.wait().unwrap();
        let read = |name: &str| {
            let path = directory.path().join(format!("{name}{rank}"));
            std::fs::read_to_string(path).unwrap_or_default()
        };
        println!("rank {rank}: {status}\n{}", read("output"));
        let lines = read("report");
        let lines = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap());
        Outcome {
            report: lines.collect(),
            status,
        }
    });
    Some(outcomes.collect())
}

/// Runs ranks that all succeed, without a finding.
fn clean(
    name: &str,
    world: usize,
    settings: &[(&str, &str)],
    body: impl FnOnce(usize, usize),
) -> Option<Vec<Outcome>> {
    let outcomes = in_ranks(name, world, settings, body)?;
    for outcome in &outcomes {
        assert!(outcome.status.success());
        assert_eq!(outcome.findings(), Vec::<&str>::new());
    }
    Some(outcomes)
}

fn shared(name: &str) -> PathBuf {
    Path::new(&std::env::var_os(SHARED).unwrap()).join(name)
}

/// Waits on the host for a file that another rank writes.
fn wait_for(name: &str) -> Vec<u8> {
    let begun = Instant::now();
    loop {
        if let Ok(bytes) = std::fs::read(shared(name)) {
            return bytes;
        }
        assert!(begun.elapsed() < PATIENCE, "no file {name}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn publish(name: &str, bytes: &[u8]) {
    let path = shared(&format!("{name}.new"));
    std::fs::write(&path, bytes).unwrap();
    std::fs::rename(path, shared(name)).unwrap();
}

// NCCL

#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// `ncclConfig_t` of NCCL 2.14.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

const NON_BLOCKING: Config = Config {
    size: size_of::<Config>(),
    magic: 0xcafe_beef,
    version: 21400,
    blocking: 0,
};

struct Nccl(Library);

macro_rules! functions {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        #[allow(non_snake_case, dead_code, clippy::too_many_arguments)]
        impl Nccl {
            $(fn $name(&self, $($argument: $type),*) -> $result {
                type Function = unsafe extern "C" fn($($type),*) -> $result;
                // SAFETY: the types are those of NCCL, and tests pass valid pointers.
                unsafe {
                    let name = concat!(stringify!($name), "\0");
                    let function: Symbol<Function> = self.0.get(name.as_bytes()).unwrap();
                    function($($argument),*)
                }
            })*
        }
    };
}

functions! {
    fn ncclGetVersion(version: *mut c_int) -> c_int;
    fn ncclGetErrorString(code: c_int) -> *const c_char;
    fn ncclGetLastError(comm: Handle) -> *const c_char;
    fn ncclGetUniqueId(id: *mut UniqueId) -> c_int;
    fn ncclCommInitRank(comm: *mut Handle, world: c_int, id: UniqueId, rank: c_int) -> c_int;
    fn ncclCommInitRankConfig(comm: *mut Handle, world: c_int, id: UniqueId, rank: c_int, config: *const Config) -> c_int;
    fn ncclCommCount(comm: Handle, count: *mut c_int) -> c_int;
    fn ncclCommUserRank(comm: Handle, rank: *mut c_int) -> c_int;
    fn ncclCommCuDevice(comm: Handle, device: *mut c_int) -> c_int;
    fn ncclCommGetAsyncError(comm: Handle, error: *mut c_int) -> c_int;
    fn ncclCommFinalize(comm: Handle) -> c_int;
    fn ncclCommDestroy(comm: Handle) -> c_int;
    fn ncclCommAbort(comm: Handle) -> c_int;
    fn ncclAllReduce(send: u64, receive: u64, count: usize, element: c_int, operator: c_int, comm: Handle, stream: Handle) -> c_int;
    fn ncclReduceScatter(send: u64, receive: u64, count: usize, element: c_int, operator: c_int, comm: Handle, stream: Handle) -> c_int;
    fn ncclAllGather(send: u64, receive: u64, count: usize, element: c_int, comm: Handle, stream: Handle) -> c_int;
    fn ncclBroadcast(send: u64, receive: u64, count: usize, element: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int;
    fn ncclReduce(send: u64, receive: u64, count: usize, element: c_int, operator: c_int, root: c_int, comm: Handle, stream: Handle) -> c_int;
    fn ncclGroupStart() -> c_int;
    fn ncclGroupEnd() -> c_int;
    fn ncclRedOpCreatePreMulSum(operator: *mut c_int, scalar: *const c_void, element: c_int, residence: c_int, comm: Handle) -> c_int;
    fn ncclRedOpDestroy(operator: c_int, comm: Handle) -> c_int;
}

impl Nccl {
    fn open() -> Nccl {
        // SAFETY: opening the emulator runs no code.
        Nccl(unsafe { Library::new(libraries().join("libnccl.so.2")) }.unwrap())
    }

    /// The id that rank 0 makes, under a name.
    fn id(&self, rank: usize, name: &str) -> UniqueId {
        if rank == 0 {
            let mut id = UniqueId([0; 128]);
            assert_eq!(self.ncclGetUniqueId(&mut id), 0);
            publish(name, &id.0);
        }
        UniqueId(wait_for(name).try_into().unwrap())
    }

    /// A blocking communicator of all ranks.
    fn communicator(&self, rank: usize, world: usize) -> Handle {
        let (id, mut comm) = (self.id(rank, "id"), 0);
        let code = self.ncclCommInitRank(&mut comm, world as c_int, id, rank as c_int);
        assert_eq!(code, 0, "{}", self.last_error(comm));
        comm
    }

    fn last_error(&self, comm: Handle) -> String {
        // SAFETY: the function returns a text that lives as long as the process.
        let text = unsafe { CStr::from_ptr(self.ncclGetLastError(comm)) };
        text.to_string_lossy().into_owned()
    }

    fn async_error(&self, comm: Handle) -> c_int {
        let mut error = -1;
        assert_eq!(self.ncclCommGetAsyncError(comm, &mut error), 0);
        error
    }

    /// Polls until the communicator is no longer in progress, or has an error.
    fn settled(&self, comm: Handle) -> c_int {
        self.poll(comm, |error| error != IN_PROGRESS)
    }

    /// Polls until the communicator has an error.
    fn failed(&self, comm: Handle) -> c_int {
        self.poll(comm, |error| error != IN_PROGRESS && error != 0)
    }

    fn poll(&self, comm: Handle, is_over: impl Fn(c_int) -> bool) -> c_int {
        let begun = Instant::now();
        loop {
            let error = self.async_error(comm);
            if is_over(error) {
                return error;
            }
            assert!(begun.elapsed() < PATIENCE, "still {error}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn sum(&self, buffer: u64, count: usize, comm: Handle, stream: Handle) -> c_int {
        self.ncclAllReduce(buffer, buffer, count, F32, SUM, comm, stream)
    }
}

/// The driver, NCCL and a stream of a child's device.
fn start() -> (Cuda, Nccl, Handle) {
    let cuda = Cuda::start();
    let stream = cuda.stream();
    (cuda, Nccl::open(), stream)
}

// Elements

/// Name, number and bytes of the types.
const ELEMENTS: [(&str, c_int, usize); 10] = [
    ("i8", 0, 1),
    ("u8", 1, 1),
    ("i32", 2, 4),
    ("u32", 3, 4),
    ("i64", 4, 8),
    ("u64", 5, 8),
    ("f16", 6, 2),
    ("f32", 7, 4),
    ("f64", 8, 8),
    ("bf16", 9, 2),
];

fn encode(element: &str, value: f64) -> Vec<u8> {
    match element {
        "i8" => (value as i8).to_le_bytes().to_vec(),
        "u8" => (value as u8).to_le_bytes().to_vec(),
        "i32" => (value as i32).to_le_bytes().to_vec(),
        "u32" => (value as u32).to_le_bytes().to_vec(),
        "i64" => (value as i64).to_le_bytes().to_vec(),
        "u64" => (value as u64).to_le_bytes().to_vec(),
        "f16" => f16::from_f32(value as f32).to_le_bytes().to_vec(),
        "f32" => (value as f32).to_le_bytes().to_vec(),
        "f64" => value.to_le_bytes().to_vec(),
        _ => bf16::from_f32(value as f32).to_le_bytes().to_vec(),
    }
}

/// An element of a rank's operand; products of four fit an i8.
fn value(rank: usize, index: usize) -> f64 {
    ((rank + index) % 3 + 1) as f64
}

fn encode_all(element: &str, values: impl Iterator<Item = f64>) -> Vec<u8> {
    values.flat_map(|value| encode(element, value)).collect()
}

fn reduced(operator: c_int, world: usize, index: usize) -> f64 {
    let values = (0..world).map(|rank| value(rank, index));
    match operator {
        0 => values.sum(),
        1 => values.product(),
        2 => values.fold(f64::MIN, f64::max),
        3 => values.fold(f64::MAX, f64::min),
        _ => values.sum::<f64>() / world as f64,
    }
}

fn put_bytes(cuda: &Cuda, bytes: &[u8]) -> u64 {
    let buffer = cuda.alloc(bytes.len());
    let code = cuda.cuMemcpyHtoD_v2(buffer, bytes.as_ptr().cast(), bytes.len());
    assert_eq!((code, cuda.cuStreamSynchronize(0)), (0, 0));
    buffer
}

fn get_bytes(cuda: &Cuda, buffer: u64, bytes: usize) -> Vec<u8> {
    let mut values = vec![0u8; bytes];
    let code = cuda.cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), buffer, bytes);
    assert_eq!(code, 0);
    values
}

#[test]
fn every_operation_and_type_gives_what_plain_loops_give() {
    let name = "every_operation_and_type_gives_what_plain_loops_give";
    for world in 1..=4 {
        let body = |rank: usize, world: usize| {
            let (cuda, nccl, stream) = start();
            let comm = nccl.communicator(rank, world);
            let mut cases = 0;
            for (element, number, bytes) in ELEMENTS {
                cases += check_element(
                    &cuda,
                    &nccl,
                    comm,
                    stream,
                    (element, number, bytes),
                    [rank, world],
                );
            }
            assert_eq!(cases, 10 * (3 * 5 + 2));
            assert_eq!(nccl.ncclCommDestroy(comm), 0);
        };
        let Some(outcomes) = clean(name, world, &[], body) else {
            return;
        };
        let counts = &outcomes[0].summary()["nccl"];
        assert_eq!(counts["all_reduce"]["operations"], 50);
        let bytes = 5 * 5 * ELEMENTS.iter().map(|(_, _, bytes)| bytes).sum::<usize>();
        assert_eq!(counts["all_reduce"]["bytes"], bytes);
        assert_eq!(counts["all_gather"]["bytes"], bytes / 5 * world);
    }
}

/// Runs all operations on a type, and returns how many.
fn check_element(
    cuda: &Cuda,
    nccl: &Nccl,
    comm: Handle,
    stream: Handle,
    (element, number, bytes): (&str, c_int, usize),
    [rank, world]: [usize; 2],
) -> usize {
    const COUNT: usize = 5;
    let all = COUNT * world;
    let root = world - 1;
    let operand = |elements| encode_all(element, (0..elements).map(|index| value(rank, index)));
    let send = put_bytes(cuda, &operand(all));
    let mut cases = 0;
    let mut check =
        |receive_bytes: usize, expected: Option<Vec<u8>>, call: &dyn Fn(u64) -> c_int| {
            let receive = cuda.alloc(receive_bytes);
            assert_eq!(call(receive), 0, "{}", nccl.last_error(comm));
            assert_eq!(cuda.cuStreamSynchronize(stream), 0);
            if let Some(expected) = expected {
                assert_eq!(
                    get_bytes(cuda, receive, receive_bytes),
                    expected,
                    "{element}"
                );
            }
            assert_eq!(cuda.cuMemFree_v2(receive), 0);
            cases += 1;
        };
    for operator in 0..5 {
        let result = |from: usize, elements: usize| {
            let values = (from..from + elements).map(|index| reduced(operator, world, index));
            encode_all(element, values)
        };
        check(COUNT * bytes, Some(result(0, COUNT)), &|receive| {
            nccl.ncclAllReduce(send, receive, COUNT, number, operator, comm, stream)
        });
        check(
            COUNT * bytes,
            Some(result(rank * COUNT, COUNT)),
            &|receive| nccl.ncclReduceScatter(send, receive, COUNT, number, operator, comm, stream),
        );
        let at_root = (rank == root).then(|| result(0, COUNT));
        check(COUNT * bytes, at_root, &|receive| {
            let root = root as c_int;
            nccl.ncclReduce(send, receive, COUNT, number, operator, root, comm, stream)
        });
    }
    let gathered = (0..world).flat_map(|of| (0..COUNT).map(move |index| value(of, index)));
    check(
        all * bytes,
        Some(encode_all(element, gathered)),
        &|receive| nccl.ncclAllGather(send, receive, COUNT, number, comm, stream),
    );
    let sent = encode_all(element, (0..COUNT).map(|index| value(root, index)));
    check(COUNT * bytes, Some(sent), &|receive| {
        nccl.ncclBroadcast(send, receive, COUNT, number, root as c_int, comm, stream)
    });
    assert_eq!(cuda.cuMemFree_v2(send), 0);
    cases
}

#[test]
fn operations_in_place_and_factors_work() {
    clean(
        "operations_in_place_and_factors_work",
        2,
        &[],
        |rank, world| {
            let (cuda, nccl, stream) = start();
            let comm = nccl.communicator(rank, world);
            let buffer = cuda.put(&[1.0, 2.0, 3.0, 4.0]);
            let own = buffer + 8 * rank as u64;
            assert_eq!(
                nccl.ncclReduceScatter(buffer, own, 2, F32, SUM, comm, stream),
                0
            );
            assert_eq!(nccl.ncclAllGather(own, buffer, 2, F32, comm, stream), 0);
            assert_eq!(nccl.sum(buffer, 4, comm, stream), 0);
            assert_eq!(cuda.cuStreamSynchronize(stream), 0);
            assert_eq!(cuda.get(buffer, 4), [4.0, 8.0, 12.0, 16.0]);

            let (mut operator, factor) = (0, (rank + 1) as f32 / 4.0);
            let code = nccl.ncclRedOpCreatePreMulSum(&mut operator, pointer(&factor), F32, 1, comm);
            assert_eq!(code, 0);
            let call =
                |operator| nccl.ncclAllReduce(buffer, buffer, 4, F32, operator, comm, stream);
            assert_eq!(call(operator), 0);
            assert_eq!(nccl.ncclRedOpDestroy(operator, comm), 0);
            assert_eq!(call(operator), INVALID_ARGUMENT);
            assert_eq!(cuda.cuStreamSynchronize(stream), 0);
            assert_eq!(cuda.get(buffer, 4), [3.0, 6.0, 9.0, 12.0]);
            assert_eq!(cuda.cuMemFree_v2(buffer), 0);
            assert_eq!(nccl.ncclCommDestroy(comm), 0);
        },
    );
}

#[test]
fn one_process_can_have_all_ranks_in_a_group() {
    let settings = [
        ("EMULATED_GPU_DEVICES", "3"),
        ("CUDA_VISIBLE_DEVICES", "0,1,2"),
    ];
    clean(
        "one_process_can_have_all_ranks_in_a_group",
        1,
        &settings,
        |_, _| {
            let (cuda, nccl, _) = start();
            let mut id = UniqueId([0; 128]);
            assert_eq!(nccl.ncclGetUniqueId(&mut id), 0);
            let mut comms = [0; 3];
            assert_eq!(nccl.ncclGroupStart(), 0);
            for (rank, comm) in comms.iter_mut().enumerate() {
                cuda.enter(rank as c_int);
                assert_eq!(nccl.ncclCommInitRank(comm, 3, id, rank as c_int), 0);
            }
            assert_eq!(nccl.ncclGroupEnd(), 0);
            let buffers = [0, 1, 2].map(|rank| {
                cuda.enter(rank);
                (cuda.put(&[rank as f32; 4]), cuda.stream())
            });
            assert_eq!(nccl.ncclGroupStart(), 0);
            for (&(buffer, stream), comm) in buffers.iter().zip(comms) {
                assert_eq!(nccl.sum(buffer, 4, comm, stream), 0);
                assert_eq!(nccl.sum(buffer, 2, comm, stream), 0);
            }
            assert_eq!(nccl.ncclGroupEnd(), 0);
            for (rank, &(buffer, stream)) in buffers.iter().enumerate() {
                cuda.enter(rank as c_int);
                assert_eq!(cuda.cuStreamSynchronize(stream), 0);
                assert_eq!(cuda.get(buffer, 4), [9.0, 9.0, 3.0, 3.0]);
                let (mut device, mut count, mut user) = (-1, -1, -1);
                assert_eq!(nccl.ncclCommCuDevice(comms[rank], &mut device), 0);
                assert_eq!(nccl.ncclCommCount(comms[rank], &mut count), 0);
                assert_eq!(nccl.ncclCommUserRank(comms[rank], &mut user), 0);
                assert_eq!((device, count, user), (rank as c_int, 3, rank as c_int));
                assert_eq!(nccl.ncclCommDestroy(comms[rank]), 0);
            }
            // A stream of another device is refused, and so is an end without a start.
            assert_eq!(nccl.ncclGroupEnd(), INVALID_USAGE);
        },
    );
}

/// The host never calls the driver after the operation, and the other rank still gets its result.
#[test]
fn an_operation_ends_while_the_host_is_blocked_elsewhere() {
    let name = "an_operation_ends_while_the_host_is_blocked_elsewhere";
    clean(name, 2, &[], |rank, world| {
        let (cuda, nccl, stream) = start();
        let comm = nccl.communicator(rank, world);
        let fill = cuda.function(cuda.load(), "fill");
        let buffer = cuda.alloc(128);
        // The operation waits for a kernel, which therefore has to run in the background too.
        assert_eq!(cuda.fill(fill, stream, buffer, rank as f32 + 1.0, 32), 0);
        assert_eq!(nccl.sum(buffer, 32, comm, stream), 0);
        if rank == 1 {
            assert_eq!(cuda.cuStreamSynchronize(stream), 0);
            assert_eq!(cuda.get(buffer, 32), [3.0; 32]);
            publish("result", b"");
        } else {
            wait_for("result");
        }
        assert_eq!(nccl.ncclCommDestroy(comm), 0);
    });
}

/// A kernel that uses the buffer without an event is a race, on both sides of the operation.
#[test]
fn an_operation_takes_part_in_the_search_for_races_and_uninitialised_memory() {
    let name = "an_operation_takes_part_in_the_search_for_races_and_uninitialised_memory";
    let outcomes = in_ranks(name, 2, &[], |rank, world| {
        let (cuda, nccl, stream) = start();
        let comm = nccl.communicator(rank, world);
        let fill = cuda.function(cuda.load(), "fill");
        let buffer = cuda.put(&[1.0; 32]);
        assert_eq!(nccl.sum(buffer, 32, comm, stream), 0);
        if rank == 0 {
            assert_eq!(cuda.fill(fill, cuda.stream(), buffer, 5.0, 32), 0);
            assert_eq!(cuda.cuCtxSynchronize(), common::LAUNCH_FAILED);
            // An abort does not wait until the other rank has this one's part.
            wait_for("summed");
        } else {
            assert_eq!(cuda.cuStreamSynchronize(stream), 0);
            publish("summed", b"");
            let fresh = cuda.alloc(16);
            assert_eq!(nccl.sum(fresh, 4, comm, stream), 0);
            assert_eq!(cuda.cuStreamSynchronize(stream), common::LAUNCH_FAILED);
        }
        assert_eq!(nccl.ncclCommAbort(comm), 0);
    });
    if let Some(outcomes) = outcomes {
        assert_eq!(outcomes[0].findings(), ["race"]);
        assert_eq!(outcomes[1].findings(), ["fault"]);
        let message = outcomes[1].report[0]["message"].as_str().unwrap();
        assert!(message.starts_with("all_reduce ("), "{message}");
        assert!(
            message.ends_with("are read before they are written"),
            "{message}"
        );
        assert!(outcomes.iter().all(|outcome| outcome.status.success()));
    }
}

#[test]
fn ranks_that_disagree_are_named_with_what_each_called() {
    let name = "ranks_that_disagree_are_named_with_what_each_called";
    let outcomes = in_ranks(name, 2, &[], |rank, world| {
        let (cuda, nccl, stream) = start();
        let buffer = cuda.put(&[1.0; 8]);
        for case in ["kind", "count", "type", "operator", "order"] {
            let (id, mut comm) = (nccl.id(rank, case), 0);
            let (world, number) = (world as c_int, rank as c_int);
            assert_eq!(nccl.ncclCommInitRank(&mut comm, world, id, number), 0);
            let reduce = |count, element, operator| {
                nccl.ncclAllReduce(buffer, buffer, count, element, operator, comm, stream)
            };
            let gather = || {
                let own = buffer + 4 * rank as u64;
                nccl.ncclAllGather(own, buffer, 1, F32, comm, stream)
            };
            let code = match (case, rank) {
                ("kind", 0) => gather(),
                ("count", 0) => reduce(3, F32, SUM),
                ("type", 0) => reduce(4, 2, SUM),
                ("operator", 0) => reduce(4, F32, 4),
                ("order", 0) => gather() + reduce(4, F32, SUM),
                ("order", _) => reduce(4, F32, SUM) + gather(),
                _ => reduce(4, F32, SUM),
            };
            assert_eq!(code, 0);
            assert_eq!(nccl.failed(comm), INVALID_USAGE);
            assert!(
                nccl.last_error(comm)
                    .starts_with("ranks disagree on operation 0")
            );
            assert_eq!(
                cuda.cuStreamQuery(stream),
                common::NOT_READY,
                "it hangs as on a GPU"
            );
            publish(&format!("{case}{rank}"), b"");
            wait_for(&format!("{case}{}", 1 - rank));
            assert_eq!(nccl.ncclCommAbort(comm), 0);
            assert_eq!(cuda.cuStreamSynchronize(stream), 0);
        }
    });
    let Some(outcomes) = outcomes else { return };
    for outcome in &outcomes {
        assert!(outcome.status.success());
        assert_eq!(outcome.findings(), ["nccl_mismatch"; 5]);
    }
    let calls: Vec<&Value> = outcomes[0].report[..5]
        .iter()
        .map(|line| &line["calls"])
        .collect();
    let sum = "all_reduce of 4 f32 (sum)";
    let expected = [
        "all_gather of 1 f32",
        "all_reduce of 3 f32 (sum)",
        "all_reduce of 4 i32 (sum)",
        "all_reduce of 4 f32 (avg)",
        "all_gather of 1 f32",
    ];
    assert_eq!(
        calls,
        expected
            .map(|call| json!({"0": call, "1": sum}))
            .iter()
            .collect::<Vec<_>>()
    );
}

#[test]
fn two_ranks_on_one_device_are_refused_before_nccl_2_30() {
    let name = "two_ranks_on_one_device_are_refused_before_nccl_2_30";
    let body = |rank: usize, world: usize| {
        let (_cuda, nccl, _) = start();
        let mut version = 0;
        assert_eq!(nccl.ncclGetVersion(&mut version), 0);
        let (id, mut comm) = (nccl.id(rank, "id"), 0);
        let code = nccl.ncclCommInitRank(&mut comm, world as c_int, id, rank as c_int);
        if version < 23_000 {
            assert_eq!(code, INVALID_USAGE);
            assert!(nccl.last_error(comm).starts_with("Duplicate GPU detected"));
        } else {
            assert_eq!(code, 0);
        }
        assert_eq!(nccl.ncclCommAbort(comm), 0);
    };
    let both = ("CUDA_VISIBLE_DEVICES", "0");
    let enable = ("NCCL_MULTI_RANK_GPU_ENABLE", "1");
    for version in ["22803", "23000"] {
        let settings = [both, enable, ("EMULATED_NCCL_VERSION", version)];
        if clean(name, 2, &settings, body).is_none() {
            return;
        }
    }
}

/// Two communicators that two ranks use in opposite order wait for each other for ever.
#[test]
fn a_deadlock_is_reported_with_what_each_rank_waits_for() {
    let name = "a_deadlock_is_reported_with_what_each_rank_waits_for";
    let settings = [("EMULATED_NCCL_TIMEOUT", "2")];
    let outcomes = in_ranks(name, 2, &settings, |rank, world| {
        let (cuda, nccl, stream) = start();
        let mut comms = ["first", "second"].map(|name| {
            let (id, mut comm) = (nccl.id(rank, name), 0);
            let code = nccl.ncclCommInitRank(&mut comm, world as c_int, id, rank as c_int);
            assert_eq!(code, 0);
            comm
        });
        let buffer = cuda.put(&[1.0; 4]);
        if rank == 1 {
            comms.reverse();
        }
        publish(&format!("ready{rank}"), b"");
        wait_for(&format!("ready{}", 1 - rank));
        for comm in comms {
            assert_eq!(nccl.sum(buffer, 4, comm, stream), 0);
        }
        // Each waits until the other has its finding.
        let report = std::env::var_os("EMULATED_GPU_REPORT").unwrap();
        let begun = Instant::now();
        while !std::fs::read_to_string(&report).is_ok_and(|text| text.contains("nccl_stalled")) {
            assert!(begun.elapsed() < PATIENCE);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(nccl.async_error(comms[0]), 0, "NCCL itself does not notice");
        assert_eq!(cuda.cuStreamQuery(stream), common::NOT_READY);
        publish(&format!("stalled{rank}"), b"");
        wait_for(&format!("stalled{}", 1 - rank));
        for comm in comms {
            assert_eq!(nccl.ncclCommAbort(comm), 0);
        }
        assert_eq!(cuda.cuStreamSynchronize(stream), 0);
    });
    let Some(outcomes) = outcomes else { return };
    for (rank, outcome) in outcomes.iter().enumerate() {
        assert!(outcome.status.success());
        assert_eq!(outcome.findings(), ["nccl_stalled"]);
        let finding = &outcome.report[0];
        let other = 1 - rank;
        assert_eq!(
            (&finding["rank"], &finding["waits_for"]),
            (&json!(rank), &json!([other]))
        );
        let situation = finding["peers"][other.to_string()].as_str().unwrap();
        let says = format!("waits in operation 0, all_reduce of 4 f32 (sum), for rank {rank}");
        assert!(situation.contains(&says), "{situation}");
    }
}

#[test]
fn a_rank_that_never_comes_is_reported_and_an_abort_ends_the_initialisation() {
    let name = "a_rank_that_never_comes_is_reported_and_an_abort_ends_the_initialisation";
    let settings = [("EMULATED_NCCL_TIMEOUT", "0.2")];
    let outcomes = in_ranks(name, 1, &settings, |rank, _| {
        let (_cuda, nccl, _) = start();
        let (id, mut comm) = (nccl.id(rank, "id"), 0);
        let code = nccl.ncclCommInitRankConfig(&mut comm, 3, id, 0, &NON_BLOCKING);
        assert_eq!(code, IN_PROGRESS);
        let report = std::env::var_os("EMULATED_GPU_REPORT").unwrap();
        while !std::fs::read_to_string(&report).is_ok_and(|text| text.contains("nccl_stalled")) {
            assert_eq!(nccl.async_error(comm), IN_PROGRESS);
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(nccl.ncclCommAbort(comm), 0);
    });
    if let Some(outcomes) = outcomes {
        assert!(outcomes[0].status.success());
        assert_eq!(outcomes[0].findings(), ["nccl_stalled"]);
        assert_eq!(outcomes[0].report[0]["waits_for"], json!([1, 2]));
    }
}

/// A collective that the program does not ask for is not in its stream yet, so an event does not cover it.
#[test]
fn an_event_after_a_call_that_is_in_progress_does_not_cover_it() {
    let name = "an_event_after_a_call_that_is_in_progress_does_not_cover_it";
    let outcomes = in_ranks(name, 1, &[], |rank, _| {
        let (cuda, nccl, stream) = start();
        let (id, mut comm) = (nccl.id(rank, "id"), 0);
        let code = nccl.ncclCommInitRankConfig(&mut comm, 1, id, 0, &NON_BLOCKING);
        assert_eq!((code, nccl.settled(comm)), (IN_PROGRESS, 0));
        let buffer = cuda.put(&[1.0; 4]);
        let fill = cuda.function(cuda.load(), "fill");
        let (compute, event) = (cuda.stream(), cuda.event());
        assert_eq!(nccl.sum(buffer, 4, comm, stream), IN_PROGRESS);
        assert_eq!(cuda.cuEventRecord(event, stream), 0);
        assert_eq!(cuda.cuStreamWaitEvent(compute, event, 0), 0);
        assert_eq!(cuda.fill(fill, compute, buffer, 7.0, 4), 0);
        assert_eq!(nccl.settled(comm), 0);
        assert_eq!(cuda.cuCtxSynchronize(), common::LAUNCH_FAILED);
        assert_eq!(nccl.ncclCommAbort(comm), 0);
    });
    if let Some(outcomes) = outcomes {
        assert!(outcomes[0].status.success());
        assert_eq!(outcomes[0].findings(), ["race"]);
    }
}

#[test]
fn a_non_blocking_communicator_is_in_progress_until_it_is_asked() {
    let name = "a_non_blocking_communicator_is_in_progress_until_it_is_asked";
    let outcomes = in_ranks(name, 2, &[], |rank, world| {
        let (cuda, nccl, stream) = start();
        let (id, mut comm) = (nccl.id(rank, "id"), 0);
        let (world, number) = (world as c_int, rank as c_int);
        let code = nccl.ncclCommInitRankConfig(&mut comm, world, id, number, &NON_BLOCKING);
        assert_eq!((code, nccl.settled(comm)), (IN_PROGRESS, 0));
        let buffer = cuda.put(&[1.0; 4]);
        assert_eq!(nccl.sum(buffer, 4, comm, stream), IN_PROGRESS);
        assert_eq!(nccl.settled(comm), 0);
        assert_eq!(cuda.cuStreamSynchronize(stream), 0);
        assert_eq!(cuda.get(buffer, 4), [2.0; 4]);
        assert_eq!(nccl.ncclCommFinalize(comm), IN_PROGRESS);
        assert_eq!(nccl.settled(comm), 0);
        assert_eq!(nccl.sum(buffer, 4, comm, stream), INVALID_ARGUMENT);
        assert_eq!(nccl.ncclCommDestroy(comm), 0);
        assert_eq!(nccl.sum(buffer, 4, comm, stream), INVALID_ARGUMENT);
    });
    if let Some(outcomes) = outcomes {
        for outcome in &outcomes {
            assert!(outcome.status.success());
            assert_eq!(outcome.findings(), ["misuse"; 2]);
            let message = outcome.report[1]["message"].as_str().unwrap();
            let expected = "ncclAllReduce uses a communicator that ncclCommDestroy has ended";
            assert_eq!(message, expected);
        }
    }
}

/// SIGKILL gives an asynchronous error; with `EMULATED_NCCL_SILENT_LOSS`, as between GPUs of one machine, only
/// the timeout tells.
#[test]
fn a_killed_peer_is_an_error_and_an_abort_frees_the_stream() {
    let name = "a_killed_peer_is_an_error_and_an_abort_frees_the_stream";
    let body = |rank: usize, world: usize| {
        let (cuda, nccl, stream) = start();
        let comm = nccl.communicator(rank, world);
        let buffer = cuda.put(&[1.0; 4]);
        assert_eq!(nccl.sum(buffer, 4, comm, stream), 0);
        assert_eq!(cuda.cuStreamSynchronize(stream), 0);
        publish(&format!("done{rank}"), b"");
        if rank == 2 {
            wait_for("done0");
            wait_for("done1");
            let pid = std::process::id().to_string();
            let _ = Command::new("kill").args(["-9", &pid]).status();
            unreachable!("killed");
        }
        assert_eq!(nccl.sum(buffer, 4, comm, stream), 0);
        if std::env::var_os("EMULATED_NCCL_SILENT_LOSS").is_some() {
            let report = std::env::var_os("EMULATED_GPU_REPORT").unwrap();
            while !std::fs::read_to_string(&report).is_ok_and(|text| text.contains("stalled")) {
                std::thread::sleep(Duration::from_millis(5));
            }
            assert_eq!(nccl.async_error(comm), 0);
        } else {
            assert_eq!(nccl.failed(comm), REMOTE_ERROR);
        }
        assert_eq!(cuda.cuStreamQuery(stream), common::NOT_READY);
        // A thread that waits for the stream is released by the abort of another one.
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| cuda.cuStreamSynchronize(stream));
            assert_eq!(nccl.ncclCommAbort(comm), 0);
            assert_eq!(waits.join().unwrap(), 0);
        });
        assert!(
            cuda.get(buffer, 4).iter().all(|value| value.is_nan()),
            "poison"
        );
        let fill = cuda.function(cuda.load(), "fill");
        assert_eq!(cuda.fill(fill, stream, buffer, 7.0, 4), 0);
        assert_eq!(cuda.cuStreamSynchronize(stream), 0);
        assert_eq!(cuda.get(buffer, 4), [7.0; 4]);
    };
    for (settings, findings) in [
        (&[][..], &[][..]),
        (
            &[
                ("EMULATED_NCCL_SILENT_LOSS", "1"),
                ("EMULATED_NCCL_TIMEOUT", "3"),
            ][..],
            &["nccl_stalled"][..],
        ),
    ] {
        let Some(outcomes) = in_ranks(name, 3, settings, body) else {
            return;
        };
        assert!(!outcomes[2].status.success());
        for outcome in &outcomes[..2] {
            assert!(outcome.status.success());
            assert_eq!(outcome.findings(), findings);
        }
    }
}

#[test]
fn operations_and_initialisations_fail_on_request() {
    let name = "operations_and_initialisations_fail_on_request";
    let settings = [
        ("EMULATED_NCCL_FAIL", "2"),
        ("EMULATED_NCCL_DELAY_US", "20000"),
        ("EMULATED_NCCL_FAIL_INIT", "2"),
    ];
    clean(name, 1, &settings, |rank, world| {
        let (cuda, nccl, stream) = start();
        let comm = nccl.communicator(rank, world);
        let buffer = cuda.put(&[1.0; 4]);
        let begun = Instant::now();
        assert_eq!(nccl.sum(buffer, 4, comm, stream), 0);
        assert_eq!(cuda.cuStreamSynchronize(stream), 0);
        assert!(begun.elapsed() >= Duration::from_millis(20));
        assert_eq!(nccl.async_error(comm), 0);
        assert_eq!(nccl.sum(buffer, 4, comm, stream), 0);
        assert_eq!(nccl.failed(comm), REMOTE_ERROR);
        assert_eq!(nccl.sum(buffer, 4, comm, stream), REMOTE_ERROR);
        assert_eq!(nccl.ncclCommAbort(comm), 0);
        assert_eq!(cuda.cuStreamSynchronize(stream), 0);
        let (id, mut comm) = (nccl.id(rank, "second"), 0);
        assert_eq!(nccl.ncclCommInitRank(&mut comm, 1, id, 0), SYSTEM_ERROR);
        assert_eq!(nccl.ncclCommAbort(comm), 0);
        let (id, mut comm) = (nccl.id(rank, "third"), 0);
        assert_eq!(nccl.ncclCommInitRank(&mut comm, 1, id, 0), 0);
        assert_eq!(nccl.ncclCommDestroy(comm), 0);
    });
}

#[test]
fn a_communicator_that_is_not_destroyed_is_a_leak() {
    let name = "a_communicator_that_is_not_destroyed_is_a_leak";
    let outcomes = in_ranks(name, 1, &[], |rank, world| {
        let (cuda, nccl, _) = start();
        nccl.communicator(rank, world);
        assert_eq!(cuda.cuDevicePrimaryCtxRelease_v2(0), 0);
    });
    if let Some(outcomes) = outcomes {
        // When the context is destroyed, and at exit.
        assert_eq!(outcomes[0].findings(), ["leak"; 2]);
        let leak = outcomes[0].report[0]["communicator"].as_str().unwrap();
        assert!(leak.starts_with("rank 0 of 1 of communicator "), "{leak}");
    }
}

/// Communication that is issued before a kernel that does not depend on it starts before and overlaps.
#[test]
fn the_timeline_shows_operations_that_overlap() {
    let name = "the_timeline_shows_operations_that_overlap";
    let settings = [("EMULATED_GPU_TIMELINE", "1")];
    let outcomes = clean(name, 2, &settings, |rank, world| {
        let (cuda, nccl, stream) = start();
        let comm = nccl.communicator(rank, world);
        let compute = cuda.stream();
        let fill = cuda.function(cuda.load(), "fill");
        let [gradients, other] = [cuda.put(&[1.0; 32]), cuda.alloc(128)];
        if rank == 1 {
            // The operation of rank 0 cannot end before its kernel.
            wait_for("computed");
        }
        assert_eq!(nccl.sum(gradients, 32, comm, stream), 0);
        assert_eq!(cuda.fill(fill, compute, other, 1.0, 32), 0);
        assert_eq!(cuda.cuStreamSynchronize(compute), 0);
        if rank == 0 {
            publish("computed", b"");
        }
        assert_eq!(cuda.cuCtxSynchronize(), 0);
        for buffer in [gradients, other] {
            assert_eq!(cuda.cuMemFree_v2(buffer), 0);
        }
        assert_eq!(nccl.ncclCommDestroy(comm), 0);
    });
    let Some(outcomes) = outcomes else { return };
    let timeline = of_kind(&outcomes[0].report, "timeline");
    let find = |name: &str| {
        let mut lines = timeline.iter();
        let line = lines.find(|line| line["operation"] == name).unwrap();
        ["issued", "start", "end"].map(|key| line[key].as_u64().unwrap())
    };
    let [reduce, kernel] = ["all_reduce", "kernel fill"].map(find);
    assert!(reduce[0] < kernel[0], "issued: {timeline:?}");
    assert!(
        reduce[1] < kernel[1] && kernel[2] < reduce[2],
        "{timeline:?}"
    );
}

/// A captured collective runs at each launch of the graph.
#[test]
fn a_graph_with_an_operation_runs_again_and_again() {
    clean(
        "a_graph_with_an_operation_runs_again_and_again",
        2,
        &[],
        |rank, world| {
            let (cuda, nccl, stream) = start();
            let comm = nccl.communicator(rank, world);
            let buffer = cuda.put(&[1.0; 4]);
            assert_eq!(cuda.cuStreamBeginCapture_v2(stream, 1), 0);
            assert_eq!(nccl.sum(buffer, 4, comm, stream), 0);
            let graph = cuda.out(|graph| cuda.cuStreamEndCapture(stream, graph));
            let run = cuda.out(|run| cuda.cuGraphInstantiateWithFlags(run, graph, 0));
            for _ in 0..3 {
                assert_eq!(cuda.cuGraphLaunch(run, stream), 0);
            }
            assert_eq!(cuda.cuStreamSynchronize(stream), 0);
            assert_eq!(cuda.get(buffer, 4), [8.0; 4]);
            assert_eq!(nccl.ncclCommDestroy(comm), 0);
        },
    );
}
