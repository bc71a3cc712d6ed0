//! Launches inside an allocation of Slurm: its own daemons, one `slurmd` on each host of a lab.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::json;

use super::lab::{Lab, is_possible, sh};
use super::support::{Run, same_losses, small, stderr, wait_for};

const PROGRAMS: [&str; 3] = [
    "/usr/sbin/slurmctld",
    "/usr/sbin/slurmd",
    "/usr/sbin/munged",
];

/// Nodes n1, n2 and so on, and their controller beside the launchers.
struct Cluster(Lab);

impl Cluster {
    fn of(nodes: u32) -> Cluster {
        let lab = Lab::of(nodes);
        let place = lab.place().display();
        let nodes: String = lab
            .hosts()
            .map(|node| format!("NodeName=n{node} NodeAddr=10.9.0.{node} CPUs=1 RealMemory=1000\n"))
            .collect();
        let conf = format!(
            "ClusterName=lab\nSlurmctldHost=ctl(10.9.0.254)\nSlurmUser=root\nSlurmdUser=root\n\
             AuthInfo=socket={place}/munge/socket\nStateSaveLocation={place}/state\nSlurmdSpoolDir={place}/spool.%n\n\
             SlurmctldPidFile={place}/ctl.pid\nSlurmdPidFile={place}/%n.pid\nSlurmctldLogFile={place}/ctl.log\n\
             SlurmdLogFile={place}/%n.log\nProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n\
             SelectType=select/cons_tres\nSelectTypeParameters=CR_Core\nReturnToService=2\nSlurmdTimeout=20\n\
             SlurmdParameters=config_overrides\n{nodes}PartitionName=main Nodes=ALL Default=YES State=UP\n"
        );
        fs::write(lab.file("slurm.conf"), conf).unwrap();
        fs::write(lab.file("cgroup.conf"), "CgroupPlugin=cgroup/v1\n").unwrap();
        let cluster = Cluster(lab);
        sh(&format!(
            "mkdir -p {place}/munge {place}/state
             chmod 711 {place} {place}/munge
             head -c 64 /dev/urandom >{place}/munge/key
             chmod 400 {place}/munge/key
             munged --force --socket={place}/munge/socket --key-file={place}/munge/key --pid-file={place}/munge/pid \
                 --log-file={place}/munge/log --seed-file={place}/munge/seed",
            place = cluster.0.place().display()
        ));
        let controller = cluster.call(
            "unshare",
            &["--uts", "sh", "-c", "hostname ctl; exec slurmctld"],
        );
        assert!(controller.status.success(), "{}", stderr(&controller));
        cluster.0.hosts().for_each(|node| cluster.start(node));
        cluster.wait_for_idle();
        cluster
    }

    /// Waits until all nodes are idle.
    fn wait_for_idle(&self) {
        wait_for("idle nodes", || {
            let states = self.asked("sinfo", &["--noheader", "--Node", "--format=%t"]);
            let idle = states.lines().filter(|state| state.trim() == "idle");
            (idle.count() == self.0.hosts().count()).then_some(())
        });
    }

    /// Starts the daemon of a node, which wants a mounted cgroup and uses none.
    fn start(&self, node: u32) {
        let place = self.0.place().display();
        let daemon = format!(
            "mkdir -p {place}/spool.n{node}; mount -t tmpfs none /sys/fs/cgroup; hostname n{node}
             SLURM_CONF={place}/slurm.conf slurmd"
        );
        self.0.on(node, &daemon);
    }

    /// Runs a command of Slurm beside the controller.
    fn call(&self, program: &str, arguments: &[&str]) -> Output {
        let [ip, netns, exec, name] = self.0.inside();
        Command::new(ip)
            .args([netns, exec, name, program])
            .args(arguments)
            .env("SLURM_CONF", self.0.file("slurm.conf"))
            .output()
            .unwrap()
    }

    fn asked(&self, program: &str, arguments: &[&str]) -> String {
        let output = self.call(program, arguments);
        assert!(
            output.status.success(),
            "{program} {arguments:?}: {}",
            stderr(&output)
        );
        String::from_utf8_lossy(&output.stdout).trim().to_owned()
    }

    /// Submits a job of all nodes that launches a run, with its output in a file. Returns its number.
    fn submit(&self, run: &Run, log: &Path) -> String {
        let nodes = self.0.hosts().count().to_string();
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

    fn state(&self, job: &str) -> String {
        self.asked(
            "squeue",
            &["--noheader", "--states=all", "--format=%T", "--job", job],
        )
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // It has no network, so it is not among the processes of the lab.
        let pid = fs::read_to_string(self.0.file("munge/pid")).unwrap_or_default();
        let _ = Command::new("kill").args(["-9", pid.trim()]).status();
    }
}

#[test]
fn a_job_of_slurm_outlives_a_node_and_a_preemption() {
    if !is_possible(&PROGRAMS) {
        return;
    }
    let spec =
        || small(json!({"budget": {"samples": 7_200}, "checkpoint": {"every_samples": 2400}}));
    let alone = Run::of(spec());
    let output = alone.launch(&["--procs", "1", "--quiet"]);
    assert!(output.status.success(), "{}", stderr(&output));

    let cluster = Cluster::of(3);
    let lab = &cluster.0;
    let run = Run::of(spec());
    let log = run.scratch().join("launch.log");
    let job = cluster.submit(&run, &log);
    run.wait_for_steps(1, 20);
    lab.power_off(3);
    run.wait_for_steps(2, 20);
    // As a job of a higher priority does it, but the job waits until it is released.
    cluster.asked("scontrol", &["requeuehold", &job]);
    wait_for("the requeued job", || {
        (cluster.state(&job) == "PENDING").then_some(())
    });
    let state = run.state().unwrap();
    assert_eq!(state["phase"]["phase"], "drained", "{state}\n{}", run.log());
    lab.hosts().for_each(|node| lab.wait_for_none(node));
    lab.link(3, "up");
    cluster.start(3);
    cluster.wait_for_idle();
    cluster.asked("scontrol", &["release", &job]);
    wait_for("the end of the job", || {
        let state = cluster.state(&job);
        assert!(
            !["FAILED", "CANCELLED", "TIMEOUT"].contains(&state.as_str()),
            "{state}\n{}",
            run.log()
        );
        (state == "COMPLETED").then_some(())
    });
    assert_eq!(run.worlds(), [3, 2, 3], "{}", run.log());
    for said in [
        "3 hosts of the Slurm job: n1 (1 process), n2 (1 process), n3 (1 process)",
        "n3 is lost: ",
    ] {
        assert!(run.log().contains(said), "{said}\n{}", run.log());
    }
    same_losses(&alone, &run);
    assert_eq!(run.prove()["samples"], 7_200);
    lab.hosts().for_each(|node| lab.wait_for_none(node));
}

#[test]
fn outside_of_an_allocation_the_command_that_makes_one_is_named() {
    let run = Run::of(small(json!({})));
    let output = run.launch(&["--on", "slurm"]);
    assert_eq!(output.status.code(), Some(2));
    insta::assert_snapshot!(stderr(&output), @"error: this is not inside an allocation of Slurm, which `--on slurm` uses: give this command to `sbatch --nodes N --no-kill --wrap '…'`");
}
