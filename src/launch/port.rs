//! The port of the loopback interface through which the local ranks connect.

use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use super::LaunchError;
use crate::recipe::spec::{MASTER_PORT, Trainer};
use crate::util;

/// Connection timeout, much longer than a working loopback interface needs.
const PATIENCE: Duration = Duration::from_secs(5);

/// A port that is free now. If another process takes it first, rank 0 reports that. With more than
/// one rank, a test connection checks that the interface works.
pub fn free(world: u64) -> Result<u16, LaunchError> {
    let bound = util::port::free(Ipv4Addr::LOCALHOST)
        .and_then(|listener| Ok((listener.local_addr()?, listener)));
    let (address, _listener) = bound.map_err(|error| LaunchError::Port { error })?;
    if world > 1 {
        TcpStream::connect_timeout(&address, PATIENCE)
            .map_err(|error| LaunchError::Loopback { error })?;
    }
    Ok(address.port())
}

/// The port that the user names, with an option of the launcher or a variable. `None`: any free port.
pub fn named(trainer: &Trainer) -> Result<Option<u16>, LaunchError> {
    let Some(text) = trainer.environment.get(MASTER_PORT) else {
        return Ok(None);
    };
    match text.parse() {
        Ok(0) => Ok(None),
        Ok(port) => Ok(Some(port)),
        Err(_) => Err(LaunchError::usage(format!(
            "the port of the ranks ({MASTER_PORT}, `--master_port`, `main_process_port`) is `{text}`; give a number from 1 \
             to 65535, or remove it for any free port"
        ))),
    }
}

/// Why no program can listen on a port now, at any address of this machine, as PyTorch does.
pub fn refused(port: u16) -> Option<io::Error> {
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).err()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_named_as_a_number_and_0_is_any() {
        let named = |port: &str| {
            let environment = [(MASTER_PORT.to_owned(), port.to_owned())].into();
            named(&Trainer {
                environment,
                ..Trainer::default()
            })
        };
        assert_eq!(named("29501").unwrap(), Some(29_501));
        assert_eq!(named("0").unwrap(), None);
        insta::assert_snapshot!(named("99999").unwrap_err(), @"the port of the ranks (MASTER_PORT, `--master_port`, `main_process_port`) is `99999`; give a number from 1 to 65535, or remove it for any free port");
    }

    #[test]
    fn a_port_that_another_program_has_is_refused() {
        let other = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let port = other.local_addr().unwrap().port();
        let error = refused(port).unwrap();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        // Not this one, which the system may have given to another program's connection meanwhile.
        assert!(refused(free(1).unwrap()).is_none());
    }

    #[test]
    fn a_tested_port_can_be_bound() {
        let port = free(2).unwrap();
        let listener = TcpListener::bind(("127.0.0.1", port)).unwrap();
        assert_eq!(listener.local_addr().unwrap().port(), port);
    }
}
