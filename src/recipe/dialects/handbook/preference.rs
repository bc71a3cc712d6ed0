//! The keys of TRL's trainers over preferences: DPO, KTO, ORPO and CPO with SimPO.
//!
//! Sources: the wheels of TRL 0.9.6 to 1.16.0, `trainer/{dpo,kto,orpo,cpo}_trainer.py` and their configs, since 0.26 partly in
//! `experimental/`; SimPO's own `simpo_config.py` (princeton-nlp/SimPO 1b3e8f3).

use super::values::Values;
use super::versions::Versions;
use crate::recipe::schema::spec::Objective;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::schema::untrained::{Effect, Keys};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::words::Words;

/// Keys that these trainers have and others do not, or treat differently. Those of the data and of the batch are shared by all
/// trainers.
pub(super) const KEYS: Keys = Keys {
    read: Words(
        "beta cpo_alpha desirable_weight gamma gamma_beta_ratio label_smoothing loss_type max_completion_length max_length \
         max_prompt_length reference_free rpo_alpha sft_weight simpo_gamma truncation_mode undesirable_weight",
    ),
    without_effect: Words(
        "base_model_attribute_name disable_dropout discopop_tau f_alpha_divergence_coef force_use_ref_model \
         generate_during_eval is_encoder_decoder label_pad_token_id label_smoothing_factor max_density_ratio \
         max_target_length min_density_ratio model_adapter_name padding_value precompute_ref_batch_size precompute_ref_log_probs \
         prompt_sample_size ref_adapter_name ref_model_mixup_alpha ref_model_sync_steps use_liger_loss \
         use_logits_to_keep use_num_logits_to_keep",
    ),
    unsupported: &[
        ("alpha", &["0"]),
        ("f_divergence_type", &["reverse_kl"]),
        ("ld_alpha", &["1"]),
        ("loss_weights", &["1"]),
        ("neftune_noise_alpha", &["0"]),
        ("ref_model_init_kwargs", &[]),
        ("sync_ref_model", &["false"]),
        ("tools", &[]),
        ("use_weighting", &["false"]),
    ],
};

/// What the built-in trainer does with one of [`KEYS`].
pub(super) fn effect(key: &str, objective: Objective) -> Option<Effect> {
    // The others cut only encoders' rows by it.
    if key == "max_completion_length" && objective != Objective::Dpo {
        return Some(Effect::None);
    }
    KEYS.effect(key)
}

/// The losses of DPO and of CPO, with their native names.
const LOSSES: [(&str, &str); 5] = [
    ("sigmoid", "sigmoid"),
    ("robust", "robust"),
    ("hinge", "hinge"),
    ("ipo", "ipo"),
    ("simpo", "sigmoid"),
];

/// The only loss that `loss_type` names, which may be a list of one; `None` for another, which is not trained.
fn loss(objective: Objective, node: &Node) -> Option<&str> {
    let [item] = node.items().unwrap_or(std::slice::from_ref(node)) else {
        return None;
    };
    let name = item.text()?;
    let known = match objective {
        Objective::Dpo => LOSSES[..4].iter().any(|(known, _)| *known == name),
        Objective::Cpo => name != "robust" && LOSSES.iter().any(|(known, _)| *known == name),
        Objective::Kto => name == "kto",
        _ => false,
    };
    known.then_some(name)
}

/// The value that the built-in trainer trains by in place of that of a key that it reads; `None` if it trains by it.
pub(super) fn instead(
    key: &str,
    value: &Node,
    objective: Objective,
    versions: Versions,
) -> Option<&'static str> {
    if !objective.is_over_preferences() {
        return None;
    }
    match key {
        "loss_type" if loss(objective, value).is_none() => Some(match objective {
            Objective::Kto => "loss_type=kto",
            _ => "loss_type=sigmoid",
        }),
        // The likelihood had the weight 1, and the loss that of the key.
        "rpo_alpha" if !versions.trl_since(0, 10) => Some("rpo_alpha=null"),
        _ => None,
    }
}

