use super::*;
use crate::batch::Reached;
use crate::launch::testing::recipe_of;

/// What is said of a command at the door; `None`: nothing against it.
fn refused(command: &[&str], more: &str, overrides: &[&str]) -> Option<String> {
    let place = tempfile::tempdir().unwrap();
    let text = format!(
        "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n\
         evenkeel: {{objective: sft, batch: {{gpus: 2}}{more}}}\n"
    );
    let (mut recipe, request) = recipe_of(place.path(), &text, overrides);
    recipe.spec.trainer.command = command.iter().map(|&word| word.to_owned()).collect();
    let run = RunDir::at(place.path().join("run"));
    let planned = prepare::plan(&recipe, 3, Reached::default(), None)
        .or_else(|_| prepare::plan(&recipe, 2, Reached::default(), None))
        .unwrap();
    std::fs::create_dir_all(run.path()).unwrap();
    let said = super::prepare(&run, &recipe, &planned, &request).err();
    assert_eq!(run.holds_a_run(), said.is_none());
    said.map(|error| error.to_string())
}

#[test]
fn a_command_that_would_train_on_another_batch_is_refused() {
    assert_eq!(refused(&["sh", "train.sh", "{args}"], "", &[]), None);
    let said = |command: &[&str]| refused(command, "", &[]).unwrap();
    let typed = said(&["sh", "train.sh", "--per_device_train_batch_size", "8"]);
    assert!(
        typed.contains("write `{per_device_batch_size}` there"),
        "{typed}"
    );
    let typed = said(&["sh", "train.sh", "--gradient_accumulation_steps=2"]);
    assert!(
        typed.contains("`--gradient_accumulation_steps=2`"),
        "{typed}"
    );
    let launcher = said(&["/usr/bin/torchrun", "train.py", "{args}"]);
    assert!(
        launcher.starts_with("`torchrun` starts a process for every device"),
        "{launcher}"
    );
    let launcher = said(&["python3", "-m", "torch.distributed.run", "train.py"]);
    assert!(
        launcher.starts_with("`-m torch.distributed.run`"),
        "{launcher}"
    );
    for behind in [
        &["env", "NCCL_DEBUG=INFO", "torchrun", "train.py", "{args}"][..],
        &["uv", "run", "accelerate", "launch", "train.py"],
        &[
            "python3",
            "-u",
            "-m",
            "accelerate.commands.launch",
            "train.py",
        ],
        &["trl", "sft", "{args}"],
    ] {
        assert!(
            said(behind).contains("starts a process for every device"),
            "{behind:?}"
        );
    }
    let named = ["python3", "train.py", "--engine", "deepspeed", "{args}"];
    assert_eq!(refused(&named, "", &[]), None);
    let uneven = refused(&["sh", "{args}"], "", &["evenkeel.batch.remainder=uneven"]).unwrap();
    assert!(
        uneven.contains("only the built-in trainer can do"),
        "{uneven}"
    );
    let grows = ", schedule: {kind: norm-test, max_batch: 64}";
    let grows = refused(&["sh", "{args}"], grows, &[]).unwrap();
    assert!(grows.contains("wants to change it"), "{grows}");
    let over = refused(&["sh", "{recipe}"], "", &["max_seq_length=128"]).unwrap();
    assert!(
        over.contains("`max_seq_length=128` would not be in `{recipe}`"),
        "{over}"
    );
}

#[test]
fn a_command_that_would_start_nothing_is_refused() {
    let said = |command: &[&str]| refused(command, "", &[]).unwrap();
    let absent = said(&["no-such-program", "{args}"]);
    assert_eq!(
        absent,
        "there is no program `no-such-program` that can be run in PATH: give its path"
    );
    let absent = said(&["/nowhere/python", "{args}"]);
    assert!(
        absent.ends_with("`/nowhere/python` that can be run: give its path"),
        "{absent}"
    );
    let slip = said(&["sh", "{arg}"]);
    assert_eq!(
        slip,
        "`trainer.command` has `{arg}`; did you mean `{args}`?"
    );
}

#[test]
fn checkpoints_of_another_run_are_not_gone_on_from() {
    let place = tempfile::tempdir().unwrap();
    let old = place.path().join("old/checkpoint-4");
    std::fs::create_dir_all(&old).unwrap();
    std::fs::write(old.join("trainer_state.json"), "{}").unwrap();
    let more = format!(
        ", trainer: {{checkpoint_dir: {}}}",
        place.path().join("old").display()
    );
    let said = refused(&["sh", "{args}"], &more, &[]).unwrap();
    assert!(said.contains("checkpoint-4 is there already"), "{said}");
}
