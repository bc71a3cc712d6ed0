//! Pairs and labelled completions become rows.

use serde_json::json;

use super::*;
use crate::data::Kind;
use crate::recipe::schema::spec::{Conversion, Marks, RowCut, RowTokens, Rows, Side};

const PAIRS: &str = "\
{\"prompt\": \"Sky?\", \"chosen\": \" blue\", \"rejected\": \" green\"}
{\"chosen\": \"Sun? hot\", \"rejected\": \"Sun? cold\"}
";

fn pairs(content: &str) -> Case {
    let mut case = Case::with("a.jsonl", content);
    case.objective = Objective::Dpo;
    case.data.train[0].columns = Vec::new();
    case
}

/// The rows of every sample: their tokens, with those that carry loss after `|`.
fn rows(case: &Case) -> Vec<String> {
    case.prepare().unwrap();
    let data = case.open(Part::Train).unwrap();
    let mut shown = Vec::new();
    for index in 0..data.len() {
        let (rows, label) = data.rows(index).unwrap();
        for row in &rows {
            let text = text(row);
            let answer = row.loss_mask.iter().position(|&target| target).unwrap();
            assert!(row.loss_mask[answer..].iter().all(|&target| target));
            let (prompt, completion) = text.split_at(text.char_indices().nth(answer).unwrap().0);
            let label = label.map(|label| format!(" {label}")).unwrap_or_default();
            shown.push(format!("{prompt}|{completion}{label}"));
        }
    }
    shown
}

#[test]
fn a_pair_has_two_rows_with_loss_on_their_completions() {
    let explicit = pairs(PAIRS.lines().next().unwrap());
    assert_eq!(rows(&explicit), ["^Sky?| blue$", "^Sky?| green$"]);
    let implicit = pairs(PAIRS.lines().nth(1).unwrap());
    assert_eq!(rows(&implicit), ["^Sun?| hot$", "^Sun?| cold$"]);
    assert_eq!(implicit.prepare().unwrap().manifest.kind, Kind::Pair);
}

#[test]
fn rows_are_cut_at_their_end_and_those_without_a_completion_are_dropped() {
    let mut case = pairs(
        "{\"prompt\": \"ab\", \"chosen\": \"cdef\", \"rejected\": \"gh\"}\n\
         {\"prompt\": \"abcdef\", \"chosen\": \"g\", \"rejected\": \"h\"}\n",
    );
    case.data.sequence_length = 5;
    assert_eq!(rows(&case), ["^ab|cde", "^ab|gh$"]);
    let skipped = case.prepare().unwrap().manifest.skipped;
    assert_eq!((skipped.truncated, skipped.without_targets), (1, 1));
    // As upstream, whose rows have no token more.
    case.data.extra_token = false;
    assert_eq!(rows(&case), ["^ab|cd", "^ab|gh"]);
}

#[test]
fn labels_are_kept_beside_their_rows() {
    let mut case = Case::with(
        "a.jsonl",
        "{\"prompt\": \"Sky?\", \"completion\": \" blue\", \"label\": true}\n\
         {\"prompt\": \"Sky?\", \"completion\": \" red\", \"label\": false}\n",
    );
    case.objective = Objective::Kto;
    assert_eq!(rows(&case), ["^Sky?| blue$ true", "^Sky?| red$ false"]);
    let data = case.open(Part::Train).unwrap();
    let collated = data.collate([0, 1]).unwrap();
    assert_eq!(
        (collated.batch, &collated.labels[..]),
        (2, &[true, false][..])
    );
}

#[test]
fn pairs_are_two_rows_of_a_micro_batch_and_each_is_in_the_digest() {
    let digest = |content: &str| {
        let case = pairs(content);
        case.prepare().unwrap();
        let collated = case.open(Part::Train).unwrap().collate([0]).unwrap();
        assert_eq!(collated.batch, 2);
        collated.digest(0, 7)
    };
    let pair = |chosen, rejected| {
        format!("{{\"prompt\": \"Sky?\", \"chosen\": \"{chosen}\", \"rejected\": \"{rejected}\"}}")
    };
    let one = digest(&pair(" blue", " green"));
    assert_eq!(one, digest(&pair(" blue", " green")));
    assert_ne!(one, digest(&pair(" blue", " grey")));
    assert_ne!(one, digest(&pair(" green", " blue")));
}

#[test]
fn conversations_are_rendered_by_the_template() {
    let case = pairs(
        "{\"chosen\": [{\"role\": \"user\", \"content\": \"Sky?\"}, {\"role\": \"assistant\", \
         \"content\": \"blue\"}], \"rejected\": [{\"role\": \"user\", \"content\": \"Sky?\"}, \
         {\"role\": \"assistant\", \"content\": \"green\"}]}",
    );
    assert_eq!(
        rows(&case),
        [
            "<|user|>\nSky?$\n<|assistant|>\n|blue$\n",
            "<|user|>\nSky?$\n<|assistant|>\n|green$\n"
        ]
    );
}

#[test]
fn rows_without_the_columns_are_refused() {
    let refusal = |content: &str| pairs(content).refusal();
    insta::assert_snapshot!(
        [
            refusal("{\"prompt\": \"Sky?\", \"completion\": \"blue\"}"),
            refusal("{\"chosen\": \"a\", \"rejected\": \"a\"}"),
            refusal("{\"prompt\": 1, \"chosen\": \"a\", \"rejected\": \"b\"}"),
        ]
        .join("\n")
    );
}

#[test]
fn settings_that_preferences_do_not_have_are_refused() {
    let refusal = |change: fn(&mut Case)| {
        let mut case = pairs(PAIRS);
        change(&mut case);
        case.refusal()
    };
    insta::assert_snapshot!(
        [
            refusal(|case| case.data.packing = true),
            refusal(|case| case.data.answers_only = Some(false)),
            refusal(|case| case.data.completions_only = Some(true)),
            refusal(|case| case.data.train = vec![source("synthetic")]),
        ]
        .join("\n")
    );
}

/// HALOs' feedback: one array, of two splits.
const FEEDBACK: &str = r#"[
  {"type": "pairwise_feedback", "split": "train", "prompt_id": 1, "reward_A": 1.5, "reward_B": -2,
   "prompt": [{"role": "user", "content": "Sky?"}], "label": 0,
   "output_A": [{"role": "assistant", "content": "green"}],
   "output_B": [{"role": "assistant", "content": "bl\"ue]"}]},
  {"type": "pairwise_feedback", "split": "test", "prompt_id": 2, "label": 1,
   "prompt": [{"role": "user", "content": "Sun?"}],
   "output_A": [{"role": "assistant", "content": "hot"}],
   "output_B": [{"role": "assistant", "content": "cold"}]}
]
"#;

