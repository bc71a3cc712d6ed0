//! How ranks find each other: the process that makes the unique id listens, every rank joins there with the
//! address of a listener, and then the ranks connect to each other.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::communicator::Communicator;
use super::{Code, settings};

/// Interval at which a waiting rank checks its listener and whether it is aborted.
const POLL: Duration = Duration::from_millis(2);
/// How long the root waits for the message of a rank that has connected.
const PATIENCE: Duration = Duration::from_secs(5);
/// Marks ids of this library.
const MAGIC: [u8; 8] = *b"emulated";

/// `ncclUniqueId`: [`MAGIC`], the key, and the port and the address of the root.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// Makes an id and starts its root.
    pub fn create() -> io::Result<UniqueId> {
        let address = settings().address;
        let listener = TcpListener::bind((address, 0))?;
        let key = random()?;
        let mut bytes = [0; 128];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&key.to_le_bytes());
        bytes[16..18].copy_from_slice(&listener.local_addr()?.port().to_le_bytes());
        bytes[18..22].copy_from_slice(&address.octets());
        std::thread::spawn(move || root(&listener, key));
        Ok(UniqueId(bytes))
    }

    /// The key and the address of the root.
    pub fn parts(&self) -> Option<(u64, SocketAddr)> {
        let bytes = &self.0;
        if bytes[..8] != MAGIC {
            return None;
        }
        let key = u64::from_le_bytes(bytes[8..16].try_into().ok()?);
        let port = u16::from_le_bytes(bytes[16..18].try_into().ok()?);
        let address: [u8; 4] = bytes[18..22].try_into().ok()?;
        Some((key, (Ipv4Addr::from(address), port).into()))
    }
}

fn random() -> io::Result<u64> {
    let mut bytes = [0; 8];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

fn write_line(mut to: &TcpStream, value: &Value) -> io::Result<()> {
    to.write_all(format!("{value}\n").as_bytes())
}

/// A rank that has joined.
struct Joined {
    message: Value,
    stream: TcpStream,
}

impl Joined {
    fn number(&self, key: &str) -> u64 {
        self.message[key].as_u64().unwrap_or(u64::MAX)
    }
}

/// Collects the ranks of one communicator and tells each the addresses of all.
fn root(listener: &TcpListener, key: u64) {
    let mut joined: Vec<Joined> = Vec::new();
    loop {
        let Ok((stream, _)) = listener.accept() else {
            return;
        };
        let Some(message) = read_join(&stream, key) else {
            continue;
        };
        joined.push(Joined { message, stream });
        let answer = match check(&joined) {
            Some(problem) => json!({"error": problem}),
            None if joined.len() as u64 == joined[0].number("world") => {
                joined.sort_by_key(|rank| rank.number("rank"));
                let addresses = joined.iter().map(|rank| rank.message["address"].clone());
                json!({"addresses": addresses.collect::<Vec<_>>()})
            }
            None => {
                let ranks = joined.iter().map(|rank| rank.number("rank"));
                json!({"joined": ranks.collect::<Vec<_>>()})
            }
        };
        // This process may end once its own rank has the answer.
        let own = u64::from(std::process::id());
        let (local, remote): (Vec<&Joined>, Vec<&Joined>) =
            joined.iter().partition(|rank| rank.number("pid") == own);
        for rank in remote.into_iter().chain(local) {
            // A rank that has gone is missed by those that connect to it.
            let _ = write_line(&rank.stream, &answer);
        }
        if answer.get("joined").is_none() {
            return;
        }
    }
}

fn read_join(stream: &TcpStream, key: u64) -> Option<Value> {
    stream.set_read_timeout(Some(PATIENCE)).ok()?;
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).ok()?;
    let message: Value = serde_json::from_str(&line).ok()?;
    (message["key"] == json!(key)).then_some(message)
}

/// The disagreement of the last rank with an earlier one.
fn check(joined: &[Joined]) -> Option<String> {
    let (last, earlier) = joined.split_last()?;
    let (rank, world) = (last.number("rank"), last.number("world"));
    for other in earlier {
        let (other_rank, other_world) = (other.number("rank"), other.number("world"));
        if world != other_world {
            return Some(format!(
                "rank {rank} expects {world} ranks and rank {other_rank} expects {other_world}"
            ));
        }
        if rank == other_rank {
            return Some(format!("two processes are rank {rank}"));
        }
        let allows = |rank: &Joined| rank.message["multi_rank"] == json!(true);
        let same = |key| last.message[key] == other.message[key];
        if same("host") && same("device") && !(allows(last) && allows(other)) {
            let device = &last.message["device"];
            return Some(format!(
                "Duplicate GPU detected : rank {rank} and rank {other_rank} both on CUDA device {device}"
            ));
        }
    }
    None
}

/// Why a communicator cannot be formed.
pub struct Problem {
    pub code: Code,
    pub message: String,
}

impl Problem {
    fn system(error: impl std::fmt::Display) -> Problem {
        Problem {
            code: Code::System,
            message: error.to_string(),
        }
    }
}

