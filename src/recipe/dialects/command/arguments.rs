//! Parses `--key value` arguments into a tree, as `HfArgumentParser` and `argparse` do.
//!
//! Source: transformers 5.23.0 `hf_argparser.py`: `--key value`, `--key=value`, dashes for
//! underscores, `--flag` for true and `--no_flag` for false, lists as several values, mappings as
//! JSON; the last value of a repeated key counts. After a YAML file the handbook's older parser takes `key=value`
//! without dashes, too (shenao-zhang/SELM 0ba546a `src/alignment/configs.py`, `parse_yaml_and_args`).

use std::collections::{HashMap, HashSet};

use crate::recipe::dialects::handbook::{is_switch, keys};
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::{Entry, Node, Value};
use crate::recipe::syntax::shell::word::{Word, is_long_option};
use crate::recipe::syntax::source::{FileId, Span};
use crate::recipe::syntax::yaml;

pub(crate) struct Arguments {
    /// Arguments with a key, as a mapping.
    pub root: Node,
    pub loose: Vec<Word>,
    /// The keys with unresolved values.
    pub unresolved: HashSet<String>,
}

/// Parses the words of a command's arguments.
pub(crate) fn tree(words: &[Word], span: Span, diagnostics: &mut Vec<Diagnostic>) -> Arguments {
    // A map finds repeated keys in constant time, since a command may have thousands of arguments.
    let mut entries: Vec<Entry> = Vec::new();
    let mut value_sources: HashMap<String, usize> = HashMap::new();
    let mut loose = Vec::new();
    let mut unresolved = HashSet::new();
    // Words after `--` are neither options nor values of an earlier option.
    let mut parts = words.splitn(2, |word| word.text == "--");
    let mut words = parts.next().unwrap_or_default().iter().peekable();
    while let Some(word) = words.next() {
        let option = word.option().filter(|_| is_long_option(&word.text));
        let option = option.or_else(|| {
            let assignment = word.assignment()?;
            let is_key = keys::is_known(assignment.name) && loose.iter().any(names_a_yaml);
            is_key.then(|| (assignment.name.to_owned(), Some(assignment.value)))
        });
        let Some((mut name, tied)) = option else {
            loose.push(word.clone());
            continue;
        };
        // tyro and jsonargparse put a group before a field: `--training_args.per_device_train_batch_size`.
        if let Some((_, field)) = name.rsplit_once('.')
            && keys::kind_in_training(field).is_some()
        {
            name = field.to_owned();
        }
        let mut values: Vec<Word> = tied.into_iter().collect();
        if values.is_empty() {
            while let Some(value) = words.next_if(|word| !is_long_option(&word.text)) {
                values.push(value.clone());
            }
        }
        // A switch takes at most one value, so further words are positional.
        if is_switch(&name) && values.len() > 1 {
            loose.extend(values.drain(1..));
        }
        let resolved = values.iter().all(|value| value.unresolved.is_empty());
        let node = match values.as_slice() {
            [] => match name.strip_prefix("no_").filter(|name| is_switch(name)) {
                Some(positive) if !is_switch(&name) => {
                    name = positive.to_owned();
                    Node::plain("false", word.span)
                }
                _ => Node::plain("true", word.span),
            },
            [one] => scalar(&name, one, diagnostics),
            several => {
                let values = several.iter().map(|v| scalar(&name, v, diagnostics));
                Node::sequence(values.collect(), several[0].span)
            }
        };
        if resolved {
            unresolved.remove(&name)
        } else {
            unresolved.insert(name.clone())
        };
        let entry = Entry {
            name,
            name_span: word.span,
            value: node,
        };
        match value_sources.get(&entry.name) {
            Some(&at) => entries[at] = entry,
            None => {
                value_sources.insert(entry.name.clone(), entries.len());
                entries.push(entry);
            }
        }
    }
    loose.extend(parts.flatten().cloned());
    let root = Node {
        value: Value::Mapping(entries),
        ..Node::mapping(span)
    };
    Arguments {
        root,
        loose,
        unresolved,
    }
}

