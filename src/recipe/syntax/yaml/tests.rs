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
fn aliases_and_merges_are_expanded() {
    let node = tree(
        "base: &base {a: 1, b: 2}\nother: &other {b: 3, c: 4}\n\
         one:\n  <<: *base\n  b: 9\ntwo:\n  <<: [*base, *other]\nlist: &l [1]\ncopy: *l\n\
         quoted: {\"<<\": 1}\n",
    );
    assert_eq!(
        (int(&node, "one.a"), int(&node, "one.b")),
        (1, 9),
        "own keys win"
    );
    assert_eq!(
        (int(&node, "two.b"), int(&node, "two.c")),
        (2, 4),
        "the first of a list wins"
    );
    assert_eq!(node.get("copy").unwrap().items().unwrap().len(), 1);
    assert_eq!(
        int(&node, "quoted.<<"),
        1,
        "in quotes it is a key like any other"
    );
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
fn tags_determine_the_type_of_a_scalar() {
    let node = tree("a: !!str 5\nb: !!float 1e-5\nc: ! 7\nd: !!int \"16\"\n");
    let resolved = |key: &str| node.get(key).unwrap().resolve(Schema::PyYaml).unwrap();
    assert_eq!(resolved("a"), Resolved::Str("5".to_owned()));
    assert_eq!(resolved("b"), Resolved::Float(1e-5));
    assert_eq!(resolved("c"), Resolved::Str("7".to_owned()));
    assert_eq!(resolved("d"), Resolved::Int(16));
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
fn alias_bombs_are_refused_before_they_allocate_memory() {
    let mut laughs = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..20 {
        let below = format!("*a{}, ", level - 1).repeat(10);
        laughs.push_str(&format!("a{level}: &a{level} [{below}]\n"));
    }
    assert!(error(&laughs).contains("more than 100000 nodes"));
    let long = format!(
        "a: &a {}\nb: [{}]\n",
        "x".repeat(MAX_BYTES / 2),
        "*a, ".repeat(1000)
    );
    assert!(error(&long).contains("bytes"), "{}", &error(&long)[..80]);
    let merges: String = (1..60)
        .map(|n| format!("m{n}: &m{n} {{<<: [*m{}, *m{}], k{n}: 1}}\n", n - 1, n - 1))
        .collect();
    let merged = tree(&format!("m0: &m0 {{k0: 1}}\n{merges}"));
    assert_eq!(merged.get("m59").unwrap().entries().unwrap().len(), 60);
    let chain: String = (1..200)
        .map(|n| format!("c{n}: &c{n} [*c{}]\n", n - 1))
        .collect();
    assert!(error(&format!("c0: &c0 x\n{chain}")).contains("nested more than 64"));
    assert!(error(&"[".repeat(10_000)).contains("nest"));
    assert!(error(&"- ".repeat(10_000)).contains("nest"));
    assert!(error(&"{a: ".repeat(10_000)).contains("nest"));
    assert!(error(&"x".repeat(MAX_BYTES + 1)).contains("the limit is 1048576"));
}
