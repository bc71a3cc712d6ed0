//! The options of launchers, parsed as `argparse` does: a name may be abbreviated if its parser allows it, and a
//! short option may hold its value (`-r3`).
//!
//! Sources: Python 3.11 `argparse.py` (`_parse_optional`, `_get_option_tuples`, `consume_optional`); torch 2.9
//! `distributed/run.py`, `distributed/launch.py`; DeepSpeed edaa722 `launcher/runner.py`. `accelerate/options.rs`
//! has those of `accelerate launch`.

use crate::recipe::dialects::accelerate::options::{self, Kind, Known, OPTIONS};
use crate::recipe::dialects::handbook::keys;
use crate::recipe::schema::launch::Opt;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::shell::word::{UnresolvedExtent, Word};
use crate::recipe::syntax::words::Words;
use crate::util::suggest::{did_you_mean, short};

/// The options of a program that starts another one.
pub(in crate::recipe::dialects::command) struct Options {
    /// The program's name in messages about unknown options. `None`: unknown options are not checked.
    pub who: Option<&'static str>,
    /// Options without a value. A single letter follows one dash.
    pub switches: Words,
    /// Options with a value.
    pub valued: Words,
    /// Further options, with their types.
    pub typed: &'static [Known],
    /// Each option may also be written with `-` for `_`.
    pub dashes: bool,
    /// A unique prefix of a name is accepted (`argparse`, `allow_abbrev`).
    pub cut_short: bool,
}

pub(in crate::recipe::dialects::command) const TORCHRUN: Options = Options {
    who: Some("torchrun"),
    switches: Words("h help standalone no_python module m run_path virtual_local_rank"),
    valued: Words(
        "nnodes nproc_per_node node_rank rdzv_backend rdzv_endpoint rdzv_id rdzv_conf \
         max_restarts monitor_interval start_method event_log_handler role log_dir r redirects t \
         tee local_ranks_filter master_addr master_port local_addr logs_specs numa_binding \
         duplicate_stdout_filters duplicate_stderr_filters signals_to_handle",
    ),
    typed: &[],
    dashes: true,
    cut_short: true,
};

/// `python -m torch.distributed.launch`, with one more switch.
pub(in crate::recipe::dialects::command) const TORCH_LAUNCH: Options = Options {
    who: Some("torch.distributed.launch"),
    switches: Words("h help standalone no_python module m run_path virtual_local_rank use_env"),
    ..TORCHRUN
};

pub(in crate::recipe::dialects::command) const DEEPSPEED: Options = Options {
    who: Some("DeepSpeed"),
    switches: Words(
        "h help no_python no_local_rank module save_pid force_multi no_ssh_check \
         elastic_training bind_cores_to_rank no_ssh quiet q",
    ),
    valued: Words(
        "hostfile H include i exclude e num_nodes min_elastic_nodes max_elastic_nodes num_gpus \
         num_accelerators master_port master_addr node_rank launcher launcher_args ssh_port \
         autotuning venv_script bind_core_list log_level enable_each_rank_log comment account",
    ),
    typed: &[],
    dashes: false,
    cut_short: true,
};

pub(in crate::recipe::dialects::command) const ACCELERATE: Options = Options {
    who: Some("accelerate launch"),
    switches: options::SWITCHES,
    valued: options::VALUED,
    typed: OPTIONS,
    dashes: true,
    cut_short: false,
};

pub(in crate::recipe::dialects::command) const PYTHON: Options = Options {
    who: None,
    switches: Words("u O B E I s S v q b d i x P"),
    valued: Words("X W m"),
    typed: &[],
    dashes: false,
    cut_short: false,
};

