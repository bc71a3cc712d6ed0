//! The files of a run whose hosts or pods share no directory: each has a run directory on its own disk, and a bucket has
//! what they need from each other. `docs/checkpoints.md` lists every file with its place.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::run::{BuiltIn, Run};
use super::{TrainState, checkpoint_ref};
use crate::bucket::{Bucket, BucketError, Cause};
use crate::checkpoint::{CheckpointError, FileEntry, bucket_copy};
use crate::lifecycle::{CheckpointRef, Generation, files};
use crate::util::durable::{self, FileError, create_directory};
use crate::util::{input, tree};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Brought {
    /// The disk has everything that the ranks read.
    Ready,
    /// The run is not prepared yet.
    Unprepared,
}

/// Brings what the ranks of a generation of the built-in trainer read to this disk. The first pod (`mine`) takes what it
/// has prepared to the bucket.
pub fn bring(
    bucket: &Bucket,
    run: &Path,
    record: &Generation,
    mine: bool,
) -> Result<Brought, CheckpointError> {
    if !bring_run(bucket, run, mine)? {
        return Ok(Brought::Unprepared);
    }
    // Ranks that continue bring a newer state.
    if let Some(start) = record.start.as_ref().filter(|_| record.carried.is_none()) {
        bucket_copy::fetch(bucket, run, &start.path, checkpoint_ref::checksum(start)?)?;
    }
    if mine {
        bucket.put_json(&key_of(record.number, files::RECORD), &record.sealed())?;
    }
    Ok(Brought::Ready)
}

/// The key of a generation's file.
pub fn key_of(generation: u64, file: &str) -> String {
    format!("{}/{file}", files::generation(generation))
}

/// Makes `run.json` and the prepared data of disk and bucket the same; false if neither has them, or only the disk of a
/// pod that is not the first. Of two pods that prepared the run, the bucket has the result of the first.
fn bring_run(bucket: &Bucket, run: &Path, mine: bool) -> Result<bool, CheckpointError> {
    let (file, data) = (run.join(files::RUN), run.join(files::DATA));
    loop {
        let own = own_run(run)?;
        match (bucket.get(files::RUN)?, own) {
            (Some(theirs), Some(own)) if theirs == own => return Ok(true),
            (Some(theirs), _) => {
                for outdated in [&file, &data] {
                    durable::remove(outdated)?;
                }
                download_directory(bucket, files::DATA, &data)?;
                check_data(bucket, &theirs, &data)?;
                durable::write_atomically(&file, &theirs)?;
                return Ok(true);
            }
            (None, Some(own)) if mine => {
                upload_data(bucket, &data, &mut |_, _| true)?;
                match bucket.create(files::RUN, own) {
                    Err(error) if error.cause == Cause::Taken => continue,
                    created => created?,
                }
                return Ok(true);
            }
            (None, _) => return Ok(false),
        }
    }
}

/// `run.json` of this disk.
fn own_run(run: &Path) -> Result<Option<Vec<u8>>, FileError> {
    match durable::read(&run.join(files::RUN)) {
        Err(error) if error.is_absent() => Ok(None),
        read => Ok(Some(read?)),
    }
}

