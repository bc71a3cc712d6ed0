//! The process of one rank: connects to the others, builds the engine, loads the referenced state, trains,
//! and reports how it ended.

use std::fs::{File, TryLockError};
use std::io::{BufReader, ErrorKind, stdin};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use rustix::stdio::dup2_stderr;

use super::TrainError;
use super::checkpoint_ref::{self, TrainState};
use super::entry::{agree_on_memory, check_coupling, conditions};
use super::kernels::{self, Kernels};
use super::orders::{Orders, report};
use super::preferences::Loss;
use super::references::{self, Pins};
use super::run::{BuiltIn, Run, sharded};
use super::schedule::LearningRateSchedule;
use super::trainer::{Ending, Preferences, STRAGGLER_FACTOR, Trainer, measure};
use super::watchdog::{self, EverySecond};
use super::weights::Weights;
use crate::bucket::Bucket;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::comm::activity::{Activity, Observed};
use crate::comm::solo::Solo;
use crate::comm::tcp::{self, Greeting, TcpOptions};
use crate::comm::watch::StepWatch;
use crate::comm::{CommError, Ended, World};
use crate::data::{Dataset, Tokenizer};
use crate::engine::cpu::{CpuEngine, CpuOptions};
use crate::engine::cuda::{self, CudaEngine, CudaOptions};
use crate::engine::{self, Engine, EngineError, Measure, Place, TokenLoss};
use crate::lifecycle::generation::Carried;
use crate::lifecycle::protocol::{Assignment, Order, Report, exit};
use crate::lifecycle::stall::ProgressDeadline;
use crate::lifecycle::{Generation, files};
use crate::norm::Controller;
use crate::plan::{DeviceKind, Plan};
use crate::recipe::schema::spec::{Likelihood, LikelihoodLoss, Precision};
use crate::samples::Ledger;
use crate::telemetry::metrics::{MetricsError, Writer as MetricsWriter};
use crate::telemetry::now;
use crate::telemetry::tensorboard::{self, EventFile};
use crate::util::durable::{FileError, read_json};
use crate::util::input;
use crate::util::key::{InvalidKey, Key};
use crate::util::lock::lock;
use crate::util::stderr;

/// Time that a rank that lost a peer waits for an order.
const ORDERS: Duration = Duration::from_secs(30);

/// Time between two looks for an order while a rank with a state connects.
const LOOK: Duration = Duration::from_millis(2);

/// Identity of a rank and its resources.
#[derive(Debug, Clone)]
pub struct RankOptions {
    pub run_dir: PathBuf,
    pub generation: u64,
    /// Whether the process stands by until it is given a place; `generation` is then one whose ranks run.
    pub stands_by: bool,
    /// This rank, counted from 0.
    pub rank: usize,
    /// Threads to compute with.
    pub threads: usize,
    /// The secret of the generation's ranks.
    pub key: Key,
    pub progress_deadline: ProgressDeadline,
    /// Whether it is the first rank of its host.
    pub first_of_host: bool,
    /// URL of the bucket in which checkpoints are committed, if not in the run directory.
    pub bucket: Option<String>,
}

/// Runs the rank to its end; returns its exit code.
pub fn run(options: &RankOptions) -> u8 {
    let orders = Orders::listen(BufReader::new(stdin()));
    let error = match live(options, &orders) {
        Ok(Ending::Finished) => return exit::FINISHED,
        Ok(Ending::Drained | Ending::Paused) => return exit::DRAINED,
        Err(error) => error,
    };
    stderr::line(format_args!("error: {error}"));
    let message = error.to_string();
    match error {
        TrainError::Engine(EngineError::OutOfMemory { .. }) => {
            report(&Report::OutOfMemory { message });
            exit::OUT_OF_MEMORY
        }
        error if report_lost_device(&error) => {
            // A rank without its device is a lost rank, like one on a host that is gone.
            let _ = kill_process(getpid(), Signal::KILL);
            exit::FAILED
        }
        TrainError::Engine(EngineError::Comm(
            CommError::PeerLost { .. } | CommError::Aborted { .. },
        )) => exit::PEER_LOST,
        error if error.is_of_the_volume() => {
            report(&Report::VolumeFailed { message });
            exit::FAILED
        }
        error => {
            let deterministic = match &error {
                TrainError::Engine(error) => error.is_deterministic(),
                _ => true,
            };
            report(&Report::Failed {
                message,
                deterministic,
            });
            exit::FAILED
        }
    }
}

