//! Programs of the user's own in the place of the built-in trainer. The programs are shell scripts:
//! what is looked at is what they are given and what becomes of them.

use std::os::unix::fs::PermissionsExt;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};

use super::support::{Run, evenkeel, said, wait_for};

/// Says what it was given, saves when it is asked to leave, and ends well once there is a file `stop`
/// in its run's directory.
const PROGRAM: &str = r#"
echo "pid $$ rank $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE: $*"
trap '[ "$RANK" = 0 ] && : > "$EVENKEEL_CHECKPOINT_DIR/step-$EVENKEEL_GENERATION"; exit 143' TERM
while [ ! -e "$EVENKEEL_RUN_DIR/stop" ]; do sleep 0.02; done
"#;

/// A run of a native recipe whose program is this shell script.
struct Own {
    run: Run,
    program: String,
}

/// What every command here ends with.
const NUMBERS: [&str; 3] = [
    "{per_device_batch_size}x{gradient_accumulation_steps}",
    "{resume_args}",
    "generation={generation}",
];

impl Own {
    fn new(program: &str) -> Own {
        let run = Run::of(json!({
            "batch": {"global": 12, "micro": 6},
            "budget": {"samples": 2400},
            "trainer": {"resume": ["--from", "{checkpoint}"], "drain_seconds": 1},
        }));
        let path = run.scratch().join("program.sh");
        std::fs::write(&path, program).unwrap();
        let program = path.display().to_string();
        Own { run, program }
    }

    fn arguments<'a>(&'a self, procs: &'a str) -> Vec<&'a str> {
        let mut arguments = vec!["--procs", procs, "--", "sh", &self.program];
        arguments.extend(NUMBERS);
        arguments
    }

    fn log(&self, generation: u64, rank: u64) -> String {
        let log = format!("gen-{generation}/logs/rank-{rank}.log");
        std::fs::read_to_string(self.run.out().join(log)).unwrap_or_default()
    }

    /// What every rank of a generation says of itself once it runs, without its process.
    fn greetings(&self, generation: u64, world: u64) -> Vec<String> {
        (0..world)
            .map(|rank| {
                let line = self.first_line(generation, rank);
                let (_, greeting) = line.split_once(" rank ").unwrap();
                let run = self.run.out().display().to_string();
                greeting.replace(&run, "RUN")
            })
            .collect()
    }

    fn first_line(&self, generation: u64, rank: u64) -> String {
        wait_for(&format!("rank {rank} of generation {generation}"), || {
            let log = self.log(generation, rank);
            log.split_once('\n').map(|(line, _)| line.to_owned())
        })
    }

    fn pid(&self, generation: u64, rank: u64) -> Pid {
        let line = self.first_line(generation, rank);
        let number = line.split(' ').nth(1).unwrap();
        Pid::from_raw(number.parse().unwrap()).unwrap()
    }

    fn stop(&self) {
        std::fs::write(self.run.out().join("stop"), "").unwrap();
    }

    fn resize(&self, processes: &str) {
        let resized = self.run.call("resize", &[processes]);
        assert!(resized.status.success(), "{resized:?} {}", self.run.log());
    }
}

