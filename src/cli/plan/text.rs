//! The text form of a plan: the formula first, then changes and their reasons, other feasible
//! counts, memory, lengths and diagnostics.

use anstyle::{AnsiColor, Style};

use crate::cli::render;
use crate::plan::{
    DeviceKind, Draft, Horizon, MemoryEstimate, OomStep, PlanRequest, Runner, refused_by_built_in,
};
use crate::recipe::schema::spec::{BatchSchedule, Estimator, Remainder, Spec};
use crate::recipe::{Diagnostic, Dialect, Recipe};
use crate::util::format::bytes;
use crate::util::format::count;

/// Number of feasible counts shown on each side of the requested one.
const NEAR: usize = 4;

const BOLD: Style = Style::new().bold();
const DIM: Style = Style::new().dimmed();

/// The complete text, with terminal styles. `hardware` describes the devices.
pub fn plan(
    recipe: &Recipe,
    request: &PlanRequest,
    draft: &Draft,
    oom: Option<&[OomStep]>,
    hardware: &str,
) -> String {
    let mut text = headline(recipe, draft, hardware);
    text += &format!(
        "{DIM}{}\n{}{DIM:#}\n",
        run_by(recipe, request, &draft.findings),
        recipe.detected
    );
    text += &changes(draft);
    text += &counts(draft, request.runner.device());
    if let Some(memory) = &draft.facts.memory {
        text += &memory_of(memory);
    }
    text += &oom.map(out_of_memory).unwrap_or_default();
    if let Some(horizon) = &draft.horizon {
        text += &lengths(recipe, draft, horizon);
    }
    if !draft.findings.is_empty() {
        text += "\n";
        text += &render::diagnostics(&draft.findings, &recipe.sources);
        text += &render::closing(&draft.findings);
    }
    text
}

/// What runs the plan, one line.
fn run_by(recipe: &Recipe, request: &PlanRequest, findings: &[Diagnostic]) -> String {
    match request.runner {
        Runner::BuiltIn { .. } => {
            format!(
                "run by the built-in trainer on {}",
                request.count(request.gpus)
            )
        }
        Runner::External { .. } => "run by your program, by torchrun's environment".to_owned(),
        Runner::Any { .. } => match refused_by_built_in(recipe, request, findings) {
            None => "for any trainer".to_owned(),
            Some(refusal) => format!("for other trainers: {refusal}"),
        },
    }
}

fn heading(words: &str) -> String {
    format!("\n{BOLD}{words}{BOLD:#}\n")
}

/// The formula and the meaning of its numbers.
fn headline(recipe: &Recipe, draft: &Draft, hardware: &str) -> String {
    let (formula, legend) = match (draft.split, draft.facts.remainder) {
        (Some(split), Remainder::Exact) => (
            split.formula(),
            "data-parallel ranks × micro-batch × accumulation = global batch",
        ),
        (Some(split), Remainder::Uneven) => (
            split.formula(),
            "micro-batch × (micro-batches of every rank) = global batch",
        ),
        (None, _) => (no_plan(draft), "no plan"),
    };
    let style = match draft.split {
        Some(_) => BOLD,
        None => AnsiColor::Red.on_default().bold(),
    };
    let axes: Vec<String> = [
        ("tensor", draft.facts.tensor_parallel_size),
        ("pipeline", draft.facts.pipeline_parallel_size),
        ("context", draft.facts.context_parallel_size),
        ("sequence", draft.facts.sequence_parallel_size),
    ]
    .into_iter()
    .filter(|(_, size)| *size > 1)
    .map(|(axis, size)| format!(", {axis} {size}"))
    .collect();
    let version = recipe.version.as_deref();
    let version = version.map_or(String::new(), |version| format!(" ({version})"));
    format!(
        "{style}{formula}{style:#}\n{legend}\n{DIM}{}, read as {}{version}, for {hardware}{}{DIM:#}\n",
        task(recipe),
        draft.facts.dialect,
        axes.concat()
    )
}

/// The task. A `Trainer` trains whatever its program says.
fn task(recipe: &Recipe) -> String {
    let launch = recipe.launch.as_ref();
    let script = launch.and_then(|launch| launch.script()?.value.file_stem()?.to_str());
    let of_text = ["run_clm", "run_plm", "run_fim"]
        .iter()
        .any(|name| script == Some(name));
    let stated = of_text || recipe.span("objective").is_some();
    match recipe.dialect {
        Dialect::Transformers if !stated => "task not read".to_owned(),
        _ => recipe.spec.objective.to_string(),
    }
}

