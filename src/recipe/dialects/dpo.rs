//! The Hydra tree of direct-preference-optimization: `config/config.yaml` with the groups `model`
//! and `loss`.
//!
//! `batch_size` is the global batch. Upstream cuts it into `gradient_accumulation_steps` slices and
//! each slice into one for every GPU. Both times it rounds down and drops the remainder. Only an
//! FSDP trainer starts a process for every GPU of one machine; the others drive all GPUs from one process.
//!
//! Source: direct-preference-optimization f8b8c0f, `train.py` (`main`), `trainers.py`
//! (`BasicTrainer.train`), `utils.py` (`slice_and_move_batch_for_device`, `get_local_run_dir`),
//! `preference_datasets.py` (`get_batch_iterator`).

use std::path::Path;

use super::hydra::Type::{self, Float, Int, Text};
use super::hydra::{Program, Registered, Values};
use super::preference::{self, DTYPES, DataSet, Kind};
use super::tree_effects;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::files::TreeBatch;
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::reader::{Detected, ReadOptions, Reader, Translated};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::schema::untrained::{Untrained, UntrainedReason};
use crate::recipe::syntax::node::Node;

/// Reads the tree of direct-preference-optimization.
pub struct Dpo;

/// The resolvers and keys of `train.py`.
const PROGRAM: Program = Program {
    resolvers: &[Registered {
        name: "get_local_run_dir",
        call: local_run_dir,
    }],
    optional: &[],
};

/// The values of `trainer` that upstream accepts.
const TRAINERS: &[&str] = &["BasicTrainer", "FSDPTrainer", "TensorParallelTrainer"];

/// Losses, with the objective that each is planned as.
const LOSSES: &[(&str, &str)] = &[("sft", "sft"), ("dpo", "dpo"), ("ipo", "dpo")];

/// Data sets that upstream knows by name.
const DATA_SETS: &[DataSet] = &[
    (
        "hh",
        "Anthropic/hh-rlhf",
        ["train", "test"],
        "dialogue-text",
    ),
    ("shp", "stanfordnlp/SHP", ["train", "test"], "scored-text"),
    (
        "se",
        "HuggingFaceH4/stack-exchange-preferences",
        ["train", "test"],
        "unknown",
    ),
];

/// Keys that become native ones unchanged.
const KEYS: &[(&str, Type, &str)] = &[
    ("batch.accumulation", Int, "gradient_accumulation_steps"),
    ("batch.global", Int, "batch_size"),
    ("data.sequence_length", Int, "max_length"),
    ("evaluation.batch", Int, "eval_batch_size"),
    ("evaluation.every_samples", Int, "eval_every"),
    ("evaluation.samples", Int, "n_eval_examples"),
    ("learning_rate.peak", Float, "lr"),
    ("learning_rate.warmup_steps", Int, "warmup_steps"),
    ("model.path", Text, "model.name_or_path"),
    ("optimizer.gradient_clip", Float, "max_grad_norm"),
    ("optimizer.name", Text, "optimizer"),
    ("output", Text, "local_run_dir"),
    ("tokenizer.path", Text, "model.tokenizer_name_or_path"),
];

impl Reader for Dpo {
    fn dialect(&self) -> Dialect {
        Dialect::Dpo
    }

    fn detect(&self, root: &Node, path: &Path, origin: &Origin) -> Option<Detected> {
        preference::detect(root, path, origin, Kind::Dpo)
    }

    fn read(&self, root: Node, asked: &ReadOptions<'_>, reading: &mut Reading) -> Translated {
        let composed = preference::compose(root, asked, &PROGRAM, reading);
        let values = Values::new(&composed.config);
        let mut tree = Tree::new(composed.config.span);
        preference::name(&values, asked.path, &mut tree, reading);
        objective(&values, &mut tree, reading);
        world(&values, &mut tree, reading);
        batch(&values, &mut tree, reading);
        model(&values, &mut tree, reading);
        training(&values, &mut tree, reading);
        values.translate(KEYS, &mut tree, reading);
        let names = values.texts("datasets", reading);
        for part in [0, 1] {
            preference::sources(&names, part, DATA_SETS, None, &mut tree);
        }
        let objective = preference::objective(&tree);
        if !objective.is_likelihood() {
            losses(&values, &names, &mut tree, reading);
        }
        let (config, typed) = (&composed.config, asked.command_line);
        tree_effects::find((config, Kind::Dpo, &[]), objective, typed, reading);
        Translated {
            native: tree.into_node(),
            source: composed.config,
            version: None,
            part: composed.part_of.is_some(),
        }
    }