#[test]
fn feedback_of_halos_is_read_by_its_split() {
    let mut case = Case::with("a.json", FEEDBACK);
    case.objective = Objective::Dpo;
    case.data.evaluation = case.data.train.clone();
    case.data.train[0].feedback_split = Some("train".to_owned());
    case.data.evaluation[0].feedback_split = Some("test".to_owned());
    let both = [
        "<|user|>\nSky?$\n<|assistant|>\n|bl\"ue]$\n",
        "<|user|>\nSky?$\n<|assistant|>\n|green$\n",
    ];
    assert_eq!(rows(&case), both);
    assert_eq!(case.open(Part::Evaluation).unwrap().len(), 1);
    // Single completions of the same pairs.
    case.objective = Objective::Kto;
    let labelled = [format!("{} true", both[0]), format!("{} false", both[1])];
    assert_eq!(rows(&case), labelled);
    let binary = r#"{"type": "binary_feedback", "prompt": "Sky?", "output": " blue", "label": 1, "reward": 2.5}"#;
    let mut case = Case::with("a.jsonl", binary);
    case.objective = Objective::Kto;
    assert_eq!(rows(&case), ["^Sky?| blue$ true"]);
}

/// Two answers to one question, with another question between them.
fn answers(row: impl Fn(&str, &str, u64) -> serde_json::Value) -> String {
    [
        ("Sky?", "blue", 4),
        ("Sun?", "hot", 2),
        ("Sky?", "azure", 9),
    ]
    .map(|(question, answer, score)| row(question, answer, score).to_string() + "\n")
    .concat()
}

