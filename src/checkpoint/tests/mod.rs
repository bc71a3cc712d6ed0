//! Checkpoints of a small Llama, with real files and real processes.

mod agreement;
mod bucket;
mod disk;
mod engine;
mod faults;
mod killed;
mod misuse;
mod retention;
mod round_trip;
mod speed;
mod superseded;

use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;

use serde_json::{Value, json};

use super::*;
use crate::comm::Collective;
use crate::comm::tcp::{Greeting, TcpCollective, TcpOptions, connect, host};
use crate::engine::{Layout, ModelConfig, UnitState, layout};
use crate::util::key::Key;

/// 3 blocks, grouped-query attention; 5 units.
pub fn config() -> ModelConfig {
    ModelConfig {
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 3,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        vocab_size: 40,
        max_position_embeddings: 32,
        norm_eps: 1e-5,
        rope_theta: 10000.0,
        ..ModelConfig::default()
    }
}

/// A state that differs in every element, vector and unit, and for every `salt`.
pub fn unit_state(layout: &Layout, unit: usize, salt: u64) -> UnitState {
    let vector = |number: u64| {
        let value = move |i: usize| {
            let bits = (i as u64 + 1)
                .wrapping_add(number << 24)
                .wrapping_add((unit as u64) << 32)
                .wrapping_add(salt << 48)
                .wrapping_mul(0x9E37_79B9_7F4A_7C15);
            (bits >> 40) as f32 / (1 << 24) as f32 - 0.5
        };
        (0..layout.units[unit].len).map(value).collect()
    };
    UnitState {
        parameters: vector(0),
        exp_avg: vector(1),
        exp_avg_sq: vector(2),
    }
}

pub fn target(run: &Path, generation: u64, step: u64) -> Target {
    Target {
        run_directory: run.to_path_buf(),
        bucket: None,
        generation,
        step,
    }
}

/// The training loop's state at a step.
pub fn loop_state(step: u64) -> Value {
    json!({ "step": step, "controller": { "batch": 16, "ratio": 0.1 }, "seed": 42 })
}

/// The whole part of one rank.
pub fn write_part(
    target: &Target,
    layout: &Layout,
    rank: usize,
    world: usize,
) -> Result<Part, CheckpointError> {
    let writer = Writer::begin(target, layout, rank, world);
    for unit in 0..layout.units.len() {
        if writer.owns(unit) {
            writer.write_unit(unit, unit_state(layout, unit, target.step));
        }
    }
    writer.finish()
}

pub fn commit_parts(
    target: &Target,
    layout: &Layout,
    parts: &[Part],
) -> Result<Committed, CheckpointError> {
    let (state, config) = (loop_state(target.step), config().to_json());
    commit(
        target,
        parts,
        contents(layout, target.step, &state, &config),
    )
}

pub fn contents<'a>(
    layout: &'a Layout,
    step: u64,
    state: &'a Value,
    config: &'a Value,
) -> Contents<'a> {
    Contents {
        layout,
        samples: step * 16,
        state,
        config,
        companions: &[],
        chat_template: None,
    }
}

/// Writes a checkpoint of a world, rank after rank.
pub fn write(target: &Target, layout: &Layout, world: usize) -> Result<Committed, CheckpointError> {
    let parts: Result<Vec<Part>, _> = (0..world)
        .map(|rank| write_part(target, layout, rank, world))
        .collect();
    commit_parts(target, layout, &parts?)
}

/// Opens a checkpoint of `step` in full and checks every value.
pub fn assert_whole(committed: &Committed, layout: &Layout) {
    let checkpoint = Checkpoint::open(&committed.path, Some(committed.checksum)).unwrap();
    checkpoint.check_layout(layout).unwrap();
    for unit in 0..layout.units.len() {
        let loaded = checkpoint.load_unit(unit).unwrap();
        assert!(
            loaded == unit_state(layout, unit, committed.step),
            "unit {unit}"
        );
    }
    assert_eq!(checkpoint.state().unwrap(), loop_state(committed.step));
    assert_eq!(&checkpoint.committed(), committed);
}

pub fn default_layout() -> Layout {
    layout(&config())
}

/// Command that runs only `test` (of this module), with `variable` set to `value`.
pub fn this_test(test: &str, variable: &str, value: &Path) -> Vec<PathBuf> {
    let mut assignment = std::ffi::OsString::from(format!("{variable}="));
    assignment.push(value);
    let path = format!("checkpoint::tests::{test}");
    vec![
        "env".into(),
        assignment.into(),
        std::env::current_exe().unwrap(),
        "--exact".into(),
        path.into(),
        "--nocapture".into(),
    ]
}

/// Runs one of these tests again in a child process that may mount private file systems, which end with the
/// process. Prints a note and returns if this machine does not allow mounts.
pub fn in_private_mounts(test: &str, variable: &str, value: &Path) {
    let private = |command: &[PathBuf]| {
        let mut unshare = Command::new("unshare");
        unshare.args(["--map-root-user", "--mount"]).args(command);
        unshare.output()
    };
    let possible = private(&["mount", "-t", "tmpfs", "tmpfs", "/mnt"].map(PathBuf::from));
    if !possible.is_ok_and(|output| output.status.success()) {
        // Written past the capture of the test's output, so that it is visible.
        let _ = writeln!(
            std::io::stderr(),
            "skipped {test}: this machine does not let us mount a file system"
        );
        return;
    }
    let output = private(&this_test(test, variable, value)).unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Runs `work` on every rank of a world, one thread each; returns the results in rank order.
pub fn on_all<T: Send>(world: usize, work: impl Fn(Arc<TcpCollective>) -> T + Sync) -> Vec<T> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let key = Key::random().unwrap();
    let options = |rank| {
        let greeting = Greeting { rank, world };
        TcpOptions::new("127.0.0.1", port, greeting, key.clone())
    };
    thread::scope(|scope| {
        let work = &work;
        let mut listener = Some(listener);
        let start = |rank| {
            let (options, listener) = (options(rank), listener.take());
            scope.spawn(move || {
                let collective = match listener {
                    Some(listener) => host(&options, listener).unwrap(),
                    None => connect(&options).unwrap(),
                };
                let result = work(collective.clone());
                collective.close().unwrap();
                result
            })
        };
        let ranks: Vec<_> = (0..world).map(start).collect();
        let joined = ranks.into_iter().map(|rank| rank.join().unwrap());
        joined.collect()
    })
}
