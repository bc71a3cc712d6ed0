//! Finds the command of a script that starts the training.

use super::launcher::{self, Launched};
use crate::recipe::dialects::handbook::{self, keys};
use crate::recipe::dialects::programs;
use crate::recipe::dialects::projects::{self, Project};
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::shell::word::Word;
use crate::recipe::syntax::shell::{Line, Script, Shell, inner};

/// Arguments that set the batch, or name a file that may.
const BATCH: [&str; 6] = [
    "per_device_train_batch_size",
    "per_gpu_train_batch_size",
    "gradient_accumulation_steps",
    "config",
    "deepspeed",
    "deepspeed_config",
];

/// A command that may be a training.
pub(crate) struct Candidate<'w> {
    pub launched: Launched<'w>,
    /// Word after which text may be added.
    pub last: &'w Word,
    pub words: &'w [Word],
    /// The project whose arguments are not read.
    pub project: Option<Given<&'static Project>>,
}

/// How likely a command is the training.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Likely {
    /// It starts a program.
    Program,
    /// A launcher starts it, or it has arguments of a trainer.
    Training,
    /// Its arguments set a batch.
    Batch,
}

impl Candidate<'_> {
    fn likely(&self) -> Likely {
        let launched = &self.launched;
        let options = launched.arguments.iter().filter_map(|word| {
            let option = word.option().filter(|_| word.text.starts_with("--"));
            option.map(|(name, _)| name)
        });
        let options: Vec<String> = options.collect();
        let any = |test: &dyn Fn(&str) -> bool| options.iter().any(|name| test(name));
        let file = |word: &Word| {
            let ends = [".yaml", ".yml", ".json"];
            ends.iter().any(|end| word.text.ends_with(end))
        };
        let hydra = super::hydra::call(launched.script, launched.arguments).is_some();
        let unresolved = launched
            .arguments
            .iter()
            .any(|word| word.unresolved_extent().is_some());
        let named = launched.script.map(|word| word.text.as_ref());
        if self.project.is_some()
            || any(&|name| BATCH.contains(&name))
            || hydra
            || launched.arguments.iter().any(file)
        {
            Likely::Batch
        } else if launched.many
            || any(&|name| keys::kind_in_training(name).is_some())
            || unresolved
            || named.is_some_and(|name| handbook::trainer_of(name).is_some())
        {
            Likely::Training
        } else {
            Likely::Program
        }
    }
}

/// The commands that are most likely a training.
pub(crate) fn candidates(script: &Script) -> Vec<Candidate<'_>> {
    // An inline script whose quoting is not supported is no command.
    let read = |line: &&Line| line.shell != Shell::Unread && !inner::is_harmless(&line.words);
    let mut found: Vec<(Likely, Candidate<'_>)> = script
        .lines
        .iter()
        .filter(read)
        .filter_map(|line| {
            let words = line.words.as_slice();
            if projects::trains_nothing(words) {
                return None;
            }
            let project = projects::of_command(words);
            let launched = launcher::find(words, &script.exports)
                .or_else(|| project.is_some().then(|| launcher::program(words)))?;
            let program = launched.script.map(|word| word.text.as_str());
            if program.is_some_and(programs::trains_nothing) {
                return None;
            }
            let candidate = Candidate {
                last: launched.arguments.last().or(words.last())?,
                launched,
                words,
                project,
            };
            Some((candidate.likely(), candidate))
        })
        .collect();
    let most = found.iter().map(|(likely, _)| *likely).max();
    found.retain(|(likely, _)| Some(*likely) == most);
    found.into_iter().map(|(_, candidate)| candidate).collect()
}

/// Refuses a script with several trainings: one plan cannot fit all of them.
pub(crate) fn refuse_others(candidates: &[Candidate<'_>], diagnostics: &mut Vec<Diagnostic>) {
    let several = candidates.len() > 1 && candidates[0].likely() > Likely::Program;
    if !several {
        return;
    }
    let starts = candidates
        .iter()
        .filter_map(|candidate| candidate.words.first());
    let lines: Vec<String> = starts.map(|word| word.span.line.to_string()).collect();
    let (count, lines) = (lines.len(), lines.join(", "));
    diagnostics.push(Diagnostic::error(
        "global-batch-unknown",
        candidates[1].words.first().map(|word| word.span),
        format!("{count} commands here start a training, at lines {lines}: each has its own batch"),
        "pass one of them after `--`, or a script that starts only one",
    ));
}

/// Refuses an inline script with unsupported quoting that may start the training. Returns whether it did.
pub(crate) fn refuse_unread(
    lines: &[Line],
    candidates: &[Candidate<'_>],
    diagnostics: &mut Vec<Diagnostic>,
) -> bool {
    let unread = lines.iter().filter(|line| line.shell == Shell::Unread);
    let starts = |part: &str| {
        let name = part.rsplit('/').next().unwrap_or_default();
        let launchers = ["torchrun", "accelerate", "deepspeed", "trl"];
        launchers.contains(&name) || name.starts_with("python") || name.ends_with(".py")
    };
    let mentions = |word: &Word| {
        let between = |c: char| c.is_whitespace() || "\"'`;&|()".contains(c);
        !word.unresolved.is_empty() || word.text.split(between).any(starts)
    };
    let trains = |line: &&Line| candidates.is_empty() || line.words.iter().any(mentions);
    let Some(word) = unread
        .filter(trains)
        .find_map(|line| Some(&line.words[inner::script(&line.words)?.at]))
    else {
        return false;
    };
    diagnostics.push(Diagnostic::error(
        "unknown-dialect",
        Some(word.span),
        "this inline script may start a training, but its quoting is not supported",
        "give the inner command itself: `evenkeel plan … -- COMMAND`",
    ));
    true
}
