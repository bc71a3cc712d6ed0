//! Hosts of a lab that `ssh` reaches: OpenSSH's own servers.

use std::collections::BTreeMap;
use std::fs;

use super::lab::{Lab, sh};

/// What [`Servers`] need.
pub const SSHD: &str = "/usr/sbin/sshd";

/// Hosts with SSH servers.
pub struct Servers(pub Lab);

impl Servers {
    pub fn of(hosts: u32) -> Servers {
        let servers = Servers::in_lab(Lab::of(hosts));
        servers.0.hosts().for_each(|host| servers.start(host, ":"));
        servers
    }

    /// What the servers of a lab need, which are not started.
    pub fn in_lab(lab: Lab) -> Servers {
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
        Servers(lab)
    }

    /// Starts the server of a host, in what this script makes of its disks.
    pub fn start(&self, host: u32, first: &str) {
        let conf = self.0.file("sshd.conf");
        self.0
            .on(host, &format!("{first}\n{SSHD} -f {}", conf.display()));
    }

    /// Starts all hosts again, each with these further variables.
    pub fn restart_with(&self, variables: impl Fn(u32) -> String) {
        for host in self.0.hosts() {
            self.0.power_off(host);
            self.0.link(host, "up");
            self.start_with(host, &variables(host));
        }
    }

    /// Starts the server of a host with these further variables.
    pub fn start_with(&self, host: u32, variables: &str) {
        let conf = fs::read_to_string(self.0.file("sshd.conf")).unwrap();
        let own = self.0.file(&format!("sshd-{host}.conf"));
        fs::write(
            &own,
            conf.replace("SetEnv ", &format!("SetEnv {variables} ")),
        )
        .unwrap();
        self.0.on(host, &format!("{SSHD} -f {}", own.display()));
    }

    /// Starts a host that was powered off.
    pub fn power_on(&self, host: u32) {
        self.0.link(host, "up");
        self.start(host, ":");
    }

    /// The word of `--on` for all hosts.
    pub fn place(&self) -> String {
        let hosts: Vec<String> = self
            .0
            .hosts()
            .map(|host| format!("10.9.0.{host}"))
            .collect();
        format!("ssh:{}", hosts.join(","))
    }

    /// The variables of a launch, which finds this lab's `ssh`.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{path}", self.0.file("bin").display());
        // Programs with gloo take the hosts' network.
        let network = ("GLOO_SOCKET_IFNAME".to_owned(), "eth0".to_owned());
        [("PATH".to_owned(), path), network].into()
    }
}
