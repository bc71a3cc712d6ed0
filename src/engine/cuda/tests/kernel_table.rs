//! What the kernels need of a GPU, from ptxas, the PTX and the emulated GPU's counters. The test writes it to
//! `docs/gpu.md`, so that a change of a kernel shows what it costs.

use std::fmt::Write;

use serde_json::Value;

use super::{assert_in_docs, bf16_options, child, device, roofline};
use crate::engine::cuda::CudaEngine;
use crate::engine::cuda::kernels::attention::{self, Variant};
use crate::engine::cuda::kernels::{self, Kernels};
use crate::engine::cuda::libraries::Version;
use crate::engine::cuda::nvrtc::Nvrtc;
use crate::engine::cuda::options::Precision;
use crate::engine::testing::{Batch, EVERYTHING, REVEAL, config};
use crate::engine::{Engine, ModelConfig};

/// NVRTC that the table is of; others give other registers.
const NVRTC: Version = Version(13, 5);
/// Head sizes of the table.
const HEAD_DIMS: [usize; 2] = [64, 128];
/// Head size of the child process's model, and micro-batches of its step.
const HEAD_DIM: &str = "EVENKEEL_TEST_HEAD_DIM";
const MICRO_BATCHES: &str = "EVENKEEL_TEST_MICRO_BATCHES";
/// Set if the model has the vectors of all families.
const VECTORS: &str = "EVENKEEL_TEST_VECTORS";

/// Limits of a multiprocessor of an H100 or H200 (compute capability 9.0), from the CUDA C programming guide.
mod multiprocessor {
    pub const REGISTERS: usize = 65_536;
    pub const WARPS: usize = 64;
    pub const BLOCKS: usize = 32;
    /// Bytes of shared memory.
    pub const SHARED: usize = 228 << 10;
    /// Bytes of it that CUDA reserves in each block.
    pub const RESERVED: usize = 1 << 10;
    /// Registers are given to warps in this unit.
    pub const REGISTER_UNIT: usize = 256;
}

/// Resources of a kernel.
#[derive(Debug)]
struct Resources {
    /// Threads of its largest block.
    threads: usize,
    /// Registers of a thread.
    registers: usize,
    /// Bytes of a thread's registers that do not fit and are stored in and loaded from memory.
    spills: usize,
    /// Bytes of a block.
    shared: usize,
    /// Instructions in the PTX: `mma` and `wgmma`, `ldmatrix`, `cp.async`.
    instructions: [usize; 3],
}

impl Resources {
    /// From ptxas' report and the PTX of one kernel, and its dynamic shared memory in bytes.
    fn of(kernel: &str, log: &str, ptx: &str, dynamic: u32) -> Resources {
        let (_, rest) = log
            .split_once(&format!("entry function '{kernel}'"))
            .unwrap();
        let (report, _) = rest.split_once("Compile time").unwrap();
        // "Used 62 registers, used 1 barriers, 128 bytes smem"
        let before = |unit: &str| -> Option<usize> {
            let (text, _) = report.split_once(unit)?;
            text.rsplit(' ').next()?.parse().ok()
        };
        let (_, rest) = ptx.split_once(&format!(".entry {kernel}(")).unwrap();
        let body = rest.split(".entry").next().unwrap();
        let count = |instruction| body.matches(instruction).count();
        let (_, threads) = body.split_once(".maxntid ").unwrap();
        Resources {
            threads: threads
                .split([',', '\n'])
                .next()
                .unwrap()
                .trim()
                .parse()
                .unwrap(),
            registers: before(" registers").unwrap(),
            spills: before(" bytes spill stores").unwrap() + before(" bytes spill loads").unwrap(),
            shared: before(" bytes smem").unwrap_or(0) + dynamic as usize,
            instructions: [
                count("mma.sync") + count("wgmma.mma_async"),
                count("ldmatrix"),
                count("cp.async."),
            ],
        }
    }

    /// Blocks that run on a multiprocessor at once.
    fn blocks(&self) -> usize {
        use multiprocessor::*;
        let warps = self.threads / 32;
        let registers = (self.registers * 32).next_multiple_of(REGISTER_UNIT) * warps;
        let shared = self.shared + RESERVED;
        [
            BLOCKS,
            WARPS / warps,
            REGISTERS / registers,
            SHARED / shared,
        ]
        .into_iter()
        .min()
        .unwrap_or(0)
    }
}

