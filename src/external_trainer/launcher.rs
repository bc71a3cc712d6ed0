//! Takes over what the launcher of an external trainer's command sets.

use std::path::Path;

use crate::recipe::schema::deepspeed;
use crate::recipe::schema::placeholder::DEEPSPEED_CONFIG;
use crate::recipe::syntax::yaml::MAX_BYTES;
use crate::recipe::{
    self, Dialect, Origin, ReadError, Recipe, Request, launchers, trainer_command,
};

/// Reads the recipe of a TrainingJob and completes its trainer.
pub fn read(request: &Request) -> Result<Recipe, ReadError> {
    completed(recipe::read(request)?, &request.origin)
}

/// A recipe with a complete external trainer: with the environment of `accelerate launch`, and the DeepSpeed config that
/// the launcher, the command or the recipe names. Variables of the recipe win. `origin` is that of the recipe.
/// Leaves a complete trainer and the built-in one unchanged.
pub fn completed(mut recipe: Recipe, origin: &Origin) -> Result<Recipe, ReadError> {
    if !recipe.spec.trainer.is_external() {
        return Ok(recipe);
    }
    let environment = launchers::environment(&recipe)?;
    let file = recipe
        .files
        .deepspeed
        .and_then(|file| recipe.sources.get(file));
    let file = file.map(|file| file.text.clone());
    let trainer = &mut recipe.spec.trainer;
    trainer.add_environment(environment);
    let named = format!("{{{DEEPSPEED_CONFIG}}}");
    if trainer.deepspeed_config.is_none() {
        let mut values = trainer.environment.values();
        trainer.deepspeed_config = if values.any(|value| value.contains(&named)) {
            file.clone()
        } else {
            launchers::deepspeed_config(&trainer.environment)
        };
    }
    let of_command = match named_config(&trainer.command, origin) {
        Ok(of_command) => of_command,
        Err(problem) => {
            let help =
                "docs/external-trainer.md says how evenkeel writes the config for every world";
            return Err(ReadError::of_command(&recipe, problem, help));
        }
    };
    let trainer = &mut recipe.spec.trainer;
    if let Some((at, word, text)) = of_command {
        trainer.command[at] = word;
        trainer.deepspeed_config = Some(text);
    } else if let Some(text) = file
        && trainer.deepspeed_config.is_none()
        && [Dialect::Transformers, Dialect::HandbookTrl].contains(&recipe.dialect)
        && trainer_command::arguments_win(&trainer.command)
    {
        trainer.command.extend(["--deepspeed".to_owned(), named]);
        trainer.deepspeed_config = Some(text);
    }
    Ok(recipe)
}

