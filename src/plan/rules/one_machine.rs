//! `one-machine`: direct-preference-optimization trains on one machine.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "one-machine",
    severity: Severity::Error,
    summary: "upstream trains on the GPUs of one machine only",
    why: "direct-preference-optimization starts one process for every GPU that it sees on its machine. On \
two machines it would train two separate models, each on one machine's GPUs. Plan for one machine; \
Evenkeel's built-in trainer runs the recipe on several after conversion to the native form.",
    upstream: "direct-preference-optimization f8b8c0f, `train.py` (`main`): world_size = \
torch.cuda.device_count(), processes of one `mp.spawn`.",
    wrong: Example {
        flags: "--nodes 2 --gpus-per-node 4 --dialect dpo",
        recipe: "trainer: FSDPTrainer\nbatch_size: 64\ngradient_accumulation_steps: 2\neval_batch_size: 32\n",
    },
    right: Example {
        flags: "--nodes 1 --gpus-per-node 8 --dialect dpo",
        recipe: "trainer: FSDPTrainer\nbatch_size: 64\ngradient_accumulation_steps: 2\neval_batch_size: 32\n",
    },
    check: Check::Plan(check),
};

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some(nodes) = case.request.nodes.filter(|nodes| *nodes > 1) else {
        return;
    };
    if case.recipe.dialect != Dialect::Dpo {
        return;
    }
    findings.at(
        &["parallel.strategy", "parallel.one_process"],
        format!(
            "upstream starts a process for every GPU of one machine: {nodes} machines would train \
             {nodes} separate models, on {} each",
            case.count(case.request.gpus / nodes)
        ),
        format!("plan for one: `--gpus {}`", case.request.gpus / nodes),
    );
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{only, recipe};
    use crate::recipe::Dialect;

    #[test]
    fn several_machines_are_refused_where_upstream_uses_one() {
        let mut recipe = recipe();
        recipe.dialect = Dialect::Dpo;
        let of = |recipe: &crate::recipe::Recipe, nodes| {
            let request = PlanRequest {
                nodes,
                ..PlanRequest::gpus(16)
            };
            only("one-machine", recipe, &request)
        };
        assert!(of(&recipe, None).is_empty() && of(&recipe, Some(1)).is_empty());
        assert_eq!(
            of(&recipe, Some(2))[0].message,
            "upstream starts a process for every GPU of one machine: 2 machines would train 2 \
             separate models, on 8 GPUs each"
        );
        recipe.dialect = Dialect::Halos;
        assert!(of(&recipe, Some(2)).is_empty());
    }
}
