//! Analyses an external trainer's command: its launcher, the batch numbers among its arguments, and the
//! overrides that would not reach it.

use std::path::Path;

use super::Recipe;
use super::batch_arguments;
use crate::recipe::dialects::handbook::abbreviation::{Meant, meant};
use crate::recipe::dialects::handbook::keys;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::placeholder::{self, ARGS, CHECKPOINT_DIR, RECIPE};
use crate::recipe::syntax::shell::{Line, Shell, Typed, inner};
use crate::recipe::syntax::source::FileId;
use crate::recipe::syntax::words::Words;

/// Launchers: programs that start one process per device.
const LAUNCHERS: Words =
    Words("torchrun trl accelerate accelerate-launch deepspeed mpirun mpiexec srun");

/// Launchers that are started as Python modules.
const MODULES: Words = Words(
    "torch.distributed.run torch.distributed.launch accelerate.commands.launch \
     accelerate deepspeed",
);

/// Programs that run the command after them unchanged.
const WRAPPERS: Words = Words("env exec nice nohup numactl pdm poetry run uv");

/// The commands that an external trainer's command runs: itself, or those of its inline script (`bash -c`), and the words
/// that the script gets as `$1` and so on.
fn commands(command: &[String]) -> Vec<Vec<String>> {
    let typed = Typed::of(command, FileId(0));
    let parameters = match inner::script(&typed.words) {
        Some(script) if typed.is_inline_script() => command.get(script + 2..),
        _ => None,
    };
    let lines = typed.lines.into_iter();
    let texts = |line: Line| {
        let words = line.words.iter().map(|word| word.text.as_str());
        let script = inner::script(&line.words).filter(|_| line.shell == Shell::Unread);
        match script {
            // Bash accepts no part of it.
            Some(script) => words
                .skip(script)
                .flat_map(str::split_whitespace)
                .map(str::to_owned)
                .collect(),
            None => words.map(str::to_owned).collect(),
        }
    };
    lines
        .map(texts)
        .chain(parameters.map(<[String]>::to_vec))
        .collect()
}

/// The placeholders for the numbers of one device.
const MICRO_BATCH: &str = "{per_device_batch_size}";
const ACCUMULATION: &str = "{gradient_accumulation_steps}";

/// Whether a command has placeholders for the batch numbers themselves.
pub fn has_numbers(command: &[String]) -> bool {
    let names = [MICRO_BATCH, ACCUMULATION, "{global_batch_size}"];
    let mut names = names.iter().map(|name| name.trim_matches(['{', '}']));
    names.any(|name| placeholder::is_used(command, name))
}

/// A command with placeholders for the numbers of its arguments `--batch_size` and `--accumulation_steps`, by their
/// names. `None`: none of its arguments is a batch.
pub fn with_numbers(command: &[String]) -> Option<Vec<String>> {
    const OTHERS: [&str; 7] = ["eval", "val", "test", "gen", "total", "global", "effective"];
    let placeholder = |option: &str| {
        let name = option
            .trim_start_matches('-')
            .to_lowercase()
            .replace('-', "_");
        let is_batch = ["batch_size", "batchsize", "bsz", "bs"]
            .iter()
            .any(|end| name.ends_with(end));
        match name {
            name if !option.starts_with('-') || OTHERS.iter().any(|part| name.contains(part)) => {
                None
            }
            _ if is_batch => Some(MICRO_BATCH),
            name if name.contains("accum") => Some(ACCUMULATION),
            _ => None,
        }
    };
    let mut words = command.to_vec();
    for at in 0..words.len() {
        let word = words[at].clone();
        let (option, attached) = match word.split_once('=') {
            Some((option, value)) => (option, Some(value)),
            None => (word.as_str(), None),
        };
        let Some(placeholder) = placeholder(option) else {
            continue;
        };
        let is_number = |text: &str| text.parse::<u64>().is_ok();
        match attached {
            Some(value) if is_number(value) => words[at] = format!("{option}={placeholder}"),
            None if words.get(at + 1).is_some_and(|value| is_number(value)) => {
                placeholder.clone_into(&mut words[at + 1]);
            }
            _ => {}
        }
    }
    words
        .iter()
        .any(|word| word.contains(MICRO_BATCH))
        .then_some(words)
}

