//! The training loop: runs steps until the budget is reached or a drain is requested.
//!
//! A step consumes samples [c, c+b) of the one global order. Its gradient is a sum over target tokens,
//! divided once by the tokens or the samples of the whole global batch, so that neither accumulation nor the world
//! changes the result.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::TrainError;
use super::adapter;
use super::checkpoint_ref::{self, TrainState};
use super::kl;
use super::message::{StepMessage, StepSums, decode, encode, exchange};
use super::orders::{Orders, report};
use super::preferences::{self, EvaluationSums, JudgedBatch, Loss};
use super::references::Compared;
use super::run::{Run, sharded};
use super::schedule::LearningRateSchedule;
use super::sums::{Merge, Parts};
use crate::bucket::Bucket;
use crate::checkpoint::{self, Contents, Target, Writer};
use crate::comm::solo::Solo;
use crate::comm::watch::StepWatch;
use crate::comm::{Collective, World};
use crate::data::{Collated, Dataset};
use crate::engine::{AdamW, BatchLoss, Engine, Measure, MicroBatch, Noise, Weigh};
use crate::lifecycle::protocol::{HeldState, Report};
use crate::lifecycle::{CheckpointRef, Generation};
use crate::norm::{CoordinateTest, Coordinates, Decision, GroupSums, Reason, Sums};
use crate::objective::{Kl, Step};
use crate::recipe::schema::spec::{DecayOn, Groups, LikelihoodMean, Method};
use crate::samples::{self, Order, Row};
use crate::telemetry::metrics::{self, Writer as MetricsWriter};
use crate::telemetry::{
    CoordinateTestRecord, EvaluationRecord, Metric, NormTestRecord, StepRecord, now,
};
use crate::util::stderr;

/// A step is reported as slow if it takes this many times the usual time.
pub const STRAGGLER_FACTOR: f64 = 3.0;

/// How the training loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The budget is reached.
    Finished,
    Drained,
    /// Between two steps, without a checkpoint.
    Paused,
}

/// A loss over preferences, with what the reference model says of the data; nothing for a loss without one.
pub struct Preferences {
    pub loss: Loss,
    pub training: Compared,
    pub evaluation: Compared,
}

/// The loop of one rank with all its state.
pub struct Trainer<'a> {
    pub run_dir: PathBuf,
    pub run: &'a Run,
    /// The generation, with its plan.
    pub generation: Generation,
    /// Collective of the generation's ranks.
    pub world: World,
    /// The model, with its optimiser.
    pub engine: Box<dyn Engine>,
    pub data: Dataset,
    /// The loss over preferences, if the recipe has one.
    pub preferences: Option<Preferences>,
    /// The order of the samples.
    pub order: Order,
    /// The evaluation data, if any.
    pub evaluation: Option<Dataset>,
    /// The learning rate over the samples.
    pub learning_rate: LearningRateSchedule,
    /// Where checkpoints are committed, if not in the run directory.
    pub bucket: Option<Bucket>,
    /// Steps, samples, controller and ledger so far.
    pub state: TrainState,
    /// Whether this and the weights are those of the run; a process that stands by has none yet.
    pub has_state: bool,
    /// Orders of the agent.
    pub orders: &'a Orders,
    /// The generation's metrics file, of the rank that writes it.
    pub metrics: Option<MetricsWriter>,
    /// The newest step, which rank 0 records.
    pub last_step: Option<StepRecord>,
    /// The checkpoint in progress, if any.
    pub saving: Option<Saving>,
    /// Path of the newest committed checkpoint below the run directory.
    pub last_checkpoint: Option<String>,
    /// Learns the usual duration of a step.
    pub watch: StepWatch,
    /// The batch of the observed steps.
    pub watched_batch: u64,
}

