//! Abbreviated options on a command line. argparse takes `--per_device_train_b` for the only option
//! with that prefix, and refuses a prefix of several options.
//!
//! Source: Python 3.11 `argparse.py` (`_get_option_tuples`, `allow_abbrev`); transformers 5.23.0
//! `hf_argparser.py`, which gives every field two options, with underscores and with dashes.

use super::keys::Kind;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::{Node, Value};

/// The fields that an abbreviated option may mean.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Meant<'k> {
    /// No option has this prefix.
    Nothing,
    /// Exactly one option has this prefix.
    One(&'k str),
    /// Several options have this prefix; the two options of one field count as several.
    Several(Vec<&'k str>),
}

/// The fields whose options begin with `option`.
pub(crate) fn meant<'k>(option: &str, fields: impl IntoIterator<Item = &'k str>) -> Meant<'k> {
    let fields = fields.into_iter().filter(|field| field.starts_with(option));
    let found: Vec<&str> = fields.collect();
    match found.as_slice() {
        [] => Meant::Nothing,
        // Up to its first underscore both options of a field are the same.
        [one] if one.find('_').is_none_or(|at| at < option.len()) => Meant::One(one),
        _ => Meant::Several(found),
    }
}

/// Expands the abbreviations of a command. `fields`: all fields of the trainer's parser, whose types `kind_of` knows. The
/// last occurrence counts, as with full names. A text is no abbreviated number but an option of the script itself.
pub(super) fn expand(
    root: &mut Node,
    fields: &[&'static str],
    kind_of: impl Fn(&str) -> Option<Kind>,
    reading: &mut Reading,
) {
    let Some((command, _)) = reading.files.command else {
        return;
    };
    // A program may have an option of this name itself.
    if reading.program.is_strange() {
        return;
    }
    let Value::Mapping(entries) = &mut root.value else {
        return;
    };
    let mut short = Vec::new();
    entries.retain(|entry| {
        let name = entry.name.as_str();
        let typed = entry.name_span.file == command && !fields.contains(&name);
        match meant(name, fields.iter().copied()) {
            Meant::One(field) if typed && may_be(&entry.value, kind_of(field)) => {
                short.push((field, entry.clone()));
            }
            Meant::Several(fields) if typed => {
                let named: Vec<String> = fields.iter().map(|f| format!("`--{f}`")).collect();
                let message = format!(
                    "`--{name}` is a prefix of more than one option: argparse refuses it for {}",
                    named.join(", ")
                );
                let span = Some(entry.name_span);
                reading.error("unknown-key", span, message, "write the option in full");
            }
            _ => return true,
        }
        false
    });
    for (field, entry) in short {
        reading.note(
            "unknown-key",
            Some(entry.name_span),
            format!(
                "`--{}` is read as `--{field}`, as argparse does",
                entry.name
            ),
            "write it in full: in another version several options may have this prefix",
        );
        let entries = root.entries().unwrap_or_default();
        let known = entries.iter().find(|known| known.name == field);
        let later = known.is_some_and(|known| {
            known.name_span.file == command && known.name_span.start > entry.name_span.start
        });
        if !later {
            root.set(field, entry.name_span, entry.value);
        }
    }
}

/// Whether an argument can be of a field's type, which its shell may know.
fn may_be(value: &Node, kind: Option<Kind>) -> bool {
    let text = value.text().unwrap_or_default();
    let is_number = text.contains('$') || text.trim().parse::<f64>().is_ok();
    is_number || !matches!(kind, Some(Kind::Int | Kind::Float))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each result is that of argparse in Python 3.11.
    #[test]
    fn a_unique_prefix_means_its_option() {
        let fields = [
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "output_dir",
            "seed",
            "max_steps",
            "max_grad_norm",
        ];
        for (option, expected) in [
            (
                "per_device_train_b",
                Meant::One("per_device_train_batch_size"),
            ),
            ("output_", Meant::One("output_dir")),
            ("output", Meant::Several(vec!["output_dir"])),
            ("see", Meant::One("seed")),
            ("max_s", Meant::One("max_steps")),
            ("max_", Meant::Several(vec!["max_steps", "max_grad_norm"])),
            ("xyz", Meant::Nothing),
        ] {
            assert_eq!(meant(option, fields), expected, "{option}");
        }
    }
}
