mod scripts;
mod strangers;
mod trainers;
mod trees;
mod unread;

use proptest::prelude::*;

use super::*;
use crate::plan::rules::testing::{norm_test, recipe, wrote};
use crate::plan::{Reached, Worlds};
use crate::recipe::schema::spec::{Prefer, Remainder};
use crate::recipe::{Request, Setting, corpus, read};

#[test]
fn golden_rescales_are_reproduced() {
    let Some(root) = corpus::root() else { return };
    let text = std::fs::read_to_string(root.join("golden/rescale_derived.csv")).unwrap();
    let mut rows = 0;
    for row in corpus::csv(&text).skip(1) {
        let [
            repo,
            commit,
            path,
            gbs,
            from_gpus,
            from_pd,
            from_ga,
            to_gpus,
            feasible,
            to_pd,
            to_ga,
            reason,
        ] = row.try_into().unwrap();
        let number = |text: &str| text.parse::<u64>().ok();
        let recipe = read(&Request {
            path: root.join(format!("{}/{commit}/{path}", repo.replace('/', "__"))),
            settings: vec![Setting {
                flag: "--recipe-gpus",
                path: "batch.gpus",
                value: from_gpus.clone(),
            }],
            ..Request::default()
        })
        .unwrap_or_else(|error| panic!("{path}: {error}"));
        let batch = &recipe.spec.batch;
        let own = (batch.per_device_batch_size, batch.accumulation.or(Some(1)));
        assert_eq!(own, (number(&from_pd), number(&from_ga)), "{path}");
        let world = number(&to_gpus).unwrap();
        let what = format!("{path} from {from_gpus} to {to_gpus}");
        match plan(&recipe, &PlanRequest::gpus(world)) {
            Ok(plan) => {
                assert_eq!(feasible, "yes", "{what}");
                assert_eq!(Some(plan.global_batch_size), number(&gbs), "{what}");
                assert_eq!(Some(plan.per_device_batch_size), number(&to_pd), "{what}");
                assert_eq!(
                    Some(plan.gradient_accumulation_steps),
                    number(&to_ga),
                    "{what}"
                );
                assert!(plan.facts.feasible_gpu_counts.contains(&world), "{what}");
            }
            Err(refused) => {
                assert_eq!(feasible, "no", "{what}");
                assert_eq!(refused.global_batch_size, number(&gbs), "{what}");
                let mut found = refused.findings.iter();
                let error = found.find(|d| d.is_error()).unwrap();
                assert_eq!(error.rule, "batch-divisible", "{what}");
                assert!(error.message.ends_with(&reason), "{what}");
                assert!(
                    !refused.facts.feasible_gpu_counts.contains(&world),
                    "{what}"
                );
            }
        }
        rows += 1;
    }
    assert!(rows >= 210);
}

#[test]
fn upstream_recipes_keep_their_authors_global_batch_and_worlds() {
    let Some(root) = corpus::root() else { return };
    let manifest = std::fs::read_to_string(root.join("manifest.csv")).unwrap();
    let mut planned = 0;
    for row in corpus::csv(&manifest).skip(1) {
        let [
            _,
            _,
            path,
            local_path,
            _,
            dialect,
            gpus,
            ..,
            outcome,
            _,
            _,
            _,
        ] = row.as_slice()
        else {
            panic!("{row:?}");
        };
        let Some((product, worlds)) = outcome.split_once("; exact at W in [") else {
            continue;
        };
        if dialect != "handbook-trl-yaml" {
            continue;
        }
        let setting = Setting {
            flag: "--recipe-gpus",
            path: "batch.gpus",
            value: gpus.clone(),
        };
        let recipe = read(&Request {
            path: root.join(local_path),
            settings: vec![setting],
            ..Request::default()
        })
        .unwrap();
        let own = gpus.parse().unwrap();
        let at_home = plan(&recipe, &PlanRequest::gpus(own)).unwrap();
        // `GBS=8x16x1=128` against `8 × 16 × 1 = 128`.
        let formula = at_home.formula.replace(" × ", "x").replace(" = ", "=");
        assert_eq!(format!("GBS={formula}"), *product, "{path}");
        assert_eq!(at_home.facts.adjusted, [], "{path}");
        for world in worlds.trim_end_matches(']').split(", ") {
            let world = world.parse().unwrap();
            assert!(
                at_home.facts.feasible_gpu_counts.contains(&world),
                "{path} at {world}"
            );
            let moved = plan(&recipe, &PlanRequest::gpus(world)).unwrap();
            assert_eq!(moved.global_batch_size, at_home.global_batch_size, "{path}");
        }
        planned += 1;
    }
    assert!(planned >= 14, "{planned}");
}

