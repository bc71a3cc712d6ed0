//! Recipe readers: one for each dialect. All of them produce a [`Recipe`].
//!
//! A reader translates its dialect into a tree with native keys, whose values keep their places in the user's
//! files. [`native`] turns that tree into a [`Spec`] and the map of places. This module neither plans nor
//! inspects hardware.

pub mod batch_arguments;
#[cfg(test)]
pub mod corpus;
pub mod dialects;
mod inputs;
pub mod launchers;
pub mod schema;
pub mod syntax;
pub mod trainer_command;

use std::borrow::Cow;
use std::collections::BTreeMap;

use dialects::command::alone;
use dialects::command::launcher::Launch;
use dialects::command::unresolved;
use dialects::readers::{self, READERS};
use dialects::{accelerate, deepspeed, native};
use inputs::Job;
use schema::axes;
use schema::reader::{self, Detected, ReadOptions, Reader, Translated};
use schema::reading::{self, Reading};
use syntax::shell::word::{Word, variable};

pub use dialects::native::schema as native_schema;
pub use schema::dialect::{Dialect, RESERVED};
pub use schema::environment::Environment;
pub use schema::files::{Files, TreeBatch};
pub use schema::launch::AccelerateLaunch;
pub use schema::origin::{Origin, OutsidePath};
pub use schema::overrides::{self, Setting};
pub use schema::request::Request;
pub use schema::spec::{self, Spec};
pub use schema::untrained::{Untrained, UntrainedReason};
pub use syntax::diagnostic::{self, Diagnostic, Located, Next, Severity};
pub use syntax::source::{FileId, SourceFile, Sources, Span, ValueSource, ValueSources};

/// The error for an invalid recipe: all diagnostics and the files.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}", self.summary())]
pub struct ReadError {
    /// The files that were read.
    pub sources: Sources,
    /// At least one error, and all other diagnostics.
    pub diagnostics: Vec<Diagnostic>,
    /// The recipe without the values that are refused, for its other problems. `None`: too little of it was read.
    pub rest: Option<Box<Recipe>>,
}

impl ReadError {
    /// The one error that the external trainer's command of a recipe is refused with.
    pub(crate) fn of_command(recipe: &Recipe, message: String, help: &str) -> ReadError {
        let span = recipe.span("trainer.command");
        ReadError {
            sources: recipe.sources.clone(),
            diagnostics: vec![Diagnostic::error(alone::RULE, span, message, help)],
            rest: None,
        }
    }

    /// As an error of the command that a recipe has itself.
    fn of_command_in(self, recipe: &Recipe) -> ReadError {
        let mut found = self.diagnostics.iter();
        let found = found.find(|found| found.is_error() && found.rule == alone::RULE);
        match found.cloned() {
            Some(Diagnostic { message, help, .. }) => ReadError::of_command(recipe, message, &help),
            None => self,
        }
    }

    pub fn errors(&self) -> impl Iterator<Item = &Diagnostic> {
        self.diagnostics.iter().filter(|found| found.is_error())
    }

    /// Whether a file of the recipe cannot be read at all: it is missing, not UTF-8, or not permitted.
    pub fn is_unreadable(&self) -> bool {
        let mut all = self.diagnostics.iter();
        all.any(|d| d.is_error() && d.rule == reading::UNREADABLE_FILE)
    }

    /// The first error in one line, for callers that do not render diagnostics.
    fn summary(&self) -> String {
        let format = |first: &Diagnostic| {
            let located = first.locate(&self.sources);
            let place = match (located.file, located.line, located.column) {
                (Some(file), Some(line), Some(column)) => format!("{file}:{line}:{column}: "),
                (Some(file), ..) => format!("{file}: "),
                _ => String::new(),
            };
            format!("{place}{} ({})", located.message, located.help)
        };
        diagnostic::first_error(&self.diagnostics, format)
            .unwrap_or_else(|| "the recipe cannot be read".to_owned())
    }
}

