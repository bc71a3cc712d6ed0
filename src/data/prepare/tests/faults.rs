//! Damaged stores, full disks, and preparations that fail midway.

use super::*;
use crate::data::dataset::{INDEX, PACKS, TOKENS};

fn prepared() -> Case {
    let case = Case::with("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"defg\"}\n");
    case.prepare().unwrap();
    case
}

fn file(case: &Case, name: &str) -> PathBuf {
    case.place().join("train").join(name)
}

/// Changes a file of the store.
fn edit(case: &Case, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let path = file(case, name);
    let mut bytes = std::fs::read(&path).unwrap();
    change(&mut bytes);
    std::fs::write(path, bytes).unwrap();
}

/// The error of opening and reading everything, without this machine's directory.
fn complaint(case: &Case) -> String {
    let base = case.directory.path().display().to_string();
    let read = || -> Result<(), DataError> {
        let data = Dataset::train(&case.place())?;
        for index in 0..data.len() {
            data.sample(index)?;
        }
        Ok(())
    };
    read().unwrap_err().to_string().replace(&base, "DIR")
}

#[test]
fn a_stopped_preparation_leaves_nothing_at_any_point() {
    let text = "{\"text\": \"abc\"}\n{\"text\": \"defg\"}\n".repeat(20);
    let mut case = Case::with("a.jsonl", text);
    case.data.held_out = Some(4.0);
    case.data.train[0].weight = Some(0.9);
    let run = case.place().parent().unwrap().to_path_buf();
    let stopped_at = |case: &mut Case, patience: usize| {
        case.patience = Some(AtomicUsize::new(patience));
        match case.prepare() {
            Err(DataError::Stopped) => true,
            done => {
                done.unwrap();
                false
            }
        }
    };
    let mut patience = 0;
    while stopped_at(&mut case, patience) {
        let left = std::fs::read_dir(&run).into_iter().flatten().count();
        assert_eq!(left, 0, "stopped when asked {patience} times");
        patience += 1;
    }
    // The stop is checked for every document: when it is counted, chosen, encoded and held out.
    assert!(patience > 100, "{patience}");

    // An existing store is only checked.
    case.resume = true;
    assert!(stopped_at(&mut case, 2));
    case.patience = None;
    assert!(case.prepare().unwrap().reused);
}

#[test]
fn damage_is_reported_and_repaired_by_preparing_again() {
    type Damage = fn(&Case);
    let damages: [(&str, Damage); 8] = [
        ("tokens cut off", |case| {
            edit(case, TOKENS, |bytes| bytes.truncate(5))
        }),
        ("index cut off", |case| {
            edit(case, INDEX, |bytes| bytes.truncate(31))
        }),
        ("no index", |case| {
            std::fs::remove_file(file(case, INDEX)).unwrap()
        }),
        ("no tokens", |case| {
            std::fs::remove_file(file(case, TOKENS)).unwrap()
        }),
        ("id beyond the vocabulary", |case| {
            edit(case, TOKENS, |bytes| bytes[3] = 0xff)
        }),
        ("sample beyond the end", |case| {
            edit(case, INDEX, |bytes| bytes[18] = 1)
        }),
        ("sample without length", |case| {
            edit(case, INDEX, |bytes| bytes[8] = 0)
        }),
        ("sample too long", |case| {
            edit(case, INDEX, |bytes| bytes[11] = 0xff)
        }),
    ];
    let mut complaints = Vec::new();
    for (what, damage) in damages {
        let case = prepared();
        damage(&case);
        complaints.push(format!("{what}: {}", complaint(&case)));
        let mended = case.prepare().unwrap();
        assert!(!mended.reused, "{what}");
        assert_eq!(text(&case.samples()[1]), "^defg$");
    }
    insta::assert_snapshot!(complaints.join("\n"));
}

#[test]
fn an_edited_byte_is_found_before_the_data_is_used_again() {
    let case = prepared();
    // The store is still valid, but holds other data.
    edit(&case, TOKENS, |bytes| bytes[2] = b'x');
    assert_eq!(text(&all(&case.open(Part::Train).unwrap())[0]), "^xbc$");
    assert!(!case.prepare().unwrap().reused);
    assert_eq!(text(&all(&case.open(Part::Train).unwrap())[0]), "^abc$");
}

