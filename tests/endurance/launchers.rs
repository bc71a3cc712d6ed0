//! Launchers of external trainers: the environment and the command of a rank, compared with those of the real
//! `accelerate launch` for every config of the corpus and for generated configs and options.
//!
//! The tests need a Python with torch and accelerate: `EVENKEEL_PYTHON`, or `python3`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};

use evenkeel::recipe::{self, ReadError, Request, launchers};
use serde::Deserialize;

use serde_json::{Value, json};

use super::support::{self, Run, wait_for};
use super::trainers::{own_file, python};

/// A case of `accelerate_launch.py`: a command, and what the real launcher does with it.
#[derive(Deserialize)]
struct Case {
    name: String,
    /// `{config}` is the config's file.
    words: Vec<String>,
    config: Option<Config>,
    expected: Launched,
}

#[derive(Deserialize)]
struct Config {
    text: String,
    suffix: String,
}

/// What a launcher gives to a rank.
#[derive(Debug, PartialEq, Deserialize)]
struct Launched {
    environment: BTreeMap<String, String>,
    command: Vec<String>,
    /// The number of ranks; `None`: another program decides it.
    world: Option<u64>,
    /// Why the launcher refuses.
    error: Option<String>,
}

fn refused(error: String) -> Launched {
    Launched {
        environment: BTreeMap::new(),
        command: Vec::new(),
        world: None,
        error: Some(error),
    }
}

/// What evenkeel gives to a rank in the world that the command states.
fn launched(words: &[String]) -> Launched {
    let first = |error: ReadError| refused(error.to_string());
    let request = Request {
        command: words.to_vec(),
        ..Request::default()
    };
    let recipe = match recipe::read(&request) {
        Ok(recipe) => recipe,
        Err(error) => return first(error),
    };
    let native = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec: {batch: {global: 64}}\n";
    let request = Request {
        path: "recipe.yaml".into(),
        trainer_command: words.to_vec(),
        ..Request::default()
    };
    let started = match recipe::read_text(&request, native.to_owned()) {
        Ok(started) => started,
        Err(error) => return first(error),
    };
    match launchers::stated_environment(&recipe) {
        Err(error) => first(error),
        Ok(environment) => Launched {
            environment,
            command: started.spec.trainer.command,
            world: recipe.spec.batch.gpus,
            error: None,
        },
    }
}

/// Settings that accelerate takes and evenkeel refuses, by a part of the message. accelerate drops the setting, or
/// fails later in the script.
const REFUSED: &[&str] = &[
    "has no effect with",
    "accelerate drops",
    "accelerate refuses",
    "accelerate starts",
    "only for TPUs or not at all",
    "evenkeel cannot plan TPUs",
    "starts the processes with mpirun",
    "selects devices",
    "devices in `gpu_ids`",
    "choose different types",
    "has no axis to shard over",
    "write `true` or `false`",
    "takes a whole number",
    "takes a mapping",
    "expected one of",
    "`distributed_type` is",
    "takes one value",
    "not its default",
    "former key of accelerate",
    "`--dynamo_backend` is",
    "is not read for",
    "`num_machines` is 0",
    "`num_processes` is 0",
    "`zero_stage` is",
    "name no program that evenkeel can start",
];

/// Reasons for which accelerate refuses and evenkeel does not: evenkeel knows the number of processes, makes the
/// rendezvous and writes the logs.
const ACCEPTED: &[&str] = &[
    "--num_processes",
    "--main_process_port",
    "--max_restarts",
    "--monitor_interval",
    "nproc_per_node",
    "main process IP",
    "main process port",
    "machine_rank",
    "rendezvous configuration",
    "does not match: <^[0123]$>",
    "invalid truth value none",
    "NoneType",
    "ZeroDivisionError",
];

