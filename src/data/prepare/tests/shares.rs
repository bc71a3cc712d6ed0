//! Shares of sources, held-out samples, splits, and files that a recipe names twice.

use std::collections::BTreeSet;

use super::*;

/// One JSON line per number.
fn numbers(range: std::ops::Range<u32>) -> String {
    range.map(|n| format!("{{\"text\": \"{n}\"}}\n")).collect()
}

fn texts(data: &Dataset) -> Vec<String> {
    all(data).iter().map(text).collect()
}

#[test]
fn held_out_samples_are_exact_disjoint_and_chosen_by_seed() {
    let mut case = Case::with("a.jsonl", numbers(0..100));
    let mut choices = Vec::new();
    for (held_out, seed, expected) in [(10.0, 1, 10), (0.25, 1, 25), (0.25, 2, 25), (0.001, 1, 1)] {
        case.data.held_out = Some(held_out);
        case.seed = seed;
        case.prepare().unwrap();
        let train = texts(&case.open(Part::Train).unwrap());
        let evaluation = case.open(Part::Evaluation).unwrap();
        assert_eq!(
            (train.len(), evaluation.len()),
            (100 - expected, expected as u64)
        );
        let chosen = texts(&evaluation);
        let together: BTreeSet<&String> = train.iter().chain(&chosen).collect();
        assert_eq!(together.len(), 100);
        choices.push(chosen);
    }
    assert_ne!(choices[1], choices[2]);
}

#[test]
fn held_out_packed_samples_are_not_training_targets() {
    let mut case = Case::with("a.jsonl", numbers(0..300));
    case.data.packing = true;
    case.data.sequence_length = 16;
    case.prepare().unwrap();
    let whole = texts(&case.open(Part::Train).unwrap());
    case.data.held_out = Some(20.0);
    case.prepare().unwrap();
    let train = texts(&case.open(Part::Train).unwrap());
    let evaluation = texts(&case.open(Part::Evaluation).unwrap());
    assert_eq!(evaluation.len(), 20);
    // Both parts keep their order, and together they are complete.
    let (mut train, mut evaluation) = (train.iter().peekable(), evaluation.iter().peekable());
    for sample in &whole {
        let part = if train.peek() == Some(&sample) {
            &mut train
        } else {
            &mut evaluation
        };
        assert_eq!(part.next(), Some(sample));
    }
    assert_eq!((train.next(), evaluation.next()), (None, None));
}

#[test]
fn weights_take_an_exact_seeded_share_of_each_source() {
    let mut case = Case::with("a.jsonl", numbers(0..50));
    case.write("b.jsonl", numbers(100..150));
    case.data.train.push(source("b.jsonl"));
    case.data.train[0].weight = Some(0.3);
    case.data.train[1].weight = Some(0.5);
    let mut choose = |seed| {
        case.seed = seed;
        case.prepare().unwrap();
        texts(&case.open(Part::Train).unwrap())
    };
    let one = choose(1);
    let of_a = one.iter().filter(|text| text.len() < 5).count();
    assert_eq!((one.len(), of_a), (40, 15));
    assert_eq!(one, choose(1));
    assert_ne!(one, choose(2));

    case.data.train[0].weight = Some(0.0);
    case.data.train[1].weight = Some(1.0);
    assert_eq!(case.samples().len(), 50);

    // Above 1 it is a number, and at most all.
    case.data.train[0].weight = Some(7.0);
    assert_eq!(case.samples().len(), 57);
    case.data.train[0].weight = Some(1000.0);
    assert_eq!(case.samples().len(), 100);
}

#[test]
fn a_share_of_a_stream_ends_documents_at_omitted_text() {
    // Five segments of 64 KiB, each of one letter.
    let segment = |letter: &str| format!("{}\n", letter.repeat((64 << 10) - 1));
    let mut case = Case::with("a.txt", ["a", "b", "c", "d", "e"].map(segment).concat());
    case.data.packing = true;
    case.data.sequence_length = 1 << 20;
    case.data.train[0].weight = Some(0.8);
    // The whole stream is shorter than one sample.
    case.data.sequence_length = 1000;
    let mut stream = String::new();
    for (i, sample) in case.samples().iter().enumerate() {
        let text = text(sample);
        stream += if i == 0 { &text } else { &text[1..] };
    }
    let mut runs: Vec<char> = stream.chars().collect();
    runs.dedup();
    let runs: String = runs.into_iter().filter(|&c| c != '\n').collect();
    // Four letters remain; at the omitted one a document ends and another begins.
    let possible = ["^bcde$", "^a$^cde$", "^ab$^de$", "^abc$^e$", "^abcd$"];
    assert!(possible.contains(&&runs[..]), "{runs}");
}

