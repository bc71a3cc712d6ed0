//! The number of processes that `accelerate launch` starts.
//!
//! Source: accelerate 16cb6eb, `commands/launch.py` (`launch_command`: the choice of a launcher),
//! `utils/launch.py` (`prepare_simple_launcher_cmd_env`: one process, or the number given to mpirun;
//! `prepare_multi_gpu_env`: `num_processes // num_machines` on each machine;
//! `prepare_deepspeed_cmd_env`: on several machines DeepSpeed's launcher, whose filter may name the
//! devices), `commands/launch.py` (`tpu_launcher`: all cores), `utils/constants.py` (`DEEPSPEED_MULTINODE_LAUNCHERS`).

use super::typed;
use crate::recipe::dialects::deepspeed::hosts;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::words::Words;

/// Values of `distributed_type`.
pub(super) const TYPES: Words = Words(
    "NO MULTI_CPU MULTI_GPU MULTI_NPU MULTI_MLU MULTI_SDAA MULTI_MUSA MULTI_XPU MULTI_HPU \
     MULTI_NEURON DEEPSPEED FSDP XLA MEGATRON_LM",
);

/// The distributed type: that of the command line, else the config's. An unquoted `NO` is false to PyYAML,
/// and accelerate then finds no type. It refuses a config without a type, whatever the command line has.
pub(super) fn distributed_type(root: &Node, reading: &mut Reading) -> Option<String> {
    let Some(node) = root.get("distributed_type") else {
        reading.error(
            "mandatory-missing",
            Some(root.span),
            "accelerate refuses a config without `distributed_type`",
            format!(
                "give one of {}",
                TYPES.iter().collect::<Vec<_>>().join(", ")
            ),
        );
        return None;
    };
    let own = match node.resolve(Schema::PyYaml) {
        Some(Resolved::Bool(false)) => {
            warn_about_unquoted_no(root, reading);
            Some("NO".to_owned())
        }
        Some(Resolved::Str(text)) if TYPES.has(&text) => Some(text),
        _ => {
            let text = node.shown();
            reading.unknown_value("distributed_type", text, node.span, TYPES.iter());
            None
        }
    };
    match typed::kind(root) {
        Some((kind, _)) => Some(kind.to_owned()),
        None => own,
    }
}

/// Warns about an unquoted `NO`, also in SageMaker's configs, which are not read otherwise.
pub(super) fn warn_about_unquoted_no(root: &Node, reading: &mut Reading) {
    let is_false = |node: &&Node| node.is_bool(false, Schema::PyYaml);
    if let Some(node) = root.get("distributed_type").filter(is_false) {
        reading.warning(
            "scalar-type",
            Some(node.span),
            "`distributed_type` is the boolean false to PyYAML, taken as \"NO\"",
            "quote it, `\"NO\"`: accelerate finds no type in false",
        );
    }
}

/// The default of `num_processes`, which leaves the number to the command line.
const UNSET: i128 = -1;

/// Warns about a config without processes if the command line has none either: accelerate exits.
/// Only for the type `"NO"` it assumes 1 (`commands/config/config_args.py`, `process_config`; an unquoted one
/// is another value). Without a config accelerate counts the devices.
pub(super) fn warn_about_unset_processes(root: &Node, reading: &mut Reading) {
    let stated = root.get("num_processes");
    let unset = |node: &Node| node.resolve(Schema::PyYaml) == Some(Resolved::Int(UNSET));
    let kind = root.get("distributed_type");
    let kind = kind.and_then(|node| node.resolve(Schema::PyYaml));
    let elsewhere = root.get("compute_environment").and_then(Node::text);
    if elsewhere.is_some_and(|environment| environment != "LOCAL_MACHINE") {
        return;
    }
    let one = stated.is_none() && kind == Some(Resolved::Str("NO".to_owned()));
    if one || !stated.is_none_or(unset) || kind.is_none() {
        return;
    }
    reading.warning(
        "mandatory-missing",
        Some(stated.map_or(root.span, |node| node.span)),
        "neither the config nor the command sets `num_processes`, and accelerate exits without it",
        "give it as `accelerate launch --num_processes N …`, or set it here",
    );
}

