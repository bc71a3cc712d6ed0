//! Hydra's composition, to the extent that training configs use it: defaults lists at any position in a
//! file, `_self_`, config groups, packages, overrides of groups and of values on the
//! command line, `???`, interpolations, and scalars as OmegaConf reads them.
//!
//! The result is one tree whose values keep the positions in their files and overrides. This module does
//! not interpret the values; `super::halos` and `super::dpo` do.
//!
//! Source: Hydra 1.3 (`version_base=None`, which selects the behaviour of the newest version), OmegaConf 2.3.

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

use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::overrides::{Position, apply_one};
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::{Node, joined};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::{FileId, Span};
use crate::recipe::syntax::yaml::Weight;

use compose::{Choices, Composer};
use grammar::Override;
use selection::Selection;

pub use interpolation::Registered;
pub use place::{TreeLocation, root_of};
pub use values::{Type, Values};

/// Facts about a tree's program that are not in its files.
pub struct Program {
    /// Resolvers that the program registers.
    pub resolvers: &'static [Registered],
    /// Keys that the program reads although no file has them; a key includes everything
    /// below it.
    pub optional: &'static [&'static str],
}

/// The result of composition.
pub struct Config {
    /// The tree, with Evenkeel's reserved key next to upstream's keys.
    pub root: Node,
    /// Mandatory values (`???`) without a value, with their keys.
    pub missing: Vec<(String, Span)>,
    /// Whether composition found everything in the defaults list.
    pub complete: bool,
}

/// Composes the config whose file is `root`, with the overrides of the command line.
pub fn compose(
    root: Node,
    place: &TreeLocation,
    program: &Program,
    overrides: &[String],
    command_line: Option<FileId>,
    reading: &mut Reading,
) -> Config {
    let reserved = root.get(RESERVED).cloned();
    let lines = read(overrides, command_line, reading);
    let mut selection = Selection::default();
    let mut values = Vec::new();
    let place = &TreeLocation {
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
            Line::Upstream(line) if place.has_group(&line.key) => {
                selection.take(line, reading);
            }
            line => values.push(line),
        }
    }
    let mut composer = Composer {
        place,
        program,
        selection,
        reading,
        choices: Choices::new(),
        weight: Weight::default(),
        files: 0,
        chain: Vec::new(),
        complete: true,
    };
    let mut config = composer.run(root);
    let complete = composer.finish();
    if let Some(reserved) = reserved {
        config.set(RESERVED, reserved.span, reserved);
    }
    for line in values {
        match line {
            Line::Reserved { text, at, file } => {
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
            // Without its groups the config lacks most keys, so unknown keys are not reported.
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

/// More directories with files of the tree: those from the command line, else those of its root.
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
    Reserved {
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
        let below = key.strip_prefix(RESERVED);
        if below.is_some_and(|rest| rest.starts_with(['.', '='])) {
            lines.push(Line::Reserved { text, at, file });
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

/// Every `???`, by its dotted key.
fn collect_missing(node: &Node, path: &str, found: &mut Vec<(String, Span)>) {
    if node.resolve(Schema::OmegaConf) == Some(Resolved::Missing) {
        found.push((path.to_owned(), node.span));
    }
    for entry in node.entries().unwrap_or_default() {
        if !(path.is_empty() && entry.name == RESERVED) {
            collect_missing(&entry.value, &joined(path, &entry.name), found);
        }
    }
    for (index, item) in node.items().unwrap_or_default().iter().enumerate() {
        collect_missing(item, &joined(path, &index.to_string()), found);
    }
}

#[cfg(test)]
mod tests;
