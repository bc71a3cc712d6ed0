//! A command without its launcher, for an environment that starts the processes itself and sets the batch
//! numbers of each world: `train.py …` of `torchrun … train.py …`.

use std::collections::BTreeMap;

use super::launcher::options::{Given, SRUN, options};
use super::launcher::{Launch, Launcher};
use crate::recipe::dialects::deepspeed::hosts;
use crate::recipe::schema::launch::Opt;
use crate::recipe::schema::placeholder::{self, ARGS, RESUME_ARGS};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::MASTER_PORT;
use crate::recipe::syntax::shell::Typed;
use crate::recipe::syntax::shell::word::{self, Word};
use crate::recipe::syntax::words::Words;

/// A launcher that evenkeel cannot replace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum LauncherError {
    #[error(
        "the command does not begin with a launcher that evenkeel replaces (torchrun, `accelerate launch`, deepspeed, trl, srun before one of them) or with Python; give the trainer's command, as in `evenkeel launch recipe.yaml -- python train.py --config {{recipe}} {{resume_args}}`"
    )]
    Unknown,
    /// The launcher's options cannot be replaced: the problem, and what to do.
    #[error("{0}")]
    Options(String),
}

fn no_counterpart(launcher: &str, option: &str) -> LauncherError {
    LauncherError::Options(format!(
        "`{option}` of {launcher} has no counterpart in evenkeel, which starts the ranks itself; remove it"
    ))
}

/// A command, split into its launcher and its program.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Split {
    /// The launcher without the program's arguments. `None`: Python starts the program, or evenkeel knows no launcher in the
    /// command.
    pub launcher: Option<Launch>,
    /// The words that start one rank.
    pub program: Vec<String>,
    /// Environment variables of the launcher besides torchrun's, with placeholders.
    pub environment: BTreeMap<String, String>,
    /// Environment variables that the command sets for its launcher. Those of the launcher win.
    pub assigned: BTreeMap<String, String>,
    /// Options of the launcher that have no effect.
    pub ignored: Vec<String>,
}

/// Variables that evenkeel sets for every rank, as torchrun does whatever its environment has. [`MASTER_PORT`] is not
/// among them.
const OF_RANKS: Words = Words(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_NAME ROLE_RANK \
     ROLE_WORLD_SIZE MASTER_ADDR PET_NNODES PET_NPROC_PER_NODE PET_NODE_RANK \
     TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT",
);

/// The prefix of the variables that hold defaults of torchrun's options.
const OF_TORCHRUN: &str = "PET_";

/// Options of torchrun and DeepSpeed's launcher for processes, rendezvous, restarts and logs, which evenkeel
/// replaces, and for the way to start the program.
const REPLACED: Words = Words(
    "nnodes nproc_per_node node_rank rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone \
     max_restarts monitor_interval start_method log_dir r redirects t tee local_ranks_filter \
     local_addr master_addr master_port module m no_python use_env hostfile H num_nodes num_gpus \
     launcher launcher_args ssh_port no_ssh no_ssh_check force_multi no_local_rank quiet q role \
     include i",
);

/// Those of [`REPLACED`] and of accelerate that a user may miss, for restarts, logs and the way to other hosts.
const IGNORED: Words = Words(
    "rdzv_endpoint max_restarts monitor_interval start_method log_dir r redirects t tee local_ranks_filter \
     local_addr hostfile H launcher launcher_args ssh_port no_ssh no_ssh_check force_multi quiet q",
);

/// The variables of `VAR=value PROGRAM …` and `env VAR=value PROGRAM …`, and the number of words before the program.
fn assignments(command: &[String]) -> (Vec<(&str, &str)>, usize) {
    let mut assigned = Vec::new();
    let mut program = 0;
    while let Some((word, after)) = command[program..].split_first() {
        match word.split_once('=') {
            Some((name, value)) if word::is_name(name) => assigned.push((name, value)),
            None if word.rsplit('/').next() == Some("env")
                && after.first().is_some_and(|next| !next.starts_with('-')) => {}
            _ => break,
        }
        program += 1;
    }
    (assigned, program)
}

/// The environment variables that a command sets for its program, as text without placeholders. Leaves out the variables
/// that evenkeel sets itself.
pub(crate) fn assigned(command: &[String]) -> BTreeMap<String, String> {
    for_ranks(&assignments(command).0)
}

