use super::*;
use crate::batch::Reached;
use crate::launch::prepare;
use crate::launch::testing::recipe_of;

/// The refusal of a command; `None` if it is accepted.
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
    let error = super::prepare(&run, &recipe, &planned, &request).err();
    assert_eq!(run.holds_a_run(), error.is_none());
    error.map(|error| error.to_string())
}

#[test]
fn a_command_that_would_change_the_batch_is_refused() {
    assert_eq!(refused(&["sh", "train.sh", "{args}"], "", &[]), None);
    let typed = ["sh", "train.sh", "--per_device_train_batch_size", "8"];
    let typed = refused(&typed, "", &[]).unwrap();
    assert!(typed.contains("in every world"), "{typed}");
    // Two processes split the batch, three do not, with any remainder policy.
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
fn a_command_without_an_executable_program_is_refused() {
    let refusal = |command: &[&str]| refused(command, "", &[]).unwrap();
    let absent = refusal(&["no-such-program", "{args}"]);
    assert_eq!(
        absent,
        "`no-such-program` is not an executable program in PATH; give its path"
    );
    let absent = refusal(&["/nowhere/python", "{args}"]);
    assert!(
        absent.ends_with("`/nowhere/python` is not an executable program; give its path"),
        "{absent}"
    );
}

#[test]
fn a_new_run_does_not_resume_from_checkpoints_of_another_run() {
    let place = tempfile::tempdir().unwrap();
    let old = place.path().join("old/checkpoint-4");
    std::fs::create_dir_all(&old).unwrap();
    std::fs::write(old.join("trainer_state.json"), "{}").unwrap();
    let more = format!(
        ", trainer: {{checkpoint_dir: {}}}",
        place.path().join("old").display()
    );
    let message = refused(&["sh", "{args}"], &more, &[]).unwrap();
    assert!(message.contains("checkpoint-4 already exists"), "{message}");
}
