//! How ranks meet: rank 0 listens on the master address, hands out a table of addresses, and then every pair
//! of ranks opens one connection per lane.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::TcpOptions;
use super::acceptor::{Acceptor, Admitted, Arrival};
use super::greeting::{
    Hello, Intake, Join, Lane, LaneOf, Nonces, Reply, Side, encode, lane_key, reply_limit,
};
use super::same_host::unix_where_shared;
use super::wire::{Streams, peers};
use crate::comm::CommError;
use crate::util::key::{Key, nonce};

/// The connections of each kind.
#[derive(Debug)]
pub(super) struct Mesh {
    /// Unix sockets to ranks of this host, as [`unix_where_shared`] makes them.
    pub data: Streams,
    pub exchange: Streams,
    pub heartbeat: Streams,
}

impl Mesh {
    fn lane(&mut self, lane: Lane) -> &mut Streams {
        match lane {
            Lane::Data => &mut self.data,
            Lane::Exchange => &mut self.exchange,
            Lane::Heartbeat => &mut self.heartbeat,
        }
    }

    pub fn all(&self) -> impl Iterator<Item = &TcpStream> {
        let lanes = [&self.data, &self.exchange, &self.heartbeat];
        lanes.into_iter().flatten().flatten()
    }
}

/// A rank that cannot reach rank 0 for this long reports it once and keeps trying.
const REPORT_AFTER: Duration = Duration::from_secs(5);
/// Time within which rank 0 must prove that it has the key. It may be computing, but not for this long.
const CHALLENGE_TIMEOUT: Duration = Duration::from_secs(10);

const LANES: [Lane; 3] = [Lane::Data, Lane::Exchange, Lane::Heartbeat];

/// Binds rank 0's listener; the error says how to free a port in use.
fn listen(options: &TcpOptions) -> Result<TcpListener, CommError> {
    let (place, port) = (options.master_address.as_str(), options.master_port);
    TcpListener::bind((place, port)).map_err(|error| {
        rendezvous(match error.kind() {
            io::ErrorKind::AddrInUse => format!(
                "port {port} on {place} is taken by another process; the next generation uses another port"
            ),
            io::ErrorKind::AddrNotAvailable => format!(
                "{place} is not an address of this machine: rank 0 must run where MASTER_ADDR \
                 points"
            ),
            _ => format!("cannot listen on {place}, port {port}: {error}"),
        })
    })
}

/// Connects to the other ranks. Rank 0 listens, unless it passes its listener.
pub(super) fn meet(options: &TcpOptions, listener: Option<TcpListener>) -> Result<Mesh, CommError> {
    let deadline = Instant::now() + options.timeout;
    options.greeting.validate().map_err(CommError::Misuse)?;
    let rank = options.greeting.rank;
    if rank > 0 && listener.is_some() {
        return Err(CommError::Misuse(format!(
            "rank {rank} cannot host the rendezvous: only rank 0 does"
        )));
    }
    if rank > 0 {
        return guest(options, deadline);
    }
    let listener = match listener {
        Some(listener) => listener,
        None => listen(options)?,
    };
    host(options, listener, deadline)
}

