//! The schedule of gathers and scatters: they run beside compute, in the same order on ranks that compute and
//! on ranks that only join.

use std::sync::{Arc, Mutex};

use super::*;
use crate::comm::tcp::tests::on_all;
use crate::comm::{Collective, CommError};
use crate::engine::{Order, Parameter, Role};

/// Records the operations that start; the length of a vector identifies its unit.
struct Recorder {
    world: World,
    events: Arc<Mutex<Vec<String>>>,
}

impl Collective for Recorder {
    fn rank(&self) -> usize {
        self.world.rank()
    }

    fn world(&self) -> usize {
        self.world.world()
    }

    fn start(&self, operation: Operation) -> Pending {
        let what = match operation.kind {
            Kind::AllGather => "gather",
            Kind::ReduceScatter => "scatter",
            Kind::AllReduce => "reduce",
            Kind::Broadcast { .. } => "broadcast",
        };
        let unit = operation.data.len() / 10 - 1;
        note(&self.events, format!("{what} {unit}"));
        self.world.start(operation)
    }

    fn start_fixed(&self, operation: Operation<i64>) -> Pending<i64> {
        self.world.start_fixed(operation)
    }

    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.world.exchange(message)
    }

    fn abort(&self, reason: &str) {
        self.world.abort(reason);
    }
}

fn note(events: &Mutex<Vec<String>>, event: String) {
    events.lock().unwrap().push(event);
}

/// Units 0 to 4 of 10 to 50 elements.
fn layout() -> Layout {
    let unit = |index: usize| {
        let len = 10 * (index + 1);
        Unit {
            name: format!("unit-{index}"),
            parameters: vec![Parameter {
                name: "weight".to_owned(),
                role: Role::InputNorm,
                shape: vec![len],
                offset: 0,
                order: Order::Native,
            }],
            len,
        }
    };
    Layout {
        units: (0..5).map(unit).collect(),
    }
}

/// Records that a unit computes.
type Compute<'a> = &'a dyn Fn(&str, usize);

/// Walks over the units in the model's order.
fn walk(store: &mut Store, trains: bool, tied: bool, compute: Compute<'_>) {
    let head = 4;
    let pass = match trains {
        true => Pass::Training(store.next(Measure::default(), (1, true)).unwrap()),
        false => Pass::Evaluation,
    };
    store.begin(pass).unwrap();
    for unit in 0..head {
        store.acquire(unit).unwrap();
        assert!(store.parameters(unit).iter().all(|&w| w == unit as f32));
        compute("forward", unit);
        if unit > 0 || !tied {
            store.release(unit);
        }
    }
    store.acquire(head).unwrap();
    compute("head", head);
    if trains {
        store.gradient(head).1.values.fill(1.0);
        if tied {
            store.gradient(0).1.values.fill(1.0);
        }
    }
    store.release(head);
    if tied {
        store.release(0);
    }
    if trains {
        store.complete(head).unwrap();
        for unit in (1..head).rev() {
            store.acquire(unit).unwrap();
            compute("backward", unit);
            store.gradient(unit).1.values.fill(1.0);
            store.release(unit);
            store.complete(unit).unwrap();
        }
        compute("backward", 0);
        store.gradient(0).1.values.fill(1.0);
        store.complete(0).unwrap();
    }
    store.end();
}

/// The events of two ranks that run `work`; those of the first rank include compute.
fn record(tied: bool, work: impl Fn(&mut Store, usize, Compute<'_>) + Sync) -> Vec<Vec<String>> {
    on_all(2, |world| {
        let rank = world.rank();
        let events = Arc::new(Mutex::new(Vec::new()));
        let recorder = Recorder {
            world,
            events: events.clone(),
        };
        let fill = |unit: &Unit, _, out: &mut [f32]| out.fill((unit.len / 10 - 1) as f32);
        let arena = Arena::new(None);
        let world = Arc::new(recorder);
        let sharded = Strategy::Sharded {
            unsharded_accumulation: false,
        };
        let holds = Purpose {
            strategy: sharded,
            ..Purpose::default()
        };
        let mut store = Store::new(&layout(), tied, holds, Some(world), &arena, &fill).unwrap();
        let compute = |what: &str, unit| {
            if rank == 0 {
                note(&events, format!("    {what} {unit}"));
            }
        };
        work(&mut store, rank, &compute);
        events.lock().unwrap().clone()
    })
}

#[test]
fn units_are_gathered_ahead_and_scattered_behind() {
    let events = record(false, |store, _, compute| walk(store, true, false, compute));
    insta::assert_snapshot!(events[0].join("\n"));
}

#[test]
fn tied_embeddings_stay_whole_until_the_head_is_done() {
    let events = record(true, |store, _, compute| walk(store, true, true, compute));
    insta::assert_snapshot!(events[0].join("\n"));
}

#[test]
fn a_unit_that_is_still_whole_is_not_gathered_again() {
    let gathers = |work: fn(&mut Store, Compute<'_>)| {
        let events = record(false, |store, _, compute| work(store, compute));
        events[1]
            .iter()
            .filter(|event| event.starts_with("gather"))
            .count()
    };
    // Forward 0 to 4, backward 3 (still present), 2, 1.
    let one = gathers(|store, compute| walk(store, true, false, compute));
    assert_eq!(one, 5 + 2);
    // Unit 1, the last of backward, is the second of the next forward.
    let two = gathers(|store, compute| {
        walk(store, true, false, compute);
        walk(store, true, false, compute);
    });
    assert_eq!(two, 2 * one - 1);
    // Not after an optimiser step.
    let updated = gathers(|store, compute| {
        walk(store, true, false, compute);
        store.reduce(Measure::default()).unwrap();
        store.forget();
        walk(store, true, false, compute);
    });
    assert_eq!(updated, 2 * one);
}

#[test]
fn a_joining_rank_starts_the_same_operations_in_the_same_order() {
    for tied in [false, true] {
        let events = record(tied, |store, rank, compute| {
            for trains in [true, false, true] {
                match (rank, trains) {
                    (0, _) => walk(store, trains, tied, compute),
                    (_, true) => store.join(Pass::Training(Training::default())).unwrap(),
                    (_, false) => store.join(Pass::Evaluation).unwrap(),
                }
            }
            // Twice the operations of the rank with data, and the other rank's zeros.
            assert_eq!(
                store.reduce(Measure::default()).unwrap().squared_norm,
                4.0 * 150.0
            );
        });
        let operations = |events: &[String]| {
            let all = events.iter().filter(|event| !event.starts_with(' '));
            all.cloned().collect::<Vec<_>>()
        };
        assert_eq!(operations(&events[0]), operations(&events[1]));
    }
}
