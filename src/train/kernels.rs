//! What decides the bits of a training that has the same ones in every world: the version, the processor's kernels and the
//! system's mathematical functions. The first checkpoint pins them, and every rank must have them.

use std::fmt;

use cpu_kernels::identity::Identity;
use serde::{Deserialize, Serialize};

use super::TrainError;
use super::message::exchange;
use crate::comm::Collective;

/// The kernels of a rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Kernels {
    /// The version of Evenkeel.
    version: String,
    /// Architecture and widest vectors.
    vectors: String,
    /// Elements along the depth that a large product adds up at a time; the caches decide it.
    block_depth: usize,
    /// Digest of a short computation, hexadecimal: also the system's mathematical functions decide it.
    probe: String,
}

impl Kernels {
    /// Those of this process.
    pub fn here() -> Kernels {
        let Identity {
            vectors,
            block_depth,
            probe,
        } = Identity::of_this_processor();
        Kernels {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            vectors,
            block_depth,
            probe: format!("{probe:016x}"),
        }
    }
}

impl fmt::Display for Kernels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kernels {
            version,
            vectors,
            block_depth,
            probe,
        } = self;
        write!(
            f,
            "evenkeel {version}, {vectors}, blocks of {block_depth}, probe {probe}"
        )
    }
}

/// The kernels of the run: `pinned` by its checkpoint, or those of all ranks. Collective.
///
/// # Errors
/// A rank has others.
pub fn agree(
    here: Kernels,
    pinned: Option<&Kernels>,
    world: &dyn Collective,
) -> Result<Kernels, TrainError> {
    let ranks = exchange(world, &here)?;
    let expected = pinned.unwrap_or(&ranks[0]).clone();
    match ranks
        .into_iter()
        .enumerate()
        .find(|(_, it)| *it != expected)
    {
        None => Ok(expected),
        Some((rank, found)) => Err(TrainError::Kernels {
            rank,
            found: Box::new(found),
            expected: Box::new(expected),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::solo::Solo;
    use crate::comm::tcp::tests::on_all;

    fn kernels() -> Kernels {
        Kernels {
            version: "1.2.3".into(),
            vectors: "x86_64 AVX2".into(),
            block_depth: 512,
            probe: "00c0ffee".into(),
        }
    }

    #[test]
    fn a_resume_on_another_processor_is_refused_with_what_differs() {
        let wide = Kernels {
            vectors: "x86_64 AVX-512".into(),
            ..kernels()
        };
        assert_eq!(agree(wide.clone(), None, &Solo).unwrap(), wide);
        assert_eq!(agree(wide.clone(), Some(&wide), &Solo).unwrap(), wide);
        let error = agree(wide, Some(&kernels()), &Solo).unwrap_err();
        insta::assert_snapshot!(error, @"rank 0 has other kernels (evenkeel 1.2.3, x86_64 AVX-512, blocks of 512, probe 00c0ffee) than the run (evenkeel 1.2.3, x86_64 AVX2, blocks of 512, probe 00c0ffee), and `determinism: world` promises the same bits: use machines and the version with the run's, or start a new run from its checkpoint");
    }

    #[test]
    fn ranks_of_several_kinds_are_refused_on_every_rank() {
        let refused = on_all(3, |world| {
            let here = match world.rank() {
                2 => Kernels {
                    probe: "0".into(),
                    ..kernels()
                },
                _ => kernels(),
            };
            agree(here, None, world.as_ref()).unwrap_err().to_string()
        });
        assert!(refused.iter().all(|error| error.starts_with("rank 2 has")));
    }
}
