//! Known programs with deviating arguments. open-instruct's arguments have the names of
//! `TrainingArguments`, but another meaning or other defaults; those of ms-swift and qlora have other
//! defaults. HALOs' sampler and labeller run in training
//! scripts and have a `--batch_size`, but train nothing.
//!
//! Source: allenai/open-instruct e6c3044, `open_instruct/`: `grpo_fast.py` (`step`, where the number of
//! generated samples determines accumulation), `finetune.py` (`total_batch_size`), `reward_modeling.py` (`Args`),
//! `dpo.py` and `olmo_core_finetune.py` (`dp_world_size`).

use std::path::Path;

use super::transformers::MUST_BE_TYPED;
use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;

/// The names of transformers' examples that train with `Trainer` (transformers 5.23.0 `examples/pytorch`), of TRL's
/// scripts (1.16 `trl/scripts`, `examples/scripts`), of the handbook's, and of the one of open-instruct with these defaults,
/// without `.py`.
const UPSTREAM: Words = Words(
    "run_clm run_mlm run_plm run_fim run_glue run_xnli run_ner run_qa run_seq2seq_qa run_summarization run_translation \
     run_swag run_classification run_audio_classification run_image_classification run_mae run_mim \
     run_semantic_segmentation run_object_detection run_instance_segmentation run_speech_recognition_ctc \
     run_speech_recognition_seq2seq run_sft run_dpo run_orpo run_cpt sft dpo kto orpo cpo grpo rloo gkd reward \
     reward_modeling sft_gpt_oss sft_vlm dpo_vlm grpo_vlm online_dpo nash_md xpo prm bco ppo ppo_multi_adapter ppo_tldr \
     rloo_tldr finetune_trainer",
);

/// Whether a program has the name of one whose arguments are upstream's own.
pub(crate) fn is_upstreams(script: &Path) -> bool {
    let stem = script.file_stem().and_then(|stem| stem.to_str());
    stem.is_some_and(|stem| UPSTREAM.has(stem))
}

/// HALOs 4831988, `train/sample.py` and `train/label.py`: modules that only read the model.
const READERS: [&str; 2] = ["sample", "label"];

/// Programs that evaluate models of others.
const EVALUATING: [&str; 3] = ["lighteval", "lm_eval", "lmms_eval"];

/// Whether a program, given by its file or module, trains nothing.
pub(crate) fn trains_nothing(program: &str) -> bool {
    let module = program.strip_suffix(".py").unwrap_or(program);
    if module
        .split('.')
        .next()
        .is_some_and(|name| EVALUATING.contains(&name))
    {
        return true;
    }
    let mut parts = module.rsplit(['.', '/']);
    parts.next().is_some_and(|name| READERS.contains(&name)) && parts.next() == Some("train")
}

/// open-instruct's folder and Python package.
const FOLDER: &str = "open_instruct";

/// Name prefixes of open-instruct's programs that train on generated samples.
const GENERATING: [&str; 3] = ["grpo", "ppo", "online_dpo"];

/// Arguments that only those programs have.
const ROLLOUTS: [&str; 2] = [
    "num_unique_prompts_rollout",
    "num_samples_per_prompt_rollout",
];

/// The programs of ms-swift that train, by their command or their module. Its per-device batch is 1 by
/// default, and its accumulation ⌈16 / per-device batch / processes⌉, or 1 for GRPO (ms-swift 3602360
/// `swift/trainers/arguments.py`, `swift/arguments/rlhf_args.py`).
pub(crate) fn is_swift(script: &Path) -> bool {
    let text = script.to_str().unwrap_or_default().replace('/', ".");
    let text = text.strip_suffix(".py").unwrap_or(&text);
    let modules = ["swift.cli.pt", "swift.cli.rlhf", "swift.cli.sft"];
    text.rsplit('.').next() == Some("swift") || modules.iter().any(|module| text.ends_with(module))
}

/// Whether a program starts torchrun with the values of `NPROC_PER_NODE` and `NNODES`.
pub(crate) fn takes_torchruns_variables(program: &str) -> bool {
    ["swift", "llamafactory-cli", "lmf"].contains(&program.rsplit('/').next().unwrap_or_default())
}

/// Whether a program starts one process for each visible device.
pub(crate) fn takes_visible_devices(program: &str) -> bool {
    ["llamafactory-cli", "lmf"].contains(&program.rsplit('/').next().unwrap_or_default())
}

