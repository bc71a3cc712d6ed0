//! A cluster: what `launch --nodes` needs there.

use super::{Check, Checks, Next};
use crate::cli::cluster::{ClusterArgs, submit};
use crate::client::access::{NEEDED, Right, USEFUL};
use crate::client::{self, ClientError, Cluster};

const NAME: &str = "cluster";
const VERSION: &str = env!("CARGO_PKG_VERSION");

/// `asked`: a failure is one of this command.
pub(super) fn check(
    selected: &ClusterArgs,
    asked: bool,
    checks: &mut Checks,
) -> anyhow::Result<()> {
    if !asked && !selected.is_configured() {
        let found = "no kubeconfig (only `launch --nodes` needs one)";
        return checks.add(Check::absent(
            NAME,
            found,
            Some("set KUBECONFIG, or `--kubeconfig FILE`".into()),
            false,
        ));
    }
    let version = match selected.soon(async |cluster| cluster.version().await) {
        Ok(version) => version,
        Err(error) => {
            let next = "`kubectl config get-contexts`, then `--context NAME`";
            return checks.add(Check::absent(
                NAME,
                error.to_string(),
                Some(next.into()),
                asked,
            ));
        }
    };
    let found = selected.run(async |cluster| Ok(all(cluster, &version, asked).await))?;
    found.into_iter().try_for_each(|check| checks.add(check))
}

async fn all(cluster: &Cluster, version: &str, asked: bool) -> Vec<Check> {
    let (url, namespace) = (cluster.url(), &cluster.namespace);
    let found = format!("Kubernetes {version} at {url}, namespace {namespace}");
    vec![
        Check::works(NAME, found),
        rights(cluster, asked).await,
        controller(cluster, asked).await,
        image(cluster).await,
    ]
}

async fn rights(cluster: &Cluster, asked: bool) -> Check {
    const NAME: &str = "rights";
    let mut missing: Vec<&Right> = Vec::new();
    for right in NEEDED.iter().chain(&USEFUL) {
        match cluster.allows(right).await {
            Ok(true) => {}
            Ok(false) => missing.push(right),
            Err(error) => return Check::absent(NAME, error.to_string(), None, asked),
        }
    }
    if missing.is_empty() {
        let all = NEEDED.len() + USEFUL.len();
        return Check::works(
            NAME,
            format!("all {all} that commands use in this namespace"),
        );
    }
    let named = missing.iter().map(|right| {
        let Right {
            verb,
            resource,
            gives,
            ..
        } = right;
        format!("{verb} {resource} ({gives})")
    });
    let found = format!("you may not {}", named.collect::<Vec<_>>().join(", "));
    let namespace = &cluster.namespace;
    if missing.iter().any(|right| NEEDED.contains(right)) {
        let next = format!(
            "kubectl create role trainingjobs --verb='*' --resource=trainingjobs.evenkeel.dev \
             -n {namespace} && kubectl create rolebinding trainingjobs --role=trainingjobs --user=YOU -n {namespace}"
        );
        return Check::absent(NAME, found, Some(Next::Command(next)), asked);
    }
    // A launch works without them.
    Check::works(NAME, found)
}

async fn controller(cluster: &Cluster, asked: bool) -> Check {
    const NAME: &str = "controller";
    let installs = "helm install evenkeel charts/evenkeel -n evenkeel-system --create-namespace";
    // Without the right to list jobs, the line of the rights says so.
    if let Err(error @ ClientError::NotInstalled) = client::change::list(cluster, false).await {
        return Check::absent(
            NAME,
            error.to_string(),
            Some(Next::command(installs)),
            asked,
        );
    }
    let found = match cluster.controllers().await {
        Ok(found) => found,
        Err(_) => {
            let found = "of unknown version: you may not list Deployments";
            return Check::absent(NAME, found, None, false);
        }
    };
    let Some(first) = found.iter().max_by_key(|controller| controller.ready) else {
        let found = "the CRD is installed, and no Deployment of a controller is";
        return Check::absent(NAME, found, Some(Next::command(installs)), asked);
    };
    let client::access::Controller {
        namespace,
        version,
        ready,
    } = first;
    let logs = format!("kubectl get pods -n {namespace}");
    match version {
        _ if *ready == 0 => {
            let found = format!("no replica in namespace {namespace} is ready");
            Check::absent(NAME, found, Some(Next::Command(logs)), asked)
        }
        Some(version) if version == VERSION => Check::works(
            NAME,
            format!("{version} in namespace {namespace}, as this program"),
        ),
        other => {
            let other = other.as_deref().unwrap_or("of unknown version");
            let found = format!("{other} in namespace {namespace}, and this program is {VERSION}");
            let next = format!(
                "helm upgrade evenkeel charts/evenkeel -n {namespace}, or use the program of that version"
            );
            Check::absent(NAME, found, Some(Next::Advice(next)), asked)
        }
    }
}

/// Whether nodes have the default image. They pull it when the first pod starts.
async fn image(cluster: &Cluster) -> Check {
    const NAME: &str = "image";
    let image = submit::default_image(false);
    match cluster.nodes_with(&image).await {
        Ok((0, all)) => {
            let found = format!("{image} is on none of {all} nodes yet");
            let next = "the first pod pulls it; `--image` or EVENKEEL_IMAGE names another one";
            Check::absent(NAME, found, Some(next.into()), false)
        }
        Ok((some, all)) => Check::works(NAME, format!("{image} is on {some} of {all} nodes")),
        Err(_) => Check::absent(
            NAME,
            format!("{image}: you may not list nodes"),
            None,
            false,
        ),
    }
}
