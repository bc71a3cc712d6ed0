//! The entries of a defaults list: `_self_`, `base_model`, `model: llama`, `override /model: llama`,
//! `optional model@package: [a, b]`.
//!
//! Source: Hydra 1.3, `_internal/config_repository.py` (`_extract_defaults_list`,
//! `_create_defaults_list`), `core/default_element.py`.

use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::cut;

/// One entry of a defaults list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Default {
    /// The file or group that it names.
    pub what: What,
    /// The package after `@`.
    pub package: Option<String>,
    /// `optional`: the file may be missing.
    pub optional: bool,
    pub span: Span,
}

impl Default {
    /// `_self_`, for a list that lacks it.
    pub fn this(span: Span) -> Default {
        Default {
            what: What::This,
            package: None,
            optional: false,
            span,
        }
    }
}

/// The target of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum What {
    /// The file that contains the list.
    This,
    /// A file, without its extension; a leading `/` means from the root of the tree.
    File(String),
    /// Options of a group.
    Group {
        /// The group; a leading `/` means from the root of the tree.
        group: String,
        /// The chosen options; empty for `null`.
        options: Choice,
    },
    /// `override GROUP: OPTION` for a group of another list.
    Override { group: String, options: Choice },
}

/// The choice in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Choice {
    /// `???`: another list or the command line must choose.
    Missing,
    /// One option, several, or none.
    Options(Vec<String>),
}

impl Choice {
    /// The choice of a value in a list or on the command line; `None` if it is of another type.
    pub fn of(node: &Node) -> Option<Choice> {
        match &node.value {
            Value::Mapping(_) => None,
            Value::Sequence(items) => {
                let names = items.iter().map(|item| match Choice::of(item)? {
                    Choice::Options(names) if names.len() == 1 => names.into_iter().next(),
                    _ => None,
                });
                Some(Choice::Options(names.collect::<Option<_>>()?))
            }
            Value::Scalar(scalar) => Some(match node.resolve(Schema::OmegaConf)? {
                Resolved::Missing => Choice::Missing,
                Resolved::Null => Choice::Options(Vec::new()),
                _ => Choice::Options(vec![scalar.text.clone()]),
            }),
        }
    }
}

/// The entries of a defaults list, or the error of one.
pub(super) fn parse(list: &Node) -> Result<Vec<Default>, (Span, String)> {
    let Some(items) = list.items() else {
        let message = format!("`defaults` takes a list, this is {}", list.kind());
        return Err((list.span, message));
    };
    let mut found = Vec::new();
    for item in items {
        found.push(entry(item)?);
    }
    let mut selves = found.iter().filter(|d| d.what == What::This);
    if let Some(second) = selves.nth(1) {
        return Err((second.span, "`_self_` is in the list twice".to_owned()));
    }
    Ok(found)
}

fn entry(item: &Node) -> Result<Default, (Span, String)> {
    let wrong = |message: &str| Err((item.span, message.to_owned()));
    let plain = |what, package, optional| {
        Ok(Default {
            what,
            package,
            optional,
            span: item.span,
        })
    };
    match &item.value {
        Value::Sequence(_) => wrong("an entry of `defaults` is a list"),
        Value::Scalar(scalar) => {
            let (optional, _, name) = keywords(&scalar.text);
            let (name, package) = packaged(name);
            match name {
                "" => wrong("an entry of `defaults` is empty"),
                "_self_" => plain(What::This, None, false),
                name => plain(What::File(name.to_owned()), package, optional),
            }
        }
        Value::Mapping(entries) => {
            let [entry] = entries.as_slice() else {
                return wrong("an entry of `defaults` has several groups: write one `-` for each");
            };
            let (optional, replaces, name) = keywords(&entry.name);
            let (group, package) = packaged(name);
            let Some(options) = Choice::of(&entry.value) else {
                return wrong(
                    "a group of `defaults` takes the name of an option, or a list of names",
                );
            };
            let group = group.to_owned();
            let what = match replaces {
                true => What::Override { group, options },
                false => What::Group { group, options },
            };
            Ok(Default {
                what,
                package,
                optional,
                span: entry.value.span,
            })
        }
    }
}

/// Whether the keywords before a name are `optional` and `override`, and the name.
fn keywords(text: &str) -> (bool, bool, &str) {
    let (mut optional, mut replaces) = (false, false);
    let mut rest = text.trim();
    loop {
        if let Some(next) = rest.strip_prefix("optional ") {
            optional = true;
            rest = next.trim_start();
        } else if let Some(next) = rest.strip_prefix("override ") {
            replaces = true;
            rest = next.trim_start();
        } else {
            return (optional, replaces, rest);
        }
    }
}

fn packaged(name: &str) -> (&str, Option<String>) {
    let (name, package) = cut(name, '@');
    (name, package.map(str::to_owned))
}

/// The package in a file's header: `# @package model`.
pub(super) fn package_header(text: &str) -> Option<String> {
    let comments = text.lines().map(str::trim);
    comments
        .take_while(|line| line.is_empty() || line.starts_with('#'))
        .find_map(|line| {
            let rest = line.trim_start_matches('#').trim_start();
            let package = rest.strip_prefix("@package")?;
            let package = package
                .starts_with(char::is_whitespace)
                .then_some(package)?;
            Some(package.trim().to_owned())
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
        let found = list(
            "- _self_\n- base_model\n- model: ???\n- optional loss@over: [a, b]\n- override /x: null\n",
        )
        .unwrap();
        let what: Vec<&What> = found.iter().map(|d| &d.what).collect();
        let group = |name: &str| name.to_owned();
        let chosen =
            |names: &[&str]| Choice::Options(names.iter().map(|name| (*name).to_owned()).collect());
        assert_eq!(what[0], &What::This);
        assert_eq!(what[1], &What::File(group("base_model")));
        let (group_of, options) = (group("model"), Choice::Missing);
        assert_eq!(
            what[2],
            &What::Group {
                group: group_of,
                options
            }
        );
        let (group_of, options) = (group("loss"), chosen(&["a", "b"]));
        assert_eq!(
            what[3],
            &What::Group {
                group: group_of,
                options
            }
        );
        assert_eq!(
            (found[3].optional, found[3].package.as_deref()),
            (true, Some("over"))
        );
        let (group_of, options) = (group("/x"), chosen(&[]));
        assert_eq!(
            what[4],
            &What::Override {
                group: group_of,
                options
            }
        );
    }

    #[test]
    fn invalid_entries_are_refused() {
        for (text, word) in [
            ("model: llama\n", "takes a list"),
            ("- _self_\n- _self_\n", "twice"),
            ("- {a: b, c: d}\n", "several groups"),
            ("- [a]\n", "is a list"),
            ("- model: {a: b}\n", "name of an option"),
        ] {
            assert!(list(text).unwrap_err().contains(word), "{text}");
        }
    }

    #[test]
    fn a_package_is_read_from_the_first_comments() {
        assert_eq!(
            package_header("# @package _global_\na: 1\n").as_deref(),
            Some("_global_")
        );
        assert_eq!(package_header("\n#@package a.b\n").as_deref(), Some("a.b"));
        assert_eq!(package_header("a: 1\n# @package b\n"), None);
    }
}
