//! The number of processes that `accelerate launch` starts, and the switches that choose their type. Switches exist in
//! no config. They are part of the tree of a config and its options under their own names (`--cpu`), with the key that
//! [`Tree`] gives to command-line values.
//!
//! Source: accelerate 16cb6eb, `commands/launch.py` (`_validate_launch_command`, `launch_command`: the choice of a
//! launcher), `utils/launch.py` (`prepare_simple_launcher_cmd_env`: one process, or the number given to mpirun;
//! `prepare_multi_gpu_env`: `num_processes // num_machines` on each machine;
//! `prepare_deepspeed_cmd_env`: on several machines DeepSpeed's launcher, whose filter may name the
//! devices), `commands/launch.py` (`tpu_launcher`: all cores), `utils/constants.py` (`DEEPSPEED_MULTINODE_LAUNCHERS`).

use crate::recipe::dialects::deepspeed::hosts;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::shell::word::Word;
use crate::recipe::syntax::words::Words;

/// Values of `distributed_type`.
const TYPES: Words = Words(
    "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU MULTI_HPU \
     MULTI_NEURON DEEPSPEED FSDP XLA MEGATRON_LM",
);

/// Switches that choose the distributed type, in the order in which `launch_command` checks them.
const KINDS: [(&str, &str); 5] = [
    ("use_deepspeed", "DEEPSPEED"),
    ("use_fsdp", "FSDP"),
    ("use_megatron_lm", "MEGATRON_LM"),
    ("multi_gpu", "MULTI_GPU"),
    ("tpu", "XLA"),
];

/// The switch that starts a single process.
pub(super) const CPU: &str = "cpu";
/// The switch without which accelerate passes no sizes of axes on.
pub(super) const PARALLELISM: &str = "use_parallelism_config";

/// Whether an option of `accelerate launch` is a switch that affects the world.
pub(crate) fn is_switch(name: &str) -> bool {
    [CPU, PARALLELISM].contains(&name) || KINDS.iter().any(|(switch, _)| *switch == name)
}

/// Whether a value comes from the command line, not from the config's file.
pub(super) fn is_typed(node: &Node) -> bool {
    node.key.is_some()
}

/// A switch on the command line.
pub(super) fn switch<'n>(root: &'n Node, name: &str) -> Option<&'n Node> {
    let node = root.get(&format!("--{name}"))?;
    is_typed(node).then_some(node)
}

/// The distributed type of the command line, which overrides every config.
pub(super) fn typed_kind(root: &Node) -> Option<(&'static str, &Node)> {
    KINDS
        .iter()
        .find_map(|(name, kind)| Some((*kind, switch(root, name)?)))
}

/// Refuses switches that exclude each other, most of which accelerate refuses too.
pub(super) fn refuse_switches(root: &Node, reading: &mut Reading) {
    let kinds = KINDS.iter().map(|(name, _)| *name);
    let mut typed = [CPU]
        .into_iter()
        .chain(kinds)
        .filter_map(|name| switch(root, name));
    let name = |node: &Node| node.key.clone().unwrap_or_default();
    if let (Some(first), Some(second)) = (typed.next(), typed.next()) {
        let message = format!(
            "`{}` and `{}` choose different types",
            name(first),
            name(second)
        );
        let help = "remove one of them";
        reading.error("unsupported-value", Some(second.span), message, help);
    }
    let processes = root.get("num_processes").filter(|node| is_typed(node));
    let processes = processes.and_then(|node| node.text()?.parse::<i128>().ok());
    if let (Some(multi), Some(processes @ ..2)) = (switch(root, "multi_gpu"), processes) {
        reading.error(
            "unsupported-value",
            Some(multi.span),
            format!("`--multi_gpu` needs at least 2 processes, but the command has {processes}"),
            "remove `--multi_gpu`",
        );
    }
    if let (Some(asked), None) = (switch(root, PARALLELISM), switch(root, "use_fsdp")) {
        reading.error(
            "parallelism-product",
            Some(asked.span),
            "`--use_parallelism_config` needs `--use_fsdp`",
            "add `--use_fsdp --fsdp_version 2`, or set the type and the sizes in a config file",
        );
    }
}

