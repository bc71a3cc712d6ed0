//! Splits PTX text into tokens.

use super::LoadError;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Token<'a> {
    /// A directive, an opcode with its modifiers, a register, a label or another name.
    Word(&'a str),
    Number(Number),
    /// A string literal without its quotes.
    Text(&'a str),
    Sign(char),
}

/// A literal; a minus sign is a separate token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Number {
    Integer(u64),
    /// The bits after `0f`.
    F32(u32),
    /// The bits after `0d`.
    F64(u64),
    Decimal(f64),
}

/// The opcode of the comment by which the compiler says that it leaves a register undefined on purpose.
pub const IMPLICIT_DEF: &str = "implicit-def";

/// Tokens with their line numbers, which start at 1.
///
/// Comments and the lines of `.loc` and `.file`, which have no end mark, are left out.
pub fn tokens(text: &str) -> Result<Vec<(u32, Token<'_>)>, LoadError> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::with_capacity(text.len() / 4);
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let rest = &text[at..];
        let wrong = |problem: &str| LoadError::new(text, line, problem);
        match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
            }
            byte if byte.is_ascii_whitespace() || byte == 0 => at += 1,
            b'/' if rest.starts_with("//") => {
                let comment = &rest[..rest.find('\n').unwrap_or(rest.len())];
                if let Some(register) = comment.strip_prefix("// implicit-def: ") {
                    let statement = [
                        Token::Word(IMPLICIT_DEF),
                        Token::Word(register.trim()),
                        Token::Sign(';'),
                    ];
                    tokens.extend(statement.map(|token| (line, token)));
                }
                at += comment.len();
            }
            b'/' if rest.starts_with("/*") => {
                let end = rest
                    .find("*/")
                    .ok_or_else(|| wrong("the comment has no end"))?;
                line += lines(&rest[..end]);
                at += end + 2;
            }
            b'"' => {
                let end = rest[1..]
                    .find('"')
                    .ok_or_else(|| wrong("the string has no end"))?;
                tokens.push((line, Token::Text(&rest[1..=end])));
                at += end + 2;
            }
            byte if byte.is_ascii_digit() => {
                let len = word_len(rest.as_bytes());
                let number =
                    number(&rest[..len]).ok_or_else(|| wrong("the number is malformed"))?;
                tokens.push((line, Token::Number(number)));
                at += len;
            }
            byte if is_of_word(byte) => {
                let len = word_len(rest.as_bytes());
                let word = &rest[..len];
                if word == ".loc" || word == ".file" {
                    at += rest.find('\n').unwrap_or(rest.len());
                } else {
                    tokens.push((line, Token::Word(word)));
                    at += len;
                }
            }
            byte if byte.is_ascii_punctuation() => {
                tokens.push((line, Token::Sign(byte as char)));
                at += 1;
            }
            _ => return Err(wrong("the text is not ASCII")),
        }
    }
    Ok(tokens)
}

fn lines(text: &str) -> u32 {
    text.bytes().filter(|&byte| byte == b'\n').count() as u32
}

fn is_of_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

/// Bytes of the word at the start; `::` belongs to it, a single colon ends it.
fn word_len(bytes: &[u8]) -> usize {
    let mut at = 0;
    loop {
        match bytes[at..] {
            [byte, ..] if is_of_word(byte) => at += 1,
            [b':', b':', byte, ..] if is_of_word(byte) => at += 2,
            _ => return at,
        }
    }
}

fn number(text: &str) -> Option<Number> {
    let digits = text.trim_end_matches(['u', 'U']);
    let after = |prefix: [&'static str; 2]| prefix.iter().find_map(|p| text.strip_prefix(*p));
    if let Some(bits) = after(["0f", "0F"]) {
        return u32::from_str_radix(bits, 16).ok().map(Number::F32);
    }
    if let Some(bits) = after(["0d", "0D"]) {
        return u64::from_str_radix(bits, 16).ok().map(Number::F64);
    }
    let integer = |digits: &str, radix| u64::from_str_radix(digits, radix).ok();
    let value = if let Some(digits) = digits.strip_prefix("0x").or(digits.strip_prefix("0X")) {
        integer(digits, 16)
    } else if let Some(digits) = digits.strip_prefix("0b").or(digits.strip_prefix("0B")) {
        integer(digits, 2)
    } else if digits.contains('.') {
        return digits.parse().ok().map(Number::Decimal);
    } else if digits.len() > 1 && digits.starts_with('0') {
        integer(digits, 8)
    } else {
        integer(digits, 10)
    };
    value.map(Number::Integer)
}
