//! TRL's command line. It starts `accelerate launch` and accepts launcher options among the trainer's.
//!
//! Source: TRL f2cd577 `cli/main.py`.

use super::known::ACCELERATE;
use super::options::{Opt, value};
use super::{Launched, Launcher, file, program};
use crate::recipe::dialects::accelerate::Config;
use crate::recipe::dialects::handbook::keys::{TRL_CONFIG, is_launcher_key};
use crate::recipe::syntax::shell::word::Word;

/// Switches of `accelerate launch`. They are not allowed in a recipe: TRL would pass the key's value as the
/// program.
const TRL_SWITCHES: &[&str] = &["use_deepspeed", "use_fsdp", "multi_gpu"];

/// Whether TRL's command line passes an option to its launcher.
pub(crate) fn is_for_trls_launcher(name: &str) -> bool {
    is_launcher_key(name) || TRL_SWITCHES.contains(&name)
}

/// Parses `trl sft --config … --num_processes 4`: the trainer's name, then options of trainer and launcher.
pub(super) fn trl(words: &[Word], python: String) -> Launched<'_> {
    let mut options = Vec::new();
    let mut refused = None;
    let mut room = words.last().map_or(0, |word| word.span.end);
    for (at, word) in words.iter().enumerate() {
        let option = word.option().filter(|_| word.text.starts_with("--"));
        if let Some((name, tied)) = option.filter(|(name, _)| is_for_trls_launcher(name)) {
            let switch = TRL_SWITCHES.contains(&name.as_str());
            let next = words.get(at + 1).filter(|_| !switch);
            let next = next.filter(|next| ACCELERATE.can_be_value(next));
            let value = tied.or_else(|| next.cloned());
            if !switch && value.is_none() && refused.is_none() {
                refused = ACCELERATE.misused(word, &name);
            }
            room = value.as_ref().map_or(word.span.end, |value| value.span.end);
            let at = word.span;
            options.push(Opt { name, at, value });
        }
    }
    let named = value(&options, &[TRL_CONFIG]);
    let named = named.map(|word| Config::of_trl(word.text.clone(), word.span));
    Launched {
        launcher: Launcher::Trl,
        room,
        config: named.or_else(|| file(&options)),
        options,
        refused,
        mixed: true,
        many: true,
        // The program is the module of this trainer.
        alone: Some(vec![python, "-u".to_owned(), "-m".to_owned()]),
        ..program(words)
    }
}
