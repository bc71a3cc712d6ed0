//! What must hold after a storm.

use super::jobs::{self, BATCH, Kind, STEPS, StormJob};
use crate::command_line;
use crate::losses::{self, Losses};
use crate::support::{kubectl, poll, running};

/// Maximum relative difference to the undisturbed run's loss, unless the bits must be the same.
const LOSS_TOLERANCE: f64 = 1e-6;
/// The same for the final evaluation.
const EVALUATION_TOLERANCE: f64 = 5e-3;

/// Whether a difference is allowed.
fn is_close(difference: f64, tolerance: f64) -> bool {
    let allowed = if jobs::is_exact() { 0.0 } else { tolerance };
    difference <= allowed
}

/// Runs of the storm's recipes without a disturbance.
pub struct Undisturbed {
    losses: Losses,
    evaluation: f64,
    /// Final evaluation with the norm test.
    norm_test_evaluation: f64,
}

impl Undisturbed {
    pub fn train() -> Undisturbed {
        let (losses, evaluation) = losses::alone(&jobs::recipe(Kind::Ddp));
        let (_, norm_test_evaluation) = losses::alone(&jobs::recipe(Kind::NormTest));
        Undisturbed {
            losses,
            evaluation: evaluation.expect("a final evaluation"),
            norm_test_evaluation: norm_test_evaluation.expect("a final evaluation"),
        }
    }

    /// Waits until a job completes, and checks it.
    pub fn check(&self, job: &StormJob) {
        match job.kind {
            Kind::External => external(job),
            Kind::Ddp | Kind::Fsdp => {
                self.built_in(job, self.evaluation);
                self.losses(job);
            }
            Kind::NormTest => self.built_in(job, self.norm_test_evaluation),
        }
    }

    /// Checks batch, progress, sample ledger, objects, lineage and final evaluation.
    fn built_in(&self, job: &StormJob, expected: f64) {
        let status = job.job.finish_despite_deletions(BATCH);
        job.job.one_lineage(&status);
        let progress = &status["progress"];
        assert_eq!(progress["percent"], "100 %", "{}: {progress}", job.name);
        let (proof, code) = command_line::proof(&job.name);
        assert_eq!(code, Some(0), "{}: {proof}", job.name);
        let evaluation = losses::evaluation(&job.job.run()).expect("a final evaluation");
        let difference = (evaluation - expected).abs() / expected;
        eprintln!(
            "storm: {} is exact after {} generations; final evaluation {difference:.1e} apart",
            job.name, status["jobGeneration"]["record"]["number"],
        );
        assert!(
            is_close(difference, EVALUATION_TOLERANCE),
            "{}: {evaluation}, not {expected}",
            job.name
        );
    }

    fn losses(&self, job: &StormJob) {
        let losses = losses::of(&job.job.run());
        assert!(
            losses.keys().copied().eq(1..=STEPS),
            "{}: steps are missing",
            job.name
        );
        let difference = |step: u64| {
            let (loss, expected) = (losses[&step], self.losses[&step]);
            (loss - expected).abs() / expected
        };
        let most = (1..=STEPS).map(difference).fold(0.0, f64::max);
        eprintln!("storm: {}: losses at most {most:.1e} apart", job.name);
        assert!(
            is_close(most, LOSS_TOLERANCE),
            "{}: losses {most:e} apart",
            job.name
        );
    }
}

/// Checks the steps of the external trainer: each generation continues from a checkpoint of an earlier one, and no
/// older generation takes a step after a newer one.
fn external(job: &StormJob) {
    job.job
        .wait("its end", |status| status["phase"] == "Complete");
    let text = std::fs::read_to_string(job.job.run().join("steps")).unwrap();
    let (mut generation, mut step, mut generations) = (0, 0, 0);
    for line in text.lines() {
        let (number, taken) = line.split_once(' ').expect("a generation and a step");
        let (number, taken): (u64, u64) = (number.parse().unwrap(), taken.parse().unwrap());
        let continues = if number == generation {
            taken == step + 1
        } else {
            number > generation && taken <= step + 1 && taken % 20 == 1
        };
        assert!(continues, "{}: {line} after {generation} {step}", job.name);
        generations += u64::from(number != generation);
        (generation, step) = (number, taken);
    }
    assert_eq!(step, STEPS, "{}", job.name);
    eprintln!(
        "storm: {} took every step, in {generations} generations",
        job.name
    );
}

/// Deletes all jobs, and checks that they leave no object, pod or process.
pub fn nothing_left(jobs: Vec<StormJob>) {
    for StormJob { job, disk, .. } in jobs {
        job.delete_whole();
        drop(disk);
    }
    let pods = || kubectl(&["get", "pods", "-A", "-l", "evenkeel.dev/job", "-o", "name"]);
    let processes =
        || running("evenkeel (agent|rank) .*/storm-|^/bin/busybox sh -c .* storm-external");
    let left = || format!("{}{:?}", pods(), processes());
    let none = || (pods().is_empty() && processes().is_empty()).then_some(());
    poll("the end of all pods and processes", none, left);
}
