//! The shape of a recipe's model: the recipe's keys override those of a `config.json`, which override those of
//! a well-known hub model, from the `config.json` of each.
//!
//! A test compares every known shape with the parameter count that its hub page states.

use std::collections::BTreeMap;

use serde_json::Value;

use super::shape::{
    Biases, GEMMA, GPT_NEOX, GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, STARCODER2, Shape,
};
use crate::hub;
use crate::recipe::schema::spec::Model;
use crate::util::model_keys::spelled;

/// A hub model whose shape is known.
#[derive(Debug)]
struct Known {
    id: &'static str,
    /// Ids that contain one of these, in lower case, have this shape.
    patterns: &'static [&'static str],
    shape: Shape,
    /// The parameter count of its hub page.
    #[cfg(test)]
    stated: u64,
}

/// Layers, hidden size, intermediate size, heads, key-value heads, vocabulary.
const fn llama(sizes: [u64; 6]) -> Shape {
    let [
        layers,
        hidden,
        intermediate,
        heads,
        key_value_heads,
        vocabulary,
    ] = sizes;
    Shape {
        layers,
        hidden,
        intermediate,
        heads,
        key_value_heads,
        head_dim: hidden / heads,
        vocabulary,
        ..LLAMA
    }
}

const fn tied(shape: Shape) -> Shape {
    Shape {
        tied: true,
        ..shape
    }
}

/// With the head size of Gemma, tied.
const fn gemma(sizes: [u64; 6]) -> Shape {
    Shape {
        head_dim: GEMMA.head_dim,
        fixed_heads: true,
        ..tied(llama(sizes))
    }
}

const fn experts(experts: u64, shape: Shape) -> Shape {
    Shape { experts, ..shape }
}

const fn qkv_biases(shape: Shape) -> Shape {
    Shape {
        biases: Biases::QKV,
        fixed_biases: true,
        ..shape
    }
}

/// GPT-NeoX: as StarCoder2, with a parallel residual.
const fn neox(sizes: [u64; 6]) -> Shape {
    Shape {
        parallel_residual: true,
        derived_heads: true,
        ..plain(llama(sizes))
    }
}

/// StarCoder2: LayerNorm, biases, a plain MLP.
const fn plain(shape: Shape) -> Shape {
    Shape {
        gated: false,
        biases: Biases::ALL,
        norm_bias: true,
        ..shape
    }
}

macro_rules! known {
    ($($id:literal $patterns:tt $stated:literal $shape:expr;)*) => {
        &[$(Known {
            id: $id,
            patterns: &$patterns,
            shape: $shape,
            #[cfg(test)]
            stated: $stated,
        }),*]
    };
}

