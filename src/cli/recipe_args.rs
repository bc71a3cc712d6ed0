//! The common arguments of `plan`, `check` and `launch`: the recipe and the world.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::hub::Hub;
use crate::plan::AskedRunner;
use crate::recipe::{self, Dialect, Environment, Origin, ReadError, Recipe, Request, Setting};
use crate::util::suggest::UnknownName;

/// One recipe with its flags and overrides.
#[derive(Debug, Clone, clap::Args)]
pub struct RecipeArgs {
    /// Recipe file in any supported dialect, the folder of a config tree (HALOs,
    /// direct-preference-optimization), or a script with the command that starts it
    pub recipe: PathBuf,

    #[command(flatten)]
    pub options: RecipeOptions,

    /// Change a key of the recipe in its dialect: `max_seq_length=128`,
    /// `dataset_mixture.datasets.0.id=chat.jsonl`, `loss=dpo ++model.batch_size=32` (Hydra), or a
    /// native key as `evenkeel.model.config.hidden_size=64`
    #[arg(value_name = "KEY=VALUE")]
    pub overrides: Vec<String>,
}

/// The file that `-` means.
pub const STANDARD_INPUT: &str = "/dev/stdin";

/// A command may contain the whole job, so that the first argument is an override.
pub fn take_override(
    recipe: &mut Option<PathBuf>,
    overrides: &mut Vec<String>,
    command: &[String],
) {
    let is_override = |first: &mut PathBuf| {
        let text = first.to_str().filter(|text| text.contains('='));
        text.is_some() && !first.exists()
    };
    if !command.is_empty()
        && let Some(first) = recipe.take_if(is_override)
    {
        overrides.insert(0, first.to_string_lossy().into_owned());
    }
}

impl RecipeArgs {
    /// Reads the recipe with all command-line settings.
    pub fn read(&self) -> Result<Recipe, ReadError> {
        self.options.read(&self.recipe, &self.overrides)
    }
}

/// The flags that apply to any recipe.
#[derive(Debug, Clone, clap::Args)]
pub struct RecipeOptions {
    /// Accelerate config used to launch the recipe
    #[arg(long, value_name = "FILE")]
    pub accelerate: Option<PathBuf>,

    /// Read the recipe as this dialect instead of detecting it
    #[arg(long, value_name = "DIALECT", value_parser = parse_dialect)]
    pub dialect: Option<Dialect>,

    /// Version for which the recipe is written: trl-0.9, transformers-4.41, or both with a comma;
    /// for halos head, before-2025-05-01, legacy, or a date as 2025-04-30
    #[arg(long, value_name = "VERSION")]
    pub dialect_version: Option<String>,

    /// GPUs to plan for
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20), conflicts_with_all = ["nodes", "gpus_per_node"])]
    pub gpus: Option<u64>,

    /// Machines to plan for
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    pub nodes: Option<u64>,

    /// GPUs on each machine
    #[arg(long, value_name = "M", value_parser = clap::value_parser!(u64).range(1..=1 << 10))]
    pub gpus_per_node: Option<u64>,

    /// Number of GPUs for which the recipe was written, if it does not state it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), conflicts_with = "global_batch_size")]
    pub recipe_gpus: Option<u64>,

    /// Samples per optimiser step of the recipe, if it does not state them
    #[arg(long, value_name = "B", value_parser = clap::value_parser!(u64).range(1..))]
    pub global_batch_size: Option<u64>,

    /// Samples that a device takes at once, beside --global-batch-size
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..), requires = "global_batch_size")]
    pub per_device_batch_size: Option<u64>,

    /// Hydra's flag for several jobs; it is refused with an alternative
    #[arg(short = 'm', long, hide = true)]
    multirun: bool,

    /// Remainder policy if the requested world has no exact split
    #[arg(long, value_name = "HOW", value_parser = ["exact", "uneven"])]
    pub remainder: Option<String>,
}

