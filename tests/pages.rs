//! The commands of the README, the guide and the migration pages run as printed, and print what the pages show. Those that
//! start the user's program or a cluster's job run with `--dry-run`. Those that cannot run here are listed with the reason.
//! Formulas on all pages are calculated.

mod corpus;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use regex::Regex;

/// How a command begins that no test runs from its page, and why.
const NOT_RUN: &[(&str, &str)] = &[
    (
        "cargo run --release",
        "builds with optimisation; CONTRIBUTING has its time",
    ),
    (
        "evenkeel launch examples/quickstart.yaml",
        "trains for minutes; the endurance tests launch it",
    ),
    (
        "evenkeel resize quickstart",
        "belongs to the quickstart; the endurance tests resize and prove runs",
    ),
    ("python3 -m venv", "installs; tests/install.rs does"),
    ("~/.evenkeel/bin/pip", "installs; tests/install.rs does"),
    ("tar -xzf", "installs; tests/install.rs does"),
    ("cargo install", "builds with optimisation"),
    ("pkill ", "belongs to the quickstart"),
    ("export ", "sets what this test sets"),
    ("bash scripts/test.sh", "runs this test"),
    ("git clone", "needs the network"),
    ("accelerate launch", "is what the user ran until now"),
    ("torchrun ", "is what the user ran until now"),
    ("trl ", "is what the user ran until now"),
    ("python ", "is what the user ran until now"),
    (
        "evenkeel launch examples/pytorch/",
        "needs torch; an endurance test launches it",
    ),
    (
        "evenkeel launch --on ssh:",
        "needs hosts; the endurance tests have them",
    ),
];

/// How a command begins of which only the arguments are tested, and why.
const PARSED: &[(&str, &str)] = &[
    ("evenkeel resize NAME", "needs a run that is in progress"),
    (
        "evenkeel status",
        "needs a run; the endurance tests ask for one",
    ),
    (
        "evenkeel doctor",
        "asks the hub, a bucket and a cluster; tests of each are in tests/doctor.rs and where it says",
    ),
    (
        "evenkeel report NAME",
        "needs a run; the endurance tests make one",
    ),
    (
        "evenkeel export",
        "needs a trained run; the endurance tests export each family and compare merged weights with PEFT's",
    ),
    (
        "evenkeel generate",
        "needs a trained model; the endurance tests compare texts of every family with transformers'",
    ),
];

const PAGES: &[&str] = &[
    "README.md",
    "docs/guide.md",
    "docs/install.md",
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

/// More pages of which the commands with printed output are run.
const PRINTED: &[&str] = &["docs/recipes.md", "docs/dialects/hydra.md"];

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
        "fsdp.yaml",
        "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_machines: 1\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n",
    ),
    ("my-config.yaml", "trainer: mine\nsteps: 100\n"),
    (
        "grpo.yaml",
        "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 8\nnum_generations: 8\n",
    ),
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Programs of the user.
const PROGRAMS: &[&str] = &[
    "train.py",
    "run_clm.py",
    "scripts/sft.py",
    "trl/scripts/grpo.py",
    "HALOs/launch.py",
    "direct-preference-optimization/train.py",
];

fn text(page: &str) -> String {
    fs::read_to_string(root().join(page)).unwrap()
}

/// A page's fenced blocks of a language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut open: Option<(String, String)> = None;
    for line in text(page).lines() {
        let fence = line.trim_start().strip_prefix("```");
        open = match (open, fence) {
            (None, None) => None,
            (None, Some(opened)) => Some((opened.to_owned(), String::new())),
            (Some((of, block)), Some(_)) => {
                if of == language {
                    found.push(block);
                }
                None
            }
            (Some((of, block)), None) => Some((of, block + line + "\n")),
        };
    }
    assert!(open.is_none(), "{page}: a block has no end");
    found
}

