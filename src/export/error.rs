//! Reasons for which a plan cannot be written in a form.

use super::edit::EditError;
use super::launcher::LaunchError;
use crate::recipe::schema::dialect::Dialect;

/// A plan that cannot be written in the form asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EmitError {
    /// The dialect has no keys for the numbers.
    #[error(
        "a plan cannot be written back as {dialect} {form} (`--emit args` and `--emit env` write its numbers)"
    )]
    NoForm {
        dialect: Dialect,
        /// The form that was asked for.
        form: &'static str,
    },
    /// The job names no DeepSpeed config.
    #[error("the job names no DeepSpeed config (`--emit args` writes the trainer's arguments)")]
    NoDeepspeed,
    /// The launcher cannot start the plan's world.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// accelerate starts one process for this type without `mpirun_config`.
    #[error(
        "`distributed_type: MULTI_CPU` starts one process, and the plan has {world} (add `mpirun_config`: with it accelerate starts `num_processes`)"
    )]
    Unstarted {
        /// World size, in devices.
        world: u64,
    },
    /// Pipeline stages, for which a new accelerate config has no key.
    #[error(
        "a new accelerate config has no key for {stages} pipeline stages (launch with a `MEGATRON_LM` config and name it with `--accelerate`)"
    )]
    Pipeline { stages: u64 },
    /// `accelerator_config` holds the accumulation, and upstream refuses the argument beside it.
    #[error(
        "the accumulation is `{key}` in `{file}`, and the trainer refuses a second one (replace that key by `gradient_accumulation_steps`)"
    )]
    NumSteps {
        key: &'static str,
        /// The file that holds the key.
        file: String,
    },
    /// Overrides on the command line hold the numbers, so no file of the tree changes.
    #[error(
        "the command line overrides the numbers that change: {changes} (`--emit args` writes all of them as overrides)"
    )]
    Typed {
        /// Each override and its new text.
        changes: String,
    },
    /// Several files of the tree hold the numbers.
    #[error(
        "several files of the tree hold the numbers, and only one file can be written: {changes} (edit these files, or pass the output of `--emit args`)"
    )]
    Scattered {
        /// Each key, its file and its new value.
        changes: String,
    },
    /// A number of the tree is an expression over other values.
    #[error(
        "`{key}` is `{text}` in `{file}`, an expression over other values (write the number there, or pass the output of `--emit args`)"
    )]
    Interpolated {
        key: String,
        /// The expression, as the file spells it.
        text: String,
        file: String,
    },
    /// The numbers, written into the command, change another part of its meaning.
    #[error(
        "these numbers change another part of the command's meaning ({numbers}: write them there by hand)"
    )]
    Misread {
        /// The processes to start and the arguments to type.
        numbers: String,
    },
    /// A text that cannot be changed in place.
    #[error(transparent)]
    Edit(#[from] EditError),
}
