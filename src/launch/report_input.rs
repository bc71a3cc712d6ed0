//! Collects the input of a run's report.

use super::proof::LedgerProof;
use super::{LaunchError, RunDir, history};
use crate::telemetry::report::{Fact, Facts, GenerationFacts, LedgerVerdict, ReportInput};

/// All data that the report shows. `ledger` is the proof, if requested.
pub fn report_input(
    run: &RunDir,
    ledger: Option<&LedgerProof>,
) -> Result<ReportInput, LaunchError> {
    let setup = run.setup()?;
    let state = run.state()?.ok_or_else(|| LaunchError::Usage {
        message: format!(
            "{}: no step is recorded yet; a report needs at least one \
             step",
            run.path().display()
        ),
    })?;
    let history = history::committed(run, &state)?;
    let fact = |label: &str, value: String| Fact {
        label: label.into(),
        value,
    };
    let model = setup.model()?;
    Ok(ReportInput {
        title: setup.name.clone(),
        facts: Facts {
            formula: history::current_formula(run, &state).unwrap_or_default(),
            budget: setup.budget_samples,
            details: vec![
                fact("recipe", setup.recipe_path.display().to_string()),
                fact(
                    "model",
                    format!(
                        "{} layers, width {}, {} heads, vocabulary {}",
                        model.num_hidden_layers,
                        model.hidden_size,
                        model.num_attention_heads,
                        model.vocab_size
                    ),
                ),
                fact(
                    "strategy",
                    format!("{:?}", setup.spec.parallel.strategy).to_lowercase(),
                ),
                fact("seed", setup.spec.seed.to_string()),
            ],
        },
        generations: state
            .generations
            .into_iter()
            .map(|row| GenerationFacts {
                generation: row.number,
                world: row.world,
                formula: row.formula,
                reason: row.reason.to_string(),
                start_samples: row.start_samples.unwrap_or_default(),
                seconds_to_first_step: row.first_step_seconds,
            })
            .collect(),
        steps: history.steps,
        evaluations: history.evaluations,
        floor: setup.entropy,
        vocabulary: model.vocab_size as u64,
        ledger: ledger.map(|verdict| LedgerVerdict {
            proven: verdict.is_proved(),
            text: verdict.to_string(),
        }),
    })
}