/// Source: Slurm 25.05 `srun(1)`. The options that choose the allocation, its devices, the tasks and the output.
pub(in crate::recipe::dialects::command) const SRUN: Options = Options {
    who: Some("srun"),
    switches: Words(
        "l label u unbuffered K kill_on_bad_exit v verbose Q quiet O overcommit overlap exact exclusive",
    ),
    valued: Words(
        "N nodes n ntasks ntasks_per_node J job_name A account p partition q qos t time o output e error w \
         nodelist c cpus_per_task G gpus gpus_per_node gpus_per_task gres mem mpi jobid cpu_bind gpu_bind \
         comment",
    ),
    typed: &[],
    dashes: true,
    cut_short: false,
};

/// The options of a launcher.
pub(in crate::recipe::dialects::command) struct Given<'w> {
    /// From left to right.
    pub options: Vec<Opt>,
    /// An unresolved word that may hold further options.
    pub unresolved: Option<&'w Word>,
    /// The words after the options.
    pub rest: &'w [Word],
    /// Why the launcher refuses an option.
    pub refused: Option<Diagnostic>,
}

/// The options in one word, and the value in it for the last of them.
type Match = (Vec<&'static str>, Option<Word>);

impl Options {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        let typed = self.typed.iter().map(|(name, ..)| *name);
        self.switches.iter().chain(self.valued.iter()).chain(typed)
    }

    fn takes_value(&self, name: &str) -> bool {
        let mut typed = self.typed.iter();
        self.valued.has(name)
            || typed.any(|(known, kind, ..)| *known == name && !matches!(kind, Kind::Switch))
    }

    /// The accepted spellings of a name.
    fn spellings(&self, name: &str) -> Vec<String> {
        if name.len() == 1 {
            return vec![format!("-{name}")];
        }
        let mut spellings = vec![format!("--{name}")];
        if self.dashes && name.contains('_') {
            spellings.push(format!("--{}", name.replace('_', "-")));
        }
        spellings
    }

    /// `None`: no option, or a prefix of several.
    fn find(&self, word: &Word) -> Option<Match> {
        let text = word.text.as_str();
        let (written, tied) = match text.split_once('=') {
            Some((written, _)) => (written, Some(word.after(written.len() + 1))),
            None => (text, None),
        };
        let is = |name: &&str| self.spellings(name).iter().any(|it| it == written);
        if let Some(name) = self.names().find(is) {
            return Some((vec![name], tied));
        }
        if !text.starts_with("--") {
            return self.letters(word);
        }
        let mut begun = Vec::new();
        for name in self.names().filter(|_| self.cut_short) {
            let spellings = self.spellings(name);
            let fits = spellings.iter().filter(|it| it.starts_with(written));
            begun.extend(fits.map(|_| name));
        }
        match begun.as_slice() {
            [name] => Some((vec![name], tied)),
            _ => None,
        }
    }

    /// Short options in one word (`-r3`, `-uB`). The first that takes a value takes the rest of the word.
    fn letters(&self, word: &Word) -> Option<Match> {
        let mut found = Vec::new();
        for (at, letter) in word.text.char_indices().skip(1) {
            let is = |name: &&str| name.chars().eq([letter]);
            let name = self.names().find(is)?;
            found.push(name);
            let left = at + letter.len_utf8();
            if self.takes_value(name) && left < word.text.len() {
                return Some((found, Some(word.after(left))));
            }
        }
        Some((found, None))
    }

    /// Whether a word can be an option's value.
    pub fn can_be_value(&self, word: &Word) -> bool {
        let text = word.text.as_str();
        let option = text.len() > 1 && text.starts_with('-') && !text.contains(' ');
        self.who.is_none() || !option || text.parse::<f64>().is_ok()
    }

    fn unknown(&self, word: &Word) -> Option<Diagnostic> {
        let who = self.who?;
        let text = word.text.split('=').next().unwrap_or_default();
        let known: Vec<String> = self.names().flat_map(|name| self.spellings(name)).collect();
        let known = known.iter().map(String::as_str);
        let shown = short(text);
        Some(Diagnostic::error(
            "unknown-key",
            Some(word.span),
            format!(
                "{who} has no option `{shown}`, or several with this beginning, and refuses to start"
            ),
            did_you_mean(text, known),
        ))
    }

    /// The error for a switch with a value, or another option without one.
    pub fn misused(&self, word: &Word, name: &str) -> Option<Diagnostic> {
        let who = self.who?;
        let text = short(&word.text);
        let (message, help) = if self.takes_value(name) {
            ("takes a value, but has none", "add the value")
        } else {
            ("takes no value", "remove the value")
        };
        Some(Diagnostic::error(
            "unsupported-value",
            Some(word.span),
            format!("`{text}` of {who} {message}"),
            help,
        ))
    }
}

