//! Valid and invalid rows.

use serde_json::json;

use super::*;

fn read(row: Value, columns: &[&str]) -> Result<Record, Fault> {
    let Value::Object(row) = row else { panic!() };
    let columns: Vec<String> = columns.iter().map(|name| name.to_string()).collect();
    Record::from_row(row, &columns)
}

#[test]
fn columns_are_selected_by_name_then_by_position() {
    let row =
        || json!({"messages": [], "prompt": "p", "completion": "c", "text": "t", "other": "o"});
    let chat = Record::Chat {
        messages: Vec::new(),
        first_answer: 0,
    };
    let pair = |prompt: &str, completion: &str| Record::Completion {
        prompt: prompt.to_string(),
        completion: completion.to_string(),
    };
    assert_eq!(read(row(), &[]).unwrap(), chat);
    assert_eq!(read(row(), &["text", "messages"]).unwrap(), chat);
    assert_eq!(
        read(row(), &["completion", "x", "prompt"]).unwrap(),
        pair("p", "c")
    );
    assert_eq!(
        read(row(), &["other", "text"]).unwrap(),
        Record::Text("t".to_string())
    );
    assert_eq!(
        read(row(), &["other"]).unwrap(),
        Record::Text("o".to_string())
    );
    assert_eq!(read(row(), &["other", "prompt"]).unwrap(), pair("o", "p"));
}

#[test]
fn invalid_rows_are_refused_with_the_reason() {
    let message = |role: &str| json!({"role": role, "content": "x"});
    let chat = |messages: &[Value]| json!({ "messages": messages });
    let rows = [
        (json!({"id": 1, "body": "x"}), &[][..]),
        (json!({}), &[]),
        (json!({"text": "x"}), &["body"]),
        (json!({"a": "x", "b": "x", "c": "x"}), &["a", "b", "c"]),
        (json!({"text": null}), &[]),
        (json!({"text": 3}), &[]),
        (json!({"messages": "x"}), &[]),
        (json!({"text": []}), &[]),
        (json!({"x": {}}), &["x"]),
        (json!({"prompt": "x", "completion": ["x"]}), &[]),
        (json!({"prompt": [], "completion": "x"}), &[]),
        (json!({"prompt": true, "completion": "x"}), &[]),
        (chat(&[json!("hello")]), &[]),
        (chat(&[json!({"from": "human", "value": "x"})]), &[]),
        (chat(&[json!({"role": "user"})]), &[]),
        (chat(&[json!({"role": "user", "content": ["x"]})]), &[]),
        (chat(&[message("human")]), &[]),
        (chat(&[message("assistant")]), &[]),
        (chat(&[message("system"), message("assistant")]), &[]),
        (chat(&[message("user"), message("user")]), &[]),
        (
            chat(&[message("user"), message("assistant"), message("assistant")]),
            &[],
        ),
        (chat(&[message("user"), message("system")]), &[]),
        (chat(&[message("user"), message("tool")]), &[]),
    ];
    let refusals: Vec<String> = rows
        .into_iter()
        .map(|(row, columns)| {
            let fault = read(row.clone(), columns).unwrap_err();
            format!("{row}\n    {}; {}", fault.problem, fault.help)
        })
        .collect();
    insta::assert_snapshot!(refusals.join("\n"));
}

#[test]
fn conversations_with_tools_and_developers_are_read() {
    let row = json!({"messages": [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": null, "tool_calls": []},
        {"role": "tool", "content": "x"},
        {"role": "tool", "content": "x"},
        {"role": "assistant", "content": "x"},
        {"role": "user", "content": "x"},
    ]});
    assert!(
        matches!(read(row, &[]).unwrap(), Record::Chat { messages, .. } if messages.len() == 7)
    );
}
