//! Which tokens of conversations, prompts and completions carry loss.

use super::*;

const CHAT: &str = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "2"}, {"role": "assistant", "content": "3"}]}"#;

fn sft(content: &str) -> Case {
    let mut case = Case::with("a.jsonl", content);
    case.objective = Objective::Sft;
    case.tokenizer.chat_template = Some(
        "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + eos_token }}\n\
         {% endfor %}{% if add_generation_prompt %}a:{% endif %}"
            .to_string(),
    );
    case
}

#[test]
fn only_answers_and_the_end_of_their_turn_carry_loss() {
    let case = sft(CHAT);
    let samples = case.samples();
    assert_eq!(text(&samples[0]), "u:Hi$\na:Yo$\nu:2$\na:3$\n");
    assert_eq!(learned(&samples[0]), "········Yo$········3$·");
    let data = case.open(Part::Train).unwrap();
    assert_eq!(target_count(&data, 0), 5);
    insta::assert_snapshot!(counts(&case));
}

#[test]
fn answers_beyond_the_sequence_length_are_an_error_that_names_it() {
    let mut case = sft(CHAT);
    case.data.sequence_length = 3;
    insta::assert_snapshot!(
        case.refusal()
            .replace(&case.place().display().to_string(), "PLACE")
    );
}

#[test]
fn all_tokens_carry_loss_if_the_recipe_or_the_objective_says_so() {
    let mut case = sft(CHAT);
    case.data.answers_only = Some(false);
    let everything = "u:Hi$\na:Yo$\nu:2$\na:3$\n";
    assert_eq!(learned(&case.samples()[0]), everything);
    let mut case = sft(CHAT);
    case.objective = Objective::LanguageModelling;
    assert_eq!(learned(&case.samples()[0]), everything);
}

#[test]
fn use_of_the_built_in_template_is_noted() {
    let mut case = sft(CHAT);
    case.tokenizer.chat_template = None;
    let samples = case.samples();
    insta::assert_snapshot!(format!(
        "{}\n{}",
        text(&samples[0]).replace('\n', "|"),
        learned(&samples[0]).replace('\n', "|")
    ));
    insta::assert_snapshot!(case.prepare().unwrap().notes.join("\n"));
}

#[test]
fn completions_carry_loss_and_prompts_do_not() {
    let mut case = sft(r#"{"prompt": "1+1=", "completion": "2"}"#);
    assert_eq!(learned(&case.samples()[0]), "·····2$");
    case.data.answers_only = Some(false);
    assert_eq!(learned(&case.samples()[0]), "^1+1=2$");
    // The completion itself ends with the end-of-sequence token.
    let case = sft(r#"{"prompt": "1+1=", "completion": "2<|eos|>"}"#);
    assert_eq!(text(&case.samples()[0]), "^1+1=2$");
}

/// As TRL by default: whole conversations, and completions only.
#[test]
fn completions_have_their_own_setting() {
    let as_trl = |line: &str| {
        let mut case = sft(line);
        case.data.answers_only = Some(false);
        case.data.completions_only = Some(true);
        learned(&case.samples()[0])
    };
    assert_eq!(
        as_trl(r#"{"prompt": "1+1=", "completion": "2"}"#),
        "·····2$"
    );
    assert_eq!(as_trl(CHAT), "u:Hi$\na:Yo$\nu:2$\na:3$\n");
    let prompted = r#"{"prompt": [{"role": "user", "content": "2"}], "completion": [{"role": "assistant", "content": "3"}]}"#;
    assert_eq!(as_trl(prompted), "·······3$·");
}

#[test]
fn conversational_prompts_teach_only_the_completion() {
    let case = sft(
        r#"{"prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "2"}], "completion": [{"role": "assistant", "content": "3"}]}"#,
    );
    assert_eq!(learned(&case.samples()[0]), "···················3$·");
}

#[test]
fn columns_select_the_content() {
    let mut case = sft(r#"{"q": "a", "r": "b", "text": "no"}"#);
    case.data.train[0].columns = vec!["q".to_string(), "r".to_string()];
    assert_eq!(learned(&case.samples()[0]), "··b$");
    case.data.train[0].columns = vec!["r".to_string()];
    assert_eq!(learned(&case.samples()[0]), "^b$");
}

#[test]
fn records_without_targets_are_skipped_and_counted() {
    let mut case = sft(&[
        CHAT,
        r#"{"messages": [{"role": "user", "content": "Hi"}]}"#,
        r#"{"messages": []}"#,
        r#"{"prompt": "a", "completion": ""}"#,
        r#"{"text": "  "}"#,
        // The cut to 21 tokens removes the answer.
        r#"{"prompt": "aaaaaaaaaaaaaaaaaaaaaaaaaaa", "completion": "b"}"#,
    ]
    .join("\n"));
    case.data.sequence_length = 23;
    assert_eq!(case.samples().len(), 1);
    insta::assert_snapshot!(counts(&case));
}

#[test]
fn packed_conversations_keep_their_mask() {
    let mut case = sft(&format!("{CHAT}\n{CHAT}\n"));
    case.data.packing = true;
    case.data.sequence_length = 16;
    let samples = case.samples();
    assert_eq!(
        samples.iter().map(learned).collect::<Vec<_>>(),
        ["········Yo$······", "···3$·········Yo$", "$········3$·"]
    );
}

#[test]
fn remedies_use_the_recipes_spelling_of_keys() {
    let mut case = Case::with("a.jsonl", "{\"text\": \"abc\"}\n");
    case.data.answers_only = Some(true);
    case.key = |path| format!("evenkeel.{path}");
    let message = case.refusal();
    assert!(
        message.contains("set evenkeel.data.answers_only=false"),
        "{message}"
    );
}

#[test]
fn a_prompt_that_upstream_would_cut_is_refused() {
    let mut case = sft(r#"{"prompt": "1+1=", "completion": "2"}"#);
    case.data.max_prompt_length = Some(5);
    assert_eq!(learned(&case.samples()[0]), "·····2$");
    let mut case = sft(r#"{"prompt": "1+1=", "completion": "2"}"#);
    case.data.max_prompt_length = Some(4);
    insta::assert_snapshot!(case.refusal());
    let mut case = sft(CHAT);
    case.data.max_prompt_length = Some(7);
    insta::assert_snapshot!(case.refusal());
}
