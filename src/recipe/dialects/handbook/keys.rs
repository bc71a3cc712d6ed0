//! The keys of alignment-handbook and TRL files, with their types.
//!
//! Names and types are those of the upstream dataclasses, over the versions in use: transformers
//! 4.40.2 to 5.23.0 (`training_args.py`), TRL 0.9.6 to 1.16.0, the last patch of each minor version, and
//! f2cd577 (`trainer/*_config.py`, `scripts/utils.py`), alignment-handbook 925acdf and before 19f0345
//! (`configs.py`), open-r1 1416fa0 (`configs.py`, over its history). The reader accepts recipes of all
//! these versions: `use_liger` (TRL until 0.17) beside `use_liger_kernel`.

use std::collections::{BTreeMap, HashMap};
use std::sync::LazyLock;

use crate::recipe::schema::spec::Objective::{
    self, Cpo, Dpo, Grpo, Kto, LanguageModelling, Orpo, Ppo, Reward, Rloo, Sft,
};
use crate::recipe::syntax::words::Words;

/// The type of an upstream field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Bool,
    Int,
    Float,
    Str,
    /// A list, or a single item in its place.
    List,
    /// A mapping, or text that names a file with one.
    Dict,
    /// More than one of these types.
    Any,
}

/// `TrainingArguments`. A `!` marks the fields that only programs with `TrainingArguments` commonly have. Others
/// (`output_dir`, `learning_rate`, `num_train_epochs`, `tp_size`) are widespread: the training loops of diffusers,
/// DeepSpeed-Chat, open-instruct and accelerate's examples have them with different defaults. `deepspeed` without a
/// value is DeepSpeed's own switch, which `take_switch` has removed.
const TRAINING: &str = "\
    accelerator_config:dict! activation_checkpointing:bool \
    activation_checkpointing_kwargs:dict adafactor:bool adam_beta1:float adam_beta2:float \
    adam_epsilon:float auto_find_batch_size:bool! average_tokens_across_devices:bool! \
    batch_eval_metrics:bool! bf16:bool bf16_full_eval:bool! data_seed:int \
    dataloader_drop_last:bool! dataloader_in_order:bool dataloader_multiprocessing_context:str \
    dataloader_num_workers:int dataloader_persistent_workers:bool! dataloader_pin_memory:bool! \
    dataloader_prefetch_factor:int! ddp_backend:str ddp_broadcast_buffers:bool! \
    ddp_bucket_cap_mb:int! ddp_find_unused_parameters:bool! ddp_static_graph:bool \
    ddp_timeout:int! debug:any deepspeed:dict! disable_tqdm:bool dispatch_batches:bool! \
    do_eval:bool! do_predict:bool! do_train:bool! enable_jit_checkpoint:bool \
    eval_accumulation_steps:int! eval_delay:float! eval_do_concat_batches:bool! \
    eval_on_start:bool! eval_steps:float eval_strategy:str! eval_use_gather_object:bool \
    evaluation_strategy:str! fp16:bool fp16_backend:str! fp16_full_eval:bool! \
    fp16_opt_level:str fsdp:any fsdp_config:dict! fsdp_min_num_params:int \
    fsdp_transformer_layer_cls_to_wrap:str! full_determinism:bool \
    gradient_accumulation_steps:int gradient_checkpointing:bool \
    gradient_checkpointing_kwargs:dict! greater_is_better:bool! group_by_length:bool! \
    half_precision_backend:str! hub_always_push:bool hub_model_id:str hub_private_repo:bool \
    hub_revision:str hub_strategy:str! hub_token:str ignore_data_skip:bool! \
    include_for_metrics:list! include_inputs_for_metrics:bool! \
    include_num_input_tokens_seen:any! include_tokens_per_second:bool! jit_mode_eval:bool! \
    label_names:list label_smoothing_factor:float! learning_rate:float length_column_name:str! \
    liger_kernel_config:dict load_best_model_at_end:bool! local_rank:int log_level:str \
    log_level_replica:str! log_on_each_node:bool! logging_dir:str logging_first_step:bool! \
    logging_nan_inf_filter:bool! logging_steps:float logging_strategy:str! \
    lr_scheduler_kwargs:dict! lr_scheduler_type:str max_grad_norm:float max_steps:int \
    metric_for_best_model:str! mp_parameters:str neftune_noise_alpha:float! no_cuda:bool \
    num_train_epochs:float optim:str optim_args:str optim_target_modules:any! output_dir:str \
    overwrite_output_dir:bool! parallelism_config:dict past_index:int \
    per_device_eval_batch_size:int per_device_train_batch_size:int per_gpu_eval_batch_size:int \
    per_gpu_train_batch_size:int prediction_loss_only:bool! project:str push_to_hub:bool \
    push_to_hub_model_id:str push_to_hub_organization:str push_to_hub_token:str ray_scope:str \
    remove_unused_columns:bool! report_to:list restore_callback_states_from_checkpoint:bool! \
    resume_from_checkpoint:any run_name:str save_on_each_node:bool! save_only_model:bool! \
    save_safetensors:bool! save_steps:float save_strategy:str! save_total_limit:int seed:int \
    skip_memory_metrics:bool! split_batches:bool tf32:bool torch_compile:bool \
    torch_compile_backend:str! torch_compile_mode:str torch_empty_cache_steps:int! \
    torchdynamo:str tp_size:int tpu_metrics_debug:bool tpu_num_cores:int trackio_bucket_id:str \
    trackio_space_id:str trackio_static_space_id:any train_sampling_strategy:str! \
    use_cache:bool use_cpu:bool use_ipex:bool use_legacy_prediction_loop:bool! \
    use_liger_kernel:bool! use_mps_device:bool! warmup_ratio:float warmup_steps:float \
    weight_decay:float";

