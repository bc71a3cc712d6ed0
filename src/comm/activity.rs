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
    fn wait<T>(&self, operation: &'static str, call: impl FnOnce() -> T) -> T {
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

    fn start(&self, operation: Operation) -> Box<dyn Pending> {
        self.activity.call();
        Box::new(ObservedPending {
            name: operation.name(),
            pending: self.world.start(operation),
            activity: Arc::clone(&self.activity),
        })
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

struct ObservedPending {
    name: &'static str,
    pending: Box<dyn Pending>,
    activity: Arc<Activity>,
}

impl Pending for ObservedPending {
    fn wait(self: Box<Self>) -> Result<Operation, CommError> {
        let ObservedPending {
            name,
            pending,
            activity,
        } = *self;
        activity.wait(name, || pending.wait())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::solo::Solo;

    /// An operation that says what its rank seems to do meanwhile.
    struct Curious(Arc<Activity>);

    impl Pending for Curious {
        fn wait(self: Box<Self>) -> Result<Operation, CommError> {
            assert_eq!(self.0.waiting(), Some("all-gather"));
            Ok(Operation::AllReduce(Vec::new()))
        }
    }

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
        let sum = world.start(Operation::AllReduce(vec![1.0])).wait();
        assert!(matches!(sum, Ok(Operation::AllReduce(sum)) if sum == [1.0]));
        progressed();
        let curious = ObservedPending {
            name: "all-gather",
            pending: Box::new(Curious(Arc::clone(&activity))),
            activity: Arc::clone(&activity),
        };
        Box::new(curious).wait().unwrap();
        assert_eq!(activity.waiting(), None);
    }
}
