//! Compares templates with Jinja2, finds answers in every form of template, and limits malicious templates.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use serde::Deserialize;
use serde_json::{Value as Json, json};

use super::*;
use crate::recipe::corpus;

/// `tests/reference/chat.json`, which `chat_reference.py` beside it writes.
#[derive(Deserialize)]
struct Reference {
    conversations: BTreeMap<String, Vec<Json>>,
    templates: BTreeMap<String, String>,
    rendered: Vec<Rendered>,
    upstream: Vec<Upstream>,
    published: Vec<Published>,
}

#[derive(Deserialize)]
struct Rendered {
    template: String,
    conversation: String,
    add_generation_prompt: bool,
    text: Json,
}

#[derive(Deserialize)]
struct Upstream {
    recipe: String,
    #[serde(flatten)]
    hashed: Hashed,
}

/// A template in a revision of a repository.
#[derive(Deserialize)]
struct Published {
    family: String,
    repository: String,
    path: String,
    revision: String,
    rendered: Vec<Hashed>,
}

#[derive(Deserialize)]
struct Hashed {
    conversation: String,
    add_generation_prompt: bool,
    /// Whether the template raised an error, whose message is hashed.
    error: bool,
    bytes: usize,
    fnv1a: String,
}

impl Hashed {
    fn assert_rendered(&self, template: &ChatTemplate, messages: &[Json], name: &str) {
        let found = render(template, messages, self.add_generation_prompt);
        let failed = found.is_err();
        let text = found.unwrap_or_else(|error| match error {
            ChatError::Template(message) => message
                .rsplit_once(" (line ")
                .map_or(message.clone(), |(message, _)| message.to_owned()),
            other => other.to_string(),
        });
        assert_eq!(
            (failed, text.len(), fnv1a(&text)),
            (self.error, self.bytes, self.fnv1a.clone()),
            "{name} on {}: {text:?}",
            self.conversation
        );
    }
}

