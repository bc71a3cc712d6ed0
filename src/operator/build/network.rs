//! How the job's pods are found, and who may speak to them.

use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::api::networking::v1::{
    NetworkPolicy, NetworkPolicyIngressRule, NetworkPolicyPeer, NetworkPolicyPort,
    NetworkPolicySpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::ResourceExt;

use super::{AGENT_PORT, metadata, selector};
use crate::job::api::TrainingJob;

/// A headless Service: pods have names of their own, also before they are ready.
pub fn service(job: &TrainingJob) -> Service {
    Service {
        metadata: metadata(job, job.name_any()),
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

/// Ingress only: the job's own pods on every port; the controller, and whoever carries the label
/// `evenkeel.dev/scrape`, on the agents' port. Egress stays open, since closing it breaks DNS,
/// model hubs and storage.
pub fn network_policy(job: &TrainingJob) -> NetworkPolicy {
    let labelled = |key: &str, value: &str| {
        Some(LabelSelector {
            match_labels: Some([(key.to_string(), value.to_string())].into()),
            ..LabelSelector::default()
        })
    };
    let anywhere = |key: &str, value: &str| NetworkPolicyPeer {
        namespace_selector: Some(LabelSelector::default()),
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
    let agent = NetworkPolicyPort {
        port: Some(IntOrString::Int(AGENT_PORT.into())),
        protocol: Some("TCP".into()),
        ..NetworkPolicyPort::default()
    };
    NetworkPolicy {
        metadata: metadata(job, job.name_any()),
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
                    from: Some(vec![
                        anywhere("app.kubernetes.io/name", "evenkeel-controller"),
                        anywhere("evenkeel.dev/scrape", "true"),
                    ]),
                    ports: Some(vec![agent]),
                },
            ]),
            ..NetworkPolicySpec::default()
        }),
    }
}
