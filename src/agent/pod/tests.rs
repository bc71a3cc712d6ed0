//! The parts of the agent's loop, with a sleeping process as rank.

use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::*;
use crate::api::recipe_snapshot::RecipeSnapshot;
use crate::api::status::Current as Published;
use crate::api::{LogFormat, RemainderPolicy};
use crate::host::News;
use crate::lifecycle::files;
use crate::lifecycle::generation::{Address, Member, PodRef, testing};
use crate::lifecycle::protocol::{Ending, Report};
use crate::lifecycle::stall::{OnStall, ProgressDeadline};
use crate::plan::DeviceKind;
use crate::plan::{self, PlanRequest};
use crate::recipe;
use crate::telemetry::now;
use crate::util::key::Key;
use crate::util::testing::write_program;

const FENCE: Duration = Duration::from_secs(30);

/// A pod of a world with one rank per pod. Tests call the parts of its agent directly.
struct Pod {
    agent: PodAgent,
    happened: Receiver<RankEvent>,
    asked: watch::Receiver<Vec<Peer>>,
    /// Must be on a mount, as every volume is.
    volume: tempfile::TempDir,
    _program: tempfile::TempDir,
    _inputs: Sender<Input>,
}

/// Address of a member's pod.
fn address(member: u8) -> IpAddr {
    IpAddr::V4(Ipv4Addr::new(10, 0, 0, member))
}

/// A program that ends only by a kill.
fn sleeper(place: &Path) -> PathBuf {
    let program = place.join("sleeper");
    write_program(&program, "exec sleep 600");
    program
}

impl Pod {
    /// Member `member` of the world. It has not received its job yet.
    fn new(member: u8) -> Pod {
        let volume = tempfile::tempdir_in("/dev/shm").unwrap();
        let program = tempfile::tempdir().unwrap();
        let (events, happened) = channel();
        let (inputs, received) = channel();
        let (published, _) = watch::channel(AgentState::default());
        let (asks, asked) = watch::channel(Vec::new());
        let identity = Identity {
            program: sleeper(program.path()),
            job: "uid".into(),
            key: Key::random().unwrap(),
            pod: format!("uid-{member}"),
            run: volume.path().join("run"),
            bucket: None,
            setup: false,
            devices: 1,
            cores: 1,
        };
        let log = EventLog::stdout(LogFormat::Text);
        Pod {
            agent: PodAgent::new(identity, received, events, published, asks, log),
            happened,
            asked,
            volume,
            _program: program,
            _inputs: inputs,
        }
    }

