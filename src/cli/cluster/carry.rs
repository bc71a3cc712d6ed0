//! The files of a recipe on this machine as a TrainingJob carries them.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};

use crate::cli::recipe_args::RecipeArgs;
use crate::job::api::status::RecipeSnapshot;
use crate::job::api::{RecipeSource, RemainderPolicy};
use crate::recipe::{self, FileId, Recipe, SourceFile};

/// What a command that stands for its recipe is called as a file.
const COMMAND: &str = "command.sh";

/// The recipe with every file that it was read from. What the cluster reads in them is compared with what
/// was read here, under the same overrides.
pub fn source(
    from: &RecipeArgs,
    recipe: &Recipe,
    overrides: &[String],
    remainder: RemainderPolicy,
) -> anyhow::Result<RecipeSource> {
    let dialect = from.options.dialect.map(|dialect| dialect.to_string());
    let mut source = RecipeSource {
        dialect,
        dialect_version: from.options.dialect_version.clone(),
        ..RecipeSource::default()
    };
    lay(from, recipe, &mut source)?;
    compare(&source, recipe, overrides, remainder)?;
    Ok(source)
}

/// Puts the files into a source.
fn lay(from: &RecipeArgs, recipe: &Recipe, source: &mut RecipeSource) -> anyhow::Result<()> {
    let here = std::env::current_dir().context("the working directory is gone")?;
    let real = recipe.sources.iter().filter(|file| file.path.is_file());
    let files: BTreeMap<PathBuf, &SourceFile> = real
        .map(|file| (lexical(&here.join(&file.path)), file))
        .collect();
    let start = start(&here, files.keys());
    let carried = |path: &Path| {
        let path = lexical(&here.join(path));
        let below = path.strip_prefix(&start).unwrap_or(&path);
        let name = below
            .to_str()
            .map(|name| if name.is_empty() { "." } else { name });
        name.map(str::to_owned).with_context(|| {
            format!(
                "the name of {} is not UTF-8, and a TrainingJob is: rename it",
                path.display()
            )
        })
    };
    let of_recipe = recipe.files.recipe;
    let of_command = recipe.files.command.map(|(file, _)| file);
    let text =
        |file: Option<FileId>| file.and_then(|file| Some(recipe.sources.get(file)?.text.clone()));
    if from.recipe.as_os_str().is_empty() {
        source.inline = text(of_command);
        source.path = Some(COMMAND.to_owned());
    } else if !from.recipe.is_file() && !from.recipe.is_dir() {
        // A pipe has no place that would tell anything.
        source.inline = text(of_recipe);
    } else {
        source.path = Some(carried(&from.recipe)?);
        if files.len() == 1 && from.recipe.is_file() {
            source.inline = text(of_recipe);
            return Ok(());
        }
    }
    for (path, file) in &files {
        source.files.insert(carried(path)?, file.text.clone());
    }
    let accelerate = from.options.accelerate.as_deref();
    source.accelerate_path = accelerate.map(carried).transpose()?;
    Ok(())
}

/// The folder that the paths of carried files begin in: the working directory, or what is above it and
/// all of them.
fn start<'a>(here: &Path, files: impl Iterator<Item = &'a PathBuf> + Clone) -> PathBuf {
    let holds_all = |folder: &&Path| files.clone().all(|file| file.starts_with(folder));
    let start = here.ancestors().find(holds_all);
    start.unwrap_or(Path::new("/")).to_owned()
}

/// A path without `.` and `..`, whatever links there are.
fn lexical(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path {
        if part == OsStr::new("..") {
            plain.pop();
        } else if part != OsStr::new(".") {
            plain.push(part);
        }
    }
    plain
}

/// Reads what is carried as the cluster will, and compares.
fn compare(
    source: &RecipeSource,
    recipe: &Recipe,
    overrides: &[String],
    remainder: RemainderPolicy,
) -> anyhow::Result<()> {
    let snapshot = RecipeSnapshot::of(source, source.inline.clone(), overrides);
    let request = snapshot
        .request(remainder)
        .map_err(|error| anyhow!(error))?;
    let way_out = "a TrainingJob carries the files that were read; start it from the folder that their \
                   names begin in, and name them without their folders above it";
    let mut carried = match recipe::read(&request) {
        Ok(carried) => carried,
        Err(error) => bail!("carried to the cluster the recipe cannot be read: {error}: {way_out}"),
    };
    // Its command travels by itself.
    let command = &recipe.spec.trainer.command;
    carried.spec.trainer.command.clone_from(command);
    if carried.spec != recipe.spec {
        bail!("carried to the cluster the recipe would mean something else: {way_out}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_begin_in_the_working_directory_or_above_it() {
        let files = |paths: &[&str]| Vec::from_iter(paths.iter().map(PathBuf::from));
        let from = |paths: &[&str]| start(Path::new("/a/b"), files(paths).iter());
        assert_eq!(from(&["/a/b/config/config.yaml"]), Path::new("/a/b"));
        assert_eq!(from(&["/a/b/x.yaml", "/a/c/y.yaml"]), Path::new("/a"));
        assert_eq!(from(&["/elsewhere/x.yaml"]), Path::new("/"));
        assert_eq!(lexical(Path::new("/a/./b/../c/x")), Path::new("/a/c/x"));
    }
}
