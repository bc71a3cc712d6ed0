//! DeepSpeed in an accelerate config: inline, or in a DeepSpeed file that it names. A
//! trainer's own DeepSpeed config replaces that file.
//!
//! Sources: accelerate 16cb6eb `commands/launch.py` (`launch_command`: it passes the keys of the config's file
//! on by name), `utils/launch.py` (`prepare_deepspeed_cmd_env`), `utils/dataclasses.py`
//! (`DeepSpeedPlugin`: `_deepspeed_config_checks` refuses these keys with any file; command-line values
//! replace only "auto" in the file); transformers 5.23.0 `training_args.py` (`__post_init__`: the trainer's
//! file comes first), `trainer.py` (`create_accelerator_and_postprocess`: accelerate's is compared too).

use std::path::Path;

use super::world::is_typed;
use crate::recipe::dialects::deepspeed;
use crate::recipe::schema::deepspeed::{ConfigKey, DeepSpeedPlugin};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::Schema;
use crate::recipe::syntax::words::Words;

/// Keys of `deepspeed_config` that belong in the DeepSpeed file, if there is one.
const IN_THE_FILE: Words = Words(
    "gradient_accumulation_steps gradient_clipping zero_stage offload_optimizer_device \
     offload_param_device offload_param_nvme_path offload_optimizer_nvme_path \
     zero3_save_16bit_model",
);

/// The ZeRO stage (default 2) and accumulation, from the config itself or the DeepSpeed
/// file that it names.
pub(super) fn read(root: &Node, path: &Path, reading: &mut Reading) {
    let mut tree = Tree::new(root.span);
    // accelerate checks the keys for DeepSpeed in a config's file, which the command line does not override.
    let launch = reading.accelerate.as_ref();
    let config = launch
        .and_then(|launch| launch.config.as_ref())
        .unwrap_or(root);
    let section = config.get("deepspeed_config").and_then(Node::entries);
    let keys = section
        .unwrap_or_default()
        .iter()
        .filter(|e| IN_THE_FILE.has(&e.name));
    // A precision of the command line is not the config's.
    let precision = root.entries().unwrap_or_default().iter();
    let precision =
        precision.filter(|e| e.name == "mixed_precision" && !e.value.is_null(Schema::PyYaml));
    let keys = keys.chain(precision).filter(|e| !is_typed(&e.value));
    let config_keys: Vec<ConfigKey> = keys.map(|e| (e.name.clone(), e.name_span)).collect();
    tree.default("parallel.strategy", "zero2");
    let mut file = None;
    if let Some(config) = root.get("deepspeed_config") {
        let named = config.get("deepspeed_config_file");
        match named.filter(|node| !node.is_null(Schema::PyYaml) && node.text() != Some("none")) {
            Some(named) => {
                refuse_both(&config_keys, reading);
                file = in_file(config, named, path, &mut tree, reading);
            }
            None => {
                for (key, _) in REPLACES_AUTO {
                    value(config, key, &mut tree, reading);
                }
                for (part, native) in deepspeed::OFFLOADS {
                    let key = format!("{part}_device");
                    if let Some(node) = config.get(&key).filter(|n| !n.is_null(Schema::PyYaml)) {
                        let name = format!("deepspeed_config.{key}");
                        let offloaded = deepspeed::is_offloaded(node);
                        tree.plain(native, &Given::new(name, offloaded, node.span));
                    }
                }
            }
        }
    }
    reading.deepspeed_plugin = Some(DeepSpeedPlugin {
        config_keys,
        file,
        native: tree.into_node(),
    });
}

impl DeepSpeedPlugin {
    /// For a program whose arguments are not a trainer's: it compares nothing, and where the file leaves the accumulation to
    /// it ("auto"), the samples of a step are not known (accelerate 16cb6eb `accelerator.py`, `_prepare_deepspeed`).
    pub(crate) fn leave_to_program(&mut self) {
        if let Some(file) = self.file.take() {
            deepspeed::take_micro_batch(&file, &mut self.native);
        }
    }
}

const ACCUMULATION: &str = "gradient_accumulation_steps";

/// The keys whose values count without a file. On the command line they also replace an "auto" at a path of the file.
const REPLACES_AUTO: [(&str, &str); 2] = [
    ("zero_stage", "zero_optimization.stage"),
    (ACCUMULATION, ACCUMULATION),
];

