//! The training data of a recipe: the handbook's `dataset_mixture`, its older `dataset_mixer`,
//! TRL's `datasets`, and the plain `dataset_name`.
//!
//! Sources: alignment-handbook 925acdf `data.py` (`get_dataset`), before 19f0345 `data.py`
//! (`mix_datasets`); TRL f2cd577 `scripts/utils.py` (`get_dataset`).

use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::schema::untrained::{Untrained, UntrainedReason};
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::Schema;
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
const FILE_LOADERS: [(&str, &str); 3] =
    [("json", "jsonl"), ("parquet", "parquet"), ("text", "text")];

/// Translates the data keys to `data`.
pub(super) fn translate(values: &Values, evaluates: bool, tree: &mut Tree, reading: &mut Reading) {
    let name = || {
        values
            .text("dataset_name")
            .or_else(|| values.text("dataset"))
    };
    if let Some(mixture) = values.node("dataset_mixture") {
        handbook(mixture, tree, reading);
    } else if let Some(sources) = values.node("datasets") {
        trl(sources, values, tree, reading);
    } else if let Some(mixer) = values.node("dataset_mixer") {
        dataset_mixer(mixer, values, tree, reading);
    } else if let Some(name) = name() {
        plain(&name, values, evaluates, tree);
    }
}

/// Upstream loads every source, cuts it to its weight, concatenates and shuffles them, and holds
/// out `test_split_size`. It therefore trains on sources of test splits too, and so does this.
fn handbook(mixture: &Node, tree: &mut Tree, reading: &mut Reading) {
    let mixture_values = checked(mixture, "dataset_mixture.", MIXTURE, reading);
    let Some(list) = mixture_values.node("datasets").and_then(Node::items) else {
        reading.error(
            "mandatory-missing",
            Some(mixture.span),
            "`dataset_mixture` has no list `datasets`",
            "give `datasets:` with one `- id: …` a source",
        );
        return;
    };
    for (index, source) in list.iter().enumerate() {
        let prefix = format!("dataset_mixture.datasets.{index}.");
        let fields = checked(source, &prefix, HANDBOOK_SOURCE, reading);
        push(source, &fields, ["id", "config"], tree, reading);
    }
    tree.plain_if("data.held_out", mixture_values.float("test_split_size"));
}

/// TRL's `datasets`. `fraction` is a share of the mixture. Only the sizes of all sets could turn it
/// into a share of each set.
fn trl(list: &Node, values: &Values, tree: &mut Tree, reading: &mut Reading) {
    for (index, source) in list.items().unwrap_or_default().iter().enumerate() {
        let fields = checked(source, &format!("datasets.{index}."), TRL_SOURCE, reading);
        if let Some(fraction) = fields.float("fraction") {
            let message = format!(
                "`{}` is a share of the mixture, which is not supported: the whole set is used",
                fraction.key
            );
            let help = "set `weight`, a share of the set, in `evenkeel.data.train`";
            reading.warning("unsupported-value", Some(fraction.span), message, help);
        }
        push(source, &fields, ["path", "name"], tree, reading);
    }
    tree.plain_if("data.held_out", values.float("test_split_size"));
}

/// Adds a source, whose set and config have these keys, or each of its files.
fn push(source: &Node, fields: &Values, keys: [&str; 2], tree: &mut Tree, reading: &mut Reading) {
    let [path, config] = keys;
    let Some(path) = fields.text(path) else {
        let message = format!("`{}{path}` is missing", fields.prefix);
        let help = "name a data set of the hub, or a file";
        reading.error("mandatory-missing", Some(source.span), message, help);
        return;
    };
    let mut whole = Tree::new(source.span);
    whole.text("path", &path);
    whole.text_if("config", fields.text(config));
    whole.text_if("split", fields.text("split"));
    whole.plain_if("weight", fields.float("weight"));
    let mut sources = vec![whole];
    if let Some(files) = fields
        .node("data_files")
        .map(files)
        .filter(|files| !files.is_empty())
    {
        let format = FILE_LOADERS
            .iter()
            .find(|(loader, _)| *loader == path.value);
        sources = files
            .into_iter()
            .map(|file| {
                let mut data = Tree::new(source.span);
                data.put(
                    "path",
                    &format!("{}data_files", fields.prefix),
                    file.clone(),
                );
                data.plain_if("format", format.map(|(_, format)| path.with(format)));
                data
            })
            .collect();
    }
    for mut data in sources {
        for column in words(fields.node("columns"), &format!("{}columns", fields.prefix)) {
            data.push("columns", Tree::of(&column));
        }
        tree.push("data.train", data);
    }
}

