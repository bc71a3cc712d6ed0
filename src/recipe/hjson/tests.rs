use proptest::prelude::*;

use super::*;
use crate::recipe::scalar::{Resolved, Schema};
use crate::recipe::source::Sources;
use crate::recipe::yaml;

fn read(text: &str) -> Result<Node, String> {
    let mut sources = Sources::default();
    let file = sources.add("ds.json", text);
    let mut problems = Vec::new();
    let root = parse(text, file, &mut problems);
    match problems.first() {
        None => Ok(root.unwrap()),
        Some(problem) => Err(problem.message.clone()),
    }
}

/// The tree as JSON, to compare with hjson-py.
fn json(node: &Node) -> String {
    match &node.value {
        Value::Mapping(entries) => {
            let entries = entries.iter();
            let entries = entries.map(|e| format!("{:?}: {}", e.name, json(&e.value)));
            format!("{{{}}}", entries.collect::<Vec<_>>().join(", "))
        }
        Value::Sequence(items) => {
            format!(
                "[{}]",
                items.iter().map(json).collect::<Vec<_>>().join(", ")
            )
        }
        Value::Scalar(scalar) if scalar.plain => scalar.text.clone(),
        Value::Scalar(scalar) => format!("{:?}", scalar.text),
    }
}

/// Expected results are those of `hjson.loads` of hjson-py 3.1.0.
#[test]
fn documents_are_read_like_upstream() {
    for (text, expected) in [
        ("{\"a\": 1, \"b\": [1, 2]}", r#"{"a": 1, "b": [1, 2]}"#),
        (
            "{\n  // one\n  a: 1 # two\n  /* three\n  */ b: 2\n}",
            r#"{"a": 1, "b": 2}"#,
        ),
        ("a: 1\nb: auto\n", r#"{"a": 1, "b": "auto"}"#),
        ("{a: 1, b: 2,}", r#"{"a": 1, "b": 2}"#),
        ("{a: 8#c\n b: true//d\n}", r#"{"a": 8, "b": true}"#),
        ("{a: x, y}\n}", r#"{"a": "x, y}"}"#),
        ("{a: 1 x # no comment\n}", r#"{"a": "1 x # no comment"}"#),
        (
            "{a: 32.0, b: 1e3, c: 1e-5, d: -0.5, e: 010\n}",
            r#"{"a": 32, "b": 1000, "c": 1e-5, "d": -0.5, "e": "010"}"#,
        ),
        (
            "{'a': 'it\\'s', \"b\": \"\\u00e9\\ud83d\\ude00\\n\"}",
            "{\"a\": \"it's\", \"b\": \"é😀\\n\"}",
        ),
        (
            "{\n  a: '''\n  one\n    two\n  '''\n}",
            "{\"a\": \"one\\ntwo\"}",
        ),
        ("# nothing\n", "{}"),
        ("\u{feff}{a: null}", r#"{"a": null}"#),
        ("{a: [\n1\n2,\n]\n}", r#"{"a": [1, 2]}"#),
    ] {
        let read = read(text).unwrap_or_else(|problem| panic!("{text}: {problem}"));
        assert_eq!(json(&read), expected, "{text}");
    }
}

#[test]
fn documents_that_upstream_refuses_are_refused() {
    for (text, word) in [
        ("{a: 1", "ends before `}`"),
        ("{a: [1", "ends before `]`"),
        ("{a: }", "value is missing"),
        ("{: 1}", "name is missing"),
        ("{a b: 1}", "`:` is missing"),
        ("{a: 1} b", "after the end"),
        ("{a: \"x", "is not closed"),
        ("{a: \"\\q\"}", "escape"),
        ("{a: '''x}", "is not closed"),
        ("{a: 1\n a: 1}", "given twice"),
    ] {
        let problem = read(text).unwrap_err();
        assert!(problem.contains(word), "{text}: {problem}");
    }
    assert!(read(&"[".repeat(5000)).unwrap_err().contains("deep"));
}

#[test]
fn values_and_names_have_their_positions() {
    let text = "{\n  // größer\n  größe: 16 // n\n  \"b\": x\n}";
    let root = read(text).unwrap();
    let entries = root.entries().unwrap();
    let at = |span: Span| (&text[span.start..span.end], span.line, span.column);
    assert_eq!(at(entries[0].name_span), ("größe", 3, 3));
    assert_eq!(at(entries[0].value.span), ("16", 3, 10));
    assert_eq!(at(entries[1].name_span), ("\"b\"", 4, 3));
    assert_eq!(at(entries[1].value.span), ("x", 4, 8));
}

fn any_json() -> impl Strategy<Value = serde_json::Value> {
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(Into::into),
        any::<i64>().prop_map(Into::into),
        "[a-z \"\\\\#/:,{}é]{0,8}".prop_map(Into::into),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Into::into),
            prop::collection::btree_map("[a-z:# ]{1,5}", inner, 0..4)
                .prop_map(|map| map.into_iter().collect::<serde_json::Map<_, _>>().into()),
        ]
    })
}

proptest! {
    #[test]
    fn any_text_ends_in_a_tree_or_an_error(text in "[a-b:{}\\[\\]\"'\n,/*# 0-9\\\\u]{0,60}") {
        let mut sources = Sources::default();
        let file = sources.add("ds.json", text.as_str());
        let mut problems = Vec::new();
        if parse(&text, file, &mut problems).is_none() {
            prop_assert!(!problems.is_empty());
        }
        for problem in problems {
            let span = problem.span.unwrap();
            prop_assert!(text.get(span.start..span.end).is_some());
        }
    }

    /// JSON has the same meaning to both readers.
    #[test]
    fn json_is_hjson(value in prop::collection::btree_map("[a-z:# ]{1,5}", any_json(), 0..4)) {
        let text = serde_json::to_string_pretty(&value).unwrap();
        let mut sources = Sources::default();
        let file = sources.add("ds.json", text.as_str());
        let as_yaml = yaml::parse(&text, file, &mut Vec::new()).unwrap();
        let read = read(&text).unwrap();
        prop_assert_eq!(resolved(&read), resolved(&as_yaml), "{}", text);
    }
}

/// The resolved scalars of a tree, without their spelling.
fn resolved(node: &Node) -> Vec<(String, Option<Resolved>)> {
    let mut all = Vec::new();
    collect(node, "", &mut all);
    all
}

fn collect(node: &Node, path: &str, all: &mut Vec<(String, Option<Resolved>)>) {
    all.push((path.to_owned(), node.resolve(Schema::Core)));
    for entry in node.entries().unwrap_or_default() {
        collect(&entry.value, &format!("{path}.{}", entry.name), all);
    }
    for (index, item) in node.items().unwrap_or_default().iter().enumerate() {
        collect(item, &format!("{path}.{index}"), all);
    }
}
