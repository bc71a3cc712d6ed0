//! The built-in byte vocabulary: ids 0 to 255 are the bytes, 256 begins and 257 ends a sequence, 258 pads. It
//! needs no files and represents every text without loss.

use super::{Encoder, Piece, Tokenizer};

/// Name in a recipe.
pub(super) const NAME: &str = "byte";

/// Name, Jinja variable and id of the special tokens.
const SPECIALS: [(&str, &str, u32); 3] = [
    ("<|bos|>", "bos_token", 256),
    ("<|eos|>", "eos_token", 257),
    ("<|pad|>", "pad_token", 258),
];

pub(super) fn tokenizer() -> Tokenizer {
    Tokenizer {
        name: NAME.to_string(),
        specials: SPECIALS
            .iter()
            .map(|(name, variable, _)| (variable.to_string(), name.to_string()))
            .collect(),
        chat_template: None,
        checksum: NAME.to_string(),
        start: vec![256],
        end: vec![257],
        vocabulary_size: 259,
        encoder: Encoder::Byte,
    }
}

pub(super) fn pieces(text: &str) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(text.len());
    let mut at = 0;
    while let Some(&byte) = text.as_bytes().get(at) {
        let special = SPECIALS
            .iter()
            .find(|(name, _, _)| text.as_bytes()[at..].starts_with(name.as_bytes()));
        let (id, length) = special.map_or((u32::from(byte), 1), |(name, _, id)| (*id, name.len()));
        pieces.push((id, at..at + length));
        at += length;
    }
    pieces
}
