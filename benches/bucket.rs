//! A checkpoint of 1 GB to a bucket and back, on the S3 server of the tests, on this machine.
//!
//!     EVENKEEL_S3_SERVER=$(scripts/s3-server.sh) cargo bench --bench bucket
//!
//! Prints one JSON line: MB/s of an upload, of a restore (each file is hashed while it is received) and of the same
//! requests without hashing, the ratio of the two in alternation, and the memory that each needs beyond what the process
//! had before.

#[path = "../tests/endurance/s3.rs"]
mod s3;

use std::io::Write;
use std::path::Path;
use std::time::Instant;

use evenkeel::bucket::{Bucket, Object};
use evenkeel::checkpoint::{Committed, Contents, Target, Writer, bucket_copy, commit};
use evenkeel::engine::{ModelConfig, UnitState, layout};
use serde_json::json;

use s3::Server;

/// Alternations of restore and plain download.
const ROUNDS: usize = 5;

fn main() {
    let Some(server) = Server::start() else {
        return;
    };
    let bucket = server.bucket();
    let place = tempfile::tempdir().unwrap();

    let committed = save(&bucket, &place.path().join("one"));
    let path = committed
        .path
        .strip_prefix(place.path().join("one"))
        .unwrap();
    let path = path.to_str().unwrap().to_owned();
    let objects = bucket.list(&path).unwrap();
    let megabytes = objects.iter().map(|object| object.bytes).sum::<u64>() as f64 / 1e6;

    let (uploaded, upload_memory) = measured(|| {
        for object in &objects {
            let file = place.path().join("one").join(&object.key);
            bucket.upload(&file, &object.key).unwrap();
        }
    });
    let (mut restores, mut plains, mut restore_memory) = (Vec::new(), Vec::new(), 0.0_f64);
    for round in 0..ROUNDS {
        let disk = place.path().join(format!("restored-{round}"));
        let (seconds, memory) = measured(|| {
            bucket_copy::fetch(&bucket, &disk, &path, committed.checksum).unwrap();
        });
        restores.push(seconds);
        restore_memory = restore_memory.max(memory);
        std::fs::remove_dir_all(&disk).unwrap();
        std::fs::create_dir_all(disk.join(&path)).unwrap();
        plains.push(
            measured(|| {
                objects
                    .iter()
                    .for_each(|object| plain(&bucket, &disk, &object.key, object.bytes))
            })
            .0,
        );
        std::fs::remove_dir_all(&disk).unwrap();
    }
    let mut ratios: Vec<f64> = plains
        .iter()
        .zip(&restores)
        .map(|(plain, restore)| plain / restore)
        .collect();
    println!(
        "{}",
        json!({
            "megabytes": megabytes.round(),
            "upload_mb_per_s": (megabytes / uploaded).round(),
            "upload_memory_mb": upload_memory.round(),
            "restore_mb_per_s": (megabytes / median(&mut restores)).round(),
            "restore_memory_mb": restore_memory.round(),
            "plain_mb_per_s": (megabytes / median(&mut plains)).round(),
            "restore_over_plain": (median(&mut ratios) * 100.0).round() / 100.0,
        })
    );
}

/// Commits a checkpoint of about 1 GB.
fn save(bucket: &Bucket, run: &Path) -> Committed {
    let layout = layout(&ModelConfig {
        hidden_size: 768,
        intermediate_size: 2048,
        num_hidden_layers: 9,
        num_attention_heads: 12,
        num_key_value_heads: 12,
        head_dim: 64,
        vocab_size: 16_384,
        max_position_embeddings: 1024,
        norm_eps: 1e-5,
        rope_theta: 10_000.0,
        tie_word_embeddings: true,
        initializer_range: 0.02,
        ..ModelConfig::default()
    });
    let target = Target {
        run_directory: run.to_path_buf(),
        bucket: Some(bucket.clone()),
        generation: 1,
        step: 1,
    };
    let writer = Writer::begin(&target, &layout, 0, 1);
    for (number, unit) in layout.units.iter().enumerate() {
        let vector = |salt: usize| {
            (0..unit.len)
                .map(|i| (i * 31 + salt) as f32)
                .collect::<Vec<f32>>()
        };
        let state = UnitState {
            parameters: vector(1),
            exp_avg: vector(2),
            exp_avg_sq: vector(3),
        };
        writer.write_unit(number, state);
    }
    let part = writer.finish().unwrap();
    let contents = Contents {
        layout: &layout,
        samples: 1,
        state: &json!({}),
        config: &json!({}),
        chat_template: None,
        companions: &[],
    };
    commit(&target, &[part], contents).unwrap()
}

/// Downloads an object as a restore does, but does not hash it.
fn plain(bucket: &Bucket, disk: &Path, key: &str, size: u64) {
    let mut file = std::fs::File::create(disk.join(key)).unwrap();
    let write = |piece: &[u8]| {
        piece
            .chunks(128 << 10)
            .all(|piece| file.write_all(piece).is_ok())
    };
    bucket.download(&Object::of(key, size), write).unwrap();
}

/// Seconds of an operation, and the MB by which its memory grew at most.
fn measured(operation: impl FnOnce()) -> (f64, f64) {
    std::fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = status("VmRSS:");
    let began = Instant::now();
    operation();
    (
        began.elapsed().as_secs_f64(),
        (status("VmHWM:") - before).max(0.0),
    )
}

/// MB of a line of the process's status.
fn status(name: &str) -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(name))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<f64>().unwrap() / 1e3
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
