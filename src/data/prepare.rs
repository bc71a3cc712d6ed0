//! Preparation: writes a token store from the recipe's sources, once, before any rank starts.

mod from_files;
mod synthetic;

use std::path::Path;

use super::Part;
use super::error::DataError;
use super::manifest::Manifest;
use super::publish::Draft;
use super::request::{PrepareRequest, Progress};
use super::store::Store;

/// Upper limit of the sequence length; the store's index could not hold longer samples.
const MAX_SEQUENCE_LENGTH: u64 = 1 << 30;

/// Data that ranks can open.
#[derive(Debug, Clone, PartialEq)]
pub struct Prepared {
    /// Manifest of the data.
    pub manifest: Manifest,
    /// Notes on the sources and the preparation, for people, one line each.
    pub notes: Vec<String>,
    /// Whether the directory already held the same data.
    pub reused: bool,
}

/// Prepares the data of a recipe into `request.directory`, or finds it there unchanged. After an error the
/// directory is unchanged.
pub fn prepare(
    request: &PrepareRequest<'_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, DataError> {
    let data = request.data;
    if !(1..=MAX_SEQUENCE_LENGTH).contains(&data.sequence_length) {
        return Err(request.setting(
            "data.sequence_length",
            format!("{} tokens per sample", data.sequence_length),
            format!("set 1 to {MAX_SEQUENCE_LENGTH}"),
        ));
    }
    match data.train.as_slice() {
        [] => Err(request.no_data()),
        _ => match data.synthetic() {
            Some(language) => synthetic::prepare(request, language),
            None => from_files::prepare(request, progress),
        },
    }
}

/// The prepared data in the directory, if it has the same settings and sources and is complete.
fn reuse(request: &PrepareRequest<'_>, wanted: &Manifest) -> Result<Option<Prepared>, DataError> {
    let found = Manifest::read(request.directory);
    if let Some(directory) = request.began_in {
        let recorded = Manifest::read(directory);
        refuse_other_data(request.fingerprint, directory, recorded.as_ref(), wanted)?;
    }
    let Some(found) = found.ok().filter(|m| m.fingerprint == wanted.fingerprint) else {
        return Ok(None);
    };
    let parts = [
        (Part::Train, Some(&found.train)),
        (Part::Evaluation, found.evaluation.as_ref()),
    ];
    let stored = parts
        .iter()
        .filter_map(|(part, record)| Some((part, (*record)?)))
        .filter(|_| found.synthetic.is_none());
    for (part, record) in stored {
        let directory = request.directory.join(part.directory());
        match Store::verify(&directory, record, request.stopped) {
            Ok(()) => {}
            Err(DataError::Stopped) => return Err(DataError::Stopped),
            Err(_) => return Ok(None),
        }
    }
    Ok(Some(Prepared {
        notes: found.notes.clone(),
        manifest: found,
        reused: true,
    }))
}

/// Refuses data that differs from the data with which a run began. The run records its fingerprint outside
/// the data directory, so that the check works even if the data is lost. Runs of older versions have only the
/// manifest.
fn refuse_other_data(
    fingerprint: Option<&str>,
    directory: &Path,
    found: Result<&Manifest, &DataError>,
    wanted: &Manifest,
) -> Result<(), DataError> {
    let refuse = |problem, help| Err(DataError::source(directory, problem, help));
    let began = match (fingerprint, found) {
        (Some(began), _) => began,
        (None, Ok(found)) => &found.fingerprint,
        (None, Err(error)) => {
            let why = match error {
                DataError::Store { path, problem } => format!("{}: {problem}", path.display()),
                error => error.to_string(),
            };
            return refuse(
                format!("the record of the data that the run began with is lost: {why}"),
                "put back a copy of the directory, or start a new run",
            );
        }
    };
    if began == wanted.fingerprint {
        return Ok(());
    }
    let changed = match found {
        Ok(found) if found.fingerprint == began => found.differences(wanted),
        _ => format!(
            "their fingerprint was {began}, that of the sources and settings now is {}",
            wanted.fingerprint
        ),
    };
    refuse(
        format!("the run began with other data: {changed}"),
        "undo the change, or start a new run",
    )
}

/// Writes the manifest last and publishes the directory.
fn finish(draft: Draft, manifest: Manifest) -> Result<Prepared, DataError> {
    manifest.write(draft.path())?;
    draft.publish()?;
    Ok(Prepared {
        notes: manifest.notes.clone(),
        manifest,
        reused: false,
    })
}

#[cfg(test)]
mod tests;
