//! Standard error that may be a file on a full or read-only disk, as the log of a rank is.

use std::fmt::Arguments;
use std::io::Write;

/// Writes a line to standard error. A line that cannot be written is lost; `eprintln!` would panic.
pub fn line(line: Arguments) {
    let _ = writeln!(std::io::stderr(), "{line}");
}
