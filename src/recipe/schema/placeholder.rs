//! Placeholders (`{name}`) in an external trainer's command. An unknown name stays unchanged, since the
//! trainer may use braces itself. A name that resembles a placeholder is reported as a typo.

use super::spec::Trainer;
use crate::recipe::syntax::shell;
use crate::recipe::syntax::words::Words;
use crate::util::suggest::nearest;

/// The rescaled recipe, a file.
pub const RECIPE: &str = "recipe";
/// The plan's numbers as arguments of the trainer.
pub const ARGS: &str = "args";
/// The arguments that resume the trainer; empty if there is no checkpoint yet.
pub const RESUME_ARGS: &str = "resume_args";
/// The trainer's checkpoint directory.
pub const CHECKPOINT_DIR: &str = "checkpoint_dir";
/// The directory of the run.
pub const RUN_DIR: &str = "run_dir";
/// The number of the job generation.
pub const GENERATION: &str = "generation";
/// The checkpoint to resume from, within the arguments of `trainer.resume`.
pub const CHECKPOINT: &str = "checkpoint";

/// The DeepSpeed config with the plan's numbers, a file.
pub const DEEPSPEED_CONFIG: &str = "deepspeed_config";
/// The working directory of the trainer.
pub const WORKING_DIRECTORY: &str = "working_directory";
/// Shards and replicas of the data-parallel ranks.
pub const SHARDS: [&str; 2] = ["data_shard_size", "data_replicate_size"];
/// A brace, for a text that would be a placeholder otherwise. It is filled in last, with those of a rank.
pub const LEFT_BRACE: &str = "left_brace";
/// Placeholders whose values differ between ranks or hosts.
pub const OF_A_RANK: [&str; 4] = ["local_rank", "local_world_size", "node_rank", "nodes"];

/// The placeholders of `trainer.command` and `trainer.environment`.
const IN_COMMAND: Words = Words(
    "args checkpoint_dir data_parallel_size data_replicate_size data_shard_size deepspeed_config generation \
     global_batch_size gradient_accumulation_steps left_brace local_rank local_world_size node_rank nodes \
     per_device_batch_size recipe resume_args run_dir working_directory world_size",
);

/// A piece of a word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    Text(&'a str),
    /// A name in braces, a placeholder or not.
    Name(&'a str),
}

/// Splits a word into its pieces.
pub fn pieces(word: &str) -> Vec<Piece<'_>> {
    let is_name =
        |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_');
    let mut pieces = Vec::new();
    let mut rest = word;
    let mut from = 0;
    while let Some(open) = rest[from..].find('{').map(|at| from + at) {
        let name = rest[open + 1..].split_once('}').map(|(name, _)| name);
        match name.filter(|name| is_name(name)) {
            Some(name) => {
                if open > 0 {
                    pieces.push(Piece::Text(&rest[..open]));
                }
                pieces.push(Piece::Name(name));
                rest = &rest[open + name.len() + 2..];
                from = 0;
            }
            None => from = open + 1,
        }
    }
    if !rest.is_empty() {
        pieces.push(Piece::Text(rest));
    }
    pieces
}

/// The value of a placeholder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Value {
    /// One word, inserted unchanged.
    Word(String),
    /// Any number of words. Within a longer word, an inline script, they are quoted for the shell.
    Words(Vec<String>),
}

/// Replaces the placeholders of a command. Names without a value stay unchanged.
pub fn fill(command: &[String], value_of: impl Fn(&str) -> Option<Value>) -> Vec<String> {
    let mut filled = Vec::new();
    for word in command {
        let pieces = pieces(word);
        if let [Piece::Name(name)] = pieces.as_slice()
            && let Some(Value::Words(words)) = value_of(name)
        {
            filled.extend(words);
            continue;
        }
        let text = |piece: &Piece<'_>| match piece {
            Piece::Text(text) => (*text).to_owned(),
            Piece::Name(name) => match value_of(name) {
                Some(Value::Word(word)) => word,
                Some(Value::Words(words)) => shell::join(&words),
                None => format!("{{{name}}}"),
            },
        };
        filled.push(pieces.iter().map(text).collect());
    }
    filled
}

/// Whether a command uses a placeholder.
pub fn is_used(command: &[String], name: &str) -> bool {
    let mut pieces = command.iter().flat_map(|word| pieces(word));
    pieces.any(|piece| piece == Piece::Name(name))
}

/// A text without placeholders as a word of a command or an environment.
pub fn literal(text: &str) -> String {
    if is_plain(text) {
        text.to_owned()
    } else {
        text.replace('{', &format!("{{{LEFT_BRACE}}}"))
    }
}