/// How a process leaves a generation.
enum Left<'a> {
    /// Its last one.
    Ended(Ending),
    /// For the next one, with its state.
    Carries(Box<Trainer<'a>>, Assignment),
}

fn live(options: &RankOptions, orders: &Orders) -> Result<Ending, TrainError> {
    let run = Run::read(&options.run_dir)?;
    let mut options = options.clone();
    let reports = Arc::new(Mutex::new(options.generation));
    let mut generation: Generation = read_json(&record(&options))?;
    let mut trainer = None;
    if options.stands_by {
        let mut spare = Box::new(stand_by(&options, &run, generation, orders)?);
        stderr::line(format_args!("this process stands by"));
        report(&Report::StandingBy);
        let Some(Order::Continue(assignment)) = orders.wait() else {
            return Ok(Ending::Drained);
        };
        (options, generation) = follow(&assignment, &options, &mut spare, &reports)?;
        trainer = Some(spare);
    }
    // Held until the process ends or holds the next one, so that a later launcher detects living ranks.
    let mut _alive = None;
    loop {
        _alive = record(&options).parent().map(hold).transpose()?;
        if trainer.is_none() && generation.carried.is_some() {
            let blank = stand_by(&options, &run, generation.clone(), orders)?;
            trainer = Some(Box::new(blank));
        }
        match in_generation(&options, &run, generation, trainer, orders, &reports)? {
            Left::Ended(ending) => return Ok(ending),
            Left::Carries(mut it, assignment) => {
                (options, generation) = follow(&assignment, &options, &mut it, &reports)?;
                trainer = Some(it);
            }
        }
    }
}

/// Goes to its place in another generation.
fn follow(
    assignment: &Assignment,
    options: &RankOptions,
    trainer: &mut Trainer<'_>,
    reports: &Mutex<u64>,
) -> Result<(RankOptions, Generation), TrainError> {
    let options = options.at(assignment)?;
    let generation: Generation = read_json(&record(&options))?;
    trainer.leave(generation.clone(), assignment.rank)?;
    enter(&options, reports)?;
    Ok((options, generation))
}

/// The record of the generation.
fn record(options: &RankOptions) -> PathBuf {
    let directory = options.run_dir.join(files::generation(options.generation));
    directory.join(files::RECORD)
}

impl RankOptions {
    /// The same process in another generation.
    fn at(&self, assignment: &Assignment) -> Result<RankOptions, TrainError> {
        let place = |number| usize::try_from(number).unwrap_or(usize::MAX);
        let key = assignment.key.parse();
        Ok(RankOptions {
            generation: assignment.generation,
            rank: place(assignment.rank),
            threads: place(assignment.threads),
            first_of_host: assignment.first_of_host,
            stands_by: false,
            key: key.map_err(|error: InvalidKey| CommError::Rendezvous(error.to_string()))?,
            ..self.clone()
        })
    }
}

/// Writes and reports for its place in another generation from here on.
fn enter(options: &RankOptions, reports: &Mutex<u64>) -> Result<(), TrainError> {
    let rank = options.rank as u64;
    let generation = options.generation;
    *lock(reports) = generation;
    report(&Report::Entered { generation, rank });
    let path = options.run_dir.join(files::rank_log(generation, rank));
    let log = || {
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        Ok(dup2_stderr(File::create(&path)?)?)
    };
    log().map_err(|error| FileError::from_io("write", &path, 0, error).into())
}