/// Words with one space between them.
fn joined(line: &str) -> String {
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A line of shell on a page.
struct Line {
    text: String,
    /// The folder that the lines before it enter.
    folder: String,
}

/// The commands in a page's `sh` blocks, each on one line.
fn commands(page: &str) -> Vec<Line> {
    let mut found = Vec::new();
    let mut folder = String::new();
    for block in blocks(page, "sh") {
        let block = block.replace("\\\n", " ");
        let lines = block.lines().map(str::trim);
        for line in lines.filter(|line| !line.is_empty() && !line.starts_with('#')) {
            if let Some(entered) = line.strip_prefix("cd ") {
                entered.clone_into(&mut folder);
                continue;
            }
            found.push(Line {
                text: joined(line),
                folder: folder.clone(),
            });
        }
    }
    found
}

/// The commands in a page's `console` blocks, each with the lines that it prints.
fn printed(page: &str) -> Vec<(String, Vec<String>)> {
    let mut found: Vec<(String, Vec<String>)> = Vec::new();
    for block in blocks(page, "console") {
        let block = block.replace("\\\n", " ");
        for line in block.lines() {
            match (line.strip_prefix("$ "), found.last_mut()) {
                (Some(command), _) => found.push((joined(command), Vec::new())),
                (None, Some((_, output))) => output.push(line.trim_end().to_owned()),
                // Output of a command that is in the text.
                (None, None) => {}
            }
        }
    }
    found
}

/// The words in single backticks.
fn spans(line: &str) -> Vec<&str> {
    line.split('`').skip(1).step_by(2).collect()
}

/// The commands in a page's text, and those of its tables that begin with a subcommand.
fn inline(page: &str, subcommands: &[String]) -> Vec<String> {
    let text = text(page);
    let mut in_block = false;
    let mut found = Vec::new();
    for line in text.lines() {
        let is_fence = line.trim_start().starts_with("```");
        in_block ^= is_fence;
        if in_block || is_fence {
            continue;
        }
        for span in spans(line) {
            let first = span.split(' ').next().unwrap();
            let is_verb = line.starts_with('|')
                && span.contains(' ')
                && subcommands.iter().any(|name| name == first);
            if is_verb {
                found.push(format!("evenkeel {span}"));
            } else if span.starts_with("evenkeel ") {
                found.push(span.to_owned());
            }
        }
    }
    found
}

/// The command with an argument before those of the user's program.
fn with(command: &str, argument: &str) -> String {
    match format!("{command} ").split_once(" -- ") {
        Some((own, program)) => format!("{own} {argument} -- {program}"),
        None => format!("{command} {argument}"),
    }
}

/// A folder in which commands run.
struct Place {
    folder: tempfile::TempDir,
    path: String,
}

impl Place {
    fn empty() -> Place {
        let binary = Path::new(env!("CARGO_BIN_EXE_evenkeel")).parent().unwrap();
        Place {
            folder: tempfile::tempdir().unwrap(),
            path: format!("{}:{}", binary.display(), std::env::var("PATH").unwrap()),
        }
    }

    /// A folder with the user's files and those that the pages name. `None`: the corpus is missing.
    fn with_files() -> Option<Place> {
        let corpus = corpus::root()?;
        let [handbook, halos, dpo] = [
            "huggingface__alignment-handbook/925acdfe4b",
            "ContextualAI__HALOs/4831988636",
            "eric-mitchell__direct-preference-optimization/f8b8c0f49d",
        ]
        .map(|folder| corpus.join(folder));
        let place = Place::empty();
        let at = |name: &str| place.folder.path().join(name);
        for name in PROGRAMS {
            fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            fs::write(at(name), "").unwrap();
        }
        for (name, text) in FILES {
            fs::write(at(name), text).unwrap();
        }
        fs::copy(root().join("examples/sft/recipe.yaml"), at("recipe.yaml")).unwrap();
        for (name, file) in [
            ("examples", root().join("examples")),
            ("recipes", handbook.join("recipes")),
            ("HALOs/config", halos.join("config")),
            ("HALOs/accelerate_config", halos.join("accelerate_config")),
            ("direct-preference-optimization/config", dpo.join("config")),
        ] {
            // A link would be refused by a job, to which this folder is sent.
            let copied = Command::new("cp")
                .arg("-rL")
                .arg(file)
                .arg(at(name))
                .status();
            assert!(copied.unwrap().success(), "{name}");
        }
        Some(place)
    }

    fn run(&self, command: &str) -> Output {
        self.run_in("", command)
    }

    /// Runs it in a folder, unless that is the clone whose files are in this place.
    fn run_in(&self, folder: &str, command: &str) -> Output {
        let mut at = self.folder.path().join(folder);
        if !at.is_dir() {
            self.folder.path().clone_into(&mut at);
        }
        Command::new("bash")
            .args(["-c", command])
            .current_dir(at)
            .env("PATH", &self.path)
            .env("EVENKEEL", root())
            .env("HF_HUB_OFFLINE", "1")
            .env_remove("EVENKEEL_IMAGE")
            .env_remove("COLUMNS")
            .output()
            .unwrap()
    }
}

/// What is wrong with a command that ended with another code.
fn unexpected(page: &str, command: &str, output: &Output, code: i32) -> Option<String> {
    let said = String::from_utf8_lossy(&output.stderr);
    (output.status.code() != Some(code))
        .then(|| format!("{page}: {command}\n{:?}\n{said}", output.status))
}

/// Whether the command starts the user's program, or a job on a cluster.
fn is_elsewhere(command: &str) -> bool {
    command.starts_with("evenkeel launch ")
        && (command.contains(" -- ") || command.contains(" --nodes "))
}

/// Whether the only error is that this machine's memory is too small for the model.
fn is_too_small(output: &Output) -> bool {
    let said = String::from_utf8_lossy(&output.stderr);
    let errors = said.matches("error[").count();
    errors > 0 && errors == said.matches("error[model-needs-sharding]").count()
}

/// The row with which a command begins.
fn listed(rows: &[(&str, &str)], command: &str) -> Option<usize> {
    rows.iter()
        .position(|(begin, _)| command.starts_with(begin))
}

#[test]
fn every_command_of_the_first_pages_runs_as_printed() {
    let Some(place) = Place::with_files() else {
        return;
    };
    let mut used = [vec![false; NOT_RUN.len()], vec![false; PARSED.len()]];
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    let mut ran = 0;
    for page in PAGES {
        for Line {
            text: command,
            folder,
        } in commands(page)
        {
            // Several pages have the same small training.
            let typed = command.split(" # ").next().unwrap().to_owned();
            if !seen.insert((folder.clone(), typed)) {
                continue;
            }
            if let Some(row) = listed(NOT_RUN, &command) {
                used[0][row] = true;
                continue;
            }
            ran += 1;
            if let Some(row) = listed(PARSED, &command) {
                used[1][row] = true;
                let command = command.split(" # ").next().unwrap();
                let output = place.run_in(&folder, &with(command, "--help"));
                wrong.extend(unexpected(page, command, &output, 0));
                continue;
            }
            let shown = if is_elsewhere(&command) {
                command.replacen("launch", "launch --dry-run", 1)
            } else {
                command.clone()
            };
            let output = place.run_in(&folder, &shown);
            let refused = command.contains("# refused");
            if !(is_elsewhere(&command) && is_too_small(&output)) {
                wrong.extend(unexpected(page, &shown, &output, refused.into()));
            }
            let comment = command.split_once(" # ").map(|(_, comment)| comment);
            if let Some(formula) = comment.filter(|text| text.contains(" = ") && !refused) {
                let printed = String::from_utf8_lossy(&output.stdout);
                if printed.lines().next() != Some(formula) {
                    wrong.push(format!("{page}: {command}\nprints\n{printed}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(ran > 40, "{ran} commands");
    for (rows, used) in [NOT_RUN, PARSED].iter().zip(&used) {
        let unused = rows.iter().zip(used).filter(|(_, used)| !**used);
        let unused: Vec<&str> = unused.map(|((begin, _), _)| *begin).collect();
        assert!(unused.is_empty(), "no page has these commands: {unused:?}");
    }
}

#[test]
fn a_launch_without_the_users_files_is_refused_and_leaves_no_files() {
    let empty = Place::empty();
    let mut launches = 0;
    for page in PAGES {
        for Line { text: command, .. } in commands(page) {
            if !command.starts_with("evenkeel launch ") || command.contains("examples/") {
                continue;
            }
            launches += 1;
            let output = empty.run(&command);
            let said = String::from_utf8_lossy(&output.stderr);
            let code = output.status.code();
            assert!(
                code == Some(1) || code == Some(2),
                "{page}: {command}: {said}"
            );
            let missing = ["no such file", "No such file", "config-missing"];
            assert!(
                missing.iter().any(|text| said.contains(text)),
                "{page}: {command}: {said}"
            );
        }
    }
    assert!(launches > 10, "{launches}");
    let left: Vec<_> = empty.folder.path().read_dir().unwrap().collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn printed_output_is_that_of_the_command() {
    let Some(place) = Place::with_files() else {
        return;
    };
    let mut ran = 0;
    for page in PAGES.iter().chain(PRINTED) {
        for (command, expected) in printed(page) {
            ran += 1;
            let output = place.run(&command);
            // Where a file takes the output, notes are left.
            let is_taken = command.contains(" > ");
            let text = if is_taken {
                output.stderr
            } else {
                output.stdout
            };
            let text = String::from_utf8(text).unwrap();
            let mut lines = text.lines().map(str::trim_end);
            // `…` is the rest of the output.
            for expected in expected.iter().take_while(|line| *line != "…") {
                let line = lines.next();
                assert_eq!(line, Some(expected.as_str()), "{page}: {command}\n{text}");
            }
            if expected.last().is_none_or(|last| last != "…") {
                assert_eq!(lines.next(), None, "{page}: {command}\n{text}");
            }
        }
    }
    assert!(ran >= 3, "{ran} commands");
}

#[test]
fn commands_in_the_text_of_the_first_pages_have_these_arguments() {
    let place = Place::empty();
    let help = place.run("evenkeel --help");
    let help = String::from_utf8(help.stdout).unwrap();
    let subcommands: Vec<String> = help
        .lines()
        .filter(|line| line.starts_with("  ") && !line.starts_with("   "))
        .filter_map(|line| Some(line.split_whitespace().next()?.to_owned()))
        .collect();
    let mut wrong = Vec::new();
    let mut parsed = 0;
    for page in PAGES {
        for command in inline(page, &subcommands) {
            // Without the rest of the arguments; with optional ones, and numbers.
            let shown: Vec<&str> = command
                .split(' ')
                .map(|word| word.trim_matches(['[', ']']))
                .filter(|word| *word != "…")
                .map(|word| {
                    if ["N", "R"].contains(&word) {
                        "1"
                    } else {
                        word
                    }
                })
                .collect();
            let shown = with(&shown.join(" "), "--help");
            parsed += 1;
            let output = place.run(&shown);
            wrong.extend(unexpected(page, &shown, &output, 0));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(parsed > 20, "{parsed} commands");
}

/// The part of a line of shell that one command takes.
fn alone(line: &str) -> &str {
    let ends = [" | ", " > ", " # ", " && ", "; "];
    let end = ends.iter().filter_map(|end| line.find(end)).min();
    &line[..end.unwrap_or(line.len())]
}

#[test]
fn commands_in_the_blocks_of_all_pages_have_these_arguments() {
    let place = Place::empty();
    let mut pages = vec![root().join("README.md"), root().join("CONTRIBUTING.md")];
    pages_below(&root().join("docs"), &mut pages);
    let mut wrong = Vec::new();
    let mut parsed = 0;
    for page in pages {
        let page = page.strip_prefix(root()).unwrap().to_str().unwrap();
        let printed = printed(page).into_iter().map(|(command, _)| command);
        let typed = commands(page).into_iter().map(|line| line.text);
        for command in typed.chain(printed) {
            if !command.starts_with("evenkeel ") {
                continue;
            }
            parsed += 1;
            let shown = with(&alone(&command).replace(" …", ""), "--help");
            let output = place.run(&shown);
            wrong.extend(unexpected(page, &shown, &output, 0));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
    assert!(parsed > 80, "{parsed} commands");
}

#[test]
fn scripts_and_tests_of_the_readme_exist() {
    let mut found = 0;
    for line in text("README.md").lines() {
        for span in spans(line) {
            let path = match span.strip_prefix("cargo test --test ") {
                Some(test) => format!("tests/{test}"),
                None if span.starts_with("scripts/") => span.to_owned(),
                None => continue,
            };
            found += 1;
            assert!(root().join(&path).exists(), "{span}");
        }
    }
    assert!(found >= 3, "{found}");
}

/// Every Markdown file below a folder.
fn pages_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            pages_below(&path, found);
        } else if path.extension().is_some_and(|of| of == "md") {
            found.push(path);
        }
    }
}

/// The value of a formula of sums, products and remainders of whole numbers, up to a `)` or the end.
fn value(words: &mut std::str::SplitWhitespace<'_>) -> u64 {
    let (mut total, mut term) = (0, 1);
    let mut operator = "×";
    while let Some(word) = words.next() {
        match word {
            ")" => break,
            "+" => (total, term, operator) = (total + term, 1, "×"),
            "×" | "%" => operator = word,
            operand => {
                let operand = match operand {
                    "(" => value(words),
                    number => number.parse().unwrap(),
                };
                term = match operator {
                    "%" => term % operand,
                    _ => term * operand,
                };
            }
        }
    }
    total + term
}

fn calculated(formula: &str) -> u64 {
    let spaced = formula.replace('(', " ( ").replace(')', " ) ");
    value(&mut spaced.split_whitespace())
}

#[test]
fn formulas_on_all_pages_are_right() {
    assert_eq!(calculated("16 × (2 + 2 + 1) + 3 × 2"), 86);
    assert_eq!(calculated("128 % 6"), 2);
    let mut pages = vec![root().join("README.md"), root().join("CONTRIBUTING.md")];
    pages_below(&root().join("docs"), &mut pages);
    let formula = Regex::new(r"(\(*[0-9]+\)*(?: [×+%] \(*[0-9]+\)*)+) = ([0-9]+)").unwrap();
    let mut found = 0;
    for page in pages {
        let text = fs::read_to_string(&page).unwrap();
        for formula in formula.captures_iter(&text) {
            found += 1;
            let right: u64 = formula[2].parse().unwrap();
            let page = page.display();
            assert_eq!(calculated(&formula[1]), right, "{page}: {}", &formula[0]);
        }
    }
    assert!(found >= 12, "{found} formulas");
}
