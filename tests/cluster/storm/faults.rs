//! What each fault does to the cluster, and how it is undone.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Storm;
use super::jobs::{CLOCK_FILE, GPUS, Kind, StormJob};
use super::schedule::Fault;
use crate::support::{kit, output_text, running, try_kubectl};

/// Longest time for which the API server may refuse a command, because a control plane process was just killed.
const PATIENCE: Duration = Duration::from_secs(60);

impl Storm {
    pub fn inject(&mut self, fault: Fault) {
        use Fault::*;
        match fault {
            KillRank { job, pick } => kill(&self.job(job).ranks(), pick),
            KillAgent { job, pick } => kill(&self.job(job).job.processes("agent"), pick),
            DeletePod { job, pick } => delete_pod(&self.job(job).name, pick),
            EvictPod { job, pick } => evict_pod(&self.job(job).name, pick),
            DeleteJob { job } => {
                let name = self.job(job).name.clone();
                insist(&["delete", "tj", &name, "--wait=false"]);
                self.replace(job);
            }
            DeleteCompanion { job, pick } => delete_companion(&self.job(job).name, pick),
            FullVolume { job } => self.job(job).disk.set("full"),
            ReadOnlyVolume { job } => self.job(job).disk.set("read-only"),
            SlowVolume { job, milliseconds } => {
                self.job(job).disk.set(&format!("slow {milliseconds}ms"));
            }
            AgentClock { job, seconds } => {
                set_clocks(&self.job(job).job.processes("agent"), seconds);
            }
            Scale { job, nodes } => patch(self.job(job), &json!({"nodes": nodes})),
            Suspend { job } => patch(self.job(job), &json!({"suspend": true})),
            EditSpec { job, pick } => {
                let note = json!({"evenkeel.test/edit": pick.to_string()});
                let template = json!({"metadata": {"annotations": note}});
                patch(self.job(job), &json!({"podTemplate": template}));
            }
            PowerOff { node } => kit(&["lose", &name(node)]),
            CutNetwork { node } => kit(&["cut", &name(node)]),
            PacketLoss { node, percent } => kit(&["loss", &name(node), &percent.to_string()]),
            Bandwidth { node, kilobits } => kit(&["rate", &name(node), &format!("{kilobits}kbit")]),
            Delay { node, milliseconds } => {
                kit(&["delay", &name(node), &format!("{milliseconds}ms")]);
            }
            Devices { node, count } => set_devices(node, &count.to_string()),
            Cordon { node } => insist(&["cordon", &name(node)]),
            KillController { pick } => kill(&controllers(), pick),
            ControllerClock { seconds } => set_clocks(&controllers(), seconds),
            KillApiServer { seconds } => kit(&["restart", "apiserver", &seconds.to_string()]),
            KillScheduler { seconds } => kit(&["restart", "scheduler", &seconds.to_string()]),
            RestartEtcd { seconds } => kit(&["restart", "etcd", &seconds.to_string()]),
            RestoreEtcd { seconds } => {
                kit(&["restore", &seconds.to_string()]);
                // The next fault may strike one of the lost jobs.
                let found = loop {
                    if let Some(found) = super::statuses() {
                        break found;
                    }
                    std::thread::sleep(Duration::from_millis(500));
                };
                self.replace_lost(&found);
            }
        }
    }

    pub fn undo(&mut self, fault: Fault) {
        use Fault::*;
        match fault {
            FullVolume { job } | ReadOnlyVolume { job } | SlowVolume { job, .. } => {
                self.job(job).disk.set("sound");
            }
            AgentClock { job, .. } => set_clocks(&self.job(job).job.processes("agent"), 0),
            Scale { job, .. } => patch(self.job(job), &json!({"nodes": 3})),
            Suspend { job } => patch(self.job(job), &json!({"suspend": false})),
            PowerOff { node } => kit(&["return", &name(node)]),
            CutNetwork { node } => kit(&["reconnect", &name(node)]),
            PacketLoss { node, .. } | Bandwidth { node, .. } | Delay { node, .. } => {
                kit(&["clear", &name(node)]);
            }
            Devices { node, .. } => set_devices(node, GPUS),
            Cordon { node } => insist(&["uncordon", &name(node)]),
            ControllerClock { .. } => set_clocks(&controllers(), 0),
            fault => assert_eq!(fault.target(), None, "{fault:?} is not undone"),
        }
    }

