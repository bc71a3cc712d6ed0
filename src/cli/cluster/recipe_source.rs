//! Puts the files of a local recipe into a TrainingJob.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::api::recipe_snapshot::RecipeSnapshot;
use crate::api::{RecipeSource, RemainderPolicy};
use crate::cli::recipe_args::RecipeArgs;
use crate::recipe::{self, FileId, Recipe, SourceFile};

/// The recipe with every file that it was read from. Reads the files as the cluster does, under the
/// same overrides, and compares the results. `command`: the words that are the job if it has no recipe.
pub fn source(
    from: &RecipeArgs,
    recipe: &Recipe,
    command: &[String],
    overrides: &[String],
    remainder: RemainderPolicy,
) -> anyhow::Result<RecipeSource> {
    let dialect = from.options.dialect.map(|dialect| dialect.to_string());
    let mut source = RecipeSource {
        dialect,
        dialect_version: from.options.dialect_version.clone(),
        trainer_environment: recipe.spec.trainer.environment.clone(),
        deepspeed_config: recipe.spec.trainer.deepspeed_config.clone(),
        ..RecipeSource::default()
    };
    add_files(from, recipe, command, &mut source)?;
    compare(&source, recipe, overrides, remainder)?;
    Ok(source)
}

/// Puts the files into a source.
fn add_files(
    from: &RecipeArgs,
    recipe: &Recipe,
    command: &[String],
    source: &mut RecipeSource,
) -> anyhow::Result<()> {
    let here = std::env::current_dir().context("the working directory does not exist")?;
    let real = recipe.sources.iter().filter(|file| file.path.is_file());
    let files: BTreeMap<PathBuf, &SourceFile> = real
        .map(|file| (lexical(&here.join(&file.path)), file))
        .collect();
    let start = start(&here, files.keys());
    let snapshot = |path: &Path| {
        let path = lexical(&here.join(path));
        let below = path.strip_prefix(&start).unwrap_or(&path);
        let name = below
            .to_str()
            .map(|name| if name.is_empty() { "." } else { name });
        name.map(str::to_owned).with_context(|| {
            format!(
                "the path {} is not UTF-8, as a TrainingJob must be; rename it",
                path.display()
            )
        })
    };
    let of_recipe = recipe.files.recipe;
    let text =
        |file: Option<FileId>| file.and_then(|file| Some(recipe.sources.get(file)?.text.clone()));
    if from.recipe.as_os_str().is_empty() {
        source.command = command.to_vec();
    } else if !from.recipe.is_file() && !from.recipe.is_dir() {
        // A pipe has no path to keep.
        source.inline = text(of_recipe);
    } else {
        source.path = Some(snapshot(&from.recipe)?);
        if files.len() == 1 && from.recipe.is_file() {
            source.inline = text(of_recipe);
            return Ok(());
        }
    }
    for (path, file) in &files {
        source.files.insert(snapshot(path)?, file.text.clone());
    }
    // The config of the option, or of the launcher before the trainer's command.
    let of_launcher = (recipe.files.accelerate).filter(|_| !from.recipe.as_os_str().is_empty());
    let of_launcher = of_launcher.and_then(|file| recipe.sources.get(file));
    let accelerate = of_launcher.map(|file| file.path.as_path());
    source.accelerate_path = accelerate.map(snapshot).transpose()?;
    Ok(())
}

/// Base of the stored paths: the working directory, or its nearest ancestor that contains all
/// files.
fn start<'a>(here: &Path, files: impl Iterator<Item = &'a PathBuf> + Clone) -> PathBuf {
    let holds_all = |folder: &&Path| files.clone().all(|file| file.starts_with(folder));
    let start = here.ancestors().find(holds_all);
    start.unwrap_or(Path::new("/")).to_owned()
}

/// Removes `.` and `..` from a path without resolving links.
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

/// Reads the stored recipe as the cluster does and compares it.
fn compare(
    source: &RecipeSource,
    recipe: &Recipe,
    overrides: &[String],
    remainder: RemainderPolicy,
) -> anyhow::Result<()> {
    let snapshot = RecipeSnapshot::of(source, source.inline.clone(), overrides);
    let request = snapshot.request(remainder.into(), &recipe.spec.trainer.command)?;
    let remedy = "a TrainingJob contains the files that were read; run the command in their common \
                   folder, and use relative paths without `..`";
    let snapshot = match recipe::read(&request) {
        Ok(snapshot) => snapshot,
        Err(error) => bail!("the recipe cannot be read from the TrainingJob: {error}; {remedy}"),
    };
    if snapshot.spec != recipe.spec {
        bail!("the recipe would have another meaning in the TrainingJob; {remedy}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_paths_start_in_the_working_directory_or_an_ancestor() {
        let files = |paths: &[&str]| Vec::from_iter(paths.iter().map(PathBuf::from));
        let from = |paths: &[&str]| start(Path::new("/a/b"), files(paths).iter());
        assert_eq!(from(&["/a/b/config/config.yaml"]), Path::new("/a/b"));
        assert_eq!(from(&["/a/b/x.yaml", "/a/c/y.yaml"]), Path::new("/a"));
        assert_eq!(from(&["/elsewhere/x.yaml"]), Path::new("/"));
        assert_eq!(lexical(Path::new("/a/./b/../c/x")), Path::new("/a/c/x"));
    }
}
