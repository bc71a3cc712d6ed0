//! A TrainingJob as it comes from the API server: decoded, or the reason why not.
//!
//! Users of one namespace write these objects and the controller keeps those of all namespaces, so the
//! memory of decoding is bounded. `kube`'s `DeserializeGuard` buffers each object twice as a tree, of
//! about 700 B per map: an object of 1.4 MB took hundreds of MB. This guard keeps the object's text,
//! and it limits `podTemplate`, the only field without a schema, before it builds anything from it. An
//! object of any depth is an error of this object alone, not of the list that contains it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::error_boundary::InvalidObject;
use serde::de::value::MapDeserializer;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::{TrainingJob, TrainingJobSpec, TrainingJobStatus};

/// Most bytes of `spec.podTemplate` as JSON.
pub const POD_TEMPLATE_BYTES: usize = 64 * 1024;
/// Most bytes of `spec.recipe` and `spec.overrides` as JSON. etcd stores objects of 1.5 MiB.
pub const RECIPE_BYTES: usize = 1024 * 1024;
/// Most bytes of the rest of a spec as JSON, and of a status: the caches of the controller have those of all jobs.
pub const SPEC_BYTES: usize = 128 * 1024;
pub const STATUS_BYTES: usize = 512 * 1024;
/// Most nested values in `spec.podTemplate`; one takes up to about 700 B of memory.
pub const POD_TEMPLATE_VALUES: usize = 2048;

/// Fields of `metadata` that this program reads. The others can take many times their size in memory,
/// above all `managedFields`.
const METADATA: [&str; 7] = [
    "name",
    "namespace",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
];
/// Most characters of an error. Errors quote values of the object.
const ERROR: usize = 500;

/// A TrainingJob, or its metadata and the reason why it cannot be decoded.
#[derive(Resource, Debug, Clone)]
#[resource(inherit = "TrainingJob")]
pub struct GuardedJob {
    metadata: ObjectMeta,
    pub decoded: Result<TrainingJob, InvalidObject>,
}

/// Reason why a TrainingJob cannot be decoded.
#[derive(Debug, thiserror::Error)]
enum DecodeError {
    #[error("{}", without_position(.0))]
    Object(serde_json::Error),
    #[error("{field}: {}", without_position(.error))]
    Field {
        field: &'static str,
        error: serde_json::Error,
    },
    #[error(
        "spec.podTemplate has {0} bytes of JSON, more than {POD_TEMPLATE_BYTES}; move long texts to a ConfigMap that the pods mount"
    )]
    LongPodTemplate(usize),
    #[error(
        "spec.podTemplate has {0} nested values, more than {POD_TEMPLATE_VALUES}; move environment variables and files to a ConfigMap that the pods use"
    )]
    LargePodTemplate(usize),
    #[error(
        "spec.recipe and spec.overrides have {} KiB of JSON, more than {}; remove the files that the recipe does not read, and move data to the volume",
        .0.div_ceil(1024), RECIPE_BYTES / 1024
    )]
    LongRecipe(usize),
    #[error(
        "spec has {} KiB of JSON without the recipe and podTemplate, more than {}; move long commands, setup commands and variables to a ConfigMap that the pods use",
        .0.div_ceil(1024), SPEC_BYTES / 1024
    )]
    LongSpec(usize),
    #[error("status: {} KiB of JSON, more than {}, which no controller writes", .0.div_ceil(1024), STATUS_BYTES / 1024)]
    LongStatus(usize),
    #[error(
        "spec.{0}, which the schema of the TrainingJob excludes; apply the CRD of this release"
    )]
    Spec(String),
    #[error("status: {0}, which no controller writes")]
    Status(String),
}

/// The parts of an object as text.
#[derive(Deserialize)]
struct Parts<'a> {
    #[serde(borrow)]
    metadata: Option<BTreeMap<Cow<'a, str>, &'a RawValue>>,
    #[serde(borrow)]
    spec: Option<&'a RawValue>,
    #[serde(borrow)]
    status: Option<&'a RawValue>,
}

/// The parts of a spec with separate limits.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an object")]
struct Limited<'a> {
    #[serde(borrow)]
    pod_template: Option<&'a RawValue>,
    #[serde(borrow)]
    recipe: Option<&'a RawValue>,
    #[serde(borrow)]
    overrides: Option<&'a RawValue>,
}

