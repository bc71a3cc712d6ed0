//! A proxy that disturbs what passes between the S3 server and its clients.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use evenkeel::bucket::Bucket;

use super::s3::{Server, endpoint};

/// What the proxy does to connections.
#[derive(Debug, Clone, Copy)]
pub enum Disturbance {
    None,
    /// Ends the connection after this many bytes from the client.
    Cut {
        after: u64,
    },
    /// Passes the request on, and ends the connection instead of the reply.
    LoseReply,
    /// Answers requests with this error, as S3 does.
    Refuse {
        status: u16,
        code: &'static str,
    },
    /// Passes this many bytes a second in each direction.
    Slow {
        rate: u64,
    },
}

/// A proxy on loopback.
pub struct Proxy {
    port: u16,
    how: Arc<Mutex<Disturbance>>,
    /// Connections that were disturbed.
    disturbed: Arc<AtomicU64>,
}

impl Proxy {
    pub fn start(server: &Server) -> Proxy {
        let server = server.port;
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let how = Arc::new(Mutex::new(Disturbance::None));
        let disturbed = Arc::new(AtomicU64::new(0));
        let (shared, counter) = (Arc::clone(&how), Arc::clone(&disturbed));
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let (shared, counter) = (Arc::clone(&shared), Arc::clone(&counter));
                std::thread::spawn(move || pass(client, server, &shared, &counter));
            }
        });
        Proxy {
            port,
            how,
            disturbed,
        }
    }

    /// A client whose requests pass the proxy.
    pub fn bucket(&self, server: &Server) -> Bucket {
        let mut environment = server.environment();
        environment.insert("AWS_ENDPOINT_URL".to_owned(), endpoint(self.port));
        Bucket::open_with("s3://runs/test", environment).unwrap()
    }

    /// Disturbs new connections like this.
    pub fn disturb(&self, how: Disturbance) {
        *self.how.lock().unwrap() = how;
    }

    pub fn disturbed(&self) -> u64 {
        self.disturbed.load(Ordering::SeqCst)
    }
}

fn pass(mut client: TcpStream, server: u16, how: &Mutex<Disturbance>, counter: &AtomicU64) {
    let chosen = *how.lock().unwrap();
    if !matches!(chosen, Disturbance::None) {
        counter.fetch_add(1, Ordering::SeqCst);
    }
    if let Disturbance::Refuse { status, code } = chosen {
        let body = format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code></Error>");
        let mut request = [0; 65536];
        let _ = client.read(&mut request);
        let _ = write!(
            client,
            "HTTP/1.1 {status} {code}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        return;
    }
    let Ok(upstream) = TcpStream::connect((Ipv4Addr::LOCALHOST, server)) else {
        return;
    };
    let (from, to) = (client.try_clone().unwrap(), upstream.try_clone().unwrap());
    let reply = std::thread::spawn(move || match chosen {
        Disturbance::LoseReply => {
            let _ = (&upstream).read(&mut [0]);
            let _ = client.shutdown(Shutdown::Both);
        }
        Disturbance::Slow { rate } => copy(&upstream, &client, u64::MAX, Some(rate)),
        _ => copy(&upstream, &client, u64::MAX, None),
    });
    match chosen {
        Disturbance::Cut { after } => copy(&from, &to, after, None),
        Disturbance::Slow { rate } => copy(&from, &to, u64::MAX, Some(rate)),
        _ => copy(&from, &to, u64::MAX, None),
    }
    if let Disturbance::Cut { .. } = chosen {
        let _ = from.shutdown(Shutdown::Both);
    }
    let _ = reply.join();
}

/// Copies until the end of one side, then ends the other's direction.
fn copy(mut from: &TcpStream, mut to: &TcpStream, most: u64, rate: Option<u64>) {
    let mut left = most;
    let mut buffer = vec![0; 16384];
    while left > 0 {
        let length = buffer.len().min(left as usize);
        match from.read(&mut buffer[..length]) {
            Ok(0) | Err(_) => break,
            Ok(read) => {
                if to.write_all(&buffer[..read]).is_err() {
                    break;
                }
                left -= read as u64;
                if let Some(rate) = rate {
                    std::thread::sleep(Duration::from_secs_f64(read as f64 / rate as f64));
                }
            }
        }
    }
    let how = if left == 0 {
        Shutdown::Both
    } else {
        Shutdown::Write
    };
    let _ = to.shutdown(how);
}
