//! Pages of the rules that the recipe readers check, before there is anything to plan. The checks
//! themselves stand in `crate::recipe`; a test holds the two together.

use super::{Check, Example, Rule};
use crate::recipe::Severity;

/// A page in one line a field.
macro_rules! page {
    (
        $name:ident $id:literal $severity:ident
        summary $summary:literal
        why $why:literal
        upstream $upstream:literal
        wrong $wrong_flags:literal $wrong:expr;
        right $right_flags:literal $right:expr;
    ) => {
        const $name: Rule = Rule {
            id: $id,
            severity: Severity::$severity,
            summary: $summary,
            why: $why,
            upstream: $upstream,
            wrong: Example {
                flags: $wrong_flags,
                recipe: $wrong,
            },
            right: Example {
                flags: $right_flags,
                recipe: $right,
            },
            check: Check::Reader,
        };
    };
}

/// An SFT recipe of the alignment-handbook for 8 GPUs, and more keys.
macro_rules! handbook {
    ($more:literal) => {
        concat!(
            "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n",
            "evenkeel:\n  objective: sft\n  batch: {gpus: 8}\n",
            $more
        )
    };
}

/// A config of direct-preference-optimization without groups, and more keys.
macro_rules! dpo {
    ($more:literal) => {
        concat!(
            "trainer: FSDPTrainer\nbatch_size: 64\ngradient_accumulation_steps: 2\n",
            "eval_batch_size: 32\n",
            $more
        )
    };
}

/// Every rule of the readers.
pub(super) static RULES: &[&Rule] = &[
    &ACCUMULATION_CONFLICT,
    &CONFIG_MISSING,
    &DEEPSPEED_CONFLICT,
    &DEEPSPEED_UNREAD,
    &DEFAULTS_LIST,
    &DUPLICATE_KEY,
    &GPU_COUNT_CONFLICT,
    &INTERPOLATION,
    &MANDATORY_MISSING,
    &OBJECTIVE_ASSUMED,
    &OUT_OF_RANGE,
    &OVERRIDE_SYNTAX,
    &RESUME_RESTORES_BATCH,
    &RUN_NAME,
    &SCALAR_TYPE,
    &TRAINER_COMMAND,
    &UNKNOWN_DIALECT,
    &UNKNOWN_KEY,
    &UNKNOWN_OVERRIDE,
    &UNKNOWN_VALUE,
    &UNREADABLE_FILE,
    &UNSUPPORTED_VALUE,
    &VERSION_ASSUMED,
    &WRONG_TYPE,
    &YAML_SYNTAX,
];

page! {
    ACCUMULATION_CONFLICT "accumulation-conflict" Error
    summary "two places of a job name different accumulations"
    why "Accumulation may stand in the recipe and in the DeepSpeed config that it is launched with. \
When both name a number and the numbers differ, the global batch depends on which one is believed. \
Write \"auto\" in the DeepSpeed config, or leave the key out, so that the recipe decides. A recipe may \
also say it as `num_steps` of `accelerator_config`, which counts where `gradient_accumulation_steps` is 1, \
and never beside a DeepSpeed config."
    upstream "transformers 5.23.0, `integrations/deepspeed.py` (`fill_match`): collects such \
mismatches and raises; `trainer.py` (`create_accelerator_and_postprocess`): raises on both numbers. \
accelerate 16cb6eb, `accelerator.py`: takes DeepSpeed's number, with a warning."
    wrong "--gpus 8" handbook!("deepspeed: {gradient_accumulation_steps: 2, zero_optimization: {stage: 2}}\n");
    right "--gpus 8" handbook!("deepspeed: {gradient_accumulation_steps: auto, zero_optimization: {stage: 2}}\n");
}

page! {
    CONFIG_MISSING "config-missing" Error
    summary "a config group has no such option"
    why "An entry of a defaults list, or `GROUP=OPTION` on the command line, names a file below the \
folder of the tree, `GROUP/OPTION.yaml`. The help line lists what is there. The root of \
direct-preference-optimization as it is shipped names an option that its tree does not have, so `model=…` \
must be given."
    upstream "Hydra 1.3, `MissingConfigException`: \"Could not find 'model/…'\". direct-preference-optimization \
f8b8c0f, `config/config.yaml`: `model: blank_model_fp32`."
    wrong "--gpus 8 --dialect dpo" dpo!("defaults:\n- _self_\n- model: llama\n");
    right "--gpus 8 --dialect dpo" dpo!("defaults:\n- _self_\n- optional model: llama\n");
}

