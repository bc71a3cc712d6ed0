//! The units of a model, in the order of the forward pass, with Hugging Face's names.
//!
//! Within a block, q, k and v are adjacent, and so are their biases, and gate and up. The kernels use each group as one
//! matrix, `[q + k + v, hidden]` and `[2 × intermediate, hidden]`.

use std::borrow::Cow;
use std::ops::Range;

use rayon::prelude::*;

use super::{
    EngineError, Family, Kind, Layout, ModelConfig, NormKind, Order, Parameter, Role, Unit,
    UnitState,
};

/// Where a family has its modules.
struct Names {
    embedding: &'static str,
    /// Of the blocks; the layer's number follows.
    blocks: &'static str,
    input_norm: &'static str,
    /// Queries, keys and values: three modules, or one.
    qkv: &'static [&'static str],
    output: &'static str,
    middle_norm: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
    final_norm: &'static str,
    head: &'static str,
}

/// Of Llama and the families after it.
const LLAMA: Names = Names {
    embedding: "model.embed_tokens",
    blocks: "model.layers",
    input_norm: "input_layernorm",
    qkv: &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    output: "self_attn.o_proj",
    middle_norm: "post_attention_layernorm",
    gate: "mlp.gate_proj",
    up: "mlp.up_proj",
    down: "mlp.down_proj",
    final_norm: "model.norm",
    head: "lm_head",
};

impl Names {
    fn of(family: Family) -> Names {
        match family {
            Family::GptNeoX => Names {
                embedding: "gpt_neox.embed_in",
                blocks: "gpt_neox.layers",
                qkv: &["attention.query_key_value"],
                output: "attention.dense",
                up: "mlp.dense_h_to_4h",
                down: "mlp.dense_4h_to_h",
                final_norm: "gpt_neox.final_layer_norm",
                head: "embed_out",
                ..LLAMA
            },
            Family::Gpt2 => Names {
                embedding: "transformer.wte",
                blocks: "transformer.h",
                input_norm: "ln_1",
                qkv: &["attn.c_attn"],
                output: "attn.c_proj",
                middle_norm: "ln_2",
                up: "mlp.c_fc",
                down: "mlp.c_proj",
                final_norm: "transformer.ln_f",
                ..LLAMA
            },
            Family::StarCoder2 => Names {
                up: "mlp.c_fc",
                down: "mlp.c_proj",
                ..LLAMA
            },
            _ => LLAMA,
        }
    }
}

/// Position embeddings of GPT-2.
const POSITIONS: &str = "transformer.wpe";

