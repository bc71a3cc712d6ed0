//! The JSON schema of a native recipe, from the types, their comments and the ranges of their numbers.

use schemars::generate::SchemaSettings;
use serde_json::{Value, json};

use super::limits;
use super::{API_VERSION, KIND};
use crate::recipe::schema::spec::Spec;

/// The schema of a native recipe (JSON Schema 2020-12), for editors. A recipe that it accepts may still break a rule.
pub fn schema() -> Value {
    let settings = SchemaSettings::draft2020_12();
    let settings = settings.with(|settings| settings.inline_subschemas = true);
    let mut spec = settings.into_generator().into_root_schema_for::<Spec>();
    let dialect = spec.remove("$schema");
    spec.remove("title");
    let mut spec = spec.to_value();
    with_kind_inside(&mut spec["properties"]["schedule"]);
    limits::put(&mut spec);
    without_formats(&mut spec);
    json!({
        "$schema": dialect,
        "title": "Evenkeel recipe",
        "description": "A training recipe in Evenkeel's own form (docs/dialects/native.md).",
        "type": "object",
        "additionalProperties": false,
        "required": ["apiVersion", "kind", "spec"],
        "properties": {
            "apiVersion": {"const": API_VERSION},
            "kind": {"const": KIND},
            "metadata": {
                "type": ["object", "null"],
                "additionalProperties": false,
                "properties": {
                    "name": {"type": "string", "description": "The run's name; default: the file's name."},
                    "labels": true, "annotations": true, "namespace": true,
                },
            },
            "spec": spec,
        },
    })
}

/// Recipes write an enum's settings beside its `kind`, serde below the variant's name.
fn with_kind_inside(schema: &mut Value) {
    let variants = schema["oneOf"].as_array_mut().into_iter().flatten();
    for variant in variants {
        let about = variant["description"].take();
        let outer = variant["properties"].as_object_mut();
        let named = outer.and_then(|outer| outer.iter_mut().next());
        let (kind, mut inner) = match named {
            Some((name, inner)) => (json!(name), inner.take()),
            // A variant without settings.
            None => (variant["const"].take(), json!({})),
        };
        inner["type"] = json!("object");
        inner["description"] = about;
        inner["additionalProperties"] = json!(false);
        inner["properties"]["kind"] = json!({"const": kind});
        let required = inner["required"].as_array_mut();
        match required {
            Some(required) => required.push(json!("kind")),
            None => inner["required"] = json!(["kind"]),
        }
        *variant = inner;
    }
}

