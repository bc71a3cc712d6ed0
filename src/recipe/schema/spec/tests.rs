//! Generates the reference page of the native dialect from the recipe types: their fields, comments
//! and defaults. `UPDATE=1` writes it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{DataSource, Elastic, NormTest, Spec, Synthetic};

/// Introduction of the page.
const INTRODUCTION: &str = "# native

A native recipe states its global batch directly. Evenkeel translates every other dialect into a native recipe.
Native keys override the translation: under `evenkeel:` in the file, or as `evenkeel.KEY=VALUE` on the
command line. In a native recipe an override is `KEY=VALUE`, such as `batch.per_device_batch_size=4`.

```yaml
apiVersion: evenkeel.dev/v1alpha1
kind: Recipe
metadata:
  name: my-run
spec:
  batch: {global: 128, per_device_batch_size: 16}
  model: {path: HuggingFaceTB/SmolLM2-135M}
  data: {train: [{path: data.jsonl}]}
  budget: {epochs: 1}
```

The run's name is `metadata.name`, else the file's name. The key `spec.name`, also as the override `name=…`, has
precedence over both. An unknown key is an error that suggests the nearest key. A number out of range is an error that
states the range. All errors are reported together. Evenkeel reads YAML with the core schema, in which `1e-5` is a
number and `no` is a text. [Recipes](../recipes.md) explains the resulting batch.

Tests generate this page from the Rust types (`UPDATE=1 cargo test --lib`).
";

/// A field of a struct, or a variant of an enum.
#[derive(Default, Clone)]
struct Part {
    name: String,
    kind: String,
    about: String,
    /// The name in serde's `rename`, where it has one.
    renamed: Option<String>,
}

/// The types of this directory by name, with enums separate from structs.
struct Types {
    structs: BTreeMap<String, Vec<Part>>,
    enums: BTreeMap<String, Vec<Part>>,
}

impl Types {
    fn read() -> Types {
        let mut types = Types {
            structs: BTreeMap::new(),
            enums: BTreeMap::new(),
        };
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/recipe/schema/spec");
        for entry in fs::read_dir(folder).unwrap() {
            let text = fs::read_to_string(entry.unwrap().path()).unwrap();
            types.take(&text);
        }
        types
    }

    fn take(&mut self, text: &str) {
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            let opened = |word: &str| {
                let rest = line.strip_prefix(word)?;
                Some(rest.strip_suffix(" {")?.to_owned())
            };
            if let Some(name) = opened("pub struct ") {
                let fields = parts(&mut lines, |line| {
                    let (name, kind) = line.strip_prefix("pub ")?.split_once(": ")?;
                    Some((name.to_owned(), kind.trim_end_matches(',').to_owned()))
                });
                self.structs.insert(name, fields);
            } else if let Some(name) = opened("pub enum ") {
                let variants = parts(&mut lines, |line| {
                    let word = |c: char| c.is_ascii_alphanumeric();
                    let end = line.find(|c| !word(c)).unwrap_or(line.len());
                    let first = line.starts_with(|c: char| c.is_ascii_uppercase());
                    first.then(|| (line[..end].to_owned(), String::new()))
                });
                self.enums.insert(name, variants);
            }
        }
    }

    /// The values of a type, as the page describes them.
    fn takes(&self, kind: &str) -> String {
        let inside = |outer: &str| kind.strip_prefix(outer)?.strip_suffix('>');
        if let Some(kind) = inside("Option<") {
            return self.takes(kind);
        }
        if let Some(kind) = inside("Vec<") {
            return match kind {
                "String" => "a list of texts".to_owned(),
                "u64" => "a list of whole numbers".to_owned(),
                _ => "a list, below".to_owned(),
            };
        }
        match kind {
            "u64" => "a whole number".to_owned(),
            "f64" => "a number".to_owned(),
            "bool" => "`true`, `false`".to_owned(),
            "String" => "a text".to_owned(),
            kind if kind.starts_with("BTreeMap<") => "a mapping".to_owned(),
            kind => match self.enums.get(kind) {
                Some(variants) => {
                    let words = variants.iter().map(|part| format!("`{}`", word(part)));
                    words.collect::<Vec<_>>().join(", ")
                }
                None => "a mapping, below".to_owned(),
            },
        }
    }

    /// The table of a struct's keys.
    fn table(&self, name: &str, defaults: &Value) -> String {
        let mut text = "\n| key | takes | default | |\n|---|---|---|---|\n".to_owned();
        for field in &self.structs[name] {
            let default = match &defaults[&field.name] {
                Value::Null => String::new(),
                Value::Array(list) if list.is_empty() => String::new(),
                Value::Object(_) => String::new(),
                Value::String(text) if text.is_empty() => String::new(),
                Value::String(text) => format!("`{text}`"),
                value => format!("`{value}`"),
            };
            let takes = self.takes(&field.kind);
            writeln!(
                text,
                "| `{}` | {takes} | {default} | {} |",
                field.name, field.about
            )
            .unwrap();
        }
        text
    }
}

