//! DeepSpeed's elasticity: the batch that it derives from a maximum batch and a list of
//! micro-batches, and the data-parallel sizes that it allows.
//!
//! This reproduces upstream's computation, because such a config means that batch: DeepSpeed
//! edaa722, `elasticity/elasticity.py` (`compute_elastic_config`, `_get_compatible_gpus_v01` and
//! `_v02`). It chooses a batch that many counts divide, so the batch is seldom the maximum.

use super::arithmetic::{divisors, lcm};
use crate::recipe::schema::spec::{Elastic, ElasticVersion};

/// Upstream's highly composite numbers.
const HIGHLY_COMPOSITE: [u64; 38] = [
    1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560,
    10080, 15120, 20160, 25200, 27720, 45360, 50400, 55440, 83160, 110_880, 166_320, 221_760,
    277_200, 332_640, 498_960, 554_400, 665_280, 720_720,
];

/// The longest list of micro-batches; each one costs time.
const MOST_SIZES: usize = 32;

/// The result of elasticity in a world.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Made {
    /// The global batch, samples.
    pub batch: u64,
    /// Data-parallel sizes that elasticity allows, ascending.
    pub valid: Vec<u64>,
    /// The micro-batch in this world, samples; `None` if elasticity refuses the world.
    pub per_device_batch_size: Option<u64>,
}

/// The result of DeepSpeed's `elastic` in a world of this number of data-parallel ranks. The error says why
/// there is none.
pub fn make(elastic: &Elastic, ranks: u64) -> Result<Made, String> {
    let count = elastic.micro_batches.len();
    if !(1..=MOST_SIZES).contains(&count) || elastic.micro_batches.contains(&0) {
        return Err(format!(
            "{count} micro-batch sizes are given, 1 to {MOST_SIZES} can be compared"
        ));
    }
    let (batch, valid) = match elastic.version {
        ElasticVersion::V01 => search(
            elastic,
            elastic.max_batch,
            elastic.min_gpus,
            elastic.max_gpus,
        )?,
        ElasticVersion::V02 => whole_nodes(elastic, ranks)?,
    };
    let mut per_device_batch_size = None;
    if valid.contains(&ranks) {
        let sizes = elastic.micro_batches.iter().copied();
        let fitting = sizes.filter(|size| (batch / ranks).is_multiple_of(*size));
        per_device_batch_size = fitting.max();
    }
    Ok(Made {
        batch,
        valid,
        per_device_batch_size,
    })
}

/// Version 0.1; version 0.2 does the same with nodes instead of GPUs.
fn search(
    elastic: &Elastic,
    max_batch: u64,
    min: u64,
    max: u64,
) -> Result<(u64, Vec<u64>), String> {
    let sizes = &elastic.micro_batches;
    let smallest = sizes.iter().copied().min().unwrap_or(1);
    if let Some(size) = sizes.iter().find(|size| **size > max_batch) {
        return Err(format!(
            "the micro-batch {size} is larger than the batch may be, {max_batch}"
        ));
    }
    // Upstream treats zero as unset, whatever its source.
    let min = min.max(1);
    let max = if max == 0 { max_batch / smallest } else { max };
    let common = sizes.iter().copied().try_fold(1, |all, size| {
        let all = lcm(all, size);
        (all <= max_batch).then_some(all)
    });
    let mut best: (u64, Vec<u64>) = (smallest, Vec::new());
    for base in sizes.iter().copied().chain(common) {
        let batch = scaled(base, max_batch);
        let valid = counts(batch, sizes, min, max);
        let preferred = if elastic.prefer_larger {
            batch > best.0
        } else {
            batch < best.0
        };
        if valid.len() > best.1.len() || (valid.len() == best.1.len() && preferred) {
            best = (batch, valid);
        }
    }
    Ok(best)
}

/// The base times the largest highly composite number that keeps it within the maximum batch.
fn scaled(base: u64, max_batch: u64) -> u64 {
    let room = max_batch / base;
    let at = HIGHLY_COMPOSITE.partition_point(|&number| number <= room);
    base * HIGHLY_COMPOSITE[at.max(1) - 1]
}

/// Counts that split a batch into whole passes of one of the sizes.
fn counts(batch: u64, sizes: &[u64], min: u64, max: u64) -> Vec<u64> {
    let mut counts: Vec<u64> = sizes
        .iter()
        .filter(|&&size| batch.is_multiple_of(size))
        .flat_map(|size| divisors(batch / size))
        .filter(|count| (min..=max).contains(count))
        .collect();
    counts.sort_unstable();
    counts.dedup();
    counts
}