/// Removes Rust's names of integers, which no validator knows.
fn without_formats(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            let is_of_rust = |value: &Value| value.as_str().is_some();
            if fields.get("format").is_some_and(is_of_rust) {
                fields.remove("format");
            }
            fields.values_mut().for_each(without_formats);
        }
        Value::Array(items) => items.iter_mut().for_each(without_formats),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    //! Writes the schema, and from it the reference page of the native dialect. `UPDATE=1` writes both.

    use std::fmt::Write as _;

    use serde_json::Map;

    use super::*;
    use crate::util::testing::is_kept;

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

    /// The kinds of a schema's values, without the schema of null.
    fn kinds(schema: &Value) -> Vec<&Value> {
        let all = schema["oneOf"].as_array().or(schema["anyOf"].as_array());
        let Some(all) = all else {
            return vec![schema];
        };
        let all = all.iter().flat_map(kinds);
        all.filter(|one| one["type"] != "null").collect()
    }

    fn is(schema: &Value, kind: &str) -> bool {
        schema["type"] == kind || schema["type"][0] == kind
    }

    /// The values of a key, as the page describes them.
    fn takes(schema: &Value) -> String {
        let kinds = kinds(schema);
        let words = kinds.iter().flat_map(|kind| {
            let one = Some(&kind["const"]).filter(|word| word.is_string());
            let one =
                one.or(Some(&kind["properties"]["kind"]["const"]).filter(|word| word.is_string()));
            let several = kind["enum"].as_array().into_iter().flatten();
            one.into_iter()
                .chain(several.filter(|word| word.is_string()))
        });
        let words: Vec<String> = words
            .map(|word| format!("`{}`", word.as_str().unwrap()))
            .collect();
        if !words.is_empty() {
            return words.join(", ");
        }
        let kind = kinds[0];
        let text = match kind {
            kind if is(kind, "integer") => "a whole number",
            kind if is(kind, "number") => "a number",
            kind if is(kind, "boolean") => "`true`, `false`",
            kind if is(kind, "string") => "a text",
            kind if is(kind, "array") && is(&kind["items"], "string") => "a list of texts",
            kind if is(kind, "array") && is(&kind["items"], "integer") => "a list of whole numbers",
            kind if is(kind, "array") => "a list, below",
            kind if kind["properties"].is_object() => "a mapping, below",
            _ => "a mapping",
        };
        text.to_owned()
    }

    fn about(schema: &Value) -> String {
        let text = schema["description"].as_str().unwrap_or_default();
        text.split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
            .replace('|', "\\|")
    }

    fn keys(schema: &Value) -> &Map<String, Value> {
        schema["properties"].as_object().expect("a mapping")
    }

    /// The table of a mapping's keys.
    fn table(schema: &Value) -> String {
        let mut text = "\n| key | takes | default | |\n|---|---|---|---|\n".to_owned();
        for (key, schema) in keys(schema).iter().filter(|(key, _)| *key != "kind") {
            let default = match &schema["default"] {
                Value::Null | Value::Object(_) => String::new(),
                Value::Array(list) if list.is_empty() => String::new(),
                Value::String(text) if text.is_empty() => String::new(),
                Value::String(text) => format!("`{text}`"),
                value => format!("`{value}`"),
            };
            writeln!(
                text,
                "| `{key}` | {} | {default} | {} |",
                takes(schema),
                about(schema)
            )
            .unwrap();
        }
        text
    }

    fn page(schema: &Value) -> String {
        let spec = &schema["properties"]["spec"];
        let mut page = INTRODUCTION.to_owned();
        page += "\n## Below `spec`\n";
        page += &table(spec);
        for (key, schema) in keys(spec)
            .iter()
            .filter(|(_, schema)| schema["properties"].is_object())
        {
            write!(page, "\n## `{key}`\n\n{}\n", about(schema)).unwrap();
            page += &table(schema);
        }
        let below = |path: &str| {
            path.split('.').fold(spec, |schema, part| match part {
                "*" => &schema["items"],
                part => kinds(&schema["properties"][part])[0],
            })
        };
        let kind = |kind: &str| {
            let all = kinds(&spec["properties"]["schedule"]);
            let found = all
                .into_iter()
                .find(|one| one["properties"]["kind"]["const"] == kind);
            found.expect("a kind of schedule")
        };
        for (title, schema) in [
            ("`batch.elastic`", below("batch.elastic")),
            ("`data.rows`", below("data.rows")),
            ("`data.marks`", below("data.marks")),
            (
                "Each of `data.train` and `data.evaluation`",
                below("data.train.*"),
            ),
            ("`synthetic` of a source", below("data.train.*.synthetic")),
            ("`schedule` with `kind: norm-test`", kind("norm-test")),
            (
                "Each of `stages`, with `kind: stages`",
                &kind("stages")["properties"]["stages"]["items"],
            ),
            (
                "Each of `runs`, with `kind: replay`",
                &kind("replay")["properties"]["runs"]["items"],
            ),
        ] {
            write!(page, "\n## {title}\n").unwrap();
            page += &table(schema);
        }
        page
    }

    #[test]
    fn the_schema_and_its_page_match_the_recipe_types() {
        let schema = schema();
        is_kept(
            "docs/schema/recipe.json",
            &(serde_json::to_string_pretty(&schema).unwrap() + "\n"),
        );
        is_kept("docs/dialects/native.md", &page(&schema));
    }
}
