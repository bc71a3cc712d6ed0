//! Which connections are admitted, and which messages the ranks receive.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::*;

/// A world of two without rank 1. `visit` receives rank 1's port and options before rank 1 connects. Returns
/// rank 0's notices.
fn with_visitor(visit: impl FnOnce(u16, &TcpOptions) + Send) -> Vec<String> {
    let (listener, mut options) = options(2);
    let (notify, notices) = notices();
    options[0].notify = notify;
    thread::scope(|scope| {
        let zero = &options[0];
        let zero = scope.spawn(move || host(zero, listener).unwrap());
        visit(options[1].master_port, &options[1]);
        let one = connect(&options[1]).unwrap();
        let zero = zero.join().unwrap();
        let answer = scope.spawn(move || zero.exchange(b"zero").unwrap());
        assert_eq!(
            one.exchange(b"one").unwrap(),
            [b"zero".to_vec(), b"one".to_vec()]
        );
        answer.join().unwrap();
    });
    drop(options);
    notices.iter().collect()
}

/// The notices without the stranger's port, which differs on every run.
fn without_port(notices: &[String]) -> Vec<&str> {
    let start = |notice: &String| notice.find(": ").map_or(0, |at| at + 2);
    notices
        .iter()
        .map(|notice| &notice[start(notice)..])
        .collect()
}

