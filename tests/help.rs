//! The help of each command, in one snapshot (`INSTA_UPDATE=always cargo test --test help` writes it), and the width of all
//! text: lines have at most 80 columns where a terminal has them, and are broken between words only.

mod corpus;

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Columns of the terminal.
const COLUMNS: usize = 80;

/// `--help` of a command, and of its subcommands.
fn help(command: &[&str], shown: &mut String) {
    let output = Command::new(env!("CARGO_BIN_EXE_evenkeel"))
        .args(command)
        .arg("--help")
        .env_clear()
        .output()
        .unwrap();
    assert!(output.status.success(), "{command:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    shown.push_str(&format!(
        "$ evenkeel {}--help\n{text}\n",
        command
            .iter()
            .fold(String::new(), |all, word| all + word + " ")
    ));
    let subcommands = text
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| line.starts_with("  "))
        .filter(|line| !line.starts_with("   "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "help");
    for name in subcommands {
        help(&[command, &[name]].concat(), shown);
    }
}

#[test]
fn help_of_every_command() {
    let mut shown = String::new();
    help(&[], &mut shown);
    assert_eq!(wide(&shown, COLUMNS), [""; 0], "lines of more columns");
    insta::assert_snapshot!("help", shown);
}

/// The lines of a text that are wider. A single word, such as a path, is not broken, nor is the place of a diagnostic.
fn wide(text: &str, columns: usize) -> Vec<&str> {
    text.lines()
        .filter(|line| line.chars().count() > columns)
        .filter(|line| line.trim_end_matches(" \\").split_whitespace().count() > 1)
        .filter(|line| !line.trim_start().starts_with("--> "))
        .collect()
}

/// A folder in which commands run.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    /// What a command prints, for a width or without one.
    fn printed(&self, arguments: &[&str], columns: Option<usize>) -> String {
        let mut command = Command::new(env!("CARGO_BIN_EXE_evenkeel"));
        command
            .args(arguments)
            .current_dir(self.0.path())
            .stdin(Stdio::null())
            .env("HF_HUB_OFFLINE", "1")
            .env_remove("COLUMNS");
        command.envs(columns.map(|columns| ("COLUMNS", columns.to_string())));
        let output = command.output().unwrap();
        let printed = [output.stdout, output.stderr].concat();
        String::from_utf8(printed).unwrap()
    }

    /// The lines that are too wide.
    fn too_wide(&self, arguments: &[&str]) -> Option<String> {
        let printed = self.printed(arguments, Some(COLUMNS));
        assert!(!printed.is_empty(), "{arguments:?}");
        let wide = wide(&printed, COLUMNS).join("\n");
        (!wide.is_empty()).then(|| format!("evenkeel {}\n{wide}", arguments.join(" ")))
    }
}

/// Files of the corpus of upstream recipes. Empty: it is missing.
fn recipes() -> Vec<PathBuf> {
    let Some(folder) = corpus::root() else {
        return Vec::new();
    };
    let table = std::fs::read_to_string(folder.join("manifest.csv")).unwrap();
    let files = table
        .lines()
        .skip(1)
        .filter_map(|row| row.split(',').nth(3));
    let files = files.map(|file| folder.join(file));
    files.filter(|file| file.is_file()).collect()
}

#[test]
fn plans_checks_and_refusals_fit_80_columns() {
    let place = Place::new();
    let mut wide = Vec::new();
    let recipes = recipes();
    for recipe in &recipes {
        let recipe = recipe.to_str().unwrap();
        for arguments in [
            "plan RECIPE --recipe-gpus 8 --gpus 4",
            "plan RECIPE --recipe-gpus 8 --gpus 6 --remainder uneven",
            "check RECIPE",
            "launch RECIPE --recipe-gpus 8 --procs 3 --dry-run",
        ] {
            let arguments = arguments.replace("RECIPE", recipe);
            let arguments: Vec<&str> = arguments.split(' ').collect();
            wide.extend(place.too_wide(&arguments));
        }
    }
    assert!(wide.is_empty(), "{}", wide.join("\n\n"));
    assert!(recipes.is_empty() || recipes.len() > 40);
}

