//! Reacts to out-of-memory: a smaller micro-batch at the same global batch, or a smaller global
//! batch if the user allows it and no step is committed.

use super::Launcher;
use crate::launch::{LaunchError, worlds};
use crate::plan::{OomPolicy, Plan};
use crate::telemetry::Event;

impl Launcher<'_> {
    /// Whether out-of-memory shrinks the global batch: only on request, and only before the first
    /// checkpoint.
    pub(super) fn shrinks(&self) -> bool {
        let external = self
            .external
            .as_ref()
            .and_then(|external| external.newest.as_ref());
        let kept = self.state.checkpoint_ref.is_some() || external.is_some();
        self.oom_policy != OomPolicy::Exact && !kept
    }

    /// The next smaller micro-batch after that of `failed`.
    pub(super) fn smaller(&self, failed: &Plan) -> Option<u64> {
        if self.shrinks() {
            let smaller = self.oom_policy.smaller(failed.per_device_batch_size);
            smaller.filter(|per_device_batch_size| *per_device_batch_size > 0)
        } else {
            self.worlds.smaller(failed, self.state.reached(&self.run))
        }
    }

    /// Restarts the run with a smaller global batch.
    pub(super) fn shrink(&mut self, per_device_batch_size: u64) -> Result<(), LaunchError> {
        let Some(current) = &self.current else {
            return Ok(());
        };
        let was = self.run.global_batch_size;
        self.run = worlds::shrunk(&self.run, &current.host.record.plan, per_device_batch_size);
        self.run_dir.write_run(&self.run)?;
        let message = format!(
            "out of memory; `--oom-policy` shrinks the global batch: {was} → {}",
            self.run.global_batch_size
        );
        self.display.event(&Event::Warning { message });
        Ok(())
    }
}
