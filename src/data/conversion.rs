//! Rows of data sets that HALOs and direct-preference-optimization know by name, as prompts and completions.
//!
//! Upstream: eric-mitchell/direct-preference-optimization f8b8c0f `preference_datasets.py` (`get_hh`, `get_shp`);
//! ContextualAI/HALOs 4831988 `train/data.py` (`get_hh`, `get_shp`, `get_ultrabin`, `get_ultrafeedback_armorm`,
//! `get_ultrachat`, `get_safe_rlhf`, `get_oasst`, `remove_extra_spaces`); 61b9ee6
//! `dataloader.py` (`get_hh`, `get_shp`).

use serde_json::{Map, Value, json};

use super::chosen::Twister;
use super::kind::Kind;
use super::record::Fault;
use crate::recipe::schema::spec::{Conversion, Marks};

/// Marks of turns in Anthropic's dialogues.
const USER: &str = "\n\nHuman: ";
const ASSISTANT: &str = "\n\nAssistant: ";
/// The end of a prompt as text, after which the completion begins with a space.
const ANSWERS: &str = "\n\nAssistant:";

/// Why rows with [`Conversion::Unknown`] are not read, and what to do.
pub(super) const UNKNOWN: &str =
    "upstream makes prompts and completions of its rows in a way that evenkeel does not have";
pub(super) const OWN_ROWS: &str = "write rows of prompt, chosen and rejected into a JSONL file, and give its path in place of the name";

/// Pairs of a prompt that HALOs trains on, of those that `random.Random(SEED)` draws for each prompt.
const PAIRS: usize = 5;
const SEED: u64 = 0;

/// The smallest ratio of the scores of a pair that is trained on.
const RATIO: f64 = 2.0;

/// Which of the rows with one prompt has the answer that is trained on without preferences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    First,
    Last,
    /// The first with the highest score.
    Best,
}

/// A row as a prompt with a preferred and another completion, each a text or messages.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Converted {
    prompt: Value,
    /// The prompt before runs of spaces became one, by which upstream tells prompts apart.
    pub prompt_as_written: Value,
    chosen: Value,
    rejected: Value,
    /// The completion that is trained on without preferences.
    answer: Value,
    /// The score of the preferred completion, if rows have scores.
    pub score: f64,
}

