//! The wheel and the archive of the program, each installed into an empty place, and the schemas for editors.
//! `PACKAGING_PYTHON` is a Python with packaging/requirements.txt; scripts/test.sh makes it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use serde_json::Value;

/// The Python with maturin; `None`, after printing the reason, if there is none.
fn python() -> Option<PathBuf> {
    let given = std::env::var_os("PACKAGING_PYTHON").filter(|path| !path.is_empty());
    if given.is_none() {
        assert!(std::env::var_os("CI").is_none(), "set PACKAGING_PYTHON");
        eprintln!("skipped: set PACKAGING_PYTHON to a Python with packaging/requirements.txt");
    }
    given.map(|path| Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
}

fn run(command: &mut Command) -> Output {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
    output
}

fn text(command: &mut Command) -> String {
    String::from_utf8(run(command).stdout).unwrap()
}

/// The folder with the wheel and the archive of this build.
fn artefacts(python: &Path) -> &'static Path {
    static BUILT: OnceLock<tempfile::TempDir> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let out = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/package.sh");
        let mut script = Command::new(script);
        // A build of ring with other values of these, which cargo sets for tests, is another build.
        let of_this_package =
            |name: &String| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
        let names = std::env::vars()
            .map(|(name, _)| name)
            .filter(of_this_package);
        names.for_each(|name| {
            script.env_remove(name);
        });
        run(script
            .env("PACKAGING_PYTHON", python)
            .env("PROFILE", "dev")
            .env("OUT", out.path()));
        out
    });
    built.path()
}

fn only(folder: &Path, end: &str) -> PathBuf {
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|file| file.unwrap().path());
    let mut files = files.filter(|file| file.to_str().unwrap().ends_with(end));
    let found = files.next().unwrap_or_else(|| panic!("no {end}"));
    assert_eq!(files.next(), None);
    found
}

