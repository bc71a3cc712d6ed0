//! The fastest of cuBLASLt's algorithms for each product, measured once on a GPU.
//!
//! Algorithms add in different orders, so another choice gives other bits. A measurement is kept in the run's directory,
//! so that a repeated run computes the same, and in the user's cache for other runs on GPUs of this model.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::compiler::users_cache;

/// Name of the files.
const FILE: &str = "products.json";

/// The files of a run: in its directory, and in the user's cache folder if there is one.
pub fn files(run_directory: &Path) -> Vec<PathBuf> {
    let mut files = vec![run_directory.join(FILE)];
    files.extend(users_cache(FILE));
    files
}

/// `cublasLtMatmulAlgo_t`, which may be stored and used again with the same version of cuBLASLt.
pub type Algorithm = [u64; 8];

/// Algorithms by their products' descriptions.
#[derive(Debug, Default)]
pub struct Measured {
    /// What is measured is added to each of them; the first is read in preference.
    files: Vec<PathBuf>,
    known: BTreeMap<String, Algorithm>,
    /// Products of fewer FLOPs are not measured.
    least_flops: f64,
}

impl Measured {
    /// FLOPs of a product that takes long enough to be measured: some microseconds.
    pub const LEAST_FLOPS: f64 = 1e9;

    /// Reads the files. One that is missing or damaged holds nothing: they only save time. Products of fewer than
    /// `least_flops` are not measured.
    pub fn read(files: Vec<PathBuf>, least_flops: f64) -> Measured {
        let all = files.iter().rev().flat_map(|file| read(file));
        Measured {
            known: all.collect(),
            files,
            least_flops,
        }
    }

    /// Whether a product is large enough to be measured.
    pub fn takes(&self, flops: f64) -> bool {
        flops >= self.least_flops
    }

    pub fn get(&self, product: &str) -> Option<Algorithm> {
        self.known.get(product).copied()
    }

    /// Adds a measurement. A full or read-only disk costs the next process a measurement.
    pub fn add(&mut self, product: String, algorithm: Algorithm) {
        self.known.insert(product, algorithm);
        for file in &self.files {
            // Another process may have added others.
            let mut all = read(file);
            all.extend(self.known.clone());
            let _ = write(file, &all);
        }
    }
}

fn read(file: &Path) -> BTreeMap<String, Algorithm> {
    let bytes = std::fs::read(file).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

/// A rename makes the file visible complete, to other processes, too.
fn write(path: &Path, all: &BTreeMap<String, Algorithm>) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(&serde_json::to_vec_pretty(all)?)?;
    file.persist(path)?;
    Ok(())
}