/// The model's units: the embedding, one per block, the final norm with the head.
pub fn layout(config: &ModelConfig) -> Layout {
    let hidden = config.hidden_size;
    let inner = config.intermediate_size;
    let queries = config.queries();
    let keys = config.num_key_value_heads * config.head_dim;

    let names = Names::of(config.family);
    let order = match config.family {
        Family::Gpt2 => Order::Transposed,
        _ => Order::Native,
    };

    let mut embedding = Unit::new("embed".to_owned());
    let table = [config.vocab_size, hidden];
    embedding.matrix(Role::Embedding, names.embedding, table, Order::Native);
    if config.position_embeddings {
        let table = [config.max_position_embeddings, hidden];
        embedding.matrix(Role::Positions, POSITIONS, table, Order::Native);
    }

    let digits = config.num_hidden_layers.saturating_sub(1).to_string().len();
    let blocks = (0..config.num_hidden_layers).map(|layer| {
        let at = |module: &str| format!("{}.{layer}.{module}", names.blocks);
        let mut block = Unit::new(format!("block-{layer:0width$}", width = digits.max(2)));
        block.norm(config, Role::InputNorm, &at(names.input_norm));
        let projections = match names.qkv {
            [one] => vec![(Role::Qkv, Role::QkvBias, *one, config.qkv())],
            several => {
                let roles = [
                    (Role::Query, Role::QueryBias, queries),
                    (Role::Key, Role::KeyBias, keys),
                    (Role::Value, Role::ValueBias, keys),
                ];
                let all = roles.into_iter().zip(several);
                all.map(|((role, bias, width), name)| (role, bias, *name, width))
                    .collect()
            }
        };
        let order_of_qkv = match config.family {
            Family::GptNeoX => Order::ByHead(config.head_dim),
            _ => order,
        };
        for (role, _, module, width) in &projections {
            block.matrix(*role, &at(module), [*width, hidden], order_of_qkv);
        }
        for (_, role, module, width) in &projections {
            block.bias(config.qkv_biases, *role, &at(module), *width, order_of_qkv);
        }
        if config.query_key_norms {
            block.vector(Role::QueryNorm, &at("self_attn.q_norm"), config.head_dim);
            block.vector(Role::KeyNorm, &at("self_attn.k_norm"), config.head_dim);
        }
        let output = at(names.output);
        block.matrix(Role::Output, &output, [hidden, queries], order);
        block.bias(
            config.output_bias,
            Role::OutputBias,
            &output,
            hidden,
            Order::Native,
        );
        block.norm(config, Role::MiddleNorm, &at(names.middle_norm));
        let gate = config
            .gated
            .then_some((Role::Gate, Role::GateBias, names.gate));
        let inputs = gate.into_iter().chain([(Role::Up, Role::UpBias, names.up)]);
        for (role, _, module) in inputs.clone() {
            block.matrix(role, &at(module), [inner, hidden], order);
        }
        for (_, role, module) in inputs {
            block.bias(config.mlp_biases, role, &at(module), inner, Order::Native);
        }
        let down = [hidden, inner];
        block.matrix(Role::Down, &at(names.down), down, order);
        block.bias(
            config.mlp_biases,
            Role::DownBias,
            &at(names.down),
            hidden,
            Order::Native,
        );
        block
    });

    let mut head = Unit::new("head".to_owned());
    head.norm(config, Role::FinalNorm, names.final_norm);
    if !config.tie_word_embeddings {
        let shape = [config.vocab_size, hidden];
        head.matrix(Role::Head, names.head, shape, Order::Native);
    }

    let units = std::iter::once(embedding)
        .chain(blocks)
        .chain(std::iter::once(head))
        .collect();
    Layout { units }
}

impl Layout {
    /// Number of parameters of all units.
    pub fn len(&self) -> u64 {
        self.units.iter().map(|unit| unit.len as u64).sum()
    }

    /// Whether the model has no parameters.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// A unit by its index.
    pub(super) fn unit(&self, index: usize) -> Result<&Unit, EngineError> {
        self.units.get(index).ok_or_else(|| {
            EngineError::Shape(format!(
                "there is no unit {index}, the model has {}",
                self.units.len()
            ))
        })
    }

    /// Length of the largest unit, in elements.
    pub fn largest_unit(&self) -> usize {
        self.units.iter().map(|unit| unit.len).max().unwrap_or(0)
    }
}

impl Unit {
    pub(super) fn new(name: String) -> Unit {
        Unit {
            name,
            parameters: Vec::new(),
            len: 0,
        }
    }

    /// A matrix of this native shape.
    pub(super) fn matrix(
        &mut self,
        role: Role,
        module: &str,
        [rows, columns]: [usize; 2],
        order: Order,
    ) {
        let shape = match order {
            Order::Transposed => vec![columns, rows],
            Order::Native | Order::ByHead(_) => vec![rows, columns],
        };
        self.push(role, format!("{module}.weight"), shape, order);
    }

    /// The weights of a norm of the residual stream, and its bias if it has one.
    fn norm(&mut self, config: &ModelConfig, role: Role, module: &str) {
        self.vector(role, module, config.hidden_size);
        let is_layer_norm = config.norm == NormKind::Layer;
        self.bias(
            is_layer_norm,
            Role::NormBias,
            module,
            config.hidden_size,
            Order::Native,
        );
    }

    fn vector(&mut self, role: Role, module: &str, width: usize) {
        self.push(role, format!("{module}.weight"), vec![width], Order::Native);
    }

    /// A bias, if there is one.
    fn bias(&mut self, is_there: bool, role: Role, module: &str, width: usize, order: Order) {
        let order = match order {
            Order::Transposed => Order::Native,
            order => order,
        };
        if is_there {
            self.push(role, format!("{module}.bias"), vec![width], order);
        }
    }

    /// Another unit's parameter, under this name.
    pub(super) fn whole(&mut self, parameter: &Parameter, name: String) {
        let Parameter {
            role, shape, order, ..
        } = parameter;
        self.push(*role, name, shape.clone(), *order);
    }