/// Whether a value is one of `distributed_type`.
pub(super) fn is_type(node: &Node) -> bool {
    match node.resolve(Schema::PyYaml) {
        Some(Resolved::Bool(on)) => !on,
        Some(Resolved::Str(text)) => TYPES.has(&text),
        _ => false,
    }
}

/// The distributed type: that of the command line, else the config's. An unquoted `NO` is false to PyYAML,
/// and accelerate then finds no type. It refuses a config without a type, whatever the command line has.
pub(super) fn distributed_type(root: &Node, reading: &mut Reading) -> Option<String> {
    let Some(node) = root.get("distributed_type") else {
        let types: Vec<&str> = TYPES.iter().collect();
        reading.error(
            "mandatory-missing",
            Some(root.span),
            "accelerate refuses a config without `distributed_type`",
            format!("give one of {}", types.join(", ")),
        );
        return None;
    };
    let stated = match node.resolve(Schema::PyYaml) {
        Some(Resolved::Bool(false)) => {
            reading.warning(
                "scalar-type",
                Some(node.span),
                "`distributed_type` is the boolean false to PyYAML, taken as \"NO\"",
                "quote it, `\"NO\"`: accelerate finds no type in false",
            );
            "NO".to_owned()
        }
        Some(Resolved::Str(text)) if is_type(node) => text,
        _ => {
            let text = node.shown();
            reading.unknown_value("distributed_type", text, node.span, TYPES.iter());
            return None;
        }
    };
    let (kind, says, span) = match typed_kind(root) {
        Some((kind, switch)) => (kind.to_owned(), "--tpu", switch.span),
        None => (stated, "distributed_type: XLA", node.span),
    };
    if kind == "XLA" {
        let message = format!(
            "`{says}` starts a process for every TPU core that it finds, independent of `num_processes`: evenkeel cannot plan TPUs"
        );
        let help = "use `MULTI_GPU` for GPUs; for a recipe written for TPUs, remove the config and give `--recipe-gpus`";
        reading.error("unsupported-value", Some(span), message, help);
    }
    Some(kind)
}

/// The default of `num_processes`, which leaves the number to the command line.
const UNSET: i128 = -1;

/// The value of `--num_processes` that only the shell knows.
pub(super) fn unresolved(reading: &Reading) -> Option<&Word> {
    let mut options = reading.accelerate.iter().flat_map(|launch| &launch.options);
    let word = options
        .rfind(|option| option.name == "num_processes")?
        .value
        .as_ref()?;
    (!word.unresolved.is_empty()).then_some(word)
}

/// The processes of all machines, if known. `has_config`: accelerate exits if neither its config nor the command states
/// them. Only for the type `"NO"` it assumes 1 (`commands/config/config_args.py`, `process_config`; an unquoted one
/// is another value). Without a config accelerate counts the devices.
pub(super) fn world(
    root: &Node,
    kind: &str,
    has_config: bool,
    tree: &mut Tree,
    reading: &mut Reading,
) {
    let stated = root.get("num_processes");
    let unset = stated.is_none_or(|node| node.int(Schema::PyYaml) == Some(UNSET));
    let written = root.get("distributed_type");
    let written = written.and_then(|node| node.resolve(Schema::PyYaml));
    let one = stated.is_none() && written == Some(Resolved::Str("NO".to_owned()));
    if has_config && written.is_some() && unset && !one && unresolved(reading).is_none() {
        reading.warning(
            "mandatory-missing",
            Some(stated.map_or(root.span, |node| node.span)),
            "neither the config nor the command sets `num_processes`, and accelerate exits without it",
            "give it as `accelerate launch --num_processes N …`, or set it here",
        );
    }
    let mut int = |key: &str| root.get(key).and_then(|node| reading.int(key, node));
    let processes = int("num_processes").filter(|_| !unset);
    let machines = int("num_machines");
    let by_mpirun = non_empty(root, "mpirun_config.mpirun_hostfile").is_some();
    if let Some((cause, help)) = one_process(root, kind).filter(|_| !by_mpirun) {
        if let Some(given) = processes.filter(|given| given.value > 1) {
            let message = format!(
                "`num_processes: {}` has no effect: `{}` starts one process",
                given.value, cause.value
            );
            reading.warning("unsupported-value", Some(given.span), message, help);
        }
        tree.plain("batch.gpus", &cause.with(1));
        return;
    }
    if let Some(machines) = machines.as_ref().filter(|given| given.value < 1) {
        reading.error(
            "out-of-range",
            Some(machines.span),
            format!("`num_machines` is {}", machines.value),
            "give a whole number from 1",
        );
        return;
    }
    let machines = machines.map_or(1, |machines| machines.value);
    if kind == "DEEPSPEED" && machines > 1 && filtered(root, tree, reading) {
        return;
    }
    if let (Some(processes), false) = (&processes, by_mpirun) {
        divided(processes, machines, reading);
        named_devices(root, processes.value / machines, reading);
    }
    tree.plain_if("batch.gpus", processes);
}

