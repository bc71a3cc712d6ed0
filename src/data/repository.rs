//! Chooses the files of a data set in a repository of the hub, as the `datasets` library does: those of a config and a
//! split. The front matter of its README.md may list configs with their files; else the names of directories and files
//! name the splits. Deviations: a source without a split is the split `train`, or `test` of the evaluation; a file whose
//! name has the words of two splits is in one; a pattern has no `[0-9]`.
//!
//! Source: huggingface/datasets 00724a7 `data_files.py`, `utils/metadata.py`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::error::DataError;
use super::names::{belongs, fits, format_of, walk};
use crate::hub::{self, Kind};
use crate::recipe::schema::spec::{DataFormat, DataSource};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::Schema;
use crate::recipe::syntax::source::FileId;
use crate::recipe::syntax::yaml;
use crate::util::input::{self, CONFIG_BYTES};

/// Words of a path that name a split.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];
/// Files that describe data.
const DESCRIPTIONS: [&str; 4] = [
    "config.json",
    "dataset_dict.json",
    "dataset_info.json",
    "dataset_infos.json",
];
/// Extensions of data in formats that are not read.
const UNREAD: [&str; 12] = [
    "arrow", "bz2", "csv", "gz", "lz4", "tar", "tgz", "tsv", "xml", "xz", "zip", "zst",
];
/// The config of a data set without others.
const DEFAULT: &str = "default";
/// The most names in a message.
const NAMED: usize = 20;

/// Why no files are chosen.
#[derive(Debug, PartialEq, Eq)]
pub enum Unchosen {
    /// The data are in no format that is read, for this reason.
    Unread(String),
    /// A key of the source, its problem and the remedy.
    Refused {
        key: &'static str,
        problem: String,
        help: String,
    },
}

impl Unchosen {
    /// The error of the source at a native `path`, `data.train.0`.
    pub fn error(self, source: &DataSource, path: &str, key: &dyn Fn(&str) -> String) -> DataError {
        let shown = shown(&source.path);
        match self {
            Unchosen::Unread(why) => DataError::Setting {
                key: key(&format!("{path}.path")),
                problem: format!("{shown} has no data in a format that is read: {why}"),
                help: "write them as .jsonl or .parquet files, and name the directory of these"
                    .to_owned(),
            },
            Unchosen::Refused {
                key: field,
                problem,
                help,
            } => DataError::Setting {
                key: key(&format!("{path}.{field}")),
                problem: format!("{shown} {problem}"),
                help,
            },
        }
    }
}

/// The id of a repository, for messages.
fn shown(path: &str) -> String {
    hub::repo_of_snapshot(Path::new(path)).map_or_else(|| path.to_owned(), |repo| repo.id)
}

fn refused<T>(
    key: &'static str,
    problem: impl Into<String>,
    help: impl Into<String>,
) -> Result<T, Unchosen> {
    Err(Unchosen::Refused {
        key,
        problem: problem.into(),
        help: help.into(),
    })
}

/// The names, the first ones of many.
fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    let first = names[..names.len().min(NAMED)].join(", ");
    match names.len().saturating_sub(NAMED) {
        0 => first,
        more => format!("{first} and {more} more"),
    }
}

/// The front matter of a README.md.
#[derive(Debug, Default)]
pub struct Card {
    /// Whether the file has one.
    pub is_card: bool,
    configs: Vec<Config>,
    /// Why it is no YAML.
    fault: Option<String>,
}

/// A named selection of files.
#[derive(Debug, Default, Clone)]
struct Config {
    name: String,
    is_default: bool,
    /// Directory that holds its files.
    directory: Option<String>,
    /// The patterns of each split.
    patterns: Option<Vec<(String, Vec<String>)>>,
}

impl Card {
    /// The card of a directory; empty if it has none.
    pub fn of(directory: &Path) -> Card {
        let text = input::read(&directory.join(hub::CARD), CONFIG_BYTES).ok();
        let text = text.and_then(|text| String::from_utf8(text).ok());
        text.map(|text| Card::parse(&text)).unwrap_or_default()
    }