fn in_generation<'a>(
    options: &RankOptions,
    run: &'a Run,
    generation: Generation,
    mut trainer: Option<Box<Trainer<'a>>>,
    orders: &'a Orders,
    reports: &Arc<Mutex<u64>>,
) -> Result<Left<'a>, TrainError> {
    let agent_is_gone = orders.agent_is_gone();
    let has_state = trainer.as_ref().is_some_and(|trainer| trainer.has_state);
    // The others cannot watch this rank before they have connected.
    let waiting = EverySecond::start(move || {
        if agent_is_gone.load(Ordering::Relaxed) && !has_state {
            // There is no state to commit yet.
            stderr::line(format_args!("the agent left before the ranks had met"));
            std::process::exit(exit::DRAINED.into());
        }
        report(&Report::Connecting);
    });
    let met = meet(options, &generation, orders, has_state, reports);
    // Later reports come after its last one.
    drop(waiting);
    let world = match (met, trainer) {
        (Ok(Met::World(world)), it) => {
            trainer = it;
            world
        }
        (Ok(Met::Ordered(order)), Some(trainer)) => {
            let ended = CommError::Aborted {
                rank: options.rank,
                reason: "the agent ended the wait for the other ranks".to_owned(),
            };
            return obey(Some(order), trainer, || Err(ended.into()));
        }
        (Ok(Met::Ordered(_)), None) => return Ok(Left::Ended(Ending::Drained)),
        (Err(error), trainer) => return after_loss(error, trainer),
    };
    report(&Report::Connected);
    // Peers would notice that this process hangs.
    let _alone = (world.world() == 1).then(|| EverySecond::start(|| report(&Report::Alive)));
    let result = train(options, run, generation, &world, orders, trainer);
    match &result {
        Ok(Left::Ended(_)) => world.close()?,
        // The world is left already, or the collective has reported the lost peer.
        Ok(Left::Carries(..)) | Err(TrainError::Engine(EngineError::Comm(_))) => {}
        Err(error) => world.abort(&error.to_string()),
    }
    result
}

fn train<'a>(
    options: &RankOptions,
    run: &'a Run,
    generation: Generation,
    world: &World,
    orders: &'a Orders,
    trainer: Option<Box<Trainer<'a>>>,
) -> Result<Left<'a>, TrainError> {
    let (observed, activity) = Observed::of(Arc::clone(world));
    let stacks = files::stacks(generation.number, options.rank as u64);
    let stacks = options.run_dir.join(stacks);
    let watchdog = watchdog::watch(Arc::clone(&activity), options.progress_deadline, stacks);
    let (mut trainer, entered) = match trainer {
        None => {
            let trainer = load(
                options,
                run,
                generation,
                world,
                orders,
                (observed, activity),
            )?;
            (Box::new(trainer), Ok(()))
        }
        Some(mut trainer) => {
            let metrics = metrics(options, run, &generation)?;
            let place = Place {
                world: engine_world(run, world, &observed),
                threads: options.threads,
                activity,
            };
            let entered = trainer.enter(observed, place, metrics);
            (trainer, entered)
        }
    };
    let result = entered.and_then(|()| {
        report(&Report::Ready);
        trainer.train()
    });
    // What follows does not call the collective.
    drop(watchdog);
    match result {
        Ok(Ending::Paused) => {
            if let Err(error) = world.close() {
                return after_loss(error, Some(trainer));
            }
            trainer.abandon_checkpoint();
            report(&Report::Paused {
                held: trainer.held(),
            });
            let drained = || Ok(Left::Ended(Ending::Drained));
            // All ranks have the same state. Without an order, the first one commits it.
            let alone = || (options.rank == 0).then_some(Order::Commit);
            let order = trainer.orders.next(ORDERS).or_else(alone);
            obey(order, trainer, drained)
        }
        Ok(ending) => Ok(Left::Ended(ending)),
        Err(TrainError::Engine(EngineError::Comm(error))) => after_loss(error, Some(trainer)),
        // All learn of it before the engine ends its work on the device.
        Err(error) => {
            report_lost_device(&error);
            world.abort(&error.to_string());
            Err(error)
        }
    }
}

