//! NaN in JSON: `serde_json` writes numbers that are not finite as `null`, and this module reads them back.

use serde::{Deserialize, Deserializer};

/// Reads `null` as NaN; an infinity also becomes NaN.
pub(super) fn from_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}
