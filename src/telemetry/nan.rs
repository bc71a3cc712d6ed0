//! JSON has no NaN: `serde_json` writes numbers that are not finite as `null`, and this reads them
//! back.

use serde::{Deserialize, Deserializer};

/// Reads `null` as NaN (also what was an infinity).
pub(super) fn from_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}