/// Handles the loss of a peer. Where every rank holds everything, the state after the last complete step is
/// still available: the rank reports it, and the agent may order it to commit, or to continue in another generation.
fn after_loss(error: CommError, trainer: Option<Box<Trainer<'_>>>) -> Result<Left<'_>, TrainError> {
    let lost = match &error {
        CommError::PeerLost { rank, reason } | CommError::Aborted { rank, reason } => {
            Some((*rank, reason.clone()))
        }
        CommError::Rendezvous(_) | CommError::Misuse(_) => None,
    };
    let (Some((rank, message)), Some(mut trainer)) = (lost, trainer) else {
        return Err(error.into());
    };
    trainer.abandon_checkpoint();
    report(&Report::Lost {
        rank: rank as u64,
        message,
        held: trainer.held(),
    });
    obey(trainer.orders.next(ORDERS), trainer, || Err(error.into()))
}

/// Does what the agent orders to a rank that waits. `end`: how it ends without another generation.
fn obey<'a>(
    order: Option<Order>,
    mut trainer: Box<Trainer<'a>>,
    end: impl FnOnce() -> Result<Left<'a>, TrainError>,
) -> Result<Left<'a>, TrainError> {
    match order {
        Some(Order::Continue(assignment)) => return Ok(Left::Carries(trainer, assignment)),
        Some(Order::Commit) => trainer.commit_alone()?,
        _ => {}
    }
    end()
}

/// What a process can prepare outside of a generation: the engine, with the weights that are not trained, and the data.
fn stand_by<'a>(
    options: &RankOptions,
    run: &'a Run,
    generation: Generation,
    orders: &'a Orders,
) -> Result<Trainer<'a>, TrainError> {
    let data = Run::data(&options.run_dir);
    let training = Dataset::train(&data)?;
    let alone: World = Arc::new(Solo);
    let (observed, activity) = Observed::of(alone);
    // Its world will have other ranks.
    let products = None;
    let mut engine = engine(options, run, &generation, None, &activity, products, false)?;
    start(run.built_in()?, engine.as_mut(), false)?;
    let state = new_state(run, &generation.plan)?;
    let data = (training, Dataset::evaluation(&data)?);
    trainer(
        options,
        run,
        generation,
        orders,
        (observed, engine),
        data,
        state,
    )
}

/// A trainer with these parts, whose state is not that of the run yet.
fn trainer<'a>(
    options: &RankOptions,
    run: &'a Run,
    generation: Generation,
    orders: &'a Orders,
    (world, engine): (World, Box<dyn Engine>),
    (data, evaluation): (Dataset, Option<Dataset>),
    state: TrainState,
) -> Result<Trainer<'a>, TrainError> {
    let bucket = options.bucket.as_deref().map(Bucket::open).transpose();
    Ok(Trainer {
        run_dir: options.run_dir.clone(),
        run,
        last_checkpoint: generation.start.as_ref().map(|start| start.path.clone()),
        generation,
        world,
        engine,
        preferences: None,
        order: run.order(data.len())?,
        data,
        evaluation,
        learning_rate: LearningRateSchedule {
            recipe: run.spec.learning_rate.clone(),
            warmup: run.horizon.warmup_samples.unwrap_or(0),
            budget: run.budget()?,
            base_batch: run.global_batch_size,
        },
        watched_batch: state.controller.batch(),
        state,
        has_state: false,
        orders,
        metrics: None,
        last_step: None,
        bucket: bucket.map_err(CheckpointError::from)?,
        saving: None,
        watch: StepWatch::new(STRAGGLER_FACTOR),
    })
}

