//! What to type after a launch that was refused or could not download: the same command with downloaded files, or with
//! the user's own trainer.

use std::collections::HashSet;
use std::path::Path;

use crate::data::is_on_hub;
use crate::hub::{HubError, Repo};
use crate::recipe::schema::spec::{DataSource, Objective};
use crate::recipe::syntax::shell;
use crate::recipe::{Diagnostic, Dialect, Next, RESERVED, Recipe, Severity, trainer_command};

/// A launch as it was typed.
pub struct Typed<'a> {
    /// All words, with the program's name.
    pub words: &'a [String],
    /// The overrides among them.
    pub overrides: &'a [String],
}

impl Typed<'_> {
    /// The words of evenkeel itself, before the user's program.
    fn own(&self) -> &[String] {
        let end = self.words.iter().position(|word| word == "--");
        &self.words[..end.unwrap_or(self.words.len())]
    }

    /// The same command in another world, with more words before the user's program.
    fn with(&self, world: &[String], more: &[String]) -> String {
        const WORLD: [&str; 4] = ["--procs", "--gpus", "--nodes", "--gpus-per-node"];
        let replaced = if world.is_empty() { &[][..] } else { &WORLD };
        shell::join(&self.replaced(replaced, &[world, more].concat()))
    }

    /// The words without these options and their values, and with others before the user's program.
    pub fn replaced(&self, options: &[&str], by: &[String]) -> Vec<String> {
        let mut words = Vec::new();
        let mut own = self.own().iter();
        while let Some(word) = own.next() {
            let flag = word.split('=').next().unwrap_or_default();
            if !options.contains(&flag) {
                words.push(word.clone());
            } else if flag == word {
                own.next();
            }
        }
        let program = &self.words[self.own().len()..];
        [words.as_slice(), by, program].concat()
    }

    /// The launch of a script's command, with more words before it, and without the script and its variables.
    fn of_command(&self, recipe: &Recipe, more: &[String], command: &[String]) -> String {
        let script = recipe
            .files
            .recipe
            .and_then(|file| recipe.sources.get(file));
        let is_script = |word: &str| script.is_some_and(|script| Path::new(word) == script.path);
        let is_variable = |word: &str| {
            let name = word.split_once('=').map_or("", |(name, _)| name);
            recipe.variables().contains_key(name)
        };
        let own = self.own().iter();
        let own = own.filter(|word| !is_script(word) && !is_variable(word));
        let own: Vec<String> = own.chain(more).cloned().collect();
        let numbered =
            trainer_command::with_numbers(command).filter(|_| recipe.lacks_batch_arguments);
        let command = numbered.as_deref().unwrap_or(command);
        format!("{} -- {}", shell::join(&own), shell::join(command))
    }

    /// The same command with placeholders for the batch numbers of its program.
    fn with_numbers(&self) -> Option<String> {
        let (own, program) = self.words.split_at(self.own().len());
        let program = trainer_command::with_numbers(program)?;
        Some(shell::join(&[own, &program].concat()))
    }

    /// The option that gives a number of ranks, as typed.
    fn count(&self, ranks: u64) -> Vec<String> {
        let flags = ["--gpus", "--procs"];
        let typed = |flag: &&&str| self.own().iter().any(|word| word.starts_with(**flag));
        let flag = flags.iter().find(typed).unwrap_or(&"--procs");
        vec![(*flag).to_owned(), ranks.to_string()]
    }
}

/// The ranks of a launch.
pub struct Counts<'a> {
    /// Those of the refused plan.
    pub asked: u64,
    /// Those that split its batch exactly.
    pub exact: &'a [u64],
}

impl Counts<'_> {
    /// The largest exact count below the refused one, else the smallest.
    fn nearest(&self) -> Option<u64> {
        let below = self.exact.iter().filter(|count| **count < self.asked).max();
        below.or(self.exact.iter().min()).copied()
    }
}

/// Errors that end when the files are there.
const ABSENT: [&str; 3] = ["model-missing", "tokenizer-missing", "data-missing"];

/// Errors of a machine that is too small.
const MEMORY: [&str; 2] = ["model-needs-sharding", "rank-memory"];

