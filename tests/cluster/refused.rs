//! Invalid jobs are refused with a message and get no objects.

use std::process::Command;

use serde_json::{Value, json};

use super::support::{
    Job, create, kubectl, output_text, poll, recipe, restored, signal, try_create, try_kubectl,
};

/// Condition of a type in a status.
pub fn condition(status: &Value, kind: &str) -> Value {
    let mut conditions = status["conditions"].as_array().into_iter().flatten();
    let found = conditions.find(|condition| condition["type"] == kind);
    found.cloned().unwrap_or_default()
}

#[test]
fn a_recipe_without_a_feasible_world_makes_no_pod() {
    let mut recipe = recipe(4800);
    recipe["spec"]["batch"]["global"] = json!(97);
    let job = Job::apply("prime", &recipe, json!({}));
    let status = job.wait("a refusal", |status| status["phase"] == "Pending");
    let planned = &status["conditions"][0];
    assert_eq!(planned["type"], "Planned");
    assert_eq!(planned["status"], "False");
    assert!(
        planned["message"].as_str().unwrap().contains("97"),
        "{planned}"
    );
    assert!(job.pods().is_empty());
    let described = || kubectl(&["describe", "tj", "prime"]);
    let event = || {
        let text = described();
        let (_, events) = text.split_once("Events:")?;
        (events.contains("Warning") && events.contains("97")).then_some(())
    };
    poll("an event in its description", event, described);
}

#[test]
fn a_command_with_another_batch_makes_no_pod() {
    let launcher = json!(["mpirun", "train.py", "{per_device_batch_size}"]);
    let job = Job::apply(
        "launcher",
        &recipe(4800),
        json!({"trainer": {"command": launcher}}),
    );
    let status = job.wait("a refusal", |status| status["phase"] == "Pending");
    let message = status["conditions"][0]["message"].as_str().unwrap();
    assert!(
        message.contains("external-trainer") && message.contains("`mpirun` starts a process"),
        "{message}"
    );
    assert!(job.pods().is_empty());
}

#[test]
fn a_recipe_of_900_kib_trains_and_cannot_change_once_it_is_planned() {
    let own = recipe(4800);
    let comment = format!("\n# {}", "x".repeat(900 << 10));
    let inline = own.to_string() + &comment;
    let job = Job::apply("large", &own, json!({"recipe": {"inline": inline}}));
    let status = job.wait("its plan", |status| status["recipe"]["hash"].is_string());
    assert_eq!(status["recipe"]["text"], Value::Null);
    for (field, value) in [
        ("recipe", json!({"inline": own.to_string()})),
        ("overrides", json!(["budget.samples=9600"])),
    ] {
        let edit = json!({"spec": {field: value}}).to_string();
        let edit = ["patch", "tj", "large", "--type=merge", "-p", &edit];
        let refused = try_kubectl(&edit, "");
        let expected = format!("spec.{field} is immutable once the job is planned");
        assert!(
            output_text(&refused).contains(&expected),
            "{}",
            output_text(&refused)
        );
    }
    job.finish(96);
}

#[test]
fn a_recipe_in_a_config_map_of_900_kib_is_refused_with_the_way_out() {
    let _gone = restored("kubectl", &["delete", "configmap", "wordy"]);
    let own = recipe(4800).to_string();
    let text = own.clone() + &"\n".repeat(900_000);
    create(
        &json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "wordy"},
               "data": {"recipe.yaml": text}}),
    );
    let job = Job::apply(
        "wordy",
        &recipe(4800),
        json!({"recipe": {"inline": null, "configMap": {"name": "wordy"}}}),
    );
    let status = job.wait("the refusal", |status| {
        condition(status, "Planned")["status"] == "False"
    });
    let message = condition(&status, "Planned")["message"].to_string();
    assert!(
        message.contains("the status keeps at most 64 KiB: put the texts into spec.recipe"),
        "{message}"
    );
    assert!(job.pods().is_empty());
    job.wait_event("PlanRefused");
    job.patch(json!({"recipe": {"inline": own, "configMap": null}}));
    job.finish(96);
}

/// A job's spec with this pod spec in its template.
fn pod_template(spec: Value) -> Value {
    json!({"podTemplate": {"spec": spec}})
}

/// As [`pod_template`], with this security context of the trainer's container.
fn container(context: Value) -> Value {
    pod_template(json!({"containers": [{"name": "trainer", "securityContext": context}]}))
}

