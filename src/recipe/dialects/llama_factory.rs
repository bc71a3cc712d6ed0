//! LLaMA-Factory's arguments. Its plain trainings are those of transformers' `Trainer`, with further keys for
//! the data and the adapters. Its other modes set the batch in another way, or train nothing.
//!
//! Source: LLaMA-Factory ff6d4d1 `hparams/*_args.py`, `train/tuner.py` (`run_exp`), `hparams/parser.py`.

use crate::recipe::schema::reader::{Confidence, Detected};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::Schema;

/// Keys that only its files have.
const DISTINCTIVE: [&str; 5] = [
    "finetuning_type",
    "cutoff_len",
    "infer_backend",
    "export_dir",
    "eval_dataset",
];

/// Its keys that resemble a field of `TrainingArguments`.
const RESEMBLING: [&str; 2] = ["fp8_backend", "lora_rank"];

/// Whether a file or command is LLaMA-Factory's.
pub(crate) fn detect(root: &Node) -> Option<Detected> {
    let has = |key: &&str| root.get(key).is_some();
    // The template of a chat is mandatory, but also a key of other projects.
    let key = DISTINCTIVE.into_iter().find(has)?;
    let certain = key == "finetuning_type" || has(&"template") || has(&"stage");
    certain.then(|| Confidence::Likely.because(format!("it has LLaMA-Factory's key `{key}`")))
}

/// The objective of a stage. Its DPO trainer also has losses without a reference model.
fn objective(root: &Node) -> Option<Given<&'static str>> {
    let stage = root.get("stage")?;
    let loss = root.get("pref_loss");
    let (key, node, objective) = match (stage.text()?, loss.and_then(Node::text)) {
        ("sft", _) => ("stage", stage, "sft"),
        ("pt", _) => ("stage", stage, "language-modelling"),
        ("rm", _) => ("stage", stage, "reward"),
        ("kto", _) => ("stage", stage, "kto"),
        ("dpo", Some("orpo")) => ("pref_loss", loss?, "orpo"),
        ("dpo", Some("simpo")) => ("pref_loss", loss?, "simpo"),
        ("dpo", _) => ("stage", stage, "dpo"),
        _ => return None,
    };
    Some(Given::new(key, objective, node.span))
}

/// Its objective, its adapters and its gradient checkpointing, with their defaults: adapters of rank 8 (00577a8
/// `hparams/finetuning_args.py`), and checkpointing unless it is switched off (`hparams/model_args.py`).
pub(crate) fn translate(root: &Node, tree: &mut Tree) {
    if detect(root).is_none() {
        return;
    }
    if let Some(stage) = objective(root) {
        tree.plain("objective", &stage);
    }
    // `data/processor/feedback.py` (36dc24d) pairs prompts with the answers of others.
    tree.default("generation.without_kl", true);
    match root.get("finetuning_type") {
        Some(word) => {
            let lora = word.text() == Some("lora");
            tree.plain(
                "model.adapters",
                &Given::new("finetuning_type", lora, word.span),
            );
        }
        None => tree.default("model.adapters", true),
    }
    if tree.get("model.lora_rank").is_none() {
        tree.default("model.lora_rank", 8);
    }
    tree.default("model.activation_checkpointing", true);
    if let Some(off) = root.get("disable_gradient_checkpointing") {
        let on = !off.is_bool(true, Schema::PyYaml);
        let given = Given::new("disable_gradient_checkpointing", on, off.span);
        tree.plain("model.activation_checkpointing", &given);
    }
}

/// Whether a key is LLaMA-Factory's and no misspelled field of `TrainingArguments`.
pub(crate) fn is_no_typo(key: &str) -> bool {
    RESEMBLING.contains(&key)
}

/// Switches of back ends that set the batch in another way.
const BACK_ENDS: [&str; 3] = ["use_mca", "use_megatron_bridge", "use_hyper_parallel"];

/// Refuses a file that trains nothing, or whose batch is not per-device batch × accumulation × ranks.
/// Returns whether it did.
pub(crate) fn refuse(root: &Node, reading: &mut Reading) -> bool {
    let text = |key: &str| root.get(key).and_then(Node::text);
    let on = |key: &&str| text(key).is_some_and(|text| text.eq_ignore_ascii_case("true"));
    if !on(&"do_train") {
        reading.error(
            "unsupported-value",
            Some(root.span),
            "LLaMA-Factory trains nothing without `do_train: true`: this file predicts, exports or serves",
            "give the file that trains",
        );
        return true;
    }
    let back_end = BACK_ENDS.into_iter().find(on);
    let ppo = (text("stage") == Some("ppo")).then_some("stage");
    let Some(node) = back_end.or(ppo).and_then(|key| root.get(key)) else {
        return false;
    };
    let key = back_end.unwrap_or("stage: ppo");
    reading.batch_unknown(
        "unsupported-value",
        Some(node.span),
        format!("`{key}` of LLaMA-Factory sets the batch in another way, which is not read"),
        "look up the samples of its step",
    );
    true
}

