//! Metrics in the OpenMetrics text format, which Prometheus scrapes.

use prometheus_client::encoding::text;
use prometheus_client::registry::Registry;

/// The value of `Content-Type` for [`encode`].
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All metrics of a registry.
pub fn encode(registry: &Registry) -> String {
    let mut encoded = String::new();
    // Writing to a string does not fail.
    let _ = text::encode(&mut encoded, registry);
    encoded
}
