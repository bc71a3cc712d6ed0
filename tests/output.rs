//! How commands end: exit codes, refused flags, names of runs, and output errors (a full disk gives an
//! error message, a reader that has closed the pipe does not). Also the notes beside a result.

mod corpus;

use std::fs::OpenOptions;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

const CALLS: &[&[&str]] = &[
    &["--help"],
    &["--version"],
    &["plan", "examples/quickstart.yaml"],
    &["plan", "examples/quickstart.yaml", "-o", "json"],
    &["plan", "examples/quickstart.yaml", "-o", "yaml"],
    &["check", "examples/quickstart.yaml"],
    &["check", "examples/quickstart.yaml", "-o", "yaml"],
    &["check", "examples/quickstart.yaml", "-o", "sarif"],
    &[
        "plan",
        "examples/quickstart.yaml",
        "--gpus",
        "1",
        "--emit",
        "env",
    ],
    &[
        "plan",
        "--estimate",
        "--model",
        "7B",
        "--gpus",
        "1",
        "--device-memory",
        "24GB",
    ],
    &[
        "plan",
        "--estimate",
        "--model",
        "7B",
        "--gpus",
        "1",
        "--device-memory",
        "24GB",
        "model.precision=bf16",
        "parallel.strategy=fsdp",
    ],
    &["explain"],
    &["explain", "batch-divisible"],
    &["gpus"],
    &["gpus", "-o", "json"],
    &["status"],
    &["status", "-o", "json"],
];

fn evenkeel(call: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
    command.args(call).stderr(Stdio::piped());
    command
}

#[test]
fn a_full_standard_output_is_an_error_with_a_message() {
    for call in CALLS {
        let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let ended = evenkeel(call).stdout(full).output().unwrap();
        let message = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(ended.status.code(), Some(2), "{call:?}: {message}");
        assert!(
            message.starts_with("error: cannot write to standard output: No space left"),
            "{call:?}: {message}"
        );
        assert_eq!(message.lines().count(), 1, "{call:?}: {message}");
        assert_eq!(
            message.matches("No space left").count(),
            1,
            "{call:?}: {message}"
        );
    }
}

#[test]
fn a_closed_pipe_is_not_an_error() {
    for call in CALLS {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let ended = evenkeel(call).stdout(writer).output().unwrap();
        let message = String::from_utf8(ended.stderr).unwrap();
        assert_eq!(
            (ended.status.code(), message.as_str()),
            (Some(0), ""),
            "{call:?}"
        );
    }
}

#[test]
fn a_full_standard_error_does_not_change_how_a_command_ends() {
    let full = || OpenOptions::new().write(true).open("/dev/full").unwrap();
    for (call, code) in [
        (&["explain", "nope"][..], 2),
        (&["plan", "nowhere.yaml"], 2),
        (&["plan", "--nonsense"], 2),
    ] {
        let status = evenkeel(call).stderr(full()).stdout(full()).status();
        assert_eq!(status.unwrap().code(), Some(code), "{call:?}");
    }
}