fn for_ranks(assigned: &[(&str, &str)]) -> BTreeMap<String, String> {
    let assigned = assigned.iter().filter(|(name, _)| !OF_RANKS.has(name));
    let assigned = assigned.map(|(name, value)| ((*name).to_owned(), placeholder::literal(value)));
    assigned.collect()
}

/// A command that is started unchanged, but for the variables that it sets.
fn unsplit(command: &[String]) -> Split {
    let (assigned, program) = assignments(command);
    Split {
        program: command[program..].to_vec(),
        assigned: for_ranks(&assigned),
        ..Split::default()
    }
}

/// The rule of the errors for an external trainer's command.
pub(crate) const RULE: &str = "trainer-command";

/// The help of those of its launcher.
const HELP: &str = "docs/external-trainer.md lists what evenkeel replaces";

/// Splits the command of the external trainer. `found`: the launch among its words. `is_job`: it is the job, too. `None`:
/// evenkeel cannot replace its launcher, which is reported.
pub(crate) fn started(
    command: &[String],
    typed: &Typed,
    found: Option<&Launch>,
    is_job: bool,
    reading: &mut Reading,
) -> Option<Split> {
    match split(command, typed, found) {
        // The rule external-trainer refuses launchers that are not understood.
        Err(LauncherError::Unknown) if !is_job => Some(unsplit(command)),
        Err(error) => {
            reading.error(RULE, None, error.to_string(), HELP);
            None
        }
        Ok(split) => Some(split),
    }
}

/// Splits a command. `typed`: its words. `found`: the launch among them.
fn split(
    command: &[String],
    typed: &Typed,
    found: Option<&Launch>,
) -> Result<Split, LauncherError> {
    // The shell of an inline script may do more than start the command.
    if command.is_empty() || typed.is_inline_script() {
        return Err(LauncherError::Unknown);
    }
    let (assigned, program) = assignments(command);
    if program == command.len() {
        let problem = "the command sets variables and starts no program; give one after them, `VAR=value python train.py`";
        return Err(LauncherError::Options(problem.to_owned()));
    }
    let words = without_srun(&typed.words[program..])?;
    let first = words.first().map_or("", |first| first.text.as_str());
    let name = first.rsplit('/').next().unwrap_or_default();
    let named = Words("torchrun accelerate accelerate-launch deepspeed deepspeed.pt trl");
    let unknown = || {
        if named.has(name) {
            LauncherError::Options(format!(
                "the options of `{name}` name no program that evenkeel can start; check their spelling, and write them \
             out: `{name} OPTIONS train.py …`"
            ))
        } else {
            LauncherError::Unknown
        }
    };
    let found = found.ok_or_else(unknown)?;
    let (Some(mut program), Some(script)) = (found.alone.clone(), &found.program) else {
        return Err(unknown());
    };
    // Refuses a wrapper before the launcher.
    let is_script = words.len() == found.arguments.len() + 1;
    if !is_script && !named.has(name) && !name.starts_with("python") {
        return Err(LauncherError::Unknown);
    }
    let mut ignored = refuse_options(found)?;
    let of_ranks = assigned.iter().map(|(name, _)| *name);
    let replaced = of_ranks.filter(|name| OF_RANKS.has(name) && !name.starts_with(OF_TORCHRUN));
    ignored.extend(replaced.map(str::to_owned));
    let is_of_launcher =
        |word: &&Word| found.launcher == Launcher::Trl && is_of_trls_launcher(found, word);
    let (of_launcher, mut arguments): (Vec<&Word>, Vec<&Word>) =
        found.arguments.iter().partition(is_of_launcher);
    // A launcher's parser drops `--` after the program.
    let by_parser = ![Launcher::Python, Launcher::Trl].contains(&found.launcher);
    if by_parser && arguments.first().is_some_and(|word| word.text == "--") {
        arguments.remove(0);
    }
    program.push(match found.launcher {
        Launcher::Trl => format!("trl.scripts.{}", script.text),
        _ => script.text.clone(),
    });
    let local_rank = found.local_rank;
    program.extend(local_rank.map(|option| format!("{option}={{local_rank}}")));
    program.extend(arguments.into_iter().map(|word| word.text.clone()));
    let launcher = Launch {
        arguments: of_launcher.into_iter().cloned().collect(),
        ..found.clone()
    };
    Ok(Split {
        launcher: Some(launcher).filter(|launch| launch.launcher != Launcher::Python),
        program,
        environment: environment(found)?,
        assigned: for_ranks(&assigned),
        ignored,
    })
}

