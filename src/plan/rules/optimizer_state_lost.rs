//! `optimizer-state-lost`: an external trainer restores its optimiser's state after a restart.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::{Dialect, Severity};

pub(super) const RULE: Rule = Rule {
    id: "optimizer-state-lost",
    severity: Severity::Warning,
    summary: "an external trainer would begin with another optimiser's state after a restart",
    why: "After every restart the program continues from its newest checkpoint, in the same world or in another one. \
With FSDP 1, accelerate restores the parameters, but Adam's moments begin at zero with sharded state dicts, and with \
full state dicts the first moments were wrong in worlds of CPUs. FSDP 2 restores both. HALOs restores the weights and \
the schedule, but reads its optimiser's state into a key that nothing uses. It also counts samples from 0 after a \
restart, so a second restart trains samples again. The run continues without an error, but its losses differ.",
    upstream: "accelerate 1.15.0 `utils/fsdp_utils.py` (`load_fsdp_optimizer` loads into the state dict of an optimiser \
that has made no step, which is empty), seen with transformers 5.23.0 and torch 2.15 on CPUs. HALOs 4831988 `launch.py` \
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
    }
}