#[test]
fn a_narrow_plan_has_the_words_of_a_wide_one() {
    let place = Place::new();
    let words = |text: &str| {
        let words = text.split_whitespace().filter(|word| *word != "\\");
        // Of a table, other lines may have them.
        let mut words: Vec<String> = words.map(str::to_owned).collect();
        words.sort_unstable();
        words
    };
    for recipe in recipes().iter().step_by(4) {
        let recipe = recipe.to_str().unwrap();
        let arguments = ["plan", recipe, "--recipe-gpus", "8", "--gpus", "6"];
        let narrow = place.printed(&arguments, Some(60));
        let wide = place.printed(&arguments, None);
        assert_eq!(words(&narrow), words(&wide), "{recipe}");
    }
    for arguments in [&["explain"][..], &["explain", "batch-divisible"]] {
        let narrow = place.printed(arguments, Some(60));
        assert_eq!(words(&narrow), words(&place.printed(arguments, None)));
    }
}

#[test]
fn tables_pages_and_errors_fit_80_columns() {
    let place = Place::new();
    let all = place.printed(&["explain"], None);
    let rules: Vec<&str> = all
        .lines()
        .skip(1)
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(rules.len() > 50);
    let mut wide: Vec<String> = rules
        .iter()
        .filter_map(|rule| place.too_wide(&["explain", rule]))
        .collect();
    // Runs with names of the longest kind, one of them with an error.
    for name in ["one-that-has-a-long-name", &"long-".repeat(12)] {
        let run = place.0.path().join("runs").join(name.trim_matches('-'));
        std::fs::create_dir_all(&run).unwrap();
        std::fs::write(run.join("run.json"), "{").unwrap();
    }
    for arguments in [
        "explain",
        "explain batch-divisble",
        "gpus",
        "list --local",
        "status",
        "status missing",
        "plan",
        "plan missing.yaml --gpus 3",
        "plan --nonsense",
        "plan --estimate --model 7B --gpus 1 --device-memory 24GB",
        "plan --gpus 2 -- torchrun --nproc_per_node 4 train.py --do_train --per_device_train_batch_size 8",
        "launch --gpus 4 -- accelerate launch --config_file missing.yaml scripts/sft.py --config recipe.yaml",
        "launch --gpus 4 -- torchrun --nproc_per_node 4 missing.py --do_train --per_device_train_batch_size 8",
        "launch recipe.yaml --nproc_per_node 2",
        "launch recipe.yaml --gpus-per-node 2",
        "launch recipe.yaml --nodes 2 --procs 4",
        "resize missing 2",
        "run recipe.yaml",
    ] {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        wide.extend(place.too_wide(&arguments));
    }
    assert!(wide.is_empty(), "{}", wide.join("\n\n"));
}

#[test]
fn the_width_is_that_of_the_terminal() {
    let shell = format!("stty cols 50; '{}' explain", env!("CARGO_BIN_EXE_evenkeel"));
    let terminal = Command::new("script")
        .args(["-qec", &shell, "/dev/null"])
        .env("COLUMNS", "200")
        .stdin(Stdio::null())
        .output();
    let Ok(output) = terminal else {
        println!("SKIPPED: no `script` of util-linux");
        return;
    };
    let printed = String::from_utf8(output.stdout).unwrap().replace('\r', "");
    let printed = anstream::adapter::strip_str(&printed).to_string();
    assert!(printed.lines().count() > 60, "{printed}");
    assert_eq!(wide(&printed, 50), [""; 0]);
    let used = printed.lines().map(|line| line.chars().count()).max();
    assert!(used > Some(40), "{printed}");
}
