//! An API server in memory, and the controller's context with it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use axum::{Json, Router};
use kube::Client;
use kube::runtime::events::Recorder;
use kube::runtime::reflector;
use serde_json::{Value, json};
use tokio::sync::mpsc::unbounded_channel;

use super::NAMESPACE;
use crate::operator::agents::Agents;
use crate::operator::context::Context;
use crate::operator::ownership::MANAGER;
use crate::operator::stores::Stores;
use crate::util::key::Key;
use crate::util::lock::lock;

/// Objects by path, with resource versions, and the requests so far.
#[derive(Default)]
pub struct ApiServer {
    objects: Mutex<BTreeMap<String, Value>>,
    requests: Mutex<Vec<String>>,
    /// Answers to changes of these objects, by path, or of all objects of a kind.
    refused: Mutex<BTreeMap<String, (StatusCode, String)>>,
}

impl ApiServer {
    pub fn client(self: &Arc<Self>) -> Client {
        let router = Router::new().fallback(answer).with_state(Arc::clone(self));
        Client::new(router, NAMESPACE)
    }

    /// The controller's context, without nodes and pods in its caches.
    pub fn context(self: &Arc<Self>) -> Arc<Context> {
        self.context_with(Stores::new().0)
    }

    pub fn context_with(self: &Arc<Self>, stores: Arc<Stores>) -> Arc<Context> {
        let client = self.client();
        let (wake, _) = unbounded_channel();
        let key: Key = "0".repeat(64).parse().unwrap();
        Arc::new(Context {
            recorder: Recorder::new(client.clone(), MANAGER.into()),
            metrics: Default::default(),
            namespace: "system".into(),
            image: None,
            priority_classes: Some(vec!["batch".into()]),
            agents: Agents::new(wake, key.clone()),
            key,
            stores,
            known: reflector::store().0,
            client,
            leases: Default::default(),
            reservations: Default::default(),
            recipes: Default::default(),
            turns: Default::default(),
            job_cache: Default::default(),
            newest: Default::default(),
            restored: std::sync::Once::new(),
            panics: Default::default(),
        })
    }

    /// Stores an object with a new resource version, and with a uid if it has none.
    pub fn put(&self, kind: &str, mut object: Value) {
        let mut objects = lock(&self.objects);
        let path = path(kind, object["metadata"]["name"].as_str().unwrap());
        set_version(&mut object);
        objects.insert(path, object);
    }

    /// Puts an object back as it was, as a restored API server has it.
    pub fn restore(&self, kind: &str, name: &str, object: Value) {
        lock(&self.objects).insert(path(kind, name), object);
    }

    pub fn get(&self, kind: &str, name: &str) -> Option<Value> {
        lock(&self.objects).get(&path(kind, name)).cloned()
    }

    pub fn remove(&self, kind: &str, name: &str) {
        lock(&self.objects).remove(&path(kind, name));
    }

    /// Changes an object by a JSON merge patch.
    pub fn change(&self, kind: &str, name: &str, patch: Value) {
        let mut objects = lock(&self.objects);
        let object = objects.get_mut(&path(kind, name)).unwrap();
        merge(object, &patch);
        set_version(object);
    }

    /// Answers 500 to changes of an object, as with a failing admission webhook.
    pub fn refuse_writes(&self, kind: &str, name: &str) {
        let path = path(kind, name);
        let message = format!("{path}: InternalError");
        lock(&self.refused).insert(path, (StatusCode::INTERNAL_SERVER_ERROR, message));
    }

    /// Accepts changes of an object again.
    pub fn accept_writes(&self, kind: &str, name: &str) {
        lock(&self.refused).remove(&path(kind, name));
    }

    /// Answers changes of all objects of a kind with this code and message, as with a quota.
    pub fn refuse_kind(&self, kind: &str, code: u16, message: &str) {
        let code = StatusCode::from_u16(code).unwrap();
        lock(&self.refused).insert(kind.to_owned(), (code, message.to_owned()));
    }

    /// Accepts changes of a kind again.
    pub fn accept_kind(&self, kind: &str) {
        lock(&self.refused).remove(kind);
    }