/// The fields or variants of a type up to its closing brace, each with its comment.
fn parts<'t>(
    lines: &mut impl Iterator<Item = &'t str>,
    part: impl Fn(&str) -> Option<(String, String)>,
) -> Vec<Part> {
    let mut found = Vec::new();
    let mut next = Part::default();
    for line in lines.take_while(|line| *line != "}") {
        // Fields of a variant are not keys of the type.
        if line.starts_with("        ") {
            continue;
        }
        let line = line.trim();
        if let Some(text) = line.strip_prefix("///") {
            next.about = format!("{} {}", next.about, text.trim())
                .trim()
                .replace('|', "\\|");
        } else if let Some(text) = line.strip_prefix("#[serde(rename = \"") {
            next.renamed = text.split('"').next().map(str::to_owned);
        } else if let Some((name, kind)) = part(line) {
            let described = std::mem::take(&mut next);
            found.push(Part {
                name,
                kind,
                ..described
            });
        }
    }
    found
}

/// A variant's name in a recipe: kebab case, or serde's `rename`.
fn word(variant: &Part) -> String {
    if let Some(renamed) = &variant.renamed {
        return renamed.clone();
    }
    let mut word = String::new();
    for (at, c) in variant.name.char_indices() {
        if c.is_ascii_uppercase() && at > 0 {
            word.push('-');
        }
        word.push(c.to_ascii_lowercase());
    }
    word
}

fn page() -> String {
    let types = Types::read();
    let defaults = serde_json::to_value(Spec::default()).unwrap();
    let mut page = INTRODUCTION.to_owned();
    page += "\n## Below `spec`\n";
    page += &types.table("Spec", &defaults);
    for field in &types.structs["Spec"] {
        if types.structs.contains_key(&field.kind) {
            write!(page, "\n## `{}`\n\n{}\n", field.name, field.about).unwrap();
            page += &types.table(&field.kind, &defaults[&field.name]);
        }
    }
    let unwrapped = |value: Result<Value, serde_json::Error>| value.unwrap();
    for (title, name, defaults) in [
        (
            "`batch.elastic`",
            "Elastic",
            unwrapped(serde_json::to_value(Elastic::default())),
        ),
        (
            "Each of `data.train` and `data.evaluation`",
            "DataSource",
            unwrapped(serde_json::to_value(DataSource::default())),
        ),
        (
            "`synthetic` of a source",
            "Synthetic",
            unwrapped(serde_json::to_value(Synthetic::default())),
        ),
        (
            "`schedule` with `kind: norm-test`",
            "NormTest",
            unwrapped(serde_json::to_value(NormTest::default())),
        ),
        ("Each of `stages`, with `kind: stages`", "Stage", json!({})),
        (
            "Each of `runs`, with `kind: replay`",
            "ReplayRun",
            json!({}),
        ),
    ] {
        write!(page, "\n## {title}\n").unwrap();
        page += &types.table(name, &defaults);
    }
    page
}

#[test]
fn the_native_page_matches_the_recipe_types() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/dialects/native.md");
    let page = page();
    if std::env::var_os("UPDATE").is_some() {
        fs::write(&path, &page).unwrap();
    }
    let found = fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        found, page,
        "docs/dialects/native.md: run the tests with UPDATE=1"
    );
    // serde writes every key that it reads.
    let defaults = serde_json::to_value(Spec::default()).unwrap();
    for (key, value) in defaults.as_object().unwrap() {
        assert!(page.contains(&format!("| `{key}` |")), "{key}");
        for inner in value.as_object().into_iter().flat_map(|all| all.keys()) {
            let known = inner == "kind" || page.contains(&format!("| `{inner}` |"));
            assert!(known, "{key}.{inner}");
        }
    }
}
