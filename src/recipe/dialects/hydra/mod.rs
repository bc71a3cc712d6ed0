//! Hydra's composition, to the extent that training configs use it: defaults lists at any position in a
//! file, `_self_`, config groups, overrides of groups and of values on the command line, `???`,
//! interpolations, and scalars as OmegaConf reads them.
//!
//! The result is one tree whose values keep the positions in their files and overrides. This module does
//! not interpret the values; `super::halos` and `super::dpo` do.
//!
//! Source: Hydra 1.3 (`version_base=None`, which selects the behaviour of the newest version), OmegaConf 2.3.

mod assign;
mod compose;
mod defaults;
mod grammar;
mod interpolation;
mod place;
mod values;

use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::overrides::apply_one;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::{Node, joined};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::{FileId, Position, Span};

use assign::assign;
use compose::{Composer, SEARCH_PATH};
use grammar::Override;

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
    let mut reserved = Node::mapping(root.span);
    if let Some(own) = root.get(RESERVED) {
        reserved.set(RESERVED, own.span, own.clone());
    }
    let lines = read(overrides, command_line, &mut reserved, reading);
    let mut composer = Composer::new(place, reading);
    let mut values = Vec::new();
    for line in lines {
        if place.has_group(&line.key) {
            composer.choose(line);
        } else {
            values.push(line);
        }
    }
    let (mut config, complete) = composer.run(root);
    for line in values {
        if complete {
            assign(&mut config, line, program, reading);
        } else {
            // Without its groups the config lacks most keys, so unknown keys are not reported.
            assign(&mut config, line, program, &mut Reading::default());
        }
    }
    if let Some(own) = reserved.get(RESERVED) {
        config.set(RESERVED, own.span, own.clone());
    }
    let mut missing = Vec::new();
    collect_missing(&config, "", &mut missing);
    if complete {
        interpolation::resolve(&mut config, program.resolvers, reading);
    }
    Config {
        root: config,
        missing,
    }
}

/// The overrides of upstream's config. Those below the reserved key apply to `reserved`.
fn read(
    overrides: &[String],
    command_line: Option<FileId>,
    reserved: &mut Node,
    reading: &mut Reading,
) -> Vec<Override> {
    let Some(file) = command_line else {
        return Vec::new();
    };
    let mut at = Position::START;
    let mut lines = Vec::new();
    for text in overrides {
        let key = text.trim_start_matches(['+', '~']);
        let below = key.strip_prefix(RESERVED);
        if below.is_some_and(|rest| rest.starts_with(['.', '='])) {
            let path_of = |key: &str| key.trim_start_matches(['+', '~']).to_owned();
            let diagnostics = &mut reading.diagnostics;
            apply_one(reserved, text, at, file, &path_of, diagnostics);
        } else if ["-m", "--multirun"].contains(&text.as_str())
            || (key.starts_with("hydra.mode=") && key.contains("MULTIRUN"))
        {
            let (message, help) = grammar::sweep(text);
            let span = Some(at.span(file, text));
            reading.error("override-syntax", span, message, help);
        } else if key.starts_with("hydra.searchpath=") {
            let (message, help) = SEARCH_PATH;
            let span = Some(at.span(file, text));
            reading.error("unsupported-value", span, message, help);
        } else {
            match grammar::parse(text, at, file) {
                // Hydra's other settings do not concern training.
                Ok(line) if line.key.starts_with("hydra.") || line.key.starts_with("hydra/") => {}
                Ok(line) => lines.push(line),
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
