//! The agent's metrics, read from its state when they are asked for.

use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::lifecycle::agent_state::AgentState;
use crate::util::openmetrics;

/// All metrics in the OpenMetrics text format.
pub fn text(state: &AgentState) -> String {
    let mut registry = Registry::with_prefix("evenkeel");
    let mut gauge = |name, help, value: f64| registry.register(name, help, ConstGauge::new(value));
    let running = state.ranks.iter().filter(|seen| !seen.has_ended()).count();
    let generation = state.generation as f64;
    gauge(
        "generation",
        "Generation of the ranks in this pod",
        generation,
    );
    gauge("ranks", "Running ranks in this pod", running as f64);
    if let Some(step) = &state.step {
        let loss = "Loss of the newest step, nats per target token";
        gauge("step", "Optimiser steps taken", step.step as f64);
        gauge("samples", "Samples consumed", step.samples as f64);
        gauge("global_batch_samples", "Global batch", step.batch as f64);
        gauge("loss_nats", loss, step.loss);
        gauge("step_seconds", "Duration of the newest step", step.seconds);
        let tokens = step.tokens as f64;
        gauge("step_tokens", "Target tokens of the newest step", tokens);
        if let Some(test) = &step.norm_test {
            let ratio = "Ratio of the norm test; the batch grows above the threshold";
            gauge("norm_test_ratio", ratio, test.ratio);
            let threshold = "Threshold of the norm test, the square of eta";
            gauge("norm_test_threshold", threshold, test.threshold);
        }
    }
    openmetrics::encode(&registry)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_newest_step_and_its_norm_test_are_exported() {
        let norm_test = json!({
            "ratio": 0.5, "threshold": 0.25, "noise_scale": 16.0, "target": 16.0, "next_batch": 16,
            "reason": "grew ×2 (cap)",
        });
        let step = json!({
            "generation": 3, "step": 7, "samples": 56, "batch": 8, "world": 2, "loss": 2.5, "tokens": 256,
            "learning_rate": 1e-3, "gradient_norm": 1.0, "seconds": 0.5, "time": 1.0,
            "norm_test": norm_test,
        });
        let ranks = json!([{"ready": true}, {"ending": {"code": 0}}]);
        let state = json!({"generation": 3, "ranks": ranks, "step": step});
        let state: AgentState = serde_json::from_value(state).unwrap();
        insta::assert_snapshot!(text(&state));
    }

    #[test]
    fn an_agent_without_ranks_exports_no_step() {
        let text = text(&AgentState::default());
        assert!(
            text.contains("evenkeel_ranks 0.0\n") && !text.contains("evenkeel_step"),
            "{text}"
        );
    }
}
