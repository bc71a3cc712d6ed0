//! `cp.async`: copies from global to shared memory whose data are withheld until their thread waits.

use super::access::aligned;
use super::instruction::{AsyncCopy, LANES};
use super::run::{Fault, LaneFault, Machine, lanes};
use super::warp::Warp;

/// The copies of a warp that are not complete.
#[derive(Default)]
pub struct Copies {
    pending: Vec<Pending>,
    /// Groups that a lane has committed.
    committed: [u32; LANES],
}

struct Pending {
    lane: usize,
    /// The lane's group to which the copy belongs.
    group: u32,
    to: u64,
    bytes: u8,
    data: [u8; 16],
}

impl Copies {
    pub fn commit(&mut self, active: u32) {
        for lane in lanes(active) {
            self.committed[lane] += 1;
        }
    }
}

impl Warp {
    /// Begins a copy. Reads the source now, one of the times at which the hardware may read it.
    pub fn copy(
        &mut self,
        machine: &mut Machine<'_>,
        copy: &AsyncCopy,
        active: u32,
    ) -> Result<(), LaneFault> {
        let (to, from) = (self.addresses(copy.to), self.addresses(copy.from));
        let bytes = u64::from(copy.bytes);
        machine.scratch.clear();
        for lane in lanes(active) {
            let fail = |fault| LaneFault::new(lane, fault);
            let source = copy.source_bytes.map_or(u32::from(copy.bytes), |index| {
                self.r32[index as usize][lane]
            });
            if source > u32::from(copy.bytes) {
                let limit = u32::from(copy.bytes);
                return Err(fail(Fault::CopySize {
                    bytes: source,
                    limit,
                }));
            }
            machine.shared.check(to[lane], bytes).map_err(fail)?;
            aligned(from[lane], usize::from(copy.bytes)).map_err(fail)?;
            let mut data = [0; 16];
            if source > 0 {
                machine
                    .memory
                    .read(from[lane], &mut data[..source as usize])
                    .map_err(|fault| fail(fault.into()))?;
                machine.scratch.push(from[lane]);
                machine.counters.global_bytes_read += u64::from(source);
            }
            let begun = machine
                .shared
                .begin_copy(self.thread(lane), to[lane], bytes);
            begun.map_err(|c| fail(c.with(|other| machine.thread(other))))?;
            self.copies.pending.push(Pending {
                lane,
                group: self.copies.committed[lane],
                to: to[lane],
                bytes: copy.bytes,
                data,
            });
        }
        machine.counters.global(&mut machine.scratch, bytes);
        Ok(())
    }

    /// Completes the copies of the active lanes, except the given number of newest groups.
    pub fn wait_for_copies(&mut self, machine: &mut Machine<'_>, groups: Option<u32>, active: u32) {
        let first_thread = self.thread(0);
        let committed = self.copies.committed;
        self.copies.pending.retain(|pending| {
            let committed = committed[pending.lane];
            let complete = match groups {
                None => true,
                Some(groups) => pending.group < committed.saturating_sub(groups),
            };
            if !complete || active >> pending.lane & 1 == 0 {
                return true;
            }
            let data = &pending.data[..usize::from(pending.bytes)];
            let thread = first_thread + pending.lane as u32;
            machine.shared.end_copy(thread, pending.to, data);
            false
        });
    }
}
