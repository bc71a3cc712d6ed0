//! The cluster commands of `evenkeel`, from a recipe to the end of its job.

use std::process::{Command, Output};

use serde_json::Value;

use super::support::{IMAGE, Job, output_text, recipe};

fn evenkeel(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .args(arguments)
        .output()
        .unwrap()
}

/// Runs a command that must succeed and returns its standard output.
fn stdout(arguments: &[&str]) -> String {
    let output = evenkeel(arguments);
    assert!(
        output.status.success(),
        "{arguments:?}: {}",
        output_text(&output)
    );
    String::from_utf8(output.stdout).unwrap()
}

fn file(recipe: &Value) -> tempfile::NamedTempFile {
    let file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
    std::fs::write(file.path(), recipe.to_string()).unwrap();
    file
}

fn path(file: &tempfile::NamedTempFile) -> &str {
    file.path().to_str().unwrap()
}

#[test]
fn launch_follows_its_job_to_the_end() {
    let job = Job::with_volume("launched");
    let recipe = file(&recipe(9600));
    let output = evenkeel(&[
        "launch",
        path(&recipe),
        "--nodes",
        "3",
        "--name",
        "launched",
        "--claim",
        "launched",
        "--image",
        IMAGE,
        "--device",
        "cpu",
        "--log",
        "json",
    ]);
    assert!(output.status.success(), "{}", output_text(&output));
    let events: Vec<Value> = String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let of = |kind: &str| events.iter().filter(|event| event["event"] == kind).count();
    assert_eq!(of("planned"), 1);
    assert_eq!(of("generation_started"), 1);
    let steps = events.iter().filter(|event| event["event"] == "step");
    let steps: Vec<_> = steps.map(|event| event["step"].as_u64().unwrap()).collect();
    assert!(
        steps.iter().copied().eq(1..=100),
        "every step is shown once: {steps:?}"
    );
    let last = events.last().unwrap();
    assert_eq!(last["event"], "finished");
    assert_eq!(last["samples"], 9600);
    job.finish(96);
}