/// The file that the config names. Without an accumulation it means 1, which the trainer compares.
fn in_file(
    config: &Node,
    named: &Node,
    path: &Path,
    tree: &mut Tree,
    reading: &mut Reading,
) -> Option<Node> {
    let file = deepspeed::open_named(named, path, "create it next to this file", reading)?;
    let mut native = deepspeed::translate(&file, "deepspeed_config_file", reading);
    deepspeed::refuse_elasticity(&mut native, reading);
    tree.lay(native);
    if file.get(ACCUMULATION).is_none() {
        let given = Given::new("deepspeed_config_file", 1, named.span);
        tree.plain("batch.accumulation", &given);
    }
    for (key, path) in REPLACES_AUTO {
        let Some(typed) = config.get(key).filter(|node| is_typed(node)) else {
            continue;
        };
        let stated = file.get_path(path).and_then(Node::text);
        if stated == Some("auto") {
            value(config, key, tree, reading);
        } else if stated != typed.text() {
            let option = format!("{} {}", typed.key.as_deref().unwrap_or(key), typed.shown());
            let why = match stated {
                Some(stated) => {
                    format!("`{path}` is {stated} in the DeepSpeed file, which counts")
                }
                None => format!("the DeepSpeed file counts, and has no `{path}`"),
            };
            reading.warning(
                "unsupported-value",
                Some(typed.span),
                format!("`{option}` has no effect: {why}"),
                format!("set it in the file, or write \"auto\" for `{path}` there"),
            );
        }
    }
    Some(file)
}

/// Reads the stage or the accumulation of the config itself.
fn value(config: &Node, key: &str, tree: &mut Tree, reading: &mut Reading) {
    let Some(node) = config.get(key) else {
        return;
    };
    let number = node.int(Schema::PyYaml);
    let name = format!("deepspeed_config.{key}");
    if key == ACCUMULATION {
        let given = number.map(|number| Given::new(name, number, node.span));
        tree.plain_if("batch.accumulation", given);
    } else if let Some(strategy) = number.and_then(deepspeed::strategy) {
        tree.plain("parallel.strategy", &Given::new(name, strategy, node.span));
    } else {
        deepspeed::refuse_stage(key, node, reading);
    }
}

/// Refuses a config that states the same values as its DeepSpeed file, as accelerate does; it accepts
/// command-line values.
fn refuse_both(config_keys: &[ConfigKey], reading: &mut Reading) {
    for (name, at) in config_keys {
        reading.error(
            "unsupported-value",
            Some(*at),
            format!("accelerate refuses `{name}` together with `deepspeed_config_file`"),
            "set it in the DeepSpeed file, and remove it here",
        );
    }
}

/// A trainer's own DeepSpeed config counts, and accelerate refuses it with a
/// config that states the same values.
pub(crate) fn overrule(reading: &mut Reading) {
    let Some(plugin) = reading.deepspeed_plugin.take() else {
        return;
    };
    let names = plugin
        .config_keys
        .iter()
        .map(|(name, _)| format!("`{name}`"));
    let names: Vec<String> = names.collect();
    if let Some((_, at)) = plugin.config_keys.first() {
        reading.error(
            "deepspeed-conflict",
            Some(*at),
            format!(
                "accelerate refuses {} together with the trainer's own DeepSpeed config",
                names.join(", ")
            ),
            "remove the trainer's `deepspeed`, or launch it with a config whose type is not `DEEPSPEED`",
        );
    }
}

/// Lays the launcher's values over those of its DeepSpeed config, which count unless the trainer has its own.
pub(crate) fn with_deepspeed(launched: Node, reading: &mut Reading) -> Node {
    match reading.deepspeed_plugin.take() {
        Some(mut plugin) => {
            plugin.native.overlay(launched);
            plugin.native
        }
        None => launched,
    }
}

#[cfg(test)]
mod tests {
    use crate::plan::{PlanRequest, examine};
    use crate::recipe::schema::request::Request;
    use crate::recipe::schema::spec::Strategy;
    use crate::recipe::{ReadError, Recipe, read};

    const EIGHT: &str = "distributed_type: DEEPSPEED\nnum_processes: 8\n";
    const TRAINER: &str =
        "train.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2";
    const LAUNCH: &str = "accelerate launch --config_file @/a.yaml";

