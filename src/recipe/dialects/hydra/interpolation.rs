//! OmegaConf's interpolations: `${a.b}`, `${.sibling}`, `${list[0]}`, `${a}/${b}`, and resolvers,
//! `${oc.env:NAME,default}` and those that a tree's program registers.
//!
//! Hostile input ends in a diagnostic: cycles are detected, and the number of resolved interpolations,
//! their depth and the size of the result are bounded.
//!
//! Source: OmegaConf 2.3, `base.py` (`_resolve_interpolation_from_parse_tree`), `grammar_visitor.py`.

mod text;

use std::borrow::Cow;
use std::collections::HashMap;

use crate::recipe::schema::environment::Environment;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::{Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::yaml::{MAX_DEPTH, Weight, weigh};
use crate::util::suggest::{did_you_mean, short};

use super::known::child;

pub(super) use text::length;
use text::{Part, keys, parts};

/// The most interpolations that one config may resolve; every use counts.
const MAX_STEPS: usize = 4096;
/// The most problems that one config reports.
const MAX_PROBLEMS: usize = 100;

/// A resolver that a tree's program registers.
pub struct Registered {
    /// The name before the colon.
    pub name: &'static str,
    /// Computes the value from the arguments; `None` if they are invalid.
    pub call: fn(&[Node]) -> Option<String>,
}

/// Resolves every interpolation of a config in place. One that refers to a missing mandatory value
/// becomes missing itself; one that cannot be resolved is reported.
pub(super) fn resolve(root: &mut Node, registered: &[Registered], reading: &mut Reading) {
    if !has_any(root) {
        return;
    }
    let frozen = root.clone();
    let mut resolver = Resolver::new(&frozen, registered, &reading.environment);
    let mut problems = Vec::new();
    resolver.tree(root, &mut Vec::new(), &mut problems);
    // Everything that uses a wrong interpolation fails with it, so report it once.
    problems.dedup_by(|b, a| a.0 == b.0 && a.1 == b.1);
    for (span, problem) in problems {
        let Problem { message, help } = problem;
        reading.error("interpolation", Some(span), message, help);
    }
}

/// Resolves the interpolations of a name in a defaults list: they refer to the options of groups, by
/// the groups' names, and to the environment. The error is message and help.
pub(super) fn name(
    text: &str,
    choices: &Node,
    registered: &[Registered],
    environment: &Environment,
    span: Span,
) -> Result<String, (String, String)> {
    let (path, depth) = (&[][..], 0);
    let found =
        Resolver::new(choices, registered, environment).text(text, At { span, path, depth });
    let wrong = |message: String, help: String| {
        let seen = "a list sees the options of later groups, and the environment";
        (message, format!("{help} ({seen})"))
    };
    match found {
        Ok(Resolution::Node(node)) => match node.resolve(Schema::OmegaConf) {
            Some(Resolved::Str(name)) if !name.is_empty() => Ok(name),
            _ => Err(wrong(
                format!("`{}` is not the name of an option", short(text)),
                "write the option's name".to_owned(),
            )),
        },
        Ok(Resolution::Missing) => Err(wrong(
            format!(
                "`{}` refers to a mandatory value without a value",
                short(text)
            ),
            "set it".to_owned(),
        )),
        Err(Problem { message, help }) => Err(wrong(message, help)),
    }
}

fn has_any(node: &Node) -> bool {
    match &node.value {
        Value::Scalar(scalar) => scalar.text.contains("${"),
        Value::Sequence(items) => items.iter().any(has_any),
        Value::Mapping(entries) => entries.iter().any(|entry| has_any(&entry.value)),
    }
}

#[derive(Debug, Clone, PartialEq)]
struct Problem {
    message: String,
    help: String,
}

impl Problem {
    fn new(message: impl Into<String>, help: impl Into<String>) -> Problem {
        Problem {
            message: message.into(),
            help: help.into(),
        }
    }
}

/// A value, or a mandatory value that is still missing.
#[derive(Debug, Clone, PartialEq)]
enum Resolution {
    Node(Node),
    Missing,
}

/// The node whose interpolations are resolved: its place, its path, and the depth of the chain so far.
#[derive(Clone, Copy)]
struct At<'p> {
    span: Span,
    path: &'p [String],
    depth: usize,
}

