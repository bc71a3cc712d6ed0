//! Documents of every format become samples.

use std::ops::Range;

use super::*;
use crate::engine::IGNORE;

#[test]
fn a_document_is_a_sample_with_a_beginning_and_an_end_token() {
    let case = Case::with("a.jsonl", "{\"text\": \"hé\"}\n\n{\"text\": \"two\"}\n");
    let samples = case.samples();
    assert_eq!(samples[0].tokens, [256, b'h'.into(), 0xc3, 0xa9, 257]);
    assert_eq!(
        samples.iter().map(text).collect::<Vec<_>>(),
        ["^hé$", "^two$"]
    );
    assert!(
        samples
            .iter()
            .all(|s| s.loss_mask.iter().all(|&target| target))
    );
    insta::assert_snapshot!(counts(&case));
}

#[test]
fn long_documents_are_truncated_and_counted() {
    let mut case = Case::with("a.jsonl", "{\"text\": \"abcdef\"}\n{\"text\": \"a\"}\n");
    case.data.sequence_length = 4;
    assert_eq!(
        case.samples().iter().map(text).collect::<Vec<_>>(),
        ["^abcd", "^a$"]
    );
    let prepared = case.prepare().unwrap();
    insta::assert_snapshot!(prepared.notes.join("\n"), @"some data are not trained: 1 truncated to the sequence length; `data.sequence_length` is 4");
    assert_eq!(prepared.manifest.skipped.truncated, 1);
    assert_eq!(prepared.manifest.used_vocabulary, 258);
}

#[test]
fn blank_lines_separate_documents_of_plain_text() {
    let case = Case::with("a.txt", "\n \none\nline\n\n\n  two \r\n\r\nthree");
    assert_eq!(
        case.samples().iter().map(text).collect::<Vec<_>>(),
        ["^one\nline$", "^  two $", "^three$"]
    );
}

/// A file of several gzip streams, as `cat a.gz b.gz` makes it, has the text of all of them.
#[test]
fn compressed_files_are_read_as_their_text() {
    use std::io::Write;
    let packed = |text: &str| {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        packed.write_all(text.as_bytes()).unwrap();
        packed.finish().unwrap()
    };
    let lines = ["{\"text\": \"one\"}\n{\"te", "xt\": \"two\"}\n"];
    let whole = lines.map(packed).concat();
    let array = packed("[{\"text\": \"one\"}, {\"text\": \"two\"}]");
    for (name, content) in [
        ("a.jsonl.gz", whole.clone()),
        ("a.json.GZ", array),
        ("a.txt.gz", packed("one\n\ntwo\n")),
    ] {
        let mut case = Case::with(name, content);
        let texts: Vec<String> = case.samples().iter().map(text).collect();
        assert_eq!(texts, ["^one$", "^two$"], "{name}");
        case.data.train[0].weight = Some(0.5);
        assert_eq!(case.samples().len(), 1, "{name}");
    }
    let cut = Case::with("a.jsonl.gz", &whole[..whole.len() - 12]);
    insta::assert_snapshot!(cut.refusal());
}

#[test]
fn packed_documents_are_cut_with_one_token_shared() {
    let mut case = Case::with("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"de\"}\n");
    case.data.sequence_length = 4;
    case.data.packing = true;
    // ^abc$^de$ in samples of four targets; the last sample is the rest.
    assert_eq!(
        case.samples().iter().map(text).collect::<Vec<_>>(),
        ["^abc$", "$^de$"]
    );
    case.data.sequence_length = 5;
    assert_eq!(
        case.samples().iter().map(text).collect::<Vec<_>>(),
        ["^abc$^", "^de$"]
    );
    insta::assert_snapshot!(counts(&case));
}

/// The documents of each sample.
fn documents(sample: &Sample) -> Vec<String> {
    let of = |document: Range<usize>| spell(sample.tokens[document].iter().copied());
    sample.documents().map(of).collect()
}