#[test]
fn adjustments_name_the_key_in_the_recipes_dialect() {
    let mut recipe = recipe();
    recipe.spec.batch.global = None;
    recipe.spec.batch.accumulation = Some(1);
    recipe.spec.batch.gpus = Some(8);
    wrote(
        &mut recipe,
        "a.yaml",
        "batch.accumulation",
        "gradient_accumulation_steps",
    );
    let of = |gpus| {
        plan(&recipe, &PlanRequest::gpus(gpus))
            .unwrap()
            .facts
            .adjusted
    };
    assert!(of(8).is_empty());
    let fewer = of(4);
    assert_eq!(fewer.len(), 1);
    assert_eq!(fewer[0].key, "gradient_accumulation_steps");
    assert_eq!((fewer[0].from.as_str(), fewer[0].to.as_str()), ("1", "2"));
    assert_eq!(
        fewer[0].reason,
        "keeps the global batch at 128: 4 × 16 × 2 = 128"
    );
    let more = of(16);
    assert_eq!(more[0].key, "batch.per_device_batch_size");
    assert_eq!(
        more[0].reason,
        "the largest divisor of 128 / 16 ranks = 8 up to the recipe's"
    );
}

#[test]
fn unstated_values_are_named_by_the_dialects_key() {
    let mut recipe = recipe();
    recipe.dialect = crate::recipe::Dialect::HandbookTrl;
    recipe.spec.batch.global = None;
    recipe.spec.batch.accumulation = Some(1);
    recipe.spec.batch.gpus = Some(4);
    let plan = plan(&recipe, &PlanRequest::gpus(2)).unwrap();
    assert_eq!(plan.facts.adjusted[0].key, "gradient_accumulation_steps");
}

#[test]
fn every_axis_but_data_divides_the_world() {
    let mut recipe = recipe();
    recipe.spec.parallel.tensor = 2;
    recipe.spec.parallel.context = 2;
    let plan = plan(&recipe, &PlanRequest::gpus(16)).unwrap();
    assert_eq!(plan.data_parallel_size, 4);
    assert_eq!(plan.formula, "4 × 16 × 2 = 128");
    assert_eq!(
        plan.facts.feasible_gpu_counts,
        [4, 8, 16, 32, 64, 128, 256, 512]
    );
}

#[test]
fn uneven_dealing_is_planned_where_no_exact_split_exists() {
    let mut recipe = recipe();
    recipe.spec.batch.remainder = Remainder::Uneven;
    let three = plan(&recipe, &PlanRequest::gpus(3)).unwrap();
    assert_eq!(three.formula, "16 × (3 + 3 + 2) = 128");
    assert_eq!(three.deal(three.global_batch_size), [3, 3, 2]);
    assert_eq!(three.gradient_accumulation_steps, 3);
    let four = plan(&recipe, &PlanRequest::gpus(4)).unwrap();
    assert_eq!(four.facts.remainder, Remainder::Exact);
}

