//! The invariants that every fuzz target checks.
//!
//! This crate compiles only the recipe module and the rendering of diagnostics, from their own
//! sources. The whole crate takes many times as long to build with coverage instrumentation, and
//! the rest reads no recipes.

#[path = "../../src/recipe/mod.rs"]
pub mod recipe;
#[path = "../../src/export/mod.rs"]
pub mod export;
#[path = "../../src/util"]
pub mod util {
    pub mod input;
    pub mod suggest;
}
#[path = "../../src/cli/render/draw.rs"]
pub mod render;

use std::collections::BTreeMap;
use std::path::PathBuf;

use export::{Form, BatchNumbers};
use recipe::syntax::node::{Node, Value};
use recipe::syntax::scalar::Schema;
use recipe::{Diagnostic, Dialect, Origin, ReadError, Recipe, Request, Severity, Sources, Span};

/// The files of a tree by path.
pub type Files = BTreeMap<PathBuf, String>;

/// Reads a text as a dialect, with overrides, and checks the result.
pub fn read(dialect: Dialect, path: &str, text: &str, overrides: Vec<String>) {
    read_as(Some(dialect), path, text, overrides);
}

/// Like [`read`]; without a dialect the reader detects it.
pub fn read_as(dialect: Option<Dialect>, path: &str, text: &str, overrides: Vec<String>) {
    let request = Request {
        path: path.into(),
        overrides,
        dialect,
        ..Request::default()
    };
    match recipe::read_text(&request, text.to_owned()) {
        Ok(recipe) => {
            check_recipe(&recipe);
            check_written(&recipe, &request);
        }
        Err(error) => check_error(&error),
    }
}

/// Like [`read`], for a tree of configs.
pub fn read_tree(dialect: Dialect, files: Files, overrides: Vec<String>) {
    let request = Request {
        origin: Origin::snapshot(files.clone()).expect("paths inside of a folder"),
        path: ".".into(),
        overrides,
        dialect: Some(dialect),
        ..Request::default()
    };
    match recipe::read(&request) {
        Ok(recipe) => {
            check_recipe(&recipe);
            check_written_tree(&recipe, &request, files);
        }
        Err(error) => check_error(&error),
    }
}

/// Like [`read_as`], for a script or a file of arguments beside the files that it may name.
pub fn read_beside(path: &str, text: &str, mut files: Files) {
    files.insert(path.into(), text.to_owned());
    let request = Request {
        origin: Origin::snapshot(files).expect("paths inside of a folder"),
        path: path.into(),
        ..Request::default()
    };
    match recipe::read(&request) {
        Ok(recipe) => check_recipe(&recipe),
        Err(error) => check_error(&error),
    }
}

/// Reads `recipe.yaml` with the command of an external trainer, whose launcher may name the other files.
pub fn read_command(command: Vec<String>, files: Files) {
    let is_external = !command.is_empty();
    let request = Request {
        origin: Origin::snapshot(files).expect("paths inside of a folder"),
        path: "recipe.yaml".into(),
        trainer_command: command,
        ..Request::default()
    };
    match recipe::read(&request) {
        Ok(recipe) => {
            assert!(recipe.spec.trainer.is_external() || !is_external);
            check_recipe(&recipe);
            if let Err(error) = recipe::launchers::stated_environment(&recipe) {
                check_error(&error);
            }
        }
        Err(error) => check_error(&error),
    }
}

/// A plan for another world: 12 × 5 × 7.
fn numbers(recipe: &Recipe) -> BatchNumbers {
    BatchNumbers {
        world: 12,
        nodes: None,
        data_parallel: 12,
        global: 12 * 5 * 7,
        per_device_batch_size: 5,
        accumulation: 7,
        steps_per_generation: recipe.spec.generation.steps_per_generation.map(|_| 9),
    }
}

/// The file of a tree, written for another world, must read back with its numbers.
fn check_written_tree(recipe: &Recipe, request: &Request, mut files: Files) {
    let Ok(written) = export::emit(recipe, &numbers(recipe), Form::Recipe) else {
        return;
    };
    let file = written.replaces.expect("the output replaces a file of the tree");
    let name = file.strip_prefix(".").unwrap_or(&file).to_owned();
    assert!(files.insert(name, written.text.clone()).is_some(), "the output replaces a file of the tree");
    let request = &Request {
        origin: Origin::snapshot(files).expect("paths inside of a folder"),
        ..request.clone()
    };
    let accumulation = |recipe: &Recipe| recipe.files.tree.clone()?.accumulation;
    let typed = |recipe: &Recipe| {
        let file = accumulation(recipe).map(|given| given.span.file);
        file.is_none() || file == recipe.files.command_line
    };
    // Another value may depend on the number, and be refused.
    if let (false, Ok(again)) = (typed(recipe), recipe::read(request)) {
        let value = accumulation(&again).map(|given| given.value);
        assert_eq!(value, Some(7), "{}", written.text);
    }
}

