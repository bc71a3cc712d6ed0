//! Secret keys and the proofs that they make: HMAC-SHA256 (RFC 2104, FIPS 180-4).

use std::fmt;
use std::io;
use std::path::Path;
use std::str::FromStr;

use ring::hmac;
use ring::rand::{SecureRandom, SystemRandom};

use super::input;

/// Bytes of a key and of a proof.
const SIZE: usize = 32;
/// Largest file of a key: its digits and a line end.
const FILE_BYTES: u64 = 2 * SIZE as u64 + 2;

/// An unpredictable number that makes each proof unlike all others.
pub type Nonce = [u8; SIZE];
/// Evidence that its sender has a key. It does not reveal the key.
pub type Proof = [u8; SIZE];

/// A secret that processes share.
#[derive(Clone)]
pub struct Key {
    bytes: [u8; SIZE],
    hmac: hmac::Key,
}

/// A random number of the operating system.
pub fn nonce() -> io::Result<Nonce> {
    let mut bytes = Nonce::default();
    let filled = SystemRandom::new().fill(&mut bytes);
    filled.map_err(|_| io::Error::other("the system gives no random numbers"))?;
    Ok(bytes)
}

impl Key {
    fn new(bytes: [u8; SIZE]) -> Key {
        let hmac = hmac::Key::new(hmac::HMAC_SHA256, &bytes);
        Key { bytes, hmac }
    }

    pub fn random() -> io::Result<Key> {
        nonce().map(Key::new)
    }

    /// The key in a regular file.
    pub fn read(file: &Path) -> io::Result<Key> {
        let text = input::read(file, FILE_BYTES)?;
        let key = String::from_utf8_lossy(&text).parse();
        key.map_err(|error: InvalidKey| io::Error::new(io::ErrorKind::InvalidData, error))
    }

    /// The key for one purpose. It reveals neither this key nor that of another purpose.
    pub fn derive(&self, purpose: &[&[u8]]) -> Key {
        Key::new(self.prove(purpose))
    }

    /// The proof for a message in parts.
    pub fn prove(&self, message: &[&[u8]]) -> Proof {
        let mut proof = Proof::default();
        proof.copy_from_slice(hmac::sign(&self.hmac, &joined(message)).as_ref());
        proof
    }

    /// Whether a proof is that of a message. The time that this takes depends on neither.
    pub fn verify(&self, message: &[&[u8]], proof: &[u8]) -> bool {
        hmac::verify(&self.hmac, &joined(message), proof).is_ok()
    }

    /// The key's text, for files and environment variables that only its owner reads.
    pub fn reveal(&self) -> String {
        hex(&self.bytes)
    }
}

/// The parts of a message, each after its length, so that no two messages have the same bytes.
fn joined(parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
        bytes.extend_from_slice(part);
    }
    bytes
}

/// The SHA-256 of bytes, in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    hex(ring::digest::digest(&ring::digest::SHA256, bytes).as_ref())
}

/// Lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes of exactly 64 hexadecimal digits.
pub fn from_hex(text: &str) -> Option<[u8; SIZE]> {
    let digits = text.as_bytes();
    if digits.len() != 2 * SIZE {
        return None;
    }
    let mut bytes = [0; SIZE];
    for (byte, pair) in bytes.iter_mut().zip(digits.chunks(2)) {
        let digit = |digit: u8| char::from(digit).to_digit(16);
        *byte = u8::try_from(16 * digit(pair[0])? + digit(pair[1])?).ok()?;
    }
    Some(bytes)
}

/// The text is not that of a key.
#[derive(Debug, thiserror::Error)]
#[error("a key has 64 hexadecimal digits")]
pub struct InvalidKey;

impl FromStr for Key {
    type Err = InvalidKey;

    fn from_str(text: &str) -> Result<Key, InvalidKey> {
        from_hex(text.trim()).map(Key::new).ok_or(InvalidKey)
    }
}

/// Logs must not show it.
impl fmt::Debug for Key {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Key")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected proof is that of Python's hmac module.
    #[test]
    fn proofs_are_hmac_sha256_of_the_parts_after_their_lengths() {
        let key = Key::new([0x0b; SIZE]);
        let expected = "568e147fc75d8a804f400d6c30b2d354e14acfeda78dfe2e9ff6abe1a23ac9f3";
        assert_eq!(hex(&key.prove(&[b"Hi There"])), expected);
    }

    #[test]
    fn only_the_same_key_and_message_have_a_proof() {
        let key = Key::random().unwrap();
        let proof = key.prove(&[b"ab", b"c"]);
        assert!(key.verify(&[b"ab", b"c"], &proof));
        assert!(!key.verify(&[b"a", b"bc"], &proof), "parts are not joined");
        assert!(!key.verify(&[b"ab", b"c"], &proof[..31]));
        assert!(!Key::random().unwrap().verify(&[b"ab", b"c"], &proof));
        assert!(!key.derive(&[b"x"]).verify(&[b"ab", b"c"], &proof));
    }

    #[test]
    fn a_key_survives_its_text_and_is_not_shown() {
        let key = Key::random().unwrap();
        let read: Key = format!("{}\n", key.reveal()).parse().unwrap();
        assert_eq!(read.reveal(), key.reveal());
        assert_eq!(format!("{key:?}"), "Key");
        for invalid in ["", "00", &"g".repeat(64), &"0".repeat(63), &"é".repeat(32)] {
            assert!(invalid.parse::<Key>().is_err(), "{invalid}");
        }
    }
}
