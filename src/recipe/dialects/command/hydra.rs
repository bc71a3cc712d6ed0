//! The overrides of a Hydra program: `launch.py loss=dpo model=llama ++model.batch_size=32`. They apply to a
//! tree of configs beside the program.
//!
//! Source: Hydra 1.3, `_internal/utils.py` (`get_args_parser`, `compute_search_path_dir`).

use std::path::{Path, PathBuf};

use crate::recipe::dialects::command::launcher::Launch;
use crate::recipe::dialects::command::unresolved::{self, AS_EXPANDED};
use crate::recipe::schema::placeholder;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::shell::word::Word;

/// The arguments of a Hydra program.
pub(crate) struct Call<'w> {
    /// `key=value`, `+key=value`, `++key=value`, `~key`, and `--multirun`, which a later check refuses.
    pub overrides: Vec<&'w Word>,
    /// The root file of the config tree, relative to the program's directory.
    pub root: PathBuf,
    /// An unresolved word that may hold further overrides, batch numbers among them.
    pub hidden: Option<&'w Word>,
}

/// The overrides that fix the batch, by the last part of their keys.
const SETTLING: [&str; 2] = ["batch_size", "gradient_accumulation_steps"];

/// Parses a command's arguments as those of a Hydra program. `None`: there are no overrides, or some word shows that the
/// program does not use Hydra.
pub(crate) fn call(launch: &Launch) -> Option<Call<'_>> {
    let (mut folder, mut name) = ("config", "config");
    let mut overrides = Vec::new();
    let (mut hidden, mut settled) = (None, [false; 2]);
    let mut words = launch.arguments.iter();
    while let Some(word) = words.next() {
        let text = word.text.as_str();
        let (flag, tied) = match text.split_once('=').filter(|_| text.starts_with('-')) {
            Some((flag, value)) => (flag, Some(value)),
            None => (text, None),
        };
        let mut value = || tied.or_else(|| words.next().map(|word| word.text.as_str()));
        match flag {
            "--config-path" | "-cp" => folder = value()?,
            "--config-name" | "-cn" => name = value()?,
            "--run" | "-r" => {}
            "--multirun" | "-m" => overrides.push(word),
            text if is_override(text) => {
                for (settled, key) in settled.iter_mut().zip(SETTLING) {
                    *settled |= last_part(text) == key && word.unresolved.is_empty();
                }
                overrides.push(word);
            }
            // The word may expand to overrides, which then win over the earlier ones.
            _ if word.is_unresolved() => (hidden, settled) = (Some(word), [false; 2]),
            _ => return None,
        }
    }
    let has_overrides = overrides.iter().any(|word| is_override(&word.text));
    let beside = launch.script().and_then(|script| script.value.parent());
    let name = name.strip_suffix(".yaml").unwrap_or(name);
    has_overrides.then(|| Call {
        overrides,
        root: beside
            .unwrap_or(Path::new(""))
            .join(folder)
            .join(format!("{name}.yaml")),
        hidden: hidden.filter(|_| settled.contains(&false)),
    })
}

/// The last part of a key: `batch_size` of `++model.batch_size=8`.
fn last_part(text: &str) -> &str {
    let key = text.split('=').next().unwrap_or_default();
    key.trim_start_matches('+')
        .rsplit('.')
        .next()
        .unwrap_or_default()
}

/// Quotes an override whose value holds a placeholder (`{run_dir}`), which Hydra would otherwise parse as a
/// mapping.
fn as_text(word: &str) -> String {
    match word.split_once('=') {
        Some((key, value))
            if !placeholder::is_plain(value) && !value.contains(['\'', '"', '$']) =>
        {
            format!("{key}='{value}'")
        }
        _ => word.to_owned(),
    }
}

/// The key for the run's name in both trees. It is mandatory, and may keep the name of a variable.
const RUN: &str = "exp_name";

/// An override for Hydra. An unresolved variable within a value is replaced by its name (`exp_name=run-${LR}`
/// becomes `run-LR`), so that Hydra's interpolation does not apply. A value that is entirely unresolved is
/// removed with a warning, or refused if it is a batch number or chooses a config group.
pub(crate) fn resolved(word: &Word, diagnostics: &mut Vec<Diagnostic>) -> Option<String> {
    if word.text.starts_with('-') {
        return Some("--multirun".to_owned());
    }
    let Some(at) = word.text.find('=').filter(|_| !word.unresolved.is_empty()) else {
        return Some(as_text(&word.text));
    };
    let key = word.text[..at].trim_start_matches('+');
    let value = word.after(at + 1);
    let all = value.is_unresolved();
    let group = !key.contains('.') && !word.text.starts_with('+');
    let named = key == RUN;
    if unresolved::is_counted(last_part(key)) || (all && group && !named) {
        diagnostics.push(unresolved::unknown(key, &value.text, word.span));
        return None;
    }
    if all && !named {
        diagnostics.push(unresolved::left_out(key, &value.text, word.span));
        return None;
    }
    let mut text = word.text.clone();
    for part in word.unresolved.iter().rev() {
        let mut name = text[part.start..part.end].to_owned();
        name.retain(|c| c.is_alphanumeric() || c == '_');
        text.replace_range(part.start..part.end, &name);
    }
    Some(as_text(&text))
}

/// Whether a word changes a value or a group of a Hydra config.
pub(crate) fn is_override(text: &str) -> bool {
    let (key, deletes) = match text.strip_prefix('~') {
        Some(key) => (key, true),
        None => (text.trim_start_matches('+'), false),
    };
    let key = match key.split_once('=') {
        Some((key, _)) => key,
        None if deletes => key,
        None => return false,
    };
    let fits = |c: char| c.is_alphanumeric() || "_-./@".contains(c);
    key.starts_with(|c: char| c.is_alphabetic() || c == '_') && key.chars().all(fits)
}

/// The error for an unresolved word that may hold further overrides of a Hydra program.
pub(crate) fn hidden_overrides(word: &Word) -> Diagnostic {
    Diagnostic::error(
        "global-batch-unknown",
        Some(word.span),
        format!(
            "`{}` is unresolved and may hold further overrides, such as the batch size",
            unresolved::shown(word)
        ),
        format!(
            "{AS_EXPANDED}, or write the overrides of `batch_size` and `gradient_accumulation_steps` after it: \
             the last value counts"
        ),
    )
    .of_batch()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_with_a_placeholder_is_quoted_for_hydra() {
        let same = ["a=1", "a={b: 1}", "a=${b}", "a='{run_dir}'", "~a", "a=[x]"];
        for word in same {
            assert_eq!(as_text(word), word);
        }
        assert_eq!(as_text("+a={run_dir}/x"), "+a='{run_dir}/x'");
    }
}
