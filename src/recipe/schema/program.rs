//! The Python program that takes a recipe's arguments, as far as its text tells their defaults. A program may define an
//! argument of `TrainingArguments` again, with another default, or set it itself.
//!
//! The text is searched, not parsed: for a field of a dataclass (`save_steps: int = field(default=50)`), an option of
//! argparse (`add_argument("--save_steps", default=50)`), an argument of a call (`save_steps=50`), a key of a dictionary
//! and an assignment (`args.save_steps = 50`). Comments and texts do not count. A value that is no whole number is unknown.

use regex::Regex;

use crate::recipe::syntax::source::{FileId, Span};

/// Most bytes of a program that are read.
pub(crate) const PROGRAM_BYTES: u64 = 1 << 20;

/// What is known of the program.
#[derive(Debug, Default)]
pub(crate) enum Program {
    /// No command names one.
    #[default]
    None,
    /// A script of TRL, the handbook or transformers, whose arguments and defaults are theirs.
    Upstream,
    Text(ProgramText),
    /// It is not there.
    Unread,
}

/// The text of a program.
#[derive(Debug)]
pub(crate) struct ProgramText {
    file: FileId,
    text: String,
    /// The text with blanks in place of comments and of strings in three quotes, at the same offsets.
    code: String,
    /// The code with blanks in place of all strings.
    bare: String,
}

/// How a program sets an argument that its command does not give.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum OwnDefault {
    /// To this whole number.
    Number(u64, Span),
    /// To the value of another argument: `TrainingArguments(save_steps=args.save)`.
    Argument(String, Span),
    /// To something else.
    Unknown(Span),
}

impl Program {
    /// Whether the program's text sets an argument.
    pub fn sets(&self, name: &str) -> bool {
        matches!(self, Program::Text(program) if program.default(name).is_some())
    }

    /// Whether a program of a stranger takes the arguments: it may have others than upstream's.
    pub fn is_strange(&self) -> bool {
        matches!(self, Program::Text(_) | Program::Unread)
    }

    /// Whether the defaults of these arguments are those of `TrainingArguments`, as far as is known.
    pub fn has_upstreams_defaults(&self, names: &[&str]) -> bool {
        match self {
            Program::Unread => false,
            Program::Text(program) if !program.may_use_a_trainer() => false,
            _ => !names.iter().any(|name| self.sets(name)),
        }
    }

    /// Whether the program's text defines its arguments, none of them for the micro-batch of a `Trainer`, and names none.
    /// A text without arguments may hand them to another file.
    pub fn lacks_batch_arguments(&self) -> bool {
        let Program::Text(program) = self else {
            return false;
        };
        let defines = program.code.contains("add_argument(");
        let is_strict = defines && !program.code.contains("parse_known_args");
        is_strict && !program.takes("per_device_train_batch_size") && !program.may_use_a_trainer()
    }

    /// Whether the program says that it uses TRL. `None`: its text is not known.
    pub fn uses_trl(&self) -> Option<bool> {
        match self {
            Program::Text(program) => {
                let imports = Regex::new(r"(?m)^\s*(from|import)\s+trl\b").ok()?;
                Some(imports.is_match(&program.text))
            }
            Program::Upstream | Program::None | Program::Unread => None,
        }
    }
}

impl ProgramText {
    pub fn new(file: FileId, text: String) -> ProgramText {
        let [code, bare] = [true, false].map(|strings| code(&text, strings));
        ProgramText {
            file,
            text,
            code,
            bare,
        }
    }

    /// Whether the program asks for a value that it has parsed: `args.do_train`.
    pub fn asks_for(&self, name: &str) -> bool {
        self.text.contains(&format!(".{name}"))
    }

    /// Whether the command line of the program has an argument: it defines it, or parses dataclasses of others.
    pub fn takes(&self, name: &str) -> bool {
        const PARSERS: [&str; 3] = ["HfArgumentParser", "TrlParser", "H4ArgumentParser"];
        self.defined(name).is_some() || PARSERS.iter().any(|parser| self.code.contains(parser))
    }

    /// Whether the program names a `Trainer` or its arguments, or imports something that trains.
    fn may_use_a_trainer(&self) -> bool {
        let names = Regex::new(r"Trainer|TrainingArguments|(?m)^\s*(from|import)\b.*\btrain");
        names.is_ok_and(|names| names.is_match(&self.bare))
    }