    fn push(&mut self, role: Role, name: String, shape: Vec<usize>, order: Order) {
        let parameter = Parameter {
            name,
            role,
            shape,
            offset: self.len,
            order,
        };
        self.len += parameter.len();
        self.parameters.push(parameter);
    }

    /// Puts a state from the engine's order into that of files.
    pub(super) fn state_to_files(&self, state: &mut UnitState) {
        for values in state.vectors_mut() {
            self.reorder(values, |shape| shape);
        }
    }

    /// A state from the order of files in the engine's.
    pub(super) fn state_from_files<'s>(&self, state: &'s UnitState) -> Cow<'s, UnitState> {
        let mut state = Cow::Borrowed(state);
        if self.is_reordered() {
            for values in state.to_mut().vectors_mut() {
                self.reorder(values, |[rows, columns]| [columns, rows]);
            }
        }
        state
    }

    /// Parameters from the order of files in the engine's.
    pub(super) fn parameters_from_files<'p>(&self, parameters: &'p [f32]) -> Cow<'p, [f32]> {
        let mut parameters = Cow::Borrowed(parameters);
        if self.is_reordered() {
            self.reorder(parameters.to_mut(), |[rows, columns]| [columns, rows]);
        }
        parameters
    }

    fn is_reordered(&self) -> bool {
        self.parameters.iter().any(|p| p.order != Order::Native)
    }

    /// Transposes the matrices of blocks that files have transposed. `shape`: from that of the engine to that before.
    fn reorder(&self, values: &mut [f32], shape: impl Fn([usize; 2]) -> [usize; 2]) {
        for parameter in &self.parameters {
            if let Some((of_engine, block)) = parameter.reordered() {
                transpose(&mut values[parameter.range()], shape(of_engine), block);
            }
        }
    }

    /// Whether tokens are looked up in it. A trained embedding beside adapters is copied to the frozen model for that.
    pub(super) fn is_looked_up(&self) -> bool {
        self.has(Role::Embedding) && !self.has(Role::AdapterA)
    }

    pub(super) fn has(&self, role: Role) -> bool {
        self.parameters
            .iter()
            .any(|parameter| parameter.role == role)
    }

    /// The parameter with this role. The unit has one: [`layout`] made it for the same model.
    pub(super) fn of(&self, role: Role) -> &Parameter {
        let mut all = self.parameters.iter();
        all.find(|parameter| parameter.role == role)
            .unwrap_or_else(|| panic!("{} has no {role:?}", self.name))
    }

    /// Vectors: weights of norms, and biases.
    pub(super) fn vectors(&self) -> impl Iterator<Item = &Parameter> {
        let all = self.parameters.iter();
        all.filter(|parameter| parameter.role.kind() != Kind::Matrix)
    }

    /// Refuses a state of another length.
    pub(super) fn check_state(&self, state: &UnitState) -> Result<(), EngineError> {
        for (what, values) in [
            ("weights", &state.parameters),
            ("first moments", &state.exp_avg),
            ("second moments", &state.exp_avg_sq),
        ] {
            self.check_len(what, values)?;
        }
        Ok(())
    }

    /// Refuses values of another length.
    pub(super) fn check_len(&self, what: &str, values: &[f32]) -> Result<(), EngineError> {
        if values.len() == self.len {
            return Ok(());
        }
        Err(EngineError::Shape(format!(
            "{} has {} parameters, its {what} are {}",
            self.name,
            self.len,
            values.len()
        )))
    }

    /// The ranges within a `part` of the unit whose parameters have the same weight decay: whether it applies.
    pub(super) fn decay_ranges(&self, part: Range<usize>) -> Vec<(Range<usize>, bool)> {
        let mut ranges: Vec<(Range<usize>, bool)> = Vec::new();
        for parameter in &self.parameters {
            let range = parameter.range();
            let (from, to) = (range.start.max(part.start), range.end.min(part.end));
            if from >= to {
                continue;
            }
            let range = from - part.start..to - part.start;
            match ranges.last_mut() {
                Some((last, decay)) if *decay == parameter.decays() => last.end = range.end,
                _ => ranges.push((range, parameter.decays())),
            }
        }
        ranges
    }
}

impl Parameter {
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// The name of the module that has it.
    pub fn module(&self) -> &str {
        let name = &self.name;
        name.rsplit_once('.').map_or(name, |(module, _)| module)
    }