/// The words after `srun` and its options. Evenkeel starts one launcher on one machine, so only the counts matter.
fn without_srun(words: &[Word]) -> Result<&[Word], LauncherError> {
    let after = match words.split_first() {
        Some((first, after)) if first.file_name() == "srun" => after,
        _ => return Ok(words),
    };
    let Given {
        options,
        rest,
        refused,
        ..
    } = options(after, &SRUN);
    if refused.is_some() {
        let option = rest.first().map_or("", |word| word.text.as_str());
        return Err(no_counterpart("srun", option));
    }
    const COUNTS: Words = Words("N nodes n ntasks ntasks_per_node");
    for option in options.iter().filter(|option| COUNTS.has(&option.name)) {
        let count = option
            .value
            .as_ref()
            .map_or("", |value| value.text.as_str());
        if count != "1" {
            let option = option.written().replace('_', "-");
            return Err(LauncherError::Options(format!(
                "`{option} {count}` of srun starts the launcher more than once, but evenkeel starts every rank itself; \
                 remove `srun` with its options, and give the nodes of a cluster with `evenkeel launch --nodes`"
            )));
        }
    }
    Ok(rest)
}

/// Refuses options without counterpart. Returns those without effect.
fn refuse_options(found: &Launch) -> Result<Vec<String>, LauncherError> {
    let given = |names: &[&str]| found.option(names).is_some();
    if given(&["no_python"]) && given(&["module", "m"]) {
        let problem = "the launcher has both `--module` and `--no_python`; remove one of them";
        return Err(LauncherError::Options(problem.to_owned()));
    }
    let is_read = matches!(found.launcher, Launcher::Torchrun | Launcher::Deepspeed);
    let mut ignored = Vec::new();
    for option in &found.options {
        if is_read && !REPLACED.has(&option.name) {
            let option = format!("--{}", option.name);
            return Err(no_counterpart(found.launcher.name(), &option));
        }
        if IGNORED.has(&option.name) && local_port(option).is_none() {
            ignored.push(option.written());
        }
    }
    Ok(ignored)
}

/// The port of a rendezvous on this machine, `--rdzv_endpoint localhost:29501`. The ranks meet there too, because they
/// share the store of the rendezvous (torch 2.15, `elastic/rendezvous/dynamic_rendezvous.py`).
fn local_port(option: &Opt) -> Option<&str> {
    let endpoint = option
        .value
        .as_ref()
        .filter(|_| option.name == "rdzv_endpoint")?;
    let (host, port) = endpoint.text.rsplit_once(':')?;
    ["localhost", "127.0.0.1", ""]
        .contains(&host)
        .then_some(port)
}

/// The environment variables that a launcher gives to the ranks besides torchrun's.
fn environment(found: &Launch) -> Result<BTreeMap<String, String>, LauncherError> {
    let mut environment = BTreeMap::new();
    let mut set = |name: &str, value: String| environment.insert(name.to_owned(), value);
    if let Some(role) = found.value(&["role"]) {
        set("ROLE_NAME", placeholder::literal(&role.text));
    }
    // accelerate's own option is among the variables of its launch.
    let endpoint = found.options.iter().rev().find_map(local_port);
    let port = found.value(&["master_port"]).map(|port| port.text.as_str());
    if let Some(port) = port.or(endpoint) {
        set(MASTER_PORT, placeholder::literal(port));
    }
    if found.launcher == Launcher::Deepspeed {
        set("LOCAL_SIZE", "{local_world_size}".to_owned());
        set("CROSS_RANK", "{node_rank}".to_owned());
        set("CROSS_SIZE", "{nodes}".to_owned());
        let filter = found.value(&["include", "i"]);
        let devices = filter
            .map(|filter| visible_devices(&filter.text))
            .transpose()?;
        if let Some(devices) = devices.filter(|devices| !devices.is_empty()) {
            set("CUDA_VISIBLE_DEVICES", devices);
        }
    }
    Ok(environment)
}

