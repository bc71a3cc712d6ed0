//! PPO of TRL before 0.12. Its `PPOConfig` is no `TrainingArguments`, and its trainer steps on
//! `mini_batch_size` × `gradient_accumulation_steps` × processes. The defaults differ between
//! versions, so a number that the recipe does not state is unknown. The newer trainer's defaults do
//! not apply.
//!
//! Sources: TRL 0.3.0 to 0.11.4 `trainer/ppo_config.py`, 0.9.6 `trainer/ppo_trainer.py` (`__init__`,
//! `step`), `examples/scripts/ppo.py`.

use std::path::Path;

use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::words::Words;

/// Fields of the older `PPOConfig` that the newer one lacks; `use_seq2seq` of its example script; and the last two,
/// fields of its batch, which the newer trainer computes and ignores as arguments.
const FIELDS: Words = Words(
    "accelerator_kwargs adap_kl_ctrl backward_batch_size compare_steps early_stopping \
     forward_batch_size horizon init_kl_coef kl_penalty log_with model_name optimize_cuda_cache \
     optimize_device_cache ppo_epochs project_kwargs push_to_hub_if_best_kwargs query_dataset \
     ratio_threshold reward_model score_clip steps target target_kl task_name tracker_kwargs \
     tracker_project_name use_score_norm use_score_scaling use_seq2seq batch_size \
     mini_batch_size",
);

/// Batch fields of the newer trainer; the older scripts refuse them.
const NEWER: Words = Words("per_device_train_batch_size per_gpu_train_batch_size");

/// The older trainer's scripts, by names that the newer trainer's scripts do not have.
const SCRIPTS: [&str; 2] = ["examples/scripts/ppo.py", "ppo_multi_adapter.py"];

/// Refuses a PPO recipe for the older trainer; returns whether it did.
pub(super) fn refuse(root: &Node, path: &Path, reading: &mut Reading) -> bool {
    let entries = root.entries().unwrap_or_default();
    let named = |names: Words| entries.iter().find(|entry| names.has(&entry.name));
    if named(NEWER).is_some() {
        return false;
    }
    let (evidence, span) = match named(FIELDS) {
        Some(entry) => (format!("`{}`", entry.name), entry.name_span),
        None if SCRIPTS.iter().any(|script| path.ends_with(script)) => {
            (format!("`{}`", path.display()), root.span)
        }
        None => return false,
    };
    reading.error(
        "unsupported-value",
        Some(span),
        format!(
            "{evidence} belongs to TRL's PPO before 0.12, which steps on `mini_batch_size` × \
             `gradient_accumulation_steps` × processes: its batch rules are not known here"
        ),
        "state the global batch with `--dialect transformers --global-batch-size B`; PPO since 0.12 takes \
         `per_device_train_batch_size`",
    );
    true
}

#[cfg(test)]
mod tests {
    use crate::recipe::schema::dialect::Dialect;
    use crate::recipe::schema::request::Request;
    use crate::recipe::{ReadError, Recipe, read};

    fn read_command(line: &str, dialect: Option<Dialect>) -> Result<Recipe, ReadError> {
        read(&Request {
            command: line.split(' ').map(str::to_owned).collect(),
            dialect,
            ..Request::default()
        })
    }

    /// Commands from `examples/scripts/ppo.py` and `docs/source/ppo_trainer.mdx` of 0.9.6, and from
    /// scripts derived from them.
    #[test]
    fn a_recipe_for_the_older_trainer_is_refused() {
        for arguments in [
            "examples/scripts/ppo.py --log_with=wandb",
            "examples/scripts/ppo.py",
            "ppo.py --mini_batch_size 4 --batch_size 128 --log_with wandb",
            "my/ppo.py --batch_size 128 --gradient_accumulation_steps 4",
            "ppo.py --ppo_epochs 4 --num_train_epochs 1",
            "ppo_multi_adapter.py --use_peft",
        ] {
            let line = format!("accelerate launch --num_processes 4 {arguments}");
            let error = read_command(&line, None).expect_err(arguments);
            let [problem] = error.diagnostics.as_slice() else {
                panic!("{arguments}: {:?}", error.diagnostics);
            };
            assert_eq!(problem.rule, "unsupported-value", "{arguments}");
            assert!(problem.message.contains("PPO before 0.12"), "{arguments}");
            // The way out that the message names: state the global batch.
            let recipe = read_command(&line, Some(Dialect::Transformers)).unwrap();
            let batch = &recipe.spec.batch;
            assert_eq!(
                (batch.per_device_batch_size, batch.gpus),
                (None, Some(4)),
                "{arguments}"
            );
        }
    }

    #[test]
    fn a_recipe_for_the_newer_trainer_states_its_batch_per_device() {
        for (arguments, per_device_batch_size) in [
            ("examples/scripts/ppo/ppo.py --num_ppo_epochs 1", 8),
            ("ppo.py --per_device_train_batch_size 4 --log_with x", 4),
        ] {
            let line = format!("accelerate launch --num_processes 4 {arguments}");
            let batch = read_command(&line, None).unwrap().spec.batch;
            assert_eq!(
                batch.per_device_batch_size,
                Some(per_device_batch_size),
                "{arguments}"
            );
        }
    }
}