fn reference() -> Reference {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/reference/chat.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// A template for the byte vocabulary, with the special tokens of the reference.
fn template(source: &str) -> ChatTemplate {
    ChatTemplate::new(Some(source), &Tokenizer::byte()).unwrap()
}

fn render(template: &ChatTemplate, messages: &[Json], prompt: bool) -> Result<String, ChatError> {
    template.render(messages, prompt)
}

fn fnv1a(text: &str) -> String {
    let hash = text.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    format!("{hash:016x}")
}

/// The text with the answers in brackets.
fn shown(conversation: &Conversation) -> String {
    let mut text = conversation.text.clone();
    for answer in conversation.answers.iter().rev() {
        text.insert(answer.end, ']');
        text.insert(answer.start, '[');
    }
    text
}

#[test]
fn templates_render_as_in_jinja2() {
    let reference = reference();
    assert!(reference.rendered.len() > 40);
    for case in &reference.rendered {
        let template = template(&reference.templates[&case.template]);
        let messages = &reference.conversations[&case.conversation];
        let found = render(&template, messages, case.add_generation_prompt);
        let name = format!("{} on {}", case.template, case.conversation);
        match (&case.text, found) {
            (Json::String(expected), found) => assert_eq!(found.as_ref(), Ok(expected), "{name}"),
            (error, Err(ChatError::Template(message))) => {
                let expected = error["error"].as_str().unwrap();
                assert!(message.contains(expected), "{name}: {message}");
            }
            (expected, found) => panic!("{name}: {found:?} instead of {expected}"),
        }
    }
}

/// The chat templates of the upstream recipes, by path.
fn upstream() -> Option<BTreeMap<String, String>> {
    let root = corpus::root()?;
    let mut templates = BTreeMap::new();
    for case in reference().upstream {
        let recipe = std::fs::read_to_string(root.join(&case.recipe)).unwrap();
        // Double-quoted YAML that is also valid JSON.
        let quoted = recipe
            .lines()
            .find_map(|line| line.strip_prefix("chat_template: "))
            .unwrap();
        templates.insert(case.recipe, serde_json::from_str(quoted.trim()).unwrap());
    }
    Some(templates)
}

#[test]
fn upstream_templates_render_as_in_jinja2() {
    let Some(templates) = upstream() else { return };
    let reference = reference();
    assert_eq!(templates.len(), 9);
    for case in &reference.upstream {
        let template = template(&templates[&case.recipe]);
        let messages = &reference.conversations[&case.hashed.conversation];
        case.hashed
            .assert_rendered(&template, messages, &case.recipe);
    }
}

/// Reads templates in the clones below the folder `EVENKEEL_UPSTREAM`.
#[test]
fn published_templates_render_as_in_jinja2() {
    let Some(folder) = std::env::var_os("EVENKEEL_UPSTREAM").map(PathBuf::from) else {
        return;
    };
    let reference = reference();
    let mut answers = Vec::new();
    for published in &reference.published {
        let (_, clone) = published.repository.split_once('/').unwrap();
        if !folder.join(clone).exists() {
            println!("SKIPPED: no clone of {}", published.repository);
            return;
        }
        let object = format!("{}:{}", published.revision, published.path);
        let shown = Command::new("git")
            .arg("-C")
            .arg(folder.join(clone))
            .args(["show", &object])
            .output()
            .unwrap();
        assert!(shown.status.success(), "{object}: {shown:?}");
        let template = template(&String::from_utf8(shown.stdout).unwrap());
        for case in &published.rendered {
            let messages = &reference.conversations[&case.conversation];
            case.assert_rendered(&template, messages, &published.family);
        }
        let found = reference.conversations.iter().map(|(name, messages)| {
            let found = match template.answers(messages, 0) {
                Ok(found) => {
                    assert_answers(&found, messages, &published.family);
                    "found"
                }
                Err(ChatError::NotPrefixStable { .. }) => "refused",
                Err(_) => "raises",
            };
            format!("{name}: {found}")
        });
        answers.push(format!(
            "{}; {}",
            published.family,
            found.collect::<Vec<_>>().join("; ")
        ));
    }
    insta::assert_snapshot!(answers.join("\n"));
}

/// Each answer has the text of its message, and no more of the template than before or after it a few marks.
fn assert_answers(found: &Conversation, messages: &[Json], name: &str) {
    let expected = messages.iter().filter(|m| m["role"] == "assistant");
    let expected: Vec<&str> = expected
        .map(|m| m["content"].as_str().unwrap().trim())
        .collect();
    assert_eq!(found.answers.len(), expected.len(), "{name}");
    for (span, expected) in found.answers.iter().zip(expected) {
        let answer = &found.text[span.clone()];
        let (before, after) = answer.split_once(expected).unwrap_or((answer, answer));
        assert!(before.len() + after.len() < 60, "{name}: {answer:?}");
        assert!(
            messages.iter().all(|m| {
                let other = m["content"].as_str().unwrap().trim();
                other == expected || other.len() < 2 || !answer.contains(other)
            }),
            "{name}: {answer:?}"
        );
    }
}

#[test]
fn upstream_templates_show_exactly_the_answers() {
    let Some(templates) = upstream() else { return };
    let conversations = reference().conversations;
    for (recipe, source) in &templates {
        let template = template(source);
        for (name, messages) in &conversations {
            let conversation = template.answers(messages, 0).unwrap();
            let answers: Vec<&str> = conversation
                .answers
                .iter()
                .map(|span| &conversation.text[span.clone()])
                .collect();
            let expected = messages.iter().filter(|m| m["role"] == "assistant");
            let expected: Vec<&str> = expected.map(|m| m["content"].as_str().unwrap()).collect();
            assert_eq!(answers.len(), expected.len(), "{recipe} on {name}");
            for (answer, expected) in answers.iter().zip(expected) {
                let mark = answer.strip_prefix(expected).unwrap_or("none");
                // The mark that ends the turn, without any text of the next turn.
                let marks = ["<|eos|>", "<|im_end|>", "<|im_end|>\n<|eos|>"];
                assert!(marks.contains(&mark), "{recipe} on {name}: {answer:?}");
            }
        }
    }
}

/// System, user, assistant, user, assistant.
fn two_turns() -> Vec<Json> {
    vec![
        json!({"role": "user", "content": "q1"}),
        json!({"role": "assistant", "content": " a1\n"}),
        json!({"role": "user", "content": "q2"}),
        json!({"role": "assistant", "content": "a2"}),
    ]
}

#[test]
fn answers_are_found_in_every_form_of_template() {
    let shapes = [
        (
            "content is trimmed",
            "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{{ eos_token }}{% endfor %}\
             {% if add_generation_prompt %}<assistant>{% endif %}",
        ),
        (
            "no generation prompt",
            "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]\
             {% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
        ),
        (
            "another end after the last message",
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n\
             {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}\
             {{ eos_token }}{% endif %}",
        ),
        (
            "nothing ends a turn but a line break",
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}\
             {% if add_generation_prompt %}assistant: {% endif %}",
        ),
        (
            "generation blocks",
            "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}\
             {{ m.content }}{{ eos_token }}{% endgeneration %}\n{% else %}Q:{{ m.content }}\n\
             {% endif %}{% endfor %}",
        ),
    ];
    let shown: Vec<String> = shapes
        .iter()
        .map(|(name, source)| {
            let conversation = template(source).answers(&two_turns(), 0).unwrap();
            format!("{name}: {:?}", shown(&conversation))
        })
        .collect();
    insta::assert_snapshot!(shown.join("\n"));
}

