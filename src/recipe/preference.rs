//! What the trees of HALOs and of direct-preference-optimization have in common: the one is grown
//! from the other.

use std::path::Path;

use super::hydra::{self, Place, Program, Values};
use super::name;
use super::node::Node;
use super::origin::Origin;
use super::reader::{Asked, Confidence, Detected};
use super::reading::Reading;
use super::suggest::short;
use super::tree::{Given, Tree};

/// Which of the trees a root is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Halos,
    Dpo,
}

/// Which tree a root is of, and the key that tells.
pub(super) fn kind(root: &Node) -> Option<(Kind, &'static str)> {
    let list = root.get("defaults")?.items()?;
    let has_loss = list.iter().any(|entry| entry.get("loss").is_some());
    let has = |keys: &[&'static str]| keys.iter().copied().find(|key| root.get(key).is_some());
    if !has_loss || has(&["exp_name"]).is_none() {
        return None;
    }
    // Both name what they need; only one has its batch outside of the model's group.
    match has(&["batch_size", "local_dirs"]) {
        Some(key) => Some((Kind::Dpo, key)),
        None => {
            let telling = [
                "cache_dir",
                "frac_unique_desirable",
                "intermediate_checkpoints",
            ];
            has(&telling).map(|key| (Kind::Halos, key))
        }
    }
}

/// Whether a file belongs to a tree: it is its root, or stands in one of its groups.
pub(super) fn detect(root: &Node, path: &Path, origin: &Origin, wanted: Kind) -> Option<Detected> {
    reason(root, path, origin, wanted).map(|reason| Detected {
        confidence: Confidence::Certain,
        reason,
    })
}

fn reason(root: &Node, path: &Path, origin: &Origin, wanted: Kind) -> Option<String> {
    if let Some((found, key)) = kind(root) {
        return (found == wanted)
            .then(|| format!("it has a defaults list with `loss`, and the key `{key}`"));
    }
    let place = Place::of(path, origin);
    let group = place.group()?;
    let above = Reading::at(origin).load(&place.root())?;
    let (found, _) = kind(&above)?;
    (found == wanted).then(|| {
        format!(
            "it is the option `{}` of the config group `{group}`",
            place.option()
        )
    })
}

/// A config of one of the trees, composed.
pub(super) struct Composed {
    /// The tree.
    pub config: Node,
    /// The root of the tree that it is a part of, where it is an option of a group by itself.
    pub part_of: Option<Node>,
}

/// Composes a config and reports what it lacks.
pub(super) fn compose(
    root: Node,
    asked: &Asked<'_>,
    program: &Program,
    reading: &mut Reading,
) -> Composed {
    let place = Place::of(asked.path, &reading.origin);
    let (overrides, file) = (asked.overrides, asked.command_line);
    let span = root.span;
    let config = hydra::compose(root, &place, program, overrides, file, reading);
    let part_of = place
        .group()
        .and_then(|_| Reading::at(&reading.origin).load(&place.root()));
    let group = place.group().filter(|_| part_of.is_some());
    if let Some(group) = group {
        reading.note(
            "mandatory-missing",
            Some(span),
            format!(
                "this is the option `{}` of the config group `{group}`: what stands elsewhere in \
                 the tree is not known",
                place.option()
            ),
            format!(
                "give the tree and choose it: `{} {group}={}`",
                place.folder.display(),
                place.option()
            ),
        );
    }
    for (key, span) in config.missing {
        let message = format!("`{key}` is mandatory and has no value");
        if group.is_some() {
            let help = "whoever uses this option gives it";
            reading.note("mandatory-missing", Some(span), message, help);
        } else {
            let help = format!("give it on the command line: `{key}=…`");
            let problem = super::Diagnostic::error("mandatory-missing", Some(span), message, help);
            reading.pending.push(problem);
        }
    }
    Composed {
        config: config.root,
        part_of,
    }
}

/// The run's name: that of the experiment, or the file's own.
pub(super) fn name(values: &Values<'_>, path: &Path, tree: &mut Tree, reading: &mut Reading) {
    match values.text("exp_name", reading) {
        Some(given) => name::put(&given, tree, reading),
        None => {
            let place = Place::of(path, &reading.origin);
            tree.default("name", name::label(place.option()));
        }
    }
}

/// Names of PyTorch's types, and the native precision.
pub(super) const DTYPES: &[(&str, &str)] = &[
    ("float32", "f32"),
    ("float", "f32"),
    ("bfloat16", "bf16"),
    ("float16", "f16"),
    ("half", "f16"),
];

/// How long: epochs, examples, or both, whichever ends first.
pub(super) fn budget(values: &Values<'_>, tree: &mut Tree, reading: &mut Reading) {
    let epochs = values.float("n_epochs", reading);
    let examples = values.int("n_examples", reading);
    tree.plain_if("seed", values.int("seed", reading));
    if let (Some(_), Some(examples)) = (&epochs, &examples) {
        tree.plain("budget.shortest", &examples.with(true));
    }
    tree.plain_if("budget.epochs", epochs);
    tree.plain_if("budget.samples", examples);
}

/// A data set that upstream calls by a word of its own.
pub(super) struct Known {
    /// The word.
    pub word: &'static str,
    /// Its id on the hub.
    pub id: &'static str,
    /// Its splits for training and for evaluation.
    pub splits: [&'static str; 2],
}

/// Writes sources of `data.train` (0) or `data.evaluation` (1).
pub(super) fn sources(names: &[Given<String>], part: usize, known: &[Known], tree: &mut Tree) {
    let path = ["data.train", "data.evaluation"][part];
    for name in names {
        let mut source = Tree::new(name.span);
        match known.iter().find(|known| known.word == name.value) {
            Some(known) => {
                source.text("path", &name.with(known.id.to_owned()));
                source.text("split", &name.with(known.splits[part].to_owned()));
            }
            None => source.text("path", name),
        }
        tree.push(path, source);
    }
}

/// Says that a value upstream understands is planned as another.
pub(super) fn taken_as(given: &Given<String>, objective: &str, reading: &mut Reading) {
    reading.note(
        "unsupported-value",
        Some(given.span),
        format!(
            "`{}` is `{}`: planned as {objective}, whose batches are made alike",
            given.key,
            short(&given.value)
        ),
        "nothing to do for a plan",
    );
}
