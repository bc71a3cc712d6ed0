//! Prompts as token ids, and the text of the ids that continue them.

use std::path::Path;

use serde_json::json;

use super::chat::ChatTemplate;
use super::error::DataError;
use super::tokenizer::Tokenizer;

/// A model's tokenizer, with the template of its conversations.
pub struct Prompter {
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

impl Prompter {
    /// The tokenizer of a directory, or of a `tokenizer.json`.
    pub fn open(path: &Path) -> Result<Prompter, DataError> {
        let name = path.display().to_string();
        Prompter::of(Tokenizer::open(path, &name)?, path)
    }

    /// The built-in vocabulary of bytes.
    pub fn byte() -> Result<Prompter, DataError> {
        Prompter::of(Tokenizer::byte(), Path::new(super::BYTE))
    }

    /// Prompts are ids below `vocabulary_size`, with blanks between them, and so are texts.
    pub fn ids(vocabulary_size: u64) -> Result<Prompter, DataError> {
        Prompter::of(Tokenizer::ids(vocabulary_size), Path::new("ids"))
    }

    fn of(tokenizer: Tokenizer, path: &Path) -> Result<Prompter, DataError> {
        let template = ChatTemplate::new(None, &tokenizer);
        let template = template.map_err(|error| {
            DataError::source(
                path,
                error.to_string(),
                "repair it, or generate with --text",
            )
        })?;
        Ok(Prompter {
            tokenizer,
            template,
        })
    }

    /// Whether the tokenizer has a chat template.
    pub fn has_template(&self) -> bool {
        !self.template.built_in
    }

    /// A text that the model continues.
    pub fn text(&self, prompt: &str) -> Result<Vec<u32>, DataError> {
        let mut tokens = self.tokenizer.start.clone();
        tokens.extend(self.encoded(prompt)?);
        Ok(tokens)
    }

    /// A user's message that the model answers, after one of the system's if there is one.
    pub fn chat(&self, system: Option<&str>, prompt: &str) -> Result<Vec<u32>, DataError> {
        let system = system.map(|text| json!({ "role": "system", "content": text }));
        let user = json!({ "role": "user", "content": prompt });
        let messages: Vec<_> = system.into_iter().chain([user]).collect();
        let text = self.template.render(&messages, true).map_err(|error| {
            let path = Path::new(&self.tokenizer.name);
            DataError::source(path, error.to_string(), "generate with --text")
        })?;
        self.encoded(&text)
    }

    fn encoded(&self, text: &str) -> Result<Vec<u32>, DataError> {
        self.tokenizer.encode(text).map_err(|error| {
            DataError::source(Path::new("the prompt"), error.to_string(), "change it")
        })
    }

    /// The tokens with which a document ends.
    pub fn ends(&self) -> &[u32] {
        &self.tokenizer.end
    }

    /// The text that the tokens `new` add to that of the tokens before them, without special tokens.
    pub fn added(&self, before: &[u32], new: &[u32]) -> String {
        let all: Vec<u32> = before.iter().chain(new).copied().collect();
        let (before, all) = (self.tokenizer.decode(before), self.tokenizer.decode(&all));
        match all.strip_prefix(&before) {
            Some(added) => added.to_owned(),
            // The last character of the prompt was cut.
            None => self.tokenizer.decode(new),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_prompts_and_texts() {
        let prompter = Prompter::byte().unwrap();
        let prompt = prompter.text("né").unwrap();
        assert_eq!(prompt, [256, 110, 195, 169]);
        assert_eq!(prompter.added(&prompt, &[97, 257]), "a");
        // Half a character: the rest follows.
        assert_eq!(prompter.added(&prompt[..2], &[195]), "\u{fffd}");
        let chat = prompter.chat(Some("Be brief."), "Hi").unwrap();
        let text: Vec<u8> = chat
            .iter()
            .filter_map(|&id| u8::try_from(id).ok())
            .collect();
        assert_eq!(
            String::from_utf8(text).unwrap(),
            "<|system|>\nBe brief.\n<|user|>\nHi\n<|assistant|>\n"
        );
        assert!(!prompter.has_template());
        assert_eq!(prompter.ends(), [257]);
    }

    #[test]
    fn ids_are_prompts_and_texts() {
        let prompter = Prompter::ids(20).unwrap();
        assert_eq!(prompter.text("3 19 0").unwrap(), [3, 19, 0]);
        assert_eq!(prompter.added(&[3], &[19, 0]), " 19 0");
        for wrong in ["3 20", "three"] {
            let error = prompter.text(wrong).unwrap_err().to_string();
            assert!(error.contains("ids below 20"), "{error}");
        }
    }
}
