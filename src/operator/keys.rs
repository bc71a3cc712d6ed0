//! The controller's key, from which the keys of all jobs derive. It is in a Secret that the controller's pods mount.
//! The first leader creates that Secret. The controller may create Secrets and may not read them.

use std::io;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::api::{Api, PostParams};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::lifecycle::authentication::KEY_FILE;
use crate::util::key::Key;

/// Name of the Secret. The chart mounts it under this name.
const SECRET: &str = "evenkeel-controller-key";
/// Pause between two attempts to read a missing file. The kubelet takes up to two minutes to show it.
const PAUSE: Duration = Duration::from_secs(1);
/// Time after which a wait for the file is logged again.
const REPORT: Duration = Duration::from_secs(30);

/// Reads the key from the file of the mounted Secret. Without a file it creates the Secret in the controller's namespace;
/// if that exists already, it waits for the file.
pub async fn load(client: Client, namespace: &str, file: &Path) -> anyhow::Result<Key> {
    if let Some(key) = read(file)? {
        return Ok(key);
    }
    let key = Key::random()?;
    let secret = Secret {
        metadata: serde_json::from_value(json!({
            "name": SECRET,
            "labels": {"app.kubernetes.io/managed-by": "evenkeel"},
        }))?,
        immutable: Some(true),
        string_data: Some([(KEY_FILE.to_owned(), key.reveal())].into()),
        ..Secret::default()
    };
    if create_secret(client, namespace, &secret).await? {
        info!(secret = SECRET, "created the controller's key");
        return Ok(key);
    }
    let mut reported: Option<Instant> = None;
    loop {
        if let Some(key) = read(file)? {
            return Ok(key);
        }
        if reported.is_none_or(|reported| reported.elapsed() > REPORT) {
            reported = Some(Instant::now());
            warn!(
                secret = SECRET,
                file = %file.display(),
                "waiting for the controller's key: the Secret exists and the file does not; mount the Secret there"
            );
        }
        sleep(PAUSE).await;
    }
}

/// Creates a Secret; false if one has its name already.
pub async fn create_secret(
    client: Client,
    namespace: &str,
    secret: &Secret,
) -> Result<bool, kube::Error> {
    let api: Api<Secret> = Api::namespaced(client, namespace);
    match api.create(&PostParams::default(), secret).await {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(status)) if status.is_already_exists() => Ok(false),
        Err(error) => Err(error),
    }
}

/// The key in a file; `None` if there is no file.
fn read(file: &Path) -> anyhow::Result<Option<Key>> {
    match Key::read(file) {
        Ok(key) => Ok(Some(key)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", file.display())),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::operator::testing::{ApiServer, NAMESPACE};

    #[tokio::test]
    async fn the_first_controller_creates_the_key_and_the_others_read_the_mounted_file() {
        let server = Arc::new(ApiServer::default());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(KEY_FILE);
        let first = load(server.client(), NAMESPACE, &file).await.unwrap();
        let secret = server.get("secrets", SECRET).unwrap();
        assert_eq!(secret["immutable"], true);
        let text = secret["stringData"][KEY_FILE].as_str().unwrap().to_owned();
        assert_eq!(text, first.reveal());

        let client = server.client();
        let waiting = tokio::spawn({
            let file = file.clone();
            async move { load(client, NAMESPACE, &file).await }
        });
        std::fs::write(&file, text).unwrap();
        let second = waiting.await.unwrap().unwrap();
        assert_eq!(second.reveal(), first.reveal());
    }

    #[tokio::test]
    async fn a_damaged_key_is_an_error() {
        let server = Arc::new(ApiServer::default());
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(KEY_FILE);
        std::fs::write(&file, "no key").unwrap();
        let error = load(server.client(), NAMESPACE, &file).await.unwrap_err();
        assert!(
            format!("{error:#}").contains("64 hexadecimal digits"),
            "{error:#}"
        );
        assert_eq!(server.get("secrets", SECRET), None);
    }
}
