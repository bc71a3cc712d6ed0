//! Fixed schedules, compared with the paper's step counts.

use super::*;

fn replay(runs: &[(u64, u64)]) -> BatchSchedule {
    BatchSchedule::Replay {
        runs: runs
            .iter()
            .map(|&(batch, steps)| ReplayRun { batch, steps })
            .collect(),
    }
}

/// Steps and samples of a fixed schedule until its budget is reached, as the training loop runs it.
fn run(schedule: &BatchSchedule, base: u64, quantum: u64) -> (u64, u64) {
    let mut controller = Controller::new(schedule, conditions(base, quantum)).unwrap();
    let (mut step, mut samples) = (0, 0);
    while samples < BUDGET {
        step += 1;
        samples += controller.batch();
        assert_eq!(controller.requested_groups(step), None);
        let decision = controller.observe(step, samples, false, None);
        assert_eq!(decision.next_batch, controller.batch());
    }
    (step, samples)
}

/// Compares a run with the steps and the mean batch that the paper prints for its schedule.
fn assert_paper(schedule: &BatchSchedule, base: u64, quantum: u64, steps: u64, mean: f64) {
    let (ran, samples) = run(schedule, base, quantum);
    assert_eq!(ran, steps);
    let realised = samples as f64 / ran as f64;
    assert!((realised - mean).abs() < 1.0, "{realised}, printed {mean}");
}

#[test]
fn the_papers_recorded_schedules_replay_to_its_step_counts() {
    let micro_batch = [
        (replay(&[(256, 1), (3776, 530)]), 531, 3770.0),
        (
            replay(&[(256, 1), (2112, 3), (2240, 9), (8192, 241)]),
            254,
            7878.0,
        ),
        (
            replay(&[(256, 1), (1344, 3), (1392, 4), (2384, 835)]),
            843,
            2373.0,
        ),
        (replay(&[(256, 1), (1152, 7), (8192, 244)]), 252, 7965.0),
    ];
    for (schedule, steps, mean) in &micro_batch {
        assert_paper(schedule, 256, 16, *steps, *mean);
    }
    let tiny = replay(&[
        (128, 1),
        (272, 4),
        (344, 1),
        (952, 1),
        (1200, 2),
        (1600, 10),
        (8192, 242),
    ]);
    assert_paper(&tiny, 128, 8, 261, 7676.0);
}

#[test]
fn constant_batches_give_the_papers_step_counts() {
    for (batch, steps) in [(2048, 977), (4096, 489), (8192, 245)] {
        assert_eq!(run(&BatchSchedule::Constant, batch, 64).0, steps);
    }
}

#[test]
fn stage_wise_warmup_gives_the_papers_step_count() {
    let stages = BatchSchedule::Stages {
        stages: [(0.025, 2048), (0.025, 4096), (0.95, 8192)]
            .map(|(share, batch)| Stage { share, batch })
            .to_vec(),
    };
    assert_paper(&stages, 2048, 64, 269, 7439.0);
    let first = Controller::new(&stages, conditions(256, 64)).unwrap();
    assert_eq!(first.batch(), 2048, "the first stage counts, not the base");
}

#[test]
fn a_replay_keeps_its_last_batch() {
    let mut controller =
        Controller::new(&replay(&[(256, 1), (512, 2)]), conditions(256, 16)).unwrap();
    let batches: Vec<u64> = (1..=6)
        .map(|step| {
            let batch = controller.batch();
            controller.observe(step, 0, false, None);
            batch
        })
        .collect();
    assert_eq!(batches, [256, 512, 512, 512, 512, 512]);
}
