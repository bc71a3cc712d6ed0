//! What each of the files of a reading is to the job.

use super::source::FileId;
use super::tree::Given;

/// Which file of a job is what; an emitted plan is written into them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    /// The recipe's own file, which may hold a command.
    pub recipe: Option<FileId>,
    /// The file with the command that starts it, and where further arguments may be added in it.
    pub command: Option<(FileId, usize)>,
    /// The accelerate config.
    pub accelerate: Option<FileId>,
    /// The DeepSpeed config, where it is a file of its own.
    pub deepspeed: Option<FileId>,
    /// Those that are read as Hjson.
    pub hjson: Vec<FileId>,
    /// The virtual file that holds what was typed: overrides and flags.
    pub command_line: Option<FileId>,
    /// The batch as a Hydra tree says it.
    pub tree: Option<TreeBatch>,
}

/// The batch as upstream's program reads it out of its Hydra tree, whatever stands over that in
/// Evenkeel's own keys and flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeBatch {
    /// The batch size.
    pub size: Option<Given<i128>>,
    /// Accumulation steps.
    pub accumulation: Option<Given<i128>>,
    /// The size counts the samples of one accumulation step, else those of a whole step.
    pub per_pass: bool,
}
