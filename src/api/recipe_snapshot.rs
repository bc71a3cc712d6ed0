//! The recipe snapshot of a TrainingJob and how it is read: identically by the command line, the
//! controller and the agents.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::api::status::KeptRecipe;
use crate::api::{EnvVar, RecipeSource, TrainingJobSpec};
use crate::recipe::schema::spec::Remainder;
use crate::recipe::{Dialect, Environment, Origin, OutsidePath, Request, Setting};
use crate::util::suggest::UnknownName;

/// Default path of the recipe.
const RECIPE: &str = "recipe.yaml";
/// Path of an accelerate config that is given as text.
const ACCELERATE: &str = "accelerate.yaml";

/// Why a snapshot cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum InvalidSnapshot {
    #[error(transparent)]
    Path(#[from] OutsidePath),
    /// No dialect has this name.
    #[error(transparent)]
    Dialect(#[from] UnknownName),
}

/// A recipe with every text that it is read from. Its hash covers its JSON, so the fields keep their names and order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RecipeSnapshot {
    /// The recipe's text. Empty where the recipe is one of `files`.
    pub text: String,
    /// The text of the accelerate config.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerate: Option<String>,
    /// Overrides of recipe keys, as `KEY=VALUE`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub overrides: Vec<String>,
    /// The environment variables that the recipe may refer to.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The path of the accelerate config among `files`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub accelerate_path: Option<String>,
    /// Texts of the recipe's files by their paths.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, String>,
    /// The recipe's dialect, if the spec names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dialect: Option<String>,
    /// The version of the dialect, if the spec names one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dialect_version: Option<String>,
    /// The words of the command that is the whole job.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Environment of the external trainer's ranks, in place of the recipe's.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub trainer_environment: BTreeMap<String, String>,
    /// Text of the external trainer's DeepSpeed config, in place of the recipe's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deepspeed_config: Option<String>,
    /// GPUs for which the recipe counts as written, if its batch depends on them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<u64>,
    /// xxh3-128 of the snapshot without `gpus`, in hexadecimal digits.
    pub hash: String,
}

impl RecipeSnapshot {
    /// A snapshot of `source`; `text`: the recipe, inline or from a ConfigMap.
    pub fn of(source: &RecipeSource, text: Option<String>, overrides: &[String]) -> RecipeSnapshot {
        RecipeSnapshot {
            text: text.unwrap_or_default(),
            accelerate: source.accelerate.clone(),
            overrides: overrides.to_vec(),
            env: BTreeMap::new(),
            path: source.path.clone(),
            accelerate_path: source.accelerate_path.clone(),
            files: source.files.clone(),
            dialect: source.dialect.clone(),
            dialect_version: source.dialect_version.clone(),
            command: source.command.clone(),
            trainer_environment: source.trainer_environment.clone(),
            deepspeed_config: source.deepspeed_config.clone(),
            gpus: None,
            hash: String::new(),
        }
    }

    /// The snapshot of a job that was planned before.
    pub fn of_job(spec: &TrainingJobSpec, kept: &KeptRecipe) -> RecipeSnapshot {
        let text = match kept.text.as_str() {
            "" => spec.recipe.inline.clone(),
            text => Some(text.to_owned()),
        };
        let mut snapshot = RecipeSnapshot::of(&spec.recipe, text, &spec.overrides);
        snapshot.files.extend(kept.files.clone());
        RecipeSnapshot {
            env: kept.env.clone(),
            gpus: kept.gpus,
            hash: kept.hash.clone(),
            ..snapshot
        }
    }

    /// What a status keeps of it: what the spec does not have.
    pub fn kept(&self, source: &RecipeSource) -> KeptRecipe {
        let of_spec = source.inline.as_ref() == Some(&self.text);
        let files = self.files.iter();
        let files = files.filter(|(path, _)| !source.files.contains_key(*path));
        KeptRecipe {
            text: if of_spec {
                String::new()
            } else {
                self.text.clone()
            },
            files: files
                .map(|(path, text)| (path.clone(), text.clone()))
                .collect(),
            env: self.env.clone(),
            gpus: self.gpus,
            hash: self.hash.clone(),
        }
    }