#[test]
fn prefer_micro_raises_the_micro_batch_within_memory() {
    let mut recipe = crate::plan::rules::testing::seven_billion();
    recipe.spec.batch.per_device_batch_size = Some(4);
    recipe.spec.batch.accumulation = Some(4);
    recipe.spec.batch.gpus = Some(8);
    recipe.spec.batch.prefer = Prefer::PerDeviceBatchSize;
    let mut request = PlanRequest::gpus(4);
    let without = plan(&recipe, &request).unwrap();
    assert_eq!(without.formula, "4 × 4 × 8 = 128");
    request.device_memory = Some(141_000_000_000);
    let with = plan(&recipe, &request).unwrap();
    assert_eq!(with.formula, "4 × 32 × 1 = 128");
    assert!(with.facts.memory.unwrap().total < 141_000_000_000);
}

#[test]
fn elasticity_makes_the_quantum_finer_than_the_base_batch() {
    let mut recipe = norm_test(|_| {});
    recipe.spec.batch.global = Some(256);
    recipe.spec.batch.per_device_batch_size = Some(4);
    let quantum = |recipe: &Recipe| plan(recipe, &PlanRequest::gpus(4)).unwrap().quantum;
    assert_eq!(quantum(&recipe), 256);
    recipe.spec.elasticity.min = Some(2);
    recipe.spec.elasticity.max = Some(8);
    assert_eq!(quantum(&recipe), 32);
    recipe.spec.elasticity.min = Some(4);
    recipe.spec.elasticity.max = Some(4);
    assert_eq!(quantum(&recipe), 16);
}

#[test]
fn an_unreachable_maximum_is_rounded_down_with_an_adjustment() {
    let mut recipe = norm_test(|test| test.max_batch = 1000);
    recipe.spec.elasticity.max = Some(8);
    recipe.spec.elasticity.min = Some(8);
    let adjusted = plan(&recipe, &PlanRequest::gpus(8)).unwrap().facts.adjusted;
    assert_eq!(
        (adjusted[0].from.as_str(), adjusted[0].to.as_str()),
        ("1000", "896")
    );
}

#[test]
fn all_problems_are_reported_in_file_order() {
    let mut recipe = norm_test(|test| test.eta = 2.0);
    recipe.spec.elasticity.max = Some(4);
    recipe.spec.batch.auto_find = true;
    let file = recipe.sources.add("r.yaml", "0123456789");
    for (at, path) in ["schedule.eta", "batch.auto_find", "batch.global"]
        .iter()
        .enumerate()
    {
        wrote(&mut recipe, "r.yaml", path, path);
        let place = recipe.value_sources.get_mut(*path).unwrap();
        (place.span.file, place.span.start) = (file, at);
    }
    let refused = plan(&recipe, &PlanRequest::gpus(6)).unwrap_err();
    let rules: Vec<&str> = refused.findings.iter().map(|d| d.rule.as_str()).collect();
    assert_eq!(
        rules,
        [
            "norm-test-never-grows",
            "auto-find-shrinks-batch",
            "batch-divisible",
            "elasticity-bounds"
        ]
    );
    assert_eq!(refused.facts.diagnostics.len(), 4);
    assert!(refused.to_string().ends_with("and 1 more"), "{refused}");
}

#[test]
fn drafts_and_plans_have_the_same_keys() {
    let recipe = recipe();
    let request = PlanRequest::gpus(8);
    let draft = serde_json::to_value(examine(&recipe, &request)).unwrap();
    let plan = serde_json::to_value(plan(&recipe, &request).unwrap()).unwrap();
    assert_eq!(draft, plan);
    let order = |value: &serde_json::Value| -> Vec<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    assert_eq!(order(&draft), order(&plan));
}

#[test]
fn the_default_world_is_the_recipes() {
    let mut recipe = recipe();
    recipe.spec.parallel.tensor = 2;
    assert_eq!(default_world(&recipe.spec), 2);
    recipe.spec.elasticity.min = Some(4);
    assert_eq!(default_world(&recipe.spec), 4);
    recipe.spec.batch.gpus = Some(8);
    assert_eq!(default_world(&recipe.spec), 8);
}

