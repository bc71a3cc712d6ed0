//! What the built-in trainer supports.

use super::{Case, Check, Example, Findings, Rule, file, native, surveyed};
use crate::objective::Kl;
use crate::plan::DeviceKind;
use crate::plan::draft::axes;
use crate::plan::memory::{TRAINED, other_family};
use crate::recipe::schema::spec::{
    BatchSchedule, Determinism, Estimator, Groups, Method, Objective, Precision, Strategy,
};
use crate::recipe::{Dialect, Severity, Untrained, UntrainedReason};
use crate::util::suggest::short;

pub(super) const RULES: &[&Rule] = &[
    &TRAINER_OBJECTIVE,
    &TRAINER_PARALLELISM,
    &TRAINER_WEIGHTS,
    &TRAINER_NUMERICS,
    &TRAINER_DETERMINISM,
    &TRAINER_MODEL,
    &TRAINER_KEYS,
];

/// An example of 128 samples a step, with these keys in addition.
const fn with(keys: &'static str) -> Example {
    native("", "  batch: {global: 128, per_device_batch_size: 4}\n").and(keys)
}

const TRAINER_OBJECTIVE: Rule = Rule {
    id: "trainer-objective",
    severity: Severity::Error,
    summary: "the built-in trainer does not train this objective",
    text: include_str!("texts/trainer-objective.md"),
    wrong: native(
        "",
        "  objective: grpo\n  batch: {global: 128, per_device_batch_size: 4}\n",
    ),
    right: native(
        "",
        "  objective: sft\n  batch: {global: 128, per_device_batch_size: 4}\n",
    ),
    check: Check::Trainer(trainer_objective),
};

/// Whether the built-in trainer has the recipe's objective. Other dialects than these state losses over preferences in keys
/// that are not read.
pub(super) fn trains(case: &Case<'_>) -> bool {
    use Dialect::{Dpo, Halos, HandbookTrl, Native};
    let objective = case.spec().objective;
    let is_read = matches!(case.recipe.dialect, Native | HandbookTrl | Halos | Dpo);
    TRAINED.contains(&objective) && (objective.is_likelihood() || is_read)
}

fn trainer_objective(case: &Case<'_>, findings: &mut Findings<'_>) {
    if !trains(case) {
        let objective = case.spec().objective;
        findings.at(
            &["objective"],
            format!("the built-in trainer does not train {objective}"),
            "it trains language-modelling and sft, and dpo, kto, orpo, cpo and simpo of native recipes, TRL's, HALOs' and direct-preference-optimization's; `evenkeel plan` plans the others too",
        );
        return;
    }
    let spec = case.spec();
    if spec.objective == Objective::Kto && spec.schedule != BatchSchedule::Constant {
        findings.at(
            &["schedule"],
            "kto with a batch that changes: its KL estimate needs the batches of all steps before the first one",
            format!("set {}, or choose another objective", case.set("schedule.kind", "constant")),
        );
    }
    if spec.objective == Objective::Kto
        && spec.preference.kl == Kl::Global
        && case.recipe.dialect != Dialect::Native
    {
        findings.note(
            &["objective"],
            "the KL estimate covers the global batch, so that the loss is the same in any world; upstream's covers a micro-batch",
            format!("set {} for upstream's", case.set("preference.kl", "micro-batch")),
        );
    }
    let of_tokens = spec.likelihood.without_effect(spec.objective);
    let of_pairs = spec.preference.without_effect(spec.objective);
    for path in of_tokens.into_iter().chain(of_pairs) {
        findings.at(
            &[path],
            format!("{} has no effect on {}", case.key(path), spec.objective),
            "remove it, or choose another objective or loss",
        );
    }
}

const TRAINER_PARALLELISM: Rule = Rule {
    id: "trainer-parallelism",
    severity: Severity::Error,
    summary: "the built-in trainer has no tensor, pipeline, context or sequence parallelism",
    text: include_str!("texts/trainer-parallelism.md"),
    wrong: with("  parallel: {tensor: 4}\n"),
    right: with("  parallel: {strategy: fsdp}\n"),
    check: Check::Trainer(trainer_parallelism),
};