impl Trainer<'_> {
    /// Trains until the budget is reached or a drain is agreed on. The last checkpoint is committed when it
    /// returns.
    pub fn train(&mut self) -> Result<Ending, TrainError> {
        let horizon = self.run.horizon.clone();
        let world = Arc::clone(&self.world);
        let budget = self.run.budget()?;
        let crossed = |every: Option<u64>, from: u64, to: u64| {
            every.is_some_and(|every| from / every < to / every)
        };
        // An evaluation is due between two steps, which is often between two generations: the earlier one
        // drained or failed there. An evaluation that was already made is repeated with the same result.
        let last = self.state.ledger.rows().last();
        if let Some(from) = last.map(|row| row.start)
            && self.state.samples < budget
            && crossed(horizon.eval_every, from, self.state.samples)
        {
            self.evaluate()?;
        }
        // What ranks carry from one generation into the next is in memory only.
        let mut is_due = self.generation.carried.is_some();
        while self.state.samples < budget {
            let before = self.state.samples;
            let leave = self.step()?;
            let after = self.state.samples;
            if leave == Some(Ending::Paused) && after < budget {
                return Ok(Ending::Paused);
            }
            if after >= budget || leave.is_some() {
                break;
            }
            if crossed(horizon.eval_every, before, after) {
                self.evaluate()?;
            }
            let due = is_due || crossed(horizon.checkpoint_every, before, after);
            if due && self.saving.is_none() {
                self.begin_checkpoint(world.as_ref())?;
                is_due = false;
            }
        }
        let ending = if self.state.samples >= budget {
            self.evaluate()?;
            Ending::Finished
        } else {
            Ending::Drained
        };
        self.commit_now(world.as_ref())?;
        Ok(ending)
    }

    fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Runs one optimiser step; returns how to leave if that was agreed on.
    fn step(&mut self) -> Result<Option<Ending>, TrainError> {
        let started = Instant::now();
        let step = self.state.step + 1;
        let batch = self.state.controller.batch();
        let wanted = self.state.controller.requested_groups(step);
        let coordinate_test = self.state.controller.requested_coordinates(step);
        let groups = coordinate_test.map(|test| test.groups).or(wanted);
        let measure = measure(groups, coordinate_test.is_some());
        let (from, to) = (self.state.samples, self.state.samples + batch);

        let mut sums = self.run_micro_batches(batch, measure)?;
        let seconds = started.elapsed().as_secs_f64();
        let reduced = self.engine.reduce(measure)?;
        if let Some(squared_norm) = reduced.local_squared_norm {
            let local = sums.next();
            local.groups.add(squared_norm, local.count);
        }
        let saving = self.saving.as_ref();
        let message = StepMessage {
            sums,
            seconds,
            drain: self.orders.draining(),
            pause: self.orders.pausing(),
            written: saving.is_some_and(|saving| saving.writer.is_finished()),
        };
        let ranks = exchange(self.world.as_ref(), &message)?;
        let leave = match (
            ranks.iter().any(|it| it.drain),
            ranks.iter().any(|it| it.pause),
        ) {
            (true, _) => Some(Ending::Drained),
            (false, true) => Some(Ending::Paused),
            (false, false) => None,
        };
        let is_written = ranks.iter().all(|rank| rank.written);
        let totals = Parts::total(ranks.iter().map(|rank| &rank.sums));
        if totals.count == 0 {
            return Err(TrainError::NoTargets { step, from, to });
        }
        let count = totals.count as f64;
        let loss = totals.loss / count;
        let gradient_norm = reduced.squared_norm.sqrt() / count;
        for (what, value) in [("loss", loss), ("gradient norm", gradient_norm)] {
            if !value.is_finite() {
                self.engine.discard();
                return Err(TrainError::Diverged {
                    what,
                    value,
                    step,
                    from,
                    to,
                    last: self.last_checkpoint.clone(),
                });
            }
        }

        let coordinate_test = coordinate_test
            .map(|test| {
                let (engine, world) = (self.engine.as_mut(), self.world.as_ref());
                count_coordinates(test, &totals.groups, engine, world)
            })
            .transpose()?;
        let factor = self.state.controller.learning_rate_factor();
        let learning_rate = self.learning_rate.at(from) * factor;
        let optimizer = &self.run.spec.optimizer;
        let gradient_scale = clipping(gradient_norm, optimizer.gradient_clip) / count;
        let update = match optimizer.method() {
            Some(Method::RmsProp) => AdamW::rmsprop(learning_rate, gradient_scale),
            // A launch refuses other names.
            Some(Method::AdamW) | None => AdamW {
                learning_rate,
                beta1: optimizer.beta1,
                beta2: optimizer.beta2,
                epsilon: optimizer.epsilon,
                weight_decay: optimizer.weight_decay,
                vector_decay: match optimizer.weight_decay_on {
                    DecayOn::Matrices => 0.0,
                    DecayOn::All => optimizer.weight_decay,
                },
                step,
                gradient_scale,
            },
        };
        self.engine.update(update)?;

        self.state.step = step;
        self.state.samples = to;
        self.state.ledger.push(Row {
            step,
            start: from,
            batch,
            digest: totals.digest,
        })?;
        let mut record = StepRecord {
            generation: self.generation.number,
            step,
            samples: to,
            batch,
            world: self.world.world() as u64,
            loss,
            tokens: totals.targets,
            learning_rate,
            gradient_norm,
            seconds: started.elapsed().as_secs_f64(),
            time: now(),
            norm_test: None,
            coordinate_test,
            preferences: totals
                .preferences
                .record(self.preferences.as_ref().map(|it| &it.loss))
                .map(Box::new),
            external: None,
        };
        // The step is taken. If a rank is lost from here on, the one that commits it records it.
        self.last_step = Some(record.clone());
        let sums = wanted
            .is_some()
            .then(|| totals.groups.sums(reduced.squared_norm, batch));
        let decision = self.decide(step, sums)?;
        if is_written {
            let world = Arc::clone(&self.world);
            self.finish_checkpoint(world.as_ref())?;
        }

        record.seconds = started.elapsed().as_secs_f64();
        record.time = now();
        record.norm_test = norm_test_record(&decision);
        self.last_step = Some(record.clone());
        if self.rank() == 0 {
            let seconds: Vec<f64> = ranks.iter().map(|rank| rank.seconds).collect();
            self.name_straggler(batch, &seconds);
        }
        self.record(Metric::Step(record))?;
        Ok(leave)
    }

    /// Runs this rank's micro-batches of the step, and joins those of others under sharding.
    fn run_micro_batches(
        &mut self,
        batch: u64,
        measure: Measure,
    ) -> Result<Parts<StepSums>, TrainError> {
        let dealt = self.generation.plan.deal(batch);
        let micro_batch = self.generation.plan.per_device_batch_size;
        let most = dealt.iter().copied().max().unwrap_or(0);
        let count = dealt[self.rank()];
        let own = samples::micro_batches(self.state.samples, micro_batch, &dealt, self.rank());
        let own: Vec<Range<u64>> = own.collect();
        let steps = self.in_common(batch, &own, most)?;
        let mut sums = self.no_sums();
        for (i, (positions, step)) in (1..).zip(own.into_iter().zip(steps)) {
            // A step without the world is useless.
            self.world.check()?;
            let collated = self.collate(positions.clone())?;
            let local: &mut StepSums = sums.next();
            for (sample, position) in positions.clone().enumerate() {
                local.digest += collated.digest(sample, position);
            }
            let noise = self.noise(&collated, positions.clone())?;
            let dropout = self.dropout(&collated, positions.clone())?;
            let micro_batch = MicroBatch {
                noise: &noise,
                dropout: &dropout,
                ..collated.micro_batch()
            };
            let last = i == count;
            let (loss, samples, done) = match &self.preferences {
                None => {
                    let (mean, samples) = (self.run.spec.likelihood.mean, collated.samples as u64);
                    let loss = match mean {
                        LikelihoodMean::Tokens => BatchLoss::OfTokens,
                        LikelihoodMean::Samples => BatchLoss::OfSamples(samples),
                    };
                    let done = (self.engine).accumulate_loss(micro_batch, loss, measure, last)?;
                    (done.loss, mean.count(done.targets, samples), done)
                }
                Some(Preferences { loss, training, .. }) => {
                    let references = training.samples.of(positions.map(|at| self.order.at(at)));
                    let targets = loss.targets(&collated);
                    let micro_batch = MicroBatch {
                        targets: &targets,
                        ..micro_batch
                    };
                    let mut judged = JudgedBatch::default();
                    let weigh: Weigh<'_> = Box::new(|losses| {
                        judged = preferences::judged(loss, &collated, losses, &references, step);
                        std::mem::take(&mut judged.weights)
                    });
                    let samples = collated.samples as u64;
                    let weighed = BatchLoss::Weighed(samples, weigh);
                    let done =
                        (self.engine).accumulate_loss(micro_batch, weighed, measure, last)?;
                    local.preferences.merge(&judged.sums);
                    (judged.loss, samples, done)
                }
            };
            local.loss += loss;
            local.targets += done.targets;
            local.count += samples;
            if let Some(squared_norm) = done.squared_norm {
                local.groups.add(squared_norm, samples);
            }
        }
        for i in count + 1..=most {
            self.engine.join(i == most)?;
        }
        Ok(sums)
    }

    /// The sums of a rank before its first micro-batch.
    fn no_sums<T: Merge>(&self) -> Parts<T> {
        Parts::new(self.run.is_deterministic_in_every_world())
    }

    /// The samples at these positions of the global order.
    fn collate(&self, positions: Range<u64>) -> Result<Collated, TrainError> {
        let indices = positions.map(|at| self.order.at(at));
        Ok(self.data.collate(indices)?)
    }

    /// What the samples of a step have in common, for each of this rank's `own` micro-batches; a rank has up to `most`.
    /// Collective for losses that couple samples.
    fn in_common(
        &mut self,
        batch: u64,
        own: &[Range<u64>],
        most: u64,
    ) -> Result<Vec<Step>, TrainError> {
        let mut steps = vec![Step::default(); own.len()];
        let Some(Preferences { loss, training, .. }) = &self.preferences else {
            return Ok(steps);
        };
        if loss.has_likelihood() {
            // The likelihood is a mean over the tokens of the global batch.
            let mut covered = 0;
            for positions in own {
                let collated = self.collate(positions.clone())?;
                let targets = loss.targets(&collated);
                covered += loss.likelihood_tokens(&targets, collated.seq_len);
            }
            let covered: u64 = exchange(self.world.as_ref(), &covered)?.into_iter().sum();
            for step in &mut steps {
                step.samples_per_token = batch as f64 / covered.max(1) as f64;
            }
        }
        if let (Some(covered), Some(mismatched)) = (loss.kl(), &training.mismatched) {
            let (engine, world) = (self.engine.as_mut(), self.world.as_ref());
            let estimates =
                kl::estimates(covered, mismatched, &self.data, own, most, engine, world)?;
            for (step, kl) in steps.iter_mut().zip(estimates) {
                step.kl = kl;
            }
        }
        Ok(steps)
    }

    /// The noise on the embeddings of samples of text at these positions, which no split of the batch changes; none if the
    /// recipe has none.
    fn noise(&self, collated: &Collated, positions: Range<u64>) -> Result<Vec<Noise>, TrainError> {
        let spec = &self.run.spec;
        let alpha = spec.likelihood.neftune_alpha;
        if alpha == 0.0 {
            return Ok(Vec::new());
        }
        let width = self.run.built_in()?.model.hidden_size;
        let of_sample = |(position, inputs): (u64, &usize)| Noise {
            key: xxh3_64_with_seed(&position.to_le_bytes(), spec.seed),
            // The sample's last token is no input, and counts.
            magnitude: (alpha / ((inputs + 1) as f64 * width as f64).sqrt()) as f32,
        };
        Ok(positions.zip(collated.lengths()).map(of_sample).collect())
    }

    /// What draws the dropout of adapters in each row. Preferences are trained without, as upstream's `disable_dropout`
    /// has it.
    fn dropout(&self, collated: &Collated, positions: Range<u64>) -> Result<Vec<u64>, TrainError> {
        let adapters = self.run.built_in()?.adapters.as_ref();
        let drops = adapters.is_some_and(|adapters| adapters.dropout > 0.0);
        if !drops || self.preferences.is_some() || collated.batch != collated.samples {
            return Ok(Vec::new());
        }
        // Another stream than that of the noise.
        let seed = !self.run.spec.seed;
        let keys = positions.map(|position| xxh3_64_with_seed(&position.to_le_bytes(), seed));
        Ok(keys.collect())
    }

    /// Rank 0 decides on the next batch. If there is a measurement, it broadcasts the decision, so that
    /// different arithmetic of machines cannot split the world.
    fn decide(&mut self, step: u64, sums: Option<Sums>) -> Result<Decision, TrainError> {
        let warming_up = self.learning_rate.warming_up(self.state.samples);
        let measured = sums.is_some();
        let decision = self
            .state
            .controller
            .observe(step, self.state.samples, warming_up, sums);
        if !measured || self.world.world() == 1 {
            return Ok(decision);
        }
        let mine = if self.rank() == 0 {
            encode(&(&self.state.controller, decision))
        } else {
            Vec::new()
        };
        let everyones = self.world.exchange(&mine)?;
        let (controller, decision) = decode(0, &everyones[0])?;
        self.state.controller = controller;
        Ok(decision)
    }

    /// Mean loss over the evaluation data, distributed over the ranks.
    fn evaluate(&mut self) -> Result<(), TrainError> {
        let Some(data) = &self.evaluation else {
            return Ok(());
        };
        let plan = &self.generation.plan;
        let micro_batch = plan
            .facts
            .eval_batch_size
            .unwrap_or(plan.per_device_batch_size);
        let total = self.run.evaluated_samples(data.len());
        let world = self.world.world() as u64;
        let passes = total.div_ceil(micro_batch).div_ceil(world);
        let first = |pass: u64| (pass * world + self.world.rank() as u64) * micro_batch;
        let own = (0..passes)
            .map(|pass| first(pass).min(total)..(first(pass) + micro_batch).min(total))
            .filter(|samples| !samples.is_empty());
        let own: Vec<Range<u64>> = own.collect();
        let mut local: Parts<EvaluationSums> = self.no_sums();
        let engine = self.engine.as_mut();
        let mut step = Step::default();
        if let Some(Preferences { evaluation, .. }) = &self.preferences
            && let Some(mismatched) = &evaluation.mismatched
        {
            let world = self.world.as_ref();
            let estimates =
                kl::estimates(Kl::Global, mismatched, data, &own, passes, engine, world)?;
            step.kl = estimates.first().copied().unwrap_or(0.0);
        }
        for samples in &own {
            self.world.check()?;
            let collated = data.collate(samples.clone())?;
            let micro_batch = collated.micro_batch();
            match &self.preferences {
                None => {
                    let (loss, tokens) = engine.evaluate(micro_batch)?;
                    let mean = self.run.spec.likelihood.mean;
                    let count = mean.count(tokens, collated.samples as u64);
                    let sums = EvaluationSums::of_tokens(loss, tokens, count);
                    local.next().merge(&sums);
                }
                Some(Preferences {
                    loss, evaluation, ..
                }) => {
                    let targets = loss.targets(&collated);
                    let losses = engine.losses(MicroBatch {
                        targets: &targets,
                        ..micro_batch
                    })?;
                    let references = evaluation.samples.of(samples.clone());
                    let sums = loss.evaluated(&collated, &targets, &losses, &references, step);
                    local.next().merge(&sums);
                }
            }
        }
        for _ in own.len() as u64..passes {
            engine.join_evaluation()?;
        }
        let sums = Parts::total_in_turns(&exchange(self.world.as_ref(), &local)?);
        if sums.tokens > 0 {
            let loss = self.preferences.as_ref().map(|all| &all.loss);
            self.record(Metric::Evaluation(EvaluationRecord {
                generation: self.generation.number,
                samples: self.state.samples,
                loss: sums.mean(),
                tokens: sums.tokens,
                time: now(),
                preferences: sums.preferences.record(loss).map(Box::new),
            }))?;
        }
        Ok(())
    }

    /// Records a step or an evaluation in a file, which outlives the process that started this rank. Rank 0 reports it.
    fn record(&mut self, metric: Metric) -> Result<(), TrainError> {
        if let Some(metrics) = &mut self.metrics {
            metrics.write(&metric)?;
        }
        if self.rank() != 0 {
            return Ok(());
        }
        report(&match metric {
            Metric::Step(step) => Report::Step(step),
            Metric::Evaluation(evaluation) => Report::Evaluation(evaluation),
        });
        Ok(())
    }

    /// Records the newest step, which is about to be committed, if a rank was lost before rank 0 recorded it. An
    /// evaluation that is missing for the same reason is repeated by the next generation.
    pub fn record_last_step(&mut self) -> Result<(), TrainError> {
        let Some(step) = self.last_step.take() else {
            return Ok(());
        };
        if metrics::append_missing(&self.run_dir.join(self.target().metrics()), &step)? {
            report(&Report::Step(step));
        }
        Ok(())
    }

    /// Beside what follows, copies the metrics of the generation that it leaves to the bucket: no checkpoint of it will.
    pub fn keep_metrics(&self) {
        let Some(bucket) = self.bucket.clone() else {
            return;
        };
        let metrics = self.target().metrics();
        let file = self.run_dir.join(&metrics);
        std::thread::spawn(move || {
            if let Err(error) = Bucket::patiently(|| bucket.upload(&file, &metrics)) {
                stderr::line(format_args!(
                    "{} is not in the bucket: {error}",
                    file.display()
                ));
            }
        });
    }

    /// The checkpoint of the present state.
    fn target(&self) -> Target {
        Target {
            run_directory: self.run_dir.clone(),
            bucket: self.bucket.clone(),
            generation: self.generation.number,
            step: self.state.step,
        }
    }

    fn begin_checkpoint(&mut self, world: &dyn Collective) -> Result<(), TrainError> {
        let target = self.target();
        let saving = Saving::begin(self.engine.as_mut(), world, target, &self.state)?;
        self.saving = Some(saving);
        Ok(())
    }

    /// Finishes the checkpoint in progress, if any, together with all ranks of `world`.
    fn finish_checkpoint(&mut self, world: &dyn Collective) -> Result<(), TrainError> {
        let Some(saving) = self.saving.take() else {
            return Ok(());
        };
        let started = saving.started;
        let checkpoint_ref = saving.finish(self.engine.as_ref(), world, self.run)?;
        self.last_checkpoint = Some(checkpoint_ref.path.clone());
        if world.rank() == 0 {
            report(&Report::Committed {
                checkpoint_ref,
                seconds: started.elapsed().as_secs_f64(),
                bytes: 3 * size_of::<f32>() as u64 * self.engine.layout().len(),
            });
        }
        Ok(())
    }

    /// Finishes a checkpoint in progress, then writes one of the present state; returns when it is committed.
    fn commit_now(&mut self, world: &dyn Collective) -> Result<(), TrainError> {
        self.finish_checkpoint(world)?;
        self.begin_checkpoint(world)?;
        self.finish_checkpoint(world)
    }

    /// Writes and commits the whole state from this rank alone, after a peer was lost, where every rank holds
    /// everything.
    pub fn commit_alone(&mut self) -> Result<(), TrainError> {
        self.engine.discard();
        self.record_last_step()?;
        self.abandon_checkpoint();
        self.commit_now(&Solo)
    }

    /// Gives up the checkpoint in progress, which needs all ranks.
    pub fn abandon_checkpoint(&mut self) {
        if let Some(saving) = self.saving.take() {
            saving.writer.abandon();
        }
    }

    /// What it holds after its last complete step.
    pub fn held(&self) -> HeldState {
        HeldState {
            step: self.state.step,
            samples: self.state.samples,
            batch: self.state.controller.batch(),
            whole: self.has_state && !sharded(self.generation.plan.facts.strategy),
            // What a reference model says of the data is agreed on when a run starts or resumes.
            joinable: self.preferences.is_none(),
        }
    }

    fn name_straggler(&mut self, batch: u64, seconds: &[f64]) {
        if self.generation.world() < 2 {
            return;
        }
        if std::mem::replace(&mut self.watched_batch, batch) != batch {
            self.watch.forget();
        }
        if let Some(straggler) = self.watch.observe(seconds) {
            report(&Report::Straggler {
                rank: straggler.rank as u64,
                seconds: straggler.seconds,
                usual: straggler.usual,
            });
        }
    }
}

