//! Launches inside an allocation of Slurm, and runs that are submitted.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use rustix::process::Signal;

use serde_json::json;

use super::lab::{is_possible, sh};
use super::slurm_lab::{Cluster, Notice, PROGRAMS, Preemption};
use super::support::{Run, same_losses, small, stderr, wait_for};

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
    let lab = &cluster.lab;
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

/// Waits for a world of this size, and returns the number of its generation once it trains.
pub fn wait_for_world(run: &Run, after: u64, size: u64) -> u64 {
    let generation = wait_for(&format!("{size} ranks: {}", run.log()), || {
        let state = run.state()?;
        let rows = state["generations"].as_array()?;
        let row = rows.iter().find(|row| {
            row["number"].as_u64().is_some_and(|number| number > after) && row["world"] == size
        })?;
        row["number"].as_u64()
    });
    run.wait_for_steps(generation, 20);
    generation
}

#[test]
fn a_submitted_run_takes_the_nodes_that_slurm_gives_and_outlives_its_jobs() {
    if !is_possible(&PROGRAMS) {
        return;
    }
    // It trains until it is suspended: how long Slurm takes is not known.
    let spec = json!({"budget": {"samples": 100_000_000}, "checkpoint": {"every_samples": 2400}});
    let cluster = Cluster::of(3);
    let lab = &cluster.lab;
    let run = Run::of(small(spec)).with_environment(cluster.environment());
    let log = run.scratch().join("job.log");
    let output = format!("--sbatch=--output={}", log.display());
    let inside = lab.inside();
    let launch = ["--on", "slurm", "--nodes", "3", &output];
    let submitted = run.launch_in(&inside, &launch);
    assert!(submitted.status.success(), "{}", stderr(&submitted));
    assert!(
        stderr(&submitted)
            .contains(" of Slurm begins on 1 node, and submits 2 more jobs of one node each\n"),
        "{}",
        stderr(&submitted)
    );
    let again = run.launch_in(&inside, &launch);
    assert!(
        stderr(&again).contains(" of this run is in Slurm's queue already; `evenkeel cancel /"),
        "{}",
        stderr(&again)
    );
    let first = wait_for("the first job", || cluster.queue().into_keys().next());
    let three = wait_for_world(&run, 0, 3);
    // As a job of a higher priority does it.
    let further = &cluster.queue()[&format!("{first}-node-1")];
    cluster.asked("scontrol", &["requeue", further]);
    let two = wait_for_world(&run, three, 2);
    let three = wait_for_world(&run, two, 3);
    lab.power_off(node_of(&cluster, &format!("{first}-node-2")));
    let two = wait_for_world(&run, three, 2);
    // A node that no rank needs is given back, and asked for again.
    let resized = |ranks: &str| {
        let output = run.call("resize", &[ranks]);
        assert!(
            output.status.success(),
            "{}\n{}",
            stderr(&output),
            run.log()
        );
    };
    resized("1");
    wait_for("one job and its successor", || {
        let further = |name: &&String| name.contains("-node-");
        (cluster.queue().keys().filter(further).count() == 0).then_some(())
    });
    resized("2");
    let two = wait_for_world(&run, two, 2);
    // As Slurm announces the time limit.
    let job = running_job(&cluster, &first);
    cluster.asked("scancel", &["--batch", "--signal=TERM", &job]);
    wait_for("the next job", || {
        (cluster.state(&job) != "RUNNING").then_some(())
    });
    wait_for_world(&run, two, 2);
    let suspended = run.call_in(&inside, "suspend", &[]);
    assert!(suspended.status.success(), "{}", stderr(&suspended));
    cluster.wait_for_empty_queue();
    let proof = run.prove();
    assert_eq!(proof["proved"], true, "{proof}");
    let said = fs::read_to_string(&log).unwrap();
    for words in [
        "1 host of the Slurm job: n",
        "; 2 more when Slurm gives them",
        " has joined",
    ] {
        assert!(said.contains(words), "{words}\n{said}");
    }
    lab.hosts().for_each(|node| lab.wait_for_none(node));
}

