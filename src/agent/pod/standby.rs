//! A pod that is to join a running world: its processes start, load the data and reserve their memory while the others train.

use std::io;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64;

use super::PodAgent;
use crate::host::HostGeneration;
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
    /// Starts, once for each generation, what this pod needs to join the world of one that it is not part of.
    pub(super) fn stand_by(&mut self, record: &Generation) {
        let is_new = self.joins != Some(record.number) && self.standby.is_none();
        if is_new && self.all_ended() && self.is_prepared() {
            self.joins = Some(record.number);
            match self.standby_of(record) {
                Ok(standby) => self.standby = standby,
                // It joins the world with new processes.
                Err(problem) => self.warn(problem.message),
            }
        }
        self.show_standby();
    }

    /// Whether the pod has all that its processes read, without a bucket.
    fn is_prepared(&self) -> bool {
        let is_here = self.identity.bucket.is_none() && self.is_set_up;
        is_here && self.identity.run.join(files::RUN).exists()
    }

    /// `None`: no process can become a rank of this world without a checkpoint.
    fn standby_of(&self, record: &Generation) -> Result<Option<Standby>, Problem> {
        let run = Run::read(&self.identity.run);
        if !run.is_ok_and(|run| run.takes_processes(&record.plan)) {
            return Ok(None);
        }
        let gpus = self.gpus(&Inventory::discover())?;
        let cannot = |error| self.cannot_start(error);
        let key = Key::random().map_err(cannot)?;
        let nothing = self.start_in(record, 0, &[], &key);
        let host = HostGeneration::start(&nothing, None, &self.events).map_err(cannot)?;
        let mut host = host.with_spares_from(self.first_spare());
        let devices = self.identity.devices;
        for device in 0..devices {
            let gpu = usize::try_from(device)
                .ok()
                .and_then(|device| gpus.get(device));
            let gpu = gpu.map_or(&[][..], std::slice::from_ref);
            let start = self.start_in(record, devices, gpu, &key);
            host.stand_by(&start, &self.events).map_err(cannot)?;
        }
        Ok(Some(Standby {
            host,
            since: Instant::now(),
        }))
    }

    /// Number of the first process that stands by: other pods write such logs into the same directory.
    pub(super) fn first_spare(&self) -> u64 {
        xxh3_64(self.identity.pod.as_bytes()) >> 32
    }

    fn cannot_start(&self, error: io::Error) -> Problem {
        FileError::from_io("start processes in", &self.identity.run, 0, error).into()
    }

    /// Keeps as many processes standing by beside the ranks as the recipe asks for. Where the ranks use GPUs, none is free.
    pub(super) fn keep_spares(&mut self) {
        let wanted = self.spares;
        let Some(mut current) = self.current.take_if(|it| it.lacks_spares(wanted)) else {
            return;
        };
        let record = current.record.clone();
        let count = current.ranks().end - current.ranks().start;
        let started = Key::random().and_then(|key| {
            current.stand_by(&self.start_in(&record, count, &[], &key), &self.events)
        });
        self.current = Some(current);
        if let Err(error) = started {
            self.spares = 0;
            self.warn(self.cannot_start(error).message);
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
