//! Threads whose stack suffices for what a stranger wrote: the depth of a template's expressions and of the values that it
//! builds is limited, and each level takes up to a few hundred bytes of the stack. Only the pages that are used take memory.

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder};

/// Bytes of a stack.
const STACK: usize = 256 << 20;

/// As many such threads as the current pool has; with stacks of the usual size if the system gives no larger ones.
pub fn pool() -> Result<ThreadPool, ThreadPoolBuildError> {
    let threads = || ThreadPoolBuilder::new().num_threads(rayon::current_num_threads());
    let large = threads().stack_size(STACK).build();
    large.or_else(|_| threads().build())
}
