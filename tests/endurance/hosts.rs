//! Launches on other machines by SSH.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use evenkeel::engine::cuda::nvrtc::Nvrtc;
use rustix::process::Signal;
use serde_json::json;

use super::in_place::{ranks, record, spares};
use super::lab::{Lab, is_possible, sh};
use super::s3::Server;
use super::slurm::wait_for_world;
use super::ssh_lab::{SSHD, Servers};
use super::support::{
    Launched, Run, merge, same_losses, same_losses_so_far, small, stderr, wait_for,
};
use super::trainers::{BATCH, Trainer, own_file, own_trainer, python, same_samples};

/// Gives a process another time.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1";

#[test]
fn hosts_that_vanish_and_come_back_keep_the_batch_and_every_sample() {
    if !is_possible(&[SSHD]) {
        return;
    }
    let spec =
        || small(json!({"budget": {"samples": 36_000}, "checkpoint": {"every_samples": 2400}}));
    let alone = Run::of(spec());
    let output = alone.launch(&["--procs", "1", "--quiet"]);
    assert!(output.status.success(), "{}", stderr(&output));

    let servers = Servers::of(3);
    let lab = &servers.0;
    let run = Run::of(spec()).with_environment(servers.environment());
    let launched = run.start_in(&lab.inside(), &["--on", &servers.place()]);
    run.wait_for_steps(1, 20);
    for host in lab.hosts() {
        assert_eq!(lab.evenkeels(host), 2, "one of the host, and one rank");
    }
    // The host is still there, so the next world has as many ranks.
    run.signal_rank(1, 1, Signal::KILL);
    run.wait_for_steps(2, 20);
    lab.power_off(3);
    run.wait_for_steps(3, 20);
    servers.power_on(3);
    run.wait_for_steps(4, 20);
    // Cut off: its processes live on, until they notice.
    lab.link(1, "down");
    run.wait_for_steps(5, 20);
    lab.wait_for_none(1);
    lab.link(1, "up");
    run.wait_for_steps(6, 20);
    // As a machine that shuts down does.
    lab.terminate(2);
    run.wait_for_steps(7, 20);
    assert!(launched.wait().success(), "{}", run.log());
    let worlds = run.worlds();
    assert_eq!(worlds[..7], [3, 3, 2, 3, 2, 3, 2], "{}", run.log());
    for said in [
        "3 hosts by SSH: 10.9.0.1 (1 process), 10.9.0.2 (1 process), 10.9.0.3 (1 process)",
        "10.9.0.3 is lost: ",
        "10.9.0.3 is back",
        "10.9.0.1 is lost: ",
        "10.9.0.2 is about to end",
    ] {
        assert!(run.log().contains(said), "{said}\n{}", run.log());
    }
    same_losses(&alone, &run);
    assert_eq!(run.prove()["samples"], 36_000);
    lab.hosts().for_each(|host| lab.wait_for_none(host));
}

/// A spec whose run trains until it is stopped: how long hosts take is not known. Losses of so small steps stay comparable.
fn endless() -> serde_json::Value {
    small(json!({
        "budget": {"samples": 100_000_000},
        "learning_rate": {"peak": 3e-4},
        "checkpoint": {"every_samples": 1_000_000},
    }))
}

/// Ends a run, and compares it with one that nothing disturbs.
fn as_undisturbed(run: &Run, launched: Launched) {
    run.drain(launched);
    assert_eq!(run.prove()["proved"], true, "{}", run.log());
    let alone = Run::of(endless());
    let launched = alone.start(&["--procs", "1", "--quiet"]);
    let last = *run.steps().keys().last().unwrap();
    alone.wait_for_steps(1, usize::try_from(last).unwrap());
    alone.drain(launched);
    same_losses_so_far(run, &alone);
}

#[test]
fn ranks_on_hosts_keep_their_processes_while_others_come_and_go() {
    if !is_possible(&[SSHD]) {
        return;
    }
    let servers = Servers::of(3);
    let lab = &servers.0;
    let run = Run::of(endless()).with_environment(servers.environment());
    let launched = run.start_in(&lab.inside(), &["--on", &servers.place()]);
    run.wait_for_steps(1, 5);
    let begun = ranks(&run, 1, 3);
    // The host stays, and a new process takes the place.
    run.signal_rank(1, 1, Signal::KILL);
    run.wait_for_steps(2, 5);
    let second = ranks(&run, 2, 3);
    assert_eq!([second[0], second[2]], [begun[0], begun[2]]);
    assert_ne!(second[1], begun[1]);
    // Rank 0 was there. The others learn of it before the launcher.
    lab.power_off(1);
    run.wait_for_steps(3, 5);
    assert_eq!(ranks(&run, 3, 2), second[1..]);
    servers.power_on(1);
    run.wait_for_steps(4, 5);
    let fourth = ranks(&run, 4, 3);
    assert_eq!(fourth[1..], second[1..]);
    assert_eq!(spares(&run, 3), 1, "{}", run.log());
    // `evenkeel host` and the rank end at once; it is reached again soon.
    lab.kill(3);
    run.wait_for_steps(5, 5);
    assert_eq!(ranks(&run, 5, 2), fourth[..2]);
    run.wait_for_steps(6, 5);
    let sixth = ranks(&run, 6, 3);
    assert_eq!(sixth[..2], fourth[..2]);
    assert!(run.call("resize", &["2"]).status.success());
    run.wait_for_steps(7, 5);
    assert_eq!(ranks(&run, 7, 2), sixth[..2]);
    wait_for("the end of the rank that is left out", || {
        (lab.evenkeels(3) == 1).then_some(())
    });
    assert!(run.call("resize", &["3"]).status.success());
    run.wait_for_steps(8, 5);
    assert_eq!(ranks(&run, 8, 3)[..2], sixth[..2]);
    assert_eq!(spares(&run, 7), 1, "{}", run.log());

    assert_eq!(run.worlds(), [3, 3, 2, 3, 2, 3, 2, 3], "{}", run.log());
    for generation in 2..=8 {
        let record = record(&run, generation);
        assert_eq!(record["carried"]["from"], generation - 1, "{}", run.log());
    }
    as_undisturbed(&run, launched);
    lab.hosts().for_each(|host| lab.wait_for_none(host));
}

