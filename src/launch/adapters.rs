//! The adapters that a recipe trains: its own, or those of a folder that it names in place of a model.

use std::path::{Path, PathBuf};

use crate::engine::{Adapted, Adapters, Family, ModelConfig, layout, nf4};
use crate::plan::Flaw;
use crate::recipe::Spec;
use crate::telemetry::human::grouped;
use crate::train::adapter::{self, Chain};
use crate::train::weights::Weights;

/// What a launch trains in place of the model's weights, and below it.
#[derive(Debug, Clone, Default)]
pub struct Trained {
    pub adapters: Option<Adapters>,
    /// The folders of adapters that are merged into the model, in order.
    pub merged: Vec<PathBuf>,
    /// The folder of the adapter that is trained on.
    pub start: Option<PathBuf>,
    /// What lies below, as the recipe or the folder names it.
    pub base: Option<String>,
}

/// The adapter folder that a recipe names in place of a model.
#[derive(Debug, Clone)]
pub(super) struct Folder {
    directory: PathBuf,
    chain: Chain,
}

impl Folder {
    /// `None`: the recipe names a model. Relative paths start at `base`.
    pub fn of(spec: &Spec, base: &Path) -> Result<Option<Folder>, Flaw> {
        let Some(named) = &spec.model.path else {
            return Ok(None);
        };
        let directory = base.join(named);
        let chain =
            Chain::of(&directory, base).map_err(|message| wrong_folder("model-shape", message))?;
        Ok(chain.map(|chain| Folder { directory, chain }))
    }

    /// The recipe with the model below the adapters in place of the folder, whose tokenizer it keeps.
    pub fn settled(&self, spec: &Spec) -> Spec {
        let mut settled = spec.clone();
        settled.model.path = self.chain.model().map(str::to_owned);
        if let Some((_, lowest)) = self.chain.folders.first()
            && lowest.revision.is_some()
        {
            settled.model.revision.clone_from(&lowest.revision);
        }
        if spec.tokenizer.path.is_none() && self.directory.join("tokenizer.json").is_file() {
            settled.tokenizer.path = spec.model.path.clone();
        }
        settled
    }
}

/// What the recipe trains on a model of this shape.
pub(super) fn trained(
    spec: &Spec,
    folder: Option<&Folder>,
    shape: &ModelConfig,
) -> Result<Trained, Flaw> {
    let model = &spec.model;
    let refused = |message: String| flaw("trainer-weights", message);
    let of_folder = |message: String| wrong_folder("trainer-weights", message);
    let mut merged = Vec::new();
    let mut last = None;
    if let Some(folder) = folder {
        let settings = folder.chain.settings(spec.seed).map_err(of_folder)?;
        for ((directory, _), settings) in folder.chain.folders.iter().zip(settings) {
            adapter::check_saved(&settings, shape).map_err(of_folder)?;
            let adapted = Adapted::new(&layout(shape), settings.clone());
            let weights = Weights::open_adapter(directory);
            weights
                .and_then(|weights| weights.check(&adapted.trained))
                .map_err(|error| of_folder(error.to_string()))?;
            merged.push(directory.clone());
            last = Some(settings);
        }
    }
    let (adapters, start) = match model.adapters {
        true => {
            let new = adapter::of_recipe(model, shape, spec.seed).map_err(refused)?;
            (Some(new), None)
        }
        false => (last, merged.pop()),
    };
    let is_quantised = model.load_in_4bit;
    let is_nested = is_quantised && model.use_bnb_nested_quant;
    let of_head = shape.head_dim * shape.hidden_size;
    let together = nf4_weights(is_nested);
    if is_quantised && shape.family == Family::GptNeoX && !of_head.is_multiple_of(together) {
        return Err(refused(format!(
            "GPT-NeoX's files have the queries, keys and values of a head together, and the {of_head} weights of each are no \
             multiple of the {together} that 4 bits have a number for"
        )));
    }
    if is_quantised && adapters.is_none() {
        return Err(refused(
            "weights in 4 bits cannot be trained, only adapters over them".to_owned(),
        ));
    }
    let adapters = adapters.map(|adapters| Adapters {
        is_quantised,
        is_nested,
        ..adapters
    });
    if let Some(adapters) = &adapters {
        adapter::check_saved(adapters, shape).map_err(refused)?;
    }
    let named = || folder.map_or(model.path.clone(), |it| it.chain.model().map(str::to_owned));
    let lowest = merged.last().map(|it| it.display().to_string());
    Ok(Trained {
        base: lowest.or_else(named),
        adapters,
        merged,
        start,
    })
}

