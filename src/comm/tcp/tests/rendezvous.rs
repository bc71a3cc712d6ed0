//! Who gets in, and what the others are told.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::*;

/// A world of two with rank 1 missing; `visit` gets the port and the options of rank 1 before it
/// comes. Returns what rank 0 had to say about it.
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

/// Without the stranger's port, which is different every time.
fn words(notices: &[String]) -> Vec<&str> {
    let words = |notice: &String| notice.find(": ").map_or(0, |at| at + 2);
    notices
        .iter()
        .map(|notice| &notice[words(notice)..])
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
fn strangers_are_refused_and_disturb_nobody() {
    let notices = with_visitor(|port, _| {
        let mut browser = TcpStream::connect(("127.0.0.1", port)).unwrap();
        browser
            .write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            .unwrap();
        let mut answer = Vec::new();
        // It may be cut off in the middle of the answer: it had not been listened to.
        let _ = browser.read_to_end(&mut answer);

        let mut liar = TcpStream::connect(("127.0.0.1", port)).unwrap();
        liar.write_all(b"EVENKEEL\xff\xff\xff\xff").unwrap();
        let _ = liar.read_to_end(&mut answer);

        let mut fool = TcpStream::connect(("127.0.0.1", port)).unwrap();
        fool.write_all(b"EVENKEEL\x02\0\0\0{}").unwrap();
        let _ = fool.read_to_end(&mut answer);
    });
    assert_eq!(
        words(&notices),
        [
            "it is no rank of Evenkeel: it began with `GET / HTTP/1`",
            "it announced a message of 4294967295 bytes, more than 4096",
            "its greeting makes no sense: missing field `greeting` at line 1 column 2",
        ]
    );
}

#[test]
fn those_who_say_nothing_hold_nobody_up() {
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
fn a_crowd_of_strangers_makes_room() {
    let mut crowd = Vec::new();
    let notices = with_visitor(|port, _| {
        for _ in 0..300 {
            crowd.push(TcpStream::connect(("127.0.0.1", port)).unwrap());
        }
    });
    assert!(!notices.is_empty());
    for notice in words(&notices) {
        assert_eq!(notice, "too many connections that say nothing");
    }
}

#[test]
fn ranks_of_another_world_are_refused_and_told_why() {
    let mut told = Vec::new();
    let notices = with_visitor(|_, options| {
        told.push(refused(options, |it| it.greeting.job_uid = "other".into()));
        told.push(refused(options, |it| it.greeting.generation = 0));
        told.push(refused(options, |it| it.greeting.world = 3));
        told.push(refused(options, |it| {
            it.greeting.generation = 2;
            it.timeout = Duration::from_millis(300);
        }));
    });
    let reasons = [
        "it is of job `other`, not of `test`",
        "it is of generation 0, not of 1",
        "it expects a world of 3 ranks, not of 2",
    ];
    assert_eq!(words(&notices)[..3], reasons);
    for (told, reason) in told.iter().zip(reasons) {
        assert!(
            told.starts_with("rendezvous failed: rank 0 at 127.0.0.1:"),
            "{told}"
        );
        assert!(told.ends_with(&format!("says no: {reason}")), "{told}");
    }
    // A listener that is out of date may go away: the newer generation keeps trying.
    assert!(
        told[3].contains("within 300ms (it is of generation 2, not of 1)"),
        "{}",
        told[3]
    );
}

#[test]
fn the_second_of_a_rank_is_refused() {
    let (listener, options) = options(3);
    thread::scope(|scope| {
        let mut twins: Vec<_> = (0..2)
            .map(|_| {
                let options = &options[1];
                scope.spawn(move || connect(options))
            })
            .collect();
        let zero = scope.spawn(|| host(&options[0], listener));
        // One of them is told at once, before the world is whole; only then the third rank comes.
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
            error.contains("says no: rank 1 has already joined from 127.0.0.1:"),
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
fn a_rank_that_dies_before_the_world_is_whole_may_come_again() {
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
            "rank 1 left before everyone had joined"
        );
        let others = [1, 2].map(|rank| {
            let options = &options[rank];
            scope.spawn(move || connect(options).unwrap())
        });
        // All ends must be open until everyone has one.
        let others = others.map(|other| other.join().unwrap());
        zero.join().unwrap().close().unwrap();
        drop(others);
    });
}

#[test]
fn a_port_that_is_taken_says_what_to_do() {
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
fn those_who_never_came_are_named_to_everyone() {
    let (listener, mut options) = options(4);
    options[0].timeout = Duration::from_millis(500);
    thread::scope(|scope| {
        let zero = scope.spawn(|| host(&options[0], listener).err().unwrap().to_string());
        let one = connect(&options[1]).err().unwrap().to_string();
        let zero = zero.join().unwrap();
        assert!(zero.contains("2 of 4 ranks came to 127.0.0.1:"), "{zero}");
        assert!(zero.ends_with("within 500ms, without ranks 2, 3"), "{zero}");
        assert!(one.ends_with("within 500ms, without ranks 2, 3"), "{one}");
    });
}

#[test]
fn no_rank_0_is_said_clearly() {
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
fn a_greeting_that_cannot_be_is_misuse() {
    let (_listener, mut options) = options(2);
    options[1].greeting.rank = 2;
    let error = connect(&options[1]).err().unwrap().to_string();
    assert_eq!(
        error,
        "collective misuse: rank 2 is not below the world size 2"
    );
}
