//! The digest of the samples that were fed, with their positions, in any order.

use std::fmt;
use std::ops::AddAssign;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_128;

use crate::util::hex128;

/// The sum, modulo 2¹²⁸, of one xxh3-128 hash per sample. A sum does not depend on the deal of the samples or
/// on the order in which ranks add up. A sample that is dropped, repeated, moved to another position or
/// changed in one token changes it.
///
/// It guards against mistakes, not against forged digests: xxh3 is not a cryptographic hash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Digest(#[serde(with = "hex128")] pub u128);

impl Digest {
    /// The digest of one sample: its position in the global order and the row of token ids and targets
    /// (equally long) that enters the forward pass; `ignore` is the target that carries no loss.
    ///
    /// Tokens after the last target with loss are excluded. In a causal model they cannot affect the loss or
    /// a gradient, and the amount of padding depends on the longest neighbour in the micro-batch, which must
    /// not change a digest.
    pub fn of(position: u64, tokens: &[u32], targets: &[u32], ignore: u32) -> Self {
        debug_assert_eq!(tokens.len(), targets.len());
        let len = targets
            .iter()
            .rposition(|&target| target != ignore)
            .map_or(0, |last| last + 1);
        let mut bytes = Vec::with_capacity(8 + 8 * len);
        bytes.extend_from_slice(&position.to_le_bytes());
        for (token, target) in tokens.iter().zip(targets).take(len) {
            bytes.extend_from_slice(&token.to_le_bytes());
            bytes.extend_from_slice(&target.to_le_bytes());
        }
        Digest(xxh3_128(&bytes))
    }
}

impl AddAssign for Digest {
    fn add_assign(&mut self, other: Digest) {
        self.0 = self.0.wrapping_add(other.0);
    }
}

impl std::iter::Sum for Digest {
    fn sum<I: Iterator<Item = Digest>>(digests: I) -> Digest {
        let mut sum = Digest::default();
        digests.for_each(|digest| sum += digest);
        sum
    }
}

/// Formats the digest as 32 hexadecimal digits.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const IGNORE: u32 = u32::MAX;

    fn of(position: u64, tokens: &[u32], targets: &[u32]) -> Digest {
        Digest::of(position, tokens, targets, IGNORE)
    }

    #[test]
    fn position_tokens_and_targets_all_change_the_digest() {
        let base = of(7, &[1, 2, 3], &[2, 3, 4]);
        for other in [
            of(8, &[1, 2, 3], &[2, 3, 4]),
            of(7, &[1, 2, 4], &[2, 3, 4]),
            of(7, &[1, 2, 3], &[2, 3, 5]),
            of(7, &[1, 2, 3], &[IGNORE, 3, 4]),
            of(7, &[1, 2], &[2, 3]),
        ] {
            assert_ne!(base, other);
        }
    }

    #[test]
    fn padding_does_not_change_the_digest() {
        let bare = of(7, &[1, 2], &[IGNORE, 3]);
        let padded = of(7, &[1, 2, 0, 0], &[IGNORE, 3, IGNORE, IGNORE]);
        assert_eq!(bare, padded);
    }

    #[test]
    fn digests_never_change() {
        // Existing ledgers must still verify.
        let digest = of(7, &[1, 2, 3], &[2, 3, 4]);
        insta::assert_snapshot!(digest);
        assert_eq!(
            of(0, &[], &[]).0,
            xxh3_128(&[0; 8]),
            "a sample without targets still counts by its position"
        );
    }

    #[test]
    fn only_hexadecimal_digits_are_read_back() {
        let digest = Digest(0xabc);
        let json = serde_json::to_string(&digest).unwrap();
        assert_eq!(json, "\"00000000000000000000000000000abc\"");
        assert_eq!(serde_json::from_str::<Digest>(&json).unwrap(), digest);
        for wrong in [
            "\"abc\"",
            "\"+0000000000000000000000000000abc\"",
            "\"g0000000000000000000000000000abc\"",
            "12",
        ] {
            assert!(serde_json::from_str::<Digest>(wrong).is_err(), "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn a_sum_does_not_depend_on_the_order(
            samples in prop::collection::vec((any::<u64>(), any::<[u32; 3]>()), 0..12),
            cut in 0..12usize,
        ) {
            let digests: Vec<Digest> = samples
                .iter()
                .map(|(position, row)| of(*position, row, row))
                .collect();
            let forward: Digest = digests.iter().copied().sum();
            let backward: Digest = digests.iter().rev().copied().sum();
            let cut = cut.min(digests.len());
            let mut parts: Digest = digests[cut..].iter().copied().sum();
            parts += digests[..cut].iter().copied().sum();
            prop_assert_eq!(forward, backward);
            prop_assert_eq!(forward, parts);
        }
    }
}