/// A recipe written for another world must read back with the written numbers.
fn check_written(recipe: &Recipe, request: &Request) {
    let numbers = numbers(recipe);
    for form in [Form::Args, Form::Env, Form::Accelerate, Form::Deepspeed] {
        let _written = export::emit(recipe, &numbers, form);
    }
    let Ok(written) = export::emit(recipe, &numbers, Form::Recipe) else {
        return;
    };
    // Overrides take precedence over the written numbers, and a stated batch over the product.
    if !request.overrides.is_empty() || recipe.dialect != Dialect::Transformers {
        return;
    }
    let request = Request {
        dialect: Some(recipe.dialect),
        ..request.clone()
    };
    let again = recipe::read_text(&request, written.text.clone());
    let again = again.unwrap_or_else(|error| panic!("{error}: {}", written.text));
    let batch = &again.spec.batch;
    if recipe.spec.batch.global.is_none() {
        assert_eq!((batch.per_device_batch_size, batch.accumulation), (Some(5), Some(7)), "{}", written.text);
    }
}

fn check_recipe(recipe: &Recipe) {
    // A missing value that no batch number depends on fails `plan`, not reading.
    let form = |d: &&Diagnostic| d.severity == Severity::Error && d.rule != "mandatory-missing";
    let errors = recipe.diagnostics.iter().filter(form);
    assert_eq!(errors.count(), 0, "the recipe has errors: {:?}", recipe.diagnostics);
    check_diagnostics(&recipe.diagnostics, &recipe.sources);
    for place in recipe.value_sources.values() {
        check_span(place.span, &recipe.sources);
    }
    let json = serde_json::to_string(&recipe.spec).expect("the spec serialises to JSON");
    let back = serde_json::from_str(&json).expect("the spec deserialises from JSON");
    assert_eq!(recipe.spec, back);
}

fn check_error(error: &ReadError) {
    let refused = error.diagnostics.iter().any(|d| d.severity == Severity::Error);
    assert!(refused, "refusal without an error: {:?}", error.diagnostics);
    check_diagnostics(&error.diagnostics, &error.sources);
    assert!(!error.to_string().is_empty());
}

fn check_diagnostics(diagnostics: &[Diagnostic], sources: &Sources) {
    for diagnostic in diagnostics {
        assert!(!diagnostic.message.is_empty() && !diagnostic.help.is_empty());
        if let Some(span) = diagnostic.span {
            check_span(span, sources);
        }
    }
    // Rendering is slow compared to reading; a few diagnostics cover every layout over time.
    let some = &diagnostics[..diagnostics.len().min(4)];
    let _drawn = render::diagnostics(some, sources);
}

fn check_span(span: Span, sources: &Sources) {
    let file = sources.get(span.file).expect("a span lies in a source file");
    assert!(span.start <= span.end, "{span:?}");
    assert!(file.text.get(span.start..span.end).is_some(), "{span:?}");
    assert!(span.line >= 1 && span.column >= 1, "{span:?}");
}

/// Checks a tree: spans within the text, depth and size within the budgets, and that every node
/// resolves.
pub fn check_tree(root: &Node, text: &str) {
    let mut nodes = 0;
    let mut stack = vec![(root, 1)];
    while let Some((node, depth)) = stack.pop() {
        nodes += 1;
        assert!(depth <= recipe::syntax::yaml::MAX_DEPTH + 1, "depth {depth}");
        assert!(text.get(node.span.start..node.span.end).is_some(), "{:?}", node.span);
        for schema in [Schema::PyYaml, Schema::OmegaConf, Schema::Core] {
            let _value = node.resolve(schema);
        }
        match &node.value {
            Value::Scalar(_) => {}
            Value::Sequence(items) => stack.extend(items.iter().map(|i| (i, depth + 1))),
            Value::Mapping(entries) => {
                for entry in entries {
                    assert!(text.get(entry.name_span.start..entry.name_span.end).is_some());
                    stack.push((&entry.value, depth + 1));
                }
            }
        }
    }
    assert!(nodes <= recipe::syntax::yaml::MAX_NODES, "{nodes} nodes");
}
