//! The fastest of cuBLASLt's algorithms for each product, measured once on a GPU.
//!
//! Algorithms add in different orders, so another choice gives other bits. A choice is kept in the run's directory, so
//! that a repeated run computes the same, and in the user's cache for other runs on GPUs of this model.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::compiler::users_cache;
use crate::util::durable;

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

/// Algorithms by the descriptions of their products.
type Choices = BTreeMap<String, Algorithm>;

/// The choices in some files.
#[derive(Debug, Default)]
pub struct Measured {
    /// The first that has a product is used.
    files: Vec<(PathBuf, Choices)>,
    /// Products of fewer FLOPs are not measured.
    least_flops: f64,
}

impl Measured {
    /// FLOPs of a product that takes long enough to be measured: some microseconds.
    pub const LEAST_FLOPS: f64 = 1e9;

    /// Reads the files. One that is missing or damaged has no choice. Products of fewer than `least_flops` are not
    /// measured.
    pub fn read(files: Vec<PathBuf>, least_flops: f64) -> Measured {
        let files = files.into_iter().map(|file| {
            let choices = durable::read_json(&file).unwrap_or_default();
            (file, choices)
        });
        Measured {
            files: files.collect(),
            least_flops,
        }
    }

    /// Whether a product is large enough to be measured.
    pub fn takes(&self, flops: f64) -> bool {
        flops >= self.least_flops
    }

    pub fn get(&self, product: &str) -> Option<Algorithm> {
        let mut choices = self.files.iter().map(|(_, choices)| choices);
        choices.find_map(|choices| choices.get(product)).copied()
    }

    /// Writes a choice that was found in a file to those without one.
    pub fn spread(&mut self, product: &str, algorithm: Algorithm) {
        self.update(|choices| {
            choices.entry(product.to_owned()).or_insert(algorithm);
        });
    }

    /// Writes a measurement to all files.
    pub fn add(&mut self, product: &str, algorithm: Algorithm) {
        self.update(|choices| {
            choices.insert(product.to_owned(), algorithm);
        });
    }

    /// Changes the files. A full or read-only disk costs the next process a measurement.
    fn update(&mut self, change: impl Fn(&mut Choices)) {
        for (file, choices) in &mut self.files {
            // Another process may have added others.
            let before: Choices = durable::read_json(file).unwrap_or_default();
            let mut after = before.clone();
            change(&mut after);
            if after != before {
                let folder = file.parent().unwrap_or(Path::new("."));
                let _ = durable::create_directory(folder)
                    .and_then(|()| durable::write_json(file, &after));
            }
            *choices = after;
        }
    }
}
