//! What runs a recipe. Command line, local launcher, submitter and controller ask [`Runner::of`], and every plan
//! request carries the answer.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::recipe::Spec;
use crate::util::format;

/// The devices of the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// On a share of the processor's cores.
    #[default]
    Cpu,
    /// On one NVIDIA GPU for each rank.
    Cuda,
}

/// What runs a recipe, on which devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Runner {
    /// Undecided: only `plan` and `check` ask for the rules that hold for every runner.
    Any { device: DeviceKind },
    /// The user's program.
    External { device: DeviceKind },
    /// Evenkeel's trainer.
    BuiltIn {
        device: DeviceKind,
        /// Memory limit of a rank, bytes; `None`: only that of its device.
        rank_memory: Option<u64>,
    },
}

/// What the user asked to run a recipe with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskedRunner {
    /// `plan` and `check`: the program that the recipe names, else any runner.
    Any,
    /// `launch`: the program that the recipe names, else the built-in trainer.
    Launch,
    /// The built-in trainer, whatever the recipe names.
    BuiltIn,
    /// An external trainer, also if the recipe names none.
    External,
}

impl Runner {
    /// The runner of a recipe. `rank_memory`: the limit of a rank of the built-in trainer, bytes.
    pub fn of(
        spec: &Spec,
        asked: AskedRunner,
        device: DeviceKind,
        rank_memory: Option<u64>,
    ) -> Runner {
        match asked {
            AskedRunner::External => Runner::External { device },
            AskedRunner::Any | AskedRunner::Launch if spec.trainer.is_external() => {
                Runner::External { device }
            }
            AskedRunner::Any => Runner::Any { device },
            AskedRunner::Launch | AskedRunner::BuiltIn => Runner::BuiltIn {
                device,
                rank_memory,
            },
        }
    }

    pub fn device(self) -> DeviceKind {
        match self {
            Runner::Any { device }
            | Runner::External { device }
            | Runner::BuiltIn { device, .. } => device,
        }
    }

    pub fn is_external(self) -> bool {
        matches!(self, Runner::External { .. })
    }

    pub fn is_built_in(self) -> bool {
        matches!(self, Runner::BuiltIn { .. })
    }

    /// Memory limit of a rank of the built-in trainer, bytes.
    pub fn rank_memory(self) -> Option<u64> {
        match self {
            Runner::BuiltIn { rank_memory, .. } => rank_memory,
            Runner::Any { .. } | Runner::External { .. } => None,
        }
    }
}

impl DeviceKind {
    /// The count with its unit: `1 GPU`, `8 GPUs`, `2 processes`.
    pub fn count(self, count: u64) -> String {
        format::count(count, self.unit())
    }

    /// The unit in singular or plural.
    pub fn noun(self, count: u64) -> String {
        format::noun(count, self.unit())
    }

    fn unit(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "process",
            DeviceKind::Cuda => "GPU",
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Cuda => "cuda",
        })
    }
}

/// The memory of a machine's devices, which a plan divides by its ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceMemory {
    /// Bytes of every GPU.
    Each(u64),
    /// Bytes that all ranks on the CPU share.
    Shared(u64),
}

impl DeviceMemory {
    /// Bytes of a rank in a world of this size.
    pub fn of_rank(self, world: u64) -> u64 {
        match self {
            DeviceMemory::Each(bytes) => bytes,
            DeviceMemory::Shared(bytes) => bytes / world.max(1),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_of_a_recipe_runs_it_unless_another_runner_is_asked_for() {
        let device = DeviceKind::Cuda;
        let plain = Spec::default();
        let mut program = Spec::default();
        program.trainer.command = vec!["train.sh".to_owned()];
        let limit = Some(1 << 30);
        let of = |spec, asked| Runner::of(spec, asked, device, limit);
        let external = Runner::External { device };
        let built_in = Runner::BuiltIn {
            device,
            rank_memory: limit,
        };
        assert_eq!(of(&plain, AskedRunner::Any), Runner::Any { device });
        assert_eq!(of(&plain, AskedRunner::Launch), built_in);
        assert_eq!(of(&plain, AskedRunner::External), external);
        for asked in [AskedRunner::Any, AskedRunner::Launch, AskedRunner::External] {
            assert_eq!(of(&program, asked), external);
        }
        assert_eq!(of(&program, AskedRunner::BuiltIn), built_in);
    }

    #[test]
    fn ranks_on_the_cpu_share_its_memory() {
        assert_eq!(DeviceMemory::Shared(12).of_rank(3), 4);
        assert_eq!(DeviceMemory::Each(12).of_rank(3), 12);
    }
}
