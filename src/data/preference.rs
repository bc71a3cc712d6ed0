//! Preferences: pairs of a chosen and a rejected completion of a prompt, or single completions with a label.

use serde_json::{Map, Value};

use super::kind::Kind;
use super::record::{Fault, Turns, choose_columns, turns};
use super::token::Token;
use crate::recipe::schema::spec::{RowCut, Rows, Side};

/// A prompt with its completions, as in a row of the data.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Preference {
    Pair {
        prompt: Turns,
        chosen: Turns,
        rejected: Turns,
    },
    Labelled {
        prompt: Turns,
        completion: Turns,
        is_desirable: bool,
    },
}

impl Preference {
    /// The preferences of a row: one, or both completions of a pair where single ones are wanted, or none of HALOs' feedback
    /// of another split.
    pub fn of_row(
        row: Map<String, Value>,
        listed: &[String],
        split: Option<&str>,
        kind: Kind,
    ) -> Result<Vec<Preference>, Fault> {
        let row = match feedback(row, split) {
            Feedback::OtherSplit => return Ok(Vec::new()),
            Feedback::Row(row) => row,
        };
        let preference = Preference::from_row(row, listed, kind)?;
        Ok(match preference {
            Preference::Pair {
                prompt,
                chosen,
                rejected,
            } if kind == Kind::Labelled => {
                let of = |prompt, completion, is_desirable| Preference::Labelled {
                    prompt,
                    completion,
                    is_desirable,
                };
                vec![
                    of(prompt.clone(), chosen, true),
                    of(prompt, rejected, false),
                ]
            }
            one => vec![one],
        })
    }

    fn from_row(
        mut row: Map<String, Value>,
        listed: &[String],
        kind: Kind,
    ) -> Result<Preference, Fault> {
        let available: Vec<&str> = row.keys().map(String::as_str).collect();
        let columns = choose_columns(listed, &available, kind)?;
        let is_pair =
            |last: &String| matches!(row.get(last), Some(Value::String(_) | Value::Array(_)));
        let is_labelled = kind == Kind::Labelled && !columns.last().is_some_and(is_pair);
        let mut take = |name: &String| row.get_mut(name).map(Value::take).unwrap_or_default();
        match columns.as_slice() {
            [prompt, completion, label] if is_labelled => {
                let is_desirable = take(label);
                let is_desirable = is_desirable.as_bool().ok_or_else(|| {
                    Fault::new(
                        format!("{label} is {is_desirable} and must be true or false"),
                        "repair the row, or name another column in the source's columns",
                    )
                })?;
                let (prompt, completion) = (
                    turns(prompt, take(prompt))?,
                    turns(completion, take(completion))?,
                );
                same_kind(&prompt, &completion)?;
                Ok(Preference::Labelled {
                    prompt,
                    completion,
                    is_desirable,
                })
            }
            [prompt, chosen, rejected] => {
                let prompt = turns(prompt, take(prompt))?;
                let (chosen, rejected) = (
                    turns(chosen, take(chosen))?,
                    turns(rejected, take(rejected))?,
                );
                // A text beside conversations repeats their first message, which they hold themselves (TRL 1.16,
                // `maybe_extract_prompt`).
                if let (Turns::Text(_), Turns::Chat(_), Turns::Chat(_)) =
                    (&prompt, &chosen, &rejected)
                {
                    let pair = implicit(chosen, rejected)?;
                    let has_prompt = !matches!(
                        &pair,
                        Preference::Pair { prompt: Turns::Chat(prompt), .. } if prompt.is_empty()
                    );
                    return has_prompt.then_some(pair).ok_or_else(mixed);
                }
                same_kind(&prompt, &chosen)?;
                same_kind(&prompt, &rejected)?;
                Ok(Preference::Pair {
                    prompt,
                    chosen,
                    rejected,
                })
            }
            [chosen, rejected] => {
                let (chosen, rejected) = (
                    turns(chosen, take(chosen))?,
                    turns(rejected, take(rejected))?,
                );
                implicit(chosen, rejected)
            }
            columns => Err(Fault::new(
                format!("{} columns hold no preference", columns.len()),
                "name prompt, chosen and rejected in the source's columns",
            )),
        }
    }
}