/// The formula with unknown numbers, for a refused plan.
fn no_plan(draft: &Draft) -> String {
    match (draft.global_batch_size, draft.data_parallel_size) {
        (Some(global), Some(ranks)) => format!("{ranks} × ? × ? ≠ {global}"),
        (Some(global), None) => format!("? × ? × ? = {global}"),
        (None, _) => "? × ? × ? = ?".to_owned(),
    }
}

fn changes(draft: &Draft) -> String {
    if draft.facts.adjusted.is_empty() {
        return String::new();
    }
    let width = |cell: fn(&crate::plan::Adjustment) -> usize| {
        draft.facts.adjusted.iter().map(cell).max().unwrap_or(0)
    };
    let change = |from: &str, to: &str| format!("{from} → {to}");
    let keys = width(|a| a.key.chars().count());
    let values = width(|a| a.from.chars().count() + a.to.chars().count() + 3);
    let mut text = heading("changed from the recipe");
    for adjustment in &draft.facts.adjusted {
        let (key, reason) = (&adjustment.key, &adjustment.reason);
        let change = change(&adjustment.from, &adjustment.to);
        text += &format!("  {key:keys$}  {change:values$}  {reason}\n");
    }
    text
}

/// The feasible counts nearest to the requested one, which is in brackets.
fn counts(draft: &Draft, devices: DeviceKind) -> String {
    let counts = &draft.facts.feasible_gpu_counts;
    let Some(global) = draft.global_batch_size else {
        return String::new();
    };
    let mut text = heading(&format!(
        "{} counts that split {global} exactly",
        devices.noun(1)
    ));
    if counts.is_empty() {
        return text + "  none up to 1024\n";
    }
    let world = draft.facts.world_size;
    let at = counts.partition_point(|&count| count < world);
    let chosen = counts.get(at) == Some(&world);
    let (from, to) = (at.saturating_sub(NEAR), at + NEAR + usize::from(chosen));
    let near = &counts[from..to.min(counts.len())];
    let mut words: Vec<String> = near.iter().map(u64::to_string).collect();
    if chosen {
        words[at - from] = format!("{BOLD}[{world}]{BOLD:#}");
    }
    if from > 0 {
        words.insert(0, "…".to_owned());
    }
    if to < counts.len() {
        words.push("…".to_owned());
    }
    text += &format!("  {}\n", words.join("  "));
    text
}

pub(super) fn memory_of(memory: &MemoryEstimate) -> String {
    let all = match memory.available {
        Some(available) => format!("about {} of {}", bytes(memory.total), bytes(available)),
        None => format!(
            "about {} (set --device-memory to check whether it fits)",
            bytes(memory.total)
        ),
    };
    let mut text = heading(&format!("memory per device: {all}"));
    text += &format!(
        "  weights {}, gradients {}, optimiser states {}, activations {}\n",
        bytes(memory.parameters),
        bytes(memory.gradients),
        bytes(memory.optimizer),
        bytes(memory.activations)
    );
    for (i, line) in memory.assumed.iter().enumerate() {
        let lead = if i == 0 { "assumed:" } else { "" };
        text += &format!("  {DIM}{lead:8} {line}{DIM:#}\n");
    }
    text
}

/// The successive plans if micro-batch after micro-batch runs out of memory.
fn out_of_memory(steps: &[OomStep]) -> String {
    let mut text = heading("after out-of-memory: micro-batch × accumulation, global batch");
    for step in steps {
        text += &format!(
            "  {} × {}, {}\n",
            step.per_device_batch_size, step.gradient_accumulation_steps, step.global_batch_size
        );
    }
    text
}

