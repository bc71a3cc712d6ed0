//! What the scenarios share: the cluster's kit, jobs, and waiting for what they come to.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::losses;

/// Longer than anything here takes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(600);

/// The namespace of all jobs.
const NAMESPACE: &str = "default";
/// The image that scripts/cluster-tests.sh has loaded on every node.
pub const IMAGE: &str = "evenkeel.test/evenkeel:1";

/// Runs `kubectl` and returns its output; panics with its words when it fails.
pub fn kubectl(arguments: &[&str]) -> String {
    let output = try_kubectl(arguments, "");
    assert!(
        output.status.success(),
        "kubectl {arguments:?}: {}",
        words(&output)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Runs `kubectl` with something on its standard input.
pub fn try_kubectl(arguments: &[&str], input: &str) -> Output {
    use std::io::Write;
    let mut child = Command::new("kubectl")
        .args(arguments)
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .expect("kubectl is on the path: scripts/cluster-tests.sh puts it there");
    child
        .stdin
        .take()
        .unwrap()
        .write_all(input.as_bytes())
        .unwrap();
    child.wait_with_output().unwrap()
}

/// What a program had to say.
pub fn words(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Tries until there is what is waited for; `instead` says what there is when time is up.
pub fn poll<T>(what: &str, found: impl Fn() -> Option<T>, instead: impl Fn() -> String) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(
            start.elapsed() < DEADLINE,
            "waited in vain for {what}: {}",
            instead()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Something that the machine room does: `cut node3`, `gpus node2 4`, ….
pub fn kit(arguments: &[&str]) {
    let kit = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/kit/cluster");
    let output = Command::new(kit).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "cluster {arguments:?}: {}",
        words(&output)
    );
}

/// A TrainingJob on the cluster, with a volume of its own. It is deleted when the test ends.
pub struct Job {
    name: String,
    volume: tempfile::TempDir,
    /// Whether its recipe is that of the undisturbed run, but for the budget.
    comparable: bool,
}

/// The recipe of the scenarios: small, but every step takes long enough to disturb it.
pub fn recipe(samples: u64) -> Value {
    json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "scenario"},
        "spec": {
            "batch": {"global": 96, "micro": 4},
            "model": {"init": "random", "config": {
                "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
                "max_position_embeddings": 32, "tie_word_embeddings": true}},
            "data": {"sequence_length": 32, "held_out": 96, "train": [{"path": "synthetic",
                "synthetic": {"vocabulary": 64, "branching": 4, "samples": 20000}}]},
            "budget": {"samples": samples},
            "learning_rate": {"peak": 3.0e-3, "shape": "constant", "warmup_samples": 960},
            "checkpoint": {"every_samples": 960, "keep": 3},
        },
    })
}

impl Job {
    /// Applies a job of `recipe`, with more of its spec.
    pub fn apply(name: &str, recipe: &Value, more: Value) -> Job {
        Job::with_volume(name).start(recipe, more)
    }