    fn batch_keys(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("batch_size", "batch.global"),
            ("gradient_accumulation_steps", "batch.accumulation"),
        ]
    }
}

/// `${get_local_run_dir:${exp_name},${local_dirs}}`: the last of the directories, which upstream
/// creates if none exists. Upstream appends the time to the name; Evenkeel numbers
/// runs instead.
fn local_run_dir(arguments: &[Node]) -> Option<String> {
    let [name, folders] = arguments else {
        return None;
    };
    let last = folders.items()?.last()?.text()?;
    Some(format!("{last}/{}", name.text()?))
}

fn objective(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    let Some(name) = values.text("loss.name", reading) else {
        tree.default("objective", "dpo");
        return;
    };
    let known = LOSSES.iter().find(|(word, _)| *word == name.value);
    // A loss of the tree itself splits like all others; an unknown one on the command line may be a typo.
    if known.is_none() && Some(name.span.file) == reading.files.command_line {
        let words = LOSSES.iter().map(|(word, _)| *word);
        reading.unknown_value("loss.name", &name.value, name.span, words);
    }
    let taken = known.map_or("dpo", |(_, objective)| *objective);
    tree.text("objective", &name.with(taken.to_owned()));
    if known.is_none() {
        preference::taken_as(&name, taken, reading);
    }
}

/// The losses over preferences, and how rows are made: `preference_loss` of `trainers.py`, `tokenize_batch_element` of
/// `preference_datasets.py`, which cuts long prompts of `hh` at their start and of others at their end.
fn losses(
    values: &Values<'_>,
    data_sets: &[Given<String>],
    tree: &mut Tree,
    reading: &mut Reading,
) {
    tree.plain_if("preference.beta", values.float("loss.beta", reading));
    let name = values.text("loss.name", reading);
    match name.as_ref().map(|name| name.value.as_str()) {
        Some("ipo") => tree.default("preference.loss", "ipo"),
        Some("dpo") | None => {
            let smoothing = values.float("loss.label_smoothing", reading);
            tree.plain_if("preference.label_smoothing", smoothing);
            let free = values.bool("loss.reference_free", reading);
            tree.plain_if("preference.reference_free", free);
        }
        Some(_) => reading.untrained.extend(name.map(|name| Untrained {
            key: "loss.name".to_owned(),
            value: name.value,
            span: name.span,
            reason: UntrainedReason::Unsupported(Some("loss.name=dpo".to_owned())),
        })),
    }
    tree.default("data.rows.tokens", "apart-ended");
    tree.default("data.rows.cut", "completion");
    if !data_sets.iter().any(|name| name.value == "hh") {
        tree.default("data.rows.prompt_keeps", "start");
    }
    let prompt = values.int("max_prompt_length", reading);
    tree.plain_if("data.rows.max_prompt_length", prompt);
}

/// The number of processes: one for every GPU, or one in total.
fn world(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    let Some(trainer) = values.text("trainer", reading) else {
        return;
    };
    if !TRAINERS.contains(&trainer.value.as_str()) {
        let words = TRAINERS.iter().copied();
        reading.unknown_value("trainer", &trainer.value, trainer.span, words);
    }
    if trainer.value.contains("FSDP") {
        tree.text("parallel.strategy", &trainer.with("fsdp".to_owned()))
    } else {
        tree.plain("parallel.one_process", &trainer.with(true))
    }
}

fn batch(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    let mut quiet = Reading::default();
    reading.files.tree = Some(TreeBatch {
        size: values.int("batch_size", &mut quiet),
        accumulation: values.int("gradient_accumulation_steps", &mut quiet),
        per_pass: false,
    });
    tree.default("batch.division", "floored");
    tree.default("batch.last_batch", "drop");
    tree.default("evaluation.division", "floored");
    tree.default("evaluation.rounding", "batch");
    preference::checkpoints(values, true, tree, reading);
}