#[test]
fn rows_of_a_data_set_that_upstream_names_are_converted() {
    let dialogues = answers(|question, answer, _| {
        let of = |answer| format!("\n\nHuman: {question}\n\nAssistant: {answer}");
        json!({"chosen": of(answer), "rejected": of("no")})
    });
    let scored = answers(|question, answer, score| {
        json!({"history": question, "human_ref_A": "no", "human_ref_B": answer,
            "score_A": 2, "score_B": score, "labels": 0})
    });
    let case = |content: &str, conversion, objective| {
        let mut case = pairs(content);
        case.data.train[0].conversion = Some(conversion);
        case.data.sequence_length = 100;
        case.objective = objective;
        case
    };
    let as_text =
        |question: &str, answer: &str| format!("^\n\nHuman: {question}\n\nAssistant:| {answer}$");
    let text = case(&dialogues, Conversion::DialogueText, Objective::Dpo);
    let expected = [("Sky?", "blue"), ("Sun?", "hot"), ("Sky?", "azure")]
        .map(|(question, answer)| [as_text(question, answer), as_text(question, "no")]);
    assert_eq!(rows(&text), expected.concat());
    // Without a factor of 2 between the scores there is no preference.
    let pairs_with_scores = case(&scored, Conversion::ScoredText, Objective::Dpo);
    assert_eq!(
        rows(&pairs_with_scores),
        [&expected[0][..], &expected[2]].concat()
    );

    // Supervised training has one answer of each prompt: the last, the best or the first.
    let answered = |content: &str, conversion| {
        let case = case(content, conversion, Objective::Sft);
        let learned = |sample: &Sample| learned(sample).trim_matches('·').to_owned();
        case.samples().iter().map(learned).collect::<Vec<_>>()
    };
    assert_eq!(
        answered(&dialogues, Conversion::DialogueText),
        [" hot$", " azure$"]
    );
    assert_eq!(answered(&scored, Conversion::ScoredText), [" azure$"]);
    let messages = answered(&dialogues, Conversion::DialogueMessages);
    assert_eq!(messages, ["blue$", "hot$"]);
}

/// HALOs' `oasst`: a message is paired with its next better sibling, and supervised training has the last message.
#[test]
fn trees_of_messages_become_pairs() {
    let row = |id: &str, parent: Option<&str>, role: &str, rank: Option<u64>, lang: &str| {
        let row = json!({"message_id": id, "parent_id": parent, "role": role, "text": id,
            "rank": rank, "lang": lang});
        row.to_string() + "\n"
    };
    let content = [
        row("Sky?", None, "prompter", None, "en"),
        row("green", Some("Sky?"), "assistant", Some(2), "en"),
        row("blau", Some("Sky?"), "assistant", Some(0), "de"),
        row("blue", Some("Sky?"), "assistant", Some(0), "en"),
        row("grey", Some("Sky?"), "assistant", Some(1), "en"),
    ]
    .concat();
    let mut case = pairs(&content);
    case.data.train[0].conversion = Some(Conversion::RankedReplies);
    let turn = |answer: &str| format!("<|user|>\nSky?$\n<|assistant|>\n|{answer}$\n");
    let expected = [["grey", "green"], ["blue", "grey"]];
    let expected: Vec<String> = expected.concat().into_iter().map(turn).collect();
    assert_eq!(rows(&case), expected);
    // A share is one of the pairs.
    case.data.train[0].weight = Some(0.5);
    assert_eq!(rows(&case).len(), 2);
    case.data.train[0].weight = None;
    case.objective = Objective::Sft;
    let answers = case.samples().iter().map(learned).collect::<Vec<_>>();
    let answers = answers.iter().map(|answer| answer.trim_matches('·'));
    assert_eq!(answers.collect::<Vec<_>>(), ["grey$"]);
}

#[test]
fn damaged_arrays_are_refused_at_their_line() {
    let refusal = |content: &[u8]| {
        let mut case = Case::with("a.json", content);
        case.objective = Objective::Dpo;
        case.refusal()
    };
    insta::assert_snapshot!(
        [
            refusal(b"[{\"chosen\": \"ab\",\n"),
            refusal(b"[{\"chosen\": \"ab\", \"rejected\": \"ac\"},\n 7]"),
            refusal(b"[{\"chosen\": \"ab\", \"rejected\": \"ac\"}]\n{}"),
            refusal(b"\xef\xbb\xbf [\n{\"chosen\": \"\xff\"}]"),
            refusal(b"[]"),
        ]
        .join("\n")
    );
}

/// HALOs cuts the content of a turn, so that the template still ends it.
#[test]
fn the_turn_that_is_too_long_is_cut() {
    let message = |role: &str, content: &str| serde_json::json!({"role": role, "content": content});
    let row = serde_json::json!({
        "prompt": [message("user", "abcdefgh")],
        "chosen": [message("assistant", "0123456789")],
        "rejected": [message("assistant", "01")],
    });
    let mut case = pairs(&row.to_string());
    case.tokenizer.chat_template = Some(
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{% if add_generation_prompt %}a{% endif %}"
            .to_owned(),
    );
    case.data.rows = Rows {
        cut: RowCut::Turns,
        max_prompt_length: Some(8),
        ..Rows::default()
    };
    case.data.sequence_length = 15;
    // The prompt alone has 11 tokens with the beginning of the answer, which the answer's 12 or 4 count again.
    assert_eq!(rows(&case), ["uabcde.a|01234.", "uabcde.a|01."]);
    assert_eq!(case.prepare().unwrap().manifest.skipped.truncated, 1);
    case.data.sequence_length = 64;
    case.data.rows.max_prompt_length = Some(64);
    assert_eq!(rows(&case), ["uabcdefgh.a|0123456789.", "uabcdefgh.a|01."]);
}

