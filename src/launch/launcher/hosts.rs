//! The hosts of a launch with `--on`: which of them run the ranks, and what follows when one is lost or comes back.

use std::time::Instant;

use super::Launcher;
use crate::host::Share;
use crate::launch::LaunchError;
use crate::launch::hosts::{self, HostNews, Hosts, Lost};
use crate::launch::port;
use crate::lifecycle::Member;
use crate::lifecycle::generation::Address;
use crate::train::rank;

impl Launcher<'_> {
    /// The members of the next world, with the shares of other hosts.
    pub(super) fn members(&self, world: u64) -> (Vec<Member>, Vec<Share>) {
        match &self.hosts {
            Some(hosts) => hosts.members(&self.run.job, world).into_iter().unzip(),
            None => {
                let here = Member {
                    pod: None,
                    slot: 0,
                    ranks: world,
                    carries: Vec::new(),
                };
                (vec![here], Vec::new())
            }
        }
    }

    /// Where rank 0 listens.
    pub(super) fn master(&mut self, members: &[Member]) -> Result<Address, LaunchError> {
        if let (Some(hosts), [first, ..]) = (&self.hosts, members) {
            let named = port::named(&self.run.spec.trainer)?;
            let address = hosts.address(first.slot as usize, named);
            if let Some(named) = named.filter(|named| *named != address.port) {
                self.warn(format!(
                    "port {named} of {} cannot be used; the ranks connect through {} instead (MASTER_PORT)",
                    address.host, address.port
                ));
            }
            return Ok(address);
        }
        Ok(Address {
            host: "127.0.0.1".into(),
            port: self.port(members.iter().map(|member| member.ranks).sum())?,
        })
    }

    /// Looks which hosts are lost, back or about to leave. The ranks of a lost one have ended.
    pub(super) fn look_at_hosts(&mut self) {
        let wanted = self.desired.min(*self.bounds().end());
        let busy = self.current.iter().flat_map(|current| &current.shares);
        let busy: Vec<usize> = busy.map(|(host, _)| *host).collect();
        let hosts = self.hosts.as_mut();
        let news = hosts.map(|hosts| hosts.look(wanted, &busy));
        for HostNews { message, lost } in news.into_iter().flatten() {
            if let Some(Lost { host, fenced }) = lost {
                self.in_trouble();
                if let Some(current) = &mut self.current {
                    current.host.lose_spares(host as u64);
                    let shares = current.shares.iter().filter(|(of, _)| *of == host);
                    for (_, ranks) in shares {
                        current.host.lose(ranks.clone(), &message);
                        self.fenced = self.fenced.max(Some(fenced));
                    }
                }
            }
            self.warn(message.clone());
            self.host_news = Some(message);
        }
    }

    /// Whether the next generation of an external trainer must wait, because a process of a lost host may still write
    /// checkpoints. Each generation of the built-in trainer has its own directory.
    pub(super) fn waits_for_lost_ranks(&self) -> Result<bool, LaunchError> {
        let (Some(fenced), Some(current), Some(_)) = (self.fenced, &self.current, &self.external)
        else {
            return Ok(false);
        };
        let directory = self.run_dir.generation(current.host.record.number);
        Ok(current.host.has_ended() && Instant::now() < fenced && rank::any_alive(&directory)?)
    }

    /// Whether a host that is not there could make a world possible.
    pub(super) fn misses_hosts(&self) -> bool {
        self.hosts
            .as_ref()
            .is_some_and(|hosts| hosts.absent().is_some())
    }

    pub(super) fn wait_for_hosts(&mut self, problem: &str) -> Result<(), LaunchError> {
        let absent = self.hosts.as_ref().and_then(Hosts::absent);
        if let Some(absent) = absent.filter(|_| self.state.waits.is_none()) {
            let message = format!("{problem}; waiting for {absent}");
            self.warn(message.clone());
            self.state.waits = Some(message);
            self.write_state()?;
        }
        self.wait()
    }

    /// Writes which hosts are there, after the decision that this has led to.
    pub(super) fn show_hosts(&mut self) -> Result<(), LaunchError> {
        let rows = self.hosts.as_ref().map(Hosts::rows).unwrap_or_default();
        if rows == self.state.hosts {
            return Ok(());
        }
        self.state.hosts = rows;
        self.write_state()
    }

    /// The run's hosts are now these, written as after `--on ssh:`.
    pub(super) fn change_hosts(&mut self, listed: &str) {
        let problem = match (hosts::read(listed), &mut self.hosts) {
            (Ok(listed), Some(hosts)) => {
                hosts.change(listed);
                return;
            }
            (Ok(_), None) => "this run is on its launcher's machine".to_owned(),
            (Err(error), _) => error.to_string(),
        };
        self.warn(format!("a request for other hosts is ignored: {problem}"));
    }
}