page! {
    DEEPSPEED_CONFLICT "deepspeed-conflict" Error
    summary "a number of the DeepSpeed config is not the trainer's"
    why "Clipping, optimiser, warm-up and precision may stand in the DeepSpeed config as well as in the \
trainer's arguments, whose defaults count where they say nothing. The trainer compares the two and refuses \
to start where they differ; all that differ are named at once. Write \"auto\" in the DeepSpeed config so \
that the arguments decide. The file that an accelerate config names is compared in the same way. A trainer's \
own DeepSpeed config stands over that file, and accelerate refuses it beside a config that says \
`zero_stage`, `gradient_accumulation_steps`, `mixed_precision` or the like itself."
    upstream "transformers 5.23.0, `integrations/deepspeed.py` (`trainer_config_process`, \
`trainer_config_finalize`, `propagate_args_to_deepspeed`): \"Please correct the following DeepSpeed config \
values that mismatch TrainingArguments values\". accelerate 16cb6eb, `utils/dataclasses.py` \
(`DeepSpeedPlugin`, `_deepspeed_config_checks`)."
    wrong "--gpus 8" handbook!("deepspeed: {gradient_clipping: 0.5, zero_optimization: {stage: 2}}\n");
    right "--gpus 8" handbook!("deepspeed: {gradient_clipping: auto, zero_optimization: {stage: 2}}\n");
}

page! {
        DEEPSPEED_UNREAD "deepspeed-unread" Warning
    summary "the DeepSpeed config that the recipe names is not there"
    why "The file says which ZeRO stage is used, and may say an accumulation of its own. Without it \
the estimate of memory counts nothing as sharded, and a conflict cannot be seen."
    upstream "transformers 5.23.0, `integrations/deepspeed.py`: opens the file when training starts."
    wrong "--gpus 8" handbook!("deepspeed: nowhere/zero3.json\n");
    right "--gpus 8" handbook!("deepspeed: {zero_optimization: {stage: 3}}\n");
}

page! {
    DEFAULTS_LIST "defaults-list" Error
    summary "a defaults list is not well-formed, or goes in a circle"
    why "`defaults` is a list of `_self_`, of files (`- base_model`), and of groups with the option chosen \
in each (`- loss: dpo`), in the order in which they are laid over each other. It may stand anywhere in the \
file. A file that names itself through others, and a tree of more than 64 files, are refused."
    upstream "Hydra 1.3, `core/config_loader`: raises on lists that it cannot read; a circle ends in Python's \
recursion limit."
    wrong "--gpus 8 --dialect dpo" dpo!("defaults: {model: llama}\n");
    right "--gpus 8 --dialect dpo" dpo!("defaults:\n- _self_\n");
}

page! {
    DUPLICATE_KEY "duplicate-key" Error
    summary "a key is given twice in one mapping"
    why "YAML loaders silently take the last one, so a recipe with two learning rates trains with \
the one further down, which is seldom the one that its reader saw. The same value twice is a \
warning."
    upstream "PyYAML's `safe_load`, which transformers and TRL use, takes the last without a word; \
YAML 1.2 forbids it."
    wrong "--gpus 8" handbook!("learning_rate: 2.0e-05\nlearning_rate: 1.0e-05\n");
    right "--gpus 8" handbook!("learning_rate: 2.0e-05\n");
}

page! {
    GPU_COUNT_CONFLICT "gpu-count-conflict" Warning
    summary "two places say different numbers of processes, or of GPUs for them"
    why "The global batch of a recipe that says what one device does follows from the number of \
processes, and that may stand in the accelerate config as well as on the command line. What is typed \
counts; whoever computes the batch from the config is wrong by the ratio of the two. `--recipe-gpus` \
stands over both, and is told of here where it differs from what the launcher would start. So are the GPUs \
that a script asks Slurm for (`#SBATCH --gres=gpu:8`, or a comment with the `salloc` to call first): the \
launcher starts its own number of processes, whatever was asked for."
    upstream "accelerate 16cb6eb, `commands/launch.py` (`_validate_launch_command`): takes from the \
config only what was not typed."
    wrong "--gpus 8 -- accelerate launch --num_processes 8 train.py" "distributed_type: MULTI_GPU\nnum_processes: 4\nevenkeel:\n  batch: {global: 32, micro: 4}\n";
    right "--gpus 4 -- accelerate launch --num_processes 4 train.py" "distributed_type: MULTI_GPU\nnum_processes: 4\nevenkeel:\n  batch: {global: 32, micro: 4}\n";
}

