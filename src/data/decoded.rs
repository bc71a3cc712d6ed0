//! Rows of texts that become tokens, are cut, and become text and tokens again.
//!
//! Upstream: ContextualAI/HALOs 61b9ee6 `dataloader.py` (`tokenize_batch_element`, `combine_prompt_and_generation`,
//! `UnpairedPreferenceDataLoader`).
//! Deviation: a row that then has more than the limit is cut at its end, so that a completion that was cut lacks the end
//! token.

use super::record::Fault;
use super::token::Token;
use super::tokenizer::Tokenizer;
use crate::recipe::schema::spec::{Rows, Side};

/// How such rows are made.
#[derive(Clone, Copy)]
pub(super) struct Decoding<'a> {
    tokenizer: &'a Tokenizer,
    /// The text of the end token.
    end: &'a str,
    end_id: u32,
    /// Most tokens of a row, and of the prompt of a row that is too long.
    most: usize,
    most_of_prompt: usize,
    keeps: Side,
}

/// A row, and the texts of which it is made.
pub(super) struct Decoded {
    pub prompt: String,
    /// With a space and the end token at its end.
    pub completion: String,
    /// The completion carries loss.
    pub tokens: Vec<Token>,
    /// Whether a token of the completion is left.
    pub has_targets: bool,
    pub is_cut: bool,
}

impl<'a> Decoding<'a> {
    /// # Errors
    /// The tokenizer has no end token.
    pub fn new(tokenizer: &'a Tokenizer, rules: Rows, most: u64) -> Result<Decoding<'a>, Fault> {
        let (Some(end), Some(&end_id)) =
            (tokenizer.specials.get("eos_token"), tokenizer.end.last())
        else {
            return Err(Fault::new(
                "the tokenizer has no end token, with which upstream ends completions",
                "set eos_token in tokenizer_config.json",
            ));
        };
        Ok(Decoding {
            tokenizer,
            end,
            end_id,
            most: most as usize,
            most_of_prompt: rules.max_prompt_length.unwrap_or(most) as usize,
            keeps: rules.prompt_keeps,
        })
    }

    /// The ids of a prompt, which has the start token.
    pub fn of_prompt(&self, text: &str) -> Result<Vec<u32>, Fault> {
        Ok(self.without_end(self.started(text)?))
    }

    /// The ids of a completion.
    pub fn of_completion(&self, text: &str) -> Result<Vec<u32>, Fault> {
        Ok(self.without_end(self.encode(text)?))
    }

    /// The row of a prompt and a completion.
    pub fn row(&self, prompt: &[u32], completion: &[u32]) -> Result<Decoded, Fault> {
        let is_long = prompt.len() + completion.len() > self.most;
        let prompt = match self.keeps {
            _ if !is_long || prompt.len() <= self.most_of_prompt => prompt,
            Side::Start => &prompt[..self.most_of_prompt],
            Side::End => &prompt[prompt.len() - self.most_of_prompt..],
        };
        let rest = self.most.saturating_sub(prompt.len());
        let completion = &completion[..completion.len().min(rest)];
        let prompt = self.tokenizer.decode_cleaned(prompt);
        let completion = self.tokenizer.decode_cleaned(completion);
        let completion = format!("{completion} {}", self.end);
        let border = self.started(&prompt)?.len();
        let mut ids = self.started(&format!("{prompt}{completion}"))?;
        let is_cut = is_long || ids.len() > self.most;
        ids.truncate(self.most);
        let has_targets = ids.len() > border;
        let tokens = ids.into_iter().zip(0..).map(|(id, at)| Token {
            id,
            target: at >= border.max(1),
        });
        Ok(Decoded {
            prompt,
            completion,
            tokens: tokens.collect(),
            has_targets,
            is_cut,
        })
    }

    /// The tokens of a row's prompt and of its completion, each by itself, of which mismatched rows are made.
    pub fn parts(&self, row: &Decoded) -> Result<Vec<Token>, Fault> {
        let (prompt, completion) = (
            self.of_prompt(&row.prompt)?,
            self.of_completion(&row.completion)?,
        );
        let with = |target: bool| move |id: u32| Token { id, target };
        let prompt = prompt.into_iter().map(with(false));
        Ok(prompt
            .chain(completion.into_iter().map(with(true)))
            .collect())
    }

    fn started(&self, text: &str) -> Result<Vec<u32>, Fault> {
        Ok([self.tokenizer.start.clone(), self.encode(text)?].concat())
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, Fault> {
        self.tokenizer.encode(text).map_err(cannot_encode)
    }

    fn without_end(&self, mut ids: Vec<u32>) -> Vec<u32> {
        ids.pop_if(|last| *last == self.end_id);
        ids
    }
}

pub(super) fn cannot_encode(error: tokenizers::Error) -> Fault {
    Fault::new(
        format!("the tokenizer cannot encode it: {error}"),
        "repair or remove the text, or use another tokenizer",
    )
}