fn trainer_parallelism(case: &Case<'_>, findings: &mut Findings<'_>) {
    for (axis, size) in axes(&case.spec().parallel) {
        if size > 1 {
            let path = format!("parallel.{axis}");
            let (key, sharded) = (case.key(&path), case.set("parallel.strategy", "fsdp"));
            findings.at(
                &[&path],
                format!("the built-in trainer has no {axis} parallelism, {key} is {size}"),
                format!("set it to 1 ({sharded} shards instead), or plan only"),
            );
        }
    }
    let ranks = case.request.gpus;
    if case.spec().parallel.one_process && ranks > 1 {
        findings.at(
            &["parallel.one_process"],
            format!(
                "upstream drives all devices from one process, and {ranks} ranks of the built-in trainer would share no \
                 work"
            ),
            format!(
                "distribute the same global batch over the ranks: {}",
                case.set("parallel.one_process", "false")
            ),
        );
    }
}

const TRAINER_WEIGHTS: Rule = Rule {
    id: "trainer-weights",
    severity: Severity::Error,
    summary: "the built-in trainer has no weights in 8 bits",
    text: include_str!("texts/trainer-weights.md"),
    wrong: with("  model: {path: mistralai/Mistral-7B-v0.1, load_in_8bit: true}\n"),
    right: with("  model: {path: mistralai/Mistral-7B-v0.1}\n"),
    check: Check::Trainer(trainer_weights),
};

fn trainer_weights(case: &Case<'_>, findings: &mut Findings<'_>) {
    surveyed(case, findings);
    let model = &case.spec().model;
    if model.load_in_8bit {
        let path = "model.load_in_8bit";
        let key = case.recipe.key(path);
        findings.at(
            &[path],
            format!("the built-in trainer has no weights in 8 bits (`{key}`)"),
            format!("override it with `{key}=false` to train on whole weights, or plan only"),
        );
    }
}

const TRAINER_NUMERICS: Rule = Rule {
    id: "trainer-numerics",
    severity: Severity::Error,
    summary: "the recipe requests an optimiser or numerics that the built-in trainer does not have",
    text: include_str!("texts/trainer-numerics.md"),
    wrong: native(
        "--gpus 4",
        "  batch: {global: 128, per_device_batch_size: 4}\n  optimizer: {name: lion_8bit}\n",
    ),
    right: native(
        "--gpus 4",
        "  batch: {global: 128, per_device_batch_size: 4}\n  optimizer: {name: adamw_torch}\n",
    ),
    check: Check::PlanWarning(trainer_numerics),
};

fn trainer_numerics(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (spec, model) = (case.spec(), &case.spec().model);
    let mut instead = |path: &str, asked: &str, does: &str| {
        let key = case.key(path);
        findings.warn(
            &[path],
            format!("the built-in trainer {does}, but {key} asks for {asked}"),
            "results differ only by rounding; another trainer may support it",
        );
    };
    let on_cpu = case.request.runner.device() == DeviceKind::Cpu;
    match model.precision {
        Precision::F32 if model.tf32 => instead("model.tf32", "tf32", "computes in f32"),
        Precision::F32 => {}
        Precision::Bf16 if on_cpu => instead("model.precision", "bf16", "computes in f32 on CPUs"),
        Precision::F16 if on_cpu => instead("model.precision", "f16", "computes in f32 on CPUs"),
        Precision::Bf16 => {}
        Precision::F16 => instead("model.precision", "f16", "computes in bf16 on GPUs"),
    }
    if let Some(kernel) = model.attention.as_deref()
        && !EXACT.contains(&kernel)
    {
        let does = "computes exact attention with its own kernels";
        instead("model.attention", kernel, does);
    }
    match spec.parallel.strategy {
        Strategy::Ddp | Strategy::Fsdp => {}
        Strategy::Zero1 => instead("parallel.strategy", "ZeRO-1", "shards everything"),
        Strategy::Zero2 => instead("parallel.strategy", "ZeRO-2", "shards everything"),
    }
    let Some(name) = spec.optimizer.name.as_deref() else {
        return;
    };
    match spec.optimizer.method() {
        Some(Method::AdamW) => {
            let smaller = ["8bit", "4bit", "anyprecision"];
            let lower = name.to_lowercase();
            if smaller.iter().any(|word| lower.contains(word)) {
                instead("optimizer.name", name, "keeps AdamW's moments in f32");
            }
        }
        Some(Method::RmsProp) => {
            if spec.optimizer.weight_decay != 0.0 {
                findings.at(
                    &["optimizer.weight_decay"],
                    "the built-in trainer's RMSprop has no weight decay",
                    format!("set {}", case.set("optimizer.weight_decay", "0")),
                );
            }
        }
        None => {
            // HALOs and direct-preference-optimization name classes of `torch.optim`.
            let adamw = match case.recipe.dialect {
                Dialect::Halos | Dialect::Dpo => "AdamW",
                _ => "adamw_torch",
            };
            let (key, set) = (
                case.key("optimizer.name"),
                case.set("optimizer.name", adamw),
            );
            findings.at(
                &["optimizer.name"],
                format!("the built-in trainer uses AdamW or RMSprop, but {key} is {name}"),
                format!("set {set} to train with AdamW, or plan only"),
            );
        }
    }
}