/// Checks a prefix: the program plans, and its man pages, completions and schemas are where other programs look.
fn is_whole(prefix: &Path) {
    let program = prefix.join("bin/evenkeel");
    assert_eq!(
        text(Command::new(&program).arg("--version")).trim(),
        concat!("evenkeel ", env!("CARGO_PKG_VERSION"))
    );
    let planned = text(
        Command::new(&program)
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .args([
                "plan",
                "examples/sft/recipe.yaml",
                "--recipe-gpus",
                "8",
                "--gpus",
                "4",
            ]),
    );
    assert!(planned.contains("4 × 16 × 2 = 128"), "{planned}");
    let share = |file: &str| {
        let path = prefix.join("share").join(file);
        std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    assert!(share("man/man1/evenkeel-launch.1").contains(".TH"));
    assert!(
        !prefix.join("share/man/man1/evenkeel-rank.1").exists(),
        "a hidden command"
    );
    assert!(share("bash-completion/completions/evenkeel").contains("launch"));
    assert!(share("zsh/site-functions/_evenkeel").starts_with("#compdef evenkeel"));
    assert!(share("fish/vendor_completions.d/evenkeel.fish").contains("launch"));
    for kind in ["recipe", "trainingjob"] {
        let schema: Value =
            serde_json::from_str(&share(&format!("evenkeel/{kind}.schema.json"))).unwrap();
        assert_eq!(schema["type"], "object");
    }
}

#[test]
fn the_wheel_installs_into_a_fresh_environment() {
    let Some(python) = python() else { return };
    let wheel = only(artefacts(&python), ".whl");
    let name = wheel.file_name().unwrap().to_str().unwrap();
    assert!(name.starts_with("evenkeel_launcher-"), "{name}");
    let place = tempfile::tempdir().unwrap();
    let prefix = place.path().join("venv");
    run(Command::new("python3").args(["-m", "venv"]).arg(&prefix));
    let pip = || {
        let mut pip = Command::new(prefix.join("bin/python"));
        pip.args(["-m", "pip", "--disable-pip-version-check", "--quiet"]);
        pip
    };
    run(pip()
        .args(["install", "--no-index", "--no-deps"])
        .arg(&wheel));
    is_whole(&prefix);
    run(pip().args(["uninstall", "--yes", "evenkeel-launcher"]));
    assert!(!prefix.join("bin/evenkeel").exists());
    assert!(!prefix.join("share/man/man1/evenkeel-launch.1").exists());
}

#[test]
fn the_archive_runs_where_it_is_unpacked() {
    let Some(python) = python() else { return };
    let archive = only(artefacts(&python), ".tar.gz");
    let place = tempfile::tempdir().unwrap();
    run(Command::new("tar")
        .arg("-xzf")
        .arg(&archive)
        .arg("-C")
        .arg(place.path()));
    let name = archive.file_name().unwrap().to_str().unwrap();
    is_whole(&place.path().join(name.strip_suffix(".tar.gz").unwrap()));
}

/// What a validator says of a file by a schema: the places of its errors.
fn judged(python: &Path, kind: &str, file: &Value) -> Vec<String> {
    let schema = text(Command::new(env!("CARGO_BIN_EXE_evenkeel")).args(["schema", kind]));
    let script = "import json, sys, jsonschema
schema, file = json.loads(sys.argv[1]), json.loads(sys.argv[2])
kind = jsonschema.validators.validator_for(schema)
kind.check_schema(schema)
for error in kind(schema).iter_errors(file):
    print('.'.join(map(str, error.absolute_path)), '|', error.message)";
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("judge.py");
    // Too long for an argument.
    let script = script
        .replace("sys.argv[1]", "open(sys.argv[1]).read()")
        .replace("sys.argv[2]", "open(sys.argv[2]).read()");
    std::fs::write(&path, script).unwrap();
    let write = |name: &str, text: String| {
        let path = place.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let schema = write("schema.json", schema);
    let file = write("file.json", file.to_string());
    let said = text(Command::new(python).arg(path).arg(schema).arg(file));
    said.lines().map(str::to_owned).collect()
}

fn yaml(path: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    let text = std::fs::read_to_string(path).unwrap();
    // The document of the job, where a volume is beside it.
    let documents = text
        .split("\n---\n")
        .map(|text| serde_saphyr::from_str(text).unwrap());
    let mut documents = documents
        .filter(|value: &Value| value["kind"] == "Recipe" || value["kind"] == "TrainingJob");
    documents.next().unwrap()
}

#[test]
fn a_validator_accepts_our_examples_and_finds_the_mistakes_of_others() {
    let Some(python) = python() else { return };
    // maturin moves the program away for a moment.
    artefacts(&python);
    for example in [
        "examples/quickstart.yaml",
        "examples/microllama-300m-ddp-norm.yaml",
        "examples/tinyllama-1.1b-fsdp-norm.yaml",
        "examples/ablation/constant.yaml",
        "examples/ablation/norm-test.yaml",
        "examples/ablation/replay.yaml",
        "examples/ablation/stage-wise.yaml",
    ] {
        assert_eq!(
            judged(&python, "recipe", &yaml(example)),
            [""; 0],
            "{example}"
        );
    }
    for example in ["trainingjob", "microllama-300m", "tinyllama-1.1b"] {
        let path = format!("examples/kubernetes/{example}.yaml");
        assert_eq!(
            judged(&python, "trainingjob", &yaml(&path)),
            [""; 0],
            "{path}"
        );
    }

    let mut recipe = yaml("examples/quickstart.yaml");
    recipe["spec"]["batch"]["globl"] = 64.into();
    recipe["spec"]["batch"]["per_device_batch_size"] = 0.into();
    recipe["spec"]["schedule"]["kind"] = "norm-tset".into();
    let said = judged(&python, "recipe", &recipe).join("\n");
    for place in [
        "spec.batch |",
        "spec.batch.per_device_batch_size |",
        "spec.schedule |",
    ] {
        assert!(said.contains(place), "{place}: {said}");
    }

    let mut job = yaml("examples/kubernetes/trainingjob.yaml");
    job["spec"]["nodez"] = 3.into();
    job["spec"]["nodes"] = "three".into();
    job["spec"]["trainer"]["device"] = "Gpu".into();
    let said = judged(&python, "trainingjob", &job).join("\n");
    for place in ["spec |", "spec.nodes |", "spec.trainer.device |"] {
        assert!(said.contains(place), "{place}: {said}");
    }
}
