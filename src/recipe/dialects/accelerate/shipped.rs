//! The accelerate configs that TRL ships, which its command line takes by name (`--accelerate_config
//! zero2`). All of them have eight processes on one machine, in bf16.
//!
//! Source: TRL f2cd577, `trl/accelerate_configs/*.yaml`, `trl/cli/accelerate_config.py` (a file of that
//! name takes precedence); the same seven in 0.19.1 and 0.24.0.

use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::yaml;
use crate::util::suggest::did_you_mean;

/// Processes that each of them starts by default.
const PROCESSES: u64 = 8;

/// Their names and their keys, without their defaults.
const SHIPPED: &[(&str, &str)] = &[
    // It also states eight processes, without effect.
    ("single_gpu", "{distributed_type: 'NO'}"),
    ("multi_gpu", "{distributed_type: MULTI_GPU}"),
    (
        "fsdp1",
        "{distributed_type: FSDP, fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, \
         fsdp_backward_prefetch: BACKWARD_PRE, fsdp_forward_prefetch: true, \
         fsdp_reshard_after_forward: FULL_SHARD, fsdp_state_dict_type: FULL_STATE_DICT, fsdp_version: 1}}",
    ),
    (
        "fsdp2",
        "{distributed_type: FSDP, fsdp_config: {fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, \
         fsdp_reshard_after_forward: true, fsdp_state_dict_type: FULL_STATE_DICT, fsdp_version: 2}}",
    ),
    (
        "zero1",
        "{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_multinode_launcher: standard, \
         gradient_accumulation_steps: 1, zero3_init_flag: false, zero_stage: 1}}",
    ),
    (
        "zero2",
        "{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_multinode_launcher: standard, \
         offload_optimizer_device: none, offload_param_device: none, zero3_init_flag: false, zero_stage: 2}}",
    ),
    (
        "zero3",
        "{distributed_type: DEEPSPEED, deepspeed_config: {deepspeed_multinode_launcher: standard, \
         offload_optimizer_device: none, offload_param_device: none, zero3_init_flag: true, \
         zero3_save_16bit_model: true, zero_stage: 3}}",
    ),
];

/// Whether the config of that name fixes accumulation at 1.
pub(crate) fn fixes_accumulation(name: &str) -> bool {
    let found = SHIPPED.iter().find(|(known, _)| *known == name);
    found.is_some_and(|(_, text)| text.contains("gradient_accumulation_steps"))
}

/// The config of that name; every value has the position of the name.
pub(super) fn config(name: &Given<String>, reading: &mut Reading) -> Option<Node> {
    let span = name.span;
    let Some((name, text)) = SHIPPED.iter().find(|(known, _)| *known == name.value) else {
        reading.error(
            "unknown-value",
            Some(span),
            format!(
                "`{}` is `{}`: there is no such file, and TRL ships no such config",
                name.key, name.value
            ),
            did_you_mean(&name.value, SHIPPED.iter().map(|(name, ..)| *name)),
        );
        return None;
    };
    let mut root = yaml::parse(text, span.file, &mut reading.diagnostics)?;
    root.set_path("mixed_precision", Node::string("bf16", span));
    if *name != "single_gpu" {
        root.set_path("num_processes", Node::plain(PROCESSES.to_string(), span));
    }
    root.put_at(span);
    if fixes_accumulation(name) {
        reading.note(
            "accumulation-conflict",
            Some(span),
            format!("TRL's `{name}` fixes accumulation at 1, and the trainer refuses another value"),
            "if the plan needs more steps, launch with another config: `--emit accelerate` writes it",
        );
    }
    Some(root)
}

#[cfg(test)]
mod tests {
    use crate::recipe::schema::request::Request;
    use crate::recipe::schema::spec::{Precision, Strategy};
    use crate::recipe::{ReadError, Recipe, read};

    const JOB: &str =
        "trl sft --model_name_or_path m --dataset_name d --per_device_train_batch_size 4";