/// Attention kernels that compute exact attention: they differ by rounding, as two versions of one of them do.
const EXACT: [&str; 5] = [
    "eager",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
    "sdpa",
];

const TRAINER_DETERMINISM: Rule = Rule {
    id: "trainer-determinism",
    severity: Severity::Error,
    summary: "the recipe asks for the same bits in every world, and for sums that depend on the world",
    text: include_str!("texts/trainer-determinism.md"),
    wrong: native(
        "--gpus 2",
        "  batch: {global: 128, per_device_batch_size: 4}\n  determinism: world\n  schedule: {kind: norm-test, groups: workers}\n",
    ),
    right: native(
        "--gpus 2",
        "  batch: {global: 128, per_device_batch_size: 4}\n  determinism: world\n  schedule: {kind: norm-test}\n",
    ),
    check: Check::PlanWarning(trainer_determinism),
};

fn trainer_determinism(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    if spec.determinism != Determinism::World {
        return;
    }
    let runner = case.request.runner;
    if runner.is_built_in() && runner.device() == DeviceKind::Cuda {
        findings.at(
            &["determinism"],
            "`determinism: world` is of CPUs: the kernels for GPUs add in an order that the world and the micro-batch change",
            format!(
                "train on CPUs (`--procs` in place of `--gpus`), or set {}",
                case.set("determinism", "run")
            ),
        );
    }
    if let Some(test) = spec.schedule.norm_test() {
        if test.measured_groups() == Groups::Workers {
            let asked = match test.estimator {
                Estimator::Paper => ("schedule.estimator", "paper", "unbiased"),
                Estimator::Unbiased => ("schedule.groups", "workers", "micro-batches"),
            };
            let (path, value, instead) = asked;
            findings.at(
                &[path],
                format!(
                    "{} is {value}: it compares the workers, whose number is the world's",
                    case.key(path)
                ),
                format!("set {} to compare the samples", case.set(path, instead)),
            );
        }
        if test.coordinate_interval > 0 {
            let path = "schedule.coordinate_interval";
            findings.at(
                &[path],
                format!(
                    "the sums of {} are in f32 and depend on the world",
                    case.key(path)
                ),
                format!("set {}", case.set(path, "0")),
            );
        }
        if test.unsharded_accumulation {
            let path = "schedule.unsharded_accumulation";
            findings.at(
                &[path],
                format!(
                    "{} has no effect where the samples are compared",
                    case.key(path)
                ),
                format!("set {}", case.set(path, "false")),
            );
        }
    }
    if spec.objective == Objective::Kto && spec.preference.kl == Kl::MicroBatch {
        let path = "preference.kl";
        findings.at(
            &[path],
            format!(
                "{} is micro-batch: the estimate depends on the samples of a micro-batch, and so on the world",
                case.key(path)
            ),
            format!("set {}", case.set(path, "global")),
        );
    }
}