/// A checkpoint in progress beside training: every rank writes its units in the background and reports in
/// each step's message whether it has finished. Once all have, they finish the checkpoint together.
pub struct Saving {
    target: Target,
    writer: Writer,
    samples: u64,
    batch: u64,
    state: Value,
    started: Instant,
}

impl Saving {
    /// Takes the snapshot: every rank exports every unit (a collective under sharding) and hands its own
    /// units to the background writer.
    fn begin(
        engine: &mut dyn Engine,
        world: &dyn Collective,
        target: Target,
        state: &TrainState,
    ) -> Result<Saving, TrainError> {
        let started = Instant::now();
        let writer = Writer::begin(&target, engine.layout(), world.rank(), world.world());
        for unit in 0..engine.layout().units.len() {
            if let Some(exported) = engine.export(unit, writer.owns(unit))? {
                writer.write_unit(unit, exported);
            }
        }
        Ok(Saving {
            target,
            writer,
            samples: state.samples,
            batch: state.controller.batch(),
            state: state.to_json()?,
            started,
        })
    }

    /// Finishes it together with all ranks.
    fn finish(
        self,
        engine: &dyn Engine,
        world: &dyn Collective,
        run: &Run,
    ) -> Result<CheckpointRef, TrainError> {
        let built_in = run.built_in()?;
        let contents = Contents {
            layout: engine.layout(),
            samples: self.samples,
            state: &self.state,
            config: &match &built_in.adapters {
                Some(adapters) => {
                    adapter::to_json(adapters, &built_in.model, built_in.base_model.as_deref())
                }
                None => built_in.model.to_json(),
            },
            companions: &built_in.companions,
            chat_template: run.spec.tokenizer.chat_template.as_deref(),
        };
        let committed = checkpoint::finish_together(self.writer, &self.target, contents, world)?;
        let run_dir = &self.target.run_directory;
        Ok(checkpoint_ref::with_batch(&committed, run_dir, self.batch))
    }
}

