//! Finds the command of a script that starts the training.

use super::launcher::{self, Launch, Launcher};
use super::world;
use crate::recipe::dialects::handbook::{self, keys};
use crate::recipe::dialects::programs;
use crate::recipe::dialects::projects::{self, Project};
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::shell::word::{self, Word};
use crate::recipe::syntax::shell::{Form, Line, Shell, inner};
use crate::recipe::syntax::source::{FileId, Span};
use crate::recipe::syntax::words::Words;
use crate::util::suggest::short;

/// Arguments that set the batch, or name a file that may.
const BATCH: Words = Words(
    "per_device_train_batch_size per_gpu_train_batch_size gradient_accumulation_steps config deepspeed \
     deepspeed_config",
);

/// A command that may be a training.
pub(crate) struct Candidate<'w> {
    pub launch: Launch,
    /// The last word, after which text may be added.
    pub last: Span,
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
        let launch = &self.launch;
        let mut names = Vec::new();
        for word in &launch.arguments {
            if let Some((name, _)) = word.long_option() {
                names.push(name);
            }
        }
        // A program that no launcher starts has its data in JSON more often than its settings.
        let is_file = |word: &Word| {
            let ends = [".yaml", ".yml", ".json"];
            let ends = if launch.many { &ends[..] } else { &ends[..2] };
            ends.iter().any(|end| word.text.ends_with(end))
        };
        let trainer = launch.script().map(|script| script.value);
        if self.project.is_some()
            || names.iter().any(|name| BATCH.has(name))
            || super::hydra::call(launch).is_some()
            || launch.arguments.iter().any(is_file)
        {
            Likely::Batch
        } else if launch.many
            || names
                .iter()
                .any(|name| keys::kind_in_training(name).is_some())
            || launch
                .arguments
                .iter()
                .any(|word| !word.unresolved.is_empty())
            || trainer.is_some_and(|name| handbook::trainer_of(name).is_some())
        {
            Likely::Training
        } else {
            Likely::Program
        }
    }
}

/// Whether the most likely commands have a launcher or arguments of a training.
pub(crate) fn is_training(candidates: &[Candidate<'_>]) -> bool {
    candidates
        .first()
        .is_some_and(|candidate| candidate.likely() > Likely::Program)
}

/// The commands that are most likely a training.
pub(crate) fn candidates<'w>(lines: &'w [Line], text: (&str, FileId)) -> Vec<Candidate<'w>> {
    let candidate = |line| candidate(line, lines, text);
    let mut found: Vec<Candidate<'_>> = lines.iter().filter_map(candidate).collect();
    let most = found.iter().map(Candidate::likely).max();
    found.retain(|candidate| Some(candidate.likely()) == most);
    found
}

/// The command of one of the lines, if it may be a training.
fn candidate<'w>(line: &'w Line, lines: &[Line], text: (&str, FileId)) -> Option<Candidate<'w>> {
    let words = line.words.as_slice();
    // An inline script whose quoting is not supported is no command.
    if line.shell == Shell::Unread || inner::is_harmless(words) || projects::trains_nothing(words) {
        return None;
    }
    // The rest of a command that a comment or a missing `\` has ended.
    if lines.len() > 1 && begins_with_option(line) {
        return None;
    }
    let project = projects::of_command(words);
    let found = launcher::find(words);
    if inner::script_file(words).is_some() && found.as_ref().is_none_or(|launch| !launch.many) {
        return None;
    }
    let unknown = || Launch {
        words: words.to_vec(),
        alone: None,
        ..launcher::program(words)
    };
    let mut launch = found.or_else(|| project.is_some().then(unknown))?;
    let program = launch.program.as_ref();
    if program.is_some_and(|word| programs::trains_nothing(&word.text)) {
        return None;
    }
    let mut others = lines.iter().filter(|other| !std::ptr::eq(*other, line));
    let given = |name| launch.option(&[name]).is_some();
    if launch.launcher == Launcher::Torchrun
        && !(given("nnodes") && given("nproc_per_node"))
        && others.any(launcher::sets_defaults)
    {
        launch.world = None;
    }
    // Programs have no use for the blank. It would be the last switch's value.
    launch.arguments.pop_if(|word| is_escaped_end(text.0, word));
    if launch.world.is_none() {
        launch.world = world::of(&launch, line, lines, text);
    }
    Some(Candidate {
        last: launch.arguments.last().or(words.last())?.span,
        launch,
        words,
        project,
    })
}