impl Conversion {
    /// The columns that are read.
    pub(super) fn columns(self) -> std::str::SplitWhitespace<'static> {
        let names = match self {
            Conversion::DialogueText
            | Conversion::DialogueMessages
            | Conversion::DialogueMarked => "chosen rejected",
            Conversion::ScoredText
            | Conversion::ScoredMessages
            | Conversion::SeededScoredMessages
            | Conversion::AllScoredMessages => {
                "history human_ref_A human_ref_B score_A score_B labels"
            }
            Conversion::Conversation => "messages",
            Conversion::LastMessages => "prompt chosen rejected",
            Conversion::RankedReplies => "message_id parent_id text role lang rank",
            Conversion::NumberedResponses => "prompt response_0 response_1 better_response_id",
            Conversion::Unknown => "",
        };
        names.split_whitespace()
    }

    /// Which row of a prompt has the answer for supervised training.
    fn answer(self) -> Answer {
        match self {
            Conversion::DialogueMessages
            | Conversion::DialogueMarked
            | Conversion::Conversation
            | Conversion::LastMessages
            | Conversion::ScoredMessages
            | Conversion::SeededScoredMessages
            | Conversion::AllScoredMessages
            | Conversion::Unknown => Answer::First,
            Conversion::DialogueText
            | Conversion::NumberedResponses
            | Conversion::RankedReplies => Answer::Last,
            Conversion::ScoredText => Answer::Best,
        }
    }

    /// Whether samples of this kind are made of some rows of a prompt only.
    pub(super) fn selects(self, kind: Kind) -> bool {
        let some = [
            Conversion::ScoredMessages,
            Conversion::SeededScoredMessages,
            Conversion::RankedReplies,
        ];
        kind == Kind::Text || some.contains(&self)
    }

    /// Which of the rows of a prompt have samples of this kind, by their numbers, of the rows' scores. `random` is that of all
    /// prompts, which come in the order of their first rows.
    pub(super) fn selected(self, kind: Kind, scores: &[f64], random: &mut Twister) -> Vec<usize> {
        if kind != Kind::Text {
            return match self {
                Conversion::ScoredMessages => Twister::new(SEED).sample(scores.len(), PAIRS),
                Conversion::SeededScoredMessages => random.sample(scores.len(), PAIRS),
                _ => (0..scores.len()).collect(),
            };
        }
        let last = scores.len() - 1;
        vec![match self.answer() {
            Answer::First => 0,
            Answer::Last => last,
            Answer::Best => (0..last).rev().fold(last, |best, number| {
                if scores[number] >= scores[best] {
                    number
                } else {
                    best
                }
            }),
        }]
    }

    /// Converts a row; `None`: upstream leaves it out. Rows of trees are those that [`Messages`](super::replies::Messages)
    /// puts in their place.
    pub(super) fn convert(
        self,
        row: &Map<String, Value>,
        marks: &Marks,
    ) -> Result<Option<Converted>, Fault> {
        let (mut score, mut own_answer, mut as_written) = (0.0, None, None);
        let (prompt, chosen, rejected) = match self {
            Conversion::DialogueText => {
                let (chosen, rejected) = (text(row, "chosen")?, text(row, "rejected")?);
                let Some((before, _)) = chosen.rsplit_once(ANSWERS) else {
                    return Err(no_dialogue());
                };
                let (prompt, chosen) = chosen.split_at(before.len() + ANSWERS.len());
                let rejected: String = rejected.chars().skip(prompt.chars().count()).collect();
                (json!(prompt), json!(chosen), json!(rejected))
            }
            Conversion::DialogueMessages => {
                let mut turns = dialogue(text(row, "chosen")?);
                let chosen = turns.pop().ok_or_else(no_dialogue)?;
                let rejected = text(row, "rejected")?;
                let rejected = rejected.rsplit(ASSISTANT).next().unwrap_or_default();
                let roles = ["user", "assistant"].iter().cycle();
                let turns = turns.into_iter().zip(roles);
                let prompt: Vec<Value> = turns.map(|(turn, role)| message(role, turn)).collect();
                (prompt.into(), answer(chosen), answer(rejected.trim()))
            }
            Conversion::DialogueMarked => {
                let (chosen, rejected) = (text(row, "chosen")?, text(row, "rejected")?);
                // Without an answer, upstream takes the first 12 characters for the prompt.
                let length = match chosen.rfind(ASSISTANT) {
                    Some(at) => at + ASSISTANT.len(),
                    None => chosen
                        .char_indices()
                        .nth(12)
                        .map_or(chosen.len(), |(at, _)| at),
                };
                let (prompt, chosen) = chosen.split_at(length);
                let rejected: String = rejected.chars().skip(prompt.chars().count()).collect();
                let ended =
                    |text: &str| json!(single_spaced(&format!("{text}{}", marks.assistant_end)));
                let prompt = marked(prompt, marks);
                let spaced = json!(single_spaced(&prompt));
                as_written = Some(json!(prompt));
                (spaced, ended(chosen), ended(&rejected))
            }
            Conversion::LastMessages => {
                let prompt = json!([message("user", text(row, "prompt")?)]);
                as_written = row.get("prompt").cloned();
                let (chosen, rejected) = (last(row, "chosen")?, last(row, "rejected")?);
                (prompt, answer(chosen), answer(rejected))
            }
            Conversion::NumberedResponses => {
                let prompt = json!([message("user", text(row, "prompt")?)]);
                as_written = row.get("prompt").cloned();
                let better = number(row, "better_response_id")?;
                let names = match better {
                    0.0 => ["response_0", "response_1"],
                    1.0 => ["response_1", "response_0"],
                    other => {
                        return Err(Fault::new(
                            format!("better_response_id is {other} and must be 0 or 1"),
                            "repair the row",
                        ));
                    }
                };
                let [chosen, rejected] = names.map(|name| text(row, name));
                (prompt, answer(chosen?), answer(rejected?))
            }
            Conversion::Conversation => {
                let messages = row.get("messages").and_then(Value::as_array);
                let Some([first, others @ ..]) = messages.map(Vec::as_slice) else {
                    return Err(other_rows("messages is no list of messages"));
                };
                let others: Result<Value, Fault> = others.iter().map(spaced).collect();
                (json!([spaced(first)?]), others?, Value::Null)
            }
            Conversion::RankedReplies if row.is_empty() => return Ok(None),
            Conversion::RankedReplies => {
                as_written = row.get("prompt").cloned();
                let prompt = row.get("prompt").and_then(Value::as_array);
                let prompt: Result<Value, Fault> =
                    prompt.into_iter().flatten().map(spaced).collect();
                let [chosen, rejected] = ["chosen", "rejected"].map(|name| text(row, name));
                let rejected = answer(rejected?);
                // Upstream names no answer for supervised training and so takes the last one.
                own_answer = Some(rejected.clone());
                (prompt?, answer(chosen?), rejected)
            }
            Conversion::Unknown => {
                return Err(Fault::new(UNKNOWN, OWN_ROWS));
            }
            Conversion::ScoredText
            | Conversion::ScoredMessages
            | Conversion::SeededScoredMessages
            | Conversion::AllScoredMessages => {
                let scores = [number(row, "score_A")?, number(row, "score_B")?];
                let [a, b] = scores;
                let ratio = (a / b).max(b / a);
                if ratio < RATIO && self != Conversion::AllScoredMessages {
                    return Ok(None);
                }
                let answers = [text(row, "human_ref_A")?, text(row, "human_ref_B")?];
                let history = text(row, "history")?;
                as_written = row.get("history").cloned();
                let (prompt, [first, second]) = match self {
                    Conversion::ScoredText => (
                        json!(format!("{USER}{history}{ANSWERS}")),
                        answers.map(|answer| json!(format!(" {answer}"))),
                    ),
                    _ => (json!([message("user", history)]), answers.map(answer)),
                };
                if self != Conversion::ScoredText {
                    own_answer = Some(first.clone());
                }
                score = a.max(b);
                if number(row, "labels")? == 1.0 {
                    (prompt, first, second)
                } else {
                    (prompt, second, first)
                }
            }
        };
        Ok(Some(Converted {
            prompt_as_written: as_written.unwrap_or_else(|| prompt.clone()),
            prompt,
            answer: own_answer.unwrap_or_else(|| chosen.clone()),
            chosen,
            rejected,
            score,
        }))
    }
}

