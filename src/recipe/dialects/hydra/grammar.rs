//! One override of the command line in Hydra's grammar: `key=value`, `+key=value`, `++key=value`,
//! `~key`.
//!
//! Its values are not YAML: `NO` and `010` are text here, only `true` and `false` are booleans,
//! and a value with other characters than letters, digits and `/-+.$%*@?|:_` needs quotes.
//! Mappings, functions, escapes and packages are refused, and so are sweeps: a recipe is one job.
//!
//! Source: Hydra 1.3, `grammar/OverrideLexer.g4`, `grammar/OverrideParser.g4` and
//! `core/override_parser/overrides_visitor.py`.

use std::sync::LazyLock;

use regex::Regex;

use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::{FileId, Position, Span};
use crate::recipe::syntax::words::cut;
use crate::recipe::syntax::yaml::MAX_DEPTH;
use crate::util::suggest::short;

use super::interpolation::{length, split};

/// The effect of an override.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `key=value`: the key must exist.
    Change,
    /// `+key=value`: the key must not exist.
    Add,
    /// `++key=value`: the key may exist.
    Force,
    /// `~key`: removes the key.
    Delete,
}

/// One override of the command line.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Override {
    pub kind: Kind,
    /// The key: dots between keys of a config, slashes between parts of a group.
    pub key: String,
    /// `None` only for `~key`.
    pub value: Option<Node>,
    pub span: Span,
}

/// Reads an override that begins at this position of the virtual file.
pub(super) fn parse(text: &str, at: Position, file: FileId) -> Result<Override, Diagnostic> {
    let (kind, rest) = if let Some(rest) = text.strip_prefix("++") {
        (Kind::Force, rest)
    } else if let Some(rest) = text.strip_prefix('+') {
        (Kind::Add, rest)
    } else if let Some(rest) = text.strip_prefix('~') {
        (Kind::Delete, rest)
    } else {
        (Kind::Change, text)
    };
    let marks = &text[..text.len() - rest.len()];
    let (name, value) = cut(rest, '=');
    let name_at = at.after(marks);
    let span = name_at.span(file, name);
    if value.is_some() == (kind == Kind::Delete) {
        return refuse(
            span,
            format!("`{}` is not KEY=VALUE", short(text)),
            "write `key=value`, `+key=value` for a new key, or `~key` to remove one",
        );
    }
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-./$:".contains(c);
    if name.is_empty() || !name.chars().all(fits) {
        return refuse(
            span,
            format!("`{}` is not a key", short(name)),
            "write the key's parts with dots between them: `model.batch_size=32`",
        );
    }
    if name.split(['.', '/']).count() > MAX_DEPTH {
        return refuse(
            span,
            format!("the key has more than {MAX_DEPTH} parts"),
            "remove parts of it",
        );
    }
    let value = match value {
        None => None,
        Some(text) => Some(value_of(name, text, name_at.after(name).after("="), file)?),
    };
    Ok(Override {
        kind,
        key: name.to_owned(),
        value,
        span,
    })
}

fn refuse<T>(span: Span, message: impl Into<String>, help: &str) -> Result<T, Diagnostic> {
    let rule = "override-syntax";
    Err(Diagnostic::error(rule, Some(span), message, help))
}

/// The message and the help for a command line of several jobs.
pub(super) fn sweep(written: &str) -> (String, &'static str) {
    (
        format!("`{written}` is a sweep of several jobs, but a recipe is one job"),
        "give one value, and run one job after another; `KEY=[…]` is a list, `KEY='…'` text with a comma",
    )
}

/// Unquoted values that are not text, as far as Hydra (`grammar/OverrideLexer.g4`) and OmegaConf agree on them.
static PLAIN: LazyLock<Option<Regex>> = LazyLock::new(|| {
    let number = r"[+-]?(0|[1-9][0-9]*(_[0-9]+)*)(\.[0-9]*)?(e[+-]?[0-9]+)?|\.[0-9]+";
    Regex::new(&format!("(?i)^(true|false|null|{number})$")).ok()
});

/// Reads the value of a key, which begins at this position: a scalar, or a list of scalars.
fn value_of(key: &str, text: &str, at: Position, file: FileId) -> Result<Node, Diagnostic> {
    let span = at.span(file, text);
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Ok(Node::string("", span));
    }
    if !trimmed.starts_with('[') {
        if split(text).len() > 1 {
            let (message, help) = sweep(&format!("{key}={}", short(text)));
            return refuse(span, message, help);
        }
        return scalar(text, at, file);
    }
    let Some(inside) = trimmed[1..].strip_suffix(']') else {
        let help = "check the brackets, and quote text with other characters";
        return refuse(span, "a `]` is missing at the end", help);
    };
    let mut items = Vec::new();
    let before = text.len() - text.trim_start().len();
    let mut at = at.after(&text[..=before]);
    if !inside.trim().is_empty() {
        for item in split(inside) {
            items.push(scalar(item, at, file)?);
            at = at.after(item).after(",");
        }
    }
    Ok(Node::sequence(items, span))
}

const QUOTES: &str = "put the value into quotes: `key='…'` (and once more for the shell)";

