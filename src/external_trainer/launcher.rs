//! Takes over what the launcher of an external trainer's command sets.

use std::path::Path;

use crate::export;
use crate::recipe::schema::placeholder::{self, ARGS, DEEPSPEED_CONFIG};
use crate::recipe::syntax::yaml::MAX_BYTES;
use crate::recipe::{Dialect, ReadError, Recipe, launchers};
use crate::util::input;

/// Options with which a program names its DeepSpeed config.
const DEEPSPEED: [&str; 2] = ["--deepspeed", "--deepspeed_config"];

/// Completes the recipe's external trainer: the environment of `accelerate launch`, and the DeepSpeed config that
/// the launcher, the command or the recipe names, if it states batch numbers. Variables of the recipe win.
pub fn complete(recipe: &mut Recipe) -> Result<(), ReadError> {
    let mut environment = launchers::environment(recipe)?;
    let uses_file = |text: &String| text.contains(&format!("{{{DEEPSPEED_CONFIG}}}"));
    let file = recipe
        .files
        .deepspeed
        .and_then(|file| recipe.sources.get(file));
    let file = file.map(|file| file.text.clone());
    let trainer = &mut recipe.spec.trainer;
    if environment.values().any(uses_file) {
        trainer.deepspeed_config.clone_from(&file);
    }
    environment.append(&mut trainer.environment);
    trainer.environment = environment;
    if let Some(at) = deepspeed_word(&trainer.command) {
        let word = &mut trainer.command[at];
        let (before, path) = word.rsplit_once('=').unwrap_or(("", word));
        let text = input::read(Path::new(path), MAX_BYTES as u64).ok();
        if let Some(text) = text.and_then(|bytes| String::from_utf8(bytes).ok())
            && export::states_deepspeed_numbers(&text)
        {
            let equals = if before.is_empty() { "" } else { "=" };
            *word = format!("{before}{equals}{{{DEEPSPEED_CONFIG}}}");
            trainer.deepspeed_config = Some(text);
        }
    } else if let Some(text) = file.filter(|text| export::states_deepspeed_numbers(text))
        && trainer.deepspeed_config.is_none()
        && [Dialect::Transformers, Dialect::HandbookTrl].contains(&recipe.dialect)
        && trainer
            .command
            .iter()
            .any(|word| *word == format!("{{{ARGS}}}"))
    {
        // The recipe names it, and arguments win over the recipe.
        let words = ["--deepspeed".to_owned(), format!("{{{DEEPSPEED_CONFIG}}}")];
        trainer.command.extend(words);
        trainer.deepspeed_config = Some(text);
    }
    Ok(())
}

/// The position of the word that names the DeepSpeed config, alone or after `=`.
fn deepspeed_word(command: &[String]) -> Option<usize> {
    let at = command.iter().rposition(|word| {
        let name = word.split('=').next().unwrap_or_default();
        DEEPSPEED.contains(&name)
    })?;
    let value = if command[at].contains('=') {
        at
    } else {
        at + 1
    };
    let word = command.get(value)?;
    placeholder::is_plain(word).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{Request, read};

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
            command: command.clone(),
            ..Request::default()
        };
        let mut recipe = read(&request).unwrap();
        let split = launchers::split(&command).unwrap();
        recipe.spec.trainer.command = launchers::without_numbers(&recipe, split.program);
        recipe.spec.trainer.environment = split.environment;
        complete(&mut recipe).unwrap();
        let trainer = recipe.spec.trainer;
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
        assert_eq!(file, None);
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
}
