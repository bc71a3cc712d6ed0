//! Models and data sets on Hugging Face's hub: their names, their snapshots in the cache that all programs of a user
//! share, and the download of what is missing there.
//!
//! A plan only reads the cache. [`Download`] connects; only a launch of the built-in trainer calls it.

mod cache;
mod client;
mod download;
mod error;
mod id;
mod settings;

use std::path::PathBuf;

use cache::RepoCache;
pub use cache::{files_of_snapshot, model_of_snapshot, repo_of_snapshot};
pub use download::{CARD, Download, Received, Small, account, readable};
pub use error::{Cause, HubError};
pub use id::{Kind, Repo, is_id, is_model, may_be_id};
pub use settings::{Settings, Token};

/// The hub as this machine reaches it.
#[derive(Debug, Clone)]
pub struct Hub {
    pub settings: Settings,
    /// Whether a launch downloads what the cache lacks.
    pub downloads: bool,
    /// Models whose download has begun, each with its commit.
    begun: Vec<(Repo, String)>,
}

impl Hub {
    /// The hub by the variables of this process.
    pub fn of_process() -> Hub {
        Hub::of(Settings::of_process())
    }

    pub fn of(settings: Settings) -> Hub {
        Hub {
            downloads: !settings.offline,
            settings,
            begun: Vec::new(),
        }
    }

    /// No hub: only directories of this machine hold models and data sets.
    pub fn none() -> Hub {
        Hub::of(Settings::none())
    }

    /// The hub's cache alone: what it lacks is elsewhere.
    pub fn cache_only(self) -> Hub {
        Hub {
            downloads: false,
            ..self
        }
    }

    /// Whether the user forbids connections, by HF_HUB_OFFLINE.
    pub fn is_offline(&self) -> bool {
        self.settings.offline && self.settings.cache.is_some()
    }

    /// The snapshot of a repository in the cache, complete or not.
    pub fn snapshot(&self, repo: &Repo) -> Option<PathBuf> {
        let cached = RepoCache::of(self.settings.cache.as_deref()?, repo);
        let begun = self.begun.iter().find(|(begun, _)| begun == repo);
        let revision = begun.map_or(&repo.revision, |(_, commit)| commit);
        cached.snapshot(revision)
    }

    /// The directory of a model in the cache, a snapshot or a folder of it, if it has this file.
    pub fn snapshot_with(&self, repo: &Repo, file: &str) -> Option<PathBuf> {
        let snapshot = self.snapshot(repo)?;
        let directory = match &repo.folder {
            Some(folder) => snapshot.join(folder),
            None => snapshot,
        };
        directory.join(file).is_file().then_some(directory)
    }

    /// Reads a model from this commit from now on, though its revision may not refer to it yet.
    pub fn begin(&mut self, repo: &Repo, commit: &str) {
        self.begun.push((repo.clone(), commit.to_owned()));
    }
}