#[test]
fn the_api_server_refuses_contradictory_specs() {
    let inline = json!({"inline": "a: 1"});
    let both = json!({"inline": "a: 1", "configMap": {"name": "x"}});
    for (name, nodes, recipe, more, expected) in [
        (
            "both",
            1,
            &both,
            json!({}),
            "recipe.inline and recipe.configMap exclude each other",
        ),
        (
            "llama-3.1",
            1,
            &inline,
            json!({}),
            "letters, digits and dashes",
        ),
        ("none", 0, &inline, json!({}), "greater than or equal to 1"),
        (
            "late",
            1,
            &inline,
            json!({"ttlSecondsAfterFinished": 5_000_000_000_u64}),
            "ttlSecondsAfterFinished",
        ),
        (
            "bounds",
            1,
            &inline,
            json!({"elasticity": {"minNodes": 2}}),
            "minNodes is more than nodes",
        ),
        // The chart's ValidatingAdmissionPolicy.
        (
            "network",
            1,
            &inline,
            pod_template(json!({"hostNetwork": true})),
            "spec.podTemplate must not set hostNetwork",
        ),
        (
            "priority",
            1,
            &inline,
            pod_template(json!({"priorityClassName": "system-node-critical"})),
            "spec.podTemplate must not set a priority class",
        ),
        (
            "volume",
            1,
            &inline,
            pod_template(json!({"volumes": [{"name": "v", "hostPath": {"path": "/"}}]})),
            "spec.podTemplate must not mount a hostPath",
        ),
        (
            "privileged",
            1,
            &inline,
            container(json!({"privileged": true})),
            "spec.podTemplate must not have a privileged container",
        ),
        (
            "capability",
            1,
            &inline,
            container(json!({"capabilities": {"add": ["IPC_LOCK", "SYS_ADMIN"]}})),
            "spec.podTemplate must not add capabilities other than IPC_LOCK",
        ),
        (
            "host-process",
            1,
            &inline,
            container(json!({"windowsOptions": {"hostProcess": true}})),
            "spec.podTemplate must not set hostProcess",
        ),
        (
            "proc",
            1,
            &inline,
            container(json!({"procMount": "Unmasked"})),
            "spec.podTemplate must not set procMount",
        ),
        (
            "seccomp",
            1,
            &inline,
            pod_template(json!({"securityContext": {"seccompProfile": {"type": "Unconfined"}}})),
            "spec.podTemplate must not disable seccomp",
        ),
        (
            "app-armor",
            1,
            &inline,
            container(json!({"appArmorProfile": {"type": "Unconfined"}})),
            "spec.podTemplate must not disable AppArmor",
        ),
        (
            "app-armor-annotation",
            1,
            &inline,
            json!({"podTemplate": {"metadata": {"annotations": {
                "container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"}}}}),
            "spec.podTemplate must not disable AppArmor",
        ),
        (
            "se-linux",
            1,
            &inline,
            container(json!({"seLinuxOptions": {"type": "spc_t"}})),
            "spec.podTemplate must not set the SELinux user or role",
        ),
        (
            "sysctl",
            1,
            &inline,
            pod_template(
                json!({"securityContext": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}}),
            ),
            "spec.podTemplate must not set an unsafe sysctl",
        ),
        (
            "port",
            1,
            &inline,
            pod_template(json!({"initContainers": [
                {"name": "first", "ports": [{"containerPort": 1, "hostPort": 1}]}]})),
            "spec.podTemplate must not set a hostPort",
        ),
        (
            "probe",
            1,
            &inline,
            pod_template(json!({"ephemeralContainers": [
                {"name": "debug", "livenessProbe": {"tcpSocket": {"port": 1, "host": "10.0.0.1"}}}]})),
            "spec.podTemplate must not set the host of a probe or hook",
        ),
    ] {
        let mut spec =
            json!({"nodes": nodes, "image": "x", "checkpoint": {"claim": "x"}, "recipe": recipe});
        for (key, value) in more.as_object().unwrap() {
            spec[key] = value.clone();
        }
        let refused = try_create(&json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {"name": name}, "spec": spec,
        }));
        assert!(!refused.status.success(), "{name}");
        let text = output_text(&refused);
        assert!(text.contains(expected), "{name}: {text}");
    }
}

