//! One override of the command line in Hydra's grammar: `key=value`, `+key=value`, `++key=value`,
//! `~key`, with a package (`key@package=value`) for a group.
//!
//! Its values are not YAML: `NO` and `010` are text here, only `true` and `false` are booleans,
//! and a value with other characters than letters, digits and `/-\+.$%*@?|:_` needs quotes.
//!
//! Source: Hydra 1.3, `grammar/OverrideLexer.g4`, `grammar/OverrideParser.g4` and
//! `core/override_parser/overrides_visitor.py`.

use crate::recipe::schema::overrides::Position;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::{FileId, Span};
use crate::recipe::syntax::words::cut;
use crate::recipe::syntax::yaml::MAX_DEPTH;
use crate::util::suggest::short;

use super::cast::{CASTS, cast};
use super::primitive::plain;
use super::sweep;

/// The effect of an override.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `key=value`: the key must exist.
    Change,
    /// `+key=value`: the key must not exist.
    Add,
    /// `++key=value`: the key may exist.
    Force,
    /// `~key`, `~key=value`: removes the key.
    Delete,
}

/// One override of the command line.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Override {
    pub kind: Kind,
    /// The key: dots between keys of a config, slashes between parts of a group.
    pub key: String,
    /// The package after `@`.
    pub package: Option<String>,
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
    let refuse = |message: String, help: &str| {
        Err(Diagnostic::error(
            "override-syntax",
            Some(span),
            message,
            help,
        ))
    };
    if value.is_none() && kind != Kind::Delete {
        return refuse(
            format!("`{}` is not KEY=VALUE", short(text)),
            "write `key=value`, `+key=value` for a new key, or `~key` to remove one",
        );
    }
    let (key, package) = cut(name, '@');
    let fits = |c: char| c.is_ascii_alphanumeric() || "_-./$:".contains(c);
    if key.is_empty() || !name.chars().all(|c| fits(c) || c == '@') {
        return refuse(
            format!("`{}` is not a key", short(name)),
            "write the key's parts with dots between them: `model.batch_size=32`",
        );
    }
    if key.split(['.', '/']).count() > MAX_DEPTH {
        return refuse(
            format!("the key has more than {MAX_DEPTH} parts"),
            "remove parts of it",
        );
    }
    let value = match value {
        None => None,
        Some(value) => {
            let start = name_at.after(name).after("=");
            Some(Parser::whole(value, start, file, key)?)
        }
    };
    Ok(Override {
        kind,
        key: key.to_owned(),
        package: package.map(str::to_owned),
        value,
        span,
    })
}

/// A parser of one value.
struct Parser<'t> {
    text: &'t str,
    at: usize,
    /// The position of `text`.
    start: Position,
    file: FileId,
}

impl<'t> Parser<'t> {
    /// Reads the whole text as one value of a key.
    fn whole(text: &'t str, start: Position, file: FileId, key: &str) -> Result<Node, Diagnostic> {
        let mut parser = Parser {
            text,
            at: 0,
            start,
            file,
        };
        if text.trim().is_empty() {
            return Ok(Node::string("", start.span(file, text)));
        }
        let value = parser.element(0)?;
        parser.blanks();
        match parser.peek() {
            None => Ok(value),
            Some(',') => Err(parser.several(key)),
            Some(c) => Err(parser.problem(
                format!("unexpected `{c}` after the value"),
                "put the value into quotes: `key='…'`",
            )),
        }
    }

    /// The error for several values between commas, after the first one.
    fn several(mut self, key: &str) -> Diagnostic {
        let mut values = vec![self.text[..self.at].trim()];
        while self.peek() == Some(',') {
            self.next();
            let from = self.at;
            if let Err(problem) = self.element(0) {
                return problem;
            }
            self.blanks();
            values.push(self.text[from..self.at].trim());
        }
        let (message, help) = sweep::values(key, &values);
        let span = self.start.span(self.file, self.text);
        Diagnostic::error("override-syntax", Some(span), message, help)
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let next = self.peek()?;
        self.at += next.len_utf8();
        Some(next)
    }

    fn blanks(&mut self) {
        while self.peek().is_some_and(char::is_whitespace) {
            self.next();
        }
    }

    /// The span read since `from`.
    fn span(&self, from: usize) -> Span {
        self.start
            .after(&self.text[..from])
            .span(self.file, &self.text[from..self.at])
    }

    fn problem(&self, message: impl Into<String>, help: impl Into<String>) -> Diagnostic {
        let here = self.start.after(&self.text[..self.at]).span(self.file, "");
        Diagnostic::error("override-syntax", Some(here), message, help)
    }

    fn element(&mut self, depth: usize) -> Result<Node, Diagnostic> {
        if depth >= MAX_DEPTH {
            return Err(self.problem(
                format!("the value nests deeper than {MAX_DEPTH}"),
                "flatten the value",
            ));
        }
        self.blanks();
        match self.peek() {
            Some(quote @ ('\'' | '"')) => self.quoted(quote),
            Some('[') => self.list(depth),
            Some('{') => Err(self.problem(
                "a mapping is not supported as a value",
                "set its keys one at a time, `key.a=1 key.b=2`",
            )),
            _ => self.primitive(depth),
        }
    }

