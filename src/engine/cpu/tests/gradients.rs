//! Gradients of the chunks of the head.

use super::*;

#[test]
fn chunks_of_the_head_give_the_whole_batchs_loss_and_gradient() {
    // The vocabulary is so large that the whole batch's logits take two chunks and one row's take one.
    for config in [config(), tied()] {
        let config = ModelConfig {
            vocab_size: 20_000,
            ..config
        };
        let batch = Batch::new(3, 70);
        let mut engine = engine(config);
        let (loss, whole) = gradient_of(&mut engine, batch.micro_batch());
        let head_rows = engine.workspace.as_ref().unwrap().shared.head_rows;
        assert!((71..140).contains(&head_rows), "{head_rows}");
        let evaluated = engine.evaluate(batch.micro_batch()).unwrap();
        assert_eq!(evaluated, (loss, 70 + 35 + 70));
        let mut sum = 0.0;
        for row in 0..3 {
            let micro_batch = batch.part(row, row + 1);
            sum += engine
                .accumulate(micro_batch, NOTHING, row == 2)
                .unwrap()
                .loss;
        }
        assert!((sum - loss).abs() < 1e-6 * loss);
        assert_close(&whole, &take_gradient(&mut engine), 1e-5);
    }
}
