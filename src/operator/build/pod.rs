//! The pod of one slot. It contains nothing specific to a generation: the agent reads that from the
//! TrainingJob's status, so a pod serves many generations.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{
    Container, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec, PodTemplateSpec,
};
use kube::ResourceExt;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64;

use super::{
    AGENT_PORT, JOB_LABEL, METRICS_PORT, PROOF_LABEL, SLOT_LABEL, TEMPLATE_LABEL, companion,
    metadata, overlay,
};
use crate::api::status::Slot;
use crate::api::{CODE_KEY, LogFormat, TrainingJob};
use crate::inventory::kubernetes::ResourceRequest;
use crate::lifecycle::{CheckpointRef, authentication};

/// Where pods have the job's key.
const KEY_MOUNT: &str = "/run/evenkeel";
/// Where pods have the code: its archive in a ConfigMap, and its files.
const CODE_ARCHIVE: &str = "/run/evenkeel-code";
const CODE_DIRECTORY: &str = "/code";
/// Name of the trainer's container.
pub const TRAINER: &str = "trainer";
/// Default user and group ID of the pods.
const USER: i64 = 65532;
/// Termination time for the agent, in addition to the ranks' time to commit.
const AGENT_GRACE_SECONDS: u32 = 15;

/// Builds the pod of a slot; fails if `podTemplate` does not give a valid pod.
///
/// `own` is the controller's image. The image of an external trainer need not contain this program:
/// an init container copies it from the controller's image.
pub fn pod(job: &TrainingJob, slot: Slot, own: Option<&str>) -> Result<Pod, serde_json::Error> {
    let name = slot.pod(&job.name_any());
    let mut spec = spec(job, &name);
    if let Some(own) = own.filter(|_| !job.spec.trainer.command.is_empty()) {
        add_init_container(&mut spec, own);
    }
    let mut pod = with_template(job, name, spec)?;
    exclude_nodes(job, pod.spec.get_or_insert_default());
    let labels = pod.metadata.labels.get_or_insert_default();
    labels.insert(SLOT_LABEL.into(), slot.number.to_string());
    labels.insert(TEMPLATE_LABEL.into(), template_of(job));
    Ok(pod)
}

/// A pod of the job with this spec, into which `podTemplate` is merged.
fn with_template(job: &TrainingJob, name: String, spec: Value) -> Result<Pod, serde_json::Error> {
    let mut template = json!({ "spec": spec });
    if let Some(over) = &job.spec.pod_template {
        overlay::merge(&mut template, over);
    }
    let template: PodTemplateSpec = serde_json::from_value(template)?;
    let mut metadata = metadata(job, name);
    let theirs = template.metadata.unwrap_or_default();
    metadata.annotations = theirs.annotations;
    let labels = metadata.labels.get_or_insert_default();
    for (key, value) in theirs.labels.unwrap_or_default() {
        labels.entry(key).or_insert(value);
    }
    labels.insert("app.kubernetes.io/name".into(), "evenkeel-trainer".into());
    Ok(Pod {
        metadata,
        spec: template.spec,
        status: None,
    })
}

/// Name of the pod that proves a job's ledger. No name of a slot's pod has the word.
pub fn proof_name(job: &TrainingJob, number: u32) -> String {
    format!("{}-ledger-{number}", job.name_any())
}

/// Builds the pod that proves the ledger up to a checkpoint: the trainer's container with another command, without devices
/// and alone, so that its end is that of the pod.
pub fn proof_pod(
    job: &TrainingJob,
    name: String,
    checkpoint: &CheckpointRef,
) -> Result<Pod, serde_json::Error> {
    let checkpoint = serde_json::to_string(checkpoint)?;
    let spec = spec(job, &name);
    let made = with_template(job, name, spec)?;
    let mut pod = made.spec.unwrap_or_default();
    pod.containers.retain(|container| container.name == TRAINER);
    for container in &mut pod.containers {
        let command = ["evenkeel", "prove"].map(str::to_owned);
        let run = run_directory(job);
        let args = ["--run", &run, "--checkpoint", &checkpoint].map(str::to_owned);
        let resources = container.resources.get_or_insert_default();
        for amounts in [&mut resources.limits, &mut resources.requests] {
            amounts
                .get_or_insert_default()
                .remove(&job.spec.resource_name);
        }
        *container = Container {
            command: Some(command.into()),
            args: Some(args.into()),
            ports: None,
            startup_probe: None,
            liveness_probe: None,
            readiness_probe: None,
            lifecycle: None,
            ..container.clone()
        };
    }
    (pod.hostname, pod.subdomain) = (None, None);
    let mut metadata = made.metadata;
    let labels = metadata.labels.get_or_insert_default();
    labels.insert(PROOF_LABEL.into(), job.spec.prove_ledger.to_string());
    Ok(Pod {
        metadata,
        spec: Some(pod),
        status: None,
    })
}