/// TRL `ModelConfig`.
const MODEL: &str = "\
    attn_implementation:str bnb_4bit_quant_storage:str bnb_4bit_quant_type:str dtype:str \
    load_in_4bit:bool load_in_8bit:bool lora_alpha:int lora_dropout:float \
    lora_modules_to_save:list lora_r:int lora_target_modules:list lora_target_parameters:list \
    lora_task_type:str model_name_or_path:str model_revision:str torch_dtype:str \
    trust_remote_code:bool use_bnb_nested_quant:bool use_dora:bool use_peft:bool \
    use_rslora:bool";

/// TRL `ScriptArguments` and `DatasetMixtureConfig`, and the key that `TrlParser` itself reads (`env`); the handbook's
/// own arguments, including those of its old `DataArguments` and `ModelArguments`.
const SCRIPTS: &str = "\
    auto_insert_empty_system_msg:bool base_model_revision:str benchmarks:list callbacks:list \
    chat_template:str dataset:str dataset_config:str dataset_configs:list dataset_mixer:dict \
    dataset_mixture:dict dataset_name:str dataset_splits:list dataset_streaming:bool \
    dataset_test_split:str dataset_train_split:str datasets:list env:dict \
    gradient_checkpointing_use_reentrant:bool hub_model_revision:str ignore_bias_buffers:bool \
    max_eval_samples:int max_train_samples:int model_code_revision:str \
    overwrite_hub_revision:bool preprocessing_num_workers:int push_to_hub_revision:bool \
    reward_funcs:list reward_model_name_or_path:str sanity_check:bool streaming:bool \
    system_prompt:str test_split_size:float text_column:str tokenizer_name_or_path:str \
    truncation_side:str use_flash_attention_2:bool wandb_entity:str wandb_project:str \
    wandb_run_group:str";

/// The tables that every trainer shares.
const SHARED: [&str; 3] = [TRAINING, MODEL, SCRIPTS];

/// The trainers with their common names, and the words of folder and file names that name them.
pub(super) const TRAINERS: [(Objective, &str, Words); 10] = [
    (Sft, "SFT", Words("sft")),
    (LanguageModelling, "continued pre-training", Words("cpt")),
    (Dpo, "DPO", Words("dpo")),
    (Kto, "KTO", Words("kto")),
    (Orpo, "ORPO", Words("orpo")),
    (Cpo, "CPO/SimPO", Words("simpo cpo")),
    (Grpo, "GRPO", Words("grpo")),
    (Rloo, "RLOO", Words("rloo")),
    (Ppo, "PPO", Words("ppo")),
    (Reward, "reward", Words("reward rm")),
];

/// TRL `SFTConfig`.
const SFT: &str = "\
    activation_offloading:bool assistant_only_loss:bool chars_per_token:float \
    chat_template_path:str completion_only_loss:bool dataset_batch_size:int dataset_kwargs:dict \
    dataset_num_proc:int dataset_text_field:str eos_token:str eval_packing:bool loss_type:str \
    max_length:int max_seq_length:int model_init_kwargs:dict num_of_sequences:int packing:bool \
    packing_strategy:str pad_to_multiple_of:int pad_token:str padding_free:bool \
    router_aux_loss_coef:float shuffle_dataset:bool truncation_mode:str use_liger:bool";