#[test]
fn an_invalid_manifest_is_reported_and_replaced() {
    let case = prepared();
    let path = case.place().join("manifest.json");
    let text = std::fs::read_to_string(&path).unwrap();
    let half = &text[..text.len() / 2];
    let newer = text.replacen("\"version\": 1", "\"version\": 9", 1);
    let mut complaints = Vec::new();
    for content in ["", half, "[]", &newer] {
        std::fs::write(&path, content).unwrap();
        complaints.push(complaint(&case));
        assert!(!case.prepare().unwrap().reused);
    }
    std::fs::remove_file(&path).unwrap();
    complaints.push(complaint(&case));
    insta::assert_snapshot!(complaints.join("\n"));
}

#[test]
fn a_store_truncated_during_reading_is_an_error_of_that_sample() {
    let case = prepared();
    let data = case.open(Part::Train).unwrap();
    edit(&case, TOKENS, |bytes| bytes.truncate(12));
    assert_eq!(text(&data.sample(0).unwrap()), "^abc$");
    let error = data.sample(1).unwrap_err().to_string();
    assert!(error.contains("tokens.bin"), "{error}");
}

#[test]
fn a_failed_preparation_leaves_nothing_behind() {
    let lines: String = (0..5_000)
        .map(|n| format!("{{\"text\": \"{n}\"}}\n"))
        .collect();
    let case = Case::with("a.jsonl", format!("{lines}{{\"text\": }}\n"));
    let error = case.refusal();
    assert!(
        error.starts_with("DIR/a.jsonl:5001: malformed JSON"),
        "{error}"
    );
    let run = case.place().parent().unwrap().to_path_buf();
    assert_eq!(std::fs::read_dir(&run).unwrap().count(), 0);

    // An older store does not change either.
    case.write("a.jsonl", &lines);
    case.prepare().unwrap();
    case.write("a.jsonl", "{\"text\": 1}\n");
    case.refusal();
    assert_eq!(case.open(Part::Train).unwrap().len(), 5_000);
    assert_eq!(std::fs::read_dir(&run).unwrap().count(), 1);
}

#[test]
fn leftovers_of_a_killed_preparation_are_removed() {
    let case = Case::with("a.jsonl", "{\"text\": \"abc\"}\n");
    case.write("run/.data.partial/train/tokens.bin", "half");
    case.prepare().unwrap();
    let run = case.place().parent().unwrap().to_path_buf();
    assert_eq!(std::fs::read_dir(&run).unwrap().count(), 1);
}

#[test]
fn a_directory_without_prepared_data_is_not_replaced() {
    let case = Case::with("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"defg\"}\n");
    std::fs::create_dir_all(case.place()).unwrap();
    std::fs::write(case.place().join("mine.txt"), "mine").unwrap();
    let message = case.prepare().unwrap_err().to_string();
    assert!(message.contains("holds no prepared data"), "{message}");
    let mine = std::fs::read(case.place().join("mine.txt")).unwrap();
    assert_eq!(mine, b"mine");
    std::fs::remove_file(case.place().join("mine.txt")).unwrap();
    case.prepare().unwrap();
}

#[test]
fn damaged_packs_are_refused() {
    let packed = || {
        let mut case = Case::with("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"defg\"}\n");
        case.data.packing = true;
        case.data.packing_strategy = PackingStrategy::Bfd;
        case.prepare().unwrap();
        case
    };
    let mut complaints = Vec::new();
    for at in [0, 8] {
        let case = packed();
        edit(&case, PACKS, |bytes| bytes[at] = 9);
        complaints.push(complaint(&case));
        // A new preparation notices by the checksum.
        assert!(!case.prepare().unwrap().reused);
        assert_eq!(all(&case.open(Part::Train).unwrap()).len(), 1);
    }
    let case = packed();
    edit(&case, PACKS, |bytes| bytes.truncate(8));
    complaints.push(complaint(&case));
    std::fs::remove_file(file(&case, PACKS)).unwrap();
    complaints.push(complaint(&case));
    insta::assert_snapshot!(complaints.join("\n"));
}
