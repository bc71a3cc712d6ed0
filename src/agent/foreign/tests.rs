use std::fs;

use super::*;
use crate::batch::{self, PlanRequest};
use crate::recipe::{self, Request};

/// A recipe with a command, in a temporary run directory.
struct Case {
    place: tempfile::TempDir,
    recipe: Recipe,
}

const HANDBOOK: &str = "# ours\nper_device_train_batch_size: 8 # of 80 GB\n\
    gradient_accumulation_steps: 2\nevenkeel: {objective: sft, batch: {gpus: 2}}\n";
const NATIVE: &str = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  \
    batch: {global: 32, micro: 8}\n";

impl Case {
    fn new(text: &str, command: &[&str]) -> Case {
        let request = Request {
            path: "sft.yaml".into(),
            ..Request::default()
        };
        let mut recipe = recipe::read_text(&request, text.to_owned()).unwrap();
        let command = command.iter().map(|&word| word.to_owned());
        recipe.spec.trainer.command = command.collect();
        let place = tempfile::tempdir().unwrap();
        Case { place, recipe }
    }

    fn external_trainer(&self) -> Foreign<'_> {
        Foreign {
            recipe: &self.recipe,
            run: self.place.path(),
            base: Some(self.place.path()),
        }
    }

    fn call(&self, generation: u64, world: u64) -> Result<Call, String> {
        let plan = batch::plan(&self.recipe, &PlanRequest::processes(world)).unwrap();
        let foreign = self.external_trainer();
        let call = foreign.call(generation, &plan, foreign.newest());
        call.map_err(|error| error.to_string())
    }

    /// The command of a world as one line; the run directory is shown as `RUN`.
    fn command_line(&self, generation: u64, world: u64) -> String {
        let command = self.call(generation, world).unwrap().command.join(" ");
        command.replace(self.place.path().to_str().unwrap(), "RUN")
    }

    fn checkpoint(&self, name: &str) {
        let directory = self.place.path().join("checkpoints").join(name);
        fs::create_dir_all(&directory).unwrap();
        fs::write(directory.join("trainer_state.json"), "{}").unwrap();
    }
}

#[test]
fn every_generation_gets_its_numbers_and_resumes_from_the_newest_checkpoint() {
    let case = Case::new(
        HANDBOOK,
        &["train", "{args}", "{resume_args}", "--out={checkpoint_dir}"],
    );
    assert_eq!(
        case.command_line(1, 2),
        "train --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --out=RUN/checkpoints"
    );
    case.checkpoint("checkpoint-9");
    case.checkpoint("checkpoint-10");
    assert_eq!(
        case.command_line(2, 1),
        "train --per_device_train_batch_size 8 --gradient_accumulation_steps 4 \
         --resume_from_checkpoint RUN/checkpoints/checkpoint-10 --out=RUN/checkpoints"
    );
    let call = case.call(2, 4).unwrap();
    let given: Vec<&str> = call.variables().into_iter().map(|(name, _)| name).collect();
    let expected = ["CHECKPOINT_DIR", "CHECKPOINT", "RUN_DIR"];
    assert_eq!(given, expected.map(|name| format!("EVENKEEL_{name}")));
}

#[test]
fn the_written_recipe_differs_only_in_the_numbers_of_its_generation() {
    let case = Case::new(HANDBOOK, &["train", "--config", "{recipe}"]);
    let call = case.call(3, 4).unwrap();
    assert_eq!(case.command_line(3, 4), "train --config RUN/gen-3/sft.yaml");
    assert!(
        !call.recipe.clone().unwrap().exists(),
        "the recipe is written only at the start"
    );
    call.write().unwrap();
    let written = fs::read_to_string(call.recipe.unwrap()).unwrap();
    let expected = HANDBOOK.replace("accumulation_steps: 2", "accumulation_steps: 1");
    assert_eq!(written, expected.replace("gpus: 2", "gpus: 4"));
}

#[test]
fn number_placeholders_work_as_arguments_and_inside_shell_commands() {
    let line = "train -b {per_device_batch_size} -a {gradient_accumulation_steps} {resume_args}";
    let mut case = Case::new(NATIVE, &["sh", "-c", line]);
    assert!(case.call(1, 2).unwrap_err().contains("trainer.resume"));
    case.recipe.spec.trainer.resume = vec!["--from={checkpoint}".to_owned()];
    assert_eq!(case.command_line(1, 2), "sh -c train -b 8 -a 2 ");
    case.checkpoint("step 40");
    assert_eq!(
        case.command_line(2, 4),
        "sh -c train -b 8 -a 1 '--from=RUN/checkpoints/step 40'"
    );
}

#[test]
fn a_placeholder_that_the_dialect_cannot_fill_is_refused_with_an_alternative() {
    let case = Case::new(NATIVE, &["train", "{args}"]);
    let message = case.call(1, 2).unwrap_err();
    assert!(
        message.starts_with("`{args}`: a plan cannot be written back as native"),
        "{message}"
    );
    assert!(message.contains("`{per_device_batch_size}`"), "{message}");
}

#[test]
fn custom_resume_arguments_accept_any_checkpoint_but_prefer_the_dialects() {
    let mut case = Case::new(HANDBOOK, &["train", "{resume_args}"]);
    let any = case.place.path().join("checkpoints/best-70.pt");
    fs::create_dir_all(any.parent().unwrap()).unwrap();
    fs::write(&any, "").unwrap();
    assert_eq!(case.external_trainer().newest(), None);
    case.recipe.spec.trainer.resume = vec!["--from={checkpoint}".to_owned()];
    assert_eq!(case.external_trainer().newest().unwrap().path, any);
    case.checkpoint("checkpoint-9");
    assert_eq!(
        case.command_line(2, 2),
        "train --from=RUN/checkpoints/checkpoint-9"
    );
}

#[test]
fn the_checkpoint_directory_is_where_the_trainer_writes() {
    let of = |text: &str, base: bool| {
        let case = Case::new(text, &["train"]);
        let base = base.then_some(Path::new("/started/here"));
        let run = Path::new("/run");
        Foreign {
            recipe: &case.recipe,
            run,
            base,
        }
        .checkpoint_dir()
    };
    let output = format!("{HANDBOOK}output_dir: data/sft\n");
    assert_eq!(of(&output, true), Path::new("/started/here/data/sft"));
    // The container's own disk does not outlive the container.
    assert_eq!(of(&output, false), Path::new("/run/checkpoints"));
    assert_eq!(of(HANDBOOK, true), Path::new("/run/checkpoints"));
    let mut typed = Case::new(&output, &["train", "--output_dir=typed"]);
    assert_eq!(
        typed.external_trainer().checkpoint_dir(),
        typed.place.path().join("typed")
    );
    typed.recipe.spec.trainer.command[1] = "--output_dir={checkpoint_dir}".to_owned();
    assert_eq!(
        typed.external_trainer().checkpoint_dir(),
        typed.place.path().join("data/sft")
    );
    let native = format!("{NATIVE}  output: runs/mine\n");
    assert_eq!(of(&native, true), Path::new("/run/checkpoints"));
    let message = format!("{NATIVE}  trainer: {{checkpoint_dir: /volume/mine}}\n");
    assert_eq!(of(&message, false), Path::new("/volume/mine"));
}