    /// Adds the variables of `spec.trainer.env`, if the recipe may refer to one.
    pub fn add_environment(&mut self, env: &[EnvVar]) {
        let texts = self.files.values().chain(&self.overrides);
        let texts = texts.chain(&self.command);
        let mut texts = texts.chain([&self.text]);
        if texts.any(|text| text.contains("oc.env")) {
            // The value of another source is known in the pods only.
            let env = env.iter().filter(|variable| variable.value_from.is_none());
            self.env
                .extend(env.map(|variable| (variable.name.clone(), variable.value.clone())));
        }
    }

    /// Path of the recipe.
    pub fn path(&self) -> PathBuf {
        self.path.as_deref().unwrap_or(RECIPE).into()
    }

    /// The request that reads the snapshot. `command`: the external trainer's command of the job; empty: the
    /// recipe's.
    pub fn request(
        &self,
        remainder: Remainder,
        command: &[String],
    ) -> Result<Request, InvalidSnapshot> {
        let beside = self.files.iter();
        let mut files: Vec<(PathBuf, String)> = beside
            .map(|(path, text)| (path.into(), text.clone()))
            .collect();
        let is_command = !self.command.is_empty();
        // Without a text the recipe is one of the files, or a folder of them.
        if !is_command && (!self.text.is_empty() || files.is_empty()) {
            files.push((self.path(), self.text.clone()));
        }
        let accelerate = match &self.accelerate {
            Some(text) => {
                files.push((ACCELERATE.into(), text.clone()));
                Some(ACCELERATE.into())
            }
            None => self.accelerate_path.as_ref().map(PathBuf::from),
        };
        let dialect = self.dialect.as_deref().map(str::parse::<Dialect>);
        let uneven = (remainder == Remainder::Uneven).then(|| Setting {
            flag: "spec.elasticity.remainder",
            path: "batch.remainder",
            value: "uneven".into(),
        });
        let gpus = self.gpus.map(|gpus| Setting {
            flag: "status.recipe.gpus",
            path: "batch.gpus",
            value: gpus.to_string(),
        });
        Ok(Request {
            origin: Origin::snapshot(files)?,
            environment: Environment::Job(self.env.clone()),
            path: if is_command {
                PathBuf::new()
            } else {
                self.path()
            },
            command: self.command.clone(),
            trainer_command: command.to_vec(),
            trainer_environment: self.trainer_environment.clone(),
            deepspeed_config: self.deepspeed_config.clone(),
            accelerate,
            overrides: self.overrides.clone(),
            dialect: dialect.transpose()?,
            version: self.dialect_version.clone(),
            settings: uneven.into_iter().chain(gpus).collect(),
            ..Request::default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{self, Recipe};

    const TREE: [(&str, &str); 3] = [
        (
            "config/config.yaml",
            "defaults: [_self_, model: base, loss: ???]\nexp_name: tiny\n",
        ),
        (
            "config/model/base.yaml",
            "batch_size: 24\ngradient_accumulation_steps: 2\n",
        ),
        ("config/loss/dpo.yaml", "name: dpo\nbeta: 0.1\n"),
    ];

    fn read(source: &RecipeSource, text: Option<&str>) -> Result<Recipe, String> {
        let snapshot = RecipeSnapshot::of(source, text.map(str::to_owned), &["loss=dpo".into()]);
        let request = snapshot
            .request(Remainder::Exact, &[])
            .map_err(|error| error.to_string())?;
        recipe::read(&request).map_err(|error| error.to_string())
    }

    fn source(path: &str, files: &[(&str, &str)]) -> RecipeSource {
        RecipeSource {
            path: Some(path.to_owned()),
            files: files
                .iter()
                .map(|(path, text)| (path.to_string(), text.to_string()))
                .collect(),
            dialect: Some("halos".to_owned()),
            dialect_version: Some("head".to_owned()),
            ..RecipeSource::default()
        }
    }

    #[test]
    fn snapshot_of_a_tree_is_composed_as_on_disk() {
        let folder = tempfile::tempdir().unwrap();
        for (path, text) in TREE {
            let path = folder.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let on_disk = recipe::read(&Request {
            path: folder.path().join("config"),
            overrides: vec!["loss=dpo".into()],
            dialect: Some(Dialect::Halos),
            version: Some("head".into()),
            ..Request::default()
        });
        let on_disk = on_disk.unwrap();
        assert_eq!(on_disk.spec.batch.global, Some(24));
        for path in ["config", "config/config.yaml", "."] {
            let snapshot = read(&source(path, &TREE), None).unwrap();
            assert_eq!(snapshot.spec, on_disk.spec, "{path}");
        }
    }

    #[test]
    fn a_command_is_read_by_its_words() {
        let words = [
            "torchrun",
            "--nproc_per_node",
            "2",
            "train.py",
            "--per_device_train_batch_size",
            "4",
            "--run_name",
            "a 'b'; c # d",
        ];
        let source = RecipeSource {
            command: words.map(str::to_owned).to_vec(),
            ..RecipeSource::default()
        };
        let snapshot = RecipeSnapshot::of(&source, None, &[]);
        let program = ["python3", "train.py", "{args}"].map(str::to_owned);
        let recipe = recipe::read(&snapshot.request(Remainder::Exact, &program).unwrap()).unwrap();
        assert_eq!(recipe.command().unwrap(), words);
        assert_eq!(recipe.spec.trainer.command, program);
        let batch = &recipe.spec.batch;
        assert_eq!(
            (batch.gpus, batch.per_device_batch_size),
            (Some(2), Some(4))
        );
    }

    #[test]
    fn a_jobs_trainer_settings_replace_the_recipes_unchanged() {
        let text = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  batch: {global: 8}\n  trainer:\n    \
                    command: [python, train.py, '{args}']\n    environment: {OF_RECIPE: '1'}\n    \
                    deepspeed_config: '{}'\n";
        let read = |source: &RecipeSource| {
            let snapshot = RecipeSnapshot::of(source, Some(text.to_owned()), &[]);
            let request = snapshot.request(Remainder::Exact, &[]).unwrap();
            recipe::read(&request).unwrap().spec.trainer
        };
        let own = read(&RecipeSource::default());
        assert_eq!(own.environment["OF_RECIPE"], "1");
        assert_eq!(own.deepspeed_config.as_deref(), Some("{}"));
        // Neither YAML nor JSON nor a shell reads them again.
        let variables = [("A", "{world_size}"), ("B", "'a': \"#\n$C")];
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let of_job = RecipeSource {
            trainer_environment: variables.clone().into(),
            deepspeed_config: Some("{\"zero_optimization\": {}}\n".to_owned()),
            ..RecipeSource::default()
        };
        let trainer = read(&of_job);
        assert_eq!(trainer.environment, variables.into());
        assert_eq!(trainer.deepspeed_config, of_job.deepspeed_config);
        assert_eq!(trainer.command, own.command);
    }

    #[test]
    fn recipes_see_the_environment_of_their_job_only() {
        // Cargo sets CARGO_PKG_NAME for the process of this test.
        assert!(std::env::var_os("CARGO_PKG_NAME").is_some());
        let read = |name: &str, env: &[EnvVar]| {
            let root = format!(
                "defaults: [_self_, model: base, loss: dpo]\nexp_name: ${{oc.env:{name}}}\n"
            );
            let tree = [("config/config.yaml", root.as_str()), TREE[1], TREE[2]];
            let mut snapshot = RecipeSnapshot::of(&source("config", &tree), None, &[]);
            snapshot.add_environment(env);
            let request = snapshot.request(Remainder::Exact, &[]).unwrap();
            recipe::read(&request).map_err(|error| error.to_string())
        };
        insta::assert_snapshot!(read("CARGO_PKG_NAME", &[]).unwrap_err(), @"config/config.yaml:2:11: spec.trainer.env has no `CARGO_PKG_NAME`, the only environment of a TrainingJob's recipe (set the variable there, set the key in spec.overrides, or give a default: `${oc.env:NAME,default}`)");
        let env = [EnvVar {
            name: "RUN".to_owned(),
            value: "tiny".to_owned(),
            ..EnvVar::default()
        }];
        let recipe = read("RUN", &env).unwrap();
        assert_eq!(recipe.spec.name, "tiny");
    }

    /// What a job's status may show does not depend on the controller's disk.
    #[test]
    fn recipes_learn_nothing_of_the_controllers_files() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().display().to_string();
        let secret = "mixed_precision: s3cret\nnum_processes: 7\nbatch_size: 7\n";
        let files = [
            "a.yaml",
            "a.json",
            "config.yaml",
            "train.args",
            "tokenizer.json",
        ];
        for file in files {
            std::fs::write(folder.path().join(file), secret).unwrap();
        }
        let batch = "per_device_train_batch_size: 4\nevenkeel: {batch: {gpus: 2}}\n";
        let tree = |lines: &str| {
            format!("defaults: [_self_, {lines}]\nexp_name: tiny\nloss: {{name: dpo}}\n")
        };
        let native = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nmetadata: {name: a}\nspec:\n  batch: {global: 8}\n";
        let model = "{path: DISK}\n  tokenizer: {path: DISK}\n  data: {sequence_length: 8, train: [{path: DISK/a.json}]}";
        for (path, text) in [
            ("a.yaml", format!("{batch}accelerate_config: DISK/a.yaml\n")),
            ("a.yaml", format!("{batch}deepspeed: DISK/a.json\n")),
            ("a.yaml", format!("{native}  model: {model}\n")),
            ("config/config.yaml", tree("/DISK/a")),
            ("config/config.yaml", tree("model: DISK/a")),
            (
                "config/config.yaml",
                tree("a") + "hydra: {searchpath: ['file://DISK']}\n",
            ),
            (
                "run.sh",
                "accelerate launch --config_file DISK/a.yaml train.py --deepspeed DISK/a.json\n"
                    .into(),
            ),
            (
                "run.sh",
                "torchrun --nproc_per_node 2 DISK/train.py DISK/a.yaml\n".into(),
            ),
            (
                "run.sh",
                "torchrun --nproc_per_node 2 DISK/train.py --per_device_train_batch_size 1\n"
                    .into(),
            ),
            (
                "run.sh",
                "deepspeed --hostfile DISK/a.yaml train.py --deepspeed_config DISK/a.json\n".into(),
            ),
            (
                "run.sh",
                "source DISK/a.yaml\nA=$(cat DISK/a.yaml)\ntorchrun train.py --x $A\n".into(),
            ),
        ] {
            let show = |disk: &str| {
                let source = RecipeSource {
                    path: Some(path.to_owned()),
                    accelerate_path: Some(format!("{disk}/a.yaml")),
                    ..RecipeSource::default()
                };
                let text = text.replace("DISK", disk);
                let shown = [source, source_at(path)].map(|source| {
                    let snapshot = RecipeSnapshot::of(&source, Some(text.clone()), &[]);
                    let request = snapshot.request(Remainder::Exact, &[]).unwrap();
                    format!("{:?}", recipe::read(&request))
                });
                shown.concat().replace(disk, "")
            };
            let absent = disk.replace('t', "x");
            assert!(!std::path::Path::new(&absent).exists());
            let (present, absent) = (show(&disk), show(&absent));
            assert_eq!(present, absent, "{text}");
            assert!(!present.contains("s3cret"), "{present}");
        }
    }

    fn source_at(path: &str) -> RecipeSource {
        RecipeSource {
            path: Some(path.to_owned()),
            ..RecipeSource::default()
        }
    }

    #[test]
    fn invalid_paths_and_dialects_are_refused() {
        let outside = source("config", &[("../secret.yaml", "a: 1\n")]);
        let error = read(&outside, None).unwrap_err();
        assert!(error.contains("`../secret.yaml`"), "{error}");
        let other = RecipeSource {
            dialect: Some("hallos".to_owned()),
            ..source("config", &TREE)
        };
        let error = read(&other, None).unwrap_err();
        assert!(error.contains("halos"), "{error}");
        let error = read(&source("conf", &TREE), None).unwrap_err();
        assert!(error.contains("`conf`"), "{error}");
    }

    #[test]
    fn path_of_a_text_selects_the_dialect_objective() {
        let text = "per_device_train_batch_size: 4\nevenkeel: {batch: {gpus: 2}}\n";
        let objective = |path: &str| {
            let source = RecipeSource {
                dialect: Some("handbook-trl".to_owned()),
                dialect_version: None,
                ..source(path, &[])
            };
            let snapshot = RecipeSnapshot::of(&source, Some(text.to_owned()), &[]);
            let request = snapshot.request(Remainder::Exact, &[]).unwrap();
            recipe::read(&request).unwrap().spec.objective
        };
        assert_ne!(
            objective("zephyr/dpo/full.yaml"),
            objective("zephyr/sft/full.yaml")
        );
    }
}
