//! The training loop: runs steps until the budget is reached or a drain is requested.
//!
//! A step consumes samples [c, c+b) of the one global order. Its gradient is a sum over target tokens,
//! divided once by the tokens of the whole global batch, so that neither accumulation nor the world changes
//! the result.

use std::path::Path;
use std::time::Instant;

use super::TrainError;
use super::coordinates;
use super::message::{Bits, Message, Totals, decode, encode, exchange};
use super::orders::{Orders, Reports};
use super::saving::Saving;
use super::schedule::LearningRateSchedule;
use super::setup::Setup;
use super::state::TrainState;
use crate::bucket::Bucket;
use crate::checkpoint::Target;
use crate::comm::World;
use crate::comm::solo::Solo;
use crate::comm::watch::StepWatch;
use crate::data::{Collated, Dataset};
use crate::engine::{AdamW, Engine, IGNORE, Measure, MicroBatch};
use crate::lifecycle::Generation;
use crate::lifecycle::protocol::Report;
use crate::norm::{Decision, GroupSums, Reason, Sums};
use crate::recipe::schema::spec::Groups;
use crate::samples::{Deal, Digest, Order, Row};
use crate::telemetry::metrics::{self, Writer as MetricsWriter};
use crate::telemetry::{EvaluationRecord, Metric, NormTestRecord, StepRecord, now};

/// A step is reported as slow if it takes this many times the usual time.
pub const STRAGGLER_FACTOR: f64 = 3.0;

/// How the training loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The budget is reached.
    Finished,
    Drained,
}

/// The loop of one rank with all its state.
pub struct Trainer<'a> {
    pub run: &'a Path,
    /// The setup of the run.
    pub setup: &'a Setup,
    /// The generation, with its plan.
    pub generation: &'a Generation,
    /// Collective of the generation's ranks.
    pub world: World,
    /// The model, with its optimiser.
    pub engine: Box<dyn Engine>,
    pub data: Dataset,
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
    /// Orders of the agent.
    pub orders: &'a Orders,
    /// Reports to the agent.
    pub reports: Reports,
    /// The generation's metrics file, of the rank that writes it.
    pub metrics: Option<MetricsWriter>,
    /// The newest step, which rank 0 records.
    pub last_step: Option<StepRecord>,
    /// The checkpoint in progress, if any.
    pub saving: Saving,
    /// Path of the newest committed checkpoint below the run directory.
    pub last_checkpoint: Option<String>,
    /// Learns the usual duration of a step.
    pub watch: StepWatch,
    /// The batch of the observed steps.
    pub watched_batch: u64,
}

/// Results of a rank's own micro-batches of a step.
#[derive(Default)]
struct Local {
    loss: f64,
    targets: u64,
    digest: Digest,
    groups: GroupSums,
}

