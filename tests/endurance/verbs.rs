//! The verbs for a run on this machine: suspend, resume without its recipe, logs, cancel.

use serde_json::json;

use super::support::{Run, evenkeel, small, stderr};

fn stdout(output: &std::process::Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_run_is_suspended_and_resumed_by_its_name_alone() {
    let run = Run::of(small(json!({})));
    let name = format!("named-{}", std::process::id());
    let out = run.scratch().join(&name);
    let run = run.placed(out);
    // Somewhere else than where it was launched, and by the name alone.
    let elsewhere = tempfile::tempdir().unwrap();
    let call = |verb: &str, arguments: &[&str]| {
        let mut command = evenkeel();
        command
            .current_dir(elsewhere.path())
            .arg(verb)
            .arg(&name)
            .args(arguments);
        command.output().unwrap()
    };
    let launched = run.start(&["--procs", "2"]);
    run.wait_for_steps(1, 20);
    let suspended = call("suspend", &[]);
    assert!(suspended.status.success(), "{suspended:?}");
    assert!(
        stdout(&suspended).contains("is suspended after "),
        "{suspended:?}"
    );
    assert_eq!(launched.wait().code(), Some(143), "{}", run.log());
    for said in [
        "suspend requested: committing a checkpoint",
        "; `evenkeel resume ",
    ] {
        assert!(run.log().contains(said), "{}", run.log());
    }
    // The second request finds nothing to stop.
    let again = call("suspend", &[]);
    assert!(
        stdout(&again).contains("does not run; `evenkeel resume "),
        "{again:?}"
    );
    // Its recipe, overrides and folder are those of the launch, wherever the user is.
    let resumed = call("resume", &["--procs", "3"]);
    assert!(resumed.status.success(), "{}", stderr(&resumed));
    assert_eq!(run.worlds(), [2, 3]);
    assert_eq!(run.prove()["samples"], 2400);
    let logs = call("logs", &[]);
    for line in ["Generation 1: started", "Generation 2: resumed"] {
        assert!(
            stdout(&logs).contains(line) || stderr(&logs).contains(line),
            "{logs:?}"
        );
    }
    assert!(call("logs", &["--rank", "2"]).status.success());
    let absent = call("logs", &["--rank", "7"]);
    assert!(
        stderr(&absent).contains("rank 7 has no output in generation 2"),
        "{absent:?}"
    );
    let ended = call("suspend", &[]);
    assert!(stdout(&ended).contains("is finished"), "{ended:?}");
}

#[test]
fn a_cancelled_run_keeps_its_files_and_is_not_resumed() {
    let run = Run::of(small(json!({})));
    let launched = run.start(&["--procs", "2"]);
    run.wait_for_steps(1, 20);
    let following = run.calling("logs", &["-f"]);
    let cancelled = run.call("cancel", &[]);
    assert!(cancelled.status.success(), "{cancelled:?}");
    assert!(
        stdout(&cancelled).contains("its files stay"),
        "{cancelled:?}"
    );
    assert_eq!(launched.wait().code(), Some(1), "{}", run.log());
    for said in ["cancel requested: committing a checkpoint", "cancelled: "] {
        assert!(run.log().contains(said), "{}", run.log());
    }
    let followed = following.wait_with_output().unwrap();
    assert!(followed.status.success(), "{followed:?}");
    let shown = stdout(&followed);
    assert!(
        shown.contains("Step 1 ") && shown.ends_with(": cancelled\n"),
        "{shown}"
    );
    assert_eq!(run.state().unwrap()["phase"]["phase"], "cancelled");
    let committed = run.state().unwrap()["checkpoint_ref"]["samples"].clone();
    assert!(committed.as_u64() > Some(0));
    for (verb, arguments) in [("resume", &[][..]), ("resize", &["1"])] {
        let refused = run.call(verb, arguments);
        assert!(
            stderr(&refused)
                .contains("is cancelled; to train more, start a new run from its weights"),
            "{refused:?}"
        );
    }
    // A run whose launcher is gone is cancelled, too.
    let interrupted = Run::of(small(json!({})));
    interrupted.drained(&["--procs", "1"]);
    assert!(interrupted.call("cancel", &[]).status.success());
    assert_eq!(interrupted.state().unwrap()["phase"]["phase"], "cancelled");
}