/// All lengths, in samples and in steps of the global batch.
fn lengths(recipe: &Recipe, draft: &Draft, horizon: &Horizon) -> String {
    let spec = &recipe.spec;
    // A program may have other defaults than the trainer whose arguments it takes.
    let default = |part: &str, keys: [&str; 3]| {
        let stated = keys
            .iter()
            .any(|key| recipe.span(&format!("{part}.{key}")).is_some());
        let upstream = [Dialect::HandbookTrl, Dialect::Transformers].contains(&recipe.dialect);
        if upstream && !stated {
            ", the trainer's default (a program may have its own)"
        } else {
            ""
        }
    };
    let global = draft.global_batch_size.unwrap_or(1);
    let steps = |samples: u64| {
        if samples.is_multiple_of(global) {
            count(samples / global, "step")
        } else {
            format!("about {:.1} steps", samples as f64 / global as f64)
        }
    };
    let both = |samples: u64| format!("{}, {}", count(samples, "sample"), steps(samples));
    let percent = |share: f64| format!("{} % of the budget", share * 100.0);
    let mut lines: Vec<(&str, String)> = Vec::new();
    let budget = match (horizon.budget_samples, horizon.budget_steps) {
        (Some(samples), Some(steps)) => {
            format!("{}, {}", count(samples, "sample"), count(steps, "step"))
        }
        _ => match spec.budget.epochs {
            Some(1.0) => "1 epoch of unknown length".to_owned(),
            Some(epochs) => format!("{epochs} epochs of unknown length"),
            None => "not known".to_owned(),
        },
    };
    let is_default = spec
        .budget
        .epochs
        .map_or("", |_| default("budget", ["epochs", "steps", "samples"]));
    lines.push(("budget", budget + is_default));
    let warmup = match (horizon.warmup_samples, spec.learning_rate.warmup_ratio) {
        (Some(0), _) => None,
        (Some(samples), _) => Some(both(samples)),
        (None, ratio) => ratio.map(percent),
    };
    lines.extend(warmup.map(|w| ("warm-up", w)));
    let (evaluation, checkpoint) = (&spec.evaluation, &spec.checkpoint);
    let every = |samples: Option<u64>, share: Option<f64>, epoch: bool| {
        let known = samples.map(|samples| format!("every {}", both(samples)));
        let share = || share.map(|share| format!("every {}", percent(share)));
        known
            .or_else(share)
            .or_else(|| epoch.then(|| "at the end of every epoch".to_owned()))
    };
    let evaluated = every(
        horizon.eval_every,
        evaluation.every_share,
        evaluation.every_epoch,
    );
    lines.extend(evaluated.map(|when| {
        let per_device_batch_size = draft.facts.eval_batch_size;
        let each = per_device_batch_size.map_or(String::new(), |n| format!(", micro-batch {n}"));
        ("evaluation", when + &each)
    }));
    let saved = every(
        horizon.checkpoint_every,
        checkpoint.every_share,
        checkpoint.every_epoch,
    );
    lines.extend(saved.map(|when| {
        let default = default("checkpoint", ["every_steps", "every_share", "every_epoch"]);
        ("checkpoint", when + default)
    }));
    lines.extend(schedule(spec, draft).map(|words| ("batch", words)));
    let mut text = heading("lengths, in steps of the global batch");
    for (name, words) in lines {
        text += &format!("  {name:10}  {words}\n");
    }
    text
}

