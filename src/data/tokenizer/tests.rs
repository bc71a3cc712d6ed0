//! Tokenizers: exact borders, special tokens, and directories in Hugging Face's layout.

use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn targets(tokens: &[Token]) -> Vec<(u32, bool)> {
    tokens
        .iter()
        .map(|token| (token.id, token.target))
        .collect()
}

#[test]
fn byte_ids_never_change() {
    let tokenizer = Tokenizer::byte();
    assert_eq!(tokenizer.vocabulary_size, 259);
    assert_eq!(
        tokenizer.encode("a\0ü<|bos|><|eos|><|pad|><|eos").unwrap(),
        [97, 0, 0xc3, 0xbc, 256, 257, 258, 60, 124, 101, 111, 115]
    );
    assert_eq!(
        (&tokenizer.start[..], &tokenizer.end[..]),
        (&[256][..], &[257][..])
    );
}

proptest! {
    #[test]
    fn bytes_spell_the_text_and_spans_are_exact(text in ".{0,40}", cuts in prop::array::uniform2(0usize..60)) {
        let tokenizer = Tokenizer::byte();
        let floor = |at: usize| (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap();
        let (start, end) = (floor(cuts[0].min(cuts[1])), floor(cuts[0].max(cuts[1])));
        let tokens = tokenizer.encode_spans(&text, std::slice::from_ref(&(start..end))).unwrap();
        let spelled: Vec<u8> = tokens.iter().map(|token| token.id as u8).collect();
        prop_assert_eq!(&spelled, text.as_bytes());
        for (at, token) in tokens.iter().enumerate() {
            prop_assert_eq!(token.target, (start..end).contains(&at));
        }
    }
}

/// A byte-level BPE whose only merges are two line breaks, and `ab`.
fn bpe(post_processor: Value) -> Value {
    let mut vocab: serde_json::Map<String, Value> = ["Ċ", "ĊĊ", "a", "b", "ab", "Ġ", "u", ":", "x"]
        .iter()
        .zip(0..)
        .map(|(token, id)| (token.to_string(), json!(id)))
        .collect();
    vocab.insert("<s>".to_string(), json!(9));
    vocab.insert("</s>".to_string(), json!(10));
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false,
               "rstrip": false, "normalized": false, "special": true})
    };
    json!({
        "version": "1.0", "truncation": {"direction": "Right", "max_length": 3,
            "strategy": "LongestFirst", "stride": 0},
        "padding": null,
        "added_tokens": [special(9, "<s>"), special(10, "</s>"), special(11, "<|im_end|>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
            "use_regex": false},
        "post_processor": post_processor,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
            "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": false,
            "byte_fallback": false, "ignore_merges": false, "vocab": vocab,
            "merges": [["Ċ", "Ċ"], ["a", "b"]]}
    })
}

/// `<s> text`.
fn begins() -> Value {
    json!({"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [9], "tokens": ["<s>"]}}})
}

struct Directory(tempfile::TempDir);

impl Directory {
    fn new(files: &[(&str, String)]) -> Directory {
        let directory = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(directory.path().join(name), content).unwrap();
        }
        Directory(directory)
    }

    fn path(&self) -> PathBuf {
        self.0.path().to_path_buf()
    }

    fn load(&self) -> Result<Tokenizer, DataError> {
        huggingface::load(&self.path(), "mine", "tokenizer.chat_template")
    }
}

#[test]
fn a_token_never_crosses_the_border_of_an_answer() {
    let directory = Directory::new(&[("tokenizer.json", bpe(Value::Null).to_string())]);
    let tokenizer = directory.load().unwrap();
    // In the whole text the two line breaks are one token; the answer begins between them.
    assert_eq!(tokenizer.encode("u:\n\nab\n").unwrap(), [6, 7, 1, 4, 0]);
    let answer = tokenizer
        .encode_spans("u:\n\nab\n", std::slice::from_ref(&(3..6)))
        .unwrap();
    assert_eq!(
        targets(&answer),
        [
            (6, false),
            (7, false),
            (0, false),
            (0, true),
            (4, true),
            (0, false)
        ]
    );
    // Without a token across a border, the text is tokenised as a whole.
    let whole = tokenizer
        .encode_spans("u:\n\nab\n", std::slice::from_ref(&(4..6)))
        .unwrap();
    assert_eq!(
        targets(&whole),
        [(6, false), (7, false), (1, false), (4, true), (0, false)]
    );
    // Several crossed borders, and an empty answer.
    let several = tokenizer
        .encode_spans("\n\n\n\nab", &[1..3, 3..3, 5..6])
        .unwrap();
    assert_eq!(
        targets(&several),
        [(0, false), (1, true), (0, false), (2, false), (3, true)]
    );
}

#[test]
fn offsets_are_right_after_characters_of_several_bytes() {
    let mut file = bpe(begins());
    // The bytes of ü.
    file["model"]["vocab"]["Ã"] = json!(13);
    file["model"]["vocab"]["¼"] = json!(14);
    let directory = Directory::new(&[("tokenizer.json", file.to_string())]);
    let tokenizer = directory.load().unwrap();
    let tokens = tokenizer
        .encode_spans(
            "ü: üb</s>",
            std::slice::from_ref(&("ü: ".len().."ü: üb</s>".len())),
        )
        .unwrap();
    assert_eq!(
        targets(&tokens),
        [
            (13, false),
            (14, false),
            (7, false),
            (5, false),
            (13, true),
            (14, true),
            (3, true),
            (10, true)
        ]
    );
}

/// `tests/reference/tokenizers.json`, which `tokenizer_reference.py` beside it writes.
#[test]
fn ids_of_odd_texts_are_those_of_the_python_package() {
    #[derive(serde::Deserialize)]
    struct Reference {
        texts: Vec<String>,
        cases: Vec<Case>,
    }
    #[derive(serde::Deserialize)]
    struct Case {
        name: String,
        tokenizer: Value,
        ids: Vec<Vec<u32>>,
    }
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/reference/tokenizers.json"
    );
    let reference = std::fs::read(path).unwrap();
    let Reference { texts, cases } = serde_json::from_slice(&reference).unwrap();
    assert_eq!((texts.len(), cases.len()), (50, 7));
    for case in cases {
        let directory = Directory::new(&[("tokenizer.json", case.tokenizer.to_string())]);
        let tokenizer = directory.load().unwrap();
        for (text, ids) in texts.iter().zip(&case.ids) {
            let found = tokenizer.encode(text).unwrap();
            assert_eq!(&found, ids, "{}: {text:?}", case.name);
            // The ids do not depend on where the loss is, if no border cuts a token.
            let whole = tokenizer.encode_spans(text, std::slice::from_ref(&(0..text.len())));
            let whole = whole.unwrap();
            assert!(
                whole.iter().all(|token| token.target),
                "{}: {text:?}",
                case.name
            );
            assert!(whole.iter().map(|token| token.id).eq(found));
        }
    }
}

