//! Going on with a run: the same recipe, its data unchanged, none of its old ranks alive. A resume
//! that is refused leaves the run as it was.

use std::time::{Duration, Instant};

use super::request::data_of;
use super::{LaunchError, Phase, Prepared, Request, RunDir, RunState, initial};
use crate::batch::{self, Reached};
use crate::job::{Pin, files};
use crate::recipe::spec::Division;
use crate::recipe::{Recipe, Spec};
use crate::train::data::{self, PrepareRequest, Progress};
use crate::train::{Setup, checkpoint, pin, rank};
use crate::words::count;

/// How long ranks of a dead launcher are waited for: they commit a checkpoint and leave.
const OLD_RANKS: Duration = Duration::from_secs(60);

/// What the run in a directory has reached, where it is to go on: another limit for the ranks'
/// memory lets larger micro-batches be tried again.
pub fn reached(run: &RunDir, request: &Request) -> Result<Reached, LaunchError> {
    if !request.resume {
        return Ok(Reached::default());
    }
    let setup = run.setup()?;
    let state = run.state()?.unwrap_or_default();
    let reached = state.reached(&setup);
    Ok(match another_memory(&setup, request) {
        Some(_) => Reached {
            micro_limit: None,
            ..reached
        },
        None => reached,
    })
}

/// The limit of the ranks' memory, where the run is to go on with another one.
fn another_memory(setup: &Setup, request: &Request) -> Option<u64> {
    let asked = request.rank_memory;
    asked.filter(|_| asked != setup.rank_memory)
}