/// The state of a run before its first step.
fn new_state(run: &Run, plan: &Plan) -> Result<TrainState, TrainError> {
    Ok(TrainState {
        step: 0,
        samples: 0,
        controller: Controller::new(&run.spec.schedule, conditions(run, plan)?)?,
        ledger: Ledger::default(),
        references: Pins::new(),
        kernels: None,
    })
}

/// Builds the engine, loads the referenced state, and prepares everything else for the first step.
fn load<'a>(
    options: &RankOptions,
    run: &'a Run,
    generation: Generation,
    world: &World,
    orders: &'a Orders,
    (observed, activity): (World, Arc<Activity>),
) -> Result<Trainer<'a>, TrainError> {
    let data = Run::data(&options.run_dir);
    let mut training = Dataset::train(&data)?;
    let mut evaluation = Dataset::evaluation(&data)?;
    if training.needs_tokenizer() {
        let files = &run.built_in()?.companions;
        let tokenizer = Tokenizer::of_run(run.spec.tokenizer.path.as_deref(), files)?;
        let tokenizer = Arc::new(tokenizer);
        for dataset in [Some(&mut training), evaluation.as_mut()]
            .into_iter()
            .flatten()
        {
            dataset.set_tokenizer(Arc::clone(&tokenizer))?;
        }
    }
    let loss = Loss::of(&run.spec);
    let begun = begun(options, &generation)?;
    let pinned = begun.as_ref().map(|(_, state)| state.references.clone());
    let mut pins = pinned.unwrap_or_default();
    check_coupling(run, &generation.plan)?;
    let mut kernels = None;
    if run.is_deterministic_in_every_world() {
        let pinned = begun.as_ref().and_then(|(_, state)| state.kernels.as_ref());
        kernels = Some(kernels::agree(Kernels::here(), pinned, observed.as_ref())?);
    }
    let sources = references::sources(
        &options.run_dir,
        run,
        &generation.plan,
        &training,
        evaluation.as_ref(),
        &pins,
    )?;
    // The start weights are needed once more where what they say of the data is lost.
    let are_known = references::are_known(&sources, observed.as_ref())?;
    let is_first = generation.start.is_none() || !are_known;
    // The ranks of a larger world would choose differently.
    let products = (world.world() == 1).then(|| cuda::measured::files(&options.run_dir));
    let mut engine = engine(
        options,
        run,
        &generation,
        engine_world(run, world, &observed),
        &activity,
        products,
        is_first,
    )?;
    // The file of a generation exists from its begin, also if its memory does not suffice.
    let metrics = metrics(options, run, &generation)?;
    agree_on_memory(run, &generation.plan, engine.as_mut(), observed.as_ref())?;
    start(run.built_in()?, engine.as_mut(), is_first)?;
    let mut completed = Vec::new();
    for source in &sources {
        let micro_batch = generation.plan.per_device_batch_size;
        let world = observed.as_ref();
        let writes = options.first_of_host;
        let of_source = source.complete(engine.as_mut(), world, micro_batch, writes, &mut pins)?;
        completed.push(of_source);
    }
    let mut completed = completed.into_iter();
    let preferences = loss.map(|loss| Preferences {
        loss,
        training: completed.next().unwrap_or_default(),
        evaluation: completed.next().unwrap_or_default(),
    });
    let state = restore(options, run, &generation, engine.as_mut(), begun)?;
    let state = TrainState {
        references: pins,
        kernels,
        ..state
    };
    let parts = (observed, engine);
    let data = (training, evaluation);
    Ok(Trainer {
        preferences,
        metrics,
        has_state: true,
        ..trainer(options, run, generation, orders, parts, data, state)?
    })
}

/// The world of an engine; `None` if it trains alone.
fn engine_world(run: &Run, world: &World, observed: &World) -> Option<World> {
    let world = match run.device {
        DeviceKind::Cpu => observed,
        // Its own watchdog calls the collective, whatever the rank does.
        DeviceKind::Cuda => world,
    };
    (world.world() > 1).then(|| Arc::clone(world))
}

