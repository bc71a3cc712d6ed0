//! Writes a plan into a command line. Existing arguments get new values, missing ones follow the
//! last argument, and the launcher starts the plan's processes.

use std::path::Path;

use super::launcher::{relaunch, starts_processes};
use super::{
    BatchNumbers, EmitError, Emitted, changes, edit, no_form, readers, refuse, split_batches,
    standing, text_of,
};
use crate::recipe::Recipe;
use crate::recipe::dialects::command::only_numbers_changed;
use crate::recipe::syntax::source::FileId;

pub(super) fn emit(
    recipe: &Recipe,
    numbers: &BatchNumbers,
    file: FileId,
    end: usize,
) -> Result<Emitted, EmitError> {
    let reader = readers::of(recipe.dialect).ok_or_else(|| no_form(recipe, "recipe"))?;
    let text = text_of(recipe, file);
    let relaunched = relaunch(recipe, numbers, file)?;
    let relaunches = !relaunched.edits.is_empty();
    // Sorted and applied from the end to the start.
    let mut edits = relaunched.edits;
    let mut added = String::new();
    let mut typed = Vec::new();
    // Keep the layout of one argument a line.
    let between = if text.trim_start().starts_with("--") && text[..end].contains('\n') {
        "\n"
    } else {
        " "
    };
    let mut put = |path: &str, key: Option<&str>, value: u64| {
        let place = recipe
            .value_sources
            .get(path)
            .filter(|place| place.span.file == file);
        // A variable that holds more than this value, or is used elsewhere, stays; the argument is
        // added instead.
        let alone = |span| standing(recipe, span).is_some_and(|value| !value.starts_with('-'));
        match (place, key) {
            (Some(place), key) if key.is_none() || alone(place.span) => {
                typed.push((place.key.clone(), value));
                let (start, end) = (place.span.start, place.span.end);
                let before = text.get(start..end).unwrap_or_default();
                edits.push((start, end, edit::in_quotes_of(before, &value.to_string())));
            }
            (_, Some(key)) => {
                typed.push((key.to_owned(), value));
                added += between;
                added += &reader.argument(key, &value.to_string()).join(" ");
            }
            (_, None) => {}
        }
    };
    if let Some(both) = split_batches(recipe, numbers) {
        // The two keys have no native paths.
        for argument in both.iter().filter(|argument| !argument.unchanged) {
            put("", Some(argument.key), argument.value);
        }
    } else {
        for change in changes(&recipe.spec, numbers) {
            match change.path {
                // The launcher sets the processes.
                "batch.gpus" => {}
                path => put(path, reader.upstream_key(path), change.to),
            }
        }
    }
    if !added.is_empty() {
        edits.push((end, end, added));
    }
    let mut remarks = relaunched.remarks;
    let place = recipe.value_sources.get("batch.gpus");
    let elsewhere = place.is_none_or(|place| Some(place.span.file) == recipe.files.command_line);
    let moves = recipe.spec.batch.gpus != Some(numbers.world);
    if elsewhere && moves && !relaunches && starts_processes(recipe) {
        remarks.push(format!(
            "the command does not state its number of processes: start {} of them",
            numbers.world
        ));
    }
    edits.sort_by_key(|(start, ..)| std::cmp::Reverse(*start));
    let before = text;
    let mut text = text.to_owned();
    for (start, end, mut with) in edits {
        // The shell takes a number right before a redirection for a file descriptor.
        if text[end..].starts_with(['<', '>']) {
            with += " ";
        }
        text = edit::splice(&text, start, end, &with);
    }
    let path = recipe.sources.get(file).map(|source| source.path.as_path());
    let path = path.unwrap_or(Path::new(""));
    if !only_numbers_changed(path, (before, &text), &recipe.variables, &typed) {
        let processes = format!("{} processes", numbers.world);
        let processes = relaunches.then_some(processes).into_iter();
        let typed = typed.iter().map(|(key, value)| format!("--{key} {value}"));
        let numbers = processes.chain(typed).collect::<Vec<_>>().join(" ");
        return refuse(format!(
            "these numbers change another part of the command's meaning ({numbers}: write them there by hand)"
        ));
    }
    Ok(Emitted {
        remarks,
        ..Emitted::plain(text)
    })
}
