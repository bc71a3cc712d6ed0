//! Asks for the proof of a TrainingJob's ledger and waits for it.

use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;

use super::ClusterArgs;
use crate::api::condition::{ConditionReason, ConditionType};
use crate::cli::EXIT_REFUSED;
use crate::cli::output::{Format, line, say};
use crate::client::change;

/// Time between two looks at the job.
const LOOK: Duration = Duration::from_millis(500);

/// Proves the ledger in a pod of the job, and prints the verdict.
pub fn run(job: &str, cluster: &ClusterArgs, output: Format) -> anyhow::Result<ExitCode> {
    let condition = cluster.run(async |cluster| {
        let before = cluster.job(job).await?;
        let answered = before
            .status
            .as_ref()
            .map_or(0, |status| status.ledger_proof);
        let asked = before.spec.prove_ledger;
        // Of a proof that is under way another one would tell nothing new.
        let wanted = if asked > answered {
            asked
        } else {
            let next = asked.max(answered).saturating_add(1);
            change::prove_ledger(cluster, job, next).await?;
            next
        };
        let mut told = String::new();
        loop {
            let now = cluster.job(job).await?;
            let status = now.status.unwrap_or_default();
            let mut conditions = status.conditions.into_iter();
            let condition = conditions.find(|c| c.type_ == ConditionType::LedgerProved.name());
            if status.ledger_proof >= wanted {
                return Ok(condition);
            }
            let proving = condition.filter(|c| c.reason == ConditionReason::Proving.name());
            if let Some(proving) = proving.filter(|c| c.message != told) {
                say(format_args!("{}\n", proving.message));
                told = proving.message;
            }
            tokio::time::sleep(LOOK).await;
        }
    })?;
    let (proved, reason, verdict) = match condition {
        Some(found) => (found.status == "True", found.reason, found.message),
        None => (
            false,
            String::new(),
            "the controller gave no verdict".to_owned(),
        ),
    };
    if output == Format::Text {
        let mark = if proved { "proved" } else { "NOT PROVED" };
        line(format_args!("{mark}: {verdict}"))?;
    } else {
        output.print(&json!({
            "proved": proved,
            "reason": reason,
            "verdict": verdict,
        }))?;
    }
    Ok(if proved {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_REFUSED)
    })
}
