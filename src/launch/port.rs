//! The port of the loopback interface through which the local ranks connect.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::LaunchError;

/// Connection timeout, much longer than a working loopback interface needs.
const PATIENCE: Duration = Duration::from_secs(5);

/// A port that is free now. If another process takes it first, rank 0 reports that. With more than
/// one rank, a test connection checks that the interface works.
pub fn free(world: u64) -> Result<u16, LaunchError> {
    let listener = TcpListener::bind(("127.0.0.1", 0));
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