/// Joins the other ranks: a connection to each, by rank. `None` means that the communicator was aborted.
pub fn join(
    communicator: &Communicator,
    id: UniqueId,
    device: usize,
) -> Result<Option<Vec<Option<TcpStream>>>, Problem> {
    let (rank, world) = (communicator.rank, communicator.world);
    let Some((key, address)) = id.parts() else {
        return Err(Problem {
            code: Code::InvalidArgument,
            message: "the unique id is not one of ncclGetUniqueId".to_owned(),
        });
    };
    let settings = settings();
    let listener = TcpListener::bind((settings.address, 0)).map_err(Problem::system)?;
    let own = listener.local_addr().map_err(Problem::system)?;
    let root = TcpStream::connect(address).map_err(|error| {
        Problem::system(format!("no root of the unique id at {address}: {error}"))
    })?;
    let message = json!({
        "key": key, "rank": rank, "world": world, "address": own.to_string(),
        // Every machine has its own devices.
        "host": own.ip().to_string(), "device": device,
        "pid": std::process::id(),
        "multi_rank": settings.multi_rank && settings.version >= 23_000,
    });
    write_line(&root, &message).map_err(Problem::system)?;
    let Some(addresses) = addresses(communicator, &root)? else {
        return Ok(None);
    };
    connect(communicator, key, &listener, &addresses)
}

/// Waits until all ranks have joined.
fn addresses(
    communicator: &Communicator,
    root: &TcpStream,
) -> Result<Option<Vec<SocketAddr>>, Problem> {
    root.set_read_timeout(Some(POLL)).map_err(Problem::system)?;
    let begun = Instant::now();
    let mut is_stalled = false;
    let mut joined = json!([communicator.rank]);
    let mut text: Vec<u8> = Vec::new();
    loop {
        if communicator.is_aborted() {
            return Ok(None);
        }
        if begun.elapsed() > settings().timeout && !is_stalled {
            is_stalled = true;
            communicator.report_absent(&joined);
        }
        let mut bytes = [0; 4096];
        match (&*root).read(&mut bytes) {
            Ok(0) => return Err(Problem::system("the process of the unique id ended")),
            Ok(count) => text.extend(&bytes[..count]),
            Err(error) if is_late(&error) => continue,
            Err(error) => return Err(Problem::system(error)),
        }
        while let Some(end) = text.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = text.drain(..=end).collect();
            let answer: Value = serde_json::from_slice(&line).map_err(Problem::system)?;
            if let Some(problem) = answer["error"].as_str() {
                return Err(Problem {
                    code: Code::InvalidUsage,
                    message: problem.to_owned(),
                });
            }
            if let Some(addresses) = answer["addresses"].as_array() {
                let addresses = addresses.iter().map(|address| {
                    let address = address.as_str().unwrap_or_default().parse();
                    address.map_err(Problem::system)
                });
                return addresses.collect::<Result<_, _>>().map(Some);
            }
            joined = answer["joined"].clone();
        }
    }
}

fn is_late(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

/// Connects to the lower ranks and accepts the higher ones.
fn connect(
    communicator: &Communicator,
    key: u64,
    listener: &TcpListener,
    addresses: &[SocketAddr],
) -> Result<Option<Vec<Option<TcpStream>>>, Problem> {
    let (rank, world) = (communicator.rank, communicator.world);
    let mut streams: Vec<Option<TcpStream>> = (0..world).map(|_| None).collect();
    for (peer, address) in addresses.iter().enumerate().take(rank) {
        let connected = TcpStream::connect(address).and_then(|mut stream| {
            stream.set_nodelay(true)?;
            stream.write_all(&key.to_le_bytes())?;
            stream.write_all(&(rank as u64).to_le_bytes())?;
            Ok(stream)
        });
        let stream = connected
            .map_err(|error| Problem::system(format!("cannot connect to rank {peer}: {error}")))?;
        streams[peer] = Some(stream);
    }
    listener.set_nonblocking(true).map_err(Problem::system)?;
    let begun = Instant::now();
    let mut is_stalled = false;
    while streams.iter().filter(|stream| stream.is_some()).count() + 1 < world {
        if communicator.is_aborted() {
            return Ok(None);
        }
        if begun.elapsed() > settings().timeout && !is_stalled {
            is_stalled = true;
            let here = streams.iter().enumerate();
            let here = here.filter(|(peer, stream)| stream.is_some() || *peer <= rank);
            communicator.report_absent(&json!(here.map(|(peer, _)| peer).collect::<Vec<_>>()));
        }
        let mut stream = match listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) if is_late(&error) => {
                std::thread::sleep(POLL);
                continue;
            }
            Err(error) => return Err(Problem::system(error)),
        };
        let mut hello = [0; 16];
        let greeted = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| stream.set_read_timeout(Some(PATIENCE)))
            .and_then(|()| stream.read_exact(&mut hello))
            .and_then(|()| stream.set_read_timeout(None));
        let peer = u64::from_le_bytes(hello[8..].try_into().unwrap_or_default()) as usize;
        if greeted.is_ok() && hello[..8] == key.to_le_bytes() && (rank + 1..world).contains(&peer) {
            streams[peer] = Some(stream);
        }
    }
    Ok(Some(streams))
}
