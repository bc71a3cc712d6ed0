//! Slurm in a lab: its own daemons, one `slurmd` on each host, and on request a database with two QOS.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use super::lab::{Lab, sh};
use super::support::{Run, stderr, wait_for};

/// What a [`Cluster`] needs.
pub const PROGRAMS: [&str; 5] = [
    "/usr/sbin/slurmctld",
    "/usr/sbin/slurmd",
    "/usr/sbin/munged",
    "/usr/sbin/slurmdbd",
    "/usr/sbin/mariadbd",
];

/// How long a requeued job waits before it can start again; Slurm's default is 120.
const REQUEUE_SECONDS: u64 = 20;

/// Nodes n1, n2 and so on, and their controller beside the launchers.
pub struct Cluster {
    pub lab: Lab,
    preemption: Preemption,
}

/// Which jobs take the nodes of others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preemption {
    /// Those of the partition `urgent`.
    Partition,
    /// Those of the QOS `high`.
    Qos { notice: Notice },
}

/// What a preempted job hears before it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Notice {
    None,
    /// The signal that it has asked for before its time limit, half a minute before.
    Signal,
}

impl Preemption {
    /// The lines of `slurm.conf`.
    fn conf(self, place: &Path) -> String {
        let place = place.display();
        let of_qos = format!(
            "PreemptType=preempt/qos\nAccountingStorageType=accounting_storage/slurmdbd\n\
             AccountingStorageHost=10.9.0.254\nAccountingStoragePass={place}/munge/socket\n\
             AccountingStorageEnforce=qos\n"
        );
        match self {
            Preemption::Partition => "PreemptType=preempt/partition_prio\n".to_owned(),
            Preemption::Qos {
                notice: Notice::None,
            } => of_qos,
            Preemption::Qos {
                notice: Notice::Signal,
            } => format!("{of_qos}SlurmctldParameters=preempt_send_user_signal\n"),
        }
    }

    /// The option of a job that takes the nodes of others.
    fn option(self) -> &'static str {
        match self {
            Preemption::Partition => "--partition=urgent",
            Preemption::Qos { .. } => "--qos=high",
        }
    }
}

impl Cluster {
    pub fn of(nodes: u32) -> Cluster {
        Cluster::with(nodes, Preemption::Partition)
    }

    pub fn with(nodes: u32, preemption: Preemption) -> Cluster {
        let lab = Lab::of(nodes);
        let preempts = preemption.conf(lab.place());
        let place = lab.place().display();
        let nodes: String = lab
            .hosts()
            .map(|node| format!("NodeName=n{node} NodeAddr=10.9.0.{node} CPUs=1 RealMemory=1000\n"))
            .collect();
        let conf = format!(
            "ClusterName=lab\nSlurmctldHost=ctl(10.9.0.254)\nSlurmUser=root\nSlurmdUser=root\n\
             AuthInfo=socket={place}/munge/socket,cred_expire={REQUEUE_SECONDS}\nStateSaveLocation={place}/state\nSlurmdSpoolDir={place}/spool.%n\n\
             SlurmctldPidFile={place}/ctl.pid\nSlurmdPidFile={place}/%n.pid\nSlurmctldLogFile={place}/ctl.log\n\
             SlurmdLogFile={place}/%n.log\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nReturnToService=2\nSlurmdTimeout=20\n\
             SlurmdParameters=config_overrides\n{preempts}PreemptMode=REQUEUE\n{nodes}\
             PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1\n\
             PartitionName=urgent Nodes=ALL State=UP PriorityTier=9 PreemptMode=OFF\n"
        );
        fs::write(lab.file("slurm.conf"), conf).unwrap();
        fs::write(lab.file("cgroup.conf"), "CgroupPlugin=cgroup/v1\n").unwrap();
        let cluster = Cluster { lab, preemption };
        sh(&format!(
            "mkdir -p {place}/munge {place}/state
             chmod 711 {place} {place}/munge
             head -c 64 /dev/urandom >{place}/munge/key
             chmod 400 {place}/munge/key
             munged --force --socket={place}/munge/socket --key-file={place}/munge/key --pid-file={place}/munge/pid \
                 --log-file={place}/munge/log --seed-file={place}/munge/seed",
            place = cluster.lab.place().display()
        ));
        if let Preemption::Qos { notice } = preemption {
            cluster.start_database(notice);
        }
        cluster.start_controller();
        cluster.lab.hosts().for_each(|node| cluster.start(node));
        cluster.wait_for_idle();
        cluster
    }

    pub fn start_controller(&self) {
        self.start_on_controller("slurmctld");
    }

    /// Starts a daemon that wants to be on the controller's host.
    fn start_on_controller(&self, daemon: &str) {
        let command = format!("hostname ctl; exec {daemon}");
        let started = self.call("unshare", &["--uts", "sh", "-c", &command]);
        assert!(started.status.success(), "{daemon}: {}", stderr(&started));
    }

