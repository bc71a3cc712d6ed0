//! What the built-in trainer does with the keys of the HALOs and direct-preference-optimization trees: each is read,
//! without effect on the weights, or refused with the values that would change them.

use super::handbook::effects::is_neutral;
use super::preference::Kind;
use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::Objective;
use crate::recipe::schema::untrained::{Effect, Keys, Untrained, UntrainedReason};
use crate::recipe::syntax::node::{Entry, Node, Value, joined};
use crate::recipe::syntax::scalar::Schema;
use crate::recipe::syntax::source::FileId;
use crate::recipe::syntax::words::Words;

/// HALOs 4831988 `launch.py`, `train/trainers.py`, `train/dataloader.py`, and keys that its older revisions had.
const HALOS: Keys = Keys {
    read: Words(
        "beta1 beta2 datasets debug eval_every exp_name intermediate_checkpoints local_run_dir loss.dataloader \
         loss.trainer lr model.activation_checkpointing model.attn_implementation model.batch_size \
         model.eval_batch_size model.gradient_accumulation_steps model.load_from \
         model.max_grad_norm model.max_length model.max_prompt_length model.name_or_path model.peft.lora_alpha \
         model.peft.lora_dropout model.peft.lora_r model.peft.target_modules model.policy_dtype model.tokenizer_name_or_path model.use_flash_attention model.use_peft n_epochs \
         n_eval_examples n_examples optimizer seed test_datasets train_datasets use_fsdp warmup warmup_steps \
         weight_decay",
    ),
    without_effect: Words(
        "assistant_prefix assistant_suffix cache_dir cache_reference_logprobs do_first_eval eps frac_unique_desirable \
         frac_unique_undesirable fsdp_port human_prefix human_suffix humanline_M humanline_alpha humanline_beta_P humanline_beta_R humanline_gamma \
         humanline_gamma_P humanline_gamma_R humanline_iters load_reference_logprobs log_epsilon_P log_epsilon_R \
         loss.average_log_probs loss.name loss.policy_hf_model_class loss.reference_hf_model_class \
         loss.rejected_control_token loss.sync_reference loss.use_reference_model minimum_log_interval_secs mode \
         model.block_name model.eval_microbatch_size model.microbatch_size model.reference_dtype \
         model.reward_model model.v_head_max_grad_norm n_samples num_samples_per_prompt samples_dir \
         sampling_datasets sampling_mode save_every saved_policy sync_every sync_reference top_p trainer \
         wandb",
    ),
    unsupported: &[
        ("feedback_type", &["pairwise"]),
        ("humanline", &["false"]),
        ("loss.chosen_control_token", &[]),
        ("loss.control_tokens", &[]),
        ("model.from_checkpoint", &[]),
        ("model.fsdp_policy_mp", &[]),
        ("model.load_lora_from", &[]),
        ("online", &["false"]),
        ("step_scheduler_with_optimizer", &["false"]),
        ("template_tokens", &[]),
    ],
};

/// direct-preference-optimization f8b8c0f, `train.py`, `trainers.py`, `preference_datasets.py`.
const DPO: Keys = Keys {
    read: Words(
        "activation_checkpointing batch_size datasets debug eval_batch_size eval_every exp_name \
         gradient_accumulation_steps local_dirs local_run_dir loss.name lr max_grad_norm max_length \
         model.block_name model.fsdp_policy_mp model.name_or_path model.policy_dtype \
         model.tokenizer_name_or_path n_epochs n_eval_examples n_examples optimizer seed trainer warmup_steps",
    ),
    without_effect: Words(
        "do_first_eval fsdp_port loss.beta loss.label_smoothing loss.reference_free minimum_log_interval_secs \
         model.reference_dtype n_eval_model_samples sample_during_eval wandb",
    ),
    unsupported: &[("max_prompt_length", &[]), ("model.archive", &[])],
};