    pub fn parse(text: &str) -> Card {
        let text = text.trim_start_matches('\u{feff}').replace("\r\n", "\n");
        let matter = text.strip_prefix("---\n");
        let Some((matter, _)) = matter.and_then(|rest| rest.split_once("\n---")) else {
            return Card::default();
        };
        let mut found = Vec::new();
        let root = yaml::parse(matter, FileId(0), &mut found);
        let configs = root.as_ref().and_then(|root| root.get("configs"));
        let configs = configs.and_then(Node::items).unwrap_or_default();
        Card {
            is_card: true,
            configs: configs.iter().map(Config::of).collect(),
            fault: root.is_none().then(|| {
                let first = found.into_iter().next();
                first.map_or_else(|| "it is empty".to_owned(), |fault| fault.message)
            }),
        }
    }

    pub fn has_configs(&self) -> bool {
        !self.configs.is_empty()
    }
}

impl Config {
    fn of(node: &Node) -> Config {
        let text = |key: &str| node.get(key)?.text().map(str::to_owned);
        let is_true = |default: &Node| default.is_bool(true, Schema::PyYaml);
        Config {
            name: text("config_name").unwrap_or_else(|| DEFAULT.to_owned()),
            is_default: node.get("default").is_some_and(is_true),
            directory: text("data_dir"),
            patterns: node.get("data_files").map(patterns),
        }
    }
}

/// The patterns of `data_files`, by split: a pattern or a list of them are those of `train`.
fn patterns(data_files: &Node) -> Vec<(String, Vec<String>)> {
    let texts = |node: &Node| -> Vec<String> {
        let items = node.items().unwrap_or(std::slice::from_ref(node)).iter();
        items.filter_map(Node::text).map(str::to_owned).collect()
    };
    let of_split = |node: &Node| {
        let split = node.get("split")?.text()?.to_owned();
        Some((split, texts(node.get("path")?)))
    };
    let items = data_files.items().unwrap_or_default();
    let by_split: Vec<_> = items.iter().filter_map(of_split).collect();
    if !by_split.is_empty() {
        return by_split;
    }
    if let Some(entries) = data_files.entries() {
        let of_entry = entries
            .iter()
            .map(|entry| (entry.name.clone(), texts(&entry.value)));
        return of_entry.collect();
    }
    vec![("train".to_owned(), texts(data_files))]
}

/// The files of a source among those of its repository, in order of their names; never empty. `path`: the native path of
/// the source, `data.train.0`.
pub fn choose(
    files: &[String],
    card: &Card,
    source: &DataSource,
    path: &str,
) -> Result<Vec<String>, Unchosen> {
    let default = if path.starts_with("data.evaluation") {
        "test"
    } else {
        "train"
    };
    let split = source.split.as_deref().unwrap_or(default);
    if let Some(fault) = &card.fault {
        return refused(
            "path",
            format!("has a README.md whose front matter is not read: {fault}"),
            "download it, correct the front matter, and name the directory",
        );
    }
    let data: Vec<&str> = files
        .iter()
        .map(String::as_str)
        .filter(|name| is_data(name))
        .collect();
    if !card.configs.iter().any(|config| config.patterns.is_some()) {
        if let Some(script) = script(files, &source.path) {
            let why = format!("the script {script} makes them");
            return Err(Unchosen::Unread(why));
        }
        if data.is_empty() {
            return Err(Unchosen::Unread("it has no file of data".to_owned()));
        }
    }
    let converted = converted(&data);
    let configs = if card.has_configs() {
        &card.configs
    } else {
        &converted
    };
    let config = config(configs, source.config.as_deref(), &data)?;
    let splits = match &config.patterns {
        Some(patterns) => matched(patterns, config.directory.as_deref(), files),
        None => named(&below(&data, config.directory.as_deref())),
    };
    if splits.is_empty() {
        return Err(Unchosen::Unread("it has no file of data".to_owned()));
    }
    let of_split = splits.get(split).cloned().unwrap_or_default();
    // A file may be named after another split, `train_sft.jsonl`.
    let by_name = || {
        let all = below(&data, config.directory.as_deref());
        let named = all
            .into_iter()
            .filter(|(_, inner)| belongs(Path::new(inner), split));
        named.map(|(name, _)| name).collect()
    };
    let chosen: Vec<&str> = if of_split.is_empty() && config.patterns.is_none() {
        by_name()
    } else {
        of_split
    };
    if chosen.is_empty() {
        return no_split(split, &splits);
    }
    readable(&chosen, source.format)
}

