use super::*;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::diagnostic::Severity;
use crate::recipe::syntax::scalar::{Resolved, Schema};

fn tree(text: &str) -> Node {
    let mut reading = Reading::default();
    let node = reading.parse("x.yaml", text.to_owned());
    node.unwrap_or_else(|| panic!("{:?}", reading.diagnostics))
}

/// The only error of a text: its position and message.
fn error(text: &str) -> String {
    let mut reading = Reading::default();
    let node = reading.parse("x.yaml", text.to_owned());
    let errors: Vec<String> = reading
        .diagnostics
        .iter()
        .filter(|d| d.severity == Severity::Error)
        .map(|d| {
            let place = d
                .span
                .map_or(String::new(), |s| format!("{}:{}: ", s.line, s.column));
            format!("{place}{} ({}) [{}]", d.message, d.help, d.rule)
        })
        .collect();
    assert_eq!(errors.len(), 1, "{node:?} {errors:?}");
    errors[0].clone()
}

fn int(node: &Node, path: &str) -> i128 {
    match node.get_path(path).and_then(|n| n.resolve(Schema::PyYaml)) {
        Some(Resolved::Int(value)) => value,
        other => panic!("{path}: {other:?}"),
    }
}

#[test]
fn values_have_their_positions() {
    let text = "a:\n  größe: [1, {b: 'x y'}]\nc: |\n  two\n  lines\n";
    let node = tree(text);
    let list = node.get_path("a.größe").unwrap();
    let item = list.items().unwrap()[1].get("b").unwrap();
    assert_eq!((item.span.line, item.span.column), (2, 18));
    assert_eq!(&text[item.span.start..item.span.end], "'x y'");
    let key = &node.get("a").unwrap().entries().unwrap()[0];
    assert_eq!((key.name_span.line, key.name_span.column), (2, 3));
    assert_eq!(node.get("c").unwrap().text(), Some("two\nlines\n"));
}

#[test]
fn aliases_merges_and_tags_are_refused() {
    let cases = [
        "a: &n 1\nb: *n\n",
        "a: {b: 1}\nc:\n  <<: {d: 2}\n",
        "learning_rate: !!float 1e-5\n",
        "a: !!map {b: 1}\n",
        "a: ! 7\n",
    ];
    let found: Vec<String> = cases.iter().map(|text| error(text)).collect();
    insta::assert_snapshot!(found.join("\n"));
    // An anchor alone changes nothing, and in quotes `<<` is a key like any other.
    let node = tree("a: &n 1\nquoted: {\"<<\": 2}\n");
    assert_eq!((int(&node, "a"), int(&node, "quoted.<<")), (1, 2));
}

#[test]
fn a_duplicate_key_is_refused_if_its_values_differ() {
    insta::assert_snapshot!(
        error("a: 1\nb:\n  c: 1\n  c: 2\n"),
        @"4:3: `c` is given twice, first on line 3 (remove one of them: loaders silently take the last) [duplicate-key]"
    );
    let mut reading = Reading::default();
    let node = reading.parse("x", "a: 1\na: 1\n".to_owned()).unwrap();
    assert_eq!(int(&node, "a"), 1);
    assert_eq!(reading.diagnostics[0].severity, Severity::Warning);
}

#[test]
fn crlf_line_ends_and_byte_order_marks_have_no_effect() {
    let node = tree("\u{feff}a: 1\r\nb:\r\n  - x\r\n  - y\r\n");
    assert_eq!(int(&node, "a"), 1);
    let list = node.get("b").unwrap().items().unwrap();
    assert_eq!((list[1].text(), list[1].span.line), (Some("y"), 4));
}

#[test]
fn json_is_read_with_positions() {
    let node = tree("{\n\t\"a\": {\"b\": 1.5e-3},\n\t\"c\": \"\\u00e9\\ud83d\\ude00\"\n}");
    let b = node.get_path("a.b").unwrap();
    assert_eq!((b.span.line, b.span.column), (2, 13));
    assert_eq!(node.get("c").unwrap().text(), Some("é😀"));
}

#[test]
fn broken_files_are_refused_with_a_position_and_help() {
    let cases = [
        "a: [1, 2\nb: 3\n",
        "a:\n\t- b\n",
        "a: 1\n  b: 2\n",
        "a: *missing\n",
        "a: &a [*a]\n",
        "a: 1\n---\nb: 2\n",
        "[1, 2]: x\n",
        "a: !python/object:os.system x\n",
        "a: \"unfinished\n",
        "<<: 5\n",
        "",
        "# nothing but a comment\n",
        "a: {b: }}\n",
    ];
    let found: Vec<String> = cases
        .iter()
        .map(|text| format!("{text:?}\n    {}", error(text)))
        .collect();
    insta::assert_snapshot!(found.join("\n"));
}

#[test]
fn large_and_deep_files_are_refused() {
    assert!(error(&"[".repeat(10_000)).contains("nest"));
    assert!(error(&"- ".repeat(10_000)).contains("nest"));
    assert!(error(&"{a: ".repeat(10_000)).contains("nest"));
    let many = format!("[{}]", "1,".repeat(MAX_NODES));
    assert!(error(&many).contains("more than 100000 values"));
    assert!(error(&"x".repeat(MAX_BYTES + 1)).contains("the limit is 1048576"));
}

/// Each result is that of PyYAML 6.0.3.
#[test]
fn tabs_are_refused_where_pyyaml_refuses_them() {
    let reads = |text: &str| parse_as_pyyaml(text, FileId(0), &mut Vec::new()).is_some();
    for refused in [
        "a:\t1",
        "a: \t1",
        "a: 1\t",
        "a: 1\t# c",
        "a: b\tc",
        "a: [1,\t2]",
        "a\t: 1",
        "a: 'x'\t",
        "a: 1\n\t\nb: 2",
        "a: 1\n\t# c\nb: 2",
    ] {
        assert!(!reads(refused), "{refused:?}");
    }
    for read in [
        "a: 1 # b\tc",
        "a: |\n  x\ty\nb: 1",
        "a: \"x\ty\"",
        "a: 'x\ty'",
        "# \t\na: 1",
        "a: >-\n  x\ty\n  \tz\nb: '#'",
    ] {
        assert!(reads(read), "{read:?}");
    }
}
