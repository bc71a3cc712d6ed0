//! `external-trainer`: an external trainer trains with the planned batch.

use super::{Case, Check, Example, Findings, Rule};
use crate::recipe::batch_arguments::{self, BatchNumbers};
use crate::recipe::schema::placeholder;
use crate::recipe::schema::spec::{BatchSchedule, Remainder};
use crate::recipe::{Severity, trainer_command};

pub(super) const RULE: Rule = Rule {
    id: "external-trainer",
    severity: Severity::Error,
    summary: "an external trainer would train with another batch than planned",
    why: "Evenkeel starts an external trainer once for every device and passes the plan's numbers in every \
world. Four things would silently change the global batch. A number in the command does not follow \
the world. A launcher in the command starts a process for every device again. Upstream's batch finder \
lowers the per-device batch. Only the built-in trainer supports unequal shares and a growing batch.",
    upstream: "torch 2.9 `distributed/run.py` and accelerate 16cb6eb `commands/launch.py` start \
their own processes; evenkeel replaces them where they begin the command. accelerate 16cb6eb, `utils/memory.py` (`find_executable_batch_size`). \
DistributedDataParallel averages over ranks, whatever their shares.",
    wrong: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  \
             trainer: {command: [mpirun, python, train.py, --batch, '{per_device_batch_size}']}\n"
        ),
    },
    right: Example {
        flags: "--gpus 8",
        recipe: native!(
            "  batch: {global: 128, per_device_batch_size: 16}\n  \
             trainer: {command: [python, train.py, --batch, '{per_device_batch_size}']}\n"
        ),
    },
    check: Check::Plan(check),
};

/// Keys whose values depend on the world, and their placeholders.
const OF_A_WORLD: [(&str, &str); 2] = [
    ("batch.per_device_batch_size", "{per_device_batch_size}"),
    ("batch.accumulation", "{gradient_accumulation_steps}"),
];

/// The placeholder of the micro-batch.
const PER_DEVICE: &str = "per_device_batch_size";

/// TrainingArguments' switch for upstream's batch finder.
const FINDER: &str = "auto_find_batch_size";

fn check(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let command = &spec.trainer.command;
    if command.is_empty() {
        return;
    }
    let at = ["trainer.command"];
    if let Some((key, problem)) = placeholder::flaw(&spec.trainer) {
        findings.at(&[key], format!("`{key}` {problem}"), placeholder::LISTED);
    }
    if let Some(launcher) = trainer_command::launcher(command) {
        findings.at(
            &at,
            format!("`{launcher}` starts a process for every device, but so does evenkeel"),
            "begin the command with it, without a shell or another program before it, or give the command that it \
             would start, as `python train.py …`",
        );
    }
    if spec.schedule != BatchSchedule::Constant {
        findings.at(
            &["schedule"],
            format!(
                "an external trainer keeps a constant batch; {} changes it",
                case.key("schedule")
            ),
            "remove it, or use the built-in trainer",
        );
    }
    if spec.batch.auto_find || trainer_command::switches_on(command, FINDER) {
        findings.at(
            &["batch.auto_find", "trainer.command"],
            format!(
                "`{FINDER}` lowers the per-device batch inside the program and keeps accumulation"
            ),
            "remove it: after an out-of-memory error, evenkeel restarts the program with a smaller \
             per-device batch and more accumulation",
        );
    }
    check_split(case, findings);
}