impl Trainer<'_> {
    /// Trains until the budget is reached or a drain is agreed on. The last checkpoint is committed when it
    /// returns.
    pub fn train(&mut self) -> Result<Ending, TrainError> {
        let horizon = self.setup.horizon.clone();
        let budget = self.setup.budget()?;
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
        let mut drain = false;
        while self.state.samples < budget && !drain {
            let before = self.state.samples;
            drain = self.step()?;
            let after = self.state.samples;
            let (evaluate, save) = (
                crossed(horizon.eval_every, before, after),
                crossed(horizon.checkpoint_every, before, after),
            );
            let last = self.state.samples >= budget;
            if evaluate && !last && !drain {
                self.evaluate()?;
            }
            if save && !last && !drain && !self.saving.busy() {
                self.begin_checkpoint()?;
            }
        }
        let ending = if self.state.samples >= budget {
            self.evaluate()?;
            Ending::Finished
        } else {
            Ending::Drained
        };
        self.commit_now()?;
        Ok(ending)
    }

    fn rank(&self) -> usize {
        self.world.rank()
    }

    /// Runs one optimiser step; returns whether a drain was agreed on.
    fn step(&mut self) -> Result<bool, TrainError> {
        let started = Instant::now();
        let step = self.state.step + 1;
        let batch = self.state.controller.batch();
        let wanted = self.state.controller.requested_groups(step);
        let coordinate_test = self.state.controller.requested_coordinates(step);
        let groups = coordinate_test.map(|test| test.groups).or(wanted);
        let measure = measure(groups, coordinate_test.is_some());
        let (from, to) = (self.state.samples, self.state.samples + batch);

        let mut local = self.run_micro_batches(batch, measure)?;
        let seconds = started.elapsed().as_secs_f64();
        let reduced = self.engine.reduce(measure)?;
        if let Some(squared_norm) = reduced.local_squared_norm {
            local.groups.add(squared_norm, local.targets);
        }
        let message = Message {
            loss: local.loss.into(),
            targets: local.targets,
            weighted: local.groups.weighted.into(),
            units: local.groups.units,
            groups: local.groups.groups,
            digest: local.digest,
            seconds: seconds.into(),
            drain: self.orders.draining(),
            written: self.saving.written(),
        };
        let totals = Totals::of(&exchange(self.world.as_ref(), &message)?);
        if totals.targets == 0 {
            return Err(TrainError::NoTargets { step, from, to });
        }
        let tokens = totals.targets as f64;
        let loss = totals.loss / tokens;
        let gradient_norm = reduced.squared_norm.sqrt() / tokens;
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
                coordinates::count(test, &totals.groups, engine, world)
            })
            .transpose()?;
        let learning_rate = self.learning_rate();
        let optimizer = &self.setup.spec.optimizer;
        self.engine.update(AdamW {
            learning_rate,
            beta1: optimizer.beta1,
            beta2: optimizer.beta2,
            epsilon: optimizer.epsilon,
            weight_decay: optimizer.weight_decay,
            step,
            gradient_scale: clipping(gradient_norm, optimizer.gradient_clip) / tokens,
        })?;

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
            external: None,
        };
        // The step is taken. If a rank is lost from here on, the one that commits it records it.
        self.last_step = Some(record.clone());
        let sums = wanted
            .is_some()
            .then(|| totals.groups.sums(reduced.squared_norm, batch));
        let decision = self.decide(step, sums)?;
        if totals.written {
            self.finish_checkpoint()?;
        }

        record.seconds = started.elapsed().as_secs_f64();
        record.time = now();
        record.norm_test = norm_test_record(&decision);
        self.last_step = Some(record.clone());
        if self.rank() == 0 {
            self.name_straggler(batch, &totals.seconds);
        }
        self.record(Metric::Step(record))?;
        Ok(totals.drain)
    }

    /// Runs this rank's micro-batches of the step, and joins those of others under sharding.
    fn run_micro_batches(&mut self, batch: u64, measure: Measure) -> Result<Local, TrainError> {
        let dealt = self.generation.plan.deal(batch);
        let micro_batch = self.generation.plan.per_device_batch_size;
        let most = dealt.iter().copied().max().unwrap_or(0);
        let count = dealt[self.rank()];
        let deal = Deal::new(self.state.samples, micro_batch, dealt);
        let mut local = Local::default();
        for (i, positions) in (1..).zip(deal.micro_batches(self.rank())) {
            self.check()?;
            let collated = collate(&self.data, &self.order, positions.clone())?;
            for (row, position) in positions.enumerate() {
                let (tokens, targets) = collated.row(row);
                local.digest += Digest::of(position, tokens, targets, IGNORE);
            }
            let done = self
                .engine
                .accumulate(as_micro_batch(&collated), measure, i == count)?;
            local.loss += done.loss;
            local.targets += done.targets;
            if let Some(squared_norm) = done.squared_norm {
                local.groups.add(squared_norm, done.targets);
            }
        }
        for i in count + 1..=most {
            self.engine.join(i == most)?;
        }
        Ok(local)
    }

    /// Fails if the world has ended, because a step without it is useless.
    fn check(&self) -> Result<(), TrainError> {
        Ok(self.world.check()?)
    }

    fn learning_rate(&self) -> f64 {
        self.learning_rate.at(self.state.samples) * self.state.controller.learning_rate_factor()
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

    /// Mean loss per target token over the evaluation data, distributed over the ranks.
    fn evaluate(&mut self) -> Result<(), TrainError> {
        let Some(data) = self.evaluation.take() else {
            return Ok(());
        };
        let result = self.evaluate_on(&data);
        self.evaluation = Some(data);
        result
    }

    fn evaluate_on(&mut self, data: &Dataset) -> Result<(), TrainError> {
        let plan = &self.generation.plan;
        let micro_batch = plan
            .outline
            .eval_batch_size
            .unwrap_or(plan.per_device_batch_size);
        let wanted = self.setup.spec.evaluation.samples.unwrap_or(data.len());
        let total = wanted.min(data.len());
        let world = self.world.world() as u64;
        let passes = total.div_ceil(micro_batch).div_ceil(world);
        let (mut loss, mut targets) = (0.0, 0);
        for pass in 0..passes {
            self.check()?;
            let start = (pass * world + self.rank() as u64) * micro_batch;
            if start >= total {
                self.engine.join_evaluation()?;
                continue;
            }
            let collated = data.collate(start..(start + micro_batch).min(total))?;
            let (sum, tokens) = self.engine.evaluate(as_micro_batch(&collated))?;
            loss += sum;
            targets += tokens;
        }
        let everyones = exchange(self.world.as_ref(), &(Bits::from(loss), targets))?;
        let loss: f64 = everyones.iter().map(|(loss, _)| loss.get()).sum();
        let tokens: u64 = everyones.iter().map(|(_, targets)| targets).sum();
        if tokens > 0 {
            self.record(Metric::Evaluation(EvaluationRecord {
                generation: self.generation.number,
                samples: self.state.samples,
                loss: loss / tokens as f64,
                tokens,
                time: now(),
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
        self.reports.send(&match metric {
            Metric::Step(step) => Report::Step(step),
            Metric::Evaluation(evaluation) => Report::Evaluation(evaluation),
        });
        Ok(())
    }

    /// Records the newest step, which is about to be committed, if a rank was lost before rank 0 recorded it. An
    /// evaluation that is missing for the same reason is repeated by the next generation.
    fn record_last_step(&mut self) -> Result<(), TrainError> {
        let Some(step) = self.last_step.take() else {
            return Ok(());
        };
        if metrics::append_missing(&self.run.join(self.target().metrics()), &step)? {
            self.reports.send(&Report::Step(step));
        }
        Ok(())
    }

    /// The checkpoint of the present state.
    fn target(&self) -> Target {
        Target {
            run_directory: self.run.to_path_buf(),
            bucket: self.bucket.clone(),
            generation: self.generation.number,
            step: self.state.step,
        }
    }

    fn begin_checkpoint(&mut self) -> Result<(), TrainError> {
        let target = self.target();
        let (engine, world) = (self.engine.as_mut(), self.world.as_ref());
        self.saving.begin(engine, world, target, &self.state)
    }

    fn finish_checkpoint(&mut self) -> Result<(), TrainError> {
        let (engine, world) = (self.engine.as_ref(), self.world.as_ref());
        let report = self.saving.finish(engine, world, self.setup)?;
        if let Some(Report::Committed { checkpoint_ref, .. }) = &report {
            self.last_checkpoint = Some(checkpoint_ref.path.clone());
        }
        if let Some(report) = report.filter(|_| self.rank() == 0) {
            self.reports.send(&report);
        }
        Ok(())
    }

    /// Finishes a checkpoint in progress, then writes one of the present state; returns when it is committed.
    fn commit_now(&mut self) -> Result<(), TrainError> {
        self.finish_checkpoint()?;
        self.begin_checkpoint()?;
        self.finish_checkpoint()
    }

    /// Writes and commits the whole state from this rank alone, after a peer was lost, where every rank holds
    /// everything.
    pub fn commit_alone(&mut self) -> Result<(), TrainError> {
        self.engine.discard();
        self.record_last_step()?;
        self.saving.abandon();
        let target = self.target();
        self.saving
            .begin(self.engine.as_mut(), &Solo, target, &self.state)?;
        let report = self
            .saving
            .finish(self.engine.as_ref(), &Solo, self.setup)?;
        report.iter().for_each(|report| self.reports.send(report));
        Ok(())
    }

    fn name_straggler(&mut self, batch: u64, seconds: &[f64]) {
        if self.generation.world() < 2 {
            return;
        }
        if std::mem::replace(&mut self.watched_batch, batch) != batch {
            self.watch.forget();
        }
        if let Some(straggler) = self.watch.observe(seconds) {
            self.reports.send(&Report::Straggler {
                rank: straggler.rank as u64,
                seconds: straggler.seconds,
                usual: straggler.usual,
            });
        }
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

fn collate(
    data: &Dataset,
    order: &Order,
    positions: std::ops::Range<u64>,
) -> Result<Collated, TrainError> {
    let indices = positions.map(|position| order.at(position).index);
    Ok(data.collate(indices)?)
}

fn as_micro_batch(collated: &Collated) -> MicroBatch<'_> {
    MicroBatch {
        tokens: &collated.tokens,
        targets: &collated.targets,
        batch: collated.batch,
        seq_len: collated.seq_len,
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