#[test]
fn a_rank_whose_log_is_on_a_full_disk_reports_its_failure() {
    let run = tempfile::tempdir().unwrap();
    let rank = evenkeel(&["rank", "--generation", "1", "--run"])
        .arg(run.path())
        .env("RANK", "0")
        .env("RAYON_NUM_THREADS", "1")
        .env("EVENKEEL_GENERATION_KEY", "00".repeat(32))
        .stderr(OpenOptions::new().write(true).open("/dev/full").unwrap())
        .output()
        .unwrap();
    let report = String::from_utf8(rank.stdout).unwrap();
    assert_eq!(rank.status.code(), Some(1), "{report}");
    assert!(report.contains(r#""report":"volume_failed""#), "{report}");
}

#[test]
fn a_dry_run_prints_the_job_and_the_notes_about_its_command() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("own.yaml");
    let text = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  \
                batch: {global: 64, per_device_batch_size: 8}\n  \
                trainer: {command: [python, train.py, --batch, '{per_device_batch_size}'], checkpoint_dir: /volume/out}\n";
    std::fs::write(&path, text).unwrap();
    let path = path.display().to_string();
    let call = [
        "launch",
        path.as_str(),
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
        "--dry-run",
    ];
    let ended = evenkeel(&call).output().unwrap();
    let message = String::from_utf8(ended.stderr).unwrap();
    assert_eq!(ended.status.code(), Some(0), "{message}");
    assert!(
        message.contains("the command does not use {resume_args}"),
        "{message}"
    );
    let job = String::from_utf8(ended.stdout).unwrap();
    assert!(job.contains("kind: TrainingJob"), "{job}");
}

/// Runs a command in a directory.
/// A native recipe of a small model in `place`; `more` are further lines of its spec.
fn small_recipe(place: &Path, model: &str, more: &str) {
    let text = format!(
        "apiVersion: evenkeel.dev/v1alpha1
kind: Recipe
metadata: {{name: small}}
spec:
  batch: {{global: 16, per_device_batch_size: 2}}
  model: {{{model}}}
  data: {{sequence_length: 16, train: [{{path: synthetic, synthetic: {{vocabulary: 64, branching: 4, samples: 200}}}}]}}
  budget: {{samples: 32}}
{more}"
    );
    std::fs::write(place.join("recipe.yaml"), text).unwrap();
}

const SMALL_MODEL: &str = "init: random, config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, \
     num_attention_heads: 2, vocab_size: 64, max_position_embeddings: 32}";

/// The result of `launch recipe.yaml` for two nodes of four GPUs, without a cluster.
fn dry_run(directory: &Path, more: &[&str]) -> Output {
    let launch = "launch recipe.yaml --nodes 2 --gpus-per-node 4 --dry-run";
    let mut command = evenkeel(&launch.split(' ').collect::<Vec<_>>());
    command.args(more).env_remove("EVENKEEL_IMAGE");
    command.current_dir(directory).output().unwrap()
}

#[test]
fn a_job_of_gpus_trains_on_them_unless_the_cpu_is_asked_for() {
    let place = tempfile::tempdir().unwrap();
    small_recipe(place.path(), SMALL_MODEL, "");
    let job = |output: &Output| -> Value {
        serde_saphyr::from_str(&String::from_utf8_lossy(&output.stdout))
            .unwrap_or_else(|_| panic!("{output:?}"))
    };
    let output = dry_run(place.path(), &[]);
    assert_eq!(job(&output)["spec"]["trainer"]["device"], "Auto");
    let image = job(&output)["spec"]["image"].clone();
    assert!(
        image
            .as_str()
            .unwrap()
            .starts_with("evenkeel/evenkeel-cuda:"),
        "{image}"
    );
    assert!(!message(&output).contains("idle"), "{}", message(&output));
    let output = dry_run(place.path(), &["--device", "cpu"]);
    assert_eq!(job(&output)["spec"]["trainer"]["device"], "Cpu");
    assert!(message(&output).contains("leaves the nvidia.com/gpu of its pods idle"));
}

#[test]
fn what_the_built_in_trainer_refuses_is_refused_before_a_job_exists() {
    let place = tempfile::tempdir().unwrap();
    // Too large for GPUs.
    let large_heads = SMALL_MODEL.replace(
        "num_attention_heads: 2",
        "num_attention_heads: 2, head_dim: 512",
    );
    let indivisible = SMALL_MODEL.replace("num_attention_heads: 2", "num_attention_heads: 3");
    let short = SMALL_MODEL.replace("max_position_embeddings: 32", "max_position_embeddings: 8");
    for (model, more, flags, rule) in [
        (
            SMALL_MODEL,
            "  objective: grpo\n",
            &[][..],
            "trainer-objective",
        ),
        (
            SMALL_MODEL,
            "",
            &["--rank-memory", "1KiB"][..],
            "rank-memory",
        ),
        ("path: google/gemma-2-9b", "", &[][..], "trainer-model"),
        (&large_heads, "", &[][..], "trainer-model"),
        (&indivisible, "", &[][..], "model-shape"),
        (&short, "", &[][..], "sequence-too-long"),
    ] {
        small_recipe(place.path(), model, more);
        let output = dry_run(place.path(), flags);
        assert_eq!(output.status.code(), Some(1), "{rule}: {output:?}");
        assert!(
            message(&output).contains(&format!("error[{rule}]")),
            "{}",
            message(&output)
        );
    }
}

#[test]
fn what_a_plan_refuses_on_this_machine_a_launch_refuses() {
    let place = tempfile::tempdir().unwrap();
    let large = "init: random, config: {hidden_size: 8192, intermediate_size: 28672, num_hidden_layers: 80, \
         num_attention_heads: 64, vocab_size: 64, max_position_embeddings: 32}";
    small_recipe(place.path(), large, "");
    for call in [
        &["plan", "recipe.yaml"][..],
        &["launch", "recipe.yaml", "--device", "cpu"],
    ] {
        let output = at(place.path(), call);
        let text = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            message(&output)
        );
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("error[model-needs-sharding]"), "{text}");
    }
    assert!(!place.path().join("runs").exists());
}