/// The DeepSpeed config that a command names: the position of its word, the word with a placeholder instead, and the
/// config's text. A file that could not be written for every world is refused, since its batch numbers would stay.
fn named_config(
    command: &[String],
    origin: &Origin,
) -> Result<Option<(usize, String, String)>, String> {
    let is_file = |path: &str| path.ends_with(".json");
    let Some(at) = trainer_command::deepspeed_word(command) else {
        let mut typed = trainer_command::DEEPSPEED
            .into_iter()
            .filter_map(|key| trainer_command::typed(command, key));
        return match typed.find(|(_, path)| is_file(path)) {
            Some((word, path)) => Err(format!(
                "the command names the DeepSpeed config `{path}` with `{word}`, where evenkeel cannot replace it: give \
                 `--deepspeed {path}` as words of the command itself"
            )),
            None => Ok(None),
        };
    };
    let word = &command[at];
    let path = word.split_once('=').map_or(word.as_str(), |(_, path)| path);
    let refused = |why: String| match is_file(path) {
        true => Err(format!(
            "the command names the DeepSpeed config `{path}`, {why}"
        )),
        // The name of a config that the program has.
        false => Ok(None),
    };
    let text = match origin.read(Path::new(path), MAX_BYTES as u64) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) => {
            return refused(format!(
                "which cannot be read: {error}; a TrainingJob needs it in `spec.recipe.files` under this path"
            ));
        }
    };
    let Some(root) = deepspeed::parse(&text) else {
        return refused("which is no mapping in JSON without repeated keys".to_owned());
    };
    let placeholder = format!("{}{{{DEEPSPEED_CONFIG}}}", &word[..word.len() - path.len()]);
    Ok(deepspeed::is_config(&root).then_some((at, placeholder, text)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    /// The trainer of a command with `a.yaml`, an accelerate config, and `ds.json`; `@` is their directory.
    fn trainer(config: &str, command: &str) -> (Vec<String>, Vec<String>, Option<String>) {
        let folder = tempfile::tempdir().unwrap();
        let file = r#"{"train_batch_size": 64, "zero_optimization": {"stage": 2}}"#;
        std::fs::write(folder.path().join("a.yaml"), config).unwrap();
        std::fs::write(folder.path().join("ds.json"), file).unwrap();
        let here = folder.path().to_str().unwrap();
        let command = words(&command.replace('@', here));
        let request = Request {
            command,
            starts_command: true,
            ..Request::default()
        };
        let trainer = read(&request).unwrap().spec.trainer;
        let variables = trainer.environment.iter();
        let variables = variables.map(|(name, value)| format!("{name}={value}"));
        (
            variables.collect(),
            trainer.command,
            trainer.deepspeed_config,
        )
    }

    const TRAIN: &str = "train.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2";

    #[test]
    fn numbers_of_a_world_become_placeholders_in_the_environment_of_accelerate() {
        let config = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  zero_stage: 2\n  \
                      gradient_accumulation_steps: 2\n";
        let launch = "accelerate launch --config_file @/a.yaml";
        let (variables, command, file) = trainer(config, &format!("{launch} {TRAIN}"));
        for variable in [
            "ACCELERATE_CONFIG_DS_FIELDS=zero_stage,gradient_accumulation_steps",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE=2",
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS={gradient_accumulation_steps}",
            "PYTHONPATH={working_directory}",
        ] {
            assert!(variables.iter().any(|v| v == variable), "{variables:?}");
        }
        assert_eq!(command, words("python3 -u train.py {args} {resume_args}"));
        // For a checkpoint that moves; the ranks' environment names no file.
        assert!(file.unwrap().contains("\"stage\": 2"));
        let sizes = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n  \
                     parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 2\n";
        let (variables, ..) = trainer(sizes, &format!("{launch} {TRAIN}"));
        for variable in [
            "PARALLELISM_CONFIG_DP_SHARD_SIZE={data_shard_size}",
            "PARALLELISM_CONFIG_DP_REPLICATE_SIZE={data_replicate_size}",
            "PARALLELISM_CONFIG_TP_SIZE=2",
        ] {
            assert!(variables.iter().any(|v| v == variable), "{variables:?}");
        }
    }

    #[test]
    fn a_deepspeed_config_with_numbers_is_written_for_every_generation() {
        let of_launcher = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {deepspeed_config_file: @/ds.json}\n";
        let folder = tempfile::tempdir().unwrap();
        let text = r#"{"train_batch_size": "auto", "zero_optimization": {"stage": 3}}"#;
        std::fs::write(folder.path().join("ds.json"), text).unwrap();
        let config = of_launcher.replace('@', folder.path().to_str().unwrap());
        let launch = "accelerate launch --config_file @/a.yaml";
        let (variables, _, file) = trainer(
            &config,
            &format!("{launch} train.py --per_device_train_batch_size 4"),
        );
        let variable = "ACCELERATE_DEEPSPEED_CONFIG_FILE={deepspeed_config}";
        assert!(variables.iter().any(|v| v == variable), "{variables:?}");
        assert_eq!(file.as_deref(), Some(text));

        let recipe = "per_device_train_batch_size: 4\ndeepspeed: @/ds.json\n";
        let numbers = text.replace("\"auto\"", "32");
        std::fs::write(folder.path().join("ds.json"), numbers).unwrap();
        let recipe = recipe.replace('@', folder.path().to_str().unwrap());
        let line = "torchrun --nproc_per_node 8 train.py --config @/a.yaml";
        let (_, command, file) = trainer(&recipe, line);
        assert!(command.ends_with(&words("{resume_args} --deepspeed {deepspeed_config}")));
        assert!(file.unwrap().contains("32"));

        let line = format!("deepspeed --num_gpus 8 {TRAIN} --deepspeed @/ds.json");
        let (variables, command, file) = trainer("", &line);
        assert_eq!(
            variables,
            [
                "CROSS_RANK={node_rank}",
                "CROSS_SIZE={nodes}",
                "LOCAL_SIZE={local_world_size}"
            ]
        );
        let expected = "python3 -u train.py --local_rank={local_rank} --deepspeed {deepspeed_config} {args} {resume_args}";
        assert_eq!(command, words(expected));
        assert!(file.unwrap().contains("train_batch_size"));
    }

    #[test]
    fn a_jobs_command_is_completed_from_its_snapshot_only() {
        let folder = tempfile::tempdir().unwrap();
        let numbers = r#"{"train_batch_size": 16, "zero_optimization": {"stage": 2}}"#;
        let on_disk = folder.path().join("ds.json");
        std::fs::write(&on_disk, numbers).unwrap();
        let recipe = "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n\
                      evenkeel: {objective: sft}\n";
        let files = [("recipe.yaml", recipe), ("ds.json", numbers)];
        let files = files.map(|(path, text)| (path.into(), text.to_owned()));
        let origin = Origin::snapshot(files).unwrap();
        let job = |command: &str, config: &str| {
            read(&Request {
                origin: origin.clone(),
                path: "recipe.yaml".into(),
                trainer_command: words(&format!(
                    "{command} train.py {{args}} --deepspeed {config}"
                )),
                ..Request::default()
            })
        };
        for launcher in ["torchrun --nproc_per_node 2", "python3 -u"] {
            let recipe = job(launcher, "ds.json").unwrap();
            let trainer = recipe.spec.trainer.clone();
            let written = "python3 -u train.py {args} --deepspeed {deepspeed_config}";
            assert_eq!(trainer.command.join(" "), written);
            assert_eq!(trainer.deepspeed_config.as_deref(), Some(numbers));
            let again = completed(recipe, &origin).unwrap();
            assert_eq!(again.spec.trainer, trainer, "a complete trainer");
        }
        let unread = job("python3", on_disk.to_str().unwrap()).unwrap_err();
        assert!(
            unread.to_string().contains("which cannot be read"),
            "{unread}"
        );
        insta::assert_snapshot!(job("torchrun", "absent.json").unwrap_err(), @"the command names the DeepSpeed config `absent.json`, which cannot be read: not in the recipe snapshot; a TrainingJob needs it in `spec.recipe.files` under this path (docs/external-trainer.md says how evenkeel writes the config for every world)");
        let within = ["sh", "-c", "exec python sft.py {args} --deepspeed ds.json"];
        let within = within.map(str::to_owned).to_vec();
        for command in [within, words("python sft.py {args} --deepspe ds.json")] {
            let error = named_config(&command, &origin).unwrap_err();
            assert!(error.contains("cannot replace it"), "{error}");
        }
        let switch = words("python cifar.py --deepspeed_config=ds.json --deepspeed");
        assert!(named_config(&switch, &origin).unwrap().is_some());
        // A config of the program's own.
        let named = job("python3", "zero2").unwrap().spec.trainer;
        assert_eq!(named.deepspeed_config, None);
    }
}
