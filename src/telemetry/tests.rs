//! The documented schema matches the real one.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::display::tests::run;
use super::{Event, Metric};

type Schema = BTreeMap<String, BTreeSet<String>>;

/// The fields that `docs/telemetry.md` lists under each heading.
fn documented() -> Schema {
    let mut schema = Schema::new();
    let mut heading = String::new();
    for line in include_str!("../../docs/telemetry.md").lines() {
        if let Some(title) = line.strip_prefix('#') {
            heading = title.trim_start_matches('#').trim().to_owned();
        } else if let Some((field, _)) = line.strip_prefix("| `").and_then(|l| l.split_once('`')) {
            let fields = schema.entry(heading.clone()).or_default();
            assert!(fields.insert(field.to_owned()), "{heading}: {field} twice");
        }
    }
    // The display of a run is not an event.
    schema.remove("Telemetry: events, metrics and the report");
    schema
}

/// Adds the fields of a JSON object and of its nested objects.
fn learn(schema: &mut Schema, name: &str, object: &Value) {
    let fields = object.as_object().expect("an object");
    for (key, value) in fields {
        if value.is_object() {
            learn(schema, key, value);
        }
        if key != "event" && key != "kind" {
            schema
                .entry(name.to_owned())
                .or_default()
                .insert(key.clone());
        }
    }
}

#[test]
fn the_documented_fields_of_events_match_the_code() {
    let mut real = Schema::new();
    for event in run() {
        let json = serde_json::to_value(&event).expect("JSON");
        let name = json["event"].as_str().expect("a name").to_owned();
        learn(&mut real, &name, &json);
    }
    // The run must contain every kind of event; the two tests of a step are separate objects.
    let source = syn::parse_file(include_str!("event.rs")).expect("Rust");
    let kinds = source.items.iter().find_map(|item| match item {
        syn::Item::Enum(item) if item.ident == "Event" => Some(item.variants.len()),
        _ => None,
    });
    assert_eq!(Some(real.len() - 2), kinds);
    assert_eq!(documented(), real);
}

#[test]
fn metrics_have_the_fields_of_their_events() {
    let mut checked = BTreeSet::new();
    for event in run() {
        let metric = match &event {
            Event::Step(step) => Metric::Step(step.clone()),
            Event::Evaluation(evaluation) => Metric::Evaluation(evaluation.clone()),
            _ => continue,
        };
        let mut shown = serde_json::to_value(&event).expect("JSON");
        let mut kept = serde_json::to_value(&metric).expect("JSON");
        let name = shown.as_object_mut().expect("an object").remove("event");
        assert_eq!(
            kept.as_object_mut().expect("an object").remove("kind"),
            name
        );
        assert_eq!(kept, shown);
        checked.insert(name.map(|name| name.to_string()));
    }
    assert_eq!(checked.len(), 2);
}
