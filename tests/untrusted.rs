//! What strangers may name or write: recipes, run directories and data that a user only looks at, and the
//! recipes of all namespaces in the controller. None of them reads more than they hold, hangs the reader, or
//! takes its memory.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parquet::basic::{Compression, Type as PhysicalType, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::file::properties::{EnabledStatistics, WriterProperties};
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use parquet::schema::types::Type;
use rustix::fs::{CWD, FileType, Mode, mknodat};

/// Runs the program with an address space for itself and 256 MiB, and returns its exit code and all output.
fn evenkeel(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    limited(folder, 700_000, arguments)
}

/// The largest memory of the program, KiB.
fn peak(output: &str) -> u64 {
    let mut lines = output.lines();
    let peak = lines.find_map(|line| line.strip_prefix("peak KiB: "));
    peak.unwrap().parse().unwrap()
}

/// How the program ended, in one line with the name of its case: the exit code and the first error.
fn ending(folder: &Path, name: &str, code: Option<i32>, output: &str) -> String {
    let output = output.replace(&folder.display().to_string(), "[folder]");
    let mut lines = output.lines();
    let error = lines.find(|line| line.starts_with("error"));
    let error: String = error.unwrap_or("no error").chars().take(200).collect();
    format!("{name}: {} {error}", code.unwrap_or(-1))
}