/// Takes the run that the launcher has prepared to the bucket: the data, the weights and tokenizer with which it begins, and
/// `run.json` last. `progress` gets the bytes that are there and those of all files; false stops, and so does the result.
pub fn publish(
    bucket: &Bucket,
    run: &Path,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<bool, CheckpointError> {
    let own = durable::read(&run.join(files::RUN))?;
    let theirs = bucket.get(files::RUN)?;
    if theirs.as_ref().is_some_and(|theirs| *theirs == own) {
        return Ok(true);
    }
    // A resume changes only `run.json`.
    if theirs.is_none() {
        if !upload_data(bucket, &run.join(files::DATA), progress)? {
            return Ok(false);
        }
        let prepared: Run = durable::parse_json(&run.join(files::RUN), &own)?;
        if let Some(built_in) = &prepared.built_in
            && !upload_inputs(bucket, built_in, progress)?
        {
            return Ok(false);
        }
    }
    bucket.put(files::RUN, own)?;
    Ok(true)
}

/// Uploads the prepared data; false if `progress` has stopped it.
fn upload_data(
    bucket: &Bucket,
    data: &Path,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<bool, CheckpointError> {
    let found = tree::files_below(data)?;
    let keys = found
        .iter()
        .map(|file| format!("{}/{}", files::DATA, tree::relative(file, data)));
    let named: Vec<(&PathBuf, String)> = found.iter().zip(keys).collect();
    upload_all(&named, progress, |file, key| Ok(bucket.upload(file, key)?))
}

/// Uploads files by `upload`, and says how many bytes are there.
fn upload_all(
    named: &[(&PathBuf, String)],
    progress: &mut dyn FnMut(u64, u64) -> bool,
    mut upload: impl FnMut(&Path, &str) -> Result<(), CheckpointError>,
) -> Result<bool, CheckpointError> {
    let bytes = |file: &Path| file.metadata().map_or(0, |about| about.len());
    let total = named.iter().map(|(file, _)| bytes(file)).sum();
    let mut done = 0;
    for (file, key) in named {
        if !progress(done, total) {
            return Ok(false);
        }
        upload(file, key)?;
        done += bytes(file);
    }
    Ok(progress(done, total))
}

/// The files with which the run begins and that ranks read: of the folders with weights, and of the tokenizer.
fn inputs(built_in: &BuiltIn) -> Result<Vec<PathBuf>, FileError> {
    let mut found = Vec::new();
    for folder in built_in.weight_folders() {
        let entries = tree::entries(folder)?.into_iter();
        found.extend(entries.filter(|file| file.is_file() && is_of_weights(file)));
    }
    found.extend(built_in.companions.iter().cloned());
    found.sort();
    found.dedup();
    Ok(found)
}

/// Whether a file of a folder with weights belongs to them, and not to the training that has written them.
fn is_of_weights(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str());
    let name = name.unwrap_or_default();
    let is_state =
        name.starts_with("optimizer-") || ["manifest.json", "state.json"].contains(&name);
    !is_state && (name.ends_with(".safetensors") || name.ends_with(".json"))
}

fn upload_inputs(
    bucket: &Bucket,
    built_in: &BuiltIn,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<bool, CheckpointError> {
    let found = inputs(built_in)?;
    let keys = found.iter().map(|file| files::input(file));
    let named: Vec<(&PathBuf, String)> = found.iter().zip(keys).collect();
    let mut entries = BTreeMap::new();
    let upload = |file: &Path, key: &str| {
        entries.insert(key.to_owned(), bucket_copy::upload(bucket, file, key)?);
        Ok(())
    };
    if !upload_all(&named, progress, upload)? {
        return Ok(false);
    }
    bucket.put_json(files::INPUTS_LIST, &entries)?;
    Ok(true)
}

/// Brings the weights and the tokenizer with which the run begins to this disk, where [`Run::read`] finds them. A file that
/// is there has its content.
pub fn bring_inputs(bucket: &Bucket, run: &Path) -> Result<(), CheckpointError> {
    let entries = bucket.read_json::<BTreeMap<String, FileEntry>>(files::INPUTS_LIST)?;
    for (key, entry) in entries.unwrap_or_default() {
        if !files::is_input(&key) {
            let odd = format!("it names `{key}`, which no launcher writes");
            return Err(BucketError::damaged(&bucket.url(files::INPUTS_LIST), odd).into());
        }
        let file = run.join(&key);
        if file
            .metadata()
            .is_ok_and(|about| about.len() == entry.bytes)
        {
            continue;
        }
        create_directory(file.parent().unwrap_or(run))?;
        let partial = files::partial(&file);
        bucket_copy::complete(bucket, &key, &partial, entry)?;
        // After a power failure a file of this size has its content.
        let renamed = input::open(&partial).and_then(|written| written.sync_all());
        renamed
            .and_then(|()| std::fs::rename(&partial, &file))
            .map_err(|error| FileError::from_io("rename", &partial, 0, error))?;
    }
    Ok(())
}

/// Brings what a proof of the ledger reads to this disk: the run and its data. Returns the state of training in the
/// checkpoint whose history it proves.
pub fn bring_proof(
    bucket: &Bucket,
    run: &Path,
    checkpoint: &CheckpointRef,
) -> Result<TrainState, CheckpointError> {
    create_directory(run)?;
    bring_run(bucket, run, false)?;
    for number in bucket_copy::generations(bucket)? {
        let key = key_of(number, files::RECORD);
        if let Some(bytes) = bucket.get(&key)? {
            create_directory(&run.join(files::generation(number)))?;
            durable::write_atomically(&run.join(key), &bytes)?;
        }
    }
    let manifest = checkpoint_ref::checksum(checkpoint)?;
    checkpoint_ref::state_in_bucket(bucket, &checkpoint.path, manifest)
}

/// Refuses data of another preparation than that of `run.json`.
fn check_data(bucket: &Bucket, run: &[u8], data: &Path) -> Result<(), CheckpointError> {
    let damaged = |message: String| BucketError::damaged(&bucket.url(files::DATA), message);
    let run: Run = serde_json::from_slice(run).map_err(|error| damaged(error.to_string()))?;
    match run.prepared(data) {
        Ok(true) => Ok(()),
        Ok(false) => Err(damaged("it is of another preparation than run.json".to_owned()).into()),
        Err(error) => Err(damaged(error.to_string()).into()),
    }
}

fn download_directory(bucket: &Bucket, key: &str, directory: &Path) -> Result<(), CheckpointError> {
    for object in bucket.list(key)? {
        let file = object.key[key.len()..].trim_start_matches('/');
        let file = directory.join(file);
        create_directory(file.parent().unwrap_or(directory))?;
        bucket_copy::download(bucket, &object.key, &file, object.bytes)?;
    }
    Ok(())
}
