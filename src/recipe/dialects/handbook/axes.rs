//! Sizes of axes that are not read. They divide the data-parallel ranks, so the batch depends on them.

use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::Node;
use crate::util::suggest::short;

/// Names without `parallel` that several projects give to such a size.
const SHORT: [&str; 4] = ["cp_degree", "cp_size", "pp_size", "sp_size"];

/// Whether a key is the size of an axis of the trainer. The sizes of inference engines do not divide its
/// ranks.
pub(crate) fn is_size(key: &str) -> bool {
    const ENGINES: [&str; 3] = ["rollout", "sglang", "vllm"];
    let named = key.contains("parallel") && (key.ends_with("size") || key.ends_with("degree"));
    (named || SHORT.contains(&key)) && !ENGINES.iter().any(|engine| key.starts_with(engine))
}

/// Refuses a size above 1 unless the user states the axes with native keys.
pub(super) fn refuse_unread(root: &Node, reading: &mut Reading) {
    if root.get_path(&format!("{RESERVED}.parallel")).is_some() {
        return;
    }
    for entry in root.entries().unwrap_or_default() {
        let text = entry.value.text().unwrap_or(entry.value.kind());
        if !is_size(&entry.name) || ["1", "", "null", "None"].contains(&text) {
            continue;
        }
        reading.error(
            "unsupported-value",
            Some(entry.value.span),
            format!(
                "`{}` is {}: it divides the data-parallel ranks and is not read",
                entry.name,
                short(text)
            ),
            "state the axes as `evenkeel.parallel.sequence=N` (`tensor`, `pipeline`, `context`); the batch follows",
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::recipe::tests::{messages, read_command};

    /// Reduced from `examples/train/sequence_parallel/` of ms-swift and from LLaMA-Factory.
    #[test]
    fn an_unread_size_of_an_axis_is_refused() {
        let line = "torchrun --nproc_per_node 8 t.py --per_device_train_batch_size 1";
        for option in [
            "--sequence_parallel_size 4",
            "--context-parallel-size=2",
            "--pipeline_model_parallel_size 2",
            "--hyper_parallel_cp_size 2",
            "--sp_size 2",
        ] {
            let problems = messages(read_command(&format!("{line} {option}")));
            assert_eq!(problems.len(), 1, "{problems:?}");
            assert!(problems[0].ends_with("it divides the data-parallel ranks and is not read"));
        }
        for option in [
            "--sequence_parallel_size 1",
            "--vllm_tensor_parallel_size 4",
        ] {
            let batch = read_command(&format!("{line} {option}"))
                .unwrap()
                .spec
                .batch;
            assert_eq!(
                (batch.per_device_batch_size, batch.gpus),
                (Some(1), Some(8)),
                "{option}"
            );
        }
    }
}
