//! The native recipe: `apiVersion: evenkeel.dev/v1alpha1`, `kind: Recipe`, and under `spec` the
//! keys of [`Spec`].
//!
//! [`build`] is the last step of every dialect. It turns a tree with native keys into a [`Spec`]
//! and the map of places, and reports all problems of the tree at once. Only `Spec`'s serde code
//! defines which keys exist and what they hold.

mod de;
mod limits;
mod schema;

use std::path::Path;

use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::placeholder;
use crate::recipe::schema::progress_pattern;
use crate::recipe::schema::reader::{Confidence, Detected, ReadOptions, Reader, Translated};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::run_name;
use crate::recipe::schema::spec::Spec;
use crate::recipe::syntax::diagnostic::{Diagnostic, has_error};
use crate::recipe::syntax::node::{Entry, Node, Value};
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::{FileId, Span, ValueSources};
use crate::util::suggest::{did_you_mean, short};

pub use schema::schema;

/// `apiVersion` of the native form.
pub const API_VERSION: &str = "evenkeel.dev/v1alpha1";
/// `kind` of the native form.
pub const KIND: &str = "Recipe";

/// Reads recipes in the native form.
pub struct Native;

impl Reader for Native {
    fn dialect(&self) -> Dialect {
        Dialect::Native
    }

    fn detect(&self, root: &Node, _path: &Path, _origin: &Origin) -> Option<Detected> {
        let version = root.get("apiVersion")?.text()?;
        version
            .starts_with("evenkeel.dev/")
            .then(|| Confidence::Certain.because(format!("`apiVersion: {version}`")))
    }

    fn read(&self, mut root: Node, asked: &ReadOptions<'_>, reading: &mut Reading) -> Translated {
        asked.put_into(&mut root, override_path, reading);
        let native = translate(&root, asked.path, reading);
        Translated::whole(root, native)
    }
}

/// The native path of an override: overrides name keys of the spec, such as `batch.per_device_batch_size=4`. The
/// reserved key of other dialects also works, so one command line fits every recipe.
fn override_path(key: &str) -> String {
    if key.starts_with("metadata.") {
        return key.to_owned();
    }
    let key = key.strip_prefix("evenkeel.").unwrap_or(key);
    format!("spec.{key}")
}

/// The file's `spec`, with a name from the metadata or the file.
fn translate(root: &Node, path: &Path, reading: &mut Reading) -> Node {
    expect(root, "apiVersion", API_VERSION, reading);
    expect(root, "kind", KIND, reading);
    for entry in root.entries().unwrap_or_default() {
        let known = ["apiVersion", "kind", "metadata", "spec"];
        if !known.contains(&entry.name.as_str()) {
            let help = did_you_mean(&entry.name, known);
            let help = format!("{help}; the recipe's keys belong under `spec:`");
            let message = format!("there is no key `{}`", entry.name);
            reading.error("unknown-key", Some(entry.name_span), message, help);
        }
    }
    let mut native = root.get("spec").cloned().unwrap_or_else(|| {
        let help = "put the recipe's keys under `spec:`";
        let message = "the recipe has no `spec`";
        reading.error("mandatory-missing", Some(root.span), message, help);
        Node::mapping(root.span)
    });
    native.name_entries("");
    let named = root.get("metadata").and_then(|m| metadata(m, reading));
    if native.get("name").is_none() {
        let name = named.unwrap_or_else(|| Node::string(run_name::of_file(path), root.span));
        native.set("name", name.span, name);
    }
    native
}

/// The name in the metadata. Other keys are ignored, because cluster tools add them.
fn metadata(metadata: &Node, reading: &mut Reading) -> Option<Node> {
    const KNOWN: [&str; 4] = ["name", "labels", "annotations", "namespace"];
    if metadata.entries().is_none() && !metadata.is_null(Schema::Core) {
        let message = format!("`metadata` takes a mapping, this is {}", metadata.kind());
        let help = "write `metadata: {name: my-run}`";
        reading.error("wrong-type", Some(metadata.span), message, help);
    }
    for entry in metadata.entries().unwrap_or_default() {
        if !KNOWN.contains(&entry.name.as_str()) {
            let message = format!("there is no key `metadata.{}`", entry.name);
            reading.unknown_key(entry, message, KNOWN);
        }
    }
    let mut name = metadata.get("name")?.clone();
    name.name_keys("metadata.name");
    Some(name)
}

fn expect(root: &Node, key: &str, value: &str, reading: &mut Reading) {
    let Some(node) = root.get(key) else {
        let help = format!("write `{key}: {value}`");
        let message = format!("the recipe has no `{key}`");
        return reading.error("mandatory-missing", Some(root.span), message, help);
    };
    if node.resolve(Schema::Core) != Some(Resolved::Str(value.to_owned())) {
        let message = format!("`{key}` is `{}`", node.shown());
        let help = format!("this version of evenkeel reads `{key}: {value}`");
        reading.error("out-of-range", Some(node.span), message, help);
    }
}

