//! Resumes a run: same recipe, unchanged data, no old rank alive. A refused resume leaves the run
//! unchanged.

use std::time::{Duration, Instant};

use serde::Serialize;

use super::checkpoints::Checkpoints;
use super::{LaunchError, Phase, Planned, Prepared, Request, RunDir, RunState, initial};
use crate::bucket::Cause;
use crate::checkpoint::{CheckpointError, Committed};
use crate::data::{self, PrepareRequest, Progress};
use crate::lifecycle::{CheckpointRef, files};
use crate::plan::{self, Reached, Runner};
use crate::recipe::Recipe;
use crate::train::{BuiltIn, Run, TrainError, rank};
use crate::util::format::count;

/// Longest wait for ranks of a dead launcher, which commit a checkpoint and exit.
const OLD_RANKS: Duration = Duration::from_secs(60);

/// Progress of the run to resume, and what runs it from now on. A different memory limit allows larger micro-batches
/// again; without one the run keeps its own.
pub fn continued(
    run_dir: &RunDir,
    recipe: &Recipe,
    request: &Request,
) -> Result<(Reached, Runner), LaunchError> {
    if !request.resume {
        return Ok((Reached::default(), request.runner));
    }
    let run = run_of(run_dir, recipe)?;
    let state = run_dir.state()?.unwrap_or_default();
    if let Some(checkpoint_ref) = &state.checkpoint_ref {
        let checkpoints = Checkpoints::of(run_dir, &run)?;
        refuse_contradictory_reference(run_dir, &checkpoints, checkpoint_ref)?;
    }
    Ok((progress_of(&run, &state, request), runner_of(&run, request)))
}

/// What runs a resumed run.
fn runner_of(run: &Run, request: &Request) -> Runner {
    match request.runner {
        Runner::BuiltIn {
            device,
            rank_memory: None,
        } => Runner::BuiltIn {
            device,
            rank_memory: run.runner().rank_memory(),
        },
        runner => runner,
    }
}

/// The progress of a run for its next plans.
fn progress_of(run: &Run, state: &RunState, request: &Request) -> Reached {
    let reached = state.reached(run);
    if memory_changes(run, request) {
        Reached {
            per_device_batch_size_limit: None,
            ..reached
        }
    } else {
        reached
    }
}

/// Reads the run and checks that it matches the recipe.
pub(super) fn run_of(run_dir: &RunDir, recipe: &Recipe) -> Result<Run, LaunchError> {
    let run = run_dir.run()?;
    let mut spec = recipe.spec.clone();
    if spec.trainer.is_external() && run.spec.trainer.is_external() {
        // The command may be corrected between two launches; it does not change the batch.
        spec.trainer.clone_from(&run.spec.trainer);
    }
    if let Some(first) = run.spec.batch.gpus {
        spec = spec.of_world(first);
    }
    if let Some(key) = difference(&run.spec, &spec) {
        return Err(LaunchError::usage(format!(
            "{} was launched with another `{key}`; resume it with its original recipe and \
                 overrides (`{} {}`), or start a new run with another --out",
            run_dir.path().display(),
            run.recipe_path.display(),
            run.overrides.join(" ")
        )));
    }
    let global = plan::global_batch(&spec);
    if global != Some(run.global_batch_size) {
        return Err(edited(
            run_dir,
            format!(
                "another global batch ({}) than its recipe ({})",
                run.global_batch_size,
                global.map_or("none".to_owned(), |global| global.to_string())
            ),
        ));
    }
    let horizon = plan::horizon(&run.spec, run.global_batch_size, run.data_samples);
    if run.horizon != horizon {
        return Err(edited(
            run_dir,
            "other lengths than its own recipe".to_owned(),
        ));
    }
    Ok(run)
}

/// The error of a run file that contradicts the recipe.
fn edited(run_dir: &RunDir, contradiction: String) -> LaunchError {
    LaunchError::usage(format!(
        "{} was edited: it has {contradiction}; restore a copy, or start a new run with another \
             --out",
        run_dir.path().join(files::RUN).display()
    ))
}

/// Whether the resume changes the memory of the ranks.
fn memory_changes(run: &Run, request: &Request) -> bool {
    let asked = request.runner.rank_memory();
    let kept = run.runner();
    asked.is_some() && asked != kept.rank_memory() || request.runner.device() != kept.device()
}

