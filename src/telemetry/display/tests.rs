use std::sync::{Arc, Mutex};

use super::*;
use crate::telemetry::{CoordinateTestRecord, EvaluationRecord, NormTestRecord};

/// A writer whose text the test reads.
#[derive(Clone, Default)]
struct Paper(Arc<Mutex<Vec<u8>>>);

impl Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no test panicked").write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Paper {
    /// The text written so far, without colours.
    fn text(&self) -> String {
        let bytes = self.0.lock().expect("no test panicked").clone();
        let text = String::from_utf8(bytes).expect("UTF-8");
        anstream::adapter::strip_str(&text).to_string()
    }
}

fn step(nth: u64, world: u64, batch: u64, samples: u64) -> Event {
    Event::Step(StepRecord {
        generation: 3 - world,
        step: nth,
        samples,
        batch,
        world,
        loss: 5.0 - nth as f64 / 10.0,
        tokens: batch * 64,
        learning_rate: 3e-4,
        gradient_norm: 0.8,
        seconds: 4.0,
        time: 1_000.0 + 4.0 * nth as f64,
        norm_test: (nth > 2).then(|| NormTestRecord {
            ratio: 0.06,
            threshold: 0.04,
            noise_scale: Some(812.0),
            target: Some(1.5 * batch as f64),
            next_batch: 2 * batch,
            reason: "grew ×2 (cap)".to_owned(),
        }),
        preferences: None,
        external: None,
        coordinate_test: match nth {
            5 => Some(CoordinateTestRecord {
                share: Some(0.31),
                undefined: None,
            }),
            7 => Some(CoordinateTestRecord {
                share: None,
                undefined: Some("one group".to_owned()),
            }),
            _ => None,
        },
    })
}

/// A run with every kind of event.
pub(crate) fn run() -> Vec<Event> {
    let mut events = vec![
        Event::Planned {
            name: "quickstart".to_owned(),
            formula: "2 × 8 × 2 = 32".to_owned(),
            world: 2,
            global_batch: 32,
            budget: 1_024,
            devices: "2 CPU ranks with 1 thread each".to_owned(),
            floor: Some(2.0794),
        },
        Event::Preparing {
            what: "tokenising train.jsonl".to_owned(),
            done: 0,
            total: 28_000,
        },
        Event::Preparing {
            what: "tokenising train.jsonl".to_owned(),
            done: 28_000,
            total: 28_000,
        },
        Event::GenerationStarted {
            generation: 1,
            world: 2,
            formula: "2 × 8 × 2 = 32".to_owned(),
            reason: "first start".to_owned(),
            start_samples: 0,
        },
    ];
    events.extend((1..=4).map(|nth| step(nth, 2, 32, 32 * nth)));
    events.extend([
        Event::BatchChanged {
            samples: 128,
            from: 32,
            to: 64,
            ratio: Some(0.06),
            threshold: Some(0.04),
            reason: "grew ×2 (cap)".to_owned(),
        },
        Event::Evaluation(EvaluationRecord {
            generation: 1,
            samples: 128,
            loss: 4.2,
            tokens: 8_192,
            time: 1_017.0,
            preferences: None,
        }),
        Event::Checkpoint {
            samples: 128,
            seconds: 0.213,
            bytes: 35_860_000,
        },
        Event::Straggler {
            rank: 1,
            seconds: 12.0,
            usual: 3.5,
        },
        Event::RankLost {
            rank: 1,
            reason: "connection closed".to_owned(),
        },
        Event::GenerationStarted {
            generation: 2,
            world: 1,
            formula: "1 × 8 × 8 = 64".to_owned(),
            reason: "rank 1 was lost".to_owned(),
            start_samples: 128,
        },
    ]);
    events.extend((5..=18).map(|nth| step(nth, 1, 64, 128 + 64 * (nth - 4))));
    events.extend([
        Event::Rescaled {
            from: 2,
            to: 1,
            seconds: 1.42,
            message: "rank 1 was lost".to_owned(),
        },
        Event::Note {
            message: "3200 documents packed into 412 samples, 98 % full".to_owned(),
        },
        Event::Warning {
            message: "the last epoch is not whole".to_owned(),
        },
        Event::Waiting {
            message: "0 of the pool's nodes have 2 GPUs free for this job".to_owned(),
        },
        Event::Output {
            rank: 1,
            line: "loading the tokenizer".to_owned(),
        },
        Event::Draining {
            message: "interrupted (Ctrl-C); once more ends at once".to_owned(),
        },
        Event::DrainCancelled {
            message: "1 rank asked for".to_owned(),
        },
        Event::Finished {
            samples: 1_024,
            steps: 18,
            loss: 3.2,
            seconds: 74.0,
        },
    ]);
    events
}

