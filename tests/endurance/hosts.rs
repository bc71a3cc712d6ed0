//! Launches on other machines by SSH: OpenSSH's own servers, one on each host of a lab.

use std::collections::BTreeMap;
use std::fs;

use serde_json::json;

use super::lab::{Lab, is_possible, sh};
use super::support::{Run, merge, same_losses, small, stderr};
use super::trainers::{BATCH, Trainer, own_file, own_trainer, python, same_samples};

const SSHD: &str = "/usr/sbin/sshd";

/// Hosts with SSH servers.
struct Servers(Lab);

impl Servers {
    fn of(hosts: u32) -> Servers {
        let lab = Lab::of(hosts);
        let place = lab.place().display();
        sh(&format!(
            "mkdir -p /run/sshd {place}/bin
             ssh-keygen -q -t ed25519 -N '' -f {place}/host
             ssh-keygen -q -t ed25519 -N '' -f {place}/user
             cp {place}/user.pub {place}/authorized
             {{ printf '10.9.0.* '; cat {place}/host.pub; }} >{place}/known"
        ));
        let client = format!(
            "IdentityFile {place}/user\nIdentitiesOnly yes\nUserKnownHostsFile {place}/known\nUser root\n\
             StrictHostKeyChecking yes\nHost named\nHostName 10.9.0.1\n"
        );
        let server = format!(
            "HostKey {place}/host\nAuthorizedKeysFile {place}/authorized\nPidFile none\nStrictModes no\n\
             PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\nMaxStartups 100\n\
             SetEnv XDG_CACHE_HOME={place}/cache\n"
        );
        fs::write(lab.file("ssh.conf"), client).unwrap();
        fs::write(lab.file("sshd.conf"), server).unwrap();
        // The user's own configuration: ssh finds it by the password database, not by HOME.
        let ssh = format!("#!/bin/sh\nexec /usr/bin/ssh -F {place}/ssh.conf \"$@\"\n");
        fs::write(lab.file("bin/ssh"), ssh).unwrap();
        sh(&format!("chmod 755 {place}/bin/ssh"));
        let servers = Servers(lab);
        servers.0.hosts().for_each(|host| servers.start(host, ":"));
        servers
    }

    /// Starts the server of a host, in what this script makes of its disks.
    fn start(&self, host: u32, first: &str) {
        let conf = self.0.file("sshd.conf");
        self.0
            .on(host, &format!("{first}\n{SSHD} -f {}", conf.display()));
    }

    /// Starts a host that was powered off.
    fn power_on(&self, host: u32) {
        self.0.link(host, "up");
        self.start(host, ":");
    }

    /// The word of `--on` for all hosts.
    fn place(&self) -> String {
        let hosts: Vec<String> = self
            .0
            .hosts()
            .map(|host| format!("10.9.0.{host}"))
            .collect();
        format!("ssh:{}", hosts.join(","))
    }

    /// The variables of a launch, which finds this lab's `ssh`.
    fn environment(&self) -> BTreeMap<String, String> {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}", self.0.file("bin").display());
        // Programs with gloo take the hosts' network.
        let network = ("GLOO_SOCKET_IFNAME".to_owned(), "eth0".to_owned());
        [("PATH".to_owned(), path), network].into()
    }
}

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
    let rank = run.rank(1, 1);
    rustix::process::kill_process(rank, rustix::process::Signal::KILL).unwrap();
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
    // A damaged copy of the program is replaced.
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
