//! The hosts of a run: which are there, what they have, and which of them run a world.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::slurm::submission;
use super::ssh::Program;
use super::{Called, Reach, Reached};
use crate::host::{Facts, Remote, Share, ToHost, Unreached};
use crate::inventory::{Device, Devices};
use crate::launch::Requirements;
use crate::lifecycle::Member;
use crate::lifecycle::generation::Address;
use crate::plan::DeviceKind;
use crate::util::format::count;
use crate::util::key::Key;
use crate::util::{input, port};

/// Pause between two attempts to reach a lost host.
const RETRY: Duration = Duration::from_secs(5);
/// Name of a file, by which hosts show that they share its directory.
const TOKEN: &str = ".evenkeel-hosts";
/// Largest such file, bytes.
const FILE_BYTES: u64 = 4 << 20;

/// The variables of the launcher that ranks get too, by the beginnings of their names.
const PASSED_ON: [&str; 32] = [
    "PATH",
    "LD_LIBRARY_PATH",
    "PYTHON",
    "VIRTUAL_ENV",
    "CONDA",
    "XDG_CACHE_HOME",
    "EVENKEEL_",
    "HF_",
    "HUGGINGFACE_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "CUDA_",
    "NCCL_",
    "UCX_",
    "GLOO_",
    "TORCH_",
    "OMP_",
    "MKL_",
    "RUST_",
    "AWS_",
    "ACCELERATE_",
    "DEEPSPEED_",
    "DS_",
    "WANDB_",
    "MLFLOW_",
    "COMET_",
    "FI_",
    "TRITON_",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "TZ",
];
/// Never passed on: a host has its own devices, and only the first job a submission.
const OWN: [&str; 2] = ["CUDA_VISIBLE_DEVICES", submission::VARIABLE];

/// The hosts that a launch reaches.
pub struct Hosts {
    hosts: Vec<Host>,
    callers: Callers,
    device: DeviceKind,
    token: Option<Token>,
    arrivals: (Sender<Arrival>, Receiver<Arrival>),
}

/// What a thread needs to reach a host.
#[derive(Clone)]
struct Callers {
    program: Arc<Program>,
    first: Arc<ToHost>,
}

struct Host {
    reach: Reach,
    name: String,
    /// By which the other hosts reach it too.
    address: String,
    state: State,
    /// It is about to end, and the user knows.
    leaves: bool,
    /// Its GPUs that ranks can take.
    gpus: Vec<Device>,
    /// Why it is not reached.
    problem: Option<String>,
}

enum State {
    There(Arc<Remote>),
    /// Lost; the next attempt to reach it.
    Gone(Instant),
    Connecting,
}

struct Arrival {
    host: usize,
    called: Called,
}

/// A file of the run directory whose text no other directory has.
#[derive(Clone)]
struct Token {
    file: PathBuf,
    text: String,
}

/// A host is lost, back, or about to end.
#[derive(Debug, PartialEq, Eq)]
pub struct HostNews {
    pub message: String,
    /// The host that is lost with its ranks.
    pub lost: Option<Lost>,
}

/// A host that is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost {
    /// Its number.
    pub host: usize,
    /// Its ranks have ended by then.
    pub fenced: Instant,
}

/// Hosts that cannot be used, each with what to do.
#[derive(Debug, thiserror::Error)]
#[error("{}", problems.join("\nerror: "))]
pub struct Unreachable {
    pub problems: Vec<String>,
}