/// Another host is lost, or the launcher is killed, while ranks wait: the launcher knows that a host is cut off only some time
/// after the ranks of the others.
#[test]
fn faults_while_the_ranks_of_hosts_wait_lose_no_sample() {
    if !is_possible(&[SSHD]) {
        return;
    }
    let servers = Servers::of(3);
    let lab = &servers.0;
    let run = Run::of(endless()).with_environment(servers.environment());
    let on = servers.place();
    let launched = run.start_in(&lab.inside(), &["--on", &on]);
    run.wait_for_steps(1, 5);
    let waits = ranks(&run, 1, 3)[1];
    let cut = || {
        lab.link(3, "down");
        std::thread::sleep(Duration::from_secs(6));
    };
    cut();
    lab.kill(1);
    run.wait_for_steps(2, 5);
    // The first host may be back already.
    let world = run.worlds()[1];
    assert!(
        ranks(&run, 2, world).contains(&waits),
        "{world}\n{}",
        run.log()
    );
    lab.wait_for_none(3);
    lab.link(3, "up");
    wait_for_world(&run, 2, 3);
    cut();
    launched.signal(Signal::KILL);
    drop(launched);
    lab.hosts().for_each(|host| lab.wait_for_none(host));
    lab.link(3, "up");
    let last = run.worlds().len() as u64;
    let launched = run.start_in(&lab.inside(), &["--resume", "--on", &on]);
    run.wait_for_steps(last + 1, 5);
    as_undisturbed(&run, launched);
    lab.hosts().for_each(|host| lab.wait_for_none(host));
}

#[test]
fn hosts_that_cannot_be_used_are_named_with_what_to_do() {
    if !is_possible(&[SSHD]) {
        return;
    }
    let servers = Servers::of(2);
    let lab = &servers.0;
    // What ssh says differs between its versions.
    let refused = |place: &str, said: [&str; 2]| {
        let run = Run::of(small(json!({}))).with_environment(servers.environment());
        let output = run.launch_in(&lab.inside(), &["--on", place]);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(!run.out().exists());
        let error = stderr(&output);
        for said in said {
            assert!(error.contains(said), "{said}\n{error}");
        }
    };
    refused(
        "ssh:10.9.0.1,nowhere.invalid",
        [
            "error: nowhere.invalid is not reached: ",
            "; correct the name, or describe the host in ~/.ssh/config\n",
        ],
    );
    refused(
        "ssh:10.9.0.77:23",
        [
            "error: 10.9.0.77:23 is not reached: ",
            "; see what `ssh -p 23 10.9.0.77` does\n",
        ],
    );
    // A server whose key is another one.
    let known = fs::read_to_string(lab.file("known")).unwrap();
    fs::write(lab.file("known"), "").unwrap();
    refused(
        "ssh:10.9.0.1",
        [
            "Host key verification failed.",
            "; run `ssh 10.9.0.1` once, and compare the host's key\n",
        ],
    );
    fs::write(lab.file("known"), known).unwrap();
    // A server that does not know the user's key.
    let authorized = fs::read_to_string(lab.file("authorized")).unwrap();
    fs::write(lab.file("authorized"), "").unwrap();
    refused(
        "ssh:named",
        [
            "Permission denied",
            "; run `ssh-copy-id named`, or add the key to ssh's agent\n",
        ],
    );
    fs::write(lab.file("authorized"), authorized).unwrap();
    refused(
        "ssh:10.9.0.1,root@10.9.0.1",
        [
            "error: 10.9.0.1 and root@10.9.0.1 are one machine",
            "; name it once\n",
        ],
    );
    lab.on(1, "ip route add unreachable 10.9.0.2/32");
    refused(
        &servers.place(),
        [
            "error: 10.9.0.1 does not reach 10.9.0.2 at 10.9.0.2: No route to host",
            "; open ports 20000 to 32767 between the hosts\n",
        ],
    );
    lab.on(1, "ip route delete unreachable 10.9.0.2/32");
    // A damaged copy of the program is replaced. One that runs cannot be damaged.
    lab.hosts().for_each(|host| lab.wait_for_none(host));
    sh(&format!(
        "truncate -s 1000 {}/cache/evenkeel/bin/*/evenkeel",
        lab.place().display()
    ));
    let run = Run::of(small(json!({}))).with_environment(servers.environment());
    let output = run.launch_in(&lab.inside(), &["--on", &servers.place()]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("note: copying the program to 10.9.0."));
    // A host with another disk where the run would be.
    lab.power_off(2);
    lab.link(2, "up");
    let (disk, kept) = (std::env::temp_dir(), lab.place().display());
    let disk = disk.display();
    servers.start(
        2,
        &format!(
            "mkdir -p /run/kept; mount --bind {kept} /run/kept; mount -t tmpfs none {disk}
             mkdir -p {kept}; mount --bind /run/kept {kept}"
        ),
    );
    refused(
        &servers.place(),
        [
            "error: 10.9.0.2 and this machine do not share /",
            "put the run into a directory that all hosts have at the same path, with --out\n",
        ],
    );
}

