//! Adapters of recipes and of PEFT's folders (`adapter_config.json`, `adapter_model.safetensors`).

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::checkpoint::ADAPTER_CONFIG;
use crate::engine::{Adapters, Family, ModelConfig, Parameter, Role, is_layer, layout};
use crate::recipe::schema::spec::Model;
use crate::util::durable::{FileError, parse_json};
use crate::util::input::{self, CONFIG_BYTES};

/// The name for every linear layer of the blocks.
const ALL: &str = "all-linear";

/// Keys of `LoraConfig` that make adapters which are not computed here, unless they are empty or false (PEFT 0.21,
/// `tuners/lora/config.py`).
const OTHER_METHODS: [&str; 14] = [
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "exclude_modules",
    "layer_replication",
    "layers_to_transform",
    "lora_bias",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "velora_config",
];
/// Modules of heads, of all families.
const HEADS: [&str; 2] = ["lm_head", "embed_out"];
/// Most adapters that lie one above the other.
const MOST: usize = 8;

/// PEFT's description of adapters, as far as it is read. Its defaults are PEFT's.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct AdapterConfig {
    peft_type: String,
    /// The model below: a path, or a name of the hub.
    pub base_model_name_or_path: Option<String>,
    r: usize,
    lora_alpha: f64,
    lora_dropout: f64,
    use_rslora: bool,
    target_modules: Value,
    modules_to_save: Option<Vec<String>>,
    bias: String,
    task_type: Option<String>,
    /// Of the model below, on the hub.
    pub revision: Option<String>,
    /// All other keys.
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl Default for AdapterConfig {
    fn default() -> Self {
        AdapterConfig {
            peft_type: String::new(),
            base_model_name_or_path: None,
            r: 8,
            lora_alpha: 8.0,
            lora_dropout: 0.0,
            use_rslora: false,
            target_modules: Value::Null,
            modules_to_save: None,
            bias: "none".to_owned(),
            task_type: None,
            revision: None,
            others: Map::new(),
        }
    }
}

impl AdapterConfig {
    /// That of a folder; `None` if it has none.
    pub fn read(directory: &Path) -> Result<Option<AdapterConfig>, FileError> {
        let path = directory.join(ADAPTER_CONFIG);
        if !path.is_file() {
            return Ok(None);
        }
        let bytes = input::read(&path, CONFIG_BYTES)
            .map_err(|error| FileError::from_io("read", &path, 0, error))?;
        Ok(Some(parse_json(&path, &bytes)?))
    }

    /// What the engines compute; an error names what they do not. `seed` draws new ones.
    pub fn settings(&self, seed: u64) -> Result<Adapters, String> {
        let is_empty = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Object(map) => map.is_empty(),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        let modules = match &self.target_modules {
            Value::String(all) if all == ALL => Some(Vec::new()),
            Value::Array(names) => names
                .iter()
                .map(|name| name.as_str().map(str::to_owned))
                .collect(),
            _ => None,
        };
        let refused = [
            (
                self.peft_type != "LORA",
                format!("peft_type {}", self.peft_type),
            ),
            (self.bias != "none", format!("bias {}", self.bias)),
            (
                modules.is_none(),
                "target_modules that are no list".to_owned(),
            ),
            (self.r == 0, "rank 0".to_owned()),
            (
                !(self.lora_alpha > 0.0 && self.lora_alpha.is_finite()),
                format!("lora_alpha {}", self.lora_alpha),
            ),
            (
                !(0.0..1.0).contains(&self.lora_dropout),
                format!("lora_dropout {}", self.lora_dropout),
            ),
            (
                self.task_type.as_ref().is_some_and(|it| it != "CAUSAL_LM"),
                "another task_type than CAUSAL_LM".to_owned(),
            ),
        ];
        let is_set = |key: &&&str| self.others.get(**key).is_some_and(|value| !is_empty(value));
        let another = OTHER_METHODS
            .iter()
            .find(is_set)
            .map(|key| (true, (*key).to_owned()));
        if let Some((_, what)) = refused
            .into_iter()
            .chain(another)
            .find(|(is_there, _)| *is_there)
        {
            return Err(format!("the built-in trainer has no adapters with {what}"));
        }
        Ok(Adapters {
            rank: self.r,
            alpha: self.lora_alpha,
            rank_stabilized: self.use_rslora,
            dropout: self.lora_dropout,
            modules: modules.unwrap_or_default(),
            saved: self.modules_to_save.clone().unwrap_or_default(),
            is_quantised: false,
            is_nested: false,
            seed,
        })
    }
}

/// A folder with an adapter, and those below it.
#[derive(Debug, Clone)]
pub struct Chain {
    /// From the lowest to the named one.
    pub folders: Vec<(PathBuf, AdapterConfig)>,
}

impl Chain {
    /// `None`: the directory has a model, or nothing. Relative paths start at `base`. An error is for people.
    pub fn of(directory: &Path, base: &Path) -> Result<Option<Chain>, String> {
        let mut folders = Vec::new();
        let mut next = directory.to_path_buf();
        while next.is_dir() && !next.join("config.json").is_file() {
            let Some(config) = AdapterConfig::read(&next).map_err(|error| error.to_string())?
            else {
                break;
            };
            let Some(below) = &config.base_model_name_or_path else {
                return Err(format!(
                    "{} names no model",
                    next.join(ADAPTER_CONFIG).display()
                ));
            };
            let below = base.join(below);
            folders.insert(0, (std::mem::replace(&mut next, below), config));
            if folders.len() > MOST {
                return Err(format!(
                    "more than {MOST} adapters lie below {}; merge them first",
                    directory.display()
                ));
            }
        }
        Ok((!folders.is_empty()).then_some(Chain { folders }))
    }

