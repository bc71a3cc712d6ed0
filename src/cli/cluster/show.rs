//! `evenkeel status JOB` on a cluster: phase, formula, progress and generations of a TrainingJob,
//! and the reason for a wait.

use std::process::ExitCode;

use super::ClusterArgs;
use crate::api::TrainingJob;
use crate::api::status::Phase;
use crate::cli::EXIT_REFUSED;
use crate::cli::output::{Format, line, print, print_as_is, width};
use crate::cli::status::View;
use crate::cli::table::Table;

/// Shows one job; exit code 1 if it has failed.
pub fn run(name: &str, cluster: &ClusterArgs, output: Format) -> anyhow::Result<View> {
    let job = cluster.run(async |cluster| Ok(cluster.job(name).await?))?;
    match output {
        Format::Text => text(&job)?,
        format => format.print(&job)?,
    }
    let status = job.status.unwrap_or_default();
    Ok(View {
        code: match status.phase {
            Phase::Failed => ExitCode::from(EXIT_REFUSED),
            _ => ExitCode::SUCCESS,
        },
        ended: status.is_over(),
    })
}

fn text(job: &TrainingJob) -> anyhow::Result<()> {
    let status = job.status.clone().unwrap_or_default();
    let name = job.metadata.name.clone().unwrap_or_default();
    let message = match status.message.as_str() {
        "" => String::new(),
        message => format!(": {message}"),
    };
    line(format_args!("{name}: {:?}{message}", status.phase))?;
    let spec = &job.spec;
    line(format_args!(
        "  nodes       {} of {}, {} {} each",
        status.nodes, spec.nodes, spec.gpus_per_node, spec.resource_name
    ))?;
    if let Some(plan) = &status.plan {
        line(format_args!("  batch       {} samples", plan.formula))?;
        let feasible: Vec<String> = plan.feasible_nodes.iter().map(u32::to_string).collect();
        line(format_args!("  feasible    {} nodes", feasible.join(", ")))?;
        for warning in &plan.warnings {
            line(format_args!("  warning     {warning}"))?;
        }
    }
    if let Some(progress) = &status.progress {
        let budget = match progress.budget {
            Some(budget) => format!(" of {budget}"),
            None => String::new(),
        };
        let known = |label: &str, value: &str, after: &str| match value {
            "" => String::new(),
            value => format!(", {label}{value}{after}"),
        };
        line(format_args!(
            "  progress    {}{budget} samples, step {}{}, batch {}{}{}",
            progress.samples,
            progress.step,
            known("loss ", &progress.loss, ""),
            progress.batch,
            match progress.tokens_per_second {
                0 => String::new(),
                rate => format!(", {rate} tokens/s"),
            },
            known("", &progress.time_left, " left"),
        ))?;
    }
    match (&status.checkpoint, &status.external_checkpoint) {
        (Some(checkpoint_ref), _) => line(format_args!(
            "  checkpoint  {} ({} samples)",
            checkpoint_ref.path, checkpoint_ref.samples
        ))?,
        (None, Some(newest)) => line(format_args!("  checkpoint  {}", newest.path.display()))?,
        (None, None) => line("  checkpoint  none yet")?,
    }
    line(format_args!(
        "  lost        {} nodes or pods; {} restarts without progress of {}",
        status.disruptions, status.restarts, spec.budgets.restarts
    ))?;
    if !status.history.is_empty() {
        // An external trainer does not report samples.
        let external = !status.command(spec).is_empty();
        let mut table = Table::new([
            "generation",
            "nodes",
            "plan",
            "from sample",
            "first step",
            "message",
        ]);
        for change in &status.history {
            let seconds = change.stages.first_step_seconds;
            table.row([
                change.generation.to_string(),
                format!("{} → {}", change.from_nodes, change.to_nodes),
                change.formula.clone(),
                if external {
                    "–".into()
                } else {
                    change.samples.to_string()
                },
                seconds.map_or("–".into(), |s| format!("{s:.1} s")),
                change.message.clone(),
            ]);
        }
        print(format_args!("\n{}", table.render(width())))?;
    }
    if !status.log_tail.is_empty() {
        print_as_is(format_args!("\nlog tail\n{}\n", status.log_tail))?;
    }
    Ok(())
}
