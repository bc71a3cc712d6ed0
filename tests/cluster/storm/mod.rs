//! A storm: faults from a seed strike four jobs at once. Afterwards every job is exact, and nothing is left behind.
//!
//! `EVENKEEL_STORM_SEED` and `EVENKEEL_STORM_MINUTES` choose the storm. A failure repeats with the same seed, as far as
//! times on a busy machine do. `EVENKEEL_STORM_ALL=1` also evicts pods, deletes jobs and their companion objects, and
//! restores etcd from data that are up to a minute old. With `EVENKEEL_STORM_BITS` the jobs must keep the bits of
//! undisturbed ones.

mod faults;
mod jobs;
mod schedule;
mod usage;
mod verify;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use self::jobs::{GPUS, Kind, StormJob};
use self::schedule::{Fault, Faults, NODES, Planned, schedule};
use self::usage::Usage;
use crate::replicas::{self, OneReplica};
use crate::support::{Restore, kit, kubectl, restored, try_kubectl};

/// The storm of the suite.
const SEED: u64 = 24;
const MINUTES: u64 = 2;
/// Time between two observations of jobs and processes.
const OBSERVATION: Duration = Duration::from_secs(5);
/// Time between two backups of etcd, if it is restored.
const BACKUP: Duration = Duration::from_secs(60);
/// A failure of the trainer follows its cause within this time.
const AFTERMATH: Duration = Duration::from_secs(90);

#[test]
fn jobs_survive_a_storm() {
    let (seed, minutes) = (
        number("EVENKEEL_STORM_SEED", SEED),
        number("EVENKEEL_STORM_MINUTES", MINUTES),
    );
    let faults = match std::env::var_os("EVENKEEL_STORM_ALL") {
        Some(_) => Faults::All,
        None => Faults::Survived,
    };
    let length = Duration::from_secs(60 * minutes);
    let planned = schedule(seed, length, faults);
    eprintln!(
        "storm: seed {seed}, {minutes} minutes, {} faults",
        planned.len()
    );

    let undisturbed = verify::Undisturbed::train();
    let _prepared = prepare();
    let mut storm = Storm::start(faults);
    storm.run(&planned);
    let took = storm.began.elapsed().as_secs_f64();
    eprintln!(
        "storm: over after {took:.0} s, {:.0} faults an hour; the running jobs complete",
        planned.len() as f64 * 3600.0 / took
    );
    storm.end(&undisturbed, length);
}

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("{variable}={text} is no number")),
        Err(_) => default,
    }
}

/// Gives the nodes enough GPUs, and runs two controllers whose clocks can be stepped.
fn prepare() -> (Vec<Restore>, Restore, OneReplica) {
    let mut devices = Vec::new();
    for node in 1..=NODES {
        let node = faults::name(node);
        kit(&["gpus", &node, GPUS]);
        devices.push(restored("kit", &["gpus", &node, "2"]));
    }
    let command = |settings: [String; jobs::CLOCK.len()]| -> Vec<String> {
        let set = ["-n", "evenkeel-system", "set", "env", "deployment", "--all"];
        set.map(str::to_owned).into_iter().chain(settings).collect()
    };
    let set = command(jobs::CLOCK.map(|(name, value)| format!("{name}={value}")));
    let unset = command(jobs::CLOCK.map(|(name, _)| format!("{name}-")));
    let [set, unset] = [&set, &unset].map(|words| Vec::from_iter(words.iter().map(String::as_str)));
    kubectl(&set);
    replicas::scale(2);
    (devices, restored("kubectl", &unset), OneReplica)
}

struct Storm {
    began: Instant,
    /// Time that commands took. It does not count, so that faults on a slow machine last as long as planned.
    stalled: Duration,
    running: BTreeMap<Kind, StormJob>,
    /// Completed, deleted and lost jobs; each was replaced by another of its kind.
    ended: Vec<StormJob>,
    /// Faults that are not undone yet.
    lasting: Vec<Planned>,
    /// When a fault last struck ranks, pods or the volume of a kind, or a node.
    struck: BTreeMap<Kind, Instant>,
    /// `status.restarts` of each running job.
    restarts: BTreeMap<Kind, u64>,
    usage: Usage,
    faults: Faults,
}

impl Storm {
    /// Starts a job of each kind, and waits until all of them train.
    fn start(faults: Faults) -> Storm {
        let running: BTreeMap<Kind, StormJob> = Kind::ALL
            .map(|kind| (kind, StormJob::start(kind, 1)))
            .into();
        for job in running.values() {
            job.job.wait("training on three nodes", |status| {
                status["phase"] == "Running" && status["nodes"] == 3
            });
        }
        if faults == Faults::All {
            kit(&["backup"]);
        }
        Storm {
            began: Instant::now(),
            stalled: Duration::ZERO,
            running,
            ended: Vec::new(),
            lasting: Vec::new(),
            struck: BTreeMap::new(),
            restarts: BTreeMap::new(),
            usage: Usage::default(),
            faults,
        }
    }