/// Translates the loss and the rules for rows.
pub(super) fn translate(
    objective: Objective,
    values: &Values,
    versions: Versions,
    tree: &mut Tree,
) {
    rows(objective, values, versions, tree);
    tree.plain_if("preference.beta", values.float("beta"));
    match objective {
        Objective::Dpo => dpo(values, versions, tree),
        Objective::Cpo => cpo(values, tree),
        Objective::Kto => {
            for key in ["desirable_weight", "undesirable_weight"] {
                tree.plain_if(&format!("preference.{key}"), values.float(key));
            }
        }
        _ => {}
    }
}

/// The name of the loss, as far as it is trained.
fn named<'n>(objective: Objective, values: &'n Values<'_>) -> Option<Given<&'n str>> {
    let node = values.node("loss_type")?;
    loss(objective, node).map(|name| Given::new("loss_type", name, node.span))
}

fn put_loss(name: Option<&Given<&str>>, tree: &mut Tree) {
    let native = name.and_then(|given| {
        let (_, native) = LOSSES.iter().find(|(known, _)| *known == given.value)?;
        Some(given.with(*native))
    });
    tree.plain_if("preference.loss", native);
}

fn dpo(values: &Values, versions: Versions, tree: &mut Tree) {
    let name = named(Objective::Dpo, values);
    put_loss(name.as_ref(), tree);
    let is = |wanted: &str| name.as_ref().is_some_and(|given| given.value == wanted);
    if is("ipo") {
        tree.default("preference.by_token", true);
    }
    // TRL 0.29.0 and later: only the robust loss has it.
    let is_sigmoid = name.is_none() || is("sigmoid");
    if is("robust") || is_sigmoid && !versions.trl_since(0, 29) {
        smoothing(values, tree);
    }
    tree.plain_if("preference.reference_free", values.bool("reference_free"));
    if versions.trl_since(0, 10) {
        let weight = values.float("rpo_alpha");
        tree.plain_if("preference.likelihood_weight", weight);
    }
}

fn smoothing(values: &Values, tree: &mut Tree) {
    let smoothing = values.float("label_smoothing");
    tree.plain_if("preference.label_smoothing", smoothing);
}

/// CPO, SimPO as a loss of CPO, and SimPO by its own config.
fn cpo(values: &Values, tree: &mut Tree) {
    let name = named(Objective::Cpo, values);
    put_loss(name.as_ref(), tree);
    let of_simpo = ["gamma_beta_ratio", "gamma", "sft_weight"];
    let is_own = of_simpo.iter().any(|key| values.node(key).is_some());
    let name = name.map_or("sigmoid", |given| given.value);
    let is_simpo = is_own || name == "simpo";
    let beta = values.float("beta");
    if is_simpo && !is_own && beta.is_none() {
        tree.default("preference.beta", 0.1);
    }
    let beta = beta.map_or(if is_own { 2.0 } else { 0.1 }, |beta| beta.value);
    if name == "ipo" {
        tree.default("preference.by_token", true);
    }
    if is_simpo {
        tree.default("objective", Objective::Simpo);
        if !is_own {
            tree.default("preference.target_margin", 0.5 / beta);
            tree.default("preference.likelihood_weight", 1.0);
        }
        let by_beta = |key: &str| {
            let gamma = values.float(key)?;
            Some(gamma.with(gamma.value / beta))
        };
        let margin = values.float("gamma_beta_ratio");
        let margin = margin.or_else(|| by_beta("gamma"));
        let margin = margin.or_else(|| by_beta("simpo_gamma"));
        tree.plain_if("preference.target_margin", margin);
    }
    let weight = values.float("sft_weight");
    let weight = weight.or_else(|| values.float("cpo_alpha"));
    tree.plain_if("preference.likelihood_weight", weight);
    if name != "hinge" && name != "ipo" {
        smoothing(values, tree);
    }
}

