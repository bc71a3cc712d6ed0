//! The port of the loopback interface through which the local ranks connect.

use std::hash::{BuildHasher, RandomState};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::time::Duration;

use super::LaunchError;

/// Connection timeout, much longer than a working loopback interface needs.
const PATIENCE: Duration = Duration::from_secs(5);

/// Below the ports that Linux gives to connections and to listeners without a choice
/// (`net.ipv4.ip_local_port_range`, 32768 by default).
const CHOSEN: Range<u16> = 20_000..32_768;

/// A port that is free now. If another process takes it first, rank 0 reports that. With more than
/// one rank, a test connection checks that the interface works.
pub fn free(world: u64) -> Result<u16, LaunchError> {
    let chosen = (0..16).find_map(|_| {
        let random = RandomState::new().hash_one(0) % CHOSEN.len() as u64;
        TcpListener::bind(("127.0.0.1", CHOSEN.start + random as u16)).ok()
    });
    let listener = chosen.map_or_else(|| TcpListener::bind(("127.0.0.1", 0)), Ok);
    let bound = listener.and_then(|listener| Ok((listener.local_addr()?, listener)));
    let (address, _listener) = bound.map_err(|error| LaunchError::Port { error })?;
    if world > 1 {
        TcpStream::connect_timeout(&address, PATIENCE)
            .map_err(|error| LaunchError::Loopback { error })?;
    }
    Ok(address.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tested_port_can_be_bound() {
        let port = free(2).unwrap();
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        assert_eq!(listener.local_addr().unwrap().port(), port);
    }
}
