//! Commits the files of the ranks as a checkpoint; the coordinator's part.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Value, json};

use super::CheckpointError;
use super::checksum::{Checksum, FileEntry};
use super::history::not_written;
use super::lineage;
use super::manifest::{FORMAT, Manifest, Part};
use super::names::{
    ADAPTER_CONFIG, CHAT_TEMPLATE, CONFIG, Committed, INDEX, MANIFEST, STATE, Target,
};
use super::unit_file::{Content, UnitShape, is_adapter, unit_shapes};
use super::verified::check_size;
use crate::bucket::Bucket;
use crate::engine::Layout;
use crate::util::durable::{self, FileError, sync_directory};
use crate::util::input::{self, STATE_BYTES};

/// Content of a checkpoint besides the ranks' files, at the step at which the units were copied out of the
/// engine, which may be several steps ago.
#[derive(Debug, Clone, Copy)]
pub struct Contents<'a> {
    /// The units of the model.
    pub layout: &'a Layout,
    /// Samples consumed so far.
    pub samples: u64,
    /// The training loop's state, opaque to this module.
    pub state: &'a Value,
    /// Content of Hugging Face's `config.json`, or of PEFT's `adapter_config.json`.
    pub config: &'a Value,
    /// Files of the tokenizer, copied beside the weights under their own names.
    pub companions: &'a [PathBuf],
    /// Written instead of the tokenizer's own chat template.
    pub chat_template: Option<&'a str>,
}

/// Makes a checkpoint of the parts of all ranks: writes the remaining files, the manifest last, and renames
/// the directory. Until then the checkpoint is invisible; an error leaves nothing behind. With a bucket, its manifest
/// makes the checkpoint: of two ranks that commit the same step, one succeeds. An error leaves objects behind, since
/// they may be the other rank's; [`super::bucket_copy::retain`] removes them.
pub fn commit(
    target: &Target,
    parts: &[Part],
    contents: Contents<'_>,
) -> Result<Committed, CheckpointError> {
    let committed = complete(target, parts, contents).and_then(|files| files.publish(target));
    // A generation that starts has taken the files away, which is no fault of the volume or the bucket.
    let committed = committed.map_err(|error| match refuse_superseded(target) {
        Err(superseded @ CheckpointError::Superseded { .. }) => superseded,
        _ => not_written(target, error),
    });
    if committed.is_err() {
        // The first error is the one to report.
        let _ = abandon(target);
    }
    committed
}

/// Removes the files of a checkpoint that will not be committed. One rank of the generation calls it after
/// the writers of all ranks have finished.
pub fn abandon(target: &Target) -> Result<(), CheckpointError> {
    Ok(durable::remove(&target.partial())?)
}

/// Refuses the commit of a generation once a later one of its job starts: that one has searched for its start, or will
/// withdraw this checkpoint before it does.
fn refuse_superseded(target: &Target) -> Result<(), CheckpointError> {
    let generation = target.generation;
    match lineage::successor(&target.run_directory, target.bucket.as_ref(), generation)? {
        Some(successor) => Err(CheckpointError::Superseded {
            generation,
            successor,
        }),
        None => Ok(()),
    }
}

/// A checkpoint whose files are all written, and which may be committed.
pub(super) struct Complete {
    manifest: Manifest,
    /// The manifest as it is written.
    bytes: Vec<u8>,
    /// Files that only the coordinator has.
    own: Vec<String>,
}