/// What runs a recipe, where nothing is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum TrainerChoice {
    /// Evenkeel's trainer.
    BuiltIn,
    /// Your program.
    External,
}

impl TrainerChoice {
    /// What the user asked for with `--trainer`, or without it.
    pub fn asked(choice: Option<TrainerChoice>) -> AskedRunner {
        match choice {
            None => AskedRunner::Any,
            Some(TrainerChoice::BuiltIn) => AskedRunner::BuiltIn,
            Some(TrainerChoice::External) => AskedRunner::External,
        }
    }
}

/// The variables of this process that are UTF-8, which a recipe on the user's machine may refer to.
fn shell_variables() -> BTreeMap<String, String> {
    let variables = std::env::vars_os();
    variables
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
        .collect()
}

impl RecipeOptions {
    /// The hub for recipes under these flags. The pods of a cluster download no model.
    pub fn hub(&self) -> Hub {
        let hub = Hub::of_process();
        if self.nodes.is_some() {
            hub.cache_only()
        } else {
            hub
        }
    }

    /// Reads a recipe under these flags.
    pub fn read(&self, path: &Path, overrides: &[String]) -> Result<Recipe, ReadError> {
        self.read_job(path, overrides, &[])
    }

    /// As [`Self::read`], with the upstream start command; `path` is empty if the command defines
    /// the job.
    pub fn read_job(
        &self,
        path: &Path,
        overrides: &[String],
        command: &[String],
    ) -> Result<Recipe, ReadError> {
        recipe::read(&self.request(path, overrides, command))
    }

    /// The request to read a recipe under these flags.
    pub fn request(&self, path: &Path, overrides: &[String], command: &[String]) -> Request {
        let mut overrides = overrides.to_vec();
        overrides.extend(self.multirun.then(|| "--multirun".to_owned()));
        Request {
            origin: Origin::Disk,
            environment: Environment::Shell(shell_variables()),
            path: match path.to_str() {
                Some("-") => STANDARD_INPUT.into(),
                _ => path.to_owned(),
            },
            command: command.to_vec(),
            starts_command: false,
            trainer_command: Vec::new(),
            trainer_environment: BTreeMap::new(),
            deepspeed_config: None,
            accelerate: self.accelerate.clone(),
            overrides,
            dialect: self.dialect,
            version: self.dialect_version.clone(),
            settings: self.settings(),
            world: self.typed_world(),
        }
    }

    /// The options of the world as typed.
    fn typed_world(&self) -> Vec<String> {
        let options = [
            ("--gpus", self.gpus),
            ("--nodes", self.nodes),
            ("--gpus-per-node", self.gpus_per_node),
        ];
        let typed = options
            .into_iter()
            .filter_map(|(flag, value)| Some([flag.to_owned(), value?.to_string()]));
        typed.flatten().collect()
    }

    /// The requested world, in devices; `None` means the detected hardware.
    pub fn world(&self) -> Option<u64> {
        self.gpus
            .or_else(|| Some(self.nodes? * self.gpus_per_node?))
    }

    /// The flags that set native keys.
    fn settings(&self) -> Vec<Setting> {
        let number = |n: Option<u64>| n.map(|n| n.to_string());
        [
            ("--recipe-gpus", "batch.gpus", number(self.recipe_gpus)),
            (
                "--global-batch-size",
                "batch.global",
                number(self.global_batch_size),
            ),
            (
                "--per-device-batch-size",
                "batch.per_device_batch_size",
                number(self.per_device_batch_size),
            ),
            ("--remainder", "batch.remainder", self.remainder.clone()),
        ]
        .into_iter()
        .filter_map(|(flag, path, value)| {
            Some(Setting {
                flag,
                path,
                value: value?,
            })
        })
        .collect()
    }
}

fn parse_dialect(name: &str) -> Result<Dialect, UnknownName> {
    name.parse()
}