impl Hosts {
    /// Reaches all hosts at once. `resumes`: those that are not reached may follow later, if one is reached. `notes` takes what
    /// takes long, and who is not reached.
    pub fn connect(
        hosts: &[Reach],
        program: &Path,
        resumes: bool,
        notes: &Sender<String>,
    ) -> Result<Hosts, Unreachable> {
        let refused = |problem: String| Unreachable {
            problems: vec![problem],
        };
        let directory = std::env::current_dir();
        let directory = directory.map_err(|error| refused(format!("this directory: {error}")))?;
        let callers = Callers {
            program: Arc::new(Program::at(program)),
            first: Arc::new(ToHost::Enter {
                directory,
                environment: environment().collect(),
            }),
        };
        let call = |reach: Reach| {
            let (callers, notes) = (callers.clone(), notes.clone());
            thread::spawn(move || {
                let note = |note: String| drop(notes.send(note));
                let called = callers.call(&reach, &note);
                Host::called(reach, called)
            })
        };
        let called: Vec<_> = hosts.iter().cloned().map(call).collect();
        let (mut hosts, mut problems) = (Vec::<Host>::new(), Vec::new());
        for called in called {
            match called.join() {
                Ok(host) => hosts.push(host),
                Err(_) => problems.push("a host could not be called".to_owned()),
            }
        }
        let required = hosts.iter().filter(|host| !host.reach.is_optional());
        problems.extend(required.filter_map(|host| host.problem.clone()));
        if resumes && hosts.iter().any(Host::is_usable) {
            for problem in problems.drain(..) {
                let _ = notes.send(format!("{problem}; the run continues without it"));
            }
        }
        problems.extend(twice(&hosts));
        problems.extend(hosts.iter().filter_map(Host::lacks_gpus));
        if !problems.is_empty() {
            return Err(Unreachable { problems });
        }
        Ok(Hosts {
            hosts,
            callers,
            device: DeviceKind::Cpu,
            token: None,
            arrivals: channel(),
        })
    }

    /// What each host is, with its name and its GPUs that may be used.
    pub fn facts(&self) -> impl Iterator<Item = (String, &Facts, &[Device])> {
        self.hosts.iter().filter_map(|host| {
            let remote = host.remote()?;
            Some((host.name(), remote.facts(), host.gpus.as_slice()))
        })
    }

    /// Chooses where the ranks compute.
    pub fn on(mut self, device: DeviceKind) -> Hosts {
        self.device = device;
        self
    }

    /// Ranks that the hosts can run which are there and stay.
    pub fn capacity(&self) -> u64 {
        self.slots_on(self.device)
    }

    /// Ranks that the largest host can run.
    pub fn most_on_a_host(&self) -> u64 {
        let slots = self.hosts.iter().map(|host| host.slots(self.device));
        slots.max().unwrap_or(u64::MAX)
    }

    /// Ranks that these hosts can run on this device.
    pub fn slots_on(&self, device: DeviceKind) -> u64 {
        let there = self.hosts.iter().filter(|host| host.is_usable());
        there.map(|host| host.slots(device)).sum()
    }

    /// The memory that each rank on the CPU may use, on the host that has least.
    pub fn least_memory(&self) -> Option<u64> {
        let of_ranks = self.hosts.iter().filter_map(|host| {
            let memory = host.remote()?.facts().inventory.cpu.memory_available?;
            Some(memory / host.slots(DeviceKind::Cpu))
        });
        of_ranks.min()
    }

    /// Refuses hosts that do not have the run's directory, at the same path.
    pub fn share(&self, run_dir: &Path) -> Result<(), Unreachable> {
        let remedy =
            "put the run into a directory that all hosts have at the same path, with --out";
        self.share_directory(run_dir, remedy)
    }

    /// Refuses hosts on which an external trainer cannot start, or whose checkpoints the others do not see. `key`: that of
    /// the checkpoints' directory in the recipe.
    pub fn can_run(&self, trainer: &Requirements, key: &str) -> Result<(), Unreachable> {
        let lacks = |host: &Host| {
            let problem = host.remote()?.lacks(&trainer.base, &trainer.program)?;
            Some(format!(
                "{}: {problem}; install the program at the same path on all hosts, or launch from a directory that they share",
                host.name()
            ))
        };
        let problems: Vec<String> = self.hosts.iter().filter_map(lacks).collect();
        if !problems.is_empty() {
            return Err(Unreachable { problems });
        }
        let exists = |directory: &&Path| directory.is_dir();
        let checkpoints = trainer.checkpoint_dir.ancestors().find(exists);
        let remedy = format!(
            "the trainer writes its checkpoints there; name a directory that all hosts have at the same path ({key})"
        );
        checkpoints.map_or(Ok(()), |directory| self.share_directory(directory, &remedy))
    }

