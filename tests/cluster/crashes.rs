//! Kills the controller with SIGKILL at every step of every transition. It runs outside the cluster,
//! so that the test can set its fault points; the installed controller is scaled to zero meanwhile.

use std::collections::BTreeSet;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use serde_json::{Value, json};

use super::support::{Job, kit, kubectl, recipe, restored, signal};

/// Fault points, and the actions at which they can strike.
const FAULT_POINTS: [&str; 4] = ["decided", "written", "companions", "pods"];
const ACTIONS: [&str; 8] = [
    "keep",
    "place",
    "drain",
    "cancel-drain",
    "publish",
    "wait",
    "suspend",
    "end",
];

/// The installed controller is scaled to zero while this lives.
struct ScaledToZero;

impl ScaledToZero {
    fn now() -> ScaledToZero {
        scale(0);
        kubectl(&[
            "wait",
            "--for=delete",
            "pods",
            "-n",
            "evenkeel-system",
            "--all",
            "--timeout=60s",
        ]);
        ScaledToZero
    }
}

impl Drop for ScaledToZero {
    fn drop(&mut self) {
        scale(1);
        kubectl(&[
            "rollout",
            "status",
            "deployment",
            "-n",
            "evenkeel-system",
            "--timeout=60s",
        ]);
    }
}

fn scale(replicas: u32) {
    let replicas = format!("--replicas={replicas}");
    kubectl(&[
        "scale",
        "deployment",
        "-n",
        "evenkeel-system",
        "--all",
        &replicas,
    ]);
}

/// A controller that is restarted after each crash, with the fault points that have not struck yet.
struct CrashingController {
    stop: Arc<AtomicBool>,
    keeper: Option<JoinHandle<BTreeSet<String>>>,
}

impl CrashingController {
    fn start() -> CrashingController {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let keeper = std::thread::spawn(move || {
            let value_sources = FAULT_POINTS.iter();
            let mut left: BTreeSet<String> = value_sources
                .flat_map(|place| ACTIONS.map(|action| format!("{place}/{action}")))
                .chain(["pod/create".to_string()])
                .collect();
            let mut died = BTreeSet::new();
            while !stopped.load(Ordering::Relaxed) {
                let mut controller = controller(&left);
                while controller.try_wait().unwrap().is_none() {
                    if stopped.load(Ordering::Relaxed) {
                        controller.kill().unwrap();
                    }
                    std::thread::sleep(std::time::Duration::from_millis(20));
                }
                let status = controller.wait().unwrap();
                let mut output = String::new();
                let mut errors = controller.stderr.take().unwrap();
                errors.read_to_string(&mut output).unwrap();
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                let fault = output.lines().find_map(|line| line.strip_prefix("fault: "));
                let fault = fault
                    .unwrap_or_else(|| panic!("the controller exited without a fault: {output}"));
                assert_eq!(status.signal(), Some(9), "{output}");
                assert!(left.remove(fault), "{fault}");
                died.insert(fault.to_string());
            }
            died
        });
        CrashingController {
            stop,
            keeper: Some(keeper),
        }
    }

    /// Stops it; returns the fault points that have struck.
    fn end(mut self) -> BTreeSet<String> {
        self.stop.store(true, Ordering::Relaxed);
        self.keeper.take().unwrap().join().unwrap()
    }
}

impl Drop for CrashingController {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// The key of the cluster's controllers, which scripts/cluster-up.sh writes.
fn controller_key() -> String {
    let kubeconfig = std::env::var("KUBECONFIG").expect("scripts/cluster-tests.sh sets KUBECONFIG");
    let key = Path::new(&kubeconfig).with_file_name("controller.key");
    key.to_str().expect("a path in UTF-8").to_owned()
}

fn controller(faults: &BTreeSet<String>) -> Child {
    let faults: Vec<&str> = faults.iter().map(String::as_str).collect();
    Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .args([
            "controller",
            "--no-leader-election",
            "--listen",
            "127.0.0.1:0",
            "--key",
            &controller_key(),
        ])
        .env("EVENKEEL_FAULTS", faults.join(","))
        .env("RUST_LOG", "off")
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Runs a transition under a controller that crashes once at each fault point that it passes. For
/// each of `actions` the controller must have crashed before and after the decision was written; an entry
/// with a slash is a single fault point. Returns the result of the transition.
fn killed_throughout<T>(what: &str, actions: &[&str], transition: impl FnOnce() -> T) -> T {
    let mortal = CrashingController::start();
    let result = transition();
    let died = mortal.end();
    eprintln!(
        "{what}: the controller crashed {} times, at {died:?}",
        died.len()
    );
    for action in actions {
        let faults = match action.contains('/') {
            true => vec![(*action).to_owned()],
            false => ["decided", "written"]
                .map(|place| format!("{place}/{action}"))
                .to_vec(),
        };
        for fault in faults {
            assert!(
                died.contains(&fault),
                "{what}: no crash at {fault}: {died:?}"
            );
        }
    }
    result
}

#[test]
fn a_controller_killed_at_every_step_of_every_transition_loses_nothing() {
    let _scaled_to_zero = ScaledToZero::now();
    let job = Job::with_volume("mortal");
    let made = ["companions/place", "pods/place", "pod/create"];
    let begun = [&["place", "publish"][..], &made].concat();
    let job = killed_throughout("begin", &begun, || {
        let job = job.start(&recipe(2_000_000), json!({}));
        job.wait_training_on(3);
        job
    });
    let _uncordoned = restored("kubectl", &["uncordon", "node3"]);
    killed_throughout("cordon", &["drain", "publish"], || {
        let samples = |status: &Value| status["progress"]["samples"].as_u64().unwrap_or(0);
        let before = samples(&job.status());
        kubectl(&["cordon", "node3"]);
        let status = job.wait_training_on(2);
        // A new controller process does not treat a drain as ended before it has polled the agents.
        let began = status["history"][1]["samples"].as_u64().unwrap();
        assert!(began >= before, "{began} after {before}: {status:#}");
    });
    killed_throughout("scale up", &["drain", "publish"], || {
        kubectl(&["uncordon", "node3"]);
        job.wait_training_on(3);
    });
    {
        let _returned = restored("kit", &["return", "node2"]);
        killed_throughout("power cut", &["publish"], || {
            kit(&["lose", "node2"]);
            job.wait_training_on(2);
        });
    }
    killed_throughout("the node's return", &["drain", "publish"], || {
        job.wait_training_on(3);
    });
    killed_throughout("killed rank", &["publish"], || {
        signal("KILL", &job.processes("rank")[3]);
        job.wait("a new generation", |status| {
            let last = status["history"].as_array().unwrap().last().unwrap();
            last["message"].as_str().unwrap().contains("rank")
        });
        job.wait_training_on(3);
    });
    killed_throughout("suspension", &["suspend"], || {
        job.settle(96);
    });
    killed_throughout("resumption", &["place", "publish"], || {
        job.patch(json!({"suspend": false}));
        job.wait_training_on(3);
    });
    killed_throughout("deletion in mid-rescale", &["drain"], || {
        kubectl(&["cordon", "node3"]);
        job.wait_rescale();
        job.delete_whole();
    });
    kubectl(&["uncordon", "node3"]);
    let brief = Job::with_volume("mortal-end");
    killed_throughout("end", &["place", "publish", "end"], || {
        brief.start(&recipe(4800), json!({})).finish(96);
    });
}
