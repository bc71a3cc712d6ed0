//! The options of each launcher.
//!
//! Sources: torch 2.9 `distributed/run.py`, `distributed/launch.py`; DeepSpeed edaa722
//! `launcher/runner.py`. `accelerate/options.rs` has those of `accelerate launch`.

use crate::recipe::dialects::accelerate::options::{self, Kind, Known, OPTIONS};
use crate::recipe::syntax::words::Words;

/// The options of a program that starts another one.
pub(super) struct Options {
    /// The program's name in messages about unknown options. `None`: unknown options are not checked.
    pub who: Option<&'static str>,
    /// Options without a value. A single letter follows one dash.
    pub switches: Words,
    /// Options with a value.
    pub valued: Words,
    /// Further options, with their types.
    pub typed: &'static [Known],
    /// Each option may also be written with `-` for `_`.
    pub dashes: bool,
    /// A unique prefix of a name is accepted (`argparse`, `allow_abbrev`).
    pub cut_short: bool,
}

impl Options {
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        let typed = self.typed.iter().map(|(name, ..)| *name);
        self.switches.iter().chain(self.valued.iter()).chain(typed)
    }

    pub fn takes_value(&self, name: &str) -> bool {
        let mut typed = self.typed.iter();
        self.valued.has(name)
            || typed.any(|(known, kind, ..)| *known == name && !matches!(kind, Kind::Switch))
    }
}

pub(super) const TORCHRUN: Options = Options {
    who: Some("torchrun"),
    switches: Words("h help standalone no_python module m run_path virtual_local_rank"),
    valued: Words(
        "nnodes nproc_per_node node_rank rdzv_backend rdzv_endpoint rdzv_id rdzv_conf \
         max_restarts monitor_interval start_method event_log_handler role log_dir r redirects t \
         tee local_ranks_filter master_addr master_port local_addr logs_specs numa_binding \
         duplicate_stdout_filters duplicate_stderr_filters signals_to_handle",
    ),
    typed: &[],
    dashes: true,
    cut_short: true,
};

/// `python -m torch.distributed.launch`, with one more switch.
pub(super) const TORCH_LAUNCH: Options = Options {
    who: Some("torch.distributed.launch"),
    switches: Words("h help standalone no_python module m run_path virtual_local_rank use_env"),
    ..TORCHRUN
};

pub(super) const DEEPSPEED: Options = Options {
    who: Some("DeepSpeed"),
    switches: Words(
        "h help no_python no_local_rank module save_pid force_multi no_ssh_check \
         elastic_training bind_cores_to_rank no_ssh quiet q",
    ),
    valued: Words(
        "hostfile H include i exclude e num_nodes min_elastic_nodes max_elastic_nodes num_gpus \
         num_accelerators master_port master_addr node_rank launcher launcher_args ssh_port \
         autotuning venv_script bind_core_list log_level enable_each_rank_log comment account",
    ),
    typed: &[],
    dashes: false,
    cut_short: true,
};

pub(super) const ACCELERATE: Options = Options {
    who: Some("accelerate launch"),
    switches: options::SWITCHES,
    valued: options::VALUED,
    typed: OPTIONS,
    dashes: true,
    cut_short: false,
};

pub(super) const PYTHON: Options = Options {
    who: None,
    switches: Words("u O B E I s S v q b d i x P"),
    valued: Words("X W m"),
    typed: &[],
    dashes: false,
    cut_short: false,
};

/// Source: Slurm 25.05 `srun(1)`. The options that choose the allocation, its devices, the tasks and the output.
pub(super) const SRUN: Options = Options {
    who: Some("srun"),
    switches: Words(
        "l label u unbuffered K kill_on_bad_exit v verbose Q quiet O overcommit overlap exact exclusive",
    ),
    valued: Words(
        "N nodes n ntasks ntasks_per_node J job_name A account p partition q qos t time o output e error w \
         nodelist c cpus_per_task G gpus gpus_per_node gpus_per_task gres mem mpi jobid cpu_bind gpu_bind \
         comment",
    ),
    typed: &[],
    dashes: true,
    cut_short: false,
};

/// The spawn scripts among the examples of transformers and optimum-habana.
pub(super) const SPAWN: Options = Options {
    who: None,
    switches: Words("use_mpi use_deepspeed use_env"),
    valued: Words("world_size num_cores hostfile master_port"),
    typed: &[],
    dashes: true,
    cut_short: true,
};
