//! The training data of a recipe: the handbook's `dataset_mixture`, its older `dataset_mixer`,
//! TRL's `datasets`, and the plain `dataset_name`.
//!
//! Sources: alignment-handbook 925acdf `data.py` (`get_dataset`), before 19f0345 `data.py`
//! (`mix_datasets`); TRL f2cd577 `scripts/utils.py` (`get_dataset`).

use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::util::suggest::did_you_mean;

use super::keys;
use super::values::Values;

/// Keys of a source in a handbook `dataset_mixture`.
const HANDBOOK_SOURCE: &str = "id:str config:str split:str columns:list weight:float";

/// Keys of a source in TRL's `datasets`.
const TRL_SOURCE: &str = "\
    path:str name:str data_dir:str data_files:any split:str columns:list fraction:float";

/// Keys of the handbook's `dataset_mixture`.
const MIXTURE: &str = "datasets:list seed:int test_split_size:float";

/// Loaders of the `datasets` library that read local files, with the native format.
const FILE_LOADERS: &[(&str, &str)] =
    &[("json", "jsonl"), ("parquet", "parquet"), ("text", "text")];

/// Translates the data keys to `data`.
pub(super) fn translate(values: &Values, evaluates: bool, tree: &mut Tree, reading: &mut Reading) {
    let text_field = values
        .text("dataset_text_field")
        .or_else(|| values.text("text_column"));
    if let Some(mixture) = values.node("dataset_mixture") {
        handbook(mixture, tree, reading);
    } else if let Some(sources) = values.node("datasets") {
        trl(sources, values, tree, reading);
    } else if let Some(mixer) = values.node("dataset_mixer") {
        dataset_mixer(mixer, values, tree, reading);
    } else if let Some(name) = values
        .text("dataset_name")
        .or_else(|| values.text("dataset"))
    {
        plain(&name, values, evaluates, text_field.as_ref(), tree);
    }
}

/// Upstream loads every source, cuts it to its weight, concatenates and shuffles them, and holds
/// out `test_split_size`. It therefore trains on sources of test splits too, and so does this.
fn handbook(mixture: &Node, tree: &mut Tree, reading: &mut Reading) {
    let mixture_values = checked(mixture, "dataset_mixture.", MIXTURE, reading);
    let Some(sources) = mixture_values.node("datasets").and_then(Node::items) else {
        reading.error(
            "mandatory-missing",
            Some(mixture.span),
            "`dataset_mixture` has no list `datasets`",
            "give `datasets:` with one `- id: …` a source",
        );
        return;
    };
    for (index, source) in sources.iter().enumerate() {
        let prefix = format!("dataset_mixture.datasets.{index}.");
        let values = checked(source, &prefix, HANDBOOK_SOURCE, reading);
        let Some(id) = values.text("id") else {
            missing(source, &prefix, "id", reading);
            continue;
        };
        let mut data = Tree::new(source.span);
        data.text("path", &id);
        data.text_if("config", values.text("config"));
        data.text_if("split", values.text("split"));
        data.plain_if("weight", values.float("weight"));
        columns(values.node("columns"), &prefix, &mut data);
        tree.push("data.train", data);
    }
    tree.plain_if("data.held_out", mixture_values.float("test_split_size"));
}

/// TRL's `datasets`. `fraction` is a share of the mixture. Only the sizes of all sets could turn it
/// into a share of each set.
fn trl(sources: &Node, values: &Values, tree: &mut Tree, reading: &mut Reading) {
    for (index, source) in sources.items().unwrap_or_default().iter().enumerate() {
        let prefix = format!("datasets.{index}.");
        let fields = checked(source, &prefix, TRL_SOURCE, reading);
        let Some(path) = fields.text("path") else {
            missing(source, &prefix, "path", reading);
            continue;
        };
        if let Some(fraction) = fields.float("fraction") {
            reading.warning(
                "unsupported-value",
                Some(fraction.span),
                format!(
                    "`{}` is a share of the mixture, which is not supported: the whole set is used",
                    fraction.key
                ),
                "set `weight`, a share of the set, in `evenkeel.data.train`",
            );
        }
        let loader = FILE_LOADERS.iter().find(|(name, _)| *name == path.value);
        let files = fields.node("data_files").map(files).unwrap_or_default();
        for (value, span) in files.iter().cloned() {
            let mut data = Tree::new(source.span);
            let key = format!("{prefix}data_files");
            data.text("path", &Given::new(key, value, span));
            if let Some((_, format)) = loader {
                data.text("format", &path.with((*format).to_owned()));
            }
            columns(fields.node("columns"), &prefix, &mut data);
            tree.push("data.train", data);
        }
        if files.is_empty() {
            let mut data = Tree::new(source.span);
            data.text("path", &path);
            data.text_if("config", fields.text("name"));
            data.text_if("split", fields.text("split"));
            columns(fields.node("columns"), &prefix, &mut data);
            tree.push("data.train", data);
        }
    }
    tree.plain_if("data.held_out", values.float("test_split_size"));
}

