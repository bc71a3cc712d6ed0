//! JSON values as YAML in block style. Strings are in double quotes, which JSON and YAML read
//! alike, so none of them can be taken for something else.

use serde_json::Value;

/// A whole document, ended by a line feed.
pub fn document(value: &Value) -> String {
    let mut text = String::new();
    match value {
        Value::Object(map) if !map.is_empty() => entries(value, 0, &mut text),
        Value::Array(items) if !items.is_empty() => entries(value, 0, &mut text),
        scalar => text = format!("{scalar}\n"),
    }
    text
}

/// The entries of a collection, each on a line of its own at this depth.
fn entries(value: &Value, depth: usize, text: &mut String) {
    let indent = "  ".repeat(depth);
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                *text += &format!("{indent}{key}:");
                child(value, depth, text);
            }
        }
        Value::Array(items) => {
            for item in items {
                let from = text.len();
                if item.is_object() && item.as_object().is_some_and(|map| !map.is_empty()) {
                    entries(item, depth + 1, text);
                    // The dash stands in the indentation of the first key.
                    let dash = from + indent.len();
                    text.replace_range(dash..dash + 1, "-");
                } else {
                    *text += &format!("{indent}-");
                    child(item, depth, text);
                }
            }
        }
        scalar => *text += &format!("{indent}{scalar}\n"),
    }
}

/// A value after its key or dash.
fn child(value: &Value, depth: usize, text: &mut String) {
    let collection = match value {
        Value::Object(map) => !map.is_empty(),
        // A list of numbers reads better on one line.
        Value::Array(items) => items
            .iter()
            .any(|item| item.is_object() || item.is_string()),
        _ => false,
    };
    if collection {
        text.push('\n');
        entries(value, depth + 1, text);
    } else {
        *text += &format!(" {value}\n");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::document;

    #[test]
    fn documents_are_block_yaml() {
        let value = json!({
            "proof": "8 × 16 × 1 = 128",
            "eval_every": null,
            "feasible_gpu_counts": [1, 2, 4],
            "adjusted": [{"key": "a: b", "from": "1"}, {"key": "no", "nested": {"x": ["y"]}}],
            "diagnostics": [],
        });
        insta::assert_snapshot!(document(&value));
    }

    #[test]
    fn what_is_written_is_read_back() {
        let value = json!({"name": "no", "list": ["1e-5", "~"], "map": {"deep": {"n": 1.5}}});
        let mut sources = crate::recipe::Sources::default();
        let text = document(&value);
        let file = sources.add("x", text.as_str());
        let mut found = Vec::new();
        let tree = crate::recipe::yaml::parse(&text, file, &mut found).unwrap();
        assert_eq!(found, []);
        let list = tree.get("list").unwrap().items().unwrap();
        assert_eq!(list[0].text(), Some("1e-5"));
        let deep = tree.get_path("map.deep.n").unwrap();
        assert_eq!(deep.text(), Some("1.5"));
    }
}
