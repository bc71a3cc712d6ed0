//! Parses the options at the start of a launcher's arguments as `argparse` does: a name may be abbreviated
//! if its parser allows it, and a short option may hold its value (`-r3`).
//!
//! Source: Python 3.11 `argparse.py` (`_parse_optional`, `_get_option_tuples`, `consume_optional`).

use super::known::Options;
use crate::recipe::dialects::handbook::keys;
use crate::recipe::syntax::diagnostic::Diagnostic;
use crate::recipe::syntax::shell::word::{UnresolvedExtent, Word};
use crate::recipe::syntax::source::Span;
use crate::util::suggest::{did_you_mean, short};

/// An option of a launcher.
#[derive(Debug, Clone)]
pub(crate) struct Opt {
    /// The name, with `_` for every `-`.
    pub name: String,
    pub at: Span,
    /// The value; `None` for switches.
    pub value: Option<Word>,
}

/// Whether a trainer's arguments follow without a program. Documentation examples sometimes omit its name.
fn lacks_program(rest: &[Word]) -> bool {
    let first = rest.first().and_then(Word::option);
    let of_trainer = first.is_some_and(|(name, _)| keys::is_known(&name));
    of_trainer && !rest.iter().any(|word| word.text.ends_with(".py"))
}

/// The options of a launcher.
pub(super) struct Given<'w> {
    /// From left to right.
    pub options: Vec<Opt>,
    /// An unresolved word that may hold further options.
    pub unresolved: Option<&'w Word>,
    /// The words after the options.
    pub rest: &'w [Word],
    /// Why the launcher refuses an option.
    pub refused: Option<Diagnostic>,
}

/// Aliases of options, each with the name that replaces it.
const SAME: [(&str, &str); 1] = [("num_accelerators", "num_gpus")];

/// How the parser understands a word.
enum OptionMatch {
    /// Options. The last one may have its value in the same word.
    Options(Vec<&'static str>, Option<Word>),
    /// An ambiguous prefix, with the options that it fits.
    Several(Vec<String>),
    Unknown,
}

impl Options {
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

    fn find(&self, word: &Word) -> OptionMatch {
        let text = word.text.as_str();
        let (written, tied) = match text.split_once('=') {
            Some((written, _)) => (written, Some(word.after(written.len() + 1))),
            None => (text, None),
        };
        let is = |name: &&str| {
            self.spellings(name)
                .iter()
                .any(|spelling| spelling == written)
        };
        if let Some(name) = self.names().find(is) {
            return OptionMatch::Options(vec![name], tied);
        }
        if !text.starts_with("--") {
            return self.letters(word);
        }
        let mut begun = Vec::new();
        for name in self.names().filter(|_| self.cut_short) {
            let spellings = self.spellings(name).into_iter();
            begun.extend(
                spellings
                    .filter(|spelling| spelling.starts_with(written))
                    .map(|spelling| (name, spelling)),
            );
        }
        match begun.as_slice() {
            [] => OptionMatch::Unknown,
            [(name, _)] => OptionMatch::Options(vec![name], tied),
            _ => OptionMatch::Several(begun.into_iter().map(|(_, spelling)| spelling).collect()),
        }
    }

    /// Short options in one word (`-r3`, `-uB`). The first that takes a value takes the rest of the word.
    fn letters(&self, word: &Word) -> OptionMatch {
        let mut found = Vec::new();
        for (at, letter) in word.text.char_indices().skip(1) {
            let is = |name: &&str| name.chars().eq([letter]);
            let Some(name) = self.names().find(is) else {
                return OptionMatch::Unknown;
            };
            found.push(name);
            let left = at + letter.len_utf8();
            if self.takes_value(name) && left < word.text.len() {
                return OptionMatch::Options(found, Some(word.after(left)));
            }
        }
        OptionMatch::Options(found, None)
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
            format!("{who} has no option `{shown}` and refuses to start"),
            did_you_mean(text, known),
        ))
    }

    fn ambiguous(&self, word: &Word, several: &[String]) -> Option<Diagnostic> {
        let who = self.who?;
        let text = short(word.text.split('=').next().unwrap_or_default());
        let several: Vec<String> = several.iter().map(|name| format!("`{name}`")).collect();
        let several = several.join(" or ");
        Some(Diagnostic::error(
            "unknown-key",
            Some(word.span),
            format!("`{text}` may be {several}, so {who} refuses to start"),
            "write the option in full",
        ))
    }

    /// The error for a switch with a value, or another option without one.
    pub fn misused(&self, word: &Word, name: &str) -> Option<Diagnostic> {
        let who = self.who?;
        let text = short(&word.text);
        let (message, help) = match self.takes_value(name) {
            false => ("takes no value", "remove the value"),
            true => ("takes a value, but has none", "add the value"),
        };
        Some(Diagnostic::error(
            "unsupported-value",
            Some(word.span),
            format!("`{text}` of {who} {message}"),
            help,
        ))
    }
}

/// Parses the options at the start of `words`. An unresolved word of unknown length counts as further
/// options, not as the program.
pub(super) fn options<'w>(words: &'w [Word], known: &Options) -> Given<'w> {
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
        let (names, mut tied) = match known.find(word) {
            OptionMatch::Options(names, tied) => (names, tied),
            // After an unresolved word they may belong to the program.
            OptionMatch::Unknown | OptionMatch::Several(_) if unresolved.is_some() => break,
            OptionMatch::Unknown if lacks_program(rest) => break,
            OptionMatch::Unknown => {
                refused = known.unknown(word);
                break;
            }
            OptionMatch::Several(several) => {
                refused = known.ambiguous(word, &several);
                break;
            }
        };
        rest = after;
        let last = names.last().copied().unwrap_or_default();
        for name in names {
            let takes_value = known.takes_value(name);
            let mut value = tied.take_if(|_| name == last);
            if takes_value && value.is_none() {
                value = rest
                    .split_first()
                    .filter(|(next, _)| known.can_be_value(next))
                    .map(|(next, after)| {
                        rest = after;
                        next.clone()
                    });
            }
            if takes_value != value.is_some() && refused.is_none() {
                refused = known.misused(word, name);
            }
            let same = SAME.iter().find(|(alias, _)| *alias == name);
            let name = same.map_or(name, |(_, name)| name).to_owned();
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
