//! Small inputs on which a plan was wrong, missing or unhelpful (`../shared/cases`): each plans its right batch, or is
//! refused with the way out.

use std::path::PathBuf;
use std::process::Command;

fn folder() -> Option<PathBuf> {
    let recipes = std::env::var_os("EVENKEEL_RECIPES").map(PathBuf::from);
    let shared = recipes.and_then(|recipes| Some(recipes.parent()?.to_owned()));
    let folder = shared.unwrap_or("../shared".into()).join("cases");
    let folder = std::path::absolute(folder).unwrap();
    let found = folder.join("cases.csv").is_file();
    if !found {
        println!("SKIPPED: no cases at {}", folder.display());
    }
    found.then_some(folder)
}

/// The file, the arguments with `FILE` in its place, and what the output says.
type Case = (&'static str, &'static str, &'static [&'static str]);

const CASES: &[Case] = &[
    (
        "configs/neox.yml",
        "plan FILE --gpus 96",
        &[
            "`pipe-parallel-size` is GPT-NeoX's",
            "--global-batch-size B",
        ],
    ),
    (
        "configs/deepspeed-text-number.json",
        "plan --gpus 8 -- torchrun --nproc_per_node 8 train.py --do_train --per_device_train_batch_size 4 \
         --gradient_accumulation_steps 8 --deepspeed FILE",
        &["error[accumulation-conflict]", "the text \"8\""],
    ),
    (
        "configs/torchtitan.toml",
        "plan FILE --gpus 8",
        &["`training` is torchtitan's", "--global-batch-size B"],
    ),
    (
        "configs/dataset-mixer-counts.yaml",
        "plan FILE --recipe-gpus 8 --gpus 4",
        &["4 × 2 × 8 = 64\n"],
    ),
    (
        "configs/save-steps-zero.yaml",
        "plan FILE --recipe-gpus 8 --gpus 4",
        &["4 × 2 × 8 = 64\n"],
    ),
    (
        "configs/dpo-smoothing.yaml",
        "check FILE",
        &["TRL 0.29 and newer ignore it, TRL 0.28 and HALOs apply it"],
    ),
    ("commands/mason.sh", "plan FILE", &["1 × 1 × 128 = 128\n"]),
    (
        "commands/swift-world.sh",
        "plan FILE",
        &["1 × 2 × 8 = 16\n", "ms-swift takes 2"],
    ),
    (
        "commands/swift-world.sh",
        "plan FILE --recipe-gpus 8",
        &[
            "gpu-count-conflict",
            "gives a world of 4, but `--recipe-gpus` is 8",
        ],
    ),
    ("commands/eval-command.sh", "plan FILE", &["= 16\n"]),
    (
        "commands/srun-ntasks.sh",
        "plan FILE --gpus 16",
        &["16 × 4 × 2 = 128\n"],
    ),
    (
        "commands/srun-ntasks.sh",
        "plan FILE --recipe-gpus 8",
        &[
            "error[accumulation-conflict]",
            "for 16 processes (`GPUS`), but `--recipe-gpus` is 8",
        ],
    ),
    (
        "commands/small-data.sh",
        "plan FILE",
        &[
            "= 256\n",
            "the training files hold 10 rows, one global batch takes 256",
        ],
    ),
    ("commands/comment-then-comment.sh", "plan FILE", &["= 12\n"]),
    ("commands/backquoted-comment.sh", "plan FILE", &["= 12\n"]),
    (
        "commands/backslash-blank.sh",
        "plan FILE",
        &[
            "= 12\n",
            "the command ends here, without the arguments below",
        ],
    ),
    (
        "commands/default-with-brackets.sh",
        "plan FILE",
        &["= 12\n"],
    ),
    ("commands/comment-in-array.sh", "plan FILE", &["= 12\n"]),
];

#[test]
fn every_small_input_has_its_right_plan_or_a_way_out() {
    let Some(folder) = folder() else { return };
    let mut wrong = Vec::new();
    for (file, arguments, expected) in CASES {
        let path = folder.join(file);
        let words = arguments.split_whitespace();
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        // A command names its files from the directory in which it runs.
        command.current_dir(path.parent().unwrap());
        for word in words {
            match word {
                "FILE" => command.arg(&path),
                word => command.arg(word),
            };
        }
        let output = command.output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8(text).unwrap();
        // Messages are wrapped at the terminal's width.
        let flat = text.split_whitespace().collect::<Vec<_>>().join(" ");
        let says = |part: &&&str| text.contains(**part) || flat.contains(**part);
        if let Some(missing) = expected.iter().find(|part| !says(part)) {
            wrong.push(format!("{file}: {arguments}\nlacks: {missing}\n{text}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn no_small_input_is_left_out() {
    let Some(folder) = folder() else { return };
    let list = std::fs::read_to_string(folder.join("cases.csv")).unwrap();
    let files = list
        .lines()
        .skip(1)
        .filter_map(|line| line.split(',').next());
    for file in files {
        assert!(CASES.iter().any(|(known, ..)| *known == file), "{file}");
    }
}
