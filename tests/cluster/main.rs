//! Scenarios on a real Kubernetes: real kubelets, real pods, ranks that really train. The cluster
//! is the one that `KUBECONFIG` names; `scripts/cluster-tests.sh` starts it, installs the chart and
//! runs these one after the other.

mod command_line;
mod crashes;
mod elastic;
mod fencing;
mod lifecycle;
mod losses;
mod memory;
mod pool;
mod refused;
mod replicas;
mod support;
mod volumes;
