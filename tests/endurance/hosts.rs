//! Launches on other machines by SSH: OpenSSH's own servers, one on each host of a lab.

use std::collections::BTreeMap;
use std::fs;

use serde_json::json;

use super::lab::{Lab, is_possible, sh};
use super::support::{Run, same_losses, small, stderr};

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
        [("PATH".to_owned(), path)].into()
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
    lab.link(3, "up");
    servers.start(3, ":");
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
