//! Starts a generation in a pod: checks the prerequisites, waits for the first member, and reports
//! what prevents the start.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::waiting::Waiting;
use super::{Membership, PodAgent, state_of};
use crate::agent::external::{self, external_call};
use crate::agent::mirror::Mirror;
use crate::agent::preparation::Preparation;
use crate::agent::volume;
use crate::bucket::Bucket;
use crate::external_trainer::choice;
use crate::host::{HostGeneration, Start};
use crate::inventory::{Devices, Inventory};
use crate::lifecycle::agent_state::{AgentState, Problem};
use crate::lifecycle::generation::Generation;
use crate::lifecycle::{Reason, authentication, files};
use crate::plan::DeviceKind;
use crate::telemetry::{Pace, now};
use crate::train::Run;
use crate::train::run_files::Brought;
use crate::util::durable::FileError;
use crate::util::key::Key;

/// Retry interval of NVML queries, volume checks and a failed preparation.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

impl PodAgent {
    /// Checks, before a generation counts on this pod, that the pod has the devices of its resource
    /// request. A pod with missing devices gets no ranks.
    pub(super) fn inspect(&mut self) {
        let checked = self
            .inspected
            .is_some_and(|at| at.elapsed() < RETRY_INTERVAL);
        let newest = self.job.as_ref().and_then(|job| job.generation.as_ref());
        let counts = newest.is_some_and(|c| c.record.ranks_of_pod(&self.identity.pod).is_some());
        // An NVML query may block, which must not delay the stop of ranks.
        if checked || counts || !self.all_ended() {
            return;
        }
        self.inspected = Some(Instant::now());
        let short = Inventory::discover().device_shortfall(self.identity.devices);
        let known = self.state.problem.as_ref();
        match short.map(Problem::hardware) {
            Some(problem) => self.report_problem(problem),
            None if known.is_some_and(Problem::is_hardware) => {
                self.state.problem = None;
                self.publish();
            }
            None => {}
        }
    }

    /// Starts this pod's share of a generation once the run is prepared. Older ranks have exited.
    pub(super) fn begin(&mut self, record: &Generation) {
        let Some((first, count)) = record.ranks_of_pod(&self.identity.pod) else {
            self.stand_by(record);
            return;
        };
        if self.pauses(record.number) {
            return;
        }
        if let (Some(mirror), Reason::RankLost { .. }) = (&self.mirror, &record.reason) {
            mirror.rank_lost(&record.lost);
        }
        let continues = |current: &HostGeneration| current.continues_in(record);
        let continues = self.current.as_ref().is_some_and(continues);
        // What ranks that continue leave is copied beside training.
        if !self.is_kept() && !continues {
            self.report_wait("copying what the last ranks have left to the bucket".to_owned());
            return;
        }
        match self.try_to_start(record, first, count) {
            Ok(true) => self.publish(),
            Ok(false) => {}
            Err(problem) => {
                self.pause = Some((record.number, Instant::now()));
                self.delayed = Some((record.number, false));
                self.report_problem(problem);
            }
        }
    }

    /// Whether a start of this generation has just failed. Another one is tried at once.
    pub(super) fn pauses(&self, number: u64) -> bool {
        let pause = self.pause.filter(|(of, _)| *of == number);
        pause.is_some_and(|(_, since)| since.elapsed() < RETRY_INTERVAL)
    }

    /// Tries to start the ranks; false while a prerequisite is missing. Checks every prerequisite
    /// again on each call.
    fn try_to_start(
        &mut self,
        record: &Generation,
        first: u64,
        count: u64,
    ) -> Result<bool, Problem> {
        let has = self.identity.devices;
        if count > has {
            return Err(Problem::hardware(format!(
                "the plan needs {count} devices in this pod, which has {has}"
            )));
        }
        if let Some(problem) = volume::unmounted(&self.identity.run) {
            return Err(problem);
        }
        let delayed = self.delayed.filter(|(of, _)| *of == record.number);
        if delayed != Some((record.number, true)) {
            let ready = self.set_up()? && self.prepared(record, first == 0)?;
            if !ready || delayed.is_some() {
                self.delayed = Some((record.number, ready));
                // Others may have committed during the wait.
                self.later.take_if(|_| ready);
                return Ok(false);
            }
        }
        let inventory = Inventory::discover();
        if let Some(message) = inventory.device_shortfall(count) {
            return Err(Problem::hardware(message));
        }
        let gpus = self.gpus(&inventory)?;
        self.start(record, first, count, &gpus)?;
        self.delayed = None;
        self.end_wait();
        Ok(true)
    }