    /// Names of all objects of a kind.
    pub fn names(&self, kind: &str) -> Vec<String> {
        let objects = lock(&self.objects);
        let names = objects.keys().filter_map(|key| key.split_once('/'));
        let names = names.filter(|(plural, _)| *plural == kind);
        names.map(|(_, name)| name.to_owned()).collect()
    }

    /// Requests for a kind so far, as `METHOD kind/name`.
    pub fn requests(&self, kind: &str) -> Vec<String> {
        let requests = lock(&self.requests).clone();
        let of_kind = |request: &String| request.contains(kind);
        requests.into_iter().filter(of_kind).collect()
    }
}

fn path(kind: &str, name: &str) -> String {
    format!("{kind}/{name}")
}

/// Sets another resource version, and the uid of a new object.
fn set_version(object: &mut Value) {
    let metadata = &mut object["metadata"];
    let version = metadata["resourceVersion"].as_str().map(str::parse);
    let version: u64 = version.and_then(Result::ok).unwrap_or(0);
    metadata["resourceVersion"] = json!((version + 1).to_string());
    if metadata["uid"].is_null() {
        metadata["uid"] = json!(format!("uid-of-{}", metadata["name"].as_str().unwrap()));
    }
}

/// Answers `…/namespaces/n/KIND[/NAME[/status]]` as an API server does.
async fn answer(
    State(server): State<Arc<ApiServer>>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> (StatusCode, Json<Value>) {
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (_, resource) = uri.path().split_once("/namespaces/n/").unwrap();
    let mut parts = resource.split('/');
    let kind = parts.next().unwrap();
    let of_body = || body["metadata"]["name"].as_str().unwrap_or_default();
    let name = parts.next().unwrap_or_else(of_body);
    let key = path(kind, name);
    lock(&server.requests).push(format!("{method} {key}"));
    let mut objects = lock(&server.objects);
    let failure = |code: StatusCode, reason: &str, message: String| {
        let status = json!({
            "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
            "message": message, "reason": reason, "code": code.as_u16(),
        });
        (code, Json(status))
    };
    let refuse = |code, reason: &str| failure(code, reason, format!("{key}: {reason}"));
    if method != Method::GET {
        let refused = lock(&server.refused);
        let answer = refused.get(&key).or_else(|| refused.get(kind));
        if let Some((code, message)) = answer {
            return failure(
                *code,
                code.canonical_reason().unwrap_or_default(),
                message.clone(),
            );
        }
    }
    let existing = objects.get(&key).cloned();
    if method == Method::POST {
        if existing.is_some() {
            return refuse(StatusCode::CONFLICT, "AlreadyExists");
        }
        let mut object = body;
        set_version(&mut object);
        objects.insert(key, object.clone());
        return (StatusCode::CREATED, Json(object));
    }
    let Some(mut object) = existing else {
        return refuse(StatusCode::NOT_FOUND, "NotFound");
    };
    let required = match method {
        Method::DELETE => &body["preconditions"],
        _ => &body["metadata"],
    };
    for field in ["uid", "resourceVersion"] {
        if !required[field].is_null() && required[field] != object["metadata"][field] {
            return refuse(StatusCode::CONFLICT, "Conflict");
        }
    }
    match method {
        Method::PATCH if parts.next() == Some("status") && kind == "trainingjobs" => {
            // The controller applies the whole status.
            object["status"] = body["status"].clone();
            set_version(&mut object);
            objects.insert(key, object.clone());
        }
        Method::PATCH => {
            merge(&mut object, &body);
            set_version(&mut object);
            objects.insert(key, object.clone());
        }
        Method::DELETE => drop(objects.remove(&key)),
        _ => {}
    }
    (StatusCode::OK, Json(object))
}

/// JSON merge patch (RFC 7386).
pub fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (key, value) in over {
                if value.is_null() {
                    base.remove(key);
                } else {
                    merge(base.entry(key.clone()).or_insert(Value::Null), value);
                }
            }
        }
        (base, over) => *base = over.clone(),
    }
}