/// These rows, made as HALOs up to 2024-09 makes them, with short marks around turns and prompts of six tokens.
fn decoded(content: &str) -> Case {
    let mut case = pairs(content);
    case.data.extra_token = false;
    case.data.marks = Marks {
        user: "<u>".to_owned(),
        user_end: " ;".to_owned(),
        assistant: "<a>".to_owned(),
        assistant_end: ".".to_owned(),
    };
    case.data.rows = Rows {
        tokens: RowTokens::Decoded,
        max_prompt_length: Some(6),
        ..Rows::default()
    };
    case
}

/// HALOs up to 2024-09 cuts prompt and completion and makes a text of them again, with its marks around turns.
#[test]
fn rows_of_decoded_texts_are_cut_as_upstream_cuts_them() {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let row = json!({
        "prompt": [message("user", "Sky? ")],
        "chosen": [message("assistant", "  blue")],
        "rejected": [message("assistant", "no")],
    });
    let mut case = decoded(&row.to_string());
    case.data.sequence_length = 64;
    assert_eq!(
        rows(&case),
        ["^<u>Sky? ;<a>| blue. $", "^<u>Sky? ;<a>|no. $"]
    );
    assert_eq!(case.prepare().unwrap().manifest.skipped.truncated, 0);
    // The prompt has 13 tokens and the completions 6 and 3, so that only the row of the first is too long.
    case.data.sequence_length = 18;
    assert_eq!(rows(&case), ["^? ;<a>| blue. $", "^<u>Sky? ;<a>|no. $"]);
    assert_eq!(case.prepare().unwrap().manifest.skipped.truncated, 1);
    case.data.rows.prompt_keeps = Side::Start;
    assert_eq!(rows(&case)[0], "^<u>Sk| blue. $");
    // Five tokens of each completion are left, with which the rows are longer than 11.
    case.data.sequence_length = 11;
    assert_eq!(rows(&case), ["^<u>Sk| blue", "^<u>Sk|no. $"]);
    let mut other = pairs(&row.to_string().replace("user", "system"));
    other.data.rows = case.data.rows;
    insta::assert_snapshot!(other.refusal());
}

/// Its supervised rows are made in the same way.
#[test]
fn supervised_rows_are_decoded_too() {
    let message = |role: &str, content: &str| json!({"role": role, "content": content});
    let row = json!({
        "prompt": [message("user", "Sky? ")],
        "completion": [message("assistant", "  blue")],
    });
    let texts = json!({"prompt": "Sky?", "completion": "  blue"});
    let mut case = decoded(&format!("{row}\n{texts}"));
    case.objective = Objective::Sft;
    case.data.sequence_length = 64;
    assert_eq!(rows(&case), ["^<u>Sky? ;<a>| blue. $", "^Sky?|  blue $"]);
    case.data.sequence_length = 18;
    assert_eq!(rows(&case), ["^? ;<a>| blue. $", "^Sky?|  blue $"]);
    assert_eq!(case.prepare().unwrap().manifest.skipped.truncated, 1);

    let refused = |content: &str, change: &dyn Fn(&mut Case)| {
        let mut case = pairs(content);
        case.objective = Objective::Sft;
        case.data.rows.tokens = RowTokens::Decoded;
        change(&mut case);
        case.refusal()
    };
    let talk = json!({"messages": [message("user", "Sky?"), message("assistant", "blue")]});
    insta::assert_snapshot!(
        [
            refused(&talk.to_string(), &|_| {}),
            refused(&texts.to_string(), &|case| case.data.packing = true),
            refused(&texts.to_string(), &|case| case.data.answers_only =
                Some(false)),
        ]
        .join("\n")
    );
}

