//! The binding of NCCL on emulated GPUs (`emulated-gpu/`): one child process for each rank.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use evenkeel::engine::cuda::Precision;
use evenkeel::engine::cuda::driver::{
    Argument, Device, Driver, Grid, Memory, Module, Pinned, Stream,
};
use evenkeel::engine::cuda::error::CudaError;
use evenkeel::engine::cuda::nccl::{Communicator, Nccl, UniqueId};
use half::bf16;
use serde_json::Value;

/// The test that a child process runs.
const CHILD: &str = "EVENKEEL_TEST_CHILD";
/// Rank and world of the child.
const RANK: &str = "EVENKEEL_TEST_RANK";
/// Directory of the libraries, and of files that ranks share.
const SHARED: &str = "EVENKEEL_TEST_SHARED";

/// A limit that only a failing test reaches.
const LONG: Duration = Duration::from_secs(120);
/// A limit that a test waits for.
const SHORT: Duration = Duration::from_millis(300);

const FLOATS: usize = 32;
const BYTES: usize = FLOATS * 4;

/// What a rank did.
struct Outcome {
    /// Lines of the emulated GPU's report.
    report: Vec<Value>,
    /// What the body returned.
    said: String,
    status: ExitStatus,
}

impl Outcome {
    fn summary(&self) -> &Value {
        let mut lines = self.report.iter();
        lines.find(|line| line["kind"] == "summary").unwrap()
    }

    /// The kinds of the findings.
    fn findings(&self) -> Vec<&str> {
        let kinds = self.report.iter().filter_map(|line| line["kind"].as_str());
        kinds.filter(|&kind| kind != "summary").collect()
    }
}