/// Prepares a resume of the run in the directory.
pub(super) fn resume(
    run_dir: &RunDir,
    recipe: &Recipe,
    planned: &Planned,
    request: &Request,
    progress: &mut dyn FnMut(Progress),
) -> Result<Prepared, LaunchError> {
    let run = run_of(run_dir, recipe)?;
    if let Some(shape) = &planned.model.shape
        && let Some(key) = difference(&run.built_in()?.model, shape)
    {
        return Err(LaunchError::usage(format!(
            "{} has another `{key}` of the model than the recipe and its config.json; one of them was \
             edited: undo that, or start a new run with another --out",
            run_dir.path().join(files::RUN).display()
        )));
    }
    let checkpoints = Checkpoints::of(run_dir, &run)?;
    let mut state = run_dir.state()?;
    if let Some(state) = &state {
        refuse_ended(run_dir, &run, state)?;
    }
    if state.is_none() && checkpoints.exist()? {
        return Err(LaunchError::usage(format!(
            "{} contains checkpoints but no state.json, which lists the valid ones; restore a \
             copy of it, or start a new run with another --out",
            run_dir.path().display()
        )));
    }
    wait_for_old_ranks(run_dir, state.as_ref(), request)?;
    // Ranks may have committed checkpoints after their launcher died.
    if let Some(state) = &mut state {
        state.checkpoint_ref = newest(&checkpoints, state)?;
        state.per_device_batch_size_limit =
            progress_of(&run, state, request).per_device_batch_size_limit;
    }
    let pinned = state
        .as_ref()
        .is_none_or(|state| state.checkpoint_ref.is_some());
    if !pinned && checkpoints.exist()? {
        return Err(LaunchError::usage(format!(
            "{} contains checkpoints, but its state.json lists none of them; restore a copy of it, or \
             start a new run with another --out",
            run_dir.path().display()
        )));
    }
    let mut notes = Vec::new();
    let built_in = run.built_in()?;
    let frozen_digest = initial::unchanged(built_in, &run.spec)?;
    match (
        state
            .as_mut()
            .filter(|state| state.checkpoint_ref.is_some()),
        &built_in.weights,
    ) {
        (Some(state), _) => notes.extend(verify(&checkpoints, state, &recipe.key("model.path"))?),
        (None, Some(weights)) => initial::check(weights, &built_in.model)?,
        (None, None) => {}
    }
    let directory = Run::data(run_dir.path());
    let data = data::prepare(
        &PrepareRequest {
            began_in: Some(&directory),
            fingerprint: built_in.data_fingerprint.as_deref(),
            stopped: &|| request.stopped(),
            ..PrepareRequest::of(
                &recipe.spec,
                &recipe.keys(),
                Some(&built_in.model),
                &run.base,
                &directory,
            )
        },
        progress,
    )?;
    // All checks have passed. The state is written first: a micro-batch limit dropped too early is
    // found again, while one kept for other memory would remain.
    if memory_changes(&run, request)
        && let Some(state) = &state
    {
        run_dir.write_state(state)?;
    }
    let runner = runner_of(&run, request);
    let resumed = Run {
        device_memory: request.device_memory,
        device: runner.device(),
        built_in: Some(BuiltIn {
            rank_memory: runner.rank_memory(),
            data_fingerprint: Some(data.manifest.fingerprint),
            frozen_digest,
            ..built_in.clone()
        }),
        ..run.clone()
    };
    if resumed != run {
        run_dir.write_run(&resumed)?;
    }
    Ok(Prepared {
        worlds: planned.of_run(&resumed),
        run: resumed,
        state,
        external: None,
        notes: notes.into_iter().chain(data.notes).collect(),
        facts: Vec::new(),
    })
}

/// Refuses a run that is finished or cancelled; no launcher continues it in any world.
pub fn refuse_ended(run_dir: &RunDir, run: &Run, state: &RunState) -> Result<(), LaunchError> {
    let ended = match state.phase {
        Phase::Finished => "finished, its budget is exhausted",
        Phase::Cancelled => "cancelled",
        _ => return Ok(()),
    };
    let place = run_dir.path().display();
    let recipe = run.recipe();
    let model = recipe.key("model.path");
    let weights = match &state.checkpoint_ref {
        None => String::new(),
        Some(_) if run.bucket.is_some() => {
            format!(" from its weights, {model}=DIR after `evenkeel export {place} --out DIR`")
        }
        Some(checkpoint_ref) => format!(
            " from its weights, {model}={}",
            run_dir.path().join(&checkpoint_ref.path).display()
        ),
    };
    Err(LaunchError::usage(format!(
        "{} is {ended}; to train more, start a new run{weights}",
        run_dir.path().display()
    )))
}