/// Whether a trainer's arguments follow without a program. Documentation examples sometimes omit its name.
fn lacks_program(rest: &[Word]) -> bool {
    let first = rest.first().and_then(Word::option);
    let of_trainer = first.is_some_and(|(name, _)| keys::is_known(&name));
    of_trainer && !rest.iter().any(|word| word.text.ends_with(".py"))
}

/// Parses the options at the start of `words`. An unresolved word of unknown length counts as further
/// options, not as the program.
pub(in crate::recipe::dialects::command) fn options<'w>(
    words: &'w [Word],
    known: &Options,
) -> Given<'w> {
    let mut found = Vec::new();
    let mut refused = None;
    // The first unresolved word, the rest from the last one on, and the number of options before the last one.
    let mut unresolved: Option<(&Word, &[Word], usize)> = None;
    let mut rest = words;
    while let Some((word, after)) = rest.split_first() {
        let named = word.text.find('=').unwrap_or(word.text.len());
        let hidden = word.text.starts_with('-') && word.unresolved.iter().any(|h| h.start < named);
        if hidden || word.unresolved_extent() == Some(UnresolvedExtent::Number) && !after.is_empty()
        {
            let first = unresolved.map_or(word, |(first, ..)| first);
            unresolved = Some((first, rest, found.len()));
            rest = after;
            continue;
        }
        if word.text == "--" && known.who.is_some() {
            rest = after;
            break;
        }
        if word.text.len() < 2 || !word.text.starts_with('-') {
            break;
        }
        let Some((names, mut tied)) = known.find(word) else {
            // After an unresolved word it may belong to the program.
            if unresolved.is_none() && !lacks_program(rest) {
                refused = known.unknown(word);
            }
            break;
        };
        rest = after;
        let last = names.last().copied().unwrap_or_default();
        for name in names {
            let takes_value = known.takes_value(name);
            let mut value = tied.take_if(|_| name == last);
            if takes_value
                && value.is_none()
                && let Some((next, after)) = rest.split_first()
                && known.can_be_value(next)
            {
                value = Some(next.clone());
                rest = after;
            }
            if takes_value != value.is_some() && refused.is_none() {
                refused = known.misused(word, name);
            }
            // DeepSpeed has two names for one option.
            let name = match name {
                "num_accelerators" => "num_gpus".to_owned(),
                name => name.to_owned(),
            };
            let at = word.span;
            found.push(Opt { name, at, value });
        }
    }
    // If arguments follow, the last unresolved word is the program itself.
    let mut hidden = unresolved.map(|(first, ..)| first);
    if let Some((first, last, before)) = unresolved
        && rest.first().is_none_or(|word| word.text.starts_with('-'))
    {
        found.truncate(before);
        hidden = Some(first).filter(|first| first.span != last[0].span);
        rest = last;
    }
    Given {
        options: found,
        unresolved: hidden,
        rest,
        refused,
    }
}

/// The last option with one of the names; it overrides earlier ones.
pub(crate) fn option<'o>(options: &'o [Opt], names: &[&str]) -> Option<&'o Opt> {
    let mut options = options.iter().rev();
    options.find(|option| names.contains(&option.name.as_str()))
}

/// The value of [`option`].
pub(crate) fn value<'o>(options: &'o [Opt], names: &[&str]) -> Option<&'o Word> {
    option(options, names)?.value.as_ref()
}
