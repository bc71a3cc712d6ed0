//! A recipe in a world: every number that follows from both, and `None` where one does not follow. The rules check the
//! numbers, and a draft without gaps in which they find no error becomes a [`Plan`].

use serde::{Serialize, Serializer};

use super::arithmetic::product;
use super::batch_plan::{Adjustment, Facts, MAX_BATCH, Plan};
use super::elastic;
use super::horizon::{Horizon, held_out, horizon};
use super::memory::Memory;
use super::request::PlanRequest;
use super::split::{Cap, Split, Splitter};
use crate::recipe::schema::spec::{
    BatchSchedule, Determinism, Division, EvaluationDivision, Parallel, Prefer, Remainder, Spec,
};
use crate::recipe::syntax::diagnostic;
use crate::recipe::{Diagnostic, Dialect, Recipe};

/// The largest count in the list of feasible GPU counts.
pub const MOST_GPUS: u64 = 1024;
/// The micro-batch where neither the recipe nor memory determines one
/// (`per_device_train_batch_size` of transformers 5.23.0).
pub const DEFAULT_MICRO: u64 = 8;
/// Why a recipe without an error has no plan.
pub(super) const NOT_ENOUGH: &str = "the recipe does not state enough for a plan";

/// A plan with gaps, and what the rules find in it. Serialized it has the keys of a [`Plan`], with null for a missing
/// value. As an error, its findings allow no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[error("{}", self.summary())]
pub struct Draft {
    /// `None`: the other axes do not divide the world.
    pub data_parallel_size: Option<u64>,
    /// `None`: the recipe does not determine it, or it is beyond [`MAX_BATCH`].
    pub global_batch_size: Option<u64>,
    /// `None`: no split exists.
    pub split: Option<Split>,
    /// Every batch of the schedule is a multiple of this, samples.
    pub quantum: Option<u64>,
    /// The part that does not depend on the split.
    pub facts: Facts,
    /// Data-parallel ranks at the GPU count that the recipe was written for.
    pub recipe_ranks: Option<u64>,
    /// The product of the recipe's numbers, independent of a stated global batch.
    pub recipe_product: Option<u128>,
    /// Upstream's numbers in the recipe's own world, if upstream derives its micro-batch from a
    /// global batch.
    pub upstream: Option<Upstream>,
    /// The micro-batch that DeepSpeed derives for a config that states none, samples.
    pub deepspeed_micro: Option<u64>,
    /// The split without the memory limit, if memory made it smaller.
    pub unlimited: Option<Split>,
    /// Lengths in samples; present if the global batch is.
    pub horizon: Option<Horizon>,
    /// Training samples of the data, counted or known from a synthetic source.
    pub data_samples: Option<u64>,
    /// Findings of the reader and the rules, in file order; empty until the rules have run.
    pub findings: Vec<Diagnostic>,
}

impl Serialize for Draft {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Keys<'a> {
            formula: Option<String>,
            data_parallel_size: Option<u64>,
            per_device_batch_size: Option<u64>,
            gradient_accumulation_steps: Option<u64>,
            global_batch_size: Option<u64>,
            quantum: Option<u64>,
            #[serde(flatten)]
            facts: &'a Facts,
        }
        let split = self.split;
        let keys = Keys {
            formula: split.map(|split| split.formula()),
            data_parallel_size: self.data_parallel_size,
            per_device_batch_size: split.map(|split| split.per_device_batch_size),
            gradient_accumulation_steps: split.map(|split| split.accumulation()),
            global_batch_size: self.global_batch_size,
            quantum: self.quantum,
            facts: &self.facts,
        };
        keys.serialize(serializer)
    }
}

/// A micro-batch that upstream derives from its global batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Upstream {
    /// Data-parallel ranks of the world that the recipe was written for, else of the requested one.
    pub ranks: u64,
    /// Accumulation as the recipe states it.
    pub accumulation: u64,
    /// ⌊⌊global / accumulation⌋ / ranks⌋, samples.
    pub per_device_batch_size: u64,
    /// Samples that a step trains on.
    pub used: u64,
}