/// A row after its translation from HALOs' feedback.
enum Feedback {
    Row(Map<String, Value>),
    OtherSplit,
}

/// Translates a row of HALOs' feedback, `pairwise_feedback` or `binary_feedback`, of any split or of `wanted` (HALOs
/// 4831988, `train/data.py`, `get_feedback`). Other rows are not changed.
fn feedback(mut row: Map<String, Value>, wanted: Option<&str>) -> Feedback {
    let label = |row: &Map<String, Value>| row.get("label").and_then(Value::as_f64);
    let names = match row.get("type").and_then(Value::as_str) {
        Some("pairwise_feedback") if label(&row) == Some(1.0) => {
            [("output_A", "chosen"), ("output_B", "rejected")]
        }
        Some("pairwise_feedback") => [("output_B", "chosen"), ("output_A", "rejected")],
        Some("binary_feedback") => {
            if let Some(label) = label(&row) {
                row.insert("label".to_owned(), Value::Bool(label != 0.0));
            }
            [("output", "completion"), ("", "")]
        }
        _ => return Feedback::Row(row),
    };
    let split = row.get("split").and_then(Value::as_str);
    if wanted.is_some_and(|wanted| split.is_some_and(|split| split != wanted)) {
        return Feedback::OtherSplit;
    }
    for (from, to) in names {
        if let Some(value) = row.remove(from) {
            row.insert(to.to_owned(), value);
        }
    }
    Feedback::Row(row)
}

/// Takes the beginning that both completions share for their prompt (TRL 1.16, `extract_prompt`: a space before the first
/// difference belongs to the completions).
fn implicit(chosen: Turns, rejected: Turns) -> Result<Preference, Fault> {
    let equal = || {
        Fault::new(
            "chosen and rejected are equal, or one is the beginning of the other",
            "remove the row",
        )
    };
    match (chosen, rejected) {
        (Turns::Text(chosen), Turns::Text(rejected)) => {
            let mut at = first_difference(&chosen, &rejected).ok_or_else(equal)?;
            if chosen[..at].ends_with(' ') {
                at -= 1;
            }
            Ok(Preference::Pair {
                prompt: Turns::Text(chosen[..at].to_owned()),
                chosen: Turns::Text(chosen[at..].to_owned()),
                rejected: Turns::Text(rejected[at..].to_owned()),
            })
        }
        (Turns::Chat(mut chosen), Turns::Chat(mut rejected)) => {
            let at = chosen
                .iter()
                .zip(&rejected)
                .position(|(one, other)| one != other);
            let at = at.ok_or_else(equal)?;
            let prompt = chosen.drain(..at).collect();
            rejected.drain(..at);
            Ok(Preference::Pair {
                prompt: Turns::Chat(prompt),
                chosen: Turns::Chat(chosen),
                rejected: Turns::Chat(rejected),
            })
        }
        _ => Err(mixed()),
    }
}

/// The byte at which two texts differ; `None` if one is the beginning of the other.
pub(super) fn first_difference(one: &str, other: &str) -> Option<usize> {
    let mut both = one.char_indices().zip(other.chars());
    let different = both.find(|((_, one), other)| one != other);
    different.map(|((at, _), _)| at)
}

fn same_kind(one: &Turns, other: &Turns) -> Result<(), Fault> {
    match (one, other) {
        (Turns::Text(_), Turns::Text(_)) | (Turns::Chat(_), Turns::Chat(_)) => Ok(()),
        _ => Err(mixed()),
    }
}

fn mixed() -> Fault {
    Fault::new(
        "its columns mix texts and lists of messages",
        "give all of them as texts, or all as lists of messages",
    )
}