    /// Starts `slurmdbd` and its database, with the QOS `low` of all jobs, and `high`. They end with the lab.
    fn start_database(&self, notice: Notice) {
        let place = self.lab.place().display();
        let conf = format!(
            "DbdHost=ctl\nDbdAddr=10.9.0.254\nSlurmUser=root\nAuthInfo=socket={place}/munge/socket\n\
             StorageType=accounting_storage/mysql\nStorageHost=127.0.0.1\nStorageUser=root\n\
             PidFile={place}/dbd.pid\nLogFile={place}/dbd.log\n"
        );
        fs::write(self.lab.file("slurmdbd.conf"), conf).unwrap();
        sh(&format!(
            "chmod 600 {place}/slurmdbd.conf
             mkdir {place}/db
             server='mariadbd --no-defaults --user=root --datadir={place}/db --innodb-buffer-pool-size=16M'
             printf 'create database mysql;\\nuse mysql;\\n' |
                 cat - /usr/share/mysql/mysql_system_tables.sql | $server --bootstrap >{place}/db.log 2>&1
             {inside} $server --socket={place}/db.socket --bind-address=127.0.0.1 --skip-grant-tables --skip-name-resolve \
                 >>{place}/db.log 2>&1 &",
            inside = self.lab.inside().join(" ")
        ));
        wait_for("the database", || {
            self.lab.file("db.socket").exists().then_some(())
        });
        self.start_on_controller("slurmdbd");
        wait_for("Slurm's database", || {
            let added = self.call("sacctmgr", &["--immediate", "add", "cluster", "lab"]);
            added.status.success().then_some(())
        });
        let grace = match notice {
            Notice::None => "gracetime=0",
            Notice::Signal => "gracetime=30",
        };
        let change = |words: &str| {
            let words: Vec<&str> = words.split(' ').collect();
            self.asked("sacctmgr", &[&["--immediate"], &words[..]].concat());
        };
        change(&format!("add qos low {grace}"));
        change("add qos high preempt=low");
        change("modify user root set qos+=low,high defaultqos=low");
    }

    /// Waits until all nodes are idle.
    pub fn wait_for_idle(&self) {
        wait_for("idle nodes", || {
            let states = self.asked(
                "sinfo",
                &["--noheader", "--partition=main", "--Node", "--format=%t"],
            );
            let idle = states.lines().filter(|state| state.trim() == "idle");
            (idle.count() == self.lab.hosts().count()).then_some(())
        });
    }

    /// Starts the daemon of a node, which wants a mounted cgroup and uses none.
    pub fn start(&self, node: u32) {
        let place = self.lab.place().display();
        let daemon = format!(
            "mkdir -p {place}/spool.n{node}; mount -t tmpfs none /sys/fs/cgroup; hostname n{node}
             SLURM_CONF={place}/slurm.conf slurmd"
        );
        self.lab.on(node, &daemon);
    }

    /// Runs a command of Slurm beside the controller.
    pub fn call(&self, program: &str, arguments: &[&str]) -> Output {
        let [ip, netns, exec, name] = self.lab.inside();
        Command::new(ip)
            .args([netns, exec, name, program])
            .args(arguments)
            .env("SLURM_CONF", self.lab.file("slurm.conf"))
            .output()
            .unwrap()
    }

    pub fn asked(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.call(program, arguments);
        assert!(
            output.status.success(),
            "{program} {arguments:?}: {}",
            stderr(&output)
        );
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Submits a job of all nodes that launches a run, with its output in a file. Returns its number.
    pub fn submit(&self, run: &Run, log: &Path) -> String {
        let nodes = self.lab.hosts().count().to_string();
        let script = format!(
            "exec {} launch {} --on slurm --out {}",
            env!("CARGO_BIN_EXE_evenkeel"),
            run.recipe().display(),
            run.out().display()
        );
        let output = format!("--output={}", log.display());
        let options = [
            "--parsable",
            "--nodes",
            &nodes,
            "--no-kill",
            "--requeue",
            "--open-mode=append",
        ];
        let arguments = [&options[..], &[&output, "--wrap", &script]].concat();
        self.asked("sbatch", &arguments)
    }

    /// The variables of commands that ask Slurm.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let conf = self.lab.file("slurm.conf").display().to_string();
        [("SLURM_CONF".to_owned(), conf)].into()
    }

    /// The numbers of the jobs in the queue, by name.
    pub fn queue(&self) -> BTreeMap<String, String> {
        let queue = self.asked("squeue", &["--noheader", "--format=%j %i"]);
        let jobs = queue.lines().filter_map(|line| line.trim().split_once(' '));
        jobs.map(|(name, id)| (name.to_owned(), id.to_owned()))
            .collect()
    }

    /// Takes a node from its job for 20 s, by a job of a higher priority.
    pub fn preempt(&self, node: u32) {
        let node = format!("--nodelist=n{node}");
        let urgent = [
            self.preemption.option(),
            "--exclusive",
            "--output=/dev/null",
        ];
        self.asked(
            "sbatch",
            &[&urgent[..], &[&node, "--wrap=sleep 20"]].concat(),
        );
    }

    pub fn wait_for_empty_queue(&self) {
        wait_for("an empty queue", || self.queue().is_empty().then_some(()));
    }

    pub fn state(&self, job: &str) -> String {
        self.asked(
            "squeue",
            &["--noheader", "--states=all", "--format=%T", "--job", job],
        )
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // It has no network, so it is not among the processes of the lab.
        let pid = fs::read_to_string(self.lab.file("munge/pid")).unwrap_or_default();
        let _ = Command::new("kill").args(["-9", pid.trim()]).status();
    }
}
