//! DNS names of the job's pods, and network access to them.

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::{AGENT_PORT, METRICS_PORT, companion, metadata, selector};
use crate::api::TrainingJob;

/// Headless Service: gives each pod a DNS name, also before it is ready.
pub fn service(job: &TrainingJob) -> Service {
    Service {
        metadata: metadata(job, companion(job)),
        spec: Some(ServiceSpec {
            cluster_ip: Some("None".into()),
            publish_not_ready_addresses: Some(true),
            selector: Some(selector(job)),
            ports: Some(vec![ServicePort {
                name: Some("agent".into()),
                port: AGENT_PORT.into(),
                ..ServicePort::default()
            }]),
            ..ServiceSpec::default()
        }),
        ..Service::default()
    }
}

/// Restricts ingress only. The job's pods may connect on every port. On the agents' port the controller may
/// connect. On the port for metrics, pods with the label `evenkeel.dev/scrape` may, in the job's namespace or in a
/// namespace with that label: only an administrator labels namespaces, while any tenant labels pods. Egress is
/// open, since closing it breaks DNS, model hubs and storage.
///
/// `controller`: the controller's namespace.
pub fn network_policy(job: &TrainingJob, controller: &str) -> NetworkPolicy {
    let labelled = |key: &str, value: &str| {
        Some(LabelSelector {
            match_labels: Some([(key.to_string(), value.to_string())].into()),
            ..LabelSelector::default()
        })
    };
    let peer = |namespaces: Option<LabelSelector>, key: &str, value: &str| NetworkPolicyPeer {
        namespace_selector: namespaces,
        pod_selector: labelled(key, value),
        ..NetworkPolicyPeer::default()
    };
    let own = NetworkPolicyPeer {
        pod_selector: Some(LabelSelector {
            match_labels: Some(selector(job)),
            ..LabelSelector::default()
        }),
        ..NetworkPolicyPeer::default()
    };
    let port = |number: u16| {
        Some(vec![NetworkPolicyPort {
            port: Some(IntOrString::Int(number.into())),
            protocol: Some("TCP".into()),
            ..NetworkPolicyPort::default()
        }])
    };
    NetworkPolicy {
        metadata: metadata(job, companion(job)),
        spec: Some(NetworkPolicySpec {
            pod_selector: Some(LabelSelector {
                match_labels: Some(selector(job)),
                ..LabelSelector::default()
            }),
            policy_types: Some(vec!["Ingress".into()]),
            ingress: Some(vec![
                NetworkPolicyIngressRule {
                    from: Some(vec![own]),
                    ..NetworkPolicyIngressRule::default()
                },
                NetworkPolicyIngressRule {
                    from: Some(vec![peer(
                        labelled("kubernetes.io/metadata.name", controller),
                        "app.kubernetes.io/name",
                        "evenkeel-controller",
                    )]),
                    ports: port(AGENT_PORT),
                },
                NetworkPolicyIngressRule {
                    from: Some(vec![
                        peer(None, "evenkeel.dev/scrape", "true"),
                        peer(
                            labelled("evenkeel.dev/scrape", "true"),
                            "evenkeel.dev/scrape",
                            "true",
                        ),
                    ]),
                    ports: port(METRICS_PORT),
                },
            ]),
            ..NetworkPolicySpec::default()
        }),
    }
}
