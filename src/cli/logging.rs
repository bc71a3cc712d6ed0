//! Logs of the long-running commands: one line an event on standard error, `RUST_LOG` filters.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

/// Starts logging; JSON where nobody reads along.
pub fn start() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let base = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr);
    if std::io::stderr().is_terminal() {
        base.with_target(false).init();
    } else {
        base.json().init();
    }
}
