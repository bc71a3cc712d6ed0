//! `evenkeel prepare`: prepares a run directory for its first generation (started by the agent).

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;

use super::{EXIT_REFUSED, refuse_unread, render};
use crate::api::RemainderPolicy;
use crate::api::recipe_snapshot::RecipeSnapshot;
use crate::data::DataError;
use crate::hub::Hub;
use crate::inventory::Inventory;
use crate::launch::{LaunchError, Request, RunDir, RunLock, download, prepare};
use crate::lifecycle::files;
use crate::lifecycle::protocol::exit;
use crate::plan::{AskedRunner, DeviceKind, OomPolicy, Reached, Runner};
use crate::recipe;
use crate::util::durable::{self, FileError};

/// Prepare a run directory without launching the run (started by the agent).
#[derive(clap::Args)]
pub struct Args {
    /// Recipe of the TrainingJob and its remainder policy, as JSON.
    recipe: PathBuf,
    /// Number of ranks of the first generation.
    #[arg(long)]
    procs: u64,
    /// The run directory.
    #[arg(long)]
    out: PathBuf,
    /// Memory limit of one rank, bytes.
    #[arg(long, value_parser = crate::util::size::parse)]
    rank_memory: Option<u64>,
    /// Where the built-in trainer computes: cpu or cuda.
    #[arg(long, value_parser = parse_device, default_value = "cpu")]
    device: DeviceKind,
}

fn parse_device(text: &str) -> Result<DeviceKind, &'static str> {
    [DeviceKind::Cpu, DeviceKind::Cuda]
        .into_iter()
        .find(|kind| kind.to_string() == text)
        .ok_or("expected cpu or cuda")
}

pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let out = args.out.clone();
    let prepared = prepare_run(args);
    match prepared {
        Err(error) if may_succeed_later(&error, &out) => {
            super::failed(&error);
            Ok(ExitCode::from(exit::TRY_AGAIN))
        }
        prepared => prepared,
    }
}

/// Whether a retry may succeed: the error concerns the run's volume, a disk or a bucket, not the recipe.
fn may_succeed_later(error: &anyhow::Error, out: &Path) -> bool {
    let file = match error.downcast_ref() {
        Some(LaunchError::Data(DataError::Bucket(error))) => return error.cause.may_be_mended(),
        Some(LaunchError::Hub(error)) => return error.cause.may_pass(),
        Some(LaunchError::File(file) | LaunchError::Data(DataError::File(file))) => Some(file),
        _ => error.downcast_ref::<FileError>(),
    };
    match file {
        // The previous preparation holds the lock and is about to end.
        Some(FileError::NoSpace { .. } | FileError::HeldBy { .. }) => true,
        Some(FileError::Io { path, source, .. }) => {
            path.starts_with(out) || !concerns_the_path(source.kind())
        }
        Some(FileError::TooLarge { .. } | FileError::Json { .. }) | None => false,
    }
}

/// Whether the error calls for another path or another file.
fn concerns_the_path(kind: ErrorKind) -> bool {
    use ErrorKind::*;
    matches!(
        kind,
        NotFound
            | PermissionDenied
            | IsADirectory
            | NotADirectory
            | InvalidFilename
            | InvalidInput
            | InvalidData
            | UnexpectedEof
    )
}

/// The hub as this pod reaches it. Its cache is on the volume or the disk of the run, where every rank finds it, unless the
/// pod's environment names another place.
fn hub(out: &Path) -> Hub {
    let mut hub = Hub::of_process();
    let is_named = ["HF_HUB_CACHE", "HF_HOME"]
        .iter()
        .any(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty()));
    if !is_named {
        hub.settings.cache = Some(out.join(files::HUB));
    }
    hub
}

fn prepare_run(args: Args) -> anyhow::Result<ExitCode> {
    let (snapshot, remainder): (RecipeSnapshot, RemainderPolicy) = durable::read_json(&args.recipe)
        .with_context(|| format!("reading {}", args.recipe.display()))?;
    let request = snapshot.request(remainder.into(), &[])?;
    let recipe = match recipe::read(&request) {
        Ok(recipe) => recipe,
        Err(error) => return Ok(refuse_unread(&error, false)),
    };
    let runner = Runner::of(
        &recipe.spec,
        AskedRunner::Launch,
        args.device,
        args.rank_memory,
    );
    // The controller plans the worlds, and it knows no memory of devices.
    let mut hub = hub(&args.out);
    let planned = prepare::plan(
        &recipe,
        args.procs,
        Reached::default(),
        runner,
        (None, OomPolicy::default()),
        &hub,
    );
    let planned = match planned {
        Ok(planned) => planned,
        Err(LaunchError::Refused(refused)) => {
            render::print(&refused.findings, &recipe.sources);
            return Ok(ExitCode::from(EXIT_REFUSED));
        }
        Err(error) => return Err(error.into()),
    };
    let run_lock = RunLock::take(RunDir::at(&args.out))?;
    let request = Request {
        overrides: snapshot.overrides.clone(),
        cores: Inventory::discover().cpu.cores,
        // No signals: the agent kills this process, and the next attempt removes partial data.
        ..Request::of(snapshot.path(), runner)
    };
    let planned = download(planned, &recipe, &request, &mut hub, &mut |_, _| {})?;
    prepare::prepare(run_lock.run_dir(), &recipe, &planned, &request, &mut |_| {})?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn only_disk_and_volume_errors_are_retried() {
        let out = Path::new("/checkpoints/run");
        let data = |error| anyhow::anyhow!(LaunchError::Data(DataError::File(error)));
        let file = |path: &str, kind| {
            let source = io::Error::from(kind);
            FileError::from_io("write", Path::new(path), 0, source)
        };
        let (inside, outside) = ("/checkpoints/run/data", "/data/train.jsonl");
        let passes = |error: anyhow::Error| may_succeed_later(&error, out);
        assert!(passes(data(file(inside, ErrorKind::StorageFull))));
        assert!(passes(data(file(inside, ErrorKind::PermissionDenied))));
        assert!(passes(data(file(outside, ErrorKind::TimedOut))));
        assert!(!passes(data(file(outside, ErrorKind::NotFound))));
        assert!(!passes(data(file(outside, ErrorKind::FileTooLarge))));
        let held = FileError::HeldBy {
            directory: out.into(),
            pid: None,
        };
        assert!(passes(LaunchError::File(held).into()));
        let read = Err::<(), _>(file(outside, ErrorKind::TimedOut)).context("reading");
        assert!(passes(read.unwrap_err()));
        let message = "no key that is read says how long to train".to_owned();
        assert!(!passes(LaunchError::Usage { message }.into()));
    }
}
