//! Jobs of one tenant that must not change what another tenant's job holds or waits for.
//! `benches/tenants.py` runs every attack for an hour.

use std::process::{Command, Output};

use serde_json::{Value, json};

use super::refused::condition;
use super::support::{
    IMAGE, Job, Restore, create, kubectl, output_text, poll, recipe, restored, try_create,
    try_kubectl,
};

const STRANGER: &str = "stranger";

/// Creates the other tenant's namespace, which is deleted with its objects when dropped.
fn stranger() -> Restore {
    let gone = restored("kubectl", &["delete", "namespace", STRANGER]);
    create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": STRANGER}}));
    gone
}

/// A job of the other tenant that asks for 2 nodes.
fn job_of_stranger(name: &str, pod: &Value) -> Value {
    json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": name, "namespace": STRANGER},
        "spec": {
            "nodes": 2, "gpusPerNode": 2, "image": IMAGE, "trainer": {"device": "Cpu"},
            "recipe": {"inline": recipe(2_000_000).to_string()},
            "checkpoint": {"path": "/tmp"},
            "elasticity": {"capacity": "Request", "placementSeconds": 3600},
            "podTemplate": {"spec": pod},
        },
    })
}

fn create_job(name: &str, pod: Value) {
    create(&job_of_stranger(name, &pod));
}

/// Status of a job of the other tenant.
fn status_of_stranger(name: &str) -> Value {
    let text = kubectl(&["-n", STRANGER, "get", "tj", name, "-o", "json"]);
    let job: Value = serde_json::from_str(&text).unwrap();
    job["status"].clone()
}

/// Waits until a condition of a job of the other tenant is `status`, and returns its message.
fn wait_condition_of_stranger(name: &str, kind: &str, status: &str) -> String {
    let found = || {
        let found = condition(&status_of_stranger(name), kind);
        (found["status"] == status).then(|| found["message"].to_string())
    };
    poll(&format!("{kind} {status} of {name}"), found, || {
        format!("{:#}", status_of_stranger(name))
    })
}

/// Uid, restarts and priority class of each pod of the controller.
fn controllers() -> Vec<(String, u64, String)> {
    let listed = kubectl(&["-n", "evenkeel-system", "get", "pods", "-o", "json"]);
    let pods: Value = serde_json::from_str(&listed).unwrap();
    let pods = pods["items"].as_array().unwrap().iter();
    // A rollout of an earlier scenario may still end an older pod.
    let living = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    living
        .map(|pod| {
            let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
            (
                text(&pod["metadata"]["uid"]),
                restarts.as_u64().unwrap_or(0),
                text(&pod["spec"]["priorityClassName"]),
            )
        })
        .collect()
}

/// Waits for 20 more steps of a job in its first generation.
fn steps_on(job: &Job) {
    let step = |status: &Value| status["progress"]["step"].as_u64().unwrap_or(0);
    let before = step(&job.status());
    let status = job.wait("its steps", |status| step(status) > before + 20);
    assert_eq!(status["jobGeneration"]["record"]["number"], 1, "{status:#}");
    assert_eq!(status["phase"], "Running", "{status:#}");
}

/// Waits until a job of the other tenant has this many pods.
fn wait_pods(name: &str, count: usize) {
    let label = format!("evenkeel.dev/job={name}");
    let pods = || kubectl(&["-n", STRANGER, "get", "pods", "-l", &label, "-o", "name"]);
    let all = || (pods().lines().count() == count).then_some(());
    poll("the other tenant's pods", all, pods);
}