    fn share_directory(&self, directory: &Path, remedy: &str) -> Result<(), Unreachable> {
        let refused = |error: std::io::Error| Unreachable {
            problems: vec![format!("{}: {error}", directory.display())],
        };
        let directory = std::path::absolute(directory).map_err(refused)?;
        let text = Key::random().map_err(refused)?.reveal();
        let token = Token {
            file: directory.join(TOKEN),
            text,
        };
        std::fs::write(&token.file, &token.text).map_err(refused)?;
        let without = |host: &&Host| {
            let remote = host.remote();
            remote.is_some_and(|remote| token.is_read(remote) != Some(true))
        };
        let without: Vec<String> = self.hosts.iter().filter(without).map(Host::name).collect();
        std::fs::remove_file(&token.file).map_err(refused)?;
        if without.is_empty() {
            return Ok(());
        }
        Err(Unreachable {
            problems: vec![format!(
                "{} and this machine do not share {}: {remedy}",
                without.join(", "),
                directory.display()
            )],
        })
    }

    /// Hosts that come back show by this file that they share the run's directory.
    pub fn recognise(&mut self, file: &Path) {
        let text = input::read(file, FILE_BYTES).ok();
        let text = text.and_then(|text| String::from_utf8(text).ok());
        let file = std::path::absolute(file).ok();
        self.token = file.zip(text).map(|(file, text)| Token { file, text });
    }

    /// Refuses hosts that do not reach each other.
    pub fn check_links(&self) -> Result<(), Unreachable> {
        let here = (self.hosts.iter().enumerate()).filter(|(_, host)| host.remote().is_some());
        let here: Vec<(&Host, Address)> = here
            .map(|(index, host)| (host, self.address(index, None)))
            .collect();
        let check = |from: &Host| {
            let others: Vec<_> = here
                .iter()
                .filter(|(host, _)| !std::ptr::eq(*host, from))
                .collect();
            let addresses = others.iter().map(|(_, address)| address.clone()).collect();
            let problems = from.remote().and_then(|remote| remote.connects(addresses));
            let problems = others.iter().zip(problems.unwrap_or_default());
            let problem = |(other, problem): (&&(&Host, Address), Option<String>)| {
                let problem = problem?;
                let (from, to, at) = (from.name(), other.0.name(), &other.1.host);
                Some(format!(
                    "{from} does not reach {to} at {at}: {problem}; open ports 20000 to 32767 between the hosts"
                ))
            };
            problems.filter_map(problem).collect::<Vec<_>>()
        };
        let problems: Vec<String> = thread::scope(|all| {
            let checks: Vec<_> = here
                .iter()
                .map(|(host, _)| all.spawn(|| check(host)))
                .collect();
            let found = checks.into_iter().filter_map(|check| check.join().ok());
            found.flatten().collect()
        });
        match problems.is_empty() {
            true => Ok(()),
            false => Err(Unreachable { problems }),
        }
    }

    /// The hosts of a world: its members, and each one's share of the ranks. The first ones take as many as they can.
    pub fn members(&self, world: u64) -> Vec<(Member, Share)> {
        let mut left = world;
        let mut members = Vec::new();
        for (slot, host) in (0..).zip(&self.hosts) {
            let Some(remote) = host.remote().filter(|_| host.is_usable()) else {
                continue;
            };
            let ranks = left.min(host.slots(self.device));
            if ranks == 0 {
                continue;
            }
            left -= ranks;
            let member = Member {
                slot,
                ranks,
                pod: None,
            };
            let gpus = host.gpus.iter().map(|gpu| gpu.id.clone());
            let gpus = match self.device {
                DeviceKind::Cuda => gpus.take(usize::try_from(ranks).unwrap_or(0)).collect(),
                DeviceKind::Cpu => Vec::new(),
            };
            let share = Share {
                host: Arc::clone(remote),
                count: ranks,
                gpus,
            };
            members.push((member, share));
        }
        members
    }

    /// Where rank 0 listens if it is on this host: the named port, if it is free.
    pub fn address(&self, host: usize, named: Option<u16>) -> Address {
        let host = &self.hosts[host];
        // A taken port is an error of rank 0, and the next generation has another one.
        let chosen = host.remote().and_then(|remote| remote.port(named));
        Address {
            host: host.address.clone(),
            port: chosen.unwrap_or_else(port::random),
        }
    }