/// The commands after a refusal, one a line, for the words that the user typed. Empty: the findings say what to change.
pub fn after_refusal(
    recipe: &Recipe,
    findings: &[Diagnostic],
    counts: &Counts<'_>,
    typed: &Typed<'_>,
) -> Vec<String> {
    let errors: Vec<&Diagnostic> = findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error)
        .collect();
    let has = |rule: &str| errors.iter().any(|error| error.rule == rule);
    let is_external = recipe.spec.trainer.is_external();
    let world = if has("global-batch-unknown") {
        ["--recipe-gpus", "N"].map(str::to_owned).to_vec()
    } else {
        Vec::new()
    };
    let own_trainer = || match recipe.command() {
        // That dialect's program cannot continue from its checkpoints, so its launch is refused.
        _ if recipe.dialect == Dialect::Dpo => None,
        Some(command) => Some(typed.of_command(recipe, &world, &command)),
        None if recipe.is_command() => {
            let lacking = recipe.lacking_variables();
            let given: Vec<String> = lacking.iter().map(|name| format!("{name}=VALUE")).collect();
            (!given.is_empty()).then(|| typed.with(&[], &[world.as_slice(), &given].concat()))
        }
        None => {
            let own = shell::join(&[typed.own(), &world].concat());
            Some(format!("{own} -- {}", program(recipe, typed.overrides)))
        }
    };
    if recipe.lacks_batch_arguments
        && is_external
        && has("external-trainer")
        && let Some(numbered) = typed.with_numbers()
    {
        return vec![numbered];
    }
    if recipe.spec.parallel.one_process
        && let [only] = errors.as_slice()
        && only.rule == "trainer-parallelism"
    {
        let distributed = format!("{}=false", recipe.key("parallel.one_process"));
        return vec![typed.with(&[], &[distributed])];
    }
    if !is_external
        && errors
            .iter()
            .any(|error| error.rule.starts_with("trainer-"))
    {
        return Vec::from_iter(own_trainer());
    }
    let of_world = ["batch-divisible", "sequence-too-long"];
    let known = |error: &&Diagnostic| {
        let rule = error.rule.as_str();
        of_world.contains(&rule)
            || (!is_external && (ABSENT.contains(&rule) || MEMORY.contains(&rule)))
    };
    if !errors.iter().all(known) {
        return Vec::new();
    }
    if errors
        .iter()
        .any(|error| MEMORY.contains(&error.rule.as_str()))
    {
        return smaller(recipe, typed, own_trainer(), has("data-missing"));
    }
    if has("model-missing") && recipe.spec.model.path.is_none() {
        return Vec::new();
    }
    let is_absent = |path: &str| match path {
        "model.path" => has("model-missing") || has("tokenizer-missing"),
        _ => has("data-missing"),
    };
    let (mut lines, mut overrides) = downloads(recipe, is_absent);
    if lines.is_empty() && ABSENT.iter().any(|rule| has(rule)) {
        return smaller(recipe, typed, own_trainer(), has("data-missing"));
    }
    let too_long = errors
        .iter()
        .find(|error| error.rule == "sequence-too-long");
    overrides.extend(too_long.and_then(|error| Some(error.help.split('`').nth(1)?.to_owned())));
    let mut world = Vec::new();
    if has("batch-divisible") {
        let Some(count) = counts.nearest() else {
            return Vec::new();
        };
        world = typed.count(count);
    }
    if !lines.is_empty() || !overrides.is_empty() || !world.is_empty() {
        lines.push(typed.with(&world, &overrides));
    }
    let uneven = "--remainder uneven";
    if let [only] = errors.as_slice()
        && only.help.contains(uneven)
    {
        let words = uneven.split(' ').map(str::to_owned);
        lines.push(typed.with(&[], &Vec::from_iter(words)));
    }
    lines
}