fn model(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    // Only FSDP trains in another precision than that of the weights.
    let sharded = tree.get("parallel.strategy").is_some();
    let policy = values.word("model.policy_dtype", DTYPES, reading);
    let mixed = values.word("model.fsdp_policy_mp", DTYPES, reading);
    let precision = mixed.filter(|_| sharded).or(policy);
    let precision = precision.map(|given| given.with(given.value.to_owned()));
    tree.text_if("model.precision", precision);
    let checkpointing = values.bool("activation_checkpointing", reading);
    tree.plain_if(
        "model.activation_checkpointing",
        checkpointing.filter(|_| sharded),
    );
    let block = values.node("model.block_name");
    if sharded && block.is_none() && values.has("model.block_name") {
        let span = values.node("trainer").map(|node| node.span);
        reading.error(
            "mandatory-missing",
            span,
            "an FSDP trainer needs `model.block_name`, but it is null",
            "give the class of the model's blocks: `model.block_name=GPTNeoXLayer`",
        );
    }
}

fn training(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    preference::budget(values, tree, reading);
    // Linear warm-up over `warmup_steps`, then constant.
    tree.default("learning_rate.shape", "constant");
    preference::warm_up(values, tree);
    // PyTorch's optimisers decay all parameters.
    tree.default("optimizer.weight_decay_on", "all");
    // The default weight decay of PyTorch's AdamW is 0.01.
    if values.node("optimizer").and_then(Node::text) == Some("AdamW") {
        tree.default("optimizer.weight_decay", "0.01");
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use crate::recipe::schema::dialect::Dialect;
    use crate::recipe::schema::request::Request;
    use crate::recipe::schema::spec::{
        Division, EvaluationDivision, IntervalRounding, LastBatch, LearningRateShape, Objective,
        Precision, Strategy,
    };
    use crate::recipe::{ReadError, Recipe, corpus, read};

    fn config() -> Option<PathBuf> {
        let root = corpus::root()?;
        Some(root.join("eric-mitchell__direct-preference-optimization/f8b8c0f49d/config"))
    }

    fn read_at(path: PathBuf, overrides: &[&str]) -> Result<Recipe, ReadError> {
        read(&Request {
            path,
            overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
            ..Request::default()
        })
    }

    #[test]
    fn a_launch_of_the_tree_gives_upstreams_values() {
        let Some(config) = config() else { return };
        let overrides = [
            "model=pythia28",
            "datasets=[hh,shp]",
            "loss=dpo",
            "loss.beta=0.1",
            "exp_name=anthropic-dpo",
            "gradient_accumulation_steps=2",
            "batch_size=64",
            "eval_batch_size=32",
            "trainer=FSDPTrainer",
            "model.fsdp_policy_mp=bfloat16",
        ];
        let recipe = read_at(config, &overrides).unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
        assert_eq!(recipe.diagnostics, []);
        assert_eq!(recipe.dialect, Dialect::Dpo);
        let spec = &recipe.spec;
        assert_eq!(spec.objective, Objective::Dpo);
        assert_eq!(
            (spec.batch.global, spec.batch.accumulation),
            (Some(64), Some(2))
        );
        assert_eq!(spec.batch.division, Division::Floored);
        assert_eq!(spec.batch.last_batch, LastBatch::Drop);
        assert_eq!(spec.evaluation.batch, Some(32));
        assert_eq!(spec.evaluation.division, EvaluationDivision::Floored);
        assert_eq!(spec.evaluation.every_samples, Some(20_000));
        assert_eq!(spec.evaluation.rounding, IntervalRounding::Batch);
        assert_eq!(spec.checkpoint.every_samples, Some(20_000));
        assert_eq!(spec.parallel.strategy, Strategy::Fsdp);
        assert!(!spec.parallel.one_process);
        assert_eq!(spec.model.path.as_deref(), Some("EleutherAI/pythia-2.8b"));
        assert_eq!(spec.model.precision, Precision::Bf16);
        assert_eq!(spec.learning_rate.peak, 5e-7);
        assert_eq!(spec.learning_rate.shape, LearningRateShape::Constant);
        assert_eq!(spec.learning_rate.warmup_steps, Some(150));
        assert_eq!(spec.optimizer.name.as_deref(), Some("RMSprop"));
        assert_eq!(spec.optimizer.gradient_clip, Some(10.0));
        assert_eq!(spec.data.train[1].path, "stanfordnlp/SHP");
        assert_eq!(spec.data.evaluation[0].split.as_deref(), Some("test"));
        assert_eq!(spec.data.sequence_length, 512);
        // The resolver of `train.py`, without the time that upstream appends to the name.
        assert_eq!(spec.output.as_deref(), Some(".cache/anthropic-dpo"));
    }

    #[test]
    fn other_trainers_drive_all_gpus_from_one_process() {
        let Some(config) = config() else { return };
        let of = |trainer: &str| {
            let trainer = format!("trainer={trainer}");
            let overrides = ["model=pythia28", "exp_name=x", "loss=sft", &trainer];
            read_at(config.clone(), &overrides).map(|recipe| recipe.spec.parallel.one_process)
        };
        assert!(of("BasicTrainer").unwrap() && of("TensorParallelTrainer").unwrap());
        assert!(!of("FSDPTrainer").unwrap());
        let error = of("FSDPTraner").unwrap_err();
        assert!(
            error.to_string().contains("did you mean `FSDPTrainer`?"),
            "{error}"
        );
    }

    #[test]
    fn the_shipped_root_names_a_missing_option() {
        let Some(config) = config() else { return };
        let error = read_at(config.join("config.yaml"), &["exp_name=x"]).unwrap_err();
        let found = &error.diagnostics[0];
        assert_eq!(found.rule, "config-missing");
        assert_eq!(
            found.message,
            "the config group `model` has no option `blank_model_fp32`"
        );
        assert!(
            found.help.starts_with("did you mean `blank_model`?"),
            "{}",
            found.help
        );
        let place = found.locate(&error.sources);
        assert_eq!((place.line, place.column), (Some(96), Some(10)));
        assert!(place.file.unwrap().ends_with("config/config.yaml"));
    }

    #[test]
    fn the_wrong_key_of_the_readme_is_refused_with_the_right_one() {
        let Some(config) = config() else { return };
        let overrides = [
            "exp_name=x",
            "model=blank_model",
            "model.name_or_path=gpt2-xl",
            "model.block=GPT2Block",
        ];
        let error = read_at(config, &overrides).unwrap_err();
        let found: Vec<_> = error.diagnostics.iter().filter(|d| d.is_error()).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].rule, "unknown-override");
        assert_eq!(found[0].message, "there is no key `model.block` to change");
    }

    #[test]
    fn a_loss_lacks_its_mandatory_values() {
        let Some(config) = config() else { return };
        let recipe = read_at(config.clone(), &["model=pythia69", "loss=dpo"]).unwrap();
        let messages: Vec<&str> = recipe
            .diagnostics
            .iter()
            .map(|d| d.message.as_str())
            .collect();
        assert_eq!(
            messages,
            [
                "`exp_name` is mandatory and has no value",
                "`loss.beta` is mandatory and has no value"
            ]
        );
        let sharded = [
            "model=blank_model",
            "model.name_or_path=x",
            "exp_name=x",
            "trainer=FSDPTrainer",
        ];
        let error = read_at(config, &sharded).unwrap_err();
        assert!(error.to_string().contains("`model.block_name`"), "{error}");
    }

    #[test]
    fn a_custom_loss_of_the_tree_is_noted_and_an_unknown_loss_on_the_command_line_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.yaml");
        let text = "trainer: FSDPTrainer\nbatch_size: 64\ngradient_accumulation_steps: 2\n\
                eval_batch_size: 32\nloss: {name: tdpo}\n";
        std::fs::write(&path, text).unwrap();
        let read = |overrides: &[&str]| {
            crate::recipe::read(&crate::recipe::schema::request::Request {
                path: path.clone(),
                dialect: Some(crate::recipe::schema::dialect::Dialect::Dpo),
                overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
                ..Default::default()
            })
        };
        let recipe = read(&[]).unwrap();
        assert_eq!(recipe.spec.batch.global, Some(64));
        let findings = recipe.diagnostics.iter();
        let findings = findings.filter(|d| d.message.starts_with("`loss.name` is `tdpo`"));
        assert_eq!(findings.count(), 1);
        let error = read(&["loss.name=spo"]).unwrap_err();
        assert!(
            error.to_string().contains("`loss.name` is `spo`"),
            "{error}"
        );
    }
}