    fn run(&mut self, planned: &[Planned]) {
        let mut coming = planned.iter().peekable();
        let (mut observed, mut saved) = (Instant::now(), Instant::now());
        while coming.peek().is_some() || !self.lasting.is_empty() {
            let now = self.time();
            if let Some(over) = self.lasting.iter().position(|fault| fault.end() <= now) {
                let fault = self.lasting.remove(over).fault;
                self.strike("undo", fault, Storm::undo);
            } else if let Some(next) = coming.next_if(|next| next.at <= now) {
                if !next.lasts.is_zero() {
                    self.lasting.push(*next);
                }
                self.strike("inject", next.fault, Storm::inject);
            } else if observed.elapsed() >= OBSERVATION {
                observed = Instant::now();
                self.usage.observe(now);
                self.tend();
            } else if self.faults == Faults::All && saved.elapsed() >= BACKUP {
                saved = Instant::now();
                kit(&["backup"]);
            } else {
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }

    fn strike(&mut self, what: &str, fault: Fault, strike: impl Fn(&mut Storm, Fault)) {
        let start = Instant::now();
        self.log(&format!("{what} {fault:?}"));
        strike(self, fault);
        let took = start.elapsed();
        self.stalled += took;
        if took > Duration::from_secs(1) {
            self.log(&format!("{fault:?} took {:.1} s", took.as_secs_f64()));
        }
        for kind in Kind::ALL {
            if fault.strikes(kind) {
                self.struck.insert(kind, Instant::now());
            }
        }
    }

    /// Time of the schedule.
    fn time(&self) -> Duration {
        self.began.elapsed() - self.stalled
    }

    fn log(&self, line: &str) {
        eprintln!("storm {:7.1} s: {line}", self.time().as_secs_f64());
    }

    /// Replaces completed jobs, and checks that no job pays for the faults of others.
    fn tend(&mut self) {
        // The API server may have been killed a moment ago.
        let Some(statuses) = statuses() else { return };
        self.replace_lost(&statuses);
        let mut line = Vec::new();
        for kind in Kind::ALL {
            let name = self.running[&kind].name.clone();
            // The others have just begun.
            let Some(status) = statuses.get(&name) else {
                continue;
            };
            assert!(status["phase"] != "Failed", "{name} failed: {status:#}");
            let restarts = status["restarts"].as_u64().unwrap_or(0);
            if restarts > self.restarts.insert(kind, restarts).unwrap_or(0) {
                self.log(&format!(
                    "{name}: {restarts} restarts, {}",
                    last_change(status)
                ));
                let cause = self.struck.get(&kind);
                let caused = cause.is_some_and(|at| at.elapsed() < AFTERMATH);
                assert!(caused, "{name} failed, and no fault struck it: {status:#}");
            }
            line.push(format!(
                "{} {} at step {} in generation {}",
                name,
                status["phase"].as_str().unwrap_or("Pending"),
                status["progress"]["step"].as_u64().unwrap_or(0),
                status["jobGeneration"]["record"]["number"],
            ));
            if status["phase"] == "Complete" {
                self.replace(kind);
            }
        }
        self.log(&line.join("; "));
    }

    /// Starts the next job of a kind, beside those that ended, were deleted or are lost.
    fn replace(&mut self, kind: Kind) {
        let before = self.ended.iter().filter(|job| job.kind == kind).count();
        let next = StormJob::start(kind, before + 2);
        let mut old = self.running.insert(kind, next).expect("a job of each kind");
        old.disk.set("sound");
        self.ended.push(old);
        self.restarts.remove(&kind);
    }

    /// Replaces the jobs that a restored etcd does not have.
    fn replace_lost(&mut self, statuses: &BTreeMap<String, Value>) {
        for kind in Kind::ALL {
            let name = self.running[&kind].name.clone();
            if !statuses.contains_key(&name) {
                assert!(self.faults == Faults::All, "{name} is gone");
                self.log(&format!("{name} is not in the restored etcd"));
                self.replace(kind);
            }
        }
    }

    /// Waits for all jobs and verifies everything.
    fn end(mut self, undisturbed: &verify::Undisturbed, length: Duration) {
        let mut jobs = std::mem::take(&mut self.ended);
        jobs.extend(std::mem::take(&mut self.running).into_values());
        let existing = statuses().expect("the API server answers");
        for job in &jobs {
            // A restored spec may have been suspended at that time.
            if existing
                .get(&job.name)
                .is_some_and(|status| status["phase"] == "Suspended")
            {
                job.job.patch(json!({"suspend": false}));
            }
        }
        let is_there =
            |job: &&StormJob| self.faults == Faults::Survived || existing.contains_key(&job.name);
        // Each failure is printed; the other jobs are checked too.
        let is_harmed =
            |job: &&StormJob| catch_unwind(AssertUnwindSafe(|| undisturbed.check(job))).is_err();
        let harmed = jobs.iter().filter(is_there).filter(is_harmed);
        let harmed: Vec<String> = harmed.map(|job| job.name.clone()).collect();
        eprintln!("storm: {} jobs, {} harmed", jobs.len(), harmed.len());
        verify::nothing_left(jobs);
        self.usage.check(length);
        assert_eq!(harmed, [""; 0]);
    }
}

/// Undoes everything if the test fails.
impl Drop for Storm {
    fn drop(&mut self) {
        for planned in std::mem::take(&mut self.lasting) {
            if catch_unwind(AssertUnwindSafe(|| self.undo(planned.fault))).is_err() {
                eprintln!("storm: cannot undo {:?}", planned.fault);
            }
        }
    }
}

/// Statuses of all jobs by name; `None` if the API server does not answer.
fn statuses() -> Option<BTreeMap<String, Value>> {
    let output = try_kubectl(&["get", "tj", "-o", "json", "--request-timeout=5s"], "");
    // A failed call prints an empty list.
    if !output.status.success() {
        return None;
    }
    let list: Value = serde_json::from_slice(&output.stdout).ok()?;
    let jobs = list["items"].as_array()?.iter();
    let named = |job: &Value| {
        Some((
            job["metadata"]["name"].as_str()?.into(),
            job["status"].clone(),
        ))
    };
    jobs.map(named).collect()
}

/// Cause of the newest generation, for people.
fn last_change(status: &Value) -> &str {
    let last = status["history"]
        .as_array()
        .and_then(|history| history.last());
    last.and_then(|change| change["message"].as_str())
        .unwrap_or("")
}
