//! The schedule of a storm: a pure function of its seed.

use std::time::Duration;

use evenkeel::util::random::Random;

use super::jobs::Kind;

/// Nodes of the cluster kit, `node1` to `node3`.
pub const NODES: u64 = 3;
/// When the first fault strikes.
const CALM: Duration = Duration::from_secs(5);

/// One thing that goes wrong. `pick` selects one of the candidates that exist at that time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    KillRank { job: Kind, pick: u64 },
    KillAgent { job: Kind, pick: u64 },
    DeletePod { job: Kind, pick: u64 },
    EvictPod { job: Kind, pick: u64 },
    DeleteJob { job: Kind },
    DeleteCompanion { job: Kind, pick: u64 },
    FullVolume { job: Kind },
    ReadOnlyVolume { job: Kind },
    SlowVolume { job: Kind, milliseconds: u64 },
    AgentClock { job: Kind, seconds: i64 },
    Scale { job: Kind, nodes: u64 },
    Suspend { job: Kind },
    EditSpec { job: Kind, pick: u64 },
    PowerOff { node: u64 },
    CutNetwork { node: u64 },
    PacketLoss { node: u64, percent: u64 },
    Bandwidth { node: u64, kilobits: u64 },
    Delay { node: u64, milliseconds: u64 },
    Devices { node: u64, count: u64 },
    Cordon { node: u64 },
    KillController { pick: u64 },
    ControllerClock { seconds: i64 },
    KillApiServer { seconds: u64 },
    KillScheduler { seconds: u64 },
    RestartEtcd { seconds: u64 },
    RestoreEtcd { seconds: u64 },
}

impl Fault {
    /// Whether it strikes ranks, pods or the volume of this kind of job. The control plane's faults do not, nor does the loss
    /// of a companion object.
    pub fn strikes(self, kind: Kind) -> bool {
        use Fault::*;
        match self {
            KillRank { job, .. }
            | KillAgent { job, .. }
            | DeletePod { job, .. }
            | EvictPod { job, .. } => job == kind,
            _ => match self.target() {
                Some(Target::Job(job)) => job == kind,
                Some(Target::Node(_)) => true,
                Some(Target::Controller) | None => false,
            },
        }
    }

    /// What it occupies while it lasts; `None` if there is nothing to undo.
    pub fn target(self) -> Option<Target> {
        use Fault::*;
        match self {
            FullVolume { job }
            | ReadOnlyVolume { job }
            | SlowVolume { job, .. }
            | AgentClock { job, .. }
            | Scale { job, .. }
            | Suspend { job } => Some(Target::Job(job)),
            PowerOff { node }
            | CutNetwork { node }
            | PacketLoss { node, .. }
            | Bandwidth { node, .. }
            | Delay { node, .. }
            | Devices { node, .. }
            | Cordon { node } => Some(Target::Node(node)),
            ControllerClock { .. } => Some(Target::Controller),
            KillRank { .. }
            | KillAgent { .. }
            | DeletePod { .. }
            | EvictPod { .. }
            | DeleteJob { .. }
            | DeleteCompanion { .. }
            | EditSpec { .. }
            | KillController { .. }
            | KillApiServer { .. }
            | KillScheduler { .. }
            | RestartEtcd { .. }
            | RestoreEtcd { .. } => None,
        }
    }
}

/// What a lasting fault occupies: it has one such fault at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Node(u64),
    Job(Kind),
    Controller,
}

/// A fault with its time after the begin of the storm. Its undo follows after `lasts`; zero: there is nothing to undo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Planned {
    pub at: Duration,
    pub fault: Fault,
    pub lasts: Duration,
}

impl Planned {
    pub fn end(&self) -> Duration {
        self.at + self.lasts
    }
}

/// The kinds of faults that a storm has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Faults {
    /// Those after which every job still exists.
    Survived,
    /// Also evicted pods, deleted jobs and companion objects, and etcd restored from older data.
    All,
}

/// The faults of a storm, by time. At each time at least one node is undisturbed, and all faults are undone at its end.
pub fn schedule(seed: u64, length: Duration, faults: Faults) -> Vec<Planned> {
    let mut random = Draw(Random::seeded(seed));
    let mut planned: Vec<Planned> = Vec::new();
    let mut at = CALM;
    while at < length {
        let fault = draw(&mut random, faults);
        let lasts = duration(fault, &mut random).min(length - at);
        let next = Planned { at, fault, lasts };
        let allowed = faults == Faults::All || !matches!(fault, Fault::RestoreEtcd { .. });
        if allowed && fits(&next, &planned) {
            planned.push(next);
            at += Duration::from_millis(random.between(2_000, 10_000));
        }
    }
    planned
}

fn fits(next: &Planned, planned: &[Planned]) -> bool {
    let Some(target) = next.fault.target() else {
        return true;
    };
    let lasting = planned.iter().filter(|earlier| earlier.end() >= next.at);
    let occupied: Vec<Target> = lasting
        .filter_map(|earlier| earlier.fault.target())
        .collect();
    let nodes = occupied
        .iter()
        .filter(|target| matches!(target, Target::Node(_)));
    let node_left = !matches!(target, Target::Node(_)) || (nodes.count() as u64) < NODES - 1;
    node_left && !occupied.contains(&target)
}