/// A valid recipe: its values, their places, and the diagnostics.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// The dialect of its file.
    pub dialect: Dialect,
    /// The version of the dialect that it is read as, if there are several.
    pub version: Option<String>,
    /// The reason for choosing the dialect and the version, one line.
    pub detected: String,
    pub spec: Spec,
    /// The file is only a part of a recipe; other files hold the rest.
    pub part: bool,
    /// The places of values, by native path.
    pub value_sources: ValueSources,
    /// The files that were read.
    pub sources: Sources,
    /// The role of each file.
    pub files: Files,
    /// Keys by which the built-in trainer does not train.
    pub untrained: Vec<Untrained>,
    /// The settings of `accelerate launch`, if it starts the program.
    pub accelerate: Option<AccelerateLaunch>,
    /// The command, if the job has one.
    pub(crate) launch: Option<Launch>,
    /// The given variables of its script.
    pub(crate) variables: BTreeMap<String, String>,
    /// Evenkeel replaces a launcher at the start of the external trainer's command.
    pub launcher_replaced: bool,
    /// The text of its program defines arguments, none of them for the batch numbers, and names no `Trainer`.
    pub lacks_batch_arguments: bool,
    /// The reader's diagnostics, in file order. Most errors end reading and never occur here; the error for
    /// a missing value on which no batch number depends fails only `plan`.
    pub diagnostics: Vec<Diagnostic>,
}

impl Recipe {
    /// The place of the value at a native path. `None`: it is a default.
    pub fn span(&self, path: &str) -> Option<Span> {
        self.value_sources.get(path).map(|p| p.span)
    }

