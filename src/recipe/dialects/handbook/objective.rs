//! Finds the trainer that a recipe is for. Upstream the launched script decides it. The file does
//! not name the script; its folder (`recipes/*/dpo/…`) or its keys do.

use std::path::Path;

use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::Objective;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::words::Words;

use super::keys;

/// TRL trainers whose batch rules are not known here, by words of their scripts' names (TRL 0.9.6,
/// 0.24.0 and f2cd577: `trainer/`, `experimental/`, `examples/scripts/`). Most generate their
/// training data.
const UNSUPPORTED: [(&str, &str); 13] = [
    ("online-dpo", "OnlineDPO"),
    ("dpo-online", "OnlineDPO"),
    ("async-grpo", "AsyncGRPO"),
    ("async-distillation", "AsyncDistillation"),
    ("nash-md", "NashMD"),
    ("xpo", "XPO"),
    ("gold", "GOLD"),
    ("gkd", "GKD"),
    ("tpo", "TPO"),
    ("bco", "BCO"),
    ("prm", "PRM"),
    ("minillm", "MiniLLM"),
    ("distillation", "Distillation"),
];

/// The unsupported trainer in the name of a program or recipe. A word that other programs may have
/// in their names must be the whole name.
pub(super) fn unsupported(path: &Path) -> Option<&'static str> {
    let stem = path.file_stem()?.to_str()?.to_ascii_lowercase();
    let stem = parts(&stem).collect::<Vec<_>>().join("-");
    let called = |name: &str| {
        let several = name.contains('-') && format!("-{stem}-").contains(&format!("-{name}-"));
        stem == name || several
    };
    let found = UNSUPPORTED.iter().find(|(name, _)| called(name));
    found.map(|(_, trainer)| *trainer)
}

/// The first of these decides: the reserved key, the file's path, keys that only one trainer has,
/// the names of outputs. Without any of them the objective is SFT, the handbook's first stage. `None`: the
/// trainer is refused.
pub(super) fn detect(root: &Node, path: &Path, reading: &mut Reading) -> Option<Objective> {
    let stated = root.get_path(&format!("{RESERVED}.objective"));
    let stated = stated.and_then(Node::text).map(serde_json::Value::from);
    if let Some(objective) = stated.and_then(|name| serde_json::from_value(name).ok()) {
        // SimPO is a loss of TRL's trainer of CPO.
        let is_loss = objective == Objective::Simpo;
        return Some(if is_loss { Objective::Cpo } else { objective });
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
    let placed = by_place(path);
    let found = placed
        .filter(|named| is_name(path, *named) || !is_of_another(root, *named))
        .or_else(|| by_keys(root))
        .or(placed)
        .or_else(|| by_names(root));
    if found.is_some() {
        return found;
    }
    reading.warning(
        "objective-assumed",
        Some(root.span),
        "neither the file's folder nor its keys name a trainer: read as SFT",
        "move it to a folder named `sft`, `dpo`, …, or set `evenkeel.objective=dpo`",
    );
    Some(Objective::Sft)
}

/// The nearest folder with a trainer's name, then a word of the file's name.
fn by_place(path: &Path) -> Option<Objective> {
    let mut folders = path.parent().into_iter().flat_map(Path::ancestors);
    let folder = folders.find_map(|folder| parts(folder.file_name()?.to_str()?).find_map(word));
    folder.or_else(|| by_name(path))
}

/// Whether a trainer's name is the whole name of a folder or of the file: `dpo/`, `sft.yaml`.
fn is_name(path: &Path, named: Objective) -> bool {
    let folders = path.parent().into_iter().flat_map(Path::ancestors);
    let names = folders.filter_map(Path::file_name).chain(path.file_stem());
    let mut names = names.filter_map(|name| name.to_str());
    names.any(|name| word(name) == Some(named))
}

/// Whether the keys of a recipe are those of one other trainer, and not all of this one. A word of a name may then mean
/// something else (`school_of_reward_hacks`).
fn is_of_another(root: &Node, named: Objective) -> bool {
    let entries = root.entries().unwrap_or_default().iter();
    let names = entries.map(|entry| entry.name.as_str());
    let own = names.filter(|name| keys::shared(name).is_none() && !COMMON.has(name));
    let owners = own.map(keys::owners).filter(|owners| !owners.is_empty());
    let owners: Vec<Vec<Objective>> = owners.collect();
    let has_all = |one: Objective| owners.iter().all(|owners| owners.contains(&one));
    !has_all(named) && by_keys(root).is_some_and(has_all)
}

/// The objective in a word of a program's name.
pub(super) fn by_name(script: &Path) -> Option<Objective> {
    parts(script.file_stem()?.to_str()?).find_map(word)
}

fn word(text: &str) -> Option<Objective> {
    let word = text.to_ascii_lowercase();
    let found = keys::TRAINERS.iter().find(|(.., words)| words.has(&word))?;
    Some(found.0)
}

fn parts(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric())
}

/// Keys of TRL's older PPO that many programs have.
const COMMON: Words = Words("base_model batch_size");

/// Keys that belong to one trainer decide. `beta` means DPO where no narrower key is present.
fn by_keys(root: &Node) -> Option<Objective> {
    if root.get("loss_type").and_then(Node::text) == Some("simpo") {
        return Some(Objective::Cpo);
    }
    for entry in root.entries()? {
        if keys::shared(&entry.name).is_some() || COMMON.has(&entry.name) {
            continue;
        }
        match keys::owners(&entry.name).as_slice() {
            [one] => return Some(*one),
            // Continued pre-training has the same keys as SFT, and GRPO nearly all keys of RLOO.
            [first @ Objective::Sft, Objective::LanguageModelling]
            | [first @ Objective::Grpo, Objective::Rloo] => return Some(*first),
            _ => {}
        }
    }
    // Keys that several trainers share leave those that have all of them.
    let mut left: Option<Vec<Objective>> = None;
    for entry in root.entries()? {
        let owners = keys::owners(&entry.name);
        if keys::shared(&entry.name).is_some() || owners.is_empty() {
            continue;
        }
        left = Some(match left {
            None => owners,
            Some(left) => left
                .into_iter()
                .filter(|one| owners.contains(one))
                .collect(),
        });
    }
    let left = left.unwrap_or_default();
    if left.contains(&Objective::Dpo) && !left.contains(&Objective::Sft) {
        return Some(by_names(root).unwrap_or(Objective::Dpo));
    }
    let preferences = root.get("beta").is_some() || chosen_and_rejected(root);
    preferences.then(|| by_names(root).unwrap_or(Objective::Dpo))
}

/// Whether the data has the columns of preference pairs.
fn chosen_and_rejected(root: &Node) -> bool {
    let mixture = root.get_path("dataset_mixture.datasets");
    let sources = mixture
        .or_else(|| root.get("datasets"))
        .and_then(Node::items);
    sources.unwrap_or_default().iter().any(|source| {
        let columns = source
            .get("columns")
            .and_then(Node::items)
            .unwrap_or_default();
        let has = |name| columns.iter().any(|column| column.text() == Some(name));
        has("chosen") && has("rejected")
    })
}

/// The objective in the names of outputs, such as `zephyr-7b-dpo-full`.
fn by_names(root: &Node) -> Option<Objective> {
    let mut names = ["hub_model_id", "run_name", "output_dir"].into_iter();
    names.find_map(|key| parts(root.get(key)?.text()?).find_map(word))
}
