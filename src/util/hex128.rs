//! Hashes of 128 bits as 32 hexadecimal digits, in text and in JSON.

use serde::{Deserialize, Deserializer, Serializer, de};

/// A text that is not a checksum.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a checksum; a checksum has 32 hexadecimal digits")]
pub struct NoChecksum(String);

pub fn parse(text: &str) -> Result<u128, NoChecksum> {
    let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    match u128::from_str_radix(text, 16) {
        Ok(value) if digits => Ok(value),
        _ => Err(NoChecksum(text.to_owned())),
    }
}

pub fn serialize<S: Serializer>(hash: &u128, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{hash:032x}"))
}

pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u128, D::Error> {
    parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
}
