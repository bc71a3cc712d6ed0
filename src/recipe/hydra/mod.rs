//! Hydra's composition, as far as trees of training configs use it: defaults lists wherever they
//! stand in a file, `_self_`, config groups, packages, overrides of groups and of values on the
//! command line, `???`, interpolations, and scalars as OmegaConf reads them.
//!
//! What comes out is one tree whose values still point at the files and overrides that they stood
//! in. Nothing here knows what the values mean; `super::halos` and `super::dpo` do.
//!
//! Source: Hydra 1.3 (`version_base=None`, so the behaviour of the newest version), OmegaConf 2.3.

mod assign;
mod cast;
mod compose;
mod defaults;
mod grammar;
mod interpolation;
mod known;
mod layer;
mod names;
mod place;
mod primitive;
mod searchpath;
mod selection;
mod sweep;
mod values;

use std::path::PathBuf;

use super::dialect::RESERVED;
use super::node::Node;
use super::overrides::{Position, apply_one};
use super::reading::Reading;
use super::scalar::{Resolved, Schema};
use super::source::{FileId, Span};

use compose::Composer;
use grammar::Override;
use selection::Selection;

pub use interpolation::Registered;
pub use place::{Place, root_of};
pub use values::Values;

/// What a tree's program knows that its files do not say.
pub struct Program {
    /// Resolvers that it registers.
    pub resolvers: &'static [Registered],
    /// Keys that it reads where they are given, and that no file has; a key stands for everything
    /// below it too.
    pub optional: &'static [&'static str],
}

/// A composed config.
pub struct Config {
    /// The tree, with the reserved key beside upstream's.
    pub root: Node,
    /// Values that must still be given, with their keys.
    pub missing: Vec<(String, Span)>,
    /// Whether everything that the defaults list asks for was found.
    pub complete: bool,
}

/// Composes the config whose file is `root`, under the overrides of the command line.
pub fn compose(
    root: Node,
    place: &Place,
    program: &Program,
    overrides: &[String],
    command_line: Option<FileId>,
    reading: &mut Reading,
) -> Config {
    let reserved = root.get(RESERVED).cloned();
    let lines = read(overrides, command_line, reading);
    let mut selection = Selection::default();
    let mut values = Vec::new();
    let place = &Place {
        also: also(&root, &lines, program, reading),
        ..place.clone()
    };
    for line in lines {
        match line {
            Line::Upstream(line) if sweep::is_mode(&line.key, line.value.as_ref()) => {
                let (message, help) = sweep::mode("hydra.mode=MULTIRUN");
                reading.error("override-syntax", Some(line.span), message, help);
            }
            Line::Upstream(line) if line.key.starts_with("hydra.") => {}
            Line::Upstream(line) if line.key.starts_with("hydra/") => {}
            Line::Upstream(line) if place.has_group(&line.key) && !is_mapping(&line) => {
                selection.take(line, reading);
            }
            line => values.push(line),
        }
    }
    let mut composer = Composer::new(place, program, selection, reading);
    let mut config = composer.run(root);
    let complete = composer.finish();
    if let Some(reserved) = reserved {
        config.set(RESERVED, reserved.span, reserved);
    }
    for line in values {
        match line {
            Line::Own { text, at, file } => {
                let path_of = |key: &str| key.trim_start_matches(['+', '~']).to_owned();
                apply_one(
                    &mut config,
                    text,
                    at,
                    file,
                    &path_of,
                    &mut reading.diagnostics,
                );
            }
            // Without its groups a config has few keys: nothing can be said about the others.
            Line::Upstream(line) if !complete => assign::quietly(&mut config, line),
            Line::Upstream(line) => assign::assign(&mut config, line, program, reading),
        }
    }
    let mut missing = Vec::new();
    collect_missing(&config, "", &mut missing);
    if complete {
        interpolation::resolve(&mut config, program.resolvers, reading);
    }
    Config {
        root: config,
        missing,
        complete,
    }
}

/// More folders with files of the tree: those that were typed, else those of its root.
fn also(root: &Node, lines: &[Line<'_>], program: &Program, reading: &mut Reading) -> Vec<PathBuf> {
    let typed = lines.iter().find_map(|line| match line {
        Line::Upstream(line) if line.key == searchpath::KEY => line.value.as_ref(),
        _ => None,
    });
    match typed.or_else(|| root.get_path(searchpath::KEY)) {
        Some(list) => searchpath::folders(list, program, reading),
        None => Vec::new(),
    }
}

/// An override: of upstream's config, or below the reserved key.
enum Line<'o> {
    Upstream(Override),
    Own {
        text: &'o str,
        at: Position,
        file: FileId,
    },
}

fn read<'o>(
    overrides: &'o [String],
    command_line: Option<FileId>,
    reading: &mut Reading,
) -> Vec<Line<'o>> {
    let Some(file) = command_line else {
        return Vec::new();
    };
    let mut at = Position::START;
    let mut lines = Vec::new();
    for text in overrides {
        let key = text.trim_start_matches(['+', '~']);
        let own = key.strip_prefix(RESERVED);
        if own.is_some_and(|rest| rest.starts_with(['.', '='])) {
            lines.push(Line::Own { text, at, file });
        } else if sweep::is_flag(text) {
            let (message, help) = sweep::mode(text);
            let span = Some(at.span(file, text));
            reading.error("override-syntax", span, message, help);
        } else {
            match grammar::parse(text, at, file) {
                Ok(line) => lines.push(Line::Upstream(line)),
                Err(problem) => reading.diagnostics.push(problem),
            }
        }
        at = at.after(text).after("\n");
    }
    lines
}

/// A mapping given to a group's key is a value, not a choice.
fn is_mapping(line: &Override) -> bool {
    let value = line.value.as_ref();
    value.is_some_and(|value| value.entries().is_some())
}

/// Every `???`, by its dotted key.
fn collect_missing(node: &Node, path: &str, found: &mut Vec<(String, Span)>) {
    let join = |name: &str| match path {
        "" => name.to_owned(),
        path => format!("{path}.{name}"),
    };
    if node.resolve(Schema::OmegaConf) == Some(Resolved::Missing) {
        found.push((path.to_owned(), node.span));
    }
    for entry in node.entries().unwrap_or_default() {
        if !(path.is_empty() && entry.name == RESERVED) {
            collect_missing(&entry.value, &join(&entry.name), found);
        }
    }
    for (index, item) in node.items().unwrap_or_default().iter().enumerate() {
        collect_missing(item, &join(&index.to_string()), found);
    }
}

#[cfg(test)]
mod tests;
