//! Upstream's launch scripts, which are not part of this repository: each is read with the numbers of a table
//! that were compared with the script by hand, or refused.

use std::collections::BTreeMap;
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

/// `EVENKEEL_SCRIPTS`, or `../shared/scripts` beside the crate. `None`: it is missing; prints a message.
fn root() -> Option<PathBuf> {
    let path = std::env::var_os("EVENKEEL_SCRIPTS").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/scripts"),
        PathBuf::from,
    );
    if path.is_dir() {
        return Some(path);
    }
    eprintln!("skipped: no upstream scripts at {}", path.display());
    None
}

/// Data-parallel size, micro-batch and accumulation of the plan for a number of GPUs, or the rules of the
/// errors.
fn planned(folder: &Path, path: &str, gpus: &str) -> Result<[u64; 3], String> {
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
        _ => Err(format!(
            "{plan} {}",
            String::from_utf8_lossy(&output.stderr)
        )),
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
        if found.clone().ok() != expected {
            wrong.insert(format!("{name} {gpus}"), (expected, found));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
