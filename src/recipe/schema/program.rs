//! The Python program that takes a recipe's arguments, as far as its text tells their defaults. A program may define an
//! argument of `TrainingArguments` again, with another default, or set it itself.
//!
//! The text is searched, not parsed: a field of a dataclass (`save_steps: int = field(default=50)`), an option of argparse
//! (`add_argument("--save_steps", default=50)`) and an argument of a call (`save_steps=50`). What is written otherwise
//! counts as unknown.

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
    /// Its text.
    Text(ProgramText),
    /// It is not there.
    Unread,
}

/// The text of a program.
#[derive(Debug)]
pub(crate) struct ProgramText {
    pub file: FileId,
    pub text: String,
}

/// How a program sets an argument that its command does not give.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Default {
    /// To this whole number.
    Number(u64, Span),
    /// To the value of another argument: `TrainingArguments(save_steps=args.save)`.
    Argument(String, Span),
    /// To something else.
    Unknown(Span),
}

impl Program {
    /// Whether the defaults of these arguments are those of `TrainingArguments`, as far as is known.
    pub fn has_upstreams_defaults(&self, names: &[&str]) -> bool {
        match self {
            Program::None | Program::Upstream => true,
            Program::Text(program) => names.iter().all(|name| program.default(name).is_none()),
            Program::Unread => false,
        }
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
    /// The program's own default of an argument; `None`: it does not mention the argument, so that the default is that of
    /// the class that it parses.
    pub fn default(&self, name: &str) -> Option<Default> {
        let dashed = name.replace('_', "-");
        let field = format!(
            r"(?m)^[ \t]+{name}\s*:[^=\n]*=\s*(?:(?:\w+\.)?field\(\s*default\s*=\s*)?(?<number>\d+)?"
        );
        let option = format!(
            r#"add_argument\(\s*["']--(?:{name}|{dashed})["'](?:[^()]*?\bdefault\s*=\s*(?<number>\d+))?"#
        );
        let passed = format!(
            r"(?m)(?:^|[(,])[ \t]*{name}\s*=\s*(?:(?<number>\d+)\s*[,)\n]|(?:\w+\.)+(?<argument>\w+)\s*[,)\n])?"
        );
        [field, option, passed].iter().find_map(|pattern| {
            let found = Regex::new(pattern).ok()?.captures(&self.text)?;
            let span = Span::of(&self.text, found.get(0)?.range(), self.file);
            let number = found
                .name("number")
                .and_then(|number| number.as_str().parse().ok());
            let argument = found
                .name("argument")
                .map(|argument| argument.as_str().to_owned());
            Some(match (number, argument) {
                (Some(number), _) => Default::Number(number, span),
                // It passes on what it parses by the same name.
                (None, Some(argument)) if argument == name => return None,
                (None, Some(argument)) => Default::Argument(argument, span),
                (None, None) => Default::Unknown(span),
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn default(text: &str) -> Option<Option<u64>> {
        let (file, text) = (FileId(0), text.to_owned());
        let found = ProgramText { file, text }.default("save_steps")?;
        Some(match found {
            Default::Number(number, _) => Some(number),
            Default::Argument(..) | Default::Unknown(_) => None,
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
            let (file, text) = (FileId(0), text.to_owned());
            ProgramText { file, text }.default("per_device_train_batch_size")
        };
        let text =
            "TrainingArguments(\n    per_device_train_batch_size=script_args.train_batch_size,\n)";
        let Some(Default::Argument(name, _)) = default(text) else {
            panic!("{:?}", default(text));
        };
        assert_eq!(name, "train_batch_size");
        let same =
            "TrainingArguments(per_device_train_batch_size=args.per_device_train_batch_size, x=1)";
        assert_eq!(default(same), None);
        let computed = "TrainingArguments(per_device_train_batch_size=args.batch // args.steps)";
        assert!(matches!(default(computed), Some(Default::Unknown(_))));
    }

    #[test]
    fn a_program_that_imports_trl_uses_it() {
        let uses = |text: &str| {
            let (file, text) = (FileId(0), text.to_owned());
            Program::Text(ProgramText { file, text }).uses_trl()
        };
        assert_eq!(uses("import os\nfrom trl import SFTTrainer\n"), Some(true));
        assert_eq!(uses("# from trl\nimport control\n"), Some(false));
        assert_eq!(Program::Unread.uses_trl(), None);
    }
}