/// The arguments of ms-swift that its defaults add, for a number of processes. `None`: the number is unknown, so that
/// the accumulation is.
fn swift_defaults(arguments: &Node, processes: Option<u64>) -> Option<Vec<(&'static str, u64)>> {
    let [micro_batch, accumulation] = MUST_BE_TYPED;
    let mut defaults = Vec::new();
    // Versions 1 and 2 call it `batch_size` (ms-swift 2.6.1 `swift/llm/utils/argument.py`).
    let given = arguments
        .get(micro_batch)
        .or_else(|| arguments.get("batch_size"));
    let per_device: u64 = match given {
        Some(node) => node.text()?.parse().ok()?,
        None => 1,
    };
    if arguments.get(micro_batch).is_none() {
        defaults.push((micro_batch, per_device));
    }
    if arguments.get(accumulation).is_none() {
        let grpo = arguments.get("rlhf_type").and_then(Node::text) == Some("grpo");
        let default = match processes {
            _ if grpo => 1,
            Some(processes) => {
                16_u64.div_ceil(per_device.checked_mul(processes).filter(|all| *all > 0)?)
            }
            None => return None,
        };
        defaults.push((accumulation, default));
    }
    Some(defaults)
}

/// Replaces the name of one of ms-swift's own configs of DeepSpeed or FSDP by what it says (ms-swift 3.5.3
/// `swift/llm/argument/train_args.py`; 2.6.1 `swift/llm/utils/argument.py`; 3602360 `swift/config/fsdp2.json`).
fn take_swifts_sharding(arguments: &mut Node, key: &str) {
    let Some(node) = arguments.get(key).cloned() else {
        return;
    };
    let Some(name) = node.text() else { return };
    let stage = name.strip_prefix("default-").unwrap_or(name);
    let (strategy, offloads) = match stage {
        "fsdp2" => ("fsdp", false),
        "zero0" => ("ddp", false),
        "zero1" => ("zero1", false),
        "zero2" => ("zero2", false),
        "zero3" => ("fsdp", false),
        "zero2_offload" => ("zero2", true),
        "zero3_offload" => ("fsdp", true),
        _ => return,
    };
    arguments.remove_path(key);
    let path = |key: &str| format!("{RESERVED}.parallel.{key}");
    arguments.set_path(
        &path("strategy"),
        Node::string(strategy.to_owned(), node.span),
    );
    if offloads {
        let truth = || Node::plain("true".to_owned(), node.span);
        arguments.set_path(&path("offload_optimizer"), truth());
        if strategy == "fsdp" {
            arguments.set_path(&path("offload_parameters"), truth());
        }
    }
}

/// Completes or refuses the arguments of a program that do not set the batch as a `Trainer`'s do. `processes`: their
/// number where the program runs as written.
pub(crate) fn complete(
    script: &Path,
    span: Span,
    arguments: &mut Node,
    processes: Option<u64>,
    reading: &mut Reading,
) {
    if is_swift(script) {
        for key in ["deepspeed", "fsdp"] {
            take_swifts_sharding(arguments, key);
        }
        let Some(defaults) = swift_defaults(arguments, processes) else {
            let defaults = "ms-swift has another default, ⌈16 / per-device batch / processes⌉ for the accumulation";
            return require_batch(defaults, span, arguments, reading);
        };
        for (key, value) in defaults {
            let by_old_name = key == MUST_BE_TYPED[0] && arguments.get("batch_size").is_some();
            if by_old_name {
                arguments.set(key, span, Node::plain(value.to_string(), span));
                continue;
            }
            reading.note(
                "mandatory-missing",
                Some(span),
                format!("`{key}` is not given: ms-swift takes {value}"),
                "nothing to do: its per-device batch is 1 by default, and its accumulation ⌈16 / per-device batch / processes⌉, or 1 for GRPO",
            );
            arguments.set(key, span, Node::plain(value.to_string(), span));
        }
        return;
    }
    if script.file_stem().is_some_and(|stem| stem == "qlora") {
        let defaults = "qlora has other defaults, 1 and 16";
        return require_batch(defaults, span, arguments, reading);
    }
    let name = name(script);
    let rollout = ROLLOUTS.iter().any(|key| arguments.get(key).is_some());
    let generates = |name: &str| GENERATING.iter().any(|begin| name.starts_with(begin));
    let Some(name) = name.or(rollout.then_some("grpo_fast")) else {
        return;
    };
    if rollout || generates(name) {
        reading.batch_unknown(
            "unsupported-value",
            Some(span),
            format!(
                "open-instruct's `{name}` takes its batch from the generated samples and ignores \
                 `per_device_train_batch_size`: its batch is not supported"
            ),
            "set the batch in a native recipe, `batch: {global: B}`, and start it with the program after `--`",
        );
        return;
    }
    // This program uses `Trainer` with its defaults; all others have different ones.
    if name == "finetune_trainer" {
        return;
    }
    let defaults = format!("open-instruct's `{name}` has other defaults than `TrainingArguments`");
    require_batch(&defaults, span, arguments, reading);
}

