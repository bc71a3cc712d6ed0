//! `optimizer-state-lost`: an external trainer restores its optimiser's state after a restart.

use serde_json::Value;

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::schema::spec::Strategy;
use crate::recipe::{Dialect, Severity, trainer_command};

pub(super) const RULE: Rule = Rule {
    id: "optimizer-state-lost",
    severity: Severity::Warning,
    summary: "an external trainer would begin with another optimiser's state after a restart",
    why: "After every restart the program continues from its newest checkpoint, in the same world or in another one. \
With FSDP 1, accelerate restores the parameters, but Adam's moments begin at zero with sharded state dicts, and with \
full state dicts the first moments were wrong in worlds of CPUs. FSDP 2 restores both. That holds for accelerate's \
launcher, which chooses FSDP 1 without `fsdp_version`, as well as for the arguments `fsdp` and `fsdp_config` of \
transformers. They choose FSDP 2 without `version` since transformers 5.10, which Evenkeel assumes; for older ones \
set `version: 2`. A `fsdp_config` in a separate file is not read. With `save_only_model` transformers saves no optimiser's state. HALOs restores the weights and \
the schedule, but reads its optimiser's state into a key that nothing uses. It also counts samples from 0 after a \
restart, so a second restart trains samples again. The run continues without an error, but its losses differ.",
    upstream: "accelerate 1.15.0 `utils/fsdp_utils.py` (`load_fsdp_optimizer` loads into the state dict of an optimiser \
that has made no step, which is empty), seen with transformers 5.23.0 and torch 2.15 on CPUs. transformers 5.24.0 `training_args.py` \
(`_process_fsdp_args`; the default `version` was 1 up to 5.9) and `trainer.py` (`save_only_model`). HALOs 4831988 `launch.py` \
(`optimizer_state.update`) and `train/trainers.py` (`save`, `example_counter`). Evenkeel's comparison is in \
docs/external-trainer.md.",
    wrong: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  \
             trainer:\n    command: [python, train.py, --batch, '{per_device_batch_size}']\n    \
             environment: {ACCELERATE_USE_FSDP: 'true', FSDP_VERSION: '1'}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  \
             trainer:\n    command: [python, train.py, --batch, '{per_device_batch_size}']\n    \
             environment: {ACCELERATE_USE_FSDP: 'true', FSDP_VERSION: '2'}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let trainer = &case.spec().trainer;
    if !trainer.is_external() {
        return;
    }
    let second = trainer
        .environment
        .get("FSDP_VERSION")
        .is_some_and(|version| version == "2");
    if case.recipe.dialect == Dialect::Halos {
        findings.at(
            &["trainer.command"],
            "HALOs restores its weights after a restart, but not its optimiser's state, and after a second restart it \
             trains samples again",
            "compare the losses after a restart; docs/external-trainer.md shows by how much they differed",
        );
    } else if trainer.uses_fsdp() && !second {
        findings.at(
            &["trainer.environment"],
            "accelerate restores the parameters of FSDP 1 after a restart, but not the optimiser's state",
            "set `fsdp_version: 2` in the accelerate config",
        );
    } else if !trainer.uses_fsdp() && may_choose_fsdp_1(case) {
        findings.at(
            &["parallel.strategy"],
            "transformers may shard with FSDP 1, with which the optimiser's state is not restored after a restart",
            "set `version: 2` in `fsdp_config`, in the recipe or as JSON in the command",
        );
    }
    let typed = trainer_command::typed(&trainer.command, SAVE_ONLY_MODEL).is_some();
    let only_model = trainer_command::switches_on(&trainer.command, SAVE_ONLY_MODEL)
        || (!trainer.saves_optimizer && !typed);
    if only_model {
        let key = if trainer.saves_optimizer {
            format!("`{SAVE_ONLY_MODEL}`")
        } else {
            case.key("trainer.saves_optimizer")
        };
        findings.at(
            &["trainer.saves_optimizer", "trainer.command"],
            format!(
                "with {key} checkpoints lack the optimiser's state, so it begins again after every restart"
            ),
            "remove it",
        );
    }
}

/// The argument of transformers for checkpoints without the optimiser.
const SAVE_ONLY_MODEL: &str = "save_only_model";