    /// Applies the job of this volume.
    pub fn start(mut self, recipe: &Value, more: Value) -> Job {
        let name = &self.name;
        let mut standard = self::recipe(0);
        standard["spec"]["budget"] = recipe["spec"]["budget"].clone();
        self.comparable = *recipe == standard;
        let mut spec = json!({
            "nodes": 3, "gpusPerNode": 2, "image": IMAGE,
            "recipe": {"inline": recipe.to_string()},
            "checkpoint": {"claim": name},
            "elasticity": {"growDelaySeconds": 2, "placementSeconds": 30, "drainSeconds": 20},
        });
        merge(&mut spec, &more);
        create(&json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": name}, "spec": spec,
        }));
        self
    }

    /// Lets the volume hold no more than this: it is a file system of its own from now on.
    pub fn limit_volume(&self, size: &str) {
        let options = format!("size={size},mode=0777");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(self.volume.path())
            .status()
            .unwrap();
        assert!(mounted.success());
    }

    /// Makes such a volume's file system read-only (`ro`) or writable again (`rw`), as a disk with errors
    /// is: what is mounted of it in pods stays mounted.
    pub fn remount_volume(&self, how: &str) {
        let whole = format!("remount,{how}");
        for options in [&whole, "remount,bind,rw"] {
            let mut mount = Command::new("mount");
            let mounted = mount.args(["-o", options]).arg(self.volume.path()).status();
            assert!(mounted.unwrap().success());
        }
    }

    /// Waits until it has failed.
    pub fn wait_failure(&self) -> Value {
        let failed = || Some(self.status()).filter(|status| status["state"] == "Failed");
        poll("its failure", failed, || format!("{:#}", self.status()))
    }

    /// The volume and the claim of a job that somebody else will create.
    pub fn with_volume(name: &str) -> Job {
        let job = Job::without_claim(name);
        job.claim();
        job
    }

    /// The same before its volume is claimed.
    pub fn without_claim(name: &str) -> Job {
        let volume = tempfile::tempdir().unwrap();
        use std::os::unix::fs::PermissionsExt;
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(volume.path(), open).unwrap();
        let job = Job {
            name: name.into(),
            volume,
            comparable: false,
        };
        create(&json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": {
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"],
                "storageClassName": "", "hostPath": {"path": job.volume.path()},
                "claimRef": {"namespace": NAMESPACE, "name": name}}}));
        job
    }

    /// Claims its volume.
    pub fn claim(&self) {
        create(&json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": self.name},
            "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "",
                "volumeName": self.name, "resources": {"requests": {"storage": "1Gi"}}}}));
    }

    /// The status as it is.
    pub fn status(&self) -> Value {
        let text = kubectl(&["get", "tj", &self.name, "-o", "json"]);
        let job: Value = serde_json::from_str(&text).unwrap();
        job["status"].clone()
    }

    /// Waits for a status.
    pub fn wait(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let found = || {
            let status = self.status();
            if holds(&status) {
                return Some(status);
            }
            assert!(
                status["state"] != "Failed",
                "the job failed while it was waited for {what}: {status:#}"
            );
            None
        };
        poll(what, found, || {
            format!("{:#}\n{}", self.status(), self.describe())
        })
    }

    /// Waits until a generation of so many nodes has taken steps beyond where it began.
    pub fn wait_training_on(&self, nodes: u64) -> Value {
        self.wait(&format!("training on {nodes} nodes"), |status| {
            let last = status["history"].as_array().and_then(|h| h.last().cloned());
            let stepped = last.is_some_and(|change| change["firstStep"].is_number());
            status["nodes"] == nodes && status["state"] == "Running" && stepped
        })
    }

    /// Waits for the end, and proves what must hold of every job: the batch of every generation,
    /// that every sample was consumed exactly once, that nothing else was made for it, and the
    /// losses of the scenarios' own recipe.
    pub fn finish(&self, batch: u64) -> Value {
        let status = self.wait("its end", |status| status["state"] == "Complete");
        self.prove_all(&status, batch, "finished");
        status
    }

    /// The same of a job that has been through enough, long before its end: it takes ten more steps in
    /// the world that it came to, and is suspended. How long that takes hangs on no machine's speed.
    pub fn settle(&self, batch: u64) -> Value {
        let samples = |status: &Value| status["progress"]["samples"].as_u64().unwrap_or(0);
        let before = samples(&self.status());
        self.wait("ten more steps", |status| {
            status["state"] == "Running" && samples(status) >= before + 10 * batch
        });
        self.patch(json!({"suspend": true}));
        let status = self.wait("its suspension", |status| status["state"] == "Suspended");
        self.prove_all(&status, batch, "drained");
        status
    }

    fn prove_all(&self, status: &Value, batch: u64, phase: &str) {
        for change in status["history"].as_array().unwrap() {
            let proof = change["proof"].as_str().unwrap();
            // The norm test may have raised it, and says from where.
            let kept = [format!("= {batch}"), format!("(base {batch})")];
            assert!(kept.iter().any(|end| proof.ends_with(end)), "{proof}");
        }
        self.prove(status, phase);
        if self.comparable {
            losses::prove(&losses::of(&self.run()));
        }
        let seats = status["seats"].as_array().map_or(0, Vec::len);
        self.pods_left(seats);
        // One of each stands beside them, and no more.
        let others = "services,serviceaccounts,roles,rolebindings,networkpolicies";
        let others = kubectl(&["get", others, "-l", &self.selector(), "-o", "name"]);
        assert_eq!(others.lines().count(), 5, "{others}");
    }

    /// Nothing was committed in a generation beyond where the next one began: what a node commits that
    /// was given up counts for nothing, and would be found here.
    pub fn one_lineage(&self, status: &Value) {
        let history = status["history"].as_array().unwrap();
        for pair in history.windows(2) {
            let (old, began) = (&pair[0]["generation"], pair[1]["samples"].as_u64().unwrap());
            let commits = self.run().join(format!("gen-{old}"));
            for entry in std::fs::read_dir(&commits).into_iter().flatten() {
                let manifest = entry.unwrap().path().join("manifest.json");
                let Ok(text) = std::fs::read_to_string(&manifest) else {
                    continue;
                };
                let manifest: Value = serde_json::from_str(&text).unwrap();
                let samples = manifest["samples"]
                    .as_u64()
                    .expect("a checkpoint's samples");
                assert!(
                    samples <= began,
                    "{samples} in generation {old}, left at {began}"
                );
            }
        }
    }

    fn selector(&self) -> String {
        format!("evenkeel.dev/job={}", self.name)
    }

    /// Waits until the API server does not know it any more.
    pub fn wait_gone(&self) {
        let known = || try_kubectl(&["get", "tj", &self.name], "");
        let gone = || (!known().status.success()).then_some(());
        poll("its deletion", gone, || words(&known()));
    }

    /// Notes of the events on it.
    pub fn events(&self) -> String {
        let about = format!("involvedObject.name={}", self.name);
        kubectl(&["get", "events", "--field-selector", &about])
    }

    /// Proves the ledger from the volume.
    fn prove(&self, status: &Value, phase: &str) {
        let run = self.run();
        // What a local launcher writes for `status`; on a cluster it stands in the job.
        let state = json!({
            "phase": {"phase": phase}, "pin": status["checkpoint"], "request": 0,
            "micro_limit": null, "generations": [],
        });
        std::fs::write(run.join("state.json"), state.to_string()).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
            .args(["status", "--ledger"])
            .arg(&run)
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", words(&output));
    }

    /// The run's directory on the volume.
    pub fn run(&self) -> PathBuf {
        let mut entries = std::fs::read_dir(self.volume.path()).unwrap();
        entries
            .next()
            .expect("a run's directory on the volume")
            .unwrap()
            .path()
    }

    /// Its pods' processes on this machine that were started as `evenkeel WHAT`.
    pub fn processes(&self, what: &str) -> Vec<String> {
        running(&format!("evenkeel {what} .*/{}-[0-9a-f-]*", self.name))
    }

    /// The uids of its pods by name, without those that are being deleted.
    pub fn pods(&self) -> std::collections::BTreeMap<String, String> {
        let selector = self.selector();
        let text = kubectl(&["get", "pods", "-l", &selector, "-o", "json"]);
        let pods: Value = serde_json::from_str(&text).unwrap();
        let pods = pods["items"].as_array().unwrap().iter();
        let text = |value: &Value| value.as_str().unwrap().to_string();
        pods.map(|pod| {
            (
                text(&pod["metadata"]["name"]),
                text(&pod["metadata"]["uid"]),
            )
        })
        .collect()
    }

    /// Its pods, once so many are left.
    pub fn pods_left(&self, count: usize) -> std::collections::BTreeMap<String, String> {
        let left = || Some(self.pods()).filter(|pods| pods.len() == count);
        let instead = || format!("{:?}", self.pods());
        poll(&format!("{count} pods to be left"), left, instead)
    }

    /// Deletes it; nothing that was made for it may be left.
    pub fn delete_whole(self) {
        let selector = self.selector();
        drop(self);
        let kinds = "pods,services,serviceaccounts,roles,rolebindings,networkpolicies";
        let left = kubectl(&["get", kinds, "-l", &selector, "-o", "name"]);
        assert_eq!(left, "");
    }

    /// Waits until it is being moved to fewer nodes, or just was.
    pub fn wait_rescale(&self) {
        self.wait("a rescale", |status| {
            status["state"] != "Running" || status["nodes"] == 2
        });
    }

    /// Changes its spec.
    pub fn patch(&self, spec: Value) {
        let patch = json!({"spec": spec}).to_string();
        kubectl(&["patch", "tj", &self.name, "--type=merge", "-p", &patch]);
    }

    fn describe(&self) -> String {
        words(&try_kubectl(
            &["describe", "pods", "-l", &self.selector()],
            "",
        ))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        try_kubectl(
            &["delete", "tj", &self.name, "--wait=true", "--timeout=60s"],
            "",
        );
        let selector = self.selector();
        try_kubectl(
            &[
                "wait",
                "--for=delete",
                "pods",
                "-l",
                &selector,
                "--timeout=60s",
            ],
            "",
        );
        try_kubectl(&["delete", "pvc", &self.name, "--wait=false"], "");
        try_kubectl(&["delete", "pv", &self.name, "--wait=false"], "");
        // Where nothing was mounted there is nothing to unmount.
        let _ = Command::new("umount")
            .arg(self.volume.path())
            .stderr(std::process::Stdio::null())
            .status();
    }
}

