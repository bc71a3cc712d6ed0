//! Pages of the rules that the recipe readers check before planning. The checks are in
//! `crate::recipe`; a test compares both lists.

use super::{Check, Example, Rule, file, native};
use crate::recipe::Severity;

/// A rule's page, one line for each field.
macro_rules! page {
    (
        $id:literal $severity:ident
        summary $summary:literal
        why $why:literal
        upstream $upstream:literal
        wrong $wrong:expr;
        right $right:expr;
    ) => {
        &Rule {
            id: $id,
            severity: Severity::$severity,
            summary: $summary,
            why: $why,
            upstream: $upstream,
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
        why "The recipe and the DeepSpeed config that it is launched with may both state accumulation. \
    If the numbers differ, the global batch depends on which one counts. \
    Write \"auto\" in the DeepSpeed config, or remove the key, so that the recipe decides. A recipe may \
    also state it as `num_steps` of `accelerator_config`. That counts if `gradient_accumulation_steps` is 1, \
    and never together with a DeepSpeed config."
        upstream "transformers 5.23.0, `integrations/deepspeed.py` (`fill_match`): collects such \
    mismatches and raises; `trainer.py` (`create_accelerator_and_postprocess`): raises on both numbers. \
    accelerate 16cb6eb, `accelerator.py`: takes DeepSpeed's number, with a warning."
        wrong handbook("--gpus 8", "deepspeed: {gradient_accumulation_steps: 2, zero_optimization: {stage: 2}}\n");
        right handbook("--gpus 8", "deepspeed: {gradient_accumulation_steps: auto, zero_optimization: {stage: 2}}\n");
    },
    page! {
        "config-missing" Error
        summary "a config group has no such option"
        why "An entry of a defaults list, or `GROUP=OPTION` on the command line, names a file below the \
    root directory of the tree, `GROUP/OPTION.yaml`. The help line lists the options. The shipped root of \
    direct-preference-optimization names an option that its tree does not have, so give `model=…`."
        upstream "Hydra 1.3, `MissingConfigException`: \"Could not find 'model/…'\". direct-preference-optimization \
    f8b8c0f, `config/config.yaml`: `model: blank_model_fp32`."
        wrong dpo("--gpus 8 --dialect dpo", "defaults:\n- _self_\n- model: llama\n");
        right dpo("--gpus 8 --dialect dpo", "defaults:\n- _self_\n- optional model: llama\n");
    },
    page! {
        "deepspeed-conflict" Error
        summary "the DeepSpeed config and the trainer state different values"
        why "The DeepSpeed config and the trainer's arguments may both state clipping, optimiser, warm-up and \
    precision; unset arguments count with their defaults. The trainer compares the two and refuses to start if \
    they differ. The finding names all that differ. Write \"auto\" in the DeepSpeed config so that the \
    arguments decide. The same holds for the file that an accelerate config names. A trainer's own DeepSpeed \
    config overrides that file, and accelerate refuses it with a config that sets \
    `zero_stage`, `gradient_accumulation_steps`, `mixed_precision` or the like itself."
        upstream "transformers 5.23.0, `integrations/deepspeed.py` (`trainer_config_process`, \
    `trainer_config_finalize`, `propagate_args_to_deepspeed`): \"Please correct the following DeepSpeed config \
    values that mismatch TrainingArguments values\". accelerate 16cb6eb, `utils/dataclasses.py` \
    (`DeepSpeedPlugin`, `_deepspeed_config_checks`)."
        wrong handbook("--gpus 8", "deepspeed: {gradient_clipping: 0.5, zero_optimization: {stage: 2}}\n");
        right handbook("--gpus 8", "deepspeed: {gradient_clipping: auto, zero_optimization: {stage: 2}}\n");
    },
    page! {
        "deepspeed-unread" Warning
        summary "the DeepSpeed config that the recipe names does not exist"
        why "The file states the ZeRO stage, and may state an accumulation. Without it the memory estimate \
    assumes no sharding, and Evenkeel cannot detect a conflict."
        upstream "transformers 5.23.0, `integrations/deepspeed.py`: opens the file when training starts."
        wrong handbook("--gpus 8", "deepspeed: nowhere/zero3.json\n");
        right handbook("--gpus 8", "deepspeed: {zero_optimization: {stage: 3}}\n");
    },
    page! {
        "defaults-list" Error
        summary "a defaults list is not well-formed, or contains a cycle"
        why "`defaults` is a list of `_self_`, of files (`- base_model`), and of groups with their options \
    (`- loss: dpo`). Later entries override earlier ones. It may appear anywhere in the \
    file. Evenkeel refuses a file that includes itself through others, and a tree of more than 64 files."
        upstream "Hydra 1.3, `core/config_loader`: raises on lists that it cannot read; a cycle ends in Python's \
    recursion limit."
        wrong dpo("--gpus 8 --dialect dpo", "defaults: {model: llama}\n");
        right dpo("--gpus 8 --dialect dpo", "defaults:\n- _self_\n");
    },
    page! {
        "duplicate-key" Error
        summary "a mapping has a key twice"
        why "YAML loaders silently take the last one, so a recipe with two learning rates trains with \
    the second, while its reader may have seen only the first. The same value twice is a warning."
        upstream "PyYAML's `safe_load`, which transformers and TRL use, silently takes the last; \
    YAML 1.2 forbids it."
        wrong handbook("--gpus 8", "learning_rate: 2.0e-05\nlearning_rate: 1.0e-05\n");
        right handbook("--gpus 8", "learning_rate: 2.0e-05\n");
    },
    page! {
        "gpu-count-conflict" Warning
        summary "two places state different numbers of processes or GPUs"
        why "The global batch of a recipe with per-device numbers depends on the number of processes. The \
    accelerate config and the command line may both state that number. The command line counts; a batch \
    computed from the config is wrong by the ratio of the two. `--recipe-gpus` overrides both, and this rule \
    warns if it differs from the number that the launcher would start. It also warns about the GPUs \
    that a script requests from Slurm (`#SBATCH --gres=gpu:8`, or a comment with the `salloc` to call first). \
    The launcher starts its own number of processes, whatever the script requested."
        upstream "accelerate 16cb6eb, `commands/launch.py` (`_validate_launch_command`): takes from the \
    config only the options that the command line lacks."
        wrong file("--gpus 8 -- accelerate launch --num_processes 8 train.py", "distributed_type: MULTI_GPU\nnum_processes: 4\nevenkeel:\n  batch: {global: 32, per_device_batch_size: 4}\n");
        right file("--gpus 4 -- accelerate launch --num_processes 4 train.py", "distributed_type: MULTI_GPU\nnum_processes: 4\nevenkeel:\n  batch: {global: 32, per_device_batch_size: 4}\n");
    },
    page! {
        "mandatory-missing" Error
        summary "a key without a default is missing"
        why "Most keys have a default. The ones without are mandatory: the `apiVersion` \
    and `kind` of a native recipe, the `id` of a data set, the `batch` of a stage. A Hydra tree marks them \
    `???`, both values and options of groups: `exp_name=…`, `loss=dpo`. The finding names all of them; a plan \
    still shows the numbers that do not depend on them. In an option of a group that is read alone they are a \
    note. An accelerate config without `num_processes` leaves it to the command: a warning, because a plan \
    does not depend on it."
        upstream "HfArgumentParser (transformers 5.23.0) refuses such a file too. accelerate 16cb6eb, \
    `commands/launch.py` (`_validate_launch_command`): a config without `num_processes` holds -1, and the \
    launcher exits unless the command gives it. A missing key inside a \
    mapping, such as a data set's `id`, fails when it is first used. HALOs and \
    direct-preference-optimization: `OmegaConf.missing_keys`, \"Got missing keys in config\"."
        wrong file("--gpus 8", "apiVersion: evenkeel.dev/v1alpha1\nspec:\n  batch: {global: 128, per_device_batch_size: 16}\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "interpolation" Error
        summary "an interpolation cannot be resolved"
        why "`${a.b}` takes another key's value, `${.b}` the value of a sibling key, `${name:…}` the result of a \
    resolver. It is an error if the key does not exist, if interpolations form a \
    cycle, or if the resolver is unknown. Known are `oc.env`, `oc.decode`, and the resolvers that the tree's \
    program registers. A value for the key on the command line replaces the interpolation."
        upstream "OmegaConf 2.3: `InterpolationKeyError`, \"Recursive interpolation detected\", \
    `UnsupportedInterpolationType`."
        wrong dpo("--gpus 8 --dialect dpo", "cache_dir: ${run_dir}\nrun_dir: ${cache_dir}\n");
        right dpo("--gpus 8 --dialect dpo", "cache_dir: ${run_dir}\nrun_dir: .cache\n");
    },
    page! {
        "objective-assumed" Warning
        summary "the recipe does not state its objective"
        why "Upstream the launched script determines the objective, not a key of the file. Evenkeel takes it \
    from the directory or the file's name (`recipes/*/dpo/…`), else from keys that only one trainer has, \
    else it assumes supervised fine-tuning. `evenkeel.objective=dpo`, on the command \
    line or as `evenkeel: {objective: dpo}` in the file, sets it."
        upstream "alignment-handbook 925acdf: `scripts/sft.py`, `scripts/dpo.py`, `scripts/orpo.py`."
        wrong file("--gpus 8 --recipe-gpus 8", "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n");
        right file("--gpus 8 --recipe-gpus 8 evenkeel.objective=sft", "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n");
    },
    page! {
        "out-of-range" Error
        summary "a number is outside of its range"
        why "Evenkeel refuses zero, negative and absurd sizes at their key, rather than where they first \
    divide something. Every number of a recipe except the seeds has a range, and the help line states it. \
    `data.held_out` (upstream's `test_split_size`) is a share below 1 or a whole number of samples, so 1.5 \
    is neither."
        upstream "Mostly unchecked upstream: a batch of 0 ends in a division by zero or an empty loader. \
    `datasets`, `train_test_split`: raises on a share that is not between 0 and 1."
        wrong native("--gpus 8", "  batch: {global: 0, per_device_batch_size: 16}\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "override-syntax" Error
        summary "an override of a Hydra config is not well-formed"
        why "Overrides follow Hydra's grammar, which is not YAML's: `key=value` changes a key, `+key=value` \
    adds one, `++key=value` does either, `~key` removes one, `group=option` chooses a file. Values with \
    other characters than letters, digits and `/-+.$%*@?|:_` need quotes, and a comma outside of brackets \
    starts a sweep over several runs."
        upstream "Hydra 1.3, `grammar/OverrideParser.g4`."
        wrong dpo("--gpus 8 --dialect dpo datasets=hh,shp", "datasets: [hh]\n");
        right dpo("--gpus 8 --dialect dpo datasets=[hh,shp]", "datasets: [hh]\n");
    },
    page! {
        "resume-restores-batch" Warning
        summary "resuming upstream may restore another per-device batch"
        why "A checkpoint of transformers keeps the per-device batch that it was written with. Versions \
    up to 5.1 use that one when they resume, whatever the recipe states, so a run that resumes \
    on another number of GPUs gets another global batch. Evenkeel resumes with `--resume`: \
    micro-batch and accumulation come from the plan of the new world."
        upstream "transformers 5.23.0, `trainer.py`: `train_batch_size` of the state is taken only \
    together with `auto_find_batch_size`; up to 5.1 always."
        wrong handbook("--gpus 8", "resume_from_checkpoint: out/checkpoint-100\n");
        right handbook("--gpus 8", "");
    },
    page! {
        "run-name" Error
        summary "the run's name or directory cannot be used"
        why "A name becomes a directory, `runs/NAME`, and part of the names of cluster objects. So it must be \
    a DNS label (RFC 1123): lower-case letters, digits and `-`, 63 at most, with a letter or digit at both \
    ends. Evenkeel refuses a native recipe with another `metadata.name`; the default is the file's name. \
    Upstream a name may be any text (`run_name`, the last part of `output_dir`). There Evenkeel takes the \
    nearest label, and a note says so if that differs."
        upstream "Kubernetes, `apimachinery/pkg/util/validation` (`IsDNS1123Label`). transformers 5.23.0, \
    `training_args.py`: `run_name` is shown in reports, `output_dir` is a path."
        wrong file("--gpus 8", "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nmetadata: {name: ../../elsewhere}\nspec:\n  batch: {global: 128, per_device_batch_size: 16}\n");
        right file("--gpus 8", "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nmetadata: {name: my-run-2}\nspec:\n  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "trainer-command" Error
        summary "the command of an external trainer contains a mistake"
        why "In `trainer.command` (and after `--` on the command line) `{args}`, `{recipe}`, \
    `{resume_args}` and others are placeholders for values of the plan in each generation. Another name in \
    braces stays unchanged, because programs use braces too. A name close to a placeholder is an error: it \
    would pass a meaningless argument to every rank. `trainer.resume` must contain `{checkpoint}`: without it \
    the program would not know which checkpoint to resume from. `trainer.progress_pattern` must be \
    a regular expression with the group `step`."
        upstream "torchrun passes a script's arguments on unchanged: its batch does not follow the world."
        wrong file("--gpus 8", "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  batch: {global: 128, per_device_batch_size: 16}\n  trainer: {command: [python, train.py, '{resume_arg}']}\n");
        right file("--gpus 8", "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  batch: {global: 128, per_device_batch_size: 16}\n  trainer: {command: [python, train.py, '{resume_args}'], resume: [--from, '{checkpoint}']}\n");
    },
    page! {
        "scalar-type" Warning
        summary "a value's type differs from its appearance"
        why "`1e-5` is a string to PyYAML, which wants a dot; `NO` without quotes is false; `12:30` is the \
    number 750, in base 60. Some loaders convert such values back and some do not. Evenkeel takes the type \
    that the key needs, and names the spelling that every loader reads alike."
        upstream "PyYAML's resolver (YAML 1.1). TRL f2cd577, `scripts/utils.py` (`TrlParser`): strings go \
    through argparse, which converts them; transformers' own `parse_yaml_file` leaves them."
        wrong handbook("--gpus 8", "learning_rate: 2e-5\n");
        right handbook("--gpus 8", "learning_rate: 2.0e-05\n");
    },
    page! {
        "unknown-dialect" Error
        summary "the file is not a recipe in a known dialect"
        why "Evenkeel recognises a dialect by its keys. It reads native recipes, recipes of the \
    alignment-handbook and TRL, transformers' arguments, the Hydra trees of HALOs and \
    direct-preference-optimization, and configs of `accelerate launch` and DeepSpeed. It recognises other Hydra \
    configs but does not read them. `--dialect` decides where no key does; a file without any of these keys is \
    most likely not a recipe."
        upstream "None."
        wrong file("--gpus 8", "steps: [build, test]\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "unknown-key" Error
        summary "a key is unknown"
        why "A key with a typo has no effect, and the intended key keeps its default. In \
    places where upstream ignores unknown keys, this is a warning; on the command line always an error. A \
    trainer's script may define more keys, so in its recipe a key that resembles no other is a warning too."
        upstream "HfArgumentParser (transformers 5.23.0) and accelerate 16cb6eb refuse the file; TRL f2cd577 \
    ignores it in a file and refuses it on the command line. It ignores unknown keys inside a mapping, such as `dataset_mixture`."
        wrong native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16, acumulation: 2}\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16, accumulation: 1}\n");
    },
    page! {
        "unknown-override" Error
        summary "an override names a key that the config does not have"
        why "Hydra refuses `key=value` for a key that does not exist. `++key=value` and `+key=value` silently add \
    it. No program reads the new key, so a typo behind `++` has no effect: a warning, \
    with the key that was most likely meant. The README of HALOs itself has one, \
    `++config.intermediate_checkpoints=true` for `intermediate_checkpoints`."
        upstream "Hydra 1.3, `_internal/config_loader_impl.py` (`_apply_overrides_to_config`): \"Could not \
    override\"; with `++`, `OmegaConf.update(…, force_add=True)`."
        wrong dpo("--gpus 8 --dialect dpo batchsize=32", "");
        right dpo("--gpus 8 --dialect dpo batch_size=32", "");
    },
    page! {
        "unknown-value" Error
        summary "a key does not take this value"
        why "The key takes one of a fixed set of values, and this is none of them. The help line names the \
    nearest."
        upstream "Enums of transformers and accelerate raise on it as well, when the trainer is built."
        wrong native("--gpus 8", "  objective: stf\n  batch: {global: 128, per_device_batch_size: 16}\n");
        right native("--gpus 8", "  objective: sft\n  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "unreadable-file" Error
        summary "a file cannot be read"
        why "The file does not exist, cannot be opened, is not UTF-8 text, or is larger than 1 MiB, which no \
    recipe is. A named pipe is refused too, because a read would wait for a writer; \
    `/dev/stdin` and a shell's `<(…)` are read."
        upstream "None."
        wrong handbook("--gpus 8 --accelerate nowhere.yaml", "");
        right handbook("--gpus 8", "");
    },
    page! {
        "unsupported-value" Warning
        summary "a value is known but not supported"
        why "The recipe requests a feature that upstream has and Evenkeel does not. The \
    message states what Evenkeel does instead. Without an alternative it is an error."
        upstream "Each key does what its name says."
        wrong handbook("--gpus 8", "lr_scheduler_type: cosine_with_restarts\n");
        right handbook("--gpus 8", "lr_scheduler_type: cosine\n");
    },
    page! {
        "version-assumed" Warning
        summary "the recipe does not state the version of its dialect"
        why "`model.batch_size` of HALOs has been the global batch since 2025-05-01 and was the batch of one \
    accumulation step before. With an accumulation of 1 both are the same. With more, the comment on the key, \
    and keys that only one version has, determine the version. Without them Evenkeel takes the newest. \
    `--dialect-version` sets it."
        upstream "HALOs 2f70d00, `launch.py`, `config/model/base_model.yaml`."
        wrong file("--gpus 8 --dialect halos", "model: {batch_size: 32, gradient_accumulation_steps: 2, eval_batch_size: 32}\nloss: {trainer: SFTTrainer}\n");
        right file("--gpus 8 --dialect halos --dialect-version head", "model: {batch_size: 32, gradient_accumulation_steps: 2, eval_batch_size: 32}\nloss: {trainer: SFTTrainer}\n");
    },
    page! {
        "wrong-type" Error
        summary "a value is not of the type that its key takes"
        why "For example text where the key takes a number, or one value where it takes a list. The help line \
    names the type."
        upstream "HfArgumentParser converts what it can and raises on the rest."
        wrong native("--gpus 8", "  batch: {global: 128, per_device_batch_size: sixteen}\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16}\n");
    },
    page! {
        "yaml-syntax" Error
        summary "the file is not well-formed YAML"
        why "Evenkeel cannot check a file that does not parse. Usual causes are truncated files, tabs as \
    indentation and unclosed quotes; the message shows the position. The quotes of a command must be closed as \
    well. Aliases (`*name`), merges (`<<`) and tags (`!!float`) are refused too: write the values out."
        upstream "Every YAML loader refuses a file that does not parse."
        wrong native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16\n");
        right native("--gpus 8", "  batch: {global: 128, per_device_batch_size: 16}\n");
    },
];
