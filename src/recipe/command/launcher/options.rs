//! The options at the start of a launcher's words, as `argparse` finds them: a name may be cut short
//! where its parser says so, and a letter's value may stand beside it (`-r3`).
//!
//! Source: Python 3.11 `argparse.py` (`_parse_optional`, `_get_option_tuples`, `consume_optional`).

use super::known::Options;
use crate::recipe::command::words::{Unsaid, Word};
use crate::recipe::diagnostic::Diagnostic;
use crate::recipe::handbook::keys;
use crate::recipe::source::Span;
use crate::recipe::suggest::{did_you_mean, short};

/// An option of a launcher.
#[derive(Debug, Clone)]
pub(in crate::recipe) struct Opt {
    /// Its name, with `_` for every `-`.
    pub name: String,
    /// Where it stands.
    pub at: Span,
    /// Its value; `None` for switches.
    pub value: Option<Word>,
}

/// Whether a trainer's arguments come next, and nothing that could be the program: pages leave its name
/// out.
fn lacks_program(rest: &[Word]) -> bool {
    let first = rest.first().and_then(Word::option);
    let of_trainer = first.is_some_and(|(name, _)| keys::is_known(&name));
    of_trainer && !rest.iter().any(|word| word.text.ends_with(".py"))
}

/// The options of a launcher.
pub(super) struct Given<'w> {
    /// In the order of writing.
    pub options: Vec<Opt>,
    /// What may be more of them.
    pub unsaid: Option<&'w Word>,
    /// What follows them.
    pub rest: &'w [Word],
    /// Why the launcher takes none of it.
    pub refused: Option<Diagnostic>,
}

/// Names that mean another one.
const SAME: [(&str, &str); 1] = [("num_accelerators", "num_gpus")];

/// What a word is to a parser.
enum Found {
    /// Options, of which the last one may be given its value in the same word.
    Options(Vec<&'static str>, Option<Word>),
    /// The start of several.
    Several(Vec<String>),
    Unknown,
}

impl Options {
    fn names(&self) -> impl Iterator<Item = &'static str> {
        self.switches.iter().chain(self.valued).copied()
    }

    /// The ways to spell a name.
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

    fn find(&self, word: &Word) -> Found {
        let text = word.text.as_str();
        let (written, tied) = match text.split_once('=') {
            Some((written, _)) => (written, Some(word.after(written.len() + 1))),
            None => (text, None),
        };
        let is = |name: &&str| self.spellings(name).iter().any(|own| own == written);
        if let Some(name) = self.names().find(is) {
            return Found::Options(vec![name], tied);
        }
        if !text.starts_with("--") {
            return self.letters(word);
        }
        let mut begun = Vec::new();
        for name in self.names().filter(|_| self.cut_short) {
            let spellings = self.spellings(name).into_iter();
            begun.extend(
                spellings
                    .filter(|own| own.starts_with(written))
                    .map(|own| (name, own)),
            );
        }
        match begun.as_slice() {
            [] => Found::Unknown,
            [(name, _)] => Found::Options(vec![name], tied),
            _ => Found::Several(begun.into_iter().map(|(_, own)| own).collect()),
        }
    }

