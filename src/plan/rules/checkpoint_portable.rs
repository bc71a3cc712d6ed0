//! `checkpoint-portable`: an external trainer's checkpoint loads in another world.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::schema::placeholder::{self, DEEPSPEED_CONFIG, RECIPE};
use crate::recipe::schema::spec::Strategy;
use crate::recipe::{Dialect, Severity, trainer_command};

pub(super) const RULE: Rule = Rule {
    id: "checkpoint-portable",
    severity: Severity::Error,
    summary: "an external trainer's checkpoint would not load in another world",
    why: "When devices come or go, Evenkeel starts the program again in another world, and the program loads its \
newest checkpoint there. Checkpoints with a part for each rank load only in a world of the same size, unless they \
can be converted. Evenkeel converts those of DeepSpeed's ZeRO to universal checkpoints, and must then set \
`checkpoint.load_universal` in the DeepSpeed config of the program. direct-preference-optimization saves checkpoints, \
but has no argument to continue from them. docs/external-trainer.md says for each trainer \
and sharding what its checkpoint needs.",
    upstream: "accelerate 1.15.0 `utils/fsdp_utils.py` and transformers 5.23.0 `trainer.py` \
(`_load_from_checkpoint` finds no checkpoint with `LOCAL_STATE_DICT`). DeepSpeed 0.19.8 `runtime/zero/` refuses a \
checkpoint of another data-parallel size; `checkpoint/ds_to_universal.py` converts it. direct-preference-optimization \
f8b8c0f `train.py` loads only `model.archive`, the weights of a policy.",
    wrong: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  \
             trainer:\n    command: [python, train.py, --batch, '{per_device_batch_size}']\n    \
             environment: {ACCELERATE_USE_FSDP: 'true', FSDP_STATE_DICT_TYPE: LOCAL_STATE_DICT}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  \
             trainer:\n    command: [python, train.py, --batch, '{per_device_batch_size}']\n    \
             environment: {ACCELERATE_USE_FSDP: 'true', FSDP_VERSION: '2', FSDP_STATE_DICT_TYPE: SHARDED_STATE_DICT}\n"
        ),
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let trainer = &spec.trainer;
    let elasticity = &spec.elasticity;
    let fixed = elasticity.min.is_some() && elasticity.min == elasticity.max;
    if !trainer.is_external() {
        return;
    }
    // accelerate also takes the number of the type.
    let state = trainer.environment.get("FSDP_STATE_DICT_TYPE");
    let local =
        state.is_some_and(|kind| ["LOCAL_STATE_DICT", "2"].contains(&&*kind.to_uppercase()));
    if local && trainer.uses_fsdp() {
        findings.at(
            &["trainer.environment"],
            "with `LOCAL_STATE_DICT` every rank saves its own part, and transformers loads it in no world",
            "set `fsdp_version: 2` and `fsdp_state_dict_type: SHARDED_STATE_DICT` in the accelerate config",
        );
    }
    if !fixed && case.recipe.dialect == Dialect::Dpo && trainer.resume.is_empty() {
        findings.at(
            &["trainer.command"],
            "direct-preference-optimization cannot continue from its checkpoints, so every other world would begin \
             again at step 0",
            format!(
                "keep one world, with the same {} and {}; if your program can continue, set {}",
                case.key("elasticity.min"),
                case.key("elasticity.max"),
                case.key("trainer.resume")
            ),
        );
    }
    if !fixed && spec.parallel.strategy != Strategy::Ddp && uses_unwritten_config(case) {
        findings.at(
            &["trainer.command"],
            "ZeRO's checkpoints load in another world only with `checkpoint.load_universal` in the DeepSpeed \
             config, which evenkeel cannot set in this command",
            format!(
                "add `--deepspeed {{deepspeed_config}}` to the command, or keep one world, with the same {} and {}",
                case.key("elasticity.min"),
                case.key("elasticity.max")
            ),
        );
    }
}

/// Whether the program uses a DeepSpeed config that Evenkeel does not write.
fn uses_unwritten_config(case: &Case<'_>) -> bool {
    let recipe = case.recipe;
    let trainer = &case.spec().trainer;
    let command = &trainer.command;
    let alone = recipe.dialect == Dialect::Deepspeed;
    let written = trainer.deepspeed_config.is_some()
        || placeholder::is_used(command, DEEPSPEED_CONFIG)
        || trainer_command::deepspeed_word(command).is_some()
        || (alone && placeholder::is_used(command, RECIPE))
        || (!alone && trainer_command::arguments_win(command));
    (alone || recipe.files.deepspeed.is_some()) && !written
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::schema::spec::Elasticity;
    use crate::recipe::{self, Dialect, Recipe, Request};

    #[test]
    fn an_elastic_launch_of_dpo_is_refused_unless_its_program_can_resume() {
        let mut recipe = recipe();
        recipe.dialect = Dialect::Dpo;
        let found = |recipe: &Recipe| only("checkpoint-portable", recipe, &PlanRequest::gpus(8));
        assert!(found(&recipe).is_empty(), "the built-in trainer");
        recipe.spec.trainer.command = vec!["train.py".to_owned()];
        let refused = found(&recipe);
        insta::assert_snapshot!(refused[0].help, @"keep one world, with the same `evenkeel.elasticity.min` and `evenkeel.elasticity.max`; if your program can continue, set `evenkeel.trainer.resume`");
        let mut resumes = recipe.clone();
        resumes.spec.trainer.resume = vec!["{checkpoint}".to_owned()];
        assert!(found(&resumes).is_empty());
        recipe.spec.elasticity.min = Some(8);
        assert_eq!(found(&recipe).len(), 1);
        recipe.spec.elasticity.max = Some(8);
        assert!(found(&recipe).is_empty());
    }

    #[test]
    fn a_deepspeed_config_that_evenkeel_does_not_write_is_refused_unless_the_world_is_fixed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("ds.json");
        let config = r#"{"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}"#;
        std::fs::write(&file, config).unwrap();
        let text = format!(
            "per_device_train_batch_size: 4\ndeepspeed: {}\n\
             evenkeel: {{objective: sft, batch: {{gpus: 2}}}}\n",
            file.display()
        );
        let request = Request {
            path: "sft.yaml".into(),
            ..Request::default()
        };
        let mut recipe = recipe::read_text(&request, text).unwrap();
        let mut count = |command: &str, elasticity: Elasticity| {
            recipe.spec.trainer.command = command.split(' ').map(str::to_owned).collect();
            recipe.spec.elasticity = elasticity;
            only("checkpoint-portable", &recipe, &PlanRequest::gpus(2)).len()
        };
        let any = Elasticity::default;
        assert_eq!(count("python train.py {recipe}", any()), 1);
        for command in [
            "python train.py {args}",
            "python train.py --config {recipe}",
            "python train.py {recipe} --deepspeed {deepspeed_config}",
            "python train.py {recipe} --deepspeed=mine.json",
        ] {
            assert_eq!(count(command, any()), 0, "{command}");
        }
        let fixed = Elasticity {
            min: Some(2),
            max: Some(2),
        };
        assert_eq!(count("python train.py {recipe}", fixed), 0);
    }
}
