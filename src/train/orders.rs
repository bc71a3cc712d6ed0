//! The connection of a rank to its agent: orders on standard input, reports on standard output.

use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use crate::lifecycle::protocol::{Order, Report};
use crate::util::stderr;

/// Incoming orders, read by a separate thread.
pub struct Orders {
    draining: Arc<AtomicBool>,
    pausing: Arc<AtomicBool>,
    agent_is_gone: Arc<AtomicBool>,
    others: Receiver<Order>,
}

impl Orders {
    /// Reads orders until the end of the input, which means that the agent is gone and the rank must drain.
    pub fn listen(input: impl BufRead + Send + 'static) -> Orders {
        let draining = Arc::new(AtomicBool::new(false));
        let (sender, receiver) = channel();
        let pausing = Arc::new(AtomicBool::new(false));
        let agent_is_gone = Arc::new(AtomicBool::new(false));
        let (flag, gone) = (Arc::clone(&draining), Arc::clone(&agent_is_gone));
        let pause = Arc::clone(&pausing);
        std::thread::spawn(move || {
            read_orders(input, &flag, &pause, &sender);
            gone.store(true, Ordering::Relaxed);
            flag.store(true, Ordering::Relaxed);
        });
        Orders {
            draining,
            pausing,
            agent_is_gone,
            others: receiver,
        }
    }

    /// Whether an order to drain is in effect.
    pub fn draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Whether an order to pause is in effect.
    pub fn pausing(&self) -> bool {
        self.pausing.load(Ordering::Relaxed)
    }

    /// Becomes true at the end of the input.
    pub fn agent_is_gone(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.agent_is_gone)
    }

    /// The same without a limit of time.
    pub fn wait(&self) -> Option<Order> {
        self.others.recv().ok()
    }

    /// The same if it has arrived.
    pub fn arrived(&self) -> Option<Order> {
        self.others.try_recv().ok()
    }

    /// The next order other than to drain, to pause or to cancel that; `None` if no order arrives in time or the agent is
    /// gone.
    pub fn next(&self, timeout: Duration) -> Option<Order> {
        self.others.recv_timeout(timeout).ok()
    }
}

fn read_orders(
    input: impl BufRead,
    draining: &AtomicBool,
    pausing: &AtomicBool,
    others: &Sender<Order>,
) {
    let cancel = || {
        draining.store(false, Ordering::Relaxed);
        pausing.store(false, Ordering::Relaxed);
    };
    for line in input.lines() {
        let Ok(line) = line else { break };
        match serde_json::from_str(&line) {
            Ok(Order::Drain) => draining.store(true, Ordering::Relaxed),
            Ok(Order::Pause) => pausing.store(true, Ordering::Relaxed),
            Ok(Order::CancelDrain) => cancel(),
            Ok(order @ Order::Continue(_)) => {
                // They were of the generation before.
                cancel();
                drop(others.send(order));
            }
            Ok(order) => drop(others.send(order)),
            Err(error) => {
                stderr::line(format_args!(
                    "an order that cannot be read ({error}): {line}"
                ));
            }
        }
    }
}

/// Writes a report to the agent. [`Orders`] detects an agent that is gone; reports to it are dropped.
pub fn report(report: &Report) {
    let mut out = std::io::stdout().lock();
    if let Ok(line) = serde_json::to_string(report) {
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_input_means_drain() {
        let orders = Orders::listen(&b"{\"order\":\"stop\"}\n"[..]);
        assert_eq!(orders.next(Duration::from_secs(5)), Some(Order::Stop));
        // The channel closes only after the flag is set.
        assert_eq!(orders.next(Duration::from_secs(5)), None);
        assert!(orders.draining());
    }

    #[test]
    fn a_drain_can_be_cancelled() {
        let (input, mut agent) = std::io::pipe().unwrap();
        let orders = Orders::listen(std::io::BufReader::new(input));
        agent
            .write_all(b"{\"order\":\"drain\"}\n{\"order\":\"stop\"}\n")
            .unwrap();
        assert_eq!(orders.next(Duration::from_secs(5)), Some(Order::Stop));
        assert!(orders.draining());
        agent
            .write_all(b"{\"order\":\"cancel_drain\"}\n{\"order\":\"stop\"}\n")
            .unwrap();
        assert_eq!(orders.next(Duration::from_secs(5)), Some(Order::Stop));
        assert!(!orders.draining());
        drop(agent);
        assert_eq!(orders.next(Duration::from_secs(5)), None);
        assert!(orders.draining());
    }

    #[test]
    fn garbage_is_not_an_order() {
        let orders = Orders::listen(&b"\xff\xfe garbage\n{\"order\":\"commit\"}\n"[..]);
        // Invalid UTF-8 ends the input, because no agent of Evenkeel writes it.
        assert_eq!(orders.next(Duration::from_secs(5)), None);
        assert!(orders.draining());
    }
}
