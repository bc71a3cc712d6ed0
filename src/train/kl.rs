//! KTO's estimate of the KL between the model and its reference, from mismatched rows.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::TrainError;
use super::bits;
use super::message::exchange;
use super::mismatched::Mismatched;
use super::references::{References, answers};
use crate::comm::Collective;
use crate::data::Dataset;
use crate::engine::Engine;
use crate::objective::{Kl, mean_kl};

/// Log-ratios of the mismatched rows of a micro-batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
struct LogRatios {
    /// Position of the first row.
    first: u64,
    #[serde(with = "bits")]
    sum: f64,
    rows: u64,
}

impl LogRatios {
    fn kl(all: impl Iterator<Item = LogRatios>) -> f64 {
        let (mut sum, mut rows) = (0.0, 0);
        for part in all {
            sum += part.sum;
            rows += part.rows;
        }
        mean_kl(sum, rows)
    }
}

/// The KL estimate of each of this rank's micro-batches, which have these positions. Collective: the ranks run up to `most`
/// passes each.
pub fn estimates(
    kl: Kl,
    (rows, references): &(Mismatched, References),
    dataset: &Dataset,
    own: &[Range<u64>],
    most: u64,
    engine: &mut dyn Engine,
    world: &dyn Collective,
) -> Result<Vec<f64>, TrainError> {
    let mut ratios = Vec::new();
    for positions in own {
        world.check()?;
        let collated = rows.collate(dataset, positions.clone())?;
        let said = answers(engine, &collated)?;
        let of_reference = references.of(positions.clone());
        let pairs = said.iter().zip(&of_reference);
        ratios.push(LogRatios {
            first: positions.start,
            sum: pairs.map(|(said, reference)| said - reference).sum(),
            rows: said.len() as u64,
        });
    }
    for _ in own.len() as u64..most {
        engine.join_evaluation()?;
    }
    let all: Vec<Vec<LogRatios>> = exchange(world, &ratios)?;
    Ok(match kl {
        Kl::Global => {
            let mut all: Vec<LogRatios> = all.into_iter().flatten().collect();
            // In the order of the samples, which no world changes.
            all.sort_unstable_by_key(|part| part.first);
            vec![LogRatios::kl(all.into_iter()); own.len()]
        }
        Kl::MicroBatch => (0..own.len())
            .map(|i| LogRatios::kl(all.iter().filter_map(|rank| rank.get(i).copied())))
            .collect(),
    })
}