    /// Whether the program evaluates or predicts and never trains.
    pub fn only_evaluates(&self) -> bool {
        let has = |calls: &str| {
            let calls = Regex::new(calls);
            calls.is_ok_and(|calls| calls.is_match(&self.bare))
        };
        // A function of another file may train.
        let runs_other = has(r"(\b|_)(main|run\w*)\(") && !has(r"\bdef\s+(main|run\w*)\(");
        has(r"\.(evaluate|predict)\(") && !has(r"(\b|_)(train|fit|backward)\(") && !runs_other
    }

    /// Where the program defines a data loader that every rank fills with the same samples: neither accelerate nor
    /// a sampler divides them. `Trainer`'s method with this name divides them with `accelerator.prepare`.
    pub fn undivided_loader(&self) -> Option<Span> {
        const DIVIDING: [&str; 5] = [
            "prepare",
            "Distributed",
            "num_replicas",
            "world_size",
            "super(",
        ];
        let method = Regex::new(r"(?m)^(?<indent>[ \t]*)def get_train_dataloader\(").ok()?;
        let mut all = method.captures_iter(&self.bare);
        all.find_map(|found| {
            let name = found.get(0)?;
            let indent = found.name("indent")?.as_str().len();
            let outside = |line: &&str| {
                let content = line.trim_start();
                !content.is_empty() && line.len() - content.len() <= indent
            };
            let rest = &self.bare[name.end()..];
            let (first, rest) = rest.split_once('\n').unwrap_or((rest, ""));
            // The parameters may end on another line.
            let inside = |line: &&str| line.trim_start().starts_with(')') || !outside(line);
            let lines = std::iter::once(first).chain(rest.lines().take_while(inside));
            let body = lines.collect::<Vec<_>>().join("\n");
            let loads = body.contains("DataLoader(");
            let divides = DIVIDING.iter().any(|call| body.contains(call));
            (loads && !divides).then(|| Span::of(&self.text, name.range(), self.file))
        })
    }

    /// The program's own default of an argument; `None`: it does not set the argument, so that the default is that of the
    /// class that it parses.
    pub fn default(&self, name: &str) -> Option<OwnDefault> {
        self.defined(name).or_else(|| self.passed(name))
    }

    /// The default of an option or field that the program itself defines.
    pub fn defined(&self, name: &str) -> Option<OwnDefault> {
        let name = regex::escape(name);
        let dashed = name.replace('_', "-");
        let field = format!(
            r"(?m)^[ \t]+{name}\s*:[^=\n]*=\s*(?:(?:\w+\.)?field\(\s*default\s*=\s*)?(?:(?<number>\d+)\s*(?:[,)]|$))?"
        );
        let option = format!(
            r#"add_argument\((?:\s*["']-\w["']\s*,)?\s*["']--(?:{name}|{dashed})["'](?:(?:[^()]|\([^()]*\))*?\bdefault\s*=\s*(?<number>\d+)\s*[,)])?"#
        );
        let found = self.find(&field, &self.bare, |_| true);
        found.or_else(|| self.find(&option, &self.code, |_| true))
    }