fn number() -> impl Strategy<Value = Option<u64>> {
    let some = prop_oneof![
        0..40_u64,
        Just(1 << 20),
        Just(u64::from(u32::MAX)),
        Just(u64::MAX)
    ];
    prop_oneof![1 => Just(None), 4 => some.prop_map(Some)]
}

proptest! {
    #[test]
    fn absurd_numbers_are_planned_exactly_or_refused(
        (global, per_device_batch_size, accumulation, gpus) in (number(), number(), number(), number()),
        (tensor, pipeline, min, max) in (number(), number(), number(), number()),
        (world, limit, current, data) in (0..3000_u64, number(), number(), number()),
        (memory, max_batch) in (number(), number()),
        uneven: bool,
    ) {
        let mut recipe = norm_test(|test| test.max_batch = max_batch.unwrap_or(0));
        let spec = &mut recipe.spec;
        // The reader accepts only batches from 1 to 2^32.
        let batch = |n: Option<u64>| n.map(|n| n.clamp(1, 1 << 32));
        spec.batch.global = batch(global);
        spec.batch.per_device_batch_size = batch(per_device_batch_size);
        spec.batch.accumulation = batch(accumulation);
        spec.batch.gpus = gpus;
        spec.batch.remainder = if uneven { Remainder::Uneven } else { Remainder::Exact };
        spec.parallel.tensor = tensor.unwrap_or(1);
        spec.parallel.pipeline = pipeline.unwrap_or(1);
        spec.elasticity.min = min;
        spec.elasticity.max = max;
        spec.model.path = Some("TinyLlama/TinyLlama-1.1B".to_owned());
        spec.budget.epochs = Some(3.0);
        let request = PlanRequest {
            gpus: world,
            device_memory: memory,
            per_device_batch_size_limit: limit,
            current_batch: current,
            data_samples: data,
            ..PlanRequest::gpus(1)
        };
        match plan(&recipe, &request) {
            Ok(plan) => {
                let reached = Reached {
                    per_device_batch_size_limit: limit,
                    batch: current,
                    ..Reached::default()
                };
                let worlds = Worlds::new(recipe, request, None);
                prop_assert_eq!(worlds.known().is_feasible(world, reached), None, "only a plan can tell");
                let batch = plan.global_batch_size;
                let dealt: u64 = plan.deal(batch).iter().sum();
                prop_assert_eq!(dealt * plan.per_device_batch_size, batch);
                let axes = plan.facts.tensor_parallel_size * plan.facts.pipeline_parallel_size;
                prop_assert_eq!(plan.data_parallel_size * axes, world);
                prop_assert_eq!(batch % plan.quantum, 0);
                prop_assert_eq!(plan.quantum % plan.per_device_batch_size, 0);
            }
            Err(refused) => prop_assert!(
                refused.findings.iter().any(|d| d.is_error()),
                "refused without a reason: {:?}",
                refused
            ),
        }
    }

    #[test]
    fn a_count_is_feasible_exactly_when_it_is_planned(
        global in 1..3000_u64, per_device_batch_size in 1..33_u64, tensor in 1..4_u64, world in 1..200_u64,
    ) {
        let mut recipe = recipe();
        recipe.spec.batch.global = Some(global);
        recipe.spec.batch.per_device_batch_size = Some(per_device_batch_size);
        recipe.spec.parallel.tensor = tensor;
        let draft = examine(&recipe, &PlanRequest::gpus(world));
        let listed = draft.facts.feasible_gpu_counts.contains(&world);
        prop_assert_eq!(listed, world % tensor == 0 && global % (world / tensor) == 0);
        prop_assert_eq!(listed, draft.finish().is_ok());
        let worlds = Worlds::new(recipe, PlanRequest::gpus(1), None);
        let known = worlds.known().is_feasible(world, Reached::default());
        prop_assert_eq!(known, (!listed).then_some(false));
    }
}