const TRAINER_MODEL: Rule = Rule {
    id: "trainer-model",
    severity: Severity::Error,
    summary: "the built-in trainer does not support this model",
    text: include_str!("texts/trainer-model.md"),
    wrong: with(
        "  model:\n    config: {model_type: phi3, hidden_size: 64, num_hidden_layers: 2, vocab_size: 256}\n",
    ),
    right: with(
        "  model:\n    config: {model_type: llama, hidden_size: 64, num_attention_heads: 4, num_hidden_layers: 2, vocab_size: 256}\n",
    ),
    check: Check::Trainer(trainer_model),
};

fn trainer_model(case: &Case<'_>, findings: &mut Findings<'_>) {
    let model = &case.spec().model;
    if let Some(family) = other_family(model, case.request.model_config.as_ref()) {
        let path = model.path.as_deref().unwrap_or_default();
        findings.at(
            &["model.path"],
            format!("the built-in trainer does not train {family} ({path})"),
            format!(
                "choose a Llama, Mistral, Qwen 2, Qwen 3, SmolLM or Gemma model, set {} to train a Llama of these sizes, or \
                 give your program after `--`",
                case.set("model.config.model_type", "llama")
            ),
        );
    }
    surveyed(case, findings);
}

const TRAINER_KEYS: Rule = Rule {
    id: "trainer-keys",
    severity: Severity::Error,
    summary: "the built-in trainer does not train by a key of the recipe",
    text: include_str!("texts/trainer-keys.md"),
    wrong: file(
        "--global-batch-size 128",
        "model_name_or_path: mistralai/Mistral-7B-v0.1\nnum_train_epochs: 1\ngroup_by_length: true\n",
    ),
    right: file(
        "--global-batch-size 128",
        "model_name_or_path: mistralai/Mistral-7B-v0.1\nnum_train_epochs: 1\nlearning_rate: 2.0e-5\n",
    ),
    check: Check::Trainer(trainer_keys),
};

fn trainer_keys(case: &Case<'_>, findings: &mut Findings<'_>) {
    let own = "run your program after `--`";
    let mut without_effect = Vec::new();
    for Untrained {
        key,
        value,
        span,
        reason,
    } in &case.recipe.untrained
    {
        let (message, help) = match reason {
            UntrainedReason::NoEffect => {
                without_effect.push(format!("`{key}`"));
                continue;
            }
            UntrainedReason::NoEffectExcept(part) => {
                without_effect.push(format!("`{key}` except `{part}`"));
                continue;
            }
            UntrainedReason::Unsupported(instead) => (
                format!(
                    "the built-in trainer does not train by `{key}`, which is {}",
                    short(value)
                ),
                match instead {
                    Some(instead) => format!("override it with `{instead}`, or {own}"),
                    None => format!("remove it, or {own}"),
                },
            ),
            UntrainedReason::Unknown => (
                format!("the built-in trainer does not know `{key}`"),
                format!("remove it, or {own}"),
            ),
        };
        findings.spot(*span, message, help);
    }
    if !without_effect.is_empty() {
        findings.note(
            &[],
            format!(
                "without effect in the built-in trainer: {}",
                without_effect.join(", ")
            ),
            "nothing to do: these keys change no weights",
        );
    }
}

#[cfg(test)]
mod tests {
    use crate::objective::Kl;
    use crate::plan::rules::testing::{launch, launched, norm_test, only, recipe, reported};
    use crate::plan::{AskedRunner, DeviceKind, PlanRequest, Runner};
    use crate::recipe::Severity::Error;
    use crate::recipe::schema::spec::{
        BatchSchedule, Determinism, Estimator, Groups, NormTest, Objective, Precision, Strategy,
    };
    use crate::recipe::schema::untrained::{Untrained, UntrainedReason};
    use crate::recipe::syntax::source::{FileId, Span};
    use crate::recipe::{Dialect, Recipe, Severity};

    #[test]
    fn other_objectives_are_refused() {
        let mut recipe = recipe();
        recipe.spec.objective = Objective::Grpo;
        assert_eq!(launched("trainer-objective", &recipe).len(), 1);
        recipe.spec.objective = Objective::Dpo;
        assert!(launched("trainer-objective", &recipe).is_empty());
        recipe.spec.preference.target_margin = Some(0.5);
        let unused = launched("trainer-objective", &recipe);
        assert_eq!(
            unused[0].message,
            "`preference.target_margin` has no effect on dpo"
        );
        recipe.spec.preference.target_margin = None;
        recipe.dialect = Dialect::HandbookTrl;
        assert!(launched("trainer-objective", &recipe).is_empty());
        recipe.dialect = Dialect::Transformers;
        assert_eq!(launched("trainer-objective", &recipe).len(), 1);
        recipe.spec.objective = Objective::Sft;
        assert!(launched("trainer-objective", &recipe).is_empty());
    }