    /// The `gpu`-th GPU of a host does not work: no further rank takes it.
    pub fn lose_gpu(&mut self, host: usize, gpu: usize) {
        let gpus = &mut self.hosts[host].gpus;
        if gpu < gpus.len() {
            gpus.remove(gpu);
        }
    }

    /// Looks at all hosts, and calls lost ones again.
    pub fn look(&mut self) -> Vec<HostNews> {
        let mut news = Vec::new();
        while let Ok(Arrival {
            host: index,
            called,
        }) = self.arrivals.1.try_recv()
        {
            let host = &mut self.hosts[index];
            if !matches!(host.state, State::Connecting) {
                continue;
            }
            let called = Host::called(host.reach.clone(), called);
            let before = std::mem::replace(host, called);
            let message = match (host.remote(), &host.problem) {
                (Some(_), _) if host.reach.is_optional() => format!("{} has joined", host.name),
                (Some(_), _) => format!("{} is back", host.name),
                // Of one that was lost the user knows.
                (None, Some(problem))
                    if host.reach.is_optional() && before.problem.as_ref() != Some(problem) =>
                {
                    problem.clone()
                }
                (None, _) => continue,
            };
            news.push(HostNews {
                message,
                lost: None,
            });
        }
        for index in 0..self.hosts.len() {
            let host = &mut self.hosts[index];
            match &host.state {
                State::There(remote) => {
                    if let Some(why) = remote.loss() {
                        news.push(HostNews {
                            message: format!("{} is lost: {why}", host.name()),
                            lost: Some(Lost {
                                host: index,
                                fenced: remote.fenced(),
                            }),
                        });
                        host.state = State::Gone(Instant::now() + RETRY);
                        if host.leaves {
                            let reach = host.reach.clone();
                            thread::spawn(move || reach.has_left());
                        }
                    } else if remote.is_leaving() && !std::mem::replace(&mut host.leaves, true) {
                        news.push(HostNews {
                            message: format!("{} is about to end", host.name()),
                            lost: None,
                        });
                    }
                }
                State::Gone(next) if Instant::now() >= *next => {
                    host.state = State::Connecting;
                    let (reach, callers) = (host.reach.clone(), self.callers.clone());
                    let (token, arrivals) = (self.token.clone(), self.arrivals.0.clone());
                    thread::spawn(move || {
                        let called = callers.call(&reach, &|_| ());
                        let shares = |reached: &Reached| {
                            token
                                .as_ref()
                                .is_none_or(|token| token.is_read(&reached.remote) == Some(true))
                        };
                        let called = match called {
                            Ok(Some(reached)) if !shares(&reached) => {
                                let problem = "it does not have the run's directory";
                                Err(Unreached::Unstarted(problem.to_owned()))
                            }
                            called => called,
                        };
                        let _ = arrivals.send(Arrival {
                            host: index,
                            called,
                        });
                    });
                }
                State::Gone(_) | State::Connecting => {}
            }
        }
        news
    }

    /// The hosts that are not there or about to leave; `None`: all are there.
    pub fn absent(&self) -> Option<String> {
        let absent = self.hosts.iter().filter(|host| !host.is_usable());
        let names: Vec<String> = absent.map(Host::name).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }
}

impl fmt::Display for Hosts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let begin = |host: &&Host| host.remote().is_some() || !host.reach.is_optional();
        let begin: Vec<&Host> = self.hosts.iter().filter(begin).collect();
        let each = begin.iter().map(|host| {
            let slots = host.slots(self.device);
            let has = match self.device {
                DeviceKind::Cuda => count(slots, "GPU"),
                DeviceKind::Cpu => count(slots, "process"),
            };
            format!("{} ({has})", host.name())
        });
        let each: Vec<String> = each.collect();
        let hosts = count(begin.len() as u64, "host");
        let by = match self.hosts.first().map(|host| &host.reach) {
            Some(Reach::Slurm(_) | Reach::SlurmJob(..)) => "of the Slurm job",
            _ => "by SSH",
        };
        write!(f, "{hosts} {by}: {}", each.join(", "))?;
        match self.hosts.len() - begin.len() {
            0 => Ok(()),
            later => write!(f, "; {later} more when Slurm gives them"),
        }
    }
}

impl Callers {
    fn call(&self, reach: &Reach, note: &dyn Fn(String)) -> Called {
        reach.connect(&self.program, &self.first, note)
    }
}