#[test]
fn hosts_join_and_leave_a_run_on_request() {
    if !is_possible(&[SSHD]) {
        return;
    }
    let servers = Servers::of(3);
    let lab = &servers.0;
    let inside = lab.inside();
    let spec = json!({"budget": {"samples": 100_000_000}, "checkpoint": {"every_samples": 2400}});
    let run = Run::of(small(spec)).with_environment(servers.environment());
    let resized = |change: &str| {
        let output = run.call("resize", &["--hosts", change]);
        let said = format!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            stderr(&output)
        );
        (output.status.code(), said)
    };
    let hosts = || {
        let shown = run.call("status", &[]).stdout;
        let shown = String::from_utf8(shown).unwrap();
        let lines = shown
            .lines()
            .map(str::trim_start)
            .skip_while(|line| !line.starts_with("hosts "));
        let lines =
            lines.take_while(|line| line.starts_with("hosts ") || line.starts_with("10.9."));
        let names = lines.map(|line| line.trim_start_matches("hosts").trim_start().to_owned());
        names.collect::<Vec<_>>()
    };
    let launched = run.start_in(&inside, &["--on", "ssh:10.9.0.1,10.9.0.2"]);
    run.wait_for_steps(1, 5);
    assert_eq!(hosts(), ["10.9.0.1, 1 rank", "10.9.0.2, 1 rank"]);
    let (code, said) = resized("+10.9.0.3");
    assert_eq!(code, Some(0), "{said}\n{}", run.log());
    assert!(
        said.starts_with("requested 10.9.0.1, 10.9.0.2, 10.9.0.3\ngeneration 2 trains: 3 ×"),
        "{said}"
    );
    // Rank 0 is there.
    let (code, said) = resized("-10.9.0.1");
    assert_eq!(code, Some(0), "{said}\n{}", run.log());
    assert!(said.contains("\ngeneration 3 trains: 2 ×"), "{said}");
    lab.wait_for_none(1);
    let (code, said) = resized("+10.9.0.77:23");
    assert_eq!(code, Some(1), "{said}\n{}", run.log());
    assert!(said.contains("generation 3 trains: 2 ×"), "{said}");
    assert!(
        said.contains("error: 10.9.0.77:23 is not reached: "),
        "{said}"
    );
    assert_eq!(hosts().len(), 3);
    let (code, said) = resized("+root@10.9.0.2");
    assert_eq!(code, Some(1), "{said}\n{}", run.log());
    assert!(
        said.contains("error: 10.9.0.2 and root@10.9.0.2 are one machine"),
        "{said}"
    );
    run.drain(launched);
    let (code, said) = resized("10.9.0.1,10.9.0.3");
    assert_eq!(code, Some(0), "{said}");
    let next = format!(
        "`evenkeel resume {}` continues on 10.9.0.1, 10.9.0.3\n",
        run.out().display()
    );
    assert!(said.ends_with(&next), "{said}");
    let suspended = |generation| {
        run.wait_for_steps(generation, 5);
        let output = run.call_in(&inside, "suspend", &[]);
        assert!(output.status.success(), "{}", stderr(&output));
    };
    let resume = || {
        let words = [&inside[..], &[env!("CARGO_BIN_EXE_evenkeel")]].concat();
        std::process::Command::new(words[0])
            .args(&words[1..])
            .arg("resume")
            .arg(run.out())
            .envs(servers.environment())
            .spawn()
            .unwrap()
    };
    let mut resumed = resume();
    suspended(4);
    resumed.wait().unwrap();
    assert_eq!(hosts(), [""; 0]);
    // A list that is typed for a resume holds from then on.
    let launched = run.start_in(&inside, &["--resume", "--on", &servers.place()]);
    suspended(5);
    launched.wait();
    let mut resumed = resume();
    suspended(6);
    resumed.wait().unwrap();
    assert_eq!(run.worlds(), [2, 3, 2, 2, 3, 3], "{}", run.log());
    assert_eq!(run.prove()["proved"], true);
    lab.hosts().for_each(|host| lab.wait_for_none(host));
}

