//! Downloads what a launch needs of the hub and the cache lacks, after all checks that need none of it.

use super::prepare::{plan, refuse_on_device};
use super::request::data_of;
use super::{LaunchError, Planned, Request, base};
use crate::data::{self, Tokenizer};
use crate::hub::{Download, Hub, Received, Repo};
use crate::recipe::Recipe;

/// Downloads what is missing, and plans again with it. The small files come first: they may refuse the model or its
/// tokenizer before the weights are requested.
pub fn download(
    planned: Planned,
    recipe: &Recipe,
    request: &Request,
    hub: &mut Hub,
    progress: &mut dyn FnMut(&Repo, Received),
) -> Result<Planned, LaunchError> {
    if planned.missing.is_empty() {
        return Ok(planned);
    }
    let ranks = planned.plan.facts.world_size;
    let (runner, memory) = (request.runner, request.device_memory);
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
    check(&again(hub)?, recipe, request)?;
    for (missing, download) in begun {
        if missing.weights {
            download.weights(&mut |received| progress(&missing.repo, received))?;
        }
        download.finish()?;
    }
    again(hub)
}

/// Refuses a model for the device, and a tokenizer that cannot be read or does not fit the model.
fn check(planned: &Planned, recipe: &Recipe, request: &Request) -> Result<(), LaunchError> {
    let shape = planned.model.shape.as_ref();
    if let Some(shape) = shape {
        refuse_on_device(shape, request)?;
    }
    let base = base()?;
    let key = recipe.keys();
    let data = data_of(&planned.settled, &key, shape, &base, &base);
    if data::needs_tokenizer(&data) {
        let tokenizer = Tokenizer::load(&data)?;
        if let Some(vocab_size) = data.vocab_size {
            let tokens = tokenizer.vocabulary_size;
            data::check_vocabulary(&tokenizer.described(), tokens, vocab_size)?;
        }
    }
    Ok(())
}
