//! What Evenkeel relies on in an object store, on a real S3 server: of many writers one creates an object, a lost reply
//! is no lost commit, and disturbed connections lose no byte.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use evenkeel::bucket::{Bucket, Cause, Object};
use serde_json::json;

use super::proxy::{Disturbance, Proxy};
use super::s3::{self, Server};
use super::support::{Run, same_losses, small, stderr, wait_for};

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
    bucket
        .download(&Object::of(key, bytes as u64), sink)
        .unwrap();
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
        wait_for("the object", || {
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
        Disturbance::Refuse {
            status: 503,
            code: "SlowDown",
        },
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

/// Amazon's answers to requests that this server has no reason to refuse, as documented in
/// <https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html>.
#[test]
fn expired_credentials_and_a_wrong_clock_are_named() {
    let Some(server) = Server::start() else {
        return;
    };
    let proxy = Proxy::start(&server);
    for (status, code, cause) in [
        (400, "ExpiredToken", Cause::Expired),
        (403, "RequestTimeTooSkewed", Cause::Clock),
    ] {
        proxy.disturb(Disturbance::Refuse { status, code });
        let error = proxy.bucket(&server).put("key", vec![1]).unwrap_err();
        println!("{error}");
        assert_eq!(error.cause, cause, "{error}");
    }
    // New credentials arrive while an operation waits for them.
    let bucket = proxy.bucket(&server);
    proxy.disturb(Disturbance::Refuse {
        status: 400,
        code: "ExpiredToken",
    });
    std::thread::scope(|scope| {
        let put = scope.spawn(|| Bucket::patiently(|| bucket.put("key", vec![1])));
        let before = proxy.disturbed();
        wait_for("a second attempt", || {
            (proxy.disturbed() > before + 1).then_some(())
        });
        proxy.disturb(Disturbance::None);
        put.join().unwrap().unwrap();
    });
}

#[test]
fn a_read_only_identity_reads_and_is_refused_the_rest() {
    let Some(server) = Server::start() else {
        return;
    };
    let mut environment = server.environment();
    environment.insert("AWS_ACCESS_KEY_ID".to_owned(), s3::READER.to_owned());
    let bucket = Bucket::open_with("s3://runs/test", environment).unwrap();
    server.bucket().put("data/a.txt", b"text".to_vec()).unwrap();
    assert_eq!(bucket.get("data/a.txt").unwrap().unwrap(), "text");
    assert_eq!(bucket.list("data").unwrap().len(), 1);
    for error in [
        bucket.put("key", vec![1]).unwrap_err(),
        bucket.create("key", vec![1]).unwrap_err(),
        bucket.delete("data/a.txt").unwrap_err(),
    ] {
        println!("{error}");
        assert_eq!(error.cause, Cause::Denied, "{error}");
    }
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

#[test]
fn data_in_a_bucket_train_like_the_same_data_on_the_disk() {
    let Some(server) = Server::start() else {
        return;
    };
    let disk = tempfile::tempdir().unwrap();
    std::fs::create_dir(disk.path().join("train")).unwrap();
    for (name, words) in [
        ("train/a.txt", "one two three"),
        ("train/b.md", "four five"),
        ("other.txt", "six"),
    ] {
        let text: String = (0..2000)
            .map(|i| format!("{words} {}\n", i * i % 97))
            .collect();
        let path = disk.path().join(name);
        std::fs::write(&path, text).unwrap();
        server
            .bucket()
            .upload(&path, &format!("data/{name}"))
            .unwrap();
    }
    let run = |path: &str| {
        let changes = json!({
            "model": {"config": {"vocab_size": 259}},
            "tokenizer": {"path": "byte"},
            "data": {"packing": true, "train": [{"path": path, "split": "train"}]},
            "budget": {"samples": 600}, "checkpoint": {"every_samples": 120},
        });
        Run::of(small(changes)).with_environment(server.environment())
    };
    let on_disk = run(disk.path().to_str().unwrap());
    let in_bucket = run("s3://runs/test/data/");
    // Left by a preparation that was killed.
    std::fs::create_dir_all(in_bucket.out().join(".data.cache/old")).unwrap();
    for run in [&on_disk, &in_bucket] {
        let launched = run.launch(&["--procs", "1"]);
        assert!(launched.status.success(), "{}", stderr(&launched));
    }
    same_losses(&on_disk, &in_bucket);
    assert!(!in_bucket.out().join(".data.cache").exists());

    let drained = run("s3://runs/test/data/**/a.txt");
    drained.drained(&["--procs", "1"]);
    let object = "data/train/a.txt";
    let text = server.bucket().get(object).unwrap().unwrap().to_vec();
    server.bucket().put(object, b"others".to_vec()).unwrap();
    let refused = drained.launch(&["--procs", "1", "--resume"]);
    let message = "the run began with other data: changed: training data";
    assert!(stderr(&refused).contains(message), "{}", stderr(&refused));
    // The same content in a new version.
    server.bucket().put(object, text).unwrap();
    let resumed = drained.launch(&["--procs", "1", "--resume"]);
    assert!(resumed.status.success(), "{}", stderr(&resumed));
    for (path, message) in [
        (
            "s3://runs/test/none/",
            "there is no object s3://runs/test/none/, and none below it",
        ),
        (
            "s3://runs/test/data/*.parquet",
            "s3://runs/test/data/*.parquet holds no data",
        ),
        (
            "s3://nowhere/data/",
            "cannot list s3://nowhere/data: there is no such bucket",
        ),
        (
            "ftp://runs/data/",
            "cannot open ftp://runs/data/: the URL is not usable; write s3://",
        ),
    ] {
        let refused = run(path).launch(&["--procs", "1"]);
        assert!(stderr(&refused).contains(message), "{}", stderr(&refused));
    }
    server
        .bucket()
        .put("data/bad.jsonl", b"{\"text\": \"good\"}\n{\n".to_vec())
        .unwrap();
    let refused = run("s3://runs/test/data/bad.jsonl").launch(&["--procs", "1"]);
    let message = "s3://runs/test/data/bad.jsonl:2: ";
    assert!(stderr(&refused).contains(message), "{}", stderr(&refused));
}