/// A micro-batch that does not fit into this machine's memory becomes smaller in a launch as in a plan.
#[test]
fn a_launch_takes_the_micro_batch_that_a_plan_shows() {
    let place = tempfile::tempdir().unwrap();
    let wide = "init: random, config: {hidden_size: 4096, intermediate_size: 8192, num_hidden_layers: 2, \
         num_attention_heads: 32, vocab_size: 64, max_position_embeddings: 2048}";
    let long = |text: String| text.replace("sequence_length: 16", "sequence_length: 2048");
    small_recipe(place.path(), wide, "");
    let path = place.path().join("recipe.yaml");
    let text = long(std::fs::read_to_string(&path).unwrap()).replace(
        "global: 16, per_device_batch_size: 2",
        "global: 8192, per_device_batch_size: 8192",
    );
    std::fs::write(&path, text).unwrap();
    let shown = |call: &[&str]| {
        let output = at(place.path(), call);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", message(&output));
        let formula = text
            .lines()
            .find(|line| line.contains(" × "))
            .map(str::to_owned);
        formula.unwrap_or_else(|| panic!("{text}"))
    };
    let planned = shown(&["plan", "recipe.yaml", "--trainer", "built-in"]);
    let launched = shown(&["launch", "recipe.yaml", "--dry-run", "--procs", "1"]);
    assert!(!planned.contains("× 8192 ×"), "{planned}");
    assert_eq!(planned, launched);
}

#[test]
fn another_family_is_refused_by_its_name() {
    let place = tempfile::tempdir().unwrap();
    let shape = "config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2, \
         vocab_size: 64, max_position_embeddings: 32}";
    for (id, family) in [
        ("google/gemma-2-9b", "Gemma 2 and later ones"),
        ("facebook/opt-350m", "OPT"),
        ("Qwen/Qwen2.5-VL-7B", "Qwen's multimodal models"),
    ] {
        small_recipe(
            place.path(),
            &format!("path: {id}, init: random, {shape}"),
            "",
        );
        let output = at(place.path(), &["launch", "recipe.yaml", "--device", "cpu"]);
        let refused = format!("the built-in trainer does not train {family} ({id})");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(message(&output).contains(&refused), "{}", message(&output));
        let plan = at(place.path(), &["plan", "recipe.yaml", "--gpus", "2"]);
        assert!(plan.status.success(), "{plan:?}");
        let text = String::from_utf8_lossy(&plan.stdout);
        assert!(
            text.contains(&format!("for other trainers: {refused}")),
            "{text}"
        );
        let plan = at(
            place.path(),
            &[
                "plan",
                "recipe.yaml",
                "--gpus",
                "2",
                "--trainer",
                "built-in",
            ],
        );
        assert_eq!(plan.status.code(), Some(1), "{plan:?}");
    }
    // The recipe states its family.
    let llama = shape.replace("config: {", "config: {model_type: llama, ");
    small_recipe(
        place.path(),
        &format!("path: google/gemma-2-9b, init: random, {llama}"),
        "",
    );
    let output = at(
        place.path(),
        &[
            "launch",
            "recipe.yaml",
            "--device",
            "cpu",
            "--procs",
            "1",
            "--quiet",
        ],
    );
    assert!(output.status.success(), "{output:?}");
}

fn at(directory: &Path, call: &[&str]) -> Output {
    evenkeel(call).current_dir(directory).output().unwrap()
}

