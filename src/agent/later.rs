//! Looks on the volume for generations that the job's status does not have. They exist after the API server was
//! restored from an older copy of its data.

use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use crate::checkpoint;
use crate::lifecycle::agent_state::LaterGeneration;
use crate::lifecycle::{Generation, files};
use crate::train::checkpoint_ref;
use crate::util::durable::read_json;

/// The search for one status of the job.
pub struct Search {
    /// The newest generation of the status.
    published: Option<Generation>,
    working: Option<JoinHandle<Option<LaterGeneration>>>,
    found: Option<LaterGeneration>,
}

impl Search {
    /// Begins to search; the volume may block.
    pub fn begin(run: PathBuf, job: &str, published: Option<&Generation>) -> Search {
        let (job, newest) = (job.to_owned(), published.cloned());
        Search {
            published: published.cloned(),
            working: Some(std::thread::spawn(move || {
                find(&run, &job, newest.as_ref())
            })),
            found: None,
        }
    }

    /// Whether it is the search for a status with this generation.
    pub fn is_for(&self, published: Option<&Generation>) -> bool {
        match (&self.published, published) {
            (Some(one), Some(other)) => is_same(one, other),
            (one, other) => one.is_none() && other.is_none(),
        }
    }

    /// Whether it has ended, and what it has found.
    pub fn result(&mut self) -> Option<Option<&LaterGeneration>> {
        if let Some(working) = self.working.take_if(|working| working.is_finished()) {
            // It does not panic.
            self.found = working.join().unwrap_or_default();
        }
        self.working.is_none().then_some(self.found.as_ref())
    }
}

/// Whether two records are of one generation: an API server that was restored may have published another one with
/// its number.
fn is_same(one: &Generation, other: &Generation) -> bool {
    let published_together = (one.created - other.created).abs() < 1e-3;
    one.number == other.number && published_together && one.members == other.members
}

/// The newest generation of this job on the volume, if the published one is older or another one of its number.
fn find(run: &Path, job: &str, published: Option<&Generation>) -> Option<LaterGeneration> {
    let numbers = std::fs::read_dir(run).into_iter().flatten().flatten();
    let numbers = numbers.filter_map(|entry| files::parse_generation(entry.file_name().to_str()?));
    let least = published.map_or(1, |generation| generation.number);
    let mut numbers: Vec<u64> = numbers.filter(|number| *number >= least).collect();
    numbers.sort_unstable();
    let record = numbers.into_iter().rev().find_map(|number| {
        let path = run.join(files::generation(number)).join(files::RECORD);
        let record: Generation = read_json(&path).ok()?;
        (record.job == job && record.number == number).then_some(record)
    })?;
    if published.is_some_and(|published| is_same(published, &record)) {
        return None;
    }
    let committed = checkpoint::list(run).unwrap_or_default().committed;
    let own = committed
        .iter()
        .rfind(|checkpoint| checkpoint.generation == record.number);
    let own = own.and_then(|own| checkpoint_ref::of(own, run).ok());
    Some(LaterGeneration {
        number: record.number,
        checkpoint: own.or(record.start),
    })
}