fn refused(options: &TcpOptions, change: impl FnOnce(&mut TcpOptions)) -> String {
    let mut options = options.clone();
    change(&mut options);
    match connect(&options) {
        Ok(_) => panic!("it was let in"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn strangers_are_refused_and_do_not_disturb_the_rendezvous() {
    let notices = with_visitor(|port, _| {
        let mut browser = TcpStream::connect(("127.0.0.1", port)).unwrap();
        browser
            .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        let mut answer = Vec::new();
        // The answer may be cut off, because rank 0 closed with unread data.
        let _ = browser.read_to_end(&mut answer);

        let mut liar = TcpStream::connect(("127.0.0.1", port)).unwrap();
        liar.write_all(b"EVENKEEL\xff\xff\xff\xff").unwrap();
        let _ = liar.read_to_end(&mut answer);

        let mut fool = TcpStream::connect(("127.0.0.1", port)).unwrap();
        fool.write_all(b"EVENKEEL\x02\0\0\0{}").unwrap();
        let _ = fool.read_to_end(&mut answer);
    });
    assert_eq!(
        without_port(&notices),
        [
            "it is not a rank of Evenkeel: it began with `GET / HTTP/1`",
            "it announced a message of 4294967295 bytes, more than 4096",
            "its greeting is malformed: missing field `greeting` at line 1 column 2",
        ]
    );
}

#[test]
fn silent_connections_do_not_delay_the_rendezvous() {
    let mut silent = Vec::new();
    let notices = with_visitor(|port, _| {
        for _ in 0..20 {
            let mut loris = TcpStream::connect(("127.0.0.1", port)).unwrap();
            loris.write_all(b"EVEN").unwrap();
            silent.push(loris);
        }
    });
    assert!(notices.is_empty(), "{notices:?}");
}

#[test]
fn the_oldest_of_too_many_silent_connections_is_closed() {
    let mut crowd = Vec::new();
    let notices = with_visitor(|port, _| {
        for _ in 0..300 {
            crowd.push(TcpStream::connect(("127.0.0.1", port)).unwrap());
        }
    });
    assert!(!notices.is_empty());
    for notice in without_port(&notices) {
        assert_eq!(notice, "too many connections without a greeting");
    }
}

#[test]
fn ranks_of_another_world_are_refused_with_the_reason() {
    let mut errors = Vec::new();
    let notices = with_visitor(|_, options| {
        errors.push(refused(options, |it| it.greeting.job_uid = "other".into()));
        errors.push(refused(options, |it| it.greeting.generation = 0));
        errors.push(refused(options, |it| it.greeting.world = 3));
        errors.push(refused(options, |it| {
            it.greeting.generation = 2;
            it.timeout = Duration::from_millis(300);
        }));
    });
    let reasons = [
        "it belongs to job `other`, not to `test`",
        "it belongs to generation 0, not to 1",
        "it expects a world of 3 ranks, not of 2",
    ];
    assert_eq!(without_port(&notices)[..3], reasons);
    for (error, reason) in errors.iter().zip(reasons) {
        assert!(
            error.starts_with("rendezvous failed: rank 0 at 127.0.0.1:"),
            "{error}"
        );
        assert!(
            error.ends_with(&format!("refuses this rank: {reason}")),
            "{error}"
        );
    }
    // An outdated listener may go away, so the rank of the newer generation keeps trying.
    assert!(
        errors[3].contains("within 300ms (it belongs to generation 2, not to 1)"),
        "{}",
        errors[3]
    );
}

#[test]
fn a_rank_that_joins_twice_is_refused() {
    let (listener, options) = options(3);
    thread::scope(|scope| {
        let mut twins: Vec<_> = (0..2)
            .map(|_| {
                let options = &options[1];
                scope.spawn(move || connect(options))
            })
            .collect();
        let zero = scope.spawn(|| host(&options[0], listener));
        // One of the two is refused at once, before the world is complete; only then the third rank connects.
        while !twins.iter().any(|twin| twin.is_finished()) {
            thread::yield_now();
        }
        let first = twins.iter().position(|twin| twin.is_finished()).unwrap();
        let error = twins
            .remove(first)
            .join()
            .unwrap()
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.contains("refuses this rank: rank 1 has already joined from 127.0.0.1:"),
            "{error}"
        );
        let two = scope.spawn(|| connect(&options[2]));
        let ranks = [zero, twins.remove(0), two].map(|rank| rank.join().unwrap().unwrap());
        let exchanged = ranks.map(|rank| scope.spawn(move || rank.exchange(b"x").unwrap()));
        for exchanged in exchanged {
            assert_eq!(exchanged.join().unwrap().len(), 3);
        }
    });
}

#[test]
fn a_rank_that_dies_during_the_rendezvous_may_rejoin() {
    let (listener, mut options) = options(3);
    let (notify, notices) = notices();
    options[0].notify = notify;
    let port = options[0].master_port;
    thread::scope(|scope| {
        let zero = scope.spawn(|| host(&options[0], listener).unwrap());
        let hello = super::super::greeting::Hello {
            greeting: options[1].greeting.clone(),
            purpose: super::super::greeting::Purpose::Join {
                listen: ([127, 0, 0, 1], 1).into(),
            },
        };
        let mut short_lived = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let hello = super::super::greeting::encode(&hello).unwrap();
        short_lived.write_all(&hello).unwrap();
        drop(short_lived);
        assert_eq!(
            notices.recv().unwrap(),
            "rank 1 left before all ranks had joined"
        );
        let others = [1, 2].map(|rank| {
            let options = &options[rank];
            scope.spawn(move || connect(options).unwrap())
        });
        // All ends must stay open until every rank has a connection.
        let others = others.map(|other| other.join().unwrap());
        zero.join().unwrap().close().unwrap();
        drop(others);
    });
}

#[test]
fn a_port_in_use_is_an_error_with_a_remedy() {
    let (_taken, options) = options(2);
    let error = connect(&options[0]).err().unwrap().to_string();
    let port = options[0].master_port;
    assert_eq!(
        error,
        format!(
            "rendezvous failed: port {port} on 127.0.0.1 is taken: set MASTER_PORT to a free \
             port, or stop the process that listens there"
        )
    );
}

#[test]
fn missing_ranks_are_named_to_every_rank() {
    let (listener, mut options) = options(4);
    options[0].timeout = Duration::from_millis(500);
    thread::scope(|scope| {
        let zero = scope.spawn(|| host(&options[0], listener).err().unwrap().to_string());
        let one = connect(&options[1]).err().unwrap().to_string();
        let zero = zero.join().unwrap();
        assert!(
            zero.contains("2 of 4 ranks connected to 127.0.0.1:"),
            "{zero}"
        );
        assert!(zero.ends_with("within 500ms, without ranks 2, 3"), "{zero}");
        assert!(one.ends_with("within 500ms, without ranks 2, 3"), "{one}");
    });
}

#[test]
fn an_absent_rank_0_is_reported() {
    let (listener, mut options) = options(2);
    drop(listener);
    options[1].timeout = Duration::from_millis(100);
    let error = connect(&options[1]).err().unwrap().to_string();
    assert!(
        error.contains("within 100ms (Connection refused"),
        "{error}"
    );
    assert!(error.ends_with("does rank 0 run there, and is it MASTER_ADDR and MASTER_PORT"));
}

#[test]
fn an_invalid_greeting_is_misuse() {
    let (_listener, mut options) = options(2);
    options[1].greeting.rank = 2;
    let error = connect(&options[1]).err().unwrap().to_string();
    assert_eq!(
        error,
        "collective misuse: rank 2 is not below the world size 2"
    );
}
