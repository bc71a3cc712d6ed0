//! Changes one value of a YAML or JSON text and keeps every other byte.
//!
//! The reader's spans say where the value is. Every edited text is parsed again, and must equal the
//! original except for that value. Anything that could carry the change elsewhere ends in a refusal,
//! never in another recipe.

use super::EmitError;
use crate::recipe::syntax::diagnostic::Severity;
use crate::recipe::syntax::node::{Entry, Node, joined};
use crate::recipe::syntax::source::{Sources, Span};
use crate::recipe::syntax::{json, yaml};

/// The refusal of a text that cannot be changed in place.
pub(super) fn refused(key: &str, value: &str) -> EmitError {
    EmitError(format!(
        "`{key}` cannot be set to {value} without changing other values (write the value there by hand)"
    ))
}

/// The grammar of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Syntax {
    /// YAML or JSON.
    Yaml,
    /// JSON with comments, which DeepSpeed reads.
    Commented,
}

impl Syntax {
    /// The syntax of a DeepSpeed config: JSON, which YAML contains, or JSON with comments.
    pub fn of_deepspeed(text: &str) -> Syntax {
        match json::problem(text) {
            None => Syntax::Yaml,
            Some(_) => Syntax::Commented,
        }
    }

    fn parse(self, text: &str) -> Option<Node> {
        let mut sources = Sources::default();
        let file = sources.add("", "");
        let mut problems = Vec::new();
        let root = match self {
            Syntax::Yaml => yaml::parse(text, file, &mut problems),
            Syntax::Commented => yaml::parse(&json::without_comments(text), file, &mut problems),
        };
        root.filter(|_| problems.iter().all(|p| p.severity != Severity::Error))
    }

    /// The text with `value` at a dotted path. Replaces the value there, or else adds a new key to
    /// the parent mapping, after `beside` where that key exists.
    pub fn set(
        self,
        text: &str,
        path: &str,
        value: &str,
        beside: &str,
    ) -> Result<String, EmitError> {
        self.place(text, (path, value), beside, (path, value))
    }

    /// As [`Self::set`] for `edit`, a path and its new text. Checks that `arrived`, a path and its value, follows.
    fn place(
        self,
        text: &str,
        edit: (&str, &str),
        beside: &str,
        arrived: (&str, &str),
    ) -> Result<String, EmitError> {
        let (path, new) = edit;
        let root = self.parse(text);
        let edits = [
            root.as_ref()
                .and_then(|root| replaced(text, root, path, new)),
            root.as_ref()
                .and_then(|root| inserted(text, root, path, new, beside)),
            // Where `beside` is merged from elsewhere.
            root.as_ref()
                .and_then(|root| inserted(text, root, path, new, "")),
        ];
        let mut edits = edits.into_iter().flatten();
        edits
            .find(|edited| self.changes_only(text, edited, path, arrived))
            .ok_or_else(|| refused(arrived.0, arrived.1))
    }

    /// Sets a key of a mapping at the top level, and adds the mapping if it is missing.
    pub fn set_in(
        self,
        text: &str,
        mapping: &str,
        key: &str,
        value: &str,
    ) -> Result<String, EmitError> {
        let path = format!("{mapping}.{key}");
        let root = self.parse(text);
        let present = root.as_ref().and_then(|root| root.get(mapping));
        if present.is_some_and(|present| present.text() != Some("null")) {
            return self.set(text, &path, value, "");
        }
        let whole = format!("{{\"{key}\": {value}}}");
        self.place(text, (mapping, &whole), "", (&path, value))
    }

    /// The whole number at a dotted path.
    pub fn number(self, text: &str, path: &str) -> Option<u64> {
        self.parse(text)?.get_path(path)?.text()?.parse().ok()
    }

    /// Whether two texts have the same content except at a path, and the second has `arrived`, a path and its value.
    fn changes_only(self, before: &str, after: &str, path: &str, arrived: (&str, &str)) -> bool {
        let (Some(mut before), Some(mut after)) = (self.parse(before), self.parse(after)) else {
            return false;
        };
        let (place, value) = arrived;
        let arrived = after.get_path(place).and_then(Node::text) == Some(value);
        before.remove_path(path);
        after.remove_path(path);
        arrived && before.same_value(&after)
    }
}

