//! The hosts of a run: which are there, what they have, and which of them run a world.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::slurm::submission;
use super::ssh::Program;
use super::{Called, Listed, Reach, Reached};
use crate::bucket::{Bucket, BucketError};
use crate::host::{Facts, Remote, Share, ToHost};
use crate::inventory::{Device, Devices};
use crate::launch::Requirements;
use crate::launch::run_dir::HostRow;
use crate::lifecycle::generation::Address;
use crate::lifecycle::{Member, files};
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
const PASSED_ON: [&str; 34] = [
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
    "AZURE_",
    "GOOGLE_",
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
    admission: Admission,
    arrivals: (Sender<Arrival>, Receiver<Arrival>),
}

/// What a host must have that joins a run which trains.
#[derive(Clone, Default)]
struct Admission {
    token: Option<Token>,
    bucket: Option<BucketToken>,
    trainer: Option<Arc<Requirements>>,
}

/// A host that is there.
struct There {
    name: String,
    remote: Arc<Remote>,
    /// By which the other hosts reach it.
    address: String,
}

/// A host and a port of it that others can connect to.
struct Linked {
    host: There,
    port: u16,
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
    /// It has been there.
    was_there: bool,
    /// It is about to end, and the user knows.
    leaves: bool,
    /// The user has removed it: it runs no further ranks.
    removed: bool,
    /// No rank needs it, and its job has ended.
    is_given_up: bool,
    /// Its GPUs that ranks can take.
    gpus: Vec<Device>,
    /// Why it is not there.
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
    /// Why a host that is reached cannot train.
    problem: Option<String>,
}

/// A file of the run directory whose text no other directory has.
#[derive(Clone)]
struct Token {
    file: PathBuf,
    text: String,
}

/// An object of the run's bucket, and its text.
#[derive(Clone)]
struct BucketToken {
    url: String,
    key: String,
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
            admission: Admission::default(),
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