page! {
    MANDATORY_MISSING "mandatory-missing" Error
    summary "something that has no default is missing"
    why "Most keys have a default, and the few that have none are asked for by name: the `apiVersion` \
and `kind` of a native recipe, the `id` of a data set, the `batch` of a stage. In a Hydra tree they are \
marked `???`, values and options of groups alike: `exp_name=…`, `loss=dpo`. All of them are named at \
once; a plan still shows the numbers that do not hang on them. In an option of a group that is read by \
itself they are a note. An accelerate config without `num_processes` leaves them to the command: a warning, \
for a plan does not hang on them."
    upstream "HfArgumentParser (transformers 5.23.0) refuses such a file too. accelerate 16cb6eb, \
`commands/launch.py` (`_validate_launch_command`): a config without `num_processes` holds -1, and it stops \
unless the command says them. What is missing inside of a \
mapping, as a data set's `id`, fails when it is first used. HALOs and \
direct-preference-optimization: `OmegaConf.missing_keys`, \"Got missing keys in config\"."
    wrong "--gpus 8" "apiVersion: evenkeel.dev/v1alpha1\nspec:\n  batch: {global: 128, micro: 16}\n";
    right "--gpus 8" native!("  batch: {global: 128, micro: 16}\n");
}

page! {
    INTERPOLATION "interpolation" Error
    summary "an interpolation cannot be resolved"
    why "`${a.b}` stands for another key's value, `${.b}` for one beside it, `${name:…}` for what a \
resolver makes of its arguments. It is an error when the key is not there, when interpolations go in a \
circle, and when nothing knows the resolver. Known are `oc.env`, `oc.select`, and those that the tree's \
program registers. Give the key a value on the command line to do without it."
    upstream "OmegaConf 2.3: `InterpolationKeyError`, \"Recursive interpolation detected\", \
`UnsupportedInterpolationType`."
    wrong "--gpus 8 --dialect dpo" dpo!("cache_dir: ${run_dir}\nrun_dir: ${cache_dir}\n");
    right "--gpus 8 --dialect dpo" dpo!("cache_dir: ${run_dir}\nrun_dir: .cache\n");
}

page! {
    OBJECTIVE_ASSUMED "objective-assumed" Warning
    summary "nothing says which trainer the recipe is for"
    why "Upstream the objective is the script that is launched, not a key of the file. It is taken \
from the folder or the file's name (`recipes/*/dpo/…`), else from keys that only one trainer has. \
Where nothing tells, it is taken as supervised fine-tuning. `evenkeel.objective=dpo`, on the command \
line or as `evenkeel: {objective: dpo}` in the file, decides."
    upstream "alignment-handbook 925acdf: `scripts/sft.py`, `scripts/dpo.py`, `scripts/orpo.py`."
    wrong "--gpus 8 --recipe-gpus 8" "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n";
    right "--gpus 8 --recipe-gpus 8 evenkeel.objective=sft" "per_device_train_batch_size: 16\ngradient_accumulation_steps: 1\n";
}

page! {
    OUT_OF_RANGE "out-of-range" Error
    summary "a number is outside of what makes sense"
    why "Zero, negative and absurd sizes are refused where they stand, rather than where they first \
divide something. Every number of a recipe but the seeds has a range, and the help line names it. \
`data.held_out` (upstream's `test_split_size`) is a share below 1 or a whole number of samples, so 1.5 \
is neither."
    upstream "Mostly unchecked upstream: a batch of 0 ends in a division by zero or an empty loader. \
`datasets`, `train_test_split`: raises on a share that is not between 0 and 1."
    wrong "--gpus 8" native!("  batch: {global: 0, micro: 16}\n");
    right "--gpus 8" native!("  batch: {global: 128, micro: 16}\n");
}

page! {
    OVERRIDE_SYNTAX "override-syntax" Error
    summary "an override of a Hydra config is not well-formed"
    why "Overrides follow Hydra's grammar, which is not YAML's: `key=value` changes a key, `+key=value` \
adds one, `++key=value` does either, `~key` takes one away, `group=option` chooses a file. Values with \
other characters than letters, digits and `/-+.$%*@?|:_` need quotes, and a comma outside of brackets \
would start a sweep over several runs."
    upstream "Hydra 1.3, `grammar/OverrideParser.g4`."
    wrong "--gpus 8 --dialect dpo datasets=hh,shp" dpo!("datasets: [hh]\n");
    right "--gpus 8 --dialect dpo datasets=[hh,shp]" dpo!("datasets: [hh]\n");
}