/// Whether a word holds no name in braces.
pub fn is_plain(word: &str) -> bool {
    pieces(word)
        .iter()
        .all(|piece| matches!(piece, Piece::Text(_)))
}

/// Whether a command uses a placeholder for the plan's numbers.
pub fn takes_numbers(command: &[String]) -> bool {
    let numbers =
        Words("recipe args deepspeed_config per_device_batch_size gradient_accumulation_steps");
    numbers.iter().any(|name| is_used(command, name))
}

/// Help for a wrong placeholder.
pub const LISTED: &str = "docs/external-trainer.md lists the placeholders";

/// The key with a wrong placeholder, and the problem.
pub fn flaw(trainer: &Trainer) -> Option<(&'static str, String)> {
    let typo = |words: &[String], known: Words| {
        let all: Vec<&str> = known.iter().collect();
        let mut names = words.iter().flat_map(|word| pieces(word));
        names.find_map(|piece| match piece {
            Piece::Name(name) if !known.has(name) => {
                let meant = nearest(name, &all)?;
                Some(format!("has `{{{name}}}`; did you mean `{{{meant}}}`?"))
            }
            _ => None,
        })
    };
    if let Some(problem) = typo(&trainer.command, IN_COMMAND) {
        return Some(("trainer.command", problem));
    }
    let values: Vec<String> = trainer.environment.values().cloned().collect();
    if let Some(problem) = typo(&values, IN_COMMAND) {
        return Some(("trainer.environment", problem));
    }
    if let Some(problem) = typo(&trainer.resume, Words(CHECKPOINT)) {
        return Some(("trainer.resume", problem));
    }
    let lacks = !trainer.resume.is_empty() && !is_used(&trainer.resume, CHECKPOINT);
    lacks.then(|| {
        let problem = "lacks `{checkpoint}`, so the trainer cannot know which checkpoint to load";
        ("trainer.resume", problem.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_join_to_the_whole_word(word in "\\PC{0,12}|[{}a-z_$]{0,24}") {
            let text = |piece: Piece<'_>| match piece {
                Piece::Text(text) => text.to_owned(),
                Piece::Name(name) => format!("{{{name}}}"),
            };
            let whole: String = pieces(&word).into_iter().map(text).collect();
            prop_assert_eq!(&whole, &word);
            let filled = fill(std::slice::from_ref(&word), |_| None);
            prop_assert_eq!(filled, [word]);
        }
    }

    #[test]
    fn only_lower_case_names_in_braces_are_placeholders() {
        use Piece::{Name, Text};
        assert_eq!(pieces("{args}"), [Name("args")]);
        assert_eq!(
            pieces("--b={world_size},{{recipe}x"),
            [
                Text("--b="),
                Name("world_size"),
                Text(",{"),
                Name("recipe"),
                Text("x")
            ]
        );
        for plain in ["", "{", "}{", "{}", "{A}", r#"{"a": 1}"#, "${HOME}", "a{b"] {
            let expected = if plain.is_empty() {
                vec![]
            } else {
                vec![Text(plain)]
            };
            assert_eq!(pieces(plain), expected, "{plain}");
        }
    }

    #[test]
    fn a_lone_placeholder_becomes_words_and_one_within_a_word_is_quoted() {
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        let value_of = |name: &str| match name {
            "args" => Some(Value::Words(words(&["--name", "my run"]))),
            "recipe" => Some(Value::Word("my recipe.yaml".to_owned())),
            "resume_args" => Some(Value::Words(Vec::new())),
            _ => None,
        };
        let command = words(&[
            "run",
            "{args}",
            "{resume_args}",
            "sh -c x {args}",
            "--recipe={recipe}",
            "{other}",
        ]);
        assert_eq!(
            fill(&command, value_of),
            [
                "run",
                "--name",
                "my run",
                "sh -c x --name 'my run'",
                "--recipe=my recipe.yaml",
                "{other}"
            ]
        );
    }

    #[test]
    fn a_typo_is_reported_and_an_unknown_name_is_not() {
        let flaw = |command: &[&str], resume: &[&str]| {
            let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
            flaw(&Trainer {
                command: words(command),
                resume: words(resume),
                ..Trainer::default()
            })
            .map(|(key, problem)| format!("{key} {problem}"))
        };
        assert_eq!(flaw(&["train.py", "--name={step}", "{args}"], &[]), None);
        assert_eq!(
            flaw(&["train.py", "{resume_arg}"], &[]).unwrap(),
            "trainer.command has `{resume_arg}`; did you mean `{resume_args}`?"
        );
        assert_eq!(flaw(&["train.py"], &["--from", "{checkpoint}"]), None);
        let problem = flaw(&["train.py"], &["--resume"]).unwrap();
        assert!(problem.starts_with("trainer.resume lacks"), "{problem}");
    }
}