/// Reads quoted or unquoted text, a number, a boolean or `null`.
fn scalar(written: &str, at: Position, file: FileId) -> Result<Node, Diagnostic> {
    let text = written.trim_start();
    let at = at.after(&written[..written.len() - text.len()]);
    let text = text.trim_end();
    let span = at.span(file, text);
    let mut rest = text;
    match text.chars().next() {
        None => return refuse(span, "a value is missing", "write `''` for empty text"),
        Some('[') => {
            let help = "no recipe key takes one: flatten it";
            return refuse(span, "a list in a list is not supported", help);
        }
        Some('{') => {
            let help = "set its keys one at a time, `key.a=1 key.b=2`";
            return refuse(span, "a mapping is not supported as a value", help);
        }
        Some(quote @ ('\'' | '"')) => {
            let Some(inside) = text[1..].strip_suffix(quote) else {
                let message = format!("the quote `{quote}` is not closed at the end");
                return refuse(span, message, "close the text with the same quote");
            };
            if inside.contains(quote) || inside.ends_with('\\') {
                let message = format!("`{quote}` within quotes of this kind is not supported");
                return refuse(
                    span,
                    message,
                    "use the other kind of quotes around the text",
                );
            }
            return Ok(Node::string(inside, span));
        }
        // Hydra keeps the blanks after a colon.
        Some(_) if text.ends_with(':') && !written.ends_with(':') => {
            return refuse(span, "`:` before a blank needs quotes", QUOTES);
        }
        Some(_) => {}
    }
    while let Some(c) = rest.chars().next() {
        let here = at.after(&text[..text.len() - rest.len()]).span(file, "");
        if rest.starts_with("${") {
            let Some(end) = length(rest) else {
                let help = "close it with `}`";
                return refuse(here, "the interpolation `${` is not closed", help);
            };
            rest = &rest[end..];
            continue;
        }
        if c == '(' {
            let name = short(text[..text.len() - rest.len()].trim());
            let message =
                format!("`{name}(…)` is a function of Hydra's grammar, which is not supported");
            let help = "write the value itself; quote text with brackets";
            return refuse(here, message, help);
        }
        if !(c.is_ascii_alphanumeric() || " \t_/-+.$%*@?|:".contains(c)) {
            return refuse(here, format!("`{c}` needs quotes in a value"), QUOTES);
        }
        rest = &rest[c.len_utf8()..];
    }
    if PLAIN.as_ref().is_some_and(|plain| plain.is_match(text)) {
        Ok(Node::plain(text.to_ascii_lowercase(), span))
    } else {
        Ok(Node::string(text, span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::syntax::scalar::{Resolved, Schema};

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
            (r"'a\b'", text(r"a\b")),
            ("/a/b:c", text("/a/b:c")),
            ("${b.c}/d", text("${b.c}/d")),
            ("1e-5", Resolved::Float(1e-5)),
            ("5.", Resolved::Float(5.0)),
            ("1_0.5", Resolved::Float(10.5)),
            ("20_000", Resolved::Int(20_000)),
            ("+1", Resolved::Int(1)),
            ("True", Resolved::Bool(true)),
            ("null", Resolved::Null),
            ("???", Resolved::Missing),
            ("00.5", text("00.5")),
            (".5", Resolved::Float(0.5)),
        ] {
            assert_eq!(value(written), read, "{written}");
        }
    }

    #[test]
    fn lists_keep_the_positions_of_their_items() {
        let read = read("++a.b=[x, 1, 'y']").unwrap();
        assert_eq!((read.kind, read.key.as_str()), (Kind::Force, "a.b"));
        let value = read.value.unwrap();
        let items = value.items().unwrap();
        assert_eq!(items[0].text(), Some("x"));
        assert_eq!(items[1].text(), Some("1"));
        assert_eq!((items[2].span.line, items[2].span.column), (1, 14));
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
            ("a=int(1)", "`int(…)` is a function"),
            ("a=\\,x", "sweep"),
            ("a=b: ", "needs quotes"),
            (r"a='x\'y'", "within quotes"),
            ("a=[[1]]", "a list in a list"),
            ("~a=1", "KEY=VALUE"),
            ("model@other=llama", "not a key"),
            ("a=[1", "missing"),
            ("a='x", "is not closed"),
            ("a=${b", "is not closed"),
            ("a={b: 1}", "a mapping is not supported"),
            ("a=[1,]", "missing"),
        ] {
            let problem = read(text).unwrap_err();
            assert!(
                problem.message.contains(word),
                "{text}: {}",
                problem.message
            );
        }
    }

    #[test]
    fn a_sweep_is_refused_at_its_values() {
        let problem = read("loss=sft, dpo").unwrap_err();
        let message = "`loss=sft, dpo` is a sweep of several jobs, but a recipe is one job";
        assert_eq!(problem.message, message);
        let span = problem.span.unwrap();
        assert_eq!((span.start, span.end), (5, 13));
    }

    #[test]
    fn a_deletion_has_no_value() {
        let gone = read("~model").unwrap();
        assert_eq!((gone.kind, gone.value), (Kind::Delete, None));
    }
}