/// The command after a plan that was refused, for the words that the user typed. `None`: the findings say what to change.
pub fn after_refused_plan<'d>(
    errors: impl Iterator<Item = &'d Diagnostic>,
    counts: &Counts<'_>,
    typed: &Typed<'_>,
) -> Option<String> {
    let errors: Vec<&Diagnostic> = errors.collect();
    let mut world = Vec::new();
    let is_of_world = |error: &&Diagnostic| error.rule == "batch-divisible";
    if errors.iter().any(is_of_world) {
        world = typed.count(counts.nearest()?);
    }
    let mut more: Vec<String> = Vec::new();
    for error in errors {
        match error.next.as_deref() {
            Some(Next::Command(command)) => return Some(command.clone()),
            // Another world ends them.
            _ if !world.is_empty() && OF_WORLD.contains(&error.rule.as_str()) => {}
            // The user has given them.
            Some(Next::Words(words)) if words.iter().all(|word| typed.words.contains(word)) => {
                return None;
            }
            Some(Next::Words(words)) => {
                // A script's variable may have the name of a key.
                let key = |word: &str| word.split_once('=').map(|(key, _)| key.to_owned());
                let given: Vec<String> = more.iter().filter_map(|word| key(word)).collect();
                let is_new = |word: &&String| key(word).is_none_or(|key| !given.contains(&key));
                let words: Vec<String> = words.iter().filter(is_new).cloned().collect();
                if !more.ends_with(&words) {
                    more.extend(words);
                }
            }
            None => return None,
        }
    }
    (!(more.is_empty() && world.is_empty())).then(|| typed.with(&world, &more))
}

/// Errors of a world that does not split a batch.
const OF_WORLD: [&str; 3] = [
    "batch-divisible",
    "effective-batch-floored",
    "eval-batch-divisible",
];

/// What trains a recipe that is too large for this machine, or whose model and data are on another one.
fn smaller(
    recipe: &Recipe,
    typed: &Typed<'_>,
    own_trainer: Option<String>,
    lacks_data: bool,
) -> Vec<String> {
    let cluster = ["--nodes", "2", "--gpus-per-node", "8"].map(str::to_owned);
    // The model and the length of docs/your-recipe.md.
    let tiny = [
        ("model.path", "$EVENKEEL/examples/sft/model"),
        ("tokenizer.path", "byte"),
        ("data.sequence_length", "96"),
    ];
    let key = |path: &str| match path {
        // Upstream's key takes no `byte`.
        "tokenizer.path" if recipe.dialect != Dialect::Native => {
            format!("{RESERVED}.{path}")
        }
        path => recipe.key(path).into_owned(),
    };
    let tiny: Vec<String> = tiny
        .iter()
        .map(|(path, value)| format!("{}={value}", key(path)))
        .collect();
    let on_hub = |source: &DataSource| is_on_hub(Path::new(""), &source.path);
    let mut sources = recipe.spec.data.sources();
    let rows = if lacks_data || sources.any(|(_, source)| on_hub(source)) {
        rows(recipe)
    } else {
        Some((None, Vec::new()))
    };
    let own = own_trainer.map(|command| format!("{command}   # your own trainer"));
    let nodes = format!("{}   # the nodes of a cluster", typed.with(&cluster, &[]));
    let mut lines: Vec<String> = own.into_iter().chain([nodes]).collect();
    if let Some((make, rows)) = rows {
        lines.extend(make);
        // `$EVENKEEL` is for the shell.
        lines.push(format!(
            "{} {}   # in small, with a model of the project in `EVENKEEL`",
            typed.with(&[], &[]),
            [tiny, rows].concat().join(" ")
        ));
    }
    lines
}

/// The rows of docs/your-recipe.md in place of a recipe's data: the command that makes them, and the overrides that name
/// them, for the shell. `None`: the recipe trains on other rows.
fn rows(recipe: &Recipe) -> Option<(Option<String>, Vec<String>)> {
    const PAIRS: &str = r#"seq 400 | sed 's/.*/{"chosen": "&, twice? &, &", "rejected": "&, twice? no"}/' > pairs.jsonl"#;
    let (make, file, columns) = match recipe.spec.objective {
        Objective::Sft => (None, "$EVENKEEL/examples/sft/sums.jsonl", "messages"),
        Objective::Dpo | Objective::Orpo | Objective::Cpo | Objective::Simpo => {
            (Some(PAIRS.to_owned()), "pairs.jsonl", "chosen,rejected")
        }
        _ => return None,
    };
    let data = &recipe.spec.data;
    let mut rows = Vec::new();
    for (path, source) in data.sources() {
        let key = recipe.key(&format!("{path}.path")).into_owned();
        // The name in a mixture is a key.
        let row = match key.strip_suffix(&source.path) {
            Some(mixture) => format!("\"{}={{{file}: 1.0}}\"", mixture.trim_end_matches('.')),
            None => format!("{key}={file}"),
        };
        rows.push(row);
        if !source.columns.is_empty() {
            let key = recipe.key(&format!("{path}.columns.0")).into_owned();
            let key = key.trim_end_matches(".0");
            rows.push(format!("\"{key}=[{columns}]\""));
        }
    }
    // The same file is no evaluation data. A share is one of any number of rows.
    if !data.evaluation.is_empty() || data.held_out.is_some_and(|held_out| held_out >= 1.0) {
        rows.push(format!("{}=40", recipe.key("data.held_out")));
    }
    if recipe.dialect == Dialect::HandbookTrl && !recipe.spec.model.lora_target_modules.is_empty() {
        rows.push("lora_target_modules=all-linear".to_owned());
    }
    let mut seen = HashSet::new();
    rows.retain(|row| seen.insert(row.clone()));
    Some((make, rows))
}

