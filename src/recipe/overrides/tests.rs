use super::*;
use crate::recipe::reading::Reading;

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

fn text<'n>(root: &'n Node, path: &str) -> &'n str {
    let step = |node: &'n Node, part: &str| match part.parse::<usize>() {
        Ok(index) => node.items().and_then(|i| i.get(index)),
        Err(_) => node.get(part),
    };
    path.split('.')
        .try_fold(root, step)
        .and_then(Node::text)
        .unwrap_or_else(|| panic!("no value at {path} in {root:?}"))
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
