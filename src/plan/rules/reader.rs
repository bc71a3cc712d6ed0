//! Pages of the rules that the recipe readers check before planning. The checks are in
//! `crate::recipe`; a test compares both lists.

use super::{Check, Example, Rule, file, native};
use crate::recipe::Severity;

/// A rule's page, one line for each field.
macro_rules! page {
    (
        $id:literal $severity:ident
        summary $summary:literal
        wrong $wrong:expr;
        right $right:expr;
    ) => {
        &Rule {
            id: $id,
            severity: Severity::$severity,
            summary: $summary,
            text: include_str!(concat!("texts/", $id, ".md")),
            wrong: $wrong,
            right: $right,
            check: Check::Reader,
        }
    };
}

/// An SFT recipe of the alignment-handbook for 8 GPUs, with these keys in addition.
const fn handbook(flags: &'static str, keys: &'static str) -> Example {
    let text = "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n\
                evenkeel:\n  objective: sft\n  batch: {gpus: 8}\n";
    file(flags, text).and(keys)
}

/// A config of direct-preference-optimization without groups, with these keys in addition.
const fn dpo(flags: &'static str, keys: &'static str) -> Example {
    let text = "trainer: FSDPTrainer\nbatch_size: 64\ngradient_accumulation_steps: 2\n\
                eval_batch_size: 32\n";
    file(flags, text).and(keys)
}

