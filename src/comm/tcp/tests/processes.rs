//! Ranks that are processes and die as processes do. A rank is this test program, started again with only the
//! ignored test below.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;

use rustix::process::{Pid, Signal, kill_process};

use super::*;

/// A test that waits longer than this has hung.
const HANG: Duration = Duration::from_secs(60);

const VARIABLE: &str = "EVENKEEL_TEST_RANK";

#[test]
#[ignore = "a rank of the tests in this file, not a test"]
fn rank() {
    let role = std::env::var(VARIABLE).unwrap();
    let numbers: Vec<usize> = role
        .split(' ')
        .map(|number| number.parse().unwrap())
        .collect();
    let &[rank, world, port] = numbers.as_slice() else {
        panic!("three numbers, not {role}");
    };
    let greeting = Greeting { rank, world };
    let mut options = TcpOptions::new("127.0.0.1", port as u16, greeting, key());
    options.heartbeat_interval = Duration::from_millis(200);
    options.heartbeat_timeout = Duration::from_secs(2);
    let collective = if rank == 0 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        // `\n` first: the test harness has printed a line without an end.
        println!("\nport {}", listener.local_addr().unwrap().port());
        host(&options, listener).unwrap()
    } else {
        connect(&options).unwrap()
    };
    let mut first = true;
    let error = loop {
        // The last rank runs exchanges, the others run operations.
        let done = if rank + 1 == world {
            collective.exchange(b"step").map(|_| ())
        } else {
            let pending = collective.start(Operation::all_reduce(vec![1.0; 1 << 20]));
            collective
                .exchange(b"step")
                .and_then(|_| pending.wait())
                .map(|_| ())
        };
        let done = done.and_then(|()| {
            if rank + 1 == world {
                all_reduce(&collective, vec![1.0; 1 << 20]).map(|_| ())
            } else {
                Ok(())
            }
        });
        if let Err(error) = done {
            break error;
        }
        if std::mem::take(&mut first) {
            println!("\nworking");
        }
    };
    println!("\nerror {error}");
    // Exits at once, as a rank of a job does: its last message must already be sent.
    std::process::exit(1);
}

struct Rank {
    child: Child,
    lines: Receiver<String>,
}

impl Rank {
    fn start(rank: usize, world: usize, port: u16) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--ignored", "--nocapture", "--test-threads=1"])
            .arg("comm::tcp::tests::processes::rank")
            .env(VARIABLE, format!("{rank} {world} {port}"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        Rank { child, lines }
    }

    /// The text after `word` on the next line that begins with it.
    fn wait_for(&self, word: &str) -> String {
        loop {
            match self.lines.recv_timeout(HANG) {
                Ok(line) => {
                    if let Some(rest) = line.strip_prefix(word) {
                        return rest.trim().to_owned();
                    }
                }
                Err(RecvTimeoutError::Timeout) => panic!("it hangs before it says `{word}`"),
                Err(RecvTimeoutError::Disconnected) => panic!("it ended without `{word}`"),
            }
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        // The child may have exited already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A world of processes that runs operations.
fn working_world(world: usize) -> Vec<Rank> {
    let zero = Rank::start(0, world, 0);
    let port = zero.wait_for("port").parse().unwrap();
    let others = (1..world).map(|rank| Rank::start(rank, world, port));
    let ranks: Vec<Rank> = std::iter::once(zero).chain(others).collect();
    for rank in &ranks {
        rank.wait_for("working");
    }
    ranks
}

#[test]
fn a_killed_rank_is_named_by_all_survivors() {
    for victim in 0..4 {
        let ranks = working_world(4);
        ranks[victim].signal(Signal::KILL);
        for (rank, survivor) in ranks.iter().enumerate().filter(|(rank, _)| *rank != victim) {
            let error = survivor.wait_for("error");
            assert!(
                error.starts_with(&format!("lost rank {victim}: ")),
                "rank {rank}: {error}"
            );
        }
    }
}

#[test]
fn a_frozen_rank_is_named_by_all_and_learns_it_when_it_resumes() {
    let ranks = working_world(3);
    ranks[1].signal(Signal::STOP);
    for survivor in [&ranks[0], &ranks[2]] {
        let error = survivor.wait_for("error");
        assert!(
            error.starts_with("lost rank 1: no heartbeat for 2."),
            "{error}"
        );
    }
    ranks[1].signal(Signal::CONT);
    let error = ranks[1].wait_for("error");
    let words = "lost rank 1: the other ranks gave up on this rank: no heartbeat for 2.";
    assert!(error.starts_with(words), "{error}");
}

#[test]
fn no_rank_is_lost_when_all_freeze_briefly() {
    let ranks = working_world(2);
    for rank in &ranks {
        rank.signal(Signal::STOP);
    }
    // All processes are suspended for longer than the heartbeat timeout.
    thread::sleep(Duration::from_millis(2500));
    for rank in &ranks {
        rank.signal(Signal::CONT);
    }
    // Both continue until one is killed.
    let quiet = ranks[0].lines.recv_timeout(Duration::from_millis(1000));
    assert_eq!(quiet, Err(RecvTimeoutError::Timeout));
    ranks[1].signal(Signal::KILL);
    let error = ranks[0].wait_for("error");
    assert!(error.starts_with("lost rank 1: "), "{error}");
    assert!(!error.contains("no heartbeat"), "{error}");
}
