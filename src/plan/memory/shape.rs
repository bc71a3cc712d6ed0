//! The sizes of a model that its memory depends on.

use serde_json::Value;

use crate::util::model_keys::spelled;

/// The largest dimension; beyond it a shape counts as unknown.
const MAX_DIMENSION: u64 = 1 << 22;
/// The largest number of layers.
const MAX_LAYERS: u64 = 1 << 14;
/// The largest number of experts of a layer.
const MAX_EXPERTS: u64 = 1 << 12;
/// Experts that see each token in a mixture (Mixtral's `num_experts_per_tok`).
const ACTIVE_EXPERTS: u64 = 2;

/// A decoder-only transformer. Sizes are counts, not bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// `num_hidden_layers`.
    pub layers: u64,
    /// `hidden_size`.
    pub hidden: u64,
    /// `intermediate_size`.
    pub intermediate: u64,
    /// `num_attention_heads`.
    pub heads: u64,
    /// `num_key_value_heads`.
    pub key_value_heads: u64,
    /// `head_dim`.
    pub head_dim: u64,
    /// Head size and key-value heads do not follow from hidden size and heads (Qwen 3, Gemma).
    pub fixed_heads: bool,
    /// They always follow from them, whatever is stated (GPT-NeoX, GPT-2).
    pub derived_heads: bool,
    /// `vocab_size`.
    pub vocabulary: u64,
    /// `tie_word_embeddings`.
    pub tied: bool,
    /// `num_local_experts`; 1 for dense models.
    pub experts: u64,
    /// Gated MLP of three matrices (SwiGLU, GEGLU), else two.
    pub gated: bool,
    pub biases: Biases,
    /// No key changes the biases (Mistral, Qwen 2, GPT-2).
    pub fixed_biases: bool,
    /// Positions with an embedding (GPT-2); 0 without.
    pub positions: u64,
    /// Attention and MLP read the same input (GPT-NeoX).
    pub parallel_residual: bool,
    /// Norms with a bias (LayerNorm), else without (RMSNorm).
    pub norm_bias: bool,
    /// Norms of each head's queries and keys (Qwen 3).
    pub head_norms: bool,
}

/// Which linear layers of a block have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Biases {
    /// Queries, keys and values.
    pub qkv: bool,
    /// Attention's output projection.
    pub output: bool,
    pub mlp: bool,
}

impl Biases {
    pub(super) const NONE: Biases = Biases {
        qkv: false,
        output: false,
        mlp: false,
    };
    pub(super) const QKV: Biases = Biases {
        qkv: true,
        ..Biases::NONE
    };
    pub(super) const ALL: Biases = Biases {
        qkv: true,
        output: true,
        mlp: true,
    };
}

/// Llama 7B, the defaults of `LlamaConfig` (transformers 5.23.0).
pub(super) const LLAMA: Shape = Shape {
    layers: 32,
    hidden: 4096,
    intermediate: 11008,
    heads: 32,
    key_value_heads: 32,
    head_dim: 128,
    fixed_heads: false,
    derived_heads: false,
    vocabulary: 32000,
    tied: false,
    experts: 1,
    gated: true,
    biases: Biases::NONE,
    fixed_biases: false,
    positions: 0,
    parallel_residual: false,
    norm_bias: false,
    head_norms: false,
};

/// Mistral 7B, the defaults of `MistralConfig` (transformers 5.23.0).
pub(super) const MISTRAL: Shape = Shape {
    intermediate: 14336,
    key_value_heads: 8,
    fixed_biases: true,
    ..LLAMA
};

/// The defaults of `Qwen2Config` (transformers 5.24.0).
pub(super) const QWEN2: Shape = Shape {
    intermediate: 22016,
    vocabulary: 151_936,
    biases: Biases::QKV,
    fixed_biases: true,
    ..LLAMA
};

/// The defaults of `Qwen3Config` (transformers 5.24.0).
pub(super) const QWEN3: Shape = Shape {
    biases: Biases::NONE,
    fixed_biases: false,
    fixed_heads: true,
    head_norms: true,
    ..QWEN2
};

/// The defaults of `SmolLM3Config` (transformers 5.24.0).
pub(super) const SMOLLM3: Shape = Shape {
    layers: 36,
    hidden: 2048,
    heads: 16,
    key_value_heads: 4,
    vocabulary: 128_256,
    tied: true,
    ..LLAMA
};

