use super::*;
use crate::recipe::syntax::diagnostic::Diagnostic;

/// A config after resolution, or its errors.
fn resolved(text: &str) -> Result<Node, Vec<Diagnostic>> {
    let mut reading = Reading::default();
    let mut root = reading.parse("config.yaml", text.to_owned()).unwrap();
    let registered = [Registered {
        name: "count",
        call: |arguments| Some(arguments.first()?.items()?.len().to_string()),
    }];
    resolve(&mut root, &registered, &mut reading);
    match reading.diagnostics.is_empty() {
        true => Ok(root),
        false => Err(reading.diagnostics),
    }
}

fn value(text: &str, path: &str) -> Resolved {
    let root = resolved(text).unwrap();
    root.get_path(path)
        .unwrap()
        .resolve(Schema::OmegaConf)
        .unwrap()
}

/// The message of the only error.
fn problem(text: &str) -> String {
    let found = resolved(text).unwrap_err();
    assert!(found.iter().all(|d| d.rule == "interpolation"));
    format!("{} ({})", found[0].message, found[0].help)
}

/// Expected values are those of OmegaConf 2.3.1.
#[test]
fn values_are_omegaconfs() {
    let text = |text: &str| Resolved::Str(text.to_owned());
    let int = Resolved::Int;
    for (yaml, path, expected) in [
        ("a: ${b}/x\nb: 5e-6\n", "a", text("5e-06/x")),
        ("a: ${b} ${c}\nb: null\nc: yes\n", "a", text("None True")),
        ("a: ${b}\nb: 5e-6\n", "a", Resolved::Float(5e-6)),
        ("a: '${b}'\nb: 3\n", "a", int(3)),
        ("a: \\${b}\nb: 3\nc: ${b}\n", "a", text("${b}")),
        ("a: x\\${b}${b}\nb: 3\n", "a", text("x${b}3")),
        ("a: $b ${b}$\nb: 3\n", "a", text("$b 3$")),
        ("a: ${l[1]}\nl: [1, 2]\n", "a", int(2)),
        ("a: ${l.0}\nl: [1, 2]\n", "a", int(1)),
        ("a: ${b[c]}\nb: {c: 2}\n", "a", int(2)),
        ("n: {m: \"${.k}\", k: 3}\n", "n.m", int(3)),
        ("n: {k: 3, p: {q: \"${..k}\"}}\n", "n.p.q", int(3)),
        ("a: ${b.c}\nb: ${d}\nd: {c: 4}\n", "a", int(4)),
        ("a: ${n}\nn: {k: \"${b}\"}\nb: 2\n", "a.k", int(2)),
        ("k: x\nx: 7\na: ${${k}}\n", "a", int(7)),
        ("a: ${oc.select:zz,3}\n", "a", int(3)),
        // Expected values are those of OmegaConf 2.3.
        ("a: ${oc.env:EVENKEEL_NO_SUCH_VARIABLE,5}\n", "a", text("5")),
        (
            "a: ${oc.env:EVENKEEL_NO_SUCH_VARIABLE,true}\n",
            "a",
            text("True"),
        ),
        (
            "a: ${oc.env:EVENKEEL_NO_SUCH_VARIABLE,null}\n",
            "a",
            Resolved::Null,
        ),
        (
            "a: ${oc.decode:${oc.env:EVENKEEL_NO_SUCH_VARIABLE,5}}\n",
            "a",
            int(5),
        ),
        ("a: ${count:${l}}\nl: [1, 2]\n", "a", text("2")),
        ("a: ${b}\nb: ???\n", "a", Resolved::Missing),
        ("a: x${b}\nb: ???\n", "a", Resolved::Missing),
    ] {
        assert_eq!(value(yaml, path), expected, "{yaml}");
    }
}

#[test]
fn cycles_are_reported_with_their_keys() {
    assert_eq!(
        problem("a: ${b}\nb: x${c}\nc: ${a}\n"),
        "the interpolation forms a cycle: a → b → c → a (set one of them to a plain value)"
    );
    assert!(problem("a: ${a}\n").contains("a → a"));
    assert!(problem("a: {b: \"${a}\"}\n").contains("cycle"));
    // A reference to a sibling is no cycle.
    assert!(resolved("a: {b: \"${a.c}\", c: 1}\n").is_ok());
}

#[test]
fn missing_keys_and_resolvers_are_named() {
    assert!(problem("abc: 1\nx: ${abd}\n").contains("did you mean `abc`?"));
    assert!(problem("b: {d: 1}\nx: ${b.c}\n").contains("no key `b.c`"));
    assert!(problem("b: 3\nx: ${b.c}\n").contains("no key `b.c`"));
    assert!(problem("x: ${...b}\n").contains("more dots"));
    assert!(problem("x: ${nope:1}\n").contains("unknown resolver `nope`"));
    assert!(problem("x: ${b\n").contains("is not closed"));
    assert!(problem("b: [1]\nx: a${b}\n").contains("is a list"));
    assert!(problem("x: ${oc.env:EVENKEEL_NO_SUCH_VARIABLE}\n").contains("environment"));
}

#[test]
fn exponential_interpolations_are_refused() {
    let mut lists = "x0: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n".to_owned();
    let mut texts = "x0: aaaaaaaaaa\n".to_owned();
    for level in 1..40 {
        let one = format!("${{x{}}}", level - 1);
        lists += &format!(
            "x{level}: [{}]\n",
            vec![format!("\"{one}\""); 10].join(", ")
        );
        texts += &format!("x{level}: {}\n", one.repeat(10));
    }
    for bomb in [lists, texts] {
        let message = problem(&bomb);
        assert!(
            message.contains("larger than any recipe") || message.contains("more than"),
            "{message}"
        );
    }
    let chain: String = (0..500)
        .map(|n| format!("x{n}: ${{x{}}}\n", n + 1))
        .collect();
    assert!(problem(&format!("{chain}x500: 1\n")).contains("longer than 64"));
    let nested = format!("x: {}a{}\n", "${".repeat(2000), "}".repeat(2000));
    assert!(problem(&nested).contains("longer than 64"));
}
