//! The commands of the README, the guide and the migration pages run as printed. Those that cannot run here are listed
//! with the reason.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// How a command begins that no test runs from its page, and why.
const NOT_RUN: &[(&str, &str)] = &[
    (
        "cargo run --release",
        "builds with optimisation; CONTRIBUTING has its time",
    ),
    (
        "target/release/evenkeel",
        "belongs to the quickstart; the endurance tests resize and prove runs",
    ),
    ("pkill ", "belongs to the quickstart"),
    ("export PATH=", "sets the path, as this test does"),
    ("bash scripts/test.sh", "runs this test"),
    ("git clone", "needs the network"),
    ("cd ", "enters the clone"),
    ("accelerate launch", "is what the user ran until now"),
    ("torchrun ", "is what the user ran until now, or output"),
    ("trl ", "is what the user ran until now"),
    (
        "evenkeel launch --gpus 4 -- ",
        "needs GPUs and the user's program; the endurance tests launch these",
    ),
    (
        "evenkeel launch recipe.yaml --recipe-gpus 8 --gpus 4 -- ",
        "needs the user's program",
    ),
    (
        "evenkeel launch recipe.yaml --procs 4 -- ",
        "needs the user's program",
    ),
    (
        "evenkeel launch run.sh --gpus 2 -- ",
        "needs the user's program",
    ),
    (
        "evenkeel launch examples/pytorch/",
        "needs torch; an endurance test launches it",
    ),
    (
        "evenkeel launch recipes/zephyr-7b-beta/sft/config_full.yaml --recipe-gpus 8 --gpus 4",
        "needs the handbook's program",
    ),
    (
        "evenkeel launch recipes/zephyr-7b-beta/sft/config_full.yaml --recipe-gpus 8 --nodes 2",
        "needs a cluster",
    ),
    ("evenkeel resize NAME", "needs a run that is in progress"),
    (
        "evenkeel status",
        "needs a run; the endurance tests ask for one",
    ),
    (
        "evenkeel report NAME",
        "needs a run; the endurance tests make one",
    ),
    (
        "evenkeel generate",
        "needs a trained model; the endurance tests compare texts of every family with transformers'",
    ),
    (
        "evenkeel plan --gpus 4 --emit accelerate -- accelerate launch --config_file multi.yaml train.py …",
        "repeats the command above it with `…`",
    ),
];

const PAGES: &[&str] = &[
    "README.md",
    "docs/guide.md",
    "docs/your-recipe.md",
    "docs/migrate/README.md",
    "docs/migrate/accelerate.md",
    "docs/migrate/alignment-handbook.md",
    "docs/migrate/deepspeed.md",
    "docs/migrate/dpo.md",
    "docs/migrate/halos.md",
    "docs/migrate/transformers.md",
    "docs/migrate/trl.md",
];

/// Files that pages name for those of the user.
const FILES: &[(&str, &str)] = &[
    (
        "multi.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 8\nmixed_precision: bf16\n",
    ),
    (
        "ds.json",
        r#"{"train_batch_size": 96, "train_micro_batch_size_per_gpu": 8}"#,
    ),
    (
        "elastic.json",
        r#"{"elasticity": {"enabled": true, "max_train_batch_size": 128, "micro_batch_sizes": [1, 2, 4, 8, 16], "min_gpus": 1, "max_gpus": 64, "version": 0.1}}"#,
    ),
    (
        "run.sh",
        "torchrun --nproc_per_node 4 run_clm.py --per_device_train_batch_size 8 --gradient_accumulation_steps 2 --output_dir out --do_train\n",
    ),
    (
        "train.sh",
        "torchrun --nproc_per_node $GPUS train.py --do_train --per_device_train_batch_size 4\n",
    ),
    (
        "sft.yaml",
        "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 4\n",
    ),
    (
        "dpo.yaml",
        "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 4\nbeta: 0.1\n",
    ),
    (
        "grpo.yaml",
        "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 8\nnum_generations: 8\n",
    ),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The commands in a page's `sh` blocks, each on one line.
fn commands(page: &str) -> Vec<String> {
    let text = fs::read_to_string(root().join(page)).unwrap();
    let mut found = Vec::new();
    for block in text.split("```sh\n").skip(1) {
        let block = block.split("```").next().unwrap().replace("\\\n", " ");
        let lines = block
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !line.starts_with('#'));
        found.extend(lines.map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")));
    }
    found
}

/// The folder of a revision of the upstream project, in the corpus.
fn upstream(project: &str, revision: &str) -> Option<PathBuf> {
    let corpus = std::env::var_os("EVENKEEL_RECIPES");
    let corpus = corpus.map_or(root().join("../shared/recipes"), PathBuf::from);
    let folder = corpus.join(project).join(revision);
    folder
        .is_dir()
        .then(|| std::path::absolute(folder).unwrap())
}

#[test]
fn every_command_of_the_first_pages_runs_as_printed() {
    let (Some(handbook), Some(halos)) = (
        upstream("huggingface__alignment-handbook", "925acdfe4b"),
        upstream("ContextualAI__HALOs", "4831988636"),
    ) else {
        println!("SKIPPED: no corpus (set EVENKEEL_RECIPES)");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    for (name, text) in FILES {
        fs::write(at(name), text).unwrap();
    }
    fs::copy(root().join("examples/sft/recipe.yaml"), at("recipe.yaml")).unwrap();
    symlink(root().join("examples"), at("examples")).unwrap();
    symlink(handbook.join("recipes"), at("recipes")).unwrap();
    symlink(&halos, at("HALOs")).unwrap();
    let binary = Path::new(env!("CARGO_BIN_EXE_evenkeel")).parent().unwrap();
    let path = format!("{}:{}", binary.display(), std::env::var("PATH").unwrap());

    let mut used = vec![false; NOT_RUN.len()];
    let mut wrong = Vec::new();
    let mut ran = 0;
    for page in PAGES {
        for command in commands(page) {
            let listed = NOT_RUN
                .iter()
                .position(|(begin, _)| command.starts_with(begin));
            if let Some(listed) = listed {
                used[listed] = true;
                continue;
            }
            let refused = command.contains("# refused");
            let output = Command::new("bash")
                .args(["-c", &command])
                .current_dir(folder.path())
                .env("PATH", &path)
                .env("EVENKEEL", root())
                .output()
                .unwrap();
            ran += 1;
            if output.status.code() != Some(i32::from(refused)) {
                let text = String::from_utf8_lossy(&output.stderr).into_owned();
                wrong.push(format!("{page}: {command}\n{:?}\n{text}", output.status));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(ran > 20, "{ran} commands");
    let unused = NOT_RUN.iter().zip(&used).filter(|(_, used)| !**used);
    let unused: Vec<&str> = unused.map(|((begin, _), _)| *begin).collect();
    assert!(unused.is_empty(), "no page has these commands: {unused:?}");
}
