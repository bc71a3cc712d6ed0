//! The status of an external trainer: its command, the checkpoint that it resumed from, and the
//! last line of each rank.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::cli::output::{Unprinted, line};
use crate::host::{last_lines, shown};
use crate::launch::{RunDir, RunState};
use crate::lifecycle::files;

/// The newest generation of an external trainer.
#[derive(Serialize)]
pub struct ExternalStatus {
    command: Vec<String>,
    checkpoint_dir: PathBuf,
    /// The checkpoint that it resumed from.
    checkpoint: Option<PathBuf>,
    ranks: Vec<Rank>,
}

/// One of its ranks.
#[derive(Serialize)]
struct Rank {
    rank: u64,
    log: PathBuf,
    /// The last non-empty line of its log.
    last_line: Option<String>,
}

impl ExternalStatus {
    /// Reads it from a run; `None` for the built-in trainer.
    pub fn of(run_dir: &RunDir, state: &RunState) -> Option<ExternalStatus> {
        let row = state.generations.last()?;
        let call = row.call.clone()?;
        let log = |rank| run_dir.path().join(files::rank_log(row.number, rank));
        let rank = |rank| Rank {
            rank,
            last_line: last_line(&log(rank)),
            log: log(rank),
        };
        Some(ExternalStatus {
            command: call.command,
            checkpoint_dir: call.checkpoint_dir,
            checkpoint: call.checkpoint,
            ranks: (0..row.world).map(rank).collect(),
        })
    }

    /// Prints it as lines of text.
    pub fn print(&self) -> Result<(), Unprinted> {
        line(format_args!("  command     {}", self.command.join(" ")))?;
        match &self.checkpoint {
            Some(from) => line(format_args!("  resumed     {}", from.display()))?,
            None => line(format_args!(
                "  started     from the beginning; checkpoints are expected in {}",
                self.checkpoint_dir.display()
            ))?,
        }
        for rank in &self.ranks {
            let text = rank.last_line.as_deref().unwrap_or("(no output yet)");
            line(format_args!("  rank {:<6} {text}", rank.rank))?;
        }
        match self.ranks.first().and_then(|rank| rank.log.parent()) {
            Some(logs) => line(format_args!("  logs        {}", logs.display())),
            None => Ok(()),
        }
    }
}

/// The last line of a log, as a terminal shows it.
fn last_line(log: &Path) -> Option<String> {
    let lines = last_lines(log);
    let lines = lines.lines().rev().map(shown);
    lines.into_iter().find(|line| !line.trim().is_empty())
}
