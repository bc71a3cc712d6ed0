//! Scenarios on a real Kubernetes cluster with real kubelets, pods and training ranks. `KUBECONFIG`
//! names the cluster; `scripts/cluster-tests.sh` starts it, installs the chart and runs the scenarios
//! one after the other.

mod buckets;
mod command_line;
mod crashes;
mod elastic;
mod fencing;
mod first_job;
mod gpus;
mod lifecycle;
mod losses;
mod memory;
mod namespaced;
mod ownership;
mod places;
mod pool;
mod progress;
mod refused;
mod replicas;
mod restored;
mod storm;
mod strangers;
mod support;
mod tenants;
mod volumes;
