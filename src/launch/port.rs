//! Where the ranks of this machine meet: a port of the loopback interface.

use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use super::LaunchError;

/// Longer than the loopback interface takes on any machine that is still of use.
const PATIENCE: Duration = Duration::from_secs(5);

/// A port that is free now. Rank 0 says so clearly if somebody takes it before it listens. Where
/// more than one rank has to meet there, it is tried whether they could.
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
    fn a_port_that_was_tried_can_be_listened_at() {
        let port = free(2).unwrap();
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        assert_eq!(listener.local_addr().unwrap().port(), port);
    }
}
