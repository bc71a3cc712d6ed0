//! `evenkeel launch RECIPE --nodes N`: creates a TrainingJob from a recipe and follows it until it
//! ends.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};
use kube::ResourceExt;
use serde_json::{Value, json};

use super::{ClusterArgs, recipe_source};
use crate::api::{
    CheckpointVolume, Elasticity, EnvVar, LogFormat, NVIDIA_GPU, OnStall, RemainderPolicy, Trainer,
    TrainerDevice, TrainingJob, TrainingJobSpec,
};
use crate::bucket::Bucket;
use crate::cli::output::{Format, say, say_as_is};
use crate::cli::recipe_args::RecipeArgs;
use crate::cli::{EXIT_REFUSED, first_set, render};
use crate::client::{self, End, change, code};
use crate::external_trainer;
use crate::launch;
use crate::plan::{self, AskedRunner, DeviceKind, PlanRequest, Runner};
use crate::recipe::{Recipe, overrides};
use crate::telemetry::{Display, Mode};
use crate::util::format::{bytes, count};
use crate::util::input;
use crate::util::key::{hex, nonce};

/// Exit code after Ctrl-C while following a job, which continues.
const EXIT_INTERRUPTED: u8 = 130;

/// Cluster options of `launch`.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "On a cluster (with --nodes)")]
#[group(skip)]
pub struct Args {
    /// Container image [default: $EVENKEEL_IMAGE, then evenkeel/evenkeel of this version, on GPUs
    /// evenkeel/evenkeel-cuda]
    #[arg(long, value_name = "IMAGE")]
    image: Option<String>,
    /// PersistentVolumeClaim for checkpoints; it must be writable from all nodes [default:
    /// checkpoints]
    #[arg(long, value_name = "CLAIM")]
    claim: Option<String>,
    /// Bucket for checkpoints: s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX. It replaces the claim of a
    /// cluster, and the directory that the hosts of `--on ssh` or `--on slurm` share
    #[arg(long, value_name = "URL", conflicts_with = "claim")]
    bucket: Option<String>,
    /// Folder that every pod gets as its working directory: the files that git tracks or would track, at most 256 MiB
    /// [default: the working directory, if a command follows `--`]
    #[arg(long, value_name = "DIR")]
    code: Option<PathBuf>,
    /// Send no code: the image has it
    #[arg(long, conflicts_with = "code")]
    no_code: bool,
    /// Shell command that runs once in every pod before its ranks, for example "pip install -r requirements.txt"; on Slurm,
    /// before the launch
    #[arg(long, value_name = "COMMAND")]
    setup: Option<String>,
    /// Environment variable of the ranks; repeatable
    #[arg(long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Secret or ConfigMap whose keys are environment variables: secret/NAME or configmap/NAME; repeatable
    #[arg(long, value_name = "KIND/NAME")]
    env_from: Vec<String>,
    /// How `kubectl logs` shows what the ranks print: text, or one JSON event a line [default: text]
    #[arg(long, value_name = "FORMAT", hide_possible_values = true)]
    pod_log: Option<LogFormat>,
    /// Annotation of the pods' ServiceAccount, which gives them an identity of the cloud, for example
    /// "eks.amazonaws.com/role-arn=arn:aws:iam::…"; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    service_account_annotation: Vec<String>,
    /// YAML file with a pod template that is merged into every pod: node selectors, tolerations, volumes, resources
    #[arg(long, value_name = "FILE")]
    pod_template: Option<PathBuf>,
    /// Resource name of a GPU in the nodes' allocatable resources [default: nvidia.com/gpu]
    #[arg(long, value_name = "NAME")]
    resource: Option<String>,
    /// Smallest number of nodes
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    min_nodes: Option<u32>,
    /// Print the plan, or with --nodes the TrainingJob or Slurm's script, and start nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Create the TrainingJob without following it
    #[arg(long)]
    detach: bool,
    #[command(flatten)]
    cluster: ClusterArgs,
}

/// Environment variable with the default of `--image`.
const IMAGE: &str = "EVENKEEL_IMAGE";

