//! Memory that TrainingJobs of any content take in the controller's cache. The jobs are listed from an
//! API server in memory, as the controller lists them, and an allocator counts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use evenkeel::api::TrainingJob;
use evenkeel::operator::watched_jobs;
use evenkeel::plan::{PlanRequest, Reached, Worlds};
use evenkeel::recipe::{self, Request};
use futures::StreamExt;
use kube::Client;
use kube::core::error_boundary::{DeserializeGuard, InvalidObject};
use tokio::task::JoinSet;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Bytes that are allocated, and the most since [`measure`] began.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// Only one test allocates at a time.
static ALONE: Mutex<()> = Mutex::new(());

struct Counting;

// SAFETY: every call is passed on to the system's allocator; the counters do not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Result of `run`, the bytes that it still holds, and the most that it held.
fn measure<T>(name: &str, run: impl FnOnce() -> T) -> (T, usize, usize) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = run();
    let held = LIVE.load(Relaxed).saturating_sub(before);
    let peak = PEAK.load(Relaxed) - before;
    println!("{name}: holds {} KiB, peak {} KiB", held / KIB, peak / KIB);
    (result, held, peak)
}

/// Jobs by their number.
type Jobs = (usize, fn(usize) -> String);

/// Answers a list with a page of jobs, and a watch with silence.
async fn answer(
    State((count, job)): State<Jobs>,
    Query(query): Query<HashMap<String, String>>,
) -> Body {
    if query.contains_key("watch") {
        return Body::from_stream(futures::stream::pending::<Result<Bytes, std::io::Error>>());
    }
    let number = |name: &str| query.get(name).and_then(|value| value.parse().ok());
    let begin: usize = number("continue").unwrap_or(0);
    let end = count.min(begin + number("limit").unwrap_or(count));
    let next = if end < count {
        end.to_string()
    } else {
        String::new()
    };
    let mut text = format!(
        r#"{{"apiVersion":"evenkeel.dev/v1alpha1","kind":"TrainingJobList","metadata":{{"resourceVersion":"1","continue":"{next}"}},"items":["#
    );
    for index in begin..end {
        text += if index > begin { "," } else { "" };
        text += &job(index);
    }
    Body::from(text + "]}")
}

/// Cached and unreadable jobs after the first list.
fn listed(jobs: Jobs) -> (Vec<Arc<TrainingJob>>, Vec<InvalidObject>) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_all().build().unwrap();
    runtime.block_on(async {
        let router = Router::new().fallback(answer).with_state(jobs);
        let unreadable = Arc::new(Mutex::new(Vec::new()));
        let seen = unreadable.clone();
        let report = move |object| {
            seen.lock().unwrap().push(object);
            JoinSet::new()
        };
        let (known, events) = watched_jobs(&Client::new(router, "n"), None, report);
        tokio::select! {
            () = events.for_each(async |event| drop(event.unwrap())) => unreachable!("a watch never ends"),
            ready = known.wait_until_ready() => ready.unwrap(),
        }
        let unreadable = std::mem::take(&mut *unreadable.lock().unwrap());
        (known.state(), unreadable)
    })
}

/// A job as an API server writes it.
fn job(index: usize, metadata: &str, spec: &str, status: &str) -> String {
    format!(
        r#"{{"apiVersion":"evenkeel.dev/v1alpha1","kind":"TrainingJob","metadata":{{"name":"j{index}","namespace":"n","uid":"u{index}","resourceVersion":"1"{metadata}}},"spec":{{"image":"i","nodes":1,"checkpoint":{{"path":"/c"}}{spec}}},"status":{{{status}}}}}"#
    )
}