/// The variables of the real launcher that evenkeel compares: it makes the rendezvous, and starts as many threads
/// as a rank has cores.
fn comparable(mut real: Launched, own: &Launched) -> Launched {
    for name in ["MASTER_ADDR", "OMP_NUM_THREADS"] {
        if !own.environment.contains_key(name) {
            real.environment.remove(name);
        }
    }
    // accelerate gives a single process no port, and others its default.
    match own.environment.get("MASTER_PORT") {
        Some(port) if !real.environment.contains_key("MASTER_PORT") => {
            real.environment
                .insert("MASTER_PORT".to_owned(), port.clone());
        }
        None => {
            real.environment.remove("MASTER_PORT");
        }
        Some(_) => {}
    }
    if let Some(path) = real.environment.get_mut("PYTHONPATH") {
        *path = "{working_directory}".to_owned();
    }
    if let Some(python) = real.command.first_mut().filter(|first| *first == "python") {
        *python = "python3".to_owned();
    }
    // accelerate starts a single process with buffered output.
    if real.command.first().is_some_and(|first| first == "python3")
        && real.command.get(1).is_none_or(|second| second != "-u")
    {
        real.command.insert(1, "-u".to_owned());
    }
    // On several hosts DeepSpeed's launcher starts the ranks.
    if real
        .command
        .first()
        .is_none_or(|first| first == "deepspeed")
    {
        real.command.clone_from(&own.command);
        real.world = None;
    }
    if own.world.is_none() || real.world.is_none() {
        real.world = own.world;
    }
    real
}

#[test]
fn accelerate_launch_and_evenkeel_give_ranks_the_same_environment() {
    let Some(python) = python("torch, accelerate, yaml") else {
        return;
    };
    let recipes = std::env::var_os("EVENKEEL_RECIPES").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/recipes"),
        Into::into,
    );
    // All of them take minutes.
    let every = match std::env::var_os("EVENKEEL_THOROUGH") {
        Some(_) => 1,
        None => 4,
    };
    let output = Command::new(python)
        .arg(own_file("tests/trainers/accelerate_launch.py"))
        .arg(recipes)
        .arg(every.to_string())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let folder = tempfile::tempdir().unwrap();
    let mut equal = 0;
    let mut both_refuse = 0;
    let mut counts: BTreeMap<&str, u64> = BTreeMap::new();
    // By what is wrong: the number of cases and the first of them.
    let mut wrong: BTreeMap<String, (u64, String)> = BTreeMap::new();
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        let case: Case = serde_json::from_str(line).unwrap();
        let mut path = String::new();
        if let Some(config) = &case.config {
            let file = folder.path().join(format!("config{}", config.suffix));
            std::fs::write(&file, &config.text).unwrap();
            path = file.display().to_string();
        }
        let words: Vec<String> = case
            .words
            .iter()
            .map(|word| word.replace("{config}", &path))
            .collect();
        let own = launched(&words);
        let mut report = |what: String| {
            let entry = wrong.entry(what).or_insert_with(|| (0, case.name.clone()));
            entry.0 += 1;
        };
        match (&case.expected.error, &own.error) {
            (Some(_), Some(_)) => both_refuse += 1,
            (Some(error), None) => match ACCEPTED.iter().find(|part| error.contains(**part)) {
                Some(part) => *counts.entry(part).or_default() += 1,
                None => report(format!("accepted, but {error}")),
            },
            (None, Some(error)) => match REFUSED.iter().find(|part| error.contains(**part)) {
                Some(part) => *counts.entry(part).or_default() += 1,
                None => {
                    let (_, error) = error.split_once(": ").unwrap_or(("", error));
                    report(format!("refused: {error}"));
                }
            },
            (None, None) => {
                let mut real = comparable(case.expected, &own);
                // accelerate 1.15 drops the former name, which evenkeel reads.
                let text = case.config.as_ref().map_or("", |config| &config.text);
                let mut lines = text.lines().map(str::trim);
                let former =
                    lines.find_map(|line| line.strip_prefix("fsdp_backward_prefetch_policy: "));
                if let Some(value) = former {
                    let name = "FSDP_BACKWARD_PREFETCH".to_owned();
                    real.environment.insert(name, value.to_owned());
                }
                if real == own {
                    equal += 1;
                } else {
                    report(difference(&real, &own));
                }
            }
        }
    }
    println!("{equal} equal, both refuse {both_refuse}, one refuses: {counts:?}");
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(equal > 1000 / every, "only {equal} cases are equal");
}

/// The variables that differ, and the whole command and world if they do.
fn difference(real: &Launched, own: &Launched) -> String {
    let names = real.environment.keys().chain(own.environment.keys());
    let differ = names.filter(|name| real.environment.get(*name) != own.environment.get(*name));
    let differ: BTreeMap<&String, _> = differ
        .map(|name| {
            (
                name,
                (real.environment.get(name), own.environment.get(name)),
            )
        })
        .collect();
    let (real, own) = ((&real.command, real.world), (&own.command, own.world));
    let rest = if real == own {
        String::new()
    } else {
        format!("{real:?}, own {own:?}")
    };
    format!("{differ:?} {rest}")
}