#[test]
fn tokens_that_a_tokenizer_adds_are_added_once_and_on_request() {
    let directory = Directory::new(&[("tokenizer.json", bpe(begins()).to_string())]);
    let tokenizer = directory.load().unwrap();
    // No text is truncated or extended, whatever the file says.
    assert_eq!(tokenizer.encode("abxxx").unwrap(), [4, 8, 8, 8]);
    assert_eq!(tokenizer.start, [9]);
    // The well-known name applies, because no configuration names the token.
    assert_eq!(tokenizer.end, [10]);
    // Two special tokens are in the vocabulary, the third comes after it.
    assert_eq!(tokenizer.vocabulary_size, 12);
    assert_eq!(tokenizer.marks(), ["</s>", "<s>", "<|im_end|>"]);
}

#[test]
fn the_configuration_names_special_tokens_and_the_template() {
    let config = json!({
        "add_bos_token": true, "bos_token": null, "eos_token": {"content": "<|im_end|>"},
        "pad_token": "</s>", "chat_template": [{"name": "tools", "template": "T"},
                                              {"name": "default", "template": "D"}]
    });
    let files = [
        ("tokenizer.json", bpe(Value::Null).to_string()),
        ("tokenizer_config.json", config.to_string()),
    ];
    let directory = Directory::new(&files);
    let tokenizer = directory.load().unwrap();
    assert_eq!(
        (&tokenizer.start[..], &tokenizer.end[..]),
        (&[][..], &[11][..])
    );
    assert_eq!(tokenizer.chat_template.as_deref(), Some("D"));
    assert_eq!(
        tokenizer.specials,
        BTreeMap::from(
            [("eos_token", "<|im_end|>"), ("pad_token", "</s>")].map(|(a, b)| (a.into(), b.into()))
        )
    );
    // The separate file has priority over the configuration and changes the checksum.
    std::fs::write(directory.path().join("chat_template.jinja"), "J").unwrap();
    assert_eq!(
        directory.load().unwrap().chat_template.as_deref(),
        Some("J")
    );
    let file =
        huggingface::load(&directory.path().join("tokenizer.json"), "mine", "template").unwrap();
    assert_eq!(file.checksum, tokenizer.checksum);
}

/// The expected text is that of `clean_up_tokenization` of transformers, which its version 4.35 calls by default.
#[test]
fn decoded_texts_are_cleaned_up_unless_the_configuration_says_no() {
    let text = "I ca n't , he 's \' ok \' . We \'ve  ! You \'re I \'m ?";
    assert_eq!(
        cleaned(text.to_owned()),
        "I can't, he's'ok '. We've ! You're I'm?"
    );
    let cleans_up = |config: Value| {
        let files = [
            ("tokenizer.json", bpe(Value::Null).to_string()),
            ("tokenizer_config.json", config.to_string()),
        ];
        Directory::new(&files).load().unwrap().cleans_up
    };
    assert!(cleans_up(json!({})));
    assert!(!cleans_up(json!({"clean_up_tokenization_spaces": false})));
}

#[test]
fn unusable_tokenizers_are_refused() {
    let good = bpe(Value::Null).to_string();
    let cases: [&[(&str, String)]; 7] = [
        &[],
        &[("tokenizer.model", "binary".into())],
        &[("tokenizer.json", good[..good.len() / 2].into())],
        &[("tokenizer.json", "{}".into())],
        &[
            ("tokenizer.json", good.clone()),
            ("tokenizer_config.json", "{".into()),
        ],
        &[
            ("tokenizer.json", good.clone()),
            (
                "tokenizer_config.json",
                json!({"eos_token": "<nobody>"}).to_string(),
            ),
        ],
        &[
            ("tokenizer.json", good.clone()),
            (
                "tokenizer_config.json",
                json!({"chat_template": []}).to_string(),
            ),
        ],
    ];
    let refusals: Vec<String> = cases
        .iter()
        .map(|files| {
            let directory = Directory::new(files);
            let error = directory.load().err().unwrap().to_string();
            error.replace(&directory.path().display().to_string(), "DIR")
        })
        .collect();
    insta::assert_snapshot!(refusals.join("\n"));
}
