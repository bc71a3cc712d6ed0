//! Duration of a checkpoint of 8.4 million parameters, without assertions. Run it alone with `cargo test
//! --lib checkpoint::tests::speed -- --ignored --nocapture`. It uses the directory `$EVENKEEL_RUN`, or the
//! system's temporary directory.

use std::time::{Duration, Instant};

use super::*;
use crate::checkpoint::unit_file::unit_shapes;
use crate::checkpoint::unit_file::{self, Content};

fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed())
}

#[test]
#[ignore = "a measurement"]
fn eight_million_parameters() {
    let model = ModelConfig {
        hidden_size: 256,
        intermediate_size: 688,
        num_hidden_layers: 8,
        num_attention_heads: 8,
        num_key_value_heads: 8,
        head_dim: 32,
        vocab_size: 4096,
        max_position_embeddings: 256,
        ..config()
    };
    let layout = layout(&model);
    let units = layout.units.len();
    let place = std::env::var_os("EVENKEEL_RUN").map_or_else(std::env::temp_dir, PathBuf::from);
    let run = tempfile::tempdir_in(place).unwrap();
    for step in 1..=5 {
        let states: Vec<_> = (0..units).map(|u| unit_state(&layout, u, step)).collect();
        let target = target(run.path(), 1, step);

        let shapes = unit_shapes(&layout);
        let (files, writing) = timed(|| {
            let write = |(unit, state): (usize, &UnitState)| {
                let (header, _) = Content::Moments.header(&shapes[unit]).unwrap();
                let path = run.path().join(format!("moments-{unit}"));
                unit_file::write(&path, &header, Content::Moments, state).unwrap()
            };
            states.iter().enumerate().map(write).collect::<Vec<_>>()
        });
        let ((), syncing) = timed(|| files.iter().for_each(|(file, _)| file.sync_all().unwrap()));

        let writer = Writer::begin(&target, &layout, 0, 1);
        let ((), handing_over) = timed(|| {
            for (unit, state) in states.into_iter().enumerate() {
                writer.write_unit(unit, state);
            }
        });
        let (part, finishing) = timed(|| writer.finish().unwrap());
        let (committed, committing) = timed(|| commit_parts(&target, &layout, &[part]).unwrap());
        let (_, verifying) = timed(|| Checkpoint::open(&committed.path, None).unwrap());
        let (_, loading) = timed(|| {
            let checkpoint = Checkpoint::open_lazily(&committed.path, None).unwrap();
            (0..units).for_each(|unit| drop(checkpoint.load_unit(unit).unwrap()));
        });
        println!(
            "moments only: write {writing:.1?}, fsync {syncing:.1?}; all of {} parameters: hand \
             over {handing_over:.1?}, finish {finishing:.1?}, commit {committing:.1?}, verify \
             {verifying:.1?}, load and verify {loading:.1?}",
            layout.len()
        );
    }
}
