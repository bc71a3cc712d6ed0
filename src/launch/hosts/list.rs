//! The hosts that a user names: `h1,user@h2:2222`, or a file with one host a line, `user@host:port gpus=8`.

use std::fmt;
use std::path::Path;

use crate::util::input;

/// Largest file of hosts, bytes.
const FILE_BYTES: u64 = 1 << 20;
/// Most hosts of a run.
const HOSTS: usize = 1024;

/// A host as the user names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// What `ssh` gets: a name or an address, with a user before it if one is given.
    pub destination: String,
    pub port: Option<u16>,
    /// GPUs of it that may be used; `None`: all.
    pub gpus: Option<u64>,
    /// Processes that train there without GPUs; `None`: one.
    pub procs: Option<u64>,
}

impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.destination)?;
        self.port.map_or(Ok(()), |port| write!(f, ":{port}"))
    }
}

/// The hosts as [`read`] reads them again.
pub fn written(hosts: &[Listed]) -> String {
    let word = |host: &Listed| {
        let (user, name) = match host.destination.rsplit_once('@') {
            Some((user, name)) => (format!("{user}@"), name),
            None => (String::new(), host.destination.as_str()),
        };
        let name = match host.port {
            Some(port) if name.contains(':') => format!("[{name}]:{port}"),
            Some(port) => format!("{name}:{port}"),
            None => name.to_owned(),
        };
        let of = |key: &str, number: Option<u64>| {
            number.map_or(String::new(), |number| format!(" {key}={number}"))
        };
        format!(
            "{user}{name}{}{}",
            of("gpus", host.gpus),
            of("procs", host.procs)
        )
    };
    let words: Vec<String> = hosts.iter().map(word).collect();
    words.join(",")
}

/// Why a list of hosts cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HostError(pub(super) String);

/// Whether this is the name of a file, and not a list.
fn is_file(hosts: &str) -> bool {
    hosts.contains('/') || Path::new(hosts).is_file()
}

/// The same hosts from any working directory.
pub fn absolute(hosts: &str) -> std::io::Result<String> {
    match is_file(hosts) {
        true => Ok(std::path::absolute(hosts)?.display().to_string()),
        false => Ok(hosts.to_owned()),
    }
}

/// Reads the hosts in a list or a file.
pub fn read(hosts: &str) -> Result<Vec<Listed>, HostError> {
    let path = Path::new(hosts);
    let is_file = is_file(hosts);
    let text = if is_file {
        let read = input::read(path, FILE_BYTES);
        let bytes = read.map_err(|error| HostError(format!("cannot read {hosts}: {error}")))?;
        String::from_utf8_lossy(&bytes).into_owned()
    } else {
        hosts.replace(',', "\n")
    };
    let mut found: Vec<Listed> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let at = |problem: String| match is_file {
            true => HostError(format!("{hosts}:{}: {problem}", number + 1)),
            false => HostError(problem),
        };
        let host = host(line).map_err(at)?;
        if found
            .iter()
            .any(|other| other.to_string() == host.to_string())
        {
            return Err(at(format!("`{host}` is named twice")));
        }
        found.push(host);
    }
    match found.len() {
        0 => Err(HostError(
            "no host is named; give names as in `--on ssh:h1,h2`, or a file with one host a line"
                .to_owned(),
        )),
        1..=HOSTS => Ok(found),
        more => Err(HostError(format!("{more} hosts are more than {HOSTS}"))),
    }
}

/// The hosts after a change: `+h9,-h3` adds and removes hosts of these, and a list or a file without signs replaces them.
pub fn changed(hosts: &[Listed], change: &str) -> Result<Vec<Listed>, HostError> {
    let signed = |word: &str| word.trim().starts_with(['+', '-']);
    if !change.split(',').any(signed) {
        return read(change);
    }
    let mut changed = hosts.to_vec();
    for word in change.split(',') {
        let (sign, word) = word.trim().split_at_checked(1).unwrap_or_default();
        let problem = |problem: String| HostError(format!("`{sign}{word}`: {problem}"));
        let host = host(word.trim()).map_err(problem)?;
        let same = |other: &Listed| other.to_string() == host.to_string();
        match (sign, changed.iter().position(same)) {
            ("+", None) => changed.push(host),
            ("+", Some(_)) => return Err(problem("the run has it already".to_owned())),
            ("-", Some(index)) => drop(changed.remove(index)),
            ("-", None) => {
                let names: Vec<String> = changed.iter().map(Listed::to_string).collect();
                return Err(problem(format!("the run's hosts are {}", names.join(", "))));
            }
            _ => {
                return Err(problem(
                    "every host needs `+` or `-` if one has it".to_owned(),
                ));
            }
        }
    }
    match changed.len() {
        0 => Err(HostError(
            "no host would be left; `evenkeel suspend` stops the run".to_owned(),
        )),
        1..=HOSTS => Ok(changed),
        more => Err(HostError(format!("{more} hosts are more than {HOSTS}"))),
    }
}

