//! The roles of a job's files.

use super::tree::Given;
use crate::recipe::syntax::source::FileId;

/// The role of each file of a job. An exported plan is written into these files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Files {
    /// The recipe's file, which may hold a command.
    pub recipe: Option<FileId>,
    /// The file with the command, and the byte offset at which arguments may be added.
    pub command: Option<(FileId, usize)>,
    /// The config of `accelerate launch`.
    pub accelerate: Option<FileId>,
    /// The DeepSpeed config, if it is a separate file.
    pub deepspeed: Option<FileId>,
    /// Files that are JSON with comments.
    pub commented: Vec<FileId>,
    /// The virtual file with the command line's overrides and flags.
    pub command_line: Option<FileId>,
    /// The batch of a Hydra tree.
    pub tree: Option<TreeBatch>,
}

/// The batch that the upstream program reads from its Hydra tree, before evenkeel's keys and flags override
/// it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TreeBatch {
    /// Batch size in samples; `per_pass` says of which unit.
    pub size: Option<Given<i128>>,
    pub accumulation: Option<Given<i128>>,
    /// `size` counts the samples of one accumulation step; otherwise those of a whole optimizer step.
    pub per_pass: bool,
}