fn message(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

#[test]
fn exit_code_1_is_a_rule_and_2_an_unusable_file_or_argument() {
    let place = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &[u8]| std::fs::write(place.path().join(name), text).unwrap();
    let native =
        "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  objective: sft\n  batch: ";
    write(
        "good.yaml",
        format!("{native}{{global: 64, per_device_batch_size: 8}}\n").as_bytes(),
    );
    write(
        "reading.yaml",
        format!("{native}{{global: many, per_device_batch_size: 8}}\n").as_bytes(),
    );
    write(
        "planning.yaml",
        format!("{native}{{global: 63, per_device_batch_size: 8}}\n").as_bytes(),
    );
    write("latin-1.yaml", b"spec: caf\xe9\n");
    for (file, code) in [
        ("good.yaml", 0),
        ("reading.yaml", 1),
        ("planning.yaml", 1),
        ("latin-1.yaml", 2),
        ("missing.yaml", 2),
    ] {
        for command in ["plan", "check", "launch"] {
            // `launch` refuses the good recipe for other reasons.
            if command == "launch" && code == 0 {
                continue;
            }
            let ended = at(place.path(), &[command, file, "--gpus", "4"]);
            assert_eq!(
                ended.status.code(),
                Some(code),
                "{command} {file}: {ended:?}"
            );
        }
    }
    let check = |files: &[&str]| {
        let call = [&["check", "--gpus", "4"], files].concat();
        at(place.path(), &call).status.code()
    };
    assert_eq!(
        check(&["good.yaml", "reading.yaml", "planning.yaml"]),
        Some(1)
    );
    assert_eq!(check(&["missing.yaml", "reading.yaml"]), Some(2));
    let call = ["plan", "good.yaml", "--gpus", "4", "--nonsense"];
    assert_eq!(at(place.path(), &call).status.code(), Some(2));
    assert!(!place.path().join("runs").exists());
}

/// Axes and batch of a command that is not read, as the refusal of the command proposes.
#[test]
fn a_plan_takes_overrides_beside_a_command_without_a_recipe() {
    let folder = tempfile::tempdir().unwrap();
    let call = "plan --gpus 16 --global-batch-size 64 -o json evenkeel.parallel.tensor=2 -- \
                torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2";
    let words: Vec<&str> = call.split_whitespace().collect();
    let output = at(folder.path(), &words);
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(plan["formula"], "8 × 8 × 1 = 64", "{}", message(&output));
    assert_eq!(plan["tensor_parallel_size"], 2);
}

#[test]
fn a_flag_without_the_flag_that_it_needs_is_refused_by_name() {
    let recipe = "examples/quickstart.yaml";
    for flags in [
        &["--namespace", "training"][..],
        &["-n", "training"],
        &["--context", "home"],
        &["--kubeconfig", "config"],
        &["--image", "evenkeel:1"],
        &["--claim", "volume"],
        &["--resource", "amd.com/gpu"],
        &["--min-nodes", "2"],
        &["--detach"],
        &["--gpus-per-node", "8"],
    ] {
        let ended = evenkeel(&[&["launch", recipe], flags].concat())
            .output()
            .unwrap();
        let flag = match flags[0] {
            "-n" => "--namespace",
            flag => flag,
        };
        let expected = format!("error: `{flag}` needs `--nodes`\n");
        assert_eq!((ended.status.code(), message(&ended)), (Some(2), expected));
    }
    for (call, expected) in [
        (
            &["plan", recipe, "--context", "home"][..],
            "`--context` needs `--from-cluster`",
        ),
        (
            &["plan", recipe, "--resource", "amd.com/gpu", "--gpus", "2"],
            "`--resource` needs `--from-cluster`",
        ),
        (
            &["plan", recipe, "--nodes", "2"],
            "`--nodes` needs `--gpus-per-node` or `--from-cluster`",
        ),
        (
            &["plan", recipe, "--gpus-per-node", "2"],
            "`--gpus-per-node` needs `--nodes` or `--from-cluster`",
        ),
        (
            &["check", recipe, "--gpus-per-node", "2"],
            "`--gpus-per-node` needs `--nodes`",
        ),
        (
            &["launch", recipe, "--nodes", "2", "--resume"],
            "`--resume` applies to this machine, and `--nodes` launches on a cluster; remove one of them",
        ),
    ] {
        let ended = evenkeel(call).output().unwrap();
        let expected = format!("error: {expected}\n");
        assert_eq!((ended.status.code(), message(&ended)), (Some(2), expected));
    }
}

/// A recipe for an external trainer, and the arguments that launch it.
const EXTERNAL: &str = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nmetadata: {name: recipe}\n\
    spec: {batch: {global: 8, per_device_batch_size: 4}, budget: {samples: 64}}\n";

fn launch_external(place: &Path, flags: &[&str], program: &str) -> Output {
    let before = ["launch", "recipe.yaml", "--procs", "2", "--quiet"];
    let command = [
        "--",
        "sh",
        "-c",
        program,
        "train",
        "{per_device_batch_size}",
    ];
    at(place, &[&before, flags, &command].concat())
}

#[test]
fn a_quiet_launch_prints_no_notes() {
    let place = tempfile::tempdir().unwrap();
    let launch = |name: &str, flags: &[&str]| {
        let before = ["launch", "--procs", "1", "--name", name];
        let command = [
            "--",
            "torchrun",
            "--max_restarts",
            "3",
            "--no_python",
            "true",
            "--per_device_train_batch_size",
            "4",
        ];
        let call = [&before[..], flags, &command[..]].concat();
        message(&at(place.path(), &call))
    };
    let loud = launch("loud", &[]);
    assert!(loud.starts_with("note[external-trainer]: "), "{loud}");
    // Its only warning stays.
    let quiet = launch("quiet", &["-q"]);
    assert!(
        quiet.starts_with("   Warning the trainer's checkpoint directory"),
        "{quiet}"
    );
    let lines: Vec<&str> = quiet.lines().skip(1).collect();
    assert_eq!(lines, ["finished: runs/quiet"]);
}

#[test]
fn a_python_program_in_place_of_a_recipe_is_refused_with_its_command() {
    let place = tempfile::tempdir().unwrap();
    let ended = at(place.path(), &["plan", "train.py", "--gpus", "2"]);
    assert_eq!(ended.status.code(), Some(2));
    insta::assert_snapshot!(message(&ended), @"
    error: `train.py` is a Python program, not a recipe; its command follows `--`
    next:
      evenkeel plan --gpus 2 -- python train.py
      evenkeel plan --gpus 2 --global-batch-size B -- python train.py   # if its arguments do not state the batch
    ");
}

#[test]
fn a_name_names_a_local_run_and_its_directory() {
    let place = tempfile::tempdir().unwrap();
    let place = place.path();
    std::fs::write(place.join("recipe.yaml"), EXTERNAL).unwrap();
    let program = "file=$EVENKEEL_CHECKPOINT_DIR/step-7; [ -e $file ] || : > $file; exit 3";
    let launch = |flags: &[&str]| launch_external(place, flags, program);
    let name_of = |run: &str| {
        let text = std::fs::read(place.join(run).join("run.json")).unwrap();
        let run: Value = serde_json::from_slice(&text).unwrap();
        run["name"].as_str().unwrap().to_owned()
    };
    assert_eq!(launch(&["--name", "first"]).status.code(), Some(1));
    assert_eq!(name_of("runs/first"), "first");
    let taken = launch(&["--name", "first"]);
    assert_eq!(taken.status.code(), Some(2));
    assert_eq!(
        message(&taken),
        "error: runs/first already contains a run; --resume continues it, another --name starts a new one\n"
    );
    let absent = launch(&["--name", "second", "--resume"]);
    assert!(
        message(&absent).contains("runs/second: no run to resume"),
        "{absent:?}"
    );
    // Beside --out, the name does not select the directory.
    assert_eq!(
        launch(&["--name", "second", "--out", "elsewhere"])
            .status
            .code(),
        Some(1)
    );
    assert_eq!(name_of("elsewhere"), "second");
    assert!(!place.join("runs/second").exists());

    for resume in [
        &["--resume", "--name", "first"][..],
        &["--resume", "--out", "runs/first"],
    ] {
        let ended = launch_external(place, resume, "exit 0");
        // The first resume finishes the run.
        let expected = if resume[1] == "--name" { 0 } else { 2 };
        assert_eq!(ended.status.code(), Some(expected), "{ended:?}");
    }
    assert_eq!(name_of("runs/first"), "first");

    // An external trainer's samples are unknown.
    let status = at(place, &["status", "first"]);
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("from checkpoint"), "{status}");
    assert!(status.contains("step-7"), "{status}");
    assert!(!status.contains("from sample"), "{status}");
    let status = at(place, &["status", "first", "-o", "json"]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    let generations = status["generations"].as_array().unwrap();
    assert!(
        generations.iter().all(|row| row["start_samples"].is_null()),
        "{status}"
    );
    let list = at(place, &["status", "-o", "json"]);
    let list: Value = serde_json::from_slice(&list.stdout).unwrap();
    assert_eq!(list[0]["committed_samples"], Value::Null);
}

#[test]
fn a_run_of_another_version_is_refused_by_every_command() {
    let place = tempfile::tempdir().unwrap();
    let place = place.path();
    std::fs::write(
        place.join("recipe.yaml"),
        EXTERNAL.replace("recipe}", "old}"),
    )
    .unwrap();
    let run = place.join("runs/old");
    std::fs::create_dir_all(run.join("gen-1")).unwrap();
    let write = |name: &str, value: Value| {
        std::fs::write(run.join(name), value.to_string()).unwrap();
    };
    // As written before the format was recorded.
    let setup = json!({
        "job": "b3f1c0a8d2e94f57", "name": "old", "recipe_path": "recipe.yaml", "dialect": "native",
        "base": place, "overrides": [], "spec": {"name": "old", "objective": "sft"},
        "global_batch_size": 8, "model": null, "model_config": null, "weights": null,
        "companions": [], "data_samples": 100,
        "horizon": {"budget_samples": 64, "warmup_samples": 0},
        "rank_memory": null, "entropy": null,
    });
    write("run.json", setup.clone());
    write(
        "state.json",
        json!({
            "phase": {"phase": "drained"}, "pin": null, "request": 0, "micro_limit": null,
            "generations": [{
                "number": 1, "reason": {"kind": "rank-lost", "rank": 1, "why": "killed"}, "world": 2,
                "proof": "2 × 4 × 1 = 8", "start_samples": 0, "created": 1.0, "first_step_seconds": 0.5,
            }],
        }),
    );
    write(
        "gen-1/record.json",
        json!({
            "job": "b3f1c0a8d2e94f57", "number": 1, "reason": {"kind": "started"},
            "members": [{"seat": 0, "ranks": 2}], "created": 1.0,
        }),
    );
    let calls: &[&[&str]] = &[
        &["launch", "recipe.yaml", "--resume"],
        &["launch", "recipe.yaml", "--resume", "--name", "old"],
        &["status", "old"],
        &["status", "old", "--ledger"],
        &["resize", "old", "2"],
        &["report", "old"],
        &["report", "old", "--ledger"],
    ];
    let refusal = |version: &str, format: u64| {
        format!(
            "runs/old was written by {version} version of evenkeel (format {format}; this version \
             reads format 2): start a new run, or use the version that wrote it"
        )
    };
    let refused = |expected: &str| {
        for call in calls {
            let ended = at(place, call);
            let expected = format!("error: {expected}\n");
            assert_eq!(
                (ended.status.code(), message(&ended)),
                (Some(2), expected),
                "{call:?}"
            );
        }
        let list = at(place, &["status", "-o", "json"]);
        let list: Value = serde_json::from_slice(&list.stdout).unwrap();
        assert_eq!(list[0]["error"], expected);
    };
    refused(&refusal("an earlier", 1));
    let mut newer = setup;
    newer["format"] = json!(3);
    write("run.json", newer);
    refused(&refusal("a later", 3));
}

#[test]
fn a_dry_run_on_this_machine_is_the_plan_of_the_launch() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/quickstart.yaml");
    let call = |more: &[&str]| {
        let mut command = evenkeel(&[
            "launch",
            recipe.to_str().unwrap(),
            "--procs",
            "2",
            "--dry-run",
        ]);
        command
            .args(more)
            .current_dir(folder.path())
            .output()
            .unwrap()
    };
    let planned = call(&[]);
    assert!(planned.status.success(), "{planned:?}");
    let text = String::from_utf8(planned.stdout).unwrap();
    assert!(text.starts_with("2 × 4 × 2 = 16\n"), "{text}");
    let said = String::from_utf8(planned.stderr).unwrap();
    assert!(said.contains("nothing was started"), "{said}");
    let refused = call(&["batch.global=17"]);
    assert_eq!(refused.status.code(), Some(1), "{refused:?}");
    assert!(folder.path().read_dir().unwrap().next().is_none());
}

#[test]
fn a_refused_launch_ends_with_the_next_command() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = "model_name_or_path: acme/model\ndataset_name: ./pairs.jsonl\nper_device_train_batch_size: 2\nbeta: 0.1\n\
                  loss_type: apo_zero\nnum_train_epochs: 1\n";
    std::fs::write(folder.path().join("dpo.yaml"), recipe).unwrap();
    let ended = evenkeel(&["launch", "dpo.yaml", "--recipe-gpus", "8", "--procs", "2"])
        .current_dir(folder.path())
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let said = String::from_utf8(ended.stderr).unwrap();
    let last = "next:\n  evenkeel launch dpo.yaml --recipe-gpus 8 --procs 2 -- trl dpo --config '{recipe}' '{resume_args}'\n";
    let last = last.replace('\'', "");
    assert!(said.ends_with(&last), "{said}");
    assert!(
        said.contains(" errors, ") || said.contains(" errors; "),
        "{said}"
    );
}