/// Requires both batch numbers of a program whose defaults are not those of `TrainingArguments`.
fn require_batch(defaults: &str, span: Span, arguments: &Node, reading: &mut Reading) {
    for key in MUST_BE_TYPED {
        if arguments.get(key).is_none() {
            reading.batch_unknown(
                "mandatory-missing",
                Some(span),
                format!("{defaults}: `{key}` is unknown"),
                format!("add `--{key} N`"),
            );
        }
    }
}

/// The name of an open-instruct program without its extension: `dpo` for `open_instruct/dpo.py` or the
/// module `open_instruct.dpo`. `None` for other programs.
fn name(script: &Path) -> Option<&str> {
    let script = script.to_str()?;
    let script = script.strip_suffix(".py").unwrap_or(script);
    let mut parts = script.rsplit(['/', '.']);
    let name = parts.next()?;
    (parts.next() == Some(FOLDER)).then_some(name)
}

#[cfg(test)]
mod tests {
    use crate::recipe::tests::{messages, read_command};

    fn first_problem(line: &str) -> String {
        let error = read_command(line).expect_err(line);
        let problem = &error.diagnostics[0];
        format!("{} {}", problem.rule, problem.message)
    }

    #[test]
    fn a_program_that_trains_on_generated_samples_is_refused() {
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
    fn a_program_with_other_defaults_needs_both_batch_numbers() {
        let line = "accelerate launch --num_processes 8 open_instruct/finetune.py \
                    --per_device_train_batch_size 1";
        let missing = "`gradient_accumulation_steps` is unknown";
        assert!(first_problem(line).ends_with(missing));
        let typed = format!("{line} --gradient_accumulation_steps 4");
        let batch = read_command(&typed).unwrap().spec.batch;
        let numbers = (batch.per_device_batch_size, batch.accumulation, batch.gpus);
        assert_eq!(numbers, (Some(1), Some(4), Some(8)));
        let divided = first_problem(&format!("{typed} --sequence_parallel_size 2"));
        assert!(
            divided.contains("divides the data-parallel ranks"),
            "{divided}"
        );
        assert!(read_command(&format!("{typed} --sequence_parallel_size 1")).is_ok());
    }

    #[test]
    fn other_programs_with_these_names_are_not_refused() {
        let line = "torchrun --nproc_per_node 2 finetune.py --per_device_train_batch_size 1";
        assert_eq!(read_command(line).unwrap().spec.batch.accumulation, Some(1));
        let line = "python open_instruct/finetune_trainer.py --do_train --seed 1";
        assert_eq!(
            read_command(line).unwrap().spec.batch.per_device_batch_size,
            Some(8)
        );
    }
    /// Reduced from `examples/train/lora_sft.sh` of ms-swift and `scripts/generate.sh` of qlora.
    #[test]
    fn defaults_of_another_project_are_not_those_of_a_trainer() {
        for (line, expected) in [
            (
                "swift sft --model m --per_device_train_batch_size 1",
                "ms-swift has another default, ⌈16 / per-device batch / processes⌉ for the accumulation: \
                 `gradient_accumulation_steps` is unknown",
            ),
            (
                "python qlora.py --do_train True --per_device_train_batch_size 2",
                "qlora has other defaults, 1 and 16: `gradient_accumulation_steps` is unknown",
            ),
            (
                "python qlora.py --model_name_or_path m --do_train False --do_predict True",
                "`do_train` is false: this command trains nothing",
            ),
        ] {
            assert!(
                messages(read_command(line)).contains(&expected.to_owned()),
                "{line}"
            );
        }
        for (line, expected) in [
            (
                "swift sft --model m --per_device_train_batch_size 1 --gradient_accumulation_steps 4",
                (1, 4),
            ),
            (
                "NPROC_PER_NODE=2 swift sft --model_id_or_path m --batch_size 4 --deepspeed default-zero3",
                (4, 2),
            ),
            (
                "torchrun --nproc_per_node 2 swift/cli/sft.py --gradient_accumulation_steps 4 --do_train",
                (1, 4),
            ),
            (
                "NPROC_PER_NODE=4 swift sft --model m --per_device_train_batch_size 2",
                (2, 2),
            ),
            ("NPROC_PER_NODE=3 swift pt --model m", (1, 6)),
            ("NPROC_PER_NODE=32 swift pt --model m --fsdp fsdp2", (1, 1)),
            ("swift rlhf --rlhf_type grpo --model m", (1, 1)),
        ] {
            let batch = read_command(line).unwrap().spec.batch;
            let numbers = (batch.per_device_batch_size, batch.accumulation);
            assert_eq!(numbers, (Some(expected.0), Some(expected.1)), "{line}");
        }
    }
}
