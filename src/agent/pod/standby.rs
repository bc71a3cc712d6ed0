//! A pod that is to join a running world: its processes start, load the data and reserve their memory while the others train.

use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64;

use super::PodAgent;
use crate::host::{HostGeneration, Start};
use crate::inventory::Inventory;
use crate::lifecycle::agent_state::Problem;
use crate::lifecycle::{Generation, files};
use crate::recipe::schema::spec::Strategy;
use crate::train::Run;
use crate::train::preferences::Loss;
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
        let is_built_in = self.external_job().is_none();
        let is_whole = record.plan.facts.strategy == Strategy::Ddp;
        let is_possible = is_built_in && is_whole && self.identity.bucket.is_none();
        let is_prepared = self.is_set_up && self.identity.run.join(files::RUN).exists();
        is_possible
            && is_prepared
            && Run::read(&self.identity.run).is_ok_and(|run| Loss::of(&run.spec).is_none())
    }

    fn standby_of(&self, record: &Generation) -> Result<Standby, Problem> {
        let run = &self.identity.run;
        let cannot = |error| FileError::from_io("start processes in", run, 0, error);
        let gpus = self.gpus(&Inventory::discover())?;
        let deadline = self.job.as_ref().map(|job| job.progress_deadline);
        let start = |count, gpus, key| Start {
            evenkeel: &self.identity.program,
            run_dir: run,
            generation: record,
            first: 0,
            count,
            cores: self.identity.cores,
            gpus,
            key,
            progress_deadline: deadline.unwrap_or_default(),
            bucket: None,
            shows_built_in: false,
        };
        let key = Key::random().map_err(cannot)?;
        let host = HostGeneration::start(&start(0, &[], &key), None, &self.events);
        // Other pods may write their logs beside those of this one.
        let first = xxh3_64(self.identity.pod.as_bytes()) >> 32;
        let mut host = host.map_err(cannot)?.with_spares_from(first);
        for device in 0..self.identity.devices {
            let gpu = usize::try_from(device)
                .ok()
                .and_then(|device| gpus.get(device));
            let gpu = gpu.map_or(&[][..], std::slice::from_ref);
            let start = start(self.identity.devices, gpu, &key);
            host.stand_by(&start, &self.events).map_err(cannot)?;
        }
        Ok(Standby {
            host,
            since: Instant::now(),
        })
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