#[test]
fn an_override_may_come_before_a_command_without_a_recipe() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("train.py"), "").unwrap();
    let command = "--gpus 2 evenkeel.elasticity.max=4 -- torchrun --nproc_per_node 4 train.py --do_train \
                   --per_device_train_batch_size 8";
    for verb in ["plan", "launch --dry-run"] {
        let ended = evenkeel(&[])
            .args(verb.split(' ').chain(command.split_whitespace()))
            .current_dir(folder.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&ended.stdout);
        assert!(text.starts_with("2 × 8 × 2 = 32\n"), "{verb}: {ended:?}");
    }
}

#[test]
fn a_plan_is_written_back_for_a_program_that_cannot_restart() {
    let Some(corpus) = corpus::root() else { return };
    let tree = corpus.join("eric-mitchell__direct-preference-optimization/f8b8c0f49d/config");
    let overrides = "model=pythia28 datasets=[hh] loss=dpo loss.beta=0.1 exp_name=run batch_size=64 \
                     trainer=FSDPTrainer --recipe-gpus 4 --gpus 2 --emit args";
    let mut plan = evenkeel(&["plan", tree.to_str().unwrap()]);
    let ended = plan.args(overrides.split_whitespace()).output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    let args = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(args, "batch_size=64 gradient_accumulation_steps=2\n");
}

