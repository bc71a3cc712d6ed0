//! A real S3 server on loopback (Versity S3 Gateway; `scripts/s3-server.sh` builds it). `benches/bucket.rs` uses it too.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use evenkeel::bucket::Bucket;
use rustix::fs::XattrFlags;
use serde_json::json;

const USER: &str = "evenkeel";
const SECRET: &str = "only-for-tests";
const REGION: &str = "eu-west-1";
/// A user who may only list and read.
pub const READER: &str = "reader";

/// The server, with one bucket `runs`. Objects are files of a folder, and the bucket's policy is an attribute of it.
pub struct Server {
    process: Child,
    host: String,
    pub port: u16,
    root: tempfile::TempDir,
}

impl Server {
    /// `None` and a message without the server's binary.
    pub fn start() -> Option<Server> {
        let server = Server::start_by(&[], &Ipv4Addr::LOCALHOST.to_string(), free_port())?;
        server.wait_for(|| TcpStream::connect((Ipv4Addr::LOCALHOST, server.port)).is_ok());
        Some(server)
    }

    /// Waits until the server listens.
    pub fn wait_for(&self, listens: impl Fn() -> bool) {
        let late = Instant::now() + Duration::from_secs(30);
        while !listens() {
            assert!(Instant::now() < late, "the S3 server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Starts the server by a program that runs another one, at an address that this program has.
    pub fn start_by(program: &[&str], host: &str, port: u16) -> Option<Server> {
        let Some(binary) = std::env::var_os("EVENKEEL_S3_SERVER").map(PathBuf::from) else {
            println!(
                "SKIPPED: no S3 server (set EVENKEEL_S3_SERVER to the output of scripts/s3-server.sh)"
            );
            return None;
        };
        let root = tempfile::tempdir().unwrap();
        let [bucket, users] = ["buckets/runs", "users"].map(|name| root.path().join(name));
        for directory in [&bucket, &users] {
            std::fs::create_dir_all(directory).unwrap();
        }
        let reader = json!({"access": READER, "secret": SECRET, "role": "user"});
        let accounts = json!({"accessAccounts": {READER: reader}});
        std::fs::write(users.join("users.json"), accounts.to_string()).unwrap();
        let policy = json!({"Version": "2012-10-17", "Statement": [{
            "Effect": "Allow", "Principal": [READER], "Action": ["s3:GetObject", "s3:ListBucket"],
            "Resource": ["arn:aws:s3:::runs", "arn:aws:s3:::runs/*"],
        }]});
        let policy = policy.to_string();
        rustix::fs::setxattr(
            &bucket,
            "user.policy",
            policy.as_bytes(),
            XattrFlags::empty(),
        )
        .unwrap();
        let words = program.iter().map(OsString::from);
        let words: Vec<OsString> = words.chain([binary.into_os_string()]).collect();
        let process = Command::new(&words[0])
            .args(&words[1..])
            .args([
                "--access",
                USER,
                "--secret",
                SECRET,
                "--region",
                REGION,
                "--quiet",
                "--keep-alive",
            ])
            .args(["--port", &format!("{host}:{port}"), "--iam-dir"])
            .arg(users)
            .arg("posix")
            .arg(root.path().join("buckets"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Some(Server {
            process,
            host: host.to_owned(),
            port,
            root,
        })
    }

    /// The objects of the bucket are files below this directory.
    #[allow(dead_code, reason = "benches/bucket.rs asks the server")]
    pub fn objects(&self) -> PathBuf {
        self.root.path().join("buckets/runs")
    }

    /// What a client's environment needs.
    pub fn environment(&self) -> BTreeMap<String, String> {
        [
            ("AWS_ACCESS_KEY_ID", USER.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
            ("AWS_REGION", REGION.to_owned()),
            (
                "AWS_ENDPOINT_URL",
                format!("http://{}:{}", self.host, self.port),
            ),
        ]
        .map(|(name, value)| (name.to_owned(), value))
        .into()
    }

    /// A client of the bucket.
    pub fn bucket(&self) -> Bucket {
        Bucket::open_with("s3://runs/test", self.environment()).unwrap()
    }
}

/// URL of a server on a port of this machine.
#[allow(dead_code, reason = "benches/bucket.rs asks the server")]
pub fn endpoint(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

pub fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}