/// Prepares the run in the directory to go on.
pub(super) fn resume(
    run: &RunDir,
    recipe: &Recipe,
    request: &Request,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, LaunchError> {
    let mut setup = run.setup()?;
    let usage = |message: String| LaunchError::Usage { message };
    let mut spec = recipe.spec.clone();
    if spec.batch.division != Division::Stated {
        // The world that the run was launched in is the one that its micro-batch comes from.
        spec.batch.gpus = setup.spec.batch.gpus;
    }
    if let Some(key) = difference(&setup.spec, &spec) {
        return Err(usage(format!(
            "{} was launched with another `{key}`: resume it with the recipe and the overrides it \
             began with (`{} {}`), or start a new run with another --out",
            run.path().display(),
            setup.recipe_path.display(),
            setup.overrides.join(" ")
        )));
    }
    let horizon = batch::horizon(&setup.spec, setup.global_batch_size, setup.data_samples);
    if setup.horizon != horizon || horizon.budget_samples != Some(setup.budget_samples) {
        return Err(usage(format!(
            "{} says other lengths than its own recipe: it was edited; put back a copy, or start a \
             new run with another --out",
            run.path().join(files::RUN).display()
        )));
    }
    let mut state = run.state()?;
    if let Some(state) = &state {
        refuse_finished(run, &setup, state)?;
    }
    if state.is_none() && run.holds_checkpoints()? {
        return Err(usage(format!(
            "{} holds checkpoints but no state.json, which says which of them count: put back a \
             copy of it, or start a new run with another --out",
            run.path().display()
        )));
    }
    wait_for_old_ranks(run, state.as_ref(), request)?;
    // What ranks committed after their launcher was gone counts too: nobody else was told.
    if let Some(state) = &mut state {
        state.pin = newest(run, state)?;
        state.micro_limit = reached(run, request)?.micro_limit;
    }
    let pinned = state.as_ref().is_none_or(|state| state.pin.is_some());
    if !pinned && run.holds_checkpoints()? {
        return Err(usage(format!(
            "{} holds checkpoints, but its state.json counts none of them: put back a copy of it, or \
             start a new run with another --out",
            run.path().display()
        )));
    }
    match (
        state.as_ref().and_then(|state| state.pin.as_ref()),
        &setup.weights,
    ) {
        (Some(pin), _) => verify(run, pin, &recipe.key("model.path"))?,
        (None, Some(weights)) => initial::check(weights, &setup.model)?,
        (None, None) => {}
    }
    let data = data::prepare(
        &PrepareRequest {
            resume: true,
            fingerprint: setup.data_fingerprint.as_deref(),
            stopped: &|| request.stopped(),
            ..data_of(
                recipe,
                &recipe.keys(),
                Some(&setup.model),
                &setup.base,
                &Setup::data(run.path()),
            )
        },
        progress,
    )?;
    // Nothing is refused any more. The state goes first: a limit of the micro-batch that is forgotten
    // too early is found again, one that outlives the memory that it is of stays.
    let before = setup.clone();
    if let Some(bytes) = another_memory(&setup, request) {
        setup.rank_memory = Some(bytes);
        if let Some(state) = &state {
            run.write_state(state)?;
        }
    }
    setup.data_fingerprint = Some(data.manifest.fingerprint);
    if setup != before {
        run.write_setup(&setup)?;
    }
    Ok(Prepared {
        setup,
        state,
        notes: data.manifest.notes,
    })
}

/// Refuses a run whose budget is reached: no launcher goes on with it, in whatever world.
pub fn refuse_finished(run: &RunDir, setup: &Setup, state: &RunState) -> Result<(), LaunchError> {
    if state.phase != Phase::Finished {
        return Ok(());
    }
    let weights = state.pin.as_ref().map_or_else(String::new, |pin| {
        format!(
            " from its weights, {}={}",
            setup.recipe().key("model.path"),
            run.path().join(&pin.path).display()
        )
    });
    Err(LaunchError::Usage {
        message: format!(
            "{} is finished, its budget is reached: to train more, start a new run{weights}",
            run.path().display()
        ),
    })
}

/// The newest checkpoint of the run's last generation, else the one that was pinned. Checkpoints
/// of earlier generations are not of the lineage beyond where the last one began.
fn newest(run: &RunDir, state: &RunState) -> Result<Option<Pin>, LaunchError> {
    let Some(last) = state.generations.last() else {
        return Ok(state.pin.clone());
    };
    let found = checkpoint::list(run.path())?
        .committed
        .into_iter()
        .filter(|committed| committed.generation == last.number)
        .max_by_key(|committed| committed.samples);
    let pinned = state.pin.as_ref().map_or(0, |pin| pin.samples);
    match found.filter(|committed| committed.samples > pinned) {
        Some(committed) => Ok(Some(pin::of(&committed, run.path())?)),
        None => Ok(state.pin.clone()),
    }
}

/// Verifies the checkpoint to go on from. When it cannot be used, the others of the run are named:
/// their weights are not lost. `path_key`: the recipe's key of a model's path.
fn verify(run: &RunDir, pin: &Pin, path_key: &str) -> Result<(), LaunchError> {
    let Err(error) = pin::open(run.path(), pin) else {
        return Ok(());
    };
    let pinned = run.path().join(&pin.path);
    let others = checkpoint::list(run.path())?.committed;
    let newest = others.into_iter().rev().find(|other| other.path != pinned);
    let way_out = match newest {
        Some(other) => format!(
            "put back a copy, or start a new run from the weights of {} ({}) with {path_key}",
            other.path.display(),
            count(other.samples, "sample")
        ),
        None => "put back a copy; this run has no other checkpoint, so that without one it has to \
                 start anew"
            .into(),
    };
    Err(LaunchError::Pinned { error, way_out })
}

fn wait_for_old_ranks(
    run: &RunDir,
    state: Option<&RunState>,
    request: &Request,
) -> Result<(), LaunchError> {
    let last = run.last_generation(state.unwrap_or(&RunState::default()))?;
    let since = Instant::now();
    // Generation 0 never was: nobody is found alive in it.
    while rank::any_alive(&run.generation(last))? {
        if request.stopped() {
            return Err(LaunchError::Stopped);
        }
        if since.elapsed() > OLD_RANKS {
            return Err(LaunchError::Usage {
                message: format!(
                    "ranks of generation {last} still run after {} s: stop them (their command \
                     line has `rank --run {}`), then resume",
                    OLD_RANKS.as_secs(),
                    run.path().display()
                ),
            });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// The first top-level key in which two specs differ.
fn difference(one: &Spec, other: &Spec) -> Option<String> {
    let object = |spec: &Spec| match serde_json::to_value(spec) {
        Ok(serde_json::Value::Object(map)) => map,
        _ => serde_json::Map::new(),
    };
    let (one, other) = (object(one), object(other));
    one.iter()
        .find(|(key, value)| other.get(*key) != Some(value))
        .map(|(key, _)| key.clone())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::testing::Launched;

    const BATCH: &str = "batch: {global: 12, micro: 2}";

    #[test]
    fn a_run_does_not_go_on_with_other_data_once_its_own_are_lost() {
        let place = tempfile::tempdir().unwrap();
        let corpus = place.path().join("corpus.jsonl");
        std::fs::write(&corpus, "{\"text\": \"abcdefgh\"}\n".repeat(100)).unwrap();
        let lines = format!(
            "{BATCH}\ntokenizer: {{path: byte}}\ndata: {{sequence_length: 8, train: [{{path: {}}}]}}",
            corpus.display()
        );
        let launched = Launched::at(place.path(), &lines, &[]);
        let data = Setup::data(launched.run.path());
        std::fs::remove_dir_all(&data).unwrap();
        assert!(launched.resume(|_| {}).is_ok());
        std::fs::remove_dir_all(&data).unwrap();
        std::fs::write(&corpus, "{\"text\": \"another\"}\n".repeat(100)).unwrap();
        let said = launched.resume(|_| {}).err().unwrap();
        assert!(said.contains("the run began with other data"), "{said}");
        assert!(
            said.ends_with("undo the change, or start a new run"),
            "{said}"
        );
        assert!(!data.exists());
    }

    #[test]
    fn a_run_of_an_older_version_goes_on_with_its_manifest_and_keeps_the_fingerprint() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(place.path(), BATCH, &[]);
        let old = Setup {
            data_fingerprint: None,
            ..launched.prepared.setup.clone()
        };
        launched.run.write_setup(&old).unwrap();
        assert!(launched.resume(|_| {}).is_ok());
        assert_eq!(launched.run.setup().unwrap(), launched.prepared.setup);
    }

    #[test]
    fn a_finished_run_is_refused_with_its_weights_as_the_way_out() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(place.path(), BATCH, &[]);
        let pin = Pin {
            path: "gen-1/step-0000004".to_owned(),
            step: 4,
            samples: 48,
            batch: 12,
            checksum: String::new(),
        };
        let mut state = RunState {
            pin: Some(pin),
            ..RunState::default()
        };
        assert!(refuse_finished(&launched.run, &launched.prepared.setup, &state).is_ok());
        state.phase = Phase::Finished;
        launched.run.write_state(&state).unwrap();
        let said = launched.resume(|_| {}).err().unwrap();
        let weights = launched.run.path().join("gen-1/step-0000004");
        let way_out = format!(
            "a new run from its weights, model.path={}",
            weights.display()
        );
        assert!(said.ends_with(&way_out), "{said}");
    }

    #[test]
    fn a_resume_with_other_memory_forgets_the_limit_of_the_micro_batch_for_good() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(place.path(), BATCH, &[]);
        let starved = RunState {
            micro_limit: Some(1),
            ..RunState::default()
        };
        launched.run.write_state(&starved).unwrap();
        let limit = || launched.run.state().unwrap().unwrap().micro_limit;
        launched.resume(|_| {}).unwrap();
        assert_eq!(limit(), Some(1));
        // Its launcher dies before it starts anything: what is on disk is all there is.
        launched
            .resume(|request| request.rank_memory = Some(1 << 30))
            .unwrap();
        assert_eq!(launched.run.setup().unwrap().rank_memory, Some(1 << 30));
        assert_eq!(limit(), None);
    }
}