/// Resources of every kernel of a source in bf16.
fn compiled(nvrtc: &Nvrtc, of: &Kernels, head_dim: usize) -> Vec<(&'static str, Resources)> {
    let geometry = attention::Geometry {
        variant: if of.source.file == kernels::ATTENTION_WGMMA.source.file {
            Variant::Wgmma
        } else {
            Variant::Mma
        },
        heads: 1,
        kv_heads: 1,
        head_dim,
    };
    let mut options = Precision::Bf16.options();
    options.extend([
        format!("-DHEAD_DIM={head_dim}"),
        "--ptxas-options=-v".to_owned(),
    ]);
    let compiled = nvrtc.compile(&of.source, &options, "sm_90a").unwrap();
    let ptx = String::from_utf8(compiled.ptx).unwrap();
    let dynamic = |kernel: &str| {
        if kernel.starts_with("attention") {
            geometry.shared_bytes(kernel)
        } else {
            0
        }
    };
    let resources = |&kernel: &_| {
        (
            kernel,
            Resources::of(kernel, &compiled.log, &ptx, dynamic(kernel)),
        )
    };
    of.names.iter().map(resources).collect()
}

/// A layer with the shapes of the large models in small: 4 heads, 2 key-value heads.
fn model(head_dim: usize) -> ModelConfig {
    ModelConfig {
        hidden_size: 256,
        intermediate_size: 1536,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim,
        vocab_size: 512,
        max_position_embeddings: 256,
        ..config()
    }
}

/// The same with the vectors of all families.
fn with_all_vectors(head_dim: usize) -> ModelConfig {
    ModelConfig {
        qkv_biases: true,
        query_key_norms: true,
        ..model(head_dim)
    }
}

/// A step of micro-batches of 256 tokens, with everything measured.
#[test]
#[ignore = "the process of another test"]
fn a_child_process_counts() {
    let [head_dim, micro_batches] =
        [HEAD_DIM, MICRO_BATCHES].map(|name| std::env::var(name).unwrap().parse().unwrap());
    let device = device().unwrap();
    let model = match std::env::var_os(VECTORS) {
        Some(_) => with_all_vectors(head_dim),
        None => model(head_dim),
    };
    let mut engine = CudaEngine::new(model, bf16_options(), &device, None, Some(5)).unwrap();
    let batch = Batch::new(micro_batches, 256);
    for row in 0..micro_batches {
        let micro_batch = batch.part(row, row + 1);
        let last = row + 1 == micro_batches;
        engine.accumulate(micro_batch, EVERYTHING, last).unwrap();
    }
    engine.reduce(EVERYTHING).unwrap();
    engine.update(REVEAL).unwrap();
    println!("outcome: trained");
}

/// What the emulated GPU of this compute capability counted, by operation.
fn counted(capability: u32, head_dim: usize, micro_batches: usize, vectors: bool) -> Value {
    let mut settings = vec![
        ("EMULATED_GPU_CAPABILITY", capability.to_string()),
        (HEAD_DIM, head_dim.to_string()),
        (MICRO_BATCHES, micro_batches.to_string()),
    ];
    settings.extend(vectors.then(|| (VECTORS, "1".to_owned())));
    let (_, lines) = child("kernel_table::a_child_process_counts", &settings);
    let [summary] = &lines[..] else {
        panic!("{lines:?}")
    };
    summary["counts"].clone()
}

/// Starting idle blocks took as long as the work of an elementwise kernel on an H100.
#[test]
fn every_block_of_a_step_writes_something() {
    if device().is_none() {
        return;
    }
    let counts = counted(90, 64, 2, true);
    let kernels = counts.as_object().unwrap().iter();
    let kernels: Vec<_> = kernels
        .filter(|(name, _)| name.starts_with("kernel "))
        .collect();
    assert!(kernels.len() > 10, "{kernels:?}");
    for (kernel, counts) in kernels {
        let idle = counts["idle_blocks"].as_u64().unwrap();
        // A token that occurs again needs no block.
        let may_be_idle = kernel == "kernel embedding_backward";
        assert!(idle == 0 || may_be_idle, "{idle} idle blocks of {kernel}");
    }
}