/// Version 0.2: a batch for whole nodes, or if the world is not among those, the largest batch up to the
/// maximum that this world splits.
fn whole_nodes(elastic: &Elastic, ranks: u64) -> Result<(u64, Vec<u64>), String> {
    let (per_node, model_parallel) = (elastic.gpus_per_node, elastic.model_parallel);
    if model_parallel == 0 || per_node == 0 || !per_node.is_multiple_of(model_parallel) {
        return Err(format!(
            "{per_node} GPUs of a node are not a multiple of the model-parallel size {model_parallel}"
        ));
    }
    let each = per_node / model_parallel;
    let (batch, nodes) = search(
        elastic,
        elastic.max_batch / each,
        elastic.min_gpus / per_node,
        elastic.max_gpus / per_node,
    )?;
    let valid: Vec<u64> = nodes.iter().map(|nodes| nodes * each).collect();
    if valid.contains(&(ranks / model_parallel)) {
        return Ok((batch * each, valid));
    }
    // Upstream computes in floating point, so parts of a node count.
    let size = ranks as f64 / per_node as f64 * each as f64;
    let filled = elastic.micro_batches.iter().map(|&per_device_batch_size| {
        let least = per_device_batch_size as f64 * size;
        (elastic.max_batch as f64 / least).floor() * least
    });
    let batch = if elastic.prefer_larger {
        filled.fold(0.0, f64::max)
    } else {
        filled.fold(f64::INFINITY, f64::min)
    };
    Ok((batch as u64, vec![size as u64]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elastic(max_batch: u64, micro_batches: &[u64]) -> Elastic {
        Elastic {
            max_batch,
            micro_batches: micro_batches.to_vec(),
            version: ElasticVersion::V01,
            ..Elastic::default()
        }
    }

    /// Results of upstream's function.
    #[test]
    fn version_0_1_gives_upstreams_batches() {
        let made = |max, sizes: &[u64], ranks| make(&elastic(max, sizes), ranks).unwrap();
        let usual = made(128, &[1, 2, 4, 8, 16], 8);
        assert_eq!((usual.batch, usual.per_device_batch_size), (120, Some(1)));
        assert_eq!(
            usual.valid,
            [1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 24, 30, 40, 60, 120]
        );
        assert_eq!(made(128, &[1, 2, 4, 8, 16], 7).per_device_batch_size, None);
    }

    /// A resumed run is compared with the batch that it was launched with.
    #[test]
    fn a_run_keeps_the_batch_of_its_first_world() {
        let mut spec = crate::recipe::Spec::default();
        spec.batch.elastic = Some(elastic(128, &[1, 2, 4, 8, 16]));
        assert_eq!(crate::plan::global_batch(&spec), None);
        let spec = spec.of_world(8).of_world(4);
        assert_eq!(spec.batch.gpus, Some(8));
        assert_eq!(crate::plan::global_batch(&spec), Some(120));
    }

    /// Results of upstream's functions for these bounds: version, maximum batch, micro-batches,
    /// (fewest, most) GPUs, (GPUs a node, model parallel), prefer larger, world; batch, sizes.
    type Row = (
        ElasticVersion,
        u64,
        &'static [u64],
        (u64, u64),
        (u64, u64),
        bool,
        u64,
        Option<u64>,
        &'static [u64],
    );

    use ElasticVersion::{V01, V02};

    #[rustfmt::skip]
    const UPSTREAM: &[Row] = &[
        (V01, 128, &[1, 2, 4, 8, 16], (4, 64), (1, 1), true, 1, Some(120), &[4, 5, 6, 8, 10, 12, 15, 20, 24, 30, 40, 60]),
        (V01, 128, &[1, 2, 4, 8, 16], (4, 64), (1, 1), false, 1, Some(120), &[4, 5, 6, 8, 10, 12, 15, 20, 24, 30, 40, 60]),
        (V01, 100, &[3, 7], (1, 10000), (1, 1), true, 1, Some(84), &[1, 2, 3, 4, 6, 7, 12, 14, 28]),
        (V01, 100, &[3, 7], (1, 10000), (1, 1), false, 1, Some(84), &[1, 2, 3, 4, 6, 7, 12, 14, 28]),
        (V02, 128, &[1, 2, 4, 8, 16], (1, 10000), (1, 1), true, 16, Some(128), &[16]),
        (V02, 128, &[1, 2, 4, 8, 16], (1, 10000), (1, 1), false, 16, Some(0), &[16]),
        (V02, 128, &[1, 2, 4, 8, 16], (1, 10000), (8, 1), true, 1, Some(128), &[1]),
        (V02, 128, &[1, 2, 4, 8, 16], (1, 10000), (8, 1), false, 1, Some(128), &[1]),
        (V02, 128, &[1, 2, 4, 8, 16], (1, 10000), (8, 2), true, 1, Some(128), &[0]),
        (V02, 128, &[1, 2, 4, 8, 16], (1, 10000), (8, 2), false, 1, Some(128), &[0]),
        (V02, 128, &[1, 2, 4, 8, 16], (1, 10000), (4, 4), true, 1, Some(128), &[0]),
        (V02, 128, &[1, 2, 4, 8, 16], (1, 10000), (4, 4), false, 1, Some(128), &[0]),
        (V02, 64, &[64], (1, 10000), (8, 1), true, 1, None, &[]),
        (V02, 64, &[64], (1, 10000), (8, 1), false, 1, None, &[]),
        (V02, 64, &[64], (1, 10000), (8, 2), true, 1, None, &[]),
        (V02, 64, &[64], (1, 10000), (8, 2), false, 1, None, &[]),
    ];

    #[test]
    fn both_versions_give_upstreams_results() {
        for &(version, max_batch, sizes, gpus, node, prefer_larger, world, batch, valid) in UPSTREAM
        {
            let elastic = Elastic {
                version,
                min_gpus: gpus.0,
                max_gpus: gpus.1,
                gpus_per_node: node.0,
                model_parallel: node.1,
                prefer_larger,
                ..elastic(max_batch, sizes)
            };
            let made = make(&elastic, world).ok();
            assert_eq!(
                made.as_ref().map(|made| made.batch),
                batch,
                "{elastic:?} {world}"
            );
            if let Some(made) = made {
                assert_eq!(made.valid, valid, "{elastic:?} {world}");
            }
        }
    }
}