/// Rank 0: collects the addresses of all ranks and sends the table to all of them.
fn host(options: &TcpOptions, listener: TcpListener, deadline: Instant) -> Result<Mesh, CommError> {
    let own = &options.greeting;
    let here = listener
        .local_addr()
        .map_err(|error| rendezvous(format!("cannot listen: {error}")))?;
    let mut acceptor = acceptor(options, listener)?;
    let mut joined: BTreeMap<usize, (TcpStream, SocketAddr)> = BTreeMap::new();
    while joined.len() + 1 < own.world {
        let watched: Vec<_> = joined
            .iter()
            .map(|(&rank, (stream, _))| (rank, stream))
            .collect();
        match acceptor.next(deadline, &watched)? {
            Arrival::Rank(stream, Admitted::Join(join)) => {
                let rank = join.greeting.rank;
                if let Some((_, first)) = joined.get(&rank) {
                    let reason = format!("rank {rank} has already joined from {first}");
                    acceptor.refuse(stream, reason);
                    continue;
                }
                if stream.set_nonblocking(false).is_ok() {
                    joined.insert(rank, (stream, join.listen));
                }
            }
            // No rank has the key for lanes yet.
            Arrival::Rank(_, Admitted::Lane(_)) => {}
            Arrival::Ended(rank) => {
                joined.remove(&rank);
                (options.notify)(&format!("rank {rank} left before all ranks had joined"));
            }
            Arrival::Timeout => {
                let missing: Vec<_> = (1..own.world)
                    .filter(|rank| !joined.contains_key(rank))
                    .collect();
                let reason = format!(
                    "{} of {} ranks connected to {here} within {:?}, without {}",
                    joined.len() + 1,
                    own.world,
                    options.timeout,
                    ranks(&missing)
                );
                let rank = missing[0];
                for (stream, _) in joined.into_values() {
                    let reason = reason.clone();
                    say(&stream, &Reply::Missing { rank, reason }).unwrap_or_default();
                }
                return Err(CommError::PeerLost { rank, reason });
            }
        }
    }
    let mut table = vec![here];
    table.extend(joined.values().map(|(_, listen)| *listen));
    let session = nonce().map_err(|error| rendezvous(error.to_string()))?;
    let reply = Reply::Table {
        addresses: table.clone(),
        rendezvous: session,
    };
    for (rank, (stream, _)) in &joined {
        say(stream, &reply).map_err(|error| left_early(*rank, &error))?;
    }
    let watched: Vec<_> = joined
        .iter()
        .map(|(&rank, (stream, _))| (rank, stream))
        .collect();
    let lanes = lane_key(&options.key, &session);
    mesh(options, acceptor, &lanes, &table, &watched, deadline)
}

fn acceptor(options: &TcpOptions, listener: TcpListener) -> Result<Acceptor, CommError> {
    let own = options.greeting.clone();
    Acceptor::new(listener, own, options.key.clone(), options.notify.clone())
}