/// Runs the body in one process for each rank, with an emulated GPU each. In a child nothing is returned.
fn in_ranks(
    name: &str,
    world: usize,
    settings: &[(&str, &str)],
    body: impl FnOnce(usize, usize) -> String,
) -> Option<Vec<Outcome>> {
    if std::env::var(CHILD).as_deref() == Ok(name) {
        let rank = std::env::var(RANK).unwrap();
        let (rank, world) = rank.split_once('/').unwrap();
        let said = body(rank.parse().unwrap(), world.parse().unwrap());
        std::fs::write(shared(&format!("said{rank}")), said).unwrap();
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    emulated_gpu::install(directory).unwrap();
    let children = (0..world).map(|rank| {
        let output = std::fs::File::create(directory.join(format!("output{rank}"))).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        for (variable, _) in std::env::vars_os() {
            let variable_bytes = variable.as_encoded_bytes();
            if variable_bytes.starts_with(b"EMULATED_") || variable_bytes.starts_with(b"NCCL_") {
                command.env_remove(variable);
            }
        }
        command
            .args([name, "--exact", "--nocapture"])
            .env_remove("VIRTUAL_ENV")
            .env(CHILD, name)
            .env(RANK, format!("{rank}/{world}"))
            .env(SHARED, directory)
            .env("EVENKEEL_CUDA_LIBRARIES", directory)
            .env("LD_LIBRARY_PATH", directory)
            .env("CUDA_VISIBLE_DEVICES", rank.to_string())
            .env("EMULATED_GPU_DEVICES", world.to_string())
            .env(
                "EMULATED_GPU_REPORT",
                directory.join(format!("report{rank}")),
            )
            .envs(settings.iter().copied())
            .stdout(output.try_clone().unwrap())
            .stderr(output)
            .spawn()
            .unwrap()
    });
    let children: Vec<_> = children.collect();
    let outcomes = children.into_iter().enumerate().map(|(rank, mut child)| {
        let status = child.wait().unwrap();
        let read = |name: &str| {
            let path = directory.join(format!("{name}{rank}"));
            std::fs::read_to_string(path).unwrap_or_default()
        };
        println!("rank {rank}: {status}\n{}", read("output"));
        let report = read("report");
        let lines = report
            .lines()
            .map(|line| serde_json::from_str(line).unwrap());
        Outcome {
            report: lines.collect(),
            said: read("said"),
            status,
        }
    });
    Some(outcomes.collect())
}

/// Runs ranks that all succeed, and fails if the emulated GPUs find a mistake, a leak included.
fn clean(
    name: &str,
    world: usize,
    settings: &[(&str, &str)],
    body: impl FnOnce(usize, usize) -> String,
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

fn publish(name: &str, bytes: &[u8]) {
    let path = shared(&format!("{name}.new"));
    std::fs::write(&path, bytes).unwrap();
    std::fs::rename(path, shared(name)).unwrap();
}

/// Waits for a file of another rank.
fn wait_for(name: &str) -> Vec<u8> {
    let begun = Instant::now();
    loop {
        if let Ok(bytes) = std::fs::read(shared(name)) {
            return bytes;
        }
        assert!(begun.elapsed() < LONG, "no file {name}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until all ranks are here.
fn meet(name: &str, rank: usize, world: usize) {
    publish(&format!("{name}{rank}"), b"");
    for other in 0..world {
        wait_for(&format!("{name}{other}"));
    }
}

/// A rank's device, with two streams and NCCL.
struct Rank {
    device: Arc<Device>,
    nccl: Arc<Nccl>,
    compute: Stream,
    communication: Stream,
    module: Module,
    rank: usize,
    world: usize,
}

impl Rank {
    fn new(rank: usize, world: usize) -> Rank {
        let driver = Driver::load().unwrap();
        let device = Device::open(&driver, 0).unwrap();
        let image = emulated_gpu::scripted::MARK.as_bytes();
        Rank {
            nccl: Nccl::load(&driver).unwrap(),
            compute: device.stream().unwrap(),
            communication: device.stream().unwrap(),
            module: device.module(image, "scripted kernels").unwrap(),
            device,
            rank,
            world,
        }
    }

    /// A communicator of all ranks, by an id that rank 0 makes under a name.
    fn try_form(&self, name: &str, timeout: Duration) -> Result<Communicator, CudaError> {
        if self.rank == 0 {
            publish(name, &self.nccl.unique_id().unwrap().0);
        }
        let id = UniqueId(wait_for(name).try_into().unwrap());
        let ranks = (self.rank, self.world);
        Communicator::form(&self.nccl, &self.device, id, ranks, timeout, &|| true)
    }

    fn form(&self, name: &str) -> Communicator {
        self.try_form(name, LONG).unwrap()
    }

    fn buffer(&self) -> Memory {
        self.device.allocate(BYTES as u64, "a test").unwrap()
    }

    /// `out[i] = value`
    fn fill(&self, stream: &Stream, out: &Memory, value: f32) {
        let function = self.module.function("fill").unwrap();
        let arguments = [
            Argument::Address(out.address()),
            Argument::Float(value),
            Argument::Int(FLOATS as i32),
        ];
        let grid = Grid {
            blocks: (1, 1, 1),
            threads: FLOATS as u32,
            shared: 0,
        };
        // SAFETY: the arguments are those of the kernel; tests keep the memory until they synchronise.
        unsafe { stream.launch(&function, grid, &arguments) }.unwrap();
    }

    fn download(&self, stream: &Stream, memory: &Memory) -> Pinned {
        let bytes = memory.bytes() as usize;
        let mut pinned = self.device.pinned(bytes, "download").unwrap();
        // SAFETY: both live until the stream is synchronised.
        unsafe { stream.download(&mut pinned, 0, memory.address(), bytes) }.unwrap();
        stream.synchronize().unwrap();
        pinned
    }

    fn floats(&self, memory: &Memory) -> Vec<f32> {
        let pinned = self.download(&self.communication, memory);
        bytemuck::cast_slice(pinned.bytes()).to_vec()
    }

    /// Memory with these bytes.
    fn upload(&self, bytes: &[u8]) -> Memory {
        let memory = self.device.allocate(bytes.len() as u64, "upload").unwrap();
        let mut pinned = self.device.pinned(bytes.len(), "upload").unwrap();
        pinned.bytes_mut().copy_from_slice(bytes);
        // SAFETY: both live until the stream is synchronised.
        unsafe {
            self.communication
                .upload(memory.address(), &pinned, 0..bytes.len())
        }
        .unwrap();
        self.communication.synchronize().unwrap();
        memory
    }

    /// Sums the buffer over all ranks.
    fn sum(&self, communicator: &Communicator, buffer: &Memory) -> Result<(), CudaError> {
        let (address, stream) = (buffer.address(), &self.communication);
        // SAFETY: tests keep the buffer until they synchronise or abort.
        unsafe { communicator.all_reduce(stream, address, FLOATS) }
    }
}

#[test]
fn collectives_give_what_plain_loops_give() {
    let name = "collectives_give_what_plain_loops_give";
    for world in 1..=3 {
        let outcomes = clean(name, world, &[], |rank, world| {
            let here = Rank::new(rank, world);
            let communicator = here.form("id");
            let stream = &here.communication;
            let total = (world * (world + 1) / 2) as f32;

            let buffer = here.buffer();
            here.fill(stream, &buffer, rank as f32 + 1.0);
            here.sum(&communicator, &buffer).unwrap();
            assert_eq!(here.floats(&buffer), [total; FLOATS]);

            // A reduce-scatter and an all-gather, in place, are an all-reduce.
            let count = FLOATS / 4;
            let values = vec![rank as f32 + 1.0; world * count];
            let all = here.upload(bytemuck::cast_slice(&values));
            let own = all.address() + (rank * count * 4) as u64;
            // SAFETY: the buffers live until the stream is synchronised.
            unsafe {
                communicator
                    .reduce_scatter(stream, all.address(), own, count)
                    .unwrap();
                communicator
                    .all_gather(stream, own, all.address(), count, Precision::F32)
                    .unwrap();
            }
            assert_eq!(here.floats(&all), vec![total; world * count]);

            // In bf16.
            let own = here.upload(bytemuck::cast_slice(&[bf16::from_f32(rank as f32); 8]));
            let gathered = here.upload(&vec![0; world * 16]);
            // SAFETY: the buffers live until the stream is synchronised.
            unsafe {
                let (own, gathered) = (own.address(), gathered.address());
                communicator
                    .all_gather(stream, own, gathered, 8, Precision::Bf16)
                    .unwrap();
            }
            communicator.synchronize(stream, LONG).unwrap();
            let gathered = here.download(stream, &gathered);
            let expected: Vec<bf16> = (0..world * 8)
                .map(|index| bf16::from_f32((index / 8) as f32))
                .collect();
            assert_eq!(
                gathered.bytes(),
                bytemuck::cast_slice::<bf16, u8>(&expected)
            );
            communicator.check().unwrap();
            String::new()
        });
        let Some(outcomes) = outcomes else { return };
        let counts = &outcomes[0].summary()["nccl"];
        assert_eq!(counts["all_reduce"]["operations"], 1);
        assert_eq!(counts["all_reduce"]["bytes"], BYTES);
        assert_eq!(counts["reduce_scatter"]["bytes"], world * BYTES / 4);
        assert_eq!(counts["all_gather"]["bytes"], world * (BYTES / 4 + 16));
    }
}

/// A non-blocking call returns before its operation is in the stream. An event that is recorded after it must
/// cover the operation all the same.
#[test]
fn an_event_after_a_collective_covers_it() {
    let name = "an_event_after_a_collective_covers_it";
    clean(name, 2, &[], |rank, world| {
        let here = Rank::new(rank, world);
        let communicator = here.form("id");
        let buffer = here.buffer();
        let [ready, reduced] = [0, 1].map(|_| here.device.event().unwrap());
        here.fill(&here.compute, &buffer, 1.0);
        here.compute.record(&ready).unwrap();
        here.communication.wait(&ready).unwrap();
        here.sum(&communicator, &buffer).unwrap();
        here.communication.record(&reduced).unwrap();
        here.compute.wait(&reduced).unwrap();
        let pinned = here.download(&here.compute, &buffer);
        assert_eq!(
            bytemuck::cast_slice::<u8, f32>(pinned.bytes()),
            [2.0; FLOATS]
        );
        String::new()
    });
}

#[test]
fn ranks_that_do_not_come_end_the_wait() {
    let name = "ranks_that_do_not_come_end_the_wait";
    let outcomes = clean(name, 1, &[], |rank, _| {
        let here = Rank::new(rank, 2);
        here.try_form("id", SHORT).err().unwrap().to_string()
    });
    if let Some(outcomes) = outcomes {
        insta::assert_snapshot!(outcomes[0].said);
    }
}

#[test]
fn two_ranks_on_one_gpu_are_refused() {
    let name = "two_ranks_on_one_gpu_are_refused";
    let settings = [("CUDA_VISIBLE_DEVICES", "0")];
    let outcomes = clean(name, 2, &settings, |rank, world| {
        let here = Rank::new(rank, world);
        let error = here.try_form("id", LONG).err().unwrap().to_string();
        // Which rank is named first depends on which joins first.
        error.replace("rank 1 and rank 0", "rank 0 and rank 1")
    });
    if let Some(outcomes) = outcomes {
        insta::assert_snapshot!(outcomes[0].said);
    }
}

#[test]
fn ranks_that_disagree_get_an_error_and_their_streams_back() {
    let name = "ranks_that_disagree_get_an_error_and_their_streams_back";
    let outcomes = in_ranks(name, 2, &[], |rank, world| {
        let here = Rank::new(rank, world);
        let communicator = here.form("id");
        let buffer = here.buffer();
        here.fill(&here.communication, &buffer, 1.0);
        let (address, count) = (buffer.address(), FLOATS - rank);
        // SAFETY: the buffer lives until the communicator is aborted.
        unsafe {
            let stream = &here.communication;
            communicator.all_reduce(stream, address, count).unwrap();
        }
        // Until both know, none aborts.
        let begun = Instant::now();
        while communicator.check().is_ok() {
            assert!(begun.elapsed() < LONG);
            std::thread::sleep(Duration::from_millis(1));
        }
        meet("checked", rank, world);
        let error = communicator.synchronize(&here.communication, LONG);
        let error = error.unwrap_err();
        let is_usage = matches!(&error, CudaError::Nccl { failure, .. } if failure.starts_with("ncclInvalidUsage: "));
        assert!(is_usage, "{error}");
        here.communication.synchronize().unwrap();
        let again = here.sum(&communicator, &buffer).unwrap_err();
        assert!(matches!(again, CudaError::NcclAborted { .. }), "{again}");
        assert!(matches!(
            communicator.check(),
            Err(CudaError::NcclAborted { .. })
        ));
        here.fill(&here.communication, &buffer, 3.0);
        assert_eq!(here.floats(&buffer), [3.0; FLOATS]);
        again.to_string()
    });
    if let Some(outcomes) = outcomes {
        for outcome in &outcomes {
            assert!(outcome.status.success());
            assert_eq!(outcome.findings(), ["nccl_mismatch"]);
        }
        insta::assert_snapshot!(outcomes[0].said);
    }
}

/// The loss of a peer gives an error, or between GPUs of one machine nothing; in both cases the wait ends.
#[test]
fn a_killed_peer_never_hangs_the_others() {
    let name = "a_killed_peer_never_hangs_the_others";
    let body = |rank: usize, world: usize| {
        let here = Rank::new(rank, world);
        let communicator = here.form("id");
        let buffer = here.buffer();
        here.fill(&here.communication, &buffer, 1.0);
        here.sum(&communicator, &buffer).unwrap();
        communicator.synchronize(&here.communication, LONG).unwrap();
        meet("summed", rank, world);
        if rank == 2 {
            let pid = std::process::id().to_string();
            let _ = Command::new("kill").args(["-9", &pid]).status();
            unreachable!("killed");
        }
        let is_silent = std::env::var_os("EMULATED_NCCL_SILENT_LOSS").is_some();
        here.sum(&communicator, &buffer).unwrap();
        let limit = if is_silent { SHORT } else { LONG };
        let error = communicator.synchronize(&here.communication, limit);
        let error = error.unwrap_err();
        match (is_silent, &error) {
            (true, CudaError::NcclTimeout { .. }) => {}
            (false, CudaError::Nccl { failure, .. }) => {
                assert!(failure.starts_with("ncclRemoteError: "), "{failure}");
            }
            _ => panic!("{error}"),
        }
        here.communication.synchronize().unwrap();
        if is_silent {
            error.to_string()
        } else {
            String::new()
        }
    };
    for settings in [&[][..], &[("EMULATED_NCCL_SILENT_LOSS", "1")]] {
        let Some(outcomes) = in_ranks(name, 3, settings, body) else {
            return;
        };
        for outcome in &outcomes[..2] {
            assert!(outcome.status.success());
            assert_eq!(outcome.findings(), Vec::<&str>::new());
        }
        if !settings.is_empty() {
            insta::assert_snapshot!(outcomes[0].said);
        }
    }
}

/// Rank 1 never joins in the operation of rank 0.
#[test]
fn an_abort_and_a_drop_end_pending_operations() {
    let name = "an_abort_and_a_drop_end_pending_operations";
    clean(name, 2, &[], |rank, world| {
        let here = Rank::new(rank, world);
        let buffer = here.buffer();
        here.fill(&here.communication, &buffer, 1.0);
        for way in ["abort", "drop"] {
            let communicator = here.form(way);
            if rank == 0 {
                here.sum(&communicator, &buffer).unwrap();
            }
            if rank == 0 && way == "abort" {
                // A thread that waits is released by the abort of another one.
                std::thread::scope(|scope| {
                    let stream = &here.communication;
                    let waits = scope.spawn(|| communicator.synchronize(stream, LONG));
                    communicator.abort();
                    communicator.abort();
                    match waits.join().unwrap() {
                        // The stream may be done before the wait begins.
                        Ok(()) | Err(CudaError::NcclAborted { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                });
            }
            if rank == 1 {
                wait_for(&format!("ended by {way}"));
            }
            drop(communicator);
            publish(&format!("ended by {way}"), b"");
            here.communication.synchronize().unwrap();
        }
        String::new()
    });
}

#[test]
fn a_failed_initialisation_says_what_to_do() {
    let name = "a_failed_initialisation_says_what_to_do";
    let settings = [("EMULATED_NCCL_FAIL_INIT", "1")];
    let outcomes = clean(name, 1, &settings, |rank, world| {
        let here = Rank::new(rank, world);
        here.try_form("id", LONG).err().unwrap().to_string()
    });
    if let Some(outcomes) = outcomes {
        insta::assert_snapshot!(outcomes[0].said);
    }
}

#[test]
fn an_old_nccl_is_refused() {
    let name = "an_old_nccl_is_refused";
    let settings = [("EMULATED_NCCL_VERSION", "21304")];
    let outcomes = clean(name, 1, &settings, |_, _| {
        let driver = Driver::load().unwrap();
        Nccl::load(&driver).err().unwrap().to_string()
    });
    if let Some(outcomes) = outcomes {
        insta::assert_snapshot!(outcomes[0].said);
    }
}