/// The setting that makes accelerate start one process, and the way out.
fn one_process(root: &Node, kind: &str) -> Option<(Given<String>, &'static str)> {
    if let Some(node) = switch(root, CPU) {
        let cause = Given::new("--cpu", "--cpu".to_owned(), node.span);
        return Some((cause, "remove `--cpu`"));
    }
    let help = match kind {
        "NO" => "use `distributed_type: MULTI_GPU`",
        "MULTI_CPU" => {
            "set `mpirun_config`, or give the number of processes of your mpirun by `--recipe-gpus`"
        }
        _ => return None,
    };
    let (key, span) = ("distributed_type", root.get("distributed_type")?.span);
    Some((Given::new(key, format!("{key}: {kind}"), span), help))
}

/// A value that is present and not empty.
fn non_empty<'n>(root: &'n Node, path: &str) -> Option<&'n Node> {
    let node = root.get_path(path)?;
    (!node.is_null(Schema::PyYaml)).then_some(node)
}

/// Refuses processes that the machines do not divide: accelerate starts `num_processes // num_machines` on each.
fn divided(processes: &Given<i128>, machines: i128, reading: &mut Reading) {
    if processes.value % machines == 0 {
        return;
    }
    let each = processes.value / machines;
    reading.error(
        "parallelism-product",
        Some(processes.span),
        format!(
            "{} processes over {machines} machines: accelerate starts {each} on each, {} in all",
            processes.value,
            each * machines
        ),
        "make `num_processes` a multiple of `num_machines`",
    );
}

/// The number of devices in `gpu_ids`, if that is less than the number of processes of a machine: they
/// see only these devices, and each needs one.
pub(crate) fn too_few_devices(ids: &str, each: u64) -> Option<usize> {
    let count = ids.split(',').count();
    // Only the shell knows how many a variable names.
    (ids != "all" && !ids.contains('$') && (count as u64) < each).then_some(count)
}

fn named_devices(root: &Node, each: i128, reading: &mut Reading) {
    let Some(node) = non_empty(root, "gpu_ids") else {
        return;
    };
    let text = node.shown();
    let each = u64::try_from(each).unwrap_or(0);
    if let Some(count) = too_few_devices(text, each) {
        reading.error(
            "parallelism-product",
            Some(node.span),
            format!(
                "{each} processes of a machine have only {count} devices in `gpu_ids` `{text}`"
            ),
            "name one device for each, or write `all`",
        );
    }
}

/// On several machines DeepSpeed's own launcher starts the processes that its filter names, independent of
/// `num_processes`. False: no filter counts.
fn filtered(root: &Node, tree: &mut Tree, reading: &mut Reading) -> bool {
    let value = |name: &str| non_empty(root, &format!("deepspeed_config.deepspeed_{name}"));
    let standard = value("multinode_launcher").and_then(Node::text) == Some("standard");
    let excluded = value("exclusion_filter");
    let Some(node) = excluded
        .or_else(|| value("inclusion_filter"))
        .filter(|_| !standard)
    else {
        return false;
    };
    let text = node.shown();
    if let (None, Some(devices)) = (excluded, hosts::device_count(text)) {
        let key = "deepspeed_config.deepspeed_inclusion_filter";
        tree.plain("batch.gpus", &Given::new(key, devices, node.span));
        return true;
    }
    reading.warning(
        "unsupported-value",
        Some(node.span),
        format!("the number of devices that `{text}` leaves is in the hostfile, which evenkeel does not read"),
        "name them (`host:0,1@other:0,1`), or give their number by `--recipe-gpus`",
    );
    true
}

