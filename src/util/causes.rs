//! The causes of an error.

use std::error::Error;

/// The innermost one, which names the problem; the wrapping errors only repeat that something failed.
pub fn innermost(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    cause.to_string()
}