/// Keeps the pod from the job's excluded nodes, in every alternative of its node affinity.
fn exclude_nodes(job: &TrainingJob, spec: &mut PodSpec) {
    let excluded = job.status.iter().flat_map(|status| &status.excluded_nodes);
    let excluded: Vec<NodeSelectorRequirement> = excluded
        .map(|node| NodeSelectorRequirement {
            key: "metadata.name".to_owned(),
            operator: "NotIn".to_owned(),
            values: Some(vec![node.clone()]),
        })
        .collect();
    if excluded.is_empty() {
        return;
    }
    let affinity = spec.affinity.get_or_insert_default();
    let affinity = affinity.node_affinity.get_or_insert_default();
    let required = &mut affinity.required_during_scheduling_ignored_during_execution;
    let terms = &mut required.get_or_insert_default().node_selector_terms;
    if terms.is_empty() {
        terms.push(NodeSelectorTerm::default());
    }
    for term in terms {
        let fields = term.match_fields.get_or_insert_default();
        fields.extend(excluded.iter().cloned());
    }
}

/// Adds an init container that copies this program into the pod.
fn add_init_container(spec: &mut Value, own: &str) {
    const TOOLS: &str = "/evenkeel";
    let mount = json!({"name": "evenkeel", "mountPath": TOOLS});
    let push = |list: &mut Value, item: Value| {
        if let Value::Array(items) = list {
            items.push(item);
        }
    };
    push(
        &mut spec["volumes"],
        json!({"name": "evenkeel", "emptyDir": {}}),
    );
    push(&mut spec["containers"][0]["volumeMounts"], mount.clone());
    spec["containers"][0]["command"] = json!([format!("{TOOLS}/evenkeel"), "agent"]);
    spec["initContainers"] = json!([{
        "name": "evenkeel",
        "image": own,
        "command": ["evenkeel", "install", TOOLS],
        "volumeMounts": [mount],
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "capabilities": {"drop": ["ALL"]},
        },
    }]);
}

/// Whether a pod was made from another image, `podTemplate` or trainer than the job has now. `template`: the job's
/// [`template_of`].
pub fn is_outdated(pod: &Pod, template: &str) -> bool {
    let label = pod.labels().get(TEMPLATE_LABEL);
    label.is_some_and(|label| label != template)
}

/// Hash of the spec fields that every pod contains. The pod itself is not hashed, so a newer
/// controller that builds different pods does not replace running ones.
pub fn template_of(job: &TrainingJob) -> String {
    let spec = &job.spec;
    let mut parts = vec![
        json!(spec.image),
        json!(spec.pod_template),
        json!(spec.trainer),
    ];
    // Jobs without it keep the hash of earlier versions.
    parts.extend(spec.code.iter().map(|code| json!(code)));
    let parts = Value::from(parts);
    format!("{:016x}", xxh3_64(parts.to_string().as_bytes()))
}

/// Resource request of the job's pods, with the placement constraints of `podTemplate`. A part that is not
/// valid counts as absent: the API server refuses such pods.
pub fn resource_request(job: &TrainingJob) -> ResourceRequest {
    let spec = job.spec.pod_template.as_ref().and_then(|t| t.get("spec"));
    fn part<T: DeserializeOwned>(spec: Option<&Value>, pointer: &str) -> Option<T> {
        T::deserialize(spec?.pointer(pointer)?).ok()
    }
    ResourceRequest {
        resource: job.spec.resource_name.clone(),
        per_slot: job.spec.gpus_per_node.into(),
        node_selector: part(spec, "/nodeSelector").unwrap_or_default(),
        node_affinity: part(
            spec,
            "/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution",
        ),
        tolerations: part(spec, "/tolerations").unwrap_or_default(),
    }
}

