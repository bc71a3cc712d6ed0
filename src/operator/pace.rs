//! Limits how soon failures are retried, how often agents are polled, and how often their answers and the changes of
//! pods reconcile a job. An agent answers at once as long as its version changes, so a faulty or hostile one could keep
//! the controller busy.

use std::collections::HashMap;
use std::hash::Hash;

use futures::channel::mpsc::UnboundedSender;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::{Duration, Instant, sleep_until};

/// A limit: up to `burst` events, `gap` apart, then one every `refill`.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    pub gap: Duration,
    pub burst: u32,
    pub refill: Duration,
}

/// Polls of one agent. A start or a loss changes its state several times within a second; otherwise it
/// holds each request for up to two seconds.
pub const POLLS: Rate = Rate {
    gap: Duration::from_millis(20),
    burst: 16,
    refill: Duration::from_millis(500),
};

/// Reconciliations of one job because of its agents. The burst is enough for a rescale.
pub const RECONCILIATIONS: Rate = Rate {
    gap: Duration::from_millis(20),
    burst: 32,
    refill: Duration::from_millis(500),
};

/// Reconciliations of one job because of its pods: the first change at once, later ones together.
pub const CHANGES: Rate = Rate {
    gap: COALESCE_WINDOW,
    burst: 1,
    refill: COALESCE_WINDOW,
};

/// Window in which changes are coalesced: of the pool before all jobs are reconciled, of a job's
/// pods before that job is.
pub const COALESCE_WINDOW: Duration = Duration::from_millis(200);

/// Past events of one source.
#[derive(Debug)]
pub struct Pace {
    rate: Rate,
    /// Earliest time of the next event by `gap`.
    free: Instant,
    /// Time at which a whole burst is possible again.
    full: Instant,
}

impl Pace {
    pub fn new(rate: Rate, now: Instant) -> Pace {
        Pace {
            rate,
            free: now,
            full: now,
        }
    }

    /// Time of the next event, not before `now`; counts it.
    pub fn next(&mut self, now: Instant) -> Instant {
        let Rate { gap, burst, refill } = self.rate;
        let saved = refill * burst.saturating_sub(1);
        let refilled = self.full.checked_sub(saved).unwrap_or(now);
        let at = now.max(self.free).max(refilled);
        self.free = at + gap;
        self.full = self.full.max(at) + refill;
        at
    }

    /// Whether past events no longer limit the next one.
    fn is_full(&self, now: Instant) -> bool {
        self.full <= now
    }
}

/// Seconds to wait after a failure that follows `before` others: `first`, doubled with each of them up to `longest`.
/// The fraction of the current millisecond is a random factor between 0.5 and 1, so that jobs that failed together
/// are not retried together.
pub fn back_off(first: f64, longest: f64, before: u32, now: f64) -> f64 {
    let pause = first * f64::from(2u32.saturating_pow(before.min(16)));
    pause.min(longest) * (0.5 + 0.5 * (now * 1000.0).fract())
}

/// Passes the keys in `news` on to `wake`, each at this rate: repeated keys that wait become one.
pub async fn forward<K: Eq + Hash + Clone>(
    rate: Rate,
    mut news: UnboundedReceiver<K>,
    wake: UnboundedSender<K>,
) {
    let mut paces: HashMap<K, Pace> = HashMap::new();
    let mut due: HashMap<K, Instant> = HashMap::new();
    loop {
        let next = due.values().min().copied();
        tokio::select! {
            key = news.recv() => {
                let Some(key) = key else { return };
                due.entry(key.clone()).or_insert_with(|| {
                    let now = Instant::now();
                    let pace = paces.entry(key);
                    pace.or_insert_with(|| Pace::new(rate, now)).next(now)
                });
            }
            () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
        }
        let now = Instant::now();
        paces.retain(|_, pace| !pace.is_full(now));
        for (key, _) in due.extract_if(|_, at| *at <= now) {
            if wake.unbounded_send(key).is_err() {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use tokio::sync::mpsc::unbounded_channel;

    use super::*;

    #[test]
    fn a_burst_passes_and_then_events_wait() {
        let start = Instant::now();
        let rate = Rate {
            gap: Duration::from_millis(10),
            burst: 3,
            refill: Duration::from_secs(1),
        };
        let mut pace = Pace::new(rate, start);
        let at = |pace: &mut Pace, ms| {
            let now = start + Duration::from_millis(ms);
            (pace.next(now) - start).as_millis()
        };
        let times: Vec<u128> = (0..5).map(|_| at(&mut pace, 0)).collect();
        assert_eq!(times, [0, 10, 20, 1000, 2000]);
        assert_eq!(at(&mut pace, 60_000), 60_000);
        assert_eq!(at(&mut pace, 60_000), 60_010, "the burst is refilled");
    }

    #[test]
    fn a_burst_of_changes_is_passed_on_at_once_and_once_more_at_its_end() {
        let start = Instant::now();
        let mut pace = Pace::new(CHANGES, start);
        let mut at = |ms| (pace.next(start + Duration::from_millis(ms)) - start).as_millis();
        assert_eq!(at(0), 0);
        // Further changes until then are the same event.
        assert_eq!(at(10), 200);
        // It was just passed on, so the next change waits again.
        assert_eq!(at(210), 400);
        assert_eq!(at(700), 700);
    }

    #[tokio::test]
    async fn a_flood_of_news_of_one_job_becomes_few_reconciliations_and_delays_no_other_job() {
        let (news, heard) = unbounded_channel();
        let (wake, mut woken) = futures::channel::mpsc::unbounded();
        let rate = Rate {
            gap: Duration::ZERO,
            burst: 3,
            refill: Duration::from_secs(3600),
        };
        tokio::spawn(forward(rate, heard, wake));
        for _ in 0..rate.burst {
            news.send("flood").unwrap();
            assert_eq!(woken.next().await, Some("flood"));
        }
        for _ in 0..1000 {
            news.send("flood").unwrap();
        }
        news.send("other").unwrap();
        assert_eq!(woken.next().await, Some("other"));
        // The channel holds no further job.
        drop(news);
        assert_eq!(woken.next().await, None);
    }
}
