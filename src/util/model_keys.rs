//! The keys of a `config.json` that some families of models spell in their own way.

/// A family's spelling of a key, by its `model_type`. transformers' `attribute_map` accepts both.
pub fn spelled(model_type: &str, key: &'static str) -> &'static str {
    match (model_type, key) {
        ("gpt2", "hidden_size") => "n_embd",
        ("gpt2", "intermediate_size") => "n_inner",
        ("gpt2", "num_hidden_layers") => "n_layer",
        ("gpt2", "num_attention_heads") => "n_head",
        ("gpt2", "max_position_embeddings") => "n_positions",
        ("gpt2", "hidden_act") => "activation_function",
        ("gpt2", "rms_norm_eps") => "layer_norm_epsilon",
        ("gpt_neox", "rms_norm_eps") => "layer_norm_eps",
        ("gpt_neox", "rope_theta") => "rotary_emb_base",
        ("starcoder2", "rms_norm_eps") => "norm_epsilon",
        _ => key,
    }
}