/// Gemma 7B, the defaults of `GemmaConfig` (transformers 5.24.0).
pub(super) const GEMMA: Shape = Shape {
    layers: 28,
    hidden: 3072,
    intermediate: 24576,
    heads: 16,
    key_value_heads: 16,
    head_dim: 256,
    fixed_heads: true,
    vocabulary: 256_000,
    tied: true,
    ..LLAMA
};

/// LayerNorm, biases and an MLP without gates.
const PLAIN: Shape = Shape {
    gated: false,
    biases: Biases::ALL,
    norm_bias: true,
    ..LLAMA
};

/// The defaults of `GPTNeoXConfig` (transformers 5.24.0).
pub(super) const GPT_NEOX: Shape = Shape {
    layers: 44,
    hidden: 6144,
    intermediate: 24576,
    heads: 64,
    key_value_heads: 64,
    head_dim: 96,
    derived_heads: true,
    vocabulary: 50432,
    parallel_residual: true,
    ..PLAIN
};

/// The defaults of `GPT2Config` (transformers 5.24.0).
pub(super) const GPT2: Shape = Shape {
    layers: 12,
    hidden: 768,
    intermediate: 3072,
    heads: 12,
    key_value_heads: 12,
    head_dim: 64,
    derived_heads: true,
    vocabulary: 50257,
    positions: 1024,
    fixed_biases: true,
    tied: true,
    ..PLAIN
};

/// The defaults of `Starcoder2Config` (transformers 5.24.0).
pub(super) const STARCODER2: Shape = Shape {
    layers: 30,
    hidden: 3072,
    intermediate: 12288,
    heads: 24,
    key_value_heads: 2,
    head_dim: 128,
    vocabulary: 49152,
    tied: true,
    ..PLAIN
};

