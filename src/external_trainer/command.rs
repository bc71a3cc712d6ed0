//! The external trainer in one generation: fills the plan's numbers into its command and picks the
//! checkpoint that it resumes from. The agent of a pod and the local launcher share this code.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use serde::{Deserialize, Serialize};

use super::{checkpoints, choice, conversion, resume};
use crate::export::{self, EmitError, Form};
use crate::lifecycle::{ExternalCheckpoint, Generation, files};
use crate::plan::{Plan, horizon};
use crate::recipe::schema::placeholder::{self, Value};
use crate::recipe::schema::reader::Checkpoints;
use crate::recipe::{Dialect, Recipe, launchers};
use crate::util::durable::{self, FileError};

#[derive(Debug, Clone, Copy)]
pub struct ExternalTrainer<'a> {
    /// The recipe that contains the command.
    pub recipe: &'a Recipe,
    /// The run directory, an absolute path.
    pub run_dir: &'a Path,
    /// Working directory and base of relative paths. `None` in a container, whose own disk does not
    /// outlive it.
    pub base: Option<&'a Path>,
    /// Most ranks that one machine runs, unless the ranks are fewer.
    pub most_on_a_host: u64,
}

/// The command of one generation; every rank starts it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Program and arguments, without a shell.
    pub command: Vec<String>,
    /// The run directory, an absolute path.
    #[serde(skip)]
    run_dir: PathBuf,
    /// Working directory; `None` means the agent's.
    #[serde(skip)]
    pub directory: Option<PathBuf>,
    /// Directory in which the trainer writes its checkpoints.
    pub checkpoint_dir: PathBuf,
    /// The newest checkpoint when the generation started.
    pub checkpoint: Option<PathBuf>,
    /// The step of [`Self::checkpoint`] that rank 0 converts before it starts the program.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub convert: Option<PathBuf>,
    /// Path of the recipe with the plan's numbers, if the command contains `{recipe}`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recipe: Option<PathBuf>,
    /// Environment variables from `trainer.environment`. Command and variables keep the placeholders of a rank.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub environment: BTreeMap<String, String>,
    /// The files that the command reads, with their texts.
    #[serde(skip)]
    texts: Vec<(PathBuf, String)>,
    /// Notes for the user about this command.
    #[serde(skip)]
    pub remarks: Vec<String>,
}

/// A command whose placeholders cannot be filled in.
#[derive(Debug, thiserror::Error)]
pub enum ExternalTrainerError {
    /// An override that the trainer would not see, or checkpoints that it would lose.
    #[error("{0}")]
    Lost(String),
    /// The plan cannot be written in this form.
    #[error(
        "`{{{placeholder}}}`: {error}; `{{per_device_batch_size}}` and `{{gradient_accumulation_steps}}` insert the plain numbers"
    )]
    Emit {
        /// The placeholder in the command.
        placeholder: &'static str,
        error: EmitError,
    },
    /// The plan is in one file of a tree, and that file alone is not a recipe.
    #[error(
        "`{{recipe}}` would be {}, one file of the recipe's tree; use `{{args}}` to pass the numbers as overrides",
        file.display()
    )]
    OneOfATree { file: PathBuf },
    #[error(
        "`{{deepspeed_config}}` names the DeepSpeed config that the command or the accelerate config names, but there is none; give the path of an existing file"
    )]
    NoDeepspeed,
    #[error(
        "ZeRO did not shard {} over {ranks} ranks, and evenkeel must set `checkpoint.load_universal` in the DeepSpeed config to load it: name a config that evenkeel can read with `--deepspeed FILE`, or resume in the former world",
        checkpoint.display()
    )]
    NotUniversal { checkpoint: PathBuf, ranks: u64 },
    #[error(
        "{ranks} ranks of one machine have only the devices {devices} (`CUDA_VISIBLE_DEVICES`, `gpu_ids` or `--include`); name one for each, or remove it"
    )]
    Devices { ranks: u64, devices: String },
    /// The trainer's resume arguments are unknown.
    #[error(
        "`{{resume_args}}`: the resume arguments of a trainer for {dialect} recipes are unknown; set `trainer.resume: [--resume, \"{{checkpoint}}\"]` (`evenkeel.trainer.resume=[…]` on the command line)"
    )]
    Resume { dialect: Dialect },
    /// A file that the command reads cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
}

