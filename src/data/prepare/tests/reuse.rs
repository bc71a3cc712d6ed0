//! The same sources and settings give the same bytes and are prepared once.

use std::collections::BTreeMap;

use super::*;

/// Every file of a directory with its content.
fn content(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    let mut directories = vec![directory.to_path_buf()];
    while let Some(inner) = directories.pop() {
        for entry in std::fs::read_dir(inner).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else {
                let name = path.strip_prefix(directory).unwrap().to_path_buf();
                files.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    files
}

/// More documents than one chunk holds, of many lengths.
fn many() -> Case {
    let lines: String = (0..6_000u32)
        .map(|n| {
            format!(
                "{{\"text\": \"{}\"}}\n",
                "x".repeat((n * 7919 % 61) as usize + 1)
            )
        })
        .collect();
    let mut case = Case::with("a.jsonl", lines);
    case.data.sequence_length = 32;
    case.data.held_out = Some(0.1);
    case.data.train[0].weight = Some(0.9);
    case
}

#[test]
fn prepared_bytes_do_not_depend_on_threads_or_runs() {
    for packing in [false, true] {
        let mut case = many();
        case.data.packing = packing;
        let prepare = |threads: usize, name: &str| {
            let place = case.directory.path().join(name);
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build()
                .unwrap()
                .install(|| case.prepare_into(&place))
                .unwrap();
            content(&place)
        };
        let one = prepare(1, "one");
        assert_eq!(
            one.keys()
                .map(|path| path.display().to_string())
                .collect::<Vec<_>>(),
            [
                "evaluation/index.bin",
                "evaluation/tokens.bin",
                "manifest.json",
                "train/index.bin",
                "train/tokens.bin"
            ]
        );
        assert!(one == prepare(4, "four"));
        assert!(one == prepare(4, "again"));
    }
}

#[test]
fn unchanged_sources_and_settings_are_not_prepared_again() {
    let case = many();
    let first = case.prepare().unwrap();
    let modified = || {
        std::fs::metadata(case.place().join("manifest.json"))
            .unwrap()
            .modified()
            .unwrap()
    };
    let before = modified();
    let second = case.prepare().unwrap();
    assert!(!first.reused && second.reused);
    assert_eq!(first.manifest, second.manifest);
    assert_eq!(before, modified());
}

#[test]
fn every_relevant_setting_prepares_the_data_again() {
    let content = "{\"text\": \"abc\"}\n".repeat(20);
    let mut case = Case::with("a.jsonl", &content);
    case.write("b.jsonl", &content);
    case.prepare().unwrap();
    type Change = fn(&mut Case);
    let changes: [(&str, Change); 9] = [
        ("the same content elsewhere", |case| {
            case.data.train = vec![source("b.jsonl")]
        }),
        ("sequence length", |case| case.data.sequence_length = 3),
        ("packing", |case| case.data.packing = true),
        ("seed", |case| case.seed = 7),
        ("answers only", |case| case.data.answers_only = Some(false)),
        ("held out", |case| case.data.held_out = Some(1.0)),
        ("weight", |case| case.data.train[0].weight = Some(0.9)),
        ("columns", |case| {
            case.data.train[0].columns = vec!["text".to_string()]
        }),
        ("template", |case| {
            case.tokenizer.chat_template = Some("x".to_string())
        }),
    ];
    let reused: Vec<&str> = changes
        .into_iter()
        .filter_map(|(name, change)| {
            change(&mut case);
            case.prepare().unwrap().reused.then_some(name)
        })
        .collect();
    // The paths of the same bytes and the spelling of a default do not matter.
    assert_eq!(reused, ["the same content elsewhere", "answers only"]);
}

#[test]
fn a_resumed_run_keeps_its_data_when_a_source_changes() {
    let mut case = many();
    case.prepare().unwrap();
    let before = content(&case.place());
    case.resume = true;
    assert!(case.prepare().unwrap().reused);
    case.write("a.jsonl", "{\"text\": \"other\"}\n");
    case.seed = 2;
    insta::assert_snapshot!(case.refusal());
    assert!(content(&case.place()) == before);
}

#[test]
fn a_run_without_its_manifest_does_not_get_other_data() {
    type Loss = fn(&Path);
    let losses: [Loss; 4] = [
        |place| std::fs::remove_dir_all(place).unwrap(),
        |place| std::fs::remove_file(place.join("manifest.json")).unwrap(),
        |place| std::fs::write(place.join("manifest.json"), "{").unwrap(),
        |place| {
            let path = place.join("manifest.json");
            let text = std::fs::read_to_string(&path).unwrap();
            let other = text.replace("\"version\": 1", "\"version\": 0");
            assert_ne!(other, text);
            std::fs::write(&path, other).unwrap();
        },
    ];
    for lose in losses {
        let mut case = many();
        let began = case.prepare().unwrap().manifest.fingerprint;
        let whole = content(&case.place());
        let source = std::fs::read(case.directory.path().join("a.jsonl")).unwrap();
        case.resume = true;
        lose(&case.place());
        let left = case.place().exists().then(|| content(&case.place()));

        let message = case.refusal();
        assert!(
            message.contains("the record of the data that the run began with is lost"),
            "{message}"
        );
        case.fingerprint = Some(began);
        case.write("a.jsonl", "{\"text\": \"other\"}\n");
        let message = case.refusal();
        assert!(
            message.contains("began with other data: their fingerprint was"),
            "{message}"
        );
        let now = case.place().exists().then(|| content(&case.place()));
        assert!(now == left, "a refusal changed the data");

        // The same data may be prepared again if no other file is in the way.
        case.write("a.jsonl", source);
        if case.place().join("manifest.json").exists() || left.is_none() {
            assert!(!case.prepare().unwrap().reused);
            assert!(content(&case.place()) == whole);
        }
    }
}

#[test]
fn progress_ends_at_all_bytes_and_counts_the_samples() {
    let case = many();
    let mut seen: Vec<Progress> = Vec::new();
    let request = PrepareRequest {
        data: &case.data,
        tokenizer: &case.tokenizer,
        objective: case.objective,
        seed: case.seed,
        model: None,
        vocab_size: None,
        base: case.directory.path(),
        directory: &case.place(),
        began_in: None,
        fingerprint: None,
        key: &|path| path.to_string(),
        stopped: &|| false,
    };
    let prepared = prepare(&request, &mut |progress| seen.push(progress)).unwrap();
    let size = std::fs::metadata(case.directory.path().join("a.jsonl"))
        .unwrap()
        .len();
    let (checks, tokens): (Vec<Progress>, Vec<Progress>) = seen
        .iter()
        .partition(|progress| progress.phase == Phase::Checksums);
    for phase in [&checks, &tokens] {
        assert!(phase.is_sorted_by_key(|progress| (progress.bytes, progress.samples)));
        assert_eq!(phase.last().unwrap().bytes, size);
    }
    assert!(seen.iter().all(|progress| progress.total == size));
    let manifest = prepared.manifest;
    let evaluation = manifest.evaluation.unwrap().samples;
    assert_eq!(
        tokens.last().unwrap().samples,
        manifest.train.samples + evaluation
    );
}
