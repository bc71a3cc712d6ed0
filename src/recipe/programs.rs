//! Programs that are known, whose arguments are spelled as `TrainingArguments`' are and mean another
//! batch, or have other defaults: those of open-instruct. And programs that stand beside a training in
//! its script and have a `--batch_size` of their own: HALOs' sampler and labeller.
//!
//! Source: allenai/open-instruct e6c3044, `open_instruct/`: `grpo_fast.py` (`step`, where accumulation
//! follows from what was generated), `finetune.py` (`total_batch_size`), `reward_modeling.py` (`Args`),
//! `dpo.py` and `olmo_core_finetune.py` (`dp_world_size`).

use std::path::Path;

use super::node::Node;
use super::reading::Reading;
use super::source::Span;
use super::transformers::MUST_BE_TYPED;

/// HALOs 4831988, `train/sample.py` and `train/label.py`: modules that only read the model.
const READERS: [&str; 2] = ["sample", "label"];

/// Whether a program, by its file or its module, is known to train nothing.
pub(super) fn trains_nothing(program: &str) -> bool {
    let module = program.strip_suffix(".py").unwrap_or(program);
    let mut parts = module.rsplit(['.', '/']);
    parts.next().is_some_and(|name| READERS.contains(&name)) && parts.next() == Some("train")
}

/// The folder of its programs, and their package.
const FOLDER: &str = "open_instruct";

/// Beginnings of the names of those that train on what they generate.
const GENERATING: [&str; 3] = ["grpo", "ppo", "online_dpo"];

/// Arguments that only those have.
const ROLLOUTS: [&str; 2] = [
    "num_unique_prompts_rollout",
    "num_samples_per_prompt_rollout",
];

/// Arguments by which the ranks that have a batch of their own are fewer than the processes.
const AXES: [&str; 4] = [
    "sequence_parallel_size",
    "tensor_parallel_degree",
    "context_parallel_degree",
    "cp_degree",
];

/// Refuses a program whose batch its arguments do not say as a `Trainer`'s do.
pub(super) fn refuse(script: &Path, span: Span, arguments: &Node, reading: &mut Reading) {
    let name = name(script);
    let rollout = ROLLOUTS.iter().any(|key| arguments.get(key).is_some());
    let generates = |name: &str| GENERATING.iter().any(|begin| name.starts_with(begin));
    let Some(name) = name.or(rollout.then_some("grpo_fast")) else {
        return;
    };
    if rollout || generates(name) {
        reading.error(
            "unsupported-value",
            Some(span),
            format!(
                "open-instruct's `{name}` steps on a share of what it has generated, whatever \
                 `per_device_train_batch_size` is: its batch is not read here"
            ),
            "say it in a native recipe, `batch: {global: B}`, and start that with the program after `--`",
        );
        return;
    }
    // A `Trainer` with its defaults, and all others with their own.
    if name == "finetune_trainer" {
        return;
    }
    for key in MUST_BE_TYPED {
        if arguments.get(key).is_none() {
            reading.error(
                "mandatory-missing",
                Some(span),
                format!(
                    "open-instruct's `{name}` has defaults of its own: what it takes for `{key}` is not known"
                ),
                format!("type `--{key} N`"),
            );
        }
    }
    for key in AXES {
        let Some(size) = arguments.get(key).filter(|size| size.text() != Some("1")) else {
            continue;
        };
        reading.error(
            "unsupported-value",
            Some(size.span),
            format!("`{key}` of open-instruct's `{name}` divides its ranks, and is not read here"),
            "say the batch in a native recipe, `batch: {global: B}` beside `parallel`, and start that with \
             the program after `--`",
        );
    }
}

/// The program's name without its ending, where it is one of the folder's: `open_instruct/dpo.py`, or the
/// module `open_instruct.dpo`.
fn name(script: &Path) -> Option<&str> {
    let script = script.to_str()?;
    let script = script.strip_suffix(".py").unwrap_or(script);
    let mut parts = script.rsplit(['/', '.']);
    let name = parts.next()?;
    (parts.next() == Some(FOLDER)).then_some(name)
}

#[cfg(test)]
mod tests {
    use crate::recipe::tests::told;

    fn first_problem(line: &str) -> String {
        let error = told(line).expect_err(line);
        let problem = &error.diagnostics[0];
        format!("{} {}", problem.rule, problem.message)
    }

    /// `scripts/train/qwen/grpo_fast_3b_single_node.sh`, cut short.
    #[test]
    fn a_program_that_steps_on_what_it_generates_says_no_batch_per_device() {
        for (program, name) in [
            ("open_instruct/grpo_fast.py", "grpo_fast"),
            ("-m open_instruct.grpo_fast", "grpo_fast"),
            ("open_instruct/ppo_vllm_thread_ray_gtrl.py", "ppo_vllm"),
            ("my_grpo.py --num_unique_prompts_rollout 48", "grpo_fast"),
        ] {
            let line = format!(
                "python {program} --per_device_train_batch_size 1 --gradient_accumulation_steps 1 \
                 --num_mini_batches 1"
            );
            let problem = first_problem(&line);
            let expected = format!("unsupported-value open-instruct's `{name}");
            assert!(problem.starts_with(&expected), "{problem}");
        }
    }

    #[test]
    fn a_loop_with_defaults_of_its_own_is_read_where_both_numbers_are_typed() {
        let line = "accelerate launch --num_processes 8 open_instruct/finetune.py \
                    --per_device_train_batch_size 1";
        let missing = "`gradient_accumulation_steps` is not known";
        assert!(first_problem(line).ends_with(missing));
        let typed = format!("{line} --gradient_accumulation_steps 4");
        let batch = told(&typed).unwrap().spec.batch;
        let numbers = (batch.micro, batch.accumulation, batch.gpus);
        assert_eq!(numbers, (Some(1), Some(4), Some(8)));
        let divided = first_problem(&format!("{typed} --sequence_parallel_size 2"));
        assert!(divided.contains("divides its ranks"), "{divided}");
        assert!(told(&format!("{typed} --sequence_parallel_size 1")).is_ok());
    }

    #[test]
    fn others_of_these_names_are_nobodys_business() {
        let line = "torchrun --nproc_per_node 2 finetune.py --per_device_train_batch_size 1";
        assert_eq!(told(line).unwrap().spec.batch.accumulation, Some(1));
        let line = "python open_instruct/finetune_trainer.py --do_train --seed 1";
        assert_eq!(told(line).unwrap().spec.batch.micro, Some(8));
    }
}