    /// The model below all of them: a path, or a name of the hub.
    pub fn model(&self) -> Option<&str> {
        let (_, lowest) = self.folders.first()?;
        lowest.base_model_name_or_path.as_deref()
    }

    /// The settings of each; an error names the file.
    pub fn settings(&self, seed: u64) -> Result<Vec<Adapters>, String> {
        let all = self.folders.iter().map(|(directory, config)| {
            let settings = config.settings(seed);
            settings
                .map_err(|error| format!("{}: {error}", directory.join(ADAPTER_CONFIG).display()))
        });
        all.collect()
    }
}

/// The adapters that a recipe trains on a model of this shape, as PEFT makes them; an error says why there are none.
pub fn of_recipe(model: &Model, config: &ModelConfig, seed: u64) -> Result<Adapters, String> {
    let named = &model.lora_target_modules;
    let modules = match named.as_slice() {
        [] => default_modules(config.family).ok_or_else(|| {
            format!(
                "PEFT has no default of lora_target_modules for {}",
                config.family.model_type()
            )
        })?,
        [all] if all == ALL => Vec::new(),
        names => names.to_vec(),
    };
    let adapters = Adapters {
        rank: model.lora_rank.unwrap_or(8) as usize,
        alpha: model.lora_alpha.unwrap_or(8.0),
        rank_stabilized: model.use_rslora,
        dropout: model.lora_dropout,
        modules,
        saved: model.lora_modules_to_save.clone(),
        is_quantised: false,
        is_nested: false,
        seed,
    };
    match adapters.unknown(&layout(config)).as_slice() {
        [] => Ok(adapters),
        names => Err(format!(
            "the blocks of {} have no linear layer named {}",
            config.family.model_type(),
            names.join(", ")
        )),
    }
}

/// Roles whose parameters kernels read as one matrix, or as one vector: all of them are trained, or none.
const TOGETHER: [&[Role]; 3] = [
    &[Role::Query, Role::Key, Role::Value],
    &[Role::QueryNorm, Role::KeyNorm],
    &[Role::Gate, Role::Up],
];

/// Refuses modules that cannot be trained whole in a model of this shape. An error is for people.
pub fn check_saved(adapters: &Adapters, config: &ModelConfig) -> Result<(), String> {
    let layout = layout(config);
    let all = || layout.units.iter().flat_map(|unit| &unit.parameters);
    let (key, family) = ("modules_to_save", config.family.model_type());
    for name in &adapters.saved {
        let one = Adapters {
            saved: vec![name.clone()],
            ..adapters.clone()
        };
        let is_head =
            config.tie_word_embeddings && HEADS.iter().any(|head| head.ends_with(name.as_str()));
        if !is_head && !all().any(|it| one.saves(it.module())) {
            return Err(format!(
                "{family} has no module with weights whose name ends with `{name}` ({key})"
            ));
        }
        let is_tied = |it: &Parameter| it.role == Role::Embedding && one.saves(it.module());
        if is_head || config.tie_word_embeddings && all().any(is_tied) {
            return Err(format!(
                "the embedding and the head are one tensor (`tie_word_embeddings`), and PEFT would part them to train \
                 `{name}` ({key})"
            ));
        }
    }
    for parameter in all().filter(|it| adapters.saves(it.module())) {
        let (module, role) = (parameter.module(), parameter.role);
        if config.family == Family::GptNeoX && role == Role::Head {
            return Err(format!(
                "the head of {family} is `{module}` in files and before transformers 5, and has another name in PEFT since \
                 ({key})"
            ));
        }
        let is_layer = is_layer(role);
        if is_layer && adapters.has(module) {
            return Err(format!(
                "`{module}` has an adapter and is trained whole; name it in target_modules or in {key}"
            ));
        }
        if is_layer && adapters.is_quantised {
            return Err(format!(
                "`{module}` is in 4 bits, and cannot be trained whole ({key})"
            ));
        }
    }
    for unit in &layout.units {
        for roles in TOGETHER {
            let (whole, frozen): (Vec<&Parameter>, Vec<&Parameter>) = (unit.parameters.iter())
                .filter(|it| roles.contains(&it.role))
                .partition(|it| adapters.saves(it.module()));
            if let ([whole, ..], [frozen, ..]) = (&whole[..], &frozen[..]) {
                return Err(format!(
                    "`{}` and `{}` are computed together; name both in {key}, or neither",
                    whole.module(),
                    frozen.module()
                ));
            }
        }
    }
    Ok(())
}

/// PEFT 0.21 `utils/constants.py`, `TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`.
fn default_modules(family: Family) -> Option<Vec<String>> {
    let names: &[&str] = match family {
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 | Family::Gemma => {
            &["q_proj", "v_proj"]
        }
        Family::GptNeoX => &["query_key_value"],
        Family::Gpt2 => &["c_attn"],
        Family::SmolLm3 | Family::StarCoder2 => return None,
    };
    Some(names.iter().map(|name| (*name).to_owned()).collect())
}

/// PEFT's description of these adapters.
pub fn to_json(adapters: &Adapters, model: &ModelConfig, base: Option<&str>) -> Value {
    let modules = match adapters.modules.as_slice() {
        [] => json!(ALL),
        names => json!(names),
    };
    let saved = (!adapters.saved.is_empty()).then_some(&adapters.saved);
    json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": adapters.dropout,
        "use_rslora": adapters.rank_stabilized,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": model.family == Family::Gpt2,
        "modules_to_save": saved,
        "inference_mode": true,
    })
}