/// Converts a tree with native keys to a spec and the places of its values.
///
/// All problems go to `diagnostics`. If one of them is an error, the spec lacks what is refused. It is `None` if that is a
/// whole section, since much of the rest would seem to be missing, or if the rest cannot be read without it.
pub fn build(tree: &Node, diagnostics: &mut Vec<Diagnostic>) -> Option<(Spec, ValueSources)> {
    let before = diagnostics.len();
    let (spec, value_sources) = de::spec(tree, diagnostics);
    let spec = spec?;
    let mut flaws = Vec::new();
    if let Some(flaw) = run_name::flaw(&spec.name) {
        let problem = format!("is `{}`: {flaw}", short(&spec.name));
        let help = format!(
            "use a DNS label, at most 63 lower-case letters, digits and `-`, such as `{}`",
            run_name::label(&spec.name)
        );
        flaws.push(("run-name", "name", problem, help));
    }
    if spec.output.as_deref() == Some("") {
        let help = "name a directory, or remove it for `runs/NAME`";
        flaws.push(("run-name", "output", "is empty".to_owned(), help.to_owned()));
    }
    if let Some((path, problem)) = placeholder::flaw(&spec.trainer) {
        let help = placeholder::LISTED.to_owned();
        flaws.push(("trainer-command", path, problem, help));
    }
    let pattern = spec.trainer.progress_pattern.as_deref();
    if let Some(Err(error)) = pattern.map(progress_pattern::compile) {
        let path = "trainer.progress_pattern";
        let help = "docs/external-trainer.md has an example".to_owned();
        flaws.push(("trainer-command", path, error.to_string(), help));
    }
    for (rule, path, problem, help) in flaws {
        let place = value_sources.get(path);
        let span = place.map(|place| place.span);
        // A refused value is a stand-in by now and is not reported again.
        let refused = |d: &Diagnostic| d.is_error() && d.span == span;
        if span.is_none() || !diagnostics.iter().any(refused) {
            let message = format!("`{}` {problem}", place.map_or(path, |place| &place.key));
            diagnostics.push(Diagnostic::error(rule, span, message, help));
        }
    }
    if !has_error(&diagnostics[before..]) {
        return Some((spec, value_sources));
    }
    let errors = diagnostics[before..].iter().filter(|d| d.is_error());
    let refused: Vec<Span> = errors.filter_map(|error| error.span).collect();
    let is_refused = |entry: &Entry| refused.contains(&entry.value.span);
    if tree.entries().unwrap_or_default().iter().any(is_refused) {
        return None;
    }
    let mut left = Vec::new();
    let (rest, value_sources) = de::spec(&without(tree, &refused), &mut left);
    let rest = rest.filter(|_| !has_error(&left))?;
    Some((rest, value_sources))
}

/// The tree without the entries and items at these places.
fn without(tree: &Node, places: &[Span]) -> Node {
    let value = match &tree.value {
        Value::Scalar(scalar) => Value::Scalar(scalar.clone()),
        Value::Sequence(items) => {
            let kept = items.iter().filter(|item| !places.contains(&item.span));
            Value::Sequence(kept.map(|item| without(item, places)).collect())
        }
        Value::Mapping(entries) => {
            let is_kept = |entry: &&Entry| {
                !places.contains(&entry.name_span) && !places.contains(&entry.value.span)
            };
            let kept = entries.iter().filter(is_kept).map(|entry| Entry {
                value: without(&entry.value, places),
                ..entry.clone()
            });
            Value::Mapping(kept.collect())
        }
    };
    Node {
        value,
        ..tree.clone()
    }
}

/// Removes the file's settings of another batch schedule than the one that an override chooses
/// (`schedule.kind=constant` over a norm test). `command_line`: the overrides' file.
pub(crate) fn leave_other_schedule(native: &mut Node, command_line: FileId, reading: &mut Reading) {
    let Some(schedule) = native.get_mut("schedule") else {
        return;
    };
    let kind = schedule
        .get("kind")
        .filter(|kind| kind.span.file == command_line);
    let Some((kind, at)) = kind.and_then(|kind| Some((kind.text()?.to_owned(), kind.span))) else {
        return;
    };
    let belongs = |key: &str| match kind.as_str() {
        "constant" => false,
        "stages" => key == "stages",
        "replay" => key == "runs",
        _ => !["stages", "runs"].contains(&key),
    };
    let Value::Mapping(entries) = &mut schedule.value else {
        return;
    };
    let mut left = Vec::new();
    entries.retain(|entry| {
        let typed = entry.name_span.file == command_line || entry.value.span.file == command_line;
        let stays = entry.name == "kind" || typed || belongs(&entry.name);
        if !stays {
            left.push(format!("`{}`", entry.name));
        }
        stays
    });
    if !left.is_empty() {
        reading.note(
            "unknown-key",
            Some(at),
            format!(
                "the schedule is {kind}: of the file's schedule {} no longer count",
                left.join(", ")
            ),
            "nothing to do",
        );
    }
}

#[cfg(test)]
mod tests;
