//! A real S3 server on loopback (Versity S3 Gateway; `scripts/s3-server.sh` builds it). `benches/bucket.rs` uses it too.

use std::collections::BTreeMap;
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
    pub port: u16,
    _root: tempfile::TempDir,
}

impl Server {
    /// `None` and a message without the server's binary.
    pub fn start() -> Option<Server> {
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
        let port = free_port();
        let process = Command::new(binary)
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
            .args(["--port", &format!("127.0.0.1:{port}"), "--iam-dir"])
            .arg(users)
            .arg("posix")
            .arg(root.path().join("buckets"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let server = Server {
            process,
            port,
            _root: root,
        };
        let late = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(Instant::now() < late, "the S3 server does not listen");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(server)
    }

    /// What a client's environment needs.
    pub fn environment(&self) -> BTreeMap<String, String> {
        [
            ("AWS_ACCESS_KEY_ID", USER.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
            ("AWS_REGION", REGION.to_owned()),
            ("AWS_ENDPOINT_URL", endpoint(self.port)),
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