impl Shape {
    /// This shape, overridden by the keys of a `config.json`, also in GPT-2's spelling.
    pub(super) fn with<'v>(&self, value: &impl Fn(&str) -> Option<&'v Value>) -> Option<Shape> {
        let stated = |key: &'static str| value(spelled("gpt2", key)).or_else(|| value(key));
        let flag = |key: &'static str| stated(key).and_then(Value::as_bool);
        let size = |key: &'static str, default: u64, max: u64| match stated(key) {
            None | Some(Value::Null) => Some(default),
            Some(value) => value.as_u64().filter(|n| (1..=max).contains(n)),
        };
        let hidden = size("hidden_size", self.hidden, MAX_DIMENSION)?;
        let heads = size("num_attention_heads", self.heads, MAX_DIMENSION)?;
        let same_heads = (hidden, heads) == (self.hidden, self.heads);
        let key_value_heads = if same_heads || self.fixed_heads || self.key_value_heads < self.heads
        {
            self.key_value_heads.min(heads)
        } else {
            heads
        };
        let head_dim = if same_heads || self.fixed_heads {
            self.head_dim
        } else {
            (hidden / heads).max(1)
        };
        let intermediate = match self.positions {
            0 => self.intermediate,
            // GPT-2's follows from its hidden size.
            _ => (4 * hidden).min(MAX_DIMENSION),
        };
        let positions = match self.positions {
            0 => 0,
            default => size("max_position_embeddings", default, MAX_DIMENSION)?,
        };
        let of_attention = flag("attention_bias").or_else(|| flag("use_bias"));
        let of_mlp = flag("mlp_bias").or_else(|| flag("use_bias"));
        let biases = match self.fixed_biases {
            true => self.biases,
            false => Biases {
                qkv: of_attention.unwrap_or(self.biases.qkv),
                output: of_attention.unwrap_or(self.biases.output),
                mlp: of_mlp.unwrap_or(self.biases.mlp),
            },
        };
        Some(Shape {
            layers: size("num_hidden_layers", self.layers, MAX_LAYERS)?,
            hidden,
            intermediate: size("intermediate_size", intermediate, MAX_DIMENSION)?,
            heads,
            key_value_heads: match self.derived_heads {
                true => heads,
                false => size("num_key_value_heads", key_value_heads, MAX_DIMENSION)?,
            },
            head_dim: match self.derived_heads {
                true => (hidden / heads).max(1),
                false => size("head_dim", head_dim, MAX_DIMENSION)?,
            },
            vocabulary: size("vocab_size", self.vocabulary, MAX_DIMENSION)?,
            tied: flag("tie_word_embeddings").unwrap_or(self.tied),
            biases,
            positions,
            parallel_residual: self.parallel_residual
                && flag("use_parallel_residual").unwrap_or(true),
            experts: size("num_local_experts", self.experts, MAX_EXPERTS)?,
            ..*self
        })
    }

    /// Parameters of the whole model.
    pub fn parameters(&self) -> f64 {
        self.embeddings() + self.head() + self.layers as f64 * self.block() + self.norm()
    }

    /// Parameters of the head, unless it is the embedding.
    pub fn head(&self) -> f64 {
        if self.tied { 0.0 } else { self.embedding() }
    }

    /// Parameters of one block.
    pub fn block(&self) -> f64 {
        let hidden = self.hidden as f64;
        let intermediate = self.intermediate as f64;
        let queries = self.queries() as f64;
        let keys = self.keys() as f64;
        let experts = self.experts as f64;
        let router = if self.experts > 1 {
            hidden * experts
        } else {
            0.0
        };
        let matrices = if self.gated { 3.0 } else { 2.0 };
        let Biases { qkv, output, mlp } = self.biases;
        let biases = [
            (qkv, queries + 2.0 * keys),
            (output, hidden),
            (mlp, (matrices - 1.0) * intermediate + hidden),
        ];
        let biases: f64 = biases.iter().filter(|(has, _)| *has).map(|(_, n)| n).sum();
        let head_norms = if self.head_norms {
            2.0 * self.head_dim as f64
        } else {
            0.0
        };
        2.0 * hidden * (queries + keys)
            + experts * matrices * hidden * intermediate
            + router
            + biases
            + head_norms
            + 2.0 * self.norm()
    }

    /// Linear layers of a block: the last parts of their names in transformers' models, how many there are, and the sum
    /// of their inputs and outputs.
    fn linear(&self) -> [(&'static [&'static str], u64, u64); 7] {
        let experts = self.experts;
        let gates = if self.gated { experts } else { 0 };
        let (queries, keys) = (self.hidden + self.queries(), self.hidden + self.keys());
        let mlp = self.hidden + self.intermediate;
        [
            (&["q_proj"], 1, queries),
            (&["k_proj"], 1, keys),
            (&["v_proj"], 1, keys),
            (&["o_proj", "dense"], 1, queries),
            (&["gate_proj", "w1"], gates, mlp),
            (&["up_proj", "w3", "c_fc", "dense_h_to_4h"], experts, mlp),
            (
                &["down_proj", "w2", "c_proj", "dense_4h_to_h"],
                experts,
                mlp,
            ),
        ]
    }

    /// The sum of inputs and outputs of the linear layers with this name in the whole model; `None` for a name that is not
    /// known.
    pub(super) fn sizes_of(&self, module: &str) -> Option<u64> {
        match last_part(module) {
            "embed_tokens" | "embed_in" | "lm_head" | "embed_out" => {
                Some(self.vocabulary + self.hidden)
            }
            "query_key_value" | "qkv_proj" => {
                Some(self.layers * (self.hidden + self.queries() + 2 * self.keys()))
            }
            name => {
                let mut layers = self.linear().into_iter();
                let (_, count, sizes) = layers.find(|(names, ..)| names.contains(&name))?;
                Some(self.layers * count * sizes)
            }
        }
    }

    /// Parameters of adapters of this rank: rank × (inputs + outputs) for each linear layer of these names (LoRA, arXiv
    /// 2106.09685). Every linear layer of the blocks counts if there is no name, or one that is not known.
    pub fn adapters(&self, rank: u64, modules: &[String]) -> f64 {
        let stated: Option<u64> = modules.iter().map(|name| self.sizes_of(name)).sum();
        let every = || {
            let of_block = self.linear().map(|(_, count, sizes)| count * sizes);
            self.layers * of_block.iter().sum::<u64>()
        };
        rank as f64 * stated.filter(|sizes| *sizes > 0).unwrap_or_else(every) as f64
    }

    /// Parameters of the modules of these names. One that is not known counts as an embedding.
    pub fn whole(&self, modules: &[String]) -> f64 {
        let norms = (2 * self.layers + 1) as f64 * self.norm();
        let head_norms = (self.layers * self.head_dim) as f64;
        let one = |module: &String| match last_part(module) {
            "q_norm" | "k_norm" => head_norms,
            // Ends of all names of norms.
            "norm" if self.head_norms => norms + 2.0 * head_norms,
            "norm" | "layernorm" => norms,
            "ln_f" | "final_layer_norm" => self.norm(),
            name if name.contains("norm") || name.starts_with("ln_") => {
                self.layers as f64 * self.norm()
            }
            "score" | "v_head" => self.hidden as f64,
            "wpe" => (self.positions * self.hidden) as f64,
            "query_key_value" | "c_attn" | "qkv_proj" => {
                (self.layers * self.hidden * self.qkv()) as f64
            }
            name => {
                let mut layers = self.linear().into_iter();
                let layer = layers.find(|(names, ..)| names.contains(&name));
                layer.map_or(self.embedding(), |(_, count, sizes)| {
                    // One side of each is the hidden size.
                    (self.layers * count * self.hidden * (sizes - self.hidden)) as f64
                })
            }
        };
        modules.iter().map(one).sum()
    }

    /// Parameters of the embedding of tokens, or of the head.
    pub fn embedding(&self) -> f64 {
        self.vocabulary as f64 * self.hidden as f64
    }

    /// Parameters of the embeddings of tokens and positions.
    pub fn embeddings(&self) -> f64 {
        self.embedding() + self.positions as f64 * self.hidden as f64
    }

    /// Elements that one block keeps per token for its backward pass: its input, both norms'
    /// outputs, the attention's queries, keys, values and output, queries and keys before their norms, the middle of the
    /// residual stream, and the MLP's inner values. Attention scores are not kept (fused attention).
    pub fn kept_per_token(&self) -> f64 {
        let inner = if self.gated { 4.0 } else { 2.0 };
        let experts = self.experts.min(ACTIVE_EXPERTS) as f64;
        let attention = if self.head_norms { 3.0 } else { 2.0 };
        5.0 * self.hidden as f64
            + attention * (self.queries() + self.keys()) as f64
            + inner * experts * self.intermediate as f64
    }

    /// Parameters of one norm.
    pub fn norm(&self) -> f64 {
        self.hidden as f64 * if self.norm_bias { 2.0 } else { 1.0 }
    }

    /// Elements of the widest vectors of a block whose gradients are summed together: a norm's weights and bias, the biases
    /// of adjacent layers, or the norms of queries and keys.
    pub fn widest_vectors(&self) -> f64 {
        let gates = if self.gated { 2 } else { 1 };
        [
            (self.biases.qkv, self.queries() + 2 * self.keys()),
            (self.biases.mlp, gates * self.intermediate),
            (self.head_norms, 2 * self.head_dim),
        ]
        .into_iter()
        .filter(|(has_them, _)| *has_them)
        .fold(self.norm(), |widest, (_, width)| widest.max(width as f64))
    }

    /// Elements of a token that a block keeps of attention and MLP in the engines: queries, keys and values, queries and keys
    /// before their norms, the output of attention, and gates and ups.
    pub fn stashed(&self) -> f64 {
        let unnormed = if self.head_norms {
            self.queries() + self.keys()
        } else {
            0
        };
        let gates = if self.gated { 2 } else { 1 };
        (self.qkv() + unnormed + self.queries() + gates * self.intermediate) as f64
    }

    /// Elements of a token's queries, keys and values.
    pub fn qkv(&self) -> u64 {
        self.queries() + 2 * self.keys()
    }

    /// Elements of the widest input of an adapter.
    pub fn widest_input(&self) -> f64 {
        self.hidden.max(self.queries()).max(self.intermediate) as f64
    }

    /// Elements of a token's queries.
    pub fn queries(&self) -> u64 {
        self.heads * self.head_dim
    }

    /// Elements of a token's keys, and of its values.
    pub fn keys(&self) -> u64 {
        self.key_value_heads * self.head_dim
    }
}

/// The last part of a module's name: `q_proj` of `model.layers.0.self_attn.q_proj`.
fn last_part(module: &str) -> &str {
    module.rsplit('.').next().unwrap_or(module)
}