/// The arguments of programs that are not read, as a mapping: options, and the overrides of Hydra.
pub(crate) fn unread(words: &[Word], span: Span) -> Node {
    let mut root = options(words, span);
    root.overlay(beside_options(words, span));
    root
}

/// The options up to `--`.
fn options(words: &[Word], span: Span) -> Node {
    let options = words.iter().filter(|word| !is_override(word)).cloned();
    tree(&options.collect::<Vec<_>>(), span, &mut Vec::new()).root
}

/// What is not among the options of a program itself: the options of the command that it starts after `--`, and the
/// overrides of Hydra, `KEY=VALUE` and `++KEY=VALUE`.
pub(crate) fn beside_options(words: &[Word], span: Span) -> Node {
    let mut root = Node::mapping(span);
    for started in words.split(|word| word.text == "--").skip(1) {
        root.overlay(options(started, span));
    }
    for word in words.iter().filter(|word| is_override(word)) {
        if let Some((name, value)) = word.text.trim_start_matches('+').split_once('=') {
            root.set(name, word.span, Node::argument(value, word.span));
        }
    }
    root
}

fn is_override(word: &Word) -> bool {
    !word.text.starts_with('-') && word.text.contains('=')
}

/// The options in the text of a script, whatever command they belong to: also those that a variable or a here-document
/// holds. Those of inference servers are left out, since they do not size the training.
pub(crate) fn of_text(text: &str, file: FileId) -> Node {
    const SERVERS: [&str; 3] = ["vllm", "sglang", "lmdeploy"];
    let span = Span::of(text, 0..0, file);
    let mut root = Node::mapping(span);
    let mut words: Vec<Word> = Vec::new();
    let mut at = 0;
    for (number, line) in (1..).zip(text.split_inclusive('\n')) {
        let (begin, code) = (at, line.trim_end());
        at += line.len();
        if code.trim_start().starts_with('#') {
            continue;
        }
        let of_word = |c: char| !c.is_whitespace() && !"\"'`;()\\".contains(c);
        let mut rest = 0;
        while let Some(start) = code[rest..].find(of_word).map(|start| rest + start) {
            let length = code[start..].find(|c| !of_word(c));
            rest = length.map_or(code.len(), |length| start + length);
            let span = Span {
                file,
                start: begin + start,
                end: begin + rest,
                line: number,
                column: u32::try_from(code[..start].chars().count() + 1).unwrap_or(u32::MAX),
            };
            words.push(Word::new(&code[start..rest], span, rest - start));
        }
        if code.ends_with('\\') && at < text.len() {
            continue;
        }
        let serves = |word: &Word| SERVERS.iter().any(|name| word.text.contains(name));
        // Without options, `NAME=VALUE` is a shell's variable.
        let is_option = |word: &Word| is_long_option(&word.text) || word.text.contains('.');
        if !words.iter().any(serves) && words.iter().any(is_option) {
            words.retain(|word| is_option(word) || !word.text.contains('='));
            root.overlay(unread(&words, span));
        }
        words.clear();
    }
    root
}

fn names_a_yaml(word: &Word) -> bool {
    word.text.ends_with(".yaml") || word.text.ends_with(".yml")
}

/// Parses a value of an option: JSON if it starts with a bracket, else a scalar. The value of a text field is
/// text (`--run_name "[dpo] a"`), and so is that of an unknown option that is no JSON. Every node of a JSON
/// value has the span of its word, since the shell's quotes shift the offsets inside.
fn scalar(name: &str, word: &Word, diagnostics: &mut Vec<Diagnostic>) -> Node {
    if !word.text.starts_with(['{', '[']) {
        return Node::argument(&word.text, word.span);
    }
    let kind = keys::agreed(name);
    let mut problems = Vec::new();
    let parsed = yaml::parse(&word.text, word.span.file, &mut problems);
    if kind == Some(keys::Kind::Str) || (kind.is_none() && !problems.is_empty()) {
        return Node::string(&word.text, word.span);
    }
    for mut problem in problems {
        problem.span = Some(word.span);
        diagnostics.push(problem);
    }
    let mut node = parsed.unwrap_or_else(|| Node::string(&word.text, word.span));
    node.put_at(word.span);
    node
}
