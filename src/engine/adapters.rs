//! Low-rank adapters of linear layers (LoRA, arXiv 2106.09685), as PEFT has them: beside x · Wᵀ, whose weights are frozen
//! like all others of the model, a layer computes scale · dropout(x) · Aᵀ · Bᵀ.

use std::borrow::Cow;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{EngineError, Kind, Layout, ModelConfig, Order, Role, Unit, initial, not_frozen};

/// The name of the unit of all that is trained.
pub const ADAPTER: &str = "adapter";

/// The adapters of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Adapters {
    pub rank: usize,
    /// Their output is multiplied by alpha / rank, or by alpha / √rank where they are rank-stabilised (arXiv 2312.03732).
    pub alpha: f64,
    pub rank_stabilized: bool,
    /// The share of their inputs that is 0 in training.
    pub dropout: f64,
    /// The linear layers that have one, by the last parts of their modules' names; empty: all of the blocks.
    pub modules: Vec<String>,
    /// The modules that are trained whole beside them, by the ends of their names (PEFT's `modules_to_save`).
    #[serde(default)]
    pub saved: Vec<String>,
    /// The linear layers of the blocks below are in 4 bits.
    #[serde(default)]
    pub is_quantised: bool,
    /// The scales of these are in 8 bits (double quantisation).
    #[serde(default)]
    pub is_nested: bool,
    /// What draws new ones.
    pub seed: u64,
}

/// An adapter of one linear layer, whose matrices are ranges of the unit of all adapters.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    /// Among all adapters: each draws its own dropout.
    pub number: usize,
    /// A, `[rank, inputs]`.
    pub a: Range<usize>,
    /// B, `[outputs, rank]`.
    pub b: Range<usize>,
    /// The layer's columns in the output of the layers that are computed together.
    pub columns: Range<usize>,
}

/// Adjacent parameters of a unit of the model that are trained whole. The frozen model has their present values, which walks
/// read.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Saved {
    /// The number of the model's unit.
    pub unit: usize,
    /// Within that unit.
    pub range: Range<usize>,
    /// Their first element within the unit of what is trained.
    pub at: usize,
}

impl Saved {
    /// Where a range of a unit of the model is trained; `None` if it is not.
    pub fn place(&self, unit: usize, range: &Range<usize>) -> Option<Range<usize>> {
        let has =
            self.unit == unit && self.range.start <= range.start && range.end <= self.range.end;
        let start = self.at + range.start.checked_sub(self.range.start)?;
        has.then(|| start..start + range.len())
    }

    /// Where all of it is trained.
    pub fn trained(&self) -> Range<usize> {
        self.at..self.at + self.range.len()
    }
}

/// The adapters of a model, and where they are.
#[derive(Debug, Clone)]
pub struct Adapted {
    pub settings: Adapters,
    /// One unit with all adapters, and then the modules that are trained whole.
    pub trained: Layout,
    pub(super) saved: Vec<Saved>,
    /// By unit of the model and role of the weights: A and B.
    places: Vec<(usize, Role, Range<usize>, Range<usize>)>,
}

impl Adapted {
    /// Adapters of a model with this layout.
    pub fn new(model: &Layout, settings: Adapters) -> Adapted {
        let mut unit = Unit::new(ADAPTER.to_owned());
        let mut places = Vec::new();
        for (index, of) in model.units.iter().enumerate() {
            for parameter in of.parameters.iter().filter(|it| is_layer(it.role)) {
                let module = parameter.module();
                if !settings.has(module) {
                    continue;
                }
                let inputs = parameter.inputs();
                let outputs = parameter.len() / inputs;
                let order = match parameter.order {
                    Order::ByHead(head_dim) => Order::ByHead(head_dim),
                    Order::Native | Order::Transposed => Order::Native,
                };
                let mut matrix = |role, name: &str, shape: [usize; 2], order| {
                    let start = unit.len;
                    let module = format!("base_model.model.{module}.{name}");
                    unit.matrix(role, &module, shape, order);
                    start..unit.len
                };
                let rank = settings.rank;
                let a = matrix(Role::AdapterA, "lora_A", [rank, inputs], Order::Native);
                let b = matrix(Role::AdapterB, "lora_B", [outputs, rank], order);
                places.push((index, parameter.role, a, b));
            }
        }
        let mut saved: Vec<Saved> = Vec::new();
        for (index, of) in model.units.iter().enumerate() {
            for parameter in of
                .parameters
                .iter()
                .filter(|it| settings.saves(it.module()))
            {
                let (range, at) = (parameter.range(), unit.len);
                unit.whole(parameter, format!("base_model.model.{}", parameter.name));
                match saved.last_mut() {
                    Some(last) if (last.unit, last.range.end) == (index, range.start) => {
                        last.range.end = range.end;
                    }
                    _ => saved.push(Saved {
                        unit: index,
                        range,
                        at,
                    }),
                }
            }
        }
        Adapted {
            settings,
            trained: Layout { units: vec![unit] },
            saved,
            places,
        }
    }