fn no_split<T>(split: &str, splits: &BTreeMap<String, Vec<&str>>) -> Result<T, Unchosen> {
    let problem = match splits.contains_key(split) {
        true => format!("has no file of the split `{split}`, which its README.md lists"),
        false => format!(
            "has no split `{split}`, but {}",
            list(splits.keys().map(String::as_str))
        ),
    };
    let help = if split.contains(['[', '+']) {
        "name one whole split, and a `weight` for a share of it; add a source for another split"
    } else {
        "name one of its splits"
    };
    refused("split", problem, help)
}

/// Whether a file has data, in any format.
fn is_data(name: &str) -> bool {
    let path = Path::new(name);
    let hidden = |part: &str| part.starts_with('.') || part.starts_with("__");
    let last = name.rsplit('/').next().unwrap_or(name);
    let ending = path
        .extension()
        .and_then(|ending| ending.to_str())
        .unwrap_or_default();
    let ending = ending.to_ascii_lowercase();
    let has_format = format_of(path).is_some() && ending != "md";
    !name.split('/').any(hidden)
        && !DESCRIPTIONS.contains(&last)
        && (has_format || UNREAD.contains(&ending.as_str()))
}

/// The configs of the hub's own Parquet files, `CONFIG/SPLIT/0000.parquet`.
fn converted(data: &[&str]) -> Vec<Config> {
    let mut splits = BTreeMap::<&str, BTreeSet<&str>>::new();
    for name in data {
        let parts: Vec<&str> = name.split('/').collect();
        let [config, split, file] = parts[..] else {
            return Vec::new();
        };
        let number = file.strip_suffix(".parquet").unwrap_or_default();
        if number.len() != 4 || !number.bytes().all(|byte| byte.is_ascii_digit()) {
            return Vec::new();
        }
        splits.entry(config).or_default().insert(split);
    }
    let patterns = |config: &str, splits: BTreeSet<&str>| {
        let pattern = |split: &str| {
            (
                split.to_owned(),
                vec![format!("{config}/{split}/*.parquet")],
            )
        };
        splits.into_iter().map(pattern).collect()
    };
    let config = |(name, splits): (&str, BTreeSet<&str>)| Config {
        name: name.to_owned(),
        patterns: Some(patterns(name, splits)),
        ..Config::default()
    };
    splits.into_iter().map(config).collect()
}

/// The config of a name, or the default one. Without a list, the name is that of a directory.
fn config(configs: &[Config], name: Option<&str>, data: &[&str]) -> Result<Config, Unchosen> {
    let names = || list(configs.iter().map(|config| config.name.as_str()));
    let has = |directory: &str| !below(data, Some(directory)).is_empty();
    let in_directory = |name: &str| Config {
        directory: Some(name.to_owned()),
        ..Config::default()
    };
    let of_name = |name: &str| configs.iter().find(|config| config.name == name);
    let help = "name one of its configs";
    match (name, configs) {
        (None | Some(DEFAULT), []) => Ok(Config::default()),
        (Some(name), []) if has(name) => Ok(in_directory(name)),
        (Some(name), []) => refused(
            "config",
            format!(
                "has no config `{name}`: no README.md lists configs, and no directory has that name"
            ),
            "remove the config, or correct it",
        ),
        (Some(name), _) => match of_name(name) {
            Some(config)
                if config.patterns.is_none() && config.directory.is_none() && has(name) =>
            {
                Ok(in_directory(name))
            }
            Some(config) => Ok(config.clone()),
            None => refused(
                "config",
                format!("has no config `{name}`, but {}", names()),
                help,
            ),
        },
        (None, [only]) => Ok(only.clone()),
        (None, _) => {
            let marked = configs.iter().find(|config| config.is_default);
            match marked.or_else(|| of_name(DEFAULT)) {
                Some(config) => Ok(config.clone()),
                None => refused(
                    "config",
                    format!("has the configs {}, and no default", names()),
                    help,
                ),
            }
        }
    }
}

/// The files below a directory, each with its path below it.
fn below<'a>(files: &[&'a str], directory: Option<&str>) -> Vec<(&'a str, &'a str)> {
    let directory = directory
        .map(relative)
        .filter(|directory| !directory.is_empty());
    let inner = |name: &'a str| match directory {
        None => Some(name),
        Some(directory) => name.strip_prefix(directory)?.strip_prefix('/'),
    };
    let files = files.iter();
    files
        .filter_map(|name| Some((*name, inner(name)?)))
        .collect()
}

fn relative(path: &str) -> &str {
    path.trim_start_matches("./").trim_matches('/')
}

