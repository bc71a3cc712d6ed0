//! Going on with a run: the same recipe, its data unchanged, none of its old ranks alive. A resume
//! that is refused leaves the run as it was.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::request::data_of;
use super::{LaunchError, Phase, Planned, Prepared, Request, RunDir, RunState, initial};
use crate::batch::{self, Reached};
use crate::job::{Pin, files};
use crate::recipe::Recipe;
use crate::recipe::spec::Division;
use crate::train::data::{self, PrepareRequest, Progress};
use crate::train::{Setup, TrainError, TrainState, checkpoint, pin, rank};
use crate::words::count;

/// How long ranks of a dead launcher are waited for: they commit a checkpoint and leave.
const OLD_RANKS: Duration = Duration::from_secs(60);

/// What the run in a directory has reached, where it is to go on: another limit for the ranks'
/// memory lets larger micro-batches be tried again.
pub fn reached(run: &RunDir, recipe: &Recipe, request: &Request) -> Result<Reached, LaunchError> {
    if !request.resume {
        return Ok(Reached::default());
    }
    let setup = setup_of(run, recipe)?;
    let state = run.state()?.unwrap_or_default();
    if let Some(pin) = &state.pin {
        refuse_another_pin(run, pin)?;
    }
    Ok(go_on_from(&setup, &state, request))
}

/// The same, of what was read already.
fn go_on_from(setup: &Setup, state: &RunState, request: &Request) -> Reached {
    let reached = state.reached(setup);
    match another_memory(setup, request) {
        Some(_) => Reached {
            micro_limit: None,
            ..reached
        },
        None => reached,
    }
}

/// The run, which has to say what its recipe says.
pub(super) fn setup_of(run: &RunDir, recipe: &Recipe) -> Result<Setup, LaunchError> {
    let setup = run.setup()?;
    let mut spec = recipe.spec.clone();
    if spec.trainer.is_own() && setup.spec.trainer.is_own() {
        // A slip in the command is mended between two launches; the batch is not touched by it.
        spec.trainer.clone_from(&setup.spec.trainer);
    }
    if spec.batch.division != Division::Stated {
        // The world that the run was launched in is the one that its micro-batch comes from.
        spec.batch.gpus = setup.spec.batch.gpus;
    }
    if let Some(key) = difference(&setup.spec, &spec) {
        return Err(LaunchError::Usage {
            message: format!(
                "{} was launched with another `{key}`: resume it with the recipe and the overrides \
                 it began with (`{} {}`), or start a new run with another --out",
                run.path().display(),
                setup.recipe_path.display(),
                setup.overrides.join(" ")
            ),
        });
    }
    let global = batch::global_batch(&spec);
    if global != Some(setup.global_batch_size) {
        return Err(edited(
            run,
            format!(
                "another global batch ({}) than its recipe ({})",
                setup.global_batch_size,
                global.map_or("none".to_owned(), |global| global.to_string())
            ),
        ));
    }
    let horizon = batch::horizon(&setup.spec, setup.global_batch_size, setup.data_samples);
    if setup.horizon != horizon || horizon.budget_samples != setup.budget_samples {
        return Err(edited(run, "other lengths than its own recipe".to_owned()));
    }
    Ok(setup)
}

/// What to say of a run whose own file contradicts what it was made from.
fn edited(run: &RunDir, contradiction: String) -> LaunchError {
    LaunchError::Usage {
        message: format!(
            "{} says {contradiction}: it was edited; put back a copy, or start a new run with another \
             --out",
            run.path().join(files::RUN).display()
        ),
    }
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
    planned: &Planned,
    request: &Request,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, LaunchError> {
    let mut setup = setup_of(run, recipe)?;
    let usage = |message: String| LaunchError::Usage { message };
    if let Some(shape) = &planned.model.shape
        && let Some(key) = difference(setup.model()?, shape)
    {
        return Err(usage(format!(
            "{} says another `{key}` of the model than the recipe and its config.json: one of them was \
             edited; undo it, or start a new run with another --out",
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
        state.micro_limit = go_on_from(&setup, state, request).micro_limit;
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
        (None, Some(weights)) => initial::check(weights, setup.model()?)?,
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
                Some(setup.model()?),
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
        own: None,
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
    let opened = pin::open(run.path(), pin).map_err(TrainError::from);
    let state = opened.and_then(|checkpoint| TrainState::from_checkpoint(&checkpoint));
    let Err(error) = state else {
        return Ok(());
    };
    let pinned = run.path().join(&pin.path);
    let others = checkpoint::list(run.path())?.committed;
    // Where only the training state is another version's, its own weights are as good as ever.
    let whole = matches!(error, TrainError::State { .. });
    let newest = others
        .into_iter()
        .rev()
        .find(|other| whole || other.path != pinned);
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

/// Refuses a pin that says other things than the checkpoint that it names. One that cannot be read is
/// [`verify`]'s business.
fn refuse_another_pin(run: &RunDir, pin: &Pin) -> Result<(), LaunchError> {
    let checkpoints = checkpoint::list(run.path())?.committed;
    let path = run.path().join(&pin.path);
    let committed = checkpoints.iter().find(|other| other.path == path);
    let Some(found) = committed.and_then(|committed| pin::of(committed, run.path()).ok()) else {
        return Ok(());
    };
    let told = |pin: &Pin| {
        format!(
            "step {}, {}, a next batch of {}",
            pin.step,
            count(pin.samples, "sample"),
            pin.batch
        )
    };
    if told(&found) == told(pin) {
        return Ok(());
    }
    Err(LaunchError::Usage {
        message: format!(
            "state.json of {} says other things of {} than the checkpoint itself: {} there, {} in \
             the checkpoint; it was edited: put back a copy, or the checkpoint's numbers",
            run.path().display(),
            pin.path,
            told(pin),
            told(&found)
        ),
    })
}

pub(super) fn wait_for_old_ranks(
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
                    "ranks of generation {last} still run after {} s: stop them (`fuser {}` names \
                     them), then resume",
                    OLD_RANKS.as_secs(),
                    run.generation(last).join(files::RANKS_LOCK).display()
                ),
            });
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// The first top-level key in which two values of a kind differ.
fn difference<T: Serialize>(one: &T, other: &T) -> Option<String> {
    let object = |value: &T| match serde_json::to_value(value) {
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
    fn a_run_whose_files_contradict_each_other_is_refused_before_it_is_planned() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(place.path(), BATCH, &[]);
        let setup = launched.prepared.setup.clone();
        let request = Request {
            resume: true,
            ..launched.request.clone()
        };
        let refused = |change: fn(&mut Setup)| {
            let mut edited = setup.clone();
            change(&mut edited);
            launched.run.write_setup(&edited).unwrap();
            let told = reached(&launched.run, &launched.recipe, &request).err();
            let told = told.map(|error| error.to_string());
            told.or_else(|| launched.resume(|_| {}).err())
        };
        assert_eq!(refused(|_| {}), None);
        for (change, expected) in [
            (
                (|setup| setup.global_batch_size = 13) as fn(&mut Setup),
                "another global batch (13) than its recipe (12)",
            ),
            (|setup| setup.budget_samples = Some(1), "other lengths than"),
            (
                |setup| {
                    if let Some(model) = &mut setup.model {
                        model.hidden_size = 16;
                    }
                },
                "another `hidden_size` of the model than the recipe",
            ),
        ] {
            let said = refused(change).unwrap();
            assert!(said.contains(expected), "{said}");
        }
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