impl Args {
    /// The first set option that needs `--nodes`, as the user types it.
    pub fn flag(&self) -> Option<&'static str> {
        first_set(&self.options().collect::<Vec<_>>()).or(self.cluster.flag())
    }

    /// Its options, and whether each is set.
    fn options(&self) -> impl Iterator<Item = (&'static str, bool)> {
        let options = [
            ("--image", self.image.is_some()),
            ("--claim", self.claim.is_some()),
            ("--bucket", self.bucket.is_some()),
            ("--code", self.code.is_some()),
            ("--no-code", self.no_code),
            ("--setup", self.setup.is_some()),
            ("--env", !self.env.is_empty()),
            ("--env-from", !self.env_from.is_empty()),
            ("--pod-log", self.pod_log.is_some()),
            (
                "--service-account-annotation",
                !self.service_account_annotation.is_empty(),
            ),
            ("--pod-template", self.pod_template.is_some()),
            ("--resource", self.resource.is_some()),
            ("--min-nodes", self.min_nodes.is_some()),
            ("--detach", self.detach),
        ];
        options.into_iter()
    }

    /// The first set option that does not apply to jobs of Slurm.
    pub fn flag_of_kubernetes(&self) -> Option<&'static str> {
        let shared = ["--bucket", "--setup", "--min-nodes"];
        let set = self.options().filter(|(flag, _)| !shared.contains(flag));
        first_set(&set.collect::<Vec<_>>()).or(self.cluster.flag())
    }

    /// The first set option besides `--bucket` that needs `--nodes`.
    pub fn flag_without_bucket(&self) -> Option<&'static str> {
        let set = self.options().filter(|(flag, _)| *flag != "--bucket");
        first_set(&set.collect::<Vec<_>>()).or(self.cluster.flag())
    }

    pub fn bucket(&self) -> Option<&str> {
        self.bucket.as_deref()
    }

    pub fn setup(&self) -> Option<&str> {
        self.setup.as_deref()
    }

    /// Nodes without which no world runs.
    pub fn min_nodes(&self) -> Option<u64> {
        self.min_nodes.map(u64::from)
    }

    fn resource(&self) -> &str {
        self.resource.as_deref().unwrap_or(NVIDIA_GPU)
    }

    /// The image for this runner. Only the one for CUDA has its libraries.
    fn image(&self, runner: Runner) -> String {
        let on_gpus = runner.is_built_in() && runner.device() == DeviceKind::Cuda;
        let image = self.image.clone();
        image.unwrap_or_else(|| default_image(on_gpus))
    }
}

/// The image without `--image`. On GPUs the built-in trainer needs one with CUDA's libraries.
pub fn default_image(on_gpus: bool) -> String {
    let suffix = if on_gpus { "-cuda" } else { "" };
    let named = std::env::var(IMAGE).ok();
    named.unwrap_or_else(|| format!("evenkeel/evenkeel{suffix}:{}", env!("CARGO_PKG_VERSION")))
}

/// A launch on a cluster.
pub struct Launch<'a> {
    pub args: &'a Args,
    pub from: &'a RecipeArgs,
    pub recipe: &'a Recipe,
    /// The words after `--`.
    pub command: &'a [String],
    /// Name of the TrainingJob; `None`: that of the recipe.
    pub name: Option<&'a str>,
    /// Memory limit of a rank, bytes.
    pub rank_memory: Option<u64>,
    /// Seconds without progress after which a rank counts as stalled.
    pub progress_deadline_seconds: Option<u32>,
    pub on_stall: OnStall,
    /// Where the built-in trainer computes.
    pub device: TrainerDevice,
}

