//! Turns conversations into text and finds the answers in that text.

mod answers;
mod environment;

use std::collections::BTreeMap;
use std::ops::Range;

use minijinja::value::Serde;
use minijinja::{Environment, Value, context};

use super::tokenizer::Tokenizer;
use crate::util::format::bytes_apart;

/// The template for tokenizers without one, unless the recipe sets one: a header line per message, and the
/// end-of-sequence token after it.
const PLAIN: &str = "{% for message in messages %}\
    {{ '<|' ~ message['role'] ~ '|>\\n' ~ message['content'] ~ eos_token ~ '\\n' }}\
    {% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}";

/// Name of the only template of an environment.
const NAME: &str = "chat_template";

/// Most bytes of a template. The longest that is published has about 20 KB. The depth of its expressions follows from it.
const LONGEST: usize = 60_000;

/// A compiled chat template.
pub struct ChatTemplate {
    /// Whether neither the recipe nor the tokenizer has a template.
    pub built_in: bool,
    /// The template's Jinja source.
    pub source: String,
    environment: Environment<'static>,
    specials: BTreeMap<String, String>,
    marks: Vec<String>,
    generation: bool,
}

/// A conversation as text, with its answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    /// The rendering of all messages.
    pub text: String,
    /// Byte ranges of the answers, each with the mark that ends its turn.
    pub answers: Vec<Range<usize>>,
}

/// Why a template cannot be used, a conversation cannot be rendered, or its answers cannot be found.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// The template's syntax is wrong.
    #[error("the chat template is malformed: {0}")]
    Malformed(String),
    /// The template failed or raised an error.
    #[error("the chat template failed: {0}")]
    Template(String),
    /// The text of a message depends on later messages.
    #[error(
        "the chat template changes earlier text: with message {message} (of role assistant) \
         the text before the answer changes or the answer itself is altered, so the answer's \
         tokens cannot be identified"
    )]
    NotPrefixStable {
        /// Number of the answer's message, counted from 1.
        message: usize,
    },
}

impl ChatError {
    /// The remedy, with the recipe's keys of the template and of `answers_only`.
    pub fn help(&self, template_key: &str, answers_key: &str) -> String {
        match self {
            ChatError::Malformed(_) => format!("repair it, or set {template_key}"),
            ChatError::Template(_) => format!("repair the conversation, or set {template_key}"),
            ChatError::NotPrefixStable { .. } => format!(
                "set {template_key} to a template that marks answers with \
                 {{% generation %}}…{{% endgeneration %}}, or set {answers_key}=false"
            ),
        }
    }
}

impl ChatTemplate {
    /// The recipe's template, else the tokenizer's, else the built-in one.
    pub fn new(recipe: Option<&str>, tokenizer: &Tokenizer) -> Result<ChatTemplate, ChatError> {
        let named = recipe.or(tokenizer.chat_template.as_deref());
        let source = named.unwrap_or(PLAIN);
        if source.len() > LONGEST {
            let [size, limit] = bytes_apart(source.len() as u64, LONGEST as u64);
            return Err(ChatError::Malformed(format!(
                "it has {size}, more than {limit}"
            )));
        }
        let mut environment = environment::environment();
        let (compiled, generation) = answers::rewrite(source);
        environment
            .add_template_owned(NAME, compiled)
            .map_err(|error| ChatError::Malformed(environment::message(&error)))?;
        Ok(ChatTemplate {
            built_in: named.is_none(),
            source: source.to_string(),
            environment,
            specials: tokenizer.specials.clone(),
            marks: tokenizer.marks(),
            generation,
        })
    }

    /// The conversation as text, with the ranges of the answers from message `first` (counted from 0) on.
    ///
    /// `{% generation %}` marks of the template decide. Without marks, an answer starts where the rendering
    /// of the messages before it, with the generation prompt, ends.
    pub fn answers(
        &self,
        messages: &[serde_json::Value],
        first: usize,
    ) -> Result<Conversation, ChatError> {
        let (text, spans) = answers::unmark(&self.raw(messages, false)?);
        let answers = if self.generation {
            answers::marked(messages, first, &text, spans)?
        } else {
            answers::by_prefixes(self, messages, first, &text)?
        };
        Ok(Conversation { text, answers })
    }

    /// The conversation as text, without the answers' ranges.
    pub fn render(
        &self,
        messages: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        Ok(answers::unmark(&self.raw(messages, add_generation_prompt)?).0)
    }

    fn raw(
        &self,
        messages: &[serde_json::Value],
        add_generation_prompt: bool,
    ) -> Result<String, ChatError> {
        let failed = |error| ChatError::Template(environment::message(&error));
        let template = self.environment.get_template(NAME).map_err(failed)?;
        let values = context! {
            messages => Serde(messages),
            add_generation_prompt => add_generation_prompt,
            // transformers passes none if there are no tools.
            tools => (),
            documents => (),
            ..Value::from(self.specials.clone())
        };
        let mut text = environment::Bounded::default();
        template
            .render_captured_to(values, &mut text)
            .map_err(failed)?;
        Ok(text.into_string())
    }
}

#[cfg(test)]
mod tests;