/// The batch schedule; `None` for a constant batch.
fn schedule(spec: &Spec, draft: &Draft) -> Option<String> {
    let quantum = draft.quantum.unwrap_or(1);
    Some(match &spec.schedule {
        BatchSchedule::Constant => return None,
        BatchSchedule::NormTest(test) => {
            let estimator = match test.estimator {
                Estimator::Unbiased => "unbiased",
                Estimator::Paper => "as printed",
            };
            let interval = match test.interval {
                1 => "every step".to_owned(),
                n => format!("every {n} steps"),
            };
            format!(
                "norm test ({estimator}, η {}) {interval}, up to {} in multiples of {quantum}",
                test.eta,
                test.max_batch - test.max_batch % quantum.max(1)
            )
        }
        BatchSchedule::Stages { stages } => {
            let each = stages.iter();
            let each = each.map(|s| format!("{} for {} %", s.batch, s.share * 100.0));
            each.collect::<Vec<_>>().join(", ")
        }
        BatchSchedule::Replay { runs } => {
            let steps = runs
                .iter()
                .map(|run| run.steps)
                .fold(0, u64::saturating_add);
            format!("a recorded schedule of {}", count(steps, "step"))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{PlanRequest, examine};
    use crate::recipe::corpus;
    use crate::recipe::{Request, Setting, read};

    /// The text of an upstream recipe's plan without styles; `None` if the corpus is missing.
    fn upstream(path: &str, gpus: u64, settings: &[(&'static str, &str)]) -> Option<String> {
        let root = corpus::root()?.join("huggingface__alignment-handbook/925acdfe4b/recipes");
        let flag = |path: &'static str| match path {
            "batch.gpus" => "--recipe-gpus",
            "batch.remainder" => "--remainder",
            path => path,
        };
        let mut recipe = read(&Request {
            path: root.join(path),
            settings: settings
                .iter()
                .map(|(path, value)| Setting {
                    flag: flag(path),
                    path,
                    value: (*value).to_owned(),
                })
                .collect(),
            ..Request::default()
        })
        .unwrap();
        recipe.sources = rename(&recipe, &root.display().to_string());
        let request = PlanRequest {
            device_memory: Some(80_000_000_000),
            ..PlanRequest::gpus(gpus)
        };
        let draft = examine(&recipe, &request);
        let text = plan(&recipe, &request, &draft, None, &request.count(gpus));
        Some(anstream::adapter::strip_str(&text).to_string())
    }

    /// The sources with paths independent of this machine.
    fn rename(recipe: &Recipe, root: &str) -> crate::recipe::Sources {
        let mut sources = crate::recipe::Sources::default();
        for file in recipe.sources.iter() {
            let path = file.path.display().to_string();
            sources.add(path.replace(root, "recipes"), file.text.clone());
        }
        sources
    }

    #[test]
    fn half_the_gpus_keep_the_global_batch() {
        let recipe = "zephyr-7b-beta/sft/config_full.yaml";
        let settings = [("batch.gpus", "8"), ("parallel.strategy", "fsdp")];
        if let Some(text) = upstream(recipe, 4, &settings) {
            insta::assert_snapshot!(text);
        }
    }

    #[test]
    fn a_refused_count_shows_what_is_known_and_what_to_do() {
        let recipe = "zephyr-7b-beta/dpo/config_full.yaml";
        if let Some(text) = upstream(recipe, 6, &[("batch.gpus", "8")]) {
            insta::assert_snapshot!(text);
        }
    }

    #[test]
    fn uneven_dealing_shows_every_ranks_share() {
        let recipe = "zephyr-7b-beta/sft/config_full.yaml";
        let settings = [("batch.gpus", "8"), ("batch.remainder", "uneven")];
        if let Some(text) = upstream(recipe, 3, &settings) {
            insta::assert_snapshot!(text);
        }
    }

    #[test]
    fn without_a_global_batch_the_plan_asks_for_it() {
        if let Some(text) = upstream("zephyr-7b-beta/sft/config_full.yaml", 4, &[]) {
            insta::assert_snapshot!(text);
        }
    }

    #[test]
    fn processes_are_not_called_gpus() {
        let recipe = read(&Request {
            path: "examples/quickstart.yaml".into(),
            ..Request::default()
        })
        .unwrap();
        let device = DeviceKind::Cpu;
        let request = PlanRequest::of(Runner::Any { device }, 3);
        let text = plan(
            &recipe,
            &request,
            &examine(&recipe, &request),
            None,
            "3 CPU ranks",
        );
        assert!(
            text.contains("process counts that split 16 exactly"),
            "{text}"
        );
        assert!(text.contains("use 1, 2, 4 or 8 processes"), "{text}");
        assert!(!text.contains("GPU"), "{text}");
    }

    #[test]
    fn the_norm_test_shows_its_bounds() {
        let path = "examples/microllama-300m-ddp-norm.yaml";
        let recipe = read(&Request {
            path: path.into(),
            ..Request::default()
        })
        .unwrap();
        let request = PlanRequest::gpus(4);
        let text = plan(
            &recipe,
            &request,
            &examine(&recipe, &request),
            None,
            "4 GPUs",
        );
        insta::assert_snapshot!(anstream::adapter::strip_str(&text).to_string());
    }

    #[test]
    fn a_single_step_is_singular() {
        let recipe = "apiVersion: evenkeel.dev/v1alpha1
kind: Recipe
metadata: {name: run}
spec:
  batch: {global: 12, per_device_batch_size: 2}
  budget: {samples: 12}
  checkpoint: {every_samples: 12}
";
        let recipe = crate::recipe::read_text(&Request::default(), recipe.to_owned()).unwrap();
        let request = PlanRequest::gpus(1);
        let text = plan(
            &recipe,
            &request,
            &examine(&recipe, &request),
            None,
            "1 GPU",
        );
        let text = anstream::adapter::strip_str(&text).to_string();
        assert!(
            text.contains("  budget      12 samples, 1 step\n"),
            "{text}"
        );
        assert!(text.contains("every 12 samples, 1 step\n"), "{text}");
    }
}
