//! What a rank's process runs: the built-in trainer, or the user's own program. Both find
//! torchrun's environment, so that a script written for torchrun runs unchanged.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::batch::Plan;
use crate::job::Generation;

/// What a rank runs.
#[derive(Debug, Clone, Copy)]
pub enum Program<'a> {
    /// The built-in trainer: this program.
    BuiltIn(&'a Path),
    /// The user's own command line. `{global_batch_size}` and the like in it become the plan's
    /// numbers.
    Foreign(&'a [String]),
}

/// What is needed to start ranks.
pub struct Start<'a> {
    /// What they run.
    pub program: Program<'a>,
    /// The run's directory.
    pub run: &'a Path,
    /// The generation.
    pub generation: &'a Generation,
    /// The first rank of this host.
    pub first: u64,
    /// How many ranks this host runs.
    pub count: u64,
    /// Threads per rank.
    pub threads: u64,
}

/// The plan's numbers, as a foreign program finds them: in the place of `{name}` in its arguments,
/// and as `EVENKEEL_NAME` in its environment.
fn numbers(plan: &Plan) -> [(&'static str, u64); 4] {
    [
        ("global_batch_size", plan.global_batch_size),
        ("per_device_batch_size", plan.per_device_batch_size),
        (
            "gradient_accumulation_steps",
            plan.gradient_accumulation_steps,
        ),
        ("world_size", plan.outline.world_size),
    ]
}

/// The command of one rank; what it prints goes into `log`, but for the reports that the built-in
/// trainer writes to its standard output.
pub(super) fn command(
    start: &Start<'_>,
    rank: u64,
    local: u64,
    log: File,
) -> std::io::Result<Command> {
    let mut command = match start.program {
        Program::BuiltIn(program) => {
            let mut command = Command::new(program);
            command
                .arg("rank")
                .arg("--run")
                .arg(start.run)
                .args(["--generation", &start.generation.number.to_string()])
                .env("RAYON_NUM_THREADS", start.threads.to_string())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped());
            command
        }
        Program::Foreign(words) => {
            let mut words = words
                .iter()
                .map(|word| filled(word, &start.generation.plan));
            let mut command = Command::new(words.next().unwrap_or_default());
            command
                .args(words)
                .stdin(Stdio::null())
                .stdout(log.try_clone()?);
            for (name, number) in numbers(&start.generation.plan) {
                let name = format!("EVENKEEL_{}", name.to_uppercase());
                command.env(name, number.to_string());
            }
            // The same in every generation: where its own checkpoints outlive the world.
            command.env("EVENKEEL_RUN_DIR", start.run);
            command
        }
    };
    command
        .envs(torchrun(start, rank, local))
        .stderr(log)
        // A group of its own: Ctrl-C on the terminal is for the launcher, which drains the ranks.
        .process_group(0);
    Ok(command)
}

/// An argument with the plan's numbers in the place of their names.
fn filled(word: &str, plan: &Plan) -> String {
    numbers(plan)
        .iter()
        .fold(word.to_owned(), |word, (name, number)| {
            word.replace(&format!("{{{name}}}"), &number.to_string())
        })
}

/// The environment of a worker of torchrun (torch.distributed.elastic), and what its agents set of
/// their own (`PET_*`).
fn torchrun(start: &Start<'_>, rank: u64, local: u64) -> Vec<(&'static str, String)> {
    let generation = start.generation;
    let node = generation
        .shares()
        .position(|(first, _)| first == start.first);
    let node = node.unwrap_or(0).to_string();
    let nodes = generation.members.len().to_string();
    let local_world = start.count.to_string();
    vec![
        ("RANK", rank.to_string()),
        ("LOCAL_RANK", local.to_string()),
        ("WORLD_SIZE", generation.world().to_string()),
        ("LOCAL_WORLD_SIZE", local_world.clone()),
        ("GROUP_RANK", node.clone()),
        ("GROUP_WORLD_SIZE", nodes.clone()),
        ("MASTER_ADDR", generation.master.host.clone()),
        ("MASTER_PORT", generation.master.port.to_string()),
        ("PET_NNODES", nodes),
        ("PET_NPROC_PER_NODE", local_world),
        ("PET_NODE_RANK", node),
        ("TORCHELASTIC_RUN_ID", generation.job.clone()),
        (
            "TORCHELASTIC_RESTART_COUNT",
            generation.number.saturating_sub(1).to_string(),
        ),
    ]
}