/// Every other rank: asks rank 0 for the table, repeatedly until it answers.
fn guest(options: &TcpOptions, deadline: Instant) -> Result<Mesh, CommError> {
    let own = &options.greeting;
    let place = format!("{}:{}", options.master_address, options.master_port);
    let mut pause = Duration::from_millis(20);
    let (since, mut reported) = (Instant::now(), false);
    loop {
        let why = match join(options, deadline) {
            Ok(Joined {
                master,
                listener,
                table,
                lanes,
            }) => {
                let acceptor = acceptor(options, listener)?;
                let watched = [(0, &master)];
                return mesh(options, acceptor, &lanes, &table, &watched, deadline);
            }
            Err(Joining::Refused(reason)) => {
                return Err(rendezvous(format!(
                    "rank 0 at {place} refuses this rank: {reason}"
                )));
            }
            Err(Joining::Missing { rank, reason }) => {
                return Err(CommError::PeerLost { rank, reason });
            }
            Err(Joining::NotYet(why)) => why,
        };
        if since.elapsed() > REPORT_AFTER && !std::mem::replace(&mut reported, true) {
            let rank = own.rank;
            (options.notify)(&format!(
                "rank {rank} does not reach rank 0 at {place} yet: {why}"
            ));
        }
        if Instant::now() + pause >= deadline {
            return Err(rendezvous(format!(
                "no world at {place} within {:?} ({why}): does rank 0 run there, and is it \
                 MASTER_ADDR and MASTER_PORT",
                options.timeout
            )));
        }
        sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Why one attempt to join failed.
enum Joining {
    /// Rank 0 may not listen yet, or a rank of another generation still does.
    NotYet(String),
    /// A refusal that is final.
    Refused(String),
    /// Rank 0 has given up, because some rank did not connect.
    Missing { rank: usize, reason: String },
}

impl From<io::Error> for Joining {
    fn from(error: io::Error) -> Self {
        Joining::NotYet(error.to_string())
    }
}

/// What a rank has once rank 0 has sent the table of addresses.
struct Joined {
    master: TcpStream,
    listener: TcpListener,
    table: Vec<SocketAddr>,
    lanes: Key,
}

fn join(options: &TcpOptions, deadline: Instant) -> Result<Joined, Joining> {
    let own = &options.greeting;
    let host = options.master_address.as_str();
    let mut last = Joining::NotYet(format!("{host} has no address"));
    let mut master = None;
    for address in (host, options.master_port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(deadline)) {
            Ok(stream) => {
                master = Some(stream);
                break;
            }
            Err(error) => last = error.into(),
        }
    }
    let Some(master) = master else {
        return Err(last);
    };
    // The interface that reaches rank 0 also reaches the other ranks.
    let towards_master = master.local_addr()?.ip();
    let listener = TcpListener::bind((towards_master, 0))?;
    let address = listener.local_addr()?;
    let nonces = challenge(options, &master, deadline)?;
    let join = Join {
        greeting: own.clone(),
        listen: address,
    };
    say(&master, &join.proven(&options.key, &nonces)?)?;
    match hear(&master, own.world, deadline)? {
        Some(Reply::Table {
            addresses: mut table,
            rendezvous,
        }) if table.len() == own.world => {
            table[0] = master.peer_addr()?;
            Ok(Joined {
                master,
                listener,
                table,
                lanes: lane_key(&options.key, &rendezvous),
            })
        }
        Some(Reply::Refused(reason)) => Err(Joining::Refused(reason)),
        Some(Reply::Missing { rank, reason }) => Err(Joining::Missing { rank, reason }),
        Some(_) => Err(Joining::Refused("its answer is not that of rank 0".into())),
        None => Err(Joining::NotYet("rank 0 still waits for other ranks".into())),
    }
}

/// Has the process that listens prove that it has the key.
fn challenge(
    options: &TcpOptions,
    master: &TcpStream,
    deadline: Instant,
) -> Result<Nonces, Joining> {
    let guest = nonce()?;
    say(master, &Hello::Open { nonce: guest })?;
    let patience = deadline.min(Instant::now() + CHALLENGE_TIMEOUT);
    let stranger =
        "the process that listens there does not prove that it has the key of this generation";
    match hear(master, options.greeting.world, patience)? {
        Some(Reply::Challenge { nonce: host, proof }) => {
            let nonces = Nonces { guest, host };
            if options.key.verify(&nonces.of_host(), &proof) {
                Ok(nonces)
            } else {
                Err(Joining::NotYet(stranger.into()))
            }
        }
        Some(Reply::Refused(reason)) => Err(Joining::NotYet(reason)),
        _ => Err(Joining::NotYet(stranger.into())),
    }
}

/// The next message of a rank that listens; `None` if it does not come in time.
fn hear(stream: &TcpStream, world: usize, deadline: Instant) -> io::Result<Option<Reply>> {
    stream.set_read_timeout(Some(left(deadline)))?;
    Intake::new(reply_limit(world)).read(stream)
}

/// Connects to every lower rank, admits every higher one, and waits until all ranks have done so.
fn mesh(
    options: &TcpOptions,
    mut acceptor: Acceptor,
    lanes: &Key,
    table: &[SocketAddr],
    watched: &[(usize, &TcpStream)],
    deadline: Instant,
) -> Result<Mesh, CommError> {
    let own = &options.greeting;
    acceptor.admit_lanes(lanes.clone());
    let empty = || (0..own.world).map(|_| None).collect();
    let mut mesh = Mesh {
        data: empty(),
        exchange: empty(),
        heartbeat: empty(),
    };
    // The peers' proofs are read once this rank has admitted its own peers, so that no rank waits for another.
    let mut asked = Vec::new();
    for (peer, address) in table.iter().enumerate().take(own.rank) {
        for lane in LANES {
            let connect = || {
                let stream = TcpStream::connect_timeout(address, left(deadline))?;
                let lane = LaneOf {
                    rank: own.rank,
                    lane,
                    nonce: nonce()?,
                };
                let proof = lane.proof(lanes, peer, Side::Connects);
                say(&stream, &Hello::Lane { lane, proof })?;
                Ok((stream, lane))
            };
            let (stream, of) = connect().map_err(|error: io::Error| CommError::PeerLost {
                rank: peer,
                reason: format!("it cannot be reached at {address}: {error}"),
            })?;
            mesh.lane(lane)[peer] = Some(stream);
            asked.push((peer, of));
        }
    }
    let mut expected = LANES.len() * (own.world - 1 - own.rank);
    while expected > 0 {
        match acceptor.next(deadline, watched)? {
            Arrival::Rank(stream, Admitted::Lane(of)) => {
                let place = mesh.lane(of.lane).get_mut(of.rank);
                let Some(place) = place.filter(|place| of.rank > own.rank && place.is_none())
                else {
                    let reason = format!("rank {} has already connected", of.rank);
                    acceptor.refuse(stream, reason);
                    continue;
                };
                let proof = of.proof(lanes, own.rank, Side::Accepts);
                say(&stream, &Reply::Admitted(proof))
                    .map_err(|error| left_early(of.rank, &error))?;
                *place = Some(stream);
                expected -= 1;
            }
            Arrival::Rank(stream, Admitted::Join(join)) => {
                let reason = format!("rank {} has already joined", join.greeting.rank);
                acceptor.refuse(stream, reason);
            }
            Arrival::Ended(rank) => {
                return Err(left_early(rank, &"connection closed"));
            }
            Arrival::Timeout => {
                let missing = (own.rank + 1..own.world).filter(|&rank| {
                    [&mesh.data, &mesh.exchange, &mesh.heartbeat]
                        .iter()
                        .any(|lane| lane[rank].is_none())
                });
                let missing: Vec<_> = missing.collect();
                return Err(CommError::PeerLost {
                    rank: missing[0],
                    reason: format!(
                        "no connection from {} within {:?}",
                        ranks(&missing),
                        options.timeout
                    ),
                });
            }
        }
    }
    for (peer, of) in asked {
        let stream = mesh.lane(of.lane)[peer].as_ref();
        stream.map_or(Ok(()), |stream| {
            admitted(stream, &of, lanes, peer, deadline).map_err(|error| left_early(peer, &error))
        })?;
    }
    for stream in mesh.all() {
        stream
            .set_nodelay(true)
            .map_err(|error| rendezvous(format!("a connection broke: {error}")))?;
    }
    let patience = left(deadline);
    mesh.data = unix_where_shared(own.rank, mesh.data, options.unix_sockets, patience)
        .map_err(|(rank, error)| left_early(rank, &error))?;
    everyone_is_ready(&mesh.heartbeat, deadline)?;
    Ok(mesh)
}

/// Waits until a peer has admitted a lane and proven that it has the key.
fn admitted(
    stream: &TcpStream,
    lane: &LaneOf,
    lanes: &Key,
    peer: usize,
    deadline: Instant,
) -> io::Result<()> {
    match hear(stream, 0, deadline)? {
        Some(Reply::Admitted(proof)) if lane.is_proven(lanes, peer, Side::Accepts, &proof) => {
            Ok(())
        }
        Some(Reply::Refused(reason)) => Err(io::Error::other(reason)),
        _ => Err(io::Error::other("it does not prove that it has the key")),
    }
}

/// Exchanges one byte with every peer. From here on, silence of a peer counts against it.
fn everyone_is_ready(heartbeat: &[Option<TcpStream>], deadline: Instant) -> Result<(), CommError> {
    for (rank, mut stream) in peers(heartbeat) {
        stream
            .set_nonblocking(false)
            .and_then(|()| stream.write_all(&[READY]))
            .map_err(|error| left_early(rank, &error))?;
    }
    for (rank, mut stream) in peers(heartbeat) {
        let mut byte = [0];
        stream
            .set_read_timeout(Some(left(deadline)))
            .and_then(|()| io::Read::read_exact(&mut stream, &mut byte))
            .map_err(|error| left_early(rank, &error))?;
    }
    Ok(())
}

const READY: u8 = b'R';

fn left_early(rank: usize, how: &impl std::fmt::Display) -> CommError {
    CommError::PeerLost {
        rank,
        reason: format!("it left while the ranks connected: {how}"),
    }
}

fn say<T: serde::Serialize>(mut stream: &TcpStream, message: &T) -> io::Result<()> {
    stream.write_all(&encode(message)?)
}

/// Time until the deadline; never zero, which a socket would take for "no limit".
fn left(deadline: Instant) -> Duration {
    deadline
        .saturating_duration_since(Instant::now())
        .max(Duration::from_millis(1))
}

fn ranks(ranks: &[usize]) -> String {
    let ranks: Vec<String> = ranks.iter().map(usize::to_string).collect();
    match ranks.as_slice() {
        [one] => format!("rank {one}"),
        many => format!("ranks {}", many.join(", ")),
    }
}

fn rendezvous(reason: String) -> CommError {
    CommError::Rendezvous(reason)
}
