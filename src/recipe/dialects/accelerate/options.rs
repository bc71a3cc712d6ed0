//! The options of `accelerate launch` with their types and defaults.
//!
//! Source: accelerate 1.15.0 `commands/launch.py` (`launch_command_parser`).

use Kind::{Bool, Float, Int, OneOf, Switch, Text, Truth, Truths};

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
    /// Three truth values, separated by commas.
    Truths,
}

/// Name, type, and default as YAML. A single letter follows one dash.
pub(crate) type Known = (&'static str, Kind, &'static str);

#[rustfmt::skip]
pub(crate) const OPTIONS: &[Known] = &[
    ("config_file", Text, ""),
    ("quiet", Switch, ""),
    ("q", Switch, ""),
    ("module", Switch, ""),
    ("m", Switch, ""),
    ("no_python", Switch, ""),
    ("debug", Switch, ""),
    ("cpu", Switch, "false"),
    ("multi_gpu", Switch, "false"),
    ("tpu", Switch, "false"),
    ("mixed_precision", OneOf(&["no", "fp16", "bf16", "fp8"]), ""),
    ("num_processes", Int, ""),
    ("num_machines", Int, ""),
    ("num_cpu_threads_per_process", Int, ""),
    ("enable_cpu_affinity", Switch, "false"),
    ("dynamo_backend", OneOf(&["no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi", "fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torhchxla_trace_once", "tvm"]), ""),
    ("dynamo_mode", OneOf(&["default", "reduce-overhead", "max-autotune"]), "default"),
    ("dynamo_use_fullgraph", Switch, "false"),
    ("dynamo_use_dynamic", Switch, "false"),
    ("dynamo_use_regional_compilation", Switch, "false"),
    ("use_deepspeed", Switch, "false"),
    ("use_fsdp", Switch, "false"),
    ("use_parallelism_config", Switch, "false"),
    ("use_megatron_lm", Switch, "false"),
    ("gpu_ids", Text, ""),
    ("same_network", Switch, "false"),
    ("machine_rank", Int, ""),
    ("main_process_ip", Text, ""),
    ("main_process_port", Int, ""),
    ("tee", Text, "0"),
    ("t", Text, ""),
    ("log_dir", Text, ""),
    ("role", Text, "default"),
    ("rdzv_backend", Text, "static"),
    ("rdzv_conf", Text, ""),
    ("max_restarts", Int, "0"),
    ("monitor_interval", Float, "0.1"),
    ("tpu_cluster", Switch, "false"),
    ("no_tpu_cluster", Switch, "false"),
    ("tpu_use_sudo", Switch, "false"),
    ("vm", Text, ""),
    ("env", Text, ""),
    ("main_training_function", Text, ""),
    ("downcast_bf16", Switch, "false"),
    ("deepspeed_config_file", Text, ""),
    ("zero_stage", Int, ""),
    ("offload_optimizer_device", Text, ""),
    ("offload_param_device", Text, ""),
    ("offload_optimizer_nvme_path", Text, ""),
    ("offload_param_nvme_path", Text, ""),
    ("gradient_accumulation_steps", Int, ""),
    ("gradient_clipping", Float, ""),
    ("zero3_init_flag", Text, ""),
    ("zero3_save_16bit_model", Text, ""),
    ("deepspeed_hostfile", Text, ""),
    ("deepspeed_exclusion_filter", Text, ""),
    ("deepspeed_inclusion_filter", Text, ""),
    ("deepspeed_multinode_launcher", Text, ""),
    ("deepspeed_moe_layer_cls_names", Text, ""),
    ("fsdp_version", OneOf(&["1", "2"]), "1"),
    ("fsdp_offload_params", Text, "false"),
    ("fsdp_min_num_params", Int, "100000000"),
    ("fsdp_sharding_strategy", Text, "FULL_SHARD"),
    ("fsdp_reshard_after_forward", Text, "true"),
    ("fsdp_auto_wrap_policy", Text, ""),
    ("fsdp_transformer_layer_cls_to_wrap", Text, ""),
    ("fsdp_backward_prefetch", Text, ""),
    ("fsdp_state_dict_type", Text, ""),
    ("fsdp_forward_prefetch", Text, "false"),
    ("fsdp_use_orig_params", Text, "true"),
    ("fsdp_cpu_ram_efficient_loading", Text, "true"),
    ("fsdp_sync_module_states", Text, "true"),
    ("fsdp_activation_checkpointing", Text, "false"),
    ("fsdp_activation_checkpointing_offload", Text, "false"),
    ("megatron_lm_tp_degree", Int, "1"),
    ("megatron_lm_use_custom_fsdp", Bool, "false"),
    ("megatron_lm_no_load_optim", Bool, "false"),
    ("megatron_lm_eod_mask_loss", Bool, "false"),
    ("megatron_lm_overlap_cpu_optimizer_d2h_h2d", Bool, "false"),
    ("megatron_lm_no_save_optim", Bool, "false"),
    ("megatron_lm_optimizer_cpu_offload", Bool, "false"),
    ("megatron_lm_use_precision_aware_optimizer", Bool, "false"),
    ("megatron_lm_decoder_last_pipeline_num_layers", Int, ""),
    ("megatron_lm_pp_degree", Int, "1"),
    ("megatron_lm_num_micro_batches", Int, ""),
    ("megatron_lm_sequence_parallelism", Text, ""),
    ("megatron_lm_recompute_activations", Text, ""),
    ("megatron_lm_use_distributed_optimizer", Text, ""),
    ("megatron_lm_gradient_clipping", Float, "1.0"),
    ("megatron_lm_recompute_granularity", Text, ""),
    ("megatron_lm_recompute_method", Text, ""),
    ("megatron_lm_recompute_num_layers", Int, ""),
    ("megatron_lm_attention_backend", Text, ""),
    ("megatron_lm_expert_model_parallel_size", Int, ""),
    ("megatron_lm_context_parallel_size", Int, ""),
    ("megatron_lm_attention_dropout", Float, ""),
    ("megatron_lm_hidden_dropout", Float, ""),
    ("megatron_lm_attention_softmax_in_fp32", Text, ""),
    ("megatron_lm_expert_tensor_parallel_size", Int, ""),
    ("megatron_lm_calculate_per_token_loss", Text, ""),
    ("megatron_lm_use_rotary_position_embeddings", Text, ""),
    ("fp8_backend", OneOf(&["ao", "te", "msamp"]), ""),
    ("fp8_use_autocast_during_eval", Switch, "false"),
    ("fp8_margin", Int, "0"),
    ("fp8_interval", Int, "1"),
    ("fp8_format", OneOf(&["HYBRID", "E4M3", "E5M2"]), "HYBRID"),
    ("fp8_amax_history_len", Int, "1024"),
    ("fp8_amax_compute_algo", OneOf(&["max", "most_recent"]), "most_recent"),
    ("fp8_override_linear_precision", Truths, "false,false,false"),
    ("fp8_opt_level", OneOf(&["O1", "O2"]), "O2"),
    ("fp8_enable_fsdp_float8_all_gather", Truth, "true"),
    ("fp8_pad_inner_dim", Truth, "true"),
    ("aws_access_key_id", Text, ""),
    ("aws_secret_access_key", Text, ""),
    ("mpirun_hostfile", Text, ""),
    ("parallelism_config_dp_replicate_size", Int, "1"),
    ("parallelism_config_dp_shard_size", Int, "1"),
    ("parallelism_config_tp_size", Int, "1"),
    ("parallelism_config_cp_size", Int, "1"),
    ("parallelism_config_cp_backend", OneOf(&["torch"]), "torch"),
    ("parallelism_config_cp_comm_strategy", Text, "allgather"),
    ("parallelism_config_sp_size", Int, "1"),
    ("parallelism_config_sp_backend", OneOf(&["deepspeed"]), "deepspeed"),
    ("parallelism_config_sp_seq_length", Text, ""),
    ("parallelism_config_sp_seq_length_is_variable", Bool, "true"),
    ("parallelism_config_sp_attn_implementation", Text, "sdpa"),
    ("h", Switch, ""),
    ("help", Switch, ""),
];