impl At<'_> {
    fn deeper(self) -> Self {
        At {
            depth: self.depth + 1,
            ..self
        }
    }
}

struct Resolver<'r> {
    /// The config after composition.
    root: &'r Node,
    registered: &'r [Registered],
    environment: &'r Environment,
    /// Resolved scalars, by path.
    known: HashMap<String, Resolution>,
    /// Paths of the scalars in progress, the outermost first.
    active: Vec<String>,
    steps: usize,
    /// Suggestions for misspelt keys, which take long in a large config.
    suggestions: usize,
    /// The size of the config and of everything copied into it.
    spent: Weight,
}

impl<'r> Resolver<'r> {
    fn new(root: &'r Node, registered: &'r [Registered], environment: &'r Environment) -> Self {
        Resolver {
            root,
            registered,
            environment,
            known: HashMap::new(),
            active: Vec::new(),
            steps: 0,
            suggestions: 0,
            spent: weigh(root),
        }
    }

    /// Resolves a tree at a path.
    fn tree(
        &mut self,
        node: &mut Node,
        path: &mut Vec<String>,
        problems: &mut Vec<(Span, Problem)>,
    ) {
        match &mut node.value {
            Value::Scalar(scalar) if !scalar.text.contains("${") => {}
            Value::Scalar(_) => match self.scalar(node, path, 0) {
                Ok(Resolution::Node(found)) => {
                    *node = Node {
                        span: node.span,
                        ..found
                    }
                }
                Ok(Resolution::Missing) => *node = Node::plain("???", node.span),
                Err(problem) if problems.len() < MAX_PROBLEMS => {
                    problems.push((node.span, problem));
                }
                Err(_) => {}
            },
            _ => {
                for (name, child) in node.children_mut() {
                    path.push(name);
                    self.tree(child, path, problems);
                    path.pop();
                }
            }
        }
    }

    /// A resolved copy of a node of the config.
    fn copy(&mut self, node: &Node, path: &[String], depth: usize) -> Result<Resolution, Problem> {
        if node.text().is_some_and(|text| text.contains("${")) {
            return self.scalar(node, path, depth);
        }
        if node.resolve(Schema::OmegaConf) == Some(Resolved::Missing) {
            return Ok(Resolution::Missing);
        }
        self.spend(weigh(node))?;
        let mut copy = node.clone();
        let mut problems = Vec::new();
        if node.text().is_none() {
            self.deeper(depth)?;
            self.tree(&mut copy, &mut path.to_vec(), &mut problems);
        }
        match problems.into_iter().next() {
            Some((_, problem)) => Err(problem),
            None => Ok(Resolution::Node(copy)),
        }
    }

    /// Resolves a scalar with interpolations.
    fn scalar(
        &mut self,
        node: &Node,
        path: &[String],
        depth: usize,
    ) -> Result<Resolution, Problem> {
        let span = node.span;
        let name = path.join(".");
        if let Some(known) = self.known.get(&name).cloned() {
            if let Resolution::Node(found) = &known {
                self.spend(weigh(found))?;
            }
            return Ok(known);
        }
        if let Some(at) = self.active.iter().position(|active| *active == name) {
            let mut circle: Vec<String> = self.active[at..].to_vec();
            circle.push(name);
            return Err(Problem::new(
                format!("the interpolation forms a cycle: {}", circle.join(" → ")),
                "set one of them to a plain value",
            ));
        }
        self.deeper(self.active.len() + depth)?;
        self.active.push(name.clone());
        let found = self.text(node.text().unwrap_or_default(), At { span, path, depth });
        self.active.pop();
        let found = found?;
        self.known.insert(name, found.clone());
        Ok(found)
    }

