//! The chat templates of TRL's package, rendered by transformers and here.

use std::collections::BTreeMap;
use std::process::Command;

use evenkeel::data::{Dataset, PrepareRequest, prepare};
use evenkeel::recipe::Spec;
use serde_json::{Value, json};

use super::families::printed;
use super::losses::run_in;
use super::trainers::{own_file, python};

/// A line of the script's answer.
#[derive(serde::Deserialize)]
struct Template {
    source: String,
    /// By conversation; `None`: the template raises an error.
    rendered: BTreeMap<String, Option<String>>,
}

fn conversations() -> BTreeMap<&'static str, Value> {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    BTreeMap::from([
        (
            "one turn",
            json!([
                message("user", "What is 2 + 2?"),
                message("assistant", "It is 4.")
            ]),
        ),
        (
            "system and two turns",
            json!([
                message("system", "Be brief."),
                message("user", "Grüße!\n\nWho are you?"),
                message("assistant", "<b>Nobody</b> & 'no one'\n"),
                message("user", "  spaces  "),
                message("assistant", "<think>\nWell.\n</think>\n\n  kept?  "),
            ]),
        ),
        (
            "a tool",
            json!([
                message("user", "Time?"),
                {"role": "assistant", "content": "", "tool_calls": [
                    {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}]},
                message("tool", "noon"),
                message("assistant", "Noon."),
            ]),
        ),
    ])
}

/// The text of a conversation as the built-in trainer prepares it, by the tokenizer of bytes.
fn prepared(source: &str, messages: &Value) -> Result<String, String> {
    let folder = tempfile::tempdir().unwrap();
    let row = json!({ "messages": messages }).to_string();
    std::fs::write(folder.path().join("rows.jsonl"), row).unwrap();
    let spec: Spec = serde_json::from_value(json!({
        "objective": "sft",
        "data": {"sequence_length": 100_000, "train": [{"path": "rows.jsonl"}], "answers_only": false},
        "tokenizer": {"path": "byte", "chat_template": source},
    }))
    .unwrap();
    let directory = folder.path().join("data");
    let request = PrepareRequest::of(&spec, &str::to_owned, None, folder.path(), &directory);
    prepare(&request, &mut |_| {}).map_err(|error| error.to_string())?;
    let sample = Dataset::train(&directory).unwrap().sample(0).unwrap();
    let mut bytes = Vec::new();
    for id in sample.tokens {
        match id {
            256 => bytes.extend(b"<|bos|>"),
            257 => bytes.extend(b"<|eos|>"),
            258 => bytes.extend(b"<|pad|>"),
            byte => bytes.push(u8::try_from(byte).unwrap()),
        }
    }
    Ok(String::from_utf8(bytes).unwrap())
}

#[test]
fn templates_of_trls_package_render_as_by_transformers() {
    let Some(python) = python("transformers, trl") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let conversations = conversations();
    let text = serde_json::to_string(&conversations).unwrap();
    std::fs::write(folder.path().join("conversations.json"), text).unwrap();
    let script = own_file("tests/trainers/chat_templates.py");
    let output = run_in(
        folder.path(),
        Command::new(&python),
        &[&script, "conversations.json"],
    );
    let templates: BTreeMap<String, Template> = printed(&output);
    let (mut same, mut refused) = (0, 0);
    for (name, template) in &templates {
        for (conversation, expected) in &template.rendered {
            let found = prepared(&template.source, &conversations[conversation.as_str()]);
            let what = format!("{name} on {conversation}");
            match (expected, found) {
                (Some(expected), Ok(found)) => {
                    assert_eq!(&found, expected, "{what}");
                    same += 1;
                }
                (None, Err(_)) => refused += 1,
                (expected, found) => panic!("{what}: {found:?}, transformers {expected:?}"),
            }
        }
    }
    println!(
        "{} templates: {same} texts, {refused} errors",
        templates.len()
    );
    assert!(templates.len() >= 10 && same > 2 * templates.len());
}
