//! `KEY=VALUE` on the command line, and flags that set a native key.
//!
//! A virtual file named `command line` holds both, one a line, so that a message about an override
//! points at it. An unknown key is added, and the dialect's reader refuses it as it does in a file.

use std::collections::BTreeMap;

use super::dialect::RESERVED;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::Schema;
use crate::recipe::syntax::source::{FileId, Position, Sources, Span};
use crate::recipe::syntax::yaml;

/// The name of the virtual file.
pub const COMMAND_LINE: &str = "command line";

/// A command-line flag that sets one native key (`--recipe-gpus 8`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The flag, for messages.
    pub flag: &'static str,
    /// The native path that it sets.
    pub path: &'static str,
    pub value: String,
}

/// Refuses a key that has two different values, in overrides or in an override and a flag. The last one would win in
/// silence.
pub fn refuse_contradictions(
    overrides: &[String],
    settings: &[Setting],
    diagnostics: &mut Vec<Diagnostic>,
) {
    let named = overrides.iter().filter_map(|text| {
        let (key, value) = text.split_once('=')?;
        Some((key, value, text.clone()))
    });
    let of_flags = settings.iter().map(|setting| {
        let shown = format!("{} {}", setting.flag, setting.value);
        (setting.path, setting.value.as_str(), shown)
    });
    let mut seen: BTreeMap<&str, (&str, String)> = BTreeMap::new();
    for (key, value, shown) in of_flags.chain(named) {
        let key = plain(key);
        let Some((first, shown_first)) = seen.get(key) else {
            seen.insert(key, (value, shown));
            continue;
        };
        if !is_same(first, value) {
            diagnostics.push(Diagnostic::error(
                "duplicate-key",
                None,
                format!("`{shown_first}` and `{shown}` contradict each other"),
                "remove one of them",
            ));
        }
    }
}

/// Sets a native key in place of its overrides.
pub fn set(overrides: &mut Vec<String>, key: &str, value: &str) {
    let is_other = |text: &str| {
        text.split_once('=')
            .is_none_or(|(name, _)| plain(name) != key)
    };
    overrides.retain(|text| is_other(text));
    overrides.push(format!("{RESERVED}.{key}={value}"));
}

/// A key without Hydra's `+` and `++`, and a native key without what precedes it.
fn plain(key: &str) -> &str {
    let key = key.trim_start_matches('+');
    let native = key
        .strip_prefix(RESERVED)
        .and_then(|rest| rest.strip_prefix('.'));
    native.unwrap_or(key)
}

/// Whether two values are the same text or number.
fn is_same(one: &str, other: &str) -> bool {
    let number = |text: &str| text.parse::<f64>().ok();
    one == other || number(one).is_some_and(|one| number(other) == Some(one))
}

/// The virtual file with every override and setting; `None` without any.
pub fn add_source(
    sources: &mut Sources,
    overrides: &[String],
    settings: &[Setting],
) -> Option<FileId> {
    if overrides.is_empty() && settings.is_empty() {
        return None;
    }
    let mut text = overrides.join("\n");
    for setting in settings {
        if !text.is_empty() {
            text.push('\n');
        }
        text.push_str(&format!("{}={}", setting.flag, setting.value));
    }
    text.push('\n');
    Some(sources.add(COMMAND_LINE, text))
}

/// Applies every override to the tree. `path_of` turns a key into a path from the tree's root.
pub fn apply(
    root: &mut Node,
    overrides: &[String],
    file: FileId,
    path_of: impl Fn(&str) -> String,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let mut at = Position::START;
    for text in overrides {
        apply_one(root, text, at, file, &path_of, diagnostics);
        at = at.after(text).after("\n");
    }
}

/// Applies one override, which begins at a place of the virtual file.
pub(crate) fn apply_one(
    root: &mut Node,
    text: &str,
    at: Position,
    file: FileId,
    path_of: &impl Fn(&str) -> String,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let Some((key, value)) = text.split_once('=').filter(|(key, _)| !key.is_empty()) else {
        diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            Some(at.span(file, text)),
            format!("`{text}` is not KEY=VALUE"),
            "write the key, `=` and the value without spaces: `max_steps=100`",
        ));
        return;
    };
    let value_at = at.after(key).after("=");
    let key_span = at.span(file, key);
    let path = path_of(key);
    let result = match parse_value(value, value_at, file, diagnostics) {
        Some(_) if path.matches('.').count() >= yaml::MAX_DEPTH => Err((
            format!("the key has more than {} parts", yaml::MAX_DEPTH),
            "no recipe key is nested this deeply".to_owned(),
        )),
        Some(value) => put(root, &path, key_span, value),
        None => Ok(()),
    };
    if let Err((message, help)) = result {
        let problem = Diagnostic::error("unknown-key", Some(key_span), message, help);
        diagnostics.push(problem);
    }
}