/// The launcher at the start of a command, after wrappers such as `env` and `nice`, or of one in its inline script.
pub fn launcher(command: &[String]) -> Option<String> {
    let commands = commands(command);
    commands.iter().find_map(|words| first_launcher(words))
}

fn first_launcher(command: &[String]) -> Option<String> {
    let mut words = command.iter();
    let (mut wrapped, mut option) = (false, false);
    while let Some(word) = words.next() {
        let name = Path::new(word).file_name()?.to_str()?;
        if word == "-m" {
            let module = words.next()?;
            return MODULES.has(module).then(|| format!("-m {module}"));
        }
        if LAUNCHERS.has(name) {
            return Some(name.to_owned());
        }
        let python = name.starts_with("python");
        let wrapper = WRAPPERS.has(name);
        // `nice -n 10`: the word after an option of a wrapper may be its value.
        let value = wrapped && option;
        if !(python || wrapper || value || word.starts_with('-') || word.contains('=')) {
            return None;
        }
        wrapped = wrapper || (wrapped && !python);
        option = word.starts_with('-');
    }
    None
}

/// Whether words use evenkeel's checkpoint directory: `{checkpoint_dir}` or `EVENKEEL_CHECKPOINT_DIR`.
pub fn says_checkpoint_dir(words: &[String]) -> bool {
    let variable = "EVENKEEL_CHECKPOINT_DIR";
    placeholder::is_used(words, CHECKPOINT_DIR) || words.iter().any(|word| word.contains(variable))
}

/// The last value that a command gives for a key, as `--key value`, `--key=value` or Hydra's `++key=value`,
/// also within an inline script. Returns the word with the key, and the value.
pub fn typed(command: &[String], key: &str) -> Option<(String, String)> {
    let named = |word: &str| match word.strip_prefix("--") {
        Some(option) => is_option(option, key),
        None => word.trim_start_matches('+') == key,
    };
    let last = |words: &Vec<String>| {
        let mut last_first = words.iter().enumerate().rev();
        last_first.find_map(|(at, word)| match word.split_once('=') {
            Some((name, value)) => named(name).then(|| (word.clone(), value.to_owned())),
            None if word.starts_with("--") && named(word) => {
                Some((word.clone(), words.get(at + 1)?.clone()))
            }
            None => None,
        })
    };
    commands(command).iter().rev().find_map(last)
}

/// Whether an option without its dashes is a key, or an abbreviation of it that argparse accepts.
fn is_option(option: &str, key: &str) -> bool {
    let name = option.replace('-', "_");
    let mut fields: Vec<&str> = keys::training().collect();
    fields.retain(|field| *field != key);
    fields.push(key);
    name == key || meant(&name, fields) == Meant::One(key)
}

/// Whether a command enables a switch: `--key`, `--key true` or `--key=true`.
pub fn switches_on(command: &[String], key: &str) -> bool {
    let off = ["false", "no", "off", "0"];
    let named = |word: &String| {
        let option = word.strip_prefix("--");
        option.is_some_and(|option| is_option(option, key))
    };
    match typed(command, key) {
        Some((_, value)) => !off.contains(&value.to_lowercase().as_str()),
        // A switch as the last word has no value.
        None => {
            let mut commands = commands(command).into_iter();
            commands.any(|words| words.last().is_some_and(named))
        }
    }
}

/// The script that a command starts with Python, as a path; `None` for a module, inline code or another program.
pub fn script(command: &[String]) -> Option<&str> {
    let mut words = command.iter().map(String::as_str);
    let name = words.next()?.rsplit('/').next()?;
    let script = words.find(|word| !word.starts_with('-'))?;
    let is_script = script.ends_with(".py") && placeholder::is_plain(script);
    (name.starts_with("python") && is_script).then_some(script)
}

/// Options with which a program names its DeepSpeed config, without dashes.
pub const DEEPSPEED: [&str; 2] = ["deepspeed", "deepspeed_config"];

/// The position of the word that names the DeepSpeed config, alone or after `=`.
pub fn deepspeed_word(command: &[String]) -> Option<usize> {
    (0..command.len()).rev().find_map(|at| {
        let (name, tied) = match command[at].split_once('=') {
            Some((name, _)) => (name, true),
            None => (command[at].as_str(), false),
        };
        let value = if tied { at } else { at + 1 };
        let option = name.strip_prefix("--")?;
        let word = command.get(value).filter(|_| DEEPSPEED.contains(&option))?;
        // `--deepspeed` alone is a switch of programs that call DeepSpeed.
        let named = tied || !word.starts_with('-');
        (named && placeholder::is_plain(word)).then_some(value)
    })
}