impl Upstream {
    fn of(spec: &Spec, global: u64, ranks: u64) -> Upstream {
        let accumulation = spec.batch.accumulation.unwrap_or(1).max(1);
        let per_device_batch_size = global / accumulation / ranks.max(1);
        Upstream {
            ranks,
            accumulation,
            per_device_batch_size,
            used: per_device_batch_size * accumulation * ranks,
        }
    }
}

impl Draft {
    /// Derives every number that follows.
    pub fn new(recipe: &Recipe, request: &PlanRequest) -> Draft {
        let spec = &recipe.spec;
        let recipe_ranks = spec.batch.gpus.and_then(|gpus| ranks(gpus, &spec.parallel));
        let recipe_product = stated_product(spec, recipe_ranks);
        let here = ranks(request.gpus, &spec.parallel);
        let elastic = spec.batch.elastic.as_ref().and_then(|elastic| {
            let written_for = recipe_ranks.or(here)?;
            elastic::make(elastic, written_for).ok()
        });
        let global = request
            .global_batch_size
            .or_else(|| global_batch(spec))
            .or_else(|| Some(elastic.as_ref()?.batch))
            .filter(|global| (1..=MAX_BATCH).contains(global));
        let data_samples = request.data_samples.or_else(|| synthetic_samples(spec));
        let horizon = global.map(|global| horizon(spec, global, data_samples));
        let parallel = &spec.parallel;
        let facts = Facts {
            dialect: recipe.dialect,
            objective: spec.objective,
            world_size: request.gpus,
            tensor_parallel_size: parallel.tensor,
            pipeline_parallel_size: parallel.pipeline,
            context_parallel_size: parallel.context,
            sequence_parallel_size: parallel.sequence,
            strategy: parallel.strategy,
            eval_batch_size: spec.evaluation.per_device_batch_size,
            remainder: spec.batch.remainder,
            feasible_gpu_counts: Vec::new(),
            adjusted: Vec::new(),
            memory: None,
            diagnostics: Vec::new(),
        };
        let mut draft = Draft {
            data_parallel_size: here,
            global_batch_size: global,
            split: None,
            quantum: None,
            facts,
            recipe_ranks,
            recipe_product,
            upstream: None,
            deepspeed_micro: None,
            unlimited: None,
            horizon,
            data_samples,
            findings: Vec::new(),
        };
        if let Some(global) = global {
            let ranks = recipe_ranks.or(here);
            let derived = ranks.filter(|_| spec.batch.division != Division::Stated);
            draft.upstream = derived.map(|ranks| Upstream::of(spec, global, ranks));
            let taken = elastic.map(|made| made.valid);
            draft.split(recipe, request, global, taken.as_deref());
        }
        draft
    }

    /// Splits the global batch. `taken`: the data-parallel sizes that DeepSpeed's elasticity allows,
    /// if it is on.
    fn split(
        &mut self,
        recipe: &Recipe,
        request: &PlanRequest,
        global: u64,
        taken: Option<&[u64]>,
    ) {
        let spec = &recipe.spec;
        // TRL has a default, and each other program its own.
        let is_guessed = recipe.dialect == Dialect::Transformers
            && recipe.span("data.sequence_length").is_none();
        let memory = Memory::of(spec, recipe.dialect, request)
            .map(|memory| memory.guessing_length(is_guessed));
        let fits = |ranks: u64, per_device_batch_size: u64| {
            let memory = memory.as_ref();
            memory.is_none_or(|memory| memory.fits(ranks, per_device_batch_size))
        };
        self.deepspeed_micro = self.micro_of_deepspeed(recipe, global);
        let stated = self
            .per_device_batch_size(spec)
            .filter(|_| !request.estimate);
        let memory_decides = memory.is_some() && request.device_memory.is_some();
        let cap = cap(spec, request, stated, memory_decides);
        let splitter = Splitter::new(global, request.current_batch, cap, &fits);
        let exact = |ranks: u64| {
            splitter.is_exact(ranks)
                && divides(spec, global, ranks)
                && taken.is_none_or(|valid| valid.contains(&ranks))
        };
        self.facts.feasible_gpu_counts = (1..=MOST_GPUS)
            .filter(|&devices| ranks(devices, &spec.parallel).is_some_and(exact))
            .collect();
        let Some(split) = self
            .data_parallel_size
            .and_then(|ranks| splitter.choose(ranks, spec.batch.remainder))
        else {
            return;
        };
        self.unlimited = Splitter::new(global, request.current_batch, cap, &|_, _| true)
            .choose(split.ranks, spec.batch.remainder)
            .filter(|unlimited| unlimited.per_device_batch_size != split.per_device_batch_size);
        self.quantum = splitter.quantum(allowed_ranks(spec, split.ranks), spec.batch.remainder);
        self.facts.remainder = split.remainder;
        self.facts.memory = memory
            .as_ref()
            .map(|memory| memory.estimate(split.ranks, split.per_device_batch_size));
        self.facts.eval_batch_size = evaluation_micro(spec, &split).map(|stated| {
            // Its memory is that of training.
            let most = match request.runner.is_built_in() {
                true => split.per_device_batch_size,
                false => stated,
            };
            stated.min(most)
        });
        self.facts.adjusted = adjustments(recipe, request, self, &split);
        self.split = Some(split);
    }