#[test]
fn pods_that_are_never_placed_take_nothing_from_a_running_job() {
    let job = Job::apply("holder", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let _gone = stranger();
    create_job("unscheduled", json!({"schedulerName": "absent"}));
    create_job("selective", json!({"nodeSelector": {"pool": "absent"}}));
    create_job("bound", json!({"nodeName": "node1"}));
    wait_pods("unscheduled", 2);
    wait_pods("selective", 2);
    // Every node's change reconciles the running job beside those pods.
    let _label = restored("kubectl", &["label", "node", "node1", "changed-"]);
    for change in 0..5 {
        let label = format!("changed=n{change}");
        kubectl(&["label", "--overwrite", "node", "node1", &label]);
        steps_on(&job);
    }
    job.settle(96);
}

#[test]
fn a_priority_class_takes_no_place_from_the_controller_or_a_running_job() {
    const POLICY: &str = "validatingadmissionpolicybinding/evenkeel.evenkeel-system";
    let before = controllers();
    for (_, _, class) in &before {
        assert_eq!(class, "system-cluster-critical");
    }
    let job = Job::apply("steady", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let _gone = stranger();
    let preempting = |priority: Value| {
        let mut pod = json!({"containers": [
            {"name": "trainer", "resources": {"requests": {"cpu": "64"}}}]});
        pod.as_object_mut()
            .unwrap()
            .extend(priority.as_object().unwrap().clone());
        try_create(&job_of_stranger("preempting", &pod))
    };
    for priority in [
        json!({"priorityClassName": "system-node-critical"}),
        json!({"priorityClassName": "system-cluster-critical"}),
        json!({"priority": 2_000_001_000}),
    ] {
        let refused = preempting(priority);
        let text = output_text(&refused);
        assert!(
            !refused.status.success() && text.contains("must not set a priority class"),
            "{text}"
        );
    }
    // A cluster without the policy.
    let actions = |action: &str| {
        format!(
            r#"[{{"op": "replace", "path": "/spec/validationActions", "value": ["{action}"]}}]"#
        )
    };
    let (audit, deny) = (actions("Audit"), actions("Deny"));
    let _policy = restored("kubectl", &["patch", POLICY, "--type=json", "-p", &deny]);
    kubectl(&["patch", POLICY, "--type=json", "-p", &audit]);
    let admitted = || {
        let created = preempting(json!({"priorityClassName": "system-node-critical"}));
        created.status.success().then_some(())
    };
    poll("a cluster without the policy", admitted, String::new);
    let message = wait_condition_of_stranger("preempting", "Planned", "False");
    assert!(
        message.contains("the priority class system-node-critical"),
        "{message}"
    );
    steps_on(&job);
    let pods = kubectl(&["-n", STRANGER, "get", "pods", "-o", "name"]);
    assert_eq!(pods, "");
    assert_eq!(controllers(), before);
    job.settle(96);
}

#[test]
fn a_forged_status_makes_its_job_unreadable_and_stops_no_other() {
    let before = controllers();
    let job = Job::apply("unforged", &recipe(2_000_000), json!({}));
    let generation = job.wait_training_on(3)["jobGeneration"].clone();
    let _gone = stranger();
    let mut huge = generation.clone();
    huge["record"]["members"][0]["ranks"] = json!(u32::MAX);
    let mut zeros = generation;
    for number in zeros["record"]["plan"]
        .as_object_mut()
        .unwrap()
        .values_mut()
    {
        if number.is_u64() {
            *number = json!(0);
        }
    }
    let forge = |name: &str, generation: &Value| {
        let status = json!({"status": {"jobGeneration": generation}}).to_string();
        let patch = [
            "patch",
            "tj",
            name,
            "--subresource=status",
            "--type=merge",
            "-p",
            &status,
        ];
        kubectl(&[&["-n", STRANGER][..], &patch].concat());
    };
    for (name, forged, expected) in [
        ("huge", huge, "4294967295"),
        ("zeros", zeros, "is 0, which no controller writes"),
    ] {
        create_job(name, json!({"nodeSelector": {"pool": "absent"}}));
        wait_condition_of_stranger(name, "Planned", "True");
        forge(name, &forged);
        let message = wait_condition_of_stranger(name, "Readable", "False");
        assert!(message.contains(expected), "{message}");
        steps_on(&job);
        forge(name, &Value::Null);
        wait_condition_of_stranger(name, "Readable", "True");
    }
    assert_eq!(controllers(), before);
    job.settle(96);
}

#[test]
fn a_job_without_quota_reserves_nothing() {
    let _gone = stranger();
    create(
        &json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {
        "name": "none", "namespace": STRANGER}, "spec": {"hard": {"pods": "0"}}}),
    );
    create_job("refused", json!({}));
    let conditions = || {
        let path = "-o=jsonpath={.status.conditions[?(@.type=='PodsReady')].reason}";
        kubectl(&["-n", STRANGER, "get", "tj", "refused", path])
    };
    let refused = || (conditions() == "Refused").then_some(());
    poll("the refusal", refused, conditions);
    let job = Job::apply("unhindered", &recipe(9600), json!({}));
    let status = job.finish(96);
    assert_eq!(status["history"].as_array().unwrap().len(), 1, "{status:#}");
}