#[test]
fn wrong_clocks_change_nothing() {
    if !is_possible(&[SSHD, FAKETIME]) {
        return;
    }
    let spec =
        || small(json!({"budget": {"samples": 12_000}, "checkpoint": {"every_samples": 2400}}));
    let alone = Run::of(spec());
    let output = alone.launch(&["--procs", "1", "--quiet"]);
    assert!(output.status.success(), "{}", stderr(&output));

    let servers = Servers::of(2);
    let lab = &servers.0;
    let clock =
        |wrong: &str| format!("LD_PRELOAD={FAKETIME} FAKETIME={wrong} DONT_FAKE_MONOTONIC=1");
    servers.restart_with(|host| clock(if host == 1 { "-2h" } else { "+10d" }));
    let run = Run::of(spec()).with_environment(servers.environment());
    let launched = run.start_in(&lab.inside(), &["--on", &servers.place()]);
    run.wait_for_steps(1, 20);
    lab.power_off(2);
    run.wait_for_steps(2, 20);
    lab.link(2, "up");
    servers.start_with(2, &clock("-30d"));
    run.wait_for_steps(3, 20);
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [2, 1, 2], "{}", run.log());
    same_losses(&alone, &run);
    assert_eq!(run.prove()["samples"], 12_000);
    lab.hosts().for_each(|host| lab.wait_for_none(host));
}

#[test]
fn a_full_disk_of_hosts_ends_the_run_and_a_resume_continues_it() {
    if !is_possible(&[SSHD]) {
        return;
    }
    let spec =
        || small(json!({"budget": {"samples": 12_000}, "checkpoint": {"every_samples": 1200}}));
    let alone = Run::of(spec());
    let output = alone.launch(&["--procs", "1", "--quiet"]);
    assert!(output.status.success(), "{}", stderr(&output));

    let disk = Disk::of("64m");
    let servers = Servers::of(2);
    let lab = &servers.0;
    let run = Run::of(spec())
        .with_environment(servers.environment())
        .placed(disk.0.path().join("run"));
    let launched = run.start_in(&lab.inside(), &["--on", &servers.place()]);
    run.wait_for_steps(1, 20);
    disk.fill();
    assert_eq!(launched.wait().code(), Some(1), "{}", run.log());
    assert!(
        run.log().contains("no space left on the disk of"),
        "{}",
        run.log()
    );
    lab.hosts().for_each(|host| lab.wait_for_none(host));
    disk.empty();
    let launched = run.start_in(&lab.inside(), &["--resume", "--on", &servers.place()]);
    assert!(launched.wait().success(), "{}", run.log());
    same_losses(&alone, &run);
    assert_eq!(run.prove()["samples"], 12_000);
    lab.hosts().for_each(|host| lab.wait_for_none(host));
}

/// Hosts that share no disk: each has another one where the run and its files would be, and another cache of runs.
struct Apart {
    servers: Servers,
    s3: Server,
}

impl Apart {
    /// `None` and a message without the S3 server.
    fn of(hosts: u32) -> Option<Apart> {
        let lab = Lab::of(hosts);
        let s3 = lab.s3()?;
        let servers = Servers::in_lab(lab);
        let apart = Apart { servers, s3 };
        for host in apart.lab().hosts() {
            apart.power_on(host, ":");
        }
        Some(apart)
    }

    fn lab(&self) -> &Lab {
        &self.servers.0
    }

    /// Starts a host with empty disks, and first this script there.
    fn power_on(&self, host: u32, first: &str) {
        let (disk, kept) = (std::env::temp_dir(), self.lab().place().display());
        let disk = disk.display();
        let runs = self.runs();
        let runs = runs.display();
        self.lab().link(host, "up");
        self.servers.start(
            host,
            &format!(
                "mkdir -p /run/kept {runs}; mount --bind {kept} /run/kept; mount -t tmpfs none {disk}
                 mkdir -p {kept}; mount --bind /run/kept {kept}; umount /run/kept; mount -t tmpfs none {runs}
                 {first}"
            ),
        );
    }

    /// The directory of runs in the cache of a host.
    fn runs(&self) -> std::path::PathBuf {
        self.lab().file("cache/evenkeel/runs")
    }

    /// The variables of a launch.
    fn environment(&self) -> BTreeMap<String, String> {
        let mut environment = self.servers.environment();
        environment.extend(self.s3.environment());
        // As the servers have it.
        let cache = self.lab().file("cache").display().to_string();
        environment.insert("XDG_CACHE_HOME".to_owned(), cache);
        environment
    }

    /// The words of a launch.
    fn words(&self) -> [String; 4] {
        let on = self.servers.place();
        ["--on", &on, "--bucket", "s3://runs/team"].map(str::to_owned)
    }

    /// Proves the ledger of a run, whose checkpoints are only reached from inside.
    fn prove(&self, run: &Run) -> serde_json::Value {
        let output = run.call_in(&self.lab().inside(), "status", &["--ledger", "-o", "json"]);
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", stderr(&output)))
    }

    /// The names in the bucket below the run's prefix.
    fn objects(&self) -> Vec<String> {
        let runs = fs::read_dir(self.s3.objects().join("team")).unwrap();
        let runs: Vec<_> = runs.map(|run| run.unwrap().path()).collect();
        assert_eq!(runs.len(), 1, "{runs:?}");
        let entries = walk(&runs[0]);
        entries
            .iter()
            .map(|file| file.strip_prefix(&runs[0]).unwrap().display().to_string())
            .collect()
    }
}

