//! The meaning of `model.batch_size`, which has changed twice.
//!
//! | version | `model.batch_size` B | a micro-batch |
//! |---|---|---|
//! | `head`, since 2f70d00 (2025-05-01) | the global batch | B / (ranks × accumulation), exact |
//! | `before-2025-05-01`, since 1191dba (2024-12-25) | one accumulation step | B / ranks, exact |
//! | `legacy`, up to 61b9ee6 | one accumulation step | ⌊B / ranks⌋, the remainder is dropped |

use crate::recipe::dialects::hydra::Values;
use crate::recipe::schema::reader::ReadAs;
use crate::recipe::schema::reading::Reading;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::source::{SourceFile, Sources};
use crate::util::suggest::did_you_mean;

/// A version of the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    /// The batch is global.
    Head,
    /// The batch is that of one accumulation step.
    PerStep,
    /// The batch is that of one accumulation step, rounded down; before the tree used accelerate.
    Legacy,
}

/// The day of 2f70d00.
const HEAD_SINCE: &str = "2025-05-01";
/// The day of daa8842, which moved the tree to accelerate.
const ACCELERATE_SINCE: &str = "2024-09-05";

impl Version {
    /// Values of `--dialect-version` in the order of [`Version::ALL`], in addition to days such as `2025-04-30`.
    const NAMES: &'static [&'static str] = &["head", "before-2025-05-01", "legacy"];

    const ALL: [Version; 3] = [Version::Head, Version::PerStep, Version::Legacy];

    fn name(self) -> &'static str {
        Version::NAMES[self as usize]
    }

    /// The version with this name, or of this day.
    fn named(text: &str) -> Option<Version> {
        let mut all = Version::ALL.into_iter();
        if let Some(version) = all.find(|version| version.name() == text) {
            return Some(version);
        }
        let day = |c: char| c.is_ascii_digit() || c == '-';
        let is_day = text.len() == HEAD_SINCE.len() && text.chars().all(day);
        is_day.then_some(if text < ACCELERATE_SINCE {
            Version::Legacy
        } else if text < HEAD_SINCE {
            Version::PerStep
        } else {
            Version::Head
        })
    }
}

/// Keys that only the legacy tree has.
const LEGACY: &[&str] = &[
    "use_fsdp",
    "fsdp_port",
    "saved_policy",
    "human_prefix",
    "mode",
];
/// Keys added after the batch had become global (2f136e0, 2025-05-23).
const HEAD: &[&str] = &["log_epsilon_P", "log_epsilon_R"];
/// Keys removed before that.
const EARLIER: &[&str] = &["warmup_steps", "humanline_alpha", "datasets"];

/// The version of a tree, and the reason. `roots` are the files that may contain its root's keys.
pub(super) fn detect(
    values: &Values<'_>,
    roots: [Option<&Node>; 2],
    asked: Option<&str>,
    reading: &mut Reading,
) -> (Version, ReadAs) {
    let named = asked.and_then(Version::named);
    if let (Some(text), None) = (asked, named) {
        let names = did_you_mean(text, Version::NAMES.iter().copied());
        let message = format!("`--dialect-version` is `{text}`");
        let help = format!("{names}, or a day such as `2025-04-30`");
        reading.error("unknown-value", None, message, help);
    }
    let key_of = |keys: &[&'static str]| {
        let has = |key: &str| roots.iter().flatten().any(|root| root.get(key).is_some());
        let found = keys.iter().find(|key| has(key))?;
        Some(format!("it has the key `{found}`"))
    };
    let (version, why) = if let Some(version) = named {
        (version, "`--dialect-version`".to_owned())
    } else if let Some(why) = key_of(LEGACY) {
        (Version::Legacy, why)
    } else if let Some((version, file)) = by_comment(&reading.sources) {
        (version, format!("the comment on `batch_size` in {file}"))
    } else if let Some(why) = key_of(HEAD) {
        (Version::Head, why)
    } else if let Some(why) = key_of(EARLIER) {
        (Version::PerStep, why)
    } else {
        warn(values, reading);
        (Version::Head, "the default".to_owned())
    };
    let name = version.name().to_owned();
    let reason = format!("version {name}: {why}");
    (version, ReadAs { name, reason })
}

/// Warns which batch is assumed, if it makes a difference.
fn warn(values: &Values<'_>, reading: &mut Reading) {
    let mut quiet = Reading::default();
    let size = values.int("model.batch_size", &mut quiet);
    let passes = values.int("model.gradient_accumulation_steps", &mut quiet);
    let (Some(size), Some(passes)) = (size, passes.filter(|passes| passes.value > 1)) else {
        return;
    };
    reading.warning(
        "version-assumed",
        Some(size.span),
        format!(
            "the version of the tree is unknown: `model.batch_size` {} is taken as the global batch; \
             before {HEAD_SINCE} it was one of {} accumulation steps and the global batch {}",
            size.value,
            passes.value,
            size.value.saturating_mul(passes.value)
        ),
        format!("set it: `--dialect-version head` or `--dialect-version before-{HEAD_SINCE}`"),
    );
}

/// The version by the comment on `batch_size`, which 2f70d00 changed together with its meaning.
fn by_comment(sources: &Sources) -> Option<(Version, String)> {
    sources.iter().find_map(|file| {
        let version = commented(file)?;
        Some((version, format!("`{}`", file.path.display())))
    })
}

fn commented(file: &SourceFile) -> Option<Version> {
    let mut comment = String::new();
    for line in file.text.lines() {
        if let Some(text) = line.trim_start().strip_prefix('#') {
            comment += text;
        } else if line.starts_with("batch_size:") {
            return if comment.contains("and gradient accumulation steps") {
                Some(Version::Head)
            } else if comment.contains("divide by number of devices to get microbatch size (done") {
                Some(Version::PerStep)
            } else {
                None
            };
        } else {
            comment.clear();
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_given_by_name_or_by_day() {
        for (text, version) in [
            ("head", Some(Version::Head)),
            ("before-2025-05-01", Some(Version::PerStep)),
            ("legacy", Some(Version::Legacy)),
            ("2025-05-01", Some(Version::Head)),
            ("2025-04-30", Some(Version::PerStep)),
            ("2023-12-03", Some(Version::Legacy)),
            ("2025", None),
            ("yesterday!", None),
        ] {
            assert_eq!(Version::named(text), version, "{text}");
        }
    }
}
