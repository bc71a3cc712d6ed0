//! Writes a plan into a Hydra tree, into the one file that holds the numbers that change.
//!
//! A tree holds neither ranks nor micro-batch: upstream's program derives them. An override on the
//! command line takes precedence over every file, so the user must retype it. Numbers in several
//! files cannot be written as one text. Errors and remarks name both cases, with the numbers.

use super::{EmitError, Emitted, Numbers, edit, name_of, no_form, readers, text_of};
use crate::recipe::Recipe;
use crate::recipe::source::FileId;
use crate::recipe::tree::Given;

/// The batch size as the recipe's tree counts it: samples per step, or per accumulation step.
/// `None` for a recipe that is no tree.
pub(super) fn size(recipe: &Recipe, numbers: &Numbers) -> Option<u64> {
    let tree = recipe.files.tree.as_ref()?;
    Some(match tree.per_pass {
        true => numbers.global / numbers.accumulation,
        false => numbers.global,
    })
}

/// One batch key: the value in the tree, and the plan's.
struct Number<'r> {
    key: &'static str,
    given: Option<&'r Given<i128>>,
    value: u64,
}

impl Number<'_> {
    fn changes(&self) -> bool {
        let value = i128::from(self.value);
        self.given.is_none_or(|given| given.value != value)
    }
}

pub(super) fn emit(recipe: &Recipe, numbers: &Numbers) -> Result<Emitted, EmitError> {
    let both = batch(recipe, numbers).ok_or_else(|| no_form(recipe, "recipe"))?;
    let typed = recipe.files.command_line;
    let file_of = |number: &Number| number.given.map(|given| given.span.file);
    let is_typed = |number: &&Number| typed.is_some() && file_of(number) == typed;
    // A number that no file states goes into the file of the other number.
    let batch_file = both.iter().filter(|n| !is_typed(n)).find_map(file_of);
    let changed = || both.iter().filter(|number| number.changes());
    let (retyped, rewritten): (Vec<&Number>, Vec<&Number>) = changed().partition(is_typed);
    let mut files: Vec<Option<FileId>> = rewritten
        .iter()
        .map(|n| file_of(n).or(batch_file))
        .collect();
    files.dedup();
    let retyped: Vec<String> = retyped.iter().filter_map(|n| retype(recipe, n)).collect();
    let file = match files.as_slice() {
        [] if !retyped.is_empty() => {
            let changes = retyped.join(", ");
            return Err(EmitError::Typed { changes });
        }
        // Nothing changes: write the file that holds the batch, or else the root.
        [] => batch_file.or(recipe.files.recipe),
        [file] => *file,
        _ => {
            let changes: Vec<String> = rewritten.iter().map(|n| becomes(recipe, n)).collect();
            let changes = changes.join(", ");
            return Err(EmitError::Scattered { changes });
        }
    };
    let file = file.ok_or_else(|| no_form(recipe, "recipe"))?;
    let mut text = text_of(recipe, file).to_owned();
    for number in rewritten {
        let (path, beside) = place(recipe, file, number, &both)?;
        text = edit::set(&text, &path, &number.value.to_string(), &beside)?;
    }
    let replaces = recipe.sources.get(file).map(|file| file.path.clone());
    let mut remarks = Vec::new();
    if let Some(path) = &replaces {
        let path = path.display();
        remarks.push(format!("replace `{path}` of the tree by this"));
    }
    if !retyped.is_empty() {
        let changes = retyped.join(", ");
        remarks.push(format!("change these overrides too: {changes}"));
    }
    Ok(Emitted {
        text,
        replaces,
        remarks,
    })
}

/// Both batch numbers of a tree; `None` for a recipe that is no tree.
fn batch<'r>(recipe: &'r Recipe, numbers: &Numbers) -> Option<[Number<'r>; 2]> {
    let reader = readers::of(recipe.dialect)?;
    let tree = recipe.files.tree.as_ref()?;
    Some([
        Number {
            key: reader.upstream_key("batch.global")?,
            given: tree.size.as_ref(),
            value: size(recipe, numbers)?,
        },
        Number {
            key: reader.upstream_key("batch.accumulation")?,
            given: tree.accumulation.as_ref(),
            value: numbers.accumulation,
        },
    ])
}

/// The path of a number by its own file's keys, and the key after which a new number is inserted.
fn place(
    recipe: &Recipe,
    file: FileId,
    number: &Number,
    both: &[Number],
) -> Result<(String, String), EmitError> {
    let text = text_of(recipe, file);
    let key = number.key;
    let refuse = || {
        EmitError::Edit(edit::EditError {
            key: key.to_owned(),
            value: number.value.to_string(),
        })
    };
    let there = both
        .iter()
        .filter(|other| other.given.is_some_and(|given| given.span.file == file))
        .max_by_key(|other| other.key == key);
    let (there, given) = there
        .and_then(|there| Some((there, there.given?)))
        .ok_or_else(refuse)?;
    let written = text.get(given.span.start..given.span.end);
    if let Some(written) = written.filter(|written| written.contains("${")) {
        return Err(EmitError::Interpolated {
            key: there.key.to_owned(),
            text: written.to_owned(),
            file: name_of(recipe, file),
        });
    }
    let path = edit::path_at(text, given.span, there.key).ok_or_else(refuse)?;
    if there.key == key {
        return Ok((path, String::new()));
    }
    let name = |path: &str| path.rsplit('.').next().unwrap_or(path).to_owned();
    let new = match path.rsplit_once('.') {
        Some((parent, _)) => format!("{parent}.{}", name(key)),
        None => name(key),
    };
    Ok((new, name(&path)))
}

/// States the new value of a number in its file.
fn becomes(recipe: &Recipe, number: &Number) -> String {
    let file = number.given.map(|given| name_of(recipe, given.span.file));
    let file = file.unwrap_or_default();
    format!("`{}` becomes {} in `{file}`", number.key, number.value)
}

/// The override that sets a number, before and after the change.
fn retype(recipe: &Recipe, number: &Number) -> Option<String> {
    let span = number.given?.span;
    let text = text_of(recipe, span.file);
    let start = text.get(..span.start)?.rfind('\n').map_or(0, |at| at + 1);
    let line = text.get(start..)?.lines().next()?;
    let value = (span.start - start, span.end - start);
    let after = edit::splice(line, value.0, value.1, &number.value.to_string());
    Some(format!("`{line}` becomes `{after}`"))
}

#[cfg(test)]
mod tests;