/// Submits a run on these nodes, with further options. Returns the name of its first job, and the file of that one's output.
fn submitted(cluster: &Cluster, run: &Run, options: &[&str]) -> (String, PathBuf) {
    let log = run.scratch().join("job.log");
    let output = format!("--sbatch=--output={}", log.display());
    let launch = [&["--on", "slurm", &output], options].concat();
    let submitted = run.launch_in(&cluster.lab.inside(), &launch);
    assert!(submitted.status.success(), "{}", stderr(&submitted));
    let first = wait_for("the first job", || cluster.queue().into_keys().next());
    (first, log)
}

#[test]
fn a_requeued_run_keeps_its_nodes_and_a_cancelled_one_is_resumed_on_others() {
    if !is_possible(&PROGRAMS) {
        return;
    }
    let spec = json!({"budget": {"samples": 100_000_000}, "checkpoint": {"every_samples": 2400}});
    let cluster = Cluster::of(2);
    let run = Run::of(small(spec)).with_environment(cluster.environment());
    let (first, log) = submitted(&cluster, &run, &["--nodes", "2"]);
    let said = || fs::read_to_string(&log).unwrap_or_default();
    let two = wait_for_world(&run, 0, 2);
    let further = || cluster.queue()[&format!("{first}-node-1")].clone();
    let kept = further();
    cluster.asked("scontrol", &["requeue", &running_job(&cluster, &first)]);
    let two = wait_for_world(&run, two, 2);
    assert_eq!(further(), kept, "{}", said());
    cluster.asked("scancel", &[&running_job(&cluster, &first)]);
    cluster.wait_for_empty_queue();

    let inside = cluster.lab.inside();
    let call = |name: &str, options: &[&str]| {
        let output = run.call_in(&inside, name, options);
        assert!(output.status.success(), "{}\n{}", stderr(&output), said());
    };
    let refused = stderr(&run.call_in(&inside, "resume", &["--procs", "3"]));
    let expected = "error: 3 processes need 3 nodes, and --nodes is 2; add `--nodes 3`, or use `--procs` for fewer\n";
    assert!(refused.ends_with(expected), "{refused}");
    call("resume", &["--nodes", "1"]);
    let one = wait_for_world(&run, two, 1);
    call("suspend", &[]);
    cluster.wait_for_empty_queue();
    // One rank needs no further node, until there are more.
    call("resume", &["--procs", "1"]);
    let one = wait_for_world(&run, one, 1);
    assert!(cluster.queue().keys().all(|name| *name == first));
    call("resize", &["2"]);
    wait_for_world(&run, one, 2);
    call("cancel", &[]);
    cluster.wait_for_empty_queue();
    assert_eq!(run.prove()["proved"], true, "{}", said());
    cluster
        .lab
        .hosts()
        .for_each(|node| cluster.lab.wait_for_none(node));
}