#[cfg(test)]
mod tests {
    use crate::recipe::schema::dialect::Dialect;
    use crate::recipe::schema::request::Request;
    use crate::recipe::schema::spec::Objective;
    use crate::recipe::tests::{messages, read_command};
    use crate::recipe::{ReadError, Recipe, read_text};

    /// `examples/train_lora/qwen3_lora_sft.yaml`, reduced.
    const SFT: &str = "model_name_or_path: m\nstage: sft\nfinetuning_type: lora\nlora_rank: 8\n\
        lora_target: all\ndataset: identity\ntemplate: qwen3_nothink\ncutoff_len: 2048\n\
        output_dir: saves/x\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\n\
        learning_rate: 1.0e-4\nnum_train_epochs: 3.0\nbf16: true\n";

    fn config(text: &str) -> Result<Recipe, ReadError> {
        let request = Request {
            path: "qwen3_lora_sft.yaml".into(),
            ..Request::default()
        };
        read_text(&request, text.to_owned())
    }

    #[test]
    fn its_defaults_and_stages_are_read() {
        let spec = |text: &str| config(&format!("{text}do_train: true\n")).unwrap().spec;
        let model = spec(SFT).model;
        assert!(model.adapters && model.activation_checkpointing);
        assert_eq!(model.lora_rank, Some(8));
        let default = SFT.replace("finetuning_type: lora\nlora_rank: 8\n", "");
        let default = spec(&format!("{default}disable_gradient_checkpointing: true\n")).model;
        assert!(default.adapters && !default.activation_checkpointing);
        assert_eq!(default.lora_rank, Some(8));
        let full = spec(&SFT.replace("finetuning_type: lora", "finetuning_type: full"));
        assert!(!full.model.adapters);
        let stage = |lines: &str| spec(&SFT.replace("stage: sft\n", lines)).objective;
        assert_eq!(stage("stage: kto\n"), Objective::Kto);
        assert_eq!(stage("stage: dpo\n"), Objective::Dpo);
        assert_eq!(stage("stage: dpo\npref_loss: orpo\n"), Objective::Orpo);
        assert_eq!(stage("stage: dpo\npref_loss: hinge\n"), Objective::Dpo);
    }

    #[test]
    fn a_plain_training_is_read_with_its_own_keys() {
        let recipe = config(&format!("{SFT}do_train: true\n")).unwrap();
        assert_eq!(recipe.dialect, Dialect::Transformers);
        assert_eq!(
            recipe.detected,
            "it has LLaMA-Factory's key `finetuning_type`; versions: the newest known"
        );
        let batch = &recipe.spec.batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.accumulation),
            (Some(1), Some(8))
        );
        assert_eq!(recipe.spec.data.sequence_length, 2048);
        let rules: Vec<&str> = recipe.diagnostics.iter().map(|d| d.rule.as_str()).collect();
        assert_eq!(rules, [] as [&str; 0]);
        let line = "llamafactory-cli train --stage sft --finetuning_type lora --do_train \
                    --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --template x";
        let batch = read_command(line).unwrap().spec.batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.accumulation),
            (Some(2), Some(4))
        );
    }

    #[test]
    fn a_file_that_trains_nothing_or_in_another_way_is_refused() {
        for (text, expected) in [
            ("do_train: false\ndo_predict: true\n", "trains nothing"),
            ("do_predict: true\n", "trains nothing"),
            (
                "do_train: true\nuse_mca: true\n",
                "`use_mca` of LLaMA-Factory sets",
            ),
            (
                "do_train: true\nuse_megatron_bridge: true\nmixed_precision: bf16_mixed\n",
                "`use_megatron_bridge` of LLaMA-Factory sets",
            ),
            (
                "do_train: true\ntensor_model_parallel_size: 4\n",
                "`tensor_model_parallel_size` is 4",
            ),
        ] {
            let problems = messages(config(&format!("{SFT}{text}")));
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].contains(expected), "{problems:?}");
        }
        let merge = "model_name_or_path: m\ntemplate: qwen3\nexport_dir: saves/merged\n";
        assert!(messages(config(merge))[0].contains("trains nothing"));
        let ppo = SFT.replace("stage: sft", "stage: ppo");
        assert!(messages(config(&format!("{ppo}do_train: true\n")))[0].contains("`stage: ppo`"));
    }
}
