//! The state of reading one recipe: its files and diagnostics.

use std::path::{Path, PathBuf};

use super::deepspeed::{self, DeepSpeedPlugin};
use super::environment::Environment;
use super::files::Files;
use super::launch::AccelerateLaunch;
use super::origin::Origin;
use super::program::Program;
use super::tree::Given;
use super::untrained::Untrained;
use crate::recipe::syntax::diagnostic::{self, Diagnostic, Severity};
use crate::recipe::syntax::node::{Entry, Node};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::shell::{self, word::variable};
use crate::recipe::syntax::source::{FileId, Sources, Span};
use crate::recipe::syntax::{json, toml, yaml};
use crate::util::format;
use crate::util::suggest::{did_you_mean, short};

/// The rule of a file that cannot be read at all.
pub(crate) const UNREADABLE_FILE: &str = "unreadable-file";

/// How a line of every native recipe begins.
const NATIVE: &str = "apiVersion: evenkeel.dev/";

/// The files read so far and their diagnostics.
#[derive(Debug, Default)]
pub struct Reading {
    /// Where files are read from.
    pub origin: Origin,
    /// The environment variables that the recipe may refer to.
    pub environment: Environment,
    /// Every file, in the order of reading.
    pub sources: Sources,
    /// The diagnostics so far.
    pub diagnostics: Vec<Diagnostic>,
    /// Errors that fail `plan`, not reading: a missing value on which no batch number depends.
    pub pending: Vec<Diagnostic>,
    /// The role of each file.
    pub files: Files,
    /// The program is one of TRL's scripts, which refuse unknown arguments.
    pub(crate) of_trl: bool,
    /// TRL's command line starts the program, and hands keys that no trainer knows to its launcher.
    pub(crate) by_trl: bool,
    /// Only the program's name says that it uses TRL. It may set its batch itself.
    pub(crate) only_by_name: bool,
    /// The program that takes the arguments.
    pub(crate) program: Program,
    /// Keys by which the built-in trainer does not train.
    pub(crate) untrained: Vec<Untrained>,
    /// The DeepSpeed settings, if an accelerate config enables DeepSpeed.
    pub(crate) deepspeed_plugin: Option<DeepSpeedPlugin>,
    /// The settings of `accelerate launch`, if it starts the program.
    pub(crate) accelerate: Option<AccelerateLaunch>,
    /// Files whose reader determines the types of values (`argparse`, JSON), so YAML's types of scalars do
    /// not apply.
    pub(crate) converted: Vec<FileId>,
}

impl Reading {
    /// An empty state for files at an origin.
    pub fn at(origin: &Origin) -> Reading {
        Reading {
            origin: origin.clone(),
            ..Reading::default()
        }
    }

    pub fn error(
        &mut self,
        rule: &str,
        span: Option<Span>,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        let problem = Diagnostic::error(rule, span, message, help);
        self.diagnostics.push(problem);
    }

    /// An error for a program whose batch is not known here. With a given global batch only its launcher is read.
    pub(crate) fn batch_unknown(
        &mut self,
        rule: &str,
        span: Option<Span>,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        let problem = Diagnostic::error(rule, span, message, help);
        self.diagnostics.push(problem.of_batch());
    }

    pub fn warning(
        &mut self,
        rule: &str,
        span: Option<Span>,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        let problem = Diagnostic::warning(rule, span, message, help);
        self.diagnostics.push(problem);
    }

    pub fn note(
        &mut self,
        rule: &str,
        span: Option<Span>,
        message: impl Into<String>,
        help: impl Into<String>,
    ) {
        let problem = Diagnostic::note(rule, span, message, help);
        self.diagnostics.push(problem);
    }