fn small(index: usize) -> String {
    job(index, "", r#","recipe":{"inline":"a: 1"}"#, "")
}

/// One job whose `podTemplate` is many small maps, 1.4 MB of text; the others are small.
fn many_maps(index: usize) -> String {
    if index > 0 {
        return small(index);
    }
    let maps = r#"{"a":0},"#.repeat(175_000);
    let spec = format!(r#","recipe":{{"inline":""}},"podTemplate":{{"x":[{maps}0]}}"#);
    job(index, "", &spec, "")
}

/// One job whose `podTemplate` is nested more deeply than JSON is decoded.
fn deep(index: usize) -> String {
    if index > 0 {
        return small(index);
    }
    let (open, close) = ("[".repeat(5000), "]".repeat(5000));
    let spec = format!(r#","recipe":{{"inline":""}},"podTemplate":{{"x":{open}{close}}}"#);
    job(index, "", &spec, "")
}

/// A job whose `managedFields` are many small maps.
fn many_managed_fields(index: usize) -> String {
    let fields: String = (0..70_000)
        .map(|n| format!(r#""f:{n:06}":{{"f:a":{{}}}},"#))
        .collect();
    let metadata = format!(
        r#","managedFields":[{{"manager":"m","operation":"Apply","fieldsType":"FieldsV1","fieldsV1":{{{fields}"f:z":{{}}}}}}]"#
    );
    job(index, &metadata, r#","recipe":{"inline":""}"#, "")
}

/// A planned job whose recipe has 512 KiB, with a status that an earlier version wrote: it repeats the recipe.
fn planned(index: usize) -> String {
    let text = format!("{index:08}").repeat(512 * KIB / 8);
    let spec = format!(r#","recipe":{{"inline":"{text}"}}"#);
    let status = format!(r#""recipe":{{"text":"{text}","hash":"{index}"}}"#);
    job(index, "", &spec, &status)
}

/// A job with long texts outside of its recipe.
fn wordy(index: usize) -> String {
    let value = "x".repeat(100 * KIB);
    let variable = format!(r#"{{"name":"A","value":"{value}"}}"#);
    let env = vec![variable; 12].join(",");
    let spec = format!(r#","recipe":{{"inline":"a: 1"}},"trainer":{{"env":[{env}]}}"#);
    job(index, "", &spec, "")
}

#[test]
fn one_pod_template_takes_no_more_memory_than_its_text() {
    let _alone = alone();
    let text = many_maps(0);
    assert!(text.len() > 1_400_000);
    // What the object takes as a tree.
    let decode = || serde_json::from_str::<DeserializeGuard<TrainingJob>>(&text).unwrap();
    let (_, _, tree) = measure("kube's guard", || drop(decode()));
    assert!(tree > 150 * MIB, "{tree}");

    let ((jobs, unreadable), held, peak) = measure("many maps", || listed((3, many_maps)));
    assert_eq!((jobs.len(), unreadable.len()), (2, 1));
    assert_eq!(unreadable[0].metadata.name.as_deref(), Some("j0"));
    assert!(peak < 24 * MIB, "{peak}");
    assert!(held < MIB, "{held}");
}

#[test]
fn managed_fields_take_no_more_memory_than_their_text() {
    let _alone = alone();
    assert!(many_managed_fields(0).len() > 1_200_000);
    let ((jobs, unreadable), held, peak) =
        measure("managed fields", || listed((1, many_managed_fields)));
    assert_eq!((jobs.len(), unreadable.len()), (1, 0));
    assert!(peak < 24 * MIB, "{peak}");
    assert!(held < MIB, "{held}");
}

#[test]
fn a_deep_job_hides_no_other() {
    let _alone = alone();
    let ((jobs, unreadable), ..) = measure("deep", || listed((3, deep)));
    assert_eq!((jobs.len(), unreadable.len()), (2, 1));
}

#[test]
fn the_cache_has_no_recipe_and_one_page_at_a_time() {
    let _alone = alone();
    const JOBS: usize = 1000;
    let ((jobs, _), held, peak) = measure("1000 planned jobs", || listed((JOBS, planned)));
    assert_eq!(jobs.len(), JOBS);
    assert!(held / JOBS < 16 * KIB, "{held}");
    // A page of five jobs of 1 MiB: chunks, body and text of the response, and one decoded page.
    assert!(peak - held < 32 * MIB, "{peak} {held}");
}

#[test]
fn long_texts_elsewhere_are_refused() {
    let _alone = alone();
    let ((jobs, unreadable), held, _) = measure("wordy jobs", || listed((20, wordy)));
    assert_eq!((jobs.len(), unreadable.len()), (0, 20));
    assert!(
        unreadable[0].error.contains("move long commands"),
        "{}",
        unreadable[0].error
    );
    assert!(held / 20 < 16 * KIB, "{held}");
}

/// A recipe that trains on files.
fn on_files(files: &str) -> String {
    format!(
        "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nmetadata: {{name: r}}\nspec:\n  \
         batch: {{global: 64, per_device_batch_size: 4}}\n  model: {{path: m}}\n  \
         budget: {{samples: 6400}}\n  data:\n    sequence_length: 32\n    train:\n{files}"
    )
}

#[test]
fn the_worlds_of_a_recipe_take_none_of_its_texts() {
    let _alone = alone();
    let comments = "      # a comment of thirty-two bytes\n".repeat(16 * KIB);
    let text = on_files("      - {path: a.jsonl}\n") + &comments;
    let path = "recipe.yaml".into();
    let request = Request {
        path,
        ..Request::default()
    };
    let copy = text.clone();
    let (worlds, held, _) = measure("worlds", || {
        let mut recipe = recipe::read_text(&request, copy).unwrap();
        recipe.sources.forget_texts();
        let worlds = Worlds::new(recipe, PlanRequest::gpus(1), None);
        let feasible = (1..=16).filter(|&world| worlds.is_feasible(world, Reached::default()));
        assert!(feasible.count() > 3);
        (worlds, text.clone())
    });
    drop(worlds);
    // The copy of the text that was made here is as large as the one that was dropped.
    assert!(held < 64 * KIB, "{held} of {}", text.len());
}