#[cfg(test)]
mod tests {
    use crate::recipe::schema::overrides::Setting;
    use crate::recipe::schema::request::Request;
    use crate::recipe::{ReadError, Recipe, read};

    const TRAINER: &str =
        "train.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2";

    /// Reads a command; `@` is the path of a config with the given text.
    fn job(config: &str, launcher: &str) -> Result<Recipe, ReadError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.yaml");
        std::fs::write(&path, config).unwrap();
        for (name, text) in [
            (
                "auto.json",
                r#"{"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 2}}"#,
            ),
            (
                "none.json",
                r#"{"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}"#,
            ),
        ] {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let here = folder.path().display().to_string();
        let line = format!("{launcher} {TRAINER}").replace('@', &path.display().to_string());
        let line = line.replace('%', &here);
        read(&Request {
            command: line.split_whitespace().map(str::to_owned).collect(),
            ..Request::default()
        })
    }

    /// The processes of a job, and its findings: rule and line.
    fn findings(config: &str, launcher: &str) -> (Option<u64>, Vec<String>) {
        let (gpus, diagnostics) = match job(config, launcher) {
            Ok(recipe) => (recipe.spec.batch.gpus, recipe.diagnostics),
            Err(error) => (Some(0), error.diagnostics),
        };
        let line = |d: &crate::recipe::syntax::diagnostic::Diagnostic| {
            let line = d.span.map_or(0, |span| span.line);
            format!("{line}: {}[{}]", d.severity, d.rule)
        };
        (gpus, diagnostics.iter().map(line).collect())
    }

    const LAUNCH: &str = "accelerate launch --config_file @";
    const EIGHT: &str = "distributed_type: MULTI_GPU\nnum_processes: 8\n";

    #[test]
    fn one_process_starts_without_a_multi_process_type() {
        let cpu = "distributed_type: MULTI_CPU\nnum_processes: 4\nuse_cpu: true\n";
        let warned = |line: u32| vec![format!("{line}: warning[unsupported-value]")];
        assert_eq!(findings(cpu, LAUNCH), (Some(1), warned(2)));
        let by_mpirun = format!("{cpu}mpirun_config: {{mpirun_hostfile: hosts}}\n");
        assert_eq!(findings(&by_mpirun, LAUNCH), (Some(4), vec![]));
        assert_eq!(findings(EIGHT, LAUNCH), (Some(8), vec![]));
        assert_eq!(
            findings(EIGHT, &format!("{LAUNCH} --cpu")),
            (Some(1), warned(2))
        );
        let typed = "accelerate launch --cpu --num_processes 4";
        assert_eq!(findings("", typed), (Some(1), warned(1)));
    }

    #[test]
    fn tpus_are_refused_by_name() {
        let xla = "distributed_type: XLA\nnum_processes: 8\n";
        let refused = |line: u32| (Some(0), vec![format!("{line}: error[unsupported-value]")]);
        assert_eq!(findings(xla, LAUNCH), refused(1));
        assert_eq!(findings(EIGHT, &format!("{LAUNCH} --tpu")), refused(1));
        assert_eq!(
            findings("", "accelerate launch --tpu --num_processes 8"),
            refused(1)
        );
        // The command line overrides it.
        assert_eq!(
            findings(xla, &format!("{LAUNCH} --multi_gpu")),
            (Some(8), vec![])
        );
    }

