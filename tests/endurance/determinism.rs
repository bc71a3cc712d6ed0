//! `determinism: world`: runs through random worlds, micro-batches, shardings and faults have the same bits as an undisturbed
//! one. `EVENKEEL_THOROUGH=1` makes twenty runs of 500 steps and more of three.

use rustix::process::Signal;
use serde_json::{Value, json};

use super::support::{Launched, Run, merge, small, wait_for};

/// Splitmix64, so that a failure can be repeated with its seed.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % bound
    }
}

/// The bits of a run: the weights, what each step decided, and the evaluations.
#[derive(Debug, PartialEq)]
struct Bits {
    weights: String,
    steps: Vec<Value>,
    evaluations: Vec<(u64, u64)>,
}

fn bits(run: &Run, samples: u64) -> Bits {
    let proof = run.prove();
    assert_eq!(proof["proved"], true, "{proof}");
    assert!(proof["samples"].as_u64().unwrap() >= samples, "{proof}");
    let steps = run.steps().into_iter().map(|(number, step)| {
        let of = |key: &str| step[key].clone();
        json!([
            number,
            of("samples"),
            of("batch"),
            of("loss"),
            of("gradient_norm"),
            of("learning_rate"),
            of("norm_test")
        ])
    });
    let evaluations = run.evaluations().into_iter();
    Bits {
        weights: proof["weights"].as_str().unwrap().to_owned(),
        steps: steps.collect(),
        evaluations: evaluations
            .map(|(samples, loss)| (samples, loss.to_bits()))
            .collect(),
    }
}

/// A recipe whose batch grows by the norm test.
fn recipe(samples: u64, changes: Value) -> Value {
    let mut spec = small(json!({
        "determinism": "world",
        "elasticity": {"min": 1, "max": 4},
        "schedule": {"kind": "norm-test", "eta": 0.4, "max_batch": 36},
        "budget": {"samples": samples},
        "data": {"held_out": 21},
        "evaluation": {"every_samples": samples / 5},
        "checkpoint": {"every_samples": samples / 8},
    }));
    merge(&mut spec, changes);
    spec
}

/// Waits until the newest generation after the first `known` ones has taken some steps; `None`: the launch has ended.
fn next_generation(run: &Run, launched: &mut Launched, known: usize, steps: usize) -> Option<u64> {
    wait_for("a generation with steps, or the end", || {
        if launched.has_ended() {
            return Some(None);
        }
        let state = run.state()?;
        let generations = state["generations"].as_array()?.len();
        let newest = generations as u64;
        let is_there = generations > known && run.generation_steps(newest).len() >= steps;
        is_there.then_some(Some(newest))
    })
}

/// Trains through several random changes of the world.
fn disturbed(spec: Value, random: &mut Random, changes: u64) -> Run {
    const WORLDS: [u64; 4] = [1, 2, 3, 4];
    let run = Run::of(spec);
    let start = |run: &Run, random: &mut Random, more: &[&str]| {
        let procs = WORLDS[random.below(4) as usize].to_string();
        let arguments = [&["--procs", &procs][..], more].concat();
        run.start(&arguments)
    };
    let mut launched = start(&run, random, &[]);
    let mut known = 0;
    for _ in 0..changes {
        let steps = 1 + random.below(12) as usize;
        let Some(newest) = next_generation(&run, &mut launched, known, steps) else {
            break;
        };
        known = newest as usize;
        let world = run.worlds()[known - 1];
        match random.below(3) {
            0 => {
                let others: Vec<u64> = WORLDS.into_iter().filter(|it| *it != world).collect();
                let next = others[random.below(3) as usize].to_string();
                let _ = run.call("resize", &[&next]);
            }
            1 if world > 1 => run.kill_rank_if_there(newest, random.below(world)),
            _ => {
                launched.signal(Signal::INT);
                if launched.wait().success() {
                    return run;
                }
                launched = start(&run, random, &["--resume"]);
            }
        }
    }
    assert!(launched.wait().success(), "{}", run.log());
    run
}

#[test]
fn runs_through_random_worlds_micro_batches_and_faults_end_in_the_bits_of_an_undisturbed_one() {
    let is_thorough = std::env::var_os("EVENKEEL_THOROUGH").is_some();
    let (runs, samples) = if is_thorough {
        (20, 18_000)
    } else {
        (3, 1_800)
    };
    let seed = std::env::var("EVENKEEL_SEED").ok();
    let seed = seed.and_then(|seed| seed.parse().ok()).unwrap_or(45);
    let undisturbed = Run::of(recipe(samples, json!({})));
    let output = undisturbed.launch(&["--quiet", "--procs", "1"]);
    assert!(output.status.success(), "{output:?}");
    let expected = bits(&undisturbed, samples);
    let batch = |step: &Value| step[2].as_u64().unwrap();
    let (first, last) = (
        &expected.steps[0],
        &expected.steps[expected.steps.len() - 1],
    );
    assert!(
        batch(first) < batch(last),
        "the norm test must decide something"
    );
    let mut random = Random(seed);
    for number in 0..runs {
        let strategy = ["ddp", "fsdp"][number % 2];
        let micro_batch = [1, 2, 3, 4, 6][random.below(5) as usize];
        let spec = recipe(
            samples,
            json!({
                "parallel": {"strategy": strategy},
                "batch": {"per_device_batch_size": micro_batch},
            }),
        );
        let changes = 3 + random.below(3);
        let run = disturbed(spec, &mut random, changes);
        let found = bits(&run, samples);
        let what = format!("seed {seed}, run {number}: {:?} {strategy}", run.worlds());
        println!("{what}: weights {}", found.weights);
        for (found, expected) in found.steps.iter().zip(&expected.steps) {
            assert_eq!(found, expected, "{what}");
        }
        assert_eq!(found, expected, "{what}");
    }
}

/// The planted change: without the mode the worlds differ in their bits.
#[test]
fn without_the_mode_another_world_has_other_bits() {
    let of_world = |procs: &str| {
        let run = Run::of(small(json!({"budget": {"samples": 600}})));
        let output = run.launch(&["--quiet", "--procs", procs]);
        assert!(output.status.success(), "{output:?}");
        bits(&run, 600).weights
    };
    assert_ne!(of_world("1"), of_world("3"));
}