/// Runs the program with an address space in KiB. The output ends with the program's largest memory.
fn limited(folder: &Path, memory: u64, arguments: &[&str]) -> (Option<i32>, String) {
    let path = folder.join("output");
    let output = File::create(&path).unwrap();
    let mut child = Command::new("sh")
        .args([
            "-c",
            &format!("ulimit -c 0; ulimit -t 30; ulimit -v {memory}; exec \"$0\" \"$@\""),
        ])
        .arg(env!("CARGO_BIN_EXE_evenkeel"))
        .args(arguments)
        .current_dir(folder)
        .env("RAYON_NUM_THREADS", "2")
        .stdin(Stdio::null())
        .stdout(output.try_clone().unwrap())
        .stderr(output)
        .spawn()
        .unwrap();
    // Beside other programs, 30 s of a processor take longer.
    let end = Instant::now() + Duration::from_secs(600);
    let mut peak = String::new();
    loop {
        let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        if let Some(kib) = line.and_then(|line| line.trim().strip_suffix(" kB")) {
            peak = format!("peak KiB: {kib}\n");
        }
        if let Some(status) = child.try_wait().unwrap() {
            let output = fs::read(&path).unwrap();
            return (
                status.code(),
                String::from_utf8_lossy(&output).into_owned() + "\n" + &peak,
            );
        }
        if Instant::now() > end {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("evenkeel {arguments:?} does not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_chat_template_cannot_take_the_memory_of_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // Each text is one instruction; the texts together have 12 GB.
    let template = "chat_template: \"{% set ns = namespace(all=[]) %}{% for i in range(200) %}\
                    {% set ns.all = ns.all + [(i ~ 'x') * 20000000] %}{% endfor %}\", path: byte";
    fs::write(at("recipe.yaml"), recipe(MODEL, template, "data.jsonl")).unwrap();
    let turn = |role| format!("{{\"role\": \"{role}\", \"content\": \"a\"}}");
    let turns = [turn("user"), turn("assistant")].join(", ");
    fs::write(at("data.jsonl"), format!("{{\"messages\": [{turns}]}}\n")).unwrap();
    let arguments = ["launch", "recipe.yaml", "--procs", "1"];
    let (code, output) = limited(folder.path(), 8_000_000, &arguments);
    assert_eq!(code, Some(2), "{output}");
    let words = "the preparation of the data takes more memory than it may";
    assert!(output.contains(words), "{output}");
    assert!(peak(&output) < 3 << 20, "{output}");
}

#[test]
fn no_chat_template_aborts_the_program() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let turn = |role| format!("{{\"role\": \"{role}\", \"content\": \"a\"}}");
    let turns = [turn("user"), turn("assistant")].join(", ");
    fs::write(at("data.jsonl"), format!("{{\"messages\": [{turns}]}}\n")).unwrap();
    let mut endings = Vec::new();
    let nested = "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = [ns.l] %}{% endfor %}";
    for template in [
        format!("{{{{ {}1 }}}}", "not ".repeat(14_000)),
        format!("{{{{ {}1 }}}}", "-".repeat(59_000)),
        format!("{{{{ 1{} }}}}", "|string".repeat(8000)),
        format!("{{{{ messages{} }}}}", "[0]".repeat(19_000)),
        format!("{{{{ {}2 }}}}", "1 if 1 else ".repeat(4900)),
        format!("{{{{ 1{} }}}}", "+1".repeat(29_000)),
        "{{ 1 }}".repeat(10_000),
        "{#".repeat(100_000),
        format!("{nested}{{{{ ns.l }}}}"),
        format!("{nested}{{{{ ns.l|tojson }}}}"),
        "{% block a %}{{ self.a() }}{% endblock %}".to_owned(),
        "{{ 'x\\nx'|indent(10000000000) }}".to_owned(),
        "{{ [1]|batch(10000000000, 0)|list }}".to_owned(),
        "{{ '%10000000000d'|format(1) }}".to_owned(),
    ] {
        let written = serde_json::to_string(&template).unwrap();
        let tokenizer = format!("chat_template: {written}, path: byte");
        fs::write(at("recipe.yaml"), recipe(MODEL, &tokenizer, "data.jsonl")).unwrap();
        let arguments = ["launch", "recipe.yaml", "--procs", "1"];
        let (code, output) = limited(folder.path(), 16_000_000, &arguments);
        let start: String = template.chars().take(60).collect();
        assert!(matches!(code, Some(0..=2)), "{start}: {code:?} {output}");
        assert!(peak(&output) < 3 << 20, "{start}: {output}");
        endings.push(ending(folder.path(), &start, code, &output));
    }
    insta::assert_snapshot!(endings.join("\n"));
}

/// Writes a Parquet file with one text of `length` equal bytes, which few bytes hold.
fn write_bomb(path: &Path, length: usize) {
    let schema = parse_message_type("message bomb { required binary text (STRING); }").unwrap();
    let properties = WriterProperties::builder()
        .set_dictionary_enabled(false)
        .set_statistics_enabled(EnabledStatistics::None)
        .set_compression(Compression::ZSTD(ZstdLevel::default()))
        .build();
    let file = File::create(path).unwrap();
    let mut writer =
        SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties)).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let mut column = group.next_column().unwrap().unwrap();
    let text = ByteArray::from(vec![b'a'; length]);
    let typed = column.typed::<ByteArrayType>();
    typed.write_batch(&[text], None, None).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

/// The number as Thrift's compact protocol writes it.
fn thrift(number: u64) -> Vec<u8> {
    let mut rest = number << 1;
    let mut bytes = Vec::new();
    while rest >= 0x80 {
        bytes.push(rest as u8 | 0x80);
        rest >>= 7;
    }
    bytes.push(rest as u8);
    bytes
}

#[test]
fn no_parquet_file_takes_the_memory_of_the_machine() {
    const LENGTH: usize = 140_000_000;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    // A page of 140 MB in a few KB; and the same that claims 2^31 - 1 bytes, which takes as many digits.
    write_bomb(&at("bomb.parquet"), LENGTH);
    let mut bytes = fs::read(at("bomb.parquet")).unwrap();
    let size = thrift(LENGTH as u64 + 4);
    let place = bytes
        .windows(size.len())
        .position(|found| found == size)
        .unwrap();
    bytes[place..place + size.len()].copy_from_slice(&thrift((1 << 31) - 1));
    fs::write(at("claims.parquet"), bytes).unwrap();
    // A footer of 10^6 columns.
    let field = |n: usize| {
        let field = Type::primitive_type_builder(&format!("c{n}"), PhysicalType::INT32).build();
        Arc::new(field.unwrap())
    };
    let fields = (0..1_000_000).map(field).collect();
    let schema = Type::group_type_builder("wide").with_fields(fields).build();
    let file = File::create(at("wide.parquet")).unwrap();
    let writer = SerializedFileWriter::new(file, Arc::new(schema.unwrap()), Arc::default());
    writer.unwrap().close().unwrap();
    let mut endings = Vec::new();
    for name in ["bomb", "claims", "wide"] {
        let file = format!("{name}.parquet");
        let text = recipe(MODEL, "path: byte", &file).replace("jsonl", "parquet");
        fs::write(
            at("recipe.yaml"),
            text.replace("objective: sft", "objective: language-modelling"),
        )
        .unwrap();
        let arguments = ["launch", "recipe.yaml", "--procs", "1"];
        let (code, output) = limited(folder.path(), 8_000_000, &arguments);
        assert_eq!(code, Some(2), "{name}: {output}");
        assert!(output.len() < 4096, "{name}: {} bytes", output.len());
        assert!(peak(&output) < 3 << 20, "{name}: {output}");
        endings.push(ending(folder.path(), name, code, &output));
    }
    insta::assert_snapshot!(endings.join("\n"));
}

/// A tokenizer of one letter, with these components.
fn write_tokenizer(folder: &Path, components: &str) {
    fs::create_dir_all(folder).unwrap();
    let text = format!(
        "{{\"version\": \"1.0\", {components}, \"model\": {{\"type\": \"BPE\", \"vocab\": {{\"a\": 0, \"b\": 1}}, \
         \"merges\": [], \"unk_token\": \"b\"}}}}"
    );
    fs::write(folder.join("tokenizer.json"), text).unwrap();
    let config = r#"{"eos_token": "b", "bos_token": "a"}"#;
    fs::write(folder.join("tokenizer_config.json"), config).unwrap();
}

#[test]
fn no_tokenizer_takes_the_memory_or_the_time_of_the_machine() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let text = format!("{{\"text\": \"{}c\"}}\n", "a".repeat(200_000));
    fs::write(at("data.jsonl"), text).unwrap();
    let split = |pattern: &str| {
        format!(
            "\"pre_tokenizer\": {{\"type\": \"Split\", \"pattern\": {{\"Regex\": \"{pattern}\"}}, \
             \"behavior\": \"Isolated\", \"invert\": false}}"
        )
    };
    let replace = |pattern: &str, content: &str| {
        format!("{{\"type\": \"Replace\", \"pattern\": {pattern}, \"content\": \"{content}\"}}")
    };
    let normalizer = |steps: Vec<String>| {
        format!(
            "\"normalizer\": {{\"type\": \"Sequence\", \"normalizers\": [{}]}}",
            steps.join(", ")
        )
    };
    let mut endings = Vec::new();
    for (name, components) in [
        ("nested", split("(a+)+b")),
        ("lookahead", split("(?=(a+))*(a|aa)+b")),
        ("backreference", split("(a*)*\\\\1b")),
        ("large", split("(a{1000}){1000}{1000}")),
        ("open", split("((((")),
        ("deep", split(&"(".repeat(100_000))),
        // Each step writes the text 100 times.
        ("growing", {
            let step = replace("{\"String\": \"a\"}", &"a".repeat(100));
            normalizer(vec![step; 8])
        }),
        ("empty", {
            let step = replace("{\"Regex\": \"\"}", &"a".repeat(1000));
            normalizer(vec![step; 8])
        }),
    ] {
        write_tokenizer(&at(name), &components);
        let path = format!("path: {name}");
        let text = recipe(MODEL, &path, "data.jsonl")
            .replace("objective: sft", "objective: language-modelling");
        fs::write(at("recipe.yaml"), text).unwrap();
        let arguments = ["launch", "recipe.yaml", "--procs", "1"];
        let (code, output) = limited(folder.path(), 16_000_000, &arguments);
        assert!(matches!(code, Some(0..=2)), "{name}: {code:?} {output}");
        assert!(peak(&output) < 3 << 20, "{name}: {output}");
        endings.push(ending(folder.path(), name, code, &output));
    }
    insta::assert_snapshot!(endings.join("\n"));
}