    /// The problem of hosts with GPUs of different models, whose equal shares of a batch take different times.
    pub fn different_gpus(&self) -> Option<String> {
        let there = self
            .hosts
            .iter()
            .filter(|host| !host.removed && host.remote().is_some());
        let of_hosts = there.map(|host| {
            let models = host.gpus.iter().filter_map(|gpu| gpu.name.as_deref());
            (host, models.collect::<BTreeSet<&str>>())
        });
        let of_hosts: Vec<_> = of_hosts.filter(|(_, models)| !models.is_empty()).collect();
        let all: BTreeSet<&str> = of_hosts
            .iter()
            .flat_map(|(_, models)| models.iter().copied())
            .collect();
        let each = of_hosts.iter().map(|(host, models)| {
            let models: Vec<&str> = models.iter().copied().collect();
            format!("{} ({})", host.name(), models.join(", "))
        });
        (all.len() > 1).then(|| {
            format!(
                "the GPUs are of different models: {}; name hosts with GPUs of one model",
                each.collect::<Vec<_>>().join(", ")
            )
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

    /// Whether Slurm may give further hosts.
    pub fn may_grow(&self) -> bool {
        self.hosts.iter().any(|host| host.reach.is_optional())
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
    pub fn can_run(&mut self, trainer: Requirements, key: &str) -> Result<(), Unreachable> {
        let trainer = Arc::new(trainer);
        self.admission.trainer = Some(Arc::clone(&trainer));
        let lacks = |host: &Host| lacks(&host.name, host.remote()?, &trainer);
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

    /// Refuses hosts whose ranks cannot use the bucket.
    pub fn reach_bucket(&self, bucket: &Bucket) -> Result<(), Unreachable> {
        let refused = |error: BucketError| Unreachable {
            problems: vec![with_doctor(error.to_string(), bucket.base(), "here")],
        };
        let random = Key::random().map_err(|error| Unreachable {
            problems: vec![error.to_string()],
        })?;
        let text = random.reveal();
        let token = BucketToken {
            url: bucket.base().to_owned(),
            key: format!("{TOKEN}-{}", text.get(..16).unwrap_or(&text)),
            text,
        };
        bucket
            .put(&token.key, token.text.clone().into_bytes())
            .map_err(refused)?;
        let there: Vec<There> = self.there().collect();
        let problems = thread::scope(|all| {
            let token = &token;
            let check = |host| all.spawn(move || token.problem(host));
            let checks: Vec<_> = there.iter().map(check).collect();
            let found = checks.into_iter().filter_map(|check| check.join().ok());
            found.flatten().collect::<Vec<String>>()
        });
        bucket.delete(&token.key).map_err(refused)?;
        if problems.is_empty() {
            return Ok(());
        }
        Err(Unreachable { problems })
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
        self.admission.token = file.zip(text).map(|(file, text)| Token { file, text });
    }

    /// Hosts that come back show by the object of this file in the run's bucket that they can use it.
    pub fn recognise_bucket(&mut self, bucket: &Bucket, file: &Path) {
        let text = input::read(file, FILE_BYTES).ok();
        let text = text.and_then(|text| String::from_utf8(text).ok());
        self.admission.bucket = text.map(|text| BucketToken {
            url: bucket.base().to_owned(),
            key: files::RUN.to_owned(),
            text,
        });
        if self.share_small_files() {
            self.recognise(file);
        }
    }

    /// Whether they share the directory of a run that has a bucket: any of these nodes may run its next launcher.
    pub fn share_small_files(&self) -> bool {
        let is_of_slurm = |host: &Host| matches!(host.reach, Reach::Slurm(_) | Reach::SlurmJob(..));
        self.hosts.iter().any(is_of_slurm)
    }

    /// Removes a run from the disks of all hosts.
    pub fn clear(&self, job: &str) {
        let there: Vec<There> = self.there().collect();
        thread::scope(|all| {
            for There { name, remote, .. } in &there {
                all.spawn(move || remote.clear(&own_disk(job, name)));
            }
        });
    }

    /// Refuses hosts that do not reach each other.
    pub fn check_links(&self) -> Result<(), Unreachable> {
        let here: Vec<Linked> = self.there().map(There::linked).collect();
        let problems: Vec<String> = thread::scope(|all| {
            let checks: Vec<_> = here
                .iter()
                .map(|host| {
                    let others = here.iter().filter(|other| !std::ptr::eq(*other, host));
                    let others: Vec<&Linked> = others.collect();
                    all.spawn(move || host.unreached(&others))
                })
                .collect();
            let found = checks.into_iter().filter_map(|check| check.join().ok());
            found.flatten().collect()
        });
        match problems.is_empty() {
            true => Ok(()),
            false => Err(Unreachable { problems }),
        }
    }

    fn there(&self) -> impl Iterator<Item = There> {
        self.hosts.iter().filter_map(|host| {
            Some(There {
                name: host.name(),
                remote: Arc::clone(host.remote()?),
                address: host.address.clone(),
            })
        })
    }

    /// The user's hosts are now these.
    pub fn change(&mut self, listed: Vec<Listed>) {
        let is =
            |host: &Host, listed: &Listed| matches!(&host.reach, Reach::Ssh(of) if of == listed);
        for host in &mut self.hosts {
            host.removed = !listed.iter().any(|listed| is(host, listed));
        }
        for listed in listed {
            if !self.hosts.iter().any(|host| is(host, &listed)) {
                let mut host = Host::called(Reach::Ssh(listed), Ok(None));
                host.state = State::Gone(Instant::now());
                self.hosts.push(host);
            }
        }
    }

    /// The hosts for the status of a run.
    pub fn rows(&self) -> Vec<HostRow> {
        let hosts = self.hosts.iter().filter(|host| !host.removed);
        let row = |host: &Host| HostRow {
            name: host.name(),
            slots: host.remote().map_or(0, |_| host.slots(self.device)),
            problem: host.problem.clone(),
        };
        hosts.map(row).collect()
    }

    /// The hosts of a world of this job: its members, and each one's share of the ranks. The first ones take as many as they
    /// can.
    pub fn members(&self, job: &str, world: u64) -> Vec<(Member, Share)> {
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
                carries: Vec::new(),
                pod: None,
            };
            let gpus = host.gpus.iter().map(|gpu| gpu.id.clone());
            let gpus = match self.device {
                DeviceKind::Cuda => gpus.collect(),
                DeviceKind::Cpu => Vec::new(),
            };
            let share = Share {
                slot,
                host: Arc::clone(remote),
                own_disk: own_disk(job, &host.name),
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

    /// A GPU of a host does not work: no further rank takes it.
    pub fn lose_gpu(&mut self, host: usize, gpu: &str) {
        self.hosts[host].gpus.retain(|it| it.id != gpu);
    }

    /// Looks at all hosts, and calls those again that are lost and wanted. `wanted`: most ranks that the run may have.
    /// `busy`: hosts with ranks now.
    pub fn look(&mut self, wanted: u64, busy: &[usize]) -> Vec<HostNews> {
        let mut news = Vec::new();
        while let Ok(arrival) = self.arrivals.1.try_recv() {
            let message = self.arrived(arrival);
            news.extend(message.map(|message| HostNews {
                message,
                lost: None,
            }));
        }
        let mut left = wanted;
        for index in 0..self.hosts.len() {
            let slots = self.hosts[index].expected_slots(self.device);
            let is_idle = !busy.contains(&index);
            let host = &mut self.hosts[index];
            let is_spare = host.removed || left == 0 && host.reach.is_optional();
            if !host.removed {
                left = left.saturating_sub(slots);
            }
            match &host.state {
                State::There(remote) => {
                    if let Some(why) = remote.loss() {
                        let message = format!("{} is lost: {why}", host.name());
                        host.problem = Some(message.clone());
                        news.push(HostNews {
                            message,
                            lost: Some(Lost {
                                host: index,
                                fenced: remote.fenced(),
                            }),
                        });
                        host.state = State::Gone(Instant::now() + RETRY);
                        if host.leaves {
                            host.give_up();
                        }
                    } else if remote.is_leaving() && !std::mem::replace(&mut host.leaves, true) {
                        news.push(HostNews {
                            message: format!("{} is about to end", host.name()),
                            lost: None,
                        });
                    } else if is_spare && is_idle {
                        host.state = State::Gone(Instant::now());
                        news.push(HostNews {
                            message: format!("{} is no longer needed", host.name()),
                            lost: None,
                        });
                    }
                }
                State::Gone(_) if is_spare => {
                    if !std::mem::replace(&mut host.is_given_up, true) {
                        host.give_up();
                    }
                }
                State::Gone(next) if Instant::now() >= *next => {
                    host.is_given_up = false;
                    host.state = State::Connecting;
                    let (reach, callers) = (host.reach.clone(), self.callers.clone());
                    let (admission, arrivals) = (self.admission.clone(), self.arrivals.0.clone());
                    let others: Vec<There> = self.there().collect();
                    thread::spawn(move || {
                        let called = callers.call(&reach, &|_| ());
                        let problem = match &called {
                            Ok(Some(reached)) => admission.problem(reached, others),
                            Ok(None) | Err(_) => None,
                        };
                        let _ = arrivals.send(Arrival {
                            host: index,
                            called,
                            problem,
                        });
                    });
                }
                State::Gone(_) | State::Connecting => {}
            }
        }
        news
    }

    /// Takes what became of a call. Returns what the user does not know yet.
    fn arrived(&mut self, arrival: Arrival) -> Option<String> {
        let Arrival {
            host: index,
            called,
            problem,
        } = arrival;
        let host = &self.hosts[index];
        if !matches!(host.state, State::Connecting) {
            return None;
        }
        let (reach, removed, was_there) = (host.reach.clone(), host.removed, host.was_there);
        let called = Host::called(reach, called);
        let before = std::mem::replace(&mut self.hosts[index], called);
        let problem = problem.or_else(|| {
            let arrived = &self.hosts[index];
            arrived.remote()?;
            let has_no_gpu = arrived.slots(self.device) == 0;
            let has_no_gpu = has_no_gpu.then(|| format!("{} has no GPU", arrived.name()));
            let differs = || {
                let by_evenkeel = self.admission.trainer.is_none();
                self.different_gpus()
                    .filter(|_| by_evenkeel && self.device == DeviceKind::Cuda)
            };
            let problem = arrived.lacks_gpus().or(has_no_gpu);
            problem.or_else(|| twice(&self.hosts)).or_else(differs)
        });
        let cannot_train = problem.is_some();
        let host = &mut self.hosts[index];
        host.removed = removed;
        host.was_there |= was_there;
        if cannot_train {
            host.state = State::Gone(Instant::now() + RETRY);
            host.problem = problem;
        }
        let is_new = host.reach.is_optional() || !was_there;
        match (host.remote(), &host.problem) {
            _ if removed => None,
            (Some(_), _) if is_new => Some(format!("{} has joined", host.name())),
            (Some(_), _) => Some(format!("{} is back", host.name())),
            // Of one that was lost the user knows.
            (None, Some(problem))
                if (is_new || cannot_train) && before.problem.as_ref() != Some(problem) =>
            {
                Some(problem.clone())
            }
            (None, _) => None,
        }
    }

    /// The hosts that are not there or about to leave; `None`: all are there.
    pub fn absent(&self) -> Option<String> {
        let wanted = self.hosts.iter().filter(|host| !host.removed);
        let absent = wanted.filter(|host| !host.is_usable());
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

impl BucketToken {
    /// Why ranks on this host cannot use the bucket.
    fn problem(&self, host: &There) -> Option<String> {
        let problem = host.remote.check(&self.url, &self.key, &self.text)?;
        let problem = with_doctor(problem, &self.url, "on that host");
        Some(format!("{}: {problem}", host.name))
    }
}

/// A problem of a bucket, and the command that tests it.
fn with_doctor(problem: String, url: &str, place: &str) -> String {
    format!("{problem}; `evenkeel doctor --bucket {url}` {place} tests it again")
}

/// The run directory of a host that shares none, below its cache. Hosts may share that.
fn own_disk(job: &str, host: &str) -> PathBuf {
    let plain = |letter: char| letter.is_ascii_alphanumeric() || "-.".contains(letter);
    let host: String = host
        .chars()
        .map(|letter| if plain(letter) { letter } else { '_' })
        .collect();
    Path::new(job).join(format!("host-{host}"))
}

impl There {
    /// The same with a free port.
    fn linked(self) -> Linked {
        let port = self.remote.port(None).unwrap_or_else(port::random);
        Linked { host: self, port }
    }
}

impl Linked {
    /// Which of the others it does not reach.
    fn unreached(&self, others: &[&Linked]) -> Vec<String> {
        let address = |Linked { host, port }: &&Linked| Address {
            host: host.address.clone(),
            port: *port,
        };
        let addresses = others.iter().map(address).collect();
        let problems = self.host.remote.connects(addresses).unwrap_or_default();
        let problem = |(other, problem): (&&Linked, Option<String>)| {
            let (problem, There { name, address, .. }) = (problem?, &other.host);
            Some(format!(
                "{} does not reach {name} at {address}: {problem}; open ports 20000 to 32767 between the hosts",
                self.host.name
            ))
        };
        others.iter().zip(problems).filter_map(problem).collect()
    }
}

impl Admission {
    /// Why a host that is reached cannot train with these others.
    fn problem(&self, reached: &Reached, others: Vec<There>) -> Option<String> {
        let Reached {
            remote,
            name,
            address,
        } = reached;
        let token = self.token.as_ref();
        if token.is_some_and(|token| token.is_read(remote) != Some(true)) {
            return Some(format!("{name} does not have the run's directory"));
        }
        let this = There {
            name: name.clone(),
            remote: Arc::clone(remote),
            address: address.clone(),
        };
        let bucket = self.bucket.as_ref();
        if let Some(problem) = bucket.and_then(|bucket| bucket.problem(&this)) {
            return Some(problem);
        }
        let trainer = self.trainer.as_ref();
        if let Some(problem) = trainer.and_then(|trainer| lacks(name, remote, trainer)) {
            return Some(problem);
        }
        let this = this.linked();
        // One that is lost meanwhile does not answer.
        let others = others.into_iter().filter(|other| other.remote.stays());
        let others: Vec<Linked> = others.map(There::linked).collect();
        let others: Vec<&Linked> = others.iter().collect();
        let from_others = others.iter().flat_map(|other| other.unreached(&[&this]));
        this.unreached(&others)
            .into_iter()
            .chain(from_others)
            .next()
    }
}

/// Why an external trainer cannot start on a host.
fn lacks(name: &str, remote: &Remote, trainer: &Requirements) -> Option<String> {
    let problem = remote.lacks(&trainer.base, &trainer.program)?;
    Some(format!(
        "{name}: {problem}; install the program at the same path on all hosts, or launch from a directory that they share"
    ))
}

/// Two names of one machine, whose devices would count twice.
fn twice(hosts: &[Host]) -> Option<String> {
    let machine = |host: &Host| host.remote().map(|remote| remote.facts().machine.clone());
    let mut names = BTreeMap::new();
    for host in hosts
        .iter()
        .filter(|host| matches!(host.reach, Reach::Ssh(_)) && !host.removed)
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
            was_there: false,
            leaves: false,
            removed: false,
            is_given_up: false,
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
                host.state = State::There(remote);
                host.was_there = true;
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
        !self.removed && self.remote().is_some_and(|remote| remote.stays())
    }

    /// Lets a job of Slurm go.
    fn give_up(&self) {
        let reach = self.reach.clone();
        thread::spawn(move || reach.has_left());
    }

    /// Ranks that it can run, or may when it is there.
    fn expected_slots(&self, device: DeviceKind) -> u64 {
        match (device, self.remote()) {
            (DeviceKind::Cuda, None) => self.reach.most_gpus().unwrap_or(1),
            _ => self.slots(device),
        }
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
            "AWS_ENDPOINT_URL",
            "GOOGLE_APPLICATION_CREDENTIALS",
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

    #[test]
    fn the_directories_of_hosts_stay_in_the_directory_of_the_job() {
        for (host, directory) in [
            ("n1", "job/host-n1"),
            ("me@h2:2222", "job/host-me_h2_2222"),
            ("..", "job/host-.."),
            ("../x", "job/host-.._x"),
        ] {
            assert_eq!(own_disk("job", host), Path::new(directory));
        }
    }
}