/// Texts that are packed by best fit.
fn fitted<S: AsRef<str>>(texts: &[S], sequence_length: u64) -> Case {
    let rows = texts
        .iter()
        .map(|text| json!({"text": text.as_ref()}).to_string());
    let mut case = Case::with("a.jsonl", rows.collect::<Vec<_>>().join("\n"));
    case.data.packing = true;
    case.data.packing_strategy = PackingStrategy::Bfd;
    case.data.sequence_length = sequence_length;
    case
}

#[test]
fn documents_are_packed_whole_into_the_fullest_sample() {
    let mut case = fitted(&["abcdef", "ab", "x", "abcdefghijk", "abc"], 9);
    // A document of n tokens has n - 1 inputs.
    let samples = case.samples();
    assert_eq!(
        samples.iter().map(documents).collect::<Vec<_>>(),
        [
            vec!["^abcdefghi"],
            vec!["^abcdef$", "^x$"],
            vec!["^abc$", "^ab$"]
        ]
    );
    insta::assert_snapshot!(counts(&case));
    let data = case.open(Part::Train).unwrap();
    let collated = data.collate(0..3).unwrap();
    let micro_batch = collated.micro_batch();
    assert_eq!((micro_batch.batch, micro_batch.seq_len), (3, 9));
    assert_eq!(micro_batch.starts, [0, 9, 16, 18, 22]);
    assert_eq!(
        spell(micro_batch.tokens[9..18].iter().copied()),
        "^abcdef^x"
    );
    let targets = |range: Range<usize>| spell(micro_batch.targets[range].iter().copied());
    assert_eq!(
        (targets(9..18), targets(18..25)),
        ("abcdef$x$".into(), "abc$ab$".into())
    );
    assert_eq!(micro_batch.targets[25..], [IGNORE; 2]);
    // Rows of one document each are as without packing.
    assert!(data.collate([0]).unwrap().micro_batch().starts.is_empty());

    // Upstream's samples count the last token too.
    case.data.extra_token = false;
    assert_eq!(
        case.samples().iter().map(documents).collect::<Vec<_>>(),
        [
            vec!["^abcdefgh"],
            vec!["^abcdef$"],
            vec!["^abc$", "^ab$"],
            vec!["^x$"]
        ]
    );
    case.data.packing_strategy = PackingStrategy::BfdSplit;
    assert_eq!(
        case.samples().iter().map(documents).collect::<Vec<_>>(),
        [
            vec!["^abcdefgh"],
            vec!["^abcdef$"],
            vec!["^abc$", "^ab$"],
            vec!["ijk$", "^x$"]
        ]
    );
    case.data.packing = false;
    insta::assert_snapshot!(case.refusal());
}

/// Held-out documents are chosen before the others are packed, and packed too.
#[test]
fn every_document_is_in_one_sample_of_one_part() {
    let texts: Vec<String> = (0..2500)
        .map(|i| format!("{i:04}").repeat(1 + i % 7))
        .collect();
    let mut case = fitted(&texts, 60);
    case.data.held_out = Some(0.1);
    let prepared = case.prepare().unwrap();
    let of = |part| {
        all(&case.open(part).unwrap())
            .iter()
            .map(documents)
            .collect::<Vec<_>>()
    };
    let (train, evaluation) = (of(Part::Train).concat(), of(Part::Evaluation).concat());
    assert_eq!(evaluation.len(), 250);
    let mut found = [train, evaluation].concat();
    found.sort();
    let mut expected: Vec<String> = texts.iter().map(|text| format!("^{text}$")).collect();
    expected.sort();
    assert_eq!(found, expected);
    assert_eq!(
        prepared.packed().as_deref(),
        Some("2250 documents packed into 655 samples, 97 % full")
    );
    assert!(case.prepare().unwrap().reused);
}

#[test]
fn packed_plain_text_is_one_document_per_file() {
    let mut case = Case::with("d/a.txt", "one\n\ntwo\n");
    case.write("d/b.txt", "three");
    case.data.train = vec![source("d")];
    case.data.packing = true;
    case.data.sequence_length = 8;
    assert_eq!(
        case.samples().iter().map(text).collect::<Vec<_>>(),
        ["^one\n\ntwo", "o\n$^three", "e$"]
    );
}

