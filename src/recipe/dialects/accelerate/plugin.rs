//! The DeepSpeed config that accelerate makes in a rank when its launcher names no file.
//!
//! Source: accelerate 1.15.0 `utils/dataclasses.py` (`DeepSpeedPlugin.__post_init__`).

use serde_json::{Value, json};

use super::environment::Variables;

/// Variables of a rank that uses the config instead of what the launcher states: accelerate refuses a file
/// beside keys of the accelerate config, and the first variable lists these keys.
pub(crate) const FILE_VARIABLES: [(&str, &str); 2] = [
    ("ACCELERATE_CONFIG_DS_FIELDS", "deepspeed_config_file"),
    ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "{deepspeed_config}"),
];

/// The DeepSpeed config that accelerate makes from these variables of a launch: JSON, with an accumulation of 1 in place
/// of the plan's. `None`: the launch does not use DeepSpeed, or names a file.
pub fn deepspeed_config(variables: &Variables) -> Option<String> {
    let is = |name: &str| variables.get(name).map(String::as_str);
    let [_, (file, _)] = FILE_VARIABLES;
    if is("ACCELERATE_USE_DEEPSPEED") != Some("true") || is(file).is_some() {
        return None;
    }
    let of = |name: &str| is(&format!("ACCELERATE_DEEPSPEED_{name}"));
    // accelerate's launcher passes no paths for NVMe.
    let offload = |name: &str| json!({"device": of(name).unwrap_or("none"), "nvme_path": null});
    let mut config = json!({
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 1,
        "zero_optimization": {
            "stage": of("ZERO_STAGE").unwrap_or("2").parse::<u64>().ok()?,
            "offload_optimizer": offload("OFFLOAD_OPTIMIZER_DEVICE"),
            "offload_param": offload("OFFLOAD_PARAM_DEVICE"),
            "stage3_gather_16bit_weights_on_model_save": of("ZERO3_SAVE_16BIT_MODEL") == Some("true"),
        },
    });
    match is("ACCELERATE_GRADIENT_CLIPPING").unwrap_or("auto") {
        "auto" => config["gradient_clipping"] = json!("auto"),
        // accelerate sets no clipping of 0.
        text => match text.parse::<f64>().ok()? {
            0.0 => {}
            value => config["gradient_clipping"] = json!(value),
        },
    }
    serde_json::to_string_pretty::<Value>(&config).ok()
}
