//! What follows when memory runs out: a smaller micro-batch at the same global batch, or, where that
//! was asked for and nothing is trained yet, a smaller global batch.

use super::Launcher;
use crate::batch::{OomPolicy, Plan};
use crate::launch::{LaunchError, worlds};
use crate::telemetry::Event;

impl Launcher<'_> {
    /// Whether memory that runs out shrinks the global batch: where that was asked for, and as long
    /// as nothing is trained. A run that has a checkpoint keeps its batch.
    pub(super) fn shrinks(&self) -> bool {
        let own = self.own.as_ref().and_then(|own| own.newest.as_ref());
        let kept = self.state.pin.is_some() || own.is_some();
        self.oom_policy != OomPolicy::Exact && !kept
    }

    /// The micro-batch after that of `failed`, which did not fit.
    pub(super) fn smaller(&self, failed: &Plan) -> Option<u64> {
        match self.shrinks() {
            true => {
                let smaller = self.oom_policy.smaller(failed.per_device_batch_size);
                smaller.filter(|micro| *micro > 0)
            }
            false => worlds::descend(&self.setup, failed, self.state.reached(&self.setup)),
        }
    }

    /// Begins the run again with another global batch.
    pub(super) fn shrink(&mut self, micro: u64) -> Result<(), LaunchError> {
        let Some(current) = &self.current else {
            return Ok(());
        };
        let was = self.setup.global_batch_size;
        self.setup = worlds::shrunk(&self.setup, &current.generation.plan, micro);
        self.run.write_setup(&self.setup)?;
        let message = format!(
            "memory ran out, and `--oom-policy` shrinks the global batch: {was} → {}",
            self.setup.global_batch_size
        );
        self.display.event(&Event::Warning { message });
        Ok(())
    }
}