/// Launches on `nodes` nodes.
pub fn run(launch: &Launch<'_>, nodes: u64, mode: Mode) -> anyhow::Result<ExitCode> {
    let &Launch {
        args, from, recipe, ..
    } = launch;
    let nodes = u32::try_from(nodes).ok().filter(|nodes| *nodes <= 1024);
    let nodes = nodes.context("a TrainingJob has at most 1024 nodes")?;
    let given = from.options.gpus_per_node;
    let per_node = match given.map(u32::try_from).transpose()? {
        Some(per_node) => per_node,
        None => {
            let found = args
                .cluster
                .run(async |cluster| Ok(client::free(cluster, args.resource(), None).await?))
                .context("cannot determine the GPUs per node; set --gpus-per-node")?;
            found.per_node
        }
    };
    // The controller checks again; this check refuses a bad recipe before it is sent.
    let world = u64::from(nodes) * u64::from(per_node);
    let device = launch.device.on(args.resource());
    let runner = Runner::of(
        &recipe.spec,
        AskedRunner::Launch,
        device,
        launch.rank_memory,
    );
    let request = PlanRequest {
        gpus_per_node: Some(per_node.into()),
        flaws: launch::stated_flaws(recipe, runner),
        ..PlanRequest::of(runner, world)
    };
    let draft = plan::examine(recipe, &request);
    render::print_for(mode.is_quiet(), &draft.findings, &recipe.sources);
    let Ok(plan) = draft.finish() else {
        return Ok(ExitCode::from(EXIT_REFUSED));
    };
    let notes = if recipe.spec.trainer.is_external() {
        external_trainer::check::command(recipe, &plan, &from.overrides)?
    } else {
        Vec::new()
    };
    for note in notes {
        say(format_args!("warning: {note}\n"));
    }
    let mut job = submitted_job(launch, runner, nodes, per_node)?;
    if let Some(warning) = job.spec.idle_devices() {
        say(format_args!("warning: {warning}\n"));
    }
    let code = code_of(launch, &mut job, mode)?;
    if args.dry_run {
        Format::Yaml.print(&job)?;
        return Ok(ExitCode::SUCCESS);
    }
    if !mode.is_quiet() {
        say(format_args!(
            "{nodes} × {per_node} {}: {}\n",
            args.resource(),
            plan.formula
        ));
    }
    let name = job.name_any();
    let options = args.cluster.options();
    if let Some(Code {
        archive,
        url: Some(url),
        ..
    }) = &code
    {
        upload(url, archive)?;
    }
    args.cluster.run(async |cluster| {
        let created = change::create(cluster, &job).await?;
        if let Some(Code {
            archive,
            config_map: Some(name),
            ..
        }) = code
        {
            let sent = change::create_code(cluster, &created, &name, archive).await;
            if let Err(error) = sent {
                // Its pods would wait for the code.
                change::cancel(cluster, &created.name_any()).await?;
                return Err(error.into());
            }
        }
        Ok(())
    })?;
    if args.detach {
        say(format_args!(
            "created {name}; `evenkeel logs -f {name}{options}` follows it\n"
        ));
        return Ok(ExitCode::SUCCESS);
    }
    watch(&Watching {
        job: &name,
        cluster: &args.cluster,
        mode,
    })
}

/// The code of a launch and the place that it goes to.
struct Code {
    archive: Vec<u8>,
    config_map: Option<String>,
    url: Option<String>,
}

/// Archives the code of a launch and says so; the job then names its place.
fn code_of(launch: &Launch<'_>, job: &mut TrainingJob, mode: Mode) -> anyhow::Result<Option<Code>> {
    let args = launch.args;
    let directory = match &args.code {
        Some(directory) => directory.as_path(),
        None if args.no_code || job.spec.trainer.command.is_empty() => return Ok(None),
        None => Path::new("."),
    };
    let code = code::archive(directory)?;
    let size = bytes(code.archive.len() as u64);
    if !mode.is_quiet() {
        say(format_args!(
            "code: {} of {}, {} ({size} compressed)\n",
            count(code.files as u64, "file"),
            directory.display(),
            bytes(code.bytes)
        ));
    }
    let is_small = code.archive.len() <= code::MOST_IN_CONFIG_MAP;
    let (config_map, url) = match &args.bucket {
        _ if is_small => {
            // The ConfigMap of a deleted job may still wait for its own deletion.
            let suffix = hex(&nonce()?[..4]);
            (Some(format!("{}-code-{suffix}", job.name_any())), None)
        }
        Some(bucket) => {
            let bucket = bucket.trim_end_matches('/');
            (None, Some(format!("{bucket}/code/{}.tar.gz", code.sha256)))
        }
        None => {
            let too_large = format!(
                "the code is too large for a ConfigMap, {size} of {}: give a bucket with --bucket, add what the training \
                 does not need to .gitignore, or send a smaller folder with --code DIR",
                bytes(code::MOST_IN_CONFIG_MAP as u64)
            );
            if args.code.is_some() {
                bail!(too_large);
            }
            say(format_args!(
                "warning: the image must have the program, since no code is sent; {too_large}\n"
            ));
            return Ok(None);
        }
    };
    job.spec.code = Some(crate::api::Code {
        config_map: config_map.clone(),
        url: url.clone(),
        sha256: code.sha256,
    });
    Ok(Some(Code {
        archive: code.archive,
        config_map,
        url,
    }))
}

