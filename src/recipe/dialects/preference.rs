//! The common part of the HALOs and direct-preference-optimization trees; HALOs derives from the
//! latter.

use std::path::Path;

use super::hydra::{self, Program, TreeLocation, Values};
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::reader::{Confidence, Detected, ReadOptions};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::run_name;
use crate::recipe::schema::spec::Objective;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::Node;
use crate::util::suggest::short;

/// The tree that a root belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Halos,
    Dpo,
}

/// The tree that a root belongs to, and the key that decides it.
pub(crate) fn kind(root: &Node) -> Option<(Kind, &'static str)> {
    let list = root.get("defaults")?.items()?;
    let has_loss = list.iter().any(|entry| entry.get("loss").is_some());
    let has = |keys: &[&'static str]| keys.iter().copied().find(|key| root.get(key).is_some());
    if !has_loss || has(&["exp_name"]).is_none() {
        return None;
    }
    // Both trees have `loss` and `exp_name`; only direct-preference-optimization has its batch outside
    // the group `model`.
    match has(&["batch_size", "local_dirs"]) {
        Some(key) => Some((Kind::Dpo, key)),
        None => {
            let distinctive = [
                "cache_dir",
                "frac_unique_desirable",
                "intermediate_checkpoints",
            ];
            has(&distinctive).map(|key| (Kind::Halos, key))
        }
    }
}

/// Whether a file belongs to a tree: it is the root, or an option of one of its groups.
pub(crate) fn detect(root: &Node, path: &Path, origin: &Origin, wanted: Kind) -> Option<Detected> {
    reason(root, path, origin, wanted).map(|reason| Confidence::Certain.because(reason))
}

fn reason(root: &Node, path: &Path, origin: &Origin, wanted: Kind) -> Option<String> {
    if let Some((found, key)) = kind(root) {
        return (found == wanted)
            .then(|| format!("it has a defaults list with `loss`, and the key `{key}`"));
    }
    let place = TreeLocation::of(path, origin);
    let group = place.group()?;
    let (_, above) = Reading::at(origin).open(&place.root(), None)?;
    let (found, _) = kind(&above)?;
    (found == wanted).then(|| {
        format!(
            "it is the option `{}` of the config group `{group}`",
            place.option()
        )
    })
}

/// A composed config of one of the trees.
pub(crate) struct Composed {
    pub config: Node,
    /// The root of its tree, if the config is a single option of a group.
    pub part_of: Option<Node>,
}

/// Composes a config and reports its missing values.
pub(crate) fn compose(
    root: Node,
    asked: &ReadOptions<'_>,
    program: &Program,
    reading: &mut Reading,
) -> Composed {
    let place = TreeLocation::of(asked.path, &reading.origin);
    let (overrides, file) = (asked.overrides, asked.command_line);
    let span = root.span;
    let config = hydra::compose(root, &place, program, overrides, file, reading);
    let part_of = place
        .group()
        .and_then(|_| Reading::at(&reading.origin).open(&place.root(), None))
        .map(|(_, root)| root);
    let group = place.group().filter(|_| part_of.is_some());
    if let Some(group) = group {
        reading.note(
            "mandatory-missing",
            Some(span),
            format!(
                "this is the option `{}` of the config group `{group}`: the other files of \
                 the tree are unknown",
                place.option()
            ),
            format!(
                "pass the tree and choose the option: `{} {group}={}`",
                place.folder.display(),
                place.option()
            ),
        );
    }
    for (key, span) in config.missing {
        let message = format!("`{key}` is mandatory and has no value");
        if group.is_some() {
            let help = "the recipe that uses this option sets it";
            reading.note("mandatory-missing", Some(span), message, help);
        } else {
            let help = format!("set it on the command line: `{key}=…`");
            let problem = Diagnostic::error("mandatory-missing", Some(span), message, help)
                .ended_by([format!("{key}=VALUE")]);
            reading.pending.push(problem);
        }
    }
    Composed {
        config: config.root,
        part_of,
    }
}

/// The run's name: the experiment's, else the file's.
pub(crate) fn name(values: &Values<'_>, path: &Path, tree: &mut Tree, reading: &mut Reading) {
    match values.text("exp_name", reading) {
        Some(given) => run_name::put(&given, tree, reading),
        None => {
            let place = TreeLocation::of(path, &reading.origin);
            tree.default("name", run_name::label(place.option()));
        }
    }
}

/// Upstream writes a checkpoint after every evaluation if `saves`; the planner rounds both by the batch of the run.
pub(crate) fn checkpoints(
    values: &Values<'_>,
    saves: bool,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    let debug = values.bool("debug", reading);
    let saves = saves && !debug.is_some_and(|debug| debug.value);
    let every = values.int("eval_every", &mut Reading::default());
    tree.plain_if("checkpoint.every_samples", every.filter(|_| saves));
}

/// Names of PyTorch's types, with the native precision.
pub(crate) const DTYPES: &[(&str, &str)] = &[
    ("float32", "f32"),
    ("float", "f32"),
    ("bfloat16", "bf16"),
    ("float16", "f16"),
    ("half", "f16"),
];

/// The lengths of the samples and of the run: epochs, examples, or whichever of both ends first.
pub(crate) fn budget(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    // Upstream cuts tokens to the length and shifts the targets by one inside of it.
    tree.default("data.extra_token", false);
    let epochs = values.float("n_epochs", reading);
    let examples = values.int("n_examples", reading);
    tree.plain_if("seed", values.int("seed", reading));
    if let (Some(_), Some(examples)) = (&epochs, &examples) {
        tree.plain("budget.shortest", &examples.with(true));
    }
    tree.plain_if("budget.epochs", epochs);
    tree.plain_if("budget.samples", examples);
}

/// A data set that upstream knows by name: the name, its id on the hub, after which a third part is the directory that
/// upstream reads, its splits for training and for evaluation, and how upstream converts its rows (`Conversion`).
pub(crate) type DataSet = (&'static str, &'static str, [&'static str; 2], &'static str);

/// Writes the sources of `data.train` (0) or `data.evaluation` (1). `feedback`: the split of files of HALOs' feedback.
pub(crate) fn sources(
    names: &[Given<String>],
    part: usize,
    known: &[DataSet],
    feedback: Option<&str>,
    tree: &mut Tree,
) {
    let path = ["data.train", "data.evaluation"][part];
    for name in names {
        let mut source = Tree::new(name.span);
        match known.iter().find(|(word, ..)| *word == name.value) {
            Some((_, id, splits, conversion)) => {
                let mut parts = id.match_indices('/').map(|(at, _)| at);
                let (id, directory) = match parts.nth(1) {
                    Some(at) => (&id[..at], Some(&id[at + 1..])),
                    None => (*id, None),
                };
                source.text("path", &name.with(id.to_owned()));
                if let Some(directory) = directory {
                    source.default("config", directory);
                }
                source.text("split", &name.with(splits[part].to_owned()));
                // Upstream leaves out pairs only where it trains.
                let conversion = match (*conversion, part) {
                    ("scored-messages" | "seeded-scored-messages", 1) => "all-scored-messages",
                    (conversion, _) => conversion,
                };
                source.default("conversion", conversion);
            }
            None => {
                source.text("path", name);
                if let Some(split) = feedback {
                    source.default("feedback_split", split);
                }
            }
        }
        tree.push(path, source);
    }
}

/// The objective of a translated recipe.
pub(crate) fn objective(tree: &Tree) -> Objective {
    let name = tree.get("objective").and_then(Node::text);
    let name = serde_json::Value::from(name.unwrap_or_default());
    serde_json::from_value(name).unwrap_or_default()
}

/// The warm-up of a `LambdaLR` with min(1, (step + 1) / (warmup_steps + 1)).
pub(crate) fn warm_up(values: &Values<'_>, tree: &mut Tree) {
    if let Some(steps) = values.int("warmup_steps", &mut Reading::default()) {
        tree.default(
            "learning_rate.warmup_start",
            1.0 / (steps.value as f64 + 1.0),
        );
    }
}

/// Notes that the plan treats a value of upstream as another objective.
pub(crate) fn taken_as(given: &Given<String>, objective: &str, reading: &mut Reading) {
    reading.note(
        "unsupported-value",
        Some(given.span),
        format!(
            "`{}` is `{}`: planned as {objective}, whose batches have the same layout",
            given.key,
            short(&given.value)
        ),
        "the plan needs no change",
    );
}
