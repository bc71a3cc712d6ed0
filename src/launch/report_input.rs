//! Collects the input of a run's report.

use super::proof::LedgerProof;
use super::run_dir::GenerationRow;
use super::{LaunchError, RunDir, generator, history};
use crate::plan::DeviceKind;
use crate::recipe::schema::spec::Precision;
use crate::recipe::syntax::shell;
use crate::telemetry::report::{Fact, GenerationFacts, LedgerVerdict, LossOf, ReportInput};
use crate::util::format::count;
use crate::util::time;

/// All data that the report shows. `ledger` is the proof, if requested.
pub fn report_input(
    run_dir: &RunDir,
    ledger: Option<&LedgerProof>,
) -> Result<ReportInput, LaunchError> {
    let run = run_dir.run()?;
    let state = run_dir.state()?.ok_or_else(|| {
        LaunchError::usage(format!(
            "{}: no step is recorded yet; a report needs at least one \
             step",
            run_dir.path().display()
        ))
    })?;
    let history = history::committed(run_dir, &state)?;
    let fact = |label: &str, value: String| Fact {
        label: label.into(),
        value,
    };
    let mut details = vec![fact("recipe", run.recipe_path.display().to_string())];
    if !run.command_line.is_empty() {
        let command = format!("evenkeel {}", shell::join(&run.command_line));
        details.push(fact("command", command));
    } else if !run.overrides.is_empty() {
        details.push(fact("overrides", run.overrides.join(" ")));
    }
    let started = state.generations.first().map(|row| row.created);
    details.extend(started.map(|seconds| fact("started", time::minute(seconds))));
    details.push(fact(
        "reported by",
        format!("evenkeel {}", env!("CARGO_PKG_VERSION")),
    ));
    let call = state.generations.last().and_then(|row| row.call.as_ref());
    match (call, &run.built_in) {
        (Some(call), _) => details.extend([
            fact("program", call.command.join(" ")),
            fact("checkpoints", call.checkpoint_dir.display().to_string()),
        ]),
        (None, None) => {}
        (None, Some(built_in)) => {
            let model = &built_in.model;
            let shape = format!(
                "{} layers, width {}, {} heads, vocabulary {}",
                model.num_hidden_layers,
                model.hidden_size,
                model.num_attention_heads,
                model.vocab_size
            );
            let spec = &run.spec;
            let strategy = format!("{:?}", spec.parallel.strategy).to_lowercase();
            let sources = spec.data.train.iter().map(|source| source.path.clone());
            let sources: Vec<String> = sources.collect();
            let data = match run.data_samples {
                Some(samples) => format!("{} ({})", sources.join(", "), count(samples, "sample")),
                None => sources.join(", "),
            };
            let precision = match (run.device, spec.model.precision) {
                (DeviceKind::Cpu, _) | (_, Precision::F32) => "f32",
                (DeviceKind::Cuda, Precision::Bf16 | Precision::F16) => {
                    "bf16, weights and states in f32"
                }
            };
            details.extend([
                fact("model", shape),
                fact("data", data),
                fact(
                    "tokens a sample",
                    format!("at most {}", spec.data.sequence_length),
                ),
                fact("precision", precision.to_owned()),
                fact("strategy", strategy),
                fact("seed", spec.seed.to_string()),
            ]);
            let newest = state.checkpoint_ref.as_ref();
            details.extend(newest.map(|newest| {
                let samples = count(newest.samples, "sample");
                fact("checkpoint", format!("{} ({samples})", newest.path))
            }));
            if !history.evaluations.is_empty() {
                let mean = match spec.is_mean_over_tokens() {
                    true => "a mean over tokens; transformers' eval_loss is a mean over batches",
                    false => "a mean over samples; transformers' eval_loss is a mean over batches",
                };
                details.push(fact("evaluation loss", mean.to_owned()));
            }
        }
    }
    // A report of what was trained does not need them.
    let continuations = generator::continuations(run_dir, &run).unwrap_or_else(|error| {
        details.push(fact("texts", format!("not continued: {error}")));
        Vec::new()
    });
    let mut steps = history.steps.iter().rev();
    let total = steps.find_map(|step| step.external?.total_samples);
    let mut start = 0;
    let start_of = |row: &GenerationRow| {
        // An external trainer tells only by its first report from where it continues.
        let resumed = row
            .call
            .as_ref()
            .is_some_and(|call| call.checkpoint.is_some());
        let mut steps = history.steps.iter().filter(|_| resumed);
        let first = steps.find(|step| step.generation == row.number);
        let reported = first.map(|step| step.samples.saturating_sub(step.batch));
        start = row.start_samples.or(reported).unwrap_or(start);
        start
    };
    let starts: Vec<u64> = state.generations.iter().map(start_of).collect();
    Ok(ReportInput {
        title: run.name.clone(),
        formula: history::current_formula(run_dir, &state).unwrap_or_default(),
        budget: total.or(run.horizon.budget_samples),
        details,
        generations: state
            .generations
            .into_iter()
            .zip(starts)
            .map(|(row, start_samples)| GenerationFacts {
                generation: row.number,
                world: row.world,
                formula: row.formula,
                reason: row.reason.to_string(),
                start_samples,
                seconds_to_first_step: row.first_step_seconds,
            })
            .collect(),
        steps: history.steps,
        evaluations: history.evaluations,
        floor: run.built_in.as_ref().and_then(|it| it.entropy),
        vocabulary: (run.built_in.as_ref())
            .filter(|_| run.spec.is_mean_over_tokens())
            .map_or(0, |it| it.model.vocab_size as u64),
        loss_of: match run.spec.objective.is_likelihood() {
            _ if run.built_in.is_none() || run.spec.is_cross_entropy() => LossOf::CrossEntropy,
            true if run.spec.is_mean_over_tokens() => LossOf::Tokens,
            true => LossOf::Samples,
            false => LossOf::Preferences,
        },
        continuations,
        ledger: ledger.map(|verdict| LedgerVerdict {
            proven: verdict.is_proved(),
            text: verdict.to_string(),
        }),
    })
}
