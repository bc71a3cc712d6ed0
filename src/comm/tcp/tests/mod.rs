//! Real sockets: ranks as threads here and in [`rendezvous`], as processes in [`processes`].

mod processes;
mod rendezvous;

use std::net::TcpListener;
use std::panic::resume_unwind;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use proptest::prelude::*;

use super::*;
use crate::comm::Kind;

/// The key of the tests' worlds.
fn key() -> Key {
    "7".repeat(64).parse().unwrap()
}

/// Options for a rank of a test's world, and a bound listener for rank 0.
fn options(world: usize) -> (TcpListener, Vec<TcpOptions>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let options = (0..world).map(|rank| {
        let greeting = Greeting { rank, world };
        TcpOptions::new("127.0.0.1", port, greeting, key())
    });
    (listener, options.collect())
}

/// Runs `work` on every rank of a world, one thread each; returns the results in rank order.
pub(crate) fn on_all<T: Send>(
    world: usize,
    work: impl Fn(Arc<TcpCollective>) -> T + Sync,
) -> Vec<T> {
    let (listener, options) = options(world);
    on_all_with(listener, &options, work)
}

fn on_all_with<T: Send>(
    listener: TcpListener,
    options: &[TcpOptions],
    work: impl Fn(Arc<TcpCollective>) -> T + Sync,
) -> Vec<T> {
    let work = &work;
    thread::scope(|scope| {
        let mut listener = Some(listener);
        let ranks: Vec<_> = options
            .iter()
            .map(|options| {
                let listener = listener.take();
                scope.spawn(move || {
                    work(match listener {
                        Some(listener) => host(options, listener).unwrap(),
                        None => connect(options).unwrap(),
                    })
                })
            })
            .collect();
        let joined = ranks.into_iter().map(|rank| rank.join());
        joined
            .map(|rank| rank.unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    })
}

/// A channel as [`TcpOptions::notify`].
fn notices() -> (Notify, Receiver<String>) {
    let (sender, notices) = channel();
    let sender = Mutex::new(sender);
    let notify = move |line: &str| {
        let _ = lock(&sender).send(line.to_owned());
    };
    (Arc::new(notify), notices)
}

fn all_reduce(world: &TcpCollective, data: Vec<f32>) -> Result<Vec<f32>, CommError> {
    Ok(world.start(Operation::all_reduce(data)).wait()?.data)
}

fn reduce_scatter(world: &TcpCollective, data: Vec<f32>) -> Result<Vec<f32>, CommError> {
    let operation = Operation {
        kind: Kind::ReduceScatter,
        shard: vec![0.0; data.len() / world.world()],
        data,
    };
    Ok(world.start(operation).wait()?.shard)
}

fn all_gather(world: &TcpCollective, shard: Vec<f32>) -> Result<Vec<f32>, CommError> {
    let operation = Operation {
        kind: Kind::AllGather,
        data: vec![0.0; shard.len() * world.world()],
        shard,
    };
    Ok(world.start(operation).wait()?.data)
}

/// Gives the data of the ranks that hold it to the others.
fn broadcast(
    world: &TcpCollective,
    data: Vec<f32>,
    holders: &[bool],
) -> Result<Vec<f32>, CommError> {
    let operation = Operation::broadcast(data, holders.to_vec());
    Ok(world.start(operation).wait()?.data)
}

/// An addend that differs for every rank and element, and whose sum depends on the order of addition.
fn addend(rank: usize, len: usize) -> Vec<f32> {
    (0..len)
        .map(|index| ((index * 31 + rank * 977) % 1013) as f32 * 0.37 + 1e4 / (rank + 1) as f32)
        .collect()
}

/// The sum in rank order.
fn naive_sum(world: usize, len: usize) -> Vec<f32> {
    (1..world).fold(addend(0, len), |mut sum, rank| {
        for (sum, addend) in sum.iter_mut().zip(addend(rank, len)) {
            *sum += addend;
        }
        sum
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn operations_equal_the_naive_result_to_the_bit(
        world in 1usize..=5,
        // Empty, shorter than the world, not divisible, several chunks.
        lens in prop::collection::vec(prop_oneof![0usize..12, 60_000usize..400_000], 1..4),
        holders in 1u32..32,
        unix_sockets in prop::bool::ANY,
    ) {
        // At least one rank holds what is broadcast.
        let holds = |rank: usize| holders >> rank & 1 == 1 || holders % (1 << world) == 0;
        let holders: Vec<bool> = (0..world).map(holds).collect();
        let (listener, mut options) = options(world);
        options.iter_mut().for_each(|options| options.unix_sockets = unix_sockets);
        on_all_with(listener, &options, |collective| {
            let rank = collective.rank();
            for &len in &lens {
                let sum = naive_sum(world, len);
                assert_eq!(all_reduce(&collective, addend(rank, len)).unwrap(), sum);
                let own = if holders[rank] { sum.clone() } else { vec![f32::NAN; len] };
                assert_eq!(broadcast(&collective, own, &holders).unwrap(), sum);
                let len = len - len % world;
                let part = rank * len / world..(rank + 1) * len / world;
                let sum = naive_sum(world, len);
                let shard = reduce_scatter(&collective, addend(rank, len)).unwrap();
                assert_eq!(shard, sum[part.clone()]);
                assert_eq!(all_gather(&collective, sum[part.clone()].to_vec()).unwrap(), sum);
                let integers = |rank| -> Vec<i64> {
                    addend(rank, len).iter().map(|x| x.to_bits().into()).collect()
                };
                let start = |kind| collective.start_fixed(Operation {
                    kind,
                    data: integers(rank),
                    shard: vec![0; part.len()],
                });
                let mut sum = vec![0i64; len];
                for rank in 0..world {
                    cpu_kernels::fixed::accumulate(&mut sum, &integers(rank));
                }
                assert_eq!(start(Kind::AllReduce).wait().unwrap().data, sum);
                assert_eq!(start(Kind::ReduceScatter).wait().unwrap().shard, sum[part]);
            }
        });
    }

    #[test]
    fn messages_reach_everyone_in_rank_order(
        world in 1usize..=5,
        lens in prop::collection::vec(0usize..200_000, 5),
    ) {
        let message = |rank: usize| vec![rank as u8; lens[rank]];
        let expected: Vec<_> = (0..world).map(message).collect();
        on_all(world, |collective| {
            for _ in 0..3 {
                let all = collective.exchange(&message(collective.rank())).unwrap();
                assert_eq!(all, expected);
            }
        });
    }
}

#[test]
fn vectors_use_a_unix_socket_between_ranks_of_one_host_that_both_want_it() {
    for unwilling in [None, Some(0), Some(1), Some(2)] {
        let (listener, mut options) = options(3);
        for (rank, options) in options.iter_mut().enumerate() {
            options.unix_sockets = Some(rank) != unwilling;
        }
        on_all_with(listener, &options, |collective| {
            let rank = collective.rank();
            for (peer, stream) in wire::peers(&collective.connections.mesh.data) {
                let willing = ![rank, peer].map(Some).contains(&unwilling);
                // A Unix socket has no address of the internet.
                assert_eq!(stream.peer_addr().is_err(), willing);
            }
            let sum = all_reduce(&collective, addend(rank, 200_000)).unwrap();
            assert_eq!(sum, naive_sum(3, 200_000));
        });
    }
}

#[test]
fn operations_run_in_order_beside_exchanges() {
    on_all(3, |collective| {
        let rank = collective.rank();
        let started: Vec<_> = (1..20)
            .map(|len| collective.start(Operation::all_reduce(addend(rank, len * 1000))))
            .collect();
        for round in 0..20u8 {
            assert_eq!(collective.exchange(&[round]).unwrap(), vec![vec![round]; 3]);
        }
        for (len, pending) in (1..20).zip(started) {
            let sum = pending.wait().unwrap().data;
            assert_eq!(sum, naive_sum(3, len * 1000));
        }
    });
}

#[test]
fn an_abort_reaches_every_rank_with_its_reason() {
    let met = std::sync::Barrier::new(4);
    let errors = on_all(4, |collective| {
        collective.exchange(b"hello").unwrap();
        // Every rank has heard from every other one.
        met.wait();
        if collective.rank() == 2 {
            collective.abort("out of memory");
        }
        let error = all_reduce(&collective, vec![1.0; 100_000]).unwrap_err();
        assert_eq!(
            collective.exchange(b"").unwrap_err().to_string(),
            error.to_string()
        );
        error.to_string()
    });
    assert_eq!(
        errors,
        vec!["rank 2 stopped the collectives: out of memory"; 4]
    );
}

#[test]
fn operations_that_differ_are_misuse_and_end_the_world() {
    let errors = on_all(3, |collective| {
        let len = if collective.rank() == 1 { 30 } else { 33 };
        all_reduce(&collective, vec![1.0; len])
            .unwrap_err()
            .to_string()
    });
    for error in &errors {
        assert!(error.contains("collective misuse: rank"), "{error}");
        assert!(
            error.contains("all-reduce (operation 1) of 30 elements"),
            "{error}"
        );
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_before_anything_is_sent() {
    on_all(2, |collective| {
        let wrong = collective.start(Operation {
            kind: Kind::ReduceScatter,
            data: vec![0.0; 5],
            shard: vec![0.0; 2],
        });
        assert!(matches!(wrong.wait(), Err(CommError::Misuse(_))));
        for holders in [&[false, false][..], &[true]] {
            let wrong = broadcast(&collective, vec![0.0; 5], holders);
            assert!(matches!(wrong, Err(CommError::Misuse(_))));
        }
        assert_eq!(all_reduce(&collective, vec![1.0]).unwrap(), [2.0]);
    });
}

#[test]
fn a_rank_that_closes_early_does_not_fail_a_slower_one() {
    let (done, all_done) = channel();
    let (done, all_done) = (Mutex::new(done), Mutex::new(all_done));
    on_all(3, |collective| {
        let rank = collective.rank();
        let pending = collective.start(Operation::all_reduce(addend(rank, 300_000)));
        collective.exchange(b"last").unwrap();
        if rank == 1 {
            // Waits until the others have left.
            for _ in 0..2 {
                lock(&all_done).recv().unwrap();
            }
        }
        let sum = pending.wait().unwrap().data;
        assert_eq!(sum, naive_sum(3, 300_000));
        collective.close().unwrap();
        lock(&done).send(()).unwrap();
    });
}

#[test]
fn an_operation_after_everyone_else_left_names_who_left() {
    let errors = on_all(2, |collective| {
        collective.exchange(b"last").unwrap();
        if collective.rank() == 0 {
            return None;
        }
        Some(collective.exchange(b"one more").unwrap_err().to_string())
    });
    let reason = "lost rank 0: it finished and left while this rank still needed it";
    assert_eq!(errors[1].as_deref(), Some(reason));
}

#[test]
fn a_closed_world_starts_nothing() {
    on_all(2, |collective| {
        collective.close().unwrap();
        collective.close().unwrap();
        assert!(matches!(
            collective.exchange(b""),
            Err(CommError::Misuse(_))
        ));
        assert!(matches!(
            all_reduce(&collective, vec![]),
            Err(CommError::Misuse(_))
        ));
    });
}

#[test]
fn leaving_with_operations_under_way_is_an_abort() {
    let errors = on_all(2, |collective| {
        if collective.rank() == 1 {
            drop(collective.start(Operation::all_reduce(vec![1.0; 1000])));
            return None;
        }
        Some(collective.exchange(b"").unwrap_err().to_string())
    });
    let reason = "rank 1 stopped the collectives: it left with operations under way";
    assert_eq!(errors[0].as_deref(), Some(reason));
}

#[test]
fn a_slow_rank_is_named_and_not_lost() {
    let (listener, mut options) = options(3);
    let (notify, notices) = notices();
    let notices = Mutex::new(notices);
    for options in &mut options {
        options.heartbeat_interval = Duration::from_millis(100);
        options.heartbeat_timeout = Duration::from_secs(1);
    }
    // Longer than a rank may be silent; this rank sends heartbeats.
    options[0].patience = Duration::from_millis(1500);
    options[0].notify = notify;
    on_all_with(listener, &options, |collective| {
        if collective.rank() == 2 {
            let notice = lock(&notices).recv().unwrap();
            let words = "waiting for rank 2 for 2 s in an exchange (it is alive: last heartbeat";
            assert!(notice.starts_with(words), "{notice}");
        }
        assert_eq!(collective.exchange(b"late").unwrap().len(), 3);
    });
}

#[test]
fn a_half_open_connection_is_detected() {
    let (listener, mut options) = options(3);
    for options in &mut options {
        options.heartbeat_interval = Duration::from_millis(100);
        options.heartbeat_timeout = Duration::from_secs(1);
    }
    // Like a host that vanished: the connections are open, and no data arrives.
    options[1].heartbeat_interval = Duration::from_secs(3600);
    let errors = on_all_with(listener, &options, |collective| {
        if collective.rank() == 1 {
            // This rank starts no operation; the verdict of the others wakes it.
            while collective.connections.verdict().is_none() {
                thread::yield_now();
            }
        }
        collective.exchange(b"").unwrap_err().to_string()
    });
    assert!(
        errors[0].starts_with("lost rank 1: no heartbeat for 1."),
        "{}",
        errors[0]
    );
    assert!(
        errors[2].starts_with("lost rank 1: no heartbeat for 1."),
        "{}",
        errors[2]
    );
    let own = "lost rank 1: the other ranks gave up on this rank: no heartbeat for 1.";
    assert!(errors[1].starts_with(own), "{}", errors[1]);
}
