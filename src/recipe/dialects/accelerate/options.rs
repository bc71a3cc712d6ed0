//! The options of `accelerate launch` with their types, their defaults and their variables.
//!
//! Source: accelerate 1.15.0 `commands/launch.py` (`launch_command_parser`), `utils/launch.py`
//! (`prepare_*_env`).

use Kind::{Bool, Float, Int, OneOf, Switch, Text, Truth};
use Pass::{Decides, Lower, Other, Refused, Set};

use super::world::is_switch;
use crate::recipe::schema::launch::Opt;
use crate::recipe::schema::spec::MASTER_PORT;
use crate::recipe::schema::tree::{Given, Tree};
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;

/// How `accelerate launch` converts the value of an option.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    /// No value: true.
    Switch,
    Text,
    OneOf(&'static [&'static str]),
    Int,
    Float,
    /// Python's `bool`: every text but the empty one is true.
    Bool,
    /// `yes` and the like are 1, `no` and the like are 0.
    Truth,
}

/// How a setting reaches the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pass {
    /// The variable has its text.
    Set(&'static str),
    /// As [`Pass::Set`], in lower case.
    Lower(&'static str),
    /// The reason for which Evenkeel refuses it, and the way out.
    Refused(&'static str, &'static str),
    /// The variable depends on it in another way.
    Decides(&'static str),
    /// No variable depends on it.
    Other,
}

/// Name, type, default as YAML, and variable.
pub(crate) type Known = (&'static str, Kind, &'static str, Pass);

/// Switches that Evenkeel replaces: processes, types, rendezvous, restarts and logs. A single letter follows one dash.
pub(crate) const SWITCHES: Words = Words(
    "quiet q module m no_python cpu multi_gpu use_deepspeed use_fsdp use_parallelism_config \
     use_megatron_lm same_network h help",
);

/// As [`SWITCHES`], with a value.
pub(crate) const VALUED: Words = Words(
    "config_file num_processes num_machines machine_rank main_process_ip tee \
     t log_dir rdzv_backend rdzv_conf max_restarts monitor_interval deepspeed_hostfile \
     deepspeed_multinode_launcher",
);

/// Options that TRL's command line passes to `accelerate launch`. No trainer has them (TRL f2cd577 `cli/main.py`).
const TRL_PASSES_ON: Words = Words(
    "config_file num_processes num_machines machine_rank main_process_ip main_process_port \
     mixed_precision gpu_ids zero_stage deepspeed_config_file fsdp_version \
     fsdp_sharding_strategy fsdp_reshard_after_forward",
);

/// TRL's option for the accelerate config: a file, or the name of a config that TRL ships.
pub(crate) const TRL_CONFIG: &str = "accelerate_config";

/// Whether TRL's command line passes a key of the recipe to its launcher.
pub(crate) fn is_launcher_key(name: &str) -> bool {
    name == TRL_CONFIG || TRL_PASSES_ON.has(name)
}

/// The options that a command or a recipe states, as keys of the config that they override; switches as `--NAME`.
/// `dashes`: what precedes an option's name in messages.
pub(crate) fn tree(options: &[Opt], dashes: &str, span: Span) -> Node {
    let mut tree = Tree::new(span);
    for Opt { name, at, value } in options {
        let key = format!("{dashes}{name}");
        if is_switch(name) {
            tree.plain(&key, &Given::new(&key, true, *at));
        } else if let (Some(value), Some(path)) = (value, config_key(name)) {
            // An unresolved count stays unset; the user gives it with `--recipe-gpus`.
            if COUNTS.has(name) && !value.unresolved.is_empty() {
                continue;
            }
            tree.put(&path, &key, Node::argument(&value.text, value.span));
        }
    }
    tree.into_node()
}

/// Options for the world size and this machine's rank.
const COUNTS: Words = Words("num_processes num_machines machine_rank");

/// The key of a config that an option with a value overrides.
fn config_key(name: &str) -> Option<String> {
    const PREFIXES: [(&str, &str); 5] = [
        ("fsdp_", "fsdp_config"),
        ("parallelism_config_", "parallelism_config"),
        ("megatron_lm_", "megatron_lm_config"),
        ("deepspeed_", "deepspeed_config"),
        ("mpirun_", "mpirun_config"),
    ];
    let part = match name {
        "num_processes" | "num_machines" | "mixed_precision" | "gpu_ids" | "main_process_ip" => {
            return Some(name.to_owned());
        }
        "zero_stage" | "gradient_accumulation_steps" => "deepspeed_config",
        name => {
            let mut prefixes = PREFIXES.iter();
            prefixes.find(|(prefix, _)| name.starts_with(prefix))?.1
        }
    };
    Some(format!("{part}.{name}"))
}

const FILTER: Pass = Refused(
    "selects devices, but evenkeel starts a rank for each device of the plan",
    "remove it, and set CUDA_VISIBLE_DEVICES or `--gpus`",
);

#[rustfmt::skip]
pub(crate) const OPTIONS: &[Known] = &[
    ("debug", Switch, "", Decides("ACCELERATE_DEBUG_MODE")),
    ("tpu", Switch, "false", Other),
    ("mixed_precision", OneOf(&["no", "fp16", "bf16", "fp8"]), "", Decides("ACCELERATE_MIXED_PRECISION")),
    ("num_cpu_threads_per_process", Int, "", Set("OMP_NUM_THREADS")),
    ("main_process_port", Int, "", Set(MASTER_PORT)),
    ("enable_cpu_affinity", Switch, "false", Decides("ACCELERATE_CPU_AFFINITY")),
    ("dynamo_backend", OneOf(&["no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt", "onnxrt", "tensorrt", "tvm"]), "", Decides("ACCELERATE_DYNAMO_BACKEND")),
    ("dynamo_mode", OneOf(&["default", "reduce-overhead", "max-autotune"]), "default", Set("ACCELERATE_DYNAMO_MODE")),
    ("dynamo_use_fullgraph", Switch, "false", Set("ACCELERATE_DYNAMO_USE_FULLGRAPH")),
    ("dynamo_use_dynamic", Switch, "false", Set("ACCELERATE_DYNAMO_USE_DYNAMIC")),
    ("dynamo_use_regional_compilation", Switch, "false", Set("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION")),
    ("gpu_ids", Text, "", Other),
    ("role", Text, "default", Other),
    ("tpu_cluster", Switch, "false", Other),
    ("no_tpu_cluster", Switch, "false", Other),
    ("tpu_use_sudo", Switch, "false", Other),
    ("vm", Text, "", Other),
    ("env", Text, "", Other),
    ("main_training_function", Text, "", Other),
    ("downcast_bf16", Switch, "false", Other),
    ("deepspeed_config_file", Text, "", Set("ACCELERATE_DEEPSPEED_CONFIG_FILE")),
    ("zero_stage", Int, "", Set("ACCELERATE_DEEPSPEED_ZERO_STAGE")),
    ("offload_optimizer_device", Text, "", Lower("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE")),
    ("offload_param_device", Text, "", Lower("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")),
    ("offload_optimizer_nvme_path", Text, "", Other),
    ("offload_param_nvme_path", Text, "", Other),
    ("gradient_accumulation_steps", Int, "", Set("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")),
    ("gradient_clipping", Float, "", Lower("ACCELERATE_GRADIENT_CLIPPING")),
    ("zero3_init_flag", Text, "", Lower("ACCELERATE_DEEPSPEED_ZERO3_INIT")),
    ("zero3_save_16bit_model", Text, "", Lower("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL")),
    ("deepspeed_exclusion_filter", Text, "", FILTER),
    ("deepspeed_inclusion_filter", Text, "", FILTER),
    ("deepspeed_moe_layer_cls_names", Text, "", Set("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")),
    ("fsdp_version", OneOf(&["1", "2"]), "1", Set("FSDP_VERSION")),
    ("fsdp_offload_params", Text, "false", Lower("FSDP_OFFLOAD_PARAMS")),
    ("fsdp_min_num_params", Int, "100000000", Set("FSDP_MIN_NUM_PARAMS")),
    ("fsdp_sharding_strategy", Text, "FULL_SHARD", Set("FSDP_SHARDING_STRATEGY")),
    ("fsdp_reshard_after_forward", Text, "true", Lower("FSDP_RESHARD_AFTER_FORWARD")),
    ("fsdp_auto_wrap_policy", Text, "", Set("FSDP_AUTO_WRAP_POLICY")),
    ("fsdp_transformer_layer_cls_to_wrap", Text, "", Set("FSDP_TRANSFORMER_CLS_TO_WRAP")),
    ("fsdp_backward_prefetch", Text, "", Set("FSDP_BACKWARD_PREFETCH")),
    ("fsdp_state_dict_type", Text, "", Set("FSDP_STATE_DICT_TYPE")),
    ("fsdp_forward_prefetch", Text, "false", Lower("FSDP_FORWARD_PREFETCH")),
    ("fsdp_use_orig_params", Text, "true", Lower("FSDP_USE_ORIG_PARAMS")),
    ("fsdp_cpu_ram_efficient_loading", Text, "true", Lower("FSDP_CPU_RAM_EFFICIENT_LOADING")),
    ("fsdp_sync_module_states", Text, "true", Lower("FSDP_SYNC_MODULE_STATES")),
    ("fsdp_activation_checkpointing", Text, "false", Lower("FSDP_ACTIVATION_CHECKPOINTING")),
    ("fsdp_activation_checkpointing_offload", Text, "false", Lower("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")),
    ("megatron_lm_tp_degree", Int, "1", Set("MEGATRON_LM_TP_DEGREE")),
    ("megatron_lm_use_custom_fsdp", Bool, "false", Set("MEGATRON_LM_USE_CUSTOM_FSDP")),
    ("megatron_lm_no_load_optim", Bool, "false", Set("MEGATRON_LM_NO_LOAD_OPTIM")),
    ("megatron_lm_eod_mask_loss", Bool, "false", Set("MEGATRON_LM_EOD_MASK_LOSS")),
    ("megatron_lm_overlap_cpu_optimizer_d2h_h2d", Bool, "false", Set("MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D")),
    ("megatron_lm_no_save_optim", Bool, "false", Set("MEGATRON_LM_NO_SAVE_OPTIM")),
    ("megatron_lm_optimizer_cpu_offload", Bool, "false", Set("MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD")),
    ("megatron_lm_use_precision_aware_optimizer", Bool, "false", Set("MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER")),
    ("megatron_lm_decoder_last_pipeline_num_layers", Int, "", Set("MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS")),
    ("megatron_lm_pp_degree", Int, "1", Set("MEGATRON_LM_PP_DEGREE")),
    ("megatron_lm_num_micro_batches", Int, "", Set("MEGATRON_LM_NUM_MICRO_BATCHES")),
    ("megatron_lm_sequence_parallelism", Text, "", Set("MEGATRON_LM_SEQUENCE_PARALLELISM")),
    ("megatron_lm_recompute_activations", Text, "", Set("MEGATRON_LM_RECOMPUTE_ACTIVATIONS")),
    ("megatron_lm_use_distributed_optimizer", Text, "", Set("MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER")),
    ("megatron_lm_gradient_clipping", Float, "1.0", Set("MEGATRON_LM_GRADIENT_CLIPPING")),
    ("megatron_lm_recompute_granularity", Text, "", Set("MEGATRON_LM_RECOMPUTE_GRANULARITY")),
    ("megatron_lm_recompute_method", Text, "", Set("MEGATRON_LM_RECOMPUTE_METHOD")),
    ("megatron_lm_recompute_num_layers", Int, "", Set("MEGATRON_LM_RECOMPUTE_NUM_LAYERS")),
    ("megatron_lm_attention_backend", Text, "", Set("MEGATRON_LM_ATTENTION_BACKEND")),
    ("megatron_lm_expert_model_parallel_size", Int, "", Set("MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE")),
    ("megatron_lm_context_parallel_size", Int, "", Set("MEGATRON_LM_CONTEXT_PARALLEL_SIZE")),
    ("megatron_lm_attention_dropout", Float, "", Set("MEGATRON_LM_ATTENTION_DROPOUT")),
    ("megatron_lm_hidden_dropout", Float, "", Set("MEGATRON_LM_HIDDEN_DROPOUT")),
    ("megatron_lm_attention_softmax_in_fp32", Text, "", Set("MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32")),
    ("megatron_lm_expert_tensor_parallel_size", Int, "", Set("MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE")),
    ("megatron_lm_calculate_per_token_loss", Text, "", Set("MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS")),
    ("megatron_lm_use_rotary_position_embeddings", Text, "", Set("MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS")),
    ("fp8_backend", OneOf(&["ao", "te", "msamp"]), "", Set("ACCELERATE_FP8_BACKEND")),
    ("fp8_use_autocast_during_eval", Switch, "false", Set("ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL")),
    ("fp8_margin", Int, "0", Set("ACCELERATE_FP8_MARGIN")),
    ("fp8_interval", Int, "1", Set("ACCELERATE_FP8_INTERVAL")),
    ("fp8_format", OneOf(&["HYBRID", "E4M3", "E5M2"]), "HYBRID", Set("ACCELERATE_FP8_FORMAT")),
    ("fp8_amax_history_len", Int, "1024", Set("ACCELERATE_FP8_AMAX_HISTORY_LEN")),
    ("fp8_amax_compute_algo", OneOf(&["max", "most_recent"]), "most_recent", Set("ACCELERATE_FP8_AMAX_COMPUTE_ALGO")),
    ("fp8_override_linear_precision", OneOf(&["false,false,false"]), "false,false,false", Other),
    ("fp8_opt_level", OneOf(&["O1", "O2"]), "O2", Set("ACCELERATE_FP8_OPT_LEVEL")),
    ("fp8_enable_fsdp_float8_all_gather", Truth, "true", Set("ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER")),
    ("fp8_pad_inner_dim", Truth, "true", Set("ACCELERATE_FP8_PAD_INNER_DIM")),
    ("aws_access_key_id", Text, "", Other),
    ("aws_secret_access_key", Text, "", Other),
    ("mpirun_hostfile", Text, "", Refused("starts the processes with mpirun, but evenkeel starts them", "remove it")),
    ("parallelism_config_dp_replicate_size", Int, "1", Set("PARALLELISM_CONFIG_DP_REPLICATE_SIZE")),
    ("parallelism_config_dp_shard_size", Int, "1", Set("PARALLELISM_CONFIG_DP_SHARD_SIZE")),
    ("parallelism_config_tp_size", Int, "1", Set("PARALLELISM_CONFIG_TP_SIZE")),
    ("parallelism_config_cp_size", Int, "1", Set("PARALLELISM_CONFIG_CP_SIZE")),
    ("parallelism_config_cp_backend", OneOf(&["torch"]), "torch", Set("PARALLELISM_CONFIG_CP_BACKEND")),
    ("parallelism_config_cp_comm_strategy", Text, "allgather", Set("PARALLELISM_CONFIG_CP_COMM_STRATEGY")),
    ("parallelism_config_sp_size", Int, "1", Set("PARALLELISM_CONFIG_SP_SIZE")),
    ("parallelism_config_sp_backend", OneOf(&["deepspeed"]), "deepspeed", Set("PARALLELISM_CONFIG_SP_BACKEND")),
    ("parallelism_config_sp_seq_length", Text, "None", Set("PARALLELISM_CONFIG_SP_SEQ_LENGTH")),
    ("parallelism_config_sp_seq_length_is_variable", Bool, "true", Set("PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE")),
    ("parallelism_config_sp_attn_implementation", Text, "sdpa", Set("PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION")),
];

/// Keys of the config that are no options.
#[rustfmt::skip]
pub(crate) const KEYS_ONLY: &[Known] = &[
    ("use_cpu", Switch, "", Decides("ACCELERATE_USE_CPU")),
    ("fsdp_ignored_modules", Text, "", Set("FSDP_IGNORED_MODULES")),
    ("fp8_use_mxfp8_block_scaling", Text, "", Set("ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING")),
];