/// The engine's measurements of these groups for the norm test.
pub(super) fn measure(groups: Option<Groups>, coordinates: bool) -> Measure {
    Measure {
        micro_batches: groups == Some(Groups::MicroBatches),
        worker: groups == Some(Groups::Workers),
        coordinates,
    }
}

/// Factor of the gradient that limits its norm to `clip` (torch.nn.utils.clip_grad_norm_).
fn clipping(norm: f64, clip: Option<f64>) -> f64 {
    match clip.filter(|&clip| clip > 0.0) {
        Some(clip) => (clip / (norm + 1e-6)).min(1.0),
        None => 1.0,
    }
}

/// The result of the test, which may be undefined; `None` if it did not run.
fn norm_test_record(decision: &Decision) -> Option<NormTestRecord> {
    if let Reason::Scheduled | Reason::NotDue | Reason::NotMeasured = decision.reason {
        return None;
    }
    Some(NormTestRecord {
        ratio: decision.ratio.unwrap_or(f64::NAN),
        threshold: decision.threshold?,
        noise_scale: decision.noise_scale,
        target: decision.target,
        next_batch: decision.next_batch,
        reason: decision.reason.to_string(),
    })
}

/// Counts the coordinate-wise test on all ranks together: the share of coordinates that pass in a step with these
/// groups, which are the same on every rank. Collective; called between the engine's reduction and its update.
fn count_coordinates(
    test: CoordinateTest,
    groups: &GroupSums,
    engine: &mut dyn Engine,
    world: &dyn Collective,
) -> Result<CoordinateTestRecord, TrainError> {
    let bound = match test.bound(groups) {
        Ok(bound) => bound,
        Err(why) => {
            return Ok(CoordinateTestRecord {
                share: None,
                undefined: Some(why.to_string()),
            });
        }
    };
    let mut counted = Coordinates::default();
    engine.coordinates(&mut |weighted, summed| counted.merge(&bound.count(weighted, summed)))?;
    let mut all = Coordinates::default();
    for part in exchange(world, &counted)? {
        all.merge(&part);
    }
    Ok(CoordinateTestRecord {
        share: all.share(),
        undefined: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::cpu::{CpuEngine, CpuOptions};
    use crate::train::testing::{MICRO_BATCH, tiny_model};

    const MEASURE: Measure = Measure {
        micro_batches: true,
        worker: false,
        coordinates: true,
    };

    /// The record of a step of `micro_batches` micro-batches with the same tokens.
    fn record(micro_batches: u64, eta: f64) -> CoordinateTestRecord {
        let options = CpuOptions {
            threads: Some(1),
            measure: MEASURE,
            ..CpuOptions::default()
        };
        let mut engine = CpuEngine::new(tiny_model(), options, None, Some(1)).unwrap();
        let mut groups = GroupSums::default();
        for index in 1..=micro_batches {
            let last = index == micro_batches;
            let done = engine.accumulate(MICRO_BATCH, MEASURE, last).unwrap();
            groups.add(done.squared_norm.unwrap(), done.targets);
        }
        engine.reduce(MEASURE).unwrap();
        let test = CoordinateTest {
            groups: Groups::MicroBatches,
            threshold: eta * eta,
        };
        count_coordinates(test, &groups, &mut engine, &Solo).unwrap()
    }

    #[test]
    fn groups_without_any_difference_pass_in_every_coordinate() {
        assert_eq!(record(3, 0.1).share, Some(1.0));
    }

    #[test]
    fn one_group_is_undefined_with_a_reason_in_the_record() {
        let record = record(1, 0.1);
        assert_eq!(record.share, None);
        assert_eq!(
            record.undefined.as_deref(),
            Some(
                "one group has no variance; the test needs two workers or micro-batches in a step"
            )
        );
    }
}
