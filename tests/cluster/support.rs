//! Support for the scenarios: the cluster kit, jobs, and waiting for their status.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::losses;

/// Longer than any step of a scenario takes on a busy machine.
const DEADLINE: Duration = Duration::from_secs(600);

/// Namespace of all jobs.
const NAMESPACE: &str = "default";
/// Image that scripts/cluster-tests.sh loads on every node.
pub const IMAGE: &str = "evenkeel.test/evenkeel:1";

/// Runs `kubectl` and returns its output; panics with its error output if it fails.
pub fn kubectl(arguments: &[&str]) -> String {
    let output = try_kubectl(arguments, "");
    assert!(
        output.status.success(),
        "kubectl {arguments:?}: {}",
        output_text(&output)
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Runs `kubectl` with `input` on its standard input.
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

/// Standard output and standard error of a process.
pub fn output_text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Polls until `found` returns a value; panics with `instead` at the deadline.
pub fn poll<T>(what: &str, found: impl Fn() -> Option<T>, instead: impl Fn() -> String) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = found() {
            return found;
        }
        assert!(
            start.elapsed() < DEADLINE,
            "timed out waiting for {what}: {}",
            instead()
        );
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Runs a command of the cluster kit: `cut node3`, `gpus node2 4`, ….
pub fn kit(arguments: &[&str]) {
    let kit = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cluster/kit/cluster");
    let output = Command::new(kit).args(arguments).output().unwrap();
    assert!(
        output.status.success(),
        "cluster {arguments:?}: {}",
        output_text(&output)
    );
}

/// A TrainingJob on the cluster with its volume. It is deleted when the test ends.
pub struct Job {
    name: String,
    /// The folder of its volume or of its bucket.
    volume: tempfile::TempDir,
    in_bucket: bool,
    /// Whether its recipe equals that of the undisturbed run except for the budget.
    comparable: bool,
}

/// Recipe of the scenarios: small, but with steps that are long enough to disturb.
pub fn recipe(samples: u64) -> Value {
    json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "Recipe", "metadata": {"name": "scenario"},
        "spec": {
            "batch": {"global": 96, "per_device_batch_size": 4},
            "model": {"init": "random", "config": {
                "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2,
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

/// The same with four times the parameters, for scenarios in which memory or a volume ends.
pub fn wide_recipe(samples: u64) -> Value {
    let mut recipe = recipe(samples);
    let model = &mut recipe["spec"]["model"]["config"];
    model["hidden_size"] = json!(64);
    model["intermediate_size"] = json!(176);
    recipe
}

/// Number of slots in a status.
fn slots(status: &Value) -> usize {
    status["slots"].as_array().map_or(0, Vec::len)
}

/// Variables of the kit's S3 server.
pub fn s3_environment() -> BTreeMap<String, String> {
    [
        ("AWS_ACCESS_KEY_ID", "evenkeel"),
        ("AWS_SECRET_ACCESS_KEY", "only-for-tests"),
        ("AWS_REGION", "eu-west-1"),
        ("AWS_ENDPOINT_URL", "http://10.89.0.1:9000"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into()
}

impl Job {
    /// Creates a job of `recipe`; `more` is merged into its spec.
    pub fn apply(name: &str, recipe: &Value, more: Value) -> Job {
        Job::with_volume(name).start(recipe, more)
    }

    /// Creates the job of this volume.
    pub fn start(mut self, recipe: &Value, more: Value) -> Job {
        let name = &self.name;
        let mut standard = self::recipe(0);
        standard["spec"]["budget"] = recipe["spec"]["budget"].clone();
        self.comparable = *recipe == standard;
        let mut spec = json!({
            "nodes": 3, "gpusPerNode": 2, "image": IMAGE,
            // The kit's GPUs exist only in the nodes' status.
            "trainer": {"device": "Cpu"},
            "recipe": {"inline": recipe.to_string()},
            "checkpoint": {"claim": name},
            "elasticity": {"scaleUpDelaySeconds": 2, "placementSeconds": 30, "drainSeconds": 20},
        });
        if self.in_bucket {
            spec["checkpoint"] = json!({"path": format!("s3://{name}/runs")});
            let environment =
                json!({"name": "trainer", "envFrom": [{"secretRef": {"name": "s3"}}]});
            spec["podTemplate"] = json!({"spec": {"containers": [environment]}});
        }
        merge(&mut spec, &more);
        create(&json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": name}, "spec": spec,
        }));
        self
    }

    /// Limits the size of the volume by mounting a separate file system.
    pub fn limit_volume(&self, size: &str) {
        let options = format!("size={size},mode=0777");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &options, "tmpfs"])
            .arg(self.volume.path())
            .status()
            .unwrap();
        assert!(mounted.success());
    }

    /// Makes a limited volume's file system read-only (`ro`), like a disk with errors, or writable again
    /// (`rw`). Mounts in pods remain.
    pub fn remount_volume(&self, how: &str) {
        let whole = format!("remount,{how}");
        for options in [&whole, "remount,bind,rw"] {
            let mut mount = Command::new("mount");
            let mounted = mount.args(["-o", options]).arg(self.volume.path()).status();
            assert!(mounted.unwrap().success());
        }
    }

    /// Waits for a condition with `kubectl wait`.
    fn wait_condition(&self, condition: &str) {
        let condition = format!("--for=condition={condition}");
        kubectl(&[
            "wait",
            &condition,
            "--timeout=10s",
            &format!("tj/{}", self.name),
        ]);
    }

    /// Waits until the job has failed.
    pub fn wait_failure(&self) -> Value {
        let failed = || Some(self.status()).filter(|status| status["phase"] == "Failed");
        let status = poll("its failure", failed, || format!("{:#}", self.status()));
        self.wait_condition("Failed");
        status
    }

    /// Creates the volume and the claim of a job, but not the job.
    pub fn with_volume(name: &str) -> Job {
        let job = Job::without_claim(name);
        job.claim();
        job
    }

    /// Creates the bucket of a job whose pods share no volume, and the Secret with its credentials.
    pub fn with_bucket(name: &str) -> Job {
        let state = std::env::var("CLUSTER_STATE").unwrap_or("/tmp/evenkeel-cluster".into());
        // The server's buckets are folders.
        let volume = tempfile::Builder::new()
            .prefix(name)
            .rand_bytes(0)
            .tempdir_in(Path::new(&state).join("s3"))
            .unwrap();
        kubectl_apply(&json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s3"},
            "stringData": s3_environment()}));
        Job {
            name: name.into(),
            volume,
            in_bucket: true,
            comparable: false,
        }
    }

    /// Creates the volume of a job without a claim.
    pub fn without_claim(name: &str) -> Job {
        let volume = tempfile::tempdir().unwrap();
        use std::os::unix::fs::PermissionsExt;
        let open = std::fs::Permissions::from_mode(0o777);
        std::fs::set_permissions(volume.path(), open).unwrap();
        let job = Job {
            name: name.into(),
            volume,
            in_bucket: false,
            comparable: false,
        };
        create(&json!({
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": {
                "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"],
                "storageClassName": "", "hostPath": {"path": job.volume.path()},
                "claimRef": {"namespace": NAMESPACE, "name": name}}}));
        job
    }

    /// Creates the claim of the volume.
    pub fn claim(&self) {
        create(&json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": self.name},
            "spec": {"accessModes": ["ReadWriteMany"], "storageClassName": "",
                "volumeName": self.name, "resources": {"requests": {"storage": "1Gi"}}}}));
    }

    pub fn status(&self) -> Value {
        let text = kubectl(&["get", "tj", &self.name, "-o", "json"]);
        let job: Value = serde_json::from_str(&text).unwrap();
        job["status"].clone()
    }

    /// Waits for a status that `holds`; panics if the job fails.
    pub fn wait(&self, what: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let found = || {
            let status = self.status();
            if holds(&status) {
                return Some(status);
            }
            assert!(
                status["phase"] != "Failed",
                "the job failed while waiting for {what}: {status:#}"
            );
            None
        };
        poll(what, found, || {
            format!("{:#}\n{}", self.status(), self.describe())
        })
    }

    /// Waits until a generation of `nodes` nodes has taken its first step.
    pub fn wait_training_on(&self, nodes: u64) -> Value {
        self.wait(&format!("training on {nodes} nodes"), |status| {
            let last = status["history"].as_array().and_then(|h| h.last().cloned());
            let stepped =
                last.is_some_and(|change| change["stages"]["firstStepSeconds"].is_number());
            status["nodes"] == nodes && status["phase"] == "Running" && stepped
        })
    }

    /// Waits for the end and checks the invariants of every job: the batch of every generation, that
    /// every sample was consumed exactly once, the number of its objects, and the losses of the
    /// scenarios' recipe.
    pub fn finish(&self, batch: u64) -> Value {
        let status = self.finish_despite_deletions(batch);
        self.pods_left(slots(&status));
        status
    }

    /// As [`Self::finish`], but a pod may have been deleted at the end, and is not replaced.
    pub fn finish_despite_deletions(&self, batch: u64) -> Value {
        let status = self.wait("its end", |status| status["phase"] == "Complete");
        self.wait_condition("Complete");
        self.check_all(&status, batch);
        let left = || (self.pods().len() <= slots(&status)).then_some(());
        poll("no more pods than slots", left, || {
            format!("{:?}", self.pods())
        });
        status
    }

    /// Ends a long job early: waits for ten more steps in the current world, suspends the job and checks
    /// the same invariants. The number of steps does not depend on the speed of the machine.
    pub fn settle(&self, batch: u64) -> Value {
        let samples = |status: &Value| status["progress"]["samples"].as_u64().unwrap_or(0);
        let before = samples(&self.status());
        self.wait("ten more steps", |status| {
            status["phase"] == "Running" && samples(status) >= before + 10 * batch
        });
        self.patch(json!({"suspend": true}));
        let status = self.wait("its suspension", |status| status["phase"] == "Suspended");
        self.check_all(&status, batch);
        self.pods_left(slots(&status));
        status
    }

    fn check_all(&self, status: &Value, batch: u64) {
        for change in status["history"].as_array().unwrap() {
            let proof = change["formula"].as_str().unwrap();
            // The norm test may have raised the batch; the formula then names the base batch.
            let kept = [format!("= {batch}"), format!("(base {batch})")];
            assert!(kept.iter().any(|end| proof.ends_with(end)), "{proof}");
        }
        self.check(status);
        if self.comparable {
            losses::check(&losses::of(&self.run()));
        }
        // The job has exactly one object of each kind.
        let others = "services,serviceaccounts,roles,rolebindings,networkpolicies,secrets";
        let others = kubectl(&["get", others, "-l", &self.selector(), "-o", "name"]);
        assert_eq!(others.lines().count(), 6, "{others}");
    }

    /// Checks that no generation committed a checkpoint beyond the start of the next generation, as an
    /// unfenced lost node would.
    pub fn one_lineage(&self, status: &Value) {
        let history = status["history"].as_array().unwrap();
        // One that did not begin was replaced by the next. A restored API server may have published two of its number.
        let has_begun = |entry: &&Value| {
            let directory = format!("gen-{}", entry["jobGeneration"]);
            let record = self.run().join(directory).join("record.json");
            let record = std::fs::read_to_string(record).unwrap_or_default();
            let record: Value = serde_json::from_str(&record).unwrap_or_default();
            record.is_object()
                && record["start"]["samples"].as_u64().unwrap_or(0) == entry["samples"]
        };
        let begun: Vec<&Value> = history.iter().filter(has_begun).collect();
        for pair in begun.windows(2) {
            let (old, began) = (
                &pair[0]["jobGeneration"],
                pair[1]["samples"].as_u64().unwrap(),
            );
            let commits = self.run().join(format!("gen-{old}"));
            for entry in std::fs::read_dir(&commits).into_iter().flatten() {
                let manifest_path = entry.unwrap().path().join("manifest.json");
                let Ok(text) = std::fs::read_to_string(&manifest_path) else {
                    continue;
                };
                let manifest: Value = serde_json::from_str(&text).unwrap();
                let samples = manifest["samples"]
                    .as_u64()
                    .expect("a checkpoint's samples");
                // All times are of this machine's clock.
                let time = |path: &Path| {
                    let modified = path.metadata().and_then(|file| file.modified());
                    modified.map_or_else(|error| error.to_string(), |time| format!("{time:?}"))
                };
                let next = format!("gen-{}/record.json", pair[1]["jobGeneration"]);
                assert!(
                    samples <= began,
                    "{}: {samples} in generation {old} (committed at {}), left at {began} (the next one's record is of {}): \
                     {:#}\n{:#}",
                    self.name,
                    time(&manifest_path),
                    time(&self.run().join(next)),
                    status["history"],
                    status["conditions"]
                );
            }
        }
    }

    fn selector(&self) -> String {
        format!("evenkeel.dev/job={}", self.name)
    }

    /// Waits until the job is deleted.
    pub fn wait_gone(&self) {
        let known = || try_kubectl(&["get", "tj", &self.name], "");
        let gone = || (!known().status.success()).then_some(());
        poll("its deletion", gone, || output_text(&known()));
    }

    /// Events of the job.
    fn events(&self) -> String {
        let about = format!("involvedObject.name={}", self.name);
        kubectl(&["get", "events", "--field-selector", &about])
    }

    /// Waits for an event of the job with this text, which follows the status, and returns all of them.
    pub fn wait_event(&self, text: &str) -> String {
        let events = || Some(self.events()).filter(|events| events.contains(text));
        poll(&format!("an event with {text}"), events, || self.events())
    }

    /// Checks the sample ledger on the volume.
    fn check(&self, status: &Value) {
        let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
            .args(["status", "--ledger", "-o", "json"])
            .arg(self.run())
            // It reads the data again, which may be in a bucket.
            .envs(s3_environment())
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", output_text(&output));
        let verdict: Value = serde_json::from_slice(&output.stdout).unwrap();
        // Of two checkpoints of one step the status may have the earlier one.
        assert_eq!(verdict["samples"], status["checkpoint"]["samples"]);
    }

    /// The volume, a directory of this machine.
    pub fn volume(&self) -> &Path {
        self.volume.path()
    }

    /// The run directory on the volume or in the bucket.
    pub fn run(&self) -> PathBuf {
        self.begun_run().expect("a run directory on the volume")
    }

    /// The run directory, once an agent has created it.
    pub fn begun_run(&self) -> Option<PathBuf> {
        let place = match self.in_bucket {
            true => self.volume.path().join("runs"),
            false => self.volume.path().to_owned(),
        };
        let entries = std::fs::read_dir(place).ok()?;
        let mut places = entries.map(|entry| entry.unwrap().path());
        places.find(|place| !place.ends_with("faults"))
    }

    /// PIDs of its pods' processes `evenkeel WHAT` on this machine.
    pub fn processes(&self, what: &str) -> Vec<String> {
        running(&format!("evenkeel {what} .*/{}-[0-9a-f-]*", self.name))
    }

    /// Uids of its pods, by name.
    pub fn pods(&self) -> BTreeMap<String, String> {
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

    /// Waits until the job has `count` pods and returns them.
    pub fn pods_left(&self, count: usize) -> std::collections::BTreeMap<String, String> {
        let left = || Some(self.pods()).filter(|pods| pods.len() == count);
        let instead = || format!("{:?}", self.pods());
        poll(&format!("{count} pods to be left"), left, instead)
    }

    /// Deletes the job and checks that none of its objects is left.
    pub fn delete_whole(self) {
        let selector = self.selector();
        drop(self);
        let kinds = "pods,services,serviceaccounts,roles,rolebindings,networkpolicies,secrets";
        let left = kubectl(&["get", kinds, "-l", &selector, "-o", "name"]);
        assert_eq!(left, "");
    }

    /// Waits for the start or the end of a scale down to two nodes.
    pub fn wait_rescale(&self) {
        self.wait("a rescale", |status| {
            status["phase"] != "Running" || status["nodes"] == 2
        });
    }

    /// Merges a patch into its spec.
    pub fn patch(&self, spec: Value) {
        let patch = json!({"spec": spec}).to_string();
        kubectl(&["patch", "tj", &self.name, "--type=merge", "-p", &patch]);
    }

    fn describe(&self) -> String {
        output_text(&try_kubectl(
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
        // Fails if nothing is mounted, which does not matter.
        let _ = Command::new("umount")
            .arg(self.volume.path())
            .stderr(std::process::Stdio::null())
            .status();
    }
}

/// PIDs of this machine's processes whose command lines match a pattern, including those in pods.
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

/// Restores the cluster after a scenario, also if it fails.
pub struct Restore(&'static str, Vec<String>);

/// Runs a command of `kubectl` or of the `kit` when it is dropped.
pub fn restored(by: &'static str, arguments: &[&str]) -> Restore {
    Restore(by, arguments.iter().map(|word| (*word).into()).collect())
}

impl Drop for Restore {
    fn drop(&mut self) {
        let arguments: Vec<&str> = self.1.iter().map(String::as_str).collect();
        match self.0 {
            "kubectl" => drop(try_kubectl(&arguments, "")),
            _ => kit(&arguments),
        }
    }
}

/// A node without a controller pod, so that a scenario can lose it while the controller runs.
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

/// Creates objects; panics with the error of the API server.
fn kubectl_apply(object: &Value) {
    let output = try_kubectl(&["apply", "-f", "-"], &object.to_string());
    assert!(output.status.success(), "{}", output_text(&output));
}

pub fn create(objects: &Value) {
    let output = try_create(objects);
    assert!(output.status.success(), "{}", output_text(&output));
}

/// Creates objects and returns the output of `kubectl`.
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