    /// Row length of a matrix in the engine's order.
    pub(super) fn inputs(&self) -> usize {
        match self.order {
            Order::Transposed => self.shape[0],
            Order::Native | Order::ByHead(_) => self.shape[1],
        }
    }

    /// The matrix of blocks that files have transposed: its shape in the engine's order, and the elements of a block.
    fn reordered(&self) -> Option<([usize; 2], usize)> {
        match self.order {
            Order::Native => None,
            Order::Transposed => Some(([self.shape[1], self.shape[0]], 1)),
            Order::ByHead(head_dim) => {
                let heads = self.shape[0] / (3 * head_dim);
                Some(([3, heads], self.len() / (3 * heads)))
            }
        }
    }

    /// Whether the tensor has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether weight decay applies: to matrices, as in transformers' Trainer.
    pub fn decays(&self) -> bool {
        self.role.kind() == Kind::Matrix
    }

    /// Range of the tensor within its unit, in elements.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.offset..self.offset + self.len()
    }
}

impl UnitState {
    fn vectors_mut(&mut self) -> [&mut Vec<f32>; 3] {
        [
            &mut self.parameters,
            &mut self.exp_avg,
            &mut self.exp_avg_sq,
        ]
    }
}

/// Transposes a matrix of blocks in place.
fn transpose(values: &mut [f32], [rows, columns]: [usize; 2], block: usize) {
    let before = values.to_vec();
    let of_columns = values.par_chunks_mut(rows * block).enumerate();
    of_columns.for_each(|(column, to)| {
        for (row, to) in to.chunks_exact_mut(block).enumerate() {
            let from = (row * columns + column) * block;
            to.copy_from_slice(&before[from..from + block]);
        }
    });
}

/// The part of a unit of `len` elements that one rank holds. All parts but the last are equally long.
pub fn part(len: usize, rank: usize, world: usize) -> Range<usize> {
    let part = len.div_ceil(world);
    (rank * part).min(len)..((rank + 1) * part).min(len)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> ModelConfig {
        ModelConfig {
            hidden_size: 256,
            intermediate_size: 688,
            num_hidden_layers: 8,
            num_attention_heads: 8,
            num_key_value_heads: 8,
            head_dim: 32,
            vocab_size: 4096,
            max_position_embeddings: 256,
            norm_eps: 1e-5,
            rope_theta: 10000.0,
            ..ModelConfig::default()
        }
    }

    #[test]
    fn parameter_count_matches_pytorch() {
        // The PyTorch model of the same shape in shared/bench has 8 425 728 parameters.
        assert_eq!(layout(&config()).len(), 8_425_728);
    }

    #[test]
    fn tied_head_has_only_the_norm() {
        let tied = layout(&ModelConfig {
            tie_word_embeddings: true,
            ..config()
        });
        let head = tied.units.last().unwrap();
        assert_eq!(head.len, 256);
        assert_eq!(head.parameters[0].name, "model.norm.weight");
        assert_eq!(tied.len(), 8_425_728 - 4096 * 256);
    }

    #[test]
    fn parts_of_a_unit_decay_as_the_whole() {
        let unit = &layout(&config()).units[1];
        let flags = |part: Range<usize>| {
            let ranges = unit.decay_ranges(part).into_iter();
            let flags = ranges.flat_map(|(range, decay)| range.map(move |at| (at, decay)));
            flags.collect::<Vec<_>>()
        };
        let whole = flags(0..unit.len);
        assert!(whole.iter().map(|(at, _)| *at).eq(0..unit.len));
        // A norm ends within the second part; the last one is padded.
        let held = unit.len / 3 + 100;
        for start in (0..unit.len).step_by(held) {
            let end = (start + held).min(unit.len);
            let part = whole[start..end]
                .iter()
                .map(|(at, decay)| (at - start, *decay));
            assert!(flags(start..start + held).into_iter().eq(part));
        }
    }

    #[test]
    fn parameters_are_adjacent_and_fill_their_unit() {
        let all = ModelConfig {
            qkv_biases: true,
            query_key_norms: true,
            ..config()
        };
        for unit in layout(&all).units {
            let mut at = 0;
            for parameter in &unit.parameters {
                assert_eq!(parameter.offset, at, "{}", parameter.name);
                at = parameter.range().end;
                assert_eq!(parameter.decays(), parameter.shape.len() == 2);
            }
            assert_eq!(unit.len, at);
        }
    }
}
