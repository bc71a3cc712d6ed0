use super::*;
use crate::recipe::scalar::{Resolved, Schema};

fn read(text: &str) -> Result<Override, Diagnostic> {
    parse(text, Position::START, FileId(0))
}

fn value(text: &str) -> Resolved {
    let value = read(&format!("a={text}")).unwrap().value.unwrap();
    value.resolve(Schema::OmegaConf).unwrap()
}

/// Expected values are those of `OverridesParser` of Hydra 1.3.8.
#[test]
fn scalars_follow_hydra_and_not_yaml() {
    let text = |text: &str| Resolved::Str(text.to_owned());
    for (written, read) in [
        ("010", text("010")),
        ("on", text("on")),
        ("NO", text("NO")),
        ("12:30", text("12:30")),
        ("0x10", text("0x10")),
        ("1__0", text("1__0")),
        ("1 2", text("1 2")),
        ("x y", text("x y")),
        ("", text("")),
        ("'1'", text("1")),
        ("'x y,#'", text("x y,#")),
        (r"'a\'b\\\'c\\'", text(r"a'b\'c\")),
        (r"'a\b'", text(r"a\b")),
        ("\\,x", text(",x")),
        ("/a/b:c", text("/a/b:c")),
        ("${b.c}/d", text("${b.c}/d")),
        ("1e-5", Resolved::Float(1e-5)),
        ("-.5", Resolved::Float(-0.5)),
        ("5.", Resolved::Float(5.0)),
        ("1_0.5", Resolved::Float(10.5)),
        ("inf", Resolved::Float(f64::INFINITY)),
        ("20_000", Resolved::Int(20_000)),
        ("+1", Resolved::Int(1)),
        ("True", Resolved::Bool(true)),
        ("null", Resolved::Null),
        ("???", Resolved::Missing),
        ("00.5", text("00.5")),
        ("int(3.7)", Resolved::Int(3)),
        ("int('1_0')", Resolved::Int(10)),
        ("int (value = true)", Resolved::Int(1)),
        ("float(3)", Resolved::Float(3.0)),
        ("float(' inf ')", Resolved::Float(f64::INFINITY)),
        ("str(010)", text("010")),
        ("str(1e-5)", text("1e-05")),
        ("str(1e16)", text("1e+16")),
        ("str(123456.0)", text("123456.0")),
        ("str(TRUE)", text("true")),
        ("bool('False')", Resolved::Bool(false)),
        ("bool(int(0.5))", Resolved::Bool(false)),
        ("bool(null)", Resolved::Bool(false)),
        ("b: ", text("b: ")),
        ("x\\  ", text("x ")),
    ] {
        assert_eq!(value(written), read, "{written}");
    }
}

#[test]
fn collections_nest_and_keep_their_positions() {
    let read = read("++a.b=[x, {k: 1, l: ['y']}]").unwrap();
    assert_eq!((read.kind, read.key.as_str()), (Kind::Force, "a.b"));
    let value = read.value.unwrap();
    let items = value.items().unwrap();
    assert_eq!(items[0].text(), Some("x"));
    assert_eq!(items[1].get_path("k").and_then(Node::text), Some("1"));
    let inner = &items[1].get("l").unwrap().items().unwrap()[0];
    assert_eq!((inner.span.line, inner.span.column), (1, 22));
    assert_eq!(read.span.column, 3);
}

#[test]
fn syntax_that_hydra_refuses_is_refused_with_help() {
    for (text, word) in [
        ("a", "KEY=VALUE"),
        ("=1", "not a key"),
        ("a=1,2", "sweep"),
        ("a=b=c", "quotes"),
        ("a=x#y", "quotes"),
        ("a=choice(1,2)", "sweep"),
        ("a=sort([2,1])", "function"),
        ("a=int(1,2)", "sweep"),
        ("a=int(x)", "cannot convert"),
        ("a=int('1.5')", "cannot convert"),
        ("a=int(null)", "cannot convert"),
        ("a=int(1", "missing"),
        ("a=[1", "missing"),
        ("a='x", "is not closed"),
        ("a=${b", "is not closed"),
        ("a={1}", "pairs"),
        ("a=[1,]", "missing"),
    ] {
        let problem = read(text).unwrap_err();
        assert!(
            problem.message.contains(word),
            "{text}: {}",
            problem.message
        );
    }
    let deep = format!("a={}", "[".repeat(5000));
    assert!(read(&deep).unwrap_err().message.contains("deeper"));
}

#[test]
fn a_sweep_is_refused_with_the_single_jobs() {
    let problem = read("loss=sft, dpo").unwrap_err();
    assert!(
        problem
            .message
            .starts_with("`loss=sft,dpo` is a sweep of 2 jobs")
    );
    assert!(
        problem.help.contains("`loss=sft`, then `loss=dpo`;"),
        "{}",
        problem.help
    );
    let span = problem.span.unwrap();
    assert_eq!((span.start, span.end), (5, 13));
    let many = read("a=[1,2],{b: 3},'x,y',4,5").unwrap_err().help;
    assert!(
        many.contains("`a={b: 3}`, then `a='x,y'`, then `a=4`, and so on"),
        "{many}"
    );
    assert!(read("a=1,").unwrap_err().message.contains("missing"));
}

#[test]
fn deletions_and_packages() {
    let gone = read("~model").unwrap();
    assert_eq!((gone.kind, gone.value), (Kind::Delete, None));
    let moved = read("model@other=llama").unwrap();
    assert_eq!(moved.package.as_deref(), Some("other"));
}