#[test]
fn only_answers_from_the_first_requested_one_are_found() {
    for source in [
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}\
         {% if add_generation_prompt %}a{% endif %}",
        "{% for m in messages %}{{ m.role[0] }}{% if m.role == 'assistant' %}{% generation %}\
         {{ m.content }};{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}",
    ] {
        let conversation = template(source).answers(&two_turns(), 3).unwrap();
        assert_eq!(shown(&conversation), "uq1;a a1\n;uq2;a[a2;]");
    }
}

#[test]
fn tool_calls_are_answers_too() {
    let messages = [
        json!({"role": "user", "content": "time?"}),
        json!({"role": "assistant", "content": null, "tool_calls": [{"name": "clock"}]}),
        json!({"role": "tool", "content": "noon"}),
        json!({"role": "assistant", "content": "Noon."}),
    ];
    let source = "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}\
                  {{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{{ eos_token }}\
                  {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    insta::assert_snapshot!(shown(&template(source).answers(&messages, 0).unwrap()));
}

#[test]
fn templates_that_change_earlier_messages_are_refused() {
    let forgets = "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' or loop.last %}\
                   {{ m.content }}{% endif %}{% endfor %}\
                   {% if add_generation_prompt %}<assistant>{% endif %}";
    let counts = "{{ messages | length }} messages:{% for m in messages %}<{{ m.role }}>\
                  {{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}";
    let shouts = "{% for m in messages %}<{{ m.role }}>{{ m.content | upper }}{% endfor %}\
                  {% if add_generation_prompt %}<assistant>{% endif %}";
    let refused: Vec<String> = [forgets, counts, shouts]
        .iter()
        .map(|source| {
            let error = template(source).answers(&two_turns(), 0).unwrap_err();
            format!(
                "{error}; {}",
                error.help("tokenizer.chat_template", "data.answers_only")
            )
        })
        .collect();
    insta::assert_snapshot!(refused.join("\n"));
}

#[test]
fn separators_and_odd_tags_are_those_of_python() {
    let text = "{{ {'b': [1, {'x': []}], 'ü': none} | tojson(separators=[',', ':']) }}";
    let rendered = render(&template(text), &[], false).unwrap();
    assert_eq!(rendered, "{\"b\":[1,{\"x\":[]}],\"ü\":null}");
    // No tag ends here; the engine's parser reports it.
    assert!(ChatTemplate::new(Some("{%}"), &Tokenizer::byte()).is_err());
}

#[test]
fn malicious_templates_are_stopped() {
    let secret = tempfile::NamedTempFile::new().unwrap();
    let path = secret.path().display();
    let ill = [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}".into(),
        "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}".into(),
        "{% for a in range(9999) %}{{ 'x' * 99999 }}{% endfor %}".into(),
        "{{ 'x' * 99999999999 }}".into(),
        format!("{{% include '{path}' %}}"),
        format!("{{% extends '{path}' %}}"),
        format!("{{% import '{path}' as x %}}"),
        "{{ ''.__class__.__mro__ }}{{ messages.__class__() }}".into(),
        "{{ open('/etc/passwd').read() }}".into(),
        "{{ raise_exception('no') }}".into(),
        "{{ strftime_now('%Q') }}".into(),
        "{{ messages | tojson(separators=[1]) }}".into(),
        "{{ messages | tojson(unknown=1) }}".into(),
        "{{ messages | tojson(indent=99999999999) }}".into(),
    ];
    let errors: Vec<String> = ill
        .iter()
        .map(|source| {
            let error = render(&template(source), &two_turns(), false).unwrap_err();
            error.to_string().replace(&path.to_string(), "PATH")
        })
        .collect();
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn malformed_templates_are_named_with_their_line() {
    let errors: Vec<String> = [
        "{% for m in messages %}",
        "\n{{ m. }}",
        "{% nonsense %}",
        "{{",
    ]
    .iter()
    .map(|source| {
        ChatTemplate::new(Some(source), &Tokenizer::byte())
            .err()
            .unwrap()
            .to_string()
    })
    .collect();
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn the_date_of_templates_is_constant() {
    let template = template("{{ strftime_now('%A, %d %B %Y, %H:%M, 100%%') }}");
    let text = render(&template, &two_turns(), false).unwrap();
    assert_eq!(text, "Friday, 26 July 2024, 00:00, 100%");
}

#[test]
fn special_tokens_are_not_cut_where_two_texts_differ() {
    let marks = ["<|eos|>".to_string(), "<|e".to_string(), "é<".to_string()];
    let shared = |one, other| answers::shared_prefix(one, other, &marks);
    assert_eq!(shared("abc<|eos|>", "abc<|im_start|>"), 3);
    assert_eq!(shared("abc", "abcdef"), 3);
    assert_eq!(shared("same", "same"), 4);
    assert_eq!(shared("x", "y"), 0);
    // Moved back out of one special token and into another.
    assert_eq!(shared("aé<|eos|>", "aé<|im|>"), 1);
    // Characters with the same first byte.
    assert_eq!(shared("aé", "aè"), 1);
}