    /// Resolves the interpolations in a text.
    fn text(&mut self, text: &str, at: At<'_>) -> Result<Resolution, Problem> {
        self.deeper(at.depth)?;
        let parts = parts(text).ok_or_else(|| {
            Problem::new(
                format!("the interpolation in `{}` is not closed", short(text)),
                "close it with `}`, or write `\\${` for the characters themselves",
            )
        })?;
        if let [Part::Interpolation(inner)] = parts.as_slice() {
            return self.interpolation(inner, at.deeper());
        }
        let mut joined = String::new();
        for part in parts {
            match part {
                Part::Text(text) => joined += &text,
                Part::Interpolation(inner) => match self.interpolation(inner, at.deeper())? {
                    Resolution::Missing => return Ok(Resolution::Missing),
                    Resolution::Node(found) => joined += &embedded(&found, inner)?,
                },
            }
            self.spend(Weight {
                nodes: 0,
                text: joined.len(),
                height: 0,
            })?;
        }
        Ok(Resolution::Node(Node::string(joined, at.span)))
    }

    /// Resolves the text between `${` and `}`.
    fn interpolation(&mut self, inner: &str, at: At<'_>) -> Result<Resolution, Problem> {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            return Err(Problem::new(
                format!("the config resolves more than {MAX_STEPS} interpolations"),
                "write plain values",
            ));
        }
        self.deeper(at.depth)?;
        if let Some((name, arguments)) = text::resolver(inner) {
            return self.call(name, &arguments, at);
        }
        // A key may contain an interpolation: `${${which}}`.
        let written = match inner.contains("${") {
            false => inner.to_owned(),
            true => match self.text(inner, at)? {
                Resolution::Missing => return Ok(Resolution::Missing),
                Resolution::Node(found) => embedded(&found, inner)?,
            },
        };
        self.key(&written, at.path, at.depth)
    }

    /// The node that a key names.
    fn key(&mut self, written: &str, path: &[String], depth: usize) -> Result<Resolution, Problem> {
        let written = written.trim();
        let dots = written.bytes().take_while(|b| *b == b'.').count();
        let unknown = |help: String| {
            Problem::new(
                format!(
                    "there is no key `{}` for `${{{}}}`",
                    short(&written[dots..]),
                    short(written)
                ),
                help,
            )
        };
        let base = match dots {
            0 => Some(0),
            dots => path.len().checked_sub(dots),
        };
        let base = base.ok_or_else(|| unknown("it has more dots than there are levels".into()))?;
        let mut at: Vec<String> = path[..base].to_vec();
        at.extend(keys(&written[dots..]));
        let root = self.root;
        let mut here = Cow::Borrowed(root);
        for (level, key) in at.iter().enumerate() {
            if here.text().is_some_and(|text| text.contains("${")) {
                match self.scalar(&here, &at[..level], depth)? {
                    Resolution::Missing => return Ok(Resolution::Missing),
                    Resolution::Node(found) => here = Cow::Owned(found),
                }
            }
            let below = match &here {
                Cow::Borrowed(node) => child(node, key).map(Cow::Borrowed),
                Cow::Owned(node) => child(node, key).cloned().map(Cow::Owned),
            };
            here = below.ok_or_else(|| {
                self.suggestions += 1;
                let known = here.entries().unwrap_or_default().iter();
                unknown(if self.suggestions <= MAX_PROBLEMS {
                    did_you_mean(key, known.map(|e| e.name.as_str()))
                } else {
                    "check its spelling".to_owned()
                })
            })?;
        }
        match here {
            Cow::Borrowed(node) => self.copy(node, &at, depth),
            // A node from an interpolation is resolved already.
            Cow::Owned(node) => {
                self.spend(weigh(&node))?;
                Ok(Resolution::Node(node))
            }
        }
    }

    /// The value of a resolver.
    fn call(&mut self, name: &str, arguments: &[&str], at: At<'_>) -> Result<Resolution, Problem> {
        let span = at.span;
        let mut values = Vec::new();
        for argument in arguments {
            let unquoted = text::unquoted(argument);
            match argument.contains("${") {
                false => values.push(Node::string(unquoted, span)),
                true => match self.text(unquoted, at)? {
                    Resolution::Missing => return Ok(Resolution::Missing),
                    Resolution::Node(value) => values.push(value),
                },
            }
        }
        let first = values.first().and_then(Node::text).unwrap_or_default();
        let default = values.get(1).cloned();
        let unfit = || {
            Problem::new(
                format!("`{name}` does not accept these arguments"),
                "set the key to a plain value, here or on the command line",
            )
        };
        if let Some(registered) = self.registered.iter().find(|r| r.name == name) {
            let text = (registered.call)(&values).ok_or_else(unfit)?;
            return Ok(Resolution::Node(Node::string(text, span)));
        }
        let as_written = |node: Node| match node.text() {
            // A default is a scalar of the grammar: `${oc.select:n,5}` is a number.
            Some(text) if arguments.get(1).is_some_and(|a| a.trim() == text) => {
                Node::plain(text, span)
            }
            _ => node,
        };
        match name {
            // The environment gives text, a default Python's `str`; only null stays null.
            "oc.env" => match (self.environment.get(first), default) {
                (Some(value), _) => Ok(Resolution::Node(Node::string(value, span))),
                (None, Some(default)) => {
                    let default = as_written(default);
                    Ok(Resolution::Node(match default.resolve(Schema::OmegaConf) {
                        None | Some(Resolved::Null) => default,
                        Some(value) => Node::string(value.to_string(), span),
                    }))
                }
                (None, None) => {
                    let (message, help) = self.environment.missing(first);
                    Err(Problem { message, help })
                }
            },
            // `oc.decode` parses its text: `${oc.decode:${oc.env:N,16}}` is a number.
            "oc.decode" => match values.iter().map(Node::text).collect::<Vec<_>>().as_slice() {
                [Some(text)] if !text.starts_with(['[', '{', '\'', '"']) => {
                    Ok(Resolution::Node(Node::plain(*text, span)))
                }
                _ => Err(unfit()),
            },
            "oc.select" => match (self.key(first, at.path, at.depth), default) {
                (Ok(Resolution::Node(found)), _) => Ok(Resolution::Node(found)),
                (_, Some(default)) => Ok(Resolution::Node(as_written(default))),
                (Ok(Resolution::Missing), None) => Ok(Resolution::Missing),
                (Err(_), None) => Ok(Resolution::Node(Node::plain("null", span))),
            },
            _ => Err(Problem::new(
                format!("unknown resolver `{name}`"),
                "set the key to a plain value, here or on the command line",
            )),
        }
    }

    fn deeper(&self, depth: usize) -> Result<(), Problem> {
        if depth < MAX_DEPTH {
            return Ok(());
        }
        Err(Problem::new(
            format!("a chain of interpolations is longer than {MAX_DEPTH}"),
            "write plain values",
        ))
    }

    fn spend(&mut self, weight: Weight) -> Result<(), Problem> {
        let total = self.spent.with(weight);
        self.spent = total.ok_or_else(|| {
            Problem::new(
                "the interpolations make the config larger than any recipe",
                "write plain values, or check that this is the right file",
            )
        })?;
        Ok(())
    }
}

/// A value as part of a text.
fn embedded(node: &Node, inner: &str) -> Result<String, Problem> {
    let value = node.resolve(Schema::OmegaConf).ok_or_else(|| {
        Problem::new(
            format!("`${{{}}}` is {} inside a text", short(inner), node.kind()),
            "refer to one of its values, or remove the text around it",
        )
    })?;
    Ok(value.to_string())
}

#[cfg(test)]
mod tests;
