//! Recipe readers: one file per upstream dialect, every one of them to the same [`Recipe`].
//!
//! A reader translates its dialect into a tree with the native recipe's keys whose values still
//! point at the user's own lines; [`native`] turns that tree into a [`Spec`] and the map of
//! places. Nothing here plans, and nothing here looks at hardware.

#[cfg(test)]
pub mod corpus;
pub mod diagnostic;
pub mod native;
pub mod node;
pub mod overrides;
pub mod reader;
pub mod scalar;
pub mod source;
pub mod spec;
mod suggest;
pub mod yaml;

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use diagnostic::{Diagnostic, Located, Severity};
pub use overrides::Setting;
pub use source::{FileId, Place, Places, Sources, Span};
pub use spec::Spec;

use node::Node;
use reader::{Detected, READERS, Reader};

/// Which upstream (or our own) way of writing recipes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// `evenkeel.dev/v1alpha1`, kind `Recipe`.
    Native,
    /// alignment-handbook and TRL YAML.
    HandbookTrl,
}

impl Dialect {
    /// The name that `--dialect` takes and that plans carry.
    pub fn name(self) -> &'static str {
        match self {
            Dialect::Native => "native",
            Dialect::HandbookTrl => "handbook-trl",
        }
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Dialect {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let mut read = READERS.iter().map(|r| r.dialect());
        read.find(|d| d.name() == name)
            .ok_or_else(|| suggest::did_you_mean(name, READERS.iter().map(|r| r.dialect().name())))
    }
}

/// What to read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// The recipe.
    pub path: PathBuf,
    /// An accelerate config beside it.
    pub accelerate: Option<PathBuf>,
    /// `KEY=VALUE` in the recipe's own dialect, or below the reserved key `evenkeel`.
    pub overrides: Vec<String>,
    /// The dialect, where detection should not decide.
    pub dialect: Option<Dialect>,
    /// Flags that set a native key; they win over everything else.
    pub settings: Vec<Setting>,
}

/// A recipe that cannot be used: everything that is wrong with it, and the files it stood in.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}", self.summary())]
pub struct ReadError {
    /// The files that were read.
    pub sources: Sources,
    /// At least one error, and whatever else was noticed.
    pub diagnostics: Vec<Diagnostic>,
}

impl ReadError {
    /// The first error in one line, for callers that cannot draw diagnostics.
    fn summary(&self) -> String {
        let errors = || {
            let all = self.diagnostics.iter();
            all.filter(|d| d.severity == Severity::Error)
        };
        let Some(first) = errors().next() else {
            return "the recipe cannot be read".to_owned();
        };
        let located = first.locate(&self.sources);
        let mut text = match (located.file, located.line, located.column) {
            (Some(file), Some(line), Some(column)) => format!("{file}:{line}:{column}: "),
            (Some(file), ..) => format!("{file}: "),
            _ => String::new(),
        };
        text.push_str(&format!("{} ({})", located.message, located.help));
        match errors().count() {
            0 | 1 => text,
            n => format!("{text}, and {} more", n - 1),
        }
    }
}

/// A recipe that was read: what it says, where it says it, and what was noticed on the way.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// How it was written.
    pub dialect: Dialect,
    /// Why the reader took it for that dialect, one line.
    pub detected: String,
    /// What it says.
    pub spec: Spec,
    /// Where it says it, by native path.
    pub places: Places,
    /// The files that were read.
    pub sources: Sources,
    /// What the reader noticed. Errors of form are never here: they end the reading.
    pub diagnostics: Vec<Diagnostic>,
}

impl Recipe {
    /// Where the value at a native path stood, if anybody wrote it.
    pub fn span(&self, path: &str) -> Option<Span> {
        self.places.get(path).map(|p| p.span)
    }

    /// The key as the user's dialect spells it, for messages; the native path if nobody wrote it.
    pub fn key<'a>(&'a self, path: &'a str) -> &'a str {
        self.places.get(path).map_or(path, |p| p.key.as_str())
    }
}

/// Reads a recipe in whatever dialect it is written.
///
/// Errors of form end the reading: all of them are in the [`ReadError`]. Warnings are in the
/// [`Recipe`].
pub fn read(request: &Request) -> Result<Recipe, ReadError> {
    let mut reading = Reading::default();
    match reading.read(request) {
        Some((reader, detected, spec, places)) => Ok(Recipe {
            dialect: reader.dialect(),
            detected,
            spec,
            places,
            sources: reading.sources,
            diagnostics: reading.diagnostics,
        }),
        None => Err(ReadError {
            sources: reading.sources,
            diagnostics: reading.diagnostics,
        }),
    }
}