    #[test]
    fn on_several_machines_a_deepspeed_filter_gives_the_processes() {
        let config = |more: &str| {
            format!(
                "distributed_type: DEEPSPEED\nnum_processes: 16\nnum_machines: 2\n\
             deepspeed_config:\n  zero_stage: 2\n{more}"
            )
        };
        let included = config("  deepspeed_inclusion_filter: \"a:0,1@b:0,1\"\n");
        assert_eq!(findings(&included, LAUNCH), (Some(4), vec![]));
        let standard = format!("{included}  deepspeed_multinode_launcher: standard\n");
        assert_eq!(findings(&standard, LAUNCH), (Some(16), vec![]));
        let alone = included.replace("num_machines: 2", "num_machines: 1");
        assert_eq!(findings(&alone, LAUNCH), (Some(16), vec![]));
        for unknown in ["inclusion_filter: \"a@b:0\"", "exclusion_filter: \"a:0\""] {
            let config = config(&format!("  deepspeed_{unknown}\n"));
            let warned = vec!["6: warning[unsupported-value]".to_owned()];
            assert_eq!(findings(&config, LAUNCH), (None, warned), "{unknown}");
        }
    }

    #[test]
    fn combinations_that_accelerate_or_deepspeed_refuse_are_refused() {
        let deepspeed = |more: &str| {
            format!(
                "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  \
             deepspeed_config_file: {more}"
            )
        };
        for (config, launcher, expected) in [
            (
                "compute_environment: LOCAL_MACHINE\nnum_processes: 4\n",
                LAUNCH,
                "1: error[mandatory-missing]",
            ),
            (
                "distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: \"0\"\n",
                LAUNCH,
                "3: error[parallelism-product]",
            ),
            (
                EIGHT,
                "accelerate launch --config_file @ --gpu_ids 0,1",
                "1: error[parallelism-product]",
            ),
            (
                "",
                "accelerate launch --use_fsdp --cpu",
                "1: error[unsupported-value]",
            ),
            (
                "",
                "accelerate launch --multi_gpu --num_processes 1",
                "1: error[unsupported-value]",
            ),
            (
                "",
                "deepspeed --num_gpus 8 --include localhost:0,1",
                "1: error[unsupported-value]",
            ),
            (
                "",
                "deepspeed --num_nodes 2 --exclude other:0",
                "1: error[unsupported-value]",
            ),
            (
                &deepspeed("auto.json\n  gradient_accumulation_steps: 2\n"),
                LAUNCH,
                "5: error[unsupported-value]",
            ),
            (
                &deepspeed("auto.json\nmixed_precision: bf16\n"),
                LAUNCH,
                "5: error[unsupported-value]",
            ),
            (
                &deepspeed("none.json\n"),
                LAUNCH,
                "1: error[mandatory-missing]",
            ),
        ] {
            let (gpus, found) = findings(config, launcher);
            assert_eq!(
                (gpus, found),
                (Some(0), vec![expected.to_owned()]),
                "{config}{launcher}"
            );
        }
        let file = deepspeed("auto.json\n");
        assert_eq!(findings(&file, LAUNCH), (Some(8), vec![]));
        let typed = format!("{LAUNCH} --mixed_precision bf16");
        assert_eq!(findings(&file, &typed), (Some(8), vec![]));
        let ids = "distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: 0,1,2,3\n";
        assert_eq!(findings(ids, LAUNCH), (Some(4), vec![]));
    }

    #[test]
    fn a_flag_that_differs_from_the_launcher_is_a_warning() {
        let line = format!("accelerate launch --num_processes 8 {TRAINER}");
        let with = |gpus: &str| {
            let recipe = read(&Request {
                command: line.split_whitespace().map(str::to_owned).collect(),
                settings: vec![Setting {
                    flag: "--recipe-gpus",
                    path: "batch.gpus",
                    value: gpus.to_owned(),
                }],
                ..Request::default()
            });
            recipe.unwrap()
        };
        assert_eq!(with("8").diagnostics, []);
        let four = with("4");
        assert_eq!(four.spec.batch.gpus, Some(4));
        assert_eq!(four.diagnostics[0].rule, "gpu-count-conflict");
        assert_eq!(
            four.diagnostics[0].message,
            "`num_processes` gives a world of 8, but `--recipe-gpus` is 4"
        );
    }