/// Writes the remaining files of a checkpoint, its manifest last.
pub(super) fn complete(
    target: &Target,
    parts: &[Part],
    contents: Contents<'_>,
) -> Result<Complete, CheckpointError> {
    let partial = target.partial();
    let directory = target.directory();
    if directory.exists() {
        return Err(CheckpointError::Misuse(format!(
            "{} is there already",
            directory.display()
        )));
    }
    let (world, mut files) = collect(target, parts)?;
    // A bucket has the files that the other ranks report. They may have other disks.
    let shared = files.iter().filter(|_| target.bucket.is_none());
    for (name, entry) in shared {
        check_size(&partial.join(name), *entry).map_err(|damage| {
            CheckpointError::Misuse(format!(
                "the coordinator finds that {damage}, in {}; all machines have to share the run's \
                 directory",
                partial.display()
            ))
        })?;
    }

    let units = unit_shapes(contents.layout);
    let mut written = vec![(STATE, contents.state.clone())];
    if is_adapter(&units) {
        written.push((ADAPTER_CONFIG, contents.config.clone()));
    } else {
        written.push((INDEX, index(contents.layout, &units)));
        written.push((CONFIG, contents.config.clone()));
    }
    for (name, value) in written {
        let bytes = to_json(&value)?;
        files.insert(name.to_string(), write(&partial.join(name), &bytes)?);
    }
    if let Some(template) = contents.chat_template {
        let entry = write(&partial.join(CHAT_TEMPLATE), template.as_bytes())?;
        files.insert(CHAT_TEMPLATE.to_string(), entry);
    }
    for source in contents.companions {
        let name = source.file_name().and_then(|name| name.to_str());
        if contents.chat_template.is_some() && name == Some(CHAT_TEMPLATE) {
            continue;
        }
        let free = name.filter(|name| *name != MANIFEST && !files.contains_key(*name));
        let name = free.ok_or_else(|| {
            CheckpointError::Misuse(format!(
                "{} cannot lie beside a checkpoint's own files",
                source.display()
            ))
        })?;
        let bytes = input::read(source, STATE_BYTES)
            .map_err(|error| FileError::from_io("read", source, 0, error))?;
        files.insert(name.to_string(), write(&partial.join(name), &bytes)?);
    }

    let mut manifest = Manifest {
        format: FORMAT,
        evenkeel: env!("CARGO_PKG_VERSION").to_string(),
        generation: target.generation,
        step: target.step,
        samples: contents.samples,
        world,
        units,
        files,
        seal: String::new(),
    };
    (manifest.check_files()).map_err(|error| CheckpointError::Misuse(error.to_string()))?;
    let bytes = manifest.seal().map_err(not_json)?;
    write(&partial.join(MANIFEST), &bytes)?;
    refuse_superseded(target)?;
    let is_of_rank = |name: &&String| parts.iter().any(|part| part.files.contains_key(*name));
    let own = manifest.files.keys().filter(|name| !is_of_rank(name));
    Ok(Complete {
        own: own.cloned().collect(),
        manifest,
        bytes,
    })
}

impl Complete {
    /// Makes the checkpoint visible. Fails if a later generation has withdrawn it.
    pub(super) fn publish(self, target: &Target) -> Result<Committed, CheckpointError> {
        let (partial, directory) = (target.partial(), target.directory());
        if let Some(bucket) = &target.bucket {
            let began = Instant::now();
            for name in &self.own {
                let (file, key) = (partial.join(name), target.key(name));
                Bucket::patiently_since(began, || bucket.upload(&file, &key))?;
            }
            Bucket::patiently_since(began, || {
                bucket.create(&target.key(MANIFEST), self.bytes.clone())
            })?;
        }
        sync_directory(&partial)?;
        std::fs::rename(&partial, &directory)
            .map_err(|error| FileError::from_io("rename", &partial, 0, error))?;
        if let Some(parent) = directory.parent() {
            sync_directory(parent)?;
        }
        Ok((self.manifest).committed(&directory, Checksum::of(&self.bytes)))
    }
}

/// The files of all ranks, if every rank of one world wrote for this target.
fn collect(
    target: &Target,
    parts: &[Part],
) -> Result<(usize, BTreeMap<String, FileEntry>), CheckpointError> {
    let mut files = BTreeMap::new();
    for (rank, part) in parts.iter().enumerate() {
        let of_target = (part.generation, part.step) == (target.generation, target.step);
        if !of_target || (part.rank, part.world) != (rank, parts.len()) {
            return Err(CheckpointError::Misuse(format!(
                "part {rank} of {} for generation {} and step {} is that of rank {} of {} for \
                 generation {} and step {}",
                parts.len(),
                target.generation,
                target.step,
                part.rank,
                part.world,
                part.generation,
                part.step
            )));
        }
        files.extend(part.files.clone());
    }
    Ok((parts.len(), files))
}

/// Hugging Face's map from tensors to files.
fn index(layout: &Layout, units: &[UnitShape]) -> Value {
    let mut weight_map = serde_json::Map::new();
    let mut elements = 0;
    for (index, unit) in layout.units.iter().enumerate() {
        elements += unit.len;
        for parameter in &unit.parameters {
            let file = Content::Weights.file_name(index, units);
            weight_map.insert(parameter.name.clone(), file.into());
        }
    }
    json!({
        "metadata": {
            "total_parameters": elements,
            "total_size": elements * size_of::<f32>(),
        },
        "weight_map": weight_map,
    })
}

fn to_json(value: &Value) -> Result<Vec<u8>, CheckpointError> {
    let mut bytes = serde_json::to_vec_pretty(value).map_err(not_json)?;
    bytes.push(b'\n');
    Ok(bytes)
}

fn not_json(error: serde_json::Error) -> CheckpointError {
    CheckpointError::Misuse(format!("something has no JSON form: {error}"))
}

/// Writes a small file durably.
fn write(path: &Path, bytes: &[u8]) -> Result<FileEntry, FileError> {
    let written = || -> io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    written().map_err(|error| FileError::from_io("write", path, bytes.len() as u64, error))?;
    Ok(FileEntry::of(bytes))
}
