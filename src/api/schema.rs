//! Schemas that are not derived from a Rust type of this crate.

use std::collections::BTreeMap;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    JSONSchemaProps, JSONSchemaPropsOrArray,
};
use kube::Resource;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

use super::TrainingJob;

/// Characters of a message. The schema has the same limit.
pub const MESSAGE: usize = 4096;

/// An object of any fields; the API server stores it unchanged.
pub fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "nullable": true,
        "x-kubernetes-preserve-unknown-fields": true
    })
}

/// A list of such objects.
pub fn any_objects(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "array", "maxItems": 256, "items": any_object(generator)})
}

/// Texts of files by their paths. One text is at most as long as a ConfigMap.
pub fn texts(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 128,
        "additionalProperties": {"type": "string", "maxLength": 524_288}
    })
}

/// Annotations of an object.
pub fn annotations(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 32,
        "additionalProperties": {"type": "string", "maxLength": 4096}
    })
}

/// Environment variables: values by name, bounded as in `spec.trainer.env`.
pub fn variables(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 1024,
        "additionalProperties": {"type": "string", "maxLength": 131_072}
    })
}

/// Conditions, merged by their type; limits as in `metav1.Condition`.
pub fn conditions(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": 32,
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": {
            "type": "object",
            "required": ["type", "status", "lastTransitionTime", "reason", "message"],
            "properties": {
                "type": {
                    "description": "Type of the condition, unique in the list.",
                    "type": "string", "maxLength": 316
                },
                "status": {
                    "description": "True, False or Unknown.",
                    "type": "string", "enum": ["True", "False", "Unknown"]
                },
                "observedGeneration": {
                    "description": "The metadata.generation of the spec that the condition is about.",
                    "type": "integer", "format": "int64"
                },
                "lastTransitionTime": {
                    "description": "When the status last changed.",
                    "type": "string", "format": "date-time"
                },
                "reason": {
                    "description": "Reason of the status, one CamelCase word. Programs may compare it.",
                    "type": "string", "maxLength": 1024
                },
                "message": {
                    "description": "Details for people.",
                    "type": "string", "maxLength": MESSAGE
                }
            }
        }
    })
}

/// Removes the formats of unsigned integers, which API servers do not know and warn about. Their
/// minimum of 0 stays.
pub fn without_unsigned_formats(schema: &mut JSONSchemaProps) {
    schema.format.take_if(|format| format.starts_with("uint"));
    let properties = schema.properties.iter_mut();
    for property in properties.flat_map(BTreeMap::values_mut) {
        without_unsigned_formats(property);
    }
    if let Some(JSONSchemaPropsOrArray::Schema(items)) = &mut schema.items {
        without_unsigned_formats(items);
    }
}

/// The schema of a whole TrainingJob for editors, from that of the API server. Where the API server drops a field
/// (`kubectl apply` refuses it), it is an error.
pub fn of_training_job(mut schema: Value) -> Value {
    strict(&mut schema);
    let properties = &mut schema["properties"];
    properties["apiVersion"] = json!({"const": TrainingJob::api_version(&())});
    properties["kind"] = json!({"const": TrainingJob::kind(&())});
    properties["metadata"] = json!({"type": "object"});
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema".into();
    schema["title"] = "Evenkeel TrainingJob".into();
    schema["required"] = json!(["apiVersion", "kind", "metadata", "spec"]);
    schema
}

/// Closes every object, and removes what only an API server knows.
fn strict(schema: &mut Value) {
    match schema {
        Value::Object(fields) => {
            let keeps =
                fields.get("x-kubernetes-preserve-unknown-fields") == Some(&Value::Bool(true));
            let is_closed = fields.get("properties").is_some_and(Value::is_object)
                && fields.get("type").is_some_and(Value::is_string);
            if is_closed && !keeps && !fields.contains_key("additionalProperties") {
                fields.insert("additionalProperties".to_owned(), Value::Bool(false));
            }
            if fields.remove("nullable") == Some(Value::Bool(true))
                && let Some(kind) = fields.get_mut("type")
            {
                *kind = json!([kind.take(), "null"]);
            }
            fields.retain(|key, _| !key.starts_with("x-kubernetes-"));
            fields.values_mut().for_each(strict);
        }
        Value::Array(items) => items.iter_mut().for_each(strict),
        _ => {}
    }
}
