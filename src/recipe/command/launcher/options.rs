//! The options that launchers have, and those that stand before a program.
//!
//! Sources: those of [`super`].

use crate::recipe::command::words::{Unsaid, Word};
use crate::recipe::source::Span;

/// An option of a launcher.
#[derive(Debug, Clone)]
pub(in crate::recipe) struct Opt {
    /// Its name, with `_` for every `-`.
    pub name: String,
    /// Where it stands.
    pub at: Span,
    /// Its value; `None` for switches.
    pub value: Option<Word>,
}

/// Options of a launcher that stand without a value.
pub(super) struct Options {
    switches: &'static [&'static str],
    /// Options with a value; empty: all others have one.
    valued: &'static [&'static str],
}

pub(super) const TORCHRUN: Options = Options {
    switches: &[
        "standalone",
        "no_python",
        "module",
        "m",
        "run_path",
        "use_env",
        "virtual_local_rank",
    ],
    valued: &[
        "nnodes",
        "nproc_per_node",
        "node_rank",
        "rdzv_backend",
        "rdzv_endpoint",
        "rdzv_id",
        "rdzv_conf",
        "max_restarts",
        "monitor_interval",
        "start_method",
        "event_log_handler",
        "role",
        "log_dir",
        "r",
        "redirects",
        "t",
        "tee",
        "local_ranks_filter",
        "master_addr",
        "master_port",
        "local_addr",
        "logs_specs",
        "numa_binding",
        "duplicate_stdout_filters",
        "duplicate_stderr_filters",
        "signals_to_handle",
    ],
};

pub(super) const DEEPSPEED: Options = Options {
    switches: &[
        "no_python",
        "no_local_rank",
        "module",
        "save_pid",
        "force_multi",
        "no_ssh_check",
        "elastic_training",
        "bind_cores_to_rank",
        "no_ssh",
        "enable_each_rank_log",
    ],
    valued: &[
        "hostfile",
        "H",
        "include",
        "i",
        "exclude",
        "e",
        "num_nodes",
        "min_elastic_nodes",
        "max_elastic_nodes",
        "num_gpus",
        "master_port",
        "master_addr",
        "node_rank",
        "launcher",
        "launcher_args",
        "ssh_port",
        "autotuning",
        "venv_script",
        "bind_core_list",
        "log_level",
    ],
};

pub(super) const ACCELERATE: Options = Options {
    switches: &[
        "quiet",
        "q",
        "cpu",
        "multi_gpu",
        "tpu",
        "enable_cpu_affinity",
        "dynamo_use_fullgraph",
        "dynamo_use_dynamic",
        "dynamo_use_regional_compilation",
        "use_deepspeed",
        "use_fsdp",
        "use_parallelism_config",
        "use_megatron_lm",
        "same_network",
        "module",
        "m",
        "no_python",
        "tpu_cluster",
        "no_tpu_cluster",
        "tpu_use_sudo",
        "downcast_bf16",
        "fp8_use_autocast_during_eval",
        "debug",
    ],
    valued: &[],
};

pub(super) const PYTHON: Options = Options {
    switches: &[
        "u", "O", "OO", "B", "E", "I", "s", "S", "v", "q", "b", "d", "i", "x", "P",
    ],
    valued: &["X", "W", "m"],
};

pub(super) const SPAWN: Options = Options {
    switches: &["use_mpi", "use_deepspeed", "use_env"],
    valued: &[],
};

/// The options of a launcher.
pub(super) struct Given<'w> {
    /// In the order of writing.
    pub options: Vec<Opt>,
    /// What may be more of them.
    pub unsaid: Option<&'w Word>,
    /// What follows them.
    pub rest: &'w [Word],
}

/// The options at the start of `words`. A word that may be any number of words is taken for further
/// ones, and not for the program.
pub(super) fn options<'w>(words: &'w [Word], known: &Options) -> Given<'w> {
    let mut found = Vec::new();
    // The first of such words, and the last with as many options as stood before it.
    let mut unsaid: Option<(&Word, &[Word], usize)> = None;
    let mut rest = words;
    while let Some((word, after)) = rest.split_first() {
        if word.unsaid() == Some(Unsaid::Number) && !after.is_empty() {
            let first = unsaid.map_or(word, |(first, ..)| first);
            unsaid = Some((first, rest, found.len()));
            rest = after;
            continue;
        }
        let Some((name, tied)) = word.option() else {
            break;
        };
        let switch = known.switches.contains(&name.as_str());
        if !switch && !known.valued.is_empty() && !known.valued.contains(&name.as_str()) {
            break;
        }
        rest = after;
        let value = match tied {
            Some(value) => Some(value),
            None if switch => None,
            None => rest.split_first().map(|(value, after)| {
                rest = after;
                value.clone()
            }),
        };
        let at = word.span;
        found.push(Opt { name, at, value });
    }
    // Arguments come next: it is the program itself that is not said.
    let mut hidden = unsaid.map(|(first, ..)| first);
    if let Some((first, last, before)) = unsaid
        && rest.first().is_none_or(|word| word.text.starts_with('-'))
    {
        found.truncate(before);
        hidden = Some(first).filter(|first| first.span != last[0].span);
        rest = last;
    }
    Given {
        options: found,
        unsaid: hidden,
        rest,
    }
}

/// The option that counts of those with a name: the last one.
pub(in crate::recipe::command) fn option<'o>(
    options: &'o [Opt],
    names: &[&str],
) -> Option<&'o Opt> {
    let mut options = options.iter().rev();
    options.find(|option| names.contains(&option.name.as_str()))
}

pub(super) fn value<'o>(options: &'o [Opt], names: &[&str]) -> Option<&'o Word> {
    option(options, names)?.value.as_ref()
}
