//! PPO as TRL had it before 0.12: a `PPOConfig` that is no `TrainingArguments`, whose trainer steps on
//! `mini_batch_size` × `gradient_accumulation_steps` × processes. The defaults changed from version to
//! version, so a number that nobody typed is not known, and none of the newer trainer's is meant.
//!
//! Sources: TRL 0.3.0 to 0.11.4 `trainer/ppo_config.py`, 0.9.6 `trainer/ppo_trainer.py` (`__init__`,
//! `step`), `examples/scripts/ppo.py`.

use std::path::Path;

use crate::recipe::node::Node;
use crate::recipe::reading::Reading;

/// Fields of the older `PPOConfig` that the newer one has not.
const FIELDS: [&str; 31] = [
    "accelerator_kwargs",
    "adap_kl_ctrl",
    "backward_batch_size",
    "compare_steps",
    "early_stopping",
    "forward_batch_size",
    "horizon",
    "init_kl_coef",
    "kl_penalty",
    "log_with",
    "model_name",
    "optimize_cuda_cache",
    "optimize_device_cache",
    "ppo_epochs",
    "project_kwargs",
    "push_to_hub_if_best_kwargs",
    "query_dataset",
    "ratio_threshold",
    "reward_model",
    "score_clip",
    "steps",
    "target",
    "target_kl",
    "task_name",
    "tracker_kwargs",
    "tracker_project_name",
    "use_score_norm",
    "use_score_scaling",
    // Those of its example script.
    "use_seq2seq",
    // Numbers of its batch, which the newer trainer works out itself, whatever is typed.
    "batch_size",
    "mini_batch_size",
];

/// Fields that say the newer trainer's batch; the older scripts refuse them.
const NEWER: [&str; 2] = ["per_device_train_batch_size", "per_gpu_train_batch_size"];

/// Its scripts, which the newer trainer's are not called like.
const SCRIPTS: [&str; 2] = ["examples/scripts/ppo.py", "ppo_multi_adapter.py"];

/// Refuses a PPO recipe that is for the older trainer; whether it is one.
pub(super) fn refuse(root: &Node, path: &Path, reading: &mut Reading) -> bool {
    let entries = root.entries().unwrap_or_default();
    let named = |names: &[&str]| {
        let mut entries = entries.iter();
        entries.find(|entry| names.contains(&entry.name.as_str()))
    };
    if named(&NEWER).is_some() {
        return false;
    }
    let (told, span) = match named(&FIELDS) {
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
            "{told} is of TRL's PPO before 0.12, which steps on `mini_batch_size` × \
             `gradient_accumulation_steps` × processes: its batch is not read here"
        ),
        "say what a step takes, `--dialect transformers --global-batch-size B`; PPO since 0.12 is told \
         `per_device_train_batch_size`",
    );
    true
}

#[cfg(test)]
mod tests {
    use crate::recipe::{Dialect, ReadError, Recipe, Request, read};

    fn told(line: &str, dialect: Option<Dialect>) -> Result<Recipe, ReadError> {
        read(&Request {
            command: line.split(' ').map(str::to_owned).collect(),
            dialect,
            ..Request::default()
        })
    }

    /// Calls out of `examples/scripts/ppo.py` and `docs/source/ppo_trainer.mdx` of 0.9.6, and of scripts
    /// grown from it.
    #[test]
    fn the_older_trainer_is_not_planned_with_the_newer_ones_batch() {
        for arguments in [
            "examples/scripts/ppo.py --log_with=wandb",
            "examples/scripts/ppo.py",
            "ppo.py --mini_batch_size 4 --batch_size 128 --log_with wandb",
            "my/ppo.py --batch_size 128 --gradient_accumulation_steps 4",
            "ppo.py --ppo_epochs 4 --num_train_epochs 1",
            "ppo_multi_adapter.py --use_peft",
        ] {
            let line = format!("accelerate launch --num_processes 4 {arguments}");
            let error = told(&line, None).expect_err(arguments);
            let [problem] = error.diagnostics.as_slice() else {
                panic!("{arguments}: {:?}", error.diagnostics);
            };
            assert_eq!(problem.rule, "unsupported-value", "{arguments}");
            assert!(problem.message.contains("PPO before 0.12"), "{arguments}");
            // The way out that is named: whoever knows the batch says it.
            let recipe = told(&line, Some(Dialect::Transformers)).unwrap();
            let batch = &recipe.spec.batch;
            assert_eq!((batch.micro, batch.gpus), (None, Some(4)), "{arguments}");
        }
    }

    #[test]
    fn the_newer_trainer_is_told_its_batch_per_device() {
        for (arguments, micro) in [
            ("examples/scripts/ppo/ppo.py --num_ppo_epochs 1", 8),
            ("ppo.py --per_device_train_batch_size 4 --log_with x", 4),
        ] {
            let line = format!("accelerate launch --num_processes 4 {arguments}");
            let batch = told(&line, None).unwrap().spec.batch;
            assert_eq!(batch.micro, Some(micro), "{arguments}");
        }
    }
}
