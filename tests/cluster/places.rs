//! One recipe on this machine, on hosts that `ssh` reaches, on nodes of Slurm and on Kubernetes.

use serde_json::{Value, json};

#[path = "../endurance/lab.rs"]
#[expect(dead_code, reason = "the endurance tests use all of it")]
mod lab;
#[path = "../endurance/s3.rs"]
#[expect(dead_code, reason = "the endurance tests use all of it")]
mod s3;
#[path = "../endurance/slurm_lab.rs"]
#[expect(dead_code, reason = "the endurance tests use all of it")]
mod slurm_lab;
#[path = "../endurance/ssh_lab.rs"]
#[expect(dead_code, reason = "the endurance tests use all of it")]
mod ssh_lab;
// The places above have it as `super::support`.
#[path = "../endurance/support.rs"]
#[expect(dead_code, reason = "the endurance tests use all of it")]
mod support;

use self::lab::is_possible;
use self::slurm_lab::{Cluster, PROGRAMS};
use self::ssh_lab::{SSHD, Servers};
use self::support::{Run, stderr};
use super::losses::{self, Losses};
use super::support::{Job, kubectl, recipe};

/// Steps in each world.
const STEPS: usize = 100;

/// A run of one place, which has changed its world.
struct Trained {
    place: &'static str,
    /// Ranks of its generations.
    worlds: Vec<u64>,
    losses: Losses,
}

impl Trained {
    /// Waits until a run trains in its second world, and suspends it there.
    fn of(place: &'static str, run: &Run, inside: &[&str]) -> Trained {
        run.wait_for_steps(2, STEPS);
        let suspended = run.call_in(inside, "suspend", &[]);
        assert!(
            suspended.status.success(),
            "{place}: {}\n{}",
            stderr(&suspended),
            run.log()
        );
        assert_eq!(run.prove()["proved"], true, "{place}");
        Trained {
            place,
            worlds: run.worlds(),
            losses: losses::of(&run.out()),
        }
    }

    /// Compares the losses of all steps with those of an undisturbed run, and prints the largest relative difference.
    fn compare(&self, alone: &Losses) {
        let Trained {
            place,
            worlds,
            losses,
        } = self;
        assert!(
            losses.keys().copied().eq(1..=losses.len() as u64),
            "{place}: steps are missing"
        );
        let differences = losses.iter().map(|(step, loss)| {
            let expected = alone[step];
            (loss - expected).abs() / expected.abs()
        });
        let largest = differences.fold(0.0, f64::max);
        println!(
            "{place}: worlds {worlds:?}, {} steps, largest relative difference of a loss {largest:.1e}",
            losses.len()
        );
        assert!(largest <= losses::TOLERANCE, "{place}: {largest}");
    }
}

fn here(recipe: &Value) -> Trained {
    let run = Run::of(recipe["spec"].clone());
    let _launched = run.start(&["--procs", "3"]);
    run.wait_for_steps(1, STEPS);
    let resized = run.call("resize", &["2"]);
    assert!(resized.status.success(), "{}", stderr(&resized));
    Trained::of("this machine", &run, &["env"])
}

fn on_ssh(recipe: &Value) -> Trained {
    let servers = Servers::of(3);
    let lab = &servers.0;
    let run = Run::of(recipe["spec"].clone()).with_environment(servers.environment());
    let _launched = run.start_in(&lab.inside(), &["--on", &servers.place()]);
    run.wait_for_steps(1, STEPS);
    lab.power_off(3);
    Trained::of("SSH", &run, &lab.inside())
}

fn on_slurm(recipe: &Value) -> Trained {
    let cluster = Cluster::of(3);
    let lab = &cluster.lab;
    let run = Run::of(recipe["spec"].clone()).with_environment(cluster.environment());
    cluster.submit(&run, &run.scratch().join("launch.log"));
    run.wait_for_steps(1, STEPS);
    lab.power_off(3);
    Trained::of("Slurm", &run, &lab.inside())
}

fn on_kubernetes(recipe: &Value) -> Trained {
    let job = Job::apply("places", recipe, json!({"gpusPerNode": 1}));
    job.wait_training_on(3);
    kubectl(&["scale", "tj", "places", "--replicas=2"]);
    job.wait_training_on(2);
    let status = job.settle(96);
    let history = status["history"].as_array().unwrap().iter();
    Trained {
        place: "Kubernetes",
        worlds: history
            .map(|row| row["toNodes"].as_u64().unwrap())
            .collect(),
        losses: losses::of(&job.run()),
    }
}

#[test]
fn one_recipe_has_equal_losses_on_all_places() {
    if !is_possible(&[&PROGRAMS[..], &[SSHD]].concat()) {
        return;
    }
    let long = recipe(2_000_000);
    let trained = [here, on_ssh, on_slurm, on_kubernetes].map(|place| place(&long));
    let most = trained.iter().map(|it| it.losses.len() as u64).max();
    // The learning rate is constant, so the budget changes no loss.
    let (alone, _) = losses::alone(&recipe(most.unwrap() * 96));
    trained.iter().for_each(|it| it.compare(&alone));
}