/// How long a fault lasts. A full or read-only volume is repaired before the restart budget of its job is used up.
fn duration(fault: Fault, random: &mut Draw) -> Duration {
    let (least, most) = match fault {
        Fault::FullVolume { .. } | Fault::ReadOnlyVolume { .. } => (3_000, 8_000),
        Fault::PowerOff { .. } | Fault::CutNetwork { .. } => (5_000, 40_000),
        _ if fault.target().is_some() => (5_000, 25_000),
        _ => (0, 0),
    };
    Duration::from_millis(random.between(least, most))
}

fn draw(random: &mut Draw, faults: Faults) -> Fault {
    use Fault::*;
    let job = Kind::ALL[random.below(Kind::ALL.len() as u64) as usize];
    let node = random.between(1, NODES);
    let pick = random.below(1 << 32);
    let seconds = random.between(0, 4);
    let clock_steps = [-3600, -60, -5, 5, 60, 3600];
    let clock = clock_steps[random.below(clock_steps.len() as u64) as usize];
    let kinds = match faults {
        // With `RestoreEtcd`, which the schedule leaves out: the seeds of this storm have found defects.
        Faults::Survived => 23,
        Faults::All => 26,
    };
    match random.below(kinds) {
        0 => KillRank { job, pick },
        1 => KillAgent { job, pick },
        2 => DeletePod { job, pick },
        3 => FullVolume { job },
        4 => ReadOnlyVolume { job },
        5 => SlowVolume {
            job,
            milliseconds: random.between(50, 500),
        },
        6 => AgentClock {
            job,
            seconds: clock,
        },
        7 => Scale {
            job,
            nodes: random.between(1, NODES - 1),
        },
        8 => Suspend { job },
        9 => EditSpec { job, pick },
        10 => PowerOff { node },
        11 => CutNetwork { node },
        12 => PacketLoss {
            node,
            percent: random.between(2, 30),
        },
        13 => Bandwidth {
            node,
            kilobits: random.between(500, 5_000),
        },
        14 => Delay {
            node,
            milliseconds: random.between(10, 150),
        },
        15 => Devices {
            node,
            count: random.between(0, 4),
        },
        16 => Cordon { node },
        17 => KillController { pick },
        18 => ControllerClock { seconds: clock },
        19 => KillApiServer { seconds },
        20 => KillScheduler { seconds },
        21 => RestartEtcd { seconds },
        22 => RestoreEtcd { seconds },
        23 => EvictPod { job, pick },
        24 => DeleteJob { job },
        _ => DeleteCompanion { job, pick },
    }
}

/// Draws numbers for a schedule. A seed keeps its schedule only as long as they are drawn in this way.
struct Draw(Random);

impl Draw {
    fn below(&mut self, limit: u64) -> u64 {
        self.0.next_u64() % limit
    }

    /// A number from `least` to `most`, both included.
    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const HOUR: Duration = Duration::from_secs(3600);

    fn name(fault: Fault) -> String {
        let text = format!("{fault:?}");
        text.split(' ').next().unwrap().to_owned()
    }

    #[test]
    fn a_schedule_is_a_function_of_its_seed() {
        assert_eq!(
            schedule(7, HOUR, Faults::Survived),
            schedule(7, HOUR, Faults::Survived)
        );
        assert_ne!(
            schedule(7, HOUR, Faults::Survived),
            schedule(8, HOUR, Faults::Survived)
        );
        // Seeds that found a defect keep their faults.
        let planned = schedule(24, Duration::from_secs(120), Faults::Survived);
        let first: Vec<Fault> = planned.iter().map(|next| next.fault).take(2).collect();
        let (job, pick) = (Kind::Ddp, 1_315_766_848);
        let milliseconds = 177;
        let expected = [
            Fault::SlowVolume { job, milliseconds },
            Fault::KillRank { job, pick },
        ];
        assert_eq!((planned.len(), &first[..]), (18, &expected[..]));
    }

    #[test]
    fn an_hour_has_every_fault_and_deletes_jobs_only_on_request() {
        let names = |faults| -> BTreeSet<String> {
            let planned = schedule(1, HOUR, faults);
            assert!(planned.len() >= 500, "{}", planned.len());
            planned.iter().map(|planned| name(planned.fault)).collect()
        };
        let (all, survived) = (names(Faults::All), names(Faults::Survived));
        assert_eq!((all.len(), survived.len()), (26, 22));
        let only: Vec<&str> = all.difference(&survived).map(String::as_str).collect();
        assert_eq!(
            only,
            ["DeleteCompanion", "DeleteJob", "EvictPod", "RestoreEtcd"]
        );
    }

    #[test]
    fn one_node_is_undisturbed_and_no_target_has_two_lasting_faults() {
        for seed in 0..20 {
            let planned = schedule(seed, HOUR, Faults::All);
            for (index, next) in planned.iter().enumerate() {
                assert!(next.end() <= HOUR);
                let lasting = |other: &&Planned| {
                    other.fault.target().is_some() && other.at <= next.at && other.end() >= next.at
                };
                let targets: Vec<_> = planned[..=index]
                    .iter()
                    .filter(lasting)
                    .filter_map(|other| other.fault.target())
                    .collect();
                let nodes = targets
                    .iter()
                    .filter(|target| matches!(target, Target::Node(_)));
                assert!((nodes.count() as u64) < NODES, "seed {seed}: {targets:?}");
                for target in &targets {
                    let same = targets.iter().filter(|other| *other == target);
                    assert_eq!(same.count(), 1, "seed {seed}: {targets:?}");
                }
            }
        }
    }
}
