//! Recipe readers: one file per upstream dialect, every one of them to the same [`Recipe`].
//!
//! A reader translates its dialect into a tree with the native recipe's keys whose values still
//! point at the user's own lines; [`native`] turns that tree into a [`Spec`] and the map of
//! places. Nothing here plans, and nothing here looks at hardware.

pub mod accelerate;
mod axes;
mod command;
#[cfg(test)]
pub mod corpus;
mod deepspeed;
pub mod diagnostic;
mod dialect;
pub mod dpo;
pub mod emit;
mod files;
pub mod halos;
pub mod handbook;
mod hjson;
pub mod hydra;
mod job;
mod name;
pub mod native;
pub mod node;
mod origin;
pub mod overrides;
pub mod own_command;
pub mod placeholder;
mod preference;
mod programs;
pub mod reader;
mod readers;
mod reading;
mod request;
pub mod resume;
pub mod scalar;
pub mod source;
pub mod spec;
pub mod suggest;
pub mod transformers;
mod tree;
pub mod yaml;

use std::borrow::Cow;

pub use diagnostic::{Diagnostic, Located, Severity};
pub use dialect::{Dialect, RESERVED};
pub use files::{Files, TreeBatch};
pub use origin::{Origin, OutsidePath};
pub use overrides::Setting;
pub use request::Request;
pub use source::{FileId, Place, Places, SourceFile, Sources, Span};
pub use spec::Spec;

use accelerate::Zero;
use job::Job;
use reader::{Asked, Detected, Reader, Translated};
use readers::READERS;
use reading::Reading;

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
        let told = |first: &Diagnostic| {
            let located = first.locate(&self.sources);
            let place = match (located.file, located.line, located.column) {
                (Some(file), Some(line), Some(column)) => format!("{file}:{line}:{column}: "),
                (Some(file), ..) => format!("{file}: "),
                _ => String::new(),
            };
            format!("{place}{} ({})", located.message, located.help)
        };
        diagnostic::first_error(&self.diagnostics, told)
            .unwrap_or_else(|| "the recipe cannot be read".to_owned())
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
    /// Whether it is a part of a recipe only: what it lacks stands elsewhere.
    pub part: bool,
    /// Where it says it, by native path.
    pub places: Places,
    /// The files that were read.
    pub sources: Sources,
    /// Which of them is what.
    pub files: Files,
    /// What the reader noticed, in file order. Errors of form are never here, they end the reading;
    /// a value that is missing and that no number hangs on stops the plan only.
    pub diagnostics: Vec<Diagnostic>,
}

impl Recipe {
    /// Where the value at a native path stood, if anybody wrote it.
    pub fn span(&self, path: &str) -> Option<Span> {
        self.places.get(path).map(|p| p.span)
    }

    /// The key as the user's dialect spells it, for messages. What nobody wrote has the spelling
    /// that an override takes: the dialect's own key where it has one, else the native path, below
    /// [`RESERVED`] in upstream dialects.
    pub fn key<'a>(&'a self, path: &'a str) -> Cow<'a, str> {
        if let Some(place) = self.places.get(path) {
            return Cow::Borrowed(&place.key);
        }
        if self.dialect == Dialect::Native {
            return Cow::Borrowed(path);
        }
        let upstream = readers::of(self.dialect).and_then(|reader| reader.upstream_key(path));
        match upstream {
            Some(key) => Cow::Borrowed(key),
            None => Cow::Owned(format!("{RESERVED}.{path}")),
        }
    }

    /// [`Recipe::key`] for those who know no recipes.
    pub fn keys(&self) -> impl Fn(&str) -> String + '_ {
        |path| self.key(path).into_owned()
    }
}

/// Reads a recipe in whatever dialect it is written.
///
/// Errors of form end the reading: all of them are in the [`ReadError`]. Warnings are in the
/// [`Recipe`].
pub fn read(request: &Request) -> Result<Recipe, ReadError> {
    finish(request, None)
}

/// As [`read`], with the recipe's text at hand; its path still says where it stands.
pub fn read_text(request: &Request, text: String) -> Result<Recipe, ReadError> {
    finish(request, Some(text))
}