impl Limited<'_> {
    /// Checks them, and the rest of a spec of `bytes` as JSON.
    fn check(&self, bytes: usize) -> Result<(), DecodeError> {
        check_pod_template(self.pod_template)?;
        let length = |part: Option<&RawValue>| part.map_or(0, |part| part.get().len());
        let recipe = length(self.recipe) + length(self.overrides);
        if recipe > RECIPE_BYTES {
            return Err(DecodeError::LongRecipe(recipe));
        }
        let rest = bytes.saturating_sub(recipe + length(self.pod_template));
        if rest > SPEC_BYTES {
            return Err(DecodeError::LongSpec(rest));
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for GuardedJob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Box::<RawValue>::deserialize(deserializer)?;
        let parts = serde_json::from_str(text.get()).map_err(DecodeError::Object);
        let parts: Parts = parts.map_err(serde::de::Error::custom)?;
        // Without its metadata the object cannot be named.
        let metadata = metadata(&parts).map_err(serde::de::Error::custom)?;
        let decoded = decode(&parts, metadata.clone()).map_err(|error| InvalidObject {
            error: error.to_string().chars().take(ERROR).collect(),
            metadata: metadata.clone(),
        });
        Ok(GuardedJob { metadata, decoded })
    }
}

fn metadata(parts: &Parts) -> Result<ObjectMeta, DecodeError> {
    let fields = parts.metadata.iter().flatten();
    let read = fields.filter(|(name, _)| METADATA.contains(&name.as_ref()));
    let read = MapDeserializer::new(read.map(|(name, value)| (name.as_ref(), *value)));
    let field = "metadata";
    ObjectMeta::deserialize(read).map_err(|error| DecodeError::Field { field, error })
}

fn decode(parts: &Parts, metadata: ObjectMeta) -> Result<TrainingJob, DecodeError> {
    let spec = parts.spec.unwrap_or(RawValue::NULL);
    part::<Limited>("spec", spec)?.check(spec.get().len())?;
    let parsed: TrainingJobSpec = part("spec", spec)?;
    if let Some(flaw) = parsed.flaw() {
        return Err(DecodeError::Spec(flaw));
    }
    let mut status: Option<TrainingJobStatus> = match parts.status {
        Some(status) => part("status", status)?,
        None => None,
    };
    let kept = status.as_mut().and_then(|status| status.recipe.as_mut());
    if let Some(kept) = kept.filter(|_| parsed.recipe.config_map.is_none()) {
        // Earlier versions wrote the texts of the spec again.
        (kept.text, kept.files) = Default::default();
    }
    let bytes = |status| serde_json::to_vec(status).map_or(0, |text| text.len());
    if let Some(bytes) = status
        .as_ref()
        .map(bytes)
        .filter(|bytes| *bytes > STATUS_BYTES)
    {
        return Err(DecodeError::LongStatus(bytes));
    }
    if let Some(flaw) = status.as_ref().and_then(TrainingJobStatus::flaw) {
        return Err(DecodeError::Status(flaw));
    }
    Ok(TrainingJob {
        metadata,
        spec: parsed,
        status,
    })
}

fn part<'a, T: Deserialize<'a>>(field: &'static str, text: &'a RawValue) -> Result<T, DecodeError> {
    serde_json::from_str(text.get()).map_err(|error| DecodeError::Field { field, error })
}

fn check_pod_template(text: Option<&RawValue>) -> Result<(), DecodeError> {
    let text = text.map_or("", RawValue::get);
    if text.len() > POD_TEMPLATE_BYTES {
        return Err(DecodeError::LongPodTemplate(text.len()));
    }
    let values = values(text);
    if values > POD_TEMPLATE_VALUES {
        return Err(DecodeError::LargePodTemplate(values));
    }
    Ok(())
}

/// Values in a JSON text, nested ones included: each but the first follows a bracket or a comma. An
/// empty list or object counts as two.
fn values(json: &str) -> usize {
    let (mut values, mut in_text, mut escaped) = (1, false, false);
    for byte in json.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => in_text = !in_text,
            b'[' | b'{' | b',' if !in_text => values += 1,
            _ => {}
        }
    }
    values
}

/// The message of an error; its position in the text of an API server helps no user.
fn without_position(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let position = format!(" at line {} column {}", error.line(), error.column());
    message.strip_suffix(&position).unwrap_or(&message).into()
}

#[cfg(test)]
mod tests {
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;

    /// A job with fields of its spec.
    fn job(fields: Value) -> Value {
        let mut job = json!({
            "apiVersion": "evenkeel.dev/v1alpha1", "kind": "TrainingJob",
            "metadata": {
                "name": "a", "namespace": "n", "uid": "u", "resourceVersion": "7", "generation": 3,
                "labels": {"team": "x"},
                "managedFields": [{"manager": "m", "fieldsV1": {"f:spec": {"f:nodes": {}}}}],
            },
            "spec": {
                "recipe": {"inline": "a: 1"}, "image": "i", "checkpoint": {"path": "/c"}, "nodes": 2,
            },
        });
        let spec = job["spec"].as_object_mut().unwrap();
        spec.extend(fields.as_object().unwrap().clone());
        job
    }

    fn decoded<T: DeserializeOwned>(object: impl ToString) -> T {
        serde_json::from_str(&object.to_string()).unwrap()
    }

