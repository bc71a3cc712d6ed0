//! A network of hosts on this machine: each is a network namespace with a link, and all share this machine's disk.
//! Launchers run in a namespace beside them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use super::s3::Server;
use super::support::{stderr, wait_for};

/// Numbers the labs of this process.
static LABS: AtomicU32 = AtomicU32::new(0);

/// Whether such a network and these programs can run here. In CI they must.
pub fn is_possible(programs: &[&str]) -> bool {
    let mut programs = programs.iter().chain(&["/usr/sbin/ip"]);
    let absent = programs.find(|program| !Path::new(program).exists());
    let problem = match absent {
        Some(program) => format!("no {program}"),
        None if !rustix::process::geteuid().is_root() => "not root".to_owned(),
        None => return true,
    };
    assert!(
        std::env::var_os("CI").is_none(),
        "hosts cannot run here: {problem} (scripts/test.sh installs what they need)"
    );
    eprintln!("SKIPPED: hosts cannot run here: {problem}");
    false
}

/// Runs a script that must succeed.
pub fn sh(script: &str) -> Output {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", stderr(&output));
    output
}

pub struct Lab {
    place: tempfile::TempDir,
    name: String,
    hosts: u32,
}

impl Lab {
    /// Hosts with the addresses 10.9.0.1, 10.9.0.2 and so on; the launchers' is 10.9.0.254.
    pub fn of(hosts: u32) -> Lab {
        let number = LABS.fetch_add(1, Ordering::Relaxed);
        let lab = Lab {
            place: tempfile::tempdir().unwrap(),
            name: format!("ek{}x{number}", std::process::id()),
            hosts,
        };
        let name = &lab.name;
        sh(&format!(
            "ip netns add {name}
             ip -n {name} link set dev lo up
             ip -n {name} link add name lab0 type bridge
             ip -n {name} link set dev lab0 up
             ip -n {name} addr add 10.9.0.254/24 dev lab0"
        ));
        for host in 1..=hosts {
            sh(&format!(
                "ip netns add {name}h{host}
                 ip -n {name}h{host} link set dev lo up
                 ip link add name v{host} netns {name} type veth peer name eth0 netns {name}h{host}
                 ip -n {name} link set dev v{host} master lab0 up
                 ip -n {name}h{host} addr add 10.9.0.{host}/24 dev eth0
                 ip -n {name}h{host} link set dev eth0 up"
            ));
        }
        lab
    }

    /// A directory for the files of its servers.
    pub fn place(&self) -> &Path {
        self.place.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.place().join(name)
    }

    pub fn hosts(&self) -> std::ops::RangeInclusive<u32> {
        1..=self.hosts
    }

    /// Runs a script on a host, in a new mount namespace.
    pub fn on(&self, host: u32, script: &str) {
        let namespace = format!("{}h{host}", self.name);
        let unshare = ["unshare", "--mount", "--uts", "sh", "-ec", script];
        let output = Command::new("ip")
            .args(["netns", "exec", &namespace])
            .args(unshare)
            .output()
            .unwrap();
        assert!(output.status.success(), "{script}: {}", stderr(&output));
    }

    /// A program in the namespace of the launchers.
    pub fn inside(&self) -> [&str; 4] {
        ["ip", "netns", "exec", &self.name]
    }

    /// Another address beside the launchers', which all hosts reach.
    fn address(&self, last: u8) -> String {
        let (name, address) = (&self.name, format!("10.9.0.{last}"));
        sh(&format!("ip -n {name} addr add {address}/24 dev lab0"));
        address
    }

    /// An S3 server beside the launchers, which all hosts reach; `None` and a message without its binary.
    pub fn s3(&self) -> Option<Server> {
        let (host, port) = (self.address(253), 7070);
        let server = Server::start_by(&self.inside(), &host, port)?;
        server.wait_for(|| {
            let [ip, netns, exec, name] = self.inside();
            let open = format!("</dev/tcp/{host}/{port}");
            let mut command = Command::new(ip);
            command.args([netns, exec, name, "bash", "-c", &open]);
            command.stderr(Stdio::null()).status().unwrap().success()
        });
        Some(server)
    }

    /// A path as a host sees it, through one of its processes.
    pub fn seen_by(&self, host: u32, path: &Path) -> PathBuf {
        let pids = self.processes(&format!("{}h{host}", self.name));
        let root = Path::new("/proc").join(&pids[0]).join("root");
        root.join(path.strip_prefix("/").unwrap())
    }

    fn processes(&self, namespace: &str) -> Vec<String> {
        let found = sh(&format!("ip netns pids {namespace}"));
        let pids = String::from_utf8_lossy(&found.stdout).into_owned();
        pids.split_whitespace().map(str::to_owned).collect()
    }

    /// How many processes of Evenkeel a host has, with those that it has started.
    pub fn evenkeels(&self, host: u32) -> usize {
        self.of_evenkeel(host).len()
    }

    fn of_evenkeel(&self, host: u32) -> Vec<String> {
        let mut pids = self.processes(&format!("{}h{host}", self.name));
        pids.retain(|pid| {
            let process = Path::new("/proc").join(pid);
            let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
            // The program of an external trainer has another name.
            let variables = fs::read(process.join("environ")).unwrap_or_default();
            let mut variables = variables.split(|byte| *byte == 0);
            name.trim() == "evenkeel" || variables.any(|variable| variable == b"EVENKEEL_HOST=1")
        });
        pids
    }

    /// Sends SIGTERM to the processes of Evenkeel on a host.
    pub fn terminate(&self, host: u32) {
        sh(&format!("kill -TERM {}", self.of_evenkeel(host).join(" ")));
    }

    /// Kills the processes of Evenkeel on a host, which stays.
    pub fn kill(&self, host: u32) {
        sh(&format!("kill -KILL {}", self.of_evenkeel(host).join(" ")));
    }

    /// Waits until a host has no process of Evenkeel.
    pub fn wait_for_none(&self, host: u32) {
        wait_for("the end of Evenkeel's processes on a host", || {
            (self.evenkeels(host) == 0).then_some(())
        });
    }

    /// Connects a host, or cuts its network.
    pub fn link(&self, host: u32, state: &str) {
        sh(&format!("ip -n {} link set dev v{host} {state}", self.name));
    }

    /// Ends everything on a host at once, without closing a connection. Its link stays down.
    pub fn power_off(&self, host: u32) {
        self.link(host, "down");
        let namespace = format!("{}h{host}", self.name);
        wait_for("the end of the host's processes", || {
            let pids = self.processes(&namespace);
            sh(&format!("kill -9 {} 2>/dev/null || true", pids.join(" ")));
            pids.is_empty().then_some(())
        });
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let hosts = self.hosts().map(|host| format!("{}h{host}", self.name));
        for name in hosts.chain([self.name.clone()]) {
            let script = format!("ip netns pids {name} | xargs -r kill -9; ip netns delete {name}");
            let mut command = Command::new("sh");
            let _ = command.args(["-c", &script]).stderr(Stdio::null()).status();
        }
    }
}