/// The files of each split whose patterns are listed.
fn matched<'a>(
    patterns: &[(String, Vec<String>)],
    directory: Option<&str>,
    files: &'a [String],
) -> BTreeMap<String, Vec<&'a str>> {
    let directory = directory.map(relative).unwrap_or_default();
    let mut splits = BTreeMap::<String, Vec<&str>>::new();
    for (split, patterns) in patterns {
        let of_split = splits.entry(split.clone()).or_default();
        for pattern in patterns {
            let pattern = format!("{directory}/{}", relative(pattern));
            let names = files.iter().map(String::as_str);
            of_split.extend(names.filter(|name| fits(&pattern, Path::new(name))));
        }
        of_split.sort_unstable_by_key(|name| Path::new(*name));
        of_split.dedup();
    }
    splits
}

/// The files of each split that their names state: of shards, then of directories, then of files. Data that name no
/// split are those of `train`.
fn named<'a>(files: &[(&'a str, &'a str)]) -> BTreeMap<String, Vec<&'a str>> {
    let by = |split: &dyn Fn(&str) -> Option<String>| {
        let mut splits = BTreeMap::<String, Vec<&str>>::new();
        for (name, inner) in files {
            if let Some(split) = split(inner) {
                splits.entry(split).or_default().push(name);
            }
        }
        splits
    };
    let word = |text: &str| keyword(text).map(str::to_owned);
    let of_directory = |inner: &str| inner.rsplit_once('/').and_then(|(above, _)| word(above));
    let of_file = |inner: &str| word(inner.rsplit('/').next().unwrap_or(inner));
    let of_shard = |inner: &str| {
        let (name, ..) = shard(inner.strip_prefix("data/")?)?;
        (!name.contains('/')).then(|| name.to_owned())
    };
    let all = |_: &str| Some("train".to_owned());
    let found = [by(&of_shard), by(&of_directory), by(&of_file), by(&all)];
    let mut found = found.into_iter().filter(|splits| !splits.is_empty());
    found.next().unwrap_or_default()
}

/// The split that a word of a path names.
fn keyword(path: &str) -> Option<&'static str> {
    let is_between = |c: char| "-._ /".contains(c) || c.is_ascii_digit();
    let words: Vec<&str> = path.split(is_between).collect();
    let names = |(_, keywords): &&(&str, &[&str])| keywords.iter().any(|word| words.contains(word));
    SPLITS.iter().find(names).map(|(split, _)| *split)
}

/// Name, number and count of a shard `NAME-00000-of-00002….parquet`.
fn shard(path: &str) -> Option<(&str, u32, u32)> {
    let (before, after) = path.split_once("-of-")?;
    let (name, number) = before.rsplit_once('-')?;
    let digits = |text: &str| {
        let is_number = text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
        text.parse().ok().filter(|_| is_number)
    };
    Some((name, digits(number)?, digits(after.get(..5)?)?))
}

/// A script of the repository's name, which makes its data.
fn script(files: &[String], path: &str) -> Option<String> {
    let id = shown(path);
    let script = format!("{}.py", id.rsplit('/').next().unwrap_or(&id));
    files.contains(&script).then_some(script)
}

/// The files in the most frequent of the formats that are read, or in the one of the recipe.
fn readable(files: &[&str], format: Option<DataFormat>) -> Result<Vec<String>, Unchosen> {
    let of = |format: DataFormat| -> Vec<String> {
        let files = files.iter().filter(|name| is_data(name));
        let files = files.filter(|name| format_of(Path::new(name)) == Some(format));
        files.map(|name| (*name).to_owned()).collect()
    };
    let formats = [
        DataFormat::Bin,
        DataFormat::Text,
        DataFormat::Jsonl,
        DataFormat::Parquet,
    ];
    let mut chosen = match format {
        Some(format) => of(format),
        None => formats
            .into_iter()
            .map(of)
            .max_by_key(Vec::len)
            .unwrap_or_default(),
    };
    let unread = files
        .iter()
        .find(|name| format_of(Path::new(name)).is_none());
    if chosen.is_empty() {
        let file = unread.or(files.first()).copied().unwrap_or_default();
        return Err(Unchosen::Unread(format!("they are in {file}")));
    }
    chosen.sort_unstable_by(|one, other| Path::new(one).cmp(Path::new(other)));
    Ok(chosen)
}