/// Uploads the archive, unless the bucket has it.
fn upload(url: &str, archive: &[u8]) -> anyhow::Result<()> {
    let (place, name) = url.rsplit_once('/').unwrap_or_default();
    let bucket = Bucket::open(place)?;
    if !bucket.has(name)? {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), archive)?;
        bucket.upload(file.path(), name)?;
    }
    Ok(())
}

/// A variable of `--env`.
fn variable(text: &str) -> anyhow::Result<EnvVar> {
    let (name, value) = text
        .split_once('=')
        .with_context(|| format!("`--env {text}` has no value; write --env NAME=VALUE"))?;
    Ok(EnvVar {
        name: name.to_owned(),
        value: value.to_owned(),
        value_from: None,
    })
}

/// The pod template of `--pod-template`.
fn pod_template(file: &Path) -> anyhow::Result<Value> {
    let cannot = || format!("cannot read the pod template {}", file.display());
    let text = input::read(file, input::CONFIG_BYTES).with_context(cannot)?;
    let text = String::from_utf8(text).with_context(cannot)?;
    let template: Value = serde_saphyr::from_str(&text).with_context(cannot)?;
    let Some(fields) = template.as_object() else {
        bail!("{}: write `spec:` with the fields of a pod", cannot());
    };
    let known = ["apiVersion", "kind", "metadata", "spec"];
    if let Some(other) = fields.keys().find(|key| !known.contains(&key.as_str())) {
        bail!(
            "{}: `{other}` is none of metadata and spec; write the fields of a pod below `spec:`",
            cannot()
        );
    }
    Ok(template)
}

/// An annotation of `--service-account-annotation`.
fn annotation(text: &str) -> anyhow::Result<(String, String)> {
    let parts = text.split_once('=');
    let name = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let (key, value) = parts
        .filter(|(key, _)| !key.is_empty() && key.chars().all(name))
        .with_context(|| {
            format!(
                "`--service-account-annotation {text}` is no annotation; write \
                 --service-account-annotation eks.amazonaws.com/role-arn=VALUE"
            )
        })?;
    Ok((key.to_owned(), value.to_owned()))
}

/// A source of `--env-from`.
fn source(text: &str) -> anyhow::Result<Value> {
    let kinds = [("secret/", "secretRef"), ("configmap/", "configMapRef")];
    let found = kinds
        .iter()
        .find_map(|(kind, key)| Some((*key, text.strip_prefix(kind)?)));
    let (key, name) = found.with_context(|| {
        format!("`--env-from {text}` is neither secret/NAME nor configmap/NAME")
    })?;
    Ok(json!({key: {"name": name}}))
}

