//! External trainers. The trainers are shell scripts; the tests check their arguments, their
//! environment and their end.

use std::os::unix::fs::PermissionsExt;

use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::{Value, json};

use super::support::{Run, evenkeel, stderr, wait_for};

/// Prints its arguments, saves on the drain signal, and succeeds once a file `stop` exists in its
/// run directory.
const PROGRAM: &str = r#"
trap '[ "$RANK" = 0 ] && : > "$EVENKEEL_CHECKPOINT_DIR/step-$EVENKEEL_GENERATION"; exit 143' TERM
echo "pid $$ rank $RANK/$WORLD_SIZE local $LOCAL_RANK/$LOCAL_WORLD_SIZE: $*"
while [ ! -e "$EVENKEEL_RUN_DIR/stop" ]; do sleep 0.02; done
"#;

/// A run of a native recipe with this shell script as external trainer.
struct External {
    run: Run,
    program: String,
}

/// The last arguments of every command here.
const NUMBERS: [&str; 3] = [
    "{per_device_batch_size}x{gradient_accumulation_steps}",
    "{resume_args}",
    "generation={generation}",
];

impl External {
    fn new(program: &str) -> External {
        let run = Run::of(json!({
            "batch": {"global": 12, "per_device_batch_size": 6},
            "budget": {"samples": 2400},
            "trainer": {"resume": ["--from", "{checkpoint}"], "drain_seconds": 1},
        }));
        let path = run.scratch().join("program.sh");
        std::fs::write(&path, program).unwrap();
        let program = path.display().to_string();
        External { run, program }
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

    /// First line of every rank of a generation, without its process id.
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
fn external_trainer_keeps_its_global_batch_over_a_resize_and_a_kill() {
    let external = External::new(PROGRAM);
    let launched = external.run.start(&external.arguments("2"));
    assert_eq!(
        external.greetings(1, 2),
        [
            "0/2 local 0/2: 6x1 generation=1",
            "1/2 local 1/2: 6x1 generation=1"
        ]
    );
    external.resize("1");
    let from = |step| format!("--from RUN/checkpoints/step-{step}");
    assert_eq!(
        external.greetings(2, 1),
        [format!("0/1 local 0/1: 6x2 {} generation=2", from(1))]
    );
    external.resize("3");
    let third = external.greetings(3, 3);
    assert_eq!(
        third[2],
        format!("2/3 local 2/3: 4x1 {} generation=3", from(2))
    );
    // A killed process counts as a lost device; the others hang, as in a collective.
    kill_process(external.pid(3, 1), Signal::KILL).unwrap();
    let fourth = external.greetings(4, 2);
    assert_eq!(
        fourth[0],
        format!("0/2 local 0/2: 6x1 {} generation=4", from(2))
    );

    // The launcher writes the phase after the ranks have started.
    let status = wait_for("the running phase", || {
        let status = external.run.call("status", &["-o", "json"]);
        let status: Value = serde_json::from_slice(&status.stdout).unwrap();
        (status["phase"] == "running").then_some(status)
    });
    let shown = status["external_trainer"]["ranks"][1]["last_line"]
        .as_str()
        .unwrap();
    assert!(shown.contains("rank 1/2 local 1/2: 6x1"), "{status:#}");
    external.stop();
    assert!(launched.wait().success(), "{}", external.run.log());
    assert_eq!(external.run.worlds(), [2, 1, 3, 2]);
    assert_eq!(
        external.run.proofs(),
        [
            "2 × 6 × 1 = 12",
            "1 × 6 × 2 = 12",
            "3 × 4 × 1 = 12",
            "2 × 6 × 1 = 12"
        ]
    );
    // The terminal shows each rank's output with its number.
    let log = external.run.log();
    assert!(log.contains("Rank 2: pid "), "{log}");
    assert!(log.contains("lost rank 1: killed by signal 9"), "{log}");
    let text = external.run.call("status", &[]);
    let text = String::from_utf8(text.stdout).unwrap();
    assert!(
        text.contains("finished") && text.contains("rank 1"),
        "{text}"
    );
}

/// Writes its progress ten times a second, and continues from the step of the newest checkpoint.
const REPORTING: &str = r#"
step=$(ls "$EVENKEEL_CHECKPOINT_DIR" | sed -n 's/^step-//p' | sort -n | tail -n 1)
step=${step:-0}
trap '[ "$RANK" = 0 ] && : > "$EVENKEEL_CHECKPOINT_DIR/step-$step"; exit 143' TERM
while [ ! -e "$EVENKEEL_RUN_DIR/stop" ]; do
  step=$((step + 1))
  [ "$RANK" = 0 ] && printf '{"step": %d, "total_steps": 400, "loss": %d.5, "tokens": %d}' \
    $step $((9 - step / 20)) $((step * 120)) > "$EVENKEEL_PROGRESS.tmp" &&
    mv "$EVENKEEL_PROGRESS.tmp" "$EVENKEEL_PROGRESS"
  sleep 0.1
done
"#;

#[test]
fn the_report_shows_the_progress_of_an_external_trainer_over_its_generations() {
    let external = External::new(REPORTING);
    let launched = external.run.start(&external.arguments("2"));
    external.run.wait_for_steps(1, 4);
    external.resize("3");
    external.run.wait_for_steps(2, 4);
    external.stop();
    assert!(launched.wait().success(), "{}", external.run.log());
    let report = external.run.call("report", &[]);
    assert!(report.status.success(), "{}", stderr(&report));
    let page = std::fs::read_to_string(external.run.out().join("report.html")).unwrap();
    let last = external.run.generation_steps(2).pop().unwrap();
    let loss = last["loss"].as_f64().unwrap();
    for shown in [
        format!("<dt>Training loss</dt><dd>{loss:.4}</dd>"),
        format!("of 4,800 in {} steps", last["step"]),
        "2 → 3 in 2 generations".to_owned(),
        // The page escapes the slash.
        " tok&#x2f;s</dd>".to_owned(),
        "3 × 4 × 1 = 12".to_owned(),
    ] {
        assert!(page.contains(&shown), "{shown} is not in {page}");
    }
    // The second generation continues the curve.
    let data = page.split_once("id=\"data\">").unwrap().1;
    let data: Value = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    let points = data["curves"]["loss"][0]["points"].as_array().unwrap();
    assert!(points.len() >= 8, "{points:?}");
    assert!(
        points.is_sorted_by(|a, b| a[0].as_f64() < b[0].as_f64()),
        "{points:?}"
    );
}

#[test]
fn external_trainer_gets_the_environment_of_torchrun_and_the_plan() {
    let external = External::new("env; echo the end; exit 0");
    let output = external.run.launch(&external.arguments("3"));
    assert!(output.status.success(), "{}", stderr(&output));
    let value = |rank: u64, name: &str| {
        let log = external.log(1, rank);
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
        assert!(external.log(1, rank).ends_with("the end\n"));
    }
    let checkpoints = external.run.out().join("checkpoints");
    assert_eq!(
        value(0, "EVENKEEL_CHECKPOINT_DIR"),
        checkpoints.display().to_string()
    );
    assert!(
        !external.log(1, 0).contains("EVENKEEL_CHECKPOINT="),
        "no checkpoint exists yet"
    );
}

#[test]
fn external_trainer_that_ignores_the_drain_signal_is_killed_after_its_time_limit() {
    let external = External::new(&PROGRAM.replace("trap '", "trap '' TERM; : '"));
    let launched = external.run.start(&external.arguments("2"));
    external.greetings(1, 2);
    external.resize("3");
    external.greetings(2, 3);
    external.stop();
    assert!(launched.wait().success(), "{}", external.run.log());
    assert_eq!(external.run.worlds(), [2, 3]);
    let log = external.run.log();
    assert!(
        log.contains("rank 0, rank 1 did not exit within 1 s"),
        "{log}"
    );
}

#[test]
fn external_trainer_that_always_fails_is_started_four_times() {
    let external = External::new("echo no such dataset >&2; exit 3");
    let output = external.run.launch(&external.arguments("2"));
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("exit code 3"),
        "{}",
        stderr(&output)
    );
    assert_eq!(external.run.worlds(), [2, 2, 2, 2]);
    assert!(external.log(4, 1).contains("no such dataset"));
}

#[test]
fn external_trainer_that_exits_with_143_unasked_is_started_four_times() {
    // 143 is the exit code after a drain signal; here the trainer exits with it without a signal.
    let external = External::new("exit 143");
    let output = external.run.launch(&external.arguments("2"));
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("without a request to drain"),
        "{}",
        stderr(&output)
    );
    assert_eq!(external.run.worlds().len(), 4);
}