/// Options that only older versions have, switches first. The newest refuses them.
pub(crate) const SWITCHES_GONE: [&str; 3] = ["ipex", "use_xpu", "use_mps_device"];
pub(crate) const VALUED_GONE: [&str; 2] = ["fsdp_backward_prefetch_policy", "mpirun_ccl"];

const fn count(switches: bool) -> usize {
    let (mut at, mut found) = (0, 0);
    while at < OPTIONS.len() {
        found += (matches!(OPTIONS[at].1, Switch) == switches) as usize;
        at += 1;
    }
    found
}

const fn names<const N: usize>(switches: bool, gone: &[&'static str]) -> [&'static str; N] {
    let mut names = [""; N];
    let (mut at, mut found) = (0, 0);
    while at < OPTIONS.len() {
        if matches!(OPTIONS[at].1, Switch) == switches {
            names[found] = OPTIONS[at].0;
            found += 1;
        }
        at += 1;
    }
    while found < N {
        names[found] = gone[found - count(switches)];
        found += 1;
    }
    names
}

/// The names of all switches.
pub(crate) const SWITCHES: &[&str] = &names::<{ count(true) + 3 }>(true, &SWITCHES_GONE);
/// The names of all options with a value.
pub(crate) const VALUED: &[&str] = &names::<{ count(false) + 2 }>(false, &VALUED_GONE);
