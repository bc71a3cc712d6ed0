//! `trainer-numerics`: the built-in trainer supports the recipe's optimiser and numerics.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::schema::spec::{Precision, Strategy};
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "trainer-numerics",
    severity: Severity::Error,
    summary: "the recipe requests an optimiser or numerics that the built-in trainer does not have",
    why: "The built-in trainer computes in f32 on CPUs, and in f32 or bf16 on GPUs, with exact attention. It uses AdamW with both \
moments in f32. It keeps everything on every rank (`ddp`) or shards everything (`fsdp`, also for ZeRO-1 \
and ZeRO-2). A plan follows the recipe, for trainers that support it. The warnings state what `launch` does \
instead; `check` omits them for upstream recipes. Lower precision, states of fewer bits and another \
sharding change rounding, speed and memory, not the objective. Another kind of optimiser is \
another experiment: `launch` refuses it.",
    upstream: "transformers 5.23.0, `training_args.py`: `bf16`, `tf32` and `OptimizerNames`. DeepSpeed edaa722: ZeRO \
stages 1 to 3.",
    wrong: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  optimizer: {name: lion_8bit}\n"
        ),
    },
    right: Example {
        flags: "--gpus 4",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 4}\n  optimizer: {name: adamw_torch}\n"
        ),
    },
    check: Check::PlanWarning(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (model, optimizer) = (&case.spec().model, &case.spec().optimizer);
    let mut instead = |path: &str, asked: &str, does: &str| {
        let message = format!(
            "the built-in trainer {does}, but {} asks for {asked}",
            case.key(path)
        );
        let help = "results differ only by rounding; another trainer may support it";
        findings.add(Severity::Warning, &[path], message, help);
    };
    let on_cpu = case.request.on_cpu;
    match model.precision {
        Precision::F32 if model.tf32 => instead("model.tf32", "tf32", "computes in f32"),
        Precision::F32 => {}
        Precision::Bf16 if on_cpu => instead("model.precision", "bf16", "computes in f32 on CPUs"),
        Precision::F16 if on_cpu => instead("model.precision", "f16", "computes in f32 on CPUs"),
        Precision::Bf16 => {}
        Precision::F16 => instead("model.precision", "f16", "computes in bf16 on GPUs"),
    }
    if let Some(kernel) = model
        .attention
        .as_deref()
        .filter(|kernel| !EXACT.contains(kernel))
    {
        let does = "computes exact attention with its own kernels";
        instead("model.attention", kernel, does);
    }
    match case.spec().parallel.strategy {
        Strategy::Ddp | Strategy::Fsdp => {}
        Strategy::Zero1 => instead("parallel.strategy", "ZeRO-1", "shards everything"),
        Strategy::Zero2 => instead("parallel.strategy", "ZeRO-2", "shards everything"),
    }
    let Some(name) = optimizer.name.as_deref() else {
        return;
    };
    match kind(name) {
        Kind::AdamW => {}
        Kind::SmallerAdamW => instead("optimizer.name", name, "keeps AdamW's moments in f32"),
        Kind::Other => findings.at(
            &["optimizer.name"],
            format!(
                "the built-in trainer uses AdamW, but {} is {name}",
                case.key("optimizer.name")
            ),
            format!(
                "set {} to train with AdamW, or plan only",
                case.set("optimizer.name", adamw(case))
            ),
        ),
    }
}

/// The name of AdamW in the recipe's dialect.
fn adamw(case: &Case<'_>) -> &'static str {
    match case.recipe.dialect {
        // Classes of `torch.optim`.
        Dialect::Halos | Dialect::Dpo => "AdamW",
        _ => "adamw_torch",
    }
}

/// Attention kernels that compute exact attention in the precision of the model.
const EXACT: [&str; 2] = ["eager", "sdpa"];

/// How an optimiser compares with AdamW in f32.
enum Kind {
    AdamW,
    SmallerAdamW,
    Other,
}

/// The kind of an upstream name (`OptimizerNames`, transformers 5.23.0 `training_args.py`).
fn kind(name: &str) -> Kind {
    let name = name.to_lowercase();
    let smaller = ["8bit", "4bit", "anyprecision"];
    match name.strip_prefix("paged_").unwrap_or(&name) {
        base if !base.starts_with("adamw") => Kind::Other,
        base if smaller.iter().any(|word| base.contains(word)) => Kind::SmallerAdamW,
        _ => Kind::AdamW,
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{launched, only, recipe};
    use crate::recipe::Severity;
    use crate::recipe::schema::spec::{Precision, Strategy};

    #[test]
    fn substitutions_are_warned_about_and_do_not_fail() {
        let mut recipe = recipe();
        assert!(launched("trainer-numerics", &recipe).is_empty());
        recipe.spec.model.precision = Precision::Bf16;
        recipe.spec.model.attention = Some("flash_attention_2".to_owned());
        recipe.spec.parallel.strategy = Strategy::Zero2;
        recipe.spec.optimizer.name = Some("paged_adamw_8bit".to_owned());
        let found = launched("trainer-numerics", &recipe);
        let messages: Vec<&str> = found.iter().map(|d| d.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "the built-in trainer computes in f32 on CPUs, but `model.precision` asks for bf16",
                "the built-in trainer computes exact attention with its own kernels, but `model.attention` \
                 asks for flash_attention_2",
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
            let request = PlanRequest {
                on_cpu,
                ..PlanRequest::gpus(1)
            };
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
            "rmsprop",
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
        for name in ["adamw_torch", "adamw_torch_fused", "paged_adamw_32bit"] {
            recipe.spec.optimizer.name = Some(name.to_owned());
            assert!(launched("trainer-numerics", &recipe).is_empty(), "{name}");
        }
    }
}