#[test]
fn no_weights_take_the_memory_of_the_machine() {
    const TENSOR: &str = r#""dtype": "F32", "shape": [0], "data_offsets": [0, 0]"#;
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::write(at("data.jsonl"), "{\"messages\": []}\n").unwrap();
    let config = "{\"model_type\": \"llama\", \"hidden_size\": 8, \"intermediate_size\": 8, \
                  \"num_hidden_layers\": 1, \"num_attention_heads\": 1, \"vocab_size\": 300, \
                  \"max_position_embeddings\": 8}";
    let file = |header: &str| [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    let many: String = (0..200_000)
        .map(|n| format!("\"{n}\": {{{TENSOR}}}, "))
        .collect();
    let one = |name: &str| format!("{{\"{name}\": {{{TENSOR}}}}}");
    let index = |tensor: &str, file: &str| {
        format!("{{\"weight_map\": {{\"{tensor}\": \"{file}\"}}}}").into_bytes()
    };
    let long = "x".repeat(5_000_000);
    let (whole, shards) = ("model.safetensors", "model.safetensors.index.json");
    for (name, file, bytes) in [
        ("length", whole, u64::MAX.to_le_bytes().to_vec()),
        (
            "many",
            whole,
            file(&format!("{{{many}\"a\": {{{TENSOR}}}}}")),
        ),
        ("name", whole, file(&one(&long))),
        ("outside", shards, index("a", "../length/model.safetensors")),
        ("file", shards, index("a", &long)),
        ("tensor", shards, index(&long, "a.safetensors")),
    ] {
        fs::create_dir(at(name)).unwrap();
        fs::write(at(name).join("config.json"), config).unwrap();
        fs::write(at(name).join(file), bytes).unwrap();
        let path = format!("path: {name}, init: weights");
        fs::write(at("recipe.yaml"), recipe(&path, "path: byte", "data.jsonl")).unwrap();
        let arguments = ["launch", "recipe.yaml", "--procs", "1"];
        let (code, output) = limited(folder.path(), 8_000_000, &arguments);
        assert_eq!(code, Some(2), "{name}: {output}");
        assert!(output.contains(name), "{name}: {output}");
        assert!(output.len() < 4096, "{name}: {} bytes", output.len());
        assert!(peak(&output) < 1 << 20, "{name}: {output}");
    }
}

/// A native recipe that names `data`, a tokenizer and a model.
fn recipe(model: &str, tokenizer: &str, data: &str) -> String {
    format!(
        "apiVersion: evenkeel.dev/v1alpha1
kind: Recipe
metadata: {{name: special}}
spec:
  objective: sft
  batch: {{global: 1, per_device_batch_size: 1}}
  model: {{{model}}}
  tokenizer: {{{tokenizer}}}
  data: {{sequence_length: 8, train: [{{path: {data}, format: jsonl}}]}}
  budget: {{samples: 1}}
"
    )
}

const MODEL: &str = "init: random, config: {hidden_size: 8, intermediate_size: 8, num_hidden_layers: 1, \
                     num_attention_heads: 1, vocab_size: 300, max_position_embeddings: 8}";

#[test]
fn special_files_are_refused_wherever_a_stranger_names_one() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let _socket = UnixListener::bind(at("socket")).unwrap();
    mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let specials = [
        ("kernel", Some("/proc/kmsg")),
        ("zero", Some("/dev/zero")),
        ("folder", Some("/")),
        ("socket", None),
        ("pipe", None),
    ];
    fs::write(at("data.jsonl"), "{\"messages\": []}\n").unwrap();
    fs::write(at("plain.yaml"), "per_device_train_batch_size: 1\n").unwrap();
    for (special, target) in specials {
        if let Some(target) = target {
            symlink(target, at(special)).unwrap();
        }
        // A directory of a model, of a tokenizer, and of a run, each of whose files is the special one.
        let files = [
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "model.safetensors",
            "model.safetensors.index.json",
            "run.json",
            "state.json",
            "lock",
        ];
        let all = format!("all-{special}");
        fs::create_dir(at(&all)).unwrap();
        for file in files {
            symlink(at(special), at(&all).join(file)).unwrap();
        }
        let data = format!("data-{special}.yaml");
        fs::write(at(&data), recipe(MODEL, "path: byte", special)).unwrap();
        let tokenizer = format!("tokenizer-{special}.yaml");
        let path = format!("path: {all}");
        fs::write(at(&tokenizer), recipe(MODEL, &path, "data.jsonl")).unwrap();
        let model = format!("model-{special}.yaml");
        fs::write(at(&model), recipe(&path, "path: byte", "data.jsonl")).unwrap();
        for arguments in [
            vec!["check", special],
            vec!["plan", special, "--gpus", "1"],
            vec!["check", "plain.yaml", "--accelerate", special],
            vec!["launch", &data, "--procs", "1"],
            vec!["launch", &tokenizer, "--procs", "1"],
            vec!["launch", &model, "--procs", "1"],
            vec!["status", &all],
            vec!["report", &all],
        ] {
            let (code, output) = evenkeel(folder.path(), &arguments);
            assert!(
                code.is_some_and(|code| code == 1 || code == 2),
                "{arguments:?} ends with {code:?}: {output}"
            );
            assert!(!output.is_empty(), "{arguments:?}");
        }
    }
}

