//! Upstream's launch scripts, which are not part of this repository: each is read with the numbers of a table
//! that were compared with the script by hand, or refused.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Scripts that the table's revision read and this one refuses, with the reason.
const REFUSED: &[(&str, &str)] = &[];

/// Scripts that the table's revision refused and this one reads, with data-parallel size, micro-batch and
/// accumulation for 4 and for 8 GPUs, and the reason.
const READ: &[(&str, [[u64; 3]; 2], &str)] = &[(
    "artidoro/qlora/scripts/finetune_llama2_guanaco_7b.sh",
    [[4, 1, 32], [8, 1, 16]],
    "it ends in a backslash, which bash removes",
)];

/// Refused scripts without a place of the error, and the reason.
const WITHOUT_PLACE: &[(&str, &str)] = &[
    ("OptimalScale/LMFlow/scripts/archive/run_app.sh", MISSING),
    ("OptimalScale/LMFlow/scripts/run_finetune.sh", MISSING),
    (
        "OptimalScale/LMFlow/scripts/run_finetune_with_custom_optim.sh",
        MISSING,
    ),
    (
        "deepspeedai/DeepSpeedExamples/training/bing_bert/1-bit_adam/nccl/ds_train_bert_onebitadam_bsz4k_seq128_nccl.sh",
        MISSING,
    ),
    (
        "deepspeedai/DeepSpeedExamples/training/bing_bert/1-bit_lamb/nccl/ds_train_bert_onebitlamb_bsz64k_seq128_nccl.sh",
        MISSING,
    ),
    (
        "deepspeedai/DeepSpeedExamples/training/bing_bert/ds_train_bert_nvidia_data_bsz64k_seq128.sh",
        MISSING,
    ),
    (
        "deepspeedai/DeepSpeedExamples/training/imagenet/run_ds_fp16.sh",
        MISSING,
    ),
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

/// The error names a file that the folder lacks, instead of a line.
const MISSING: &str = "unreadable-file";
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

#[test]
fn every_script_is_read_with_its_numbers_or_refused() {
    let Some(root) = root() else { return };
    let table = std::fs::read_to_string(root.join("baseline.csv")).unwrap();
    let mut wrong = BTreeMap::new();
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
        let refused = REFUSED.iter().any(|(script, _)| *script == name);
        let read = READ.iter().find(|(script, ..)| *script == name);
        let expected = match (refused, read) {
            (true, _) => None,
            (false, Some((_, numbers, _))) => Some(numbers[usize::from(*gpus == "8")]),
            (false, None) => stated,
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
            wrong.insert(format!("{name} {gpus}"), (flaw, expected, found));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
