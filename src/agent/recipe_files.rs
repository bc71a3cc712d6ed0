//! The recipe of a TrainingJob as files, which is how recipes are read.

use std::fs;
use std::path::{Path, PathBuf};

use crate::durable::{self, FileError};
use crate::job::api::status::RecipeSnapshot;
use crate::recipe::{self, ReadError, Recipe, Request};

/// Why a recipe cannot be used in its pod.
#[derive(Debug, thiserror::Error)]
pub enum RecipeError {
    /// It cannot be written down.
    #[error(transparent)]
    File(#[from] FileError),
    /// It cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// Writes a recipe into a directory, and says where it stands.
pub fn write(snapshot: &RecipeSnapshot, files: &Path) -> Result<Request, FileError> {
    fs::create_dir_all(files).map_err(|error| FileError::from_io("create", files, 0, error))?;
    let path = files.join("recipe.yaml");
    durable::write_atomically(&path, snapshot.text.as_bytes())?;
    let accelerate = match &snapshot.accelerate {
        Some(text) => {
            let file = files.join("accelerate.yaml");
            durable::write_atomically(&file, text.as_bytes())?;
            Some(file)
        }
        None => None,
    };
    Ok(Request {
        path,
        accelerate,
        overrides: snapshot.overrides.clone(),
        ..Request::default()
    })
}

/// Reads a recipe as the controller did.
pub fn read(snapshot: &RecipeSnapshot, files: &Path) -> Result<Recipe, RecipeError> {
    Ok(recipe::read(&write(snapshot, files)?)?)
}

/// Where they stand in a pod: on its container's own disk.
pub fn directory() -> PathBuf {
    std::env::temp_dir().join("evenkeel-recipe")
}