    #[test]
    fn a_second_trl_config_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("sft.yaml");
        let text = "model_name_or_path: m\ndataset_name: d\naccelerate_config: zero2\n";
        std::fs::write(&path, text).unwrap();
        let line = format!(
            "trl sft --config {} --accelerate_config multi_gpu",
            path.display()
        );
        let refused = read(&Request {
            command: line.split_whitespace().map(str::to_owned).collect(),
            ..Request::default()
        });
        let found = refused.unwrap_err().diagnostics;
        assert!(found[0].message.contains("refuses the second"), "{found:?}");
    }

    #[test]
    fn sizes_count_only_where_accelerate_passes_them_on() {
        let sized = |kind: &str, sizes: &str| {
            format!("distributed_type: {kind}\nnum_processes: 8\nparallelism_config: {{{sizes}}}\n")
        };
        let own = "parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 4";
        let fsdp2 = format!("{}fsdp_config: {{fsdp_version: 2}}\n", sized("FSDP", own));
        let by_hand = "accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 \
                   --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 4";
        for (config, launcher, tensor, expected) in [
            (sized("MULTI_GPU", own), LAUNCH.to_owned(), 2, None),
            (fsdp2.clone(), LAUNCH.to_owned(), 2, None),
            (
                String::new(),
                format!("{by_hand} --use_parallelism_config"),
                2,
                None,
            ),
            (
                String::new(),
                by_hand.to_owned(),
                1,
                Some("1: warning[unsupported-value]"),
            ),
            (
                fsdp2.clone(),
                format!("{LAUNCH} --use_fsdp"),
                1,
                Some("3: warning[unsupported-value]"),
            ),
            (
                fsdp2,
                format!("{LAUNCH} --use_fsdp --fsdp_version 2 --use_parallelism_config"),
                2,
                None,
            ),
            (
                sized("MULTI_GPU", "tp_size: 2, dp_shard_size: 4"),
                LAUNCH.to_owned(),
                1,
                Some("3: warning[unsupported-value]"),
            ),
            (
                EIGHT.to_owned(),
                format!("{LAUNCH} --parallelism_config_tp_size 2"),
                1,
                Some("1: warning[unsupported-value]"),
            ),
        ] {
            let recipe = job(&config, &launcher);
            let recipe = recipe.unwrap_or_else(|error| panic!("{config}{launcher}: {error}"));
            assert_eq!(recipe.spec.parallel.tensor, tensor, "{config}{launcher}");
            let (_, found) = findings(&config, &launcher);
            let expected: Vec<String> = expected.into_iter().map(str::to_owned).collect();
            assert_eq!(found, expected, "{config}{launcher}");
        }
    }

    #[test]
    fn parallelism_that_accelerate_refuses_is_refused() {
        let sized = |kind: &str, more: &str| {
            format!(
                "distributed_type: {kind}\nnum_processes: 2\nparallelism_config:\n  \
             parallelism_config_tp_size: 2\n{more}"
            )
        };
        let typed = "accelerate launch --num_processes 8 --parallelism_config_tp_size 2 \
                 --parallelism_config_dp_shard_size 4 --use_parallelism_config";
        for (config, launcher) in [
            (
                sized("FSDP", "  parallelism_config_dp_shard_size: 1\n"),
                LAUNCH.to_owned(),
            ),
            (
                sized("FSDP", "fsdp_config: {fsdp_version: 2}\n"),
                LAUNCH.to_owned(),
            ),
            (sized("MEGATRON_LM", ""), LAUNCH.to_owned()),
            (String::new(), typed.to_owned()),
            (String::new(), format!("{typed} --use_fsdp")),
        ] {
            let error = job(&config, &launcher).unwrap_err();
            let rules: Vec<&str> = error.diagnostics.iter().map(|d| d.rule.as_str()).collect();
            assert_eq!(rules, ["parallelism-product"], "{config}{launcher}");
        }
        // Unstated sizes are 1, and the planner checks the product.
        let recipe = job(&sized("MULTI_GPU", ""), LAUNCH).unwrap();
        let parallel = recipe.spec.parallel;
        assert_eq!(
            (parallel.data_replicate, parallel.data_shard),
            (Some(1), Some(1))
        );
    }
}