/// Mismatched rows are made of texts that were decoded before: a second space is before their end token. The expected rows are
/// those of `UnpairedPreferenceDataLoader` of HALOs 61b9ee6, with a tokenizer of bytes that puts a start token before texts,
/// up to the tokens beyond `max_length`.
#[test]
fn mismatched_rows_of_decoded_texts_have_a_space_more() {
    use std::sync::Arc;

    use crate::data::Tokenizer;
    use crate::engine::IGNORE;
    let row = |prompt: &str, completion: &str, label: bool| {
        let row = json!({"prompt": prompt, "completion": completion, "label": label});
        format!("{row}\n")
    };
    let mut case = decoded(
        &[
            row("abcdefghijkl", "uvw", true),
            row("Q?", " 0123456789", false),
            row("", "", false),
        ]
        .concat(),
    );
    case.objective = Objective::Kto;
    let mismatched = |case: &Case, pairs: &[[u64; 2]]| {
        case.prepare().unwrap();
        let mut data = case.open(Part::Train).unwrap();
        let early = data.collate_mismatched(pairs.iter().copied()).unwrap_err();
        assert!(early.to_string().contains("need the tokenizer"), "{early}");
        data.set_tokenizer(Arc::new(Tokenizer::byte())).unwrap();
        let collated = data.collate_mismatched(pairs.iter().copied()).unwrap();
        let shown = (0..collated.batch).map(|row| {
            let (tokens, targets) = collated.row(row);
            let last = targets.last().filter(|&&target| target != IGNORE);
            let ids = tokens.iter().chain(last).copied().collect();
            let prompt = targets.iter().take_while(|&&target| target == IGNORE);
            let prompt = prompt.count() + 1;
            let row = text(&Sample {
                tokens: ids,
                ..Sample::default()
            });
            let at = row
                .char_indices()
                .nth(prompt)
                .map_or(row.len(), |(at, _)| at);
            format!("{}|{}", &row[..at], &row[at..])
        });
        shown.collect::<Vec<_>>()
    };
    case.data.sequence_length = 64;
    assert_eq!(
        rows(&case),
        [
            "^abcdefghijkl|uvw $ true",
            "^Q?| 0123456789 $ false",
            "^| $ false"
        ]
    );
    let pairs = [[0, 1], [1, 2], [2, 0]];
    assert_eq!(
        mismatched(&case, &pairs),
        ["^abcdefghijkl| 0123456789  $", "^Q?|  $", "^|uvw  $"]
    );
    // The prompt of the first is cut in its own row, and again in the mismatched one, whose start token counts.
    case.data.sequence_length = 14;
    assert_eq!(
        rows(&case),
        ["^ghijkl|uvw $ true", "^Q?| 0123456789 false", "^| $ false"]
    );
    assert_eq!(
        mismatched(&case, &pairs),
        ["^ghijkl| 012345", "^Q?|  $", "^|uvw  $"]
    );
    case.data.rows.prompt_keeps = Side::Start;
    assert_eq!(mismatched(&case, &pairs)[0], "^abcde| 0123456");
}

/// The expected pairs are those of `get_shp` of HALOs 61b9ee6 after `random.seed(1)`. Two prompts differ in their spaces only.
#[test]
fn pairs_of_all_prompts_are_drawn_with_one_sequence_of_random_numbers() {
    let prompts = ["a b", "a  b", "a b", "c", "a b", "a b", "a  b", "a b", "d"];
    let row = |i: usize| {
        let score = if i % 11 == 4 { 3 } else { 2 + 7 * (i % 2) };
        let row = json!({
            "history": prompts[i % 9], "human_ref_A": format!("{i}+"), "human_ref_B": format!("{i}-"),
            "score_A": score, "score_B": 4, "labels": i % 2,
        });
        format!("{row}\n")
    };
    let mut case = pairs(&(0..24).map(row).collect::<String>());
    case.data.train[0].conversion = Some(Conversion::SeededScoredMessages);
    case.data.rows = Rows {
        tokens: RowTokens::Decoded,
        ..Rows::default()
    };
    let drawn = |case: &Case| {
        let rows = rows(case);
        let chosen = rows.iter().step_by(2).map(|row| {
            let (prompt, completion) = row.split_once('|').unwrap();
            assert!(["^a b", "^c", "^d"].contains(&prompt), "{row}");
            completion.strip_suffix(" $").unwrap().to_owned()
        });
        chosen.collect::<Vec<_>>().join(" ")
    };
    assert_eq!(
        drawn(&case),
        "1+ 2- 3+ 5+ 6- 8- 9+ 10- 12- 17+ 18- 19+ 20- 21+"
    );
    case.objective = Objective::Sft;
    assert_eq!(
        rows(&case),
        ["^a b|0+ $", "^a b|1+ $", "^c|3+ $", "^d|8+ $"]
    );
}