/// The section of `docs/gpu.md`.
fn table(nvrtc: &Nvrtc) -> String {
    let mut table = "| kernel | threads | registers | spilled bytes | shared memory, bytes | blocks (warps of 64) \
                     | `mma`, `wgmma` | `ldmatrix` | `cp.async` | bank conflicts | sectors / ideal |\n\
                     |---|---|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    for head_dim in HEAD_DIMS {
        // Only attention depends on the head size. Hopper's kernels and the others are those of these capabilities.
        let sources = match head_dim {
            64 => kernels::SOURCES.as_slice(),
            _ => &[],
        };
        let [hopper, other] = [90, 80].map(|capability| counted(capability, head_dim, 2, true));
        let attention = [(Variant::Wgmma, &hopper), (Variant::Mma, &other)];
        let attention = attention.map(|(of, counts)| (of.kernels(), Some(of), counts));
        let sources = sources.iter().map(|source| (source, None, &hopper));
        for (source, variant, counts) in sources.chain(attention) {
            for (kernel, resources) in compiled(nvrtc, source, head_dim) {
                let count = |name| counts[format!("kernel {kernel}")][name].as_u64();
                let ratio = match (count("global_sectors"), count("global_sectors_ideal")) {
                    (Some(touched), Some(ideal)) => format!("{:.2}", touched as f64 / ideal as f64),
                    _ => "–".to_owned(),
                };
                let conflicts = count("bank_conflicts").map_or("–".to_owned(), |n| n.to_string());
                let of = match variant {
                    Some(Variant::Wgmma) => format!(", head size {head_dim}"),
                    Some(_) => format!(", head size {head_dim}, `mma`"),
                    None => String::new(),
                };
                let Resources {
                    threads,
                    registers,
                    spills,
                    shared,
                    instructions: [mma, ldmatrix, copies],
                } = resources;
                let blocks = resources.blocks();
                let _ = writeln!(
                    table,
                    "| `{kernel}`{of} | {threads} | {registers} | {spills} | {shared} | {blocks} ({}) | {mma} | \
                     {ldmatrix} | {copies} | {conflicts} | {ratio} |",
                    blocks * threads / 32,
                );
            }
        }
    }
    table
}

#[test]
fn the_table_of_kernels_in_the_docs_is_current() {
    if device().is_none() {
        return;
    }
    let nvrtc = Nvrtc::load(None).unwrap();
    if nvrtc.version != NVRTC {
        // In CI, scripts/test.sh has installed it.
        assert!(std::env::var_os("CI").is_none(), "NVRTC {}", nvrtc.version);
        eprintln!(
            "skipped: the table of kernels is that of NVRTC {NVRTC}, not {}",
            nvrtc.version
        );
        return;
    }
    assert_in_docs("kernels", &table(&nvrtc));
}

#[test]
fn the_roofline_counts_what_the_engine_launches() {
    if device().is_none() {
        return;
    }
    let counts = counted(90, 64, 1, false);
    let runs = |names: &[&str]| -> u64 {
        let operations = counts.as_object().unwrap().iter();
        let of_group =
            operations.filter(|(operation, _)| names.iter().any(|name| operation.contains(name)));
        of_group
            .map(|(_, counts)| counts["runs"].as_u64().unwrap())
            .sum()
    };
    let step = roofline::step(&model(64), (1, 256), Precision::Bf16);
    let elementwise = [
        "rmsnorm",
        "column_sums",
        "rope",
        "gated_",
        "embedding",
        "cross_entropy",
        "sum_losses",
    ];
    for (group, cost, names) in [
        ("products", step.products, &["matrix product"][..]),
        ("attention", step.attention, &["attention"]),
        ("elementwise", step.elementwise, &elementwise),
        ("optimiser", step.optimiser, &["adamw"]),
        (
            "norm test",
            step.norm_test,
            &["squared_norm", "sum_partials"],
        ),
    ] {
        assert_eq!(cost.launches as u64, runs(names), "{group}");
    }
}
