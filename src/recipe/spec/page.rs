//! The page of the native dialect, made of the recipe's own types: their fields, comments and defaults.
//! `UPDATE=1` writes it.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::{DataSource, Elastic, NormTest, Spec, Synthetic};

/// What the page begins with.
const INTRODUCTION: &str = "# native

Evenkeel's own recipe, which says its global batch outright. Every other dialect is translated into it, and
its keys stand over the translation: below `evenkeel:` in the file, or as `evenkeel.KEY=VALUE` on the command
line. In a native recipe itself an override is `KEY=VALUE`, as `batch.micro=4`.

```yaml
apiVersion: evenkeel.dev/v1alpha1
kind: Recipe
metadata:
  name: my-run
spec:
  batch: {global: 128, micro: 16}
  model: {path: HuggingFaceTB/SmolLM2-135M}
  data: {train: [{path: data.jsonl}]}
  budget: {epochs: 1}
```

The name is `metadata.name`, else the file's. Unknown keys are refused with what was meant, numbers outside of
their ranges with the range, and all problems at once. YAML is read as its core schema has it, `1e-5` a number
and `no` a text. What the keys come to is on the page of [recipes](../recipes.md).

Made of the program's own types, by its tests (`UPDATE=1 cargo test`).
";

/// A field of a struct, or a variant of an enum.
#[derive(Default, Clone)]
struct Part {
    name: String,
    kind: String,
    about: String,
    /// What serde calls a variant, where it is told.
    renamed: Option<String>,
}

/// The types of this room by their names, enums among them.
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
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/recipe/spec");
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

    /// What a type takes, in words.
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

/// The parts of a type up to its closing brace, each with the comment above it.
fn parts<'t>(
    lines: &mut impl Iterator<Item = &'t str>,
    part: impl Fn(&str) -> Option<(String, String)>,
) -> Vec<Part> {
    let mut found = Vec::new();
    let mut next = Part::default();
    for line in lines.take_while(|line| *line != "}") {
        // Fields of a variant are its own business.
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
            let own = std::mem::take(&mut next);
            found.push(Part { name, kind, ..own });
        }
    }
    found
}

/// A variant as a recipe spells it: kebab case, unless serde is told.
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
    let own = |value: Result<Value, serde_json::Error>| value.unwrap();
    for (title, name, defaults) in [
        (
            "`batch.elastic`",
            "Elastic",
            own(serde_json::to_value(Elastic::default())),
        ),
        (
            "Each of `data.train` and `data.evaluation`",
            "DataSource",
            own(serde_json::to_value(DataSource::default())),
        ),
        (
            "`synthetic` of a source",
            "Synthetic",
            own(serde_json::to_value(Synthetic::default())),
        ),
        (
            "`schedule` with `kind: norm-test`",
            "NormTest",
            own(serde_json::to_value(NormTest::default())),
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
fn the_page_of_the_native_dialect_has_the_keys_of_the_program() {
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
    // What serde writes has every key that it reads.
    let defaults = serde_json::to_value(Spec::default()).unwrap();
    for (key, value) in defaults.as_object().unwrap() {
        assert!(page.contains(&format!("| `{key}` |")), "{key}");
        for inner in value.as_object().into_iter().flat_map(|all| all.keys()) {
            let known = inner == "kind" || page.contains(&format!("| `{inner}` |"));
            assert!(known, "{key}.{inner}");
        }
    }
}
