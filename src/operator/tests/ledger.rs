//! The proof of a job's ledger in a pod.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::{Value, json};

use super::lifecycle::checkpoint;
use crate::api::status::Phase;
use crate::operator::testing::Cluster;

fn proof(cluster: &Cluster) -> Condition {
    let mut conditions = cluster.status().conditions.into_iter();
    conditions.find(|c| c.type_ == "LedgerProved").unwrap()
}

/// Ends the pod of a proof with this message.
fn end(cluster: &mut Cluster, number: u32, message: &str) {
    let state = json!({"terminated": {"exitCode": 0, "message": message}});
    let status =
        json!({"phase": "Succeeded", "containerStatuses": [{"name": "trainer", "state": state}]});
    let pod = format!("x-ledger-{number}");
    cluster
        .server
        .change("pods", &pod, json!({"status": status}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_proves_the_ledger_of_a_running_and_of_a_complete_job() {
    let mut cluster = Cluster::running().await;
    cluster.edit(json!({"proveLedger": 1}));
    cluster.reconcile().await.unwrap();
    assert_eq!(proof(&cluster).reason, "NoLedger");
    assert_eq!(cluster.status().ledger_proof, 1);

    cluster.ranks(|_| json!({"ready": true}));
    let state = json!({"generation": 1, "ranks": [{"ready": true}], "committed": checkpoint(1, 3)});
    cluster.agent("x-0-1", state);
    cluster.reconcile().await.unwrap();
    cluster.edit(json!({"proveLedger": 2}));
    cluster.reconcile().await.unwrap();
    assert_eq!(proof(&cluster).reason, "Proving");
    let pod = cluster.server.get("pods", "x-ledger-2").unwrap();
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["command"], json!(["evenkeel", "prove"]));
    assert_eq!(
        container["resources"]["limits"]["nvidia.com/gpu"],
        Value::Null
    );
    assert!(
        container["args"][3]
            .as_str()
            .unwrap()
            .contains("gen-1/step-0000003")
    );
    // It belongs to no world: it stays, and the generation continues.
    for _ in 0..3 {
        cluster.reconcile().await.unwrap();
    }
    assert!(cluster.server.get("pods", "x-ledger-2").is_some());
    assert_eq!(cluster.status().phase, Phase::Running);
    let verdict = json!({"proved": true, "checkpoint": "gen-1/step-0000003", "verdict": "3 steps", "samples": 24, "digest": "ab"});
    end(&mut cluster, 2, &verdict.to_string());
    cluster.reconcile().await.unwrap();
    let proved = proof(&cluster);
    assert_eq!(
        (proved.status.as_str(), proved.reason.as_str()),
        ("True", "LedgerProved")
    );
    assert_eq!(
        proved.message,
        "3 steps (checkpoint gen-1/step-0000003, digest ab)"
    );

    cluster.ranks(|_| json!({"ending": {"code": 0}}));
    cluster
        .reconcile_until(|status| status.phase == Phase::Complete)
        .await;
    assert_eq!(proof(&cluster).status, "True");
    cluster.edit(json!({"proveLedger": 3}));
    cluster.reconcile().await.unwrap();
    assert_eq!(proof(&cluster).reason, "Proving");
    end(&mut cluster, 3, "no space left on the device");
    cluster.reconcile().await.unwrap();
    let failed = proof(&cluster);
    assert_eq!(
        (failed.status.as_str(), failed.reason.as_str()),
        ("False", "ProofFailed")
    );
    assert_eq!(
        failed.message,
        "pod x-ledger-3: no space left on the device"
    );
    assert_eq!(cluster.status().phase, Phase::Complete);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_pod_of_a_proof_says_why() {
    let mut cluster = Cluster::running().await;
    let state = json!({"generation": 1, "ranks": [{"ready": true}], "committed": checkpoint(1, 3)});
    cluster.agent("x-0-1", state);
    cluster.reconcile().await.unwrap();
    cluster.server.refuse_kind("pods", 403, "exceeded quota");
    cluster.edit(json!({"proveLedger": 1}));
    cluster.reconcile().await.unwrap_err();
    cluster.reconcile().await.unwrap_err();
    let waits = proof(&cluster);
    assert_eq!(waits.reason, "Proving");
    assert!(
        waits.message.contains("exceeded quota"),
        "{}",
        waits.message
    );
    assert_eq!(cluster.status().ledger_proof, 0);
    cluster.server.accept_kind("pods");
    cluster.reconcile().await.unwrap();
    assert!(cluster.server.get("pods", "x-ledger-1").is_some());
}
