//! Upstream's launch scripts, which are not part of this repository: each is read with the numbers of a table
//! that were compared with the script by hand, or refused.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Scripts that the table's revision read and this one refuses, with `refused now: ` and the reason.
const REFUSED: &[(&str, &str)] = &[];

/// Scripts that the table's revision refused and this one reads, with data-parallel size, micro-batch and
/// accumulation for 4 and for 8 GPUs, and `read now: ` with the reason.
const READ: &[(&str, [[u64; 3]; 2], &str)] = &[(
    "artidoro/qlora/scripts/finetune_llama2_guanaco_7b.sh",
    [[4, 1, 32], [8, 1, 16]],
    "read now: it ends in a backslash, which bash removes",
)];

/// Refused scripts without a place of the error, and the reason.
const WITHOUT_PLACE: &[(&str, &str)] = &[
    (
        "huggingface/peft/examples/boft_controlnet/eval.sh",
        NO_BATCH,
    ),
    (
        "huggingface/peft/examples/boft_controlnet/train_controlnet.sh",
        NO_BATCH,
    ),
    (
        "huggingface/peft/examples/boft_dreambooth/train_dreambooth.sh",
        NO_BATCH,
    ),
];

/// Nothing in the script is wrong: it leaves the batch to its program.
const NO_BATCH: &str = "global-batch-unknown";

/// `EVENKEEL_SCRIPTS`, or `../shared/scripts` beside the crate. `None`: it is missing; prints a message, also when
/// the test passes. It must exist on the CI.
fn root() -> Option<PathBuf> {
    let path = std::env::var_os("EVENKEEL_SCRIPTS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/scripts"),
        PathBuf::from,
    );
    if path.is_dir() {
        return Some(path);
    }
    let missing = format!(
        "no upstream scripts at {} (set EVENKEEL_SCRIPTS)",
        path.display()
    );
    assert!(
        std::env::var_os("CI").is_none_or(|ci| ci != "true"),
        "{missing}"
    );
    let _ = writeln!(std::io::stderr(), "SKIPPED: {missing}");
    None
}

/// A script that was not planned.
#[derive(Debug)]
struct Refused {
    exit: Option<i32>,
    /// The diagnostics of severity `error`.
    errors: Vec<Value>,
    stderr: String,
}

impl Refused {
    /// What is wrong with the refusal itself. `without_place`: the rule of an error that has no line.
    fn flaw(&self, without_place: Option<&str>) -> Option<String> {
        let has_line = |error: &Value| error["line"].is_u64() && error["file"].is_string();
        let has_help = |error: &Value| error["help"].as_str().is_some_and(|help| !help.is_empty());
        let expected = |error: &Value| without_place.is_some_and(|rule| error["rule"] == rule);
        let placed = self.errors.iter().any(has_line);
        let flaw = if ![Some(1), Some(2)].contains(&self.exit) {
            "the exit code is neither 1 nor 2"
        } else if self.errors.is_empty() {
            "there is no error in the output"
        } else if !self.errors.iter().all(has_help) {
            "an error has no help"
        } else if without_place.is_some() && (placed || !self.errors.iter().any(expected)) {
            "it is not the refusal in WITHOUT_PLACE"
        } else if without_place.is_none() && !placed {
            "no error has a line"
        } else {
            return None;
        };
        Some(format!("{flaw}; stderr: {}", self.stderr))
    }
}

/// Data-parallel size, micro-batch and accumulation of the plan for a number of GPUs.
fn planned(folder: &Path, path: &str, gpus: &str) -> Result<[u64; 3], Refused> {
    let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .args([
            "plan",
            path,
            "--recipe-gpus",
            "8",
            "--gpus",
            gpus,
            "-o",
            "json",
        ])
        .current_dir(folder)
        .output()
        .unwrap();
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let keys = [
        "data_parallel_size",
        "per_device_batch_size",
        "gradient_accumulation_steps",
    ];
    let numbers = keys.map(|key| plan[key].as_u64());
    match (output.status.code(), numbers) {
        (Some(0), [Some(a), Some(b), Some(c)]) => Ok([a, b, c]),
        (exit, _) => {
            let diagnostics = plan["diagnostics"].as_array().into_iter().flatten();
            let errors = diagnostics.filter(|found| found["severity"] == "error");
            Err(Refused {
                exit,
                errors: errors.cloned().collect(),
                stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
            })
        }
    }
}

/// The page that lists what becomes of each script.
const PAGE: &str = "docs/dialects/upstream-scripts.md";

/// What becomes of a script for 4 and for 8 GPUs, and what has changed since the table's revision.
struct Script {
    plans: Vec<Result<[u64; 3], Refused>>,
    change: &'static str,
}

