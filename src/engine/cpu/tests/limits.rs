//! Limits: of memory and of the model's shape.

use super::*;

#[test]
fn the_memory_limit_is_known_before_the_first_step() {
    let batch = Batch::new(4, 40);
    let mut free = engine(config());
    let model = free.memory().0;
    free.reserve(4, 40).unwrap();
    free.accumulate(batch.micro_batch(), EVERYTHING, true)
        .unwrap();
    let needed = free.memory().0;

    let limited = |limit| {
        let options = CpuOptions {
            memory_limit: Some(limit),
            measure: EVERYTHING,
            ..CpuOptions::default()
        };
        CpuEngine::new(config(), options, None, Some(5))
    };
    let refused = |error| matches!(error, Err(EngineError::OutOfMemory { .. }));
    assert!(refused(limited(model - 1).map(drop)));

    // The reserved memory is exactly enough for the whole step.
    let mut exact = limited(needed).unwrap();
    exact.reserve(4, 40).unwrap();
    exact
        .accumulate(batch.micro_batch(), EVERYTHING, true)
        .unwrap();
    exact.reduce(EVERYTHING).unwrap();
    exact.update(REVEAL).unwrap();
    exact.evaluate(batch.micro_batch()).unwrap();
    assert_eq!(exact.memory(), (needed, needed));

    // One byte less is refused and leaves nothing allocated; a smaller micro-batch still works.
    let mut short = limited(needed - 1).unwrap();
    assert!(refused(short.reserve(4, 40)));
    assert_eq!(short.memory().0, model);
    short.reserve(2, 40).unwrap();
    let after = short.memory().0;
    short
        .accumulate(batch.part(0, 2), EVERYTHING, true)
        .unwrap();
    assert_eq!(short.memory().0, after);
}

#[test]
fn sizes_beyond_a_limit_are_refused_with_a_message() {
    let mut engine = engine(config());
    let mut batch = Batch::new(2, 20);
    let mut say = |micro_batch: MicroBatch<'_>| {
        let error = engine.accumulate(micro_batch, NOTHING, true).unwrap_err();
        assert_eq!(
            engine.evaluate(micro_batch).unwrap_err().to_string(),
            error.to_string()
        );
        error.to_string()
    };
    let whole = batch.micro_batch();
    let mut messages = vec![
        say(MicroBatch { batch: 3, ..whole }),
        say(MicroBatch {
            targets: &whole.targets[1..],
            ..whole
        }),
        say(MicroBatch {
            tokens: &[],
            targets: &[],
            batch: 0,
            seq_len: 20,
            ..MicroBatch::default()
        }),
        say(MicroBatch {
            batch: usize::MAX,
            seq_len: 2,
            ..whole
        }),
        say(MicroBatch {
            batch: 1,
            seq_len: 129,
            ..whole
        }),
    ];
    batch.targets[7] = 30;
    messages.push(say(batch.micro_batch()));
    batch.tokens[7] = 31;
    messages.push(say(batch.micro_batch()));
    messages.push(engine.reserve(0, 20).unwrap_err().to_string());
    messages.push(engine.reserve(1, 1000).unwrap_err().to_string());
    messages.push(engine.export(9, true).unwrap_err().to_string());
    let mut state = engine.export(1, true).unwrap().unwrap();
    state.exp_avg.pop();
    messages.push(engine.import(1, &state).unwrap_err().to_string());
    let odd = ModelConfig {
        head_dim: 5,
        ..config()
    };
    let error = CpuEngine::new(odd, CpuOptions::default(), None, Some(0)).map(drop);
    messages.push(error.unwrap_err().to_string());
    insta::assert_snapshot!(messages.join("\n"));
}