    #[test]
    fn every_axis_is_refused_by_name() {
        let mut recipe = recipe();
        recipe.spec.parallel.tensor = 2;
        recipe.spec.parallel.context = 2;
        assert_eq!(launched("trainer-parallelism", &recipe).len(), 2);
    }

    #[test]
    fn a_program_of_one_process_is_refused_for_several_ranks() {
        let mut recipe = recipe();
        recipe.spec.parallel.one_process = true;
        assert!(launched("trainer-parallelism", &recipe).is_empty());
        let two = PlanRequest {
            gpus: 2,
            ..launch()
        };
        let found = only("trainer-parallelism", &recipe, &two);
        assert_eq!(found.len(), 1);
        assert!(
            found[0].help.contains("parallel.one_process=false"),
            "{found:?}"
        );
    }

    #[test]
    fn weights_in_8_bits_are_refused() {
        let mut recipe = recipe();
        recipe.spec.model.adapters = true;
        recipe.spec.model.load_in_4bit = true;
        recipe.spec.model.lora_modules_to_save = vec!["lm_head".to_owned()];
        assert!(launched("trainer-weights", &recipe).is_empty());
        recipe.spec.model.load_in_8bit = true;
        assert_eq!(launched("trainer-weights", &recipe).len(), 1);
    }

