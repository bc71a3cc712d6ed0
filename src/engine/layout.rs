//! The units of a model, in the order of the forward pass, with Hugging Face's names.
//!
//! Within a block, q, k and v are adjacent, and so are their biases, and gate and up. The kernels use each group as one
//! matrix, `[q + k + v, hidden]` and `[2 × intermediate, hidden]`.

use std::ops::Range;

use super::{EngineError, Kind, Layout, ModelConfig, Parameter, Role, Unit, UnitState};

/// The model's units: the embedding, one per block, the final norm with the head.
pub fn layout(config: &ModelConfig) -> Layout {
    let hidden = config.hidden_size;
    let inner = config.intermediate_size;
    let queries = config.queries();
    let keys = config.num_key_value_heads * config.head_dim;

    let mut embedding = Unit::new("embed".to_owned());
    embedding.matrix(
        Role::Embedding,
        "model.embed_tokens",
        config.vocab_size,
        hidden,
    );

    let digits = config.num_hidden_layers.saturating_sub(1).to_string().len();
    let blocks = (0..config.num_hidden_layers).map(|layer| {
        let at = |module: &str| format!("model.layers.{layer}.{module}");
        let mut block = Unit::new(format!("block-{layer:0width$}", width = digits.max(2)));
        block.norm(Role::InputNorm, &at("input_layernorm"), hidden);
        let projections = [
            (Role::Query, Role::QueryBias, "self_attn.q_proj", queries),
            (Role::Key, Role::KeyBias, "self_attn.k_proj", keys),
            (Role::Value, Role::ValueBias, "self_attn.v_proj", keys),
        ];
        for (role, _, module, width) in projections {
            block.matrix(role, &at(module), width, hidden);
        }
        for (_, role, module, width) in projections.into_iter().filter(|_| config.qkv_biases) {
            block.push(role, format!("{}.bias", at(module)), vec![width]);
        }
        if config.query_key_norms {
            block.norm(Role::QueryNorm, &at("self_attn.q_norm"), config.head_dim);
            block.norm(Role::KeyNorm, &at("self_attn.k_norm"), config.head_dim);
        }
        block.matrix(Role::Output, &at("self_attn.o_proj"), hidden, queries);
        block.norm(Role::MiddleNorm, &at("post_attention_layernorm"), hidden);
        block.matrix(Role::Gate, &at("mlp.gate_proj"), inner, hidden);
        block.matrix(Role::Up, &at("mlp.up_proj"), inner, hidden);
        block.matrix(Role::Down, &at("mlp.down_proj"), hidden, inner);
        block
    });

    let mut head = Unit::new("head".to_owned());
    head.norm(Role::FinalNorm, "model.norm", hidden);
    if !config.tie_word_embeddings {
        head.matrix(Role::Head, "lm_head", config.vocab_size, hidden);
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
    fn new(name: String) -> Unit {
        Unit {
            name,
            parameters: Vec::new(),
            len: 0,
        }
    }

    fn matrix(&mut self, role: Role, module: &str, rows: usize, columns: usize) {
        self.push(role, format!("{module}.weight"), vec![rows, columns]);
    }

    fn norm(&mut self, role: Role, module: &str, width: usize) {
        self.push(role, format!("{module}.weight"), vec![width]);
    }

    fn push(&mut self, role: Role, name: String, shape: Vec<usize>) {
        let parameter = Parameter {
            name,
            role,
            shape,
            offset: self.len,
        };
        self.len += parameter.len();
        self.parameters.push(parameter);
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
            if values.len() != self.len {
                return Err(EngineError::Shape(format!(
                    "{} has {} parameters, its {what} are {}",
                    self.name,
                    self.len,
                    values.len()
                )));
            }
        }
        Ok(())
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
            rms_norm_eps: 1e-5,
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