impl Token {
    fn is_read(&self, remote: &Remote) -> Option<bool> {
        remote.reads(&self.file, &self.text)
    }
}

/// Two names of one machine, whose devices would count twice.
fn twice(hosts: &[Host]) -> Option<String> {
    let machine = |host: &Host| host.remote().map(|remote| remote.facts().machine.clone());
    let mut names = BTreeMap::new();
    for host in hosts
        .iter()
        .filter(|host| matches!(host.reach, Reach::Ssh(_)))
    {
        let Some(machine) = machine(host) else {
            continue;
        };
        if let Some(other) = names.insert(machine, host.name()) {
            return Some(format!(
                "{other} and {} are one machine; name it once",
                host.name()
            ));
        }
    }
    None
}

impl Host {
    /// A host that was called.
    fn called(reach: Reach, called: Called) -> Host {
        let mut host = Host {
            name: reach.name(),
            address: String::new(),
            state: State::Gone(Instant::now() + RETRY),
            leaves: false,
            gpus: Vec::new(),
            problem: None,
            reach,
        };
        match called {
            Ok(Some(Reached {
                remote,
                name,
                address,
            })) => {
                let gpus = match remote.facts().inventory.devices() {
                    Devices::Gpus { devices } => devices,
                    Devices::CpuRanks { .. } => Vec::new(),
                };
                let most = host.reach.most_gpus();
                let most = most.map_or(usize::MAX, |most| {
                    usize::try_from(most).unwrap_or(usize::MAX)
                });
                host.gpus = gpus.into_iter().take(most).collect();
                (host.name, host.address) = (name, address);
                host.state = State::There(Arc::new(remote));
            }
            Ok(None) => {}
            Err(why) => {
                let remedy = host.reach.remedy(&why);
                host.problem = Some(format!("{} is not reached: {why}; {remedy}", host.name));
            }
        }
        host
    }

    /// Why it does not have the GPUs that the list says.
    fn lacks_gpus(&self) -> Option<String> {
        let (asked, has) = (self.reach.most_gpus()?, self.gpus.len() as u64);
        let lacks = self.remote().is_some() && has < asked;
        lacks.then(|| {
            format!(
                "{} has {}, and {asked} are asked for; correct {}",
                self.name(),
                count(has, "GPU"),
                match self.reach {
                    Reach::Ssh(_) => "`gpus=` in the list of hosts",
                    Reach::Slurm(_) | Reach::SlurmJob(..) => "--gpus-per-node",
                }
            )
        })
    }

    fn name(&self) -> String {
        self.name.clone()
    }

    fn remote(&self) -> Option<&Arc<Remote>> {
        match &self.state {
            State::There(remote) => Some(remote),
            State::Gone(_) | State::Connecting => None,
        }
    }

    /// Whether it is there and stays.
    fn is_usable(&self) -> bool {
        // One whose connection has ended since the last look is not.
        self.remote().is_some_and(|remote| remote.stays())
    }

    fn slots(&self, device: DeviceKind) -> u64 {
        match device {
            DeviceKind::Cuda => self.gpus.len() as u64,
            DeviceKind::Cpu => self.reach.procs(),
        }
    }
}

/// The variables that ranks on other hosts get from this process.
fn environment() -> impl Iterator<Item = (String, String)> {
    let all = std::env::vars_os();
    let texts =
        all.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
    texts.filter(|(name, _)| is_passed_on(name))
}

fn is_passed_on(name: &str) -> bool {
    PASSED_ON.iter().any(|begins| name.starts_with(begins)) && !OWN.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_get_what_programs_need_and_keep_their_own_devices() {
        for name in [
            "PATH",
            "PYTHONPATH",
            "HF_TOKEN",
            "NCCL_DEBUG",
            "EVENKEEL_CUDA_LIBRARIES",
        ] {
            assert!(is_passed_on(name), "{name}");
        }
        for name in [
            "CUDA_VISIBLE_DEVICES",
            "HOME",
            "USER",
            "SSH_CONNECTION",
            "SLURM_PROCID",
            "RANK",
            "EVENKEEL_SLURM_RUN",
        ] {
            assert!(!is_passed_on(name), "{name}");
        }
    }
}