    fn job(&mut self, kind: Kind) -> &mut StormJob {
        self.running
            .get_mut(&kind)
            .expect("a running job of each kind")
    }
}

pub fn name(node: u64) -> String {
    format!("node{node}")
}

/// PIDs of the controllers.
pub fn controllers() -> Vec<String> {
    running("evenkeel controller --listen 0.0.0.0")
}

/// Kills one of the processes, if there is one.
fn kill(processes: &[String], pick: u64) {
    if let Some(process) = pick_one(processes, pick) {
        // It may have ended by itself.
        let _ = Command::new("kill").args(["-KILL", process]).status();
    }
}

fn pick_one<T>(candidates: &[T], pick: u64) -> Option<&T> {
    let count = candidates.len() as u64;
    candidates.get(pick.checked_rem(count)? as usize)
}

/// Steps the clocks of the processes' containers: libfaketime reads the offset from a file there.
fn set_clocks(processes: &[String], seconds: i64) {
    for process in processes {
        // A process that has ended has no clock.
        let _ = std::fs::write(
            format!("/proc/{process}/root{CLOCK_FILE}"),
            format!("{seconds:+}\n"),
        );
    }
}

/// One of a job's objects of these kinds, as `kind/name`, if there is one.
fn object(job: &str, kinds: &str, pick: u64) -> Option<String> {
    let selector = format!("evenkeel.dev/job={job}");
    let found = insist_on(&["get", kinds, "-l", &selector, "-o", "name"]);
    let objects: Vec<&str> = found.lines().collect();
    pick_one(&objects, pick).map(|object| (*object).to_owned())
}

fn delete_companion(job: &str, pick: u64) {
    let kinds = "services,serviceaccounts,roles,rolebindings,networkpolicies,secrets";
    if let Some(companion) = object(job, kinds, pick) {
        insist(&["delete", &companion, "--wait=false", "--ignore-not-found"]);
    }
}

/// Evicts a pod of a job as a drain of its node does.
fn evict_pod(job: &str, pick: u64) {
    let Some(pod) = object(job, "pods", pick) else {
        return;
    };
    let name = pod.trim_start_matches("pod/");
    let eviction = json!({
        "apiVersion": "policy/v1", "kind": "Eviction",
        "metadata": {"name": name, "namespace": "default"},
    });
    let path = format!("/api/v1/namespaces/default/pods/{name}/eviction");
    let create = ["create", "--raw", &path, "-f", "-"];
    // The pod may have ended meanwhile.
    until_answered(&create, &eviction.to_string(), |output| {
        output.status.success() || output_text(output).contains("NotFound")
    });
}

/// Deletes a pod of a job, every second time without its grace period.
fn delete_pod(job: &str, pick: u64) {
    let Some(pod) = object(job, "pods", pick / 2) else {
        return;
    };
    let grace = if pick.is_multiple_of(2) {
        "--grace-period=0"
    } else {
        "--grace-period=-1"
    };
    let force = format!("--force={}", pick.is_multiple_of(2));
    insist(&[
        "delete",
        &pod,
        "--wait=false",
        "--ignore-not-found",
        grace,
        &force,
    ]);
}

fn patch(job: &StormJob, spec: &Value) {
    let patch = json!({"spec": spec}).to_string();
    insist(&["patch", "tj", &job.name, "--type=merge", "-p", &patch]);
}

fn set_devices(node: u64, count: &str) {
    kit(&["gpus", &name(node), count]);
}

/// Runs `kubectl` until the API server answers.
fn insist(arguments: &[&str]) {
    insist_on(arguments);
}

fn insist_on(arguments: &[&str]) -> String {
    until_answered(arguments, "", |output| output.status.success())
}

/// Runs `kubectl` until its output is an answer.
fn until_answered(arguments: &[&str], stdin: &str, is_answer: impl Fn(&Output) -> bool) -> String {
    let start = Instant::now();
    loop {
        let output = try_kubectl(arguments, stdin);
        if is_answer(&output) {
            return output_text(&output);
        }
        assert!(
            start.elapsed() < PATIENCE,
            "kubectl {arguments:?}: {}",
            output_text(&output)
        );
        std::thread::sleep(Duration::from_millis(500));
    }
}
