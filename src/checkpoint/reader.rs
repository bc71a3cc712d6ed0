//! Reads checkpoints and verifies them.

use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde_json::Value;

use super::checksum::{FileEntry, Hasher};
use super::manifest::Manifest;
use super::names::{Committed, STATE};
use super::unit_file::{self, Content, TensorShape, UnitShape, unit_shapes};
use super::verified::{self, Damage, check_size};
use super::{CheckpointError, Checksum};
use crate::engine::{Engine, Layout, UnitState};

/// A committed checkpoint, open for reading. It returns only content that was checked against the manifest
/// while it was read.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    checksum: Checksum,
}

impl Checkpoint {
    /// Opens a checkpoint and checks every byte, all files in parallel: the launcher calls it before it
    /// references the checkpoint. `expected` is the checksum of a checkpoint reference.
    pub fn open(path: &Path, expected: Option<Checksum>) -> Result<Self, CheckpointError> {
        let checkpoint = Self::open_manifest(path, expected)?;
        checkpoint.check_every(verified::verify)?;
        Ok(checkpoint)
    }

    /// Opens a checkpoint and checks its manifest and the sizes of its files; the content is checked while it
    /// is read. Ranks use it, because they read nearly all of it anyway.
    pub fn open_lazily(path: &Path, expected: Option<Checksum>) -> Result<Self, CheckpointError> {
        let checkpoint = Self::open_manifest(path, expected)?;
        checkpoint.check_every(check_size)?;
        Ok(checkpoint)
    }

    fn open_manifest(path: &Path, expected: Option<Checksum>) -> Result<Self, CheckpointError> {
        let (manifest, checksum) = Manifest::read(path)?;
        if let Some(expected) = expected.filter(|expected| *expected != checksum) {
            return Err(CheckpointError::NotThePinned {
                path: path.to_path_buf(),
                found: checksum,
                expected,
            });
        }
        Ok(Self {
            path: path.to_path_buf(),
            manifest,
            checksum,
        })
    }

    fn check_every(
        &self,
        check: impl Fn(&Path, FileEntry) -> Result<(), Damage> + Sync,
    ) -> Result<(), CheckpointError> {
        let damage: Vec<Damage> = (self.manifest.files.par_iter())
            .filter_map(|(name, entry)| check(&self.path.join(name), *entry).err())
            .collect();
        if damage.is_empty() {
            return Ok(());
        }
        Err(self.damaged(damage))
    }

    fn damaged(&self, damage: Vec<Damage>) -> CheckpointError {
        CheckpointError::Damaged {
            path: self.path.clone(),
            damage,
        }
    }

    /// Generation, step, samples, world and shape.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The data of a checkpoint reference.
    pub fn committed(&self) -> Committed {
        self.manifest.committed(&self.path, self.checksum)
    }

    /// Checks that the checkpoint belongs to a model with this layout.
    pub fn check_layout(&self, layout: &Layout) -> Result<(), CheckpointError> {
        match difference(&self.manifest.units, &unit_shapes(layout)) {
            None => Ok(()),
            Some(difference) => Err(CheckpointError::Shape {
                path: self.path.clone(),
                difference,
            }),
        }
    }

    /// Reads one of the units of [`Manifest::units`].
    pub fn load_unit(&self, unit: usize) -> Result<UnitState, CheckpointError> {
        let units = self.manifest.units.len();
        let shape = self.manifest.units.get(unit).ok_or_else(|| {
            CheckpointError::Misuse(format!("unit {unit} of a checkpoint of {units}"))
        })?;
        let mut state = UnitState::default();
        for content in Content::ALL {
            self.load(content, unit, shape, &mut state)?;
        }
        Ok(state)
    }

    /// The checksum of the weights: of each tensor's name, shape and values in the order of the model. Which ranks wrote
    /// them to which files does not change it.
    pub fn weights_checksum(&self) -> Result<Checksum, CheckpointError> {
        let mut hasher = Hasher::default();
        for (index, unit) in self.manifest.units.iter().enumerate() {
            let mut state = UnitState::default();
            self.load(Content::Weights, index, unit, &mut state)?;
            let mut values = &state.parameters[..];
            for TensorShape { name, shape } in &unit.parameters {
                hasher.update(format!("{name} {shape:?}\n").as_bytes());
                let (of_tensor, rest) = values.split_at(shape.iter().product());
                hasher.update(bytemuck::cast_slice(of_tensor));
                values = rest;
            }
        }
        Ok(hasher.finish().xxh3_128)
    }

    fn load(
        &self,
        content: Content,
        index: usize,
        shape: &UnitShape,
        state: &mut UnitState,
    ) -> Result<(), CheckpointError> {
        let name = content.file_name(index, &self.manifest.units);
        let path = self.path.join(&name);
        unit_file::read(&path, self.entry(&name)?, content, shape, state)
            .map_err(|damage| self.damaged(vec![damage]))
    }

    /// Loads weights and optimiser states into an engine, whatever world wrote them.
    pub fn restore(&self, engine: &mut dyn Engine) -> Result<(), CheckpointError> {
        self.check_layout(engine.layout())?;
        for unit in 0..self.manifest.units.len() {
            engine.import(unit, &self.load_unit(unit)?)?;
        }
        Ok(())
    }

    /// State of the training loop.
    pub fn state(&self) -> Result<Value, CheckpointError> {
        let path = self.path.join(STATE);
        let bytes = verified::read(&path, self.entry(STATE)?)
            .map_err(|damage| self.damaged(vec![damage]))?;
        serde_json::from_slice(&bytes).map_err(|error| {
            let reason = format!("cannot be parsed: {error}");
            self.damaged(vec![verified::damage(&path, reason)])
        })
    }

    fn entry(&self, name: &str) -> Result<FileEntry, CheckpointError> {
        self.manifest
            .listed(name)
            .map_err(|reason| CheckpointError::Manifest {
                path: self.path.clone(),
                reason,
            })
    }
}

/// The first difference between the tensors of a checkpoint and those of a model, with both shapes.
fn difference(held: &[UnitShape], wanted: &[UnitShape]) -> Option<String> {
    fn tensors(units: &[UnitShape]) -> Vec<(usize, &TensorShape)> {
        let units = units.iter().enumerate();
        let tensors =
            units.flat_map(|(index, unit)| unit.parameters.iter().map(move |t| (index, t)));
        tensors.collect()
    }
    let (in_checkpoint, in_model) = (tensors(held), tensors(wanted));
    let longest = in_checkpoint.len().max(in_model.len());
    let first = (0..longest).find(|&i| in_checkpoint.get(i) != in_model.get(i))?;
    let tensor = |tensors: &[(usize, &TensorShape)]| match tensors.get(first) {
        Some((unit, TensorShape { name, shape })) => format!("`{name}` {shape:?} in unit {unit}"),
        None => "nothing more".to_string(),
    };
    let total = |units: &[UnitShape]| {
        let elements: usize = units.iter().map(UnitShape::elements).sum();
        format!("{} units with {elements} parameters", units.len())
    };
    Some(format!(
        "it holds {} where the model has {} ({} against {})",
        tensor(&in_checkpoint),
        tensor(&in_model),
        total(held),
        total(wanted)
    ))
}
