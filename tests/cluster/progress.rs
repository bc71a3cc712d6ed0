//! Progress of external trainers, as `kubectl get tj` and `evenkeel status` show it.

use std::process::Command;

use serde_json::{Value, json};

use super::support::{Job, kubectl, output_text, recipe};

/// A trainer whose rank 0 takes a step a second and reports it by this command, until the run has a file `stop`.
fn job(name: &str, report: &str, trainer: Value) -> Job {
    let program = format!(
        "step=0\n\
         while [ ! -e \"$EVENKEEL_RUN_DIR/stop\" ]; do\n\
           step=$((step + 1))\n\
           echo \"rank $RANK at step $step\"\n\
           if [ \"$RANK\" = 0 ]; then {report}; fi\n\
           /bin/busybox sleep 1\n\
         done"
    );
    let mut recipe = recipe(57_600);
    recipe["spec"]["trainer"] = trainer;
    let command = ["/bin/busybox", "sh", "-c", &program];
    Job::apply(
        name,
        &recipe,
        json!({"image": "evenkeel.test/busybox:1", "trainer": {"command": command}}),
    )
}

/// The columns `STEP`, `LOSS`, `TOKENS/S` and `LEFT`, which are before the last column.
fn columns(name: &str) -> [String; 4] {
    let table = kubectl(&["get", "tj", name]);
    let (header, row) = table.trim_end().split_once('\n').unwrap();
    let cells = |line: &str| -> [String; 4] {
        let cells = line.split_whitespace().rev().skip(1).take(4);
        let mut cells: Vec<String> = cells.map(str::to_owned).collect();
        cells.reverse();
        cells.try_into().unwrap()
    };
    assert_eq!(
        cells(header),
        ["STEP", "LOSS", "TOKENS/S", "LEFT"],
        "{table}"
    );
    cells(row)
}

/// Checks what a job of 600 steps shows while it runs, and that a finished one has no time left. `counts_tokens`: the
/// trainer reports its tokens.
fn shows_its_progress(name: &str, job: &Job, counts_tokens: bool) {
    job.wait("its progress", |status| {
        let progress = &status["progress"];
        progress["step"].as_u64() >= Some(4) && progress["timeLeft"].is_string()
    });
    let [step, loss, tokens_per_second, left] = columns(name);
    assert!((4..600).contains(&step.parse().unwrap()), "{step}");
    assert_eq!(loss, "2.5000");
    let rate: u64 = tokens_per_second.parse().unwrap();
    assert_eq!(rate > 0, counts_tokens, "{rate} tokens/s");
    assert!(left.ends_with('s'), "{left}");

    let shown = |command: &str| {
        let shown = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
            .args([command, name, "-n", "default"])
            .output()
            .unwrap();
        let text = output_text(&shown);
        assert!(shown.status.success(), "{text}");
        text
    };
    let text = shown("status");
    let progress = text.lines().find(|line| line.contains("  progress  "));
    let progress = progress.unwrap_or_else(|| panic!("no progress in {text}"));
    for part in [
        " of 57600 samples, step ",
        ", loss 2.5000, batch 96, ",
        " left",
    ] {
        assert!(progress.contains(part), "{progress}");
    }

    let selected = format!("evenkeel.dev/job={name}");
    let pods = kubectl(&["logs", "-c", "trainer", "--tail=-1", "-l", &selected]);
    assert!(
        pods.lines().any(|line| line == "[0] rank 0 at step 1"),
        "{pods}"
    );
    let output = shown("logs");
    let of_program = output.lines().filter(|line| line.starts_with("rank "));
    let lines: Vec<&str> = of_program.take(3).collect();
    let expected = ["rank 0 at step 1", "rank 0 at step 2", "rank 0 at step 3"];
    assert_eq!(lines, expected, "{output}");

    std::fs::write(job.run().join("stop"), "").unwrap();
    let status = job.wait("its end", |status| status["phase"] == "Complete");
    assert_eq!(status["progress"]["loss"], "2.5000");
    assert!(status["progress"]["timeLeft"].is_null(), "{status:#}");
}

#[test]
fn progress_that_an_external_trainer_writes_is_in_the_columns() {
    let report = r#"echo "{\"step\": $step, \"total_steps\": 600, \"loss\": 2.5, \"tokens\": $((step * 1000))}" > "$EVENKEEL_PROGRESS.tmp"
        /bin/busybox mv "$EVENKEEL_PROGRESS.tmp" "$EVENKEEL_PROGRESS""#;
    let job = job("written", report, json!({}));
    shows_its_progress("written", &job, true);
}

#[test]
fn progress_that_an_external_trainer_prints_is_in_the_columns() {
    let report = r#"echo "step $step/600: loss 2.5""#;
    let pattern = "step (?<step>[0-9]+)/(?<total_steps>[0-9]+): loss (?<loss>[0-9.]+)";
    let job = job("printed", report, json!({"progress_pattern": pattern}));
    shows_its_progress("printed", &job, false);
}
