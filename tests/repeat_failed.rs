//! `scripts/repeat-failed.sh` on a test binary with planted failures.

use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// Tests that fail, abort or hang at first, and one that always fails. Each is fine unless a file of its name exists.
const PLANTED: &str = r#"
    fn planted(name: &str) -> bool {
        std::path::Path::new(&std::env::var("PLANTED").unwrap()).join(name).exists()
    }
    fn planted_once(name: &str) -> bool {
        let planted = planted(name);
        if planted { std::fs::remove_file(format!("{}/{name}", std::env::var("PLANTED").unwrap())).unwrap() }
        planted
    }
    #[test] fn passes() {}
    #[test] #[should_panic] fn panics() { panic!() }
    #[test] #[ignore] fn ignored() { panic!() }
    #[test] #[ignore = "takes minutes: elsewhere"] fn ignored_for_a_reason() { panic!() }
    #[test] #[should_panic(expected = "another")] fn panics_otherwise() { if planted_once("panics") { panic!("one") } panic!("another") }
    mod module {
        #[test] fn fails_once() { if super::planted_once("fails-once") { panic!("for the first time") } }
    }
    #[test] fn aborts_once() { if planted_once("aborts-once") { std::process::abort() } }
    #[test] fn hangs_once() { if planted_once("hangs-once") { loop { std::thread::park() } } }
    #[test] fn fails() { if planted("fails") { panic!("again and again") } }
"#;

struct Planted {
    directory: TempDir,
    binary: std::path::PathBuf,
}

impl Planted {
    fn new(failures: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        // Cargo's runner knows test binaries by their directory.
        std::fs::create_dir(path.join("deps")).unwrap();
        std::fs::write(path.join("planted.rs"), PLANTED).unwrap();
        let binary = path.join("deps/planted-0123456789abcdef");
        let compiled = Command::new("rustc")
            .args(["--edition", "2024", "--test", "-o"])
            .args([&binary, &path.join("planted.rs")])
            .status()
            .unwrap();
        assert!(compiled.success());
        for failure in failures {
            std::fs::write(path.join(failure), "").unwrap();
        }
        Self { directory, binary }
    }

    fn run(&self) -> Output {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/repeat-failed.sh");
        Command::new(script)
            .args([&self.binary, Path::new("--nocapture")])
            .env("PLANTED", self.directory.path())
            .env("FLAKY", self.flaky(""))
            .env("TEST_LIMIT", "10")
            .output()
            .unwrap()
    }

    fn flaky(&self, path: &str) -> std::path::PathBuf {
        self.directory.path().join("flaky").join(path)
    }

    /// The tests that are listed as flaky, without the files of their outputs.
    fn listed(&self) -> Vec<String> {
        let list = std::fs::read_to_string(self.flaky("list")).unwrap_or_default();
        let test = |line: &str| line.split_once(':').map_or("", |(test, _)| test).to_owned();
        list.lines()
            .map(|line| test(&line.replace("::", ".")))
            .collect()
    }
}

#[test]
fn a_test_that_passes_when_repeated_is_listed_with_both_outputs() {
    let planted = Planted::new(&["fails-once"]);
    let output = planted.run();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(planted.listed(), ["planted module.fails_once"]);
    let kept = |file: &str| {
        let path = planted.flaky("planted/module.fails_once").join(file);
        std::fs::read_to_string(path).unwrap()
    };
    assert!(kept("first.log").contains("for the first time"));
    assert!(kept("repetition-1.log").contains("test module::fails_once ... ok"));
    assert!(kept("repetition-1.log").contains("running 1 test"));
}

#[test]
fn a_test_that_fails_three_times_ends_the_run_with_its_outputs_last() {
    let planted = Planted::new(&["fails"]);
    let output = planted.run();
    assert_eq!(output.status.code(), Some(101), "{output:?}");
    assert_eq!(planted.listed(), [""; 0]);
    let failed = std::fs::read_to_string(planted.flaky("failed")).unwrap();
    assert!(String::from_utf8_lossy(&output.stdout).ends_with(&failed));
    // Both repetitions.
    assert_eq!(failed.matches("again and again").count(), 2, "{failed}");
}

#[test]
fn tests_without_a_result_are_repeated() {
    // The process dies with SIGABRT.
    let planted = Planted::new(&["aborts-once"]);
    let output = planted.run();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(planted.listed().len(), 1, "{output:?}");

    // The process is killed after its limit.
    let planted = Planted::new(&["hangs-once"]);
    let output = planted.run();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(planted.listed(), ["planted hangs_once"]);
    let first = std::fs::read_to_string(planted.flaky("planted/hangs_once/first.log")).unwrap();
    assert!(first.contains("no end after 10 s"), "{first}");
}

#[test]
fn a_test_that_panics_with_another_message_is_repeated() {
    let planted = Planted::new(&["panics"]);
    let output = planted.run();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(planted.listed(), ["planted panics_otherwise"]);
}

#[test]
fn a_run_without_failures_repeats_nothing() {
    let planted = Planted::new(&[]);
    let output = planted.run();
    assert!(output.status.success(), "{output:?}");
    assert!(!planted.flaky("").exists());
    assert_eq!(
        String::from_utf8_lossy(&output.stdout)
            .matches("running")
            .count(),
        1
    );
}