/// The keys of HALOs' losses over preferences, where they differ from those of supervised fine-tuning.
const HALOS_PREFERENCES: Keys = Keys {
    read: Words(
        "loss.OR_scale loss.beta loss.desirable_weight loss.epsilon loss.gamma_beta_ratio loss.tau loss.undesirable_weight",
    ),
    without_effect: Words(""),
    unsupported: &[
        ("frac_unique_desirable", &["1.0", "1"]),
        ("frac_unique_undesirable", &["1.0", "1"]),
        ("loss.sync_reference", &["false"]),
        // Upstream drops inputs of adapters in these losses too.
        ("model.peft.lora_dropout", &["0"]),
        ("sync_reference", &["false"]),
    ],
};

/// The same of direct-preference-optimization.
const DPO_PREFERENCES: Keys = Keys {
    read: Words("loss.beta loss.label_smoothing loss.reference_free max_prompt_length"),
    without_effect: Words(""),
    unsupported: &[],
};

/// The keys of a tree with `loss=sft`.
pub(crate) fn keys(kind: Kind) -> &'static Keys {
    match kind {
        Kind::Halos => &HALOS,
        Kind::Dpo => &DPO,
    }
}

/// The keys that losses over preferences treat differently.
pub(crate) fn keys_of_preferences(kind: Kind) -> &'static Keys {
    match kind {
        Kind::Halos => &HALOS_PREFERENCES,
        Kind::Dpo => &DPO_PREFERENCES,
    }
}

/// Keys without effect upstream either, of which the reader tells.
const NOTED: Words = Words("eps save_every");

/// Finds the keys of a composed config by which the built-in trainer does not train. Those without effect count only where
/// the user typed them: a tree has many that the user did not choose. `more`: keys that the version of the tree reads beside
/// those of its kind.
pub(crate) fn find(
    (config, kind, more): (&Node, Kind, &[&str]),
    objective: Objective,
    command_line: Option<FileId>,
    reading: &mut Reading,
) {
    let typed = |entry: &Entry| Some(entry.value.span.file) == command_line;
    let own = (!objective.is_likelihood()).then(|| keys_of_preferences(kind));
    let adapts = config.get_path("model.use_peft");
    let adapts = adapts.is_some_and(|asked| asked.is_bool(true, Schema::OmegaConf));
    let effect = |key: &str| {
        if more.contains(&key) {
            return Some(Effect::Read);
        }
        let of_preferences = own.and_then(|own| own.effect(key));
        let effect = of_preferences.or_else(|| keys(kind).effect(key))?;
        let is_idle = !adapts && key.starts_with("model.peft.");
        Some(if is_idle { Effect::None } else { effect })
    };
    below(config, "", &effect, &mut |key, entry, reason| {
        let named = typed(entry) && !NOTED.has(key);
        if reason != UntrainedReason::NoEffect || named {
            reading.untrained.push(Untrained {
                key: key.to_owned(),
                value: entry.value.shown().to_owned(),
                span: entry.name_span,
                reason,
            });
        }
    });
}