    fn quoted(&mut self, quote: char) -> Result<Node, Diagnostic> {
        let from = self.at;
        self.next();
        let mut text = String::new();
        // Backslashes escape in pairs, and only before a quote.
        let mut backslashes = 0_usize;
        while let Some(c) = self.next() {
            match c {
                '\\' => {
                    backslashes += 1;
                    text.push(c);
                }
                c if c == quote => {
                    text.truncate(text.len() - backslashes.div_ceil(2));
                    if backslashes.is_multiple_of(2) {
                        return Ok(Node::string(text, self.span(from)));
                    }
                    backslashes = 0;
                    text.push(c);
                }
                c => {
                    backslashes = 0;
                    text.push(c);
                }
            }
        }
        Err(self.problem(
            format!("the quote `{quote}` is not closed"),
            "close the text with the same quote",
        ))
    }

    fn list(&mut self, depth: usize) -> Result<Node, Diagnostic> {
        let from = self.at;
        self.next();
        let mut items = Vec::new();
        self.blanks();
        if self.peek() == Some(']') {
            self.next();
        } else {
            loop {
                items.push(self.element(depth + 1)?);
                if self.separator(']')? {
                    break;
                }
            }
        }
        Ok(Node::sequence(items, self.span(from)))
    }

    /// Reads a comma (false), or the end of the collection (true).
    fn separator(&mut self, end: char) -> Result<bool, Diagnostic> {
        self.blanks();
        match self.next() {
            Some(',') => Ok(false),
            Some(c) if c == end => Ok(true),
            _ => Err(self.problem(
                format!("a `,` or `{end}` is missing"),
                "check the brackets, and quote text with other characters",
            )),
        }
    }

    /// Reads a number, a boolean, `null`, unquoted text, or a function.
    fn primitive(&mut self, depth: usize) -> Result<Node, Diagnostic> {
        let (from, inside) = (self.at, depth > 0);
        let mut text = String::new();
        let mut is_text = false;
        // Trailing blanks belong to the text if they are escaped or follow a colon.
        let mut kept = 0;
        while let Some(c) = self.peek() {
            let rest = &self.text[self.at..];
            if c == ',' || (inside && "]})".contains(c)) {
                break;
            }
            if rest.starts_with("${") {
                let length = super::interpolation::length(rest).ok_or_else(|| {
                    self.problem("the interpolation `${` is not closed", "close it with `}`")
                })?;
                text.push_str(&rest[..length]);
                self.at += length;
                is_text = true;
                continue;
            }
            self.next();
            match c {
                '\\' if self.peek().is_some_and(|c| "\\()[]{}:=, \t".contains(c)) => {
                    text.extend(self.next());
                    kept = text.len();
                    is_text = true;
                }
                ':' => {
                    let blanks = self.at;
                    self.blanks();
                    text.push(c);
                    text.push_str(&self.text[blanks..self.at]);
                    kept = text.len();
                }
                '(' if !is_text => return self.function(text.trim(), from, depth),
                c if c.is_ascii_alphanumeric() || " \t_/-\\+.$%*@?|".contains(c) => text.push(c),
                c => {
                    return Err(self.problem(
                        format!("`{c}` needs quotes in a value"),
                        "put the value into quotes: `key='…'` (and once more for the shell)",
                    ));
                }
            }
        }
        let blanks = text.len() - kept.max(text.trim_end().len());
        text.truncate(text.len() - blanks);
        self.at -= blanks;
        let span = self.span(from);
        if self.at == from {
            return Err(self.problem("a value is missing", "write `''` for empty text"));
        }
        Ok(match plain(&text).filter(|_| !is_text) {
            Some(plain) => Node::plain(plain, span),
            None => Node::string(text, span),
        })
    }

    /// Reads the arguments of a function, after its name and opening bracket.
    fn function(&mut self, name: &str, from: usize, depth: usize) -> Result<Node, Diagnostic> {
        if !CASTS.contains(&name) {
            let (message, help) = sweep::function(name).unwrap_or_else(|| {
                let help = "write the value itself; quote text with brackets";
                let message = format!("`{name}(…)` is a function of Hydra's grammar");
                (message, help.to_owned())
            });
            return Err(self.problem(message, help));
        }
        self.blanks();
        if let Some(rest) = self.text[self.at..].strip_prefix("value")
            && rest.trim_start().starts_with('=')
        {
            self.at = self.text.len() - rest.trim_start().len() + 1;
        }
        let value = self.element(depth + 1)?;
        if !self.separator(')')? {
            let message =
                format!("`{name}(…)` of several values is a sweep, but a recipe is one job");
            return Err(self.problem(message, "give one value at a time, `KEY=VALUE`"));
        }
        let span = self.span(from);
        cast(name, &value, span).ok_or_else(|| {
            let written = short(&self.text[from..self.at]);
            let message = format!("`{written}` cannot convert its value");
            Diagnostic::error(
                "override-syntax",
                Some(span),
                message,
                "write the value itself",
            )
        })
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
        let read = read("++a.b=[x, 1, ['y']]").unwrap();
        assert_eq!((read.kind, read.key.as_str()), (Kind::Force, "a.b"));
        let value = read.value.unwrap();
        let items = value.items().unwrap();
        assert_eq!(items[0].text(), Some("x"));
        assert_eq!(items[1].text(), Some("1"));
        let inner = &items[2].items().unwrap()[0];
        assert_eq!((inner.span.line, inner.span.column), (1, 15));
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
        let many = read("a=[1,2],[3],'x,y',4,5").unwrap_err().help;
        assert!(
            many.contains("`a=[3]`, then `a='x,y'`, then `a=4`, and so on"),
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
}