#[test]
fn huge_recipes_are_refused_before_they_take_memory_or_time() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let words = |count: usize, one: &str| one.repeat(count);
    let train = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 4";
    let numbers = words(490_000, "1,");
    let mut endings = Vec::new();
    let levels = |line: &dyn Fn(usize) -> String| (1..60).map(line).collect::<String>();
    for (name, text) in [
        (
            "wide.json",
            format!("// c\n{{\"train_batch_size\": 8,\n\"x\": [{numbers}1]}}"),
        ),
        (
            "wide-words.json",
            format!(
                "// c\n{{train_batch_size: 8\nx: {}\n}}",
                words(490_000, "1}")
            ),
        ),
        ("comments.json", {
            let comments = words(240_000, "/**/");
            format!("{{\"train_batch_size\": 8, {comments}\"x\": [1,]}}")
        }),
        ("keys.json", {
            let keys: String = (0..60_000).map(|n| format!("\"k{n}\": 1,\n")).collect();
            format!("// c\n{{{keys}\"train_batch_size\": 8}}")
        }),
        (
            "deep.json",
            format!("{{\"train_batch_size\": 8, \"x\": {}", words(300_000, "[")),
        ),
        ("wide.yaml", format!("a: [{numbers}]")),
        ("deep.yaml", words(500_000, "- ")),
        ("aliases.yaml", {
            let lists =
                levels(&|n| format!("a{n}: &a{n} [{}]\n", words(9, &format!("*a{},", n - 1))));
            format!("a0: &a0 [1]\n{lists}")
        }),
        ("merges.yaml", {
            let merged = |n| format!("a{n}: &a{n} {{<<: [*a{0}, *a{0}], k{n}: *a{0}}}\n", n - 1);
            format!("a0: &a0 {{x: 1}}\n{}", levels(&merged))
        }),
        ("duplicates.yaml", words(170_000, "k: 1\n")),
        (
            "digits.yaml",
            format!("per_device_train_batch_size: {}\n", words(1_000_000, "9")),
        ),
        ("unknown.yaml", {
            let keys: String = (0..45_000).map(|n| format!("num_procs{n}: 1\n")).collect();
            format!("compute_environment: LOCAL_MACHINE\n{keys}")
        }),
        (
            "array.sh",
            format!(
                "#!/bin/sh\nA=({})\n{train} \"${{A[@]}}\"\n",
                words(400_000, "x ")
            ),
        ),
        (
            "braces.sh",
            format!("#!/bin/sh\n{}{train}\n", words(200_000, "{ ")),
        ),
        ("doubled.sh", {
            let doubled = levels(&|n| format!("A{n}=$A{0}$A{0}\n", n - 1));
            format!("#!/bin/sh\nA0=xxxxxxxx\n{doubled}{train} --seed $A59\n")
        }),
    ] {
        fs::write(at(name), text).unwrap();
        let (code, output) = evenkeel(folder.path(), &["check", name]);
        assert!(
            matches!(code, Some(0..=2)),
            "{name} ends with {code:?}: {output}"
        );
        assert!(
            output.len() < 1 << 20,
            "{name}: {} bytes of output",
            output.len()
        );
        assert!(peak(&output) < 256 << 10, "{name}: {output}");
        endings.push(ending(folder.path(), name, code, &output));
    }
    insta::assert_snapshot!(endings.join("\n"));
}

