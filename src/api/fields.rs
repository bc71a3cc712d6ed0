//! The reference of a TrainingJob's fields and conditions, from the schema and the condition types.

use serde_json::{Map, Value};

/// The page, in Markdown: a table for the spec, and one for the status.
pub fn page() -> Result<String, serde_json::Error> {
    let crd = serde_json::to_value(super::crd())?;
    let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"];
    let mut text = String::from(
        "# TrainingJob\n\n`evenkeel.dev/v1alpha1`. The tests generate this page from the API types (`src/api/`): change their doc\n\
         comments and run `UPDATE=1 cargo test --lib`. `evenkeel crd --fields` prints this page, and\n\
         `kubectl explain trainingjob` has the same texts.\n\n\
         Times are RFC 3339 with microseconds; durations end in `Seconds`. Conditions are the contract of the\n\
         status: `status.phase` and `status.message` summarise them for people and may change.\n",
    );
    for part in ["spec", "status"] {
        text +=
            &format!("\n## {part}\n\n| field | type | default | meaning |\n|---|---|---|---|\n");
        rows(&schema[part], part, &mut text);
    }
    text += "\n## Conditions\n\nEvery condition has a status, a reason and a message. `kubectl wait --for=condition=Complete \
             tj/NAME`\nreturns once training reached its budget; a job that cannot continue sets `Failed`.\n\n";
    text += &super::condition::table();
    text += "\n## Rules between fields\n\nThe API server refuses a TrainingJob that breaks one of them, with this message.\n\n| field | message |\n|---|---|\n";
    rules(&schema["spec"], "spec", &mut text);
    Ok(text)
}

/// A row for every field below `schema`; an object's fields follow the object.
fn rows(schema: &Value, path: &str, text: &mut String) {
    for (name, field) in properties(schema) {
        let path = format!("{path}.{name}");
        let (kind, inner) = kind(field);
        let default = match &field["default"] {
            // Each field of the object has its own row and default.
            Value::Null | Value::Object(_) => String::new(),
            value => format!("`{value}`"),
        };
        let required = schema["required"].as_array();
        let required = required.is_some_and(|all| all.iter().any(|one| one == name));
        let required = if required && path.starts_with("spec") {
            ", required"
        } else {
            ""
        };
        let meaning = field["description"].as_str().unwrap_or_default();
        let meaning = meaning.replace('\n', " ").replace('|', "\\|");
        *text += &format!("| `{path}` | {kind}{required} | {default} | {meaning} |\n");
        let within = if field["type"] == "array" {
            format!("{path}[]")
        } else {
            path
        };
        rows(inner, &within, text);
    }
}

fn properties(schema: &Value) -> impl Iterator<Item = (&String, &Value)> {
    let properties = schema["properties"].as_object();
    properties.into_iter().flat_map(Map::iter)
}

/// The type with its limits, and the schema of the fields below it.
fn kind(field: &Value) -> (String, &Value) {
    let (list, of) = if field["type"] == "array" {
        ("list of ", &field["items"])
    } else {
        ("", field)
    };
    let limit = |schema: &Value, key: &str, unit: &str| {
        let most = schema[key].as_f64();
        most.map_or_else(String::new, |most| format!(", at most {most} {unit}"))
    };
    let name = if let Some(values) = of["enum"].as_array() {
        let values = values.iter().filter_map(Value::as_str);
        let values: Vec<String> = values.map(|value| format!("`{value}`")).collect();
        values.join(", ")
    } else {
        let kind = match of["format"].as_str() {
            Some("date-time") => "time",
            _ => of["type"].as_str().unwrap_or("object"),
        };
        format!("{kind}{}", limit(of, "maxLength", "characters"))
    };
    // The schema holds bounds as floating-point numbers, those of integers too.
    let range = match (field["minimum"].as_f64(), field["maximum"].as_f64()) {
        (Some(least), Some(most)) => format!(" {least} to {most}"),
        (Some(least), None) => format!(" from {least}"),
        _ => String::new(),
    };
    let items = limit(field, "maxItems", "items");
    (format!("{list}{name}{range}{items}"), of)
}

fn rules(schema: &Value, path: &str, text: &mut String) {
    let all = schema["x-kubernetes-validations"].as_array();
    for rule in all.into_iter().flatten() {
        let message = rule["message"].as_str().unwrap_or_default();
        *text += &format!("| `{path}` | {message} |\n");
    }
    for (name, field) in properties(schema) {
        rules(field, &format!("{path}.{name}"), text);
    }
}