/// Searched in order: the name of a fine-tune comes before a part of it that is another
/// model's name.
const KNOWN: &[Known] = known! {
    "google/gemma-7b" ["gemma-7b", "7b-gemma"] 8_537_680_896
        gemma([28, 3072, 24576, 16, 16, 256_000]);
    "google/gemma-2b" ["gemma-2b"] 2_506_172_416
        gemma([18, 2048, 16384, 8, 1, 256_000]);
    "mistralai/Mistral-7B-v0.1" ["mistral-7b", "zephyr-7b"] 7_241_732_096
        llama([32, 4096, 14336, 32, 8, 32000]);
    "mistral-community/Mixtral-8x22B-v0.1" ["mixtral-8x22b", "zephyr-orpo-141b"] 140_620_634_112
        experts(8, llama([56, 6144, 16384, 48, 8, 32000]));
    "mistralai/Mixtral-8x7B-v0.1" ["mixtral-8x7b"] 46_702_792_704
        experts(8, llama([32, 4096, 14336, 32, 8, 32000]));
    "bigcode/starcoder2-15b" ["starcoder2-15b", "starchat2-15b"] 15_957_889_024
        plain(llama([40, 6144, 24576, 48, 4, 49152]));
    "bigcode/starcoder2-7b" ["starcoder2-7b"] 7_173_923_840
        tied(plain(llama([32, 4608, 18432, 36, 4, 49152])));
    "bigcode/starcoder2-3b" ["starcoder2-3b"] 3_030_371_328
        tied(plain(llama([30, 3072, 12288, 24, 2, 49152])));
    "HuggingFaceTB/SmolLM2-135M" ["smollm2-135m", "smollm-135m"] 134_515_008
        tied(llama([30, 576, 1536, 9, 3, 49152]));
    "HuggingFaceTB/SmolLM2-360M" ["smollm2-360m", "smollm-360m"] 361_821_120
        tied(llama([32, 960, 2560, 15, 5, 49152]));
    "HuggingFaceTB/SmolLM2-1.7B" ["smollm2-1.7b", "smollm-1.7b"] 1_711_376_384
        tied(llama([24, 2048, 8192, 32, 32, 49152]));
    "TinyLlama/TinyLlama-1.1B" ["tinyllama"] 1_100_048_384
        llama([22, 2048, 5632, 32, 4, 32000]);
    "meta-llama/Llama-2-7b-hf" ["llama-2-7b", "llama-7b"] 6_738_415_616
        llama([32, 4096, 11008, 32, 32, 32000]);
    "meta-llama/Llama-2-13b-hf" ["llama-2-13b", "llama-13b"] 13_015_864_320
        llama([40, 5120, 13824, 40, 40, 32000]);
    "meta-llama/Llama-2-70b-hf" ["llama-2-70b"] 68_976_648_192
        llama([80, 8192, 28672, 64, 8, 32000]);
    "meta-llama/Llama-3.2-1B" ["llama-3.2-1b"] 1_235_814_400
        tied(llama([16, 2048, 8192, 32, 8, 128_256]));
    "meta-llama/Llama-3.2-3B" ["llama-3.2-3b"] 3_212_749_824
        tied(llama([28, 3072, 8192, 24, 8, 128_256]));
    "meta-llama/Meta-Llama-3-8B" ["llama-3-8b", "llama-3.1-8b"] 8_030_261_248
        llama([32, 4096, 14336, 32, 8, 128_256]);
    "meta-llama/Meta-Llama-3-70B"
        ["llama-3-70b", "llama-3.1-70b", "llama-3.3-70b"] 70_553_706_496
        llama([80, 8192, 28672, 64, 8, 128_256]);
    "meta-llama/Llama-3.1-405B" ["llama-3.1-405b"] 405_853_388_800
        llama([126, 16384, 53248, 128, 8, 128_256]);
    "Qwen/Qwen2.5-0.5B" ["qwen2.5-0.5b", "qwen2-0.5b"] 494_032_768
        tied(qkv_biases(llama([24, 896, 4864, 14, 2, 151_936])));
    "Qwen/Qwen2.5-1.5B" ["qwen2.5-1.5b", "qwen2-1.5b"] 1_543_714_304
        tied(qkv_biases(llama([28, 1536, 8960, 12, 2, 151_936])));
    "Qwen/Qwen2.5-7B" ["qwen2.5-7b", "qwen2-7b"] 7_615_616_512
        qkv_biases(llama([28, 3584, 18944, 28, 4, 152_064]));
    "EleutherAI/pythia-70m" ["pythia-70m"] 70_426_624
        neox([6, 512, 2048, 8, 8, 50304]);
    "EleutherAI/pythia-160m" ["pythia-160m"] 162_322_944
        neox([12, 768, 3072, 12, 12, 50304]);
    "EleutherAI/pythia-410m" ["pythia-410m"] 405_334_016
        neox([24, 1024, 4096, 16, 16, 50304]);
    "EleutherAI/pythia-1.4b" ["pythia-1.4b"] 1_414_647_808
        neox([24, 2048, 8192, 16, 16, 50304]);
    "EleutherAI/pythia-1b" ["pythia-1b"] 1_011_781_632
        neox([16, 2048, 8192, 8, 8, 50304]);
    "EleutherAI/pythia-2.8b" ["pythia-2.8b"] 2_775_208_960
        neox([32, 2560, 10240, 32, 32, 50304]);
    "EleutherAI/pythia-6.9b" ["pythia-6.9b"] 6_857_302_016
        neox([32, 4096, 16384, 32, 32, 50432]);
    "EleutherAI/pythia-12b" ["pythia-12b"] 11_846_072_320
        neox([36, 5120, 20480, 40, 40, 50688]);
};

/// The model that a hub id (or the name of a local copy) names, or its base model.
fn find(path: &str) -> Option<&'static Known> {
    let path = path.to_lowercase();
    KNOWN
        .iter()
        .find(|known| known.patterns.iter().any(|pattern| path.contains(pattern)))
}