/// What has been gathered so far.
#[derive(Default)]
struct Reading {
    sources: Sources,
    diagnostics: Vec<Diagnostic>,
}

/// The reader, why it was chosen, and what it found.
type Found = (&'static dyn Reader, String, Spec, Places);

impl Reading {
    fn read(&mut self, request: &Request) -> Option<Found> {
        let mut root = self.load(&request.path)?;
        let (reader, detected) = self.choose(&root, request)?;
        let command_line =
            overrides::add_source(&mut self.sources, &request.overrides, &request.settings);
        if let Some(file) = command_line {
            overrides::apply(
                &mut root,
                &request.overrides,
                file,
                |key| reader.override_path(key),
                &mut self.diagnostics,
            );
        }
        let mut native = reader
            .translate(&root, &request.path, &mut self.diagnostics)
            .native;
        if let Some(file) = command_line {
            native.overlay(overrides::settings_tree(
                &request.overrides,
                &request.settings,
                file,
            ));
            self.refuse_unknown_overrides(file);
        }
        let built = native::build(&native, &mut self.diagnostics);
        let refused = self
            .diagnostics
            .iter()
            .any(|d| d.severity == Severity::Error);
        let (spec, places) = built.filter(|_| !refused)?;
        Some((reader, detected, spec, places))
    }

    /// An unknown key may be a warning in a file, where upstream ignores it; whoever types one
    /// wants it to do something.
    fn refuse_unknown_overrides(&mut self, command_line: FileId) {
        for diagnostic in &mut self.diagnostics {
            let typed = diagnostic.span.is_some_and(|s| s.file == command_line);
            if typed && diagnostic.rule == "unknown-key" {
                diagnostic.severity = Severity::Error;
            }
        }
    }

    /// Reads and parses one file.
    fn load(&mut self, path: &Path) -> Option<Node> {
        let unreadable = |message: String, help: &str| {
            Diagnostic::error(
                "unreadable-file",
                None,
                format!("`{}` {message}", path.display()),
                help,
            )
        };
        // One byte more than allowed is enough to know that a file is too large.
        let mut bytes = Vec::new();
        let limit = yaml::MAX_BYTES as u64 + 1;
        let read = File::open(path).and_then(|f| f.take(limit).read_to_end(&mut bytes));
        if let Err(error) = read {
            let problem = unreadable(
                format!("cannot be read: {error}"),
                "give the path of a recipe file",
            );
            self.diagnostics.push(problem);
            return None;
        }
        let text = match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => {
                let problem = unreadable(
                    format!(
                        "is not UTF-8 text (byte {} is the first that is not)",
                        error.utf8_error().valid_up_to()
                    ),
                    "save it as UTF-8",
                );
                self.diagnostics.push(problem);
                return None;
            }
        };
        let file = self.sources.add(path, text);
        let text = self.sources.get(file).map_or("", |f| f.text.as_str());
        yaml::parse(text, file, &mut self.diagnostics)
    }

    /// The reader that is surest of the file, or the one asked for.
    fn choose(&mut self, root: &Node, request: &Request) -> Option<(&'static dyn Reader, String)> {
        if root.entries().is_none() {
            let message = format!("a recipe is a mapping, this is {}", root.kind());
            let help = "write `key: value` lines; is this the right file?";
            self.diagnostics.push(Diagnostic::error(
                "wrong-type",
                Some(root.span),
                message,
                help,
            ));
            return None;
        }
        if let Some(dialect) = request.dialect {
            let reader = READERS.iter().copied().find(|r| r.dialect() == dialect)?;
            return Some((reader, format!("`--dialect {dialect}`")));
        }
        let mut best: Option<(&'static dyn Reader, Detected)> = None;
        for reader in READERS.iter().copied() {
            if let Some(detected) = reader.detect(root, &request.path)
                && best
                    .as_ref()
                    .is_none_or(|(_, b)| detected.confidence > b.confidence)
            {
                best = Some((reader, detected));
            }
        }
        match best {
            Some((reader, detected)) => Some((reader, detected.reason)),
            None => {
                let read: Vec<&str> = READERS.iter().map(|r| r.dialect().name()).collect();
                self.diagnostics.push(Diagnostic::error(
                    "unknown-dialect",
                    Some(root.span),
                    "the file is not a recipe in a dialect that is known here",
                    format!(
                        "read are: {}; `--dialect` decides where no key does",
                        read.join(", ")
                    ),
                ));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