    fn error(fields: Value) -> String {
        let result = decoded::<GuardedJob>(job(fields)).decoded;
        let invalid = result.unwrap_err();
        assert_eq!(invalid.metadata.uid.as_deref(), Some("u"));
        invalid.error
    }

    #[test]
    fn a_readable_job_is_decoded_without_unread_metadata() {
        let template = json!({"spec": {"nodeSelector": {"zone": "a, b [c] {d} \"e\""}}});
        let object = job(json!({"podTemplate": template}));
        let mut expected: TrainingJob = decoded(&object);
        expected.metadata.labels = None;
        expected.metadata.managed_fields = None;
        let job = decoded::<GuardedJob>(&object).decoded;
        assert_eq!(job.unwrap(), expected);
    }

    #[test]
    fn an_invalid_job_keeps_its_metadata_and_its_error() {
        insta::assert_snapshot!(error(json!({"nodes": "two"})), @r#"spec: invalid type: string "two", expected u32"#);
        insta::assert_snapshot!(error(json!({"recipe": null})), @"spec: invalid type: null, expected struct RecipeSource");
        let object =
            json!({"metadata": {"name": "a"}, "spec": job(json!({}))["spec"], "status": 1});
        let job = decoded::<GuardedJob>(object).decoded;
        insta::assert_snapshot!(job.unwrap_err().error, @"status: invalid type: integer `1`, expected struct TrainingJobStatus");
        let job = decoded::<GuardedJob>(json!({"metadata": {"name": "a"}})).decoded;
        insta::assert_snapshot!(job.unwrap_err().error, @"spec: invalid type: null, expected an object");
        let long = error(json!({"elasticity": {"onCordon": "x".repeat(100 << 10)}}));
        assert_eq!(long.chars().count(), ERROR);
    }

    #[test]
    fn pod_templates_are_bounded() {
        let text = |length: usize| json!({"podTemplate": {"x": "a".repeat(length)}});
        let values = |count: usize| json!({"podTemplate": {"x": vec![0; count]}});
        let around = json!({"x": ""}).to_string().len();
        for allowed in [
            text(POD_TEMPLATE_BYTES - around),
            values(POD_TEMPLATE_VALUES - 2),
            json!({"podTemplate": null}),
        ] {
            let job = decoded::<GuardedJob>(job(allowed)).decoded;
            job.unwrap();
        }
        insta::assert_snapshot!(error(text(POD_TEMPLATE_BYTES - around + 1)), @"spec.podTemplate has 65537 bytes of JSON, more than 65536; move long texts to a ConfigMap that the pods mount");
        insta::assert_snapshot!(error(values(POD_TEMPLATE_VALUES - 1)), @"spec.podTemplate has 2049 nested values, more than 2048; move environment variables and files to a ConfigMap that the pods use");
    }

    #[test]
    fn every_part_is_bounded() {
        let recipe = |length: usize| json!({"recipe": {"inline": "a".repeat(length)}});
        assert!(
            decoded::<GuardedJob>(job(recipe(900 << 10)))
                .decoded
                .is_ok()
        );
        insta::assert_snapshot!(error(recipe(RECIPE_BYTES)), @"spec.recipe and spec.overrides have 1025 KiB of JSON, more than 1024; remove the files that the recipe does not read, and move data to the volume");
        let overrides = json!({"overrides": vec!["a".repeat(32 << 10); 32]});
        insta::assert_snapshot!(error(overrides), @"spec.recipe and spec.overrides have 1025 KiB of JSON, more than 1024; remove the files that the recipe does not read, and move data to the volume");
        let setup = json!({"trainer": {"command": vec!["a".repeat(32 << 10); 4]}});
        insta::assert_snapshot!(error(setup), @"spec has 129 KiB of JSON without the recipe and podTemplate, more than 128; move long commands, setup commands and variables to a ConfigMap that the pods use");
        let mut forged = job(json!({}));
        forged["status"] = json!({"logTail": "a".repeat(600 << 10)});
        let forged = decoded::<GuardedJob>(forged).decoded.unwrap_err();
        insta::assert_snapshot!(forged.error, @"status: 601 KiB of JSON, more than 512, which no controller writes");
    }

    #[test]
    fn a_deep_pod_template_is_an_error_of_its_job_alone() {
        let deep = "[".repeat(1000) + &"]".repeat(1000);
        let object = job(json!({"podTemplate": {"x": "DEEP"}})).to_string();
        let list = format!("[{},{}]", object.replace("\"DEEP\"", &deep), job(json!({})));
        let jobs: Vec<GuardedJob> = decoded(list);
        let [
            GuardedJob { decoded: first, .. },
            GuardedJob {
                decoded: second, ..
            },
        ] = &jobs[..]
        else {
            panic!("{jobs:?}");
        };
        insta::assert_snapshot!(first.as_ref().unwrap_err().error, @"spec: recursion limit exceeded");
        assert!(second.is_ok());
    }
}