/// Whether a line begins with an option, so that it belongs to the command before it.
pub(crate) fn begins_with_option(line: &Line) -> bool {
    line.words
        .first()
        .is_some_and(|word| word::is_long_option(&word.text))
}

/// Warns of a training whose arguments continue on a line that the shell takes for another command.
pub(crate) fn warn_of_torn(
    lines: &[Line],
    training: &Candidate<'_>,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let at = lines
        .iter()
        .position(|line| std::ptr::eq(line.words.as_slice(), training.words));
    let next = at
        .and_then(|at| lines.get(at + 1))
        .filter(|line| begins_with_option(line));
    if let Some(word) = next.and_then(|line| line.words.first()) {
        let message = format!("{}, without it and what follows", torn_message(word));
        diagnostics.push(Diagnostic::warning(
            "yaml-syntax",
            Some(word.span),
            message,
            TORN,
        ));
    }
}

/// The way out for a line that begins with an option.
const TORN: &str = "end the lines before it with `\\`, without a comment or a blank after it";

fn torn_message(word: &Word) -> String {
    let option = short(&word.text);
    format!("this line begins with `{option}`: the command before it has ended")
}

/// The error for a line that begins with an option.
pub(crate) fn torn(word: &Word) -> Diagnostic {
    Diagnostic::error("unknown-dialect", Some(word.span), torn_message(word), TORN)
}

/// The error for a script that only runs another one.
pub(crate) fn other_script(lines: &[Line]) -> Option<Diagnostic> {
    // What comes before it most often prepares.
    let file = lines
        .iter()
        .rev()
        .find_map(|line| inner::script_file(&line.words))?;
    let path = word::join(std::slice::from_ref(&file.text));
    Some(Diagnostic::error(
        "unknown-dialect",
        Some(file.span),
        format!(
            "`{}` is another script, which is not read from here",
            short(&file.text)
        ),
        format!(
            "plan that script: `evenkeel plan {path}`, with the values that its arguments have as NAME=VALUE"
        ),
    ).of_batch())
}

