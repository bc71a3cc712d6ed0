//! Draws diagnostics as text, separate from a command's result.

mod draw;
pub mod sarif;

use super::output::say;
use crate::recipe::{Diagnostic, Sources};

pub use draw::{diagnostics, summary};

/// Draws diagnostics on standard error.
pub fn print(all: &[Diagnostic], sources: &Sources) {
    say(diagnostics(all, sources));
}