/// The devices that DeepSpeed's `--include` lists on its only host, as the value of `CUDA_VISIBLE_DEVICES`.
///
/// Source: DeepSpeed 0.19.8 `launcher/runner.py` (`parse_resource_filter`), `launcher/launch.py` (`main`).
fn visible_devices(filter: &str) -> Result<String, LauncherError> {
    let by_host = hosts::devices(filter).ok_or_else(|| {
        LauncherError::Options(format!(
            "`--include {filter}` of deepspeed lists no devices, and deepspeed refuses it; write it as `localhost:0,1`"
        ))
    })?;
    let mut hosts = by_host.values();
    let (Some(devices), None) = (hosts.next(), hosts.next()) else {
        let hosts = by_host.len();
        return Err(LauncherError::Options(format!(
            "`--include {filter}` of deepspeed names {hosts} hosts, but evenkeel starts the ranks of this machine; \
             remove it, and give the nodes of a cluster with `evenkeel launch --nodes`"
        )));
    };
    let listed: Vec<String> = devices.iter().map(u64::to_string).collect();
    Ok(listed.join(","))
}

/// Whether a word is an option of TRL's launcher, or its value.
fn is_of_trls_launcher(launch: &Launch, word: &Word) -> bool {
    launch.options.iter().any(|option| {
        let value = option.value.as_ref().map(|value| value.span.start);
        option.at.start == word.span.start || value == Some(word.span.start)
    })
}