/// Refuses a script with several trainings: one plan cannot fit all of them.
///
/// `is_script`: they are in a file, so that a line names one of them.
pub(crate) fn refuse_others(
    candidates: &[Candidate<'_>],
    is_script: bool,
    diagnostics: &mut Vec<Diagnostic>,
) {
    if candidates.len() < 2 || !is_training(candidates) {
        return;
    }
    let starts = candidates
        .iter()
        .filter_map(|candidate| candidate.words.first());
    let lines: Vec<String> = starts.map(|word| word.span.line.to_string()).collect();
    let launched = candidates
        .iter()
        .position(|candidate| candidate.launch.many);
    let first = &lines[launched.unwrap_or(0)];
    let help = if is_script {
        format!("plan one of them, `evenkeel plan SCRIPT {LINE}={first}`, or pass it after `--`")
    } else {
        "pass one of them after `--`, or a script that starts only one".to_owned()
    };
    let (count, lines) = (lines.len(), lines.join(", "));
    diagnostics.push(Diagnostic::error(
        "global-batch-unknown",
        candidates[1].words.first().map(|word| word.span),
        format!("{count} commands here start a training, at lines {lines}: each has its own batch"),
        help,
    ));
}

/// The override that gives the line of a script's training, if it starts several.
pub(crate) const LINE: &str = "evenkeel.line";

/// Keeps the training at a line of a script that starts several.
pub(crate) fn choose(
    candidates: &mut Vec<Candidate<'_>>,
    line: &str,
    diagnostics: &mut Vec<Diagnostic>,
) {
    let first = |candidate: &Candidate<'_>| candidate.words.first().map(|word| word.span);
    let spans = |candidate: &Candidate<'_>| {
        let lines = first(candidate).map(|start| start.line..=candidate.last.line);
        lines.is_some_and(|lines| line.parse().is_ok_and(|line| lines.contains(&line)))
    };
    if candidates.iter().any(spans) {
        candidates.retain(spans);
        return;
    }
    let lines: Vec<String> = candidates
        .iter()
        .filter_map(first)
        .map(|start| start.line.to_string())
        .collect();
    diagnostics.push(Diagnostic::error(
        "unknown-value",
        candidates.first().and_then(first),
        format!("no command at line `{}` starts a training", short(line)),
        format!("the lines of those that do: {}", lines.join(", ")),
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
        Launcher::NAMED
            .iter()
            .any(|launcher| launcher.name() == name)
            || name.starts_with("python")
            || name.ends_with(".py")
    };
    let mentions = |word: &Word| {
        let between = |c: char| c.is_whitespace() || "\"'`;&|()".contains(c);
        !word.unresolved.is_empty() || word.text.split(between).any(starts)
    };
    let trains = |line: &&Line| candidates.is_empty() || line.words.iter().any(mentions);
    let Some(word) = unread
        .filter(trains)
        .find_map(|line| Some(&line.words[inner::script(&line.words)?]))
    else {
        return false;
    };
    diagnostics.push(
        Diagnostic::error(
            "unknown-dialect",
            Some(word.span),
            "this inline script may start a training, but its quoting is not supported",
            "give the inner command itself: `evenkeel plan … -- COMMAND`",
        )
        .of_batch(),
    );
    true
}

// White space that does not separate words: a shell treats a carriage return as an ordinary character, and so every
// blank except space and tab (POSIX.1-2024, Shell Command Language, 2.3; bash 5.2 `shell_blank`).

/// Refuses a script with CRLF line ends.
pub(crate) fn refuse_line_ends(
    text: &str,
    form: Form,
    file: FileId,
    diagnostics: &mut Vec<Diagnostic>,
) -> bool {
    let Some(at) = text.find("\r\n").filter(|_| form == Form::Script) else {
        return false;
    };
    diagnostics.push(Diagnostic::error(
            "yaml-syntax",
            Some(Span::of(text, at..at + 1, file)),
            "the lines of this script end in CRLF: the shell treats the carriage return as part of a word, and a `\\` before it does not continue the line",
            "save it with LF line ends (`dos2unix`, `sed -i 's/\\r$//'`)",
        ));
    true
}

/// Refuses a training command with a word that holds white space outside quotes.
pub(crate) fn refuse_blanks(
    form: Form,
    training: &Candidate<'_>,
    diagnostics: &mut Vec<Diagnostic>,
) {
    // White space within quotes is intended.
    let joined = |word: &&Word| word.text[..word.literal].chars().any(char::is_whitespace);
    if form == Form::Script
        && let Some(word) = training.words.iter().find(joined)
    {
        diagnostics.extend(blank(&word.text, word.span));
    }
}

/// Warns of a `\` before a blank at the end of a line: the command ends there. Returns whether it
/// did.
pub(crate) fn warn_of_escaped_end(
    text: &str,
    form: Form,
    training: &Candidate<'_>,
    diagnostics: &mut Vec<Diagnostic>,
) -> bool {
    if let Some(last) = training.words.last()
        && form == Form::Script
        && is_escaped_end(text, last)
    {
        diagnostics.push(Diagnostic::warning(
            "yaml-syntax",
            Some(last.span),
            "a blank follows this `\\`, so that it does not continue the line: the command ends here, without the arguments below",
            "remove the blank if the next line belongs to the command",
        ));
        return true;
    }
    false
}

/// Whether a word is an escaped blank at the end of its line, which was meant to continue it.
fn is_escaped_end(text: &str, word: &Word) -> bool {
    let written = text.get(word.span.start..word.span.end);
    let rest = text.get(word.span.end..).unwrap_or_default();
    let rest = rest.trim_start_matches([' ', '\t']);
    written.is_some_and(|written| ["\\ ", "\\\t"].contains(&written)) && rest.starts_with('\n')
}

/// The error for white space in a text that does not separate words. `None`: there is none.
pub(crate) fn blank(text: &str, at: Span) -> Option<Diagnostic> {
    let separates = |c: char| matches!(c, ' ' | '\t' | '\n');
    let blank = text.chars().find(|c| c.is_whitespace() && !separates(*c))?;
    let blank = u32::from(blank);
    Some(Diagnostic::error(
        "yaml-syntax",
        Some(at),
        format!("U+{blank:04X} looks like a space, but the shell does not split words at it"),
        "replace it with a space, or quote it if it is intended",
    ))
}