#[test]
fn a_dash_is_standard_input() {
    let recipe = std::fs::read("examples/quickstart.yaml").unwrap();
    let mut plan = evenkeel(&["plan", "-", "--gpus", "2"]);
    let mut child = plan
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), &recipe).unwrap();
    let piped = child.wait_with_output().unwrap();
    let named = evenkeel(&["plan", "examples/quickstart.yaml", "--gpus", "2"]);
    let named = { named }.output().unwrap();
    let first = |output: &Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().next().map(str::to_owned)
    };
    assert!(piped.status.success(), "{piped:?}");
    assert_eq!(first(&piped), first(&named));
}

#[test]
fn a_piped_recipe_with_a_launcher_in_its_command_is_read_once() {
    let recipe = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                  evenkeel: {objective: sft, batch: {gpus: 4}, \
                  trainer: {command: [torchrun, --nproc_per_node, '4', train.py, '{args}']}}\n";
    let mut plan = evenkeel(&["plan", "-", "--gpus", "2"]);
    let mut child = plan
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), recipe.as_bytes()).unwrap();
    let piped = child.wait_with_output().unwrap();
    assert!(piped.status.success(), "{piped:?}");
    let plan = String::from_utf8(piped.stdout).unwrap();
    assert!(plan.contains("2 × 4 × 4 = 32"), "{plan}");
}