/// `dataset_mixer: {set: share}` with `dataset_splits`: takes the share of every train split, and
/// whole test splits.
fn dataset_mixer(mixer: &Node, values: &Values, tree: &mut Tree, reading: &mut Reading) {
    let splits = words(values.node("dataset_splits"));
    let configs = words(values.node("dataset_configs"));
    let mut all = splits.iter().map(|s| s.value.as_str());
    if let Some(odd) = all.find(|s| !s.contains("train") && !s.contains("test")) {
        let span = values.node("dataset_splits").map(|n| n.span);
        reading.error(
            "unknown-value",
            span,
            format!("the split `{odd}` is neither a train nor a test split"),
            "use splits with `train` or `test` in their names",
        );
    }
    for (index, entry) in mixer.entries().unwrap_or_default().iter().enumerate() {
        let key = format!("dataset_mixer.{}", entry.name);
        let share = match entry.value.resolve(Schema::PyYaml) {
            Some(Resolved::Float(share)) => share,
            Some(Resolved::Int(share)) => share as f64,
            _ => {
                let message = format!("`{key}` takes a share, this is {}", entry.value.kind());
                let help = "give a number from 0 to 1";
                reading.error("wrong-type", Some(entry.value.span), message, help);
                continue;
            }
        };
        let every: Vec<Option<&Given<String>>> = match splits.as_slice() {
            [] => vec![None],
            splits => splits.iter().map(Some).collect(),
        };
        for split in every {
            let has = |word: &str| split.is_none_or(|split| split.value.contains(word));
            let (trains, tests) = (has("train"), has("test"));
            let mut data = Tree::new(entry.name_span);
            let name = Given::new(&key, entry.name.clone(), entry.name_span);
            data.text("path", &name);
            data.text_if("config", configs.get(index).cloned());
            data.text_if("split", split.cloned());
            if trains {
                let share = Given::new(&key, share, entry.value.span);
                data.plain("weight", &share);
                tree.push("data.train", data);
            } else if tests {
                tree.push("data.evaluation", data);
            }
        }
    }
}

/// `dataset_name` with its splits.
fn plain(
    name: &Given<String>,
    values: &Values,
    evaluates: bool,
    text_field: Option<&Given<String>>,
    tree: &mut Tree,
) {
    let source = |split_key: &str, default: &str| {
        let mut data = Tree::new(name.span);
        data.text("path", name);
        data.text_if("config", values.text("dataset_config"));
        data.default("split", default);
        data.text_if("split", values.text(split_key));
        if let Some(field) = text_field {
            data.push("columns", Tree::of(field));
        }
        data
    };
    tree.push("data.train", source("dataset_train_split", "train"));
    if evaluates {
        tree.push("data.evaluation", source("dataset_test_split", "test"));
    }
}

/// The typed values of a mapping with listed keys. The handbook reads its mappings with `.get`, so
/// an unknown key has no effect there; TRL makes a dataclass of them and refuses it.
fn checked<'n>(
    node: &'n Node,
    prefix: &str,
    known: &'static str,
    reading: &mut Reading,
) -> Values<'n> {
    for entry in node.entries().unwrap_or_default() {
        if keys::kind_in(known, &entry.name).is_some() {
            continue;
        }
        let span = Some(entry.name_span);
        let help = did_you_mean(&entry.name, keys::fields(known).map(|(name, _)| name));
        if known == TRL_SOURCE {
            let message = format!("there is no key `{prefix}{}`", entry.name);
            reading.error("unknown-key", span, message, help);
        } else {
            let message = format!("`{prefix}{}` does nothing", entry.name);
            reading.warning("unknown-key", span, message, help);
        }
    }
    Values::check(node, prefix, |key| keys::kind_in(known, key), reading)
}

fn missing(source: &Node, prefix: &str, key: &str, reading: &mut Reading) {
    reading.error(
        "mandatory-missing",
        Some(source.span),
        format!("`{prefix}{key}` is missing"),
        "name a data set of the hub, or a file",
    );
}

/// A list's texts with their spans.
fn words(node: Option<&Node>) -> Vec<Given<String>> {
    let items = node.and_then(Node::items).unwrap_or_default();
    let word = |item: &Node| {
        Some(Given::new(
            String::new(),
            item.text()?.to_owned(),
            item.span,
        ))
    };
    items.iter().filter_map(word).collect()
}

fn columns(node: Option<&Node>, prefix: &str, data: &mut Tree) {
    for mut column in words(node) {
        column.key = format!("{prefix}columns");
        data.push("columns", Tree::of(&column));
    }
}

/// The files of `data_files`: one, a list, or lists by split, of which only the training splits
/// count.
fn files(node: &Node) -> Vec<(String, crate::recipe::syntax::source::Span)> {
    match &node.value {
        Value::Scalar(scalar) => vec![(scalar.text.clone(), node.span)],
        Value::Sequence(items) => items.iter().flat_map(files).collect(),
        Value::Mapping(entries) => entries
            .iter()
            .filter(|e| e.name.contains("train"))
            .flat_map(|e| files(&e.value))
            .collect(),
    }
}
