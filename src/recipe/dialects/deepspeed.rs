//! DeepSpeed's JSON configs: alone, and as the part of a job that a recipe or an accelerate config
//! names. `"auto"` values come from the trainer and state nothing here.
//!
//! Of the triple `train_batch_size` = `train_micro_batch_size_per_gpu` ×
//! `gradient_accumulation_steps` × world, DeepSpeed derives missing numbers by floor division and
//! asserts the product. The file does not contain the world, so the planner derives.
//!
//! Sources: DeepSpeed edaa722 `runtime/config.py` (`DeepSpeedConfig.__init__`, which reads Hjson,
//! `_set_batch_related_parameters`, `_batch_assertion`); transformers 5.23.0 `integrations/deepspeed.py` (`trainer_config_process`
//! compares each value with the trainer's); accelerate 16cb6eb `utils/dataclasses.py`
//! (`DeepSpeedPlugin`).

pub(crate) mod elasticity;
pub(crate) mod hosts;

use std::path::Path;

use crate::recipe::schema::deepspeed::distinctive_key;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::reader::{Confidence, Detected, ReadOptions, Reader, Translated};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::run_name;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::diagnostic::Severity;
use crate::recipe::syntax::node::{Node, joined};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::util::suggest;

/// Reads a DeepSpeed config that is the recipe itself.
pub struct Deepspeed;

/// The batch triple and its native paths.
pub(crate) const TRIPLE: [(&str, &str); 3] = [
    ("train_batch_size", "batch.global"),
    (
        "train_micro_batch_size_per_gpu",
        "batch.per_device_batch_size",
    ),
    ("gradient_accumulation_steps", "batch.accumulation"),
];

impl Reader for Deepspeed {
    fn dialect(&self) -> Dialect {
        Dialect::Deepspeed
    }

    fn detect(&self, root: &Node, _path: &Path, _origin: &Origin) -> Option<Detected> {
        distinctive_key(root)
            .map(|key| Confidence::Likely.because(format!("it has the key `{key}`")))
    }

    fn read(&self, mut root: Node, asked: &ReadOptions<'_>, reading: &mut Reading) -> Translated {
        asked.put_into(&mut root, str::to_owned, reading);
        let native = whole_recipe(&root, asked.path, reading);
        Translated::whole(root, native)
    }

    fn batch_keys(&self) -> &'static [(&'static str, &'static str)] {
        &TRIPLE
    }
}

/// Translates a config that is the whole recipe.
fn whole_recipe(root: &Node, path: &Path, reading: &mut Reading) -> Node {
    refuse_duplicates(root, reading);
    refuse_wrong_numbers(root, reading);
    warn_unknown(root, reading);
    let mut tree = Tree::new(root.span);
    tree.default("name", run_name::of_file(path));
    tree.lay(translate(root, ""));
    refuse_no_batch(root, reading);
    implied_world(root, &mut tree, reading);
    elasticity::check(root, reading);
    training(root, &mut tree);
    tree.into_node()
}

/// Opens the config that a recipe or an accelerate config names. Trainers read it with Python's
/// `json` (transformers 5.23.0 `integrations/deepspeed.py`, accelerate 16cb6eb
/// `utils/deepspeed.py`) and pass the values to DeepSpeed, whose more lenient reader never sees the
/// file.
pub(crate) fn open(path: &Path, named: Span, reading: &mut Reading) -> Option<Node> {
    let (file, root) = reading.open(path, Some(named))?;
    reading.files.deepspeed = Some(file);
    reading.refuse_more_than_json(file, "the trainer");
    require_zero_optimization(&root, reading);
    Some(root)
}

/// As [`open`], for a file that `from` names. A missing one is a warning.
pub(crate) fn open_named(
    node: &Node,
    from: &Path,
    put: &str,
    reading: &mut Reading,
) -> Option<Node> {
    let name = node.text().unwrap_or_default();
    if let Some(file) = reading.beside(from, name) {
        return open(&file, node.span, reading);
    }
    let message =
        format!("the DeepSpeed config `{name}` does not exist: its ZeRO stage is unknown");
    let help = format!("{put}, or set `evenkeel.parallel.strategy`");
    reading.warning("deepspeed-unread", Some(node.span), message, help);
    None
}

