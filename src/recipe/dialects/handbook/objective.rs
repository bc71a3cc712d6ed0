//! Finds the trainer that a recipe is for. Upstream the launched script decides it. The file does
//! not name the script; its folder (`recipes/*/dpo/…`) or its keys do.

use std::path::Path;

use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::Objective;
use crate::recipe::syntax::node::Node;

use super::keys;

/// Words of folder and file names that name a trainer.
const WORDS: &[(&str, Objective)] = &[
    ("sft", Objective::Sft),
    ("cpt", Objective::LanguageModelling),
    ("dpo", Objective::Dpo),
    ("kto", Objective::Kto),
    ("orpo", Objective::Orpo),
    ("simpo", Objective::Simpo),
    ("cpo", Objective::Simpo),
    ("grpo", Objective::Grpo),
    ("rloo", Objective::Rloo),
    ("ppo", Objective::Ppo),
    ("reward", Objective::Reward),
    ("rm", Objective::Reward),
];

/// TRL trainers whose batch rules are not known here, by words of their scripts' names (TRL 0.9.6,
/// 0.24.0 and f2cd577: `trainer/`, `experimental/`, `examples/scripts/`). Most generate their
/// training data.
const UNSUPPORTED: &[(&[&str], &str)] = &[
    (&["online", "dpo"], "OnlineDPO"),
    (&["dpo", "online"], "OnlineDPO"),
    (&["async", "grpo"], "AsyncGRPO"),
    (&["async", "distillation"], "AsyncDistillation"),
    (&["nash", "md"], "NashMD"),
    (&["xpo"], "XPO"),
    (&["gold"], "GOLD"),
    (&["gkd"], "GKD"),
    (&["tpo"], "TPO"),
    (&["bco"], "BCO"),
    (&["prm"], "PRM"),
    (&["minillm"], "MiniLLM"),
    (&["distillation"], "Distillation"),
];

/// The unsupported trainer in the name of a program or recipe. A word that other programs may have
/// in their names must be the whole name.
pub(super) fn unsupported(path: &Path) -> Option<&'static str> {
    let stem = path.file_stem()?.to_str()?.to_ascii_lowercase();
    let words: Vec<&str> = parts(&stem).collect();
    let called = |name: &&[&str]| match name.len() {
        1 => words == *name,
        several => words.windows(several).any(|some| some == *name),
    };
    let found = UNSUPPORTED.iter().find(|(name, _)| called(name));
    found.map(|(_, trainer)| *trainer)
}

/// The first of these decides: the reserved key, the file's path, keys that only one trainer has,
/// the names of outputs. Without any of them the objective is SFT, the handbook's first stage. `None`: the
/// trainer is refused.
pub(super) fn detect(root: &Node, path: &Path, reading: &mut Reading) -> Option<Objective> {
    let stated = root.get(RESERVED).and_then(|over| over.get("objective"));
    if let Some(objective) = stated.and_then(Node::text).and_then(native) {
        return Some(objective);
    }
    let command = reading.files.command.map(|(file, _)| file);
    // Reading the command refuses a program.
    if Some(root.span.file) != command {
        let folder = path.parent().filter(|_| by_place(path).is_none());
        let mut named = [Some(path), folder].into_iter().flatten();
        if named.any(|named| super::refuse_unsupported(named, Some(root.span), reading)) {
            return None;
        }
    }
    if let Some(objective) = by_place(path)
        .or_else(|| by_keys(root))
        .or_else(|| by_names(root))
    {
        return Some(objective);
    }
    reading.warning(
        "objective-assumed",
        Some(root.span),
        "neither the file's folder nor its keys name a trainer: read as SFT",
        "move it to a folder named `sft`, `dpo`, …, or set `evenkeel.objective=dpo`",
    );
    Some(Objective::Sft)
}

/// An objective by its native name.
fn native(name: &str) -> Option<Objective> {
    serde_json::from_value(serde_json::Value::String(name.to_owned())).ok()
}

/// The nearest folder with a trainer's name, then a word of the file's name.
fn by_place(path: &Path) -> Option<Objective> {
    let folders = path.parent().into_iter().flat_map(Path::ancestors);
    let folder = folders
        .filter_map(|folder| folder.file_name()?.to_str())
        .find_map(word);
    folder.or_else(|| words(path.file_stem()?.to_str()?))
}

/// The objective in a word of a program's name.
pub(super) fn by_name(script: &Path) -> Option<Objective> {
    words(script.file_stem()?.to_str()?)
}

fn word(text: &str) -> Option<Objective> {
    let found = WORDS
        .iter()
        .find(|(word, _)| text.eq_ignore_ascii_case(word));
    found.map(|(_, objective)| *objective)
}

fn words(text: &str) -> Option<Objective> {
    parts(text).find_map(word)
}

fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric())
}

/// Keys that belong to one trainer decide. `beta` means DPO where no narrower key is present.
fn by_keys(root: &Node) -> Option<Objective> {
    let entries = root.entries()?;
    let owned: Vec<Vec<Objective>> = entries
        .iter()
        .filter(|e| keys::shared(&e.name).is_none())
        .map(|e| keys::owners(&e.name))
        .filter(|owners| !owners.is_empty())
        .collect();
    let simpo = root.get("loss_type").and_then(Node::text) == Some("simpo");
    if simpo {
        return Some(Objective::Simpo);
    }
    let decided = owned.iter().find_map(|owners| match owners.as_slice() {
        [one] => Some(*one),
        // Continued pre-training has the same keys as SFT.
        [Objective::Sft, Objective::LanguageModelling] => Some(Objective::Sft),
        // GRPO has nearly all keys of RLOO.
        [Objective::Grpo, Objective::Rloo] => Some(Objective::Grpo),
        _ => None,
    });
    if decided.is_some() {
        return decided;
    }
    let preferences = root.get("beta").is_some() || chosen_and_rejected(root);
    preferences.then(|| by_names(root).unwrap_or(Objective::Dpo))
}

/// Whether the data has the columns of preference pairs.
fn chosen_and_rejected(root: &Node) -> bool {
    let sources = root
        .get("dataset_mixture")
        .and_then(|m| m.get("datasets"))
        .or_else(|| root.get("datasets"));
    let columns = |source: &Node| {
        let columns = source.get("columns").and_then(Node::items);
        let has = |name| columns.is_some_and(|c| c.iter().any(|c| c.text() == Some(name)));
        has("chosen") && has("rejected")
    };
    sources
        .and_then(Node::items)
        .is_some_and(|s| s.iter().any(columns))
}

/// The objective in the names of outputs, such as `zephyr-7b-dpo-full`.
fn by_names(root: &Node) -> Option<Objective> {
    ["hub_model_id", "run_name", "output_dir"]
        .iter()
        .find_map(|key| words(root.get(key)?.text()?))
}
