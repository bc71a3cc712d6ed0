//! Times of the API: RFC 3339 with microseconds in objects, seconds since the Unix epoch in
//! decisions. All conversions between the two are here.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use schemars::{Schema, SchemaGenerator, json_schema};

/// The API's form of `seconds` since the Unix epoch, rounded to microseconds. Rounding is stable:
/// `micro_time(seconds(&time)) == time`, so an unchanged time never rewrites a status.
pub fn micro_time(seconds: f64) -> MicroTime {
    let microseconds = (seconds * 1e6).round() as i64;
    MicroTime(Timestamp::from_microsecond(microseconds).unwrap_or(Timestamp::UNIX_EPOCH))
}

/// The minute of `seconds` since the Unix epoch, for people: `2026-11-27 06:08 UTC`.
pub fn minute(seconds: f64) -> String {
    let time = micro_time(seconds).0;
    time.strftime("%Y-%m-%d %H:%M UTC").to_string()
}

/// Seconds since the Unix epoch.
pub fn seconds(time: &MicroTime) -> f64 {
    time.0.as_microsecond() as f64 / 1e6
}

/// Seconds from `start` to `end`, rounded to milliseconds; 0 where `end` is earlier.
pub fn seconds_between(start: &MicroTime, end: f64) -> f64 {
    let elapsed = end - seconds(start);
    (elapsed.max(0.0) * 1e3).round() / 1e3
}

/// The schema of a time, RFC 3339 with microseconds.
pub fn schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "format": "date-time"})
}

/// Serde for a field that is seconds since the Unix epoch in Rust and RFC 3339 in JSON.
pub mod rfc3339 {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    /// Writes RFC 3339 with microseconds.
    pub fn serialize<S: Serializer>(seconds: &f64, to: S) -> Result<S::Ok, S::Error> {
        super::micro_time(*seconds).serialize(to)
    }

    /// Reads RFC 3339.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        MicroTime::deserialize(from).map(|time| super::seconds(&time))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_read_minutes() {
        assert_eq!(minute(0.0), "1970-01-01 00:00 UTC");
        assert_eq!(minute(1_763_866_800.9), "2025-11-23 03:00 UTC");
    }

    #[test]
    fn times_survive_repeated_conversion() {
        for at in [
            0.0,
            1000.3,
            1_763_866_800.123_456_7,
            1_763_866_800.999_999_6,
        ] {
            let time = micro_time(at);
            assert_eq!(micro_time(seconds(&time)), time);
            assert!((seconds(&time) - at).abs() <= 1e-6);
        }
    }

    #[test]
    fn times_are_rfc_3339_with_microseconds() {
        let json = serde_json::to_string(&micro_time(1_763_866_800.25)).unwrap();
        assert_eq!(json, r#""2025-11-23T03:00:00.250000Z""#);
        assert_eq!(seconds_between(&micro_time(1000.0), 1000.32), 0.32);
        assert_eq!(seconds_between(&micro_time(1000.0), 999.0), 0.0);
    }
}