#[test]
fn splits_select_files_by_name_or_are_reported_as_ignored() {
    let mut case = Case::new();
    case.write("d/train-00000-of-00002.jsonl", numbers(0..2));
    case.write("d/train-00001-of-00002.jsonl", numbers(2..4));
    case.write("d/train_other.jsonl", numbers(4..5));
    case.write("d/test/part.jsonl", numbers(5..6));
    case.write("d/.hidden.jsonl", numbers(6..7));
    case.write("d/README.rst", "no data");
    case.data.train = vec![source("d")];
    let mut read = |split: Option<&str>| {
        case.data.train[0].split = split.map(str::to_string);
        let prepared = case.prepare().unwrap();
        let texts = texts(&case.open(Part::Train).unwrap()).concat();
        (texts, prepared.notes.join("\n"))
    };
    assert_eq!(
        read(Some("train")),
        ("^0$^1$^2$^3$".to_string(), String::new())
    );
    assert_eq!(read(Some("test")), ("^5$".to_string(), String::new()));
    assert_eq!(read(None).0, "^5$^0$^1$^2$^3$^4$");
    let (texts, note) = read(Some("validation"));
    assert_eq!(texts, "^5$^0$^1$^2$^3$^4$");
    insta::assert_snapshot!(note);
}

#[test]
fn wildcards_name_several_files() {
    let mut case = Case::new();
    for (i, name) in ["d/a1.jsonl", "d/a2.jsonl", "d/b1.jsonl", "d/e/a3.jsonl"]
        .iter()
        .enumerate()
    {
        case.write(name, numbers(i as u32..i as u32 + 1));
    }
    let absolute = case.directory.path().join("d/*.jsonl");
    let mut read = |pattern: &str| {
        case.data.train = vec![source(pattern)];
        case.prepare().unwrap();
        texts(&case.open(Part::Train).unwrap()).concat()
    };
    assert_eq!(read("d/a?.jsonl"), "^0$^1$");
    assert_eq!(read("d/*1.jsonl"), "^0$^2$");
    assert_eq!(read("*/e/*"), "^3$");
    assert_eq!(read("d/**/a*.jsonl"), "^0$^1$^3$");
    assert_eq!(read(absolute.to_str().unwrap()), "^0$^1$^2$");
}

#[test]
fn a_file_named_twice_is_read_once_and_never_evaluated_on() {
    let mut case = Case::with("a.jsonl", numbers(0..4));
    case.data.train.push(source("./a.jsonl"));
    case.data.train[0].split = Some("train_sft".to_string());
    case.data.train[1].split = Some("test_sft".to_string());
    case.data.evaluation = vec![source("a.jsonl")];
    let prepared = case.prepare().unwrap();
    assert_eq!(prepared.manifest.train.samples, 4);
    assert!(case.open(Part::Evaluation).is_none());
    insta::assert_snapshot!(prepared.notes.join("\n"));

    // Then only holding out gives evaluation samples.
    case.data.held_out = Some(1.0);
    case.prepare().unwrap();
    assert_eq!(case.open(Part::Evaluation).unwrap().len(), 1);
}

#[test]
fn evaluation_sources_make_a_separate_part() {
    let mut case = Case::with("a.jsonl", numbers(0..4));
    case.write("b.jsonl", numbers(10..12));
    case.data.evaluation = vec![source("b.jsonl")];
    // Not needed, so nothing is held out.
    case.data.held_out = Some(2.0);
    case.prepare().unwrap();
    assert_eq!(texts(&case.open(Part::Train).unwrap()).len(), 4);
    assert_eq!(
        texts(&case.open(Part::Evaluation).unwrap()),
        ["^10$", "^11$"]
    );
}