/// The rows of a prompt with each of its completions, as `rules` cut them to at most `most` tokens. Completions carry loss.
/// `None` if no token of a completion is kept.
pub(super) fn rows_of(
    prompt: &[u32],
    completions: &[&[u32]],
    rules: Rows,
    most: u64,
) -> Option<Vec<Vec<Token>>> {
    let limit = |limit: Option<u64>| limit.map_or(usize::MAX, |most| most as usize);
    let (most, prompt_limit) = (most as usize, limit(rules.max_prompt_length));
    let first = |ids: &mut &[u32], most: usize| *ids = &ids[..ids.len().min(most)];
    let last = |ids: &mut &[u32], most: usize| *ids = &ids[ids.len() - ids.len().min(most)..];
    let longest = completions.iter().map(|ids| ids.len()).max().unwrap_or(0);
    let mut prompt = prompt;
    let limits_prompt = match rules.cut {
        RowCut::End | RowCut::Start => true,
        RowCut::Completion => prompt.len() + longest > most,
        RowCut::Turns => false,
    };
    if limits_prompt {
        match rules.prompt_keeps {
            Side::End => last(&mut prompt, prompt_limit),
            Side::Start => first(&mut prompt, prompt_limit),
        }
    }
    let rest = match rules.cut {
        // What the prompt's limit leaves, also where the prompt is shorter than that.
        RowCut::Completion if prompt.len() + longest > most => {
            most.saturating_sub(prompt_limit.min(most))
        }
        _ => limit(rules.max_completion_length),
    };
    let row = |completion: &&[u32]| {
        let mut completion = *completion;
        first(&mut completion, rest);
        let token = |target: bool| move |&id: &u32| Token { id, target };
        let all = prompt.iter().map(token(false));
        let mut row: Vec<Token> = all.chain(completion.iter().map(token(true))).collect();
        match rules.cut {
            RowCut::Start => drop(row.drain(..row.len() - row.len().min(most))),
            RowCut::End | RowCut::Completion | RowCut::Turns => row.truncate(most),
        }
        row.first_mut()?.target = false;
        row.iter().any(|token| token.target).then_some(row)
    };
    completions.iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::super::dataset::{Sample, rows};
    use super::*;

    fn read(row: Value, columns: &[&str], kind: Kind) -> Result<Preference, Fault> {
        let Value::Object(row) = row else { panic!() };
        let columns: Vec<String> = columns.iter().map(|name| name.to_string()).collect();
        Preference::from_row(row, &columns, kind)
    }

    fn text(text: &str) -> Turns {
        Turns::Text(text.to_owned())
    }

    #[test]
    fn pairs_have_their_prompt_apart_or_share_their_beginning() {
        let pair = |prompt, chosen, rejected| Preference::Pair {
            prompt: text(prompt),
            chosen: text(chosen),
            rejected: text(rejected),
        };
        let explicit = json!({"prompt": "Hi", "chosen": " you", "rejected": " there"});
        assert_eq!(
            read(explicit, &[], Kind::Pair),
            Ok(pair("Hi", " you", " there"))
        );
        let named = json!({"q": "Hi", "good": " you", "bad": " there", "chosen": 1});
        assert_eq!(
            read(named, &["q", "good", "bad"], Kind::Pair),
            Ok(pair("Hi", " you", " there"))
        );
        let shared = json!({"chosen": "It is blue.", "rejected": "It is green."});
        assert_eq!(
            read(shared, &[], Kind::Pair),
            Ok(pair("It is", " blue.", " green."))
        );
        let cut = json!({"chosen": "Größe", "rejected": "Grüße"});
        assert_eq!(read(cut, &[], Kind::Pair), Ok(pair("Gr", "öße", "üße")));
        let equal = json!({"chosen": "a", "rejected": "a"});
        let fault = read(equal, &[], Kind::Pair).unwrap_err();
        assert!(fault.problem.starts_with("chosen and rejected are equal"));
    }

    #[test]
    fn a_text_beside_conversations_is_not_their_prompt() {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let (asked, good, bad) = (
            message("user", "Hi"),
            message("assistant", "you"),
            message("assistant", "there"),
        );
        let both = json!({"chosen": [asked, good], "rejected": [asked, bad]});
        let mut with_text = both.clone();
        with_text["prompt"] = json!("Hi");
        assert_eq!(
            read(with_text, &[], Kind::Pair),
            read(both, &[], Kind::Pair)
        );
    }

    #[test]
    fn conversations_share_their_first_messages() {
        let message = |role: &str, content: &str| json!({"role": role, "content": content});
        let (question, good, bad) = (
            message("user", "Sky?"),
            message("assistant", "blue"),
            message("assistant", "green"),
        );
        let mixed = json!({"prompt": "Sky?", "chosen": [good], "rejected": [bad]});
        let row = json!({"chosen": [question, good], "rejected": [question, bad]});
        let Ok(Preference::Pair {
            prompt: Turns::Chat(prompt),
            chosen: Turns::Chat(chosen),
            rejected: Turns::Chat(rejected),
        }) = read(row, &[], Kind::Pair)
        else {
            panic!("not a pair of conversations");
        };
        assert_eq!(
            (prompt, chosen, rejected),
            (vec![question], vec![good], vec![bad])
        );
        let fault = read(mixed, &[], Kind::Pair).unwrap_err();
        assert_eq!(fault.problem, "its columns mix texts and lists of messages");
    }

    #[test]
    fn labels_are_true_or_false() {
        let row = |label: Value| json!({"prompt": "Hi", "completion": " you", "label": label});
        assert_eq!(
            read(row(json!(false)), &[], Kind::Labelled),
            Ok(Preference::Labelled {
                prompt: text("Hi"),
                completion: text(" you"),
                is_desirable: false,
            })
        );
        let fault = read(row(json!(1)), &[], Kind::Labelled).unwrap_err();
        assert_eq!(fault.problem, "label is 1 and must be true or false");
    }

    #[test]
    fn rows_are_cut_as_the_rules_say() {
        let prompt = [1, 2, 3, 4];
        let (long, short) = ([5, 6, 7, 8], [9, 10]);
        let of = |rules: Rows, most| {
            let rows = rows_of(&prompt, &[&long, &short], rules, most)?;
            let ids = |row: &Vec<Token>| row.iter().map(|token| token.id).collect::<Vec<_>>();
            Some(rows.iter().map(ids).collect::<Vec<_>>())
        };
        let rows = |long: &[u32], short: &[u32]| Some(vec![long.to_vec(), short.to_vec()]);
        let end = Rows::default();
        assert_eq!(of(end, 6), rows(&[1, 2, 3, 4, 5, 6], &[1, 2, 3, 4, 9, 10]));
        assert_eq!(of(end, 4), None);
        let start = Rows {
            cut: RowCut::Start,
            max_prompt_length: Some(3),
            max_completion_length: Some(3),
            ..end
        };
        assert_eq!(of(start, 5), rows(&[3, 4, 5, 6, 7], &[2, 3, 4, 9, 10]));
        // Both prompts are cut, as the longer row needs it, and then the completions to what the prompt's limit leaves.
        let completion = Rows {
            cut: RowCut::Completion,
            max_prompt_length: Some(2),
            ..end
        };
        assert_eq!(
            of(completion, 8),
            rows(&[1, 2, 3, 4, 5, 6, 7, 8], &[1, 2, 3, 4, 9, 10])
        );
        assert_eq!(of(completion, 7), rows(&[3, 4, 5, 6, 7, 8], &[3, 4, 9, 10]));
        assert_eq!(of(completion, 5), rows(&[3, 4, 5, 6, 7], &[3, 4, 9, 10]));
        let begin = Rows {
            prompt_keeps: Side::Start,
            ..completion
        };
        assert_eq!(of(begin, 3), rows(&[1, 2, 5], &[1, 2, 9]));
    }

    proptest! {
        #[test]
        fn rows_of_a_pair_are_found_again(
            prompt in prop::collection::vec(0u32..9, 0..6),
            chosen in prop::collection::vec(0u32..9, 1..6),
            rejected in prop::collection::vec(0u32..9, 1..6),
            most in 1u64..12,
        ) {
            let both = rows_of(&prompt, &[&chosen, &rejected], Rows::default(), most);
            if let Some([chosen, rejected]) = both.as_deref() {
                let all = || chosen.iter().chain(rejected);
                let sample = Sample {
                    tokens: all().map(|token| token.id).collect(),
                    loss_mask: all().map(|token| token.target).collect(),
                    ..Sample::default()
                };
                prop_assert!(sample.tokens.len() as u64 <= Kind::Pair.longest(most));
                let (found, label) = rows(sample, Kind::Pair);
                prop_assert_eq!(label, None);
                for (found, row) in found.iter().zip([chosen, rejected]) {
                    let ids: Vec<u32> = row.iter().map(|token| token.id).collect();
                    prop_assert_eq!(&found.tokens, &ids);
                    let mask: Vec<bool> = row.iter().map(|token| token.target).collect();
                    prop_assert_eq!(&found.loss_mask, &mask);
                }
            }
        }
    }
}
