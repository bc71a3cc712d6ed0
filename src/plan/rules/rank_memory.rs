//! `rank-memory`: the states of a rank of the built-in trainer fit into its memory.

use super::{Case, Check, Example, Findings, Rule};
use crate::plan::memory::Estimator;
use crate::recipe::Severity;
use crate::recipe::schema::spec::Strategy;
use crate::util::format::bytes;

pub(super) const RULE: Rule = Rule {
    id: "rank-memory",
    severity: Severity::Error,
    summary: "weights, gradients and optimiser states do not fit into the memory of a rank",
    why: "`launch --rank-memory` limits the memory of a rank. The built-in trainer holds 16 bytes a \
parameter before the first sample: weights, gradients and Adam's two states, all in f32. Under DDP every \
rank holds all of it, under FSDP each rank holds a shard. No micro-batch is small enough for a limit below \
that. Samples need more, which only training shows: an out-of-memory error lowers the micro-batch \
until it fits.",
    upstream: "None: it concerns Evenkeel's built-in trainer.",
    wrong: Example {
        flags: "",
        recipe: native!(
            "  # launched with --rank-memory 8GiB\n  batch: {global: 128, per_device_batch_size: 4}\n  model: {path: meta-llama/Llama-3.2-1B}\n"
        ),
    },
    right: Example {
        flags: "",
        recipe: native!(
            "  # launched with --rank-memory 8GiB --procs 4\n  batch: {global: 128, per_device_batch_size: 4}\n  model: {path: meta-llama/Llama-3.2-1B}\n  parallel: {strategy: fsdp}\n"
        ),
    },
    check: Check::Trainer(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let config = case.request.model_config.as_ref();
    let (Some(limit), Some(ranks), Some(estimator)) = (
        case.request.rank_memory,
        case.draft.data_parallel_size,
        Estimator::of(case.spec(), config),
    ) else {
        return;
    };
    let needed = estimator.built_in_states(ranks);
    if needed <= limit {
        return;
    }
    let whole = estimator.built_in_states(1);
    let enough = case.count(whole.div_ceil(limit));
    let shard = match case.spec().parallel.strategy {
        Strategy::Ddp => format!(
            "shard them ({}) over at least {enough}",
            case.set("parallel.strategy", "fsdp")
        ),
        _ => format!("use at least {enough}"),
    };
    findings.at(
        &["parallel.strategy", "model.config", "model.path"],
        format!(
            "weights, gradients and optimiser states need {} a rank, and a rank may use {}",
            bytes(needed),
            bytes(limit)
        ),
        format!("{shard}, raise `--rank-memory`, or train a smaller model"),
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{launch, only, recipe};
    use crate::recipe::schema::spec::Strategy;

    #[test]
    fn states_beyond_the_memory_of_a_rank_are_refused_with_the_way_out() {
        let mut recipe = recipe();
        // 1 235 814 400 parameters.
        recipe.spec.model.path = Some("meta-llama/Llama-3.2-1B".to_owned());
        let mut message = |strategy, ranks, gibibytes: u64| {
            recipe.spec.parallel.strategy = strategy;
            let request = PlanRequest {
                gpus: ranks,
                rank_memory: Some(gibibytes << 30),
                ..launch()
            };
            let found = only("rank-memory", &recipe, &request);
            found.first().map(|d| format!("{}; {}", d.message, d.help))
        };
        assert_eq!(message(Strategy::Ddp, 4, 19), None);
        assert_eq!(message(Strategy::Fsdp, 4, 5), None);
        insta::assert_snapshot!(message(Strategy::Ddp, 4, 8).unwrap());
        insta::assert_snapshot!(message(Strategy::Fsdp, 4, 4).unwrap());
    }
}