/// The family that a hub id names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Named {
    /// One that the built-in trainer has, by its `model_type`.
    Trained(&'static str),
    Other(&'static str),
}

use Named::{Other, Trained};

/// Families by parts of a hub id in lower case. The first match counts. An id without one is a Llama or a Mistral, which
/// have the same blocks.
const FAMILIES: &[(Named, &[&str])] = &[
    (
        Other("Gemma 2 and later ones"),
        &[
            "gemma-2-",
            "gemma2",
            "gemma-3",
            "gemma3",
            "gemma-4",
            "shieldgemma",
        ],
    ),
    (
        Other("Gemma's relatives of other blocks"),
        &["recurrentgemma", "paligemma", "t5gemma", "embeddinggemma"],
    ),
    (Trained("gemma"), &["gemma"]),
    (Other("Mixtral"), &["mixtral", "zephyr-orpo-141b"]),
    (Trained("starcoder2"), &["starcoder2", "starchat2"]),
    (Other("StarCoder"), &["starcoder", "starchat"]),
    (
        Other("Qwen's multimodal models"),
        &[
            "qwen-vl",
            "qwen2-vl",
            "qwen2.5-vl",
            "qwen3-vl",
            "qwen2-audio",
            "-omni",
        ],
    ),
    (
        Other("Qwen's mixtures of experts"),
        &[
            "qwen1.5-moe",
            "qwen2-57b",
            "qwen3-30b",
            "qwen3-235b",
            "qwen3-coder",
            "qwen3-next",
        ],
    ),
    (Trained("qwen3"), &["qwen3"]),
    (
        Trained("qwen2"),
        &["qwen2", "qwen1.5", "qwq", "deepseek-r1-distill-qwen"],
    ),
    (Other("Qwen"), &["qwen"]),
    (Trained("gpt_neox"), &["pythia", "gpt-neox", "dolly-v2"]),
    (Other("GPT-J"), &["gpt-j"]),
    (Trained("gpt2"), &["gpt2", "mgpt"]),
    (Other("LLaVA"), &["llava"]),
    (Other("a diffusion model"), &["stable-diffusion"]),
    (
        Other("Phi"),
        &["microsoft/phi", "phi-1", "phi-2", "phi-3", "phi-4"],
    ),
    (Other("Falcon"), &["falcon"]),
    (Other("OPT"), &["facebook/opt"]),
    (Other("BLOOM"), &["bloom"]),
    (Other("MPT"), &["mpt-7b", "mpt-30b"]),
    (
        Other("DeepSeek"),
        &["deepseek-v2", "deepseek-v3", "deepseek-r1-0528"],
    ),
    (Trained("smollm3"), &["smollm3"]),
    (Other("OLMo"), &["olmo"]),
];

/// The family of a model by its hub id. `None` if a `config.json` at its path or the recipe states the family, or if its
/// path is a folder's or names no family.
fn named(model: &Model, config_at_path: Option<&BTreeMap<String, Value>>) -> Option<Named> {
    let states_it = ["model_type", "architectures"]
        .iter()
        .any(|key| model.config.contains_key(*key));
    if states_it || config_at_path.is_some() {
        return None;
    }
    let id = model.path.as_deref().filter(|path| hub::may_be_id(path))?;
    let id = id.to_lowercase();
    let is_named = |parts: &[&str]| parts.iter().any(|part| id.contains(part));
    let family = FAMILIES.iter().find(|(_, parts)| is_named(parts));
    family.map(|(family, _)| *family)
}

/// The family that the built-in trainer does not have, if the model's hub id names one.
pub fn other_family(
    model: &Model,
    config_at_path: Option<&BTreeMap<String, Value>>,
) -> Option<&'static str> {
    match named(model, config_at_path)? {
        Other(family) => Some(family),
        Trained(_) => None,
    }
}

/// The `model_type` of a model whose hub id names a family whose blocks are not Llama's.
pub fn model_type(
    model: &Model,
    config_at_path: Option<&BTreeMap<String, Value>>,
) -> Option<&'static str> {
    match named(model, config_at_path)? {
        Other(_) => None,
        Trained(model_type) => Some(model_type),
    }
}

impl Shape {
    /// Keys that a model of unknown architecture must state: a vocabulary or a width alone does not
    /// determine a shape.
    pub const REQUIRED: [&str; 3] = ["hidden_size", "num_hidden_layers", "vocab_size"];

    /// Whether a size is stated, under its common name or GPT-2's.
    pub fn states(size: &'static str, stated: impl Fn(&str) -> bool) -> bool {
        stated(size) || stated(spelled("gpt2", size))
    }

    /// Whether every size of [`Shape::REQUIRED`] is stated.
    pub fn is_stated(stated: impl Fn(&str) -> bool) -> bool {
        let mut sizes = Shape::REQUIRED.into_iter();
        sizes.all(|size| Shape::states(size, &stated))
    }

    /// Whether the shape of the recipe's model is that of a hub id.
    pub fn is_well_known(model: &Model) -> bool {
        model.path.as_deref().and_then(find).is_some()
    }