page! {
    RESUME_RESTORES_BATCH "resume-restores-batch" Warning
    summary "resuming upstream may restore another per-device batch"
    why "A checkpoint of transformers keeps the per-device batch that it was written with. Versions \
up to 5.1 take that one when they resume, whatever the recipe says, so that a run that is resumed \
on another number of GPUs gets another global batch. Evenkeel resumes with `launch --resume`: \
micro-batch and accumulation come from the plan of the new world."
    upstream "transformers 5.23.0, `trainer.py`: `train_batch_size` of the state is taken only \
together with `auto_find_batch_size`; up to 5.1 always."
    wrong "--gpus 8" handbook!("resume_from_checkpoint: out/checkpoint-100\n");
    right "--gpus 8" handbook!("");
}

page! {
    RUN_NAME "run-name" Error
    summary "the run's name or directory cannot be used"
    why "A name becomes a directory, `runs/NAME`, and part of the names of a cluster's objects. So it is \
a label of DNS (RFC 1123): lower-case letters, digits and `-`, 63 at most, a letter or digit at both \
ends. A native recipe whose `metadata.name` is none is refused; without one it is called like its file. \
Upstream a name may be any text (`run_name`, the last part of `output_dir`), so there the nearest label \
is taken, and where that differs a note says so."
    upstream "Kubernetes, `apimachinery/pkg/util/validation` (`IsDNS1123Label`). transformers 5.23.0, \
`training_args.py`: `run_name` is shown in reports, `output_dir` is a path."
    wrong "--gpus 8" "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nmetadata: {name: ../../elsewhere}\nspec:\n  batch: {global: 128, micro: 16}\n";
    right "--gpus 8" "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nmetadata: {name: my-run-2}\nspec:\n  batch: {global: 128, micro: 16}\n";
}

page! {
    TRAINER_COMMAND "trainer-command" Error
    summary "the command of a program of one's own has a slip in it"
    why "In `trainer.command` (and after `--` on the command line) `{args}`, `{recipe}`, \
`{resume_args}` and others stand for what the plan comes to in each generation. A name in braces that is \
none of them stays as it is, since programs have braces of their own; one that is nearly one of them \
would start every rank with a word that means nothing. `trainer.resume` has to say `{checkpoint}`: \
without it the program would not know where to go on from."
    upstream "torchrun passes a script's arguments on as they are: its batch does not follow the world."
    wrong "--gpus 8" "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  batch: {global: 128, micro: 16}\n  trainer: {command: [python, train.py, '{resume_arg}']}\n";
    right "--gpus 8" "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  batch: {global: 128, micro: 16}\n  trainer: {command: [python, train.py, '{resume_args}'], resume: [--from, '{checkpoint}']}\n";
}

page! {
    SCALAR_TYPE "scalar-type" Warning
    summary "a value has another type than it looks like"
    why "`1e-5` is a string to PyYAML, which wants a dot; `NO` without quotes is false; `12:30` is the \
number 750, in base 60. Some loaders convert such values back and some do not. The value is taken as what \
its key must mean, and the spelling that every loader reads alike is named."
    upstream "PyYAML's resolver (YAML 1.1). TRL f2cd577, `scripts/utils.py` (`TrlParser`): strings go \
through argparse, which converts them; transformers' own `parse_yaml_file` leaves them."
    wrong "--gpus 8" handbook!("learning_rate: 2e-5\n");
    right "--gpus 8" handbook!("learning_rate: 2.0e-05\n");
}

page! {
    UNKNOWN_DIALECT "unknown-dialect" Error
    summary "the file is no recipe in a dialect that is known"
    why "A dialect is recognised by its keys. Read are native recipes, recipes of the \
alignment-handbook and TRL, transformers' arguments, the Hydra trees of HALOs and \
direct-preference-optimization, and configs of `accelerate launch` and DeepSpeed; other Hydra configs are \
recognised and not read. `--dialect` decides where no key does; a file without any of them is most \
likely not a recipe."
    upstream "None."
    wrong "--gpus 8" "steps: [build, test]\n";
    right "--gpus 8" native!("  batch: {global: 128, micro: 16}\n");
}

page! {
    UNKNOWN_KEY "unknown-key" Error
    summary "there is no such key"
    why "A key with a typo does nothing, and what it was meant to change stays at its default. In \
places where upstream ignores unknown keys, this is a warning; on the command line always an error. A \
trainer's script may have keys of its own, so in its recipe a key that is near no other is a warning too."
    upstream "HfArgumentParser (transformers 5.23.0) and accelerate 16cb6eb refuse the file; TRL f2cd577 \
passes over it in a file and refuses it on the command line. Keys inside of a mapping, such as those of `dataset_mixture`, are ignored."
    wrong "--gpus 8" native!("  batch: {global: 128, micro: 16, acumulation: 2}\n");
    right "--gpus 8" native!("  batch: {global: 128, micro: 16, accumulation: 1}\n");
}