/// Calls `found` for every key below a mapping by which the built-in trainer does not train.
fn below(
    mapping: &Node,
    path: &str,
    effect: &dyn Fn(&str) -> Option<Effect>,
    found: &mut impl FnMut(&str, &Entry, UntrainedReason),
) {
    for entry in mapping.entries().unwrap_or_default() {
        let key = joined(path, &entry.name);
        let reason = match effect(&key) {
            _ if ["defaults", RESERVED].contains(&&*key) => continue,
            Some(Effect::Read) => continue,
            Some(Effect::Unsupported(neutral)) if is_neutral(&entry.value, neutral) => continue,
            Some(Effect::Unsupported(neutral)) => {
                let value = neutral.first().unwrap_or(&"null");
                UntrainedReason::Unsupported(Some(format!("{key}={value}")))
            }
            _ if matches!(entry.value.value, Value::Mapping(_)) => {
                below(&entry.value, &key, effect, found);
                continue;
            }
            Some(Effect::None) => UntrainedReason::NoEffect,
            None => UntrainedReason::Unknown,
        };
        found(&key, entry, reason);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::recipe::{Recipe, Request, UntrainedReason, corpus, read};

    const HALOS: &str = "ContextualAI__HALOs/4831988636/config";
    const DPO: &str = "eric-mitchell__direct-preference-optimization/f8b8c0f49d/config";

    fn tree(place: &str, overrides: &[&str]) -> Option<Recipe> {
        let path = corpus::root()?.join(place);
        let overrides = overrides.iter().map(|text| (*text).to_owned()).collect();
        let request = Request {
            path,
            overrides,
            ..Request::default()
        };
        Some(read(&request).unwrap_or_else(|error| panic!("{:?}", error.diagnostics)))
    }

    /// The supervised recipe of a tree, and its keys by which the built-in trainer does not train.
    fn untrained(place: &str, more: &[&str]) -> Option<Vec<(String, UntrainedReason)>> {
        let mut overrides = match place {
            HALOS => vec![
                "loss=sft",
                "model=llama",
                "train_datasets=[a.jsonl]",
                "test_datasets=[a.jsonl]",
            ],
            _ => vec!["loss=sft", "model=pythia28", "trainer=FSDPTrainer"],
        };
        overrides.extend(["exp_name=x"].iter().chain(more));
        let recipe = tree(place, &overrides)?;
        let untrained = recipe.untrained.into_iter();
        Some(untrained.map(|found| (found.key, found.reason)).collect())
    }

    #[test]
    fn every_key_of_the_trees_is_known() {
        for (place, more) in [(HALOS, &[][..]), (DPO, &["max_prompt_length=null"])] {
            let Some(found) = untrained(place, more) else {
                return;
            };
            assert_eq!(found, [], "{place}");
        }
    }

    #[test]
    fn a_key_that_changes_weights_is_refused_and_a_typed_one_without_effect_is_named() {
        let instead = |text: &str| UntrainedReason::Unsupported(Some(text.to_owned()));
        for (place, typed, expected) in [
            (HALOS, "humanline=true", instead("humanline=false")),
            (HALOS, "online=true", instead("online=false")),
            (
                HALOS,
                "model.load_lora_from=x",
                instead("model.load_lora_from=null"),
            ),
            (HALOS, "wandb.enabled=false", UntrainedReason::NoEffect),
            (HALOS, "model.peft.lora_alpha=8", UntrainedReason::NoEffect),
            (HALOS, "++model.shape=8", UntrainedReason::Unknown),
            (
                HALOS,
                "++model.peft.use_rslora=true",
                UntrainedReason::Unknown,
            ),
            (DPO, "++model.use_peft=true", UntrainedReason::Unknown),
            (
                DPO,
                "model.archive=policy.pt",
                instead("model.archive=null"),
            ),
            (DPO, "sample_during_eval=false", UntrainedReason::NoEffect),
            (DPO, "++loss.gamma=1", UntrainedReason::Unknown),
            (
                DPO,
                "max_prompt_length=8",
                instead("max_prompt_length=null"),
            ),
            (
                HALOS,
                "template_tokens=[x]",
                instead("template_tokens=null"),
            ),
        ] {
            let mut more = vec![typed];
            if place == DPO && !typed.starts_with("max") {
                more.push("max_prompt_length=null");
            }
            let Some(found) = untrained(place, &more) else {
                return;
            };
            let key = typed.trim_start_matches('+').split('=').next().unwrap();
            assert_eq!(found, [(key.to_owned(), expected)], "{typed}");
        }
    }

    #[test]
    fn adapters_are_those_of_the_tree_or_are_refused() {
        let usual = [
            "model=llama",
            "train_datasets=[a.json]",
            "test_datasets=[a.json]",
            "exp_name=x",
            "model.use_peft=true",
        ];
        let mut shown = Vec::new();
        for lines in [
            &["loss=sft"][..],
            &[
                "loss=sft",
                "model.peft.lora_r=8",
                "model.peft.lora_alpha=16",
                "model.peft.target_modules=[q_proj,v_proj]",
            ],
            &["loss=sft", "model.peft.target_modules=null"],
            &["loss=sft", "model.peft.target_modules=.*_proj"],
            &["loss=sft", "model.peft.lora_alpha=null"],
            &["loss=dpo"],
            &["loss=kto", "model.peft.lora_dropout=0.0"],
        ] {
            let Some(recipe) = tree(HALOS, &[&usual[..], lines].concat()) else {
                return;
            };
            let model = &recipe.spec.model;
            shown.push(format!(
                "{}: {} {:?} {:?} {} {:?} {} {:?}",
                lines.join(" "),
                model.adapters,
                model.lora_rank,
                model.lora_alpha,
                model.lora_dropout,
                model.lora_target_modules,
                model.use_rslora,
                (recipe.untrained.iter())
                    .map(|it| (&it.key, &it.reason))
                    .collect::<Vec<_>>()
            ));
        }
        insta::assert_snapshot!(shown.join("\n"));
    }

    /// What the losses of the trees set, beside the defaults.
    #[test]
    fn losses_over_preferences_are_read() {
        let halos = [
            "model=llama",
            "train_datasets=[a.json]",
            "test_datasets=[a.json]",
        ];
        let dpo = ["model=pythia28", "trainer=FSDPTrainer"];
        let mut shown = Vec::new();
        for (place, usual, lines) in [
            (HALOS, &halos[..], &["loss=dpo"][..]),
            (
                HALOS,
                &halos,
                &["loss=dpo", "loss.trainer=CDPOTrainer", "++loss.epsilon=0.2"],
            ),
            (
                HALOS,
                &halos,
                &["loss=dpo", "loss.trainer=IPOTrainer", "++loss.tau=0.3"],
            ),
            (HALOS, &halos, &["loss=simpo"]),
            (HALOS, &halos, &["loss=kto", "loss.desirable_weight=1.5"]),
            (
                DPO,
                &dpo,
                &["loss=dpo", "loss.beta=0.2", "loss.label_smoothing=0.1"],
            ),
            (
                DPO,
                &dpo,
                &[
                    "loss=dpo",
                    "loss.beta=0.2",
                    "loss.name=ipo",
                    "datasets=[a.jsonl]",
                ],
            ),
        ] {
            let overrides = [usual, lines, &["exp_name=x"]].concat();
            let Some(recipe) = tree(place, &overrides) else {
                return;
            };
            assert_eq!(recipe.untrained, [], "{lines:?}");
            let spec = &recipe.spec;
            let both = json!({
                "preference": spec.preference, "rows": spec.data.rows, "on": spec.optimizer.weight_decay_on,
                "start": spec.learning_rate.warmup_start, "split": spec.data.train[0].feedback_split,
            });
            shown.push(format!(
                "{} {}",
                lines.join(" "),
                both.to_string().replace('"', "")
            ));
        }
        insta::assert_snapshot!(shown.join("\n"));
    }

    #[test]
    fn other_losses_over_preferences_are_refused() {
        let instead = |text: &str| UntrainedReason::Unsupported(Some(text.to_owned()));
        let usual = [
            "model=llama",
            "train_datasets=[a.json]",
            "test_datasets=[a.json]",
            "exp_name=x",
        ];
        for (lines, key, reason) in [
            (
                &["loss=dpo", "loss.trainer=SLiCTrainer"][..],
                "loss.trainer",
                instead("loss=dpo"),
            ),
            (
                &["loss=dpo", "loss.trainer=ORPOTrainer"],
                "loss.trainer",
                instead("loss=dpo"),
            ),
            (
                &["loss=kto", "loss.dataloader=HalfPrefDataLoader"],
                "loss.dataloader",
                instead("loss=dpo"),
            ),
            (
                &["loss=kto", "frac_unique_desirable=0.5"],
                "frac_unique_desirable",
                instead("frac_unique_desirable=1.0"),
            ),
            (
                &["loss=dpo", "loss.sync_reference=true"],
                "loss.sync_reference",
                instead("loss.sync_reference=false"),
            ),
        ] {
            let Some(recipe) = tree(HALOS, &[&usual[..], lines].concat()) else {
                return;
            };
            let found: Vec<_> = recipe
                .untrained
                .iter()
                .map(|it| (it.key.as_str(), &it.reason))
                .collect();
            assert_eq!(found, [(key, &reason)], "{lines:?}");
        }
    }
}
