//! Objects that a job does not own: whatever their names and labels, the controller leaves them alone.

use serde_json::{Value, json};

use super::support::{Job, Restore, create, kubectl, poll, recipe, restored};

const KINDS: [&str; 5] = [
    "NetworkPolicy",
    "Service",
    "ServiceAccount",
    "Role",
    "RoleBinding",
];

/// One object of every companion kind with this name. The NetworkPolicy isolates the pods of a database.
fn victims(name: &str) -> Vec<Value> {
    let metadata = json!({"name": name, "labels": {"victim": "true"}});
    let database = json!({"matchLabels": {"app": "database"}});
    vec![
        json!({"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": metadata,
            "spec": {"podSelector": database, "policyTypes": ["Ingress"]}}),
        json!({"apiVersion": "v1", "kind": "Service", "metadata": metadata,
            "spec": {"selector": {"app": "database"}, "ports": [{"port": 5432}]}}),
        json!({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata,
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}]}),
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
            "metadata": metadata,
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
            "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": "default"}]}),
    ]
}

/// A pod of a user that sleeps, with labels and `devices` GPUs.
fn sleeping_pod(name: &str, labels: &Value, devices: u32) -> Value {
    json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": labels}, "spec": {
    "terminationGracePeriodSeconds": 0,
    "securityContext": {"runAsNonRoot": true, "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"}},
    "containers": [{
        "name": "sleep", "image": "evenkeel.test/busybox:1",
        "command": ["/bin/busybox", "sleep", "86424"],
        "resources": {"limits": {"nvidia.com/gpu": devices.to_string()}},
        "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
    }]}})
}

fn wait_ready(pod: &str) {
    let pod = format!("pod/{pod}");
    kubectl(&["wait", "--for=condition=Ready", &pod, "--timeout=60s"]);
}

/// Metadata and spec of an object, without its status.
fn object(kind: &str, name: &str) -> Value {
    let text = kubectl(&["get", kind, name, "-o", "json"]);
    let mut object: Value = serde_json::from_str(&text).unwrap();
    let fields = object.as_object_mut().unwrap();
    fields.remove("status");
    if kind == "Pod" {
        // They count the kubelet's writes of the status.
        let metadata = fields["metadata"].as_object_mut().unwrap();
        metadata.remove("resourceVersion");
        metadata.remove("generation");
    }
    object
}

/// Deletes the victims of a scenario, also if it fails.
fn deleted(name: &'static str) -> Vec<Restore> {
    let delete = |kind| restored("kubectl", &["delete", kind, name, "--ignore-not-found"]);
    KINDS.into_iter().map(delete).collect()
}

/// The condition `PodsReady`, if its reason is `NameTaken`.
fn name_taken(status: &Value) -> Option<Value> {
    let mut conditions = status["conditions"].as_array().into_iter().flatten();
    let ready = conditions.find(|condition| condition["type"] == "PodsReady")?;
    (ready["reason"] == "NameTaken").then(|| ready.clone())
}

#[test]
fn objects_with_the_name_of_the_job_are_left_alone() {
    let names = ["namesake", "namesake-agent"];
    let _deleted = names.map(deleted);
    for name in names {
        victims(name).iter().for_each(create);
    }
    let all = || names.map(|name| KINDS.map(|kind| object(kind, name)));
    let before = all();
    let job = Job::apply("namesake", &recipe(4800), json!({}));
    job.finish(96);
    assert_eq!(all(), before);
    job.delete_whole();
    assert_eq!(all(), before);
}