/// Processes of this machine whose command lines match a pattern, pods' among them.
pub fn running(pattern: &str) -> Vec<String> {
    let output = Command::new("pgrep")
        .args(["-f", pattern])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(String::from).collect()
}

/// Sends a signal to a process.
pub fn signal(name: &str, process: &str) {
    let sent = Command::new("kill")
        .args(["-s", name, process])
        .status()
        .unwrap();
    assert!(sent.success());
}

/// Undoes what a scenario did to the cluster, also when it fails.
pub struct Mended(&'static str, Vec<String>);

/// To be undone by `kubectl` or by the `kit`, when it is dropped.
pub fn mended(by: &'static str, arguments: &[&str]) -> Mended {
    Mended(by, arguments.iter().map(|word| (*word).into()).collect())
}

impl Drop for Mended {
    fn drop(&mut self) {
        let arguments: Vec<&str> = self.1.iter().map(String::as_str).collect();
        match self.0 {
            "kubectl" => drop(try_kubectl(&arguments, "")),
            _ => kit(&arguments),
        }
    }
}

/// A node on which the controller does not run: this one may be lost while somebody looks.
pub fn node_without_controller() -> String {
    let taken = kubectl(&[
        "get",
        "pods",
        "-n",
        "evenkeel-system",
        "-o",
        "jsonpath={.items[*].spec.nodeName}",
    ]);
    let nodes = ["node3", "node2", "node1"].into_iter();
    let mut free = nodes.filter(|node| !taken.split(' ').any(|taken| taken == *node));
    free.next().expect("more nodes than controllers").into()
}

/// Creates objects; panics with the API server's words when it refuses.
pub fn create(objects: &Value) {
    let output = try_create(objects);
    assert!(output.status.success(), "{}", words(&output));
}

/// Creates objects.
pub fn try_create(objects: &Value) -> Output {
    try_kubectl(&["create", "-f", "-"], &objects.to_string())
}

fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                merge(base.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (base, over) => *base = over.clone(),
    }
}
