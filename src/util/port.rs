//! Unused ports.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;

/// Below the ports that Linux gives to connections and to listeners without a choice
/// (`net.ipv4.ip_local_port_range`, 32768 by default).
const CHOSEN: Range<u16> = 20_000..32_768;

/// A listener on a port of these addresses that is free now.
pub fn free(addresses: Ipv4Addr) -> io::Result<TcpListener> {
    let chosen = (0..16).find_map(|_| TcpListener::bind((addresses, random())).ok());
    chosen.map_or_else(|| TcpListener::bind((addresses, 0)), Ok)
}

/// A port that is probably free on any machine.
pub fn random() -> u16 {
    let random = RandomState::new().hash_one(0) % CHOSEN.len() as u64;
    CHOSEN.start + random as u16
}