#[test]
fn commands_change_and_show_a_job() {
    let job = Job::with_volume("moved");
    let recipe = file(&recipe(2_000_000));
    let planned = stdout(&[
        "plan",
        path(&recipe),
        "--from-cluster",
        "--gpus-per-node",
        "2",
    ]);
    assert!(planned.contains("3 nodes × 2 nvidia.com/gpu"), "{planned}");
    let launch = [
        "launch",
        path(&recipe),
        "--nodes",
        "3",
        "--gpus-per-node",
        "2",
        "--name",
        "moved",
        "--claim",
        "moved",
        "--image",
        IMAGE,
        "--device",
        "cpu",
        "--detach",
    ];
    let started = evenkeel(&launch);
    assert!(started.status.success(), "{}", output_text(&started));
    job.wait_training_on(3);
    let again = evenkeel(&launch);
    assert_eq!(again.status.code(), Some(2));
    assert!(
        output_text(&again).contains("already"),
        "{}",
        output_text(&again)
    );

    let list = stdout(&["list"]);
    assert!(
        list.contains("moved") && list.contains("6 × 4 × 4 = 96"),
        "{list}"
    );
    let shown = stdout(&["status", "moved", "--namespace", "default"]);
    assert!(shown.contains("3 of 3, 2 nvidia.com/gpu each"), "{shown}");
    let steps = stdout(&["logs", "moved"]);
    assert!(steps.contains("loss"), "{steps}");
    let missing = evenkeel(&["logs", "moved", "--rank", "6"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(
        output_text(&missing).contains("ranks 0 to 5"),
        "{}",
        output_text(&missing)
    );
    stdout(&["logs", "moved", "--rank", "5"]);

    // A run of the same name on this machine: the name alone means neither.
    let here = tempfile::tempdir().unwrap();
    let run = here.path().join("runs/moved");
    std::fs::create_dir_all(&run).unwrap();
    std::fs::write(run.join("run.json"), "{}").unwrap();
    let both = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .current_dir(here.path())
        .args(["suspend", "moved"])
        .output()
        .unwrap();
    assert_eq!(both.status.code(), Some(2));
    let message = "`moved` is the run in runs/moved and a TrainingJob in namespace default; add `--local` or `-n default`";
    assert!(
        output_text(&both).contains(message),
        "{}",
        output_text(&both)
    );

    stdout(&["scale", "moved", "1"]);
    job.wait_training_on(1);
    stdout(&["suspend", "moved"]);
    job.wait("its suspension", |status| status["phase"] == "Suspended");
    stdout(&["resume", "moved"]);
    job.wait_training_on(1);
    let cancelled = stdout(&["cancel", "moved"]);
    assert!(cancelled.contains("stays on the volume"), "{cancelled}");
    job.pods_left(0);
    let gone = evenkeel(&["status", "moved", "-n", "default"]);
    assert_eq!(gone.status.code(), Some(2));
}

/// What `evenkeel status JOB --ledger` prints about a job of the scenarios, and its exit code.
pub fn proof(name: &str) -> (String, Option<i32>) {
    let output = evenkeel(&["status", name, "-n", "default", "--ledger"]);
    (output_text(&output), output.status.code())
}

#[test]
fn the_ledger_of_a_job_is_proved_in_a_pod_of_it() {
    for (name, job) in [
        ("proved", Job::with_volume("proved")),
        ("proved-bucket", Job::with_bucket("proved-bucket")),
    ] {
        let job = job.start(&recipe(4800), serde_json::json!({"nodes": 2}));
        job.finish(96);
        let (text, code) = proof(name);
        assert_eq!(code, Some(0), "{text}");
        let proved =
            "proved: 50 steps consumed samples 0..4800 of the one global order exactly once";
        assert!(
            text.contains(proved) && text.contains(", digest "),
            "{text}"
        );
        // A byte of what the checkpoint says of the samples.
        let checkpoint = job.status()["checkpoint"]["path"].clone();
        let state = job
            .run()
            .join(checkpoint.as_str().unwrap())
            .join("state.json");
        let mut bytes = std::fs::read(&state).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&state, bytes).unwrap();
        let (text, code) = proof(name);
        assert_eq!(code, Some(1), "{text}");
        assert!(
            text.contains("NOT PROVED") && text.contains("state.json"),
            "{text}"
        );
        job.delete_whole();
    }
}

#[test]
fn a_config_tree_is_sent_with_its_job() {
    let job = Job::with_volume("tree");
    let folder = tempfile::tempdir().unwrap();
    let tree = [
        (
            "config.yaml",
            "defaults: [_self_, model: base, loss: ???]\nexp_name: tree\n",
        ),
        (
            "model/base.yaml",
            "batch_size: 24\ngradient_accumulation_steps: 2\n",
        ),
        ("loss/dpo.yaml", "name: dpo\nbeta: 0.1\n"),
    ];
    for (path, text) in tree {
        let path = folder.path().join("config").join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let launch = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .current_dir(folder.path())
        .args(["launch", "config", "loss=dpo", "--dialect", "halos"])
        .args(["--nodes", "3", "--name", "tree", "--claim", "tree"])
        .args(["--image", "evenkeel.test/busybox:1", "--", "/bin/busybox"])
        .args([
            "sh",
            "-c",
            "echo \"$@\"; /bin/busybox sleep 3",
            "train",
            "loss=dpo",
            "cache_dir={checkpoint_dir}",
            "{args}",
        ])
        .output()
        .unwrap();
    assert!(launch.status.success(), "{}", output_text(&launch));
    let status = job.wait("its end", |status| status["phase"] == "Complete");
    assert_eq!(status["plan"]["globalBatchSize"], 24);
    let log = job.run().join("gen-1/logs/rank-5.log");
    let text = std::fs::read_to_string(log).unwrap();
    assert!(text.contains("model.batch_size=24"), "{text}");
}

#[test]
fn contexts_are_selected_like_in_kubectl() {
    let job = Job::apply(
        "contexts",
        &recipe(4800),
        serde_json::json!({"suspend": true}),
    );
    // A second kubeconfig whose current context is unreachable, before the valid one.
    let own = std::env::var("KUBECONFIG").unwrap();
    let text = "{apiVersion: v1, kind: Config, current-context: away, users: [], clusters: [\
        {name: away, cluster: {server: 'https://127.0.0.1:9'}}], contexts: [\
        {name: away, context: {cluster: away, user: away}}, \
        {name: home, context: {cluster: c, user: u, namespace: default}}]}";
    let away = file(&Value::Null);
    std::fs::write(away.path(), text).unwrap();
    let list = |context: &[&str]| {
        let mut list = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        list.env("KUBECONFIG", format!("{}:{own}", path(&away)));
        output_text(&list.arg("list").args(context).output().unwrap())
    };
    assert!(list(&[]).contains("127.0.0.1:9"), "{}", list(&[]));
    let home = list(&["--context", "home"]);
    assert!(home.contains("contexts"), "{home}");
    job.delete_whole();
}

#[test]
fn missing_jobs_and_contexts_are_reported() {
    let no_job = evenkeel(&["suspend", "missing", "-n", "default"]);
    assert_eq!(no_job.status.code(), Some(2));
    assert!(
        output_text(&no_job).contains("TrainingJob missing does not exist in namespace default"),
        "{}",
        output_text(&no_job)
    );
    let no_context = evenkeel(&["list", "--context", "nowhere"]);
    assert_eq!(no_context.status.code(), Some(2));
    assert!(
        output_text(&no_context).contains("nowhere"),
        "{}",
        output_text(&no_context)
    );
}

/// A user of the cluster who may only read its nodes, by a kubeconfig that impersonates them.
#[test]
fn the_doctor_names_what_a_user_lacks() {
    let whole = stdout(&["doctor", "--cluster", "-o", "json"]);
    let checks: Vec<Value> = serde_json::from_str(&whole).unwrap();
    let of = |name: &str| {
        let found = checks.iter().find(|check| check["name"] == name);
        found.unwrap_or_else(|| panic!("{whole}"))
    };
    for name in ["cluster", "rights", "controller"] {
        assert_eq!(of(name)["state"], "works", "{whole}");
    }
    let version = env!("CARGO_PKG_VERSION");
    let running = format!("{version} in namespace evenkeel-system, as this program");
    assert_eq!(of("controller")["found"], running.as_str());

    let admin = std::fs::read_to_string(std::env::var("KUBECONFIG").unwrap()).unwrap();
    let mut config: Value = serde_saphyr::from_str(&admin).unwrap();
    config["users"][0]["user"]["as"] = "guest".into();
    let config = file(&config);
    let output = evenkeel(&["doctor", "--cluster", "--kubeconfig", path(&config)]);
    let text = output_text(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains(
            "NO  rights        you may not create trainingjobs (launch), get trainingjobs (status)"
        ),
        "{text}"
    );
    let next = "--resource=trainingjobs.evenkeel.dev -n default && kubectl create rolebinding trainingjobs";
    assert!(text.contains(next), "{text}");
}