#[test]
fn segments_of_a_long_stream_do_not_change_its_tokens() {
    let line = "The quick brown fox jumps over the lazy dog.\n";
    let content = line.repeat(5_000);
    let mut case = Case::with("a.txt", &content);
    case.data.packing = true;
    case.data.sequence_length = 1000;
    let mut stream = String::new();
    for (i, sample) in case.samples().iter().enumerate() {
        let text = text(sample);
        stream += if i == 0 { &text } else { &text[1..] };
    }
    assert_eq!(stream, format!("^{content}$"));
}

#[test]
fn token_ids_are_read_unchanged() {
    let ids: Vec<u8> = (1..=10u16)
        .flat_map(|id| (id * 100).to_le_bytes())
        .collect();
    let mut case = Case::with("a.bin", ids);
    case.tokenizer.path = None;
    case.data.sequence_length = 4;
    case.vocab_size = Some(1001);
    let samples = case.samples();
    let tokens: Vec<&[u32]> = samples.iter().map(|s| &s.tokens[..]).collect();
    assert_eq!(
        tokens,
        [
            &[100, 200, 300, 400, 500][..],
            &[500, 600, 700, 800, 900],
            &[900, 1000]
        ]
    );
}

#[test]
fn wide_token_ids_and_headers_are_recognised() {
    let ids = [70_000u32, 5, 6];
    let wide: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let header = |magic: u32, version: u32, count: u32| {
        let mut words = vec![0u32; 256];
        words[..3].copy_from_slice(&[magic, version, count]);
        words
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect::<Vec<u8>>()
    };
    let read = |name: &str, content: Vec<u8>, vocab_size| {
        let mut case = Case::with(name, content);
        case.tokenizer.path = None;
        case.vocab_size = Some(vocab_size);
        case.samples().remove(0).tokens
    };
    assert_eq!(read("a.bin", wide.clone(), 128_000), ids);
    let mut llama = header(20_240_801, 7, 3);
    llama.extend(&wide);
    assert_eq!(read("a.bin", llama, 70_001), ids);
    let mut gpt2 = header(20_240_520, 1, 2);
    gpt2.extend([1, 2, 3, 4]);
    assert_eq!(read("a.bin", gpt2, 128_000), [0x201, 0x403]);
    assert_eq!(read("a.u32.bin", vec![1, 0, 0, 0, 2, 0, 0, 0], 100), [1, 2]);
}

#[test]
fn micro_batches_are_padded_to_their_longest_sample() {
    let lines = ["a", "bcdefghijk", "lm"].map(|text| format!("{{\"text\": \"{text}\"}}\n"));
    let mut case = Case::with("a.jsonl", lines.concat());
    case.data.sequence_length = 12;
    case.prepare().unwrap();
    let data = case.open(Part::Train).unwrap();
    let ignore = crate::engine::IGNORE;

    let batch = data.collate([2, 0]).unwrap();
    assert_eq!((batch.batch, batch.seq_len), (2, 8));
    let (l, m, a) = (b'l'.into(), b'm'.into(), b'a'.into());
    assert_eq!(
        batch.tokens,
        [256, l, m, 0, 0, 0, 0, 0, 256, a, 0, 0, 0, 0, 0, 0]
    );
    let mut targets = vec![ignore; 16];
    targets[..3].copy_from_slice(&[l, m, 257]);
    targets[8..10].copy_from_slice(&[a, 257]);
    assert_eq!(batch.targets, targets);
    assert_eq!(batch.row(0), (&[256, l, m][..], &[l, m, 257][..]));
    assert_eq!(batch.row(1), (&[256, a][..], &[a, 257][..]));

    // Rounded up to 8 columns, but at most the sequence length: 11 would be 16.
    assert_eq!(data.collate([1]).unwrap().seq_len, 12);
    assert_eq!(data.collate([]).unwrap(), Default::default());
    assert_eq!((target_count(&data, 1), target_count(&data, 2)), (11, 3));
}
