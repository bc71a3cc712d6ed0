use super::*;

fn conditions() -> Conditions {
    Conditions {
        base_batch: 256,
        quantum: 16,
        budget: 2_000_000,
        micro_batch: 4,
        workers: 4,
        sharded: false,
    }
}

fn refusal(schedule: &BatchSchedule) -> String {
    check(schedule, &conditions()).unwrap_err().to_string()
}

#[test]
fn a_maximum_below_the_base_batch_is_refused() {
    let settings = NormTest {
        max_batch: 128,
        ..NormTest::default()
    };
    let refused = check(&BatchSchedule::NormTest(settings), &conditions());
    assert_eq!(
        refused,
        Err(ScheduleError::MaximumBelowBase {
            max: 128,
            base: 256
        })
    );
}

#[test]
fn fixed_schedules_are_refused_where_they_cannot_be_split_or_add_up() {
    let stages = |stages: &[(f64, u64)]| BatchSchedule::Stages {
        stages: stages
            .iter()
            .map(|&(share, batch)| Stage { share, batch })
            .collect(),
    };
    let replay = |runs: &[(u64, u64)]| BatchSchedule::Replay {
        runs: runs
            .iter()
            .map(|&(batch, steps)| ReplayRun { batch, steps })
            .collect(),
    };
    let messages = [
        refusal(&stages(&[])),
        refusal(&stages(&[(0.5, 256), (0.25, 512)])),
        refusal(&stages(&[(0.5, 256), (0.5, 500)])),
        refusal(&replay(&[])),
        refusal(&replay(&[(256, 1), (8, 3)])),
        refusal(&replay(&[(0, 3)])),
    ];
    insta::assert_snapshot!(messages.join("\n"));
}

#[test]
fn a_quantum_that_no_world_could_use_is_refused() {
    for (quantum, micro) in [(0, 4), (16, 0), (24, 4), (16, 3), (512, 4)] {
        let conditions = Conditions {
            quantum,
            micro_batch: micro,
            ..conditions()
        };
        let refused = check(&BatchSchedule::Constant, &conditions);
        assert!(matches!(refused, Err(ScheduleError::Quantum { .. })));
    }
}

#[test]
fn sharded_workers_need_unsharded_accumulation_or_are_refused() {
    let sharded = Conditions {
        sharded: true,
        ..conditions()
    };
    let paper = NormTest {
        estimator: Estimator::Paper,
        ..NormTest::default()
    };
    let with = |settings: NormTest| check(&BatchSchedule::NormTest(settings), &sharded);
    let message = with(paper.clone()).unwrap_err().to_string();
    insta::assert_snapshot!(message);
    let workers = NormTest {
        groups: Groups::Workers,
        ..NormTest::default()
    };
    assert!(with(workers.clone()).is_err());
    for accepted in [
        NormTest {
            unsharded_accumulation: true,
            ..paper.clone()
        },
        NormTest {
            groups: Groups::MicroBatches,
            ..NormTest::default()
        },
    ] {
        assert_eq!(with(accepted), Ok(()));
    }
    // Without accumulation a worker has one micro-batch, whose gradient exists unsharded for a moment.
    let wide = Conditions {
        workers: 64,
        ..sharded
    };
    let small = NormTest {
        max_batch: 256,
        ..workers
    };
    assert_eq!(check(&BatchSchedule::NormTest(small), &wide), Ok(()));
}