/// A run at a low QOS loses a further node and then its first job to jobs of a higher one.
fn outlives_a_higher_qos(notice: Notice) {
    if !is_possible(&PROGRAMS) {
        return;
    }
    let spec = json!({"budget": {"samples": 100_000_000}, "checkpoint": {"every_samples": 2400}});
    let cluster = Cluster::with(2, Preemption::Qos { notice });
    let run = Run::of(small(spec)).with_environment(cluster.environment());
    let (first, log) = submitted(&cluster, &run, &["--nodes", "2", "--qos", "low"]);
    let two = wait_for_world(&run, 0, 2);
    cluster.preempt(node_of(&cluster, &format!("{first}-node-1")));
    let one = wait_for_world(&run, two, 1);
    println!("a further node's job is preempted: {}", cost(&run, two));
    let two = wait_for_world(&run, one, 2);
    let job = running_job(&cluster, &first);
    cluster.preempt(node_of(&cluster, &first));
    wait_for_world(&run, two, 2);
    println!("the first job is preempted: {}", cost(&run, two));
    let said = fs::read_to_string(&log).unwrap();
    // One that could commit has ended, and the next job continues; another one waits in the queue again.
    let is_same = running_job(&cluster, &first) == job;
    assert_eq!(is_same, notice == Notice::None, "{said}");
    let waiting = ["--noheader", "--format=%T", "--name", &first];
    let mut states: Vec<_> =
        (cluster.asked("squeue", &waiting).lines().map(str::to_owned)).collect();
    states.sort();
    assert_eq!(states, ["PENDING", "RUNNING"], "{said}");
    let suspended = run.call_in(&cluster.lab.inside(), "suspend", &[]);
    assert!(suspended.status.success(), "{}\n{said}", stderr(&suspended));
    cluster.wait_for_empty_queue();
    let proof = run.prove();
    assert_eq!(proof["proved"], true, "{proof}");
    let mut formulas = run.proofs().into_iter();
    assert!(formulas.all(|formula| formula.ends_with(" = 12")));
    cluster
        .lab
        .hosts()
        .for_each(|node| cluster.lab.wait_for_none(node));
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_run_outlives_jobs_of_a_higher_qos() {
    outlives_a_higher_qos(Notice::None);
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_run_outlives_announced_jobs_of_a_higher_qos() {
    outlives_a_higher_qos(Notice::Signal);
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn a_submitted_run_keeps_its_checkpoints_in_a_bucket() {
    if !is_possible(&PROGRAMS) {
        return;
    }
    let spec = json!({"budget": {"samples": 100_000_000}, "checkpoint": {"every_samples": 2400}});
    let cluster = Cluster::of(2);
    let lab = &cluster.lab;
    let Some(s3) = lab.s3() else {
        return;
    };
    let mut environment = cluster.environment();
    environment.extend(s3.environment());
    let cache = lab.file("cache").display().to_string();
    environment.insert("XDG_CACHE_HOME".to_owned(), cache);
    let run = Run::of(small(spec)).with_environment(environment);
    let log = run.scratch().join("job.log");
    let output = format!("--sbatch=--output={}", log.display());
    let inside = lab.inside();
    let launch = ["--on", "slurm", "--nodes", "2", &output];
    let bucket = ["--bucket", "s3://runs/team"];
    let submitted = run.launch_in(&inside, &[&launch[..], &bucket].concat());
    assert!(submitted.status.success(), "{}", stderr(&submitted));
    let first = wait_for("the first job", || cluster.queue().into_keys().next());
    let two = wait_for_world(&run, 0, 2);
    let node = node_of(&cluster, &format!("{first}-node-1"));
    lab.power_off(node);
    let one = wait_for_world(&run, two, 1);
    lab.link(node, "up");
    cluster.start(node);
    let two = wait_for_world(&run, one, 2);
    // As a job of a higher priority does it: another node may run the next launcher.
    cluster.asked("scontrol", &["requeue", &running_job(&cluster, &first)]);
    wait_for_world(&run, two, 2);
    let suspended = run.call_in(&inside, "suspend", &[]);
    let said = fs::read_to_string(&log).unwrap();
    assert!(suspended.status.success(), "{}\n{said}", stderr(&suspended));
    cluster.wait_for_empty_queue();
    let proof = run.call_in(&inside, "status", &["--ledger", "-o", "json"]);
    let proof = String::from_utf8(proof.stdout).unwrap();
    assert!(proof.contains("\"proved\": true"), "{proof}");
    lab.hosts().for_each(|node| lab.wait_for_none(node));
}

/// What a fault did to the steps of a run, from the generation before it to the next one that has taken a step.
fn cost(run: &Run, before: u64) -> String {
    let last = run.generation_steps(before).pop().unwrap();
    let next = (before + 1..).find_map(|number| {
        let steps = run.generation_steps(number);
        steps.into_iter().next().map(|first| (number, first))
    });
    let (number, first) = next.unwrap();
    let lost = last["step"].as_u64().unwrap() + 1 - first["step"].as_u64().unwrap();
    let seconds = first["time"].as_f64().unwrap() - last["time"].as_f64().unwrap();
    let world = &first["world"];
    format!("{world} ranks in generation {number}, {lost} steps lost, {seconds:.1} s without steps")
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn ten_faults_of_slurm_in_a_row_leave_an_exact_ledger() {
    if !is_possible(&PROGRAMS) {
        return;
    }
    let cluster = Cluster::of(3);
    let lab = &cluster.lab;
    let spec = json!({"budget": {"samples": 100_000_000}, "checkpoint": {"every_samples": 2400}});
    let run = Run::of(small(spec)).with_environment(cluster.environment());
    let (first, _) = submitted(&cluster, &run, &["--nodes", "3"]);
    let further = |number: u32| format!("{first}-node-{number}");
    let number_of = |name: &str| cluster.queue()[name].clone();
    let now = std::cell::Cell::new(wait_for_world(&run, 0, 3));
    // Each fault, the world before all nodes are back, and what brings them back.
    let after = |fault: &str, size: u64, mend: &dyn Fn()| {
        let generation = wait_for_world(&run, now.get(), size);
        println!("{fault}: {}", cost(&run, now.get()));
        now.set(generation);
        mend();
        if size < 3 {
            now.set(wait_for_world(&run, generation, 3));
            println!("  all nodes are back: {}", cost(&run, generation));
        }
    };
    let by_itself = || ();

    run.signal_rank(now.get(), 1, Signal::KILL);
    after("a rank is killed", 3, &by_itself);
    cluster.asked("scontrol", &["requeue", &number_of(&further(1))]);
    after("a further node's job is requeued", 2, &by_itself);
    let node = node_of(&cluster, &further(2));
    lab.power_off(node);
    after("a further node loses its power", 2, &|| {
        lab.link(node, "up");
        cluster.start(node);
    });
    let controller = fs::read_to_string(lab.file("ctl.pid")).unwrap();
    sh(&format!("kill -9 {}", controller.trim()));
    std::thread::sleep(Duration::from_secs(60));
    cluster.start_controller();
    println!("Slurm's controller is gone for a minute: no world changes");
    assert_eq!(run.worlds().len() as u64, now.get());
    let job = number_of(&first);
    let kept = [1, 2].map(|number| number_of(&further(number)));
    run.signal_launcher(Signal::KILL);
    after(
        "the launcher is killed; the next job resumes",
        3,
        &by_itself,
    );
    assert_ne!(running_job(&cluster, &first), job);
    cluster.asked("scontrol", &["requeue", &running_job(&cluster, &first)]);
    after("the first job is requeued", 3, &by_itself);
    assert_eq!([1, 2].map(|number| number_of(&further(number))), kept);
    let job = running_job(&cluster, &first);
    cluster.asked("scancel", &["--batch", "--signal=TERM", &job]);
    after("the first job's time limit is announced", 3, &by_itself);
    let node = node_of(&cluster, &further(1));
    lab.link(node, "down");
    after("a further node is cut off", 2, &|| lab.link(node, "up"));
    cluster.preempt(node_of(&cluster, &further(2)));
    after("a further node's job is preempted", 2, &by_itself);
    cluster.preempt(node_of(&cluster, &first));
    after("the first job is preempted", 3, &by_itself);

    let suspended = run.call_in(&lab.inside(), "suspend", &[]);
    assert!(suspended.status.success(), "{}", stderr(&suspended));
    cluster.wait_for_empty_queue();
    let proof = run.prove();
    assert_eq!(proof["proved"], true, "{proof}");
    println!(
        "{} samples proved in {} worlds",
        proof["samples"],
        run.worlds().len()
    );
    lab.hosts().for_each(|node| lab.wait_for_none(node));
}

/// The node on which a job runs.
fn node_of(cluster: &Cluster, name: &str) -> u32 {
    let node = cluster.asked("squeue", &["--noheader", "--format=%N", "--name", name]);
    node.trim_start_matches('n').parse().unwrap()
}

/// The running job of this name.
fn running_job(cluster: &Cluster, name: &str) -> String {
    let options = [
        "--noheader",
        "--states=RUNNING",
        "--format=%i",
        "--name",
        name,
    ];
    cluster.asked("squeue", &options)
}

#[test]
fn what_slurm_cannot_give_is_refused_and_what_waits_can_be_cancelled() {
    if !is_possible(&PROGRAMS) {
        return;
    }
    let cluster = Cluster::of(1);
    let inside = cluster.lab.inside();
    let run = Run::of(small(json!({}))).with_environment(cluster.environment());
    let refused = |arguments: &[&str], said: &str| {
        let output = run.launch_in(&inside, arguments);
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(
            stderr(&output).contains(said),
            "{said}\n{}",
            stderr(&output)
        );
        assert!(!run.out().exists());
    };
    let slurm = ["--on", "slurm", "--nodes", "1"];
    let with = |more: &[&'static str]| [&slurm[..], more].concat();
    refused(
        &with(&["--partition", "nowhere"]),
        "error: cannot ask Slurm with sbatch: invalid partition specified: nowhere",
    );
    refused(
        &with(&["--image", "x"]),
        "error: `--image` applies to Kubernetes; remove it\n",
    );
    refused(
        &["--on", "slurm", "--nodes", "2", "--min-nodes", "3"],
        "error: --nodes is 2, and the run needs at least 3 (--min-nodes, elasticity.min); raise --nodes, or lower the minimum\n",
    );
    let shown = run.launch_in(&inside, &with(&["--time", "1:00:00", "--dry-run"]));
    let script = String::from_utf8_lossy(&shown.stdout).into_owned();
    assert!(script.contains("#SBATCH --time=1:00:00\n"), "{script}");
    // Within an allocation, and as one of its tasks.
    let program = env!("CARGO_BIN_EXE_evenkeel");
    let recipe = run.recipe().display();
    let within = |options: &[&str], more: &str| {
        let line = format!("{program} launch {recipe} {more}");
        let output = cluster.call("srun", &[options, &["sh", "-c", &line]].concat());
        stderr(&output)
    };
    let said = within(&["--nodes=1"], "--nodes 2");
    assert!(
        said.contains("the allocation has 1 node, and --nodes is 2"),
        "{said}"
    );
    let said = within(&["--nodes=1", "--ntasks=2", "--overcommit"], "--dry-run");
    assert!(
        said.contains("this is task 1 of `srun`, and only one process launches"),
        "{said}"
    );
    cluster.asked(
        "scontrol",
        &["update", "nodename=n1", "state=drain", "reason=test"],
    );
    let submitted = run.launch_in(&inside, &slurm);
    assert!(submitted.status.success(), "{}", stderr(&submitted));
    let job = cluster.queue().into_values().next().unwrap();
    let waits = format!("job {job}, PENDING (");
    let status = run.call_in(&inside, "status", &[]);
    let shown = String::from_utf8(status.stdout).unwrap();
    let expected = format!("{}: queued: {waits}", run.out().display());
    assert!(shown.starts_with(&expected), "{shown}");
    assert!(shown.ends_with(") in Slurm's queue\n"), "{shown}");
    let list = cluster.call(program, &["list", "--local"]);
    let shown = String::from_utf8(list.stdout).unwrap();
    assert!(shown.contains(&waits), "{shown}");
    let logs = stderr(&run.call_in(&inside, "logs", &[]));
    assert!(logs.contains(&format!(" has not begun: {waits}")), "{logs}");
    let cancelled = run.call_in(&inside, "cancel", &[]);
    assert!(cancelled.status.success(), "{}", stderr(&cancelled));
    cluster.wait_for_empty_queue();
}

#[test]
fn outside_of_an_allocation_the_command_that_makes_one_is_named() {
    let run = Run::of(small(json!({})));
    let output = run.launch(&["--on", "slurm"]);
    assert_eq!(output.status.code(), Some(2));
    insta::assert_snapshot!(stderr(&output), @"error: this is not inside an allocation of Slurm; add `--nodes N` to submit the run, or start this command by `sbatch --nodes N --no-kill --wrap '…'`");
}