/// Reports an error of a lost GPU, with the name of this rank's; returns whether it is one.
fn report_lost_device(error: &TrainError) -> bool {
    let TrainError::Engine(EngineError::Cuda(lost)) = error else {
        return false;
    };
    if lost.is_of_a_lost_device() {
        let gpu = std::env::var("CUDA_VISIBLE_DEVICES").unwrap_or_default();
        report(&Report::DeviceLost {
            message: format!("its GPU {gpu} is lost ({lost})"),
        });
    }
    lost.is_of_a_lost_device()
}

/// The metrics file, which rank 0 writes for all ranks. Hosts without a common disk each have one, so that any survivor
/// can add it to a checkpoint.
fn metrics(
    options: &RankOptions,
    run: &Run,
    generation: &Generation,
) -> Result<Option<MetricsWriter>, TrainError> {
    if options.rank == 0 {
        return metrics_file(&options.run_dir, run, generation).map(Some);
    }
    if options.bucket.is_none() || !options.first_of_host {
        return Ok(None);
    }
    let directory = options.run_dir.join(files::generation(options.generation));
    let writer = MetricsWriter::append_to(directory.join(files::METRICS))?;
    Ok(Some(writer))
}

/// The metrics file of a generation in a run directory, with TensorBoard's if the recipe asks for it.
pub fn metrics_file(
    run_dir: &Path,
    run: &Run,
    generation: &Generation,
) -> Result<MetricsWriter, TrainError> {
    let directory = run_dir.join(files::generation(generation.number));
    let writer = MetricsWriter::append_to(directory.join(files::METRICS))?;
    if !run.spec.tensorboard {
        return Ok(writer);
    }
    let directory = run_dir.join(tensorboard::DIRECTORY);
    let step = generation.start_step();
    let events = EventFile::create(&directory, generation.number, step, now());
    let events = events.map_err(|error| MetricsError::Write {
        path: directory,
        error,
    })?;
    Ok(writer.with_events(events))
}

/// How a rank's wait for the others ends.
enum Met {
    World(World),
    /// By an order, to a rank that has a state.
    Ordered(Order),
}

/// Connects to the other ranks of the generation.
fn meet(
    options: &RankOptions,
    generation: &Generation,
    orders: &Orders,
    has_state: bool,
    reports: &Arc<Mutex<u64>>,
) -> Result<Met, CommError> {
    let world = generation.world() as usize;
    if world == 1 {
        return Ok(Met::World(Arc::new(Solo)));
    }
    let greeting = Greeting {
        rank: options.rank,
        world,
    };
    let mut tcp = TcpOptions::new(
        generation.master.host.clone(),
        generation.master.port,
        greeting,
        options.key.clone(),
    );
    tcp.notify = Arc::new(|message: &str| {
        let message = message.to_string();
        report(&Report::Warning { message });
    });
    let (own, number) = (options.rank, generation.number);
    let reports = Arc::clone(reports);
    let ended: Ended = Arc::new(move |error| {
        // A world that was left says nothing of the one that followed.
        let current = lock(&reports);
        // The agent waits for ranks that compute: this report says that the rank lives, and which peer it
        // lost.
        if let CommError::PeerLost { rank, reason } | CommError::Aborted { rank, reason } = error
            && *rank != own
            && *current == number
        {
            report(&Report::LossDetected {
                rank: *rank as u64,
                message: reason.clone(),
            });
        }
    });
    tcp.ended = Arc::clone(&ended);
    let connect = move || tcp::connect(&tcp).inspect_err(|error| ended(error));
    if !has_state {
        return Ok(Met::World(connect()?));
    }
    // Another rank may be lost meanwhile. The thread that still waits then ends by its time limit.
    let (connected, result) = channel();
    std::thread::spawn(move || drop(connected.send(connect())));
    loop {
        match result.recv_timeout(LOOK) {
            Ok(Ok(world)) => return Ok(Met::World(world)),
            // The one that is lost may have broken the meeting without a name; its agent knows it.
            Ok(Err(error @ CommError::Rendezvous(_))) => {
                let order = orders.next(ORDERS);
                return order.map(Met::Ordered).ok_or(error);
            }
            Ok(Err(error)) => return Err(error),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(CommError::Rendezvous("its thread has ended".to_owned()));
            }
        }
        if let Some(order) = orders.arrived() {
            return Ok(Met::Ordered(order));
        }
        if orders.agent_is_gone().load(Ordering::Relaxed) {
            // One of the states counts.
            let counts = |carried: Carried| carried.rank == options.rank as u64;
            let order = match generation.carried.is_some_and(counts) {
                true => Order::Commit,
                false => Order::Stop,
            };
            return Ok(Met::Ordered(order));
        }
    }
}