    /// Passes of the loop, until the volume was searched and after it. After a wait it is searched again.
    fn act(&mut self) {
        for _ in 0..2 {
            self.agent.act();
            while let Some(search) = &mut self.agent.later
                && search.result().is_none()
            {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        self.agent.act();
    }

    /// Delivers this generation of the job.
    fn receive_generation(&mut self, number: u64, change: impl FnOnce(&mut Membership)) {
        let mut job = job_of(1);
        let generation = job.generation.as_mut().unwrap();
        generation.record.number = number;
        change(&mut job);
        self.agent.take(Input::Job(Box::new(job)));
        self.act();
    }

    /// Delivers the job's first generation.
    fn receive_job(&mut self, world: u8) {
        let job = Box::new(job_of(world));
        self.agent.take(Input::Job(job));
        self.act();
    }

    /// Writes what the first member prepares.
    fn prepare(&self) {
        let run = self.volume.path().join("run");
        std::fs::create_dir_all(&run).unwrap();
        std::fs::write(run.join(files::RUN), "{}").unwrap();
    }

    fn runs(&self) -> bool {
        self.agent.state.generation == 1 && !self.agent.all_ended()
    }

    /// The pod's rank reports.
    fn report(&mut self, report: Report) {
        let report = RankEvent {
            generation: self.agent.state.generation,
            rank: 0,
            news: News::Report(Box::new(report)),
        };
        self.agent.take(Input::Rank(report));
    }

    /// How the pod's rank ended.
    fn ended(&mut self) -> Ending {
        loop {
            let event = self.happened.recv_timeout(Duration::from_secs(60)).unwrap();
            self.agent.take(Input::Rank(event));
            if let Some(ending) = self.agent.state.ranks[0].ending() {
                return ending;
            }
        }
    }

    fn asked(&mut self) -> Vec<IpAddr> {
        self.agent.ask_peers();
        let asked = self.asked.borrow();
        asked.iter().map(|peer| peer.host).collect()
    }
}

fn job_of(world: u8) -> Membership {
    let text = format!(
        "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
         evenkeel: {{objective: sft, batch: {{gpus: {world}}}}}\n"
    );
    let snapshot = RecipeSnapshot {
        text,
        ..RecipeSnapshot::default()
    };
    let request = snapshot
        .request(RemainderPolicy::Exact.into(), &[])
        .unwrap();
    let recipe = recipe::read(&request).unwrap();
    let members = (0..world).map(|member| Member {
        slot: member.into(),
        ranks: 1,
        carries: Vec::new(),
        pod: Some(PodRef {
            name: format!("job-{member}-1"),
            uid: format!("uid-{member}"),
            ip: address(member).to_string(),
            node: format!("node{member}"),
        }),
    });
    let plan = plan::plan(&recipe, &PlanRequest::gpus(world.into())).unwrap();
    let record = Generation {
        master: Address {
            host: address(0).to_string(),
            port: 1,
        },
        created: now(),
        ..testing::record(1, members.collect(), plan)
    };
    Membership {
        recipe: snapshot,
        remainder: RemainderPolicy::Exact,
        device: DeviceKind::Cpu,
        rank_memory: None,
        command: Vec::new(),
        generation: Some(Published {
            record,
            command: None,
            drain: false,
            pause: false,
            drain_cause: String::new(),
            after_loss: None,
            outcome: None,
            end_time: None,
        }),
        checkpoint: None,
        fence_after: FENCE,
        drain: Duration::from_secs(60),
        progress_deadline: Default::default(),
        on_stall: Default::default(),
        over: false,
    }
}

fn ago(time: Duration) -> Instant {
    Instant::now().checked_sub(time).unwrap()
}

#[test]
fn a_single_pod_world_stops_when_it_is_cut_off() {
    let mut pod = Pod::new(0);
    pod.prepare();
    pod.receive_job(1);
    assert!(pod.runs());
    pod.agent.contact.after(2 * FENCE);
    // The API server is unreachable, the controller is not.
    pod.agent.take(Input::Polled);
    pod.act();
    assert_eq!(pod.agent.state.ranks[0].cause, None);
    pod.agent.contact.after(2 * FENCE);
    pod.act();
    assert_eq!(pod.ended(), Ending::Signal(9));
    let message = pod.agent.state.ranks[0].signal_message(9);
    assert!(
        message.starts_with("cut off: no contact with the API server"),
        "{message}"
    );
}

#[test]
fn a_pod_that_is_cut_off_starts_no_ranks() {
    let mut pod = Pod::new(1);
    pod.receive_job(2);
    pod.agent.contact.after(2 * FENCE);
    pod.prepare();
    pod.act();
    assert_eq!(pod.agent.state.generation, 0);
    pod.agent.take(Input::Peer(Answer {
        host: address(0),
        generation: 0,
    }));
    pod.act();
    assert!(pod.runs());
}

#[test]
fn peers_are_asked_while_the_cluster_is_silent_and_an_answer_keeps_ranks_alive() {
    let mut pod = Pod::new(1);
    pod.prepare();
    pod.receive_job(3);
    assert!(pod.asked().is_empty());
    pod.agent.contact.after(FENCE / 2);
    assert_eq!(pod.asked(), [address(2), address(0)]);
    pod.agent.contact.after(FENCE);
    let answered = |generation| {
        Input::Peer(Answer {
            host: address(2),
            generation,
        })
    };
    pod.agent.take(answered(1));
    pod.act();
    assert_eq!(pod.agent.state.ranks[0].cause, None);
    // A peer with a newer generation proves that these ranks belong to no world.
    pod.agent.take(answered(2));
    assert_eq!(pod.ended(), Ending::Signal(9));
}

#[test]
fn a_waiting_pod_reports_what_it_waits_for_and_detects_an_unshared_volume() {
    let mut pod = Pod::new(1);
    pod.receive_job(2);
    assert_eq!(pod.agent.state.waiting_for, None);
    pod.agent.waiting.as_mut().unwrap().begun = ago(Duration::from_secs(60));
    pod.act();
    let message = pod.agent.state.waiting_for.clone().unwrap();
    assert!(
        message.starts_with("waiting for job-0-1 to prepare the run in "),
        "{message}"
    );
    assert_eq!(pod.asked(), [address(0)]);

    pod.agent.take(Input::Peer(Answer {
        host: address(0),
        generation: 1,
    }));
    pod.act();
    assert_eq!(
        pod.agent.state.problem, None,
        "a shared file may appear late"
    );
    pod.agent.waiting.as_mut().unwrap().first_started = Some(ago(Duration::from_secs(60)));
    pod.act();
    let problem = pod.agent.state.problem.clone().unwrap();
    assert_eq!(problem.reason, "VolumeNotShared");
    assert!(!problem.deterministic && problem.message.contains("ReadWriteMany"));

    // The volume turns out to be shared.
    pod.prepare();
    pod.agent.pause = None;
    pod.act();
    assert!(pod.runs());
    assert_eq!(
        (&pod.agent.state.problem, &pod.agent.state.waiting_for),
        (&None, &None)
    );
    assert!(pod.asked().is_empty());
}

#[test]
fn prerequisites_of_a_start_are_checked_every_few_seconds() {
    let mut pod = Pod::new(0);
    pod.prepare();
    pod.agent.identity.devices = 0;
    pod.receive_job(1);
    let problem = pod.agent.state.problem.clone().unwrap();
    assert_eq!(problem.reason, "HardwareMismatch");
    pod.agent.identity.devices = 1;
    pod.act();
    assert!(!pod.runs(), "the check ran just now");
    pod.agent.pause = None;
    pod.act();
    assert!(pod.runs());
}

fn kill(process: u32) {
    let killed = Command::new("kill")
        .args(["-9", &process.to_string()])
        .status();
    assert!(killed.unwrap().success());
}

#[test]
fn a_killed_preparation_is_retried() {
    let mut pod = Pod::new(0);
    pod.receive_job(1);
    let first = pod.agent.preparation.as_ref().unwrap().child.id();
    assert_eq!(pod.agent.state.problem, None);
    kill(first);
    let deadline = Instant::now() + Duration::from_secs(60);
    while pod.agent.state.problem.is_none() {
        assert!(Instant::now() < deadline);
        pod.act();
    }
    let problem = pod.agent.state.problem.clone().unwrap();
    assert_eq!(problem.reason, "PreparationFailed");
    assert!(!problem.deterministic && problem.message.contains("signal 9"));
    pod.agent.pause = None;
    pod.act();
    let second = pod.agent.preparation.take().unwrap();
    assert_ne!(second.child.id(), first);
    kill(second.child.id());
}

#[test]
fn every_step_of_an_external_trainer_is_published() {
    let mut pod = Pod::new(0);
    let mut job = job_of(1);
    job.command = vec!["train".to_owned()];
    let pattern = "evenkeel.trainer.progress_pattern=step (?<step>[0-9]+)";
    job.recipe.overrides = vec![pattern.to_owned()];
    pod.agent.take(Input::Job(Box::new(job)));
    pod.act();
    assert!(pod.runs());
    let published = pod.agent.published.subscribe();
    let log = pod.volume.path().join("run").join(files::rank_log(1, 0));
    for step in [4, 5] {
        std::fs::write(&log, "step 4\nstep 5\n".split_at(7 * (step - 3)).0).unwrap();
        pod.agent.follow_ranks(false);
        let found = published.borrow().step.as_ref().map(|record| record.step);
        assert_eq!(found, Some(step as u64));
    }
}

#[test]
fn a_pod_whose_job_is_gone_drains_its_ranks_and_kills_those_that_stay() {
    let mut pod = Pod::new(0);
    pod.prepare();
    pod.receive_job(1);
    assert!(pod.runs());
    pod.agent.take(Input::Gone);
    pod.act();
    assert!(pod.runs(), "they have time to commit");
    pod.agent.gone = Some(ago(Duration::from_secs(61)));
    pod.act();
    assert_eq!(pod.ended(), Ending::Signal(9));
    assert!(pod.agent.terminating && pod.agent.all_ended(), "it exits");
}

#[test]
fn a_pod_whose_job_is_gone_starts_no_ranks() {
    let mut pod = Pod::new(0);
    pod.prepare();
    pod.agent.take(Input::Gone);
    pod.receive_job(1);
    assert_eq!(pod.agent.state.generation, 0);
    assert!(pod.agent.all_ended(), "it exits");
}

#[test]
fn ranks_start_only_above_the_generations_on_the_volume() {
    let mut pod = Pod::new(0);
    pod.prepare();
    let run = pod.volume.path().join("run");
    let mut earlier = job_of(1).generation.unwrap().record;
    earlier.number = 3;
    earlier.write(&run).unwrap();
    // A generation of another job, and one that began too late to write its record.
    earlier.job = "another".to_owned();
    earlier.number = 5;
    earlier.write(&run).unwrap();
    std::fs::create_dir(run.join(files::generation(6))).unwrap();
    let later = |pod: &Pod| pod.agent.state.later.as_ref().map(|later| later.number);

    pod.receive_generation(1, |_| {});
    assert_eq!((pod.agent.state.generation, later(&pod)), (0, Some(3)));
    // The number is right, but the API server published this one after it was restored.
    pod.receive_generation(3, |job| {
        job.generation.as_mut().unwrap().record.created += 60.0;
    });
    assert_eq!((pod.agent.state.generation, later(&pod)), (0, Some(3)));
    pod.receive_generation(4, |_| {});
    assert_eq!((pod.agent.state.generation, later(&pod)), (4, None));
    assert!(!pod.agent.all_ended());
}

#[test]
fn a_checkpoint_that_cannot_be_read_now_may_be_the_newest() {
    let mut pod = Pod::new(0);
    pod.prepare();
    let run = pod.volume.path().join("run");
    job_of(1).generation.unwrap().record.write(&run).unwrap();
    let checkpoint = run.join(files::checkpoint_path(1, 10));
    std::fs::create_dir(&checkpoint).unwrap();
    let manifest = checkpoint.join("manifest.json");
    std::os::unix::fs::symlink(&manifest, &manifest).unwrap();
    pod.receive_generation(2, |_| {});
    assert_eq!(pod.agent.state.generation, 0);
    let problem = pod.agent.state.problem.clone().unwrap();
    assert_eq!(problem.reason, "StartFailed");
    // What is damaged does not count.
    std::fs::remove_file(&manifest).unwrap();
    std::fs::write(&manifest, "{").unwrap();
    pod.agent.pause = None;
    pod.act();
    assert_eq!(
        (pod.agent.state.generation, &pod.agent.state.problem),
        (2, &None)
    );
}

#[test]
fn the_volume_is_searched_once_the_ranks_of_earlier_generations_have_ended() {
    let mut pod = Pod::new(0);
    pod.prepare();
    pod.receive_generation(1, |_| {});
    assert!(pod.runs());
    let mut job = job_of(1);
    job.generation.as_mut().unwrap().record.number = 2;
    let published = job.generation.clone().unwrap().record;
    pod.agent.take(Input::Job(Box::new(job)));
    let searches = |pod: &Pod| {
        let search = pod.agent.later.as_ref();
        search.is_some_and(|search| search.is_for(Some(&published)))
    };
    pod.act();
    assert!(!searches(&pod), "the rank may still commit");
    assert_eq!(pod.ended(), Ending::Signal(9));
    pod.act();
    assert!(searches(&pod));
    assert_eq!(pod.agent.state.generation, 2);
}

#[test]
fn a_generation_that_waited_begins_only_after_another_search() {
    let mut pod = Pod::new(1);
    pod.receive_job(2);
    assert!(pod.agent.waiting.is_some());
    let run = pod.volume.path().join("run");
    let mut later = job_of(2).generation.unwrap().record;
    later.number = 2;
    later.write(&run).unwrap();
    pod.prepare();
    pod.act();
    let found = pod.agent.state.later.as_ref().map(|later| later.number);
    assert_eq!((pod.agent.state.generation, found), (0, Some(2)));
}

#[test]
fn a_pod_closes_the_earlier_generations_before_it_searches_for_their_newest_checkpoint() {
    let mut pod = Pod::new(0);
    pod.prepare();
    let run = pod.volume.path().join("run");
    job_of(1).generation.unwrap().record.write(&run).unwrap();
    let unfinished = files::partial(&run.join(files::checkpoint_path(1, 10)));
    let starting = run.join(files::generation(2)).join(files::STARTING);
    // An agent was killed before it could remove it.
    let withdrawn = files::withdrawn(&run.join(files::checkpoint_path(1, 9)));
    for directory in [&unfinished, &withdrawn] {
        std::fs::create_dir(directory).unwrap();
    }
    // The pod is no member.
    pod.receive_generation(2, |job| {
        job.generation.as_mut().unwrap().record.members.clear();
    });
    assert!(unfinished.exists() && !starting.exists());
    pod.receive_generation(2, |job| {
        job.generation.as_mut().unwrap().record.created += 60.0;
    });
    assert_eq!(pod.agent.state.generation, 2);
    assert!(!unfinished.exists() && !withdrawn.exists() && starting.exists());
}

#[test]
fn an_older_status_says_nothing_about_the_ranks_of_a_later_generation() {
    let mut pod = Pod::new(0);
    pod.prepare();
    pod.receive_generation(2, |_| {});
    assert!(!pod.agent.all_ended());
    pod.receive_generation(1, |job| {
        let generation = job.generation.as_mut().unwrap();
        generation.outcome = Some(crate::lifecycle::Outcome::Drained);
        generation.drain = true;
    });
    let later = pod.agent.state.later.as_ref().map(|later| later.number);
    assert_eq!(later, Some(2));
    assert!(!pod.agent.all_ended() && !pod.agent.current.as_ref().unwrap().is_draining());
    pod.receive_generation(3, |_| {});
    assert_eq!(pod.ended(), Ending::Signal(9));
    pod.act();
    assert_eq!(pod.agent.state.generation, 3);
}

fn stall(pod: &mut Pod, waiting: bool) {
    let message = "no progress for 9 s while computing".to_owned();
    pod.report(Report::Stalled { message, waiting });
}

#[test]
fn a_stalled_rank_is_killed_unless_it_is_only_reported() {
    let mut pod = Pod::new(0);
    pod.prepare();
    pod.receive_generation(1, |job| job.on_stall = OnStall::Report);
    stall(&mut pod, false);
    let stalled = pod.agent.state.stalled.clone();
    assert_eq!(
        stalled.as_deref(),
        Some("rank 0: no progress for 9 s while computing")
    );
    pod.report(Report::Progressing);
    assert_eq!(pod.agent.state.stalled, None);
    assert!(pod.runs());

    pod.receive_generation(1, |job| job.on_stall = OnStall::Restart);
    stall(&mut pod, false);
    assert_eq!(pod.ended(), Ending::Signal(9));
    let rank = &pod.agent.state.ranks[0];
    assert!(rank.is_stalled());
    assert_eq!(
        rank.signal_message(9),
        "no progress for 9 s while computing, so it was killed"
    );
}

#[test]
fn a_rank_that_stalls_in_waiting_for_others_does_not_count_as_the_cause() {
    let mut pod = Pod::new(0);
    pod.prepare();
    pod.receive_generation(1, |_| {});
    stall(&mut pod, true);
    assert_eq!(pod.ended(), Ending::Signal(9));
    assert!(!pod.agent.state.ranks[0].is_stalled());
}

#[test]
fn a_stalled_external_trainer_is_aborted_so_that_it_writes_its_stacks() {
    let mut pod = Pod::new(0);
    pod.receive_generation(1, |job| {
        job.command = vec!["train".to_owned()];
        job.progress_deadline = ProgressDeadline::After(Duration::ZERO);
    });
    assert!(pod.runs());
    std::thread::sleep(Duration::from_millis(2));
    pod.agent.follow_ranks(false);
    assert_eq!(pod.ended(), Ending::Signal(6));
    assert!(pod.agent.state.ranks[0].is_stalled());
}
