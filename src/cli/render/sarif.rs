//! Diagnostics as SARIF 2.1.0, which code review tools show next to the lines.
//!
//! Columns count characters, as in evenkeel. A finding without a location is reported at its
//! recipe, for a config tree at the root file.

use std::path::Path;

use serde_json::{Value, json};

use crate::plan::rules::RULES;
use crate::recipe::{Diagnostic, Sources, Span};

/// Result of checking one recipe.
pub struct Checked<'a> {
    /// Path of the recipe.
    pub recipe: &'a Path,
    pub diagnostics: &'a [Diagnostic],
    /// The files of the recipe.
    pub sources: &'a Sources,
}

impl Checked<'_> {
    /// The recipe's main file; for a folder the first file read, which is its root.
    fn file(&self) -> &Path {
        let root = self.sources.iter().next();
        let root = root.filter(|file| file.path.starts_with(self.recipe));
        root.map_or(self.recipe, |file| file.path.as_path())
    }
}

/// The complete SARIF document.
pub fn document(results: Vec<Value>) -> Value {
    let rules: Vec<Value> = RULES
        .iter()
        .map(|rule| {
            json!({
                "id": rule.id,
                "shortDescription": {"text": rule.summary},
                "fullDescription": {"text": rule.why()},
                "help": {"text": format!("evenkeel explain {}", rule.id)},
                "defaultConfiguration": {"level": rule.severity},
            })
        })
        .collect();
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": {"driver": {
                "name": "evenkeel",
                "version": env!("CARGO_PKG_VERSION"),
                "rules": rules,
            }},
            "columnKind": "unicodeCodePoints",
            "results": results,
        }],
    })
}

/// SARIF results of one recipe.
pub fn results(checked: &Checked<'_>) -> Vec<Value> {
    let results = checked.diagnostics.iter();
    results
        .map(|diagnostic| result(diagnostic, checked))
        .collect()
}

fn result(diagnostic: &Diagnostic, checked: &Checked<'_>) -> Value {
    let place = diagnostic
        .span
        .and_then(|span| Some((span, checked.sources.get(span.file)?)));
    // A setting on the command line has no file.
    let place = place.filter(|(_, file)| file.path.is_file() || file.path == checked.recipe);
    let mut location = match &place {
        Some((_, file)) => json!({"artifactLocation": {"uri": uri(&file.path)}}),
        None => json!({"artifactLocation": {"uri": uri(checked.file())}}),
    };
    if let Some((span, file)) = place {
        location["region"] = region(span, &file.text);
    }
    let index = RULES.iter().position(|rule| rule.id == diagnostic.rule);
    json!({
        "ruleId": diagnostic.rule,
        "ruleIndex": index,
        "level": diagnostic.severity,
        "message": {"text": format!("{}\nhelp: {}", diagnostic.message, diagnostic.help)},
        "locations": [{"physicalLocation": location}],
    })
}

/// From the first character to the one after the last, on the first non-empty line of the span.
fn region(span: Span, text: &str) -> Value {
    let marked = text.get(span.start..span.end).unwrap_or_default();
    let first = marked.lines().next().unwrap_or_default().trim_end();
    let length = u32::try_from(first.chars().count()).unwrap_or(0).max(1);
    json!({
        "startLine": span.line,
        "startColumn": span.column,
        "endColumn": span.column.saturating_add(length),
    })
}

/// A path as a relative or absolute URI reference.
fn uri(path: &Path) -> String {
    let mut uri = String::new();
    for byte in path.to_string_lossy().bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                uri.push(char::from(byte));
            }
            byte => uri.push_str(&format!("%{byte:02X}")),
        }
    }
    if path.is_absolute() {
        format!("file://{uri}")
    } else {
        uri
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_has_the_region_of_its_characters() {
        let mut sources = Sources::default();
        let text = "größe: 1\nmicro: vier # x\n";
        let file = sources.add("my recipes/é.yaml", text);
        let start = text.find("vier").unwrap();
        let span = Span {
            file,
            start,
            end: start + 4,
            line: 2,
            column: 8,
        };
        let found = [
            Diagnostic::error("wrong-type", Some(span), "it is no number", "give one"),
            Diagnostic::note("run-name", None, "it has another name", "nothing to do"),
        ];
        let results = results(&Checked {
            recipe: Path::new("my recipes/é.yaml"),
            diagnostics: &found,
            sources: &sources,
        });
        let at = &results[0]["locations"][0]["physicalLocation"];
        assert_eq!(at["artifactLocation"]["uri"], "my%20recipes/%C3%A9.yaml");
        assert_eq!(
            at["region"],
            json!({"startLine": 2, "startColumn": 8, "endColumn": 12})
        );
        assert_eq!(results[0]["level"], "error");
        assert_eq!(
            results[1]["locations"][0]["physicalLocation"]["region"],
            Value::Null
        );
        // A config tree is given as a folder.
        let whole = Checked {
            recipe: Path::new("my recipes"),
            diagnostics: &found[1..],
            sources: &sources,
        };
        let of_tree = super::results(&whole);
        let at = &of_tree[0]["locations"][0]["physicalLocation"];
        assert_eq!(at["artifactLocation"]["uri"], "my%20recipes/%C3%A9.yaml");
        let document = document(results);
        let rules = &document["runs"][0]["tool"]["driver"]["rules"];
        for result in document["runs"][0]["results"].as_array().unwrap() {
            let index = usize::try_from(result["ruleIndex"].as_u64().unwrap()).unwrap();
            assert_eq!(rules[index]["id"], result["ruleId"]);
        }
    }
}