/// What the chart renders for the other tenant's namespace alone, with the values of `tenants.yaml` and these.
fn protection(values: &[&str]) -> Output {
    let chart = concat!(env!("CARGO_MANIFEST_DIR"), "/charts/evenkeel");
    Command::new("helm")
        .args(["template", "tenants", chart, "--namespace", STRANGER])
        .args(["--values", &format!("{chart}/tenants.yaml")])
        .args(["--set", "namespaced=true"])
        .args(values.iter().flat_map(|value| ["--set", value]))
        .args(["--show-only", "templates/protection.yaml"])
        .output()
        .unwrap()
}

/// Its objects with this text.
fn objects(values: &[&str], with: &str) -> String {
    let rendered = protection(values);
    assert!(rendered.status.success(), "{}", output_text(&rendered));
    let text = String::from_utf8(rendered.stdout).unwrap();
    let objects = text.split("\n---\n").filter(|object| object.contains(with));
    objects.collect::<Vec<_>>().join("\n---\n")
}

#[test]
fn the_chart_lists_no_class_of_kubernetes() {
    let rendered = protection(&["admissionPolicy.priorityClasses={system-node-critical}"]);
    let text = output_text(&rendered);
    assert!(!rendered.status.success());
    assert!(
        text.contains("would let a job preempt the controller"),
        "{text}"
    );
}

#[test]
fn tenants_have_a_quota_of_jobs() {
    let _gone = stranger();
    let values = ["tenants.namespaces={stranger}", "tenants.jobs=1"];
    let quota = objects(&values, "count/trainingjobs.evenkeel.dev");
    let created = try_kubectl(&["create", "-f", "-"], &quota);
    assert!(created.status.success(), "{}", output_text(&created));
    let used = || {
        let path = r"-o=jsonpath={.items[*].status.used.count/trainingjobs\.evenkeel\.dev}";
        kubectl(&["-n", STRANGER, "get", "resourcequotas", path])
    };
    poll("the count", || (used() == "0").then_some(()), used);
    let small = |name: &str| {
        json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": name, "namespace": STRANGER},
            "spec": {"nodes": 1, "suspend": true, "image": IMAGE, "recipe": {"inline": "a: 1"},
                "checkpoint": {"path": "/tmp"}},
        })
    };
    create(&small("first"));
    let second = try_kubectl(&["create", "-f", "-"], &small("second").to_string());
    let text = output_text(&second);
    assert!(!second.status.success());
    assert!(text.contains("exceeded quota"), "{text}");
}

