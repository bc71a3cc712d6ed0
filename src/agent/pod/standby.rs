//! A pod that is to join a running world: its processes start, load the data and reserve their memory while the others train.

use std::io;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64;

use super::PodAgent;
use crate::bucket::Bucket;
use crate::host::{HostGeneration, Start};
use crate::inventory::Inventory;
use crate::lifecycle::agent_state::Problem;
use crate::lifecycle::{Generation, files};
use crate::train::Run;
use crate::util::durable::FileError;
use crate::util::key::Key;

/// Longest time for which the others do not wait for these processes.
const PREPARING: Duration = Duration::from_secs(120);

/// The processes of this pod that stand by.
pub struct Standby {
    pub host: HostGeneration,
    since: Instant,
}

impl PodAgent {
    /// Starts what this pod needs to join the world of a generation that it is not part of.
    pub(super) fn stand_by(&mut self, record: &Generation) {
        if self.standby.is_none() && self.all_ended() && self.may_join(record) {
            match self.standby_of(record) {
                Ok(standby) => self.standby = Some(standby),
                // It joins the world with new processes.
                Err(problem) => self.warn(problem.message),
            }
        }
        self.show_standby();
    }

    /// Whether a process can become a rank of this world without a checkpoint.
    fn may_join(&self, record: &Generation) -> bool {
        let is_here = self.identity.bucket.is_none() && self.is_set_up;
        let is_prepared = is_here && self.identity.run.join(files::RUN).exists();
        let run = is_prepared.then(|| Run::read(&self.identity.run));
        run.is_some_and(|run| run.is_ok_and(|run| run.takes_processes(&record.plan)))
    }

    fn standby_of(&self, record: &Generation) -> Result<Standby, Problem> {
        let gpus = self.gpus(&Inventory::discover())?;
        let host = self.with_start(record, 0, &[], |start| {
            HostGeneration::start(start, None, &self.events)
        })?;
        let mut host = host.with_spares_from(self.first_spare());
        for device in 0..self.identity.devices {
            let gpu = usize::try_from(device)
                .ok()
                .and_then(|device| gpus.get(device));
            let gpu = gpu.map_or(&[][..], std::slice::from_ref);
            self.with_start(record, self.identity.devices, gpu, |start| {
                host.stand_by(start, &self.events)
            })?;
        }
        Ok(Standby {
            host,
            since: Instant::now(),
        })
    }

    /// Number of the first process that stands by: other pods write such logs into the same directory.
    pub(super) fn first_spare(&self) -> u64 {
        xxh3_64(self.identity.pod.as_bytes()) >> 32
    }

    /// Starts something for this pod in a generation. `count`: processes that share the pod's processors.
    fn with_start<T>(
        &self,
        record: &Generation,
        count: u64,
        gpus: &[String],
        start: impl FnOnce(&Start<'_>) -> io::Result<T>,
    ) -> Result<T, Problem> {
        let run = &self.identity.run;
        let cannot = |error| FileError::from_io("start processes in", run, 0, error);
        let deadline = self.job.as_ref().map(|job| job.progress_deadline);
        let started = start(&Start {
            evenkeel: &self.identity.program,
            run_dir: run,
            generation: record,
            first: 0,
            count,
            cores: self.identity.cores,
            gpus,
            key: &Key::random().map_err(cannot)?,
            progress_deadline: deadline.unwrap_or_default(),
            bucket: self.identity.bucket.as_ref().map(Bucket::base),
            shows_built_in: false,
        });
        Ok(started.map_err(cannot)?)
    }

    /// Keeps as many processes standing by beside the ranks as the recipe asks for. Where the ranks use GPUs, none is free.
    pub(super) fn keep_spares(&mut self) {
        let wanted = self.spares;
        let Some(mut current) = self.current.take_if(|it| it.lacks_spares(wanted)) else {
            return;
        };
        let record = current.record.clone();
        let count = current.ranks().end - current.ranks().start;
        let started = self.with_start(&record, count, &[], |start| {
            current.stand_by(start, &self.events)
        });
        self.current = Some(current);
        if let Err(problem) = started {
            self.spares = 0;
            self.warn(problem.message);
        }
    }

    /// Publishes whether the processes only begin to stand by.
    pub(super) fn show_standby(&mut self) {
        let prepares = self.standby.as_ref().is_some_and(|standby| {
            !standby.host.are_spares_ready() && standby.since.elapsed() < PREPARING
        });
        if std::mem::replace(&mut self.state.prepares, prepares) != prepares {
            self.publish();
        }
    }
}