fn shown(sink: impl FnOnce(Box<dyn Write + Send>) -> Sink) -> String {
    let paper = Paper::default();
    let mut display = Display::on(sink(Box::new(paper.clone())));
    for event in run() {
        display.event(&event);
    }
    paper.text()
}

#[test]
fn a_log_describes_the_run_in_few_lines() {
    insta::assert_snapshot!(shown(Sink::Plain));
}

#[test]
fn json_lines_hold_every_event_and_are_read_back() {
    let text = shown(Sink::JsonLines);
    let events: Vec<Event> = text
        .lines()
        .map(|line| serde_json::from_str(line).expect("an event"))
        .collect();
    assert_eq!(events, run());
    insta::assert_snapshot!(text);
}

#[test]
fn quiet_shows_alarms_and_the_result() {
    insta::assert_snapshot!(shown(Sink::Quiet));
}

#[test]
fn quiet_json_holds_alarms_and_the_end() {
    let text = shown(Sink::QuietJsonLines);
    let kinds: Vec<String> = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).expect("JSON"))
        .map(|event| event["event"].as_str().expect("a kind").to_owned())
        .collect();
    assert_eq!(kinds, ["straggler", "rank_lost", "warning", "finished"]);
}

#[test]
fn lines_are_wrapped_between_their_parts() {
    let mut progress = Progress::default();
    let mut text = String::new();
    for event in run() {
        progress.take(&event);
        if matches!(&event, Event::Step(step) if step.step != 4) {
            continue;
        }
        let line = Line::of(&event, &progress).wrapped(48);
        text += &anstream::adapter::strip_str(&line).to_string();
        text.push('\n');
    }
    assert!(
        text.lines().all(|line| line.chars().count() <= 48),
        "{text}"
    );
    insta::assert_snapshot!(text);
}

#[test]
fn time_left_follows_the_clock_and_not_only_the_steps() {
    let mut progress = Progress::default();
    for event in run().iter().take(8) {
        progress.take(event);
    }
    // 4 steps of 32 samples, one every 4 s: 896 more samples take 112 s.
    let left = progress.seconds_left().expect("a rate");
    assert!((left - 112.0).abs() < 1e-9, "{left}");
    assert!((progress.tokens_per_second().expect("a rate") - 512.0).abs() < 1e-9);
    assert!((progress.share() - 0.125).abs() < 1e-12);
}

#[test]
fn a_new_generation_starts_its_own_clock() {
    let mut progress = Progress::default();
    for event in run().iter().take(14) {
        progress.take(event);
    }
    assert_eq!(progress.samples, 128);
    assert_eq!(progress.seconds_left(), None);
    progress.take(&step(5, 1, 64, 192));
    // One step of 64 samples in 4 s, whatever passed before it.
    assert_eq!(progress.seconds_left(), Some(52.0));
}

#[test]
fn a_closed_pipe_does_not_stop_the_run() {
    struct Closed;
    impl Write for Closed {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Err(io::ErrorKind::BrokenPipe.into())
        }
    }
    for sink in [
        Sink::Plain,
        Sink::JsonLines,
        Sink::Quiet,
        Sink::QuietJsonLines,
    ] {
        let mut display = Display::on(sink(Box::new(Closed)));
        run().iter().for_each(|event| display.event(event));
        assert_eq!(display.progress.samples, 1_024);
    }
}

#[test]
fn a_run_without_a_budget_or_a_finite_loss_is_shown() {
    let mut progress = Progress::default();
    let Event::Step(lost) = step(1, 2, 32, 32) else {
        unreachable!("a step");
    };
    let lost = Event::Step(StepRecord {
        loss: f64::NAN,
        ..lost
    });
    progress.take(&lost);
    let line = Line::of(&lost, &progress).plain();
    let line = anstream::adapter::strip_str(&line).to_string();
    assert_eq!(
        line,
        "      Step 1 · 32 samples · loss NaN · batch 32 · 512 tok/s · lr 3.00e-4"
    );
}
