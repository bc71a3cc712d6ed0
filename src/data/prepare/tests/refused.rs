//! Invalid input: each error names problem, place and remedy, before anything is written.

use super::*;

#[test]
fn malformed_lines_are_reported_with_file_and_line() {
    let ok = "{\"text\": \"ok\"}\n";
    let contents: [(&str, Vec<u8>); 11] = [
        ("a.jsonl", format!("{ok}\n{{\"text\": \"x\",}}\n").into()),
        ("a.jsonl", format!("{ok}{{\"text\": \"half").into()),
        ("a.jsonl", format!("{ok}[1]\n").into()),
        ("a.jsonl", format!("{ok}\"text\"\n").into()),
        ("a.jsonl", format!("{ok}{{\"body\": \"x\"}}\n").into()),
        ("a.jsonl", format!("{ok}{{\"text\": 1}}\n").into()),
        (
            "a.jsonl",
            format!("{ok}{{\"text\": \"x\", \"text\": \"y\"}}\n").into(),
        ),
        (
            "a.jsonl",
            format!("{ok}{{\"messages\": [{{\"role\": \"user\", \"role\": \"x\"}}]}}\n").into(),
        ),
        (
            "a.jsonl",
            [ok.as_bytes(), b"{\"text\": \"\xff\"}\n"].concat(),
        ),
        ("a.txt", b"fine\n\nnot \xc3( fine\n".to_vec()),
        (
            "a.jsonl",
            format!("{ok}{{\"messages\": [{{\"role\": \"assistant\", \"content\": \"x\"}}]}}\n")
                .into(),
        ),
    ];
    let refusals: Vec<String> = contents
        .into_iter()
        .map(|(name, content)| {
            let case = Case::with(name, content);
            let refusal = case.refusal();
            assert!(!case.place().exists());
            refusal
        })
        .collect();
    insta::assert_snapshot!(refusals.join("\n"));
}

#[test]
fn sources_without_data_are_refused() {
    let mut refusals = Vec::new();
    for (name, content) in [
        ("a.jsonl", ""),
        ("a.jsonl", "\n\n"),
        ("a.jsonl", "{\"text\": \"\"}\n{\"messages\": []}\n"),
        ("a.txt", "\n \n"),
        ("a.csv", "x"),
        ("a.jsonl.gz", "x"),
        ("a.parquet", "no parquet at all"),
        ("a.bin", "odd"),
        ("a.bin", "\0\0"),
    ] {
        let mut case = Case::with(name, content);
        case.objective = Objective::Sft;
        refusals.push(format!("{name}: {}", case.refusal()));
    }
    let mut case = Case::new();
    refusals.push(case.refusal());
    case.write("sockets/a.txt", "x");
    let socket = case.directory.path().join("sockets/a.jsonl");
    let _socket = std::os::unix::net::UnixListener::bind(socket).unwrap();
    for path in [
        "",
        "HuggingFaceH4/ultrachat_200k",
        "data/train.jsonl",
        "no*.jsonl",
        "empty",
        "/dev/null",
        "sockets",
    ] {
        case.write("empty/README.rst", "x");
        case.data.train = vec![source(path)];
        refusals.push(format!("{path}: {}", case.refusal()));
    }
    insta::assert_snapshot!(refusals.join("\n"));
}

#[test]
fn token_ids_beyond_the_vocabulary_are_refused_with_their_byte() {
    let case = |name: &str, content: &[u8], vocab_size| {
        let mut case = Case::with(name, content);
        case.tokenizer.path = None;
        case.vocab_size = Some(vocab_size);
        case.refusal()
    };
    let wide: Vec<u8> = (0..100u32).flat_map(u32::to_le_bytes).collect();
    let mut cut = vec![0u32; 256];
    cut[..3].copy_from_slice(&[20_240_520, 1, 5]);
    let cut: Vec<u8> = cut.into_iter().flat_map(u32::to_le_bytes).collect();
    insta::assert_snapshot!(
        [
            case("a.bin", &[1, 0, 2, 0, 100, 0], 100),
            case("a.u32.bin", &[1, 0, 0, 0, 2, 0], 100),
            case("a.bin", &wide, 50_000),
            case("a.bin", &cut, 50_000),
        ]
        .join("\n")
    );
}

#[test]
fn impossible_settings_are_refused() {
    let mut refusals = Vec::new();
    let mut refuse = |change: fn(&mut Case)| {
        let mut case = Case::with("a.jsonl", "{\"text\": \"abc\"}\n{\"text\": \"de\"}\n");
        change(&mut case);
        refusals.push(case.refusal());
        assert!(!case.place().exists());
    };
    refuse(|case| {
        case.data.packing = true;
        case.data.sequence_length = 9;
    });
    refuse(|case| case.data.sequence_length = 1 << 40);
    refuse(|case| case.data.held_out = Some(2.0));
    refuse(|case| case.data.train[0].weight = Some(1.5));
    refuse(|case| case.data.train[0].weight = Some(0.1));
    refuse(|case| case.data.train[0].weight = Some(0.0));
    refuse(|case| case.data.train.push(source("synthetic")));
    refuse(|case| case.data.answers_only = Some(true));
    refuse(|case| case.vocab_size = Some(258));
    refuse(|case| case.objective = Objective::Grpo);
    refuse(|case| case.tokenizer.path = None);
    refuse(|case| case.tokenizer.path = Some("mistralai/Mistral-7B-v0.1".to_string()));
    refuse(|case| case.tokenizer.path = Some("./tokenizer.json".to_string()));
    refuse(|case| case.tokenizer.path = Some("/dev/null".to_string()));
    refuse(|case| {
        case.write("b.jsonl", "{\"text\": \"\"}\n");
        case.data.evaluation = vec![source("b.jsonl")];
    });
    refuse(|case| {
        case.write(
            "a.jsonl",
            "{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}]}\n",
        );
        case.tokenizer.chat_template = Some("{% for %}".to_string());
    });
    insta::assert_snapshot!(refusals.join("\n"));
}