/// The newest checkpoint of the run's last generation, else the referenced one. Checkpoints of
/// earlier generations after the start of the last one are not in the lineage.
fn newest(
    checkpoints: &Checkpoints<'_>,
    state: &RunState,
) -> Result<Option<CheckpointRef>, LaunchError> {
    let Some(last) = state.generations.last() else {
        return Ok(state.checkpoint_ref.clone());
    };
    let found = checkpoints
        .list()?
        .committed
        .into_iter()
        .filter(|committed| committed.generation == last.number)
        .max_by_key(|committed| committed.samples);
    let pinned = state.committed_samples();
    match found.filter(|committed| committed.samples > pinned) {
        Some(committed) => Ok(Some(checkpoints.refer(&committed)?)),
        None => Ok(state.checkpoint_ref.clone()),
    }
}

/// Verifies the checkpoint to start from. If it is damaged, the run falls back to the newest whole checkpoint
/// before it, with everything in it; returns a note about that. Without one the error names another
/// checkpoint of the run, whose weights remain usable. `path_key`: the recipe's key of the model path.
fn verify(
    checkpoints: &Checkpoints<'_>,
    state: &mut RunState,
    path_key: &str,
) -> Result<Option<String>, LaunchError> {
    let Some(checkpoint_ref) = &state.checkpoint_ref else {
        return Ok(None);
    };
    let Err(error) = checkpoints.read(checkpoint_ref) else {
        return Ok(None);
    };
    if is_damage(&error)
        && let Some(note) = fall_back(checkpoints, state, &error.to_string())?
    {
        return Ok(Some(note));
    }
    let Some(checkpoint_ref) = &state.checkpoint_ref else {
        return Ok(None);
    };
    let pinned = checkpoints.path(checkpoint_ref);
    let others = checkpoints.list()?.committed;
    // If only the training state has another version, its weights are still valid.
    let whole = matches!(error, TrainError::State { .. });
    let newest = others
        .into_iter()
        .rev()
        .find(|other| whole || other.path != pinned);
    let way_out = match newest {
        Some(other) => format!(
            "restore a copy, or start a new run from the weights of {} ({}) with {path_key}",
            checkpoints.place(&other.path),
            count(other.samples, "sample")
        ),
        None => "restore a copy; this run has no other checkpoint, so without a copy it must \
                 restart"
            .into(),
    };
    let error = Box::new(error);
    Err(LaunchError::Pinned { error, way_out })
}

/// As [`verify`], for a generation whose ranks have refused its start checkpoint. Returns a note if the run
/// falls back to an older one; `None` if the checkpoint is whole or no other is.
pub(super) fn fall_back_if_damaged(
    checkpoints: &Checkpoints<'_>,
    state: &mut RunState,
) -> Result<Option<String>, LaunchError> {
    let Some(checkpoint_ref) = &state.checkpoint_ref else {
        return Ok(None);
    };
    match checkpoints.read_whole(checkpoint_ref) {
        Err(error) if is_damage(&error) => fall_back(checkpoints, state, &error.to_string()),
        _ => Ok(None),
    }
}

/// Whether the checkpoint is lost. A state of another version, or a file that cannot be opened now, is not.
fn is_damage(error: &TrainError) -> bool {
    use CheckpointError::{Bucket, Damaged, Manifest, NotCommitted, NotThePinned};
    match error {
        TrainError::Checkpoint(Bucket(error)) => {
            matches!(error.cause, Cause::Damaged | Cause::Missing)
        }
        TrainError::Checkpoint(error) => matches!(
            error,
            Damaged { .. } | Manifest { .. } | NotCommitted { .. } | NotThePinned { .. }
        ),
        _ => false,
    }
}

