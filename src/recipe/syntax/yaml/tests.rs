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
fn tags_are_refused() {
    let cases = [
        "learning_rate: !!float 1e-5\n",
        "a: !!map {b: 1}\n",
        "a: ! 7\n",
    ];
    let found: Vec<String> = cases.iter().map(|text| error(text)).collect();
    insta::assert_snapshot!(found.join("\n"), @"
    1:24: the tag `!!float` is not supported (remove the tag, and write the value so that it needs none) [yaml-syntax]
    1:10: the tag `!!map` is not supported (remove the tag, and write the value so that it needs none) [yaml-syntax]
    1:6: the tag `!` is not supported (remove the tag, and write the value so that it needs none) [yaml-syntax]
    ");
}

/// PyYAML 6.0.3 reads both texts of a pair as the same value.
#[test]
fn aliases_and_merges_are_read_as_pyyaml_reads_them() {
    for (text, written_out) in [
        ("a: &n 1\nb: *n\n", "a: 1\nb: 1\n"),
        ("a: &l [1, 2]\nb: {c: *l}\n", "a: [1, 2]\nb: {c: [1, 2]}\n"),
        ("a: &e\nb: *e\n", "a:\nb:\n"),
        ("a: &k name\n*k : 1\n", "a: name\nname: 1\n"),
        // The mapping's own keys count, wherever they are.
        (
            "b: &b {x: 1, y: 2}\nc:\n  <<: *b\n  y: 3\n",
            "b: {x: 1, y: 2}\nc: {x: 1, y: 3}\n",
        ),
        (
            "b: &b {x: 1, y: 2}\nc:\n  y: 3\n  <<: *b\n",
            "b: {x: 1, y: 2}\nc: {x: 1, y: 3}\n",
        ),
        // The first mapping of a list counts, and the last of several merges.
        (
            "b: &b {x: 1}\nc: &c {x: 2, y: 2}\nd:\n  <<: [*b, *c]\n",
            "b: {x: 1}\nc: {x: 2, y: 2}\nd: {x: 1, y: 2}\n",
        ),
        (
            "b: &b {x: 1}\nc: &c {x: 2, y: 2}\nd:\n  <<: *b\n  <<: *c\n",
            "b: {x: 1}\nc: {x: 2, y: 2}\nd: {x: 2, y: 2}\n",
        ),
        (
            "b: &b {x: 1}\nc: &c\n  <<: *b\n  y: 2\nd: {<<: *c, z: 3}\n",
            "b: {x: 1}\nc: {x: 1, y: 2}\nd: {x: 1, y: 2, z: 3}\n",
        ),
        // Mappings below the merged ones replace each other.
        (
            "b: &b {o: {x: 1}}\nc: {<<: *b, o: {y: 2}}\n",
            "b: {o: {x: 1}}\nc: {o: {y: 2}}\n",
        ),
        ("c:\n  <<: {x: 1}\n", "c: {x: 1}\n"),
        ("<<: &b {x: 1}\ny: *b\n", "x: 1\ny: {x: 1}\n"),
        ("<<: []\ny: 1\n", "y: 1\n"),
        ("a: {\"<<\": 2}\n", "a: {'<<': 2}\n"),
    ] {
        let found = tree(text);
        assert!(found.same_value(&tree(written_out)), "{text}: {found:?}");
    }
}

#[test]
fn an_alias_has_its_own_place_and_merged_keys_have_that_of_their_text() {
    let node = tree("a: &n 1\nb: &b\n  x: &l [7]\nc: *n\nd: *b\ne:\n  <<: *b\n");
    let place = |path: &str| {
        let span = node.get_path(path).unwrap().span;
        (span.line, span.column)
    };
    assert_eq!((place("c"), place("d")), ((4, 4), (5, 4)));
    assert_eq!((place("d.x"), place("e.x")), ((3, 9), (3, 9)));
    let merged = &node.get("e").unwrap().entries().unwrap()[0];
    assert_eq!((merged.name_span.line, merged.name_span.column), (3, 3));
}

#[test]
fn aliases_that_multiply_a_file_are_refused() {
    // Nine levels of nine: 387 million values.
    let mut bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n".to_owned();
    for level in 1..9 {
        let items = vec![format!("*a{}", level - 1); 9].join(", ");
        bomb += &format!("a{level}: &a{level} [{items}]\n");
    }
    insta::assert_snapshot!(error(&bomb), @"5:9: with what its anchors and aliases repeat the file has more than 100000 values or 1 MiB (check that this is the right file) [yaml-syntax]");
    let merges = bomb.replace("[x, x, x, x, x, x, x, x, x]", "{k: v}");
    assert!(error(&merges.replace("[*a0", "[<<: *a0, *a0")).contains("more than 100000 values"));
    // Few values with much text.
    let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(1 << 19), "*a, ".repeat(9));
    assert!(error(&long).contains("1 MiB"));
    // Many anchors around the same values.
    let nested = format!(
        "{}[{}]{}",
        "[&a ".repeat(60),
        "1,".repeat(5000),
        "]".repeat(60)
    );
    let mut number = 0;
    let named: String = nested
        .chars()
        .map(|c| match c {
            'a' => {
                number += 1;
                format!("a{number}")
            }
            c => c.to_string(),
        })
        .collect();
    assert!(error(&named).contains("more than 100000 values"));
    // An alias does not lead deeper than brackets do.
    let deep = format!(
        "a: &a {}{}\nb: {}*a{}\n",
        "[".repeat(40),
        "]".repeat(40),
        "[".repeat(40),
        "]".repeat(40)
    );
    assert!(error(&deep).contains("more than 64 deep"));
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
        "a: *missing # or a file name\n",
        "a: &a [*a]\n",
        "a: &a {<<: *a}\n",
        "a: &n 1\nb: &n 2\n",
        "a: &n.b 1\n",
        "a: 1\n---\nb: 2\n",
        "[1, 2]: x\n",
        "a: !python/object:os.system x\n",
        "a: \"unfinished\n",
        "<<: 5\n",
        "<<:\n",
        "b: &b {x: 1}\nc:\n  <<: [*b, 5]\n",
        "files: *.jsonl\n",
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
    assert!(error(&"x".repeat(MAX_BYTES + 1)).contains("larger than 1 MiB"));
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

#[test]
fn a_quoted_scalar_continues_at_any_indentation_as_in_pyyaml() {
    let text = "a: \"one\ntwo\n\n three\"\nb:\n  - c: 'x\n  it''s\ny'  # end\n    größe: 7\nd: \"e\nf\" g\n";
    let (before, _) = text.split_once("d:").unwrap();
    let node = tree(before);
    assert_eq!(node.get("a").unwrap().text(), Some("one two\nthree"));
    let item = &node.get("b").unwrap().items().unwrap()[0];
    assert_eq!(item.get("c").unwrap().text(), Some("x it's y"));
    let size = item.get("größe").unwrap();
    assert_eq!(&text[size.span.start..size.span.end], "7");
    assert_eq!((size.span.line, size.span.column), (9, 12));
    let quoted = item.get("c").unwrap().span;
    assert_eq!(&text[quoted.start..quoted.end], "'x\n  it''s\ny'");
    let commented = "a: # don't\n  &x \"one\ntwo\" # isn't\nb: 1\n";
    assert_eq!(int(&tree(commented), "b"), 1);
    // A problem behind it has its own place.
    assert!(error(text).starts_with("11:4: "), "{}", error(text));
}

#[test]
fn many_such_scalars_end_in_the_parsers_problem() {
    let text = "a: \"x\ny\"\n".repeat(Indented::MOST + 1);
    assert!(error(&text).contains("multiline quoted scalar"));
    let wide = format!(
        "{}: \"{}\"\n",
        "k".repeat(100),
        "x\n".repeat(MAX_BYTES / 50)
    );
    assert!(error(&wide).contains("multiline quoted scalar"));
}
