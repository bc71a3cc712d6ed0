//! What a reconciliation observes of pods, nodes and agents.

use std::time::Duration;

use serde_json::{Value, json};

use crate::lifecycle::placement::{PodState, SlotState};
use crate::lifecycle::protocol::Ending;
use crate::operator::testing::Cluster;

/// The state of the second slot's pod, with its message.
fn second(cluster: &mut Cluster) -> (PodState, String) {
    let observed = cluster.observed();
    let SlotState { slot, pod } = observed.slots[1].clone();
    (
        pod,
        observed.reasons.get(&slot).cloned().unwrap_or_default(),
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn a_members_pod_is_ready_until_the_cluster_says_otherwise() {
    let mut cluster = Cluster::running().await;
    let ready = (PodState::Ready, String::new());
    assert_eq!(second(&mut cluster), ready);
    let state = |how: PodState, message: &str| (how, message.to_owned());
    let nodes = [
        (
            json!({"unschedulable": true}),
            state(PodState::Cordoned, "node b is cordoned"),
        ),
        (
            json!({"taints": [{"key": "maintenance", "value": "soon", "effect": "NoExecute"}]}),
            state(PodState::Leaving, "node b is tainted maintenance"),
        ),
        (json!({}), ready.clone()),
    ];
    for (spec, expected) in nodes {
        cluster.put_node("b", spec.clone());
        assert_eq!(second(&mut cluster), expected, "{spec}");
    }
    let pods = [
        (
            json!({"status": {"conditions": [{"type": "DisruptionTarget", "status": "True"}]}}),
            state(PodState::Leaving, "pod x-1-2 is being evicted"),
        ),
        (
            json!({"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}),
            state(PodState::Leaving, "pod x-1-2 is being deleted"),
        ),
        (
            json!({"metadata": {"uid": "another"}}),
            state(PodState::Lost, "pod x-1-2 was replaced"),
        ),
        (
            json!({"status": {"phase": "Failed", "reason": "Evicted"}}),
            state(PodState::Lost, "pod x-1-2 ended: Evicted"),
        ),
    ];
    for (change, expected) in pods {
        let before = cluster.server.get("pods", "x-1-2").unwrap();
        cluster.server.change("pods", "x-1-2", change.clone());
        assert_eq!(second(&mut cluster), expected, "{change}");
        cluster.server.put("pods", before);
    }
    assert_eq!(second(&mut cluster), ready);
    cluster.server.remove("pods", "x-1-2");
    assert_eq!(
        second(&mut cluster),
        state(PodState::Lost, "pod x-1-2 was deleted")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_member_is_lost_as_soon_as_there_is_evidence() {
    let mut cluster = Cluster::running().await;
    let at_work = json!({"generation": 1, "ranks": [{"ready": true}]});
    cluster.agent("x-0-1", at_work.clone());
    cluster.silent_agent("x-1-2", at_work.clone(), Duration::from_secs(5));
    assert_eq!(second(&mut cluster).0, PodState::Ready);

    // A peer lost its ranks.
    let lost = json!({"rank": 1, "message": "no heartbeat for 3.0 s", "samples": 8, "whole": true});
    cluster.agent("x-0-1", json!({"generation": 1, "ranks": [{"lost": lost}]}));
    let observed = cluster.observed();
    assert_eq!(observed.slots[1].pod, PodState::Lost);
    let message = "pod x-1-2 on b is unreachable for its peers and the controller";
    assert_eq!(observed.lost_member, Some((1, message.to_owned())));
    assert!(
        observed.suspects.contains("b"),
        "the node gets no new pod for now"
    );
    assert_eq!(observed.ranks[1].ending(), Some(Ending::Signal(9)));
    let pod = cluster.pod("x-1-2");
    assert!(
        observed.needs_forced_deletion(&pod, |_| false),
        "no kubelet confirms its end"
    );
    let other = cluster.pod("x-0-1");
    assert!(
        !observed.needs_forced_deletion(&other, |_| true),
        "its agent answers"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_of_an_external_trainer_may_commit_until_it_is_fenced() {
    let mut cluster = Cluster::running().await;
    let command = json!({"status": {"jobGeneration": {"command": ["python", "train.py"]}}});
    cluster.server.change("trainingjobs", "x", command);
    let at_work = json!({"generation": 1, "ranks": [{"ready": true}]});
    cluster.silent_agent("x-1-2", at_work.clone(), Duration::from_secs(5));
    assert!(cluster.observed().may_commit);
    let ended = json!({"generation": 1, "ranks": [{"ending": {"code": 0}}]});
    cluster.silent_agent("x-1-2", ended, Duration::from_secs(5));
    assert!(!cluster.observed().may_commit, "its ranks have ended");
    cluster.silent_agent("x-1-2", at_work, Duration::from_secs(3600));
    assert!(!cluster.observed().may_commit, "its agent has stopped them");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_container_that_exceeded_its_memory_ran_out_of_memory() {
    let mut cluster = Cluster::running().await;
    let killed = json!({"status": {"phase": "Failed", "containerStatuses": [{
        "name": "trainer", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
        "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]}});
    cluster.server.change("pods", "x-1-2", killed);
    let observed = cluster.observed();
    assert!(observed.ranks[1].is_out_of_memory());
    assert_eq!(
        observed.reasons[&observed.slots[1].slot],
        "pod x-1-2 ended with exit code 137 OOMKilled"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pod_that_is_not_ready_says_why() {
    let mut cluster = Cluster::new();
    cluster
        .reconcile_until(|status| status.slots.len() == 2)
        .await;
    cluster.reconcile().await.unwrap();
    let pod = cluster.server.names("pods")[1].clone();
    let held_up = |cluster: &mut Cluster, status: Value| {
        cluster.server.change(
            "pods",
            &pod,
            json!({"metadata": {"namespace": "n"}, "status": status}),
        );
        cluster.observed().held_up(&pod)
    };
    let waiting = |reason: &str, message: &str| {
        json!({"containerStatuses": [{
            "name": "trainer", "image": "i", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"waiting": {"reason": reason, "message": message}}}]})
    };
    assert_eq!(
        held_up(&mut cluster, waiting("ContainerCreating", "")),
        None
    );
    let unknown = held_up(&mut cluster, waiting("ErrImagePull", "no such image"));
    assert_eq!(unknown, Some(format!("{pod}: ErrImagePull: no such image")));
    let unplaced = json!({"containerStatuses": null, "conditions": [
        {"type": "PodScheduled", "status": "False", "message": "0/2 nodes are available"}]});
    let message = held_up(&mut cluster, unplaced);
    assert_eq!(message, Some(format!("{pod}: 0/2 nodes are available")));
    let problem =
        json!({"reason": "VolumeReadOnly", "message": "cannot write", "deterministic": false});
    cluster.server.change(
        "pods",
        &pod,
        json!({"spec": {"nodeName": "b"}, "status": {"podIP": "10.0.0.1"}}),
    );
    cluster.agent(&pod, json!({"problem": problem}));
    let observed = cluster.observed();
    assert_eq!(observed.held_up(&pod), Some(format!("{pod}: cannot write")));
    assert_eq!(observed.slots[1].pod, PodState::Pending);
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_end_before_they_train_are_counted() {
    let mut cluster = Cluster::new();
    cluster
        .reconcile_until(|status| status.slots.len() == 2)
        .await;
    cluster.reconcile().await.unwrap();
    let pod = cluster.server.names("pods")[0].clone();
    let ended = json!({"metadata": {"namespace": "n"}, "status": {"phase": "Failed", "reason": "StartError"}});
    cluster.server.change("pods", &pod, ended);
    assert_eq!(
        cluster.observed().ended_early,
        [format!("pod {pod} ended: StartError")]
    );
    cluster.reconcile().await.unwrap();
    let failures = cluster.status().pod_failures.unwrap();
    assert_eq!(failures.count, 1);
    assert!(
        cluster
            .status()
            .message
            .contains("new pods follow after a pause")
    );
}