/// References the newest whole checkpoint before the referenced one, which is damaged as `problem` says.
/// Returns a note, or `None` if there is no such checkpoint.
fn fall_back(
    checkpoints: &Checkpoints<'_>,
    state: &mut RunState,
    problem: &str,
) -> Result<Option<String>, LaunchError> {
    let Some(damaged) = &state.checkpoint_ref else {
        return Ok(None);
    };
    let mut older = lineage(state, checkpoints.list()?.committed);
    let path = checkpoints.path(damaged);
    older.retain(|committed| committed.path != path && committed.samples <= damaged.samples);
    let whole = older.iter().rev().find_map(|committed| {
        let checkpoint_ref = checkpoints.refer(committed).ok()?;
        checkpoints.read_whole(&checkpoint_ref).ok()?;
        Some(checkpoint_ref)
    });
    let Some(whole) = whole else {
        return Ok(None);
    };
    let note = format!(
        "checkpoint {} cannot be used: {problem}; the run continues from {} ({}), the last good one, with its \
         optimiser, schedule and ledger, and repeats {}",
        damaged.path,
        whole.path,
        count(whole.samples, "sample"),
        count(damaged.samples.saturating_sub(whole.samples), "sample")
    );
    state.checkpoint_ref = Some(whole);
    Ok(Some(note))
}

/// The checkpoints in the history of the last generation, by samples. A generation's checkpoints after the
/// start of a later one are not in it: the later one repeated those samples.
fn lineage(state: &RunState, committed: Vec<Committed>) -> Vec<Committed> {
    let rows = &state.generations;
    let mut found = committed;
    found.retain(|committed| {
        let known = rows.iter().any(|row| row.number == committed.generation);
        let later = rows.iter().filter(|row| row.number > committed.generation);
        let mut starts = later.filter_map(|row| row.start_samples);
        known && starts.all(|start| committed.samples <= start)
    });
    found.sort_by_key(|committed| (committed.samples, committed.generation));
    found
}

/// Refuses a checkpoint reference that contradicts its checkpoint. [`verify`] handles an unreadable
/// one.
fn refuse_contradictory_reference(
    run_dir: &RunDir,
    checkpoints: &Checkpoints<'_>,
    checkpoint_ref: &CheckpointRef,
) -> Result<(), LaunchError> {
    let path = checkpoints.path(checkpoint_ref);
    let listed = checkpoints.list()?.committed;
    let committed = listed.iter().find(|other| other.path == path);
    let Some(found) = committed.and_then(|committed| checkpoints.refer(committed).ok()) else {
        return Ok(());
    };
    let describe = |checkpoint_ref: &CheckpointRef| {
        format!(
            "step {}, {}, a next batch of {}",
            checkpoint_ref.step,
            count(checkpoint_ref.samples, "sample"),
            checkpoint_ref.batch
        )
    };
    if describe(&found) == describe(checkpoint_ref) {
        return Ok(());
    }
    Err(LaunchError::usage(format!(
        "state.json of {} was edited and contradicts {}: {} in state.json, {} in \
             the checkpoint; restore a copy, or set the checkpoint's numbers",
        run_dir.path().display(),
        checkpoint_ref.path,
        describe(checkpoint_ref),
        describe(&found)
    )))
}