fn spec(job: &TrainingJob, name: &str) -> Value {
    let mount = job.spec.checkpoint.mount();
    let mut volumes = vec![
        json!({"name": "shm", "emptyDir": {"medium": "Memory"}}),
        json!({"name": "tmp", "emptyDir": {}}),
    ];
    let mut mounts = vec![
        json!({"name": "shm", "mountPath": "/dev/shm"}),
        json!({"name": "tmp", "mountPath": "/tmp"}),
    ];
    let key = authentication::secret_name(&job.uid().unwrap_or_default());
    volumes.push(json!({"name": "key", "secret": {"secretName": key}}));
    mounts.push(json!({"name": "key", "mountPath": KEY_MOUNT, "readOnly": true}));
    if let Some(claim) = &job.spec.checkpoint.claim {
        volumes.push(json!({
            "name": "checkpoints", "persistentVolumeClaim": {"claimName": claim}
        }));
        mounts.push(json!({"name": "checkpoints", "mountPath": mount}));
    }
    if job.spec.checkpoint.bucket().is_some() {
        volumes.push(json!({"name": "checkpoints", "emptyDir": {}}));
        mounts.push(json!({"name": "checkpoints", "mountPath": mount}));
    }
    if let Some(code) = &job.spec.code {
        volumes.push(json!({"name": "code", "emptyDir": {}}));
        mounts.push(json!({"name": "code", "mountPath": CODE_DIRECTORY}));
        if let Some(name) = &code.config_map {
            volumes.push(json!({"name": "code-archive", "configMap": {"name": name}}));
            let mount =
                json!({"name": "code-archive", "mountPath": CODE_ARCHIVE, "readOnly": true});
            mounts.push(mount);
        }
    }
    let gpus = job.spec.gpus_per_node.to_string();
    let mut arguments = vec![
        "--run".into(),
        run_directory(job),
        "--devices".into(),
        gpus.clone(),
    ];
    if job.spec.trainer.log_format == LogFormat::Json {
        arguments.push("--log-format=json".into());
    }
    let devices = BTreeMap::from([(&job.spec.resource_name, gpus)]);
    json!({
        "hostname": name,
        "subdomain": companion(job),
        "restartPolicy": "Never",
        "serviceAccountName": companion(job),
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": job.spec.elasticity.drain_seconds.saturating_add(AGENT_GRACE_SECONDS),
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "topologySpreadConstraints": [{
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": {JOB_LABEL: job.name_any()}},
        }],
        "containers": [{
            "name": TRAINER,
            "image": job.spec.image,
            "command": ["evenkeel", "agent"],
            "args": arguments,
            "env": environment(job),
            "envFrom": Some(&job.spec.trainer.env_from).filter(|sources| !sources.is_empty()),
            "workingDir": job.spec.code.as_ref().map(|_| CODE_DIRECTORY),
            "ports": [
                {"name": "agent", "containerPort": AGENT_PORT},
                {"name": "metrics", "containerPort": METRICS_PORT},
            ],
            "resources": {"limits": devices},
            "securityContext": {
                "allowPrivilegeEscalation": false,
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": mounts,
            "startupProbe": {
                "httpGet": {"path": "/healthz", "port": "metrics"},
                "periodSeconds": 1, "failureThreshold": 60,
            },
            "livenessProbe": {
                "httpGet": {"path": "/healthz", "port": "metrics"},
                "periodSeconds": 10, "failureThreshold": 6, "timeoutSeconds": 5,
            },
        }],
        "volumes": volumes,
    })
}

/// The run directory in every pod. It contains the uid: a recreated job of the same name is another
/// run.
pub fn run_directory(job: &TrainingJob) -> String {
    format!("{}/{}", job.spec.checkpoint.mount(), run_name(job))
}

fn run_name(job: &TrainingJob) -> String {
    format!("{}-{}", job.name_any(), job.uid().unwrap_or_default())
}

/// Environment: the identity of the agent, NCCL settings for the pod network, and the user's
/// variables.
fn environment(job: &TrainingJob) -> Vec<Value> {
    let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let mut env = vec![
        field("POD_NAME", "metadata.name"),
        field("POD_UID", "metadata.uid"),
        field("POD_NAMESPACE", "metadata.namespace"),
        field("POD_IP", "status.podIP"),
        json!({"name": "EVENKEEL_JOB", "value": job.name_any()}),
        json!({"name": "EVENKEEL_JOB_UID", "value": job.uid().unwrap_or_default()}),
        json!({"name": "EVENKEEL_PORT", "value": AGENT_PORT.to_string()}),
        json!({"name": "EVENKEEL_METRICS_PORT", "value": METRICS_PORT.to_string()}),
        json!({"name": "EVENKEEL_KEY_FILE", "value": format!("{KEY_MOUNT}/{}", authentication::KEY_FILE)}),
        json!({"name": "NCCL_SOCKET_IFNAME", "value": "eth0"}),
        json!({"name": "TORCH_NCCL_ASYNC_ERROR_HANDLING", "value": "1"}),
        // NVML and `nvidia-smi` beside CUDA.
        json!({"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"}),
        json!({"name": "TMPDIR", "value": "/tmp"}),
    ];
    if let Some(bucket) = job.spec.checkpoint.bucket() {
        let url = format!("{}/{}", bucket.trim_end_matches('/'), run_name(job));
        env.push(json!({"name": "EVENKEEL_BUCKET", "value": url}));
    }
    if let Some(code) = &job.spec.code {
        let archive = format!("{CODE_ARCHIVE}/{CODE_KEY}");
        let place = code.url.as_deref().unwrap_or(&archive);
        env.push(json!({"name": "EVENKEEL_CODE", "value": place}));
        env.push(json!({"name": "EVENKEEL_CODE_SHA256", "value": code.sha256}));
        env.push(json!({"name": "EVENKEEL_CODE_DIRECTORY", "value": CODE_DIRECTORY}));
    }
    if let Some(setup) = &job.spec.trainer.setup {
        env.push(json!({"name": "EVENKEEL_SETUP", "value": setup}));
        if let Some(seconds) = job.spec.trainer.setup_seconds {
            let value = seconds.to_string();
            env.push(json!({"name": "EVENKEEL_SETUP_SECONDS", "value": value}));
        }
    }
    let theirs = job.spec.trainer.env.iter();
    env.extend(theirs.map(|variable| match &variable.value_from {
        Some(source) => json!({"name": variable.name, "valueFrom": source}),
        None => json!({"name": variable.name, "value": variable.value}),
    }));
    env
}