/// The external trainer in one generation.
#[derive(Debug)]
pub struct ExternalCall {
    pub recipe: Recipe,
    pub call: Call,
    /// The checkpoint that it resumes from.
    pub checkpoint: Option<ExternalCheckpoint>,
}

impl ExternalCall {
    /// Samples until the recipe's last step; `None` if it states epochs.
    pub fn budget(&self, record: &Generation) -> Option<u64> {
        let global = record.plan.global_batch_size.max(1);
        horizon(&self.recipe.spec, global, None).budget_samples
    }

    /// Whether the trainer names its checkpoints like this file or directory. Of an unknown trainer that is not known.
    pub fn names_checkpoint(&self, path: &Path) -> bool {
        let prefix = resume::checkpoints(self.recipe.dialect).prefix;
        let name = path.file_name().and_then(|name| name.to_str());
        !prefix.is_empty() && name.is_some_and(|name| name.starts_with(prefix))
    }

    /// The trainer's newest complete checkpoint now.
    pub fn newest(&self) -> Option<ExternalCheckpoint> {
        newest(&self.recipe, &self.call.checkpoint_dir)
    }
}

impl ExternalTrainer<'_> {
    /// The trainer's checkpoint directory: the user's setting, else `checkpoints` in the run
    /// directory.
    pub fn checkpoint_dir(&self) -> PathBuf {
        let named = resume::directory(self.recipe.dialect, &self.recipe.spec).map(PathBuf::from);
        let named = named.and_then(|path| match self.base {
            Some(base) => Some(base.join(path)),
            None => path.is_absolute().then_some(path),
        });
        named.unwrap_or_else(|| self.run_dir.join("checkpoints"))
    }

    /// The newest complete checkpoint in [`Self::checkpoint_dir`].
    pub fn newest(&self) -> Option<ExternalCheckpoint> {
        newest(self.recipe, &self.checkpoint_dir())
    }

    /// Chooses the newest checkpoint for a generation.
    pub fn choose(&self, record: &Generation) -> Result<(), FileError> {
        choice::write(self.run_dir, record, self.newest())
    }

    /// Fills in the command of a generation that resumes from the checkpoint chosen for it, and writes the files that it
    /// reads.
    pub fn begin(&self, record: &Generation) -> Result<ExternalCall, ExternalTrainerError> {
        let checkpoint = choice::read(self.run_dir, record)?;
        let call = self.call(record.number, &record.plan, checkpoint.clone())?;
        call.write()?;
        Ok(ExternalCall {
            recipe: self.recipe.clone(),
            call,
            checkpoint,
        })
    }

    /// The command of a generation with this plan, resumed from `checkpoint`. Writes no files.
    pub fn call(
        &self,
        generation: u64,
        plan: &Plan,
        checkpoint: Option<ExternalCheckpoint>,
    ) -> Result<Call, ExternalTrainerError> {
        let trainer = &self.recipe.spec.trainer;
        let command = &trainer.command;
        let values: Vec<String> = trainer.environment.values().cloned().collect();
        let uses =
            |name| placeholder::is_used(command, name) || placeholder::is_used(&values, name);
        self.refuse_too_few_devices(plan)?;
        let numbers = plan.numbers(self.recipe);
        let emitted = |placeholder| move |error| ExternalTrainerError::Emit { placeholder, error };
        let arguments = if uses(placeholder::ARGS) {
            export::arguments(self.recipe, &numbers).map_err(emitted(placeholder::ARGS))?
        } else {
            Vec::new()
        };
        let generation_files = self.run_dir.join(files::generation(generation));
        let mut call = Call {
            command: Vec::new(),
            run_dir: self.run_dir.to_owned(),
            directory: self.base.map(Path::to_owned),
            checkpoint_dir: self.checkpoint_dir(),
            checkpoint: checkpoint.map(|checkpoint| checkpoint.path),
            convert: None,
            recipe: None,
            environment: BTreeMap::new(),
            texts: Vec::new(),
            remarks: Vec::new(),
        };
        let parallel = &self.recipe.spec.parallel;
        let sharding = plan.facts.world_size / parallel.tensor / parallel.pipeline;
        let checkpoint = call.checkpoint.as_deref();
        call.convert = checkpoint.and_then(|path| conversion::needed(path, sharding));
        let batch = numbers.per_device_batch_size;
        let state = checkpoint.and_then(|path| checkpoints::with_batch(path, batch));
        call.texts.extend(state);
        let universal = call.convert.is_some();
        if universal && call.convert == call.checkpoint {
            // The program names the step itself.
            call.checkpoint = call.convert.as_deref().map(conversion::universal);
        }
        let is_deepspeed = self.recipe.dialect == Dialect::Deepspeed;
        let mut environment = trainer.environment.clone();
        if uses(placeholder::RECIPE) {
            let mut recipe = Cow::Borrowed(self.recipe);
            if recipe.accelerate.is_some() {
                // Evenkeel replaces the launcher, so its config needs no other numbers.
                recipe.to_mut().files.accelerate = None;
            }
            if trainer.deepspeed_config.is_some() {
                recipe.to_mut().files.deepspeed = None;
            }
            let written = export::emit(&recipe, &numbers, Form::Recipe);
            let mut written = written.map_err(emitted(placeholder::RECIPE))?;
            if universal && is_deepspeed {
                let text = export::with_universal_checkpoint(&written.text);
                written.text = text.map_err(emitted(placeholder::RECIPE))?;
            }
            if let Some(file) = written.replaces {
                return Err(ExternalTrainerError::OneOfATree { file });
            }
            let path = generation_files.join(self.recipe_name());
            call.texts.push((path.clone(), written.text));
            (call.recipe, call.remarks) = (Some(path), written.remarks);
        }
        let deepspeed = generation_files.join("deepspeed.json");
        let in_recipe = is_deepspeed && uses(placeholder::RECIPE);
        let named = uses(placeholder::DEEPSPEED_CONFIG);
        let added = universal && !named && !in_recipe;
        if added && !launchers::use_deepspeed_file(&mut environment) {
            let checkpoint = call.checkpoint.unwrap_or_default();
            let ranks = sharding;
            return Err(ExternalTrainerError::NotUniversal { checkpoint, ranks });
        }
        if named || added {
            let text = trainer.deepspeed_config.as_deref();
            let text = text.ok_or(ExternalTrainerError::NoDeepspeed)?;
            let mut written = export::deepspeed_config(self.recipe, text, &numbers);
            if universal {
                written = written.and_then(|text| export::with_universal_checkpoint(&text));
            }
            let written = written.map_err(emitted(placeholder::DEEPSPEED_CONFIG))?;
            call.texts.push((deepspeed.clone(), written));
        }
        let mut sizes = [1, 1];
        if placeholder::SHARDS.into_iter().any(uses) {
            let known = export::shard_sizes(self.recipe, &numbers, trainer.uses_fsdp());
            sizes = known.map_err(emitted(placeholder::SHARDS[0]))?;
        }
        let mut resume_args = Vec::new();
        if uses(placeholder::RESUME_ARGS) {
            // Evaluated even without a checkpoint: unknown arguments must fail before the start.
            let from = call.checkpoint.as_deref().unwrap_or(Path::new(""));
            let dialect = self.recipe.dialect;
            let arguments = resume::arguments(self.recipe, from);
            let arguments = arguments.ok_or(ExternalTrainerError::Resume { dialect })?;
            if call.checkpoint.is_some() {
                resume_args = arguments;
            }
        }
        let path = |path: &Path| Value::Word(path.to_string_lossy().into_owned());
        let here = || std::env::current_dir().unwrap_or_default();
        let value_of = |name: &str| match name {
            placeholder::RECIPE => call.recipe.as_deref().map(path),
            placeholder::ARGS => Some(Value::Words(arguments.clone())),
            placeholder::RESUME_ARGS => Some(Value::Words(resume_args.clone())),
            placeholder::CHECKPOINT_DIR => Some(path(&call.checkpoint_dir)),
            placeholder::RUN_DIR => Some(path(self.run_dir)),
            placeholder::GENERATION => Some(Value::Word(generation.to_string())),
            placeholder::DEEPSPEED_CONFIG => Some(path(&deepspeed)),
            placeholder::WORKING_DIRECTORY => {
                Some(path(&self.base.map_or_else(here, Path::to_owned)))
            }
            number => match placeholder::SHARDS.iter().position(|name| *name == number) {
                Some(at) => Some(Value::Word(sizes[at].to_string())),
                None => Some(Value::Word(number_of(plan, number)?.to_string())),
            },
        };
        let filled = placeholder::fill(command, value_of);
        let variables = environment.iter().map(|(name, value)| {
            let words = placeholder::fill(std::slice::from_ref(value), value_of);
            (name.clone(), words.join(" "))
        });
        call.environment = variables.collect();
        call.command = filled;
        Ok(call)
    }

    /// Refuses a world in which ranks of this machine have no device among those that the launcher selects.
    fn refuse_too_few_devices(&self, plan: &Plan) -> Result<(), ExternalTrainerError> {
        let environment = &self.recipe.spec.trainer.environment;
        let devices = environment.get("CUDA_VISIBLE_DEVICES");
        let ranks = plan.facts.world_size.min(self.most_on_a_host);
        match devices.map(String::as_str) {
            // Without a device the ranks compute on the CPU.
            None | Some("" | "-1") => Ok(()),
            Some(devices) if self.base.is_some() && (devices.split(',').count() as u64) < ranks => {
                let devices = devices.to_owned();
                Err(ExternalTrainerError::Devices { ranks, devices })
            }
            Some(_) => Ok(()),
        }
    }

    /// File name of the recipe; trainers derive the format from it.
    fn recipe_name(&self) -> PathBuf {
        let file = self
            .recipe
            .files
            .recipe
            .or(self.recipe.files.command.map(|(file, _)| file));
        let file = file.and_then(|file| self.recipe.sources.get(file));
        let name = file.and_then(|file| file.path.file_name());
        name.map_or_else(|| PathBuf::from("recipe.yaml"), PathBuf::from)
    }
}