pub(super) fn wait_for_old_ranks(
    run_dir: &RunDir,
    state: Option<&RunState>,
    request: &Request,
) -> Result<(), LaunchError> {
    let last = run_dir.last_generation(state.unwrap_or(&RunState::default()))?;
    let since = Instant::now();
    // Generation 0 never exists and has no ranks.
    while rank::any_alive(&run_dir.generation(last))? {
        if request.stopped() {
            return Err(LaunchError::Stopped);
        }
        if since.elapsed() > OLD_RANKS {
            return Err(LaunchError::usage(format!(
                "ranks of generation {last} still run after {} s; stop them (`fuser {}` lists \
                     them), then resume",
                OLD_RANKS.as_secs(),
                run_dir.generation(last).join(files::RANKS_LOCK).display()
            )));
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// The first top-level key in which two values of one type differ.
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
    use safetensors::tensor::Dtype;

    use crate::checkpoint::tensor_file::header;
    use crate::engine::ModelConfig;
    use crate::launch::run_dir::GenerationRow;
    use crate::launch::testing::Launched;
    use crate::lifecycle::Reason;

    const BATCH: &str = "batch: {global: 12, per_device_batch_size: 2}";

    #[test]
    fn only_checkpoints_before_every_later_start_are_in_the_lineage() {
        let row = |number, start_samples| GenerationRow {
            number,
            reason: Reason::Started,
            world: 1,
            formula: String::new(),
            start_samples: Some(start_samples),
            created: 0.0,
            first_step_seconds: None,
            call: None,
        };
        let committed = |generation, samples| Committed {
            path: format!("gen-{generation}/step-{samples:07}").into(),
            generation,
            step: samples,
            samples,
            checksum: "0".repeat(32).parse().unwrap(),
        };
        // Generation 2 was lost after its checkpoint at 48 was damaged; generation 3 repeated from 36.
        let state = RunState {
            generations: vec![row(1, 0), row(2, 24), row(3, 36)],
            ..RunState::default()
        };
        let all = vec![
            committed(1, 12),
            committed(1, 24),
            // Committed by a fenced rank after generation 2 had started.
            committed(1, 30),
            committed(2, 36),
            committed(2, 48),
            committed(3, 48),
            committed(4, 60),
        ];
        let paths = |committed: Vec<Committed>| -> Vec<String> {
            let paths = committed.iter().map(|c| c.path.display().to_string());
            paths.collect()
        };
        assert_eq!(
            paths(lineage(&state, all)),
            [
                "gen-1/step-0000012",
                "gen-1/step-0000024",
                "gen-2/step-0000036",
                "gen-3/step-0000048"
            ]
        );
    }

    #[test]
    fn a_run_does_not_resume_with_other_data_after_its_data_are_lost() {
        let place = tempfile::tempdir().unwrap();
        let corpus = place.path().join("corpus.jsonl");
        std::fs::write(&corpus, "{\"text\": \"abcdefgh\"}\n".repeat(100)).unwrap();
        let lines = format!(
            "{BATCH}\ntokenizer: {{path: byte}}\ndata: {{sequence_length: 8, train: [{{path: {}}}]}}",
            corpus.display()
        );
        let launched = Launched::at(place.path(), &lines, &[]);
        let data = Run::data(launched.run_dir.path());
        std::fs::remove_dir_all(&data).unwrap();
        assert!(launched.resume(|_| {}).is_ok());
        std::fs::remove_dir_all(&data).unwrap();
        std::fs::write(&corpus, "{\"text\": \"another\"}\n".repeat(100)).unwrap();
        let message = launched.resume(|_| {}).err().unwrap();
        assert!(
            message.contains("the run began with other data"),
            "{message}"
        );
        assert!(
            message.ends_with("undo the change, or start a new run"),
            "{message}"
        );
        assert!(!data.exists());
    }

    /// The last byte of the weights, which is far behind the first MiB.
    #[test]
    fn a_run_does_not_resume_with_another_reference_model() {
        let place = tempfile::tempdir().unwrap();
        let rows = place.path().join("rows.jsonl");
        let row = "{\"prompt\": \"1+1=\", \"chosen\": \"2\", \"rejected\": \"3\"}\n";
        std::fs::write(&rows, row.repeat(60)).unwrap();
        let model = place.path().join("model");
        std::fs::create_dir(&model).unwrap();
        let sizes = serde_json::json!({
            "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 70_000, "max_position_embeddings": 16,
        });
        std::fs::write(model.join("config.json"), sizes.to_string()).unwrap();
        let shape = ModelConfig::from_json(&sizes).unwrap();
        let layout = crate::engine::layout(&shape);
        let parameters = layout.units.iter().flat_map(|unit| &unit.parameters);
        let tensors = parameters.map(|it| (it.name.clone(), it.shape.as_slice()));
        let (mut bytes, length) = header(tensors, Dtype::F32).unwrap();
        bytes.resize(bytes.len() + length as usize, 0);
        assert!(bytes.len() > 2 << 20);
        let weights = model.join("model.safetensors");
        std::fs::write(&weights, &bytes).unwrap();
        let lines = format!(
            "{BATCH}\ntokenizer: {{path: byte}}\ndata: {{sequence_length: 8, train: [{{path: {}}}]}}",
            rows.display()
        );
        let path = format!("model.path={}", model.display());
        for objective in ["dpo", "orpo"] {
            let place = tempfile::tempdir().unwrap();
            let objective_of = format!("objective={objective}");
            let overrides = [&objective_of, &path, "model.config.vocab_size=70000"];
            let launched = Launched::at(place.path(), &lines, &overrides);
            assert!(launched.resume(|_| {}).is_ok());
            *bytes.last_mut().unwrap() ^= 1;
            std::fs::write(&weights, &bytes).unwrap();
            let refused = launched.resume(|_| {}).err();
            let refused = refused.map(|it| it.replace(&model.display().to_string(), "[model]"));
            match objective {
                "dpo" => {
                    insta::assert_snapshot!(refused.unwrap(), @"the weights of the reference model have changed since the launch, in [model]; put back those of the launch, or start a new run")
                }
                _ => assert_eq!(refused, None),
            }
        }
    }

    #[test]
    fn a_run_of_an_older_version_resumes_with_its_manifest_and_keeps_the_fingerprint() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(place.path(), BATCH, &[]);
        let mut old = launched.prepared.run.clone();
        old.built_in.as_mut().unwrap().data_fingerprint = None;
        launched.run_dir.write_run(&old).unwrap();
        assert!(launched.resume(|_| {}).is_ok());
        assert_eq!(launched.run_dir.run().unwrap(), launched.prepared.run);
    }

    #[test]
    fn contradictory_run_files_are_refused_before_planning() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(place.path(), BATCH, &[]);
        let run = launched.prepared.run.clone();
        let request = Request {
            resume: true,
            ..launched.request.clone()
        };
        let refused = |change: fn(&mut Run)| {
            let mut edited = run.clone();
            change(&mut edited);
            launched.run_dir.write_run(&edited).unwrap();
            let error = continued(&launched.run_dir, &launched.recipe, &request).err();
            let error = error.map(|error| error.to_string());
            error.or_else(|| launched.resume(|_| {}).err())
        };
        assert_eq!(refused(|_| {}), None);
        for (change, expected) in [
            (
                (|run| run.global_batch_size = 13) as fn(&mut Run),
                "another global batch (13) than its recipe (12)",
            ),
            (
                |run| run.horizon.budget_samples = Some(1),
                "other lengths than",
            ),
            (
                |run| {
                    if let Some(built_in) = &mut run.built_in {
                        built_in.model.hidden_size = 16;
                    }
                },
                "another `hidden_size` of the model than the recipe",
            ),
        ] {
            let message = refused(change).unwrap();
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_finished_run_is_refused_and_its_weights_are_offered() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(place.path(), BATCH, &[]);
        let checkpoint_ref = CheckpointRef {
            path: "gen-1/step-0000004".to_owned(),
            step: 4,
            samples: 48,
            batch: 12,
            checksum: String::new(),
        };
        let mut state = RunState {
            checkpoint_ref: Some(checkpoint_ref),
            ..RunState::default()
        };
        assert!(refuse_ended(&launched.run_dir, &launched.prepared.run, &state).is_ok());
        state.phase = Phase::Finished;
        launched.run_dir.write_state(&state).unwrap();
        let message = launched.resume(|_| {}).err().unwrap();
        let weights = launched.run_dir.path().join("gen-1/step-0000004");
        let way_out = format!(
            "a new run from its weights, model.path={}",
            weights.display()
        );
        assert!(message.ends_with(&way_out), "{message}");
    }

    #[test]
    fn a_resume_with_another_memory_limit_drops_the_micro_batch_limit() {
        let place = tempfile::tempdir().unwrap();
        let launched = Launched::at(place.path(), BATCH, &[]);
        let starved = RunState {
            per_device_batch_size_limit: Some(1),
            ..RunState::default()
        };
        launched.run_dir.write_state(&starved).unwrap();
        let limit = || {
            launched
                .run_dir
                .state()
                .unwrap()
                .unwrap()
                .per_device_batch_size_limit
        };
        launched.resume(|_| {}).unwrap();
        assert_eq!(limit(), Some(1));
        // The launcher dies before it starts a process, so only the files remain.
        launched
            .resume(|request| {
                request.runner = crate::plan::Runner::BuiltIn {
                    device: request.runner.device(),
                    rank_memory: Some(1 << 30),
                };
            })
            .unwrap();
        let runner = launched.run_dir.run().unwrap().runner();
        assert_eq!(runner.rank_memory(), Some(1 << 30));
        assert_eq!(limit(), None);
        // The plan that a later resume shows is that of the limit which the run keeps.
        let request = Request {
            resume: true,
            ..launched.request.clone()
        };
        let (_, planned) = continued(&launched.run_dir, &launched.recipe, &request).unwrap();
        assert_eq!(planned, runner);
    }
}