    /// A command with `a.yaml`, an accelerate config, and DeepSpeed configs of all stages; `@` is
    /// their directory.
    fn job(config: &str, command: &str) -> Result<Recipe, ReadError> {
        let folder = tempfile::tempdir().unwrap();
        let auto = r#""train_batch_size": "auto", "gradient_accumulation_steps": "auto""#;
        for (name, text) in [
            ("a.yaml", config.to_owned()),
            ("one.json", stage("1", auto)),
            ("auto.json", stage("\"auto\"", auto)),
            (
                "three.json",
                stage("3", r#""gradient_accumulation_steps": 8"#),
            ),
            (
                "micro.json",
                stage(
                    "2",
                    r#""gradient_accumulation_steps": 2, "train_micro_batch_size_per_gpu": 8"#,
                ),
            ),
            (
                "auto-accumulation.json",
                stage(
                    "2",
                    r#""gradient_accumulation_steps": "auto", "train_micro_batch_size_per_gpu": 2"#,
                ),
            ),
            (
                "whole.json",
                stage(
                    "2",
                    r#""gradient_accumulation_steps": 2, "train_batch_size": 32"#,
                ),
            ),
            (
                "more.json",
                stage(
                    "2",
                    &format!(
                        r#"{auto}, "gradient_clipping": 0.5, "bf16": {{"enabled": true}}, "optimizer": {{"params": {{"lr": 1e-3}}}}"#
                    ),
                ),
            ),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let line = command.replace('@', &folder.path().display().to_string());
        read(&Request {
            command: line.split_whitespace().map(str::to_owned).collect(),
            ..Request::default()
        })
    }

    fn stage(stage: &str, more: &str) -> String {
        format!(r#"{{"zero_optimization": {{"stage": {stage}}}, {more}}}"#)
    }

    fn with(deepspeed: &str) -> String {
        format!("{EIGHT}deepspeed_config: {{{deepspeed}}}\n")
    }

    /// Rule and message of every finding.
    fn findings(result: &Result<Recipe, ReadError>) -> Vec<String> {
        let diagnostics = match result {
            Ok(recipe) => &recipe.diagnostics,
            Err(error) => &error.diagnostics,
        };
        let findings = diagnostics.iter();
        findings
            .map(|d| format!("{}[{}] {}", d.severity, d.rule, d.message))
            .collect()
    }

    #[test]
    fn a_trainers_config_is_refused_with_a_launcher_config_for_the_same_keys() {
        let trainer = format!("{TRAINER} --deepspeed @/one.json");
        let refused = |names: &str| {
            vec![format!(
                "error[deepspeed-conflict] accelerate refuses {names} together with the trainer's own DeepSpeed config"
            )]
        };
        for (config, names) in [
            (with("zero_stage: 1"), "`zero_stage`"),
            (
                with("zero_stage: 1, gradient_accumulation_steps: 2") + "mixed_precision: bf16\n",
                "`zero_stage`, `gradient_accumulation_steps`, `mixed_precision`",
            ),
            (
                format!("{EIGHT}mixed_precision: 'no'\n"),
                "`mixed_precision`",
            ),
        ] {
            let job = job(&config, &format!("{LAUNCH} {trainer}"));
            assert_eq!(findings(&job), refused(names), "{config}");
        }
        let line = "trl sft --model_name_or_path m --dataset_name d --per_device_train_batch_size 4 \
                --accelerate_config zero3 --deepspeed @/one.json";
        assert_eq!(
            findings(&job("", line)),
            refused(
                "`offload_optimizer_device`, `offload_param_device`, `zero3_save_16bit_model`, `zero_stage`, `mixed_precision`"
            )
        );
        // A command-line value does not remove the config's key; a command-line precision does.
        let typed = format!("{LAUNCH} --zero_stage 1 {trainer}");
        assert_eq!(
            findings(&job(&with("zero_stage: 1"), &typed)),
            refused("`zero_stage`")
        );
        let typed = format!("{LAUNCH} --mixed_precision bf16 {trainer}");
        let config = format!("{EIGHT}mixed_precision: bf16\n");
        assert!(findings(&job(&config, &typed)).is_empty());
    }

    #[test]
    fn a_trainers_config_overrides_the_launchers() {
        let trainer = format!("{TRAINER} --deepspeed @/one.json");
        for (config, launch) in [
        (EIGHT.to_owned(), LAUNCH.to_owned()),
        (with("deepspeed_config_file: three.json"), LAUNCH.to_owned()),
        (EIGHT.replace("DEEPSPEED", "MULTI_GPU"), LAUNCH.to_owned()),
        (
            String::new(),
            "accelerate launch --num_processes 8 --use_deepspeed --zero_stage 3 --gradient_accumulation_steps 4"
                .to_owned(),
        ),
    ] {
        let job = job(&config, &format!("{launch} {trainer}"));
        assert!(findings(&job).is_empty(), "{config}{launch}: {:?}", findings(&job));
        let spec = job.unwrap().spec;
        assert_eq!(spec.parallel.strategy, Strategy::Zero1, "{config}{launch}");
        let batch = spec.batch;
        assert_eq!((batch.gpus, batch.accumulation), (Some(8), Some(2)));
    }
    }

    #[test]
    fn command_line_values_only_replace_auto_in_a_file() {
        let typed = |file: &str, typed: &str| {
            let config = with(&format!("deepspeed_config_file: {file}.json"));
            job(&config, &format!("{LAUNCH} {typed} {TRAINER}"))
        };
        let stage = typed("one", "--zero_stage 3");
        assert_eq!(
            findings(&stage),
            [
                "warning[unsupported-value] `--zero_stage 3` has no effect: `zero_optimization.stage` is 1 in the DeepSpeed file, which counts"
            ]
        );
        assert_eq!(stage.unwrap().spec.parallel.strategy, Strategy::Zero1);
        for (file, option, strategy) in [
            ("one", "--zero_stage 1", Strategy::Zero1),
            ("auto", "--zero_stage 3", Strategy::Fsdp),
            ("auto", "", Strategy::Zero2),
            ("auto", "--gradient_accumulation_steps 2", Strategy::Zero2),
        ] {
            let job = typed(file, option);
            assert!(
                findings(&job).is_empty(),
                "{file} {option}: {:?}",
                findings(&job)
            );
            assert_eq!(
                job.unwrap().spec.parallel.strategy,
                strategy,
                "{file} {option}"
            );
        }
        let accumulation = typed("auto", "--gradient_accumulation_steps 4").unwrap_err();
        assert_eq!(accumulation.diagnostics[0].rule, "accumulation-conflict");
    }

    #[test]
    fn the_launchers_file_is_compared_like_the_trainers() {
        let launched = |file: &str, trainer: &str| {
            let config = with(&format!("deepspeed_config_file: {file}.json"));
            let result = job(&config, &format!("{LAUNCH} {trainer}"));
            let error = result.err();
            let errors = error.iter().flat_map(|error| &error.diagnostics);
            let errors = errors.filter(|d| d.is_error());
            errors.map(|d| d.rule.clone()).collect::<Vec<_>>()
        };
        assert_eq!(launched("one", TRAINER), [""; 0]);
        assert_eq!(launched("three", TRAINER), ["accumulation-conflict"]);
        assert_eq!(launched("micro", TRAINER), ["deepspeed-batch-triple"]);
        let default = "train.py --gradient_accumulation_steps 2 --output_dir o";
        assert_eq!(launched("micro", default), [""; 0], "8 is the default");
        assert_eq!(launched("more", TRAINER), ["deepspeed-conflict"; 3]);
        let same = format!("{TRAINER} --max_grad_norm 0.5 --bf16 --learning_rate 1e-3");
        assert_eq!(launched("more", &same), [""; 0]);
        // A custom training loop compares nothing.
        let own = TRAINER.replace("train.py", "run_no_trainer.py");
        assert_eq!(launched("more", &own), [""; 0]);
        assert_eq!(launched("more", "train.py --batch_size 4"), [""; 0]);
    }

    /// The accumulation of a program that no reader knows, if its DeepSpeed config leaves it to the program.
    #[test]
    fn an_accumulation_of_the_program_leaves_the_batch_unknown() {
        let config = with("deepspeed_config_file: auto-accumulation.json");
        let batch = |launch: &str, program: &str| {
            let recipe = job(&config, &format!("{launch} {program}")).unwrap();
            crate::plan::global_batch(&recipe.spec)
        };
        let other = "train.py --batch-size 2 --gradient-accumulate-every 4";
        assert_eq!(batch(LAUNCH, other), None);
        let typed = format!("{LAUNCH} --gradient_accumulation_steps 4");
        assert_eq!(batch(&typed, other), Some(8 * 2 * 4));
    }

    #[test]
    fn a_train_batch_in_the_launchers_file_counts_all_processes() {
        let config = with("deepspeed_config_file: whole.json");
        let planned = |processes: &str| {
            let config = config.replace("num_processes: 8", processes);
            let recipe = job(&config, &format!("{LAUNCH} {TRAINER}")).unwrap();
            let world = recipe.spec.batch.gpus.unwrap();
            let draft = examine(&recipe, &PlanRequest::gpus(world));
            let errors = draft.findings.into_iter();
            let errors = errors.filter(|d| d.is_error());
            errors.map(|d| d.rule).collect::<Vec<_>>()
        };
        assert_eq!(planned("num_processes: 8"), ["global-batch-conflict"]);
        assert_eq!(planned("num_processes: 4"), [""; 0]);
    }
}