/// The commands that download a recipe's model and data, and the overrides that name their folders. `is_absent`: of which
/// native paths.
fn downloads(recipe: &Recipe, is_absent: impl Fn(&str) -> bool) -> (Vec<String>, Vec<String>) {
    let (mut lines, mut overrides) = (Vec::new(), Vec::new());
    for (path, repo) in named(recipe) {
        if is_absent(&path) && is_on_hub(Path::new(""), &repo.id) {
            let (download, named) = repo.download_for(&recipe.key(&path));
            if !lines.contains(&download) {
                lines.push(download);
            }
            overrides.extend(named.filter(|named| !overrides.contains(named)));
        }
    }
    (lines, overrides)
}

/// The commands after a repository that could not be downloaded, one a line.
pub fn after_download(recipe: &Recipe, failed: &HubError, typed: &Typed<'_>) -> Vec<String> {
    let all = named(recipe);
    let is_failed = |repo: &Repo| (repo.kind, &repo.id) == (failed.repo.kind, &failed.repo.id);
    // The other repositories would fail next.
    if failed.cause.needs_a_network() && all.iter().any(|(_, repo)| is_failed(repo)) {
        let (commands, overrides) = downloads(recipe, |_| true);
        let lines = commands
            .iter()
            .map(|line| format!("{line}   # where there is a network"));
        return lines.chain([typed.with(&[], &overrides)]).collect();
    }
    let of_failed = all.iter().filter(|(_, repo)| is_failed(repo));
    let mut paths: Vec<&str> = of_failed.map(|(path, _)| path.as_str()).collect();
    if paths.is_empty() {
        paths.push("tokenizer.path");
    }
    failed.next(&shell::join(typed.words), &paths, &recipe.keys())
}

/// The model and the data of a recipe, each with the native path of its name.
fn named(recipe: &Recipe) -> Vec<(String, Repo)> {
    let spec = &recipe.spec;
    let revision = spec.model.revision.as_deref();
    let model = spec.model.path.iter();
    let folder = spec.model.subfolder.as_deref();
    let repo = |name: &String| Repo::model(name, revision).within(folder);
    let model = model.map(|name| ("model.path".to_owned(), repo(name)));
    let data = spec.data.sources().map(|(path, source)| {
        let repo = Repo::data_set(&source.path, source.revision.as_deref());
        (format!("{path}.path"), repo)
    });
    model.chain(data).collect()
}

/// The program that trains such a recipe upstream, with the words that evenkeel fills in. A Hydra program reads its tree
/// itself, and gets the `overrides` that the user typed.
fn program(recipe: &Recipe, overrides: &[String]) -> String {
    let of_upstream = overrides.iter().filter(|text| !text.starts_with(RESERVED));
    let hydra = |script: &str| {
        let script = ["python", script].map(str::to_owned);
        let words: Vec<String> = script.into_iter().chain(of_upstream.cloned()).collect();
        format!("{} {{args}}", shell::join(&words))
    };
    let objective = recipe.spec.objective;
    match recipe.dialect {
        Dialect::HandbookTrl if handbooks(recipe) => {
            format!("python scripts/{objective}.py --config {{recipe}} {{resume_args}}")
        }
        Dialect::HandbookTrl => format!("trl {objective} --config {{recipe}} {{resume_args}}"),
        Dialect::Halos => hydra("launch.py"),
        Dialect::Dpo => hydra("train.py"),
        _ => "python train.py {recipe} {resume_args}".to_owned(),
    }
}

