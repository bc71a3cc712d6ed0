//! Every field of a TrainingJob as a page for people, from the schema that the API server checks.

use serde_json::{Map, Value};

/// The page, in Markdown: a table for the spec, and one for the status.
pub fn page() -> Result<String, serde_json::Error> {
    let crd = serde_json::to_value(super::crd())?;
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    let mut text = String::from(
        "# Fields of a TrainingJob\n\n`evenkeel.dev/v1alpha1`. Written by `evenkeel crd --fields` from the schema; change the doc\n\
         comments of `src/job/api`, not this page. What contradicts itself is refused by the API server with\nthe words of the rules below.\n",
    );
    for part in ["spec", "status"] {
        text +=
            &format!("\n## {part}\n\n| field | type | default | meaning |\n|---|---|---|---|\n");
        rows(&schema[part], part, &mut text);
    }
    text += "\n## Rules between fields\n\n";
    rules(&schema["spec"], "spec", &mut text);
    Ok(text)
}

/// A row for every field below `schema`, those of objects after their object.
fn rows(schema: &Value, path: &str, text: &mut String) {
    for (name, field) in properties(schema) {
        let path = format!("{path}.{name}");
        let (kind, inner) = kind(field);
        let default = match &field["default"] {
            Value::Null => String::new(),
            // The defaults of an object's fields stand at the fields.
            Value::Object(_) => String::new(),
            value => format!("`{value}`"),
        };
        let required = schema["required"].as_array();
        let required = required.is_some_and(|all| all.iter().any(|one| one == name));
        let kind = match required && path.starts_with("spec") {
            true => format!("{kind}, required"),
            false => kind,
        };
        let meaning = field["description"].as_str().unwrap_or_default();
        let meaning = meaning.replace('\n', " ").replace('|', "\\|");
        *text += &format!("| `{path}` | {kind} | {default} | {meaning} |\n");
        let within = if field["type"] == "array" {
            format!("{path}[]")
        } else {
            path
        };
        rows(inner, &within, text);
    }
}

fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    schema["properties"]
        .as_object()
        .into_iter()
        .flat_map(Map::iter)
}

/// The type in a word or two, and the schema whose fields come next.
fn kind(field: &Value) -> (String, &Value) {
    let name = |schema: &Value| {
        let allowed = schema["enum"].as_array();
        match allowed {
            Some(values) => {
                let values = values.iter().filter(|value| !value.is_null());
                let values: Vec<String> = values
                    .filter_map(|value| Some(format!("`{}`", value.as_str()?)))
                    .collect();
                values.join(", ")
            }
            None => schema["type"].as_str().unwrap_or("object").to_owned(),
        }
    };
    // The schema holds bounds as floating-point numbers, those of integers too.
    let range = match (field["minimum"].as_f64(), field["maximum"].as_f64()) {
        (Some(least), Some(most)) => format!(" {least} to {most}"),
        (Some(least), None) => format!(" from {least}"),
        _ => String::new(),
    };
    match field["type"] == "array" {
        true => (
            format!("list of {}", name(&field["items"])),
            &field["items"],
        ),
        false => (format!("{}{range}", name(field)), field),
    }
}

fn rules(schema: &Value, path: &str, text: &mut String) {
    let all = schema["x-kubernetes-validations"].as_array();
    for rule in all.into_iter().flatten() {
        let message = rule["message"].as_str().unwrap_or_default();
        *text += &format!("- `{path}`: {message}\n");
    }
    for (name, field) in properties(schema) {
        rules(field, &format!("{path}.{name}"), text);
    }
}