    /// Whether the pod has the job's code, and its setup command has run.
    fn set_up(&mut self) -> Result<bool, Problem> {
        if !self.is_set_up {
            let start = || Preparation::start_setup(&self.identity);
            self.is_set_up = Preparation::run(&mut self.setup, start)?;
            if !self.is_set_up {
                self.report_wait("the setup command runs in this pod".to_owned());
            }
        }
        Ok(self.is_set_up)
    }

    /// `CUDA_VISIBLE_DEVICES` of each rank of the built-in trainer, if it computes on GPUs.
    pub(super) fn gpus(&self, inventory: &Inventory) -> Result<Vec<String>, Problem> {
        let on_gpus = |job: &Membership| job.command.is_empty() && job.device == DeviceKind::Cuda;
        if !self.job.as_deref().is_some_and(on_gpus) {
            return Ok(Vec::new());
        }
        match inventory.devices() {
            Devices::Gpus { devices } => Ok(devices.into_iter().map(|gpu| gpu.id).collect()),
            Devices::CpuRanks { why, .. } => Err(Problem::hardware(format!(
                "spec.trainer.device is Cuda, but the pod has no GPU: {why}; set spec.resourceName to the \
                 resource of NVIDIA GPUs, or create the job with spec.trainer.device: Cpu"
            ))),
        }
    }

    fn start(
        &mut self,
        record: &Generation,
        first: u64,
        count: u64,
        gpus: &[String],
    ) -> Result<(), Problem> {
        let run = &self.identity.run;
        record.write(run)?;
        let external = self
            .external_job()
            .map(|job| external_call(&job.trainer_source(), run, record));
        let external = external.transpose()?.map(Arc::new);
        // What the recipe states, until the trainer reports its own.
        let stated = external.as_ref().and_then(|its| its.budget(record));
        let budget = self.state.budget.or(stated);
        let earlier = self.current.take_if(|current| current.continues_in(record));
        // Without a state that others bring, a rank starts from a checkpoint.
        let standby = self.standby.take().filter(|_| record.carried.is_some());
        let earlier = earlier.or(standby.map(|standby| standby.host));
        let gpus = match &earlier {
            Some(earlier) => earlier.gpus_in(record.carries(first), 0, gpus),
            None => gpus.to_vec(),
        };
        let key = authentication::generation_key(&self.identity.key, record.number);
        let start = Start {
            first,
            shows_built_in: true,
            ..self.start_in(record, count, &gpus, &key)
        };
        let host = match earlier {
            Some(earlier) => earlier.carry_on(&start, &self.events),
            None => HostGeneration::start(&start, external.clone(), &self.events)
                .map(|host| host.with_spares_from(self.first_spare())),
        };
        let host = host.map_err(|error| FileError::from_io("start ranks in", run, 0, error))?;
        let external_checkpoint = (external.as_ref()).and_then(|its| its.checkpoint.clone());
        let mirror = self.identity.bucket.as_ref().zip(external);
        self.mirror = mirror.map(|(bucket, external)| {
            let mut shares = record.shares();
            let member = shares.position(|(begins, _)| begins == first).unwrap_or(0);
            Mirror::start(bucket, record, member, external)
        });
        self.state = AgentState {
            version: self.state.version,
            generation: record.number,
            first,
            ranks: host.statuses().to_vec(),
            budget,
            later: self.state.later.clone(),
            started: Some(now()),
            external_checkpoint,
            ..state_of(&self.identity)
        };
        let on_cpu = |job: &Membership| job.device == DeviceKind::Cpu;
        let on_cpu = self.job.as_deref().is_some_and(on_cpu);
        let planned = Run::read(run).map_or(0, |run| run.spares(&record.plan));
        self.spares = if on_cpu { planned } else { 0 };
        self.log.begin(run, record.number, first == 0);
        self.current = Some(host);
        self.pace = Pace::default();
        Ok(())
    }