#[test]
fn external_trainer_resumes_in_its_original_working_directory() {
    let external = External::new(&format!("pwd\n{PROGRAM}"));
    let (here, there) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let launch = |from: &std::path::Path, arguments: &[&str]| {
        external
            .run
            .start_in_shell(&format!("cd '{}'", from.display()), arguments)
    };
    let launched = launch(here.path(), &external.arguments("1"));
    wait_for("the program", || {
        external.log(1, 0).contains("pid ").then_some(())
    });
    external.run.drain(launched);
    let launched = launch(there.path(), &["--procs", "1", "--resume"]);
    wait_for("the program again", || {
        external.log(2, 0).contains("pid ").then_some(())
    });
    let began = here.path().canonicalize().unwrap();
    for generation in [1, 2] {
        assert_eq!(
            external.first_line(generation, 0),
            began.display().to_string()
        );
    }
    external.stop();
    assert!(launched.wait().success(), "{}", external.run.log());
}

#[test]
fn external_trainer_does_not_resume_with_another_checkpoint_directory() {
    let external = External::new(PROGRAM);
    let launched = external.run.start(&external.arguments("1"));
    external.greetings(1, 1);
    external.run.drain(launched);
    let elsewhere = ["--procs", "1", "--resume", "trainer.checkpoint_dir=mine"];
    let refused = external.run.launch(&elsewhere);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(
        stderr(&refused).contains("but the recipe now sets `mine`"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn external_trainer_that_makes_progress_may_fail_any_number_of_times() {
    // Six failures, each after a new checkpoint.
    let program = r#"[ "$EVENKEEL_GENERATION" -gt 6 ] && exit 0
        : > "$EVENKEEL_CHECKPOINT_DIR/step-$EVENKEEL_GENERATION"; exit 9"#;
    let external = External::new(program);
    let output = external.run.launch(&external.arguments("1"));
    assert!(output.status.success(), "{}", stderr(&output));
    assert_eq!(external.run.worlds().len(), 7);
}

#[test]
fn external_trainer_out_of_memory_continues_with_a_smaller_micro_batch() {
    let program = r#"case "$1" in 6x*|4x*)
        echo 'torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB' >&2; exit 1;;
        esac"#;
    let external = External::new(program);
    let output = external.run.launch(&external.arguments("1"));
    assert!(output.status.success(), "{}", stderr(&output));
    let proofs = external.run.proofs();
    assert_eq!(
        proofs,
        ["1 × 6 × 2 = 12", "1 × 4 × 3 = 12", "1 × 3 × 4 = 12"]
    );
}

#[test]
fn no_process_of_an_older_generation_survives() {
    // A child left behind by its parent, like a data loader's worker.
    let external = External::new(&format!("sleep 1000 & echo child $! >&2\n{PROGRAM}"));
    let launched = external.run.start(&external.arguments("1"));
    let child = wait_for("the child", || {
        let log = external.log(1, 0);
        let line = log.lines().find(|line| line.starts_with("child "))?;
        Pid::from_raw(line.strip_prefix("child ")?.parse().ok()?)
    });
    wait_for("the program", || {
        external.log(1, 0).contains("pid ").then_some(())
    });
    assert!(test_kill_process(child).is_ok());
    external.resize("2");
    wait_for("the child's end", || {
        test_kill_process(child).is_err().then_some(())
    });
    external.stop();
    assert!(launched.wait().success(), "{}", external.run.log());
}

#[test]
fn ranks_of_a_dead_launcher_exit_and_a_resume_needs_no_command() {
    let external = External::new(PROGRAM);
    let launched = external.run.start(&external.arguments("2"));
    external.greetings(1, 2);
    launched.signal(Signal::KILL);
    launched.wait();
    // The ranks receive the drain signal and save.
    wait_for("the checkpoint", || {
        external
            .run
            .out()
            .join("checkpoints/step-1")
            .exists()
            .then_some(())
    });
    let launched = external.run.start(&["--procs", "3", "--resume"]);
    assert_eq!(
        external.greetings(2, 3)[0],
        "0/3 local 0/3: 4x1 --from RUN/checkpoints/step-1 generation=2"
    );
    external.run.drain(launched);
    assert!(external.run.out().join("checkpoints/step-2").exists());
    let status = external.run.call("status", &[]);
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(status.contains("drained, resumable"), "{status}");
    let formula = external.run.call("status", &["--ledger"]);
    assert!(
        stderr(&formula).contains("an external trainer trains this run"),
        "{}",
        stderr(&formula)
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
    let mut missing = vec!["torchrun", "--nproc_per_node", "2", "missing/train.py"];
    missing.extend(batch);
    let refused = launch(&["--procs", "1"], &missing);
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    let message = stderr(&refused);
    assert!(
        message.contains("missing/train.py: no such file"),
        "{message}"
    );
    assert!(!out.exists());

    let refused = launch(&["--procs", "5"], &command);
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    assert!(
        stderr(&refused).contains("batch-divisible"),
        "{}",
        stderr(&refused)
    );
    assert!(!out.exists());

    let output = launch(&["--procs", "1"], &command);
    assert!(output.status.success(), "{}", stderr(&output));
    let log = std::fs::read_to_string(out.join("gen-1/logs/rank-0.log")).unwrap();
    assert_eq!(
        log,
        "--learning_rate 1e-3 --per_device_train_batch_size 6 --gradient_accumulation_steps 2\n"
    );
    let mut mpirun = vec!["mpirun", "-n", "2", &program];
    mpirun.extend(batch);
    let refused = launch(&["--recipe-gpus", "2"], &mpirun);
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    assert!(
        stderr(&refused).contains("does not begin with a launcher that evenkeel replaces"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn a_trainers_progress_is_shown() {
    let external = External::new(
        r#"
        [ "$RANK" = 0 ] || exit 0
        echo '{"step": 4, "total_steps": 9, "loss": 2.5, "tokens": 100}' > "$EVENKEEL_PROGRESS"
        sleep 3
        echo '{"step": 9, "total_steps": 9, "tokens": 900}' > "$EVENKEEL_PROGRESS"
        "#,
    );
    let arguments = external.arguments("2");
    let output = external
        .run
        .launch(&[&["--log", "json"], arguments.as_slice()].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    let events = printed
        .lines()
        .map(|line| serde_json::from_str(line).unwrap());
    let steps: Vec<Value> = events
        .filter(|event: &Value| event["event"] == "step")
        .collect();
    let shown = |key: &str| {
        steps
            .iter()
            .map(|step| step[key].clone())
            .collect::<Vec<_>>()
    };
    assert_eq!(shown("step"), [4, 9]);
    assert_eq!(shown("samples"), [48, 108]);
    assert_eq!(shown("loss"), [json!(2.5), Value::Null]);
    assert_eq!(shown("tokens"), [0, 800]);

    let status = external.run.call("status", &[]);
    let status = String::from_utf8(status.stdout).unwrap();
    assert!(
        status.contains("  progress    108 of 108 samples, step 9, batch 12, "),
        "{status}"
    );
}

#[test]
fn a_trainers_progress_is_found_in_its_output() {
    let external = External::new(
        r#"
        [ "$RANK" = 0 ] || { echo '8/9 loss 9.0'; exit 0; }
        shown() { until grep -q "\"step\":$1," "$EVENKEEL_RUN_DIR"/gen-1/metrics.jsonl; do sleep 0.1; done; }
        printf 'starting\n4/9 loss 2.5\nsaved\n'
        shown 4
        printf '  80%%|7/9 loss 2.25\r'
        shown 7
        printf ' 100%%|9/9 loss 2.0'
        "#,
    );
    let pattern =
        "trainer.progress_pattern=(?<step>[0-9]+)/(?<total_steps>[0-9]+) loss (?<loss>[0-9.]+)";
    let arguments = external.arguments("2");
    let arguments = [&["--log", "json", pattern], arguments.as_slice()].concat();
    let output = external.run.launch(&arguments);
    assert!(output.status.success(), "{}", stderr(&output));
    let printed = String::from_utf8(output.stdout).unwrap();
    let steps = printed.lines().filter_map(|line| {
        let event: Value = serde_json::from_str(line).unwrap();
        let step = (event["step"].as_u64()?, event["loss"].as_f64()?);
        (event["event"] == "step").then_some(step)
    });
    let steps: Vec<_> = steps.collect();
    assert_eq!(steps, [(4, 2.5), (7, 2.25), (9, 2.0)]);
    let words = external.run.call("logs", &[]);
    assert!(
        words.stdout.starts_with(b"starting\n4/9 loss 2.5\n"),
        "{words:?}"
    );
    let steps = external.run.call("logs", &["--steps"]);
    let steps = String::from_utf8(steps.stdout).unwrap();
    assert!(
        steps.contains("Step 9 ") && !steps.contains("starting"),
        "{steps}"
    );
}

#[test]
fn a_taken_port_is_the_reason_of_a_failure() {
    let other = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port();
    let external = External::new(&format!(
        "exec python3 -c 'import socket; socket.socket().bind((\"127.0.0.1\", {port}))'\n"
    ));
    let output = external.run.launch(&external.arguments("1"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = stderr(&output);
    for words in [
        "Address already in use: the program listens on",
        "MASTER_PORT",
    ] {
        assert!(said.contains(words), "{said}");
    }
    // The other program may leave the port, so that a restart is worth its time.
    assert_eq!(external.run.worlds().len(), 4);
}

#[test]
fn a_taken_port_of_the_rendezvous_is_replaced_by_another() {
    let external = External::new(
        r#"
        [ "$EVENKEEL_GENERATION" = 1 ] || exit 0
        exec python3 -c '
import os, socket
port = int(os.environ["MASTER_PORT"])
taken = socket.create_server(("127.0.0.1", port))
try:
    socket.socket().bind(("127.0.0.1", port))
except OSError as error:
    raise OSError(error.errno, f"{error.strerror}: port {port}")
'
        "#,
    );
    let output = external.run.launch(&external.arguments("1"));
    let said = stderr(&output);
    assert!(output.status.success(), "{said}");
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(
        printed.contains("took the port of the rendezvous"),
        "{printed}"
    );
    assert_eq!(external.run.worlds().len(), 2);
}

#[test]
fn the_port_that_a_launcher_names_is_that_of_the_ranks_if_it_is_free() {
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let named = port.to_string();
    let launch = || {
        let run = Run::of(json!({
            "batch": {"global": 12, "per_device_batch_size": 6},
            "budget": {"samples": 24},
            "trainer": {"command": ["torchrun", "--nproc_per_node", "2", "--master_port", named, "--no_python", "env", "PLANNED={per_device_batch_size}"]},
        }));
        let output = run.launch(&["--procs", "2"]);
        assert!(output.status.success(), "{}", stderr(&output));
        let ports = (0..2).map(|rank| {
            let log = run.out().join(format!("gen-1/logs/rank-{rank}.log"));
            let log = std::fs::read_to_string(log).unwrap();
            let port = log
                .lines()
                .find_map(|line| line.strip_prefix("MASTER_PORT="));
            port.unwrap_or_else(|| panic!("no MASTER_PORT in {log}"))
                .to_owned()
        });
        let ports: Vec<String> = ports.collect();
        assert_eq!(ports[0], ports[1]);
        (
            ports[0].clone(),
            run.log() + &stderr(&output) + &String::from_utf8_lossy(&output.stdout),
        )
    };
    let (free, said) = launch();
    assert_eq!(free, named);
    assert!(!said.contains("without effect"), "{said}");
    let _other = std::net::TcpListener::bind(("127.0.0.1", port)).unwrap();
    let (other, said) = launch();
    assert_ne!(other, named);
    let warning = format!("port {port} cannot be used: Address already in use");
    assert!(said.contains(&warning), "{said}");
}

#[test]
fn a_launcher_in_the_recipes_command_is_replaced() {
    let run = Run::of(json!({
        "batch": {"global": 12, "per_device_batch_size": 6},
        "budget": {"samples": 24},
        "trainer": {"command": ["deepspeed", "--num_gpus", "2", "--no_python", "--no_local_rank", "env", "PLANNED={per_device_batch_size}"]},
    }));
    let output = run.launch(&["--procs", "1"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let log = std::fs::read_to_string(run.out().join("gen-1/logs/rank-0.log")).unwrap();
    for line in ["WORLD_SIZE=1", "LOCAL_SIZE=1", "CROSS_RANK=0", "PLANNED=6"] {
        assert!(
            log.lines().any(|found| found == line),
            "{line} is not in {log}"
        );
    }
}

#[test]
fn accelerate_launch_and_deepspeed_are_replaced_and_their_settings_reach_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("train");
    std::fs::write(&program, "#!/bin/sh\necho \"$@\"\nenv\n").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = program.display().to_string();
    let config = folder.path().join("fsdp.yaml");
    let text = "distributed_type: FSDP\nnum_processes: 4\nmixed_precision: bf16\nfsdp_config:\n  \
                fsdp_version: 2\n  fsdp_state_dict_type: SHARDED_STATE_DICT\nparallelism_config:\n  \
                parallelism_config_dp_shard_size: 4\n";
    std::fs::write(&config, text).unwrap();
    let config = config.display().to_string();
    let file = folder.path().join("ds.json");
    let mut numbers = json!({
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
    });
    std::fs::write(&file, numbers.to_string()).unwrap();
    let file = file.display().to_string();
    let launch = |name: &str, procs: &str, command: &[&str]| {
        let out = folder.path().join(name);
        let batch = ["--per_device_train_batch_size", "6"];
        let mut launch = evenkeel();
        launch
            .arg("launch")
            .arg("--out")
            .arg(&out)
            .args(["--procs", procs]);
        let output = launch.arg("--").args(command).args(batch).output().unwrap();
        let logs = (0..procs.parse().unwrap()).map(|rank: u64| {
            std::fs::read_to_string(out.join(format!("gen-1/logs/rank-{rank}.log")))
                .unwrap_or_default()
        });
        (output, logs.collect::<Vec<String>>())
    };
    let accelerate = [
        "ACCELERATE_LOG_LEVEL=info",
        "FSDP_VERSION=1",
        "RANK=7",
        "BRACES={world_size} {local_rank} {a}",
        "accelerate",
        "launch",
        "--config_file",
        &config,
        "--no_python",
        &program,
    ];
    let (output, logs) = launch("fsdp", "2", &accelerate);
    assert!(output.status.success(), "{}", stderr(&output));
    for (rank, log) in logs.iter().enumerate() {
        assert!(log.contains(&format!("\nRANK={rank}\n")), "{log}");
        assert!(
            log.starts_with("--per_device_train_batch_size 6 --gradient_accumulation_steps 2\n"),
            "{log}"
        );
        for variable in [
            "ACCELERATE_LOG_LEVEL=info",
            "BRACES={world_size} {local_rank} {a}",
            "WORLD_SIZE=2",
            "ACCELERATE_USE_FSDP=true",
            "ACCELERATE_MIXED_PRECISION=bf16",
            "FSDP_VERSION=2",
            "FSDP_STATE_DICT_TYPE=SHARDED_STATE_DICT",
            "PARALLELISM_CONFIG_DP_SHARD_SIZE=2",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE=1",
        ] {
            assert!(
                log.lines().any(|line| line == variable),
                "{variable}: {log}"
            );
        }
    }
    let deepspeed = [
        "deepspeed",
        "--num_gpus",
        "4",
        "--no_python",
        &program,
        "--deepspeed",
        &file,
    ];
    let (output, logs) = launch("deepspeed", "3", &deepspeed);
    assert!(output.status.success(), "{}", stderr(&output));
    let written = folder.path().join("deepspeed/gen-1/deepspeed.json");
    let expected = format!(
        "--deepspeed {} --per_device_train_batch_size 4 --gradient_accumulation_steps 2",
        written.display()
    );
    for (rank, log) in logs.iter().enumerate() {
        assert_eq!(
            log.lines().next(),
            Some(&*format!("--local_rank={rank} {expected}"))
        );
        assert!(
            log.contains("LOCAL_SIZE=3\n") && log.contains("CROSS_SIZE=1\n"),
            "{log}"
        );
    }
    let text = std::fs::read_to_string(written).unwrap();
    numbers["train_micro_batch_size_per_gpu"] = json!(4);
    numbers["gradient_accumulation_steps"] = json!(2);
    assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), numbers);
    let dropped = [
        "accelerate",
        "launch",
        "--config_file",
        &config,
        "--zero_stage",
        "3",
        &program,
    ];
    let (output, _) = launch("dropped", "2", &dropped);
    assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    let message =
        "`--zero_stage 3` has no effect with `distributed_type: FSDP`: accelerate drops it";
    assert!(stderr(&output).contains(message), "{}", stderr(&output));
    assert!(!folder.path().join("dropped").exists());
}

#[test]
fn a_missing_module_ends_the_run_at_once() {
    let external = External::new("echo \"ModuleNotFoundError: No module named 'trl'\"; exit 1\n");
    let output = external.run.launch(&external.arguments("2"));
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = stderr(&output);
    assert!(said.contains("No module named 'trl'"), "{said}");
    assert_eq!(external.run.worlds(), [2]);
}