    /// The micro-batch of the recipe, in its own world.
    pub fn per_device_batch_size(&self, spec: &Spec) -> Option<u64> {
        let derived = self
            .upstream
            .map(|upstream| upstream.per_device_batch_size.max(1));
        spec.batch
            .per_device_batch_size
            .or(derived)
            .or(self.deepspeed_micro)
    }

    /// The micro-batch that DeepSpeed derives for a config that states none.
    fn micro_of_deepspeed(&self, recipe: &Recipe, global: u64) -> Option<u64> {
        let batch = &recipe.spec.batch;
        let ranks = self.recipe_ranks.or(self.data_parallel_size)?;
        if let Some(elastic) = &batch.elastic {
            let here = self.data_parallel_size.unwrap_or(ranks);
            return elastic::make(elastic, here).ok()?.per_device_batch_size;
        }
        let per_device_batch_size = global / ranks / batch.accumulation.unwrap_or(1);
        (recipe.dialect == Dialect::Deepspeed && per_device_batch_size > 0)
            .then_some(per_device_batch_size)
    }

    /// With what the reader and the rules find.
    pub(super) fn judged(mut self, recipe: &Recipe, findings: Vec<Diagnostic>) -> Draft {
        let located = findings.iter().map(|found| found.locate(&recipe.sources));
        self.facts.diagnostics = located.collect();
        self.findings = findings;
        self
    }

    /// Whether a rule or the reader reports an error.
    pub fn has_errors(&self) -> bool {
        diagnostic::has_error(&self.findings)
    }

    pub fn errors(&self) -> impl Iterator<Item = &Diagnostic> {
        self.findings.iter().filter(|found| found.is_error())
    }

    /// The first error with the way out.
    fn summary(&self) -> String {
        let line = |first: &Diagnostic| format!("{} ({})", first.message, first.help);
        let first = diagnostic::first_error(&self.findings, line);
        first.unwrap_or_else(|| NOT_ENOUGH.to_owned())
    }

    /// The plan, unless there is an error or a gap.
    pub fn finish(self) -> Result<Plan, Box<Draft>> {
        self.plan().ok_or_else(|| Box::new(self))
    }

    /// As [`Draft::finish`]; `None`: there is an error or a gap.
    pub fn plan(&self) -> Option<Plan> {
        if self.has_errors() {
            return None;
        }
        let (split, quantum) = (self.split?, self.quantum?);
        Some(Plan {
            formula: split.formula(),
            data_parallel_size: split.ranks,
            per_device_batch_size: split.per_device_batch_size,
            gradient_accumulation_steps: split.accumulation(),
            global_batch_size: split.batch(),
            quantum,
            facts: self.facts.clone(),
        })
    }
}