/// Whether one of the handbook's three scripts trains the recipe, by its key for the data.
fn handbooks(recipe: &Recipe) -> bool {
    let scripts = [Objective::Sft, Objective::Dpo, Objective::Orpo];
    let key = recipe.key("data.train.0.path");
    scripts.contains(&recipe.spec.objective)
        && (key.starts_with("dataset_mixture") || key.starts_with("dataset_mixer"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::{Request, read_text};

    /// What follows a refused `evenkeel launch recipe.yaml --procs 3` by these rules.
    fn next(text: &str, rules: &[&str]) -> Vec<String> {
        let request = Request {
            path: "recipe.yaml".into(),
            ..Request::default()
        };
        let recipe = read_text(&request, text.to_owned()).unwrap();
        let findings: Vec<_> = rules
            .iter()
            .map(|rule| Diagnostic::error(rule, None, "", ""))
            .collect();
        let words = ["evenkeel", "launch", "recipe.yaml", "--procs", "3"].map(str::to_owned);
        let typed = Typed {
            words: &words,
            overrides: &[],
        };
        let counts = Counts {
            asked: 3,
            exact: &[1, 2, 4],
        };
        after_refusal(&recipe, &findings, &counts, &typed)
    }

    const BATCH: &str =
        "per_device_train_batch_size: 4\nnum_train_epochs: 1\nmodel_name_or_path: acme/model\n";

    #[test]
    fn a_refused_plan_ends_in_one_command_if_words_end_all_of_its_errors() {
        let words = ["evenkeel", "plan", "run.sh", "--gpus", "3", "X=1"].map(str::to_owned);
        let next = |errors: &[Diagnostic]| {
            let typed = Typed {
                words: &words,
                overrides: &[],
            };
            let counts = Counts {
                asked: 3,
                exact: &[1, 2, 4],
            };
            after_refused_plan(errors.iter(), &counts, &typed).unwrap_or_default()
        };
        let plain = |rule| Diagnostic::error(rule, None, "", "");
        let given = |words: &[&str]| plain("global-batch-unknown").ended_by(words.iter().copied());
        let (a, b) = (given(&["A=VALUE"]), given(&["A=VALUE", "B=VALUE"]));
        let gpus = given(&["--recipe-gpus", "N"]);
        let all = [a.clone(), b, gpus];
        let expected = "evenkeel plan run.sh --gpus 3 X=1 A=VALUE B=VALUE --recipe-gpus N";
        assert_eq!(next(&all), expected);
        let divisible = [a.clone(), plain("batch-divisible")];
        assert_eq!(
            next(&divisible),
            "evenkeel plan run.sh X=1 --gpus 2 A=VALUE"
        );
        assert_eq!(next(&[a.clone(), plain("wrong-type")]), "");
        let other = Diagnostic {
            next: Next::command("cd a && evenkeel plan b.sh".to_owned()),
            ..plain("unreadable-file")
        };
        assert_eq!(next(&[a, other]), "cd a && evenkeel plan b.sh");
        assert_eq!(next(&[]), "");
    }

    #[test]
    fn what_the_built_in_trainer_does_not_train_is_the_users_trainers() {
        let dpo = format!("{BATCH}beta: 0.1\nloss_type: sigmoid\n");
        for (data, program) in [
            (
                "dataset_mixer: {acme/pairs: 1.0}\n",
                "python scripts/dpo.py --config {recipe}",
            ),
            ("dataset_name: acme/pairs\n", "trl dpo --config {recipe}"),
        ] {
            let expected =
                format!("evenkeel launch recipe.yaml --procs 3 -- {program} {{resume_args}}");
            let rules = ["data-missing", "trainer-objective"];
            assert_eq!(next(&format!("{dpo}{data}"), &rules), [expected]);
        }
    }

    #[test]
    fn what_is_on_the_hub_is_downloaded_and_named() {
        let sft = format!("{BATCH}dataset_name: acme/chats\n");
        assert_eq!(
            next(
                &sft,
                &["model-missing", "tokenizer-missing", "data-missing"]
            ),
            [
                "hf download acme/model --local-dir model",
                "hf download acme/chats --repo-type dataset --local-dir chats",
                "evenkeel launch recipe.yaml --procs 3 model_name_or_path=model dataset_name=chats",
            ]
        );
        // The name in a mixture is a key, and no override renames it.
        let mixer = format!("{BATCH}dataset_mixer:\n  acme/chats: 1.0\n");
        assert_eq!(
            next(&mixer, &["data-missing"]),
            [
                "hf download acme/chats --repo-type dataset --local-dir acme/chats",
                "evenkeel launch recipe.yaml --procs 3",
            ]
        );
        // Another error has another way out.
        assert_eq!(next(&sft, &["data-missing", "unknown-key"]), [""; 0]);
        let both = next(&sft, &["data-missing", "batch-divisible"]);
        assert_eq!(
            both[1],
            "evenkeel launch recipe.yaml --procs 2 dataset_name=chats"
        );
    }

    #[test]
    fn every_source_of_a_failed_data_set_is_renamed() {
        let request = Request {
            path: "dpo.yaml".into(),
            ..Request::default()
        };
        for (data, overrides) in [
            (
                "dataset_mixture:\n  datasets:\n  - {id: acme/pairs, split: a}\n  - {id: acme/pairs, split: b}\n",
                "dataset_mixture.datasets.0.id=pairs dataset_mixture.datasets.1.id=pairs",
            ),
            (
                "dataset_name: acme/pairs\neval_strategy: steps\n",
                "dataset_name=pairs",
            ),
        ] {
            let recipe = read_text(&request, format!("{BATCH}{data}")).unwrap();
            let failed = HubError {
                repo: Repo::data_set("acme/pairs", None),
                endpoint: String::new(),
                cause: Box::new(crate::hub::Cause::Offline),
            };
            let typed = Typed {
                words: &["evenkeel".to_owned()],
                overrides: &[],
            };
            let next = after_download(&recipe, &failed, &typed);
            let expected = format!("evenkeel model_name_or_path=model {overrides}");
            assert_eq!(next.last(), Some(&expected));
        }
    }

    #[test]
    fn a_refusal_of_the_world_or_the_memory_ends_with_a_command_that_works() {
        let sft = format!("{BATCH}dataset_name: acme/chats\n");
        let lines = ["batch-divisible", "rank-memory"].map(|rule| next(&sft, &[rule]).join("\n"));
        insta::assert_snapshot!(lines.join("\n\n"), @r"
        evenkeel launch recipe.yaml --procs 2

        evenkeel launch recipe.yaml --procs 3 -- trl sft --config {recipe} {resume_args}   # your own trainer
        evenkeel launch recipe.yaml --nodes 2 --gpus-per-node 8   # the nodes of a cluster
        evenkeel launch recipe.yaml --procs 3 model_name_or_path=$EVENKEEL/examples/sft/model evenkeel.tokenizer.path=byte evenkeel.data.sequence_length=96 dataset_name=$EVENKEEL/examples/sft/sums.jsonl   # in small, with a model of the project in `EVENKEEL`
        ");
    }

    #[test]
    fn a_program_of_one_process_is_distributed() {
        let native = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  batch: {global: 16}\n  parallel: {one_process: true}\n";
        assert_eq!(
            next(native, &["trainer-parallelism"]),
            ["evenkeel launch recipe.yaml --procs 3 parallel.one_process=false"]
        );
    }

    #[test]
    fn no_download_helps_where_no_model_is_named() {
        let sft = "per_device_train_batch_size: 4\nnum_train_epochs: 1\ndataset_name: acme/chats\n";
        assert_eq!(next(sft, &["model-missing", "data-missing"]), [""; 0]);
    }

    #[test]
    fn a_model_and_data_of_another_machine_end_in_the_recipe_in_small() {
        let sft = "per_device_train_batch_size: 4\nnum_train_epochs: 1\nmodel_name_or_path: /scratch/models/a\n";
        let mixture = "dataset_mixture:\n  test_split_size: 1000\n  datasets:\n  - {id: /scratch/a, columns: [prompt, messages]}\n  - {id: /scratch/b}\n";
        let rules = ["model-missing", "tokenizer-missing", "data-missing"];
        let lines = next(&format!("{sft}{mixture}"), &rules).join("\n");
        insta::assert_snapshot!(lines, @r#"
        evenkeel launch recipe.yaml --procs 3 -- python scripts/sft.py --config {recipe} {resume_args}   # your own trainer
        evenkeel launch recipe.yaml --nodes 2 --gpus-per-node 8   # the nodes of a cluster
        evenkeel launch recipe.yaml --procs 3 model_name_or_path=$EVENKEEL/examples/sft/model evenkeel.tokenizer.path=byte evenkeel.data.sequence_length=96 dataset_mixture.datasets.0.id=$EVENKEEL/examples/sft/sums.jsonl "dataset_mixture.datasets.0.columns=[messages]" dataset_mixture.datasets.1.id=$EVENKEEL/examples/sft/sums.jsonl dataset_mixture.test_split_size=40   # in small, with a model of the project in `EVENKEEL`
        "#);
        let mixer = format!(
            "{sft}dataset_mixer:\n  /scratch/a: 1.0\ndataset_splits: [train, test]\neval_strategy: epoch\nbeta: 0.1\nloss_type: sigmoid\nuse_peft: true\nlora_target_modules: [a]\n"
        );
        insta::assert_snapshot!(next(&mixer, &rules).join("\n"), @r#"
        evenkeel launch recipe.yaml --procs 3 -- python scripts/dpo.py --config {recipe} {resume_args}   # your own trainer
        evenkeel launch recipe.yaml --nodes 2 --gpus-per-node 8   # the nodes of a cluster
        seq 400 | sed 's/.*/{"chosen": "&, twice? &, &", "rejected": "&, twice? no"}/' > pairs.jsonl
        evenkeel launch recipe.yaml --procs 3 model_name_or_path=$EVENKEEL/examples/sft/model evenkeel.tokenizer.path=byte evenkeel.data.sequence_length=96 "dataset_mixer={pairs.jsonl: 1.0}" evenkeel.data.held_out=40 lora_target_modules=all-linear   # in small, with a model of the project in `EVENKEEL`
        "#);
        let labels = format!("{sft}dataset_name: /scratch/a\nevenkeel: {{objective: kto}}\n");
        assert_eq!(next(&labels, &rules).len(), 2);
    }

    #[test]
    fn the_program_of_a_script_is_started_by_its_own_command() {
        let script = "python my.py --do_train --per_device_train_batch_size $N \\\n  --model_name_or_path m --run_name 'a b'\n";
        let request = Request {
            path: "jobs/train.sh".into(),
            overrides: vec!["N=2".to_owned()],
            ..Request::default()
        };
        let launch = |script: &str| {
            let recipe = read_text(&request, script.to_owned()).unwrap();
            let words = ["evenkeel", "launch", "jobs/train.sh", "N=2", "--procs=2"];
            let words = words.map(str::to_owned);
            let typed = Typed {
                words: &words,
                overrides: &request.overrides,
            };
            let rules = ["trainer-keys", "global-batch-unknown"];
            let findings = rules.map(|rule| Diagnostic::error(rule, None, "", ""));
            let counts = Counts {
                asked: 2,
                exact: &[],
            };
            after_refusal(&recipe, &findings, &counts, &typed)
        };
        insta::assert_snapshot!(launch(script).join("\n"), @"evenkeel launch --procs=2 --recipe-gpus N -- python my.py --do_train --per_device_train_batch_size 2 --model_name_or_path m --run_name 'a b'");
        // Only the shell of that machine knows the output.
        assert_eq!(launch(&script.replace("'a b'", "$(date)")), [""; 0]);
    }

    #[test]
    fn a_hydra_program_gets_the_overrides_that_were_typed() {
        let recipe = Recipe {
            dialect: Dialect::Halos,
            ..read_text(
                &Request {
                    path: "recipe.yaml".into(),
                    ..Request::default()
                },
                BATCH.to_owned(),
            )
            .unwrap()
        };
        let overrides = ["loss=dpo", "evenkeel.seed=1", "++model.batch_size=32"].map(str::to_owned);
        assert_eq!(
            program(&recipe, &overrides),
            "python launch.py loss=dpo ++model.batch_size=32 {args}"
        );
    }
}
