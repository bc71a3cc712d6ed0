//! Memory and descriptors of controllers and agents over a storm.

use std::time::Duration;

use super::faults::controllers;
use crate::support::running;

/// Growth of the peak from the first third of a storm to its last that is no leak: allocators keep some memory, and
/// the number of jobs' objects varies.
const GROWTH: f64 = 1.5;
/// Growth that is too small to be a leak, KiB and descriptors.
const SLACK: (u64, u64) = (16 << 10, 32);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Controller,
    Agent,
}

/// One process at one time.
struct Sample {
    at: Duration,
    role: Role,
    memory: u64,
    descriptors: u64,
}

#[derive(Default)]
pub struct Usage(Vec<Sample>);

impl Usage {
    pub fn observe(&mut self, at: Duration) {
        let agents = running("evenkeel agent .*/storm-");
        for (role, processes) in [(Role::Controller, controllers()), (Role::Agent, agents)] {
            // A process may end meanwhile.
            let samples = processes
                .iter()
                .filter_map(|process| sample(at, role, process));
            self.0.extend(samples);
        }
    }

    /// Compares the last third of a storm with the first.
    pub fn check(&self, length: Duration) {
        for role in [Role::Controller, Role::Agent] {
            let (first, last) = (
                self.peaks(role, Duration::ZERO, length / 3),
                self.peaks(role, length * 2 / 3, Duration::MAX),
            );
            eprintln!("storm: {role:?}: KiB and descriptors at most {first:?}, then {last:?}");
            let grew = |first: u64, last: u64, slack: u64| {
                last as f64 > GROWTH * first as f64 + slack as f64
            };
            assert!(!grew(first.0, last.0, SLACK.0), "{role:?} leaks memory");
            assert!(
                !grew(first.1, last.1, SLACK.1),
                "{role:?} leaks descriptors"
            );
        }
    }

    fn peaks(&self, role: Role, from: Duration, to: Duration) -> (u64, u64) {
        let samples = || {
            self.0
                .iter()
                .filter(|s| s.role == role && (from..to).contains(&s.at))
        };
        let memory = samples().map(|sample| sample.memory).max();
        let descriptors = samples().map(|sample| sample.descriptors).max();
        memory.zip(descriptors).expect("observed processes")
    }
}

fn sample(at: Duration, role: Role, process: &str) -> Option<Sample> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let resident = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let memory = resident.trim().strip_suffix(" kB")?.parse().ok()?;
    let descriptors = std::fs::read_dir(format!("/proc/{process}/fd"))
        .ok()?
        .count() as u64;
    Some(Sample {
        at,
        role,
        memory,
        descriptors,
    })
}