/// Writes down its environment and what accelerate's FSDP plugin reads there, and ends once `stop` exists.
const SCRIPT: &str = r#"
import json, os, sys, time
from accelerate.utils import FullyShardedDataParallelPlugin
plugin = FullyShardedDataParallelPlugin()
seen = {"argv": sys.argv[1:], "environment": dict(os.environ),
        "plugin": [str(plugin.sharding_strategy), str(plugin.state_dict_type), str(plugin.backward_prefetch)]}
name = os.environ.get("EVENKEEL_GENERATION", "real") + "-" + os.environ["RANK"] + ".json"
with open(os.path.join(os.environ["RECORD"], "." + name), "w") as file:
    json.dump(seen, file)
os.rename(os.path.join(os.environ["RECORD"], "." + name), os.path.join(os.environ["RECORD"], name))
while not os.path.exists(os.path.join(os.environ["RECORD"], "stop")):
    time.sleep(0.05)
"#;

#[test]
fn ranks_of_every_world_get_the_settings_of_a_real_accelerate_launch() {
    let Some(python) = python("torch, accelerate") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("train.py"), SCRIPT).unwrap();
    let recipe = "per_device_train_batch_size: 6\ngradient_accumulation_steps: 1\n";
    std::fs::write(path("recipe.yaml"), recipe).unwrap();
    let config = "distributed_type: FSDP\nnum_processes: 2\nmixed_precision: bf16\nfsdp_config:\n  \
                  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n  \
                  fsdp_backward_prefetch: BACKWARD_POST\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  \
                  fsdp_cpu_ram_efficient_loading: false\n  fsdp_sync_module_states: false\n";
    std::fs::write(path("fsdp.yaml"), config).unwrap();
    let python = python.display().to_string();
    let (script, config) = (path("train.py"), path("fsdp.yaml"));
    let launcher = [
        &python,
        "-m",
        "accelerate.commands.launch",
        "--config_file",
        &config,
        &script,
    ];
    let seen = |name: &str| -> Value {
        let file = folder.path().join("own").join(format!("{name}.json"));
        wait_for(name, || {
            let text = std::fs::read_to_string(&file).ok()?;
            serde_json::from_str(&text).ok()
        })
    };
    std::fs::create_dir(path("own")).unwrap();
    std::fs::create_dir(path("real")).unwrap();
    std::fs::write(path("real/stop"), "").unwrap();
    let real = Command::new(launcher[0])
        .args(&launcher[1..])
        .env("RECORD", path("real"))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    assert!(real.status.success(), "{real:?}");
    let real = std::fs::read_to_string(path("real/real-0.json")).unwrap();
    let real: Value = serde_json::from_str(&real).unwrap();
    let settings = |seen: &Value| -> BTreeMap<String, String> {
        let all = seen["environment"].as_object().unwrap().iter();
        let set =
            all.filter(|(name, _)| name.starts_with("ACCELERATE_") || name.starts_with("FSDP_"));
        // The plan's accumulation is set for every external trainer.
        let set = set.filter(|(name, _)| *name != "ACCELERATE_GRADIENT_ACCUMULATION_STEPS");
        set.map(|(name, value)| (name.clone(), value.as_str().unwrap().to_owned()))
            .collect()
    };
    let expected = settings(&real);
    assert_eq!(expected["FSDP_SHARDING_STRATEGY"], "SHARD_GRAD_OP");

    let run = Run::of_file(&folder.path().join("recipe.yaml"));
    let mut arguments = vec!["--procs", "2", "--"];
    arguments.extend(launcher);
    arguments.push("{args}");
    let record = format!("export RECORD='{}'", path("own"));
    let launched = run.start_in_shell(&record, &arguments);
    let check = |name: &str, accumulation: &str, world: &str| {
        let own = seen(name);
        assert_eq!(settings(&own), expected, "{name}");
        assert_eq!(own["plugin"], real["plugin"], "{name}");
        assert_eq!(own["environment"]["WORLD_SIZE"], world);
        let words = [
            "--per_device_train_batch_size",
            "6",
            "--gradient_accumulation_steps",
            accumulation,
        ];
        assert_eq!(own["argv"], serde_json::json!(words));
    };
    check("1-0", "1", "2");
    check("1-1", "1", "2");
    let resized = run.call("resize", &["1"]);
    assert!(resized.status.success(), "{resized:?} {}", run.log());
    check("2-0", "2", "1");
    // A resume needs no command: the run knows its launcher's settings.
    run.drain(launched);
    let launched = run.start_in_shell(&record, &["--procs", "2", "--resume"]);
    check("3-1", "1", "2");
    std::fs::write(path("own/stop"), "").unwrap();
    assert!(launched.wait().success(), "{}", run.log());
}