    /// The key in the user's dialect, for messages. A default has the key of an override: the dialect's key,
    /// or the native path below [`RESERVED`] if an upstream dialect has no key.
    pub fn key<'a>(&'a self, path: &'a str) -> Cow<'a, str> {
        if let Some(place) = self.value_sources.get(path) {
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

    /// Whether the job is a command, in a script or as typed.
    pub fn is_command(&self) -> bool {
        self.launch.is_some()
    }

    /// The words of the job's command. `None`: it has none, only its shell knows some of them, or evenkeel cannot replace
    /// its launcher.
    pub fn command(&self) -> Option<Vec<String>> {
        let launch = self
            .launch
            .as_ref()
            .filter(|launch| launch.alone.is_some())?;
        let known = |word: &Word| word.unresolved.is_empty().then(|| word.text.clone());
        launch.words.iter().map(known).collect()
    }

    /// The variables without which [`Recipe::command`] has none. Empty: giving variables does not help.
    pub fn lacking_variables(&self) -> Vec<&str> {
        let words = self.launch.iter().filter(|launch| launch.alone.is_some());
        let words = words.flat_map(|launch| &launch.words);
        let parts = words.flat_map(|word| {
            let parts = word.unresolved.iter();
            parts.map(|part| variable(&word.text[part.start..part.end]))
        });
        let mut names: Vec<&str> = parts.collect::<Option<_>>().unwrap_or_default();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// The given variables of its script.
    pub fn variables(&self) -> &BTreeMap<String, String> {
        &self.variables
    }

    /// [`Recipe::key`] as a closure, for callers without access to the recipe.
    pub fn keys(&self) -> impl Fn(&str) -> String + '_ {
        |path| self.key(path).into_owned()
    }
}

/// Reads a recipe of any dialect.
///
/// The launcher of the external trainer's command is read and removed from it.
///
/// An invalid recipe gives a [`ReadError`] with all errors. Warnings are in the [`Recipe`].
pub fn read(request: &Request) -> Result<Recipe, ReadError> {
    match inputs::piped(request) {
        Some(text) => read_text(request, text),
        None => launchers::replace(request, |request| finish(request, None)),
    }
}

/// As [`read`], with the recipe's text from the caller. Names in it resolve relative to its path.
pub fn read_text(request: &Request, text: String) -> Result<Recipe, ReadError> {
    launchers::replace(request, |request| finish(request, Some(text.clone())))
}

/// Reads a recipe. A given global batch replaces all but the launcher of a program whose batch is not known.
fn finish(request: &Request, text: Option<String>) -> Result<Recipe, ReadError> {
    let mut error = match read_job(request, text.clone(), inputs::gather) {
        Err(error) if error.errors().any(|found| found.hides_batch) => error,
        read => return read,
    };
    let launcher = read_job(request, text, inputs::gather_launcher);
    if !request.states_batch() {
        complete(&mut error, request, launcher.as_ref().err());
    }
    if !request.states_batch() || !error.errors().all(|found| found.hides_batch) {
        return Err(error);
    }
    let mut recipe = launcher?;
    let path = |sources: &Sources, span: Span| Some(sources.get(span.file)?.path.clone());
    for found in error.errors() {
        let is_same = |span: &Span| path(&error.sources, *span) == path(&recipe.sources, *span);
        let span = found.span.filter(is_same);
        let message = found.message.clone();
        recipe.diagnostics.push(match found.rule == reading::UNREADABLE_FILE {
            true => {
                let help = "nothing in it is planned: put it there before a launch";
                Diagnostic::warning(&found.rule, span, message, help)
            }
            false => {
                let help =
                    "nothing to do if the given global batch and axes are those of the training";
                Diagnostic::note(&found.rule, span, message, help)
            }
        });
    }
    diagnostic::in_file_order(&mut recipe.diagnostics);
    Ok(recipe)
}

/// Adds the command that gives the batch of a refused program, if nothing else than axes refuses it. `launcher`: why its
/// launcher alone is refused, such as axes that are not read.
fn complete(error: &mut ReadError, request: &Request, launcher: Option<&ReadError>) {
    let axes = format!("{RESERVED}.parallel.");
    let is_of_axes = |found: &Diagnostic| found.hides_batch || found.help.contains(&axes);
    if !error.errors().all(is_of_axes) {
        return;
    }
    let mut more = vec!["--global-batch-size", "B"];
    more.extend(
        launcher
            .into_iter()
            .flat_map(|launcher| launcher.errors().filter_map(axes::proposed)),
    );
    let line = request.plan_with(&more);
    let are_ended = error.errors().all(|found| found.next.is_some());
    let mut found = error.diagnostics.iter_mut();
    if let Some(first) = found.find(|found| found.is_error() && found.hides_batch) {
        first.help = format!(
            "{}; or give the samples of a step, and only the launcher is read: `{line}`",
            first.help
        );
        if !are_ended {
            first.next = Next::command(line);
        }
    }
}

/// Reads the job that `gather` finds.
fn read_job(
    request: &Request,
    text: Option<String>,
    gather: impl FnOnce(&Request, Option<String>, &mut Reading) -> Option<Job>,
) -> Result<Recipe, ReadError> {
    let mut reading = Reading::at(&request.origin);
    reading.environment = request.environment.clone();
    let (given, flags) = (&request.overrides, &request.settings);
    overrides::refuse_contradictions(given, flags, &mut reading.diagnostics);
    let job = gather(request, text, &mut reading);
    let is_command = job.as_ref().is_some_and(|job| job.launch.is_some());
    let started = job.as_ref().and_then(|job| job.started.clone());
    let found = job.and_then(|job| find(request, job, &mut reading));
    let refused = reading.has_error();
    let mut diagnostics = [reading.diagnostics, reading.pending].concat();
    if is_command {
        // The types of its arguments do not matter to a plan that reads only its launcher.
        let of_types = diagnostics
            .iter_mut()
            .filter(|found| found.rule == "wrong-type");
        for found in of_types.filter(|found| found.is_error()) {
            found.hides_batch = true;
        }
    }
    unresolved::name_script(&mut diagnostics, request);
    diagnostic::in_file_order(&mut diagnostics);
    diagnostic::keep_most_severe(&mut diagnostics);
    let sources = reading.sources;
    let recipe = found.map(|recipe| Recipe {
        sources: sources.clone(),
        diagnostics: diagnostics.clone(),
        ..recipe
    });
    match (recipe, started) {
        (Some(recipe), None) if !refused => Ok(recipe),
        (Some(recipe), Some(split)) if !refused => {
            launchers::take_over(recipe, split, request.starts_command)
        }
        (rest, _) => Err(ReadError {
            sources,
            diagnostics,
            rest: rest.map(Box::new),
        }),
    }
}

/// The recipe of a job, without its sources and diagnostics. It lacks values for which `reading` has errors.
fn find(request: &Request, job: Job, reading: &mut Reading) -> Option<Recipe> {
    let (reader, mut detected) = choose(&job, request, reading)?;
    let given = request.overrides.iter().filter(|text| {
        let name = text.split('=').next().unwrap_or_default();
        !job.variables.contains_key(name)
    });
    let overrides: Vec<String> = job.overrides.iter().chain(given).cloned().collect();
    let settings = &request.settings;
    let command_line = overrides::add_source(&mut reading.sources, &overrides, settings);
    reading.converted.extend(command_line);
    reading.files.command_line = command_line;
    let asked = ReadOptions {
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
    // A reader that refuses the whole recipe translates nothing.
    if reading.has_error() && native.entries().is_some_and(<[_]>::is_empty) {
        return None;
    }
    if let Some(version) = &version {
        detected = format!("{detected}; {}", version.reason);
    }
    if let Some(launched) = job.launched {
        let mut launched = accelerate::with_deepspeed(launched, reading);
        deepspeed::refuse_another_batch(&launched, |path| native.get_path(path), reading);
        accelerate::overruled_by_flag(&launched, settings, reading);
        // The recipe wins over the launcher.
        launched.overlay(native);
        native = launched;
    }
    if reader.dialect() != Dialect::Native
        && let Some(mut over) = root.get(RESERVED).cloned()
    {
        over.name_keys(RESERVED);
        native.overlay(over);
    }
    if let Some(file) = command_line {
        native.overlay(overrides::settings_tree(&overrides, settings, file));
        reading.refuse_unknown_keys_of(file);
        native::leave_other_schedule(&mut native, file, reading);
    }
    if reader.dialect() == Dialect::Deepspeed {
        deepspeed::leave_to_trainer(&root, &mut native, reading);
    }
    // These readers know every key.
    if ![Dialect::Native, Dialect::Accelerate].contains(&reader.dialect()) {
        for tree in [Some(&root), job.unread.as_ref()].into_iter().flatten() {
            axes::refuse_unread(tree, &native, request.states_batch(), reading);
        }
    }
    let (mut spec, value_sources) = native::build(&native, &mut reading.diagnostics)?;
    if !request.trainer_environment.is_empty() {
        spec.trainer
            .environment
            .clone_from(&request.trainer_environment);
    }
    if request.deepspeed_config.is_some() {
        spec.trainer
            .deepspeed_config
            .clone_from(&request.deepspeed_config);
    }
    Some(Recipe {
        dialect: reader.dialect(),
        version: version.map(|version| version.name),
        detected,
        spec,
        part,
        value_sources,
        sources: Sources::default(),
        files: std::mem::take(&mut reading.files),
        untrained: std::mem::take(&mut reading.untrained),
        accelerate: reading.accelerate.take(),
        launch: job.launch,
        variables: job.variables,
        launcher_replaced: false,
        lacks_batch_arguments: reading.program.lacks_batch_arguments(),
        diagnostics: Vec::new(),
    })
}

/// Refuses a version for a dialect with only one version.
fn refuse_unknown_version(reader: &dyn Reader, asked: &ReadOptions<'_>, reading: &mut Reading) {
    if let Some(version) = asked.version
        && !reader.has_versions()
    {
        reading.error(
            "unknown-value",
            None,
            format!(
                "{} has no versions, but `{version}` is requested",
                reader.dialect()
            ),
            "remove `--dialect-version`",
        );
    }
}

/// The requested reader, or the most confident one.
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
        let read: Vec<String> = READERS.iter().map(|r| r.dialect().to_string()).collect();
        reading.batch_unknown(
            "unknown-dialect",
            Some(root.span),
            match reader::others(root) {
                Some(name) => format!("this is {name}, which is not supported yet"),
                None => "no supported dialect has these keys".to_owned(),
            },
            format!("select a dialect with `--dialect` ({})", read.join(", ")),
        );
    }
    best.map(|(reader, detected)| (reader, detected.reason))
}

#[cfg(test)]
mod tests;
