//! `docs/first-job.md`, followed with TRL's own training script: a folder, a bucket and one command. A node is lost on
//! the way.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use super::support::{
    Job, Restore, create, kit, node_without_controller, output_text, poll, restored,
};

/// The alignment-handbook's recipe for Zephyr, for a tiny model of the folder and without a GPU.
const RECIPE: &str = "\
model_name_or_path: model
dataset_name: sft
per_device_train_batch_size: 4
gradient_accumulation_steps: 3
max_steps: 120
learning_rate: 1.0e-03
lr_scheduler_type: cosine
logging_steps: 1
save_steps: 10
seed: 42
bf16: false
use_cpu: true
report_to: none
disable_tqdm: true
";

/// Shared libraries that Python's modules need.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// Writes what the user's folder has, and returns the folder of the Python and of its packages.
fn write_folder(folder: &Path, python: &str) -> [PathBuf; 2] {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR"));
    let made = Command::new(python)
        .arg(repository.join("tests/trainers/tiny_model.py"))
        .arg(folder)
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", output_text(&made));
    let about = "import sys, trl, pathlib; print(sys.base_prefix, sys.prefix, pathlib.Path(trl.__file__).parent)";
    let about = Command::new(python).args(["-c", about]).output().unwrap();
    let about = String::from_utf8(about.stdout).unwrap();
    let [base, environment, trl] = about.split_whitespace().collect::<Vec<_>>()[..] else {
        panic!("{about}");
    };
    std::fs::create_dir(folder.join("scripts")).unwrap();
    std::fs::copy(
        Path::new(trl).join("scripts/sft.py"),
        folder.join("scripts/sft.py"),
    )
    .unwrap();
    std::fs::write(folder.join("recipe.yaml"), RECIPE).unwrap();
    [base, environment].map(PathBuf::from)
}

/// A pod template that brings the Python of this machine into the pods, as an image would, and what removes its volume.
fn with_python(places: &[PathBuf]) -> (Value, [Restore; 2]) {
    create(&json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "machine"}, "spec": {
            "capacity": {"storage": "1Gi"}, "accessModes": ["ReadOnlyMany"], "storageClassName": "",
            "hostPath": {"path": "/"}, "claimRef": {"namespace": "default", "name": "machine"}}}));
    create(&json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "machine"},
        "spec": {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeName": "machine",
            "resources": {"requests": {"storage": "1Gi"}}}}));
    let libraries = PathBuf::from(LIBRARIES);
    let mounts: Vec<Value> = places
        .iter()
        .chain([&libraries])
        .map(|place| {
            json!({"name": "machine", "mountPath": place, "readOnly": true,
                "subPath": place.strip_prefix("/").unwrap()})
        })
        .collect();
    let template = json!({"spec": {
        "volumes": [{"name": "machine", "persistentVolumeClaim": {"claimName": "machine", "readOnly": true}}],
        "containers": [{"name": "trainer", "volumeMounts": mounts}],
    }});
    let created = ["pvc/machine", "pv/machine"];
    (
        template,
        created.map(|name| restored("kubectl", &["delete", name, "--wait=false"])),
    )
}

#[test]
#[ignore = "takes minutes and needs TRL (EVENKEEL_PYTHON): scripts/nightly.sh"]
fn a_folder_with_trls_script_trains_through_the_loss_of_a_node() {
    let Ok(python) = std::env::var("EVENKEEL_PYTHON") else {
        println!("SKIPPED: no Python with trl (set EVENKEEL_PYTHON)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let places = write_folder(folder.path(), &python);
    let template = tempfile::NamedTempFile::new().unwrap();
    let (pods, _restored) = with_python(&places);
    std::fs::write(&template, pods.to_string()).unwrap();
    let job = Job::with_bucket("first");
    let path = format!("PATH={}/bin:/bin", places[1].display());
    let libraries = places[0].join("lib");
    let libraries = format!("LD_LIBRARY_PATH={}:{LIBRARIES}", libraries.display());
    let launched = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .current_dir(folder.path())
        .args("launch recipe.yaml --recipe-gpus 2 --nodes 3 --gpus-per-node 1 --name first".split(' '))
        .args("--bucket s3://first/runs --image evenkeel.test/busybox:1 --env-from secret/s3".split(' '))
        .args("--detach -n default --env HF_HOME=/tmp/hf --env HF_HUB_OFFLINE=1 --env".split(' '))
        .args([&path, "--env", &libraries, "--setup"])
        .args(["python -c 'import trl'", "--pod-template"])
        .arg(template.path())
        .args("-- python scripts/sft.py --config {recipe} --output_dir {checkpoint_dir} {resume_args}".split(' '))
        .output()
        .unwrap();
    let text = output_text(&launched);
    assert!(launched.status.success(), "{text}");
    println!("{text}");

    let step = |status: &Value| status["progress"]["step"].as_u64().unwrap_or(0);
    job.wait("the twentieth step", |status| step(status) >= 20);
    let node = node_without_controller();
    let _restored = restored("kit", &["return", &node]);
    kit(&["lose", &node]);
    let status = job.wait("its end", |status| status["phase"] == "Complete");
    let generations = status["history"].as_array().unwrap();
    assert!(generations.len() > 1, "{status:#}");
    for generation in generations {
        assert!(
            generation["formula"].as_str().unwrap().ends_with(" = 24"),
            "{generation}"
        );
    }
    let last = generations.len();
    let output = job.run().join(format!("gen-{last}/output"));
    // The pods copy it before they end.
    let model = || output.join("model.safetensors").is_file().then_some(());
    poll("the model", model, || format!("{}", output.display()));
    // The newest copy has every step once, whichever world took it.
    let state = std::fs::read_to_string(newest_state(&job.run())).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    let steps: Vec<u64> = state["log_history"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|entry| entry["loss"].is_number())
        .map(|entry| entry["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, (1..=120).collect::<Vec<u64>>());
    assert_eq!(state["train_batch_size"], 4);
}

/// `trainer_state.json` of the last checkpoint in the bucket.
fn newest_state(run: &Path) -> PathBuf {
    let found = Command::new("find")
        .arg(run)
        .args(["-path", "*checkpoint-120/trainer_state.json"])
        .output()
        .unwrap();
    let found = String::from_utf8(found.stdout).unwrap();
    // Fewer than ten generations.
    PathBuf::from(found.lines().max().expect("a copy of checkpoint-120"))
}