/// Reads the weights with which the run begins, and those below adapters.
fn start(built_in: &BuiltIn, engine: &mut dyn Engine, is_first: bool) -> Result<(), TrainError> {
    if let Some(directory) = &built_in.weights {
        let weights = Weights::open(directory)?.with_adapters(&built_in.merged_adapters)?;
        if built_in.adapters.is_some() {
            weights.restore_frozen(engine)?;
        } else if is_first {
            weights.restore(engine)?;
        }
    }
    if let Some(directory) = built_in.start_adapter.as_ref().filter(|_| is_first) {
        Weights::open_adapter(directory)?.restore(engine)?;
    }
    Ok(())
}

fn engine(
    options: &RankOptions,
    run: &Run,
    generation: &Generation,
    world: Option<World>,
    activity: &Arc<Activity>,
    products: Option<Vec<PathBuf>>,
    is_first: bool,
) -> Result<Box<dyn Engine>, TrainError> {
    let built_in = run.built_in()?;
    let model = built_in.model.clone();
    // Weights that `load` reads are not drawn first, which would take as long.
    let is_read_later = !is_first && built_in.adapters.is_none();
    let reads = is_read_later || built_in.weights.is_some();
    let seed = (!reads).then_some(run.spec.seed);
    let activation_checkpointing = run.spec.model.activation_checkpointing;
    // The measurements that any step of the run may request.
    let (measure, unsharded_accumulation) = match run.spec.schedule.norm_test() {
        Some(test) => (
            measure(Some(test.measured_groups()), test.coordinate_interval > 0),
            test.unsharded_accumulation,
        ),
        None => (Measure::default(), false),
    };
    let strategy = if sharded(generation.plan.facts.strategy) {
        engine::Strategy::Sharded {
            unsharded_accumulation,
        }
    } else {
        engine::Strategy::Replicated
    };
    let token_loss = token_loss(&run.spec.likelihood);
    let engine = match run.device {
        DeviceKind::Cpu => {
            let options = CpuOptions {
                threads: Some(options.threads),
                memory_limit: built_in.rank_memory,
                activation_checkpointing,
                strategy,
                measure,
                forward_only: false,
                token_loss,
                adapters: built_in.adapters.clone(),
                in_fixed_point: run.is_deterministic_in_every_world(),
            };
            CpuEngine::new(model, options, world, seed).map(boxed)
        }
        DeviceKind::Cuda => {
            let options = CudaOptions {
                // f16 is computed in bf16, which needs no loss scaling.
                precision: match run.spec.model.precision {
                    Precision::F32 => cuda::Precision::F32,
                    Precision::Bf16 | Precision::F16 => cuda::Precision::Bf16,
                },
                memory_limit: built_in.rank_memory,
                activation_checkpointing,
                strategy,
                measure,
                token_loss,
                adapters: built_in.adapters.clone(),
                noisy: run.spec.likelihood.neftune_alpha > 0.0,
                packed: run.spec.data.packs_whole(),
                products,
                activity: Arc::clone(activity),
                ..CudaOptions::default()
            };
            // The GPU of this process: its agent makes no other visible.
            let device = cuda::driver::Driver::load()
                .and_then(|driver| cuda::driver::Device::open(&driver, 0))
                .map_err(EngineError::from);
            device
                .and_then(|device| CudaEngine::new(model, options, &device, world, seed))
                .map(boxed)
        }
    };
    engine.map_err(|error| match error {
        // Memory for the micro-batch is reserved later: a smaller one would not help here.
        EngineError::OutOfMemory { .. } => TrainError::States(error),
        error => error.into(),
    })
}

