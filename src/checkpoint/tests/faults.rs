//! Damaged files.

use std::fs;

use super::*;

/// Flips a bit of a byte, counted from the end if `at` is negative.
fn flip(path: &Path, at: i64) {
    let mut bytes = fs::read(path).unwrap();
    let at = if at < 0 { bytes.len() as i64 + at } else { at };
    bytes[at as usize] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

fn edit(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from} in {text}");
    fs::write(path, text.replacen(from, to, 1)).unwrap();
}

/// Changes a fresh checkpoint; returns the results of a full and of a lazy reading.
fn damaged(change: impl Fn(&Path)) -> [Result<(), String>; 2] {
    let layout = default_layout();
    let run = tempfile::tempdir().unwrap();
    let committed = write(&target(run.path(), 1, 1), &layout, 2).unwrap();
    change(&committed.path);
    let everything = |checkpoint: Checkpoint| {
        for unit in 0..layout.units.len() {
            let loaded = checkpoint.load_unit(unit)?;
            assert!(loaded == unit_state(&layout, unit, 1), "handed out damage");
        }
        assert_eq!(checkpoint.state()?, loop_state(1), "handed out damage");
        Ok(())
    };
    let full = Checkpoint::open(&committed.path, None).map(drop);
    let lazy = Checkpoint::open_lazily(&committed.path, None).and_then(everything);
    let run = run.path().display().to_string();
    [full, lazy].map(|result| {
        result.map_err(|error: CheckpointError| error.to_string().replace(&run, "[run]"))
    })
}

#[test]
fn every_damage_is_detected_and_named() {
    let model = "model-00003-of-00005.safetensors";
    let optimizer = "optimizer-00002-of-00005.safetensors";
    type Change<'a> = (&'a str, Box<dyn Fn(&Path)>);
    let changes: Vec<Change> = vec![
        ("untouched", Box::new(|_| {})),
        (
            "byte of the weights",
            Box::new(move |path| flip(&path.join(model), -5)),
        ),
        (
            "byte of the header",
            Box::new(move |path| flip(&path.join(model), 60)),
        ),
        (
            "size of the header",
            Box::new(move |path| flip(&path.join(model), 0)),
        ),
        (
            "byte of a moment",
            Box::new(move |path| flip(&path.join(optimizer), -1)),
        ),
        (
            "truncated",
            Box::new(move |path| {
                let file = fs::File::options().write(true).open(path.join(optimizer));
                file.unwrap().set_len(100).unwrap();
            }),
        ),
        (
            "grown",
            Box::new(move |path| {
                let file = fs::File::options().append(true).open(path.join(model));
                file.unwrap().write_all(b"x").unwrap();
            }),
        ),
        (
            "missing",
            Box::new(move |path| fs::remove_file(path.join(model)).unwrap()),
        ),
        (
            "two at once",
            Box::new(move |path| {
                fs::remove_file(path.join(model)).unwrap();
                fs::remove_file(path.join(optimizer)).unwrap();
            }),
        ),
        (
            "state edited",
            Box::new(|path| edit(&path.join("state.json"), "42", "43")),
        ),
        (
            "manifest edited",
            Box::new(|path| {
                edit(
                    &path.join("manifest.json"),
                    "\"samples\": 16",
                    "\"samples\": 17",
                )
            }),
        ),
        (
            "checksum in the manifest edited",
            Box::new(|path| {
                edit(
                    &path.join("manifest.json"),
                    "xxh3_128\": \"",
                    "xxh3_128\": \"g",
                )
            }),
        ),
        (
            "manifest truncated",
            Box::new(|path| {
                let bytes = fs::read(path.join("manifest.json")).unwrap();
                fs::write(path.join("manifest.json"), &bytes[..bytes.len() / 2]).unwrap();
            }),
        ),
        (
            "manifest of a later format",
            Box::new(|path| {
                edit(
                    &path.join("manifest.json"),
                    "\"format\": 1",
                    "\"format\": 2",
                )
            }),
        ),
        (
            "no manifest",
            Box::new(|path| fs::remove_file(path.join("manifest.json")).unwrap()),
        ),
        (
            "no directory",
            Box::new(|path| fs::remove_dir_all(path).unwrap()),
        ),
    ];
    let mut text = String::new();
    for (name, change) in changes {
        let [full, lazy] = damaged(change);
        assert_eq!(full.is_ok(), name == "untouched", "{name}");
        assert_eq!(lazy.is_ok(), name == "untouched", "{name}");
        let [full, lazy] = [full, lazy].map(|result| result.err().unwrap_or("fine".to_string()));
        text += &format!("# {name}\n{full}\n");
        if lazy != full {
            text += &format!("(lazily) {lazy}\n");
        }
    }
    insta::assert_snapshot!(without_checksums(&text));
}

