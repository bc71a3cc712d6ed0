//! OmegaConf's interpolations: `${a.b}`, `${.sibling}`, `${a}/${b}`, and resolvers: `${oc.env:NAME,default}`,
//! `oc.decode` and those that a tree's program registers.
//!
//! Hostile input ends in a diagnostic: cycles are detected, and the number of resolved interpolations,
//! their depth and the size of the result are bounded.
//!
//! Source: OmegaConf 2.3, `base.py` (`_resolve_interpolation_from_parse_tree`), `grammar_visitor.py`.

use crate::recipe::schema::environment::Environment;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::yaml::MAX_DEPTH;
use crate::util::suggest::{did_you_mean, short};

/// The most interpolations that one config may resolve; every use counts.
const MAX_STEPS: usize = 4096;
/// The most problems that one config reports.
const MAX_PROBLEMS: usize = 100;
/// The most bytes that interpolations may add to the config.
const MAX_ADDED: usize = 8 << 20;
/// The bytes that a copied value counts for, in addition to its text.
const NODE: usize = 64;

/// A resolver that a tree's program registers.
pub struct Registered {
    /// The name before the colon.
    pub name: &'static str,
    /// Computes the value from the arguments; `None` if they are invalid.
    pub call: fn(&[Node]) -> Option<String>,
}

/// Message and help.
type Problem = (String, String);

/// A value; `None`: a mandatory value that is still missing.
type Resolution = Result<Option<Node>, Problem>;

fn problem<T>(message: String, help: &str) -> Result<T, Problem> {
    Err((message, help.to_owned()))
}

/// Resolves every interpolation of a config in place. One that refers to a missing mandatory value
/// becomes missing itself; one that cannot be resolved is reported.
pub(super) fn resolve(root: &mut Node, registered: &[Registered], reading: &mut Reading) {
    let frozen = root.clone();
    let mut resolver = Resolver {
        root: &frozen,
        registered,
        environment: &reading.environment,
        active: Vec::new(),
        steps: 0,
        depth: 0,
        added: 0,
    };
    let mut problems = Vec::new();
    resolver.tree(root, &mut Vec::new(), MAX_PROBLEMS, &mut problems);
    for (span, (message, help)) in problems {
        reading.error("interpolation", Some(span), message, help);
    }
}

struct Resolver<'r> {
    /// The config after composition.
    root: &'r Node,
    registered: &'r [Registered],
    environment: &'r Environment,
    /// Paths of the scalars in progress, the outermost first.
    active: Vec<String>,
    steps: usize,
    depth: usize,
    /// Bytes of all copies and texts.
    added: usize,
}