/// A trainer passes the config to accelerate's `DeepSpeedPlugin`, which requires this key.
pub(crate) fn require_zero_optimization(root: &Node, reading: &mut Reading) {
    if root.get("zero_optimization").is_none() {
        reading.error(
            "mandatory-missing",
            Some(root.span),
            "the DeepSpeed config has no `zero_optimization`, and accelerate refuses it",
            "add it, `\"zero_optimization\": {\"stage\": 0}` for none",
        );
    }
}

/// The native strategy of a ZeRO stage.
pub(crate) fn strategy(stage: i128) -> Option<&'static str> {
    match stage {
        0 => Some("ddp"),
        1 => Some("zero1"),
        2 => Some("zero2"),
        3 => Some("fsdp"),
        _ => None,
    }
}

/// The batch and the parallelism of a config, as a native tree whose keys are named `prefix.KEY`.
pub(crate) fn translate(root: &Node, prefix: &str) -> Node {
    let mut tree = Tree::new(root.span);
    let key = |key: &str| joined(prefix, key);
    let int = |path: &str| {
        let node = root.get_path(path)?;
        let value = node.int(Schema::PyYaml)?;
        Some(Given::new(key(path), value, node.span))
    };
    // Elasticity computes the triple; DeepSpeed ignores or refuses the triple beside it.
    if !elasticity::is_enabled(root) {
        for (path, native) in TRIPLE {
            tree.plain_if(native, int(path));
        }
    }
    if let Some(stage) = int("zero_optimization.stage")
        && let Some(strategy) = strategy(stage.value)
    {
        tree.plain("parallel.strategy", &stage.with(strategy));
    }
    tree.plain_if("parallel.tensor", int("tensor_parallel.autotp_size"));
    tree.plain_if("parallel.sequence", int("sequence_parallel_size"));
    elasticity::translate(root, &key, &mut tree);
    tree.into_node()
}

/// Refuses `elasticity` beside a trainer with its own batch, which DeepSpeed would override.
pub(crate) fn refuse_elasticity(native: &mut Node, reading: &mut Reading) {
    let path = "batch.elastic";
    let Some(node) = native.get_path(path) else {
        return;
    };
    reading.error(
        "deepspeed-elastic-batch",
        Some(node.span),
        "DeepSpeed's elasticity computes a batch that overrides the trainer's",
        "set `enabled` to false: Evenkeel keeps the recipe's global batch in every world",
    );
    native.remove_path(path);
}

/// DeepSpeed refuses duplicate keys, even with equal values.
fn refuse_duplicates(root: &Node, reading: &mut Reading) {
    for problem in &mut reading.diagnostics {
        let here = problem.span.is_some_and(|span| span.file == root.span.file);
        if here && problem.rule == "duplicate-key" {
            problem.severity = Severity::Error;
            problem.help = "keep one of the two: DeepSpeed refuses the file".to_owned();
        }
    }
}

/// The triple holds whole numbers of at least 1, or `"auto"`; the stage is one of four.
fn refuse_wrong_numbers(root: &Node, reading: &mut Reading) {
    for (key, _) in TRIPLE {
        let Some(node) = root.get(key) else { continue };
        match node.resolve(Schema::PyYaml) {
            Some(Resolved::Int(1..) | Resolved::Null) => {}
            Some(Resolved::Str(text)) if text == "auto" => {}
            Some(Resolved::Int(value)) => reading.error(
                "deepspeed-batch-triple",
                Some(node.span),
                format!("`{key}` is {value}, and DeepSpeed requires more than 0"),
                "give a whole number of at least 1, or \"auto\" to take the trainer's",
            ),
            _ => reading.error(
                "wrong-type",
                Some(node.span),
                format!(
                    "`{key}` takes a whole number or \"auto\", this is `{}`",
                    suggest::short(node.shown())
                ),
                "give a whole number without quotes",
            ),
        }
    }
    if let Some(node) = root.get_path("zero_optimization.stage")
        && !matches!(node.resolve(Schema::PyYaml), Some(Resolved::Int(0..=3)))
    {
        reading.error(
            "out-of-range",
            Some(node.span),
            format!(
                "`zero_optimization.stage` is `{}`",
                suggest::short(node.shown())
            ),
            "give 0, 1, 2 or 3",
        );
    }
}

