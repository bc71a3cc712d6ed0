//! External trainers: the batch in their commands, and their checkpoints.

use serde_json::Value;

use super::{Case, Check, Example, Findings, Rule, native};
use crate::plan::split::Split;
use crate::recipe::batch_arguments::{self, BatchNumbers};
use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::placeholder::{self, DEEPSPEED_CONFIG, RECIPE};
use crate::recipe::schema::spec::{BatchSchedule, Determinism, Strategy};
use crate::recipe::syntax::words::Words;
use crate::recipe::{Dialect, Severity, SourceFile, trainer_command};

pub(super) const RULES: &[&Rule] = &[
    &EXTERNAL_TRAINER,
    &CHECKPOINT_PORTABLE,
    &OPTIMIZER_STATE_LOST,
    &RECIPE_NOT_PASSED,
];

/// An example of 128 samples a step, with these keys in addition.
const fn with(keys: &'static str) -> Example {
    native(
        "--gpus 8",
        "  batch: {global: 128, per_device_batch_size: 16}\n",
    )
    .and(keys)
}

const EXTERNAL_TRAINER: Rule = Rule {
    id: "external-trainer",
    severity: Severity::Error,
    summary: "an external trainer would train with another batch than planned",
    text: include_str!("texts/external-trainer.md"),
    wrong: with(
        "  trainer: {command: [mpirun, python, train.py, --batch, '{per_device_batch_size}']}\n",
    ),
    right: with("  trainer: {command: [python, train.py, --batch, '{per_device_batch_size}']}\n"),
    check: Check::External(external_trainer),
};

/// Keys whose values depend on the world, and their placeholders.
const OF_A_WORLD: [(&str, &str); 2] = [
    ("batch.per_device_batch_size", "{per_device_batch_size}"),
    ("batch.accumulation", "{gradient_accumulation_steps}"),
];

/// TrainingArguments' switch for upstream's batch finder.
const FINDER: &str = "auto_find_batch_size";