/// The files below a directory.
fn walk(directory: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(walk(&path));
        } else {
            found.push(path);
        }
    }
    found
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn hosts_without_a_common_disk_train_from_a_bucket_and_outlive_every_loss() {
    if !is_possible(&[SSHD]) {
        return;
    }
    // It trains until it is cancelled: how long the hosts take is not known. Losses of so small steps stay comparable.
    let spec = || {
        small(json!({
            "budget": {"samples": 100_000_000},
            "learning_rate": {"peak": 3e-4},
            "checkpoint": {"every_samples": 2400},
        }))
    };
    let Some(apart) = Apart::of(3) else {
        return;
    };

    let lab = apart.lab();
    let run = Run::of(spec()).with_environment(apart.environment());
    let words = apart.words();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let launched = run.start_in(&lab.inside(), &words);
    run.wait_for_steps(1, 20);
    // A host loses its power and its disk.
    lab.power_off(3);
    run.wait_for_steps(2, 20);
    apart.power_on(3, ":");
    run.wait_for_steps(3, 20);
    // Rank 0 is cut off with the newest checkpoint on its disk, and lives on until it notices.
    lab.link(1, "down");
    run.wait_for_steps(4, 20);
    lab.wait_for_none(1);
    lab.link(1, "up");
    run.wait_for_steps(5, 20);
    launched.signal(Signal::KILL);
    drop(launched);
    lab.hosts().for_each(|host| lab.wait_for_none(host));
    let killed = run.log();
    // The run knows its bucket.
    let launched = run.start_in(&lab.inside(), &["--resume", "--on", &apart.servers.place()]);
    run.wait_for_steps(6, 20);
    let status = run.call_in(&lab.inside(), "status", &[]);
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(
        status.contains("\n  bucket      s3://runs/team/run-"),
        "{status}"
    );
    let cancelled = run.call_in(&lab.inside(), "cancel", &[]);
    assert!(cancelled.status.success(), "{}", stderr(&cancelled));
    launched.wait();
    assert_eq!(run.worlds(), [3, 2, 3, 2, 3, 3], "{killed}\n{}", run.log());
    for said in [
        "10.9.0.3 is lost: ",
        "10.9.0.3 is back",
        "10.9.0.1 is lost: ",
    ] {
        assert!(killed.contains(said), "{said}\n{killed}");
    }
    let proof = apart.prove(&run);
    let trained = run.state().unwrap()["checkpoint_ref"]["samples"].clone();
    assert_eq!(
        (&proof["proved"], &proof["samples"]),
        (&json!(true), &trained)
    );
    // The bucket has the checkpoints that the recipe keeps and the one that the last generation started from, and the
    // launcher has none.
    let objects = apart.objects();
    let is_checkpoint = |key: &&String| key.contains("/step-") && key.ends_with("/manifest.json");
    let kept = objects.iter().filter(is_checkpoint).count();
    assert!((2..=3).contains(&kept), "{objects:?}");
    let here = walk(&run.out());
    assert!(
        !here
            .iter()
            .any(|file| file.display().to_string().contains("/step-")),
        "{here:?}"
    );
    for host in lab.hosts() {
        lab.wait_for_none(host);
        let left = walk(&lab.seen_by(host, &apart.runs()));
        assert!(left.is_empty(), "host {host} keeps {left:?}");
    }
    let alone = Run::of(spec());
    let launched = alone.start(&["--procs", "1", "--quiet"]);
    let last = *run.steps().keys().last().unwrap();
    alone.wait_for_steps(1, usize::try_from(last).unwrap());
    alone.drain(launched);
    same_losses_so_far(&run, &alone);
}