pub(super) static RULES: &[&Rule] = &[
    page! {
        "accumulation-conflict" Error
        summary "two places of a job state different accumulations"
        wrong handbook("--gpus 8", "deepspeed: {gradient_accumulation_steps: 2, zero_optimization: {stage: 2}}\n");
        right handbook("--gpus 8", "deepspeed: {gradient_accumulation_steps: auto, zero_optimization: {stage: 2}}\n");
    },
    page! {
        "adapter-unused" Warning
        summary "sizes of an adapter are given, and nothing asks for an adapter"
        wrong handbook("--gpus 8", "lora_r: 16\n");
        right handbook("--gpus 8", "lora_r: 16\nuse_peft: true\n");
    },
    page! {
        "config-missing" Error
        summary "a config group has no such option"
        wrong dpo("--gpus 8 --dialect dpo", "defaults:\n- _self_\n- model: llama\n");
        right dpo("--gpus 8 --dialect dpo", "defaults:\n- _self_\n- optional model: llama\n");
    },
    page! {
        "deepspeed-conflict" Error
        summary "the DeepSpeed config and the trainer state different values"
        wrong handbook("--gpus 8", "deepspeed: {gradient_clipping: 0.5, zero_optimization: {stage: 2}}\n");
        right handbook("--gpus 8", "deepspeed: {gradient_clipping: auto, zero_optimization: {stage: 2}}\n");
    },
    page! {
        "deepspeed-unread" Warning
        summary "the DeepSpeed config that the recipe names does not exist"
        wrong handbook("--gpus 8", "deepspeed: nowhere/zero3.json\n");
        right handbook("--gpus 8", "deepspeed: {zero_optimization: {stage: 3}}\n");
    },
    page! {
        "defaults-list" Error
        summary "a defaults list is not well-formed, or contains a cycle"
        wrong dpo("--gpus 8 --dialect dpo", "defaults: {model: llama}\n");
        right dpo("--gpus 8 --dialect dpo", "defaults:\n- _self_\n");
    },
    page! {
        "duplicate-key" Error
        summary "a mapping or a command line has a key twice"
        wrong handbook("--gpus 8", "learning_rate: 2.0e-05\nlearning_rate: 1.0e-05\n");
        right handbook("--gpus 8", "learning_rate: 2.0e-05\n");
    },
    page! {
        "gpu-count-conflict" Warning
        summary "two places state different numbers of processes or GPUs"
        wrong file("--gpus 8 -- accelerate launch --num_processes 8 train.py", "distributed_type: MULTI_GPU\nnum_processes: 4\nevenkeel:\n  batch: {global: 32, per_device_batch_size: 4}\n");
        right file("--gpus 4 -- accelerate launch --num_processes 4 train.py", "distributed_type: MULTI_GPU\nnum_processes: 4\nevenkeel:\n  batch: {global: 32, per_device_batch_size: 4}\n");
    },
    page! {
        "mandatory-missing" Error
        summary "a key without a default is missing"
        wrong file("--gpus 8", "apiVersion: evenkeel.dev/v1alpha1\nspec:\n  batch: {global: 128, per_device_batch_size: 16}\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "interpolation" Error
        summary "an interpolation cannot be resolved"
        wrong dpo("--gpus 8 --dialect dpo", "cache_dir: ${run_dir}\nrun_dir: ${cache_dir}\n");
        right dpo("--gpus 8 --dialect dpo", "cache_dir: ${run_dir}\nrun_dir: .cache\n");
    },
    page! {
        "objective-assumed" Warning
        summary "the recipe does not state its objective"
        wrong file("--gpus 8 --recipe-gpus 8", "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n");
        right file("--gpus 8 --recipe-gpus 8 evenkeel.objective=sft", "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n");
    },
    page! {
        "out-of-range" Error
        summary "a number is outside of its range"
        wrong native("--gpus 8", "  batch: {global: 0, per_device_batch_size: 16}\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "override-syntax" Error
        summary "an override of a Hydra config is not well-formed"
        wrong dpo("--gpus 8 --dialect dpo datasets=hh,shp", "datasets: [hh]\n");
        right dpo("--gpus 8 --dialect dpo datasets=[hh,shp]", "datasets: [hh]\n");
    },
    page! {
        "resume-restores-batch" Warning
        summary "resuming upstream may restore another per-device batch"
        wrong handbook("--gpus 8", "resume_from_checkpoint: out/checkpoint-100\n");
        right handbook("--gpus 8", "");
    },
    page! {
        "run-name" Error
        summary "the run's name or directory cannot be used"
        wrong file("--gpus 8", "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nmetadata: {name: ../../elsewhere}\nspec:\n  batch: {global: 128, per_device_batch_size: 16}\n");
        right file("--gpus 8", "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nmetadata: {name: my-run-2}\nspec:\n  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "trainer-command" Error
        summary "the command of an external trainer contains a mistake"
        wrong file("--gpus 8", "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  batch: {global: 128, per_device_batch_size: 16}\n  trainer: {command: [python, train.py, '{resume_arg}']}\n");
        right file("--gpus 8", "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  batch: {global: 128, per_device_batch_size: 16}\n  trainer: {command: [python, train.py, '{resume_args}'], resume: [--from, '{checkpoint}']}\n");
    },
    page! {
        "scalar-type" Warning
        summary "a value's type differs from its appearance"
        wrong handbook("--gpus 8", "learning_rate: 2e-5\n");
        right handbook("--gpus 8", "learning_rate: 2.0e-05\n");
    },
    page! {
        "unknown-dialect" Error
        summary "the file is not a recipe in a known dialect"
        wrong file("--gpus 8", "steps: [build, test]\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "unknown-key" Error
        summary "a key is unknown"
        wrong native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16, acumulation: 2}\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16, accumulation: 1}\n");
    },
    page! {
        "unknown-override" Error
        summary "an override names a key that the config does not have"
        wrong dpo("--gpus 8 --dialect dpo batchsize=32", "");
        right dpo("--gpus 8 --dialect dpo batch_size=32", "");
    },
    page! {
        "unknown-value" Error
        summary "a key does not take this value"
        wrong native("--gpus 8", "  objective: stf\n  batch: {global: 128, per_device_batch_size: 16}\n");
        right native("--gpus 8", "  objective: sft\n  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "unreadable-file" Error
        summary "a file cannot be read"
        wrong handbook("--gpus 8 --accelerate nowhere.yaml", "");
        right handbook("--gpus 8", "");
    },
    page! {
        "unsupported-value" Warning
        summary "a value is known but not supported"
        wrong handbook("--gpus 8", "lr_scheduler_type: cosine_with_restarts\n");
        right handbook("--gpus 8", "lr_scheduler_type: cosine\n");
    },
    page! {
        "version-assumed" Warning
        summary "the recipe does not state the version of its dialect"
        wrong file("--gpus 8 --dialect halos", "model: {batch_size: 32, gradient_accumulation_steps: 2, eval_batch_size: 32}\nloss: {trainer: SFTTrainer}\n");
        right file("--gpus 8 --dialect halos --dialect-version head", "model: {batch_size: 32, gradient_accumulation_steps: 2, eval_batch_size: 32}\nloss: {trainer: SFTTrainer}\n");
    },
    page! {
        "wrong-type" Error
        summary "a value is not of the type that its key takes"
        wrong native("--gpus 8", "  batch: {global: 128, per_device_batch_size: sixteen}\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "yaml-syntax" Error
        summary "the file is not well-formed YAML"
        wrong native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16}\n");
    },
];