#[test]
fn huge_trees_are_refused_before_they_take_memory_or_time() {
    let text = |count: usize, one: &str| one.repeat(count);
    let large = format!("b: \"{}\"\n", text(1_000_000, "x"));
    let deep = format!("# @package {}\nx: 1\n", text(100_000, "p."));
    let all =
        |line: &dyn Fn(usize) -> String, count: usize| (1..count).map(line).collect::<String>();
    let names = "k".repeat(40);
    let mut endings = Vec::new();
    // Lines of the root, and one more file of the tree, `more.yaml`.
    for (lines, more) in [
        (
            format!(
                "x0: a\n{}",
                all(&|n| format!("x{n}: ${{x{0}}}${{x{0}}}\n", n - 1), 60)
            ),
            "",
        ),
        ("x: a${x}\n".to_owned(), ""),
        (format!("x: {}\n", text(200_000, "${")), ""),
        (format!("x: \"{}\"\n", text(250_000, "${x}")), ""),
        (
            all(&|n| format!("{names}{n}: ${{{names}x{n}}}\n"), 4000),
            "",
        ),
        (format!("x: ${{{}}}\n", text(400_000, "a.")), ""),
        ("x: 1\n".to_owned(), deep.as_str()),
        ("x: 1\n".to_owned(), large.as_str()),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let included = "- more\n".repeat(60);
        let included = match more {
            "" => "",
            text if text.starts_with('#') => "- more\n",
            _ => &included,
        };
        let root = format!(
            "defaults:\n- _self_\n{included}- model: base\n- loss: dpo\nexp_name: a\n{lines}"
        );
        write("config/config.yaml", &root);
        write("config/more.yaml", more);
        write("config/model/base.yaml", "batch_size: 8\n");
        write("config/loss/dpo.yaml", "name: dpo\nbeta: 0.1\n");
        let arguments = [
            "check",
            "config",
            "--dialect",
            "halos",
            "--dialect-version",
            "head",
        ];
        let (code, output) = evenkeel(folder.path(), &arguments);
        let begin: String = lines.chars().take(60).collect();
        assert!(
            matches!(code, Some(1 | 2)),
            "{begin} ends with {code:?}: {output}"
        );
        assert!(
            output.len() < 1 << 20,
            "{begin}: {} bytes of output",
            output.len()
        );
        assert!(peak(&output) < 256 << 10, "{begin}: {output}");
        endings.push(ending(folder.path(), begin.trim(), code, &output));
    }
    insta::assert_snapshot!(endings.join("\n"));
}