impl Call {
    /// Writes the files that the command reads. All members of a generation write the same texts.
    fn write(&self) -> Result<(), FileError> {
        durable::create_directory(&self.checkpoint_dir)?;
        for (path, text) in &self.texts {
            if let Some(directory) = path.parent() {
                durable::create_directory(directory)?;
            }
            durable::write_atomically(path, text.as_bytes())?;
        }
        Ok(())
    }

    /// Environment variables besides the plan's numbers.
    pub fn variables(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let paths = [
            ("EVENKEEL_CHECKPOINT_DIR", Some(&self.checkpoint_dir)),
            ("EVENKEEL_CHECKPOINT", self.checkpoint.as_ref()),
            ("EVENKEEL_RECIPE", self.recipe.as_ref()),
            ("EVENKEEL_RUN_DIR", Some(&self.run_dir)),
        ];
        let paths = paths.into_iter();
        paths.filter_map(|(name, path)| Some((name, path?.as_path())))
    }
}

/// Why no process can start this program in the working directory `base`; `None`: it can.
pub fn cannot_start(base: &Path, program: &str) -> Option<String> {
    if !base.is_dir() {
        return Some(format!("there is no directory {}", base.display()));
    }
    let runs = |path: &Path| path.is_file() && access(path, Access::EXEC_OK).is_ok();
    if program.contains('/') {
        let runs = runs(&base.join(program));
        return (!runs).then(|| format!("`{program}` is not an executable program"));
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).any(|directory| runs(&directory.join(program)));
    (!found).then(|| format!("`{program}` is not an executable program in PATH"))
}