/// Checks that need a plan with numbers.
fn check_split(case: &Case<'_>, findings: &mut Findings<'_>) {
    let Some(split) = case.draft.split else {
        return;
    };
    if split.remainder == Remainder::Uneven {
        findings.at(
            &["batch.remainder"],
            format!(
                "micro-batches are dealt unevenly, {}, which only the built-in trainer supports",
                split.formula()
            ),
            format!("use {}", case.feasible_near()),
        );
    }
    let recipe = case.recipe;
    let command = &case.spec().trainer.command;
    let typed = |key| {
        let (word, value) = trainer_command::typed(command, key)?;
        Some((word, value.parse::<u64>().ok()?))
    };
    let mut refuse = |word: String, why: String, instead: &str| {
        findings.at(
            &["trainer.command"],
            format!("the command sets `{word}`, {why}"),
            format!("write `{instead}` instead"),
        );
    };
    let splits = batch_arguments::splits_batches(recipe);
    for (path, instead) in OF_A_WORLD {
        let instead = if splits { "{args}" } else { instead };
        for key in batch_arguments::spellings(recipe, path) {
            if let Some((word, _)) = typed(key) {
                refuse(word, "which does not follow the world".into(), instead);
            }
        }
    }
    if splits && placeholder::is_used(command, PER_DEVICE) {
        refuse(
            format!("{{{PER_DEVICE}}}"),
            "the share of one device, but `split_batches` takes the batch of all devices".into(),
            "{args}",
        );
    }
    let numbers = BatchNumbers {
        world: case.request.gpus,
        nodes: None,
        data_parallel: split.ranks,
        global: split.per_device_batch_size * split.micro_batches,
        per_device_batch_size: split.per_device_batch_size,
        accumulation: split.accumulation(),
        steps_per_generation: None,
    };
    for (key, planned) in batch_arguments::argument_pairs(recipe, &numbers) {
        if !batch_arguments::spellings(recipe, "batch.global").contains(&key) {
            continue;
        }
        match typed(key) {
            Some((word, value)) if value != planned => {
                refuse(word, format!("but the plan has {planned}"), "{args}");
            }
            // The batch of one accumulation step changes with the world.
            Some((word, _)) if planned != numbers.global => {
                refuse(word, "which does not follow the world".into(), "{args}")
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::PlanRequest;
    use crate::plan::rules::testing::{norm_test, only, recipe};
    use crate::recipe::{self, Recipe, Request, corpus};

    const TRAINER: &str = "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n";

    /// A `TrainingArguments` recipe for two devices, with this command.
    fn with(command: &[&str], more: &str) -> Recipe {
        let text = format!("{TRAINER}{more}evenkeel: {{objective: sft, batch: {{gpus: 2}}}}\n");
        let request = Request {
            path: "sft.yaml".into(),
            ..Request::default()
        };
        let mut recipe = recipe::read_text(&request, text).unwrap();
        recipe.spec.trainer.command = command.iter().map(|&word| word.to_owned()).collect();
        recipe
    }

    fn found(recipe: &Recipe, gpus: u64) -> Vec<String> {
        let found = only("external-trainer", recipe, &PlanRequest::gpus(gpus));
        found.into_iter().map(|d| d.message).collect()
    }

    fn messages(command: &[&str]) -> Vec<String> {
        found(&with(command, ""), 2)
    }

    #[test]
    fn numbers_in_the_command_are_refused_at_any_position() {
        assert!(messages(&["sh", "train.sh", "{args}"]).is_empty());
        assert!(
            messages(&[
                "train",
                "--per_device_train_batch_size",
                "{per_device_batch_size}"
            ])
            .is_empty()
        );
        let same = "which does not follow the world";
        for (command, word) in [
            (
                &["train", "--per_device_train_batch_size", "8"][..],
                "--per_device_train_batch_size",
            ),
            (
                &["train", "--gradient_accumulation_steps=2"],
                "--gradient_accumulation_steps=2",
            ),
            (
                &["train", "--per_gpu_train_batch_size=8"],
                "--per_gpu_train_batch_size=8",
            ),
            // Abbreviations, as argparse accepts them.
            (
                &["train", "{args}", "--per-device-train-b", "3"],
                "--per-device-train-b",
            ),
            (
                &[
                    "sh",
                    "-c",
                    "exec train --per-device-train-batch-size 8 {args}",
                ],
                "--per-device-train-batch-size",
            ),
        ] {
            assert_eq!(
                messages(command),
                [format!("the command sets `{word}`, {same}")]
            );
        }
    }

    #[test]
    fn batch_finders_launchers_and_misspelt_placeholders_are_refused() {
        let finder = messages(&["train", "{args}", "--auto_find_batch_size"]);
        assert!(
            finder[0].starts_with("`auto_find_batch_size` lowers"),
            "{finder:?}"
        );
        let recipe = with(&["train", "{args}"], "auto_find_batch_size: true\n");
        assert_eq!(found(&recipe, 2), finder);
        assert!(messages(&["train", "{args}", "--auto_find_batch_size", "false"]).is_empty());
        assert_eq!(
            messages(&["train", "{args}", "--auto_find_batch", "1"]),
            finder
        );
        let launcher = messages(&["/usr/bin/torchrun", "train.py", "{args}"]);
        assert_eq!(
            launcher,
            ["`torchrun` starts a process for every device, but so does evenkeel"]
        );
        let split = "accelerator_config: {split_batches: true}\n";
        let command = ["train", "--batch", "{per_device_batch_size}"];
        assert!(found(&with(&command, split), 2)[0].contains("the share of one device"));
        assert!(found(&with(&["train", "{args}"], split), 2).is_empty());
        let slip = messages(&["train", "{arg}"]);
        assert_eq!(
            slip,
            ["`trainer.command` has `{arg}`; did you mean `{args}`?"]
        );
    }

    #[test]
    fn features_of_the_built_in_trainer_are_refused_for_an_external_one() {
        let mut uneven = with(&["train", "{args}"], "");
        uneven.spec.batch.remainder = crate::recipe::schema::spec::Remainder::Uneven;
        assert!(found(&uneven, 2).is_empty());
        assert!(found(&uneven, 3)[0].contains("only the built-in trainer supports"));
        let mut grows = norm_test(|_| {});
        assert!(found(&grows, 2).is_empty());
        grows.spec.trainer.command = vec!["train".to_owned()];
        assert!(found(&grows, 2)[0].ends_with("changes it"));
        assert!(found(&recipe(), 2).is_empty());
    }

    #[test]
    fn a_hydra_command_may_set_only_the_planned_global_batch() {
        let Some(corpus) = corpus::root() else { return };
        let tree = "eric-mitchell__direct-preference-optimization/f8b8c0f49d/config";
        let over = [
            "model=pythia28",
            "datasets=[hh]",
            "loss=sft",
            "exp_name=x",
            "trainer=FSDPTrainer",
        ];
        let numbers = ["batch_size=64", "gradient_accumulation_steps=2"];
        let request = Request {
            path: corpus.join(tree),
            overrides: over.into_iter().chain(numbers).map(str::to_owned).collect(),
            ..Request::default()
        };
        let mut recipe = recipe::read(&request).unwrap();
        let mut messages = |word: &str| {
            recipe.spec.trainer.command = vec!["train".to_owned(), word.to_owned()];
            found(&recipe, 2)
        };
        assert!(messages("batch_size=64").is_empty());
        assert_eq!(
            messages("++batch_size=32"),
            ["the command sets `++batch_size=32`, but the plan has 64"]
        );
        assert!(messages("gradient_accumulation_steps=2")[0].contains("does not follow the world"));
    }
}