    /// An error for a word that the key does not take.
    pub fn unknown_value<'w>(
        &mut self,
        key: &str,
        text: &str,
        span: Span,
        words: impl IntoIterator<Item = &'w str>,
    ) {
        let message = format!("`{key}` is `{}`", short(text));
        let mut help = did_you_mean(text, words);
        if let Some(variable) = variable(text) {
            help = format!(
                "give its value beside the script, `evenkeel plan SCRIPT {variable}=VALUE`; {help}"
            );
        }
        self.error("unknown-value", Some(span), message, help);
    }

    /// An error for an unknown key, with this message.
    pub fn unknown_key<'w>(
        &mut self,
        entry: &Entry,
        message: impl Into<String>,
        known: impl IntoIterator<Item = &'w str>,
    ) {
        let help = did_you_mean(&entry.name, known);
        self.error("unknown-key", Some(entry.name_span), message, help);
    }

    /// A whole number of a config whose reader converts nothing. Empty counts as absent; another type is reported.
    pub(crate) fn int(&mut self, key: impl Into<String>, node: &Node) -> Option<Given<i128>> {
        let key = key.into();
        match node.resolve(Schema::PyYaml) {
            Some(Resolved::Int(value)) => return Some(Given::new(key, value, node.span)),
            Some(Resolved::Null) => {}
            _ => self
                .diagnostics
                .push(wrong_type(&key, node, Schema::PyYaml, "a whole number")),
        }
        None
    }

    /// Whether there is an error, which ends reading.
    pub fn has_error(&self) -> bool {
        diagnostic::has_error(&self.diagnostics)
    }

    /// Turns warnings about unknown keys on the command line into errors. Upstream may ignore such keys in a
    /// file, but a typed key is meant to have an effect.
    pub(crate) fn refuse_unknown_keys_of(&mut self, command_line: FileId) {
        for diagnostic in &mut self.diagnostics {
            let typed = diagnostic.span.is_some_and(|s| s.file == command_line);
            if typed && diagnostic.rule == "unknown-key" {
                diagnostic.severity = Severity::Error;
            }
        }
    }

    /// Reads and parses a file. `named`: the place that names it.
    pub fn open(&mut self, path: &Path, named: Option<Span>) -> Option<(FileId, Node)> {
        let text = self.text(path, named)?;
        let file = self.sources.add(path, text);
        Some((file, self.tree(file)?))
    }

    /// As [`Reading::open`], for a file that a command names. A plan whose global batch the user gives needs no such file, and a
    /// TrainingJob does.
    pub(crate) fn open_of_command(&mut self, path: &Path, named: Span) -> Option<(FileId, Node)> {
        let known = self.diagnostics.len();
        let opened = self.open(path, Some(named));
        if opened.is_none() && matches!(self.origin, Origin::Disk) {
            let folder = self.folder_of_script(path, named);
            for found in &mut self.diagnostics[known..] {
                found.hides_batch = true;
                if let Some(folder) = &folder {
                    found.help = format!(
                        "the script names it from another folder: `cd {} && {IN_FOLDER}`",
                        shell::join(&[folder.display().to_string()])
                    );
                }
            }
        }
        opened
    }

    /// The folder at or above a script in which the path that it names is a file.
    fn folder_of_script(&self, path: &Path, named: Span) -> Option<PathBuf> {
        let script = self.sources.get(named.file)?.path.as_path();
        let mut folders = script.ancestors().skip(1);
        let is_here = |folder: &&Path| !folder.as_os_str().is_empty();
        let has_file = |folder: &&Path| self.origin.is_file(&folder.join(path));
        let found = folders.find(|folder| is_here(folder) && has_file(folder));
        found.filter(|_| path.is_relative()).map(Path::to_path_buf)
    }

    /// Parses a text as the content of a file.
    pub fn parse(&mut self, path: impl Into<PathBuf>, text: String) -> Option<Node> {
        let file = self.sources.add(path, text);
        self.tree(file)
    }

    /// Parses a file of `sources`.
    pub(crate) fn tree(&mut self, file: FileId) -> Option<Node> {
        let source = self.sources.get(file)?;
        let extension = source.path.extension();
        if extension.is_some_and(|e| e == "toml") {
            return Some(toml::tables(&source.text, file));
        }
        let is_json = extension.is_some_and(|e| e == "json" || e == "hjson");
        // A TrainingJob does not store the recipe's file name, so comments that are not YAML's tell JSON.
        let begins = |mark: &str| source.text.trim_start().starts_with(mark);
        let commented = ["//", "/*"].iter().any(|mark| source.text.contains(mark))
            && ["{", "//", "/*"].into_iter().any(begins);
        if is_json {
            self.converted.push(file);
        }
        let more_than_json = json::problem(&source.text).is_some();
        if (is_json || commented) && more_than_json {
            let plain = json::without_comments(&source.text);
            let mut problems = Vec::new();
            let root = yaml::parse(&plain, file, &mut problems).filter(deepspeed::is_config);
            // YAML would take a comment for a part of the next key.
            let misread = plain != source.text && deepspeed::is_mentioned(&source.text);
            if let Some(problem) = json::problem(&plain)
                && (root.is_some() || misread)
            {
                let help = "put names and texts into double quotes, with commas between them; comments may stay";
                let message = format!("of Hjson only JSON with comments is supported: {problem}");
                self.refuse_line(file, problem.line(), message, help);
                return None;
            }
            if root.is_some() {
                self.diagnostics.extend(problems);
                self.files.commented.push(file);
                return root;
            }
        }
        // Python's `json` reads JSON, and Evenkeel alone reads native recipes.
        let native = source.text.lines().any(|line| line.starts_with(NATIVE));
        if is_json || native || !more_than_json {
            return yaml::parse(&source.text, file, &mut self.diagnostics);
        }
        let known = self.diagnostics.len();
        let root = yaml::parse_as_pyyaml(&source.text, file, &mut self.diagnostics)?;
        // Loaders accept a key that is given twice, so that a plan of the launcher alone may.
        for problem in &mut self.diagnostics[known..] {
            problem.hides_batch = problem.is_error();
        }
        Some(root)
    }

    /// Refuses a file that Python's `json` cannot parse, for an upstream reader that uses it.
    pub(crate) fn refuse_more_than_json(&mut self, file: FileId, reader: &str) {
        let source = self.sources.get(file);
        if let Some(problem) = source.and_then(|source| json::problem(&source.text)) {
            let message =
                format!("{reader} reads this file as plain JSON and fails here: {problem}");
            let help = "remove comments and trailing commas: only DeepSpeed itself, with `--deepspeed_config`, reads comments";
            self.refuse_line(file, problem.line(), message, help);
        }
    }

    /// An error at a line of a file that is not JSON.
    fn refuse_line(&mut self, file: FileId, line: usize, message: String, help: &str) {
        let Some(source) = self.sources.get(file) else {
            return;
        };
        let mut lines = source.text.split_inclusive('\n');
        let before = lines.by_ref().take(line.saturating_sub(1));
        let start: usize = before.map(str::len).sum();
        let text = lines.next().unwrap_or_default().trim_end();
        let span = Span::of(&source.text, start..start + text.len(), file);
        self.error("yaml-syntax", Some(span), message, help);
    }

    /// Whether the reader of a file converts values to the types of their keys, whatever YAML's types are.
    pub(crate) fn converts(&self, file: FileId) -> bool {
        self.converted.contains(&file)
    }

    /// The text of a file; `None` after an error. `named`: the place that names the file.
    pub fn text(&mut self, path: &Path, named: Option<Span>) -> Option<String> {
        // One byte more than allowed is enough to know that a file is too large.
        let limit = yaml::MAX_BYTES as u64 + 1;
        let (problem, help) = match self.origin.read(path, limit) {
            Err(error) => (
                format!("cannot be read: {error}"),
                match self.origin {
                    Origin::Disk => "give the path of an existing file",
                    Origin::Snapshot(_) => {
                        "put its text into `spec.recipe.files` under this path, or create the job with `evenkeel launch \
                         --nodes`, which does it"
                    }
                },
            ),
            Ok(bytes) if bytes.len() > yaml::MAX_BYTES => (
                format!("has more than {}", format::bytes(yaml::MAX_BYTES as u64)),
                "recipes are small: is this the right file?",
            ),
            Ok(bytes) if self.sources.bytes() + bytes.len() > yaml::MAX_TEXT => (
                format!(
                    "and the files before it have more than {}",
                    format::bytes(yaml::MAX_TEXT as u64)
                ),
                "recipes are small: is this the right file?",
            ),
            Ok(bytes) => match String::from_utf8(bytes) {
                Ok(text) => return Some(text),
                Err(error) => {
                    let at = error.utf8_error().valid_up_to();
                    (
                        format!("is not UTF-8 text: the first invalid byte is at offset {at}"),
                        "save it as UTF-8",
                    )
                }
            },
        };
        let message = format!("`{}` {problem}", path.display());
        self.error(UNREADABLE_FILE, named, message, help);
        None
    }

    /// Finds a file that `from` names: in the working directory, as upstream does, or beside `from`. `None`:
    /// it is in neither place.
    pub fn beside(&self, from: &Path, name: &str) -> Option<PathBuf> {
        let parent = from.parent().unwrap_or(Path::new(""));
        [PathBuf::from(name), parent.join(name)]
            .into_iter()
            .find(|path| self.origin.is_file(path))
    }
}

/// The place of the same command, typed in the folder before it.
pub(crate) const IN_FOLDER: &str = "evenkeel plan SCRIPT";

/// The error for a value whose key takes another type.
pub(crate) fn wrong_type(key: &str, node: &Node, schema: Schema, expected: &str) -> Diagnostic {
    let found = match node.resolve(schema) {
        None => node.kind().to_owned(),
        Some(Resolved::Null) => "nothing".to_owned(),
        Some(value) => format!(
            "`{}`, {}",
            short(node.text().unwrap_or_default()),
            value.kind()
        ),
    };
    Diagnostic::error(
        "wrong-type",
        Some(node.span),
        format!("`{key}` takes {expected}, this is {found}"),
        match variable(node.text().unwrap_or_default()) {
            Some(variable) => format!(
                "give {expected} beside the script, `evenkeel plan SCRIPT {variable}=VALUE`"
            ),
            None => format!("give {expected}"),
        },
    )
}
