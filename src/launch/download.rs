//! Downloads what a launch needs of the hub and the cache lacks, after all checks that need none of it.

use super::names::MissingData;
use super::prepare::plan;
use super::{LaunchError, Planned, Request, base};
use crate::data::{self, Card, PrepareRequest, Tokenizer, Unchosen};
use crate::hub::{Cause, Download, Hub, Received, Repo};
use crate::recipe::Recipe;

/// Reports the bytes of a repository.
type Report<'a> = &'a mut dyn FnMut(&Repo, Received);

/// Downloads what is missing, and plans again with it. The small files come first: they may refuse the model, its
/// tokenizer or a source of data before weights and data are requested.
pub fn download(
    planned: Planned,
    recipe: &Recipe,
    request: &Request,
    hub: &mut Hub,
    progress: Report<'_>,
) -> Result<Planned, LaunchError> {
    if planned.downloads().is_empty() {
        return Ok(planned);
    }
    let ranks = planned.plan.facts.world_size;
    let memory = (request.device_memory, request.oom_policy);
    let runner = request.runner;
    let again = |hub: &Hub| plan(recipe, ranks, planned.reached, runner, memory, hub);
    let stopped = || request.stopped();
    let mut begun = Vec::new();
    for missing in &planned.missing {
        let repo = &missing.repo;
        let download = Download::begin(&hub.settings, repo, &stopped)?;
        download.small(missing.small, &mut |received| progress(repo, received))?;
        hub.begin(repo, download.commit());
        begun.push((missing, download));
    }
    check(&again(hub)?, recipe)?;
    let mut data = Vec::new();
    for missing in &planned.missing_data {
        data.push(choose(missing, recipe, hub, &stopped, progress)?);
    }
    for (repo, download, files) in data {
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        download.files(&files, &mut |received| progress(&repo, received))?;
        download.finish()?;
    }
    for (missing, download) in begun {
        if missing.weights {
            download.weights(&mut |received| progress(&missing.repo, received))?;
        }
        download.finish()?;
    }
    again(hub)
}

/// A begun download, and the files that it needs.
type Chosen<'a> = (Repo, Download<'a>, Vec<String>);

/// Chooses the files of a source by the list of its repository and by its card. If the repository has no data in a format
/// that is read, they are those of the Parquet files that the hub makes of it.
fn choose<'a>(
    missing: &MissingData,
    recipe: &Recipe,
    hub: &Hub,
    stopped: &'a dyn Fn() -> bool,
    progress: Report<'_>,
) -> Result<Chosen<'a>, LaunchError> {
    let MissingData { source, path, .. } = missing;
    let key = recipe.keys();
    let refused = |unchosen: Unchosen| LaunchError::from(unchosen.error(source, path, &key));
    let mut begin = |repo: &Repo| -> Result<_, LaunchError> {
        let download = Download::begin(&hub.settings, repo, stopped)?;
        download.card(&mut |received| progress(repo, received))?;
        let card = Card::of(&download.snapshot());
        let files = data::choose(download.listed(), &card, source, path);
        Ok((download, files))
    };
    let (download, files) = begin(&missing.repo)?;
    let (why, converted) = match (files, missing.repo.converted()) {
        (Ok(files), _) => return Ok((missing.repo.clone(), download, files)),
        (Err(Unchosen::Unread(why)), Some(converted)) => (why, converted),
        (Err(other), _) => return Err(refused(other)),
    };
    match begin(&converted) {
        Ok((converted_download, files)) => {
            // The next launch reads in the cache that the repository has no such data.
            download.finish()?;
            let files = files.map_err(refused)?;
            Ok((converted, converted_download, files))
        }
        Err(LaunchError::Hub(error))
            if matches!(*error.cause, Cause::NoRevision(_) | Cause::NoRepo(_)) =>
        {
            let revision = &converted.revision;
            let why = format!("{why}, and the hub offers no {revision} of it");
            Err(refused(Unchosen::Unread(why)))
        }
        Err(error) => Err(error),
    }
}

/// Refuses a tokenizer that cannot be read or does not fit the model.
fn check(planned: &Planned, recipe: &Recipe) -> Result<(), LaunchError> {
    let shape = planned.model.shape.as_ref();
    let base = base()?;
    let key = recipe.keys();
    let data = PrepareRequest::of(&planned.settled, &key, shape, &base, &base);
    if data::needs_tokenizer(&data) {
        let tokenizer = Tokenizer::load(&data)?;
        if let Some(vocab_size) = data.vocab_size {
            let tokens = tokenizer.vocabulary_size;
            data::check_vocabulary(&tokenizer.described(), tokens, vocab_size)?;
        }
    }
    Ok(())
}
