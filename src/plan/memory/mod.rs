//! An estimate of the memory of one device, with its assumptions.
//!
//! It counts weights, gradients, optimiser states and the activations of one micro-batch. It does not
//! count the runtime's memory and fragmentation: [`USABLE`] leaves a margin for both. For the built-in trainer it
//! is what the engine allocates; for external trainers it errs on the large side.

mod known;
mod on_cpu;
mod on_gpu;
mod shape;

use super::batch_plan::MemoryEstimate;
use super::{DeviceKind, PlanRequest, Runner};
use crate::recipe::Spec;
use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::spec::{Determinism, Model, NormTest, Objective, Precision, Strategy};
use crate::util::format::bytes;

pub use known::{model_type, other_family, typical, typical_sizes};
pub use shape::Shape;

/// Objectives of the built-in trainer.
pub const TRAINED: [Objective; 7] = [
    Objective::LanguageModelling,
    Objective::Sft,
    Objective::Dpo,
    Objective::Kto,
    Objective::Orpo,
    Objective::Cpo,
    Objective::Simpo,
];

/// The share of a device's memory that a run can use.
pub const USABLE: f64 = 0.9;

/// Rank of adapters where the recipe states none: in the built-in trainer that of PEFT.
const RANK: u64 = 64;
const RANK_OF_PEFT: u64 = 8;
/// Bytes of an element in f32.
const F32: f64 = 4.0;
/// Weights of a scale, and scales of a group, in 4 bits.
const BLOCK: f64 = 64.0;
const GROUP: f64 = 256.0;
/// Bytes per token and vocabulary entry: logits as computed, in f32, and both gradients.
const LOGITS: f64 = 12.0;

/// Everything that an estimate depends on except the number of ranks and the micro-batch.
#[derive(Debug, Clone)]
pub struct Memory<'a> {
    spec: &'a Spec,
    shape: Shape,
    /// The source of the shape.
    source: String,
    /// Memory of a device, bytes, if known.
    available: Option<u64>,
    /// The built-in trainer runs it on these devices.
    engine: Option<DeviceKind>,
    /// Upstream's trainer or another program runs it.
    external: bool,
    /// No key states the length of a sequence, and upstream has no default.
    length_is_guessed: bool,
}

