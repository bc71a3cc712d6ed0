//! `evenkeel controller`: the controller of TrainingJobs.

use std::process::ExitCode;

use crate::operator;
pub use crate::operator::Options as Args;

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    super::logging::start();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()?;
    let ended = runtime.block_on(operator::run(args));
    // A plan under way must not keep the process, which renews its Lease.
    runtime.shutdown_background();
    ended.map(|()| ExitCode::SUCCESS)
}