impl Resolver<'_> {
    /// Resolves a tree at a path, until it has found some number of problems.
    fn tree(
        &mut self,
        node: &mut Node,
        path: &mut Vec<String>,
        most: usize,
        problems: &mut Vec<(Span, Problem)>,
    ) {
        if problems.len() >= most {
            return;
        }
        if !is_interpolated(node) {
            for (name, child) in node.children_mut() {
                path.push(name);
                self.tree(child, path, most, problems);
                path.pop();
            }
            return;
        }
        let span = node.span;
        match self.scalar(node, path) {
            Ok(Some(found)) => *node = Node { span, ..found },
            Ok(None) => *node = Node::plain("???", span),
            Err(problem) => problems.push((span, problem)),
        }
    }

    /// Resolves a scalar with interpolations.
    fn scalar(&mut self, node: &Node, path: &[String]) -> Resolution {
        let name = path.join(".");
        if let Some(at) = self.active.iter().position(|active| *active == name) {
            let circle = [&self.active[at..], &[name]].concat().join(" → ");
            let message = format!("the interpolation forms a cycle: {circle}");
            return problem(message, "set one of them to a plain value");
        }
        self.active.push(name);
        let found = self.text(node.text().unwrap_or_default(), node.span, path);
        self.active.pop();
        found
    }

    /// Resolves the interpolations in a text.
    fn text(&mut self, text: &str, span: Span, path: &[String]) -> Resolution {
        let mut joined = String::new();
        let mut rest = text;
        while let Some(at) = rest.find("${") {
            let Some(length) = length(&rest[at..]) else {
                return problem(
                    format!("the interpolation in `{}` is not closed", short(text)),
                    "close it with `}`",
                );
            };
            let inner = &rest[at + 2..at + length - 1];
            if rest[..at].ends_with('\\') || inner.contains(['\\', '\'', '"']) {
                return problem(
                    format!(
                        "the quotes and backslashes of `{}` are not supported",
                        short(text)
                    ),
                    "set the key to a plain value, here or on the command line",
                );
            }
            let Some(found) = self.interpolation(inner, span, path)? else {
                return Ok(None);
            };
            if length == text.len() {
                return Ok(Some(found));
            }
            let Some(value) = found.resolve(Schema::OmegaConf) else {
                let kind = found.kind();
                return problem(
                    format!("`${{{}}}` is {kind} inside a text", short(inner)),
                    "refer to one of its values, or remove the text around it",
                );
            };
            joined += &rest[..at];
            joined += &value.to_string();
            rest = &rest[at + length..];
        }
        joined += rest;
        Ok(Some(Node::string(joined, span)))
    }

    /// Resolves the text between `${` and `}`.
    fn interpolation(&mut self, inner: &str, span: Span, path: &[String]) -> Resolution {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            let message = format!("the config resolves more than {MAX_STEPS} interpolations");
            return problem(message, "write plain values");
        }
        if self.depth >= MAX_DEPTH {
            let message = format!("a chain of interpolations is longer than {MAX_DEPTH}");
            return problem(message, "write plain values");
        }
        self.depth += 1;
        let found = match inner.split_once(':') {
            Some((name, arguments)) => self.call(name.trim(), arguments, span, path),
            None => self.key(inner.trim(), path),
        };
        self.depth -= 1;
        if let Ok(Some(found)) = &found {
            self.added += size(found);
        }
        if self.added > MAX_ADDED {
            return problem(
                "the interpolations make the config larger than any recipe".to_owned(),
                "write plain values, or check that this is the right file",
            );
        }
        found
    }

    /// A copy of the node that a key names, with its interpolations resolved.
    fn key(&mut self, written: &str, path: &[String]) -> Resolution {
        let dots = written.bytes().take_while(|b| *b == b'.').count();
        let key = &written[dots..];
        let unknown = |help: String| {
            let message = format!(
                "there is no key `{}` for `${{{}}}`",
                short(key),
                short(written)
            );
            Err((message, help))
        };
        let base = match dots {
            0 => Some(0),
            dots => path.len().checked_sub(dots),
        };
        let Some(base) = base else {
            return unknown("it has more dots than there are levels".to_owned());
        };
        let mut at = path[..base].to_vec();
        // `a[0]` is the same as `a.0`.
        let parts = key.split(['.', '[']);
        at.extend(parts.map(|part| part.trim_end_matches(']').to_owned()));
        let mut node = self.root;
        for name in &at {
            let Some(below) = node.get(name) else {
                if is_interpolated(node) {
                    return unknown(
                        "a part of it is an interpolation itself: name its target".into(),
                    );
                }
                let known = node.entries().unwrap_or_default().iter();
                return unknown(did_you_mean(name, known.map(|e| e.name.as_str())));
            };
            node = below;
        }
        if is_interpolated(node) {
            return self.scalar(node, &at);
        }
        if node.resolve(Schema::OmegaConf) == Some(Resolved::Missing) {
            return Ok(None);
        }
        let mut copy = node.clone();
        let mut problems = Vec::new();
        self.tree(&mut copy, &mut at, 1, &mut problems);
        match problems.pop() {
            Some((_, problem)) => Err(problem),
            None => Ok(Some(copy)),
        }
    }

    /// The value of a resolver.
    fn call(&mut self, name: &str, arguments: &str, span: Span, path: &[String]) -> Resolution {
        let mut values = Vec::new();
        for argument in split(arguments) {
            let argument = argument.trim();
            if !argument.contains("${") {
                values.push(Node::plain(argument, span));
            } else if let Some(value) = self.text(argument, span, path)? {
                values.push(value);
            } else {
                return Ok(None);
            }
        }
        let help = "set the key to a plain value, here or on the command line";
        let unfit = || problem(format!("`{name}` does not accept these arguments"), help);
        if let Some(registered) = self.registered.iter().find(|r| r.name == name) {
            return match (registered.call)(&values) {
                Some(text) => Ok(Some(Node::string(text, span))),
                None => unfit(),
            };
        }
        // It parses its text: `${oc.decode:${oc.env:N,16}}` is a number.
        if name == "oc.decode" {
            return match values.as_slice() {
                [value] => match value.text() {
                    Some(text) if !text.is_empty() && !text.starts_with(['[', '{', '\'', '"']) => {
                        Ok(Some(Node::plain(text, span)))
                    }
                    _ => unfit(),
                },
                _ => unfit(),
            };
        }
        if name != "oc.env" {
            let message = format!("the resolver `{}` is not supported", short(name));
            return problem(message, help);
        }
        let variable = values.first().and_then(Node::text).unwrap_or_default();
        if let Some(value) = self.environment.get(variable) {
            return Ok(Some(Node::string(value, span)));
        }
        let Some(default) = values.get(1) else {
            return Err(self.environment.missing(variable));
        };
        // A default becomes Python's `str`; only null stays null.
        Ok(Some(match default.resolve(Schema::OmegaConf) {
            None | Some(Resolved::Null) => default.clone(),
            Some(value) => Node::string(value.to_string(), span),
        }))
    }
}