    /// A start of processes of a generation in this pod. `count`: those that share its processors.
    pub(super) fn start_in<'s>(
        &'s self,
        record: &'s Generation,
        count: u64,
        gpus: &'s [String],
        key: &'s Key,
    ) -> Start<'s> {
        let deadline = self.job.as_ref().map(|job| job.progress_deadline);
        Start {
            evenkeel: &self.identity.program,
            run_dir: &self.identity.run,
            generation: record,
            first: 0,
            count,
            cores: self.identity.cores,
            gpus,
            key,
            progress_deadline: deadline.unwrap_or_default(),
            bucket: self.identity.bucket.as_ref().map(Bucket::base),
            shows_built_in: false,
        }
    }

    /// Whether the run is prepared. The first member prepares it; the others wait for its file.
    fn prepared(&mut self, record: &Generation, mine: bool) -> Result<bool, Problem> {
        if let (Some(job), None) = (self.external_job(), &self.identity.bucket) {
            // An external trainer prepares its own data.
            let chosen = external::choose(&job.trainer_source(), &self.identity.run, record, mine)?;
            if !chosen {
                let call = choice::file(&self.identity.run, record);
                // After a timeout the trainer starts without the first member's choice.
                if let Err(problem) = self.wait_for(record, &call) {
                    self.report_wait(problem.message);
                }
            }
            return Ok(chosen);
        }
        let file = self.identity.run.join(files::RUN);
        let ready = match self.identity.bucket.clone() {
            Some(bucket) => self.brought(&bucket, record, mine)?,
            None if file.exists() => true,
            None if mine => self.prepare()? && file.exists(),
            None => {
                self.wait_for(record, &file)?;
                false
            }
        };
        if ready {
            self.preparation = None;
            if self.state.budget.is_none() {
                let run = Run::read(&self.identity.run);
                self.state.budget = run.ok().and_then(|run| run.horizon.budget_samples);
            }
        }
        Ok(ready)
    }

    /// Whether this pod's disk has everything that the ranks read; brings it from the bucket.
    fn brought(
        &mut self,
        bucket: &Bucket,
        record: &Generation,
        mine: bool,
    ) -> Result<bool, Problem> {
        if self.preparation.is_some() && !self.prepare()? {
            return Ok(false);
        }
        let Some(job) = self.job.clone() else {
            return Ok(false);
        };
        let prepares = mine && job.command.is_empty();
        let run = self.identity.run.clone();
        let brought = self.bucket_run.bring(bucket, &run, &job, record, mine);
        match brought.transpose()? {
            Some(Brought::Ready) => return Ok(true),
            Some(Brought::Unprepared) if prepares => {
                self.prepare()?;
            }
            Some(Brought::Unprepared) => {
                self.report_long_wait(record, |waiting| waiting.message(&run))
            }
            None => self.report_long_wait(record, |_| {
                format!("copying the run's files from {} to this pod", bucket.base())
            }),
        }
        Ok(false)
    }

    /// Reports the wait for the first member or the bucket once it is long.
    fn report_long_wait(&mut self, record: &Generation, message: impl Fn(&Waiting) -> String) {
        let waiting = self.waiting_for(record);
        if waiting.is_long() {
            let message = message(waiting);
            self.report_wait(message);
        }
    }

    /// The wait for the first member of this generation.
    fn waiting_for(&mut self, record: &Generation) -> &Waiting {
        let waiting = self.waiting.take();
        let waiting = waiting.filter(|waiting| waiting.generation == record.number);
        let waiting = waiting.unwrap_or_else(|| Waiting::begin(record));
        self.waiting.insert(waiting)
    }

    /// Prepares the run in a separate process; whether that has ended.
    fn prepare(&mut self) -> Result<bool, Problem> {
        let Some(job) = &self.job else {
            return Ok(false);
        };
        let start = || Preparation::start(&self.identity, job);
        Preparation::run(&mut self.preparation, start)
    }

    /// Waits for a file of the first member, and reports the wait after a while.
    fn wait_for(&mut self, record: &Generation, file: &Path) -> Result<(), Problem> {
        let run = self.identity.run.clone();
        let waiting = self.waiting_for(record);
        if !waiting.first_runs() {
            self.report_long_wait(record, |waiting| waiting.message(&run));
            return Ok(());
        }
        // Listing a directory refreshes a network volume's cache.
        drop(file.parent().map(std::fs::read_dir));
        if file.exists() {
            return Ok(());
        }
        Err(waiting.not_shared(file))
    }

    fn report_wait(&mut self, message: String) {
        if self.state.waiting_for.as_ref() != Some(&message) {
            self.state.waiting_for = Some(message);
            self.publish();
        }
    }

    /// Ends the wait and clears its report.
    pub(super) fn end_wait(&mut self) {
        self.waiting = None;
        if self.state.waiting_for.take().is_some() {
            self.publish();
        }
    }

    pub(super) fn report_problem(&mut self, problem: Problem) {
        if self.state.problem.as_ref() == Some(&problem) {
            return;
        }
        self.warn(problem.message.clone());
        self.state.problem = Some(problem);
        self.publish();
    }
}