    /// What the program passes on, or sets after it has parsed the arguments.
    fn passed(&self, name: &str) -> Option<OwnDefault> {
        let own = regex::escape(name);
        let argument = format!(
            r"(?m)(?:^|[(,])[ \t]*{own}\s*=\s*(?:(?<number>\d+)\s*(?:[,)]|$)|(?:\w+\.)+(?<argument>\w+)\s*(?:[,)]|$)|[^=\s])"
        );
        let calls = |at: usize| !is_definition(&self.bare[..at]);
        let passed = self.find(&argument, &self.bare, calls);
        // It passes on what it parses by the same name.
        let passed = passed
            .filter(|found| !matches!(found, OwnDefault::Argument(other, _) if other == name));
        passed
            .or_else(|| {
                self.find(
                    &format!(r"\.{own}\s*(?://|[*+-])?=[^=]"),
                    &self.bare,
                    |_| true,
                )
            })
            .or_else(|| self.find(&format!(r#"["']{own}["']\s*:"#), &self.code, |_| true))
    }

    /// The first match of a pattern at a place that `counts`.
    fn find(
        &self,
        pattern: &str,
        text: &str,
        counts: impl Fn(usize) -> bool,
    ) -> Option<OwnDefault> {
        let pattern = Regex::new(pattern).ok()?;
        let mut all = pattern.captures_iter(text);
        let found = all.find(|found| found.get(0).is_some_and(|whole| counts(whole.start())))?;
        let span = Span::of(&self.text, found.get(0)?.range(), self.file);
        let number = found
            .name("number")
            .and_then(|number| number.as_str().parse().ok());
        let argument = found
            .name("argument")
            .map(|argument| argument.as_str().to_owned());
        Some(match (number, argument) {
            (Some(number), _) => OwnDefault::Number(number, span),
            (None, Some(argument)) => OwnDefault::Argument(argument, span),
            (None, None) => OwnDefault::Unknown(span),
        })
    }
}

/// Whether a text ends among the parameters of a function's definition.
fn is_definition(before: &str) -> bool {
    let mut depth = 0_usize;
    let opening = before.char_indices().rev().find(|(_, c)| match c {
        ')' => {
            depth += 1;
            false
        }
        '(' if depth > 0 => {
            depth -= 1;
            false
        }
        c => *c == '(',
    });
    // A match may begin with the bracket itself.
    let before = opening
        .map_or(before, |(at, _)| &before[..at])
        .trim_end_matches('(');
    let name = before.trim_end_matches(|c: char| c.is_alphanumeric() || c == '_');
    name.trim_end().ends_with("def") && name.len() < before.len()
}

/// The text with blanks in place of comments and of strings in three quotes, and of the others unless `strings` are kept.
fn code(text: &str, strings: bool) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let quote = ["\"\"\"", "'''", "\"", "'"]
            .into_iter()
            .find(|quote| rest.starts_with(quote));
        let end = match (first, quote) {
            ('#', _) => rest.find('\n').unwrap_or(rest.len()),
            (_, Some(quote)) => end_of_string(rest, quote),
            _ => first.len_utf8(),
        };
        let (part, after) = rest.split_at(end);
        let keeps = match quote {
            Some(quote) => strings && quote.len() == 1,
            None => first != '#',
        };
        match keeps {
            true => code.push_str(part),
            false => code.extend(
                part.bytes()
                    .map(|byte| if byte == b'\n' { '\n' } else { ' ' }),
            ),
        }
        rest = after;
    }
    code
}

/// The length of the string literal at the beginning of a text.
fn end_of_string(text: &str, quote: &str) -> usize {
    let mut at = quote.len();
    while let Some(rest) = text.get(at..).filter(|rest| !rest.is_empty()) {
        if rest.starts_with(quote) {
            return at + quote.len();
        }
        // A string in one quote ends with its line.
        if quote.len() == 1 && rest.starts_with('\n') {
            return at;
        }
        let escaped = usize::from(rest.starts_with('\\'));
        let mut chars = rest.chars().take(1 + escaped);
        at += chars.by_ref().map(char::len_utf8).sum::<usize>();
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn default(text: &str) -> Option<Option<u64>> {
        let found = ProgramText::new(FileId(0), text.to_owned()).default("save_steps")?;
        Some(match found {
            OwnDefault::Number(number, _) => Some(number),
            OwnDefault::Argument(..) | OwnDefault::Unknown(_) => None,
        })
    }

    #[test]
    fn a_programs_own_defaults_are_found() {
        for (text, expected) in [
            ("class A:\n    save_steps: int = 50\n", Some(Some(50))),
            (
                "class A:\n    save_steps: Optional[int] = field(default=50, metadata={})\n",
                Some(Some(50)),
            ),
            (
                "class A:\n    save_steps: Optional[int] = field(\n        default=50,\n",
                Some(Some(50)),
            ),
            (
                "class A:\n    save_steps: int = field(metadata={'help': 'x'}, default=50)\n",
                Some(None),
            ),
            ("class A:\n    save_steps: float = None\n", Some(None)),
            (
                "parser.add_argument(\"--save_steps\", type=int, default=50)",
                Some(Some(50)),
            ),
            (
                "parser.add_argument('--save-steps', type=int)\nparser.add_argument('--x', default=3)",
                Some(None),
            ),
            (
                "TrainingArguments(\n    output_dir=x,\n    save_steps=50,\n)",
                Some(Some(50)),
            ),
            (
                "TrainingArguments(output_dir=x, save_steps=args.save)",
                Some(None),
            ),
            (
                "# save_steps may be given\nx.save_steps == 3\nprint(args.save_steps)\n",
                None,
            ),
            ("", None),
        ] {
            assert_eq!(default(text), expected, "{text}");
        }
    }

    #[test]
    fn an_argument_that_a_program_passes_on_is_named() {
        let default = |text: &str| {
            let program = ProgramText::new(FileId(0), text.to_owned());
            program.default("per_device_train_batch_size")
        };
        let text =
            "TrainingArguments(\n    per_device_train_batch_size=script_args.train_batch_size,\n)";
        let Some(OwnDefault::Argument(name, _)) = default(text) else {
            panic!("{:?}", default(text));
        };
        assert_eq!(name, "train_batch_size");
        let same =
            "TrainingArguments(per_device_train_batch_size=args.per_device_train_batch_size, x=1)";
        assert_eq!(default(same), None);
        let computed = "TrainingArguments(per_device_train_batch_size=args.batch // args.steps)";
        assert!(matches!(default(computed), Some(OwnDefault::Unknown(_))));
    }

    #[test]
    fn a_data_loader_that_divides_nothing_is_found() {
        let undivided = |text: &str| {
            let program = ProgramText::new(FileId(0), text.to_owned());
            program.undivided_loader().is_some()
        };
        let loader = "def get_train_dataloader(self) -> DataLoader:\n    \"\"\"World_size.\"\"\"\n\n    \
                      params = {}\n    return DataLoader(self.train_dataset, **params)\n\nworld_size = 1\n";
        assert!(undivided(loader));
        assert!(undivided(&loader.replace("self)", "\n    self,\n)")));
        for (before, after) in [
            (
                "return DataLoader(self.train_dataset, **params)",
                "return self.accelerator.prepare(DataLoader(x))",
            ),
            ("params = {}", "params = {'sampler': DistributedSampler(x)}"),
            ("params = {}", "params = super().get_train_dataloader()"),
            (
                "return DataLoader(self.train_dataset, **params)",
                "return self.loader",
            ),
            ("get_train_dataloader", "get_eval_dataloader"),
        ] {
            assert!(!undivided(&loader.replace(before, after)), "{after}");
        }
    }

    #[test]
    fn a_program_that_only_evaluates_is_known_by_its_calls() {
        let evaluates = |text: &str| ProgramText::new(FileId(0), text.to_owned()).only_evaluates();
        assert!(evaluates(
            "t = Trainer(m, train_dataset=d)\nmodel.train_mode\nt.evaluate()\n"
        ));
        assert!(evaluates("print('trainer.train()')\nt.predict(d)\n"));
        assert!(evaluates("def main():\n    t.evaluate()\nmain()\n"));
        for text in [
            "t.train()\nt.evaluate()\n",
            "loss.backward()\nt.evaluate(d)\n",
            "do_train(d)\nt.evaluate(d)\n",
            "run_sft(d)\nt.evaluate(d)\n",
            "t = Trainer(m)\n",
        ] {
            assert!(!evaluates(text), "{text}");
        }
    }

    #[test]
    fn a_program_without_a_trainer_has_no_defaults_of_one() {
        let upstreams = |text: &str| {
            let program = Program::Text(ProgramText::new(FileId(0), text.to_owned()));
            program.has_upstreams_defaults(&["save_steps"])
        };
        assert!(upstreams("from transformers import Trainer\n"));
        assert!(upstreams("from llava.train.train import train\ntrain()\n"));
        assert!(!upstreams(
            "from accelerate import Accelerator\nloss.backward()\n"
        ));
        assert!(!upstreams("from transformers import PretrainedConfig\n"));
        assert!(!upstreams("Trainer(save_steps=5)\n"));
    }

    #[test]
    fn a_program_that_imports_trl_uses_it() {
        let uses =
            |text: &str| Program::Text(ProgramText::new(FileId(0), text.to_owned())).uses_trl();
        assert_eq!(uses("import os\nfrom trl import SFTTrainer\n"), Some(true));
        assert_eq!(uses("# from trl\nimport control\n"), Some(false));
        assert_eq!(Program::Unread.uses_trl(), None);
    }
}
