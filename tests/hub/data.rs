//! Launches of the real binary with data sets of the hub.

use std::fs::File;
use std::process::Output;
use std::sync::Arc;

use evenkeel::hub::Kind;
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

use super::corpus;
use super::launch::{self, NO_SERVER, Place, native};
use super::server::{Answer, Asked, COMMIT, Repository, Server, Trouble, etag};

const ID: &str = "acme/chats";
/// The commit of the hub's Parquet files.
const CONVERTED: &str = "89abcdef0123456789abcdef0123456789abcdef";
/// Two configs, whose files no name states.
const CARD: &str = "---\nconfigs:\n- config_name: en\n  default: true\n  data_files:\n  - split: train\n    path: \
                    one/*\n  - split: test\n    path: two.jsonl\n- config_name: fr\n  data_files: three.jsonl\n---\n";

fn rows(word: &str) -> Vec<u8> {
    format!("{{\"text\": \"{word} {word} {word} {word}\"}}\n")
        .repeat(40)
        .into_bytes()
}

/// A Parquet file with a column `text`.
fn parquet(word: &str) -> Vec<u8> {
    let schema = parse_message_type("message rows { required binary text (UTF8); }").unwrap();
    let mut bytes = Vec::new();
    let mut file = SerializedFileWriter::new(&mut bytes, Arc::new(schema), Arc::default()).unwrap();
    let mut group = file.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let texts: Vec<ByteArray> = (0..2000)
        .map(|number| format!("{word} {number}").as_str().into())
        .collect();
    let typed = column.typed::<ByteArrayType>();
    typed.write_batch(&texts, None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    file.close().unwrap();
    bytes
}

fn data_set(files: &[(&str, Vec<u8>)]) -> Repository {
    let files = files.iter();
    let files = files.map(|(name, bytes)| ((*name).to_owned(), bytes.clone()));
    Repository {
        kind: Kind::DataSet,
        id: ID,
        revision: "main",
        commit: COMMIT,
        files: files.collect(),
    }
}

/// A data set whose card lists its configs.
fn chats() -> Repository {
    data_set(&[
        ("README.md", CARD.into()),
        ("one/b.jsonl", rows("b")),
        ("one/a.jsonl", rows("a")),
        ("two.jsonl", rows("c")),
        ("three.jsonl", rows("d")),
    ])
}

/// A recipe that trains on `data`, without another name of the hub.
fn recipe(data: &Value, samples: u64) -> String {
    let mut spec = json!({
        "objective": "language-modelling",
        "model": {"config": {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 260}},
        "tokenizer": {"path": "byte"},
        "batch": {"global": 4, "per_device_batch_size": 2},
        "budget": {"samples": samples},
        "data": {"sequence_length": 16},
    });
    let Value::Object(data) = data.clone() else {
        panic!("{data}")
    };
    spec["data"].as_object_mut().unwrap().extend(data);
    native(&spec)
}

fn training(source: &Value) -> String {
    recipe(&json!({"train": [source]}), 16)
}

/// The files of the data set whose bytes were requested, without its card.
fn requested(server: &Server) -> Vec<String> {
    let asked = server.asked().into_iter().filter(|asked| asked.gets(""));
    let names = asked.filter_map(|asked| {
        let (_, file) = asked.path.split_once("/resolve/")?;
        let (_, name) = file.split_once('/')?;
        Some(name.to_owned())
    });
    let mut names: Vec<String> = names.filter(|name| name != "README.md").collect();
    names.dedup();
    names
}

fn manifest(place: &Place, run: &str) -> Value {
    let file = File::open(place.path(run).join("data/manifest.json")).unwrap();
    serde_json::from_reader(file).unwrap()
}

fn refusal(place: &Place, output: &Output) -> String {
    assert!(!output.status.success());
    assert!(!place.path("run").exists());
    place.text(output)
}

#[test]
fn a_data_set_of_the_hub_is_downloaded_once_and_trained() {
    let server = Server::of(chats());
    let data = json!({"train": [{"path": ID}], "evaluation": [{"path": ID}]});
    let place = Place::with(&server.endpoint, &recipe(&data, 16));
    for words in [
        &["plan", "recipe.yaml", "--trainer", "built-in"][..],
        &["check", "recipe.yaml", "--trainer", "built-in"],
    ] {
        place.succeeds(&mut place.command(words));
    }
    let output = place.launch("dry").arg("--dry-run").output().unwrap();
    let text = place.text(&output);
    let line = "the launch downloads data set acme/chats at revision main\n";
    assert_eq!(text.matches(line).count(), 1, "{text}");
    assert!(server.asked().is_empty(), "a plan downloads nothing");

    // Only the files of the config and of both splits.
    place.succeeds(&mut place.launch("first"));
    let asked = server.asked();
    assert_eq!(
        requested(&server),
        ["one/a.jsonl", "one/b.jsonl", "two.jsonl"]
    );
    for asked in &asked {
        assert_eq!(asked.header("authorization"), Some("Bearer hf_secret"));
    }
    let folder = place.path("home/hub/datasets--acme--chats");
    let snapshot = folder.join("snapshots").join(COMMIT);
    let main = std::fs::read_to_string(folder.join("refs/main")).unwrap();
    assert_eq!(main, COMMIT);
    let link = snapshot.join("one/a.jsonl").read_link().unwrap();
    let blob = format!("../../../blobs/{}", etag("one/a.jsonl", &rows("a")));
    assert_eq!(link.to_str(), Some(&*blob));
    assert_eq!(
        place.run_of("first")["spec"]["data"]["train"][0]["path"],
        json!(snapshot)
    );
    // The manifest names repository and commit.
    let first = manifest(&place, "first");
    assert_eq!(
        first["sources"][0]["path"],
        json!(snapshot.join("one/a.jsonl"))
    );
    assert_eq!(first["evaluation"]["samples"], 40);

    // From the cache, with and without a network.
    place.succeeds(&mut place.launch("second"));
    place.succeeds(place.launch("third").env("HF_HUB_OFFLINE", "1"));
    assert_eq!(server.asked().len(), asked.len());

    // A copy on this machine is the same data.
    for (name, bytes) in chats().files {
        let path = place.path("copy").join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
    let mut copied = place.launch("copied");
    copied.args(["data.train.0.path=copy", "data.evaluation.0.path=copy"]);
    place.succeeds(&mut copied);
    assert_eq!(
        manifest(&place, "copied")["fingerprint"],
        first["fingerprint"]
    );
    assert_eq!(server.asked().len(), asked.len());

    // Another config is in no snapshot yet.
    let mut offline = place.launch("run");
    let other = "data.train.0.config=fr";
    offline.arg(other).env("HF_HUB_OFFLINE", "1");
    let text = refusal(&place, &offline.output().unwrap());
    assert!(text.contains("error[data-missing]"), "{text}");
    place.succeeds(place.launch("other").arg(other));
    assert_eq!(requested(&server)[3..], ["three.jsonl"]);
    assert_eq!(
        manifest(&place, "other")["sources"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
}

#[test]
fn a_broken_download_of_data_continues_with_a_range() {
    let name = "data/train-00000-of-00001.parquet";
    let bytes = parquet("a");
    let breaks: Trouble = Box::new(|asked, number, answer| {
        let breaks_after = (asked.is_lfs && number == 0).then_some(1000);
        Answer {
            breaks_after,
            ..answer
        }
    });
    let repository = data_set(&[
        (name, bytes.clone()),
        ("data/test-00000-of-00001.parquet", parquet("b")),
    ]);
    let server = Server::with(vec![repository], breaks);
    let place = Place::with(&server.endpoint, &training(&json!({"path": ID})));
    place.succeeds(&mut place.launch("run"));
    let asked = server.asked().into_iter().filter(|asked| asked.is_lfs);
    let asked: Vec<_> = asked.collect();
    let ranges: Vec<_> = asked.iter().map(|asked| asked.header("range")).collect();
    assert_eq!(ranges, [None, Some("bytes=1000-")]);
    assert!(
        asked
            .iter()
            .all(|asked| asked.header("authorization").is_none())
    );
    assert_eq!(requested(&server), [name]);
    let blob = place
        .path("home/hub/datasets--acme--chats/blobs")
        .join(etag(name, &bytes));
    assert_eq!(std::fs::read(blob).unwrap(), bytes);
    assert_eq!(manifest(&place, "run")["train"]["samples"], 2000);
}

#[test]
fn data_that_a_script_makes_are_those_of_the_hubs_parquet_files() {
    let main = || {
        data_set(&[
            ("chats.py", b"import csv".to_vec()),
            ("rows.csv", b"a,b".to_vec()),
        ])
    };
    let converted = |repository: Repository| Repository {
        revision: "refs/convert/parquet",
        commit: CONVERTED,
        ..repository
    };
    let files = [
        ("en/train/0000.parquet", parquet("a")),
        ("en/train/0001.parquet", parquet("b")),
        ("en/test/0000.parquet", parquet("c")),
        ("fr/train/0000.parquet", parquet("d")),
    ];
    let usual = || -> Trouble { Box::new(|_, _, answer| answer) };
    let server = Server::with(vec![main(), converted(data_set(&files))], usual());
    let place = Place::with(
        &server.endpoint,
        &training(&json!({"path": ID, "config": "en"})),
    );
    place.succeeds(&mut place.launch("first"));
    let of_train = ["en/train/0000.parquet", "en/train/0001.parquet"];
    assert_eq!(requested(&server), of_train);
    let folder = place.path("home/hub/datasets--acme--chats");
    let commit = std::fs::read_to_string(folder.join("refs/refs/convert/parquet")).unwrap();
    assert_eq!(commit, CONVERTED);
    assert_eq!(manifest(&place, "first")["train"]["samples"], 4000);
    let asked = server.asked().len();
    place.succeeds(place.launch("second").env("HF_HUB_OFFLINE", "1"));
    assert_eq!(server.asked().len(), asked);

    // No config is the default one, and another revision has no such files.
    let texts = [
        training(&json!({"path": ID})),
        training(&json!({"path": ID, "config": "en", "revision": COMMIT})),
    ]
    .map(|recipe| {
        let place = Place::with(&server.endpoint, &recipe);
        refusal(&place, &place.launch("run").output().unwrap())
    });
    let alone = Server::of(main());
    let place = Place::with(&alone.endpoint, &training(&json!({"path": ID})));
    let without = refusal(&place, &place.launch("run").output().unwrap());
    insta::assert_snapshot!([&texts[..], &[without]].concat().join("\n"), @"
    error: data.train.0.config: acme/chats has the configs en, fr, and no default; name one of its configs

    error: data.train.0.path: acme/chats has no data in a format that is read: the script chats.py makes them; write them as .jsonl or .parquet files, and name the directory of these

    error: data.train.0.path: acme/chats has no data in a format that is read: the script chats.py makes them, and the hub offers no refs/convert/parquet of it; write them as .jsonl or .parquet files, and name the directory of these
    ");
}

#[test]
fn data_that_cannot_be_downloaded_end_with_the_next_command() {
    let answers = |answer: fn() -> Answer| -> Trouble { Box::new(move |_, _, _| answer()) };
    let usual: Trouble = Box::new(|_, _, answer| answer);
    let servers = [
        Server::with(
            vec![chats()],
            answers(|| Answer::of(401).with("X-Error-Code", "RepoNotFound")),
        ),
        Server::with(
            vec![chats()],
            answers(|| Answer::of(403).with("X-Error-Code", "GatedRepo")),
        ),
        Server::with(vec![], usual),
        Server::with(
            vec![chats()],
            answers(|| Answer::of(429).with("Retry-After", 100_000)),
        ),
    ];
    let mut texts = Vec::new();
    let endpoints = servers.iter().map(|server| server.endpoint.as_str());
    let source = json!({"path": ID});
    for endpoint in endpoints.chain([NO_SERVER]) {
        let place = Place::with(endpoint, &training(&source));
        let output = place.launch("run").output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        texts.push(refusal(&place, &output));
    }
    let place = Place::with(NO_SERVER, &training(&source));
    let output = place.launch("run").env("HF_HUB_OFFLINE", "1").output();
    texts.push(refusal(&place, &output.unwrap()));
    let server = Server::of(chats());
    for source in [
        json!({"path": ID, "split": "validation"}),
        json!({"path": ID, "config": "de"}),
        json!({"path": ID, "revision": "v2"}),
    ] {
        let place = Place::with(&server.endpoint, &training(&source));
        texts.push(refusal(&place, &place.launch("run").output().unwrap()));
        assert!(requested(&server).is_empty());
    }
    insta::assert_snapshot!(texts.join("\n"));
}

#[test]
fn a_data_set_that_upstream_knows_by_name_is_downloaded_and_converted() {
    let Some(corpus) = corpus::root() else { return };
    let row = |prompt| {
        let of = |answer| format!("\n\nHuman: {prompt}\n\nAssistant: {answer}");
        json!({"chosen": of("c d"), "rejected": of("d a b")}).to_string() + "\n"
    };
    let prompts = ["a b", "b c", "c d", "d a"].map(row).concat();
    let rows = |times| prompts.repeat(times).into_bytes();
    let dialogues = Repository {
        id: "Anthropic/hh-rlhf",
        ..data_set(&[("train.jsonl", rows(10)), ("test.jsonl", rows(2))])
    };
    let unchanged = Box::new(|_: &Asked, _, answer| answer);
    let server = Server::with(vec![launch::model(), dialogues], unchanged);
    let place = Place::with(&server.endpoint, "");
    let tree = corpus.join("eric-mitchell__direct-preference-optimization/f8b8c0f49d/config");
    let tree = tree.to_str().unwrap();
    let words = "model=blank_model model.name_or_path=acme/tiny exp_name=x batch_size=4 max_length=16 \
                 n_epochs=null n_examples=8 gradient_accumulation_steps=1 eval_every=8 \
                 n_eval_examples=8 eval_batch_size=4 --recipe-gpus 1 --procs 1 --device cpu --quiet";
    for (loss, samples) in [
        ("loss=dpo loss.beta=0.1 max_prompt_length=8", 40),
        ("loss=sft max_prompt_length=null", 4),
    ] {
        let out = loss.split(' ').next().unwrap();
        let named = format!("launch {tree} {loss} datasets=[hh] --out {out} {words}");
        let named: Vec<&str> = named.split_whitespace().collect();
        place.succeeds(&mut place.command(&named));
        // Supervised training has one answer of each prompt.
        assert_eq!(manifest(&place, out)["train"]["samples"], samples, "{loss}");
    }
    let other = format!("launch {tree} loss=dpo loss.beta=0.1 datasets=[se] --out other {words}");
    let other: Vec<&str> = other.split_whitespace().collect();
    let output = place.command(&other).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    insta::assert_snapshot!(place.text(&output).replace(tree, "[tree]"));
}

#[test]
fn the_mixtures_of_the_handbook_name_config_and_split() {
    let sums = |word: &str| {
        let row = json!({"messages": [
            {"role": "user", "content": format!("{word}?")},
            {"role": "assistant", "content": word},
        ]});
        format!("{row}\n").repeat(40).into_bytes()
    };
    let files = [
        ("en/train_sft.jsonl", sums("a")),
        ("en/test_sft.jsonl", sums("b")),
        ("fr/train_sft.jsonl", sums("c")),
    ];
    let common = "per_device_train_batch_size: 2\ngradient_accumulation_steps: 2\nmax_seq_length: 64\nmax_steps: 2\n\
                  learning_rate: 1.0e-3\nevenkeel:\n  tokenizer: {path: byte}\n  batch: {gpus: 1}\n  model: {config: \
                  {hidden_size: 16, num_attention_heads: 2, num_hidden_layers: 1, vocab_size: 260}}\n";
    let mixer = "dataset_mixer:\n  acme/chats: 0.5\ndataset_splits: [train_sft, test_sft]\ndataset_configs: [en]\n";
    let mixture = "dataset_mixture:\n  datasets:\n  - {id: acme/chats, config: en, split: train_sft, weight: 0.5}\n  \
                   - {id: acme/chats, config: en, split: test_sft}\n";
    for (mixed, [trained, evaluated]) in [(mixer, [20, 40]), (mixture, [60, 0])] {
        let server = Server::of(data_set(&files));
        let place = Place::with(&server.endpoint, &format!("{mixed}{common}"));
        place.succeeds(&mut place.launch("run"));
        assert_eq!(
            requested(&server),
            ["en/train_sft.jsonl", "en/test_sft.jsonl"]
        );
        let manifest = manifest(&place, "run");
        assert_eq!(manifest["train"]["samples"], trained);
        let samples = manifest["evaluation"].get("samples").cloned();
        assert_eq!(samples.unwrap_or_else(|| json!(0)), evaluated);
    }
}

#[test]
fn a_resume_keeps_the_commit_of_its_data() {
    let server = Server::of(chats());
    let data = json!({"train": [{"path": ID}]});
    let place = Place::with(&server.endpoint, &recipe(&data, 10_000_000));
    place.drain(place.launch("run"), 1);
    let asked = server.asked().len();
    // The branch moves, here to a commit without files.
    let folder = place.path("home/hub/datasets--acme--chats");
    let moved = COMMIT.replace('0', "f");
    std::fs::create_dir(folder.join("snapshots").join(&moved)).unwrap();
    std::fs::write(folder.join("refs/main"), &moved).unwrap();
    let mut resume = place.launch("run");
    resume.arg("--resume").env("HF_ENDPOINT", NO_SERVER);
    place.drain(resume, 2);
    assert_eq!(server.asked().len(), asked);

    // Without its snapshot it names the commit.
    std::fs::remove_dir_all(folder.join("snapshots").join(COMMIT)).unwrap();
    let output = place.launch("run").arg("--resume").output().unwrap();
    let text = place.text(&output);
    let help = format!("`hf download {ID} --repo-type dataset --revision {COMMIT}`");
    assert!(text.contains(&help), "{text}");
}