#[test]
fn a_quota_that_blocks_pods_is_reported_and_can_be_removed() {
    let _restored = restored(
        "kubectl",
        &["delete", "quota", "none", "--ignore-not-found"],
    );
    create(
        &json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"},
                   "spec": {"hard": {"count/pods": "0"}}}),
    );
    let job = Job::apply("quota", &recipe(4800), json!({}));
    let status = job.wait("the refusal", |status| {
        condition(status, "PodsReady")["reason"] == "Refused"
    });
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("exceeded quota: none"), "{message}");
    job.wait_event("exceeded quota");
    kubectl(&["delete", "quota", "none"]);
    let status = job.finish(96);
    assert_eq!(status["attempts"], 3, "{status:#}");
}

#[test]
fn a_refused_edit_has_no_effect_and_the_job_is_still_reconciled() {
    let job = Job::apply("meddled", &recipe(2_000_000), json!({}));
    job.wait_training_on(3);
    let pods = job.pods();
    job.patch(json!({"trainer": {"command": ["mpirun", "train.py", "{per_device_batch_size}"]}}));
    let status = job.wait("the refusal", |status| {
        condition(status, "Planned")["status"] == "False"
    });
    assert_eq!(status["phase"], "Running");
    let message = status["message"].as_str().unwrap();
    assert!(message.contains("`mpirun` starts a process"), "{message}");
    signal("KILL", &job.processes("rank")[3]);
    job.wait("a second generation", |status| {
        status["jobGeneration"]["record"]["number"] == 2
    });
    job.wait_training_on(3);
    assert_eq!(job.pods(), pods);
    job.patch(json!({"trainer": {"command": []}}));
    job.wait("its plan", |status| {
        condition(status, "Planned")["status"] == "True"
    });
    job.settle(96);
}

#[test]
fn an_unreadable_job_gets_a_condition_and_hides_no_other() {
    let odd = Job::apply("odd", &recipe(4800), json!({"suspend": true}));
    odd.wait("its suspension", |status| status["phase"] == "Suspended");
    // Another version of the controller might write such a status.
    let record = r#"{"status":{"jobGeneration":{"record":{"shape":"unknown"}}}}"#;
    let patch = [
        "patch",
        "tj",
        "odd",
        "--subresource=status",
        "--type=merge",
        "-p",
    ];
    kubectl(&[&patch[..], &[record]].concat());
    odd.wait("the Readable condition", |status| {
        condition(status, "Readable")["status"] == "False"
    });
    let system = ["-n", "evenkeel-system"];
    kubectl(&[&["rollout", "restart", "deployment"][..], &system].concat());
    kubectl(
        &[
            &["rollout", "status", "deployment", "--timeout=90s"][..],
            &system,
        ]
        .concat(),
    );
    Job::apply("even", &recipe(4800), json!({})).finish(96);
    let listed = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .arg("list")
        .output();
    let text = output_text(&listed.unwrap());
    assert!(text.contains("TrainingJob odd cannot be read"), "{text}");
    kubectl(&[&patch[..], &[r#"{"status":{"jobGeneration":null}}"#]].concat());
    odd.patch(json!({"suspend": false}));
    let status = odd.finish(96);
    assert_eq!(condition(&status, "Readable")["status"], "True");
}

#[test]
fn an_older_crd_is_reported_on_the_job_and_can_be_replaced() {
    let crd = "crd/trainingjobs.evenkeel.dev";
    let text = kubectl(&["get", crd, "-o", "json"]);
    let whole: Value = serde_json::from_str(&text).unwrap();
    let mut old = whole["spec"].clone();
    let status = "/versions/0/schema/openAPIV3Schema/properties/status/properties";
    let fields = old.pointer_mut(status).unwrap().as_object_mut().unwrap();
    fields.remove("plan").unwrap();
    let patch =
        |spec: &Value| json!([{"op": "replace", "path": "/spec", "value": spec}]).to_string();
    let (older, own) = (patch(&old), patch(&whole["spec"]));
    let replace = |patch| ["patch", crd, "--type=json", "-p", patch];
    let _restored = restored("kubectl", &replace(&own));
    kubectl(&replace(&older));
    let job = Job::apply("newer", &recipe(4800), json!({}));
    let events = job.wait_event("StatusUnwritten");
    assert!(events.contains("charts/evenkeel/crds"), "{events}");
    assert!(job.pods().is_empty());
    kubectl(&replace(&own));
    job.finish(96);
}