fn external_trainer(case: &Case<'_>, findings: &mut Findings<'_>) {
    let spec = case.spec();
    let command = &spec.trainer.command;
    if let Some((key, problem)) = placeholder::flaw(&spec.trainer) {
        findings.at(&[key], format!("`{key}` {problem}"), placeholder::LISTED);
    }
    if case.recipe.lacks_batch_arguments && placeholder::is_used(command, placeholder::ARGS) {
        findings.at(
            &["trainer.command"],
            "the program has no argument `--per_device_train_batch_size`: the plan's numbers would not reach it",
            "write `{per_device_batch_size}` and `{gradient_accumulation_steps}` where its command has them, as in \
             `--batch_size {per_device_batch_size}`",
        );
    }
    if let Some(launcher) = trainer_command::launcher(command) {
        findings.at(
            &["trainer.command"],
            format!("`{launcher}` starts a process for every device, but so does evenkeel"),
            "begin the command with it, without a shell or another program before it, or give the command that it \
             would start, as `python train.py …`",
        );
    }
    if spec.determinism == Determinism::World {
        findings.at(
            &["determinism"],
            "an external trainer decides the order of its sums, and `determinism: world` asks for one that no world changes",
            format!("set {}", case.set("determinism", "run")),
        );
    }
    if spec.schedule != BatchSchedule::Constant {
        let key = case.key("schedule");
        findings.at(
            &["schedule"],
            format!("an external trainer keeps a constant batch; {key} changes it"),
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
    if let Some(split) = case.uneven() {
        findings.at(
            &["batch.remainder"],
            format!(
                "micro-batches are dealt unevenly, {}, which only the built-in trainer supports",
                split.formula()
            ),
            format!("use {}", case.feasible_near()),
        );
    }
    if let Some(split) = case.draft.split {
        check_arguments(case, &split, findings);
    }
}

/// Refuses batch numbers in the command that differ from the plan's, or that do not follow the world.
fn check_arguments(case: &Case<'_>, split: &Split, findings: &mut Findings<'_>) {
    let recipe = case.recipe;
    let command = &case.spec().trainer.command;
    let typed = |key| {
        let (word, value) = trainer_command::typed(command, key)?;
        Some((word, value.parse::<u64>().ok()?))
    };
    let mut refuse = |word: &str, why: &str, instead: &str| {
        findings.at(
            &["trainer.command"],
            format!("the command sets `{word}`, {why}"),
            format!("write `{instead}` instead"),
        );
    };
    let of_a_world = "which does not follow the world";
    let splits = batch_arguments::splits_batches(recipe);
    for (path, instead) in OF_A_WORLD {
        let instead = if splits { "{args}" } else { instead };
        for key in batch_arguments::spellings(recipe, path) {
            if let Some((word, _)) = typed(key) {
                refuse(&word, of_a_world, instead);
            }
        }
    }
    if splits && placeholder::is_used(command, "per_device_batch_size") {
        let why = "the share of one device, but `split_batches` takes the batch of all devices";
        refuse("{per_device_batch_size}", why, "{args}");
    }
    let numbers = BatchNumbers {
        world: case.request.gpus,
        nodes: None,
        data_parallel: split.ranks,
        global: split.batch(),
        per_device_batch_size: split.per_device_batch_size,
        accumulation: split.accumulation(),
        steps_per_generation: None,
    };
    let global_keys = batch_arguments::spellings(recipe, "batch.global");
    for (key, planned) in batch_arguments::argument_pairs(recipe, &numbers) {
        let Some((word, value)) = typed(key).filter(|_| global_keys.contains(&key)) else {
            continue;
        };
        if value != planned {
            refuse(&word, &format!("but the plan has {planned}"), "{args}");
        } else if planned != numbers.global {
            // The batch of one accumulation step changes with the world.
            refuse(&word, of_a_world, "{args}");
        }
    }
}

const CHECKPOINT_PORTABLE: Rule = Rule {
    id: "checkpoint-portable",
    severity: Severity::Error,
    summary: "an external trainer's checkpoint would not load in another world",
    text: include_str!("texts/checkpoint-portable.md"),
    wrong: with(
        "  trainer:\n    command: [python, train.py, --batch, '{per_device_batch_size}']\n    \
             environment: {ACCELERATE_USE_FSDP: 'true', FSDP_STATE_DICT_TYPE: LOCAL_STATE_DICT}\n",
    ),
    right: with(
        "  trainer:\n    command: [python, train.py, --batch, '{per_device_batch_size}']\n    \
             environment: {ACCELERATE_USE_FSDP: 'true', FSDP_VERSION: '2', FSDP_STATE_DICT_TYPE: SHARDED_STATE_DICT}\n",
    ),
    check: Check::External(checkpoint_portable),
};

fn checkpoint_portable(case: &Case<'_>, findings: &mut Findings<'_>) {
    let (spec, trainer) = (case.spec(), &case.spec().trainer);
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
    let elasticity = &spec.elasticity;
    if elasticity.min.is_some() && elasticity.min == elasticity.max {
        return;
    }
    let one_world = format!(
        "keep one world, with the same {} and {}",
        case.key("elasticity.min"),
        case.key("elasticity.max")
    );
    if case.recipe.dialect == Dialect::Dpo && trainer.resume.is_empty() {
        let resume = case.key("trainer.resume");
        findings.at(
            &["trainer.command"],
            "direct-preference-optimization cannot continue from its checkpoints, so every other world would begin \
             again at step 0",
            format!("{one_world}; if your program can continue, set {resume}"),
        );
    }
    if spec.parallel.strategy != Strategy::Ddp && uses_unwritten_config(case) {
        findings.at(
            &["trainer.command"],
            "ZeRO's checkpoints load in another world only with `checkpoint.load_universal` in the DeepSpeed \
             config, which evenkeel cannot set in this command",
            format!("add `--deepspeed {{deepspeed_config}}` to the command, or {one_world}"),
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

const OPTIMIZER_STATE_LOST: Rule = Rule {
    id: "optimizer-state-lost",
    severity: Severity::Warning,
    summary: "an external trainer would begin with another optimiser's state after a restart",
    text: include_str!("texts/optimizer-state-lost.md"),
    wrong: with(
        "  trainer:\n    command: [python, train.py, --batch, '{per_device_batch_size}']\n    \
             environment: {ACCELERATE_USE_FSDP: 'true', FSDP_VERSION: '1'}\n",
    ),
    right: with(
        "  trainer:\n    command: [python, train.py, --batch, '{per_device_batch_size}']\n    \
             environment: {ACCELERATE_USE_FSDP: 'true', FSDP_VERSION: '2'}\n",
    ),
    check: Check::External(optimizer_state_lost),
};

/// The argument of transformers for checkpoints without the optimiser.
const SAVE_ONLY_MODEL: &str = "save_only_model";

fn optimizer_state_lost(case: &Case<'_>, findings: &mut Findings<'_>) {
    let trainer = &case.spec().trainer;
    let version = trainer.environment.get("FSDP_VERSION");
    let second = version.is_some_and(|version| version == "2");
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
    let switched = trainer_command::switches_on(&trainer.command, SAVE_ONLY_MODEL);
    if switched || (!trainer.saves_optimizer && !typed) {
        let key = if trainer.saves_optimizer {
            format!("`{SAVE_ONLY_MODEL}`")
        } else {
            case.key("trainer.saves_optimizer")
        };
        findings.at(
            &["trainer.saves_optimizer", "trainer.command"],
            format!("with {key} checkpoints lack the optimiser's state, so it begins again after every restart"),
            "remove it",
        );
    }
}

/// Whether transformers shards by its own arguments, and not certainly with FSDP 2.
fn may_choose_fsdp_1(case: &Case<'_>) -> bool {
    let trainer = &case.spec().trainer;
    let typed = |key| trainer_command::typed(&trainer.command, key).map(|(_, value)| value);
    let words = typed("fsdp");
    let shards = match &words {
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
            let hybrid = words.is_some_and(|words| words.contains("hybrid_shard"));
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

const RECIPE_NOT_PASSED: Rule = Rule {
    id: "recipe-not-passed",
    severity: Severity::Warning,
    summary: "an external trainer would get the batch numbers of a recipe, but nothing else of it",
    text: include_str!("texts/recipe-not-passed.md"),
    wrong: with(
        "  learning_rate: {peak: 1.0e-5}\n  \
             trainer: {command: [python, train.py, --batch, '{per_device_batch_size}']}\n",
    ),
    right: with(
        "  learning_rate: {peak: 1.0e-5}\n  trainer: {command: [python, train.py, --config, '{recipe}']}\n",
    ),
    check: Check::External(recipe_not_passed),
};

/// The sections of a recipe that Evenkeel itself applies to an external trainer: its numbers, worlds and names.
const APPLIED: Words = Words(
    "batch schedule parallel elasticity determinism generation trainer checkpoint name output",
);

/// The keys that a message lists.
const LISTED_KEYS: usize = 4;

fn recipe_not_passed(case: &Case<'_>, findings: &mut Findings<'_>) {
    let trainer = &case.spec().trainer;
    let Some(file) = unpassed_recipe(case) else {
        return;
    };
    let typed = |key: &str| trainer_command::typed(&trainer.command, key).is_some();
    let sources = case.recipe.value_sources.iter();
    let mut stated: Vec<(usize, &str)> = sources
        .filter(|(path, source)| {
            let section = path.split('.').next().unwrap_or_default();
            Some(source.span.file) == case.recipe.files.recipe && !APPLIED.has(section)
        })
        .filter_map(|(_, source)| Some((source.span.start, source.key.split('.').next()?)))
        .filter(|(_, key)| *key != RESERVED && !typed(key))
        .collect();
    stated.sort_unstable();
    let mut keys: Vec<String> = Vec::new();
    for (_, key) in stated {
        let key = format!("`{key}`");
        if !keys.contains(&key) {
            keys.push(key);
        }
    }
    let left = keys.len().saturating_sub(LISTED_KEYS);
    keys.truncate(LISTED_KEYS);
    let more = match left {
        _ if keys.is_empty() => return,
        0 => String::new(),
        left => format!(" and {left} more"),
    };
    let numbers = match placeholder::takes_numbers(&trainer.command) {
        true => "the batch numbers",
        false => "the batch numbers only in its environment",
    };
    findings.at(
        &["trainer.command"],
        format!(
            "the command receives {numbers}, but not {}{more} of {}",
            keys.join(", "),
            file.path.display()
        ),
        "add `{recipe}`, the path of the recipe with the plan's numbers, as `--config {recipe}`, or give the values as \
         the program's own arguments",
    );
}

/// The file of a recipe of which the external trainer gets only the numbers. `None`: it may read the file. The
/// program of a Hydra tree reads the tree beside it, and the launcher's config reaches the ranks as environment.
fn unpassed_recipe<'a>(case: &Case<'a>) -> Option<&'a SourceFile> {
    let recipe = case.recipe;
    let trainer = &recipe.spec.trainer;
    let passed = recipe.files.command.is_some()
        || recipe.files.tree.is_some()
        || recipe.dialect == Dialect::Accelerate;
    let file = recipe.sources.get(recipe.files.recipe?)?;
    let values: Vec<String> = trainer.environment.values().cloned().collect();
    let words = [trainer.command.as_slice(), &values].concat();
    let name = file.path.file_name()?.to_str()?;
    let of_deepspeed =
        recipe.dialect == Dialect::Deepspeed && placeholder::is_used(&words, DEEPSPEED_CONFIG);
    let passes = placeholder::is_used(&words, RECIPE)
        || of_deepspeed
        || words.iter().any(|word| word.contains(name));
    // Every key of a native recipe is evenkeel's; the program may read the numbers from its environment.
    let reads = recipe.dialect != Dialect::Native || placeholder::takes_numbers(&trainer.command);
    (trainer.is_external() && !passed && !passes && reads).then_some(file)
}

#[cfg(test)]
mod tests {
    use crate::plan::rules::testing::{norm_test, only, recipe};
    use crate::plan::{AskedRunner, DeviceKind, PlanRequest, Runner};
    use crate::recipe;
    use crate::recipe::schema::spec::Elasticity;
    use crate::recipe::{Dialect, Recipe, Request, corpus};

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
    fn numbers_that_a_program_does_not_take_are_refused() {
        let lacking = |command: &[&str]| {
            let mut recipe = with(command, "");
            recipe.lacks_batch_arguments = true;
            found(&recipe, 2)
        };
        let refused = lacking(&["train", "{args}"]);
        insta::assert_snapshot!(refused.join("\n"), @"the program has no argument `--per_device_train_batch_size`: the plan's numbers would not reach it");
        let typed = ["train", "--batch_size", "{per_device_batch_size}"];
        assert!(lacking(&typed).is_empty());
    }

    /// What runs the plan decides, whether or not the recipe names a command.
    #[test]
    fn rules_of_external_trainers_hold_where_one_runs_the_plan() {
        let device = DeviceKind::Cuda;
        let of = |recipe: &Recipe, asked| {
            let runner = Runner::of(&recipe.spec, asked, device, None);
            only("external-trainer", recipe, &PlanRequest::of(runner, 2)).len()
        };
        let unnamed = norm_test(|_| {});
        let mut named = unnamed.clone();
        named.spec.trainer.command = vec!["train".to_owned(), "{args}".to_owned()];
        for recipe in [&unnamed, &named] {
            assert_eq!(of(recipe, AskedRunner::External), 1);
            assert_eq!(of(recipe, AskedRunner::BuiltIn), 0);
        }
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
            spares: 0,
        };
        assert_eq!(count("python train.py {recipe}", fixed), 0);
    }

    fn lost(more: &str, command: &str) -> Vec<String> {
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
            assert_eq!(lost(recipe, command), [message], "{recipe} {command}");
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
            assert!(lost(recipe, command).is_empty(), "{recipe} {command}");
        }
    }

    #[test]
    fn checkpoints_without_the_optimiser_are_reported() {
        let train = "python train.py {args}";
        let message = "with `save_only_model` checkpoints lack the optimiser's state, so it begins again after every \
                       restart";
        assert_eq!(lost("save_only_model: true\n", train), [message]);
        let of_command = lost("", &format!("{train} --save_only_model true"));
        assert_eq!(of_command.len(), 1);
        let off = format!("{train} --save_only_model false");
        for (recipe, command) in [
            ("", train),
            ("save_only_model: false\n", train),
            ("save_only_model: true\n", &off),
        ] {
            assert!(lost(recipe, command).is_empty(), "{recipe} {command}");
        }
    }

    #[test]
    fn what_a_command_with_numbers_alone_does_not_receive_is_named() {
        let more = "model_name_or_path: m\nlearning_rate: 1.0e-5\noutput_dir: out\n";
        let reported = |more: &str, command: &str| {
            let text = format!(
                "per_device_train_batch_size: 4\n{more}evenkeel: {{objective: sft, batch: {{gpus: 2}}}}\n"
            );
            let request = Request {
                path: "folder/sft.yaml".into(),
                trainer_command: command.split(' ').map(str::to_owned).collect(),
                ..Request::default()
            };
            let recipe = recipe::read_text(&request, text).unwrap();
            let found = only("recipe-not-passed", &recipe, &PlanRequest::gpus(2));
            Vec::from_iter(found.into_iter().map(|found| found.message))
        };
        let train = "python train.py {args} {resume_args}";
        insta::assert_snapshot!(reported(more, train).join("\n"), @"the command receives the batch numbers, but not `model_name_or_path`, `learning_rate` of folder/sft.yaml");
        let many = format!("{more}seed: 1\nweight_decay: 0.1\nmax_grad_norm: 0.5\n");
        insta::assert_snapshot!(reported(&many, train).join("\n"), @"the command receives the batch numbers, but not `model_name_or_path`, `learning_rate`, `seed`, `weight_decay` and 1 more of folder/sft.yaml");
        insta::assert_snapshot!(reported(more, "python train.py").join("\n"), @"the command receives the batch numbers only in its environment, but not `model_name_or_path`, `learning_rate` of folder/sft.yaml");
        let typed = format!("{train} --learning_rate 1e-5");
        insta::assert_snapshot!(reported(more, &typed).join("\n"), @"the command receives the batch numbers, but not `model_name_or_path` of folder/sft.yaml");
        for command in [
            "python train.py --config {recipe}",
            "python train.py {args} --config sft.yaml",
            "sh -c 'exec python train.py {args} --config=folder/sft.yaml'",
            "torchrun train.py {args} {recipe}",
        ] {
            assert_eq!(reported(more, command), [""; 0], "{command}");
        }
        assert_eq!(reported("output_dir: out\n", train), [""; 0]);
    }

    #[test]
    fn a_script_a_tree_and_a_launchers_config_are_no_recipe_to_pass() {
        let reported = |path: &str, text: &str, command: &str| {
            let request = Request {
                path: path.into(),
                trainer_command: command.split(' ').map(str::to_owned).collect(),
                ..Request::default()
            };
            let recipe = recipe::read_text(&request, text.to_owned()).unwrap();
            only("recipe-not-passed", &recipe, &PlanRequest::gpus(2)).len()
        };
        let script = "torchrun --nproc_per_node 2 train.py --per_device_train_batch_size 4 --learning_rate 1e-5\n";
        assert_eq!(reported("run.sh", script, "python train.py {args}"), 0);
        let ours = "{\"train_batch_size\": 8, \"zero_optimization\": {\"stage\": 2}}";
        let command =
            "python train.py --deepspeed_config {deepspeed_config} --batch {per_device_batch_size}";
        assert_eq!(reported("ds.json", ours, command), 0);
    }
}