#[test]
fn taken_names_are_reported_and_the_job_trains_once_they_are_free() {
    const NAME: &str = "evenkeel-squat";
    const POD: &str = "squat-0-1";
    let _deleted = deleted(NAME);
    let _pod = restored("kubectl", &["delete", "pod", POD, "--ignore-not-found"]);
    victims(NAME).iter().for_each(create);
    create(&sleeping_pod(POD, &json!({}), 0));
    wait_ready(POD);
    let mut taken = vec![("Pod", POD)];
    taken.extend(KINDS.map(|kind| (kind, NAME)));
    let all = |taken: &[(&str, &str)]| -> Vec<Value> {
        taken
            .iter()
            .map(|(kind, name)| object(kind, name))
            .collect()
    };
    let before = all(&taken);
    let job = Job::apply("squat", &recipe(4800), json!({}));
    let status = job.wait("the condition", |status| name_taken(status).is_some());
    assert_eq!(name_taken(&status).unwrap()["status"], "False");
    let events = job.wait_event("NameTaken");
    assert!(
        events.contains("does not belong to this TrainingJob"),
        "{events}"
    );
    assert!(job.pods().is_empty());
    // The deletion of the job deletes none of them.
    kubectl(&["delete", "tj", "squat", "--wait=true"]);
    assert_eq!(all(&taken), before);
    // The next job of this name reports one after the other until all names are free.
    let job = job.start(&recipe(4800), json!({}));
    while !taken.is_empty() {
        let named = |status: &Value| {
            let message = name_taken(status)?["message"].as_str()?.to_owned();
            let starts =
                |(kind, name): &(&str, &str)| message.starts_with(&format!("{kind} `{name}`"));
            taken.iter().position(starts)
        };
        let status = job.wait("the next condition", |status| named(status).is_some());
        let first = named(&status).unwrap();
        for (kind, name) in &taken {
            let kept = object(kind, name);
            assert!(before.contains(&kept), "{kept:#}");
        }
        let (kind, name) = taken.remove(first);
        kubectl(&["delete", kind, name]);
    }
    job.finish(96);
    job.delete_whole();
}

#[test]
fn a_users_pod_with_the_labels_of_a_job_only_holds_its_devices() {
    const POD: &str = "lure-9-1";
    let labels = json!({
        "evenkeel.dev/job": "lure", "evenkeel.dev/slot": "0", "evenkeel.dev/template": "0",
        "app.kubernetes.io/name": "evenkeel-trainer", "app.kubernetes.io/managed-by": "evenkeel",
    });
    let _pod = restored("kubectl", &["delete", "pod", POD, "--ignore-not-found"]);
    create(&sleeping_pod(POD, &labels, 2));
    wait_ready(POD);
    let pod = object("Pod", POD);
    let job = Job::apply("lure", &recipe(2_000_000), json!({}));
    job.wait_training_on(2);
    job.patch(json!({"suspend": true}));
    job.wait("its suspension", |status| status["phase"] == "Suspended");
    let rest = || Some(job.pods()).filter(|pods| pods.len() == 1);
    poll("its pods to end", rest, || format!("{:?}", job.pods()));
    assert_eq!(object("Pod", POD), pod);
    kubectl(&["delete", "pod", POD]);
    job.patch(json!({"suspend": false}));
    job.wait_training_on(3);
    job.settle(96);
}

#[test]
fn deleted_companions_come_back() {
    let job = Job::apply("companions", &recipe(200_000), json!({"nodes": 2}));
    job.wait_training_on(2);
    let selector = "evenkeel.dev/job=companions";
    let kinds = "services,serviceaccounts,roles,rolebindings,networkpolicies";
    let uids = || {
        let uid = "jsonpath={.items[*].metadata.uid}";
        let text = kubectl(&["get", kinds, "-l", selector, "-o", uid]);
        text.split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let before = uids();
    assert_eq!(before.len(), 5);
    // The controller, which may not watch Secrets, applies it again with the others.
    kubectl(&["delete", "secrets", "-l", selector]);
    kubectl(&["delete", kinds, "-l", selector]);
    let new =
        || Some(uids()).filter(|now| now.len() == 5 && now.iter().all(|uid| !before.contains(uid)));
    poll("other companions", new, || format!("{:?}", uids()));
    let secrets = || kubectl(&["get", "secrets", "-l", selector, "-o", "name"]);
    let secret = || (!secrets().is_empty()).then_some(());
    poll("another Secret", secret, String::new);
    // A pod that needs them all.
    job.patch(json!({"nodes": 3}));
    job.wait_training_on(3);
    job.settle(96);
}
