//! The regular expression that finds an external trainer's progress in its output. The controller compiles the
//! patterns of all users, so their sizes have limits.

use regex::{Regex, RegexBuilder};

/// The named groups of a pattern. Each has the name of a key in the file that `EVENKEEL_PROGRESS` names.
pub const GROUPS: [&str; 5] = ["step", "total_steps", "loss", "learning_rate", "tokens"];
/// The group that every pattern has.
const REQUIRED: &str = GROUPS[0];
/// Longest pattern, bytes.
const LONGEST: usize = 1024;
/// Most memory of a compiled pattern, bytes.
const COMPILED: usize = 128 << 10;

/// A pattern that cannot be used. The messages continue the key's name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    #[error("has {0} bytes, at most {LONGEST} are possible; shorten it")]
    TooLong(usize),
    #[error("takes more than {COMPILED} bytes when compiled; lower its repetition counts")]
    TooLarge,
    #[error("is not a regular expression: {0}")]
    Syntax(String),
    #[error(
        "has no group `{REQUIRED}`; write `(?<{REQUIRED}>[0-9]+)` where the output has the step"
    )]
    NoStep,
    #[error("has the group `{0}`; name only {known}", known = GROUPS.join(", "))]
    UnknownGroup(String),
}

/// Compiles a pattern and checks its groups.
pub fn compile(pattern: &str) -> Result<Regex, PatternError> {
    if pattern.len() > LONGEST {
        return Err(PatternError::TooLong(pattern.len()));
    }
    let mut builder = RegexBuilder::new(pattern);
    let compiled = builder
        .size_limit(COMPILED)
        .dfa_size_limit(COMPILED)
        .build();
    let compiled = compiled.map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => PatternError::TooLarge,
        error => {
            // The lines before the last one show the pattern.
            let message = error.to_string();
            let last = message.lines().last().unwrap_or_default();
            PatternError::Syntax(last.trim_start_matches("error: ").to_owned())
        }
    })?;
    let unknown = |name: &&str| !GROUPS.contains(name);
    if let Some(name) = compiled.capture_names().flatten().find(unknown) {
        return Err(PatternError::UnknownGroup(name.to_owned()));
    }
    if !compiled
        .capture_names()
        .flatten()
        .any(|name| name == REQUIRED)
    {
        return Err(PatternError::NoStep);
    }
    Ok(compiled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_has_known_groups_and_a_limited_size() {
        let refused = |pattern: &str| compile(pattern).unwrap_err().to_string();
        for pattern in [
            "step (?<step>[0-9]+)/(?<total_steps>[0-9]+)",
            "(?i)(?P<step>\\d+) (loss|lr) (?P<loss>\\S+) (?<learning_rate>\\S+) (?<tokens>\\S+)",
        ] {
            assert!(compile(pattern).is_ok(), "{pattern}");
        }
        insta::assert_snapshot!(refused("(?<step>[0-9]+"), @"is not a regular expression: unclosed group");
        insta::assert_snapshot!(refused("step ([0-9]+)"), @"has no group `step`; write `(?<step>[0-9]+)` where the output has the step");
        insta::assert_snapshot!(refused("(?<step>[0-9]+) (?<total>[0-9]+)"), @"has the group `total`; name only step, total_steps, loss, learning_rate, tokens");
        insta::assert_snapshot!(refused("(?<step>\\w{900}{900})"), @"takes more than 131072 bytes when compiled; lower its repetition counts");
        insta::assert_snapshot!(refused(&"a".repeat(LONGEST + 1)), @"has 1025 bytes, at most 1024 are possible; shorten it");
    }
}