impl Converted {
    /// The row with the columns of this kind of sample.
    pub fn into_row(self, kind: Kind) -> Map<String, Value> {
        let columns = match kind {
            Kind::Text => vec![("prompt", self.prompt), ("completion", self.answer)],
            Kind::Pair | Kind::Labelled => vec![
                ("prompt", self.prompt),
                ("chosen", self.chosen),
                ("rejected", self.rejected),
            ],
        };
        let columns = columns.into_iter();
        columns
            .map(|(name, value)| (name.to_owned(), value))
            .collect()
    }
}

/// The turns of a dialogue, the user's first.
fn dialogue(text: &str) -> Vec<&str> {
    let mut turns = Vec::new();
    let mut rest = text;
    loop {
        let marks = [USER, ASSISTANT].map(|mark| rest.find(mark).map(|at| (at, mark.len())));
        let next = marks.into_iter().flatten().min();
        let turn = next.map_or(rest, |(at, _)| &rest[..at]);
        turns.push(turn.trim());
        match next {
            Some((at, length)) => rest = &rest[at + length..],
            None => break,
        }
    }
    // What comes before the first mark is no turn.
    turns.remove(0);
    turns
}

/// A dialogue in which `marks` are in place of those of the turns. The text after a turn follows its mark at once, and the
/// turn begins after that. A turn that begins with a mark's word has the text after a turn, and `marks` in place of the words
/// with a colon.
fn marked(dialogue: &str, marks: &Marks) -> String {
    let of = [
        ("Human", "Human:", &marks.user, &marks.user_end),
        (
            "Assistant",
            "Assistant:",
            &marks.assistant,
            &marks.assistant_end,
        ),
    ];
    let mut all = String::new();
    let push_turn =
        |turn: &str, all: &mut String| match of.iter().find(|(word, ..)| turn.starts_with(word)) {
            Some((_, mark, before, after)) => {
                let parts: Vec<&str> = turn.split(mark).collect();
                let last = parts.len() - 1;
                for (number, part) in parts.into_iter().enumerate() {
                    let part = if number > 0 { part.trim_start() } else { part };
                    all.push_str(if number < last { part.trim_end() } else { part });
                    if number < last {
                        all.push_str(before);
                    }
                }
                all.push_str(after);
            }
            None => all.push_str(turn),
        };
    let (mut turn, mut from) = (dialogue, 0);
    loop {
        let next = of.iter().filter_map(|(_, mark, before, after)| {
            let at = from + turn[from..].find(mark)?;
            Some((at, mark.len(), before, after))
        });
        let Some((at, length, before, after)) = next.min_by_key(|(at, ..)| *at) else {
            push_turn(turn, &mut all);
            return all;
        };
        let rest = &turn[at + length..];
        // A mark has white space after it.
        if !rest.starts_with(char::is_whitespace) {
            from = at + length;
            continue;
        }
        push_turn(turn[..at].trim_end(), &mut all);
        all.push_str(before);
        all.push_str(after);
        (turn, from) = (rest.trim_start(), 0);
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": single_spaced(content)})
}

fn spaced(turn: &Value) -> Result<Value, Fault> {
    let text = |name: &str| turn.get(name).and_then(Value::as_str);
    let problem = || other_rows("a message has no role and content");
    let (role, content) = text("role").zip(text("content")).ok_or_else(problem)?;
    Ok(message(role, content))
}

fn answer(content: &str) -> Value {
    json!([message("assistant", content)])
}

/// A text with one space for each run of several spaces and tabs.
pub(super) fn single_spaced(text: &str) -> String {
    let mut spaced = String::with_capacity(text.len());
    let is_space = |c: char| c == ' ' || c == '\t';
    let mut rest = text;
    while let Some(at) = rest.find(is_space) {
        let run = rest[at..].find(|c| !is_space(c)).unwrap_or(rest.len() - at);
        spaced.push_str(&rest[..at]);
        spaced.push_str(if run > 1 { " " } else { &rest[at..at + 1] });
        rest = &rest[at + run..];
    }
    spaced + rest
}

pub(super) fn text<'a>(row: &'a Map<String, Value>, name: &str) -> Result<&'a str, Fault> {
    let value = row.get(name).and_then(Value::as_str);
    value.ok_or_else(|| other_rows(&format!("{name} is no text")))
}