/// [`Syntax::set`] of a YAML or JSON text.
pub(super) fn set(text: &str, path: &str, value: &str, beside: &str) -> Result<String, EmitError> {
    Syntax::Yaml.set(text, path, value, beside)
}

/// [`Syntax::number`] of a YAML or JSON text.
pub(super) fn number(text: &str, path: &str) -> Option<u64> {
    Syntax::Yaml.number(text, path)
}

/// The single value at a dotted path of a YAML or JSON text; `None` for null and for an empty
/// value.
pub(super) fn text(text: &str, path: &str) -> Option<String> {
    let root = Syntax::Yaml.parse(text)?;
    let found = root.get_path(path)?.text()?;
    (!["", "null", "~"].contains(&found)).then(|| found.to_owned())
}

/// The dotted path of the value at `span` whose path is the end of `key`. `None` unless exactly
/// one path fits.
pub(super) fn path_at(text: &str, span: Span, key: &str) -> Option<String> {
    let root = Syntax::Yaml.parse(text)?;
    let mut found = Vec::new();
    paths_at(&root, span, "", &mut found);
    let fits = |path: &String| {
        let before = key.strip_suffix(path.as_str());
        before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
    };
    let mut fitting = found.into_iter().filter(fits);
    fitting.next().filter(|_| fitting.next().is_none())
}

fn paths_at(node: &Node, span: Span, path: &str, found: &mut Vec<String>) {
    for entry in node.entries().unwrap_or_default() {
        let path = joined(path, &entry.name);
        let here = entry.value.span;
        if (here.start, here.end) == (span.start, span.end) {
            found.push(path);
        } else {
            paths_at(&entry.value, span, &path, found);
        }
    }
}

/// The mapping that a path ends in, and the entry where it exists.
fn find<'n>(root: &'n Node, path: &str) -> Option<(&'n Node, Option<&'n Entry>)> {
    let (parent, name) = match path.rsplit_once('.') {
        Some((parent, name)) => (root.get_path(parent)?, name),
        None => (root, path),
    };
    let entry = parent.entries()?.iter().find(|entry| entry.name == name);
    Some((parent, entry))
}

fn replaced(text: &str, root: &Node, path: &str, value: &str) -> Option<String> {
    let entry = find(root, path)?.1?;
    entry.value.text()?;
    let after_key = entry.name_span.end;
    let (start, end) = match text.get(after_key..entry.value.span.start) {
        // An anchor may lie between the two.
        Some(between)
            if between.trim_start().starts_with(':') && !entry.value.text()?.is_empty() =>
        {
            (entry.value.span.start, entry.value.span.end)
        }
        // An empty value.
        _ => {
            let rest = text.get(after_key..)?;
            let colon = after_key + rest.find(':')? + 1;
            let after = text.get(colon..)?;
            let blank = after.len() - after.trim_start_matches([' ', '\t']).len();
            let token = after[blank..]
                .split([' ', '\t', '\r', '\n', ',', '}'])
                .next()?;
            let token = token.strip_prefix('#').map_or(token, |_| "");
            match token {
                "" => return Some(splice(text, colon, colon, &format!(" {value}"))),
                token => (colon + blank, colon + blank + token.len()),
            }
        }
    };
    Some(splice(
        text,
        start,
        end,
        &in_quotes_of(text.get(start..end)?, value),
    ))
}

/// `value` in the quotes of the text that it replaces.
pub(super) fn in_quotes_of(before: &str, value: &str) -> String {
    match before.chars().next() {
        Some(quote @ ('"' | '\'')) => format!("{quote}{value}{quote}"),
        _ => value.to_owned(),
    }
}

/// The text with `with` in place of the bytes from `start` to `end`.
pub(super) fn splice(text: &str, start: usize, end: usize, with: &str) -> String {
    format!("{}{with}{}", &text[..start], &text[end..])
}

