//! The hosts of a launch with `--on`: which of them run the ranks, and what follows when one is lost or comes back.

use super::Launcher;
use crate::host::Share;
use crate::launch::LaunchError;
use crate::launch::hosts::{HostNews, Hosts};
use crate::lifecycle::Member;
use crate::lifecycle::generation::Address;

impl Launcher<'_> {
    /// The members of the next world, with the shares of other hosts.
    pub(super) fn members(&self, world: u64) -> (Vec<Member>, Vec<Share>) {
        match &self.hosts {
            Some(hosts) => hosts.members(world).into_iter().unzip(),
            None => {
                let here = Member {
                    pod: None,
                    slot: 0,
                    ranks: world,
                };
                (vec![here], Vec::new())
            }
        }
    }

    /// Where rank 0 listens.
    pub(super) fn master(&mut self, members: &[Member]) -> Result<Address, LaunchError> {
        if let (Some(hosts), [first, ..]) = (&self.hosts, members) {
            return Ok(hosts.address(first.slot as usize));
        }
        Ok(Address {
            host: "127.0.0.1".into(),
            port: self.port(members.iter().map(|member| member.ranks).sum())?,
        })
    }

    /// Looks which hosts are lost, back or about to leave. The ranks of a lost one have ended.
    pub(super) fn look_at_hosts(&mut self) {
        let news = self.hosts.as_mut().map(Hosts::look);
        for HostNews { message, lost } in news.into_iter().flatten() {
            if let Some(host) = lost {
                self.in_trouble();
                if let Some(current) = &mut self.current {
                    let shares = current.shares.iter().filter(|(of, _)| *of == host);
                    for (_, ranks) in shares {
                        current.host.lose(ranks.clone(), &message);
                    }
                }
            }
            self.warn(message.clone());
            self.host_news = Some(message);
        }
    }

    /// Whether a host that is not there could make a world possible.
    pub(super) fn misses_hosts(&self) -> bool {
        self.hosts
            .as_ref()
            .is_some_and(|hosts| hosts.absent().is_some())
    }

    pub(super) fn wait_for_hosts(&mut self, problem: &str) -> Result<(), LaunchError> {
        let absent = self.hosts.as_ref().and_then(Hosts::absent);
        if let Some(absent) = absent.filter(|_| !self.waits) {
            self.waits = true;
            self.warn(format!("{problem}; waiting for {absent}"));
        }
        self.wait()
    }
}
