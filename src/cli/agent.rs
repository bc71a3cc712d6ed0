//! `evenkeel agent`: the process in every pod of a TrainingJob.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::channel;

use anyhow::Context;
use tokio::signal::unix::{SignalKind, signal};

use crate::agent::{self, EventLog, Identity, Input, Peers, PodAgent, Service};
use crate::api::LogFormat;
use crate::bucket::Bucket;
use crate::host::events_into;
use crate::inventory::Inventory;
use crate::lifecycle::authentication;
use crate::util::key::Key;

/// The agent of a pod (started by the controller).
#[derive(clap::Args)]
pub struct Args {
    /// The run directory.
    #[arg(long)]
    run: PathBuf,
    /// Bucket that pods without a common volume share, with the run's prefix.
    #[arg(long, env = "EVENKEEL_BUCKET", value_name = "URL")]
    bucket: Option<String>,
    /// Devices available to ranks.
    #[arg(long)]
    devices: u64,
    /// Name of the TrainingJob.
    #[arg(long, env = "EVENKEEL_JOB")]
    job: String,
    /// Uid of the TrainingJob.
    #[arg(long, env = "EVENKEEL_JOB_UID")]
    job_uid: String,
    /// Namespace of the TrainingJob.
    #[arg(long, env = "POD_NAMESPACE")]
    namespace: String,
    /// Uid of this pod.
    #[arg(long, env = "POD_UID")]
    pod: String,
    /// Port for requests of the controller and the job's other agents.
    #[arg(long, env = "EVENKEEL_PORT")]
    port: u16,
    /// Port for health and metrics, open to everybody.
    #[arg(long, env = "EVENKEEL_METRICS_PORT")]
    metrics_port: u16,
    /// How the pod's log has the lines that ranks print.
    #[arg(long, default_value = "text")]
    log_format: LogFormat,
    /// File with the job's key.
    #[arg(long, env = "EVENKEEL_KEY_FILE")]
    key: PathBuf,
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    super::logging::start();
    let key = Key::read(&args.key)
        .with_context(|| format!("cannot read the job's key in {}", args.key.display()))?;
    let identity = Identity {
        program: std::env::current_exe()?,
        job: args.job_uid.clone(),
        key: key.clone(),
        pod: args.pod,
        run: args.run,
        bucket: args.bucket.as_deref().map(Bucket::open).transpose()?,
        setup: ["EVENKEEL_CODE", "EVENKEEL_SETUP"]
            .iter()
            .any(|name| std::env::var_os(name).is_some()),
        devices: args.devices,
        cores: Inventory::discover().cpu.cores,
    };
    let agent_key = authentication::agent_key(&key, &identity.pod);
    let run = identity.run.clone();
    let (inputs, received) = channel();
    let events = events_into(&inputs, Input::Rank);
    let (published, state) = tokio::sync::watch::channel(Default::default());
    let (asked, peers) = tokio::sync::watch::channel(Vec::new());
    let agent = PodAgent::new(
        identity,
        received,
        events,
        published,
        asked,
        EventLog::stdout(args.log_format),
    );
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    let terminating = inputs.clone();
    runtime.block_on(async {
        let listen = async |port: u16| {
            agent::listen(port).await.with_context(|| {
                format!(
                    "cannot listen on port {port}; with hostNetwork a node has room for one agent only: \
                     remove hostNetwork from podTemplate, or keep the pods on different nodes"
                )
            })
        };
        let service = Service {
            key: agent_key,
            state: state.clone(),
            inputs: inputs.clone(),
            run,
        };
        tokio::spawn(agent::serve(listen(args.port).await?, service));
        let metrics = listen(args.metrics_port).await?;
        tokio::spawn(agent::serve_metrics(metrics, state));
        let others = Peers {
            port: args.port,
            key,
        };
        tokio::spawn(others.ask(peers, inputs.clone()));
        let client = kube::Client::try_default().await?;
        tokio::spawn(async move {
            let (namespace, name, uid) = (&args.namespace, &args.job, &args.job_uid);
            agent::follow(client, namespace, name, uid, inputs).await;
        });
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::spawn(async move {
            while terminate.recv().await.is_some() {
                if terminating.send(Input::Terminate).is_err() {
                    return;
                }
            }
        });
        anyhow::Ok(())
    })?;
    Ok(agent.run())
}