/// TRL `DPOConfig`, `KTOConfig`, `ORPOConfig` and `CPOConfig`.
const PREFERENCE: &str = "\
    beta:float dataset_num_proc:int disable_dropout:bool generate_during_eval:bool \
    is_encoder_decoder:bool label_pad_token_id:int max_completion_length:int max_length:int \
    max_prompt_length:int model_init_kwargs:dict padding_value:int truncation_mode:str";

/// TRL `DPOConfig` and `KTOConfig`.
const REFERENCE: &str = "\
    activation_offloading:bool base_model_attribute_name:str pad_to_multiple_of:int \
    precompute_ref_batch_size:int precompute_ref_log_probs:bool ref_model_init_kwargs:dict \
    ref_model_mixup_alpha:float ref_model_sync_steps:int router_aux_loss_coef:float \
    sync_ref_model:bool use_liger_loss:bool";

/// TRL `DPOConfig`.
const DPO: &str = "\
    discopop_tau:float f_alpha_divergence_coef:float f_divergence_type:str \
    force_use_ref_model:bool label_smoothing:float ld_alpha:float loss_type:list loss_weights:list \
    max_target_length:int model_adapter_name:str pad_token:str padding_free:bool \
    ref_adapter_name:str reference_free:bool rpo_alpha:float tools:any use_logits_to_keep:bool \
    use_num_logits_to_keep:bool use_weighting:bool";

/// TRL `KTOConfig`.
const KTO: &str = "\
    desirable_weight:float loss_type:str max_density_ratio:float min_density_ratio:float \
    prompt_sample_size:int undesirable_weight:float";

/// TRL `CPOConfig`, and SimPO's own `SimPOConfig` (1b3e8f3; `gamma` until 2024-07).
const CPO: &str = "\
    alpha:float cpo_alpha:float gamma:float gamma_beta_ratio:float label_smoothing:float \
    loss_type:str max_target_length:int sft_weight:float simpo_gamma:float";

/// TRL `GRPOConfig`, and `RLOOConfig` since 0.22.
const GENERATION: &str = "\
    beta:float cache_implementation:str chat_template_kwargs:dict disable_dropout:bool \
    ds3_gather_for_generation:bool epsilon:float epsilon_high:float generation_batch_size:int \
    generation_kwargs:dict log_completions:bool log_multimodal:bool log_unique_prompts:bool \
    mask_truncated_completions:bool max_completion_length:int max_prompt_length:int min_p:float \
    model_init_kwargs:dict num_completions_to_print:int num_generations:int \
    num_generations_eval:int num_iterations:int pad_to_multiple_of:int ref_model_mixup_alpha:float \
    ref_model_sync_steps:int repetition_penalty:float reward_weights:list \
    router_aux_loss_coef:float shuffle_dataset:bool steps_per_generation:int sync_ref_model:bool \
    temperature:float top_k:int top_p:float transformers_continuous_batching_config:dict \
    use_transformers_continuous_batching:bool use_transformers_paged:bool use_vllm:bool \
    vllm_enable_sleep_mode:bool vllm_gpu_memory_utilization:float vllm_group_port:int \
    vllm_guided_decoding_regex:str vllm_max_model_length:int vllm_mode:str vllm_model_impl:str \
    vllm_server_base_url:str vllm_server_host:str vllm_server_port:int vllm_server_timeout:float \
    vllm_structured_outputs_regex:str vllm_tensor_parallel_size:int wandb_log_unique_prompts:bool";

/// TRL `GRPOConfig`, and open-r1's `GRPOScriptArguments`, the arguments of its rewards.
const GRPO: &str = "\
    cast_lm_head_to_fp32:bool code_eval_partial_grading:bool code_eval_scoring_mode:str \
    code_eval_test_batch_size:int code_language:str code_provider:str cosine_max_len:int \
    cosine_max_value_correct:float cosine_max_value_wrong:float cosine_min_value_correct:float \
    cosine_min_value_wrong:float dataset_prompt_column:str delta:float e2b_router_url:str \
    entropy_coef:float entropy_coef_delta:float entropy_coef_max:float entropy_coef_min:float \
    entropy_target:float importance_sampling_level:str ioi_provider:str \
    log_completions_hub_repo:str loss_type:str max_completion_len:int \
    max_tool_calling_iterations:int morph_router_url:str multi_objective_aggregation:str \
    off_policy_mask_threshold:float parallel_code_exec_per_proc:int repetition_max_penalty:float \
    repetition_n_grams:int sapo_temperature_neg:float sapo_temperature_pos:float scale_rewards:any \
    soft_punish_cache:int top_entropy_quantile:float use_adaptive_entropy:bool \
    use_bias_correction_kl:bool use_liger_loss:bool vespo_k_neg:float vespo_k_pos:float \
    vespo_lambda_neg:float vespo_lambda_pos:float vllm_device:str vllm_dtype:str \
    vllm_enable_prefix_caching:bool vllm_importance_sampling_cap:float \
    vllm_importance_sampling_clip_max:float vllm_importance_sampling_clip_min:float \
    vllm_importance_sampling_correction:bool vllm_importance_sampling_mode:str \
    vllm_max_model_len:int";