fn inserted(text: &str, root: &Node, path: &str, value: &str, beside: &str) -> Option<String> {
    let (parent, _) = find(root, path)?;
    let name = path.rsplit('.').next().unwrap_or(path);
    let entries = parent.entries()?;
    if text.get(parent.span.start..)?.starts_with('{') {
        return in_braces(text, parent, entries, name, value);
    }
    // Inserts after a line of this mapping that holds a single value, because the end of such a
    // line is known.
    let is_one_line = |entry: &&Entry| {
        let line = text.get(entry.name_span.end..entry.value.span.end);
        entry.value.text().is_some() && line.is_some_and(|line| !line.contains('\n'))
    };
    let near = entries
        .iter()
        .find(|entry| entry.name == beside)
        .filter(is_one_line);
    let entry = near.or_else(|| entries.iter().rfind(is_one_line))?;
    let start = text[..entry.name_span.start]
        .rfind('\n')
        .map_or(0, |at| at + 1);
    let indent = &text[start..entry.name_span.start];
    if !indent.trim_matches([' ', '\u{feff}']).is_empty() {
        return None;
    }
    let indent = indent.trim_start_matches('\u{feff}');
    let from = entry.value.span.end.max(entry.name_span.end);
    let line = format!("{indent}{name}: {value}");
    Some(match text[from..].find('\n') {
        Some(at) => {
            let end = from + at + 1;
            let line_end = if text[..end].ends_with("\r\n") {
                "\r\n"
            } else {
                "\n"
            };
            splice(text, end, end, &format!("{line}{line_end}"))
        }
        None => format!("{text}\n{line}"),
    })
}

