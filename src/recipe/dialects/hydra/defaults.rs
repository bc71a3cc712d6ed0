//! The entries of a defaults list: `_self_`, `base_model`, `model: llama`, `override /model: llama`,
//! `optional model: llama`.
//!
//! Source: Hydra 1.3, `_internal/config_repository.py` (`_extract_defaults_list`,
//! `_create_defaults_list`), `core/default_element.py`.

use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::util::suggest::short;

/// One entry of a defaults list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Default {
    /// The file or group that it names.
    pub what: What,
    /// `optional`: the file may be missing.
    pub optional: bool,
    pub span: Span,
}

/// The target of an entry. A leading `/` of a name means from the root of the tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum What {
    /// `_self_`: the file that contains the list.
    This,
    /// A file, without its extension.
    File(String),
    /// An option of a group.
    Group { group: String, choice: Choice },
    /// `override GROUP: OPTION` for a group of another list.
    Override { group: String, choice: Choice },
}

/// The choice in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Choice {
    /// `???`: another list or the command line must choose.
    Missing,
    /// `null`: no option.
    Nothing,
    Option(String),
}

impl Choice {
    /// The choice of a value in a list or on the command line; `None` if it is of another type.
    pub fn of(node: &Node) -> Option<Choice> {
        Some(match node.resolve(Schema::OmegaConf)? {
            Resolved::Missing => Choice::Missing,
            Resolved::Null => Choice::Nothing,
            _ => Choice::Option(node.text()?.to_owned()),
        })
    }
}

/// The entries of a defaults list, or the error of one.
pub(super) fn parse(list: &Node) -> Result<Vec<Default>, (Span, String)> {
    let Some(items) = list.items() else {
        let message = format!("`defaults` takes a list, this is {}", list.kind());
        return Err((list.span, message));
    };
    let mut found: Vec<Default> = Vec::new();
    for item in items {
        let entry = entry(item).map_err(|message| (item.span, message))?;
        if entry.what == What::This && found.iter().any(|other| other.what == What::This) {
            return Err((entry.span, "`_self_` is in the list twice".to_owned()));
        }
        found.push(entry);
    }
    Ok(found)
}

fn entry(item: &Node) -> Result<Default, String> {
    let (name, value) = match &item.value {
        Value::Sequence(_) => return Err("an entry of `defaults` is a list".to_owned()),
        Value::Scalar(scalar) => (&scalar.text, None),
        Value::Mapping(entries) => match entries.as_slice() {
            [entry] => (&entry.name, Some(&entry.value)),
            _ => {
                let message = "an entry of `defaults` has several groups: write one `-` for each";
                return Err(message.to_owned());
            }
        },
    };
    let (mut name, mut optional, mut replaces) = (name.trim(), false, false);
    loop {
        if let Some(rest) = name.strip_prefix("optional ") {
            (name, optional) = (rest.trim_start(), true);
        } else if let Some(rest) = name.strip_prefix("override ") {
            (name, replaces) = (rest.trim_start(), true);
        } else {
            break;
        }
    }
    if name.is_empty() {
        return Err("an entry of `defaults` is empty".to_owned());
    }
    if name.contains('@') {
        let name = short(name);
        return Err(format!(
            "`{name}` has a package `@…`, which is not supported"
        ));
    }
    let name = name.to_owned();
    let what = match value.map(Choice::of) {
        None if replaces => return Err(format!("`override {}` lacks its option", short(&name))),
        None if name == "_self_" => What::This,
        None => What::File(name),
        Some(Some(choice)) if replaces => What::Override {
            group: name,
            choice,
        },
        Some(Some(choice)) => What::Group {
            group: name,
            choice,
        },
        Some(None) => {
            return Err(format!(
                "the group `{}` of `defaults` takes the name of one option",
                short(&name)
            ));
        }
    };
    Ok(Default {
        what,
        optional,
        span: value.map_or(item.span, |value| value.span),
    })
}

/// The package in a file's header: `# @package _global_`.
pub(super) fn package_header(text: &str) -> Option<&str> {
    let comments = text.lines().map(str::trim);
    comments
        .take_while(|line| line.is_empty() || line.starts_with('#'))
        .find_map(|line| {
            let rest = line.trim_start_matches('#').trim_start();
            let package = rest.strip_prefix("@package")?;
            package
                .starts_with(char::is_whitespace)
                .then(|| package.trim())
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::schema::reading::Reading;

    fn list(text: &str) -> Result<Vec<Default>, String> {
        let mut reading = Reading::default();
        let node = reading.parse("x", text.to_owned()).unwrap();
        parse(&node).map_err(|(_, message)| message)
    }

    #[test]
    fn every_form_of_an_entry_is_read() {
        let text =
            "- _self_\n- base_model\n- model: ???\n- optional loss: a\n- override /x: null\n";
        let found = list(text).unwrap();
        let what: Vec<What> = found.iter().map(|d| d.what.clone()).collect();
        let group = |group: &str, choice| {
            let group = group.to_owned();
            What::Group { group, choice }
        };
        let expected = [
            What::This,
            What::File("base_model".to_owned()),
            group("model", Choice::Missing),
            group("loss", Choice::Option("a".to_owned())),
            What::Override {
                group: "/x".to_owned(),
                choice: Choice::Nothing,
            },
        ];
        assert_eq!(what, expected);
        assert!(found[3].optional && !found[2].optional);
    }

    #[test]
    fn invalid_entries_are_refused() {
        for (text, word) in [
            ("model: llama\n", "takes a list"),
            ("- _self_\n- _self_\n", "twice"),
            ("- {a: b, c: d}\n", "several groups"),
            ("- [a]\n", "is a list"),
            ("- model: {a: b}\n", "name of one option"),
            ("- model: [a, b]\n", "name of one option"),
            ("- model@other: a\n", "`model@other` has a package"),
            ("- override model\n", "lacks its option"),
        ] {
            assert!(list(text).unwrap_err().contains(word), "{text}");
        }
    }

    #[test]
    fn a_package_is_read_from_the_first_comments() {
        assert_eq!(
            package_header("# @package _global_\na: 1\n"),
            Some("_global_")
        );
        assert_eq!(package_header("\n#@package a.b\n"), Some("a.b"));
        assert_eq!(package_header("a: 1\n# @package b\n"), None);
    }
}