/// Whether the program of a transformers recipe takes further arguments, which win over the recipe: it gets
/// `{args}`, or the recipe after `--config`.
pub fn arguments_win(command: &[String]) -> bool {
    let [args, recipe] = [ARGS, RECIPE].map(|name| format!("{{{name}}}"));
    command.contains(&args) || command.windows(2).any(|pair| pair == ["--config", &recipe])
}

/// The message for an override that would not reach the external trainer. `{recipe}` is the recipe's file
/// with the plan's numbers but without overrides; `{args}` holds only these numbers.
pub fn lost_override(recipe: &Recipe, overrides: &[String]) -> Option<String> {
    let command = &recipe.spec.trainer.command;
    let uses = |name| placeholder::is_used(command, name);
    if recipe.dialect == Dialect::Native && !uses(RECIPE) {
        // All keys of a native recipe are evenkeel's, and reach the trainer as numbers.
        return None;
    }
    let numbers = batch_arguments::argument_keys(recipe);
    let reserved = format!("{RESERVED}.");
    let reaches = |text: &&String| {
        let key = text.trim_start_matches(['+', '~', '-']);
        let key = key.split('=').next().unwrap_or_default();
        key.starts_with(&reserved)
            || recipe.variables.contains_key(key)
            || typed(command, key).is_some()
            || (!uses(RECIPE) && numbers.contains(&key))
    };
    let lost = overrides.iter().find(|text| !reaches(text))?;
    Some(if uses(RECIPE) {
        format!(
            "`{lost}` would not be in `{{recipe}}`, which holds the recipe's file and the plan's numbers: \
             change the file, or add the option to the trainer's command as well"
        )
    } else {
        format!(
            "`{lost}` would not reach the external trainer, which gets only the plan's numbers: add the \
             option to the trainer's command as well"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::read_text;
    use crate::recipe::schema::request::Request;

    #[test]
    fn a_programs_own_arguments_for_the_batch_get_placeholders() {
        let of = |line: &str| {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            with_numbers(&words).map(|words| words.join(" "))
        };
        for (line, expected) in [
            (
                "ift.py --lr 1 --batch_size 2 --accumulate=4 --eval_batch_size 8",
                Some(
                    "ift.py --lr 1 --batch_size {per_device_batch_size} --accumulate={gradient_accumulation_steps} --eval_batch_size 8",
                ),
            ),
            (
                "a.py --train-bsz=2",
                Some("a.py --train-bsz={per_device_batch_size}"),
            ),
            ("a.py --global_batch_size 64", None),
            ("a.py --batch_size auto", None),
            ("a.py --grad_accum 4", None),
            ("a.py batch_size=4", None),
        ] {
            assert_eq!(of(line).as_deref(), expected, "{line}");
        }
    }

    fn words(text: &str) -> Vec<String> {
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn the_script_that_python_starts_is_found() {
        for (text, found) in [
            ("python train.py --lr 1", Some("train.py")),
            (
                "/opt/bin/python3.11 -u scripts/sft.py",
                Some("scripts/sft.py"),
            ),
            ("python3 -X dev train.py", None),
            ("python -m trl.scripts.sft", None),
            ("python -c print(1)", None),
            ("python {run_dir}/train.py", None),
            ("sh train.py", None),
            ("python", None),
        ] {
            assert_eq!(script(&words(text)), found, "{text}");
        }
    }

    #[test]
    fn a_launcher_is_found_after_wrappers() {
        let found = |text: &str| launcher(&words(text));
        for (text, name) in [
            ("/usr/bin/torchrun train.py {args}", "torchrun"),
            (
                "python3 -m torch.distributed.run train.py",
                "-m torch.distributed.run",
            ),
            ("env NCCL_DEBUG=INFO torchrun train.py", "torchrun"),
            ("uv run accelerate launch train.py", "accelerate"),
            (
                "python3 -u -m accelerate.commands.launch train.py",
                "-m accelerate.commands.launch",
            ),
            ("trl sft {args}", "trl"),
            ("nice -n 10 torchrun train.py", "torchrun"),
        ] {
            assert_eq!(found(text).as_deref(), Some(name), "{text}");
        }
        let shell = |text: &str| ["bash", "-lc", text].map(str::to_owned);
        let inline = shell(". env.sh && accelerate launch train.py {args}");
        assert_eq!(launcher(&inline).as_deref(), Some("accelerate"));
        assert_eq!(launcher(&shell("exec python train.py accelerate")), None);
        let open = shell("accelerate launch 'train.py");
        assert_eq!(launcher(&open).as_deref(), Some("accelerate"));
        for text in [
            "nice -n 10 python3 train.py deepspeed",
            "python3 train.py --engine deepspeed",
            "python3 -m mine",
        ] {
            assert_eq!(found(text), None, "{text}");
        }
    }

    #[test]
    fn a_keys_value_is_found_in_every_spelling() {
        let typed = |command: &[String], key| {
            typed(command, key).map(|(word, value)| format!("{word} {value}"))
        };
        let output = |command: &str| typed(&words(command), "output_dir");
        assert_eq!(output("a --output_dir out").unwrap(), "--output_dir out");
        assert_eq!(
            output("a --output-dir=out b").unwrap(),
            "--output-dir=out out"
        );
        assert_eq!(
            output("a --output_dir x --output_dir=y").unwrap(),
            "--output_dir=y y"
        );
        assert_eq!(typed(&words("a ++m.b=3"), "m.b").unwrap(), "++m.b=3 3");
        for absent in ["output_dir out", "--output_dir", "--output_dir_2 x", "-- x"] {
            assert_eq!(output(absent), None, "{absent}");
        }
        let shell = [
            "sh".to_owned(),
            "-c".to_owned(),
            "exec a --output_dir 'my out'".to_owned(),
        ];
        assert_eq!(typed(&shell, "output_dir").unwrap(), "--output_dir my out");
        let given = ["sh", "-c", "python train.py \"$@\"", "train", "loss=dpo"].map(str::to_owned);
        assert_eq!(typed(&given, "loss").unwrap(), "loss=dpo dpo");
        // The value of another option is no script.
        let value = ["a", "--note", "with --output_dir x"].map(str::to_owned);
        assert_eq!(typed(&value, "output_dir"), None);
    }

    #[test]
    fn a_switch_is_on_unless_its_value_is_false() {
        let on = |text: &str| switches_on(&words(text), "auto_find");
        for text in [
            "a --auto_find",
            "a --auto-find true b",
            "--auto_find=1",
            "--auto_find --b",
        ] {
            assert!(on(text), "{text}");
        }
        for text in [
            "a",
            "auto_find",
            "--auto_find False",
            "--auto_find=no",
            "--auto_find_2",
        ] {
            assert!(!on(text), "{text}");
        }
    }

    #[test]
    fn an_override_that_does_not_reach_the_trainer_is_reported() {
        let text = "per_device_train_batch_size: 8\ngradient_accumulation_steps: 2\n\
                    evenkeel: {objective: sft, batch: {gpus: 2}}\n";
        let request = Request {
            path: "sft.yaml".into(),
            ..Request::default()
        };
        let mut recipe = read_text(&request, text.to_owned()).unwrap();
        let mut lost = |command: &str, over: &str| {
            recipe.spec.trainer.command = words(command);
            lost_override(&recipe, &[over.to_owned()])
        };
        let message = lost("train {recipe}", "max_length=128").unwrap();
        assert!(
            message.starts_with("`max_length=128` would not be in `{recipe}`"),
            "{message}"
        );
        let message = lost("train sft.yaml {args}", "max_length=128").unwrap();
        assert!(
            message.starts_with("`max_length=128` would not reach the external trainer"),
            "{message}"
        );
        let message = lost("train {recipe}", "per_device_train_batch_size=4");
        assert!(message.is_some());
        for (command, over) in [
            ("train {args}", "per_device_train_batch_size=4"),
            ("train {recipe}", "evenkeel.batch.gpus=4"),
            ("train {recipe} --max_length 128", "max_length=128"),
            // Reaches the trainer through the environment.
            ("train", "gradient_accumulation_steps=4"),
        ] {
            assert_eq!(lost(command, over), None, "{command} {over}");
        }
    }
}