/// The settings as a native tree. In the virtual file they follow the overrides.
pub fn settings_tree(overrides: &[String], settings: &[Setting], file: FileId) -> Node {
    let mut at = Position::START;
    for text in overrides {
        at = at.after(text).after("\n");
    }
    let mut tree = Node::mapping(at.span(file, ""));
    for setting in settings {
        let value_at = at.after(setting.flag).after("=");
        let mut value = Node::plain(&setting.value, value_at.span(file, &setting.value));
        value.key = Some(setting.flag.to_owned());
        tree.set_path(setting.path, value);
        at = value_at.after(&setting.value).after("\n");
    }
    tree
}

/// A value. It is YAML if it begins like a YAML collection or string, else one scalar as written,
/// so that `#`, `: ` and Jinja templates need no second layer of quotes.
fn parse_value(
    text: &str,
    at: Position,
    file: FileId,
    diagnostics: &mut Vec<Diagnostic>,
) -> Option<Node> {
    let template = text.starts_with("{%") || text.starts_with("{{");
    if template || !text.starts_with(['[', '{', '"', '\'', '!']) {
        return Some(Node::plain(text, at.span(file, text)));
    }
    let mut problems = Vec::new();
    let mut node = yaml::parse(text, file, &mut problems);
    for diagnostic in &mut problems {
        if let Some(span) = &mut diagnostic.span {
            shift(span, at);
        }
    }
    diagnostics.append(&mut problems);
    if let Some(node) = &mut node {
        node.each_span(&|span| shift(span, at));
    }
    node
}

/// Moves a span of a separately parsed value to the value's place in the virtual file.
fn shift(span: &mut Span, at: Position) {
    if span.line <= 1 {
        span.column += at.column - 1;
    }
    span.line += at.line - 1;
    span.start += at.offset;
    span.end += at.offset;
}