pub(super) fn number(row: &Map<String, Value>, name: &str) -> Result<f64, Fault> {
    let value = row.get(name).and_then(Value::as_f64);
    value.ok_or_else(|| other_rows(&format!("{name} is no number")))
}

/// The content of the last message.
fn last<'a>(row: &'a Map<String, Value>, name: &str) -> Result<&'a str, Fault> {
    let messages = row.get(name).and_then(Value::as_array);
    let content = messages.and_then(|messages| messages.last()?.get("content")?.as_str());
    content.ok_or_else(|| other_rows(&format!("{name} is no list of messages")))
}

fn no_dialogue() -> Fault {
    other_rows("chosen has no turn of an assistant")
}

pub(super) fn other_rows(problem: &str) -> Fault {
    Fault::new(
        problem,
        format!(
            "these are not the rows of the data set that upstream knows by this name: {OWN_ROWS}"
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(conversion: Conversion, row: Value, kind: Kind) -> Value {
        let row = row.as_object().unwrap();
        let converted = conversion.convert(row, &Marks::default()).unwrap();
        converted.map_or(Value::Null, |it| it.into_row(kind).into())
    }

    /// The expected rows are what the functions of upstream give for these.
    #[test]
    fn rows_are_those_of_upstream() {
        let dialogue = json!({
            "chosen": "\n\nHuman: Why?\n\nAssistant: Tell  me more.\n\nHuman: It\tis \t so.\n\nAssistant: I see ",
            "rejected": "\n\nHuman: Why?\n\nAssistant: Tell  me more.\n\nHuman: It\tis \t so.\n\nAssistant: No\n\n",
        });
        assert_eq!(
            converted(Conversion::DialogueText, dialogue.clone(), Kind::Pair),
            json!({
                "prompt": "\n\nHuman: Why?\n\nAssistant: Tell  me more.\n\nHuman: It\tis \t so.\n\nAssistant:",
                "chosen": " I see ", "rejected": " No\n\n",
            })
        );
        let messages = converted(Conversion::DialogueMessages, dialogue.clone(), Kind::Pair);
        let prompt = json!([
            {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Tell me more."},
            {"role": "user", "content": "It\tis so."},
        ]);
        assert_eq!(
            messages,
            json!({
                "prompt": prompt,
                "chosen": [{"role": "assistant", "content": "I see"}],
                "rejected": [{"role": "assistant", "content": "No"}],
            })
        );
        assert_eq!(
            converted(Conversion::DialogueMessages, dialogue, Kind::Text),
            json!({"prompt": prompt, "completion": [{"role": "assistant", "content": "I see"}]})
        );
        let scored = |a: u64, b: u64, labels: u64| {
            let row = json!({"history": "Is it?", "human_ref_A": "Yes", "human_ref_B": "No",
                "score_A": a, "score_B": b, "labels": labels});
            converted(Conversion::ScoredText, row, Kind::Labelled)
        };
        assert_eq!(scored(5, 3, 1), Value::Null, "less than twice the other's");
        let prompt = "\n\nHuman: Is it?\n\nAssistant:";
        assert_eq!(
            scored(6, 3, 1),
            json!({"prompt": prompt, "chosen": " Yes", "rejected": " No"})
        );
        assert_eq!(
            scored(3, 9, 0),
            json!({"prompt": prompt, "chosen": " No", "rejected": " Yes"})
        );
        let turns = |answer: &str| json!([{"role": "user", "content": "Q"}, {"role": "assistant", "content": answer}]);
        let last = json!({"prompt": "Q   1", "chosen": turns("A\t\tB"), "rejected": turns("C")});
        assert_eq!(
            converted(Conversion::LastMessages, last, Kind::Pair),
            json!({
                "prompt": [{"role": "user", "content": "Q 1"}],
                "chosen": [{"role": "assistant", "content": "A B"}],
                "rejected": [{"role": "assistant", "content": "C"}],
            })
        );
        let numbered = json!({"prompt": "Q", "response_0": "bad", "response_1": "good", "better_response_id": 1});
        assert_eq!(
            converted(Conversion::NumberedResponses, numbered, Kind::Pair),
            json!({
                "prompt": [{"role": "user", "content": "Q"}],
                "chosen": [{"role": "assistant", "content": "good"}],
                "rejected": [{"role": "assistant", "content": "bad"}],
            })
        );
    }

    /// The same for rows with scores and for conversations of HALOs.
    #[test]
    fn scored_messages_and_conversations_are_those_of_upstream() {
        let row = |a: u64, b: u64| {
            json!({"history": "Is  it?", "human_ref_A": "Yes", "human_ref_B": "No \t no",
                "score_A": a, "score_B": b, "labels": u64::from(a > b)})
        };
        let user = json!([{"role": "user", "content": "Is it?"}]);
        let assistant = |content: &str| json!([{"role": "assistant", "content": content}]);
        let pair = |chosen: &str, rejected: &str| json!({"prompt": user, "chosen": assistant(chosen), "rejected": assistant(rejected)});
        let (some, all) = (Conversion::ScoredMessages, Conversion::AllScoredMessages);
        assert_eq!(converted(some, row(3, 9), Kind::Pair), pair("No no", "Yes"));
        assert_eq!(converted(some, row(3, 4), Kind::Pair), Value::Null);
        assert_eq!(converted(all, row(4, 3), Kind::Pair), pair("Yes", "No no"));
        // The first answer, whichever is preferred.
        assert_eq!(
            converted(some, row(3, 9), Kind::Text),
            json!({"prompt": user, "completion": assistant("Yes")})
        );
        let turn = |role: &str, content: &str| json!({"role": role, "content": content});
        let talk = json!({"prompt": "Hi", "messages": [
            turn("user", "Hi   you"), turn("assistant", "Hello"), turn("user", "More"), turn("assistant", "So  on"),
        ]});
        assert_eq!(
            converted(Conversion::Conversation, talk, Kind::Text),
            json!({
                "prompt": [turn("user", "Hi you")],
                "completion": [turn("assistant", "Hello"), turn("user", "More"), turn("assistant", "So on")],
            })
        );
    }

    /// The expected prompts and completions are those of `get_hh` of HALOs 61b9ee6.
    #[test]
    fn marks_of_dialogues_are_replaced_as_upstream_does() {
        let text = |text: &str| text.to_owned();
        let marks = Marks {
            user: text("<u> "),
            user_end: text("<ue>"),
            assistant: text("<a>\n"),
            assistant_end: text("<ae>"),
        };
        let of = |chosen: &str, rejected: &str| {
            let row = json!({"chosen": chosen, "rejected": rejected});
            let row = row.as_object().unwrap();
            let converted = Conversion::DialogueMarked.convert(row, &marks);
            converted.unwrap().unwrap().into_row(Kind::Pair)
        };
        let dialogue =
            "\n\nHuman: Why?\n\nAssistant: Tell  me more. \n\nHuman:\tIt is so.\n\nAssistant: ";
        for (chosen, rejected, prompt, completions) in [
            (
                format!("{dialogue}I see "),
                format!("{dialogue}No\n\n"),
                "<u> <ue>Why?<a>\n<ae>Tell me more.<u> <ue>It is so.<a>\n<ae>",
                ["I see <ae>", "No\n\n<ae>"],
            ),
            (
                text("\n\nHuman: Humans say Human:no and Assistant: why\n\nAssistant: A"),
                text("\n\nHuman: Humans say Human:no and Assistant: why\n\nAssistant: B"),
                "<u> <ue>Humans say<u> no and<ue><a>\n<ae>why<a>\n<ae>",
                ["A<ae>", "B<ae>"],
            ),
            (
                text("\n\nHuman: Hello there"),
                text("\n\nHuman: Hello where"),
                "<u> <ue>Hel",
                ["lo there<ae>", "lo where<ae>"],
            ),
            (
                text("Note Human: Hi\n\nAssistant: Human: x\n\nAssistant: "),
                text("Note Human: Hi\n\nAssistant: Human: x\n\nAssistant: é"),
                "Note<u> <ue>Hi<a>\n<ae><u> <ue>x<a>\n<ae>",
                ["<ae>", "é<ae>"],
            ),
        ] {
            let found = of(&chosen, &rejected);
            assert_eq!(found["prompt"], prompt);
            assert_eq!([&found["chosen"], &found["rejected"]], completions);
        }
    }

    #[test]
    fn rows_of_a_prompt_are_selected_as_upstream_does() {
        let scores = [3.0, 9.0, 9.0, 4.0, 8.0, 5.0, 6.0];
        let mut random = Twister::new(1);
        let mut select =
            |conversion: Conversion, kind| conversion.selected(kind, &scores, &mut random);
        assert_eq!(select(Conversion::ScoredText, Kind::Text), [1]);
        assert_eq!(select(Conversion::DialogueText, Kind::Text), [6]);
        assert_eq!(select(Conversion::LastMessages, Kind::Text), [0]);
        assert_eq!(select(Conversion::ScoredMessages, Kind::Text), [0]);
        // `random.Random(0).sample(range(7), 5)`
        assert_eq!(
            select(Conversion::ScoredMessages, Kind::Pair),
            [6, 3, 5, 0, 1]
        );
        // `random.seed(1)`, and `random.sample(range(7), 5)` twice.
        let seeded = Conversion::SeededScoredMessages;
        assert_eq!(select(seeded, Kind::Pair), [1, 4, 0, 2, 5]);
        assert_eq!(select(seeded, Kind::Labelled), [3, 6, 5, 4, 0]);
        assert_eq!(select(seeded, Kind::Text), [0]);
        assert!(!Conversion::ScoredText.selects(Kind::Pair));
    }

    #[test]
    fn other_rows_are_refused_with_the_column() {
        for (conversion, row, problem) in [
            (
                Conversion::DialogueText,
                json!({"chosen": "no marks", "rejected": ""}),
                "chosen has no turn of an assistant",
            ),
            (
                Conversion::DialogueMessages,
                json!({"chosen": [], "rejected": ""}),
                "chosen is no text",
            ),
            (
                Conversion::ScoredText,
                json!({"score_A": 1, "score_B": "x"}),
                "score_B is no number",
            ),
            (
                Conversion::LastMessages,
                json!({"prompt": "Q", "chosen": [], "rejected": []}),
                "chosen is no list of messages",
            ),
        ] {
            let row = row.as_object().unwrap();
            let fault = conversion.convert(row, &Marks::default()).unwrap_err();
            assert_eq!(fault.problem, problem);
        }
    }
}