/// TRL `RLOOConfig` since 0.22.
const RLOO: &str = "\
    normalize_advantages:bool reward_clip_range:list";

/// TRL `PPOConfig`.
const PPO: &str = "\
    base_model:str batch_size:int cliprange:float cliprange_value:float dataset_num_proc:int \
    ds3_gather_for_generation:bool exp_name:str gamma:float kl_coef:float kl_estimator:str \
    lam:float local_batch_size:int local_mini_batch_size:int local_rollout_forward_batch_size:int \
    micro_batch_size:int mini_batch_size:int missing_eos_penalty:float model_adapter_name:str \
    non_eos_penalty:bool num_mini_batches:int num_ppo_epochs:int num_sample_generations:int \
    num_total_batches:int num_updates:int penalty_reward_value:int ref_adapter_name:str \
    response_length:int reward_model_path:str sft_model_path:str stop_token:str stop_token_id:int \
    temperature:float total_episodes:int vf_coef:float whiten_rewards:bool world_size:int";

/// TRL `RewardConfig`.
const REWARD: &str = "\
    activation_offloading:bool center_rewards_coefficient:float chat_template_path:str \
    dataset_num_proc:int disable_dropout:bool eos_token:str max_length:int model_init_kwargs:dict \
    pad_to_multiple_of:int pad_token:str";

/// The fields of trainers' own dataclasses, for all trainers that have them.
const OWN: [(&[Objective], &str); 11] = [
    (&[Sft, LanguageModelling], SFT),
    (&[Dpo, Kto, Orpo, Cpo], PREFERENCE),
    (&[Dpo, Kto], REFERENCE),
    (&[Dpo], DPO),
    (&[Kto], KTO),
    (&[Cpo], CPO),
    (&[Grpo, Rloo], GENERATION),
    (&[Grpo], GRPO),
    (&[Rloo], RLOO),
    (&[Ppo], PPO),
    (&[Reward], REWARD),
];

/// Trainers that know a key, with its type; `None` means every trainer.
type Uses = Vec<(Option<Objective>, Kind)>;

/// Every key, built from the tables once.
static INDEX: LazyLock<HashMap<&'static str, Uses>> = LazyLock::new(|| {
    let shared = SHARED.map(|table| (None, table));
    let mut tables = shared.to_vec();
    for (trainer, ..) in TRAINERS {
        let own = OWN
            .iter()
            .filter(|(trainers, _)| trainers.contains(&trainer));
        tables.extend(own.map(|(_, table)| (Some(trainer), *table)));
    }
    let mut index: HashMap<&str, Uses> = HashMap::new();
    for (trainer, table) in tables {
        for (name, kind) in fields(table) {
            index.entry(name).or_default().push((trainer, kind));
        }
    }
    index
});

/// The fields of `TrainingArguments` with their types.
static TRAINING_KINDS: LazyLock<BTreeMap<&'static str, Kind>> =
    LazyLock::new(|| fields(TRAINING).collect());

/// The type of a key of a table.
pub(crate) fn kind_in(table: &'static str, key: &str) -> Option<Kind> {
    fields(table).find_map(|(name, kind)| (name == key).then_some(kind))
}

/// The names and types of a table, `name:type`.
pub(crate) fn fields(table: &'static str) -> impl Iterator<Item = (&'static str, Kind)> {
    table.split_whitespace().filter_map(|field| {
        let (name, kind) = field.trim_end_matches('!').split_once(':')?;
        let kind = match kind {
            "bool" => Kind::Bool,
            "int" => Kind::Int,
            "float" => Kind::Float,
            "str" => Kind::Str,
            "list" => Kind::List,
            "dict" => Kind::Dict,
            _ => Kind::Any,
        };
        Some((name, kind))
    })
}

fn uses(key: &str) -> &'static [(Option<Objective>, Kind)] {
    INDEX.get(key).map_or(&[], Vec::as_slice)
}

fn find(key: &str, objective: Option<Objective>) -> Option<Kind> {
    let found = uses(key).iter().find(|(user, _)| *user == objective);
    found.map(|(_, kind)| *kind)
}