    /// Where a range of a unit of the model is trained; `None` if it is frozen.
    pub(super) fn place(&self, unit: usize, range: &Range<usize>) -> Option<Range<usize>> {
        self.saved.iter().find_map(|saved| saved.place(unit, range))
    }

    /// Draws the elements of the trained unit from `offset` on. Modules that are trained whole begin as those of the model,
    /// which has this seed; without one they are zero until the model is imported.
    pub(super) fn draw(
        &self,
        (model, config): (&Layout, &ModelConfig),
        seed: Option<u64>,
        offset: usize,
        out: &mut [f32],
    ) {
        let unit = &self.trained.units[0];
        initial::fill(unit, config, self.settings.seed, offset, out);
        for saved in &self.saved {
            let all = saved.trained();
            let (from, to) = (all.start.max(offset), all.end.min(offset + out.len()));
            if from >= to {
                continue;
            }
            let part = &mut out[from - offset..to - offset];
            part.fill(0.0);
            if let Some(seed) = seed {
                let start = saved.range.start + from - all.start;
                initial::fill(&model.units[saved.unit], config, seed, start, part);
            }
        }
    }

    /// The adapters of the layers in a range of a unit, which are computed together.
    pub(super) fn of(&self, (index, unit): (usize, &Unit), range: &Range<usize>) -> Vec<Adapter> {
        let places = self.places.iter().enumerate();
        let of_unit = places.filter(|(_, place)| place.0 == index);
        let adapters = of_unit.filter_map(|(number, (_, role, a, b))| {
            let parameter = unit.parameters.iter().find(|it| it.role == *role)?;
            if !range.contains(&parameter.offset) {
                return None;
            }
            let inputs = parameter.inputs();
            let column = (parameter.offset - range.start) / inputs;
            Some(Adapter {
                number,
                a: a.clone(),
                b: b.clone(),
                columns: column..column + parameter.len() / inputs,
            })
        });
        adapters.collect()
    }
}

/// The layout of what an engine trains.
pub(super) fn trained<'l>(adapted: Option<&'l Adapted>, model: &'l Layout) -> &'l Layout {
    adapted.map_or(model, |adapted| &adapted.trained)
}

/// The parameters of a unit of a frozen model, in the engine's order.
pub(super) fn frozen_from_files<'p>(
    adapted: Option<&Adapted>,
    model: &Layout,
    unit: usize,
    parameters: &'p [f32],
) -> Result<Cow<'p, [f32]>, EngineError> {
    let of = model.unit(unit)?;
    of.check_len("weights", parameters)?;
    match adapted {
        Some(_) => Ok(of.parameters_from_files(parameters)),
        None => Err(not_frozen(unit)),
    }
}

impl Adapters {
    /// The factor of their output.
    pub fn scale(&self) -> f32 {
        let rank = self.rank as f64;
        let divisor = if self.rank_stabilized {
            rank.sqrt()
        } else {
            rank
        };
        (self.alpha / divisor) as f32
    }

    /// Whether a module is trained whole: PEFT compares the ends of names.
    pub fn saves(&self, module: &str) -> bool {
        self.saved
            .iter()
            .any(|name| module.ends_with(name.as_str()))
    }

    /// Whether a module has one: PEFT compares whole parts of names.
    pub fn has(&self, module: &str) -> bool {
        let is_named = |name: &String| {
            module == name
                || module
                    .strip_suffix(name.as_str())
                    .is_some_and(|rest| rest.ends_with('.'))
        };
        self.modules.is_empty() || self.modules.iter().any(is_named)
    }

    /// The names that no layer of a model with this layout has.
    pub fn unknown(&self, model: &Layout) -> Vec<&str> {
        let parameters = || model.units.iter().flat_map(|unit| &unit.parameters);
        let layers = || parameters().filter(|it| is_layer(it.role));
        let names = self.modules.iter().filter(|name| {
            let one = Adapters {
                modules: vec![(*name).clone()],
                ..self.clone()
            };
            !layers().any(|it| one.has(it.module()))
        });
        names.map(String::as_str).collect()
    }
}

impl Unit {
    /// Whether it has linear layers of a block.
    pub(super) fn has_layers(&self) -> bool {
        self.parameters.iter().any(|it| is_layer(it.role))
    }
}

/// Whether these are the weights of a linear layer within a block.
pub fn is_layer(role: Role) -> bool {
    let is_table = matches!(role, Role::Embedding | Role::Positions | Role::Head);
    role.kind() == Kind::Matrix && !is_table
}
