//! The synthetic language through the same interface as files.

use super::*;
use crate::engine::IGNORE;
use crate::plan;
use crate::recipe::schema::spec::Synthetic;

fn synthetic(samples: u64, held_out: Option<f64>) -> Case {
    let mut case = Case::new();
    case.data.sequence_length = 32;
    case.data.held_out = held_out;
    case.data.train = vec![DataSource {
        path: "synthetic".to_string(),
        synthetic: Some(Synthetic {
            vocabulary: 64,
            branching: 4,
            samples,
            seed: 9,
        }),
        ..DataSource::default()
    }];
    case
}

#[test]
fn held_out_samples_are_not_trained_on() {
    let case = synthetic(100, Some(10.0));
    let prepared = case.prepare().unwrap();
    assert!(!prepared.reused);
    let train = case.open(Part::Train).unwrap();
    let evaluation = case.open(Part::Evaluation).unwrap();
    assert_eq!((train.len(), evaluation.len()), (90, 10));
    let trained = all(&train);
    assert!(
        all(&evaluation)
            .iter()
            .all(|sample| !trained.contains(sample))
    );
    assert!(matches!(
        train.sample(90),
        Err(DataError::OutOfRange {
            index: 90,
            samples: 90
        })
    ));
    insta::assert_snapshot!(counts(&case));
}

#[test]
fn the_planner_counts_the_samples_that_are_trained_on() {
    for held_out in [
        None,
        Some(0.25),
        Some(0.1),
        Some(0.999),
        Some(1.0),
        Some(7.9),
    ] {
        for samples in [10, 11, 1280] {
            // The source's weight and packing have no effect here.
            let mut case = synthetic(samples, held_out);
            case.data.train[0].weight = Some(0.5);
            case.data.packing = true;
            let mut recipe = native();
            recipe.spec.data = case.data.clone();
            let draft = plan::examine(&recipe, &plan::PlanRequest::gpus(1));
            let trained = match case.prepare() {
                Ok(prepared) => prepared.manifest.train.samples,
                // No training sample would be left.
                Err(_) => 0,
            };
            assert_eq!(
                draft.data_samples,
                Some(trained),
                "{held_out:?} of {samples}"
            );
        }
    }
}

fn native() -> crate::recipe::Recipe {
    let text = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec: {}\n";
    let request = crate::recipe::Request {
        path: "recipe.yaml".into(),
        ..Default::default()
    };
    crate::recipe::read_text(&request, text.to_string()).unwrap()
}

#[test]
fn every_token_but_the_first_is_a_target() {
    let case = synthetic(10, Some(0.25));
    case.prepare().unwrap();
    let train = case.open(Part::Train).unwrap();
    assert_eq!(train.len(), 7);
    assert_eq!(train.record.target_tokens, 7 * 32);
    assert_eq!(target_count(&train, 0), 32);
    let batch = train.collate([3, 0]).unwrap();
    assert_eq!((batch.batch, batch.seq_len), (2, 32));
    let sample = train.sample(3).unwrap().tokens;
    assert_eq!(batch.row(0), (&sample[..32], &sample[1..]));
    assert!(batch.targets.iter().all(|&target| target != IGNORE));
}

#[test]
fn unchanged_settings_reuse_the_data_and_changed_ones_replace_it() {
    let mut case = synthetic(10, None);
    case.prepare().unwrap();
    assert!(case.prepare().unwrap().reused);
    assert!(case.open(Part::Evaluation).is_none());
    case.data.sequence_length = 16;
    assert!(!case.prepare().unwrap().reused);
    assert_eq!(case.open(Part::Train).unwrap().record.longest_sample, 17);
}

#[test]
fn a_resumed_run_keeps_its_data() {
    let mut case = synthetic(10, None);
    case.prepare().unwrap();
    case.resume = true;
    assert!(case.prepare().unwrap().reused);
    case.data.sequence_length = 16;
    insta::assert_snapshot!(case.refusal());
    assert_eq!(case.open(Part::Train).unwrap().record.longest_sample, 33);
}

#[test]
fn settings_that_leave_nothing_to_train_on_are_refused() {
    let refuse = |samples, held_out| synthetic(samples, Some(held_out)).refusal();
    let mut empty = synthetic(10, None);
    empty.data.sequence_length = 0;
    let mut small = synthetic(10, None);
    small.vocab_size = Some(63);
    insta::assert_snapshot!(
        [
            refuse(10, 10.0),
            refuse(10, -1.0),
            refuse(10, f64::NAN),
            refuse(1, 0.5),
            empty.refusal(),
            small.refusal(),
        ]
        .join("\n")
    );
    assert!(!small.place().exists());
}