#[test]
fn a_tenant_names_only_what_they_may_read() {
    let _gone = stranger();
    let policies = objects(&[], "ValidatingAdmissionPolicy");
    let _policies = restored(
        "kubectl",
        &[
            "delete",
            "validatingadmissionpolicies,validatingadmissionpolicybindings",
            "tenants-evenkeel.stranger",
        ],
    );
    assert!(
        try_kubectl(&["create", "-f", "-"], &policies)
            .status
            .success()
    );
    let rules = |rules: Value| {
        json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
            "metadata": {"name": "tenant", "namespace": STRANGER}, "rules": rules})
    };
    create(&rules(json!([
        {"apiGroups": ["evenkeel.dev"], "resources": ["trainingjobs"], "verbs": ["*"]},
        {"apiGroups": [""], "resources": ["configmaps", "secrets"], "resourceNames": ["own"], "verbs": ["get"]},
    ])));
    create(
        &json!({"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding",
        "metadata": {"name": "tenant", "namespace": STRANGER},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "tenant"},
        "subjects": [{"kind": "User", "name": "alice", "apiGroup": "rbac.authorization.k8s.io"}]}),
    );
    let answer = |more: &Value| {
        let mut spec = json!({"nodes": 1, "image": "i", "recipe": {"inline": "a: 1"}, "checkpoint": {"claim": "c"}});
        for (key, value) in more.as_object().unwrap() {
            spec[key] = value.clone();
        }
        let job = json!({"apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": "hers", "namespace": STRANGER}, "spec": spec});
        let dry = ["create", "--as=alice", "--dry-run=server", "-f", "-"];
        output_text(&try_kubectl(&dry, &job.to_string()))
    };
    let pod = |spec: Value| json!({"podTemplate": {"spec": spec}});
    let volume = |source: Value| {
        let mut volume = json!({"name": "a"});
        volume
            .as_object_mut()
            .unwrap()
            .extend(source.as_object().unwrap().clone());
        pod(json!({"volumes": [volume]}))
    };
    let env = |kind: &str, name: &str| json!({"env": [{"name": "A", "valueFrom": {kind: {"name": name, "key": "k"}}}]});
    let secret = volume(json!({"secret": {"secretName": "other"}}));
    let refused = || answer(&secret).contains("only Secrets").then_some(());
    poll("the policy", refused, || answer(&secret));
    for (more, expected) in [
        (json!({}), "created"),
        (volume(json!({"secret": {"secretName": "own"}})), "created"),
        (volume(json!({"configMap": {"name": "own"}})), "created"),
        (
            volume(json!({"persistentVolumeClaim": {"claimName": "any"}})),
            "created",
        ),
        (
            json!({"trainer": {"env": [{"name": "A", "value": "b"}]}}),
            "created",
        ),
        (json!({"trainer": env("secretKeyRef", "own")}), "created"),
        (json!({"recipe": {"configMap": {"name": "own"}}}), "created"),
        (
            volume(json!({"projected": {"sources": [{"secret": {"name": "other"}}]}})),
            "only Secrets",
        ),
        (
            json!({"trainer": env("secretKeyRef", "other")}),
            "only Secrets",
        ),
        (
            json!({"trainer": {"envFrom": [{"secretRef": {"name": "other"}}]}}),
            "only Secrets",
        ),
        (
            pod(json!({"imagePullSecrets": [{"name": "other"}]})),
            "only Secrets",
        ),
        (
            pod(
                json!({"containers": [{"name": "trainer", "envFrom": [{"secretRef": {"name": "other"}}]}]}),
            ),
            "only Secrets",
        ),
        (
            pod(
                json!({"initContainers": [{"name": "i", "env": env("secretKeyRef", "other")["env"]}]}),
            ),
            "only Secrets",
        ),
        (
            volume(json!({"configMap": {"name": "other"}})),
            "only ConfigMaps",
        ),
        (
            json!({"trainer": env("configMapKeyRef", "other")}),
            "only ConfigMaps",
        ),
        (
            json!({"recipe": {"configMap": {"name": "other"}}}),
            "only ConfigMaps",
        ),
        (
            json!({"code": {"configMap": "other", "sha256": "0".repeat(64)}}),
            "only ConfigMaps",
        ),
        (
            pod(json!({"serviceAccountName": "default"})),
            "only a ServiceAccount",
        ),
        (
            pod(json!({"serviceAccount": "default"})),
            "only a ServiceAccount",
        ),
        (
            volume(json!({"csi": {"driver": "d", "nodePublishSecretRef": {"name": "own"}}})),
            "name Secrets themselves",
        ),
        (
            volume(json!({"rbd": {"image": "i", "monitors": ["m"]}})),
            "name Secrets themselves",
        ),
    ] {
        let said = answer(&more);
        assert!(said.contains(expected), "{more}: {said}");
    }
}