    fn job(more: &str) -> Result<Recipe, ReadError> {
        let line = format!("{JOB} {more}");
        read(&Request {
            command: line.split_whitespace().map(str::to_owned).collect(),
            ..Request::default()
        })
    }

    /// Expected values are those of the files in TRL.
    #[test]
    fn every_shipped_config_has_its_world_and_sharding() {
        for (name, gpus, strategy) in [
            ("single_gpu", 1, Strategy::Ddp),
            ("multi_gpu", 8, Strategy::Ddp),
            ("fsdp1", 8, Strategy::Fsdp),
            ("fsdp2", 8, Strategy::Fsdp),
            ("zero1", 8, Strategy::Zero1),
            ("zero2", 8, Strategy::Zero2),
            ("zero3", 8, Strategy::Fsdp),
        ] {
            let recipe = job(&format!("--accelerate_config {name}"));
            let spec = recipe
                .unwrap_or_else(|error| panic!("{name}: {error}"))
                .spec;
            assert_eq!(spec.batch.gpus, Some(gpus), "{name}");
            assert_eq!(spec.parallel.strategy, strategy, "{name}");
            assert_eq!(spec.model.precision, Precision::Bf16, "{name}");
        }
    }

    #[test]
    fn options_override_a_shipped_config_without_a_warning() {
        let recipe = job("--accelerate_config zero2 --num_processes 6").unwrap();
        assert_eq!(recipe.spec.batch.gpus, Some(6));
        assert_eq!(recipe.diagnostics, []);
        let fixed = job("--accelerate_config zero1").unwrap();
        assert_eq!(fixed.diagnostics[0].rule, "accumulation-conflict");
        let conflict = job("--accelerate_config zero1 --gradient_accumulation_steps 2");
        let rules = conflict.unwrap_err().diagnostics;
        assert!(
            rules.iter().all(|d| d.rule == "accumulation-conflict"),
            "{rules:?}"
        );
    }

    #[test]
    fn an_unknown_name_is_refused_with_a_suggestion() {
        let error = job("--accelerate_config zero22").unwrap_err();
        assert_eq!(error.diagnostics[0].rule, "unknown-value");
        assert_eq!(error.diagnostics[0].help, "did you mean `zero2`?");
    }

    #[test]
    fn a_file_of_that_name_takes_precedence() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("zero2");
        std::fs::write(&file, "distributed_type: FSDP\nnum_processes: 2\n").unwrap();
        let recipe = job(&format!("--accelerate_config {}", file.display())).unwrap();
        assert_eq!(recipe.spec.batch.gpus, Some(2));
        assert_eq!(recipe.spec.parallel.strategy, Strategy::Fsdp);
    }

    #[test]
    fn a_recipe_may_name_its_accelerate_config() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sft.yaml");
        let text = "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 4\n\
                    gradient_accumulation_steps: 2\naccelerate_config: zero3\nnum_processes: 4\n";
        std::fs::write(&path, text).unwrap();
        let read_with = |command: &str| {
            let command = command.replace('@', &path.display().to_string());
            let alone = command.is_empty();
            read(&Request {
                path: if alone {
                    path.clone()
                } else {
                    Default::default()
                },
                command: command.split_whitespace().map(str::to_owned).collect(),
                ..Request::default()
            })
        };
        for (command, gpus) in [
            ("", 4),
            ("trl sft --config @", 4),
            ("trl sft --config @ --num_processes 2", 2),
        ] {
            let recipe = read_with(command).unwrap_or_else(|error| panic!("{command}: {error}"));
            assert_eq!(recipe.spec.batch.gpus, Some(gpus), "{command}");
            assert_eq!(recipe.spec.parallel.strategy, Strategy::Fsdp, "{command}");
        }
        // Only TRL's own command line searches for shipped configs.
        let other = read_with("accelerate launch --num_processes 2 sft.py --config @").unwrap();
        assert_eq!(other.spec.batch.gpus, Some(2));
        assert_eq!(other.diagnostics[0].rule, "unknown-key");
    }
}
