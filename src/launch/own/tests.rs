use super::*;
use crate::batch::Reached;
use crate::launch::prepare;
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
    let plan = |ranks| prepare::plan(&recipe, ranks, Reached::default(), None);
    let planned = match plan(3).or_else(|_| plan(2)) {
        Ok(planned) => planned,
        Err(error) => return Some(error.to_string()),
    };
    std::fs::create_dir_all(run.path()).unwrap();
    let said = super::prepare(&run, &recipe, &planned, &request).err();
    assert_eq!(run.holds_a_run(), said.is_none());
    said.map(|error| error.to_string())
}

#[test]
fn a_command_that_would_train_on_another_batch_is_refused() {
    assert_eq!(refused(&["sh", "train.sh", "{args}"], "", &[]), None);
    let typed = ["sh", "train.sh", "--per_device_train_batch_size", "8"];
    let typed = refused(&typed, "", &[]).unwrap();
    assert!(typed.contains("in every world"), "{typed}");
    // Two processes split the batch, three do not, however the recipe deals it.
    let uneven = ["evenkeel.batch.remainder=uneven"];
    let uneven = refused(&["sh", "{args}"], "", &uneven);
    assert_eq!(uneven, None);
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
