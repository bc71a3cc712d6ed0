//! What a rank does, as its calls of the collective show it: whether it makes progress, and whether it waits for
//! other ranks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::{Collective, CommError, Operation, Pending, World};
use crate::util::lock::lock;

/// What is known of a rank.
#[derive(Debug, Default)]
pub struct Activity {
    /// Number of calls that have begun or ended.
    calls: AtomicU64,
    /// The operations that wait for other ranks.
    waiting: Mutex<Vec<&'static str>>,
}

impl Activity {
    /// A number that changes with every sign of progress.
    pub fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// The operation in which the rank waits for others, if any.
    pub fn waiting(&self) -> Option<&'static str> {
        lock(&self.waiting).last().copied()
    }

    fn call(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs a call that waits for other ranks.
    pub fn wait<T>(&self, operation: &'static str, call: impl FnOnce() -> T) -> T {
        self.call();
        lock(&self.waiting).push(operation);
        let result = call();
        let mut waiting = lock(&self.waiting);
        if let Some(at) = waiting.iter().rposition(|name| *name == operation) {
            waiting.remove(at);
        }
        self.call();
        result
    }

    /// The same operation, whose wait is seen.
    fn watch<T: 'static>(
        activity: &Arc<Activity>,
        operation: &'static str,
        pending: Pending<T>,
    ) -> Pending<T> {
        let activity = Arc::clone(activity);
        Pending::new(move || activity.wait(operation, || pending.wait()))
    }
}

/// A collective whose calls are seen.
pub struct Observed {
    world: World,
    activity: Arc<Activity>,
}

impl Observed {
    /// The same world, and what its calls show.
    pub fn of(world: World) -> (World, Arc<Activity>) {
        let activity = Arc::<Activity>::default();
        let observed = Observed {
            world,
            activity: Arc::clone(&activity),
        };
        (Arc::new(observed), activity)
    }
}

impl Collective for Observed {
    fn rank(&self) -> usize {
        self.world.rank()
    }

    fn world(&self) -> usize {
        self.world.world()
    }

    fn start(&self, operation: Operation) -> Pending {
        self.activity.call();
        let name = operation.kind.name();
        Activity::watch(&self.activity, name, self.world.start(operation))
    }

    fn start_fixed(&self, operation: Operation<i64>) -> Pending<i64> {
        self.activity.call();
        let name = operation.kind.name();
        Activity::watch(&self.activity, name, self.world.start_fixed(operation))
    }

    fn exchange(&self, message: &[u8]) -> Result<Vec<Vec<u8>>, CommError> {
        self.activity
            .wait("exchange", || self.world.exchange(message))
    }

    fn check(&self) -> Result<(), CommError> {
        self.activity.call();
        self.world.check()
    }

    fn abort(&self, reason: &str) {
        self.world.abort(reason);
    }

    fn close(&self) -> Result<(), CommError> {
        self.activity.wait("close", || self.world.close())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::solo::Solo;

    #[test]
    fn calls_are_progress_and_a_rank_waits_only_within_them() {
        let (world, activity) = Observed::of(Arc::new(Solo));
        let mut before = activity.calls();
        let mut progressed = || {
            let now = activity.calls();
            assert!(now > before);
            before = now;
        };
        assert_eq!(world.exchange(b"x").unwrap(), [b"x"]);
        progressed();
        world.check().unwrap();
        progressed();
        let sum = world.start(Operation::all_reduce(vec![1.0])).wait();
        assert_eq!(sum.unwrap().data, [1.0]);
        progressed();
        // It says what its rank seems to do meanwhile.
        let seen = Arc::clone(&activity);
        let curious = Pending::new(move || {
            assert_eq!(seen.waiting(), Some("all-gather"));
            Ok(Operation::all_reduce(Vec::<f32>::new()))
        });
        Activity::watch(&activity, "all-gather", curious)
            .wait()
            .unwrap();
        assert_eq!(activity.waiting(), None);
    }
}
