//! `bar.sync`, `bar.arrive` and `bar.red`: the 16 barriers of a block.

use super::instruction::{Barrier, BarrierKind, LANES, Register};
use super::run::{Fault, LaneFault, Machine, lanes};
use super::warp::Warp;

/// The barriers of a block that warps have arrived at.
#[derive(Default)]
pub struct Barriers([Option<Pending>; 16]);

struct Pending {
    /// Threads that complete the barrier.
    threads: u32,
    /// The line of the first arrival if it named no number of threads; all arrivals must be there.
    whole_block_at: Option<u32>,
    arrivals: Vec<Arrival>,
}

struct Arrival {
    warp: usize,
    kind: BarrierKind,
    destination: Option<Register>,
    /// Lanes that exist, and those whose predicate holds.
    lanes: u32,
    votes: u32,
    /// The warp's clocks when it arrived.
    released: Vec<u64>,
}

impl Barriers {
    /// A warp arrives. Gives the warps that may run again.
    pub fn arrive(
        &mut self,
        machine: &mut Machine<'_>,
        warps: &mut [Warp],
        warp: usize,
        barrier: &Barrier,
        pc: u32,
        votes: u32,
    ) -> Result<Vec<usize>, LaneFault> {
        let warp_lanes = warps[warp].exists;
        let fail = |fault| LaneFault::lowest(warp_lanes, fault);
        let id = warps[warp].uniform(barrier.id);
        let all = (warps.len() * LANES) as u32;
        let threads = barrier
            .threads
            .map_or(all, |threads| warps[warp].uniform(threads));
        let line = machine.kernel.code.instructions[pc as usize].line;
        let invalid = Fault::BarrierInvalid { id, threads };
        if threads == 0 || !threads.is_multiple_of(LANES as u32) || threads > all {
            warps[warp].step_back();
            return Err(fail(invalid));
        }
        let Some(slot) = self.0.get_mut(id as usize) else {
            warps[warp].step_back();
            return Err(fail(invalid));
        };
        let pending = slot.get_or_insert_with(|| Pending {
            threads,
            whole_block_at: barrier.threads.is_none().then_some(line),
            arrivals: Vec::new(),
        });
        if pending.threads != threads {
            warps[warp].step_back();
            return Err(fail(Fault::BarrierCount {
                id,
                threads,
                others: pending.threads,
            }));
        }
        if let Some(other) = pending.whole_block_at
            && barrier.threads.is_none()
            && other != line
        {
            warps[warp].step_back();
            return Err(fail(Fault::BarrierElsewhere { id, line: other }));
        }
        pending.arrivals.push(Arrival {
            warp,
            kind: barrier.kind,
            destination: barrier.destination,
            lanes: warp_lanes,
            votes,
            released: machine.shared.release(warp),
        });
        if (pending.arrivals.len() * LANES) < threads as usize {
            return Ok(Vec::new());
        }
        let arrivals = slot
            .take()
            .map_or_else(Vec::new, |pending| pending.arrivals);
        Ok(complete(machine, warps, &arrivals))
    }

    /// Why a warp waits for ever.
    pub fn stuck(&self, warp: usize, exited: u32) -> Fault {
        let of = |pending: &Pending| pending.arrivals.iter().any(|arrival| arrival.warp == warp);
        for (id, pending) in self.0.iter().enumerate() {
            if let Some(pending) = pending.as_ref().filter(|pending| of(pending)) {
                let id = id as u32;
                if exited > 0 && pending.whole_block_at.is_some() {
                    return Fault::BarrierAfterExit { id, exited };
                }
                return Fault::Deadlock {
                    id,
                    arrived: (pending.arrivals.len() * LANES) as u32,
                    threads: pending.threads,
                };
            }
        }
        Fault::Trap
    }
}

fn complete(machine: &mut Machine<'_>, warps: &mut [Warp], arrivals: &[Arrival]) -> Vec<usize> {
    let mut joined = vec![0; warps.len()];
    for arrival in arrivals {
        for (joined, &clock) in joined.iter_mut().zip(&arrival.released) {
            *joined = clock.max(*joined);
        }
    }
    let count: u32 = arrivals
        .iter()
        .map(|arrival| arrival.votes.count_ones())
        .sum();
    let every = arrivals
        .iter()
        .all(|arrival| arrival.votes == arrival.lanes);
    let mut released = Vec::new();
    for arrival in arrivals {
        if arrival.kind == BarrierKind::Arrive {
            continue;
        }
        released.push(arrival.warp);
        machine.shared.acquire(arrival.warp, &joined);
        let warp = &mut warps[arrival.warp];
        if let Some(d) = arrival.destination {
            match arrival.kind {
                BarrierKind::And => warp.put_predicate(d.index, arrival.lanes, mask_of(every)),
                BarrierKind::Or => warp.put_predicate(d.index, arrival.lanes, mask_of(count > 0)),
                _ => warp.put32(d.index, arrival.lanes, &[count; LANES]),
            }
        }
    }
    released
}

fn mask_of(value: bool) -> u32 {
    if value { u32::MAX } else { 0 }
}

/// The lowest lane whose value differs from the first one's, for operands that must be uniform.
pub fn first_different(values: &[u32; LANES], mask: u32) -> Option<usize> {
    let first = lanes(mask).next()?;
    lanes(mask).find(|&lane| values[lane] != values[first])
}