/// The newest complete checkpoint of a recipe's trainer in `directory`.
fn newest(recipe: &Recipe, directory: &Path) -> Option<ExternalCheckpoint> {
    let called = resume::checkpoints(recipe.dialect);
    let newest = checkpoints::newest(directory, &called);
    // A recipe that sets its own resume arguments may start any trainer.
    if newest.is_some() || recipe.spec.trainer.resume.is_empty() {
        return newest;
    }
    let any = Checkpoints {
        unless: called.unless,
        ..Checkpoints::ANY
    };
    checkpoints::newest(directory, &any)
}

/// A number of the plan by its name.
fn number_of(plan: &Plan, name: &str) -> Option<u64> {
    let variable = format!("EVENKEEL_{}", name.to_uppercase());
    let mut numbers = plan.variables().into_iter();
    Some(numbers.find(|(name, _)| *name == variable)?.1)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::plan::{self, PlanRequest};
    use crate::recipe::{self, Request};

    /// A recipe with a command, in a temporary run directory.
    struct Case {
        place: tempfile::TempDir,
        recipe: Recipe,
    }

    const HANDBOOK: &str = "# ours\nper_device_train_batch_size: 8 # of 80 GB\n\
    gradient_accumulation_steps: 2\nevenkeel: {objective: sft, batch: {gpus: 2}}\n";
    const NATIVE: &str = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  \
    batch: {global: 32, per_device_batch_size: 8}\n";

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

        fn external_trainer(&self) -> ExternalTrainer<'_> {
            ExternalTrainer {
                recipe: &self.recipe,
                run_dir: self.place.path(),
                base: Some(self.place.path()),
                most_on_a_host: u64::MAX,
            }
        }

        fn call(&self, generation: u64, world: u64) -> Result<Call, String> {
            let plan = plan::plan(&self.recipe, &PlanRequest::gpus(world)).unwrap();
            let external = self.external_trainer();
            let call = external.call(generation, &plan, external.newest());
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
    fn a_checkpoint_of_zero_is_converted_for_another_world_and_loaded_as_universal() {
        let mut case = Case::new(HANDBOOK, &["sft.py", "{args}"]);
        let step = case
            .place
            .path()
            .join("checkpoints/checkpoint-4/global_step4");
        fs::create_dir_all(&step).unwrap();
        case.checkpoint("checkpoint-4");
        fs::write(step.with_file_name("latest"), "global_step4").unwrap();
        for rank in 0..2 {
            let name = format!("zero_pp_rank_{rank}_mp_rank_00_optim_states.pt");
            fs::write(step.join(name), "").unwrap();
        }
        let message = case.call(2, 4).unwrap_err();
        let message = message.replace(&case.place.path().display().to_string(), "RUN");
        insta::assert_snapshot!(message, @"ZeRO did not shard RUN/checkpoints/checkpoint-4 over 4 ranks, and evenkeel must set `checkpoint.load_universal` in the DeepSpeed config to load it: name a config that evenkeel can read with `--deepspeed FILE`, or resume in the former world");

        let trainer = &mut case.recipe.spec.trainer;
        trainer.deepspeed_config = Some(r#"{"zero_optimization": {"stage": 1}}"#.to_owned());
        let stated = [
            ("ACCELERATE_USE_DEEPSPEED", "true"),
            ("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage"),
        ];
        let stated = stated.map(|(name, value)| (name.to_owned(), value.to_owned()));
        trainer.environment.extend(stated.clone());
        let same = case.call(2, 2).unwrap();
        assert_eq!((same.convert, same.environment), (None, stated.into()));
        let moved = case.call(2, 4).unwrap();
        assert_eq!(moved.convert, Some(step.clone()));
        let file = case.place.path().join("gen-2/deepspeed.json");
        assert_eq!(
            moved.environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"],
            file.display().to_string()
        );
        assert_eq!(
            moved.environment["ACCELERATE_CONFIG_DS_FIELDS"],
            "deepspeed_config_file"
        );
        moved.write().unwrap();
        let text = fs::read_to_string(&file).unwrap();
        assert!(
            text.contains(r#""checkpoint": {"load_universal": true}"#),
            "{text}"
        );

        // A program that gets the file itself.
        case.recipe.spec.trainer.environment.clear();
        let words = ["sft.py", "{args}", "--deepspeed", "{deepspeed_config}"];
        case.recipe.spec.trainer.command = words.map(str::to_owned).to_vec();
        let moved = case.call(3, 4).unwrap();
        assert_eq!(moved.convert, Some(step.clone()));
        assert_eq!(moved.environment.len(), 0);
        assert!(moved.command[6].ends_with("gen-3/deepspeed.json"));

        // A program that names the step itself.
        let directory = step.parent().unwrap().display().to_string();
        let trainer = &mut case.recipe.spec.trainer;
        trainer.checkpoint_dir = Some(directory);
        trainer.resume = vec!["--resume".to_owned(), "{checkpoint}".to_owned()];
        let moved = case.call(4, 4).unwrap();
        let universal = step.with_file_name("global_step4_universal");
        assert_eq!(
            (moved.convert, moved.checkpoint),
            (Some(step), Some(universal))
        );
    }

    #[test]
    fn only_an_fsdp_that_is_on_needs_a_second_shard() {
        let mut case = Case::new(HANDBOOK, &["sft.py", "{args}", "{data_shard_size}"]);
        case.recipe.spec.parallel.tensor = 2;
        for (uses, refused) in [("true", true), ("1", true), ("false", false)] {
            let environment = &mut case.recipe.spec.trainer.environment;
            environment.insert("ACCELERATE_USE_FSDP".to_owned(), uses.to_owned());
            assert_eq!(case.call(1, 2).is_err(), refused, "{uses}");
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
        let given: Vec<&str> = call.variables().map(|(name, _)| name).collect();
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
        let line =
            "train -b {per_device_batch_size} -a {gradient_accumulation_steps} {resume_args}";
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
    fn variables_are_filled_in_for_every_world_and_need_a_device_for_each_rank() {
        let mut case = Case::new(HANDBOOK, &["train", "{args}", "--local_rank={local_rank}"]);
        let variables = [
            ("CUDA_VISIBLE_DEVICES", "2,3"),
            ("ACCUMULATION", "{gradient_accumulation_steps}"),
            ("DEEPSPEED", "{deepspeed_config}"),
            ("RANK_OF_HOST", "{local_rank}"),
        ];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        case.recipe.spec.trainer.environment = variables.into();
        assert!(
            case.call(1, 2)
                .unwrap_err()
                .starts_with("`{deepspeed_config}` names")
        );
        let text = r#"{"train_batch_size": 32, "gradient_accumulation_steps": 2}"#;
        case.recipe.spec.trainer.deepspeed_config = Some(text.to_owned());
        let call = case.call(1, 1).unwrap();
        call.write().unwrap();
        let file = case.place.path().join("gen-1/deepspeed.json");
        let values: Vec<&str> = call.environment.values().map(String::as_str).collect();
        let path = file.to_str().unwrap();
        assert_eq!(values, ["4", "2,3", path, "{local_rank}"]);
        let written = fs::read_to_string(&file).unwrap();
        assert_eq!(written, text.replace("steps\": 2", "steps\": 4"));
        assert_eq!(
            case.call(1, 4).unwrap_err(),
            "4 ranks of one machine have only the devices 2,3 (`CUDA_VISIBLE_DEVICES`, `gpu_ids` or `--include`); name one for each, or remove it"
        );
    }

    #[test]
    fn the_checkpoint_directory_is_where_the_trainer_writes() {
        let of = |text: &str, base: bool| {
            let case = Case::new(text, &["train"]);
            let base = base.then_some(Path::new("/started/here"));
            let run_dir = Path::new("/run");
            ExternalTrainer {
                recipe: &case.recipe,
                run_dir,
                base,
                most_on_a_host: u64::MAX,
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
}