/// The axes over which devices hold one copy of the model, with their sizes.
pub fn axes(parallel: &Parallel) -> [(&'static str, u64); 4] {
    [
        ("tensor", parallel.tensor),
        ("pipeline", parallel.pipeline),
        ("context", parallel.context),
        ("sequence", parallel.sequence),
    ]
}

/// Devices that together hold one copy of the model; `None` beyond 64 bits, and for sizes of 0.
pub fn model_parallel(parallel: &Parallel) -> Option<u64> {
    product(&axes(parallel).map(|(_, size)| size)).filter(|&devices| devices > 0)
}

/// Whether upstream accepts the recipe unchanged with this number of ranks. If the world that it was
/// written for is known, its accumulation may change with the ranks.
fn divides(spec: &Spec, global: u64, ranks: u64) -> bool {
    let passes = spec.batch.accumulation.unwrap_or(1);
    spec.batch.division != Division::Exact
        || spec.batch.gpus.is_some()
        || product(&[ranks, passes]).is_some_and(|all| all > 0 && global.is_multiple_of(all))
}

/// Samples per device and evaluation pass, if the recipe states the evaluation batch over all
/// devices.
fn evaluation_micro(spec: &Spec, split: &Split) -> Option<u64> {
    let Some(batch) = spec.evaluation.batch else {
        return spec.evaluation.per_device_batch_size;
    };
    let passes = match spec.evaluation.division {
        EvaluationDivision::Passes => split.accumulation(),
        EvaluationDivision::Ranks | EvaluationDivision::Floored => 1,
    };
    Some((batch / split.ranks / passes).max(1))
}

/// Data-parallel ranks on this number of devices; `None` if the other axes do not divide it.
pub fn ranks(devices: u64, parallel: &Parallel) -> Option<u64> {
    if parallel.one_process {
        return (devices > 0).then_some(1);
    }
    model_parallel(parallel)
        .filter(|&axes| devices > 0 && devices.is_multiple_of(axes))
        .map(|axes| devices / axes)
}

/// The global batch of a recipe, samples: stated, or the product of its other numbers. `None`: the recipe
/// does not determine it, or it is beyond [`MAX_BATCH`].
pub fn global_batch(spec: &Spec) -> Option<u64> {
    let recipe_ranks = spec.batch.gpus.and_then(|gpus| ranks(gpus, &spec.parallel));
    let product = || u64::try_from(stated_product(spec, recipe_ranks)?).ok();
    let elastic = || {
        Some(
            elastic::make(spec.batch.elastic.as_ref()?, recipe_ranks?)
                .ok()?
                .batch,
        )
    };
    let global = spec.batch.global.or_else(product).or_else(elastic);
    global.filter(|global| (1..=MAX_BATCH).contains(global))
}

/// Micro-batch × accumulation × data-parallel ranks as the recipe states them.
fn stated_product(spec: &Spec, recipe_ranks: Option<u64>) -> Option<u128> {
    let accumulation = spec.batch.accumulation.unwrap_or(1);
    // Each factor is at most 2^32, so 128 bits hold the product.
    let each = u128::from(spec.batch.per_device_batch_size?) * u128::from(accumulation);
    Some(each * u128::from(recipe_ranks?))
}

/// The upper limit of the micro-batch. `stated`: the recipe's, if it counts.
fn cap(spec: &Spec, request: &PlanRequest, stated: Option<u64>, memory_decides: bool) -> Cap {
    // Neither the samples beside it nor the quantum may change the bits of a sample.
    if spec.determinism == Determinism::World {
        return Cap::at(1);
    }
    let limit = request.per_device_batch_size_limit.unwrap_or(u64::MAX);
    let otherwise = stated.unwrap_or(DEFAULT_MICRO).min(limit);
    let free = stated.is_none() || spec.batch.prefer == Prefer::PerDeviceBatchSize;
    let most = if free && memory_decides {
        limit
    } else {
        otherwise
    };
    Cap { most, otherwise }
}

/// Data-parallel ranks of every world that the run may use, including the planned one. Only the recipe restricts them:
/// the nodes of a job may be edited while it runs, and a batch that has grown must suit them then.
fn allowed_ranks(spec: &Spec, planned: u64) -> impl Iterator<Item = u64> + use<> {
    let axes = model_parallel(&spec.parallel).filter(|_| !spec.parallel.one_process);
    let axes = axes.unwrap_or(u64::MAX);
    let low = spec.elasticity.min.unwrap_or(1).div_ceil(axes).max(1);
    let high = spec.elasticity.max.unwrap_or(MOST_GPUS).min(MOST_GPUS) / axes;
    (low..=high).chain(std::iter::once(planned))
}

/// Training samples of a synthetic data set, whose length the recipe states.
pub(super) fn synthetic_samples(spec: &Spec) -> Option<u64> {
    let samples = spec.data.synthetic()?.samples;
    Some(samples.saturating_sub(held_out(spec.data.held_out, samples)))
}

/// The differences from the recipe, with their reasons.
fn adjustments(
    recipe: &Recipe,
    request: &PlanRequest,
    draft: &Draft,
    split: &Split,
) -> Vec<Adjustment> {
    let batch = &recipe.spec.batch;
    let (ranks, global) = (split.ranks, split.batch());
    let mut adjusted = Vec::new();
    let mut change = |path: &str, from: Option<u64>, to: u64, reason: String| {
        if let Some(from) = from
            && from != to
        {
            adjusted.push(Adjustment {
                key: recipe.key(path).into_owned(),
                from: from.to_string(),
                to: to.to_string(),
                reason,
            });
        }
    };
    let limit = request.per_device_batch_size_limit;
    let why_micro = if recipe.spec.determinism == Determinism::World {
        "determinism: world computes every sample on its own".to_owned()
    } else if request.estimate {
        "the largest that fits a device, by estimate".to_owned()
    } else if draft.unlimited.is_some() {
        "as much as the devices' memory allows, by estimate".to_owned()
    } else if limit.is_some_and(|limit| Some(limit) < batch.per_device_batch_size) {
        "the recipe's micro-batch ran out of memory".to_owned()
    } else if split.remainder == Remainder::Uneven {
        format!("the largest divisor of {global} that gives each of {ranks} ranks a micro-batch")
    } else if batch.prefer == Prefer::PerDeviceBatchSize {
        format!(
            "prefer: per_device_batch_size; the largest divisor of {global} / {ranks} ranks that fits"
        )
    } else {
        let share = global / ranks;
        format!("the largest divisor of {global} / {ranks} ranks = {share} up to the recipe's")
    };
    let stated = batch.per_device_batch_size;
    change(
        "batch.per_device_batch_size",
        stated,
        split.per_device_batch_size,
        why_micro,
    );
    let evaluated = draft.facts.eval_batch_size;
    let stated = evaluation_micro(&recipe.spec, split);
    change(
        "evaluation.per_device_batch_size",
        stated,
        evaluated.or(stated).unwrap_or_default(),
        "evaluation takes no more memory than training; the loss is the same".to_owned(),
    );
    let why = format!("keeps the global batch at {global}: {}", split.formula());
    change(
        "batch.accumulation",
        batch.accumulation,
        split.accumulation(),
        why,
    );
    if let (BatchSchedule::NormTest(test), Some(quantum)) = (&recipe.spec.schedule, draft.quantum) {
        let max = test.max_batch;
        let why =
            format!("rounded down to a multiple of {quantum}, which every allowed world splits");
        change("schedule.max_batch", Some(max), max - max % quantum, why);
    }
    let generation = &recipe.spec.generation;
    if let Some(steps) = generation.steps_per_generation
        && let Some(pass) = product(&[ranks, split.per_device_batch_size])
        && let Some(batch) = generation_batch(&recipe.spec, draft)
        && batch.is_multiple_of(pass)
    {
        let why = "keeps the generation batch unchanged".to_owned();
        change(
            "generation.steps_per_generation",
            Some(steps),
            batch / pass,
            why,
        );
    }
    adjusted
}

/// The generation batch of GRPO or RLOO, samples: as stated, or the product of the recipe's steps per
/// generation in its own world, or the global batch (TRL f2cd577, `trl/trainer/grpo_config.py`).
pub(super) fn generation_batch(spec: &Spec, draft: &Draft) -> Option<u64> {
    let generation = &spec.generation;
    match (
        generation.generation_batch_size,
        generation.steps_per_generation,
    ) {
        (Some(batch), _) => Some(batch),
        (None, Some(steps)) => product(&[
            steps,
            spec.batch.per_device_batch_size?,
            draft.recipe_ranks?,
        ]),
        (None, None) => draft.global_batch_size,
    }
}