/// Adjacent weights, in the order of files, that quantisation reads together: the block of a scale, or those of a group of
/// scales.
fn nf4_weights(is_nested: bool) -> usize {
    match is_nested {
        false => nf4::BLOCK,
        true => nf4::BLOCK * nf4::GROUP,
    }
}

/// A folder of adapters that cannot be used.
fn wrong_folder(rule: &'static str, message: String) -> Flaw {
    Flaw {
        rule,
        paths: vec!["model.path".to_owned()],
        message,
        help: "correct the folder, or name a model; other adapters need your program after `--`"
            .to_owned(),
    }
}

/// The adapters of a run, for people.
pub(super) fn described(adapters: &Adapters, shape: &ModelConfig) -> String {
    let model = layout(shape);
    let adapted = Adapted::new(&model, adapters.clone());
    let (trained, all) = (adapted.trained.len(), model.len());
    let layers = match adapters.modules.as_slice() {
        [] => "every linear layer".to_owned(),
        names => names.join(", "),
    };
    let whole = match adapters.saved.join(", ") {
        names if names.is_empty() => names,
        names => format!(", and {names} whole,"),
    };
    format!(
        "adapters of rank {} on {layers}{whole} are trained: {} parameters over {} that are frozen{}",
        adapters.rank,
        grouped(trained),
        grouped(all),
        match (adapters.is_quantised, adapters.is_nested) {
            (false, _) => "",
            (true, false) => ", in 4 bits",
            (true, true) => ", in 4 bits with scales in 8 bits",
        }
    )
}

fn flaw(rule: &'static str, message: String) -> Flaw {
    Flaw {
        rule,
        paths: vec![
            "model.lora_target_modules".to_owned(),
            "model.adapters".to_owned(),
            "model.path".to_owned(),
        ],
        message,
        help: "name the layers in lora_target_modules, or `all-linear`; or give your program after `--`"
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn layers_that_no_block_has_and_kinds_that_are_not_computed_are_named() {
        let config = |model_type: &str| {
            let mut sizes = json!({
                "model_type": model_type, "hidden_size": 16, "intermediate_size": 24,
                "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20,
                "max_position_embeddings": 32,
            });
            if model_type == "gpt_neox" {
                sizes["hidden_size"] = json!(20);
            }
            if model_type == "gpt2" {
                for dropout in ["resid_pdrop", "embd_pdrop", "attn_pdrop"] {
                    sizes[dropout] = json!(0);
                }
            }
            ModelConfig::from_json(&sizes).unwrap()
        };
        let refusal = |family: &str, modules: &[&str], quantised: bool| {
            let mut spec = Spec::default();
            spec.model.adapters = true;
            spec.model.load_in_4bit = quantised;
            spec.model.lora_target_modules = modules.iter().map(|&name| name.to_owned()).collect();
            trained(&spec, None, &config(family)).unwrap_err().message
        };
        let saving = |family: &str, whole: &[&str], quantised: bool| {
            let mut spec = Spec::default();
            spec.model.adapters = true;
            spec.model.load_in_4bit = quantised;
            let targets = match family {
                "llama" => vec!["q_proj", "v_proj"],
                "gpt2" => vec!["c_attn"],
                _ => vec!["query_key_value"],
            };
            spec.model.lora_target_modules = targets.into_iter().map(str::to_owned).collect();
            spec.model.lora_modules_to_save = whole.iter().map(|&name| name.to_owned()).collect();
            trained(&spec, None, &config(family)).unwrap_err().message
        };
        let messages = [
            refusal("llama", &["q_proj", "lm_head", "proj"], false),
            refusal("starcoder2", &[], false),
            refusal("gpt_neox", &["all-linear"], true),
            saving("llama", &["lm_head", "mlp"], false),
            saving("llama", &["embed_tokens", "layernorm", "o_proj"], true),
            saving("llama", &["norm", "v_proj"], false),
            saving("llama", &["up_proj"], false),
            saving("gpt2", &["lm_head"], false),
            saving("gpt2", &["ln_f", "wte"], false),
            saving("gpt_neox", &["embed_out"], false),
        ];
        insta::assert_snapshot!(messages.join("\n"));
        let mut spec = Spec::default();
        spec.model.load_in_4bit = true;
        assert!(trained(&spec, None, &config("llama")).is_err());
    }
}