/// How prompts and completions become rows, by the trainer's version.
fn rows(objective: Objective, values: &Values, versions: Versions, tree: &mut Tree) {
    let since = |major, minor| versions.trl_since(major, minor);
    let tokens = match objective {
        Objective::Dpo if since(0, 29) => "together",
        Objective::Dpo if since(0, 27) => "apart",
        Objective::Dpo if since(0, 12) => "apart-ended",
        Objective::Kto if since(1, 3) => "together",
        _ => "together-ended",
    };
    tree.default("data.rows.tokens", tokens);
    // Since then only the row has a limit.
    let later = match objective {
        Objective::Dpo => since(0, 29),
        Objective::Kto => since(0, 27),
        _ => since(0, 28),
    };
    let mode = values.text("truncation_mode");
    let is_end = |default| {
        mode.as_ref()
            .map_or(default, |mode| mode.value == "keep_end")
    };
    let by_prompt = later || (objective == Objective::Dpo && since(0, 12));
    if !by_prompt {
        tree.default("data.rows.cut", "completion");
        if !is_end(true) {
            tree.default("data.rows.prompt_keeps", "start");
        }
    } else if objective == Objective::Dpo && since(0, 14) && is_end(!later) {
        // Before 0.14 the mode has no effect.
        tree.default("data.rows.cut", "start");
    }
    if later {
        return;
    }
    if since(0, 14) || !by_prompt {
        let default = if since(0, 14) { 512 } else { 128 };
        tree.default("data.rows.max_prompt_length", default);
    }
    let prompt = values.int("max_prompt_length");
    tree.plain_if("data.rows.max_prompt_length", prompt);
    if objective == Objective::Dpo {
        let completion = values.int("max_completion_length");
        tree.plain_if("data.rows.max_completion_length", completion);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::dialects::handbook::{effects, keys};
    use crate::recipe::{Dialect, Recipe, Request, read_text};

    fn read(trainer: &str, version: &str, lines: &str) -> Recipe {
        let request = Request {
            path: format!("{trainer}/config.yaml").into(),
            dialect: Some(Dialect::HandbookTrl),
            version: Some(version.to_owned()),
            ..Request::default()
        };
        let text = format!("per_device_train_batch_size: 2\nmax_steps: 9\n{lines}");
        read_text(&request, text).unwrap_or_else(|error| panic!("{lines}: {:?}", error.diagnostics))
    }

    const TRAINERS: [(&str, Objective); 4] = [
        ("dpo", Objective::Dpo),
        ("kto", Objective::Kto),
        ("orpo", Objective::Orpo),
        ("cpo", Objective::Cpo),
    ];

    /// Every key that is read, with its trainer, a value that changes the run, and after `|` lines that it needs.
    const SAMPLES: &str = "\
dpo beta: 0.5
dpo label_smoothing: 0.1
dpo loss_type: ipo
dpo max_completion_length: 7
dpo max_length: 77
dpo max_prompt_length: 7
dpo reference_free: true
dpo rpo_alpha: 0.5
dpo truncation_mode: keep_start
kto beta: 0.5
kto desirable_weight: 0.5
kto max_length: 77
kto max_prompt_length: 7
kto truncation_mode: keep_start
kto undesirable_weight: 0.5
orpo beta: 0.5
orpo max_length: 77
orpo max_prompt_length: 7
orpo truncation_mode: keep_start
cpo beta: 0.5
cpo cpo_alpha: 0.5
cpo gamma: 0.5
cpo gamma_beta_ratio: 0.5
cpo label_smoothing: 0.1
cpo loss_type: simpo
cpo max_length: 77
cpo max_prompt_length: 7
cpo sft_weight: 0.5
cpo simpo_gamma: 0.7|loss_type: simpo
cpo truncation_mode: keep_start
";

    #[test]
    fn every_key_is_read_or_refused_or_without_effect() {
        for line in SAMPLES.lines() {
            let (trainer, rest) = line.split_once(' ').unwrap();
            let (line, more) = rest.split_once('|').unwrap_or((rest, ""));
            // The newest version with all of these keys.
            let of = |lines: &str| read(trainer, "trl-0.26", lines);
            let (with, without) = (of(&format!("{line}\n{more}\n")), of(more));
            assert_ne!(with.spec, without.spec, "{trainer}: {line}");
            assert_eq!(with.untrained, without.untrained, "{trainer}: {line}");
        }
        for (trainer, objective) in TRAINERS {
            let sampled = |key: &str| {
                let mut lines = SAMPLES.lines();
                lines.any(|line| line.starts_with(&format!("{trainer} {key}:")))
            };
            for key in keys::known(objective) {
                // Keys of all trainers are those of `effects`.
                let is_own =
                    keys::shared(key).is_none() && !keys::known(Objective::Sft).contains(&key);
                if is_own && effects::effect(key, objective) == Effect::Read {
                    let is_constant = key == "loss_type" && objective == Objective::Kto;
                    assert!(
                        sampled(key) || is_constant,
                        "{trainer}: {key} has no sample"
                    );
                }
            }
        }
        let known = |key: &str| {
            TRAINERS
                .iter()
                .any(|(_, it)| keys::known(*it).contains(&key))
        };
        let unsupported = KEYS.unsupported.iter().map(|(key, _)| *key);
        let read = KEYS.read.iter().chain(KEYS.without_effect.iter());
        let all = read.chain(unsupported);
        let mut all: Vec<&str> = all.collect();
        assert!(all.iter().all(|key| known(key)), "{all:?}");
        all.sort_unstable();
        let count = all.len();
        all.dedup();
        assert_eq!(all.len(), count, "a key is in two lists");
    }

    #[test]
    fn losses_and_rows_are_those_of_the_version() {
        let shown = |trainer: &str, version: &str, lines: &str| {
            let spec = read(trainer, version, lines).spec;
            let both = (spec.preference, spec.data.rows);
            let mut json = serde_json::to_value(both).unwrap();
            for part in json.as_array_mut().unwrap() {
                part.as_object_mut()
                    .unwrap()
                    .retain(|_, value| !value.is_null());
            }
            json.to_string().replace('"', "")
        };
        let zephyr = "beta: 0.01\nmax_length: 1024\nmax_prompt_length: 512\n";
        insta::assert_snapshot!(
            [
                shown("dpo", "trl-0.9", zephyr),
                shown("dpo", "trl-0.12", zephyr),
                shown("dpo", "trl-0.26", zephyr),
                shown("dpo", "trl-0.28", "label_smoothing: 0.1\n"),
                shown(
                    "dpo",
                    "trl-1.16",
                    "label_smoothing: 0.1\ntruncation_mode: keep_end\n"
                ),
                shown(
                    "dpo",
                    "trl-1.16",
                    "loss_type: [robust]\nlabel_smoothing: 0.1\n"
                ),
                shown("dpo", "trl-1.16", "loss_type: ipo\n"),
                shown("kto", "trl-0.26", zephyr),
                shown("kto", "trl-1.16", "undesirable_weight: 0.5\n"),
                shown("orpo", "trl-0.26", zephyr),
                shown("orpo", "trl-1.16", ""),
                shown("cpo", "trl-1.16", ""),
                shown(
                    "cpo",
                    "trl-1.16",
                    "loss_type: simpo\nbeta: 2.0\nsimpo_gamma: 1.6\ncpo_alpha: 0\n"
                ),
                shown("simpo", "trl-0.9", "gamma_beta_ratio: 0.3\nbeta: 10\n"),
            ]
            .join("\n")
        );
    }

    #[test]
    fn other_losses_are_refused_by_their_key() {
        use crate::recipe::UntrainedReason::{NoEffect, Unsupported};
        for (trainer, version, line, expected) in [
            (
                "dpo",
                "trl-1.16",
                "loss_type: [sigmoid, sft]",
                Some("loss_type=sigmoid"),
            ),
            (
                "dpo",
                "trl-0.26",
                "loss_type: aot_pair",
                Some("loss_type=sigmoid"),
            ),
            (
                "kto",
                "trl-1.16",
                "loss_type: apo_zero_unpaired",
                Some("loss_type=kto"),
            ),
            (
                "cpo",
                "trl-1.16",
                "loss_type: alphapo",
                Some("loss_type=sigmoid"),
            ),
            (
                "dpo",
                "trl-0.26",
                "use_weighting: true",
                Some("use_weighting=false"),
            ),
            (
                "dpo",
                "trl-0.26",
                "sync_ref_model: true",
                Some("sync_ref_model=false"),
            ),
            ("dpo", "trl-0.9", "rpo_alpha: 0.5", Some("rpo_alpha=null")),
            ("dpo", "trl-0.26", "disable_dropout: false", None),
        ] {
            let found = read(trainer, version, &format!("{line}\n")).untrained;
            let [found] = found.as_slice() else {
                panic!("{line}: {found:?}");
            };
            let expected = match expected {
                Some(instead) => Unsupported(Some(instead.to_owned())),
                None => NoEffect,
            };
            assert_eq!(found.reason, expected, "{line}");
        }
    }
}