fn is_interpolated(node: &Node) -> bool {
    node.text().is_some_and(|text| text.contains("${"))
}

/// The bytes that a copy of a tree counts for.
fn size(node: &Node) -> usize {
    let below: usize = match &node.value {
        Value::Scalar(scalar) => scalar.text.len(),
        Value::Sequence(items) => items.iter().map(size).sum(),
        Value::Mapping(entries) => {
            let sizes = entries.iter().map(|e| e.name.len() + size(&e.value));
            sizes.sum()
        }
    };
    NODE + below
}

/// The length of the interpolation at the start of a text, bytes; `None`: it is not closed.
pub(super) fn length(text: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return Some(at + 1),
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The parts of a text between commas outside of braces and quotes.
pub(super) fn split(text: &str) -> Vec<&str> {
    let (mut depth, mut quote) = (0, None);
    let separates = |c: char| {
        match c {
            _ if quote == Some(c) => quote = None,
            _ if quote.is_some() => {}
            '\'' | '"' => quote = Some(c),
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' => return depth == 0,
            _ => {}
        }
        false
    };
    text.split(separates).collect()
}

#[cfg(test)]
mod tests {
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
        if reading.diagnostics.is_empty() {
            Ok(root)
        } else {
            Err(reading.diagnostics)
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
            ("a: $b ${b}$\nb: 3\n", "a", text("$b 3$")),
            ("a: ${l[1]}\nl: [1, 2]\n", "a", int(2)),
            ("a: ${l.0}\nl: [1, 2]\n", "a", int(1)),
            ("a: ${b[c]}\nb: {c: 2}\n", "a", int(2)),
            ("n: {m: \"${.k}\", k: 3}\n", "n.m", int(3)),
            ("n: {k: 3, p: {q: \"${..k}\"}}\n", "n.p.q", int(3)),
            ("a: ${n}\nn: {k: \"${b}\"}\nb: 2\n", "a.k", int(2)),
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
        assert!(problem("x: ${nope:1}\n").contains("the resolver `nope` is not supported"));
        assert!(problem("x: ${b\n").contains("is not closed"));
        for text in ["x: \\${b}\nb: 1\n", "x: \"${oc.env:A,'b'}\"\n"] {
            assert!(
                problem(text).contains("quotes and backslashes of"),
                "{text}"
            );
        }
        assert!(problem("x: ${oc.select:b,1}\nb: 1\n").contains("is not supported"));
        assert!(problem("x: ${${b}}\nb: c\n").contains("no key `${b}`"));
        let through = problem("x: ${b.c}\nb: ${d}\nd: {c: 4}\n");
        assert!(through.contains("name its target"), "{through}");
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
        let nested = format!("x: {}a{}\n", "${oc.env:".repeat(2000), "}".repeat(2000));
        assert!(problem(&nested).contains("longer than 64"));
    }

    #[test]
    fn interpolations_end_at_their_closing_brace() {
        assert_eq!(length("${a.b}/c"), Some(6));
        assert_eq!(length("${f:${a}}x"), Some(9));
        assert_eq!(length("${a"), None);
        assert_eq!(split("${g:1,2}, b,'c,d'"), ["${g:1,2}", " b", "'c,d'"]);
    }
}