/// Without a batch number DeepSpeed has nothing to derive from.
fn refuse_no_batch(root: &Node, reading: &mut Reading) {
    let stated = |key: &&(&str, &str)| root.get(key.0).is_some();
    if TRIPLE[..2].iter().any(|key| stated(&key)) || elasticity::is_enabled(root) {
        return;
    }
    reading.error(
        "deepspeed-batch-triple",
        Some(root.span),
        "the config has neither `train_batch_size` nor `train_micro_batch_size_per_gpu`, and DeepSpeed requires one",
        "add one of them; pass a config that a trainer fills in together with its recipe or command",
    );
}

/// DeepSpeed ignores unknown keys, and derives a number of the triple whose key is misspelled.
fn warn_unknown(root: &Node, reading: &mut Reading) {
    for entry in root.entries().unwrap_or_default() {
        let name = entry.name.as_str();
        let near = suggest::nearest(name, &TRIPLE.map(|(key, _)| key));
        if let Some(near) = near.filter(|near| *near != name) {
            reading.warning(
                "unknown-key",
                Some(entry.name_span),
                format!("DeepSpeed has no key `{name}` and ignores it"),
                format!("did you mean `{near}`?"),
            );
        }
    }
}

/// A whole triple implies the data-parallel size that it was written for.
fn implied_world(root: &Node, tree: &mut Tree, reading: &mut Reading) {
    let number = |(_, path): (&str, &str)| tree.get(path)?.text()?.parse::<i128>().ok();
    let [Some(global), Some(size), Some(accumulation)] = TRIPLE.map(number) else {
        return;
    };
    let pass = size.checked_mul(accumulation).filter(|pass| *pass > 0);
    let (Some(pass), Some(node)) = (pass, tree.get("batch.global")) else {
        return;
    };
    let at = node.span;
    if global % pass == 0 && global > 0 {
        let key = "train_batch_size";
        let axes = |path: &str| {
            let size = root.get_path(path).and_then(Node::text)?;
            size.parse::<i128>().ok()
        };
        let others = ["tensor_parallel.autotp_size", "sequence_parallel_size"];
        let ranks = global / pass;
        let devices = others
            .iter()
            .filter_map(|path| axes(path))
            .fold(ranks, i128::saturating_mul);
        tree.plain("batch.gpus", &Given::new(key, devices, at));
    } else {
        reading.error(
            "deepspeed-batch-triple",
            Some(at),
            format!("{global} is not {size} × {accumulation} × world for any world, and DeepSpeed requires equality"),
            "remove one of the three: DeepSpeed derives it",
        );
    }
}

/// Translates the training settings of a config.
fn training(root: &Node, tree: &mut Tree) {
    let enabled = |key: &str| {
        let node = root.get_path(&format!("{key}.enabled"))?;
        node.is_bool(true, Schema::PyYaml).then_some(node.span)
    };
    for (key, precision) in [("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "f16")] {
        if let Some(span) = enabled(key) {
            let given = Given::new(format!("{key}.enabled"), precision.to_owned(), span);
            tree.text("model.precision", &given);
        }
    }
    let float = |path: &str| {
        let node = root.get_path(path)?;
        // JSON's numbers, some of which YAML reads as strings (`1e-5`).
        let value: f64 = node.text()?.parse().ok()?;
        value
            .is_finite()
            .then(|| Given::new(path, value, node.span))
    };
    tree.plain_if("optimizer.gradient_clip", float("gradient_clipping"));
    tree.plain_if("learning_rate.peak", float("optimizer.params.lr"));
    tree.plain_if("optimizer.epsilon", float("optimizer.params.eps"));
    tree.plain_if(
        "optimizer.weight_decay",
        float("optimizer.params.weight_decay"),
    );
    if let Some(node) = root.get_path("optimizer.type")
        && let Some(name) = node.text()
    {
        let given = Given::new("optimizer.type", name.to_lowercase(), node.span);
        tree.text("optimizer.name", &given);
    }
}

#[cfg(test)]
pub(crate) mod tests;