/// Directory in which `hf download --local-dir` keeps its notes.
const DOWNLOADED: &str = ".cache/huggingface";

/// A repository on this machine: a snapshot in the hub's cache, what `hf download` has written into another directory,
/// or a directory whose README.md lists configs.
pub(super) struct Local<'a> {
    directory: &'a Path,
    files: Vec<String>,
    /// Whether `files` are all of the commit, though the snapshot may have only some.
    is_listed: bool,
    card: Card,
}

impl Local<'_> {
    /// `None`: the directory is no repository.
    pub fn at(directory: &Path) -> Result<Option<Local<'_>>, DataError> {
        let card = Card::of(directory);
        let repo = hub::repo_of_snapshot(directory);
        let is_snapshot = repo.is_some_and(|repo| repo.kind == Kind::DataSet);
        let is_downloaded = directory.join(DOWNLOADED).is_dir();
        if !is_snapshot && !is_downloaded && !card.has_configs() {
            return Ok(None);
        }
        let listing = hub::files_of_snapshot(directory).filter(|_| is_snapshot);
        let is_listed = listing.is_some();
        let files = match listing {
            Some(files) => files,
            None => {
                let files = walk(directory)?;
                let names = files.iter().filter_map(|path| path.to_str());
                names.map(str::to_owned).collect()
            }
        };
        Ok(Some(Local {
            directory,
            files,
            is_listed,
            card,
        }))
    }

    pub fn choose(&self, source: &DataSource, path: &str) -> Result<Vec<String>, Unchosen> {
        choose(&self.files, &self.card, source, path)
    }

    /// Whether it has all of these files. Without the listing of its commit, only the names of shards can show that
    /// some are absent.
    pub fn has(&self, files: &[String]) -> bool {
        let mut shards = BTreeMap::<(&str, u32), u32>::new();
        for (name, _, count) in files.iter().filter_map(|name| shard(name)) {
            *shards.entry((name, count)).or_default() += 1;
        }
        let mut shards = shards.into_iter();
        let is_complete = self.is_listed || shards.all(|((_, count), found)| found == count);
        is_complete && files.iter().all(|name| self.directory.join(name).is_file())
    }
}

/// What a snapshot has of a source.
#[derive(Debug, PartialEq, Eq)]
pub enum Held {
    All,
    /// Some files are missing, or the source names no files.
    Less,
    /// The data set has no data in a format that is read.
    Unread,
}

