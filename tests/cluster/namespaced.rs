//! A controller that watches one namespace.

use std::process::Command;

use serde_json::json;

use super::support::{IMAGE, Job, create, kubectl, output_text, recipe, try_kubectl};

/// A second namespace with a TrainingJob.
const OTHER: &str = "elsewhere";

/// The chart's release in the namespace of the jobs, instead of the one that watches the whole cluster.
struct Namespaced;

impl Namespaced {
    fn install() -> Namespaced {
        scale_cluster_wide("0");
        let installed = Namespaced;
        let image = format!("image={IMAGE}");
        helm(&[
            "install",
            "solo",
            "charts/evenkeel",
            "--namespace",
            "default",
            "--skip-crds",
            "--set",
            "namespaced=true",
            "--set",
            "replicas=1",
            "--set",
            &image,
            "--wait",
            "--timeout",
            "90s",
        ]);
        installed
    }
}

impl Drop for Namespaced {
    fn drop(&mut self) {
        try_kubectl(
            &[
                "delete",
                "namespace",
                OTHER,
                "--ignore-not-found",
                "--wait=false",
            ],
            "",
        );
        helm(&[
            "uninstall",
            "solo",
            "--namespace",
            "default",
            "--wait",
            "--timeout",
            "90s",
        ]);
        scale_cluster_wide("1");
    }
}

fn helm(arguments: &[&str]) {
    let output = Command::new("helm").args(arguments).output();
    let output = output.expect("helm is on the path: scripts/cluster-tests.sh puts it there");
    assert!(
        output.status.success(),
        "helm {arguments:?}: {}",
        output_text(&output)
    );
}

fn scale_cluster_wide(replicas: &str) {
    let replicas = format!("--replicas={replicas}");
    let system = ["-n", "evenkeel-system"];
    kubectl(&[&["scale", "deployment", "--all", &replicas][..], &system].concat());
    kubectl(
        &[
            &["rollout", "status", "deployment", "--timeout=90s"][..],
            &system,
        ]
        .concat(),
    );
}

/// Whether the namespaced controller may do something in a namespace.
fn may(verb: &str, resource: &str, namespace: &str) -> bool {
    let account = "--as=system:serviceaccount:default:solo-evenkeel";
    let answer = try_kubectl(
        &["auth", "can-i", verb, resource, "-n", namespace, account],
        "",
    );
    answer.status.success()
}

#[test]
fn a_namespaced_controller_runs_the_jobs_of_its_namespace_alone() {
    let _installed = Namespaced::install();
    create(&json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OTHER}}));
    create(&json!({
        "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
        "metadata": {"name": "unseen", "namespace": OTHER},
        "spec": {"nodes": 1, "image": IMAGE, "recipe": {"inline": recipe(960).to_string()}, "checkpoint": {"claim": "c"}},
    }));
    for (verb, resource) in [
        ("create", "pods"),
        ("list", "trainingjobs.evenkeel.dev"),
        ("get", "configmaps"),
    ] {
        assert!(may(verb, resource, "default"), "{verb} {resource}");
        assert!(!may(verb, resource, OTHER), "{verb} {resource}");
    }
    let lease = "leases.coordination.k8s.io";
    assert!(may("get", lease, "kube-node-lease") && may("get", lease, "default"));
    assert!(!may("get", lease, OTHER) && !may("list", lease, "kube-node-lease"));
    let job = Job::apply("namespaced", &recipe(4800), json!({}));
    job.finish(96);
    let unseen = [
        "get",
        "trainingjob",
        "unseen",
        "-n",
        OTHER,
        "-o",
        "jsonpath={.status}",
    ];
    assert_eq!(kubectl(&unseen), "");
    assert_eq!(kubectl(&["get", "pods", "-n", OTHER, "-o", "name"]), "");
}
