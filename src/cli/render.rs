//! Draws diagnostics as text, separate from a command's result.

mod draw;
pub mod sarif;

use super::output::say;
use crate::recipe::{Diagnostic, Severity, Sources};

pub use draw::{diagnostics, summary};

/// The last line of a result with diagnostics: how many there are, and where to read on.
pub fn closing(all: &[Diagnostic]) -> String {
    let gravest = all.iter().min_by_key(|d| d.severity);
    let rule = gravest.map_or("", |d| d.rule.as_str());
    format!("{}; more in `evenkeel explain {rule}`\n", summary(all))
}

/// Draws diagnostics on standard error.
pub fn print(all: &[Diagnostic], sources: &Sources) {
    say(diagnostics(all, sources));
}

/// As [`print`]; notes are omitted if the command is quiet.
pub fn print_for(quiet: bool, all: &[Diagnostic], sources: &Sources) {
    let shown = all
        .iter()
        .filter(|found| !quiet || found.severity != Severity::Note);
    print(&shown.cloned().collect::<Vec<_>>(), sources);
}
