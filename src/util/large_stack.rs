//! Threads whose stack suffices for what a stranger wrote: the depth of a template's expressions and of the values that it
//! builds is limited, and each level takes up to a few hundred bytes of the stack. Only the pages that are used take memory.

use std::thread;

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// Bytes of a stack.
const STACK: usize = 256 << 20;

/// Runs `work` on such a thread, or on this one if the system gives no further one.
pub fn run<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    let mut work = Some(work);
    let mut result = None;
    let ran = thread::scope(|scope| {
        let place = (&mut work, &mut result);
        let started = thread::Builder::new()
            .stack_size(STACK)
            .spawn_scoped(scope, move || *place.1 = place.0.take().map(|work| work()));
        started.map(|thread| thread.join())
    });
    if let Ok(Err(panic)) = ran {
        std::panic::resume_unwind(panic);
    }
    match (result, work) {
        (Some(result), _) => result,
        (None, Some(work)) => work(),
        (None, None) => unreachable!("work that was taken has a result or has panicked"),
    }
}

/// As many such threads as the current pool has; with stacks of the usual size if the system gives no larger ones.
pub fn pool() -> Result<ThreadPool, ThreadPoolBuildError> {
    let threads = || ThreadPoolBuilder::new().num_threads(rayon::current_num_threads());
    let large = threads().stack_size(STACK).build();
    large.or_else(|_| threads().build())
}