/// The program and its arguments, with placeholders instead of the batch numbers. `numbers`: the keys to
/// remove. `placeholders`: the program takes the numbers and the checkpoint as arguments.
pub fn without_numbers(program: Vec<String>, numbers: &[&str], placeholders: bool) -> Vec<String> {
    let mut alone = Vec::new();
    let mut words = program.into_iter();
    while let Some(word) = words.next() {
        let option = word.strip_prefix("--");
        let (name, attached) = match (option, word.split_once('=')) {
            (Some(_), Some((name, _))) => (name.trim_start_matches('-').replace('-', "_"), true),
            (Some(name), None) => (name.replace('-', "_"), false),
            // An override of Hydra.
            (None, Some((name, _))) => (name.trim_start_matches('+').to_owned(), true),
            (None, None) => (String::new(), true),
        };
        if !numbers.contains(&name.as_str()) {
            alone.push(word);
        } else if !attached {
            words.next();
        }
    }
    if placeholders {
        alone.extend([ARGS, RESUME_ARGS].map(|name| format!("{{{name}}}")));
    }
    alone
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::launcher;
    use super::*;
    use crate::recipe::syntax::source::FileId;

    proptest! {
        #[test]
        fn any_words_end_in_placeholders_or_are_refused(words in prop::collection::vec(
            prop_oneof![any::<String>(), "torchrun|python3?|-m|train.py|--[a-z]{1,3}(=[0-9])?"],
            0..8,
        )) {
            if let Ok(split) = of_words(&words) {
                let alone = without_numbers(split.program, &["a", "b"], true);
                prop_assert_eq!(alone.last().map(String::as_str), Some("{resume_args}"));
            }
        }
    }

    fn words(command: &str) -> Vec<String> {
        command.split(' ').map(str::to_owned).collect()
    }

    fn of_words(command: &[String]) -> Result<Split, LauncherError> {
        let typed = Typed::of(command, FileId(0));
        let found = launcher::find(&typed.words);
        super::split(command, &typed, found.as_ref())
    }

    fn split(command: &str) -> Result<Split, LauncherError> {
        of_words(&words(command))
    }

    fn stripped(command: &str) -> String {
        let numbers = ["per_device_train_batch_size", "gradient_accumulation_steps"];
        let program = split(command).unwrap().program;
        without_numbers(program, &numbers, true).join(" ")
    }

    #[test]
    fn launchers_and_the_batch_numbers_are_removed() {
        for (command, expected) in [
            (
                "torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 8 --lr 1e-4",
                "python3 -u train.py --lr 1e-4 {args} {resume_args}",
            ),
            (
                "/venv/bin/torchrun --standalone -m my.train --gradient-accumulation-steps=2 --x",
                "/venv/bin/python3 -u -m my.train --x {args} {resume_args}",
            ),
            (
                "python -u -m torch.distributed.run --nproc-per-node=2 train.py --x",
                "python -u train.py --x {args} {resume_args}",
            ),
            (
                "torchrun --no_python ./train --x",
                "./train --x {args} {resume_args}",
            ),
            (
                "python3.11 -u train.py --x 1",
                "python3.11 -u train.py --x 1 {args} {resume_args}",
            ),
            (
                "python -m my.train --x",
                "python -m my.train --x {args} {resume_args}",
            ),
            (
                "accelerate launch --config_file a.yaml --num_processes=2 -m my.train --x",
                "python3 -u -m my.train --x {args} {resume_args}",
            ),
            (
                "python -m accelerate.commands.launch --use_fsdp launch.py ++loss.batch=2 --x",
                "python -u launch.py ++loss.batch=2 --x {args} {resume_args}",
            ),
            (
                "torchrun train.py -- --x",
                "python3 -u train.py --x {args} {resume_args}",
            ),
            (
                "/venv/bin/accelerate launch --no_python ./train --x",
                "./train --x {args} {resume_args}",
            ),
            (
                "deepspeed --num_gpus 2 train.py --x",
                "python3 -u train.py --local_rank={local_rank} --x {args} {resume_args}",
            ),
            (
                "deepspeed --no_local_rank --module my.train --x",
                "python3 -u -m my.train --x {args} {resume_args}",
            ),
            (
                "python -m torch.distributed.launch --nproc_per_node 2 train.py --x",
                "python -u train.py --local-rank={local_rank} --x {args} {resume_args}",
            ),
            (
                "trl sft --model_name_or_path m --num_processes 4 --x --accelerate_config zero2",
                "python3 -u -m trl.scripts.sft --model_name_or_path m --x {args} {resume_args}",
            ),
            (
                "srun --gres=gpu:8 -N1 --ntasks 1 torchrun --nnodes 1 train.py --x",
                "python3 -u train.py --x {args} {resume_args}",
            ),
        ] {
            assert_eq!(stripped(command), expected, "{command}");
        }
    }

    #[test]
    fn the_launchers_options_are_separate_from_the_programs() {
        for (command, options) in [
            (
                "accelerate launch --config_file a.yaml train.py --x",
                Some("--config_file a.yaml"),
            ),
            (
                "trl sft --config {recipe} --num_processes 4",
                Some("--num_processes 4 | --num_processes 4"),
            ),
            ("python train.py --x", None),
        ] {
            let launcher = split(command).unwrap().launcher.map(|launch| {
                let options = launch.options.iter().map(|option| {
                    let value = option.value.as_ref().map_or("", |value| &value.text);
                    format!("{} {value}", option.written())
                });
                let arguments = launch.arguments.iter().map(|word| word.text.clone());
                let arguments = arguments.collect::<Vec<_>>().join(" ");
                let both = [options.collect::<Vec<_>>().join(" "), arguments];
                both.join(" | ").trim_end_matches(" | ").to_owned()
            });
            assert_eq!(launcher.as_deref(), options, "{command}");
        }
    }

    #[test]
    fn assignments_before_the_launcher_are_the_ranks_environment_as_text() {
        for (command, program, assigned) in [
            (
                "ACCELERATE_LOG_LEVEL=info accelerate launch --config_file a.yaml sft.py --x",
                "python3 -u sft.py --x",
                "ACCELERATE_LOG_LEVEL=info",
            ),
            (
                "env A= B={world_size} MASTER_ADDR=a C={\"a\":1} torchrun train.py",
                "python3 -u train.py",
                "A= B={left_brace}world_size} C={\"a\":1}",
            ),
            (
                "PET_NPROC_PER_NODE=2 PET_MAX_RESTARTS=3 /bin/env A=1 srun torchrun train.py",
                "python3 -u train.py",
                "A=1 PET_MAX_RESTARTS=3",
            ),
            ("A=1 A=2 python train.py B=3", "python train.py B=3", "A=2"),
        ] {
            let split = split(command).unwrap();
            let of_ranks = split.assigned.iter();
            let of_ranks: Vec<String> = of_ranks
                .map(|(name, value)| format!("{name}={value}"))
                .collect();
            let found = (split.program.join(" "), of_ranks.join(" "));
            assert_eq!(
                found,
                (program.to_owned(), assigned.to_owned()),
                "{command}"
            );
        }
        let world = |command: &str| split(command).unwrap().launcher?.world;
        let command = "PET_NPROC_PER_NODE=2 /bin/env A=1 srun torchrun train.py";
        assert_eq!(world(command).unwrap().value, 2);
        let spaced = ["A=a b".to_owned(), "trl".to_owned(), "sft".to_owned()];
        assert_eq!(of_words(&spaced).unwrap().assigned["A"], "a b");
    }

    #[test]
    fn options_for_restarts_and_logs_are_ignored_and_the_role_is_the_ranks() {
        let command = "torchrun --nproc_per_node 2 --max-restarts=3 -t 3 --log_dir logs --role {args} train.py --tee 1";
        let split = split(command).unwrap();
        assert_eq!(split.ignored, ["--max_restarts", "-t", "--log_dir"]);
        assert_eq!(split.environment["ROLE_NAME"], "{left_brace}args}");
        let command = "deepspeed --hostfile=hosts --launcher_args x --num_gpus 2 train.py";
        let ignored = super::tests::split(command).unwrap().ignored;
        assert_eq!(ignored, ["--hostfile", "--launcher_args"]);
        for (command, port) in [
            ("torchrun --master_port 29501 train.py", Some("29501")),
            (
                "MASTER_PORT=1 deepspeed --master_port=29501 train.py",
                Some("29501"),
            ),
            (
                "torchrun --rdzv-endpoint=localhost:29501 train.py",
                Some("29501"),
            ),
            ("torchrun --rdzv-endpoint=a:1 train.py", None),
        ] {
            let split = super::tests::split(command).unwrap();
            let named = split.environment.get(MASTER_PORT).map(String::as_str);
            assert_eq!(named, port, "{command}");
            let ignored = if port.is_some() {
                &[][..]
            } else {
                &["--rdzv_endpoint"][..]
            };
            assert_eq!(split.ignored, ignored, "{command}");
        }
        let assigned = super::tests::split("MASTER_PORT=29501 python train.py").unwrap();
        assert_eq!(assigned.assigned[MASTER_PORT], "29501");
    }

    #[test]
    fn ranks_see_the_devices_that_deepspeed_includes() {
        for (include, devices) in [
            ("--include localhost:3,1,1", Some("1,3")),
            ("-i worker-0:0", Some("0")),
            ("--include=localhost", None),
        ] {
            let split = split(&format!("deepspeed {include} train.py")).unwrap();
            let visible = split.environment.get("CUDA_VISIBLE_DEVICES");
            assert_eq!(visible.map(String::as_str), devices, "{include}");
        }
    }

    #[test]
    fn commands_that_are_no_plain_launcher_and_options_without_counterpart_are_refused() {
        for command in [
            "env -u A torchrun train.py",
            "uv run torchrun train.py",
            "bash -c torchrun",
            "mpirun -n 2 python train.py",
        ] {
            let refused = split(command);
            assert_eq!(refused, Err(LauncherError::Unknown), "{command}");
        }
        for (command, named) in [
            ("torchrun", "the options of `torchrun` name no program"),
            (
                "accelerate launch --config_f a.yaml train.py",
                "the options of `accelerate` name no program",
            ),
            ("torchrun --run_path a train.py", "`--run_path` of torchrun"),
            (
                "deepspeed --exclude localhost:0 train.py",
                "`--exclude` of deepspeed has no counterpart",
            ),
            (
                "deepspeed --include worker-0:0,1@worker-1 train.py",
                "`--include worker-0:0,1@worker-1` of deepspeed names 2 hosts",
            ),
            (
                "deepspeed -i localhost:0-3 train.py",
                "`--include localhost:0-3` of deepspeed lists no devices",
            ),
            (
                "srun -N 2 torchrun train.py",
                "`-N 2` of srun starts the launcher more than once",
            ),
            (
                "srun --ntasks=16 torchrun train.py",
                "`--ntasks 16` of srun starts the launcher more than once",
            ),
            ("srun --chdir=/ torchrun train.py", "`--chdir=/` of srun"),
            (
                "A=1 env B=2",
                "the command sets variables and starts no program",
            ),
        ] {
            let message = split(command).unwrap_err().to_string();
            assert!(message.starts_with(named), "{message}");
        }
    }
}