/// Python imports it before the program: a rank writes down its command and its environment, and ends.
const RECORDER: &str = r#"
import json, os, sys
if "RANK" in os.environ:
    with open(os.path.join(os.environ["RECORD"], os.environ["RANK"] + ".json"), "w") as file:
        json.dump({"command": sys.orig_argv[1:], "environment": dict(os.environ)}, file)
    os._exit(0)
"#;

/// Variables that differ for a reason: evenkeel makes the rendezvous and the restarts, starts as many threads as a
/// rank has cores, and wants the stacks of an aborted rank. DeepSpeed's launcher sets the last two, for all devices of the machine.
const DIFFERENT: &[&str] = &[
    "RECORD",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "PYTHONFAULTHANDLER",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
    "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_SIGNALS_TO_HANDLE",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "CUDA_VISIBLE_DEVICES",
];

#[test]
fn the_real_launchers_and_evenkeel_give_every_rank_the_same_command_and_environment() {
    let Some(python) = python("torch, accelerate, deepspeed, trl") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("sitecustomize.py"), RECORDER).unwrap();
    std::fs::write(path("train.py"), "").unwrap();
    let recipe = "per_device_train_batch_size: 6\noutput_dir: out\nuse_cpu: true\nbf16: false\n";
    std::fs::write(path("recipe.yaml"), recipe).unwrap();
    // The launchers lie beside their Python.
    let bin = python.parent().unwrap();
    let search = std::env::var("PATH").unwrap_or_default();
    let search = format!("{}:{search}", bin.display());
    let ranks = |mut command: Command, record: String| -> Vec<Value> {
        std::fs::create_dir(path(&record)).unwrap();
        let output = command
            .current_dir(folder.path())
            .env("PYTHONPATH", folder.path())
            .env("PATH", &search)
            .env("RECORD", path(&record))
            // accelerate writes the names of all variables in capitals.
            .env_remove("CARGO_BIN_EXE_evenkeel")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(output.status.success(), "{record}: {output:?}");
        let ranks = (0..2).map(|rank| path(&record).join(format!("{rank}.json")));
        let ranks = ranks.map(|file| std::fs::read(&file).unwrap());
        ranks
            .map(|text| serde_json::from_slice(&text).unwrap())
            .collect()
    };
    let script = "train.py --per_device_train_batch_size 6 --output_dir out";
    let launchers = [
        format!("torchrun --nproc_per_node 2 {script}"),
        format!("python -m torch.distributed.run --standalone --nproc-per-node=2 {script}"),
        format!("python -m torch.distributed.launch --nproc_per_node 2 {script}"),
        format!("deepspeed --num_gpus 2 {script}"),
        // LOCAL_SIZE is the number of devices that DeepSpeed finds on CPUs.
        format!("env LOCAL_SIZE=2 deepspeed --include localhost:0,1 {script}"),
        format!(
            "deepspeed --num_gpus 2 --no_local_rank --module {}",
            script.replace(".py", "")
        ),
        format!("accelerate launch --multi_gpu --num_processes 2 --mixed_precision bf16 {script}"),
        format!(
            "env ACCELERATE_LOG_LEVEL=info ACCELERATE_MIXED_PRECISION=no LOCAL_RANK=7 BRACES={{local_rank}} \
             accelerate launch --multi_gpu --num_processes 2 --mixed_precision bf16 {script}"
        ),
        "trl sft --config recipe.yaml --accelerate_config multi_gpu --num_processes 2 \
         --model_name_or_path m --dataset_name d"
            .to_owned(),
    ];
    for (index, launcher) in launchers.iter().enumerate() {
        let words: Vec<&str> = launcher.split_whitespace().collect();
        let mut command = match words[0] {
            "env" => Command::new("env"),
            launcher => Command::new(bin.join(launcher)),
        };
        command.args(&words[1..]);
        let real = ranks(command, format!("real-{index}"));
        let mut command = support::evenkeel();
        command.args(["launch", "--procs", "2", "--out"]);
        command.arg(format!("run-{index}")).arg("--").args(&words);
        let own = ranks(command, format!("own-{index}"));
        for (real, own) in real.iter().zip(&own) {
            assert_eq!(arguments(real), arguments(own), "{launcher}");
            let (real, own) = (variables(real), variables(own));
            let lost: Vec<_> = real
                .iter()
                .filter(|(name, value)| own.get(*name) != Some(value))
                .collect();
            assert!(lost.is_empty(), "{launcher}: {lost:?}");
            let added = |name: &&String| {
                let of_evenkeel = ["EVENKEEL_", "KUBEFLOW_TRAINER_SERVER_", "PET_"];
                let own = of_evenkeel.iter().any(|prefix| name.starts_with(prefix));
                // DeepSpeed's launcher sets fewer variables than torchrun.
                let torchrun = words.contains(&"deepspeed")
                    && ["GROUP_", "ROLE_", "LOCAL_WORLD_SIZE", "TORCH"]
                        .iter()
                        .any(|prefix| name.starts_with(prefix));
                !own && !torchrun && *name != "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
            };
            let added: Vec<_> = own
                .keys()
                .filter(|name| !real.contains_key(*name))
                .filter(added)
                .collect();
            assert!(added.is_empty(), "{launcher}: {added:?}");
        }
    }
}

