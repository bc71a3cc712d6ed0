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
use crate::recipe::schema::dialect::{Dialect, RESERVED};
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::reader::{Confidence, Detected, ReadOptions, Reader, Translated};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::run_name;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::diagnostic::Severity;
use crate::recipe::syntax::node::{Node, joined};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::shell::word::variable;
use crate::recipe::syntax::source::Span;
use crate::util::suggest::{self, short};

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
    warn_unknown(root, reading);
    let mut tree = Tree::new(root.span);
    tree.default("name", run_name::of_file(path));
    tree.lay(translate(root, "", reading));
    refuse_no_batch(root, reading);
    implied_world(&mut tree, reading);
    elasticity::check(root, reading);
    training(root, &mut tree);
    tree.into_node()
}

/// Opens the config that `from`, a recipe or an accelerate config, names. A missing one is a warning. Trainers read it
/// with Python's `json` (transformers 5.23.0 `integrations/deepspeed.py`, accelerate 16cb6eb `utils/deepspeed.py`) and
/// pass the values to DeepSpeed, whose more lenient reader never sees the file.
pub(crate) fn open_named(
    node: &Node,
    from: &Path,
    put: &str,
    reading: &mut Reading,
) -> Option<Node> {
    let name = node.shown();
    let Some(path) = reading.beside(from, name) else {
        let strategy = "set `evenkeel.parallel.strategy`";
        let (why, help) = match variable(name) {
            Some(variable) => (
                "is unresolved",
                format!("give it beside the script, `{variable}=FILE`, or {strategy}"),
            ),
            None => ("does not exist", format!("{put}, or {strategy}")),
        };
        let message = format!(
            "the DeepSpeed config `{name}` {why}: its ZeRO stage is unknown, and memory is estimated without one"
        );
        reading.warning("deepspeed-unread", Some(node.span), message, help);
        return None;
    };
    let (file, root) = reading.open(&path, Some(node.span))?;
    reading.files.deepspeed = Some(file);
    reading.refuse_more_than_json(file, "the trainer");
    require_zero_optimization(&root, reading);
    Some(root)
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
    let strategies = ["ddp", "zero1", "zero2", "fsdp"];
    strategies.get(usize::try_from(stage).ok()?).copied()
}

/// A finite number. JSON's `1e-5` has no point, so it is a string to YAML.
pub(crate) fn number(node: &Node) -> Option<f64> {
    let value = match node.resolve(Schema::PyYaml)? {
        Resolved::Str(text) => text.parse().ok()?,
        value => value.number()?,
    };
    value.is_finite().then_some(value)
}

/// The batch and the parallelism of a config, as a native tree whose keys are named `prefix.KEY`. The native reader
/// checks the numbers.
pub(crate) fn translate(root: &Node, prefix: &str, reading: &mut Reading) -> Node {
    let mut tree = Tree::new(root.span);
    let key = |key: &str| joined(prefix, key);
    let numbers = [
        ("tensor_parallel.autotp_size", "parallel.tensor"),
        ("sequence_parallel_size", "parallel.sequence"),
    ];
    // Elasticity computes the triple; DeepSpeed ignores or refuses the triple beside it.
    let block = elasticity::enabled(root);
    let triple = TRIPLE.into_iter().filter(|_| block.is_none());
    for (path, native) in triple.chain(numbers) {
        if let Some(node) = root.get_path(path).filter(|node| is_stated(node)) {
            tree.put(native, &key(path), node.clone());
        }
    }
    let stage = "zero_optimization.stage";
    // No trainer gives a value to a config that is read alone.
    let alone = prefix.is_empty();
    if let Some(node) = root.get_path(stage).filter(|node| alone || is_stated(node)) {
        match node.int(Schema::PyYaml).and_then(strategy) {
            Some(strategy) => {
                let given = Given::new(key(stage), strategy, node.span);
                tree.plain("parallel.strategy", &given);
            }
            None => refuse_stage(&key(stage), node, reading),
        }
    }
    for (path, native) in OFFLOADS {
        let device = format!("zero_optimization.{path}.device");
        let node = root.get_path(&device);
        if let Some(node) = node.filter(|node| is_stated(node)) {
            tree.plain(
                native,
                &Given::new(key(&device), is_offloaded(node), node.span),
            );
        }
    }
    if let Some(block) = block {
        elasticity::translate(block, &key, &mut tree);
    }
    tree.into_node()
}

/// What DeepSpeed can move to the host, and its native path.
pub(crate) const OFFLOADS: [(&str, &str); 2] = [
    ("offload_optimizer", "parallel.offload_optimizer"),
    ("offload_param", "parallel.offload_parameters"),
];

/// Whether a `device` of an offload is the host's memory or a disk.
pub(crate) fn is_offloaded(device: &Node) -> bool {
    device
        .text()
        .is_some_and(|device| ["cpu", "nvme"].contains(&device.to_lowercase().as_str()))
}

/// Whether a value is neither empty nor the trainer's.
fn is_stated(node: &Node) -> bool {
    node.text() != Some("auto") && !node.is_null(Schema::PyYaml)
}