fn without_checksums(text: &str) -> String {
    let word = |word: &str| match word.trim_end_matches([',', ';', ':']) {
        digits if digits.parse::<Checksum>().is_ok() => word.replace(digits, "[checksum]"),
        _ => word.to_string(),
    };
    let words: Vec<String> = text.split(' ').map(word).collect();
    words.join(" ")
}

#[test]
fn every_flipped_byte_of_the_manifest_is_detected() {
    let run = tempfile::tempdir().unwrap();
    let mut layout = default_layout();
    layout.units.drain(..4);
    let committed = write(&target(run.path(), 1, 1), &layout, 1).unwrap();
    let path = committed.path.join("manifest.json");
    let sound = fs::read(&path).unwrap();
    for at in 0..sound.len() {
        let mut bytes = sound.clone();
        bytes[at] ^= 0x01;
        fs::write(&path, bytes).unwrap();
        // Only insignificant bytes may differ, and a checkpoint reference detects these too.
        if let Ok((_, checksum)) = Manifest::read(&committed.path) {
            assert!(sound[at].is_ascii_whitespace(), "byte {at}");
            assert_ne!(checksum, committed.checksum, "byte {at}");
        }
    }
}

#[test]
fn a_checkpoint_other_than_the_referenced_one_is_refused() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let first = write(&target(run.path(), 1, 1), &layout, 1).unwrap();
    let second = write(&target(run.path(), 1, 2), &layout, 1).unwrap();
    let error = Checkpoint::open(&second.path, Some(first.checksum)).unwrap_err();
    assert!(
        matches!(error, CheckpointError::NotThePinned { .. }),
        "{error}"
    );
}

#[test]
fn partial_directory_is_neither_listed_nor_opened() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let good = write(&target(run.path(), 1, 1), &layout, 1).unwrap();
    let unfinished = target(run.path(), 1, 2);
    write_part(&unfinished, &layout, 0, 2).unwrap();
    // Even a complete one: it was not renamed, so it was never committed.
    let renamed_back = unfinished.partial().with_file_name("step-0000003.partial");
    let third = write(&target(run.path(), 1, 3), &layout, 1).unwrap();
    fs::rename(&third.path, &renamed_back).unwrap();

    let history = list(run.path()).unwrap();
    assert_eq!(history.committed, std::slice::from_ref(&good));
    assert!(history.damaged.is_empty(), "{:?}", history.damaged);
    assert_eq!(latest(run.path()).unwrap(), Some(good));
    for partial in [unfinished.partial(), renamed_back] {
        let error = Checkpoint::open(&partial, None).unwrap_err().to_string();
        assert!(
            error.ends_with("is not a checkpoint: its writing was never finished"),
            "{error}"
        );
    }
}

#[test]
fn a_damaged_manifest_is_listed_separately() {
    let run = tempfile::tempdir().unwrap();
    let layout = default_layout();
    let good = write(&target(run.path(), 1, 1), &layout, 1).unwrap();
    let bad = write(&target(run.path(), 1, 2), &layout, 1).unwrap();
    flip(&bad.path.join("manifest.json"), 200);
    let history = list(run.path()).unwrap();
    assert_eq!(history.committed, [good]);
    assert_eq!(history.damaged.len(), 1);
    let message = history.damaged[0].to_string();
    assert!(message.contains("gen-1/step-0000002"), "{message}");
}