fn token_loss(likelihood: &Likelihood) -> TokenLoss {
    match likelihood.loss {
        LikelihoodLoss::Dft => TokenLoss::Dft,
        LikelihoodLoss::Nll if likelihood.label_smoothing > 0.0 => {
            TokenLoss::Smoothed(likelihood.label_smoothing as f32)
        }
        LikelihoodLoss::Nll => TokenLoss::CrossEntropy,
    }
}

fn boxed(engine: impl Engine + 'static) -> Box<dyn Engine> {
    Box::new(engine)
}

/// The checkpoint from which a generation starts, and its state of training. Its weights are read later.
fn begun(
    options: &RankOptions,
    generation: &Generation,
) -> Result<Option<(Checkpoint, TrainState)>, TrainError> {
    let Some(checkpoint_ref) = &generation.start else {
        return Ok(None);
    };
    let checkpoint = checkpoint_ref::open_lazily(&options.run_dir, checkpoint_ref)?;
    let state = TrainState::from_checkpoint(&checkpoint)?;
    Ok(Some((checkpoint, state)))
}

/// The state of the checkpoint, or a new one with the initial weights: read from files, or drawn
/// by the engine.
fn restore(
    options: &RankOptions,
    run: &Run,
    generation: &Generation,
    engine: &mut dyn Engine,
    begun: Option<(Checkpoint, TrainState)>,
) -> Result<TrainState, TrainError> {
    let Some((checkpoint, mut state)) = begun else {
        return new_state(run, &generation.plan);
    };
    checkpoint.restore(engine)?;
    let change = state.controller.refit(conditions(run, &generation.plan)?)?;
    if let Some(message) = change.filter(|_| options.rank == 0) {
        report(&Report::Warning { message });
    }
    Ok(state)
}

/// Takes a shared lock on the generation's directory. A launcher that wants to start the next generation
/// after a crash requests it exclusively.
pub fn hold(directory: &Path) -> Result<File, TrainError> {
    let path = directory.join(files::RANKS_LOCK);
    let file = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .and_then(|file| file.try_lock_shared().map(|()| file).map_err(Into::into));
    Ok(file.map_err(|error| FileError::from_io("lock", &path, 0, error))?)
}

/// Whether ranks of the generation in this directory still run. Only a missing lock proves that none ever
/// ran; a lock that cannot be opened is an error.
pub fn any_alive(directory: &Path) -> Result<bool, FileError> {
    let path = directory.join(files::RANKS_LOCK);
    let cannot = |error| FileError::from_io("open", &path, 0, error);
    let file = match input::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(cannot(error)),
    };
    match file.try_lock() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(cannot(error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreadable_rank_lock_does_not_mean_no_ranks() {
        let directory = tempfile::tempdir().unwrap();
        assert!(!any_alive(directory.path()).unwrap());
        let alive = hold(directory.path()).unwrap();
        assert!(any_alive(directory.path()).unwrap());
        drop(alive);
        let lock = directory.path().join(files::RANKS_LOCK);
        std::fs::remove_file(&lock).unwrap();
        // No process can open a link to itself.
        std::os::unix::fs::symlink(&lock, &lock).unwrap();
        let message = any_alive(directory.path()).unwrap_err().to_string();
        assert!(message.starts_with("cannot open "), "{message}");
    }
}
