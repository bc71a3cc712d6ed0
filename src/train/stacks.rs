//! The stacks of this process, for a rank that makes no progress: what the main thread computes, and where the kernel
//! keeps each thread.

use std::backtrace::Backtrace;
use std::cell::Cell;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::SIGUSR2;

use crate::util::lock::lock;
use crate::util::stderr;

/// Longest wait for the main thread's stack. A thread in an uninterruptible wait of the kernel does not answer.
pub const ANSWER: Duration = Duration::from_secs(5);

struct Prepared {
    stack: SyncSender<String>,
    written: Mutex<Receiver<String>>,
}

static PREPARED: OnceLock<Prepared> = OnceLock::new();

thread_local! {
    /// Whether this thread writes down its stack. The handler may interrupt any other thread, even one that is not yet
    /// fully started, in which `thread::current` would make its start abort the process.
    static MAIN: Cell<bool> = const { Cell::new(false) };
}

/// Makes the calling thread, the process's main thread, write down its stack when [`text`] asks for it.
pub fn prepare() {
    PREPARED.get_or_init(|| {
        // SAFETY: the action allocates, which a signal handler should not: a thread interrupted in the allocator
        // would hang. The only sender of the signal is `text`, which is called when the thread has made no progress
        // for minutes, and not interrupted in a short call.
        if let Err(error) = unsafe { signal_hook::low_level::register(SIGUSR2, capture) } {
            stderr::line(format_args!(
                "stacks of a stall will lack the main thread: {error}"
            ));
        }
        MAIN.set(true);
        let (stack, written) = sync_channel(1);
        Prepared {
            stack,
            written: Mutex::new(written),
        }
    });
}

/// Runs on the thread that received the signal; Linux prefers the main thread.
fn capture() {
    if MAIN.get()
        && let Some(prepared) = PREPARED.get()
    {
        let stack = Backtrace::force_capture().to_string();
        let _ = prepared.stack.try_send(stack);
    }
}

/// The stack of the main thread, if it answers, after one line for each thread.
pub fn text() -> String {
    let mut text = threads(Path::new("/proc/self/task"));
    let stack = PREPARED.get().and_then(|prepared| {
        let written = lock(&prepared.written);
        // An answer that came too late last time.
        let _ = written.try_recv();
        kill_process(getpid(), Signal::USR2).ok()?;
        written.recv_timeout(ANSWER).ok()
    });
    text += "\nstack of the main thread:\n";
    text += stack.as_deref().unwrap_or("it does not answer\n");
    text
}

/// A line for each thread: name, state (R: runs, S: sleeps, D: waits for a device or volume, t: traced), and the
/// function of the kernel in which it waits.
fn threads(tasks: &Path) -> String {
    let mut text = String::new();
    for task in fs::read_dir(tasks).into_iter().flatten().flatten() {
        let read = |file: &str| fs::read_to_string(task.path().join(file)).unwrap_or_default();
        let stat = read("stat");
        let state = stat.rsplit_once(") ").map_or("?", |(_, rest)| &rest[..1]);
        let (name, place) = (read("comm"), read("wchan"));
        let id = task.file_name();
        let _ = writeln!(
            text,
            "thread {} {}: {state} {}",
            id.display(),
            name.trim(),
            place.trim()
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn every_thread_has_a_line_and_the_main_thread_its_stack() {
        // The signal would reach any thread of the test process, so its handler is called here.
        prepare();
        let prepared = PREPARED.get().unwrap();
        if MAIN.get() {
            // The watchdog's test asks for stacks, too, and would take this one.
            let written = lock(&prepared.written);
            let _ = written.try_recv();
            capture();
            let stack = written.try_recv().unwrap();
            assert!(stack.contains("every_thread_has_a_line"), "{stack}");
        }
        let (parked, running) = std::sync::mpsc::channel::<()>();
        let named = thread::Builder::new().name("parked".into());
        let thread = named.spawn(move || running.recv()).unwrap();
        let lines = loop {
            let lines = threads(Path::new("/proc/self/task"));
            if lines.lines().any(|line| line.contains("parked: S futex")) {
                break lines;
            }
        };
        assert!(lines.lines().count() >= 2, "{lines}");
        drop(parked);
        thread.join().unwrap().unwrap_err();
    }
}