#[test]
fn own_program_is_resized_killed_and_finishes_with_the_same_global_batch() {
    let own = Own::new(PROGRAM);
    let launched = own.run.start(&own.arguments("2"));
    assert_eq!(
        own.greetings(1, 2),
        [
            "0/2 local 0/2: 6x1 generation=1",
            "1/2 local 1/2: 6x1 generation=1"
        ]
    );
    own.resize("1");
    let from = |step| format!("--from RUN/checkpoints/step-{step}");
    assert_eq!(
        own.greetings(2, 1),
        [format!("0/1 local 0/1: 6x2 {} generation=2", from(1))]
    );
    own.resize("3");
    let third = own.greetings(3, 3);
    assert_eq!(
        third[2],
        format!("2/3 local 2/3: 4x1 {} generation=3", from(2))
    );
    // A process that is killed is a device that is gone; the others hang, as in a collective.
    kill_process(own.pid(3, 1), Signal::KILL).unwrap();
    let fourth = own.greetings(4, 2);
    assert_eq!(
        fourth[0],
        format!("0/2 local 0/2: 6x1 {} generation=4", from(2))
    );

    let status = own.run.call("status", &["-o", "json"]);
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(status["phase"], "running");
    let shown = status["own"]["ranks"][1]["last_line"].as_str().unwrap();
    assert!(shown.contains("rank 1/2 local 1/2: 6x1"), "{status:#}");
    own.stop();
    assert!(launched.wait().success(), "{}", own.run.log());
    assert_eq!(own.run.worlds(), [2, 1, 3, 2]);
    assert_eq!(
        own.run.proofs(),
        [
            "2 × 6 × 1 = 12",
            "1 × 6 × 2 = 12",
            "3 × 4 × 1 = 12",
            "2 × 6 × 1 = 12"
        ]
    );
    // The terminal shows what each rank prints, with its number.
    let log = own.run.log();
    assert!(log.contains("Rank 2: pid "), "{log}");
    assert!(log.contains("lost rank 1: killed by signal 9"), "{log}");
    let text = own.run.call("status", &[]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(
        text.contains("finished") && text.contains("rank 1"),
        "{text}"
    );
}

#[test]
fn own_program_finds_the_environment_of_torchrun_and_the_plan() {
    let own = Own::new("env; echo the end; exit 0");
    let output = own.run.launch(&own.arguments("3"));
    assert!(output.status.success(), "{}", said(&output));
    let value = |rank: u64, name: &str| {
        let log = own.log(1, rank);
        let line = log
            .lines()
            .find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.unwrap_or_else(|| panic!("{name} is not in {log}"))
            .to_owned()
    };
    for rank in 0..3 {
        let number = rank.to_string();
        for (name, expected) in [
            ("RANK", number.as_str()),
            ("LOCAL_RANK", &number),
            ("WORLD_SIZE", "3"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("GROUP_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("PET_NNODES", "1"),
            ("PET_NPROC_PER_NODE", "3"),
            ("PET_NODE_RANK", "0"),
            ("EVENKEEL_GLOBAL_BATCH_SIZE", "12"),
            ("EVENKEEL_PER_DEVICE_BATCH_SIZE", "4"),
            ("EVENKEEL_GRADIENT_ACCUMULATION_STEPS", "1"),
            ("EVENKEEL_DATA_PARALLEL_SIZE", "3"),
            ("EVENKEEL_GENERATION", "1"),
        ] {
            assert_eq!(value(rank, name), expected, "{name}");
        }
        assert_eq!(value(rank, "MASTER_PORT"), value(0, "MASTER_PORT"));
        assert!(own.log(1, rank).ends_with("the end\n"));
    }
    let checkpoints = own.run.out().join("checkpoints");
    assert_eq!(
        value(0, "EVENKEEL_CHECKPOINT_DIR"),
        checkpoints.display().to_string()
    );
    assert!(
        !own.log(1, 0).contains("EVENKEEL_CHECKPOINT="),
        "there is none yet"
    );
}

#[test]
fn own_program_that_ignores_the_signal_is_killed_after_its_time() {
    let own = Own::new(&PROGRAM.replace("trap '", "trap '' TERM; : '"));
    let launched = own.run.start(&own.arguments("2"));
    own.greetings(1, 2);
    own.resize("3");
    own.greetings(2, 3);
    own.stop();
    assert!(launched.wait().success(), "{}", own.run.log());
    assert_eq!(own.run.worlds(), [2, 3]);
    let log = own.run.log();
    assert!(
        log.contains("rank 0, rank 1 did not leave within 1 s"),
        "{log}"
    );
}

#[test]
fn own_program_that_always_fails_is_tried_four_times() {
    let own = Own::new("echo no such dataset >&2; exit 3");
    let output = own.run.launch(&own.arguments("2"));
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(said(&output).contains("exit code 3"), "{}", said(&output));
    assert_eq!(own.run.worlds(), [2, 2, 2, 2]);
    assert!(own.log(4, 1).contains("no such dataset"));
}

#[test]
fn own_program_that_leaves_unasked_is_tried_four_times_too() {
    // 143 is what it says after the drain signal; by itself it would leave again and again.
    let own = Own::new("exit 143");
    let output = own.run.launch(&own.arguments("2"));
    assert_eq!(output.status.code(), Some(1), "{}", said(&output));
    assert!(
        said(&output).contains("nobody had asked it to"),
        "{}",
        said(&output)
    );
    assert_eq!(own.run.worlds().len(), 4);
}

#[test]
fn own_program_is_started_where_its_run_began_wherever_it_is_resumed() {
    let own = Own::new(&format!("pwd\n{PROGRAM}"));
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let launch = |from: &std::path::Path, arguments: &[&str]| {
        own.run
            .start_in_shell(&format!("cd '{}'", from.display()), arguments)
    };
    let launched = launch(here.path(), &own.arguments("1"));
    wait_for("the program", || {
        own.log(1, 0).contains("pid ").then_some(())
    });
    own.run.drain(launched);
    let launched = launch(there.path(), &["--procs", "1", "--resume"]);
    wait_for("the program again", || {
        own.log(2, 0).contains("pid ").then_some(())
    });
    let began = here.path().canonicalize().unwrap();
    for generation in [1, 2] {
        assert_eq!(own.first_line(generation, 0), began.display().to_string());
    }
    own.stop();
    assert!(launched.wait().success(), "{}", own.run.log());
}

#[test]
fn own_program_is_not_resumed_with_another_place_for_its_checkpoints() {
    let own = Own::new(PROGRAM);
    let launched = own.run.start(&own.arguments("1"));
    own.greetings(1, 1);
    own.run.drain(launched);
    let elsewhere = ["--procs", "1", "--resume", "trainer.checkpoint_dir=mine"];
    let refused = own.run.launch(&elsewhere);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    assert!(
        said(&refused).contains("now they are said to be in mine"),
        "{}",
        said(&refused)
    );
}

#[test]
fn own_program_that_makes_progress_may_fail_as_often_as_it_likes() {
    // Six failures, each after another checkpoint.
    let program = r#"[ "$EVENKEEL_GENERATION" -gt 6 ] && exit 0
        : > "$EVENKEEL_CHECKPOINT_DIR/step-$EVENKEEL_GENERATION"; exit 9"#;
    let own = Own::new(program);
    let output = own.run.launch(&own.arguments("1"));
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(own.run.worlds().len(), 7);
}

#[test]
fn own_program_without_memory_goes_on_with_a_smaller_micro_batch() {
    let program = r#"case "$1" in 6x*|4x*)
        echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB' >&2; exit 1;;
        esac"#;
    let own = Own::new(program);
    let output = own.run.launch(&own.arguments("1"));
    assert!(output.status.success(), "{}", said(&output));
    let proofs = own.run.proofs();
    assert_eq!(
        proofs,
        ["1 × 6 × 2 = 12", "1 × 4 × 3 = 12", "1 × 3 × 4 = 12"]
    );
}

#[test]
fn nothing_of_an_older_generation_lives_on() {
    // A child that its parent leaves behind, as a data loader's worker that nobody waits for.
    let own = Own::new(&format!("sleep 1000 & echo child $! >&2\n{PROGRAM}"));
    let launched = own.run.start(&own.arguments("1"));
    let child = wait_for("the child", || {
        let log = own.log(1, 0);
        let line = log.lines().find(|line| line.starts_with("child "))?;
        Pid::from_raw(line.strip_prefix("child ")?.parse().ok()?)
    });
    wait_for("the program", || {
        own.log(1, 0).contains("pid ").then_some(())
    });
    assert!(test_kill_process(child).is_ok());
    own.resize("2");
    wait_for("the child's end", || {
        test_kill_process(child).is_err().then_some(())
    });
    own.stop();
    assert!(launched.wait().success(), "{}", own.run.log());
}

#[test]
fn ranks_of_a_dead_launcher_leave_and_the_run_goes_on_without_its_command() {
    let own = Own::new(PROGRAM);
    let launched = own.run.start(&own.arguments("2"));
    own.greetings(1, 2);
    launched.signal(Signal::KILL);
    launched.wait();
    // They hear of it, and save.
    wait_for("the checkpoint", || {
        own.run
            .out()
            .join("checkpoints/step-1")
            .exists()
            .then_some(())
    });
    let launched = own.run.start(&["--procs", "3", "--resume"]);
    assert_eq!(
        own.greetings(2, 3)[0],
        "0/3 local 0/3: 4x1 --from RUN/checkpoints/step-1 generation=2"
    );
    own.run.drain(launched);
    assert!(own.run.out().join("checkpoints/step-2").exists());
    let status = own.run.call("status", &[]);
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("drained, resumable"), "{status}");
    let proof = own.run.call("status", &["--ledger"]);
    assert!(
        said(&proof).contains("the user's own program trains"),
        "{}",
        said(&proof)
    );
}

#[test]
fn a_command_without_a_recipe_is_started_without_its_torchrun() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("train");
    std::fs::write(&program, "#!/bin/sh\necho \"$@\"\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let out = folder.path().join("run");
    let launch = |before: &[&str], command: &[&str]| {
        evenkeel()
            .arg("launch")
            .arg("--out")
            .arg(&out)
            .args(before)
            .arg("--")
            .args(command)
            .output()
            .unwrap()
    };
    let program = program.display().to_string();
    let batch = [
        "--per_device_train_batch_size",
        "6",
        "--gradient_accumulation_steps=1",
    ];
    let mut command = vec!["torchrun", "--no_python", "--nproc_per_node", "2", &program];
    command.extend(batch);
    command.extend(["--learning_rate", "1e-3"]);
    let refused = launch(&["--procs", "5"], &command);
    assert_eq!(refused.status.code(), Some(1), "{}", said(&refused));
    assert!(
        said(&refused).contains("batch-divisible"),
        "{}",
        said(&refused)
    );
    assert!(!out.exists());

    let output = launch(&["--procs", "1"], &command);
    assert!(output.status.success(), "{}", said(&output));
    let log = std::fs::read_to_string(out.join("gen-1/logs/rank-0.log")).unwrap();
    assert_eq!(
        log,
        "--learning_rate 1e-3 --per_device_train_batch_size 6 --gradient_accumulation_steps 2\n"
    );
    let mut accelerate = vec!["accelerate", "launch", &program];
    accelerate.extend(batch);
    let refused = launch(&["--recipe-gpus", "2"], &accelerate);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    assert!(
        said(&refused).contains("only torchrun and Python"),
        "{}",
        said(&refused)
    );
}