/// The words of a recorded rank without the plan's numbers. TRL starts the file of its module.
fn arguments(seen: &Value) -> Vec<String> {
    let words = seen["command"].as_array().unwrap();
    let words: Vec<&str> = words.iter().map(|word| word.as_str().unwrap()).collect();
    let mut words = words
        .join(" ")
        .replace("-m trl.scripts.sft", "trl/scripts/sft.py");
    for number in [
        "--per_device_train_batch_size 6",
        "--gradient_accumulation_steps 1",
    ] {
        words = words.replace(number, "");
    }
    let words = words.split_whitespace();
    words
        .map(|word| match word.strip_suffix("trl/scripts/sft.py") {
            Some(_) => "trl/scripts/sft.py".to_owned(),
            None => word.to_owned(),
        })
        .collect()
}

/// The variables of a recorded rank that must not differ.
fn variables(seen: &Value) -> BTreeMap<String, Value> {
    let all = seen["environment"].as_object().unwrap().clone();
    let all = all.into_iter();
    all.filter(|(name, _)| !DIFFERENT.contains(&name.as_str()))
        .collect()
}

#[test]
fn a_moved_checkpoint_changes_nothing_else_in_accelerates_deepspeed_config() {
    let Some(python) = python("torch, accelerate") else {
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    let mut cases = Vec::new();
    for stage in 0..=3 {
        for precision in ["no", "bf16", "fp16"] {
            for more in [
                "",
                "gradient_clipping: 1.0",
                "gradient_clipping: 0.0",
                "offload_optimizer_device: cpu",
                "offload_optimizer_device: cpu\n  offload_param_device: cpu",
                "zero3_save_16bit_model: true",
                "zero3_init_flag: true",
                "zero3_init_flag: false",
            ] {
                let name = format!("{}.yaml", cases.len());
                let config = format!(
                    "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: '{precision}'\n\
                     deepspeed_config:\n  zero_stage: {stage}\n  {more}\n"
                );
                std::fs::write(path(&name), config).unwrap();
                let line = format!(
                    "accelerate launch --config_file {} train.py --per_device_train_batch_size 4",
                    path(&name)
                );
                let recipe = recipe::read(&Request {
                    command: line.split(' ').map(str::to_owned).collect(),
                    ..Request::default()
                });
                let mut stated = launchers::stated_environment(&recipe.unwrap()).unwrap();
                // The plan's, in every rank.
                stated.insert("ACCELERATE_GRADIENT_ACCUMULATION_STEPS".into(), "1".into());
                let text = launchers::deepspeed_config(&stated).unwrap();
                let mut config: Value = serde_json::from_str(&text).unwrap();
                config["checkpoint"] = json!({"load_universal": true});
                let file = path(&format!("{}.json", cases.len()));
                std::fs::write(&file, config.to_string()).unwrap();
                let mut with_file = stated.clone();
                assert!(launchers::use_deepspeed_file(&mut with_file));
                let name = "ACCELERATE_DEEPSPEED_CONFIG_FILE";
                assert_eq!(with_file[name], "{deepspeed_config}");
                with_file.insert(name.into(), file);
                let name = format!("{stage} {precision} {more}");
                cases.push(
                    json!({"name": name, "stated": stated, "with_file": with_file}).to_string(),
                );
            }
        }
    }
    std::fs::write(path("cases"), cases.join("\n")).unwrap();
    let output = Command::new(python)
        .arg(own_file("tests/trainers/deepspeed_plugin.py"))
        .stdin(std::fs::File::open(path("cases")).unwrap())
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert_eq!(printed.trim(), cases.len().to_string());
}