#[test]
fn a_host_that_cannot_use_the_bucket_is_named_and_joins_when_it_can() {
    if !is_possible(&[SSHD]) {
        return;
    }
    let Some(apart) = Apart::of(2) else {
        return;
    };
    let lab = apart.lab();
    let words = apart.words();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let refused = |environment: BTreeMap<String, String>, said: &[&str]| {
        let run = Run::of(small(json!({}))).with_environment(environment);
        let output = run.launch_in(&lab.inside(), &words);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(!run.out().exists());
        let error = stderr(&output);
        for said in said {
            assert!(error.contains(said), "{said}\n{error}");
        }
    };
    let mut wrong = apart.environment();
    wrong.insert("AWS_SECRET_ACCESS_KEY".to_owned(), "wrong".to_owned());
    refused(
        wrong,
        &[
            "error: cannot write s3://runs/team/.evenkeel-hosts-",
            ": the credentials are refused; check key and secret (",
            "; `evenkeel doctor --bucket s3://runs/team` here tests it again\n",
        ],
    );
    // The launcher has its credentials in a file, which the hosts do not have.
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("credentials");
    let mut environment = apart.environment();
    let secret =
        |name: &str, environment: &mut BTreeMap<String, String>| environment.remove(name).unwrap();
    let text = format!(
        "[default]\naws_access_key_id={}\naws_secret_access_key={}\n",
        secret("AWS_ACCESS_KEY_ID", &mut environment),
        secret("AWS_SECRET_ACCESS_KEY", &mut environment)
    );
    fs::write(&file, text).unwrap();
    let file = file.display().to_string();
    environment.insert("AWS_SHARED_CREDENTIALS_FILE".to_owned(), file);
    refused(
        environment,
        &[
            "error: 10.9.0.1: cannot read s3://runs/team/.evenkeel-hosts-",
            "error: 10.9.0.2: cannot read s3://runs/team/.evenkeel-hosts-",
            ": there are no credentials; ",
            "; `evenkeel doctor --bucket s3://runs/team` on that host tests it again\n",
        ],
    );
    lab.on(2, "ip route add unreachable 10.9.0.253/32");
    refused(
        apart.environment(),
        &[
            "error: 10.9.0.2: cannot read s3://runs/team/.evenkeel-hosts-",
            ": the server cannot be reached; check the endpoint and the network (",
        ],
    );
    lab.on(2, "ip route delete unreachable 10.9.0.253/32");

    // Only the launcher has the model from which the run begins.
    let first = Run::of(small(json!({})));
    let output = first.launch(&["--procs", "1", "--quiet"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let model = first.out().join("gen-1/step-0000200");
    fs::write(model.join("generation_config.json"), "{}").unwrap();
    let spec = json!({
        "model": {"path": model, "config": null},
        "budget": {"samples": 100_000_000},
        "checkpoint": {"every_samples": 2400},
    });
    let run = Run::of(small(spec)).with_environment(apart.environment());
    let launched = run.start_in(&lab.inside(), &words);
    run.wait_for_steps(1, 5);
    let loss = |run: &Run, step: u64| run.steps()[&step]["loss"].as_f64().unwrap();
    assert!(
        loss(&run, 1) < loss(&first, 1) - 0.5,
        "it began from the model"
    );
    lab.power_off(2);
    run.wait_for_steps(2, 5);
    apart.power_on(2, "ip route add unreachable 10.9.0.253/32");
    let problem = "10.9.0.2: cannot read s3://runs/team/run-";
    wait_for("the problem of a host that is back", || {
        run.log().contains(problem).then_some(())
    });
    lab.on(2, "ip route delete unreachable 10.9.0.253/32");
    run.wait_for_steps(3, 5);
    let suspended = run.call_in(&lab.inside(), "suspend", &[]);
    assert!(suspended.status.success(), "{}", stderr(&suspended));
    launched.wait();
    assert_eq!(run.worlds(), [2, 1, 2], "{}", run.log());
    // What the ranks print is here, though they have other disks.
    let log = run.out().join("gen-1/logs/rank-1.log");
    let printed = run.call_in(&lab.inside(), "logs", &["--rank", "1"]);
    assert!(
        printed.status.success() || !log.exists(),
        "{}",
        stderr(&printed)
    );
    // A resume elsewhere than on hosts cannot reach the files.
    let output = run.launch_in(&lab.inside(), &["--resume", "--on", "here"]);
    let error = stderr(&output);
    assert!(
        error.contains(", and this machine is none of its hosts; add `--on ssh:HOSTS`"),
        "{error}"
    );
    let other = ["--resume", "--on", words[1], "--bucket", "s3://runs/other"];
    let output = run.launch_in(&lab.inside(), &other);
    let error = stderr(&output);
    assert!(
        error.contains("; remove `--bucket s3://runs/other`\n"),
        "{error}"
    );
    assert_eq!(apart.prove(&run)["proved"], true);
    let objects = apart.objects();
    let companion =
        |key: &String| key.contains("/step-") && key.ends_with("/generation_config.json");
    assert!(objects.iter().any(companion), "{objects:?}");
    let model = run.scratch().join("model");
    let place = model.display().to_string();
    let exported = run.call_in(&lab.inside(), "export", &["--out", &place]);
    assert!(exported.status.success(), "{}", stderr(&exported));
    assert!(
        model.join("model.safetensors").exists(),
        "{}",
        stderr(&exported)
    );
    lab.hosts().for_each(|host| lab.wait_for_none(host));
}

/// A small disk that all hosts see. It is mounted before they are made.
struct Disk(tempfile::TempDir);

impl Disk {
    fn of(size: &str) -> Disk {
        let disk = Disk(tempfile::tempdir().unwrap());
        let place = disk.0.path().display();
        sh(&format!("mount -t tmpfs -o size={size} none {place}"));
        disk
    }

    fn filler(&self) -> std::path::PathBuf {
        self.0.path().join("filler")
    }

    fn fill(&self) {
        let file = self.filler();
        // It ends when the disk is full.
        sh(&format!(
            "cat /dev/zero >{} 2>/dev/null || true",
            file.display()
        ));
    }

    fn empty(&self) {
        fs::remove_file(self.filler()).unwrap();
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        sh(&format!("umount -l {}", self.0.path().display()));
    }
}

/// The variables of a launch on emulated GPUs, with the libraries in a directory; `None` without NVRTC.
fn emulated_gpus(libraries: &Path) -> Option<BTreeMap<String, String>> {
    if let Err(problem) = Nvrtc::load(None) {
        // In CI, scripts/test.sh has installed NVRTC.
        assert!(std::env::var_os("CI").is_none(), "{problem}");
        eprintln!("SKIPPED: no emulated GPUs, {problem}");
        return None;
    }
    emulated_gpu::install(libraries).unwrap();
    let given = std::env::var("EVENKEEL_CUDA_LIBRARIES").unwrap_or_default();
    let libraries = libraries.display().to_string();
    Some(
        [
            (
                "EVENKEEL_CUDA_LIBRARIES".to_owned(),
                format!("{libraries}:{given}"),
            ),
            ("LD_LIBRARY_PATH".to_owned(), libraries),
        ]
        .into(),
    )
}

#[test]
fn the_gpus_of_hosts_train_and_one_host_is_lost() {
    let libraries = tempfile::tempdir().unwrap();
    let gpus = emulated_gpus(libraries.path()).filter(|_| is_possible(&[SSHD]));
    let Some(gpus) = gpus else { return };
    let spec = || {
        small(json!({
            "batch": {"global": 12, "per_device_batch_size": 2},
            "budget": {"samples": 600},
            "checkpoint": {"every_samples": 120},
        }))
    };
    let alone = Run::of(spec());
    let output = alone.launch(&["--procs", "1", "--device", "cpu", "--quiet"]);
    assert!(output.status.success(), "{}", stderr(&output));

    let servers = Servers::of(2);
    let lab = &servers.0;
    let environment = servers.environment().into_iter().chain(gpus).collect();
    let run = Run::of(spec()).with_environment(environment);
    let list = lab.file("hosts.txt");
    fs::write(&list, "10.9.0.1 gpus=1\n10.9.0.2\n").unwrap();
    let on = format!("ssh:{}", list.display());
    let launch = ["--on", on.as_str(), "--device", "cuda"];
    let devices = |host: u32, models: &str| {
        format!("EMULATED_GPU_DEVICES=2 EMULATED_NCCL_ADDRESS=10.9.0.{host} {models}")
    };
    servers.restart_with(|host| {
        let model = if host == 1 {
            "NVIDIA-H100:90"
        } else {
            "NVIDIA-A100:80"
        };
        devices(host, &format!("EMULATED_GPU_MODELS={model}"))
    });
    let output = run.launch_in(&lab.inside(), &launch);
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    let error = stderr(&output);
    let different = "error: the GPUs are of different models: 10.9.0.1 (NVIDIA-H100), 10.9.0.2 (NVIDIA-A100); name hosts \
                     with GPUs of one model\n";
    assert!(error.contains(different), "{error}");
    servers.restart_with(|host| devices(host, ""));
    let launched = run.start_in(&lab.inside(), &launch);
    run.wait_for_steps(1, 5);
    lab.power_off(2);
    assert!(launched.wait().success(), "{}", run.log());
    assert_eq!(run.worlds(), [3, 1], "{}", run.log());
    let planned = "2 hosts by SSH: 10.9.0.1 (1 GPU), 10.9.0.2 (2 GPUs)";
    assert!(run.log().contains(planned), "{}", run.log());
    same_losses(&alone, &run);
    assert_eq!(run.prove()["samples"], 600);
    lab.hosts().for_each(|host| lab.wait_for_none(host));
}

/// A script of this repository with DistributedDataParallel on gloo.
const SCRIPT: &str = "examples/pytorch/train_ddp.py";

#[test]
fn a_pytorch_program_on_hosts_consumes_every_sample_once() {
    let Some(python) = python("torch").filter(|_| is_possible(&[SSHD])) else {
        return;
    };
    let servers = Servers::of(3);
    let lab = &servers.0;
    let mut trainer = own_trainer(&python, SCRIPT, &["--save-every=5"]);
    trainer.run = trainer.run.with_environment(servers.environment());
    let start = |more: &[&str], steps| {
        let place = servers.place();
        let arguments = trainer.arguments(&[more, &["--on", &place]].concat(), steps, "--steps");
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        trainer.run.start_in(&lab.inside(), &arguments)
    };
    let launched = start(&[], 1_000_000);
    trainer.wait_for_steps(1, 8);
    lab.power_off(3);
    trainer.wait_for_steps(2, 8);
    servers.power_on(3);
    trainer.wait_for_steps(3, 8);
    // Rank 0 trains there, and lives on until its host notices.
    lab.link(1, "down");
    trainer.wait_for_steps(4, 8);
    assert_eq!(lab.evenkeels(1), 0, "the next generation waited for it");
    lab.link(1, "up");
    trainer.wait_for_steps(5, 8);
    lab.terminate(2);
    trainer.wait_for_steps(7, 8);
    trainer.run.drain(launched);
    lab.hosts().for_each(|host| lab.wait_for_none(host));
    let last = trainer.fed().remove(&7).unwrap().into_keys().last();
    let steps = last.unwrap() + 10;
    let launched = start(&["--resume"], steps);
    assert!(launched.wait().success(), "{}", trainer.run.log());
    lab.hosts().for_each(|host| lab.wait_for_none(host));
    assert_eq!(trainer.run.worlds(), [3, 2, 3, 2, 3, 2, 3, 3]);
    let proofs = trainer.run.proofs();
    assert_eq!(proofs[..2], ["3 × 4 × 1 = 12", "2 × 6 × 1 = 12"]);

    let alone = own_trainer(&python, SCRIPT, &["--save-every=5"]);
    let arguments = alone.arguments(&["--procs", "1"], steps, "--steps");
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = alone.run.launch(&arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let apart = same_samples(&trainer.committed(), &alone.committed(), steps, BATCH).unwrap();
    println!("{steps} steps on 3 hosts as in one process; losses apart by {apart:.1e}");
    assert!(apart < 1e-5, "{apart}");
}

#[test]
fn what_a_trainer_on_another_host_posts_is_shown() {
    let modules = "torch, transformers, accelerate";
    let Some(python) = python(modules).filter(|_| is_possible(&[SSHD])) else {
        return;
    };
    let servers = Servers::of(2);
    let folder = tempfile::tempdir().unwrap();
    let recipe = folder.path().join("recipe.yaml");
    let text = "per_device_train_batch_size: 6\ngradient_accumulation_steps: 1\n";
    fs::write(&recipe, text).unwrap();
    let words = [
        &python.display().to_string(),
        &own_file("tests/trainers/hf_trainer.py"),
        "{args}",
        "--output_dir",
        "{checkpoint_dir}",
        // Without checkpoints there is no `trainer_state.json`: what is shown was posted.
        "--save_strategy=no",
        "--use_cpu=true",
        "--report_to=kubeflow",
        "--logging_steps=5",
        "--disable_tqdm=true",
    ];
    let run = Run::of_file(&recipe).with_environment(servers.environment());
    let trainer = Trainer::new(run, words.map(str::to_owned).to_vec());
    let place = servers.place();
    let more = ["--recipe-gpus", "2", "--on", &place];
    let arguments = trainer.arguments(&more, 20, "--max_steps");
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let output = trainer.run.launch_in(&servers.0.inside(), &arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let status = String::from_utf8(trainer.run.call("status", &[]).stdout).unwrap();
    let (_, progress) = status.split_once("  progress    ").unwrap();
    assert!(progress.contains("loss "), "{progress}");
}

#[test]
fn a_program_needs_its_files_and_its_checkpoints_on_all_hosts() {
    if !is_possible(&[SSHD]) {
        return;
    }
    let servers = Servers::of(2);
    let lab = &servers.0;
    // A disk of the second host only.
    let own = tempfile::tempdir().unwrap();
    lab.power_off(2);
    lab.link(2, "up");
    let place = own.path().display();
    servers.start(2, &format!("mount -t tmpfs none {place}"));
    let run = |more: serde_json::Value| {
        let mut spec = json!({
            "batch": {"global": 12, "per_device_batch_size": 4},
            "trainer": {"resume": ["--from", "{checkpoint}"], "environment": {"MASTER_PORT": "29555"}},
        });
        merge(&mut spec, more);
        Run::of(spec).with_environment(servers.environment())
    };
    let list = lab.file("hosts.txt");
    fs::write(&list, "10.9.0.1 procs=2\n10.9.0.2\n").unwrap();
    let on = format!("ssh:{}", list.display());
    let refused = |run: Run, command: &[&str], said: [&str; 2]| {
        let arguments = [&["--on", &on, "--"], command].concat();
        let output = run.launch_in(&lab.inside(), &arguments);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(!run.out().exists());
        let error = stderr(&output);
        for said in said {
            assert!(error.contains(said), "{said}\n{error}");
        }
    };
    let program = own.path().join("program");
    fs::copy("/bin/sh", &program).unwrap();
    refused(
        run(json!({})),
        &[program.to_str().unwrap(), "-c", "exit 0"],
        [
            "error: 10.9.0.2: `/",
            "/program` is not an executable program; install the program at the same path on all hosts, or launch from a directory that they share\n",
        ],
    );
    let checkpoints = own.path().join("checkpoints");
    refused(
        run(json!({"trainer": {"checkpoint_dir": checkpoints}})),
        &["sh", "-c", "exit 0"],
        [
            "error: 10.9.0.2 and this machine do not share /",
            "the trainer writes its checkpoints there; name a directory that all hosts have at the same path \
             (trainer.checkpoint_dir)\n",
        ],
    );
    let run = run(json!({}));
    let arguments = ["--on", &on, "--", "sh", "-c", "env; echo the end"];
    let output = run.launch_in(&lab.inside(), &arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let expected = [
        [
            "RANK=0",
            "LOCAL_RANK=0",
            "LOCAL_WORLD_SIZE=2",
            "GROUP_RANK=0",
        ],
        [
            "RANK=1",
            "LOCAL_RANK=1",
            "LOCAL_WORLD_SIZE=2",
            "GROUP_RANK=0",
        ],
        [
            "RANK=2",
            "LOCAL_RANK=0",
            "LOCAL_WORLD_SIZE=1",
            "GROUP_RANK=1",
        ],
    ];
    for (rank, expected) in expected.iter().enumerate() {
        let log = run.out().join(format!("gen-1/logs/rank-{rank}.log"));
        let log = fs::read_to_string(log).unwrap();
        let all = [
            "WORLD_SIZE=3",
            "MASTER_ADDR=10.9.0.1",
            "MASTER_PORT=29555",
            "the end",
        ];
        for line in expected.iter().chain(&all) {
            assert!(log.lines().any(|other| other == *line), "{line}\n{log}");
        }
    }
    // The output of all ranks is shown here.
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(shown.contains("Rank 2: the end"), "{shown}");
}
