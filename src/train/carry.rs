//! A process continues in another generation with the state that it has.

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use super::TrainError;
use super::checkpoint_ref::TrainState;
use super::entry::{agree_on_memory, check_coupling, conditions};
use super::kernels::{self, Kernels};
use super::message::{decode, encode, exchange};
use super::orders::report;
use super::trainer::Trainer;
use crate::comm::{Collective, CommError, Operation, Pending, World};
use crate::engine::{Engine, EngineError, Place, UnitState};
use crate::lifecycle::Generation;
use crate::lifecycle::generation::Carried;
use crate::lifecycle::protocol::Report;
use crate::telemetry::metrics::Writer as MetricsWriter;

/// Tells the states of ranks apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Version {
    /// `None` of a process that stood by.
    samples: Option<u64>,
    /// Of the state besides the weights.
    digest: u64,
}

impl Trainer<'_> {
    /// Belongs to another generation from here on, as this rank of it: what it commits is a checkpoint of that one, also
    /// before its ranks have met. No earlier generation can commit any more.
    pub fn leave(&mut self, next: Generation, rank: u64) -> Result<(), TrainError> {
        if next.carried.is_some_and(|carried| carried.rank == rank) {
            self.record_last_step()?;
            self.keep_metrics();
        }
        self.last_step = None;
        self.metrics = None;
        self.generation = next;
        Ok(())
    }

    /// Continues in its generation with the state that the processes bring. Collective.
    pub fn enter(
        &mut self,
        world: World,
        place: Place,
        metrics: Option<MetricsWriter>,
    ) -> Result<(), TrainError> {
        self.world = world;
        self.metrics = metrics;
        self.watch.forget();
        check_coupling(self.run, &self.generation.plan)?;
        self.engine.rejoin(place)?;
        self.level()?;
        if let Some(pinned) = &self.state.kernels {
            kernels::agree(Kernels::here(), Some(pinned), self.world.as_ref())?;
        }
        let memory = agree_on_memory(
            self.run,
            &self.generation.plan,
            self.engine.as_mut(),
            self.world.as_ref(),
        );
        if memory.is_err() && self.world.rank() == 0 {
            // All ranks end, and none has this state on disk.
            self.commit_alone()?;
        }
        memory?;
        let conditions = conditions(self.run, &self.generation.plan)?;
        let change = self.state.controller.refit(conditions)?;
        self.watched_batch = self.state.controller.batch();
        if let Some(message) = change.filter(|_| self.world.rank() == 0) {
            report(&Report::Warning { message });
        }
        Ok(())
    }

    /// Takes the state that counts, if it has another one. Collective.
    fn level(&mut self) -> Result<(), TrainError> {
        let own = self.has_state.then_some(&self.state);
        let (engine, world) = (self.engine.as_mut(), self.world.as_ref());
        let carried = self.generation.carried;
        let carried = carried.ok_or_else(|| missing("no rank brings one"))?;
        let Some(Differs { newest, holders }) = compare(own, &carried, world)? else {
            return Ok(());
        };
        if let Some(newest) = newest {
            self.state = newest;
        }
        // Until all of it has arrived.
        self.has_state &= holders[world.rank()];
        copy_weights(engine, &holders, world)?;
        self.has_state = true;
        Ok(())
    }
}

/// Ranks have different states.
struct Differs {
    /// The state besides the weights, if this rank has another one.
    newest: Option<TrainState>,
    /// Whether a rank has the weights that count, in rank order.
    holders: Vec<bool>,
}

/// The state with which the generation begins is not there.
fn missing(why: &str) -> TrainError {
    let message = format!("the state of the generation is missing: {why}");
    EngineError::Comm(CommError::Rendezvous(message)).into()
}

/// Compares the states of all ranks with the one that counts; `None`: all have that. Collective.
fn compare(
    own: Option<&TrainState>,
    carried: &Carried,
    world: &dyn Collective,
) -> Result<Option<Differs>, TrainError> {
    let encoded = own.map(encode).unwrap_or_default();
    let version = Version {
        samples: own.map(|state| state.samples),
        digest: xxh3_64(&encoded),
    };
    let versions = exchange(world, &version)?;
    let root = carried.rank as usize;
    let newest = versions.get(root);
    let newest = newest.filter(|newest| newest.samples == Some(carried.samples));
    let newest = newest.ok_or_else(|| missing("another process has the place of its rank"))?;
    if versions.iter().all(|version| version == newest) {
        return Ok(None);
    }
    let is_root = world.rank() == root;
    let received = world.exchange(if is_root { &encoded } else { &[] })?;
    let differs = version != *newest;
    let holds = |version: &Version| version.samples == newest.samples;
    Ok(Some(Differs {
        newest: differs.then(|| decode(root, &received[root])).transpose()?,
        holders: versions.iter().map(holds).collect(),
    }))
}

