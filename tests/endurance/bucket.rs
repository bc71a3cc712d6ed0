//! What Evenkeel relies on in an object store, on a real S3 server: of many writers one creates an object, a lost reply
//! is no lost commit, and disturbed connections lose no byte.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use evenkeel::bucket::{Bucket, Cause};

use super::proxy::{Disturbance, Proxy};
use super::s3::{self, Server};

/// The first bytes of a file of some size.
fn file_of(bytes: usize) -> (tempfile::TempDir, std::path::PathBuf, Vec<u8>) {
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("file");
    let content: Vec<u8> = (0..bytes)
        .map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8)
        .collect();
    std::fs::write(&path, &content).unwrap();
    (place, path, content)
}

fn downloaded(bucket: &Bucket, key: &str, bytes: usize) -> Vec<u8> {
    let mut read = Vec::new();
    let sink = |piece: &[u8]| {
        read.extend_from_slice(piece);
        true
    };
    bucket.download(key, bytes as u64, sink).unwrap();
    read
}

#[test]
fn of_many_writers_one_creates_an_object() {
    const WRITERS: usize = 8;
    const ROUNDS: usize = 50;
    let Some(server) = Server::start() else {
        return;
    };
    let start = Barrier::new(WRITERS);
    let winners: Vec<Vec<usize>> = std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                // Another client has other connections, like another machine.
                let (bucket, start) = (server.bucket(), &start);
                scope.spawn(move || {
                    let won = (0..ROUNDS).filter(|round| {
                        start.wait();
                        let content = format!("{writer} ").repeat(1 + 1000 * writer);
                        match bucket.create(&format!("round-{round}"), content.into_bytes()) {
                            Ok(()) => true,
                            Err(error) if error.cause == Cause::Taken => false,
                            Err(error) => panic!("{error}"),
                        }
                    });
                    won.collect::<Vec<usize>>()
                })
            })
            .collect();
        writers
            .into_iter()
            .map(|writer| writer.join().unwrap())
            .collect()
    });
    for round in 0..ROUNDS {
        let won: Vec<usize> = (0..WRITERS)
            .filter(|writer| winners[*writer].contains(&round))
            .collect();
        let [winner] = won[..] else {
            panic!("round {round} was won by {won:?}");
        };
        let content = server
            .bucket()
            .get(&format!("round-{round}"))
            .unwrap()
            .unwrap();
        assert_eq!(
            content,
            format!("{winner} ").repeat(1 + 1000 * winner).as_bytes()
        );
    }
    let most = winners.iter().map(Vec::len).max().unwrap();
    println!(
        "{ROUNDS} objects, each created by one of {WRITERS} writers; the luckiest created {most}"
    );
    assert!(most < ROUNDS, "the writers did not race");
}

#[test]
fn a_lost_reply_is_no_lost_commit() {
    let Some(server) = Server::start() else {
        return;
    };
    let proxy = Proxy::start(&server);
    let bucket = proxy.bucket(&server);
    proxy.disturb(Disturbance::LoseReply);
    std::thread::scope(|scope| {
        let commit = scope.spawn(|| bucket.create("manifest.json", b"mine".to_vec()));
        // The first attempt reaches the server; its reply does not reach the client.
        super::support::wait_for("the object", || {
            server.bucket().get("manifest.json").unwrap()
        });
        proxy.disturb(Disturbance::None);
        commit.join().unwrap().unwrap();
    });
    assert!(proxy.disturbed() > 0);
    let other = bucket
        .create("manifest.json", b"theirs".to_vec())
        .unwrap_err();
    assert_eq!(other.cause, Cause::Taken);
}

#[test]
fn a_disturbed_connection_loses_no_byte() {
    let Some(server) = Server::start() else {
        return;
    };
    let proxy = Proxy::start(&server);
    let (_place, path, content) = file_of(40_000_000);
    for how in [
        Disturbance::Cut { after: 3_000_000 },
        Disturbance::Refuse,
        Disturbance::Slow { rate: 8_000_000 },
    ] {
        // Another client, so that no connection is left from before.
        let bucket = proxy.bucket(&server);
        let before = proxy.disturbed();
        proxy.disturb(how);
        std::thread::scope(|scope| {
            let moved = scope.spawn(|| {
                bucket.upload(&path, "file").unwrap();
                downloaded(&bucket, "file", content.len())
            });
            std::thread::sleep(Duration::from_secs(2));
            proxy.disturb(Disturbance::None);
            assert!(moved.join().unwrap() == content, "{how:?}");
        });
        assert!(proxy.disturbed() > before, "{how:?}");
        server.bucket().delete("file").unwrap();
    }
}

#[test]
fn an_upload_that_ends_halfway_is_invisible() {
    let Some(server) = Server::start() else {
        return;
    };
    let proxy = Proxy::start(&server);
    let (_place, path, _) = file_of(40_000_000);
    proxy.disturb(Disturbance::Cut { after: 3_000_000 });
    let bucket = proxy.bucket(&server);
    let began = Instant::now();
    let error = bucket.upload(&path, "file").unwrap_err();
    println!("refused after {:.0?}: {error}", began.elapsed());
    assert_eq!(error.cause, Cause::Unreachable);
    assert_eq!(server.bucket().get("file").unwrap(), None);
    assert_eq!(server.bucket().list("").unwrap(), []);
}

#[test]
fn every_refusal_says_what_to_do() {
    let Some(server) = Server::start() else {
        return;
    };
    let with = |name: &str, value: &str| {
        let mut environment = server.environment();
        environment.insert(name.to_owned(), value.to_owned());
        environment
    };
    let closed = s3::endpoint(s3::free_port());
    let cases = [
        ("s3://nowhere/x", server.environment(), Cause::NoBucket),
        (
            "s3://runs/x",
            with("AWS_REGION", "us-east-2"),
            Cause::Region,
        ),
        (
            "s3://runs/x",
            with("AWS_SECRET_ACCESS_KEY", "wrong"),
            Cause::Credentials,
        ),
        (
            "s3://runs/x",
            with("AWS_ACCESS_KEY_ID", "unknown"),
            Cause::Credentials,
        ),
        (
            "s3://runs/x",
            with("AWS_ENDPOINT_URL", &closed),
            Cause::Unreachable,
        ),
    ];
    for (url, environment, cause) in cases {
        let bucket = Bucket::open_with(url, environment).unwrap();
        for error in [
            bucket.get("key").unwrap_err(),
            bucket.put("key", vec![1]).unwrap_err(),
            bucket.create("key", vec![1]).unwrap_err(),
            bucket.list("").unwrap_err(),
        ] {
            println!("{error}");
            assert_eq!(error.cause, cause, "{error}");
        }
    }
}
