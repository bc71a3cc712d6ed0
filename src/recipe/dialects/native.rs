//! The native recipe: `apiVersion: evenkeel.dev/v1alpha1`, `kind: Recipe`, and under `spec` the
//! keys of [`Spec`].
//!
//! [`build`] is the last step of every dialect. It turns a tree with native keys into a [`Spec`]
//! and the map of places, and reports all problems of the tree at once. Only `Spec`'s serde code
//! defines which keys exist and what they hold.

mod de;
mod limits;
mod value;

use std::path::Path;

use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::placeholder;
use crate::recipe::schema::progress_pattern;
use crate::recipe::schema::reader::{Confidence, Detected, ReadOptions, Reader, Translated};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::run_name;
use crate::recipe::schema::spec::Spec;
use crate::recipe::syntax::diagnostic::{Diagnostic, Severity};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::source::ValueSources;
use crate::util::suggest::{did_you_mean, short};

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
    let diagnostics = &mut reading.diagnostics;
    expect(root, "apiVersion", API_VERSION, diagnostics);
    expect(root, "kind", KIND, diagnostics);
    for entry in root.entries().unwrap_or_default() {
        let known = ["apiVersion", "kind", "metadata", "spec"];
        if !known.contains(&entry.name.as_str()) {
            let help = format!(
                "{}; the recipe's keys belong under `spec:`",
                did_you_mean(&entry.name, known)
            );
            diagnostics.push(unknown_key(&entry.name, entry.name_span, help));
        }
    }
    let mut native = match root.get("spec") {
        Some(spec) => spec.clone(),
        None => {
            diagnostics.push(Diagnostic::error(
                "mandatory-missing",
                Some(root.span),
                "the recipe has no `spec`",
                "put the recipe's keys under `spec:`",
            ));
            Node::mapping(root.span)
        }
    };
    native.name_entries("");
    let named = root.get("metadata").and_then(|m| metadata(m, diagnostics));
    if native.get("name").is_none() {
        let name = named.unwrap_or_else(|| Node::string(run_name::of_file(path), root.span));
        native.set("name", name.span, name);
    }
    native
}

/// The name in the metadata. Other keys are ignored, because cluster tools add them.
fn metadata(metadata: &Node, diagnostics: &mut Vec<Diagnostic>) -> Option<Node> {
    const KNOWN: [&str; 4] = ["name", "labels", "annotations", "namespace"];
    if metadata.entries().is_none() && !metadata.is_null(Schema::Core) {
        diagnostics.push(Diagnostic::error(
            "wrong-type",
            Some(metadata.span),
            format!("`metadata` takes a mapping, this is {}", metadata.kind()),
            "write `metadata: {name: my-run}`",
        ));
    }
    for entry in metadata.entries().unwrap_or_default() {
        if !KNOWN.contains(&entry.name.as_str()) {
            diagnostics.push(unknown_key(
                &format!("metadata.{}", entry.name),
                entry.name_span,
                did_you_mean(&entry.name, KNOWN),
            ));
        }
    }
    let mut name = metadata.get("name")?.clone();
    name.name_keys("metadata.name");
    Some(name)
}

fn unknown_key(name: &str, span: crate::recipe::syntax::source::Span, help: String) -> Diagnostic {
    Diagnostic::error(
        "unknown-key",
        Some(span),
        format!("there is no key `{name}`"),
        help,
    )
}

fn expect(root: &Node, key: &str, value: &str, diagnostics: &mut Vec<Diagnostic>) {
    match root.get(key) {
        Some(node) if node.resolve(Schema::Core) == Some(Resolved::Str(value.to_owned())) => {}
        Some(node) => diagnostics.push(Diagnostic::error(
            "out-of-range",
            Some(node.span),
            format!("`{key}` is `{}`", node.shown()),
            format!("this version of evenkeel reads `{key}: {value}`"),
        )),
        None => diagnostics.push(Diagnostic::error(
            "mandatory-missing",
            Some(root.span),
            format!("the recipe has no `{key}`"),
            format!("write `{key}: {value}`"),
        )),
    }
}

/// Converts a tree with native keys to a spec and the places of its values.
///
/// All problems go to `diagnostics`; if one of them is an error, the spec is `None`.
pub fn build(tree: &Node, diagnostics: &mut Vec<Diagnostic>) -> Option<(Spec, ValueSources)> {
    let before = diagnostics.len();
    let (spec, value_sources) = de::spec(tree, diagnostics);
    let spec = spec?;
    check_name_and_output(&spec, &value_sources, diagnostics);
    let pattern = spec.trainer.progress_pattern.as_deref();
    let pattern = pattern.and_then(|pattern| progress_pattern::compile(pattern).err());
    let flaws = [
        placeholder::flaw(&spec.trainer)
            .map(|(path, problem)| (path, problem, placeholder::LISTED)),
        pattern.map(|error| {
            (
                "trainer.progress_pattern",
                error.to_string(),
                "docs/external-trainer.md has an example",
            )
        }),
    ];
    for (path, problem, help) in flaws.into_iter().flatten() {
        let place = value_sources.get(path);
        let key = place.map_or(path, |place| &place.key);
        diagnostics.push(Diagnostic::error(
            "trainer-command",
            place.map(|place| place.span),
            format!("`{key}` {problem}"),
            help,
        ));
    }
    let refused = diagnostics[before..]
        .iter()
        .any(|d| d.severity == Severity::Error);
    (!refused).then_some((spec, value_sources))
}

/// Checks the run's name and directory. A refused value is a stand-in by now and is not reported
/// again.
fn check_name_and_output(
    spec: &Spec,
    value_sources: &ValueSources,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let mut refuse = |path: &str, problem: String, help: String| {
        let place = value_sources.get(path);
        let span = place.map(|place| place.span);
        if span.is_none() || diagnostics.iter().all(|d| d.span != span) {
            let key = place.map_or(path, |place| &place.key);
            let message = format!("`{key}` is {problem}");
            diagnostics.push(Diagnostic::error("run-name", span, message, help));
        }
    };
    if let Some(flaw) = run_name::flaw(&spec.name) {
        let help = format!(
            "use a DNS label, at most 63 lower-case letters, digits and `-`, such as `{}`",
            run_name::label(&spec.name)
        );
        refuse("name", format!("`{}`: {flaw}", short(&spec.name)), help);
    }
    if spec.output.as_deref() == Some("") {
        let help = "name a directory, or remove it for `runs/NAME`".to_owned();
        refuse("output", "empty".to_owned(), help);
    }
}

#[cfg(test)]
mod tests;