/// The type of a key in a recipe for a trainer. The trainer's own table takes precedence over the
/// shared ones.
pub(crate) fn kind(key: &str, objective: Objective) -> Option<Kind> {
    find(key, Some(objective)).or_else(|| shared(key))
}

/// The type of a key that every trainer takes.
pub(crate) fn shared(key: &str) -> Option<Kind> {
    find(key, None)
}

/// The type of a field of `TrainingArguments`.
pub(crate) fn kind_in_training(key: &str) -> Option<Kind> {
    TRAINING_KINDS.get(key).copied()
}

/// Whether only programs with `TrainingArguments` commonly have a field.
pub(crate) fn only_trainer_has(key: &str) -> bool {
    let mut fields = TRAINING.split_whitespace();
    fields.any(|field| field.ends_with('!') && field.split(':').next() == Some(key))
}

/// The type of a key, where all trainers that have it agree.
pub(crate) fn agreed(key: &str) -> Option<Kind> {
    let uses = uses(key);
    let (_, kind) = uses.first()?;
    uses.iter().all(|(_, other)| other == kind).then_some(*kind)
}

/// Whether a key is known to any trainer.
pub(crate) fn is_known(key: &str) -> bool {
    INDEX.contains_key(key)
}

/// Every key of every trainer.
pub(crate) fn all() -> impl Iterator<Item = &'static str> {
    INDEX.keys().copied()
}

/// Whether the batch depends on a key.
pub(crate) fn sets_batch(key: &str) -> bool {
    const BATCH: Words = Words(
        "auto_find_batch_size batch_size generation_batch_size gradient_accumulation_steps \
         micro_batch_size mini_batch_size num_generations num_mini_batches parallelism_config \
         per_device_train_batch_size per_gpu_train_batch_size split_batches steps_per_generation \
         total_episodes tp_size",
    );
    BATCH.has(key)
}

/// Whether other scripts commonly define an argument of this name too: for the model and its
/// adapters, for lengths and for data.
pub(crate) fn is_common(key: &str) -> bool {
    const COMMON: Words = Words(
        "alpha base_model batch_size max_source_length max_target_length beta chat_template dataset dataset_config datasets delta \
         env epsilon exp_name gamma lam loss_type max_length max_prompt_length max_seq_length \
         micro_batch_size mini_batch_size preprocessing_num_workers streaming system_prompt \
         temperature text_column top_k top_p wandb_entity wandb_project world_size",
    );
    COMMON.has(key) || fields(MODEL).any(|(name, _)| name == key)
}

/// Every field of `TrainingArguments`.
pub(crate) fn training() -> impl Iterator<Item = &'static str> {
    TRAINING_KINDS.keys().copied()
}

/// Every key that a recipe for a trainer may hold, in alphabetical order.
pub(crate) fn known(objective: Objective) -> Vec<&'static str> {
    let mut keys: Vec<&str> = INDEX.keys().copied().collect();
    keys.retain(|key| kind(key, objective).is_some());
    keys.sort_unstable();
    keys
}

/// The trainers whose own table has a key.
pub(crate) fn owners(key: &str) -> Vec<Objective> {
    uses(key).iter().filter_map(|(user, _)| *user).collect()
}

/// A trainer's common name.
pub(crate) fn name(objective: Objective) -> &'static str {
    let found = TRAINERS.iter().find(|(trainer, ..)| *trainer == objective);
    found.map_or("", |(_, name, _)| name)
}

/// Arguments of the example scripts that concern the batch, the model or the data, and those that
/// distinguish such a file from TRL's. `cutoff_len` is LLaMA-Factory's sequence length, `model_max_length` that of FastChat
/// and of what derives from it.
const EXAMPLES: &str = "\
    attn_implementation:str block_size:int config_name:str cutoff_len:int \
    dataset_config_name:str dataset_name:str dtype:str max_eval_samples:int max_length:int \
    max_seq_length:int max_source_length:int max_train_samples:int model_max_length:int model_name_or_path:str \
    overwrite_cache:bool preprocessing_num_workers:int streaming:bool task_name:str \
    tokenizer_name:str torch_dtype:str train_file:str trust_remote_code:bool \
    use_fast_tokenizer:bool validation_file:str";

/// The type of an argument of the example scripts.
pub(crate) fn example(key: &str) -> Option<Kind> {
    kind_in(EXAMPLES, key)
}

/// Every argument of the example scripts.
#[cfg(test)]
pub(crate) fn examples() -> impl Iterator<Item = &'static str> {
    fields(EXAMPLES).map(|(name, _)| name)
}