/// The processes of all machines, if known.
pub(super) fn world(root: &Node, kind: Option<&str>, tree: &mut Tree, reading: &mut Reading) {
    if kind == Some("XLA") {
        refuse_tpus(root, reading);
        return;
    }
    let mut int = |key: &str| root.get(key).and_then(|node| reading.int(key, node));
    let processes = int("num_processes").filter(|given| given.value != UNSET);
    let machines = int("num_machines");
    let by_mpirun = non_empty(root, "mpirun_config.mpirun_hostfile").is_some();
    if let Some(alone) = one_process(root, kind).filter(|_| !by_mpirun) {
        if let Some(given) = processes.filter(|given| given.value > 1) {
            reading.warning(
                "unsupported-value",
                Some(given.span),
                format!(
                    "`num_processes: {}` has no effect: {} starts one process",
                    given.value, alone.says
                ),
                alone.help,
            );
        }
        tree.plain("batch.gpus", &Given::new(alone.key, 1, alone.node.span));
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
    let on = machines.as_ref().map_or(1, |machines| machines.value);
    if kind == Some("DEEPSPEED") && on > 1 && filtered(root, tree, reading) {
        return;
    }
    if let (Some(processes), false) = (&processes, by_mpirun) {
        divided(processes, on, reading);
        named_devices(root, processes.value / on, reading);
    }
    tree.plain_if("batch.gpus", processes);
}

/// Refuses TPUs: their launcher starts a process for every core that it finds, whatever the number.
fn refuse_tpus(root: &Node, reading: &mut Reading) {
    let typed = typed::kind(root).map(|(_, node)| ("--tpu", node));
    let stated = root.get("distributed_type");
    let stated = stated.map(|node| ("distributed_type: XLA", node));
    let Some((says, node)) = typed.or(stated) else {
        return;
    };
    reading.error(
        "unsupported-value",
        Some(node.span),
        format!(
            "`{says}` starts a process for every TPU core that it finds, independent of `num_processes`: evenkeel cannot plan TPUs"
        ),
        "use `MULTI_GPU` for GPUs; for a recipe written for TPUs, remove the config and give `--recipe-gpus`",
    );
}

/// The setting that makes accelerate start one process.
struct Alone<'n> {
    key: &'static str,
    node: &'n Node,
    says: String,
    help: &'static str,
}

fn one_process<'n>(root: &'n Node, kind: Option<&str>) -> Option<Alone<'n>> {
    if let Some(node) = typed::switch(root, typed::CPU) {
        return Some(Alone {
            key: "--cpu",
            node,
            says: "`--cpu`".to_owned(),
            help: "remove `--cpu`",
        });
    }
    let help = match kind? {
        "NO" => "use `distributed_type: MULTI_GPU`",
        "MULTI_CPU" => {
            "set `mpirun_config`, or give the number of processes of your mpirun by `--recipe-gpus`"
        }
        _ => return None,
    };
    Some(Alone {
        key: "distributed_type",
        node: root.get("distributed_type")?,
        says: format!("`distributed_type: {}`", kind?),
        help,
    })
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
    (ids != "all" && (count as u64) < each).then_some(count)
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
    let key = |name: &str| format!("deepspeed_config.deepspeed_{name}");
    let launcher = non_empty(root, &key("multinode_launcher")).and_then(Node::text);
    if launcher == Some("standard") {
        return false;
    }
    let excluded = non_empty(root, &key("exclusion_filter"));
    let Some(node) = excluded.or_else(|| non_empty(root, &key("inclusion_filter"))) else {
        return false;
    };
    let text = node.shown();
    match hosts::device_count(text).filter(|_| excluded.is_none()) {
        Some(devices) => {
            let given = Given::new(key("inclusion_filter"), devices, node.span);
            tree.plain("batch.gpus", &given);
        }
        None => reading.warning(
            "unsupported-value",
            Some(node.span),
            format!("the number of devices that `{text}` leaves is in the hostfile, which evenkeel does not read"),
            "name them (`host:0,1@other:0,1`), or give their number by `--recipe-gpus`",
        ),
    }
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