/// Gives the weights and moments that count to the ranks that lack them. Collective.
fn copy_weights(
    engine: &mut dyn Engine,
    holders: &[bool],
    world: &dyn Collective,
) -> Result<(), TrainError> {
    if holders.iter().all(|holds| *holds) {
        return Ok(());
    }
    let holds = holders[world.rank()];
    // The next unit is under way while one is set.
    let mut before: Option<(usize, [Pending; 3])> = None;
    for unit in 0..engine.layout().units.len() {
        let len = engine.layout().units[unit].len;
        let own = engine.export(unit, holds)?.filter(|_| holds);
        let parts = own.map_or_else(
            || std::array::from_fn(|_| vec![0.0; len]),
            |own| [own.parameters, own.exp_avg, own.exp_avg_sq],
        );
        let start = |part| world.start(Operation::broadcast(part, holders.to_vec()));
        let started = (unit, parts.map(start));
        receive(engine, before.replace(started), holds)?;
    }
    receive(engine, before, holds)
}

/// Sets the state of a unit whose transfer has started.
fn receive(
    engine: &mut dyn Engine,
    started: Option<(usize, [Pending; 3])>,
    holds: bool,
) -> Result<(), TrainError> {
    let Some((unit, [parameters, exp_avg, exp_avg_sq])) = started else {
        return Ok(());
    };
    let state = UnitState {
        parameters: parameters.wait()?.data,
        exp_avg: exp_avg.wait()?.data,
        exp_avg_sq: exp_avg_sq.wait()?.data,
    };
    if !holds {
        engine.import(unit, &state)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::ops::RangeInclusive;
    use std::sync::Arc;

    use super::*;
    use crate::comm::tcp::{self, Greeting, TcpOptions};
    use crate::engine::cpu::{CpuEngine, CpuOptions};
    use crate::engine::{AdamW, Measure};
    use crate::norm::{Conditions, Controller};
    use crate::recipe::schema::spec::BatchSchedule;
    use crate::samples::Ledger;
    use crate::train::testing::{MICRO_BATCH, tiny_model};
    use crate::util::key::Key;

    /// Runs on the ranks of a world.
    fn on_all<T: Send>(world: usize, run: impl Fn(World) -> T + Sync) -> Vec<T> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let key = Key::random().unwrap();
        let options =
            |rank| TcpOptions::new("127.0.0.1", port, Greeting { rank, world }, key.clone());
        std::thread::scope(|scope| {
            let run = &run;
            let first = options(0);
            let mut ranks = vec![scope.spawn(move || run(tcp::host(&first, listener).unwrap()))];
            for rank in 1..world {
                let options = options(rank);
                ranks.push(scope.spawn(move || run(tcp::connect(&options).unwrap())));
            }
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    fn engine(world: Option<World>) -> CpuEngine {
        let options = CpuOptions {
            threads: Some(1),
            ..CpuOptions::default()
        };
        CpuEngine::new(tiny_model(), options, world, None).unwrap()
    }

    /// An engine after this number of steps alone.
    fn trained(steps: u64) -> CpuEngine {
        let mut engine = begun(None);
        train(&mut engine, 1..=steps);
        engine
    }

    /// An engine with the same weights each time.
    fn begun(world: Option<World>) -> CpuEngine {
        let mut engine = engine(world);
        for unit in 0..engine.layout().units.len() {
            let len = engine.layout().units[unit].len;
            // Also a negative zero, whose sign a sum of floats would lose.
            let values = (0..len).map(|i| if i % 7 == 0 { -0.0 } else { 0.01 * i as f32 });
            let state = UnitState {
                parameters: values.collect(),
                exp_avg: vec![0.0; len],
                exp_avg_sq: vec![0.0; len],
            };
            engine.import(unit, &state).unwrap();
        }
        engine
    }

    fn train(engine: &mut CpuEngine, steps: RangeInclusive<u64>) {
        train_on(engine, steps, 1);
    }

    /// Each step has this number of equal micro-batches.
    fn train_on(engine: &mut CpuEngine, steps: RangeInclusive<u64>, micro_batches: u64) {
        for step in steps {
            let measure = Measure::default();
            for index in 1..=micro_batches {
                let last = index == micro_batches;
                engine.accumulate(MICRO_BATCH, measure, last).unwrap();
            }
            engine.reduce(measure).unwrap();
            engine
                .update(AdamW {
                    weight_decay: 0.0,
                    vector_decay: 0.0,
                    learning_rate: 1e-2,
                    beta1: 0.9,
                    beta2: 0.999,
                    epsilon: 1e-8,
                    step,
                    gradient_scale: 1.0,
                })
                .unwrap();
        }
    }

    fn state(steps: u64) -> TrainState {
        let conditions = Conditions {
            base_batch: 4,
            quantum: 4,
            budget: 100,
            micro_batch: 1,
            workers: 4,
            sharded: false,
        };
        TrainState {
            step: steps,
            samples: 4 * steps,
            controller: Controller::new(&BatchSchedule::default(), conditions).unwrap(),
            ledger: Ledger::default(),
            references: Default::default(),
            kernels: None,
        }
    }

    fn bits(engine: &mut CpuEngine) -> Vec<u32> {
        let units = 0..engine.layout().units.len();
        let states = units.map(|unit| engine.export(unit, true).unwrap().unwrap());
        let values = states.flat_map(|it| [it.parameters, it.exp_avg, it.exp_avg_sq].concat());
        values.map(f32::to_bits).collect()
    }

    /// What a generation says of the state of this rank after these steps.
    fn carried(rank: u64, steps: u64) -> Carried {
        let TrainState { step, samples, .. } = state(steps);
        Carried {
            from: 1,
            rank,
            step,
            samples,
            batch: 4,
        }
    }

    /// Rank 1 is a step behind, and rank 0 has stood by.
    #[test]
    fn ranks_that_are_behind_take_the_state_that_counts_to_the_bit() {
        let expected = bits(&mut trained(2));
        let ranks = on_all(4, |world| {
            let (mut engine, own) = match world.rank() {
                0 => (engine(None), None),
                1 => (trained(1), Some(state(1))),
                _ => (trained(2), Some(state(2))),
            };
            let differs = compare(own.as_ref(), &carried(2, 2), world.as_ref());
            let differs = differs.unwrap().unwrap();
            copy_weights(&mut engine, &differs.holders, world.as_ref()).unwrap();
            let samples = differs.newest.or(own).unwrap().samples;
            (differs.holders, samples, bits(&mut engine))
        });
        for (holders, samples, found) in ranks {
            assert_eq!((holders, samples), (vec![false, false, true, true], 8));
            assert!(found == expected);
        }
    }

    /// The rank whose state counts may be a new process.
    #[test]
    fn a_state_that_is_missing_is_an_error_of_all_ranks() {
        let ranks = on_all(2, |world| {
            let own = (world.rank() == 1).then(|| state(2));
            let of = |rank, steps| compare(own.as_ref(), &carried(rank, steps), world.as_ref());
            (of(0, 2).is_err(), of(1, 3).is_err(), of(1, 2).is_ok())
        });
        assert_eq!(ranks, [(true, true, true); 2]);
    }

    /// A rank is lost in the middle of a step; the other continues with the next one, alone and on more threads.
    #[test]
    fn an_engine_leaves_a_world_that_has_failed() {
        let after = on_all(2, |world| {
            let mut engine = begun(Some(Arc::clone(&world)));
            train(&mut engine, 1..=2);
            if world.rank() == 1 {
                world.abort("lost");
                return None;
            }
            let measure = Measure::default();
            let step = engine.accumulate(MICRO_BATCH, measure, true);
            step.and_then(|_| engine.reduce(measure)).unwrap_err();
            let expected = bits(&mut engine);
            let activity = Arc::default();
            let place = Place {
                world: None,
                threads: 3,
                activity,
            };
            engine.rejoin(place).unwrap();
            assert!(bits(&mut engine) == expected);
            train(&mut engine, 3..=3);
            Some(bits(&mut engine))
        });
        // Alone, with the micro-batches of both.
        let mut alone = begun(None);
        train_on(&mut alone, 1..=2, 2);
        train(&mut alone, 3..=3);
        assert!(after[0].as_ref() == Some(&bits(&mut alone)));
    }

    /// A decision on the batch may have reached some ranks only.
    #[test]
    fn ranks_with_another_state_beside_equal_weights_take_it() {
        let ranks = on_all(2, |world| {
            let mut own = state(2);
            own.step += world.rank() as u64;
            let differs = compare(Some(&own), &carried(0, 2), world.as_ref());
            let differs = differs.unwrap().unwrap();
            (differs.holders, differs.newest.map(|it| it.step))
        });
        let all = || vec![true; 2];
        assert_eq!(ranks, [(all(), None), (all(), Some(2))]);
        let equal = on_all(2, |world| {
            let own = state(2);
            compare(Some(&own), &carried(1, 2), world.as_ref())
                .unwrap()
                .is_none()
        });
        assert_eq!(equal, [true, true]);
    }
}
