//! TRL's command line. It starts `accelerate launch` and accepts launcher options among the trainer's.
//!
//! Source: TRL f2cd577 `cli/main.py`.

use super::options::ACCELERATE;
use super::{Launch, Launcher, program};
use crate::recipe::dialects::accelerate::options::{TRL_CONFIG, is_launcher_key};
use crate::recipe::schema::launch::Opt;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::shell::word::Word;
use crate::util::suggest::short;

/// Switches of `accelerate launch`. They are not allowed in a recipe: TRL would pass the key's value as the
/// program.
const TRL_SWITCHES: &[&str] = &["use_deepspeed", "use_fsdp", "multi_gpu"];

/// Whether TRL's command line passes an option to its launcher.
pub(crate) fn is_for_trls_launcher(name: &str) -> bool {
    is_launcher_key(name) || TRL_SWITCHES.contains(&name)
}

/// The error for `--accelerate_config=zero2`, which TRL passes to its launcher as an unknown option.
fn one_word(word: &Word, value: &Word) -> Diagnostic {
    let value = short(&value.text);
    Diagnostic::error(
        "unknown-key",
        Some(word.span),
        format!("TRL refuses `--{TRL_CONFIG}={value}` as an unknown argument"),
        format!("write it as two words, `--{TRL_CONFIG} {value}`"),
    )
}

/// Refuses switches of the launcher in a recipe.
pub(crate) fn refuse_switches(recipe: &Node, reading: &mut Reading) {
    let entries = recipe.entries().unwrap_or_default().iter();
    for entry in entries.filter(|entry| TRL_SWITCHES.contains(&entry.name.as_str())) {
        let name = &entry.name;
        reading.error(
            "unsupported-value",
            Some(entry.name_span),
            format!("TRL passes `{name}` to its launcher with a value, which the launcher starts as the program"),
            format!("give `--{name}` on the command line"),
        );
    }
}

/// Parses `trl sft --config … --num_processes 4`: the trainer's name, then options of trainer and launcher.
pub(super) fn trl(words: &[Word], python: String) -> Launch {
    let mut options = Vec::new();
    let mut refused = None;
    let mut room = words.last().map_or(0, |word| word.span.end);
    for (at, word) in words.iter().enumerate() {
        let option = word.long_option();
        if let Some((name, tied)) = option.filter(|(name, _)| is_for_trls_launcher(name)) {
            let switch = TRL_SWITCHES.contains(&name.as_str());
            let next = words.get(at + 1).filter(|_| !switch);
            let next = next.filter(|next| ACCELERATE.can_be_value(next));
            if let Some(value) = tied.as_ref().filter(|_| name == TRL_CONFIG) {
                refused.get_or_insert_with(|| one_word(word, value));
            }
            let value = tied.or_else(|| next.cloned());
            if !switch && value.is_none() && refused.is_none() {
                refused = ACCELERATE.misused(word, &name);
            }
            room = value.as_ref().map_or(word.span.end, |value| value.span.end);
            let at = word.span;
            options.push(Opt { name, at, value });
        }
    }
    Launch {
        launcher: Launcher::Trl,
        room,
        options,
        refused,
        many: true,
        // The program is the module of this trainer.
        alone: Some(vec![python, "-u".to_owned(), "-m".to_owned()]),
        ..program(words)
    }
}