/// `dataset_mixer: {set: share}` with `dataset_splits`: takes the share of every train split, and
/// whole test splits. open-instruct's mixer also takes a number of rows above 1 (allenai/open-instruct 00440da
/// `open_instruct/utils.py`, `combine_dataset`).
fn dataset_mixer(mixer: &Node, values: &Values, tree: &mut Tree, reading: &mut Reading) {
    let configs = words(values.node("dataset_configs"), "dataset_configs");
    let splits = words(values.node("dataset_splits"), "dataset_splits");
    let is = |split: &Given<String>, word: &str| split.value.contains(word);
    if let Some(odd) = splits
        .iter()
        .find(|split| !is(split, "train") && !is(split, "test"))
    {
        let message = format!(
            "the split `{}` is neither a train nor a test split: the handbook's scripts refuse it",
            odd.value
        );
        let help = "nothing to do if your program takes it: no batch number depends on it";
        reading.warning("unknown-value", Some(odd.span), message, help);
        reading.untrained.push(Untrained {
            key: "dataset_splits".to_owned(),
            value: odd.value.clone(),
            span: odd.span,
            reason: UntrainedReason::Unsupported(None),
        });
    }
    let splits: Vec<Option<Given<String>>> = match splits.len() {
        0 => vec![None],
        _ => splits.into_iter().map(Some).collect(),
    };
    for (index, entry) in mixer.entries().unwrap_or_default().iter().enumerate() {
        let key = format!("dataset_mixer.{}", entry.name);
        let value = entry.value.resolve(Schema::PyYaml);
        let Some(share) = value.and_then(|value| value.number()) else {
            let message = format!("`{key}` takes a share, this is {}", entry.value.kind());
            let help =
                "give a share from 0 to 1, or a number of rows; no batch number depends on it";
            reading.warning("wrong-type", Some(entry.value.span), message, help);
            reading.untrained.push(Untrained {
                key,
                value: entry.value.shown().to_owned(),
                span: entry.name_span,
                reason: UntrainedReason::Unsupported(None),
            });
            continue;
        };
        for split in &splits {
            let trains = split.as_ref().is_none_or(|split| is(split, "train"));
            let mut data = Tree::new(entry.name_span);
            data.text(
                "path",
                &Given::new(&key, entry.name.clone(), entry.name_span),
            );
            data.text_if("config", configs.get(index).cloned());
            data.text_if("split", split.clone());
            if trains {
                data.plain("weight", &Given::new(&key, share, entry.value.span));
            }
            tree.push(
                if trains {
                    "data.train"
                } else {
                    "data.evaluation"
                },
                data,
            );
        }
    }
}

/// `dataset_name` with its splits.
fn plain(name: &Given<String>, values: &Values, evaluates: bool, tree: &mut Tree) {
    for (path, key, split, wanted) in [
        ("data.train", "dataset_train_split", "train", true),
        ("data.evaluation", "dataset_test_split", "test", evaluates),
    ] {
        if !wanted {
            continue;
        }
        let mut data = Tree::new(name.span);
        data.text("path", name);
        data.text_if("config", values.text("dataset_config"));
        data.default("split", split);
        data.text_if("split", values.text(key));
        let field = values.text("dataset_text_field");
        if let Some(field) = field.or_else(|| values.text("text_column")) {
            data.push("columns", Tree::of(&field));
        }
        tree.push(path, data);
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

/// A list's texts with their spans, under a key.
fn words(node: Option<&Node>, key: &str) -> Vec<Given<String>> {
    let items = node.and_then(Node::items).unwrap_or_default().iter();
    let word = |item: &Node| Some(Given::new(key, item.text()?.to_owned(), item.span));
    items.filter_map(word).collect()
}

/// The files of `data_files`: one, a list, or lists by split, of which only the training splits
/// count.
fn files(node: &Node) -> Vec<&Node> {
    match &node.value {
        Value::Scalar(_) => vec![node],
        Value::Sequence(items) => items.iter().flat_map(files).collect(),
        Value::Mapping(entries) => {
            let train = entries.iter().filter(|entry| entry.name.contains("train"));
            train.flat_map(|entry| files(&entry.value)).collect()
        }
    }
}