    #[test]
    fn substitutions_are_warned_about_and_do_not_fail() {
        let mut recipe = recipe();
        assert!(launched("trainer-numerics", &recipe).is_empty());
        recipe.spec.model.precision = Precision::Bf16;
        recipe.spec.model.attention = Some("paged|eager".to_owned());
        recipe.spec.parallel.strategy = Strategy::Zero2;
        recipe.spec.optimizer.name = Some("paged_adamw_8bit".to_owned());
        let found = launched("trainer-numerics", &recipe);
        let messages: Vec<&str> = found.iter().map(|d| d.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "the built-in trainer computes in f32 on CPUs, but `model.precision` asks for bf16",
                "the built-in trainer computes exact attention with its own kernels, but `model.attention` \
                 asks for paged|eager",
                "the built-in trainer shards everything, but `parallel.strategy` asks for ZeRO-2",
                "the built-in trainer keeps AdamW's moments in f32, but `optimizer.name` asks for \
                 paged_adamw_8bit",
            ]
        );
        assert!(found.iter().all(|d| d.severity == Severity::Warning));
        assert_eq!(
            only("trainer-numerics", &recipe, &PlanRequest::gpus(1)),
            found[1..]
        );
    }

    #[test]
    fn the_precision_is_known_to_differ_on_cpus() {
        let mut recipe = recipe();
        let mut message = |precision, on_cpu| {
            recipe.spec.model.precision = precision;
            let device = if on_cpu {
                DeviceKind::Cpu
            } else {
                DeviceKind::Cuda
            };
            let request = PlanRequest::of(Runner::Any { device }, 1);
            let found = only("trainer-numerics", &recipe, &request);
            let messages: Vec<_> = found.into_iter().map(|d| d.message).collect();
            messages.join("\n")
        };
        insta::assert_snapshot!(message(Precision::Bf16, true), @"the built-in trainer computes in f32 on CPUs, but `model.precision` asks for bf16");
        insta::assert_snapshot!(message(Precision::F16, true), @"the built-in trainer computes in f32 on CPUs, but `model.precision` asks for f16");
        insta::assert_snapshot!(message(Precision::F16, false), @"the built-in trainer computes in bf16 on GPUs, but `model.precision` asks for f16");
        assert_eq!(message(Precision::Bf16, false), "");
        assert_eq!(message(Precision::F32, true), "");
    }

    #[test]
    fn another_optimiser_warns_in_a_plan_and_fails_a_launch() {
        let mut recipe = recipe();
        for name in [
            "rmsprop_bnb",
            "lion_8bit",
            "galore_adamw",
            "adafactor",
            "schedule_free_adamw",
        ] {
            recipe.spec.optimizer.name = Some(name.to_owned());
            let severity = |found: Vec<crate::recipe::Diagnostic>| found[0].severity;
            let planned = only("trainer-numerics", &recipe, &PlanRequest::gpus(1));
            assert_eq!(severity(planned), Severity::Warning, "{name}");
            assert_eq!(
                severity(launched("trainer-numerics", &recipe)),
                Severity::Error,
                "{name}"
            );
        }
        for name in [
            "adamw_torch",
            "adamw_torch_fused",
            "paged_adamw_32bit",
            "RMSprop",
        ] {
            recipe.spec.optimizer.name = Some(name.to_owned());
            assert!(launched("trainer-numerics", &recipe).is_empty(), "{name}");
        }
    }

    #[test]
    fn keys_without_effect_are_named_with_the_part_that_has_one() {
        let mut recipe = recipe();
        let untrained = |key: &str, reason| Untrained {
            key: key.to_owned(),
            value: "all".to_owned(),
            span: Span::of("", 0..0, FileId(0)),
            reason,
        };
        recipe.untrained = vec![
            untrained("report_to", UntrainedReason::NoEffectExcept("tensorboard")),
            untrained("push_to_hub", UntrainedReason::NoEffect),
        ];
        let found = launched("trainer-keys", &recipe);
        insta::assert_snapshot!(found[0].message, @"without effect in the built-in trainer: `report_to` except `tensorboard`, `push_to_hub`");
    }

    #[test]
    fn every_sum_that_depends_on_the_world_is_refused_by_its_key() {
        let messages = |recipe: &Recipe, request: &PlanRequest| {
            let found = only("trainer-determinism", recipe, request);
            let lines = found
                .iter()
                .map(|it| format!("{} ({})", it.message, it.help));
            lines.collect::<Vec<String>>().join("\n")
        };
        let mut recipe = norm_test(|test| {
            test.groups = Groups::Workers;
            test.coordinate_interval = 3;
            test.unsharded_accumulation = true;
        });
        assert_eq!(messages(&recipe, &launch()), "");
        recipe.spec.determinism = Determinism::World;
        insta::assert_snapshot!(messages(&recipe, &launch()), @r"
        `schedule.groups` is workers: it compares the workers, whose number is the world's (set `schedule.groups=micro-batches` to compare the samples)
        the sums of `schedule.coordinate_interval` are in f32 and depend on the world (set `schedule.coordinate_interval=0`)
        `schedule.unsharded_accumulation` has no effect where the samples are compared (set `schedule.unsharded_accumulation=false`)
        ");
        let BatchSchedule::NormTest(test) = &mut recipe.spec.schedule else {
            panic!("a norm test");
        };
        *test = NormTest {
            estimator: Estimator::Paper,
            ..NormTest::default()
        };
        insta::assert_snapshot!(messages(&recipe, &launch()), @"`schedule.estimator` is paper: it compares the workers, whose number is the world's (set `schedule.estimator=unbiased` to compare the samples)");
        recipe.spec.schedule = BatchSchedule::NormTest(NormTest::default());
        assert_eq!(messages(&recipe, &launch()), "");
        recipe.spec.objective = Objective::Kto;
        recipe.spec.preference.kl = Kl::MicroBatch;
        let device = DeviceKind::Cuda;
        let on_gpus = PlanRequest::of(
            Runner::of(&recipe.spec, AskedRunner::BuiltIn, device, None),
            1,
        );
        insta::assert_snapshot!(messages(&recipe, &on_gpus), @r"
        `determinism: world` is of CPUs: the kernels for GPUs add in an order that the world and the micro-batch change (train on CPUs (`--procs` in place of `--gpus`), or set `determinism=run`)
        `preference.kl` is micro-batch: the estimate depends on the samples of a micro-batch, and so on the world (set `preference.kl=global`)
        ");
    }

    #[test]
    fn another_architecture_fails_only_a_launch() {
        assert_eq!(reported("trainer-model"), [vec![], vec![Error]]);
    }
}