fn finish(request: &Request, text: Option<String>) -> Result<Recipe, ReadError> {
    let mut reading = Reading::at(&request.origin);
    let job = job::gather(request, text, &mut reading);
    let found = job.and_then(|job| find(request, job, &mut reading));
    let pending = std::mem::take(&mut reading.pending);
    reading.diagnostics.extend(pending);
    diagnostic::in_file_order(&mut reading.diagnostics);
    match found {
        Some(found) => Ok(Recipe {
            dialect: found.reader.dialect(),
            detected: found.detected,
            part: found.part,
            spec: found.spec,
            places: found.places,
            sources: reading.sources,
            files: reading.files,
            diagnostics: reading.diagnostics,
        }),
        None => Err(ReadError {
            sources: reading.sources,
            diagnostics: reading.diagnostics,
        }),
    }
}

/// The reader, why it was chosen, and what it found.
struct Found {
    reader: &'static dyn Reader,
    detected: String,
    part: bool,
    spec: Spec,
    places: Places,
}

fn find(request: &Request, job: Job, reading: &mut Reading) -> Option<Found> {
    let (reader, mut detected) = choose(&job, request, reading)?;
    let overrides = [job.overrides.as_slice(), &request.overrides].concat();
    let settings = &request.settings;
    let command_line = overrides::add_source(&mut reading.sources, &overrides, settings);
    reading.converted.extend(command_line);
    reading.files.command_line = command_line;
    let asked = Asked {
        path: &job.path,
        overrides: &overrides,
        command_line,
        version: request.version.as_deref(),
    };
    refuse_unknown_version(reader, &asked, reading);
    let Translated {
        source: root,
        mut native,
        version,
        part,
    } = reader.read(job.root, &asked, reading);
    if let Some(version) = version {
        detected = format!("{detected}; {version}");
    }
    if let Some(mut launched) = job.launched {
        if reading.zero.as_ref().is_some_and(Zero::is_overruled) {
            accelerate::leave_to_trainer(&mut launched);
        }
        accelerate::conflicts(&launched, &native, reading);
        accelerate::overruled_by_flag(&launched, settings, reading);
        // What the recipe says itself wins over what it is launched with.
        launched.overlay(native);
        native = launched;
    }
    if let Some(over) = root
        .get(RESERVED)
        .filter(|_| reader.dialect() != Dialect::Native)
    {
        let mut over = over.clone();
        over.name_keys(RESERVED);
        native.overlay(over);
    }
    if let Some(file) = command_line {
        native.overlay(overrides::settings_tree(&overrides, settings, file));
        reading.refuse_unknown_keys_of(file);
    }
    let built = native::build(&native, &mut reading.diagnostics);
    let (spec, places) = built.filter(|_| !reading.has_error())?;
    Some(Found {
        reader,
        detected,
        part,
        spec,
        places,
    })
}

/// A version named for a dialect that has only one.
fn refuse_unknown_version(reader: &dyn Reader, asked: &Asked<'_>, reading: &mut Reading) {
    if let Some(version) = asked.version
        && reader.versions().is_empty()
    {
        reading.error(
            "unknown-value",
            None,
            format!(
                "{} has no versions, `{version}` was asked for",
                reader.dialect()
            ),
            "leave `--dialect-version` out",
        );
    }
}

/// The reader that is surest of the file, or the one asked for.
fn choose(
    job: &Job,
    request: &Request,
    reading: &mut Reading,
) -> Option<(&'static dyn Reader, String)> {
    let root = &job.root;
    if root.entries().is_none() {
        reading.error(
            "wrong-type",
            Some(root.span),
            format!("a recipe is a mapping, this is {}", root.kind()),
            "write `key: value` lines; is this the right file?",
        );
        return None;
    }
    if let Some(dialect) = request.dialect {
        return Some((readers::of(dialect)?, format!("`--dialect {dialect}`")));
    }
    if let Some((dialect, reason)) = &job.dialect {
        return Some((readers::of(*dialect)?, reason.clone()));
    }
    let mut best: Option<(&'static dyn Reader, Detected)> = None;
    for reader in READERS.iter().copied() {
        if let Some(detected) = reader.detect(root, &job.path, &request.origin)
            && best
                .as_ref()
                .is_none_or(|(_, b)| detected.confidence > b.confidence)
        {
            best = Some((reader, detected));
        }
    }
    if best.is_none() {
        let read: Vec<&str> = READERS.iter().map(|r| r.dialect().name()).collect();
        reading.error(
            "unknown-dialect",
            Some(root.span),
            match reader::others(root) {
                Some(name) => format!("this is {name}, which is not read yet"),
                None => "no dialect that is read here has these keys".to_owned(),
            },
            format!(
                "read are {}; `--dialect` decides where no key does",
                read.join(", ")
            ),
        );
    }
    best.map(|(reader, detected)| (reader, detected.reason))
}

#[cfg(test)]
mod tests;