impl Script {
    /// Its row in one of the two tables of [`PAGE`].
    fn row(&self, name: &str) -> String {
        let change = self.change;
        match self.plans.as_slice() {
            [Ok(four), Ok(eight)] => {
                let [four, eight] = [four, eight].map(|[a, b, c]| format!("{a} × {b} × {c}"));
                format!("| {name} | {four} | {eight} | {change} |\n")
            }
            [Err(refused), Err(_)] => format!("| {name} | {} | {change} |\n", refused.reasons()),
            other => panic!("{name}: read for one number of GPUs alone: {other:?}"),
        }
    }
}

impl Refused {
    /// Messages of the errors with their lines.
    fn reasons(&self) -> String {
        let errors = self.errors.iter().map(|error| {
            let message = error["message"].as_str().unwrap();
            // Without the number that the operating system gives an error.
            let message = message.split(" (os error").next().unwrap();
            let line = error["line"].as_u64();
            line.map_or(message.to_owned(), |line| format!("line {line}: {message}"))
        });
        Vec::from_iter(errors).join("; ")
    }
}

/// The text of [`PAGE`].
fn page(scripts: &BTreeMap<String, Script>) -> String {
    let is_read = |script: &Script| script.plans.iter().all(Result::is_ok);
    let rows = |read: bool| -> Vec<String> {
        let scripts = scripts.iter().filter(|(_, script)| is_read(script) == read);
        scripts.map(|(name, script)| script.row(name)).collect()
    };
    let (read, refused) = (rows(true), rows(false));
    format!(
        "<!-- Generated by tests/scripts.rs: UPDATE=1 cargo test --test scripts -->\n\
         # Launch scripts of upstream projects\n\n\
         What `evenkeel plan SCRIPT --recipe-gpus 8 --gpus N` gives for {} scripts that upstream projects publish. The\n\
         scripts are not part of this repository. The column `before` compares the result with the evaluator of bash\n\
         that Evenkeel had before.\n\n\
         ## Read: {}\n\n\
         The numbers are data-parallel size × micro-batch × accumulation.\n\n\
         | script | 4 GPUs | 8 GPUs | before |\n|---|---|---|---|\n{}\n\
         ## Refused: {}\n\n\
         | script | reason | before |\n|---|---|---|\n{}",
        scripts.len(),
        read.len(),
        read.concat(),
        refused.len(),
        refused.concat(),
    )
}

#[test]
fn every_script_is_read_with_its_numbers_or_refused() {
    let Some(root) = root() else { return };
    let table = std::fs::read_to_string(root.join("baseline.csv")).unwrap();
    let mut wrong = BTreeMap::new();
    let mut scripts: BTreeMap<String, Script> = BTreeMap::new();
    for row in table.lines().skip(1) {
        let fields: Vec<&str> = row.split(',').collect();
        let [
            repository,
            commit,
            path,
            gpus,
            exit,
            _,
            ranks,
            micro,
            accumulation,
            ..,
        ] = fields.as_slice()
        else {
            panic!("{row}");
        };
        let folder = root.join(repository.replace('/', "__")).join(commit);
        let stated = [ranks, micro, accumulation].map(|field| field.parse().ok());
        let stated = match stated {
            [Some(a), Some(b), Some(c)] if *exit == "0" => Some([a, b, c]),
            _ => None,
        };
        let name = format!("{repository}/{path}");
        let refused = REFUSED.iter().find(|(script, _)| *script == name);
        let read = READ.iter().find(|(script, ..)| *script == name);
        let expected = match (refused, read) {
            (Some(_), _) => None,
            (None, Some((_, numbers, _))) => Some(numbers[usize::from(*gpus == "8")]),
            (None, None) => stated,
        };
        let change = match (refused, read) {
            (Some((_, reason)), _) | (None, Some((.., reason))) => reason,
            (None, None) => "the same",
        };
        let found = planned(&folder, path, gpus);
        let flaw = match &found {
            Ok(numbers) => (expected != Some(*numbers)).then(|| "other numbers".to_owned()),
            Err(_) if expected.is_some() => Some("refused".to_owned()),
            Err(refused) => {
                let mut without_place = WITHOUT_PLACE.iter();
                let listed = without_place.find(|(script, _)| *script == name);
                refused.flaw(listed.map(|(_, rule)| *rule))
            }
        };
        if let Some(flaw) = flaw {
            let found = format!("{found:?}");
            wrong.insert(format!("{name} {gpus}"), (flaw, expected, found));
        }
        let plans = Vec::new();
        let script = scripts.entry(name).or_insert(Script { plans, change });
        script.plans.push(found);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(PAGE);
    let page = page(&scripts);
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    let kept = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        kept == page,
        "regenerate {PAGE}: UPDATE=1 cargo test --test scripts"
    );
}