/// Puts a value at a path. Keys may contain dots: the longest matching key wins.
pub(crate) fn put(
    root: &mut Node,
    path: &str,
    span: Span,
    value: Node,
) -> Result<(), (String, String)> {
    if root.is_null(Schema::Core) {
        root.value = Value::Mapping(Vec::new());
    }
    let kind = root.kind();
    let shown = root.text().unwrap_or_default().to_owned();
    match &mut root.value {
        Value::Mapping(entries) => {
            let present = entries
                .iter_mut()
                .filter(|e| {
                    path.strip_prefix(e.name.as_str())
                        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
                })
                .max_by_key(|e| e.name.len());
            if let Some(entry) = present {
                return match path[entry.name.len()..].strip_prefix('.') {
                    None => {
                        entry.name_span = span;
                        entry.value = value;
                        Ok(())
                    }
                    Some(rest) => put(&mut entry.value, rest, span, value),
                };
            }
            let Some((head, rest)) = path.split_once('.') else {
                root.set(path, span, value);
                return Ok(());
            };
            let mut below = Node::mapping(value.span);
            put(&mut below, rest, span, value)?;
            root.set(head, span, below);
            Ok(())
        }
        Value::Sequence(items) => {
            let (head, rest) = path.split_once('.').unwrap_or((path, ""));
            let count = items.len();
            let Some(item) = head.parse().ok().and_then(|i: usize| items.get_mut(i)) else {
                return Err((
                    format!("`{head}` is not an item of a list of {count}"),
                    match count {
                        0 => "the list is empty: set the whole list, `KEY=[…]`".to_owned(),
                        _ => format!("its positions are 0 to {}", count - 1),
                    },
                ));
            };
            if rest.is_empty() {
                *item = value;
                return Ok(());
            }
            put(item, rest, span, value)
        }
        Value::Scalar(_) => Err((
            format!("`{path}` cannot be set: `{shown}` is {kind}"),
            "set the parent key itself, or give it a mapping first".to_owned(),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::schema::reading::Reading;
    use crate::recipe::syntax::scalar::Resolved;

    /// Applies overrides to a text; returns the tree and the problems with their places.
    fn apply_to(text: &str, overrides: &[&str]) -> (Node, Vec<String>) {
        let mut reading = Reading::default();
        let mut root = reading.parse("x.yaml", text.to_owned()).unwrap();
        let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
        let file = add_source(&mut reading.sources, &overrides, &[]).unwrap();
        apply(
            &mut root,
            &overrides,
            file,
            str::to_owned,
            &mut reading.diagnostics,
        );
        let problems = reading
            .diagnostics
            .iter()
            .map(|d| {
                let span = d.span.unwrap();
                assert_eq!(span.file, file);
                format!("{}:{} {} ({})", span.line, span.column, d.message, d.help)
            })
            .collect();
        (root, problems)
    }

    #[test]
    fn overrides_that_contradict_each_other_or_a_flag_are_named() {
        let contradictions = |overrides: &[&str], flag: Option<&str>| {
            let overrides: Vec<String> = overrides.iter().map(|o| (*o).to_owned()).collect();
            let setting = flag.map(|value| Setting {
                flag: "--recipe-gpus",
                path: "batch.gpus",
                value: value.to_owned(),
            });
            let mut diagnostics = Vec::new();
            refuse_contradictions(&overrides, setting.as_slice(), &mut diagnostics);
            let messages = diagnostics.into_iter().map(|d| d.message);
            messages.collect::<Vec<_>>()
        };
        for (overrides, flag, message) in [
            (&["a=1", "b=2", "a=2"][..], None, "`a=1` and `a=2`"),
            (&["++a.b=x", "a.b=y"], None, "`++a.b=x` and `a.b=y`"),
            (
                &["evenkeel.batch.gpus=4"],
                Some("8"),
                "`--recipe-gpus 8` and `evenkeel.batch.gpus=4`",
            ),
            (
                &["batch.gpus=4"],
                Some("8"),
                "`--recipe-gpus 8` and `batch.gpus=4`",
            ),
        ] {
            let message = format!("{message} contradict each other");
            assert_eq!(contradictions(overrides, flag), [message]);
        }
        let mut replaced = ["a=1", "batch.gpus=8", "evenkeel.batch.gpus=8", "b"]
            .map(str::to_owned)
            .to_vec();
        set(&mut replaced, "batch.gpus", "4");
        assert_eq!(replaced, ["a=1", "b", "evenkeel.batch.gpus=4"]);
        for (overrides, flag) in [
            (&["a=1", "a=1"][..], None),
            (&["lr=2e-5", "lr=0.00002"], None),
            (&["evenkeel.batch.gpus=8"], Some("8")),
            (&["a.b=1", "a=1", "~a"], None),
        ] {
            assert_eq!(contradictions(overrides, flag), [""; 0], "{overrides:?}");
        }
    }

    fn text<'n>(root: &'n Node, path: &str) -> &'n str {
        let found = root.get_path(path).and_then(Node::text);
        found.unwrap_or_else(|| panic!("no value at {path} in {root:?}"))
    }

    #[test]
    fn keys_are_set_at_any_depth() {
        let (root, problems) = apply_to(
            "a: 1\nlist: [{id: x}, {id: y}]\nempty:\n",
            &["a=2", "list.1.id=chat.jsonl", "empty.b=3", "new.c.d=4"],
        );
        assert_eq!(problems, [""; 0]);
        assert_eq!(text(&root, "a"), "2");
        assert_eq!(text(&root, "list.0.id"), "x");
        assert_eq!(text(&root, "list.1.id"), "chat.jsonl");
        assert_eq!(text(&root, "empty.b"), "3");
        assert_eq!(text(&root, "new.c.d"), "4");
    }

    #[test]
    fn lists_replace_and_templates_need_no_quotes() {
        let (root, problems) = apply_to(
            "columns: [a, b]\nt: x\nu: y\n",
            &[
                "columns=[c]",
                "t={% for m in messages %}#{{ m }}: x{% endfor %}",
                "u='5'",
            ],
        );
        assert_eq!(problems, [""; 0]);
        assert_eq!(root.get("columns").unwrap().items().unwrap().len(), 1);
        assert_eq!(
            text(&root, "t"),
            "{% for m in messages %}#{{ m }}: x{% endfor %}"
        );
        let five = root.get("u").unwrap().resolve(Schema::Core);
        assert_eq!(five, Some(Resolved::Str("5".to_owned())));
    }

    #[test]
    fn keys_that_contain_dots_are_found() {
        let (root, _) = apply_to("mixer:\n  org/set-v1.0: 0.5\n", &["mixer.org/set-v1.0=1.0"]);
        let entries = root.get("mixer").unwrap().entries().unwrap();
        assert_eq!(entries.len(), 1);
        assert_eq!(entries[0].value.text(), Some("1.0"));
    }

    #[test]
    fn problems_point_at_the_command_line() {
        let (_, problems) = apply_to(
            "a: 1\nlist: [x]\n",
            &[
                "a=1",
                "list.7=y",
                "a.b=1",
                "b=[1, 2",
                "nothing",
                "=x",
                "list.x.y=1",
            ],
        );
        insta::assert_snapshot!(problems.join("\n"));
    }

    #[test]
    fn places_after_a_line_break_continue_the_count() {
        let (root, _) = apply_to("a: 1\n", &["t=one\ntwo", "a={b: [5]}"]);
        let five = &root.get("a").unwrap().get("b").unwrap().items().unwrap()[0];
        assert_eq!((five.span.line, five.span.column), (3, 8));
    }
}