    /// The shape of a recipe's model, and one line on its source: the recipe's
    /// keys, over those of the `config.json` at its path (if the caller has read one), over
    /// those of a well-known hub id. `None` if too little is known.
    pub fn of(
        model: &Model,
        config_at_path: Option<&BTreeMap<String, Value>>,
    ) -> Option<(Shape, String)> {
        let known = model.path.as_deref().and_then(find);
        let stated = |key: &str| {
            let own = model.config.get(key);
            own.or_else(|| config_at_path.and_then(|config| config.get(key)))
        };
        if known.is_none() && !Shape::is_stated(|key| stated(key).is_some()) {
            return None;
        }
        let stated_type = stated("model_type").and_then(Value::as_str);
        let family = match stated_type.or_else(|| model_type(model, config_at_path)) {
            Some("mistral") => &MISTRAL,
            Some("qwen2") => &QWEN2,
            Some("qwen3") => &QWEN3,
            Some("smollm3") => &SMOLLM3,
            Some("gemma") => &GEMMA,
            Some("gpt_neox") => &GPT_NEOX,
            Some("gpt2") => &GPT2,
            Some("starcoder2") => &STARCODER2,
            _ => &LLAMA,
        };
        let base = known.map_or(family, |known| &known.shape);
        let shape = base.with(&stated)?;
        let source = match (known, &model.path) {
            _ if config_at_path.is_some() => "config.json".to_owned(),
            (Some(known), Some(path)) if known.id != path => {
                format!("{path} has the shape of {}", known.id)
            }
            (Some(known), _) => known.id.to_owned(),
            (None, _) => "model.config".to_owned(),
        };
        let changed = known.is_some() && shape != *base && config_at_path.is_none();
        let suffix = if changed { ", with keys changed" } else { "" };
        Some((shape, source + suffix))
    }
}

/// Models that are typical for their size.
const TYPICAL: &[&str] = &[
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-360M",
    "meta-llama/Llama-3.2-1B",
    "HuggingFaceTB/SmolLM2-1.7B",
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Llama-2-13b-hf",
    "meta-llama/Llama-2-70b-hf",
    "meta-llama/Llama-3.1-405B",
];

/// The hub id of a model of about this number of parameters; `None` if none is within a third.
pub fn typical(parameters: f64) -> Option<&'static str> {
    let distance = |id: &str| {
        let own = find(id).map_or(f64::INFINITY, |known| known.shape.parameters());
        (own / parameters).ln().abs()
    };
    let nearest = TYPICAL
        .iter()
        .min_by(|a, b| distance(a).total_cmp(&distance(b)))?;
    (distance(nearest) < (4.0_f64 / 3.0).ln()).then_some(*nearest)
}

