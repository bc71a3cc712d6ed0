//! Writes a plan into a Hydra tree, into the one file that holds the numbers that change.
//!
//! A tree holds neither ranks nor micro-batch: upstream's program derives them. An override on the
//! command line takes precedence over every file, so the user must retype it. Numbers in several
//! files cannot be written as one text. Errors and remarks name both cases, with the numbers.

use super::{BatchNumbers, EmitError, Emitted, edit, name_of, no_form, readers, refuse, text_of};
use crate::recipe::Recipe;
use crate::recipe::batch_arguments::size;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::source::FileId;

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

pub(super) fn emit(recipe: &Recipe, numbers: &BatchNumbers) -> Result<Emitted, EmitError> {
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
            return refuse(format!(
                "the command line overrides the numbers that change: {} (`--emit args` writes all of them as overrides)",
                retyped.join(", ")
            ));
        }
        // Nothing changes: write the file that holds the batch, or else the root.
        [] => batch_file.or(recipe.files.recipe),
        [file] => *file,
        _ => {
            let changes: Vec<String> = rewritten.iter().map(|n| becomes(recipe, n)).collect();
            return refuse(format!(
                "several files of the tree hold the numbers, and only one file can be written: {} (edit these files, or pass the output of `--emit args`)",
                changes.join(", ")
            ));
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
fn batch<'r>(recipe: &'r Recipe, numbers: &BatchNumbers) -> Option<[Number<'r>; 2]> {
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
    let misplaced = || edit::refused(key, &number.value.to_string());
    let there = both
        .iter()
        .filter(|other| other.given.is_some_and(|given| given.span.file == file))
        .max_by_key(|other| other.key == key);
    let (there, given) = there
        .and_then(|there| Some((there, there.given?)))
        .ok_or_else(misplaced)?;
    let written = text.get(given.span.start..given.span.end);
    if let Some(written) = written.filter(|written| written.contains("${")) {
        return refuse(format!(
            "`{}` is `{written}` in `{}`, an expression over other values (write the number there, or pass the output of `--emit args`)",
            there.key,
            name_of(recipe, file)
        ));
    }
    let path = edit::path_at(text, given.span, there.key).ok_or_else(misplaced)?;
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
mod tests {
    use std::path::Path;

    use super::*;
    use crate::export::{Form, emit};
    use crate::recipe::read;
    use crate::recipe::schema::overrides::Setting;
    use crate::recipe::schema::request::Request;

    const ROOT: &str = "exp_name: run\ncache_dir: .cache\ndefaults:\n- _self_\n- model: small\n- loss: sft\n\
                    log_epsilon_P: 1\n";
    const BASE: &str = "# shared by all\nbatch_size: 32 # global\ngradient_accumulation_steps: 1\neval_batch_size: 32\n";

    /// A tree with the layout of HALOs, with these files of the group `model`, read for four GPUs.
    fn recipe(model: &[(&str, &str)], version: Option<&str>, overrides: &[&str]) -> Recipe {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("config.yaml", ROOT);
        write(
            "loss/sft.yaml",
            "trainer: SFTTrainer\ndataloader: SFTDataLoader\n",
        );
        for (name, text) in model {
            write(&format!("model/{name}.yaml"), text);
        }
        let setting = Setting {
            flag: "--recipe-gpus",
            path: "batch.gpus",
            value: "4".to_owned(),
        };
        read(&Request {
            path: folder.path().to_owned(),
            version: version.map(str::to_owned),
            overrides: overrides.iter().map(|o| (*o).to_owned()).collect(),
            settings: vec![setting],
            ..Request::default()
        })
        .unwrap_or_else(|error| panic!("{error}"))
    }

    /// The plan for two GPUs: 2 × 8 × 2 = 32.
    const HALF: BatchNumbers = BatchNumbers {
        world: 2,
        nodes: None,
        data_parallel: 2,
        global: 32,
        per_device_batch_size: 8,
        accumulation: 2,
        steps_per_generation: None,
    };

    fn written(recipe: &Recipe, numbers: &BatchNumbers) -> Result<Emitted, String> {
        emit(recipe, numbers, Form::Recipe).map_err(|error| error.to_string())
    }

    fn name(path: &Path) -> &str {
        path.file_name().unwrap().to_str().unwrap()
    }

    #[test]
    fn the_file_with_the_numbers_is_written_and_named() {
        let base = [
            ("base", BASE),
            ("small", "defaults:\n- base\nname_or_path: m\n"),
        ];
        let emitted = written(&recipe(&base, None, &[]), &HALF).unwrap();
        assert_eq!(emitted.text, BASE.replace("steps: 1", "steps: 2"));
        let replaces = emitted.replaces.unwrap();
        assert_eq!(name(&replaces), "base.yaml");
        assert_eq!(
            emitted.remarks,
            [format!(
                "replace `{}` of the tree by this",
                replaces.display()
            )]
        );
        // In the earlier version the batch size is that of one accumulation step.
        let earlier = recipe(&base, Some("before-2025-05-01"), &[]);
        let expected = BASE.replace("steps: 1", "steps: 2").replace("32 #", "16 #");
        assert_eq!(written(&earlier, &HALF).unwrap().text, expected);
        // Without a change the file is written as it is.
        let same = BatchNumbers {
            accumulation: 1,
            ..HALF
        };
        assert_eq!(
            written(&recipe(&base, None, &[]), &same).unwrap().text,
            BASE
        );
    }

    #[test]
    fn a_number_that_a_flag_overrides_is_written_too() {
        let model = [("small", BASE)];
        let flagged = recipe(&model, None, &["evenkeel.batch.global=64"]);
        let double = BatchNumbers {
            global: 64,
            accumulation: 4,
            ..HALF
        };
        let expected = BASE.replace("32 #", "64 #").replace("steps: 1", "steps: 4");
        assert_eq!(written(&flagged, &double).unwrap().text, expected);
    }

    #[test]
    fn a_missing_number_is_added_after_the_other() {
        let model = [("small", "batch_size: 32\neval_batch_size: 32\n")];
        assert_eq!(
            written(&recipe(&model, None, &[]), &HALF).unwrap().text,
            "batch_size: 32\ngradient_accumulation_steps: 2\neval_batch_size: 32\n"
        );
    }

    #[test]
    fn changed_overrides_are_named_with_their_new_values() {
        let model = [("small", BASE)];
        let typed = recipe(&model, None, &["model.gradient_accumulation_steps=1"]);
        let refused = written(&typed, &HALF).unwrap_err();
        let becomes =
            "`model.gradient_accumulation_steps=1` becomes `model.gradient_accumulation_steps=2`";
        assert!(refused.contains(becomes), "{refused}");
        assert!(refused.contains("--emit args"), "{refused}");
        // An override that keeps its value is no reason to refuse.
        let other = recipe(&model, None, &["++model.batch_size=32"]);
        let expected = BASE.replace("steps: 1", "steps: 2");
        assert_eq!(written(&other, &HALF).unwrap().text, expected);
        // One of two changes lies in a file, the other in an override.
        let earlier = Some("before-2025-05-01");
        let mixed = recipe(&model, earlier, &["model.batch_size=32"]);
        let emitted = written(&mixed, &HALF).unwrap();
        assert_eq!(emitted.text, expected);
        assert_eq!(
            emitted.remarks[1],
            "change these overrides too: `model.batch_size=32` becomes `model.batch_size=16`"
        );
    }

    #[test]
    fn numbers_in_several_files_are_refused_with_every_place() {
        let apart = [
            ("base", BASE),
            ("small", "defaults:\n- base\nbatch_size: 64\n"),
        ];
        let earlier = recipe(&apart, Some("before-2025-05-01"), &[]);
        let refused = written(&earlier, &HALF).unwrap_err();
        for part in [
            "`model.batch_size` becomes 16 in `",
            "small.yaml`",
            "`model.gradient_accumulation_steps` becomes 2 in `",
            "base.yaml`",
            "--emit args",
        ] {
            assert!(refused.contains(part), "{refused}");
        }
        let made = "n: 1\nbatch_size: 32\ngradient_accumulation_steps: ${.n}\n";
        let refused = written(&recipe(&[("small", made)], None, &[]), &HALF).unwrap_err();
        assert!(
            refused.starts_with("`model.gradient_accumulation_steps` is `${.n}` in `"),
            "{refused}"
        );
    }

    #[test]
    fn a_single_option_file_is_written_in_place() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("model")).unwrap();
        std::fs::write(folder.path().join("config.yaml"), ROOT).unwrap();
        let path = folder.path().join("model/small.yaml");
        std::fs::write(&path, BASE).unwrap();
        let request = Request {
            path: path.clone(),
            ..Request::default()
        };
        let emitted = written(&read(&request).unwrap(), &HALF).unwrap();
        assert_eq!(emitted.text, BASE.replace("steps: 1", "steps: 2"));
        assert_eq!(emitted.replaces, Some(path));
    }
}