impl<'a> Memory<'a> {
    /// The memory of a recipe whose model's shape is known.
    pub fn of(spec: &'a Spec, dialect: Dialect, request: &PlanRequest) -> Option<Memory<'a>> {
        let (shape, source) = Shape::of(&spec.model, request.model_config.as_ref())?;
        // A recipe of another dialect usually runs in upstream's trainer.
        let runs_built_in = match request.runner {
            Runner::Any { .. } => dialect == Dialect::Native,
            Runner::External { .. } => false,
            Runner::BuiltIn { .. } => true,
        };
        let parallel = &spec.parallel;
        let axes = [
            parallel.tensor,
            parallel.pipeline,
            parallel.context,
            parallel.sequence,
        ];
        let has_engine = runs_built_in
            && TRAINED.contains(&spec.objective)
            && axes == [1; 4]
            && shape.experts == 1
            && trains(&spec.model)
            && other_family(&spec.model, request.model_config.as_ref()).is_none();
        Some(Memory {
            engine: has_engine.then(|| request.runner.device()),
            external: !runs_built_in,
            spec,
            shape,
            source,
            available: request.device_memory,
            length_is_guessed: false,
        })
    }

    /// The memory of another recipe for the same model.
    pub fn with<'b>(&self, spec: &'b Spec) -> Memory<'b> {
        Memory {
            spec,
            shape: self.shape.clone(),
            source: self.source.clone(),
            available: self.available,
            engine: self.engine.filter(|_| trains(&spec.model)),
            external: self.external,
            length_is_guessed: self.length_is_guessed,
        }
    }

    /// The same memory of a recipe that states no length of a sequence, if `is_guessed`.
    pub fn guessing_length(mut self, is_guessed: bool) -> Memory<'a> {
        self.length_is_guessed = is_guessed;
        self
    }

    /// Bytes on each device for this number of data-parallel ranks and samples per micro-batch.
    pub fn estimate(&self, ranks: u64, per_device_batch_size: u64) -> MemoryEstimate {
        let [parameters, gradients, optimizer] = self.states(ranks);
        let activations = self.activations(per_device_batch_size);
        MemoryEstimate {
            parameters: parameters as u64,
            gradients: gradients as u64,
            optimizer: optimizer as u64,
            activations: activations as u64,
            total: self.total(ranks, per_device_batch_size) as u64,
            available: self.available,
            assumed: self.assumed(ranks, per_device_batch_size),
        }
    }

    /// Bytes on each rank before its first sample.
    pub fn before_samples(&self, ranks: u64) -> u64 {
        self.states(ranks).iter().sum::<f64>() as u64
    }

    /// Whether a device can hold a micro-batch of this number of samples; 0: the weights, gradients and
    /// optimiser states. A device of unknown memory can.
    pub fn fits(&self, ranks: u64, per_device_batch_size: u64) -> bool {
        self.fits_within(USABLE, ranks, per_device_batch_size)
    }

    /// Whether this number of samples fits into a share of a device.
    pub fn fits_within(&self, share: f64, ranks: u64, per_device_batch_size: u64) -> bool {
        self.available.is_none_or(|available| {
            self.total(ranks, per_device_batch_size) <= available as f64 * share
        })
    }

    /// The memory for this number of samples, as text; for 0 that of the states.
    pub fn needed(&self, ranks: u64, per_device_batch_size: u64) -> String {
        bytes(self.total(ranks, per_device_batch_size) as u64)
    }

    fn total(&self, ranks: u64, per_device_batch_size: u64) -> f64 {
        let [parameters, gradients, optimizer] = self.states(ranks);
        parameters + gradients + optimizer + self.activations(per_device_batch_size)
    }

    /// The ranks over which a sharded part is divided. The built-in trainer has no replicas of shards.
    fn shards(&self, ranks: u64) -> u64 {
        if self.spec.parallel.strategy == Strategy::Ddp {
            return 1;
        }
        let of_recipe = self
            .spec
            .parallel
            .data_shard
            .filter(|_| self.engine.is_none());
        of_recipe.unwrap_or(ranks).clamp(1, ranks.max(1))
    }

    /// Weights, gradients and optimiser states on one device, bytes.
    fn states(&self, ranks: u64) -> [f64; 3] {
        let shards = self.shards(ranks) as f64;
        let norm_test = self.spec.schedule.norm_test();
        let (shape, adapters) = (&self.shape, self.adapters());
        match (self.engine, &adapters) {
            (Some(DeviceKind::Cuda), None) => {
                return on_gpu::states(shape, shards, self.compute_bytes(), norm_test);
            }
            (Some(DeviceKind::Cuda), Some(adapters)) => {
                let size = self.compute_bytes();
                return on_gpu::adapted_states(shape, shards, size, norm_test, adapters);
            }
            (Some(DeviceKind::Cpu), adapters) => {
                let in_fixed_point = self.spec.determinism == Determinism::World;
                let sums = (norm_test, in_fixed_point);
                return on_cpu::states(shape, shards, sums, adapters.as_ref());
            }
            (None, _) => {}
        }
        let parallel = &self.spec.parallel;
        let parts = parallel.tensor as f64 * parallel.pipeline as f64;
        let all = self.shape.parameters() / parts;
        let adapters = self.spec.model.adapters;
        let trained = self.trained() / parts;
        let [weight, gradient, optimizer] = self.per_parameter();
        let (weight_shards, gradient_shards, optimizer_shards) = match parallel.strategy {
            Strategy::Ddp => (1.0, 1.0, 1.0),
            Strategy::Zero1 => (1.0, 1.0, shards),
            Strategy::Zero2 => (1.0, shards, shards),
            Strategy::Fsdp => (shards, shards, shards),
        };
        let frozen = if adapters { self.frozen(all) } else { 0.0 };
        let reference = if self.has_reference() {
            all * if self.has_half_weights() {
                2.0
            } else {
                self.compute_bytes()
            }
        } else {
            0.0
        };
        let mut weights = (trained * weight + frozen + reference) / weight_shards;
        let mut gradients = trained * gradient / gradient_shards;
        let mut states = trained * optimizer / optimizer_shards;
        let unit = self.shape.block().max(self.shape.embedding()) / parts;
        let [offloads_parameters, offloads_optimizer] = self.offloads();
        if offloads_optimizer {
            states = 0.0;
        }
        if offloads_parameters {
            weights = 0.0;
        }
        if offloads_parameters && offloads_optimizer {
            // A unit's gradients leave the device as soon as they are computed.
            gradients = gradients.min(unit * gradient);
        }
        if weight_shards > 1.0 || offloads_parameters {
            // The current block and the prefetched one are unsharded.
            weights += 2.0 * unit * self.compute_bytes();
        }
        gradients += trained * norm_test.map_or(0.0, |test| measured(test, gradient_shards));
        [weights, gradients, states]
    }

    /// Whether the parameters and the optimiser's states are in the host's memory. FSDP moves all of them, DeepSpeed
    /// parameters only in its third stage and nothing without a stage.
    fn offloads(&self) -> [bool; 2] {
        let parallel = &self.spec.parallel;
        let sharded = parallel.strategy != Strategy::Ddp && self.engine.is_none();
        let whole = parallel.strategy == Strategy::Fsdp;
        [
            parallel.offload_parameters && sharded && whole,
            parallel.offload_optimizer && sharded,
        ]
    }

    /// Parameters that are trained.
    fn trained(&self) -> f64 {
        let model = &self.spec.model;
        if !model.adapters {
            return self.shape.parameters();
        }
        let adapters = self.shape.adapters(self.rank(), &model.lora_target_modules);
        adapters + self.shape.whole(&model.lora_modules_to_save)
    }

    /// The rank of adapters.
    fn rank(&self) -> u64 {
        let assumed = match self.engine {
            Some(_) => RANK_OF_PEFT,
            None => RANK,
        };
        self.spec.model.lora_rank.unwrap_or(assumed)
    }

    /// What is trained in place of the model.
    fn adapters(&self) -> Option<Adapters> {
        let model = &self.spec.model;
        model.adapters.then(|| Adapters {
            parameters: self.trained(),
            rank: self.rank() as f64,
            drops: model.lora_dropout > 0.0,
            four_bits: model
                .load_in_4bit
                .then(|| four_bits(model.use_bnb_nested_quant)),
        })
    }

    /// Activations of one micro-batch, bytes.
    fn activations(&self, per_device_batch_size: u64) -> f64 {
        let parallel = &self.spec.parallel;
        let spread = parallel.context as f64 * parallel.sequence as f64 * parallel.tensor as f64;
        let rows = per_device_batch_size as f64 * self.rows_per_sample();
        let tokens = rows * self.spec.data.sequence_length as f64 / spread;
        let checkpointing = self.spec.model.activation_checkpointing;
        let adapters = self.adapters();
        match self.engine {
            Some(DeviceKind::Cuda) => {
                let (size, adapters) = (self.compute_bytes(), adapters.as_ref());
                return on_gpu::activations(&self.shape, tokens, checkpointing, size, adapters);
            }
            Some(DeviceKind::Cpu) => {
                return on_cpu::activations(&self.shape, tokens, checkpointing, adapters.as_ref());
            }
            None => {}
        }
        let layers = self.shape.layers as f64;
        let block = self.shape.kept_per_token();
        let kept = if checkpointing {
            // Every block's input, plus the values and gradients of the recomputed block.
            layers * self.shape.hidden as f64 + 2.0 * block
        } else {
            (layers + 1.0) * block
        };
        // A reward model has a score for each sequence.
        let fused = self.external && self.spec.model.fused_loss;
        let logits = match fused || self.spec.objective == Objective::Reward {
            true => 0.0,
            false => LOGITS * self.shape.vocabulary as f64,
        };
        tokens * (kept * self.compute_bytes() + logits)
    }

    /// Bytes a parameter: of the weights, their gradients and the optimiser's states.
    fn per_parameter(&self) -> [f64; 3] {
        if self.engine.is_some() {
            // AdamW's moments in f32, whatever the recipe names.
            return [4.0, 4.0, 8.0];
        }
        let states = optimizer_bytes(self.spec.optimizer.name.as_deref());
        let mixed = self.spec.model.precision != Precision::F32;
        if self.has_half_weights() {
            // Adam's moments have the precision of the weights.
            return [2.0, 2.0, if states == 8.0 { 4.0 } else { states }];
        }
        let [parameters, optimizer] = self.offloads();
        let one_offloaded = parameters != optimizer;
        match self.spec.parallel.strategy {
            // DeepSpeed computes with half-precision weights and keeps f32 weights with Adam's states.
            Strategy::Zero1 | Strategy::Zero2 if mixed => [2.0, 2.0, states + 4.0],
            // Only DeepSpeed offloads one of the two.
            Strategy::Fsdp if mixed && one_offloaded => [2.0, 2.0, states + 4.0],
            _ => [4.0, 4.0, states],
        }
    }

    /// Whether the trained weights are in half precision: FSDP and DeepSpeed keep a copy in f32, and so do adapters.
    fn has_half_weights(&self) -> bool {
        let model = &self.spec.model;
        let unsharded = self.spec.parallel.strategy == Strategy::Ddp;
        self.external && model.half_weights && unsharded && !model.adapters
    }

    /// Weights that adapters do not train, bytes.
    fn frozen(&self, all: f64) -> f64 {
        let model = &self.spec.model;
        let parts = self.shape.parameters() / all;
        let blocks = self.shape.layers as f64 * self.shape.block() / parts;
        let quantised = match (model.load_in_4bit, model.load_in_8bit) {
            (true, _) => four_bits(model.use_bnb_nested_quant),
            (_, true) => 1.0,
            _ => self.compute_bytes(),
        };
        blocks * quantised + (all - blocks) * self.compute_bytes()
    }

    /// Whether a device holds a frozen copy of the model in addition to the trained one.
    fn has_reference(&self) -> bool {
        let compares = match self.spec.objective {
            Objective::Dpo | Objective::Kto | Objective::Ppo => true,
            Objective::Grpo | Objective::Rloo => self.spec.generation.reference,
            _ => false,
        };
        // With adapters, the model without them is the reference. The built-in trainer computes the reference's values before
        // the first step, with the start weights.
        compares && !self.spec.model.adapters && self.engine.is_none()
    }

    /// Sequences that pass through the model for each sample.
    fn rows_per_sample(&self) -> f64 {
        match self.spec.objective {
            Objective::Dpo
            | Objective::Orpo
            | Objective::Cpo
            | Objective::Simpo
            | Objective::Reward => 2.0,
            _ => 1.0,
        }
    }

    /// Bytes of a value in the forward and backward pass.
    fn compute_bytes(&self) -> f64 {
        match self.spec.model.precision {
            _ if self.engine == Some(DeviceKind::Cpu) => 4.0,
            Precision::F32 => 4.0,
            Precision::Bf16 | Precision::F16 => 2.0,
        }
    }

    fn assumed(&self, ranks: u64, per_device_batch_size: u64) -> Vec<String> {
        let (model, parallel) = (&self.spec.model, &self.spec.parallel);
        let [weight, gradient, optimizer] = self.per_parameter();
        let precision = match model.precision {
            _ if self.has_half_weights() => "half-precision weights, gradients and states",
            Precision::F32 => "f32",
            _ if self.engine == Some(DeviceKind::Cpu) => "f32, as CPUs compute",
            _ if self.engine.is_some() => {
                "bf16 compute with a bf16 copy of the weights, f32 for the optimiser"
            }
            Precision::Bf16 => "bf16 compute, f32 weights for the optimiser",
            Precision::F16 => "f16 compute, f32 weights for the optimiser",
        };
        let mut lines = vec![
            format!(
                "{} parameters ({})",
                billions(self.shape.parameters()),
                self.source
            ),
            format!(
                "{precision}: {} bytes a trained parameter ({weight} + {gradient} + {optimizer})",
                weight + gradient + optimizer
            ),
        ];
        if let Some(name) = self.spec.optimizer.name.as_deref()
            && self.engine.is_none()
        {
            let states = optimizer_bytes(Some(name));
            let mut line = format!("{name}: {states} bytes of states a parameter");
            if name.contains("paged") {
                line += ", paged to the host when short";
            }
            lines.push(line);
        }
        if model.adapters {
            let base = match (model.load_in_4bit, model.load_in_8bit) {
                (true, _) => "4 bits",
                (_, true) => "8 bits",
                _ => "the compute precision",
            };
            let rank = match (model.lora_rank, self.rank()) {
                (None, rank) if !model.lora_target_modules.is_empty() => {
                    format!("rank {rank} assumed")
                }
                (_, rank) => format!("rank {rank}"),
            };
            let names = &model.lora_target_modules;
            let known = names.iter().all(|name| self.shape.sizes_of(name).is_some());
            let on = if names.is_empty() {
                "every linear layer assumed".to_owned()
            } else if known {
                names.join(", ")
            } else {
                "every linear layer".to_owned()
            };
            let whole = match model.lora_modules_to_save.join(", ") {
                names if names.is_empty() => names,
                names => format!(", and {names} whole"),
            };
            lines.push(format!(
                "adapters train {} parameters ({rank} on {on}{whole}), the rest frozen in {base}",
                billions(self.trained())
            ));
        }
        if self.has_reference() {
            lines.push("a frozen reference model in addition".to_owned());
        }
        if let Some(test) = self.spec.schedule.norm_test()
            && test.coordinate_interval > 0
        {
            lines.push("a whole gradient in f32 for the coordinate-wise test".to_owned());
        }
        let shards = self.shards(ranks);
        let device = match self.engine {
            Some(DeviceKind::Cuda) => Some("on a GPU"),
            Some(DeviceKind::Cpu) => Some("on a CPU"),
            None => None,
        };
        lines.extend(device.map(|on| format!("as the built-in trainer allocates {on}")));
        lines.push(match parallel.strategy {
            Strategy::Ddp => "unsharded on every device (DDP)".to_owned(),
            Strategy::Zero1 if self.engine.is_none() => {
                format!("optimiser states over {shards} shards (ZeRO-1)")
            }
            Strategy::Zero2 if self.engine.is_none() => {
                format!("optimiser states and gradients over {shards} shards (ZeRO-2)")
            }
            Strategy::Zero1 | Strategy::Zero2 | Strategy::Fsdp => format!(
                "weights, gradients and optimiser states over {shards} shards, two units gathered"
            ),
        });
        let offloaded = match self.offloads() {
            [true, true] => Some("parameters, gradients and optimiser states"),
            [true, false] => Some("parameters"),
            [false, true] => Some("optimiser states"),
            [false, false] => None,
        };
        if let Some(what) = offloaded {
            lines.push(format!("{what} in the host's memory (offload)"));
        }
        let model_parallel = parallel.tensor * parallel.pipeline;
        if model_parallel > 1 {
            lines.push(format!(
                "weights split evenly over {model_parallel} tensor and pipeline ranks"
            ));
        }
        let rows = match self.rows_per_sample() {
            2.0 => "pairs of sequences",
            _ => "sequences",
        };
        let checkpointing = if model.activation_checkpointing {
            "activations checkpointed once a block"
        } else {
            "no activation checkpointing"
        };
        lines.push(format!(
            "{per_device_batch_size} {rows} of {} tokens, fused attention, {checkpointing}",
            self.spec.data.sequence_length
        ));
        if self.length_is_guessed {
            lines.push("no key that is read states the length of a sequence".to_owned());
        }
        lines
    }
}