fn submitted_job(
    launch: &Launch<'_>,
    runner: Runner,
    nodes: u32,
    gpus_per_node: u32,
) -> anyhow::Result<TrainingJob> {
    let &Launch {
        args,
        from,
        recipe,
        command,
        name,
        rank_memory,
        progress_deadline_seconds,
        on_stall,
        device,
    } = launch;
    let name = match name {
        Some(name) => name.to_owned(),
        None => client::name_of(&recipe.spec.name).with_context(|| {
            format!(
                "{:?} cannot be turned into a TrainingJob name; set --name",
                recipe.spec.name
            )
        })?,
    };
    let mut overrides = from.overrides.clone();
    for (key, value) in [
        ("batch.gpus", from.options.recipe_gpus),
        ("batch.global", from.options.global_batch_size),
    ] {
        if let Some(value) = value {
            overrides::set(&mut overrides, key, &value.to_string());
        }
    }
    let trainer = &recipe.spec.trainer;
    let remainder = match from.options.remainder.as_deref() {
        Some("uneven") => RemainderPolicy::Uneven,
        _ => RemainderPolicy::Exact,
    };
    let spec = TrainingJobSpec {
        recipe: recipe_source::source(from, recipe, command, &overrides, remainder)?,
        overrides,
        nodes,
        gpus_per_node,
        resource_name: args.resource().to_owned(),
        elasticity: Elasticity {
            min_nodes: args.min_nodes.unwrap_or(1),
            remainder,
            ..Elasticity::default()
        },
        image: args.image(runner),
        trainer: Trainer {
            command: trainer.command.clone(),
            device,
            rank_memory: rank_memory.map(|bytes| bytes.to_string()),
            setup: args.setup.clone(),
            setup_seconds: None,
            env: args
                .env
                .iter()
                .map(|text| variable(text))
                .collect::<Result<_, _>>()?,
            env_from: args
                .env_from
                .iter()
                .map(|text| source(text))
                .collect::<Result<_, _>>()?,
            log_format: args.pod_log.unwrap_or_default(),
        },
        checkpoint: match &args.bucket {
            Some(url) => CheckpointVolume {
                claim: None,
                path: Some(url.clone()),
            },
            None => CheckpointVolume {
                claim: Some(args.claim.clone().unwrap_or_else(|| "checkpoints".into())),
                path: None,
            },
        },
        pod_template: args.pod_template.as_deref().map(pod_template).transpose()?,
        service_account_annotations: args
            .service_account_annotation
            .iter()
            .map(|text| annotation(text))
            .collect::<Result<_, _>>()?,
        progress_deadline_seconds,
        on_stall,
        ..TrainingJobSpec::default()
    };
    Ok(TrainingJob::new(&name, spec))
}

/// A job to follow.
pub struct Watching<'a> {
    /// Name of the job.
    pub job: &'a str,
    /// The cluster of the job.
    pub cluster: &'a ClusterArgs,
    pub mode: Mode,
}

/// Follows a job until it ends, or until Ctrl-C, which leaves it running.
pub fn watch(watching: &Watching<'_>) -> anyhow::Result<ExitCode> {
    let mut display = Display::new(watching.mode);
    let name = watching.job;
    let options = watching.cluster.options();
    let end = watching.cluster.run(async |cluster| {
        let mut each = |event: &_| display.event(event);
        tokio::select! {
            end = client::follow(cluster, name, &mut each) => Ok(Some(end?)),
            _ = tokio::signal::ctrl_c() => Ok(None),
        }
    })?;
    drop(display);
    Ok(match end {
        Some(End::Complete) => ExitCode::SUCCESS,
        Some(End::Failed { message, log_tail }) => {
            say(format_args!("error: {message}\n"));
            if !log_tail.is_empty() {
                say_as_is(format_args!("{log_tail}\n"));
            }
            ExitCode::from(EXIT_REFUSED)
        }
        Some(End::Deleted) => {
            say(format_args!("error: {name} was deleted\n"));
            ExitCode::from(EXIT_REFUSED)
        }
        None => {
            say(format_args!(
                "{name} continues; `evenkeel logs -f {name}{options}` follows it again, `evenkeel \
                 cancel {name}{options}` deletes it\n"
            ));
            ExitCode::from(EXIT_INTERRUPTED)
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_template_has_the_fields_of_a_pod_and_no_others() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let read = |text: &str| {
            std::fs::write(&file, text).unwrap();
            pod_template(file.path()).map_err(|error| format!("{error:#}"))
        };
        let template = read("spec: {nodeSelector: {pool: gpu}}\n").unwrap();
        assert_eq!(template["spec"]["nodeSelector"]["pool"], "gpu");
        for (text, message) in [
            (
                "nodeSelector: {pool: gpu}",
                "`nodeSelector` is none of metadata and spec",
            ),
            ("- spec", "write `spec:` with the fields of a pod"),
            ("spec: {", "cannot read the pod template"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn an_annotation_has_a_key_and_a_value() {
        let (key, value) = annotation("iam.gke.io/gcp-service-account=a=b").unwrap();
        assert_eq!((&*key, &*value), ("iam.gke.io/gcp-service-account", "a=b"));
        for text in ["no-value", "=x", "my key=x"] {
            let error = annotation(text).unwrap_err().to_string();
            assert!(error.contains("is no annotation"), "{error}");
        }
    }
}