/// The sizes of the typical models, ascending, as on the command line: `135M`, `6.7B`.
pub fn typical_sizes() -> Vec<String> {
    let shapes = TYPICAL.iter().filter_map(|id| Some(&find(id)?.shape));
    let size = |parameters: f64| match parameters < 1e9 {
        true => format!("{:.0}M", parameters / 1e6),
        false if parameters < 1e10 => format!("{:.1}B", parameters / 1e9),
        false => format!("{:.0}B", parameters / 1e9),
    };
    shapes.map(|shape| size(shape.parameters())).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Write;
    use std::path::{Path, PathBuf};

    use serde_json::json;

    use super::*;
    use crate::recipe::corpus;
    use crate::util::testing::is_kept;

    #[test]
    fn named_sizes_are_found() {
        let sizes = typical_sizes();
        assert_eq!(sizes[0], "135M");
        assert!(sizes.contains(&"13B".to_owned()), "{sizes:?}");
        assert_eq!(sizes.len(), TYPICAL.len());
    }

    #[test]
    fn shapes_have_the_parameters_that_their_hub_pages_state() {
        for known in KNOWN {
            let counted = known.shape.parameters();
            assert_eq!(counted, known.stated as f64, "{}", known.id);
        }
    }

    #[test]
    fn only_an_id_of_the_hub_names_a_family() {
        let family = |path: &str| {
            let model = Model {
                path: Some(path.to_owned()),
                ..Model::default()
            };
            other_family(&model, None)
        };
        assert_eq!(
            family("google/gemma-2-9b-it"),
            Some("Gemma 2 and later ones")
        );
        assert_eq!(family("google/gemma-2b"), None);
        assert_eq!(family("google/gemma-1.1-7b-it"), None);
        assert_eq!(family("pythia-2.8b"), None);
        assert_eq!(family("bigcode/starcoder"), Some("StarCoder"));
        assert_eq!(
            family("Qwen/Qwen2.5-VL-7B"),
            Some("Qwen's multimodal models")
        );
        assert_eq!(family("Qwen/Qwen-7B"), Some("Qwen"));
        assert_eq!(family("Qwen/Qwen3-8B"), None);
        assert_eq!(family("/data/qwen-vs-llama/llama"), None);
        assert_eq!(family("./gemma"), None);
    }

    /// The hub ids that the upstream recipes and scripts name.
    fn upstream_names(recipes: &Path, scripts: PathBuf) -> BTreeSet<String> {
        let key = r#"(?:model_name_or_path|name_or_path|model_id|--model|MODEL(?:_NAME|_PATH)?)[=: ]+['"]?"#;
        let id = r"((?:[A-Za-z0-9][\w.-]*/[A-Za-z][\w.-]*|gpt2[\w-]*))(?:['\s]|$|\x22)";
        let named = regex::Regex::new(&format!("{key}{id}")).unwrap();
        let mut names = BTreeSet::new();
        let mut folders = vec![recipes.to_owned(), scripts];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if let Ok(text) = std::fs::read_to_string(&path) {
                    names.extend(named.captures_iter(&text).map(|found| found[1].to_owned()));
                }
            }
        }
        names
    }

    #[test]
    fn every_model_that_upstream_names_is_in_the_docs_with_its_family() {
        let Some(recipes) = corpus::root() else {
            return;
        };
        let scripts = recipes.join("../scripts");
        if !scripts.is_dir() {
            return;
        }
        let mut page = "<!-- Generated by src/plan/memory/known.rs: UPDATE=1 cargo test --lib -->\n\
            # Models of upstream projects\n\n\
            Each model of the hub that the upstream recipes and scripts name, and the family that the built-in trainer takes \
            it for before it has the model's `config.json`. It refuses the other families by these names; an \
            external trainer decides for itself.\n\n\
            | model | family | built-in trainer |\n|---|---|---|\n"
            .to_owned();
        for name in upstream_names(&recipes, scripts) {
            let (family, trains) = match named(&model(Some(&name), json!({})), None) {
                Some(Trained(family)) => (family, "trains it"),
                Some(Other(family)) => (family, "refuses it"),
                None => ("llama, or another one of its blocks", "trains it"),
            };
            let _ = writeln!(page, "| {name} | {family} | {trains} |");
        }
        is_kept("docs/dialects/upstream-models.md", &page);
    }

    #[test]
    fn every_known_model_is_found_by_its_id() {
        for known in KNOWN {
            assert_eq!(find(known.id).map(|found| found.id), Some(known.id));
        }
        let found = |path| find(path).map(|known| known.id);
        assert_eq!(
            found("HuggingFaceH4/zephyr-7b-gemma-sft-v0.1"),
            Some("google/gemma-7b")
        );
        assert_eq!(
            found("alignment-handbook/zephyr-7b-sft-full"),
            Some("mistralai/Mistral-7B-v0.1")
        );
        assert_eq!(found("acme/new-model"), None);
    }

    fn model(path: Option<&str>, config: Value) -> Model {
        Model {
            path: path.map(str::to_owned),
            config: serde_json::from_value(config).unwrap(),
            ..Model::default()
        }
    }

    #[test]
    fn keys_of_the_recipe_win_over_the_known_shape() {
        let shrunk = model(
            Some("mistralai/Mistral-7B-v0.1"),
            json!({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                   "intermediate_size": 128, "vocab_size": 260}),
        );
        let (shape, source) = Shape::of(&shrunk, None).unwrap();
        assert_eq!((shape.layers, shape.hidden, shape.head_dim), (2, 64, 16));
        assert_eq!(shape.key_value_heads, 4);
        assert_eq!(source, "mistralai/Mistral-7B-v0.1, with keys changed");
    }

    #[test]
    fn a_config_alone_is_enough_if_it_states_the_sizes() {
        let sizes = json!({"hidden_size": 256, "num_hidden_layers": 8, "vocab_size": 4096,
            "num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 688});
        let (shape, _) = Shape::of(&model(None, sizes), None).unwrap();
        assert_eq!(shape.parameters(), 8_425_728.0);
        assert_eq!(
            Shape::of(&model(None, json!({"hidden_size": 256})), None),
            None
        );
        assert_eq!(Shape::of(&model(Some("acme/own"), json!({})), None), None);
    }

    #[test]
    fn absurd_sizes_count_as_unknown() {
        for value in [json!(0), json!(-1), json!(1_u64 << 40), json!("wide")] {
            let model = model(
                Some("mistralai/Mistral-7B-v0.1"),
                json!({"hidden_size": value}),
            );
            assert_eq!(Shape::of(&model, None), None);
        }
    }
}
