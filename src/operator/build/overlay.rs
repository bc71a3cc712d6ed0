//! Merges a user's `podTemplate` into a pod like `kubectl patch --type=strategic`: objects are merged,
//! lists with a merge key are merged by it, all other values are replaced.

use serde_json::Value;

/// Merge key of a list in a pod (`patchMergeKey` of the core/v1 types).
fn merge_key(list: &str) -> Option<&'static str> {
    Some(match list {
        "containers"
        | "initContainers"
        | "ephemeralContainers"
        | "volumes"
        | "env"
        | "imagePullSecrets"
        | "resourceClaims" => "name",
        "volumeMounts" => "mountPath",
        "volumeDevices" => "devicePath",
        "ports" => "containerPort",
        "hostAliases" => "ip",
        "topologySpreadConstraints" => "topologyKey",
        _ => return None,
    })
}

/// Lists without a merge key whose elements are appended instead of replaced.
const ADDED: [&str; 1] = ["tolerations"];

/// Merges `over` into `base`. A null deletes the key.
pub fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                if value.is_null() {
                    base.remove(key);
                    continue;
                }
                let below = base.entry(key.clone()).or_insert(Value::Null);
                match (below, value, merge_key(key)) {
                    (Value::Array(below), Value::Array(value), Some(by)) => {
                        merge_lists(below, value, by);
                    }
                    (Value::Array(below), Value::Array(value), None)
                        if ADDED.contains(&key.as_str()) =>
                    {
                        below.extend(value.iter().cloned());
                    }
                    (below, value, _) => merge(below, value),
                }
            }
        }
        (base, over) => *base = over.clone(),
    }
}

fn merge_lists(base: &mut Vec<Value>, over: &[Value], by: &str) {
    for element in over {
        let same =
            |other: &&mut Value| element.get(by).is_some() && other.get(by) == element.get(by);
        match base.iter_mut().find(same) {
            Some(below) => merge(below, element),
            None => base.push(element.clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn containers_are_merged_by_name_and_tolerations_added() {
        let mut base = json!({
            "containers": [{"name": "trainer", "image": "a", "env": [{"name": "X", "value": "1"}]}],
            "tolerations": [{"key": "a"}],
            "restartPolicy": "Never",
        });
        merge(
            &mut base,
            &json!({
                "containers": [
                    {"name": "trainer", "env": [{"name": "X", "value": "2"}, {"name": "Y"}]},
                    {"name": "sidecar", "image": "b"},
                ],
                "tolerations": [{"key": "b"}],
                "nodeSelector": {"pool": "gpu"},
                "restartPolicy": null,
            }),
        );
        assert_eq!(
            base,
            json!({
                "containers": [
                    {"name": "trainer", "image": "a",
                     "env": [{"name": "X", "value": "2"}, {"name": "Y"}]},
                    {"name": "sidecar", "image": "b"},
                ],
                "tolerations": [{"key": "a"}, {"key": "b"}],
                "nodeSelector": {"pool": "gpu"},
            })
        );
    }
}