page! {
    UNKNOWN_OVERRIDE "unknown-override" Error
    summary "an override names a key that the config does not have"
    why "Hydra refuses `key=value` for a key that is not there. `++key=value` and `+key=value` add it \
without a word, and since nothing reads it, a typo behind `++` changes nothing at all: that is a warning, \
with the key that was most likely meant. The README of HALOs itself has one, \
`++config.intermediate_checkpoints=true` for `intermediate_checkpoints`."
    upstream "Hydra 1.3, `_internal/config_loader_impl.py` (`_apply_overrides_to_config`): \"Could not \
override\"; with `++`, `OmegaConf.update(…, force_add=True)`."
    wrong "--gpus 8 --dialect dpo batchsize=32" dpo!("");
    right "--gpus 8 --dialect dpo batch_size=32" dpo!("");
}

page! {
    UNKNOWN_VALUE "unknown-value" Error
    summary "a key does not take this value"
    why "The key takes one of a few words, and this is none of them. The help line names the \
nearest."
    upstream "Enums of transformers and accelerate raise on it as well, when the trainer is built."
    wrong "--gpus 8" native!("  objective: stf\n  batch: {global: 128, micro: 16}\n");
    right "--gpus 8" native!("  objective: sft\n  batch: {global: 128, micro: 16}\n");
}

page! {
    UNREADABLE_FILE "unreadable-file" Error
    summary "a file cannot be read"
    why "It is not there, may not be read, is not UTF-8 text, or has more than a mebibyte, which no \
recipe has. A pipe with a name is refused too, since it would be waited for where nobody writes; \
`/dev/stdin` and a shell's `<(…)` are read."
    upstream "None."
    wrong "--gpus 8 --accelerate nowhere.yaml" handbook!("");
    right "--gpus 8" handbook!("");
}

page! {
    UNSUPPORTED_VALUE "unsupported-value" Warning
    summary "a value is understood, and something else is done"
    why "The recipe asks for something that upstream has and that has no counterpart here. The \
message says what is done instead. Where nothing could be done instead, it is an error."
    upstream "Each key does there what its name says."
    wrong "--gpus 8" handbook!("lr_scheduler_type: cosine_with_restarts\n");
    right "--gpus 8" handbook!("lr_scheduler_type: cosine\n");
}

page! {
    VERSION_ASSUMED "version-assumed" Warning
    summary "nothing says which version of the dialect the recipe is in"
    why "`model.batch_size` of HALOs has been the global batch since 2025-05-01 and was the batch of one \
accumulation step before. With an accumulation of 1 both are the same; with more, the comment on the key, \
and keys that only one version has, tell which it is. Where none of them is there, the newest is taken. \
`--dialect-version` decides."
    upstream "HALOs 2f70d00, `launch.py`, `config/model/base_model.yaml`."
    wrong "--gpus 8 --dialect halos" "model: {batch_size: 32, gradient_accumulation_steps: 2, eval_batch_size: 32}\nloss: {trainer: SFTTrainer}\n";
    right "--gpus 8 --dialect halos --dialect-version head" "model: {batch_size: 32, gradient_accumulation_steps: 2, eval_batch_size: 32}\nloss: {trainer: SFTTrainer}\n";
}

page! {
    WRONG_TYPE "wrong-type" Error
    summary "a value is not of the type that its key takes"
    why "For example text where a number belongs, or one value where a list does. The help line names \
what the key takes."
    upstream "HfArgumentParser converts what it can and raises on the rest."
    wrong "--gpus 8" native!("  batch: {global: 128, micro: sixteen}\n");
    right "--gpus 8" native!("  batch: {global: 128, micro: 16}\n");
}

page! {
    YAML_SYNTAX "yaml-syntax" Error
    summary "the file is not well-formed YAML"
    why "Nothing can be said about a file that cannot be parsed. Half-written files, tabs as \
indentation and quotes that do not end are the usual causes; the message points at the place. The quotes of a command \
must end as well."
    upstream "Every YAML loader refuses it."
    wrong "--gpus 8" native!("  batch: {global: 128, micro: 16\n");
    right "--gpus 8" native!("  batch: {global: 128, micro: 16}\n");
}
