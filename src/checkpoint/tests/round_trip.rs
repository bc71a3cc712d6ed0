//! Any world reads the checkpoint of any other world.

use std::collections::BTreeSet;

use super::*;
use crate::checkpoint::unit_file::unit_shapes;

#[test]
fn checkpoints_of_all_worlds_read_the_same() {
    let layout = default_layout();
    let run = tempfile::tempdir().unwrap();
    let files = |world: usize| {
        let target = target(run.path(), world as u64, 7);
        let committed = write(&target, &layout, world).unwrap();
        assert_whole(&committed, &layout);
        let checkpoint = Checkpoint::open(&committed.path, None).unwrap();
        assert_eq!(checkpoint.manifest().world, world);
        checkpoint.manifest().files.clone()
    };
    let alone = files(1);
    for world in [2, 3, 8] {
        assert_eq!(files(world), alone, "world {world}");
    }
}

#[test]
fn directory_holds_what_transformers_expects_and_nothing_unlisted() {
    let layout = default_layout();
    let run = tempfile::tempdir().unwrap();
    let companions = ["tokenizer.json", "chat_template.jinja"].map(|name| run.path().join(name));
    for file in &companions {
        std::fs::write(file, "{}").unwrap();
    }
    let target = target(run.path(), 1, 120);
    let parts = [write_part(&target, &layout, 0, 1).unwrap()];
    let contents = Contents {
        layout: &layout,
        samples: 1920,
        state: &loop_state(120),
        config: &config().to_json(),
        companions: &companions,
        chat_template: Some("{{ messages }}"),
    };
    let committed = commit(&target, &parts, contents).unwrap();
    assert_eq!(committed.path, run.path().join("gen-1/step-0000120"));
    assert_eq!((committed.step, committed.samples), (120, 1920));

    let mut found: BTreeSet<String> = std::fs::read_dir(&committed.path)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(found.remove("manifest.json"));
    let checkpoint = Checkpoint::open(&committed.path, None).unwrap();
    let listed: BTreeSet<String> = checkpoint.manifest().files.keys().cloned().collect();
    assert_eq!(found, listed);
    insta::assert_snapshot!(listed.into_iter().collect::<Vec<_>>().join("\n"));

    // The recipe's template replaces the tokenizer's own.
    let template = std::fs::read_to_string(committed.path.join("chat_template.jinja"));
    assert_eq!(template.unwrap(), "{{ messages }}");
    let index = std::fs::read(committed.path.join("model.safetensors.index.json")).unwrap();
    let index: Value = serde_json::from_slice(&index).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    for unit in &layout.units {
        for parameter in &unit.parameters {
            let file = map[&parameter.name].as_str().unwrap();
            let bytes = std::fs::read(committed.path.join(file)).unwrap();
            let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            let tensor = tensors.tensor(&parameter.name).unwrap();
            assert_eq!(tensor.shape(), parameter.shape);
        }
    }
    assert_eq!(index["metadata"]["total_size"], 4 * layout.len());
}

#[test]
fn tied_model_has_no_head_in_its_files() {
    let tied = layout(&ModelConfig {
        tie_word_embeddings: true,
        ..config()
    });
    let run = tempfile::tempdir().unwrap();
    let committed = write(&target(run.path(), 1, 1), &tied, 2).unwrap();
    assert_whole(&committed, &tied);
    let index = std::fs::read_to_string(committed.path.join("model.safetensors.index.json"));
    assert!(!index.unwrap().contains("lm_head"));
}

#[test]
fn weights_that_are_not_finite_come_back_bit_for_bit() {
    let layout = default_layout();
    let run = tempfile::tempdir().unwrap();
    let target = target(run.path(), 1, 1);
    let writer = Writer::begin(&target, &layout, 0, 1);
    let odd = [f32::NAN, f32::INFINITY, -0.0, f32::MIN_POSITIVE / 2.0];
    for unit in 0..layout.units.len() {
        let mut state = unit_state(&layout, unit, 1);
        state.exp_avg[..4].copy_from_slice(&odd);
        writer.write_unit(unit, state);
    }
    let parts = [writer.finish().unwrap()];
    let committed = commit_parts(&target, &layout, &parts).unwrap();
    let checkpoint = Checkpoint::open_lazily(&committed.path, None).unwrap();
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    assert_eq!(
        bits(&checkpoint.load_unit(2).unwrap().exp_avg[..4]),
        bits(&odd)
    );
}

#[test]
fn a_model_of_another_shape_is_refused_with_both_shapes() {
    let run = tempfile::tempdir().unwrap();
    let committed = write(&target(run.path(), 1, 1), &default_layout(), 1).unwrap();
    let checkpoint = Checkpoint::open(&committed.path, None).unwrap();
    let refusal = |change: fn(&mut ModelConfig)| {
        let mut other = config();
        change(&mut other);
        let error = checkpoint.check_layout(&layout(&other)).unwrap_err();
        error
            .to_string()
            .replace(&committed.path.display().to_string(), "[checkpoint]")
    };
    let refusals = [
        refusal(|model| model.vocab_size = 80),
        refusal(|model| model.num_hidden_layers = 4),
        refusal(|model| model.num_key_value_heads = 2),
        refusal(|model| model.tie_word_embeddings = true),
    ];
    insta::assert_snapshot!(refusals.join("\n"));
}

#[test]
fn shapes_follow_the_layout() {
    let layout = default_layout();
    for (shape, unit) in unit_shapes(&layout).iter().zip(&layout.units) {
        assert_eq!(shape.elements(), unit.len);
    }
}