fn host(line: &str) -> Result<Listed, String> {
    let mut words = line.split_whitespace();
    let name = words.next().unwrap_or_default();
    let (destination, port) = of_name(name)?;
    let mut host = Listed {
        destination,
        port,
        gpus: None,
        procs: None,
    };
    for word in words {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let number = value
            .parse()
            .ok()
            .filter(|number| (1..=64).contains(number));
        match (key, number) {
            ("gpus", Some(number)) => host.gpus = Some(number),
            ("procs", Some(number)) => host.procs = Some(number),
            ("gpus" | "procs", None) => {
                return Err(format!("`{word}`: give a number from 1 to 64"));
            }
            _ => {
                return Err(format!(
                    "`{word}` is not known; a host has `gpus=N` or `procs=N` after its name"
                ));
            }
        }
    }
    Ok(host)
}

/// Splits `user@host:port`. An IPv6 address with a port has brackets.
fn of_name(name: &str) -> Result<(String, Option<u16>), String> {
    let (user, host) = match name.rsplit_once('@') {
        Some((user, host)) => (Some(user), host),
        None => (None, name),
    };
    let (host, port) = match host.strip_prefix('[') {
        Some(rest) => match rest.split_once(']') {
            Some((host, "")) => (host, None),
            Some((host, port)) => (host, port.strip_prefix(':')),
            None => return Err(format!("`{name}`: a bracket is not closed")),
        },
        None => match host.split_once(':') {
            // Several colons without brackets are an address.
            Some((before, after)) if !after.contains(':') => (before, Some(after)),
            _ => (host, None),
        },
    };
    let port = match port {
        None => None,
        Some(text) => match text.parse::<u16>() {
            Ok(port @ 1..) => Some(port),
            _ => return Err(format!("`{name}`: `{text}` is not a port")),
        },
    };
    // Otherwise ssh would take it for an option.
    let plain = |text: &str| !text.is_empty() && !text.starts_with('-');
    if !plain(host) || user.is_some_and(|user| !plain(user)) {
        return Err(format!("`{name}` is not the name of a host"));
    }
    let destination = user.map_or(host.to_owned(), |user| format!("{user}@{host}"));
    Ok((destination, port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_read_from_a_list_and_from_a_file() {
        let listed = |destination: &str, port, gpus, procs| Listed {
            destination: destination.to_owned(),
            port,
            gpus,
            procs,
        };
        let found = read("h1,me@h2:2222, [fd00::2]:22 gpus=4 ,fd00::1 procs=2").unwrap();
        let expected = [
            listed("h1", None, None, None),
            listed("me@h2", Some(2222), None, None),
            listed("fd00::2", Some(22), Some(4), None),
            listed("fd00::1", None, None, Some(2)),
        ];
        assert_eq!(found, expected);
        assert_eq!(read(&written(&expected)).unwrap(), expected);
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("hosts");
        std::fs::write(&file, "# a pool\nh1\n\nme@h2:2222 # by its port\n").unwrap();
        assert_eq!(read(file.to_str().unwrap()).unwrap(), expected[..2]);
    }

    #[test]
    fn a_change_adds_and_removes_hosts_or_replaces_all() {
        let hosts = read("h1,me@h2:2222 gpus=4").unwrap();
        let after = |change: &str| {
            let names = changed(&hosts, change)?;
            let names: Vec<String> = names.iter().map(Listed::to_string).collect();
            Ok::<_, HostError>(names.join(" "))
        };
        assert_eq!(after("+h9 gpus=2,-h1").unwrap(), "me@h2:2222 h9");
        assert_eq!(after("-me@h2:2222").unwrap(), "h1");
        assert_eq!(after("h3, h1").unwrap(), "h3 h1");
        let kept = changed(&hosts, "+h9").unwrap();
        assert_eq!(kept[1], hosts[1]);
        let error = |change: &str| after(change).unwrap_err().to_string();
        insta::assert_snapshot!(error("+h1"), @"`+h1`: the run has it already");
        insta::assert_snapshot!(error("-h3"), @"`-h3`: the run's hosts are h1, me@h2:2222");
        insta::assert_snapshot!(error("+h3,h4"), @"`h4`: every host needs `+` or `-` if one has it");
        insta::assert_snapshot!(error("-h1,-me@h2:2222"), @"no host would be left; `evenkeel suspend` stops the run");
        insta::assert_snapshot!(error("+"), @"`+`: `` is not the name of a host");
    }

    #[test]
    fn what_is_not_a_host_is_refused_with_its_line() {
        let error = |hosts: &str| read(hosts).unwrap_err().to_string();
        insta::assert_snapshot!(error(""), @"no host is named; give names as in `--on ssh:h1,h2`, or a file with one host a line");
        insta::assert_snapshot!(error("h1,h2,h1"), @"`h1` is named twice");
        insta::assert_snapshot!(error("-oProxyCommand=x"), @"`-oProxyCommand=x` is not the name of a host");
        insta::assert_snapshot!(error("h1:0"), @"`h1:0`: `0` is not a port");
        insta::assert_snapshot!(error("h1 gpus=none"), @"`gpus=none`: give a number from 1 to 64");
        insta::assert_snapshot!(error("h1 slots=2"), @"`slots=2` is not known; a host has `gpus=N` or `procs=N` after its name");
        let place = tempfile::tempdir().unwrap();
        let file = place.path().join("hosts");
        std::fs::write(&file, "h1\n@h2\n").unwrap();
        let message = error(file.to_str().unwrap());
        assert!(
            message.ends_with("hosts:2: `@h2` is not the name of a host"),
            "{message}"
        );
    }
}
