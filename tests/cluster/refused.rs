//! What cannot be run is refused with words, and nothing is made for it.

use std::process::Command;

use serde_json::{Value, json};

use super::support::{Job, create, kubectl, mended, poll, recipe, signal, try_create, words};

/// A condition of a status.
fn condition(status: &Value, kind: &str) -> Value {
    let mut conditions = status["conditions"].as_array().into_iter().flatten();
    let found = conditions.find(|condition| condition["type"] == kind);
    found.cloned().unwrap_or_default()
}

#[test]
fn a_recipe_that_no_number_of_nodes_splits_makes_no_pod() {
    let mut recipe = recipe(4800);
    recipe["spec"]["batch"]["global"] = json!(97);
    let job = Job::apply("prime", &recipe, json!({}));
    let status = job.wait("a refusal", |status| status["state"] == "Pending");
    let planned = &status["conditions"][0];
    assert_eq!(planned["type"], "Planned");
    assert_eq!(planned["status"], "False");
    assert!(
        planned["message"].as_str().unwrap().contains("97"),
        "{planned}"
    );
    assert!(job.pods().is_empty());
    kubectl(&["get", "tj", "prime"]);
}

#[test]
fn a_command_that_would_train_on_another_batch_makes_no_pod() {
    let launcher = json!(["torchrun", "train.py", "{per_device_batch_size}"]);
    let job = Job::apply(
        "launcher",
        &recipe(4800),
        json!({"trainer": {"command": launcher}}),
    );
    let status = job.wait("a refusal", |status| status["state"] == "Pending");
    let why = status["conditions"][0]["message"].as_str().unwrap();
    assert!(
        why.contains("own-program") && why.contains("`torchrun` starts a process"),
        "{why}"
    );
    assert!(job.pods().is_empty());
}

#[test]
fn the_api_server_itself_refuses_what_contradicts_itself() {
    let inline = json!({"inline": "a: 1"});
    let both = json!({"inline": "a: 1", "configMap": {"name": "x"}});
    for (name, nodes, recipe, more, expected) in [
        (
            "both",
            1,
            &both,
            json!({}),
            "either inline or as a configMap",
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
        let said = words(&refused);
        assert!(said.contains(expected), "{name}: {said}");
    }
}

#[test]
fn what_the_api_server_refuses_to_make_is_said_and_can_be_mended() {
    let _mended = mended(
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
    let why = status["why"].as_str().unwrap();
    assert!(why.contains("exceeded quota: none"), "{why}");
    assert!(job.events().contains("exceeded quota"), "{}", job.events());
    kubectl(&["delete", "quota", "none"]);
    let status = job.finish(96);
    assert_eq!(status["attempts"], 3, "{status:#}");
}

#[test]
fn an_edit_that_is_refused_is_not_taken_up_and_the_job_is_looked_after() {
    let job = Job::apply("meddled", &recipe(400_000), json!({}));
    job.wait_training_on(3);
    let pods = job.pods();
    job.patch(json!({"trainer": {"command": ["torchrun", "train.py", "{per_device_batch_size}"]}}));
    let status = job.wait("the refusal", |status| {
        condition(status, "Planned")["status"] == "False"
    });
    assert_eq!(status["state"], "Running");
    let why = status["why"].as_str().unwrap();
    assert!(why.contains("`torchrun` starts a process"), "{why}");
    signal("KILL", &job.processes("rank")[3]);
    job.wait("a second generation", |status| {
        status["generation"]["record"]["number"] == 2
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
fn an_object_that_cannot_be_read_is_told_so_and_hides_no_other() {
    let odd = Job::apply("odd", &recipe(4800), json!({"suspend": true}));
    odd.wait("its suspension", |status| status["state"] == "Suspended");
    // As another version of the controller might have written it.
    let record = r#"{"status":{"generation":{"record":{"shape":"unknown"}}}}"#;
    let patch = [
        "patch",
        "tj",
        "odd",
        "--subresource=status",
        "--type=merge",
        "-p",
    ];
    kubectl(&[&patch[..], &[record]].concat());
    odd.wait("a word about it", |status| {
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
    let said = words(&listed.unwrap());
    assert!(said.contains("TrainingJob odd cannot be read"), "{said}");
    kubectl(&[&patch[..], &[r#"{"status":{"generation":null}}"#]].concat());
    odd.patch(json!({"suspend": false}));
    let status = odd.finish(96);
    assert_eq!(condition(&status, "Readable")["status"], "True");
}

#[test]
fn an_older_definition_is_named_on_the_job_and_can_be_mended() {
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
    let _mended = mended("kubectl", &replace(&own));
    kubectl(&replace(&older));
    let job = Job::apply("newer", &recipe(4800), json!({}));
    let said = || Some(job.events()).filter(|events| events.contains("StatusUnwritten"));
    let events = poll("a word about the definition", said, || job.events());
    assert!(events.contains("charts/evenkeel/crds"), "{events}");
    assert!(job.pods().is_empty());
    kubectl(&replace(&own));
    job.finish(96);
}