/// Adds a key at the end of a mapping in braces, with the spacing of its first key.
fn in_braces(
    text: &str,
    parent: &Node,
    entries: &[Entry],
    name: &str,
    value: &str,
) -> Option<String> {
    let open = parent.span.start + 1;
    // Merged keys are in another mapping.
    let braces = parent.span.start..parent.span.end;
    let mut own = entries
        .iter()
        .filter(|entry| braces.contains(&entry.name_span.start));
    let Some(first) = own.next() else {
        let (place, comma) = match entries {
            [] => (open, ""),
            _ => (braces.end.checked_sub(1)?, ", "),
        };
        return Some(splice(
            text,
            place,
            place,
            &format!("{comma}\"{name}\": {value}"),
        ));
    };
    let last = own.next_back().unwrap_or(first);
    let quoted = text.get(first.name_span.start..)?.starts_with('"');
    let name = if quoted {
        format!("\"{name}\"")
    } else {
        name.to_owned()
    };
    let before_first = text.get(open..first.name_span.start)?;
    let space = if before_first.contains('\n') {
        before_first
    } else {
        " "
    };
    let end = last.value.span.end;
    Some(splice(text, end, end, &format!(",{space}{name}: {value}")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn edited(text: &str, path: &str, value: &str) -> String {
        set(text, path, value, "per_device_batch_size")
            .unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    #[test]
    fn a_key_of_a_missing_mapping_is_set_with_the_mapping() {
        for (before, after) in [
            ("{}", "{\"c\": {\"u\": true}}"),
            (
                "{\"a\": {\"b\": 1}}",
                "{\"a\": {\"b\": 1}, \"c\": {\"u\": true}}",
            ),
            ("a: 1\n", "a: 1\nc: {\"u\": true}\n"),
            ("{\"c\": {\"t\": 1}}", "{\"c\": {\"t\": 1, \"u\": true}}"),
            ("{\"c\": null}", "{\"c\": {\"u\": true}}"),
            ("{\"c\": {\"u\": false}}", "{\"c\": {\"u\": true}}"),
            ("c:\n  t: 1\n", "c:\n  t: 1\n  u: true\n"),
        ] {
            let edited = Syntax::Yaml.set_in(before, "c", "u", "true");
            assert_eq!(edited.unwrap(), after);
        }
        let commented = Syntax::Commented.set_in("{\n  \"a\": 1 // one\n}", "c", "u", "true");
        assert!(commented.unwrap().contains("{\"u\": true}"));
        assert!(Syntax::Yaml.set_in("c: 1\n", "c", "u", "true").is_err());
    }

    #[test]
    fn only_the_value_changes() {
        for (before, path, after) in [
            ("a: 16 # why\nb: x\n", "a", "a: 8 # why\nb: x\n"),
            ("a:   \"16\"\r\nb: x\r\n", "a", "a:   \"8\"\r\nb: x\r\n"),
            (
                "{\"a\": 16,\n \"b\": {\"c\": 1}}",
                "b.c",
                "{\"a\": 16,\n \"b\": {\"c\": 8}}",
            ),
            ("x: {a: 16, b: 2}\n", "x.a", "x: {a: 8, b: 2}\n"),
            ("a: &n 16\n", "a", "a: &n 8\n"),
            ("a:\nb: 1\n", "a", "a: 8\nb: 1\n"),
            ("a: # empty\nb: 1\n", "a", "a: 8 # empty\nb: 1\n"),
            ("\"a\" : 16\n", "a", "\"a\" : 8\n"),
            ("b: &n 16\na: *n # why\n", "a", "b: &n 16\na: 8 # why\n"),
        ] {
            assert_eq!(edited(before, path, "8"), after);
        }
    }

    #[test]
    fn a_missing_key_is_added_to_its_parent_mapping() {
        for (before, path, after) in [
            (
                "per_device_batch_size: 4 # m\nz: 1\n",
                "a",
                "per_device_batch_size: 4 # m\na: 8\nz: 1\n",
            ),
            ("z: 1", "a", "z: 1\na: 8"),
            ("t: |\n  x\nz: 1\r\n", "a", "t: |\n  x\nz: 1\r\na: 8\r\n"),
            (
                "s:\n  b:\n    per_device_batch_size: 4\n  z: 1\n",
                "s.b.a",
                "s:\n  b:\n    per_device_batch_size: 4\n    a: 8\n  z: 1\n",
            ),
            ("{\"b\": 1}", "a", "{\"b\": 1, \"a\": 8}"),
            (
                "{\n  \"b\": [1]\n}\n",
                "a",
                "{\n  \"b\": [1],\n  \"a\": 8\n}\n",
            ),
        ] {
            assert_eq!(edited(before, path, "8"), after);
        }
    }

    #[test]
    fn a_merged_key_is_set_where_it_is_merged() {
        let base = "x: &b {a: 16, per_device_batch_size: 2}\n";
        for (before, path, after) in [
            (
                "y:\n  <<: *b\n  z: 1\n",
                "y.a",
                "y:\n  <<: *b\n  z: 1\n  a: 8\n",
            ),
            ("y: {<<: *b, z: 1}\n", "y.a", "y: {<<: *b, z: 1, a: 8}\n"),
            ("y: {<<: *b}\n", "y.a", "y: {<<: *b, \"a\": 8}\n"),
            ("<<: *b\nz: 1\n", "a", "<<: *b\nz: 1\na: 8\n"),
        ] {
            assert_eq!(
                edited(&format!("{base}{before}"), path, "8"),
                format!("{base}{after}")
            );
        }
    }

    #[test]
    fn a_span_resolves_to_the_path_with_the_given_suffix() {
        let text = "m:\n  batch_size: &n 16\nbatch_size: 8\n";
        let root = Syntax::Yaml.parse(text).unwrap();
        let found = |path: &str, key: &str| {
            let span = root.get_path(path).unwrap().span;
            path_at(text, span, key)
        };
        assert_eq!(
            found("batch_size", "model.batch_size").as_deref(),
            Some("batch_size")
        );
        assert_eq!(
            found("m.batch_size", "m.batch_size").as_deref(),
            Some("m.batch_size")
        );
        assert_eq!(found("batch_size", "model.size"), None);
        assert_eq!(
            found("m.batch_size", "x.batch_size"),
            None,
            "its parent is another key"
        );
    }

    #[test]
    fn json_keeps_its_comments() {
        let text = "{\n  // one\n  \"a\": 16 // why\n}\n";
        let edited = Syntax::Commented.set(text, "a", "8", "").unwrap();
        assert_eq!(edited, text.replace("16", "8"));
        let text = "{\n  \"a\": 16, # why\n  \"s\": {\"b\": 1}, /* é */\n}\n";
        let edited = Syntax::Commented.set(text, "c", "8", "a").unwrap();
        assert_eq!(edited, text.replace("1},", "1},\n  \"c\": 8,"));
    }

    #[test]
    fn an_edit_of_a_shared_value_is_refused() {
        let error = set("a: &n 16\nb: *n\n", "a", "8", "").unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("`a` cannot be set to 8 without")
        );
        assert!(
            set("x: 1\n", "y.a", "8", "").is_err(),
            "the parent mapping is missing"
        );
    }

    proptest! {
        #[test]
        fn any_edit_that_succeeds_changes_one_value(text in "[ab:{}\"'\n,&*#0-9 -]{0,40}", value in 1..99_u8) {
            let value = value.to_string();
            if let Ok(edited) = set(&text, "a", &value, "b") {
                prop_assert!(Syntax::Yaml.changes_only(&text, &edited, "a", ("a", &value)));
            }
        }
    }
}
