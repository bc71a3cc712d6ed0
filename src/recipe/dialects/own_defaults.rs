//! The batch numbers that the program of a command sets itself, by its text.

use std::path::{Component, Path, PathBuf};

use super::programs;
use super::transformers::{self, MUST_BE_TYPED};
use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::program::{OwnDefault, PROGRAM_BYTES, Program, ProgramText};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::request::Request;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::Span;

/// What is known of the program of a command.
pub(crate) fn program(script: &Given<&Path>, module: bool, reading: &mut Reading) -> Program {
    let path = match module {
        true => {
            PathBuf::from(script.value.to_string_lossy().replace('.', "/")).with_extension("py")
        }
        false => script.value.to_owned(),
    };
    // A TrainingJob has no files outside of its folder.
    let inside = path
        .components()
        .all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    let python = inside && path.extension().is_some_and(|extension| extension == "py");
    let found = Some(&path).filter(|path| python && reading.origin.is_file(path));
    let bytes = found.and_then(|path| reading.origin.read(path, PROGRAM_BYTES).ok());
    let Some(text) = bytes.and_then(|bytes| String::from_utf8(bytes).ok()) else {
        return match programs::is_upstreams(&path) {
            true => Program::Upstream,
            false => Program::Unread,
        };
    };
    let file = reading.sources.add(&path, text.as_str());
    Program::Text(ProgramText::new(file, text))
}

/// How a program sets an argument of `TrainingArguments` that its command does not give.
enum Own {
    /// The value, and how it comes about.
    Value(Node, String),
    /// What to do, and where the program sets it.
    Unknown(String, Span),
}

impl Own {
    /// How the program sets `key`; `None`: it does not.
    fn of(program: &ProgramText, key: &str, arguments: &Node) -> Option<Own> {
        let number = |number: u64, span| {
            let how = format!("`{key}` is not given: the program sets it to {number}");
            Own::Value(Node::plain(number.to_string(), span), how)
        };
        let unknown = |name: &str, span| {
            let help = if program.takes(name) {
                format!("add `--{name} N`")
            } else {
                "look its value up in the program, which takes no such argument".to_owned()
            };
            Own::Unknown(help, span)
        };
        Some(match program.default(key)? {
            OwnDefault::Number(value, span) => number(value, span),
            OwnDefault::Unknown(span) => unknown(key, span),
            // The program's own name for it.
            OwnDefault::Argument(name, span) => {
                match (arguments.get(&name), program.defined(&name)) {
                    (Some(given), _) => {
                        let how =
                            format!("the program takes `{key}` from `{name}`, {}", given.shown());
                        Own::Value(given.clone(), how)
                    }
                    (None, Some(OwnDefault::Number(value, span))) => number(value, span),
                    (None, _) => unknown(&name, span),
                }
            }
        })
    }
}

/// Refuses a program with a data loader that leaves every rank all samples, unless the user states an axis: the ranks then
/// share their samples, or take different ones in a way that its text does not show.
pub(crate) fn refuse_undivided(request: &Request, reading: &mut Reading) {
    let span = match &reading.program {
        Program::Text(program) if !request.states_axes() => program.undivided_loader(),
        _ => None,
    };
    if let Some(span) = span {
        reading.batch_unknown(
            "global-batch-unknown",
            Some(span),
            "the program's own data loader does not divide the samples: all ranks may train on the same",
            format!("state over how many ranks they are shared, `{RESERVED}.parallel.sequence=N`, 1 if every rank takes others"),
        );
    }
}

/// Adds the batch numbers that the program sets where its command does not. Without a micro-batch the others say nothing.
pub(crate) fn take(at: Span, request: &Request, arguments: &mut Node, reading: &mut Reading) {
    let Program::Text(program) = &reading.program else {
        return;
    };
    let is_given = |key: &str| arguments.get(key).is_some() || request.overrides_key(key);
    let own = MUST_BE_TYPED.map(|key| {
        (!is_given(key))
            .then(|| Own::of(program, key, arguments))
            .flatten()
    });
    let is_sized = is_given(MUST_BE_TYPED[0]) || matches!(own[0], Some(Own::Value(..)));
    // A command of a `Trainer` would otherwise get its default.
    let counts = transformers::is_for_a_trainer(arguments) && !request.states_batch();
    for (key, own) in MUST_BE_TYPED.into_iter().zip(own) {
        match own {
            Some(Own::Value(value, how)) if is_sized => {
                let help = "nothing to do, unless the program changes it later";
                reading.note("mandatory-missing", Some(value.span), how, help);
                arguments.set(key, at, value);
            }
            Some(Own::Unknown(help, span)) if counts => {
                let message = format!("`{key}` is not given, and the program sets it here");
                reading.batch_unknown("mandatory-missing", Some(span), message, help);
            }
            _ => {}
        }
    }
}