/// Whether transformers shards by its own arguments, and not certainly with FSDP 2.
fn may_choose_fsdp_1(case: &Case<'_>) -> bool {
    let trainer = &case.spec().trainer;
    let typed = |key| trainer_command::typed(&trainer.command, key).map(|(_, value)| value);
    let shards = match typed("fsdp") {
        Some(value) => !["", "no_shard", "false", "False"].contains(&value.as_str()),
        None => {
            let strategy = case.recipe.value_sources.get("parallel.strategy");
            let sharded = case.spec().parallel.strategy != Strategy::Ddp;
            sharded && strategy.is_some_and(|source| source.key == "fsdp")
        }
    };
    let second = match typed("fsdp_config") {
        Some(config) => has_version_2(&config),
        None => {
            let hybrid = typed("fsdp").is_some_and(|words| words.contains("hybrid_shard"));
            trainer.chooses_fsdp_2 && !hybrid
        }
    };
    shards && !second
}

/// Whether a typed `fsdp_config` has transformers' default version, 2. A file's name is no JSON.
fn has_version_2(config: &str) -> bool {
    let config = serde_json::from_str(config).unwrap_or(Value::Null);
    let version = config.get("version").or_else(|| config.get("fsdp_version"));
    match version {
        Some(version) => version == 2 || version == "2",
        None => config.is_object(),
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::only;
    use crate::recipe::{self, Request};

    fn found(more: &str, command: &str) -> Vec<String> {
        let text = format!(
            "per_device_train_batch_size: 4\n{more}evenkeel: {{objective: sft, batch: {{gpus: 2}}}}\n"
        );
        let request = Request {
            path: "sft.yaml".into(),
            trainer_command: command.split(' ').map(str::to_owned).collect(),
            ..Request::default()
        };
        let recipe = recipe::read_text(&request, text).unwrap();
        let found = only("optimizer-state-lost", &recipe, &PlanRequest::gpus(2));
        found.into_iter().map(|found| found.message).collect()
    }

    #[test]
    fn fsdp_1_of_transformers_own_arguments_is_reported() {
        let train = "python train.py {args}";
        let sharded = "fsdp: full_shard auto_wrap\n";
        let second = format!("{sharded}fsdp_config: {{version: 2}}\n");
        let message = "transformers may shard with FSDP 1, with which the optimiser's state is not restored after a \
                       restart";
        let first = format!("{sharded}fsdp_config: {{fsdp_version: 1}}\n");
        let of_command = format!("{train} --fsdp shard_grad_op");
        for (recipe, command) in [
            (&*first, train),
            ("fsdp: true\nfsdp_config: fsdp.json\n", train),
            ("fsdp: hybrid_shard\n", train),
            ("", &format!("{train} --fsdp hybrid_shard")),
            (&second, &format!("{train} --fsdp_config fsdp.json")),
            (sharded, &format!("{train} --fsdp_config {{\"version\":1}}")),
        ] {
            assert_eq!(found(recipe, command), [message], "{recipe} {command}");
        }
        for (recipe, command) in [
            (&*second, train),
            (sharded, train),
            (
                "fsdp: true\nfsdp_config: {reshard_after_forward: true}\n",
                train,
            ),
            ("fsdp: true\nfsdp_config: '{\"version\": 2}'\n", train),
            ("", &of_command),
            ("fsdp: no_shard\n", train),
            (sharded, &format!("{train} --fsdp=no_shard")),
            (sharded, &format!("{train} --fsdp_config {{\"version\":2}}")),
            (
                "",
                &format!("{of_command} --fsdp_config {{\"fsdp_version\":2}}"),
            ),
        ] {
            assert!(found(recipe, command).is_empty(), "{recipe} {command}");
        }
    }

    #[test]
    fn checkpoints_without_the_optimiser_are_reported() {
        let train = "python train.py {args}";
        let message = "with `save_only_model` checkpoints lack the optimiser's state, so it begins again after every \
                       restart";
        assert_eq!(found("save_only_model: true\n", train), [message]);
        let of_command = found("", &format!("{train} --save_only_model true"));
        assert_eq!(of_command.len(), 1);
        let off = format!("{train} --save_only_model false");
        for (recipe, command) in [
            ("", train),
            ("save_only_model: false\n", train),
            ("save_only_model: true\n", &off),
        ] {
            assert!(found(recipe, command).is_empty(), "{recipe} {command}");
        }
    }
}
