//! Which connections are admitted, and which messages the ranks receive.

use std::io::{Read, Write};
use std::net::TcpStream;

use super::super::greeting::{
    Hello, Intake, Join, Lane, LaneOf, Nonces, Reply, Side, encode, reply_limit,
};
use super::*;
use crate::util::key::nonce;

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
            "it announced a message of 4.00 GiB, more than 4.00 KiB",
            "its greeting is malformed: expected value at line 1 column 2",
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
        errors.push(refused(options, |it| it.greeting.world = 3));
        errors.push(refused(options, |it| {
            it.key = Key::random().unwrap();
            it.timeout = Duration::from_millis(300);
        }));
    });
    let reason = "it expects a world of 3 ranks, not of 2";
    // The rank with another key says nothing, since rank 0 does not prove that it has it.
    assert_eq!(without_port(&notices), [reason]);
    assert!(
        errors[0].starts_with("rendezvous failed: rank 0 at 127.0.0.1:"),
        "{}",
        errors[0]
    );
    let end = format!("refuses this rank: {reason}");
    assert!(errors[0].ends_with(&end), "{}", errors[0]);
    // A rank of another generation may be listening and go away, so the rank keeps trying.
    let other = "within 300ms (the process that listens there does not prove that it has the key of this generation)";
    assert!(errors[1].contains(other), "{}", errors[1]);
}

/// Sends a message to a rank that listens; returns its answer.
fn ask(stream: &mut TcpStream, hello: &Hello) -> Reply {
    stream.write_all(&encode(hello).unwrap()).unwrap();
    let answer = Intake::new(reply_limit(2)).read(&*stream);
    answer.unwrap().unwrap()
}

fn opened(port: u16) -> (TcpStream, Nonces) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    let guest = nonce().unwrap();
    match ask(&mut stream, &Hello::Open { nonce: guest }) {
        Reply::Challenge { nonce: host, proof } => {
            let nonces = Nonces { guest, host };
            assert!(key().verify(&nonces.of_host(), &proof));
            (stream, nonces)
        }
        other => panic!("{other:?}"),
    }
}

fn join_of_rank_1() -> Join {
    Join {
        greeting: Greeting { rank: 1, world: 2 },
        listen: ([127, 0, 0, 1], 1).into(),
    }
}

#[test]
fn a_stranger_without_the_key_takes_no_rank() {
    let mut answers = Vec::new();
    let notices = with_visitor(|port, _| {
        // It knows the protocol and everything about the world, and has another key.
        let (mut stream, nonces) = opened(port);
        let wrong = join_of_rank_1().proven(&Key::random().unwrap(), &nonces);
        answers.push(ask(&mut stream, &wrong.unwrap()));
        // It repeats a proof that it has seen on another connection.
        let seen = join_of_rank_1().proven(&key(), &nonces).unwrap();
        let (mut stream, _) = opened(port);
        answers.push(ask(&mut stream, &seen));
        // It leaves out the challenge.
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        answers.push(ask(&mut stream, &seen));
        // It asks for a lane before there are any.
        let lane = LaneOf {
            rank: 1,
            lane: Lane::Data,
            nonce: nonces.guest,
        };
        let proof = lane.proof(&key(), 0, Side::Connects);
        let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
        answers.push(ask(&mut stream, &Hello::Lane { lane, proof }));
    });
    let reason = "it does not prove that it has the key of this generation";
    assert_eq!(answers, vec![Reply::Refused(reason.into()); 4]);
    assert_eq!(without_port(&notices), [reason; 4]);
}

#[test]
fn a_rank_says_nothing_to_a_stranger_that_listens_as_rank_0() {
    let (listener, mut options) = options(2);
    options[1].timeout = Duration::from_secs(1);
    thread::scope(|scope| {
        let heard = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let hello: Hello = Intake::new(4096).read(&stream).unwrap().unwrap();
            let Hello::Open { nonce: guest } = hello else {
                panic!("{hello:?}");
            };
            let host = nonce().unwrap();
            let proof = Key::random()
                .unwrap()
                .prove(&Nonces { guest, host }.of_host());
            let challenge = encode(&Reply::Challenge { nonce: host, proof });
            stream.write_all(&challenge.unwrap()).unwrap();
            let mut rest = Vec::new();
            stream.read_to_end(&mut rest).unwrap();
            rest
        });
        let error = connect(&options[1]).err().unwrap().to_string();
        assert!(
            error.contains("does not prove that it has the key"),
            "{error}"
        );
        assert_eq!(
            heard.join().unwrap(),
            b"",
            "it says nothing after the challenge"
        );
    });
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
        let (mut short_lived, nonces) = opened(port);
        let join = Join {
            greeting: options[1].greeting.clone(),
            listen: ([127, 0, 0, 1], 1).into(),
        };
        let join = join.proven(&key(), &nonces).unwrap();
        short_lived.write_all(&encode(&join).unwrap()).unwrap();
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
            "rendezvous failed: port {port} on 127.0.0.1 is taken by another process; the next generation uses \
             another port"
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