/// Whether the built-in trainer trains what the recipe makes of the model: all weights, or adapters over whole ones or over
/// those in 4 bits.
fn trains(model: &Model) -> bool {
    !model.load_in_8bit
}

/// Adapters that are trained in place of the model.
struct Adapters {
    parameters: f64,
    rank: f64,
    /// Whether their inputs have dropout.
    drops: bool,
    /// Bytes a weight of the linear layers below, where they are in 4 bits.
    four_bits: Option<f64>,
}

impl Adapters {
    /// Elements of a token's inputs after dropout, which one place holds.
    fn dropped(&self, shape: &Shape) -> f64 {
        match self.drops {
            true => shape.widest_input(),
            false => 0.0,
        }
    }
}

/// Bytes of a weight in 4 bits: NF4 with one scale per block, in f32 or in 8 bits with an f32 per group (QLoRA, arXiv
/// 2305.14314).
fn four_bits(is_nested: bool) -> f64 {
    let scale = if is_nested { 1.0 + F32 / GROUP } else { F32 };
    0.5 + scale / BLOCK
}

/// Bytes a trained parameter that the norm test keeps unsharded on every device, in f32: the vector of the
/// coordinate-wise test, and a rank's own gradient if gradients are sharded.
fn measured(test: &NormTest, gradient_shards: f64) -> f64 {
    let own = test.unsharded_accumulation && gradient_shards > 1.0;
    let vectors = u8::from(test.coordinate_interval > 0) + u8::from(own);
    4.0 * f64::from(vectors)
}

/// Bytes of optimiser states a parameter, by upstream's name (`OptimizerNames`, transformers
/// 5.23.0 `training_args.py`); the default is AdamW with f32 moments.
fn optimizer_bytes(name: Option<&str>) -> f64 {
    let name = name.unwrap_or("adamw").to_lowercase();
    let moments = if name.contains("adafactor") || name.contains("sgd") {
        0.0
    } else if name.contains("lion") || name.contains("rmsprop") || name.contains("adagrad") {
        1.0
    } else {
        2.0
    };
    let bytes = if name.contains("4bit") {
        0.5
    } else if name.contains("8bit") {
        1.0
    } else {
        4.0
    };
    moments * bytes
}

/// The count with its unit: `7.24B`, `8.43M`.
fn billions(count: f64) -> String {
    if count >= 1e9 {
        format!("{:.2}B", count / 1e9)
    } else {
        format!("{:.2}M", count / 1e6)
    }
}

/// The part of a device's memory that a run can use, as text.
pub fn usable(available: u64) -> String {
    bytes((available as f64 * USABLE) as u64)
}

#[cfg(test)]
mod tests;
