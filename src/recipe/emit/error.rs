//! Why a plan cannot be written in some form.

use super::edit::EditError;
use super::launcher::LaunchError;
use crate::recipe::dialect::Dialect;

/// A plan that cannot be written in the form asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EmitError {
    /// The dialect has no keys for the numbers.
    #[error(
        "a plan cannot be written back as {dialect} {form} (`--emit args` and `--emit env` write its numbers)"
    )]
    NoForm {
        /// The recipe's dialect.
        dialect: Dialect,
        /// What was asked for.
        form: &'static str,
    },
    /// The job has no such config.
    #[error(
        "the job has no DeepSpeed config of its own to write (`--emit args` gives the trainer's numbers)"
    )]
    NoDeepspeed,
    /// The launcher cannot be told the plan's world.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// Nothing that accelerate starts by itself.
    #[error(
        "`distributed_type: MULTI_CPU` starts one process, and the plan has {world} (give `mpirun_config`, with which it starts `num_processes`)"
    )]
    Unstarted {
        /// Devices.
        world: u64,
    },
    /// Pipeline stages, for which a new accelerate config has no key.
    #[error(
        "an accelerate config made anew has no place for {stages} pipeline stages (launch with a `MEGATRON_LM` config of your own, and name it by `--accelerate`)"
    )]
    Pipeline {
        /// Stages.
        stages: u64,
    },
    /// The accumulation stands in `accelerator_config`, beside which no argument may say another.
    #[error(
        "the accumulation is `{key}` in `{file}`, and the trainer refuses another beside it (write `gradient_accumulation_steps` there or in the recipe instead)"
    )]
    NumSteps {
        /// The key.
        key: &'static str,
        /// Where it stands.
        file: String,
    },
    /// The numbers of a tree were typed: no file of it changes.
    #[error(
        "what changes in the tree was typed: {changes} (`--emit args` writes all that is to be typed)"
    )]
    Typed {
        /// What becomes of each.
        changes: String,
    },
    /// The numbers of a tree stand in several of its files.
    #[error(
        "the numbers stand in several files of the tree, and one is written: {changes} (change them there, or type what `--emit args` writes)"
    )]
    Scattered {
        /// What becomes of each.
        changes: String,
    },
    /// A number of a tree is made of other values.
    #[error(
        "`{key}` is `{text}` in `{file}`, which other values decide (write the number there, or type what `--emit args` writes)"
    )]
    Interpolated {
        /// The key.
        key: String,
        /// What stands there.
        text: String,
        /// Where.
        file: String,
    },
    /// What is written into the command changes what else it says.
    #[error(
        "with these numbers in it the command says something else too ({numbers}: write them there yourself)"
    )]
    Misread {
        /// The processes to start, and what is to be typed.
        numbers: String,
    },
    /// The text cannot be changed in place.
    #[error(transparent)]
    Edit(#[from] EditError),
}