/// What the snapshot in a directory has of the source at a native `path`, `data.train.0`.
pub fn held(directory: &Path, source: &DataSource, path: &str) -> Held {
    let Ok(Some(local)) = Local::at(directory) else {
        return Held::Less;
    };
    match local.choose(source, path) {
        Ok(files) if local.has(&files) => Held::All,
        Err(Unchosen::Unread(_)) => Held::Unread,
        Ok(_) | Err(Unchosen::Refused { .. }) => Held::Less,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The files that a source chooses, or the refusal.
    fn chosen(files: &[&str], card: &str, source: &DataSource) -> String {
        let files: Vec<String> = files.iter().map(|name| (*name).to_owned()).collect();
        let chosen = choose(&files, &Card::parse(card), source, "data.train.0");
        chosen
            .map(|files| files.join(" "))
            .unwrap_or_else(|unchosen| {
                let key = |path: &str| path.to_owned();
                unchosen.error(source, "data.train.0", &key).to_string()
            })
    }

    fn source(config: &str, split: &str) -> DataSource {
        let given = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        DataSource {
            path: "acme/chats".to_owned(),
            config: given(config),
            split: given(split),
            ..DataSource::default()
        }
    }

    const CARD: &str = "---\nlicense: mit\nconfigs:\n- config_name: en\n  data_files:\n  - split: train_sft\n    \
                        path: data/en-train-*\n  - split: test\n    path:\n    - data/en-test.jsonl\n    - more/**\n\
                        - config_name: fr\n  default: true\n  data_files: data/fr-*.parquet\n\
                        - config_name: de\n  data_dir: german\n- config_name: it\n---\n# Chats\n";

    #[test]
    fn the_card_lists_configs_with_the_files_of_their_splits() {
        let files = [
            "README.md",
            "data/en-test.jsonl",
            "data/en-train-1.jsonl",
            "data/en-train-0.jsonl",
            "data/fr-0.parquet",
            "german/test.jsonl",
            "german/train.jsonl",
            "it/train.jsonl",
            "more/a/b.jsonl",
        ];
        let of = |config: &str, split: &str| chosen(&files, CARD, &source(config, split));
        let train = "data/en-train-0.jsonl data/en-train-1.jsonl";
        assert_eq!(of("en", "train_sft"), train);
        assert_eq!(of("en", "test"), "data/en-test.jsonl more/a/b.jsonl");
        assert_eq!(of("", ""), "data/fr-0.parquet");
        assert_eq!(of("de", ""), "german/train.jsonl");
        assert_eq!(of("it", ""), "it/train.jsonl");
        let without_default = CARD.replace("  default: true\n", "");
        let refusals = [
            of("en", ""),
            of("en", "train_sft[:10%]"),
            of("xx", ""),
            chosen(&files, &without_default, &source("", "")),
            chosen(&files[..1], CARD, &source("", "")),
            chosen(&files, "---\nconfigs: [\n---\n", &source("", "")),
        ];
        insta::assert_snapshot!(refusals.join("\n"), @"
        data.train.0.split: acme/chats has no split `train`, but test, train_sft; name one of its splits
        data.train.0.split: acme/chats has no split `train_sft[:10%]`, but test, train_sft; name one whole split, and a `weight` for a share of it; add a source for another split
        data.train.0.config: acme/chats has no config `xx`, but en, fr, de, it; name one of its configs
        data.train.0.config: acme/chats has the configs en, fr, de, it, and no default; name one of its configs
        data.train.0.split: acme/chats has no file of the split `train`, which its README.md lists; name one of its splits
        data.train.0.path: acme/chats has a README.md whose front matter is not read: unclosed bracket '['; download it, correct the front matter, and name the directory
        ");
        // A card may give the files of a config as a mapping.
        let mapped = "---\nconfigs:\n- config_name: x\n  data_files: {test: it/*, train: [german/train.*]}\n---\n";
        assert_eq!(
            chosen(&files, mapped, &source("", "")),
            "german/train.jsonl"
        );
    }

    #[test]
    fn names_state_the_split_where_no_card_does() {
        let of =
            |files: &[&str], split: &str| chosen(files, "# No front matter", &source("", split));
        let shards = [
            "data/train_sft-00001-of-00002-ab.parquet",
            "data/train_sft-00000-of-00002-cd.parquet",
            "data/train_gen-00000-of-00001.parquet",
            "data/test-00000-of-00001.parquet",
            "data/other.parquet",
        ];
        let both = format!("{} {}", shards[1], shards[0]);
        assert_eq!(of(&shards, "train_sft"), both);
        insta::assert_snapshot!(of(&shards, ""), @"data.train.0.split: acme/chats has no split `train`, but test, train_gen, train_sft; name one of its splits");
        let directories = ["train/b.jsonl", "train/a.jsonl", "valid/a.jsonl", "x.jsonl"];
        assert_eq!(of(&directories, ""), "train/a.jsonl train/b.jsonl");
        assert_eq!(of(&directories, "validation"), "valid/a.jsonl");
        let files = [
            "chats-train.jsonl",
            "chats_dev.jsonl",
            "notes.jsonl",
            "train_sft.jsonl",
        ];
        assert_eq!(of(&files, ""), "chats-train.jsonl train_sft.jsonl");
        assert_eq!(of(&files, "train_sft"), "train_sft.jsonl");
        assert_eq!(of(&files, "validation"), "chats_dev.jsonl");
        let all = [
            "b.jsonl",
            "a/x.jsonl",
            "a.jsonl",
            "notes.txt",
            "README.md",
            "LICENSE",
            ".hidden/c.jsonl",
        ];
        assert_eq!(of(&all, ""), "a/x.jsonl a.jsonl b.jsonl");
        assert_eq!(of(&["dataset_info.json", "x.json"], "train"), "x.json");
        let evaluation = choose(
            &directories.map(str::to_owned),
            &Card::default(),
            &source("", ""),
            "data.evaluation.0",
        );
        assert!(matches!(
            evaluation,
            Err(Unchosen::Refused { key: "split", .. })
        ));
    }

    #[test]
    fn a_config_without_a_card_is_a_directory() {
        let files = ["en/train.jsonl", "en/test.jsonl", "fr/train.jsonl"];
        let of = |config: &str| chosen(&files, "", &source(config, ""));
        assert_eq!(of("en"), "en/train.jsonl");
        assert_eq!(of("default"), "en/train.jsonl fr/train.jsonl");
        insta::assert_snapshot!(of("de"), @"data.train.0.config: acme/chats has no config `de`: no README.md lists configs, and no directory has that name; remove the config, or correct it");
        // Compressed lines, of which other directories have no word of a split.
        let compressed = [
            "base/test.jsonl.gz",
            "base/train.jsonl.gz",
            "red/red.jsonl.gz",
        ];
        let of = |config: &str| chosen(&compressed, "", &source(config, "train"));
        assert_eq!(
            (of("base"), of("")),
            (compressed[1].to_owned(), compressed[1].to_owned())
        );
        // The hub's own Parquet files have a directory for each config and split.
        let converted = [
            "default/train/0000.parquet",
            "en/train/0000.parquet",
            "en/train/0001.parquet",
            "en/partial-test/0000.parquet",
        ];
        let of = |config: &str, split: &str| chosen(&converted, "", &source(config, split));
        assert_eq!(of("", ""), "default/train/0000.parquet");
        assert_eq!(of("en", ""), "en/train/0000.parquet en/train/0001.parquet");
        assert_eq!(of("en", "partial-test"), "en/partial-test/0000.parquet");
        insta::assert_snapshot!(chosen(&converted[1..], "", &source("", "test")), @"data.train.0.split: acme/chats has no split `test`, but partial-test, train; name one of its splits");
    }

    #[test]
    fn data_in_other_formats_and_scripts_are_unread() {
        let of = |files: &[&str]| chosen(files, "", &source("", ""));
        let refusals = [
            of(&["train.arrow", "test.jsonl"]),
            of(&["train.csv", "README.md"]),
            of(&["chats.py", "data/train.jsonl"]),
            of(&["README.md", "a.png"]),
        ];
        insta::assert_snapshot!(refusals.join("\n"), @"
        data.train.0.path: acme/chats has no data in a format that is read: they are in train.arrow; write them as .jsonl or .parquet files, and name the directory of these
        data.train.0.path: acme/chats has no data in a format that is read: they are in train.csv; write them as .jsonl or .parquet files, and name the directory of these
        data.train.0.path: acme/chats has no data in a format that is read: the script chats.py makes them; write them as .jsonl or .parquet files, and name the directory of these
        data.train.0.path: acme/chats has no data in a format that is read: it has no file of data; write them as .jsonl or .parquet files, and name the directory of these
        ");
        // A card decides before a script, and the recipe's format before the most frequent one.
        let card = "---\nconfigs:\n- {config_name: a, data_files: data/*}\n---\n";
        let files = [
            "chats.py",
            "data/a.jsonl",
            "data/b.parquet",
            "data/c.parquet",
        ];
        assert_eq!(
            chosen(&files, card, &source("", "")),
            "data/b.parquet data/c.parquet"
        );
        let lines = DataSource {
            format: Some(DataFormat::Jsonl),
            ..source("", "")
        };
        assert_eq!(chosen(&files, card, &lines), "data/a.jsonl");
    }

    #[test]
    fn a_snapshot_without_its_listing_is_judged_by_its_shards() {
        let place = tempfile::tempdir().unwrap();
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let folder = place.path().join("datasets--acme--chats");
        let snapshot = folder.join("snapshots").join(commit);
        let write = |name: &str| {
            let path = snapshot.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "{}").unwrap();
        };
        let held = |split: &str| held(&snapshot, &source("", split), "data.train.0");
        write("data/train-00000-of-00002.jsonl");
        assert_eq!((held(""), held("test")), (Held::Less, Held::Less));
        write("data/train-00001-of-00002.jsonl");
        assert_eq!((held(""), held("test")), (Held::All, Held::Less));
        std::fs::create_dir(folder.join(".listings")).unwrap();
        let listing = folder.join(".listings").join(commit);
        std::fs::write(&listing, "data/train-00000-of-00002.jsonl\ndata/test.jsonl").unwrap();
        assert_eq!(held(""), Held::All);
        std::fs::write(
            &listing,
            "data/train-more.jsonl\ndata/train-00000-of-00002.jsonl",
        )
        .unwrap();
        assert_eq!(held("train-more"), Held::Less);
        std::fs::write(&listing, "chats.py\nREADME.md").unwrap();
        assert_eq!(held(""), Held::Unread);
    }
}