/// Refuses a ZeRO stage that does not exist.
pub(crate) fn refuse_stage(key: &str, node: &Node, reading: &mut Reading) {
    let message = format!("`{key}` is `{}`", short(node.shown()));
    reading.error(
        "out-of-range",
        Some(node.span),
        message,
        "give 0, 1, 2 or 3",
    );
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

/// How a number of the config follows the recipe.
pub(crate) const AUTO: &str = "write \"auto\" or remove it here, so that the recipe decides";

/// Refuses a batch of the recipe that differs from the config's: the trainer compares them. `of_recipe` has the
/// recipe's values by their native paths.
pub(crate) fn refuse_another_batch<'n>(
    config: &Node,
    of_recipe: impl Fn(&str) -> Option<&'n Node>,
    reading: &mut Reading,
) {
    for (path, rule) in [
        ("batch.accumulation", "accumulation-conflict"),
        ("batch.per_device_batch_size", "deepspeed-batch-triple"),
    ] {
        let (Some(here), Some(there)) = (config.get_path(path), of_recipe(path)) else {
            continue;
        };
        // Python's `"8"` is another value than 8, and to DeepSpeed no number.
        let is_text = matches!(here.resolve(Schema::PyYaml), Some(Resolved::Str(_)));
        if here.text() != there.text() || is_text {
            let key = here.key.as_deref().unwrap_or(path);
            let of = there.key.as_ref().map(|key| format!("`{key}`"));
            let (value, of) = (there.shown(), of.unwrap_or("a default".to_owned()));
            let shown = match is_text {
                true => format!("the text \"{}\"", short(here.shown())),
                false => here.shown().to_owned(),
            };
            let message = format!("`{key}` is {shown} here, but {value} in the recipe ({of})");
            reading.error(rule, Some(here.span), message, AUTO);
        }
    }
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

/// Without a batch number DeepSpeed has nothing to derive from.
fn refuse_no_batch(root: &Node, reading: &mut Reading) {
    let stated = TRIPLE[..2].iter().any(|(key, _)| root.get(key).is_some());
    if stated || elasticity::enabled(root).is_some() {
        return;
    }
    reading.error(
        "deepspeed-batch-triple",
        Some(root.span),
        "the config has neither `train_batch_size` nor `train_micro_batch_size_per_gpu`, and DeepSpeed requires one",
        "add one of them; pass a config that a trainer fills in together with its recipe or command",
    );
}

/// Takes the micro-batch out of `native` where the config leaves the accumulation to a trainer ("auto"): without it, or a
/// stated batch, the samples of a step are not known. Returns the micro-batch and the place of "auto".
pub(crate) fn take_micro_batch(config: &Node, native: &mut Node) -> Option<(String, Span)> {
    let [(_, global), (_, size), (key, accumulation)] = TRIPLE;
    let auto = config.get(key).filter(|node| node.text() == Some("auto"))?;
    let is_stated = |path| native.get_path(path).is_some();
    if is_stated(global) || is_stated(accumulation) {
        return None;
    }
    let stated = native.get_path(size)?.shown().to_owned();
    native.remove_path(size);
    Some((stated, auto.span))
}

/// Notes that a trainer gives the accumulation of a config that is the recipe, so that it has no batch alone.
pub(crate) fn leave_to_trainer(root: &Node, native: &mut Node, reading: &mut Reading) {
    if let Some((stated, auto)) = take_micro_batch(root, native) {
        let (stated, (_, accumulation)) = (short(&stated), TRIPLE[2]);
        reading.note(
            "deepspeed-batch-triple",
            Some(auto),
            "a trainer gives the accumulation, and without it this config has no batch",
            format!(
                "plan the trainer's recipe or command with this config, or state `{RESERVED}.{accumulation}=N`; the \
                 micro-batch is {stated}"
            ),
        );
    }
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
fn implied_world(tree: &mut Tree, reading: &mut Reading) {
    let number = |path: &str| tree.get(path)?.text()?.parse::<i128>().ok();
    let numbers = TRIPLE.map(|(_, path)| number(path));
    let (Some(node), [Some(global), Some(size), Some(accumulation)]) =
        (tree.get("batch.global"), numbers)
    else {
        return;
    };
    let at = node.span;
    let Some(pass) = size.checked_mul(accumulation).filter(|pass| *pass > 0) else {
        return;
    };
    if global % pass == 0 && global > 0 {
        let axes = ["parallel.tensor", "parallel.sequence"];
        let axes = axes.into_iter().filter_map(number);
        let devices = axes.fold(global / pass, i128::saturating_mul);
        tree.plain("batch.gpus", &Given::new("train_batch_size", devices, at));
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
    for (path, native) in [
        ("gradient_clipping", "optimizer.gradient_clip"),
        ("optimizer.params.lr", "learning_rate.peak"),
        ("optimizer.params.eps", "optimizer.epsilon"),
        ("optimizer.params.weight_decay", "optimizer.weight_decay"),
    ] {
        let node = root.get_path(path);
        let given = node.and_then(|node| Some(Given::new(path, number(node)?, node.span)));
        tree.plain_if(native, given);
    }
    if let Some(node) = root.get_path("optimizer.type")
        && let Some(name) = node.text()
    {
        let given = Given::new("optimizer.type", name.to_lowercase(), node.span);
        tree.text("optimizer.name", &given);
    }
}

#[cfg(test)]
pub(crate) mod tests;