    /// `-r3`, `-uB`: letters, of which one takes what is left for its value.
    fn letters(&self, word: &Word) -> Found {
        let mut found = Vec::new();
        for (at, letter) in word.text.char_indices().skip(1) {
            let is = |name: &&str| name.chars().eq([letter]);
            let Some(name) = self.names().find(is) else {
                return Found::Unknown;
            };
            found.push(name);
            let left = at + letter.len_utf8();
            if self.valued.contains(&name) && left < word.text.len() {
                return Found::Options(found, Some(word.after(left)));
            }
        }
        Found::Options(found, None)
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
            format!("{who} has no option `{shown}`, and starts nothing"),
            did_you_mean(text, known),
        ))
    }

    fn ambiguous(&self, word: &Word, several: &[String]) -> Option<Diagnostic> {
        let who = self.who?;
        let text = short(word.text.split('=').next().unwrap_or_default());
        let several: Vec<String> = several.iter().map(|own| format!("`{own}`")).collect();
        let several = several.join(" or ");
        Some(Diagnostic::error(
            "unknown-key",
            Some(word.span),
            format!("`{text}` may be {several}, and {who} starts nothing"),
            "write the one that is meant in full",
        ))
    }

    /// A switch with a value, or another option without one.
    pub fn misused(&self, word: &Word, name: &str) -> Option<Diagnostic> {
        let who = self.who?;
        let text = short(&word.text);
        let (message, help) = match self.switches.contains(&name) {
            true => ("takes no value", "leave the value out"),
            false => ("takes a value, and none follows it", "give it one"),
        };
        Some(Diagnostic::error(
            "unsupported-value",
            Some(word.span),
            format!("`{text}` of {who} {message}"),
            help,
        ))
    }
}

/// The options at the start of `words`. A word that may be any number of words is taken for further
/// ones, and not for the program.
pub(super) fn options<'w>(words: &'w [Word], known: &Options) -> Given<'w> {
    let mut found = Vec::new();
    let mut refused = None;
    // The first of such words, and the last with as many options as stood before it.
    let mut unsaid: Option<(&Word, &[Word], usize)> = None;
    let mut rest = words;
    while let Some((word, after)) = rest.split_first() {
        let named = word.text.find('=').unwrap_or(word.text.len());
        let hidden = word.text.starts_with('-') && word.holes.iter().any(|h| h.start < named);
        if hidden || word.unsaid() == Some(Unsaid::Number) && !after.is_empty() {
            let first = unsaid.map_or(word, |(first, ..)| first);
            unsaid = Some((first, rest, found.len()));
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
            Found::Options(names, tied) => (names, tied),
            // After a word that is not said they may be the program's.
            Found::Unknown | Found::Several(_) if unsaid.is_some() => break,
            Found::Unknown if lacks_program(rest) => break,
            Found::Unknown => {
                refused = known.unknown(word);
                break;
            }
            Found::Several(several) => {
                refused = known.ambiguous(word, &several);
                break;
            }
        };
        rest = after;
        let last = names.last().copied().unwrap_or_default();
        for name in names {
            let switch = known.switches.contains(&name);
            let mut value = tied.take_if(|_| name == last);
            if !switch && value.is_none() {
                value = rest
                    .split_first()
                    .filter(|(next, _)| known.can_be_value(next))
                    .map(|(next, after)| {
                        rest = after;
                        next.clone()
                    });
            }
            if switch == value.is_some() && refused.is_none() {
                refused = known.misused(word, name);
            }
            let same = SAME.iter().find(|(own, _)| *own == name);
            let name = same.map_or(name, |(_, name)| name).to_owned();
            let at = word.span;
            found.push(Opt { name, at, value });
        }
    }
    // Arguments come next: it is the program itself that is not said.
    let mut hidden = unsaid.map(|(first, ..)| first);
    if let Some((first, last, before)) = unsaid
        && rest.first().is_none_or(|word| word.text.starts_with('-'))
    {
        found.truncate(before);
        hidden = Some(first).filter(|first| first.span != last[0].span);
        rest = last;
    }
    Given {
        options: found,
        unsaid: hidden,
        rest,
        refused,
    }
}

/// The option that counts of those with a name: the last one.
pub(in crate::recipe::command) fn option<'o>(
    options: &'o [Opt],
    names: &[&str],
) -> Option<&'o Opt> {
    let mut options = options.iter().rev();
    options.find(|option| names.contains(&option.name.as_str()))
}

pub(super) fn value<'o>(options: &'o [Opt], names: &[&str]) -> Option<&'o Word> {
    option(options, names)?.value.as_ref()
}
