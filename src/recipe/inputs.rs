//! Gathers the parts of one job: the recipe's file, the command that starts it, and the configs that either
//! names. Upstream, several programs read them. Here they become one tree with the trainer's keys and one
//! native tree with the launcher's settings. As upstream, arguments override files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::recipe::dialects::command::alone::{self, Split};
use crate::recipe::dialects::command::{self, Command, Launch, Stated, launcher, slurm};
use crate::recipe::dialects::{
    accelerate, handbook, hydra, llama_factory, own_defaults, programs, projects, readers,
    transformers,
};
use crate::recipe::schema::axes;
use crate::recipe::schema::dialect::{Dialect, RESERVED};
use crate::recipe::schema::launch::{AccelerateLaunch, Opt};
use crate::recipe::schema::program::Program;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::request::Request;
use crate::recipe::schema::tree::Tree;
use crate::recipe::syntax::node::{Node, joined};
use crate::recipe::syntax::shell::{self, ARGUMENTS, Typed, word};
use crate::recipe::syntax::source::{FileId, Span};
use crate::recipe::syntax::words::Words;

/// The parts of a job, each with its precedence settled.
pub(crate) struct Job {
    /// The trainer's keys with their values.
    pub root: Node,
    /// The file that holds them, or the program's file if there is none. Relative paths in it may start from
    /// its directory.
    pub path: PathBuf,
    /// The dialect that the command implies, and the reason.
    pub dialect: Option<(Dialect, String)>,
    /// The command's overrides for a Hydra program. Overrides given to evenkeel win over them.
    pub overrides: Vec<String>,
    /// The launcher's settings, with native keys.
    pub launched: Option<Node>,
    pub launch: Option<Launch>,
    /// What its reader does not get: a config or arguments that may size an axis.
    pub unread: Option<Node>,
    /// Overrides that give variables of the script.
    pub variables: BTreeMap<String, String>,
    /// The external trainer's command.
    pub started: Option<Split>,
}

/// The recipe's tree and its file.
type Recipe = (PathBuf, Node);

/// Reads every file of a job. `text`: the recipe's text, if the caller has it.
pub(crate) fn gather(
    request: &Request,
    text: Option<String>,
    reading: &mut Reading,
) -> Option<Job> {
    let GivenFile {
        recipe,
        mut command,
        variables,
        ..
    } = given_file(request, text, reading)?;
    let typed = typed(&request.command, reading);
    if let Some(typed) = &typed {
        command = Some(read_typed(typed, reading)?);
    }
    let launch = command.as_ref().map(|command| &command.launch);
    let started = started(request, typed.as_ref(), launch, reading)?;
    let job = match command {
        None => without_command(recipe?, started.as_ref(), request, reading),
        Some(command) => match &command.project {
            Some(project) => {
                project.value.refuse("this command", project.span, reading);
                None
            }
            None => with_command(recipe, command, request, reading),
        },
    }?;
    Some(Job {
        variables,
        started,
        ..job
    })
}

/// A job of which only the launcher is read, since the user gives its batch.
pub(crate) fn gather_launcher(
    request: &Request,
    text: Option<String>,
    reading: &mut Reading,
) -> Option<Job> {
    let GivenFile {
        recipe,
        mut command,
        script,
        variables,
    } = given_file(request, text, reading)?;
    let typed = typed(&request.command, reading);
    if let Some(typed) = &typed {
        command = read_typed(typed, reading);
    }
    let launch = command.as_ref().map(|command| &command.launch);
    let started = started(request, typed.as_ref(), launch, reading)?;
    if let Some(launcher) = started.as_ref().and_then(|split| split.launcher.as_ref())
        && !request.starts_command
    {
        command = command::of_launcher(launcher, &mut reading.diagnostics);
        reading.files.command = None;
    }
    // The user gives the devices too, so that a config of the launcher may be missing.
    let launched = launched(request, command.as_ref(), Stated::default(), reading);
    let mut launched = launched.unwrap_or_default();
    let (path, mut unread) = match recipe {
        Some(recipe) => recipe,
        None => (request.path.clone(), options_of(script, reading)),
    };
    if let Some(command) = &command
        && unread.entries().is_some()
    {
        unread.overlay(command.unread_arguments());
        unread.overlay(configs_of(command, request, reading));
    }
    put_micro_batch(&mut launched, &unread);
    reading.diagnostics.retain(|found| !found.hides_batch);
    Some(Job {
        launch: command.map(|command| command.launch),
        variables,
        started,
        ..Job::without_batch(path, unread, launched)
    })
}

/// The options in a script's text.
fn options_of(script: Option<FileId>, reading: &Reading) -> Node {
    let source = script.and_then(|file| Some((file, reading.sources.get(file)?)));
    match source {
        Some((file, source)) => command::options_of_text(&source.text, file),
        None => Node::mapping(Span::of("", 0..0, FileId(0))),
    }
}

/// What may size an axis beside the options of a program that no reader knows.
fn beside_arguments(command: &Command, request: &Request, reading: &mut Reading) -> Node {
    let Launch {
        program, arguments, ..
    } = &command.launch;
    // Where a variable holds the program or its arguments, the text of the script may have them.
    let mut words = program.iter().chain(arguments);
    let unresolved = words.any(|word| word.is_unresolved());
    let mut unread = options_of(reading.files.recipe.filter(|_| unresolved), reading);
    unread.overlay(command.unread_beside_options());
    unread.overlay(configs_of(command, request, reading));
    unread
}

/// The configs that the arguments of a program name which no reader knows, each below its name: their axes count.
fn configs_of(command: &Command, request: &Request, reading: &mut Reading) -> Node {
    let mut configs = Node::mapping(command.arguments.span);
    let mut option: Option<String> = None;
    for word in &command.launch.arguments {
        let (name, value) = match word.option() {
            Some((name, tied)) => (Some(name), tied),
            None => (option.take(), Some(word.clone())),
        };
        option = name.clone().filter(|_| value.is_none());
        let Some(value) = value else { continue };
        if !value.unresolved.is_empty() {
            if name.is_some_and(|name| NAMING_CONFIGS.has(&name)) {
                ask_for_config(&value, request, reading);
            }
            continue;
        }
        let named = Some(&value).filter(|value| command::is_config(Path::new(&value.text)));
        let path = named.and_then(|value| reading.beside(&request.path, &value.text));
        let Some(path) = path else { continue };
        // A file that is no config of the program may be anything.
        let known = reading.diagnostics.len();
        if let Some((_, root)) = reading.open(&path, Some(value.span)) {
            configs.set(&value.text, value.span, root);
        }
        reading.diagnostics.truncate(known);
    }
    configs
}

/// Options that name the config of a program.
const NAMING_CONFIGS: Words =
    Words("cfg config config_file config_yaml train_cfg train_config training_config");

/// Refuses a config whose path only the shell knows: it may hold axes. The user may give the path or state the axes.
fn ask_for_config(word: &word::Word, request: &Request, reading: &mut Reading) {
    if request.states_axes() {
        return;
    }
    let text = command::unresolved::shown(word);
    let message = format!(
        "`{text}` names a config that only the shell knows: it may divide the data-parallel ranks"
    );
    let no_axis = format!("`{RESERVED}.parallel.tensor=1` says that no rank shares its samples");
    let help = match word::variable(&word.text) {
        Some(name) => format!(
            "give its path beside the script, `evenkeel plan SCRIPT {name}=FILE`; {no_axis}"
        ),
        None => format!("{}; {no_axis}", command::AS_EXPANDED),
    };
    reading.error("unsupported-value", Some(word.span), message, help);
}

/// Puts the micro-batch of what is not read into the launcher's settings, for a plan whose global batch the user gives.
fn put_micro_batch(launched: &mut Option<Node>, unread: &Node) {
    if let Some((key, size)) = micro_batch(unread) {
        let mut native = Tree::new(size.span);
        native.put("batch.per_device_batch_size", &key, size);
        let native = native.into_node();
        launched
            .get_or_insert_with(|| Node::mapping(native.span))
            .overlay(native);
    }
}

/// The micro-batch in the arguments or the config of a program that is not read: the only number with such a name.
fn micro_batch(unread: &Node) -> Option<(String, Node)> {
    const NAMES: Words = Words(
        "device_train_microbatch_size micro_batch_size micro_batch_size_per_gpu micro_train_batch_size \
         per_device_batch_size per_device_train_batch_size per_gpu_train_batch_size ppo_micro_batch_size_per_gpu \
         train_micro_batch_size_per_gpu",
    );
    // verl's former key, which its ranks divide among them (b178a3c `trainer/fsdp_sft_trainer.py`).
    const OF_ALL_RANKS: &str = "data.micro_batch_size";
    fn collect(node: &Node, path: &str, found: &mut Vec<(String, Node)>) {
        for entry in node.entries().unwrap_or_default() {
            let path = joined(path, &entry.name);
            if path == OF_ALL_RANKS || axes::is_of_another_model(&path) {
                continue;
            }
            let name = path.rsplit('.').next().unwrap_or_default();
            let size = entry.value.text().and_then(|text| text.parse::<u64>().ok());
            match NAMES.has(&name.trim_start_matches('-').replace('-', "_"))
                && size.is_some_and(|size| size > 0)
            {
                true => found.push((path, entry.value.clone())),
                false => collect(&entry.value, &path, found),
            }
        }
    }
    let mut found = Vec::new();
    collect(unread, "", &mut found);
    let (first, others) = found.split_first()?;
    let agree = others.iter().all(|(_, size)| size.text() == first.1.text());
    agree.then(|| first.clone())
}

/// The text of a recipe that can be read only once. `None`: it is a file, or unreadable.
pub(crate) fn piped(request: &Request) -> Option<String> {
    let is_once = |path: &Path| !request.origin.is_file(path) && !request.origin.is_dir(path);
    let path = Some(&request.path).filter(|path| !path.as_os_str().is_empty() && is_once(path))?;
    Reading::at(&request.origin).text(path, None)
}

/// What the given file holds.
#[derive(Default)]
struct GivenFile {
    recipe: Option<Recipe>,
    command: Option<Command>,
    /// The file, if it is a script.
    script: Option<FileId>,
    /// Overrides that give variables of its script.
    variables: BTreeMap<String, String>,
}

/// Reads the given file. `None`: it is unreadable.
fn given_file(request: &Request, text: Option<String>, reading: &mut Reading) -> Option<GivenFile> {
    if text.is_none() && request.path.as_os_str().is_empty() {
        return Some(GivenFile::default());
    }
    // A Hydra tree is read from its root file.
    let path = match hydra::root_of(&request.path, &request.origin) {
        Some(root) if request.origin.is_dir(&request.path) => root,
        _ => request.path.clone(),
    };
    let text = match text {
        Some(text) => text,
        None => reading.text(&path, None)?,
    };
    let file = reading.sources.add(&path, text.as_str());
    reading.files.recipe = Some(file);
    if command::is_one(&path, &text) {
        let variables = variables_of(&text, &request.overrides);
        refuse_unused(&variables, &request.overrides, reading);
        return Some(GivenFile {
            command: read_command(&path, &text, file, &variables, reading),
            script: Some(file),
            variables,
            ..GivenFile::default()
        });
    }
    Some(GivenFile {
        recipe: Some((path, reading.tree(file)?)),
        ..GivenFile::default()
    })
}

/// The overrides `NAME=VALUE` whose names a script uses as variables. They replace what the script assigns to them.
fn variables_of(script: &str, overrides: &[String]) -> BTreeMap<String, String> {
    let in_arithmetic = |name: &str| {
        let of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let parts = script.split("((").skip(1);
        let mut names = parts.flat_map(|part| {
            let end = part.find("))").unwrap_or(0);
            part[..end].split(move |c| !of_name(c))
        });
        names.any(|found| found == name)
    };
    let used = |name: &str| {
        let begins = ["$", "${"].map(|mark| format!("{mark}{name}"));
        let ends = |rest: &str| !rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
        let mut found = begins.iter().flat_map(|begin| {
            script
                .match_indices(begin.as_str())
                .map(|(at, begin)| &script[at + begin.len()..])
        });
        found.any(ends) || in_arithmetic(name)
    };
    let given = overrides.iter().filter_map(|text| text.split_once('='));
    let reserved = [command::LINE, ARGUMENTS];
    let given =
        given.filter(|(name, _)| reserved.contains(name) || word::is_name(name) && used(name));
    given
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect()
}

/// Refuses an override with a variable's name that the script does not use: keys are not written in capitals.
fn refuse_unused(
    variables: &BTreeMap<String, String>,
    overrides: &[String],
    reading: &mut Reading,
) {
    let capital = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let given = overrides.iter().filter_map(|text| text.split_once('='));
    for (name, _) in given.filter(|(name, _)| word::is_name(name) && name.chars().all(capital)) {
        if !variables.contains_key(name) {
            let message = format!("the script has no variable `{name}`");
            let help =
                "give a variable that it uses, or a key of the recipe as the command writes it";
            reading.error("unknown-override", None, message, help);
        }
    }
}

/// The job of a recipe alone, or of one that a launcher starts.
fn without_command(
    (path, mut root): Recipe,
    started: Option<&Split>,
    request: &Request,
    reading: &mut Reading,
) -> Option<Job> {
    if refuse_unread_config(&root, request, reading) {
        return None;
    }
    let launcher = started.and_then(|started| started.launcher.as_ref());
    if launcher.is_some_and(Launch::is_trl) {
        command::refuse_switches(&root, reading);
    }
    // LLaMA-Factory has keys with the names of accelerate's options.
    let mut by_recipe = Stated::default();
    if llama_factory::detect(&root).is_none() {
        by_recipe = command::take_launch(&mut root);
    }
    let launcher =
        launcher.and_then(|launch| command::of_launcher(launch, &mut reading.diagnostics));
    let launched = launched(request, launcher.as_ref(), by_recipe, reading)?;
    Some(Job::of(path, root, launched))
}

/// The job of a command, and of the recipe that is given beside it or that it names.
fn with_command(
    mut recipe: Option<Recipe>,
    mut command: Command,
    request: &Request,
    reading: &mut Reading,
) -> Option<Job> {
    if refuse_arguments_file(&command, request, reading) {
        return None;
    }
    if recipe.is_none() {
        recipe = named_recipe(&command, request, reading)?;
    }
    if let Some((_, root)) = &recipe
        && refuse_unread_config(root, request, reading)
    {
        return None;
    }
    let mut by_recipe = Stated::default();
    if let Some((_, root)) = &mut recipe {
        // An accelerate config given as the recipe is the launcher's config.
        if accelerate::looks_like_one(root)
            && let Some(options) = command.accelerate.tree.take()
        {
            accelerate::lay_options(root, &options, reading);
        }
        if command.launch.is_trl() {
            command::refuse_switches(root, reading);
            by_recipe = command::take_launch(root);
        }
    }
    let launched = launched(request, Some(&command), by_recipe, reading)?;
    slurm::compare(launched.as_ref(), reading);
    refuse_other_world(&command, request, reading);
    let script = command.launch.script();
    // Upstream scripts named `*no_trainer` have a custom loop, which does not compare the two configs.
    let stem = script
        .as_ref()
        .and_then(|script| script.value.file_stem()?.to_str());
    if stem.is_some_and(|stem| stem.ends_with("no_trainer"))
        && let Some(plugin) = &mut reading.deepspeed_plugin
    {
        plugin.file = None;
    }
    reading.by_trl = command.launch.is_trl();
    reading.of_trl = reading.by_trl
        || script
            .as_ref()
            .is_some_and(|script| is_of_trl(script.value));
    let alone = recipe.is_none();
    let (path, root) = recipe.unwrap_or_else(|| {
        let path = script.map_or(request.path.as_path(), |script| script.value);
        let path = path.to_owned();
        (path, Node::mapping(command.arguments.span))
    });
    let mut job = Job::of(path, root, launched);
    job.launch = Some(command.launch.clone());
    if command.deepspeed {
        job.unread = Some(command.arguments);
        let reason = "the command names it with `--deepspeed_config`".to_owned();
        job.dialect = Some((Dialect::Deepspeed, reason));
    } else if command.hydra.is_some() {
        job.overrides = command.overrides;
    } else {
        add_arguments(&mut job, command, alone, request, reading)?;
    }
    Some(job)
}

/// Refuses `--recipe-gpus 8` where the script has computed the accumulation for another number of processes. With theirs,
/// it would have computed another one.
fn refuse_other_world(command: &Command, request: &Request, reading: &mut Reading) {
    let (Some(computed), Some(asked)) = (&command.computed_for, request.setting("batch.gpus"))
    else {
        return;
    };
    let (name, processes) = (&computed.key, computed.value);
    if asked.value == processes.to_string() {
        return;
    }
    reading.error(
        "accumulation-conflict",
        Some(computed.span),
        format!(
            "the script computes the accumulation for {processes} processes (`{name}`), but `{}` is {}",
            asked.flag, asked.value
        ),
        format!(
            "remove `{}`, or give the command as the shell expands it with that number: `evenkeel plan … -- COMMAND`",
            asked.flag
        ),
    );
}

/// The recipe that a command names, or the root of its Hydra tree. The outer `None`: it is unreadable.
fn named_recipe(
    command: &Command,
    request: &Request,
    reading: &mut Reading,
) -> Option<Option<Recipe>> {
    if let Some(root) = &command.hydra
        && !request.origin.is_file(&root.value)
    {
        reading.batch_unknown(
            "config-missing",
            Some(root.span),
            format!(
                "the Hydra config tree has no root file `{}`",
                root.value.display()
            ),
            "run evenkeel in the directory from which you train, or give the tree before `--`",
        );
        return None;
    }
    let Some(named) = command.hydra.as_ref().or(command.config.as_ref()) else {
        return Some(None);
    };
    if refuse_unresolved_path(&named.key, &named.value, named.span, reading) {
        return None;
    }
    let (file, root) = reading.open_of_command(&named.value, named.span)?;
    reading.files.recipe = Some(file);
    Some(Some((named.value.clone(), root)))
}

/// Lays a command's arguments over its job's keys, and sets the dialect that they imply. `alone`: there is no
/// recipe. `None`: the program is refused.
fn add_arguments(
    job: &mut Job,
    command: Command,
    alone: bool,
    request: &Request,
    reading: &mut Reading,
) -> Option<()> {
    let program = command.launch.script();
    let script = program.clone().filter(|_| request.dialect.is_none());
    if let Some(script) = &script
        && handbook::refuse_unsupported(script.value, Some(script.span), reading)
    {
        return None;
    }
    // The command's arguments do not make another project's file a trainer's: its own keys decide.
    let known = alone || reading.of_trl || request.dialect.is_some();
    let Job { root, path, .. } = job;
    if !known && !readers::detects(root, path, &request.origin) {
        job.unread = Some(command.arguments);
        return Some(());
    }
    let judged = !alone && readers::is_trainers(root, path, &request.origin);
    reading.program = match &program {
        Some(script) if !reading.of_trl => {
            own_defaults::program(script, command.launch.module, reading)
        }
        _ => Program::Upstream,
    };
    job.dialect = dialect_of(root, &command, judged, alone, reading);
    if alone && reading.program.is_strange() && !transformers::is_for_a_trainer(&command.arguments)
    {
        let unread = beside_arguments(&command, request, reading);
        if request.states_batch() {
            put_micro_batch(&mut job.launched, &unread);
        }
        job.unread = Some(unread);
    }
    root.overlay(command.arguments);
    if let Some(script) = script {
        let stated = job
            .launched
            .as_ref()
            .and_then(|launched| launched.get_path("batch.gpus")?.text());
        let processes = request
            .setting("batch.gpus")
            .map(|setting| setting.value.as_str())
            .or(stated);
        let processes = processes.and_then(|text| text.parse().ok());
        programs::complete(script.value, script.span, root, processes, reading);
    }
    if let Some(program) = program {
        own_defaults::refuse_undivided(request, reading);
        own_defaults::take(program.span, request, root, reading);
    }
    Some(())
}

impl Job {
    /// A job whose files imply no dialect.
    fn of(path: PathBuf, root: Node, launched: Option<Node>) -> Job {
        Job {
            root,
            path,
            dialect: None,
            overrides: Vec::new(),
            launched,
            launch: None,
            unread: None,
            variables: BTreeMap::new(),
            started: None,
        }
    }

    /// A job whose batch the user gives, since its config or command is not read.
    fn without_batch(path: PathBuf, unread: Node, launched: Option<Node>) -> Job {
        let reason = "only its launcher is read".to_owned();
        let root = Node::mapping(unread.span);
        Job {
            dialect: Some((Dialect::Transformers, reason)),
            unread: Some(unread),
            ..Job::of(path, root, launched)
        }
    }
}

/// Refuses the config of a project that is not read. Returns whether it did.
fn refuse_unread_config(root: &Node, request: &Request, reading: &mut Reading) -> bool {
    let source = reading.sources.get(root.span.file);
    let extension = source.and_then(|source| source.path.extension());
    let found = if extension.is_some_and(|extension| extension == "toml") {
        Some(projects::of_toml(root))
    } else {
        projects::of_config(root).filter(|_| request.dialect.is_none())
    };
    if let Some(project) = &found {
        let key = format!("`{}`", project.key);
        project.value.refuse(&key, project.span, reading);
    }
    found.is_some()
}

/// `variables`: those that its environment has.
fn read_command(
    path: &Path,
    text: &str,
    file: FileId,
    variables: &BTreeMap<String, String>,
    reading: &mut Reading,
) -> Option<Command> {
    reading.converted.push(file);
    let command = command::parse(path, text, file, variables, &mut reading.diagnostics)?;
    reading.files.command = Some((file, command.end));
    Some(command)
}

/// The words after `--`; `None`: there are none.
fn typed(words: &[String], reading: &mut Reading) -> Option<Typed> {
    if words.is_empty() {
        return None;
    }
    let text = format!("{}\n", shell::join(words));
    let file = reading.sources.add(shell::COMMAND, text);
    reading.converted.push(file);
    Some(Typed::of(words, file))
}

fn read_typed(typed: &Typed, reading: &mut Reading) -> Option<Command> {
    let command = command::of_typed(typed, &mut reading.diagnostics)?;
    reading.files.command = Some((typed.file, command.end));
    Some(command)
}

/// The external trainer's command that the request gives. `job`: the job's command, with its launch. The outer `None`:
/// evenkeel cannot replace the launcher.
fn started(
    request: &Request,
    job: Option<&Typed>,
    launch: Option<&Launch>,
    reading: &mut Reading,
) -> Option<Option<Split>> {
    if let Some(job) = job.filter(|_| request.starts_command) {
        let found = match launch {
            Some(launch) => Some(launch.clone()),
            None => launcher::find(&job.words),
        };
        let (words, found) = (&request.command, found.as_ref());
        return alone::started(words, job, found, true, reading).map(Some);
    }
    let words = &request.trainer_command;
    let Some(typed) = typed(words, reading) else {
        return Some(None);
    };
    let found = launcher::find(&typed.words);
    alone::started(words, &typed, found.as_ref(), false, reading).map(Some)
}

/// Whether a program is one of TRL's scripts, by its folder.
fn is_of_trl(script: &Path) -> bool {
    let folder = script.parent();
    folder.is_some_and(|folder| folder.ends_with("trl/scripts"))
}

/// Refuses `train.args` beside `train.py`. `HfArgumentParser` reads this file before the command's arguments, beside
/// `sys.argv[0]` (transformers 5.23.0 `hf_argparser.py`, `parse_args_into_dataclasses`). Returns whether it did.
fn refuse_arguments_file(command: &Command, request: &Request, reading: &mut Reading) -> bool {
    // TRL's command line looks for the file beside its installed script.
    let others = command.launch.is_trl() || command.deepspeed || command.hydra.is_some();
    let script = command.launch.script();
    let Some(script) = script.filter(|_| !others && !command.only_config) else {
        return false;
    };
    let mut names = Vec::new();
    if command.launch.module {
        let folder = PathBuf::from(script.value.to_string_lossy().replace('.', "/"));
        names.extend([folder.with_extension("args"), folder.join("__main__.args")]);
    } else if script
        .value
        .extension()
        .is_none_or(|extension| extension == "py")
    {
        names.push(script.value.with_extension("args"));
    }
    let beside = |name: &PathBuf| reading.beside(&request.path, name.to_str()?);
    let Some(path) = names.iter().find_map(beside) else {
        return false;
    };
    reading.error(
        "unsupported-value",
        Some(script.span),
        format!(
            "upstream reads `{}` before the command's arguments, which evenkeel does not",
            path.display()
        ),
        "write its arguments into the command, and remove the file",
    );
    true
}

/// The dialect that the command implies: the program has the name of one of TRL's trainers, or arguments that
/// only these have. `judged`: the named recipe has keys of `TrainingArguments`. `alone`: there is no recipe.
fn dialect_of(
    root: &mut Node,
    command: &Command,
    judged: bool,
    alone: bool,
    reading: &mut Reading,
) -> Option<(Dialect, String)> {
    let script = command.launch.script();
    let llama_factory = [&*root, &command.arguments]
        .into_iter()
        .find_map(llama_factory::detect);
    if let Some(detected) = llama_factory {
        return Some((Dialect::Transformers, detected.reason));
    }
    if let Some(script) = &script
        && let Some(objective) = handbook::trainer_of(script.value)
        && (!alone || reading.of_trl || handbook::takes(&command.arguments, &objective))
    {
        // Another project's program may have the same name. Its file is judged as if given alone.
        if !(alone || judged || reading.of_trl) {
            return None;
        }
        let arguments = &command.arguments;
        let of_trl = handbook::trl_argument(arguments).is_some();
        let parsed = transformers::is_for_a_trainer(arguments) || of_trl;
        reading.only_by_name = alone && !reading.of_trl && !parsed;
        let path = format!("{RESERVED}.objective");
        if root.get_path(&path).is_none() {
            root.set_path(&path, Node::string(objective, script.span));
        }
        let uses_trl = match &reading.program {
            Program::None | Program::Upstream => true,
            program => of_trl || program.uses_trl() == Some(true),
        };
        if uses_trl || !alone {
            let reason = format!("the command starts `{}`", script.value.display());
            return Some((Dialect::HandbookTrl, reason));
        }
    }
    // A named recipe file is detected by its keys.
    if !alone {
        return None;
    }
    let swift = script.is_some_and(|script| programs::is_swift(script.value));
    if !swift
        && handbook::deepspeed::switch(&command.arguments).is_none()
        && let Some(name) = handbook::trl_argument(&command.arguments)
    {
        let reason = format!("the command has TRL's argument `--{name}`");
        return Some((Dialect::HandbookTrl, reason));
    }
    let reason = match &reading.program {
        _ if transformers::is_for_a_trainer(&command.arguments) => {
            "the command has a trainer's arguments"
        }
        Program::Text(_) => "the text of its program",
        _ => "no reader knows its program",
    };
    Some((Dialect::Transformers, reason.to_owned()))
}

/// Refuses a file of a command whose path only the shell knows. Returns whether it did.
fn refuse_unresolved_path(key: &str, path: &Path, at: Span, reading: &mut Reading) -> bool {
    let text = path.to_string_lossy();
    let Some((_, rest)) = text.split_once('$') else {
        return false;
    };
    if reading.origin.is_file(path) {
        return false;
    }
    let shown = command::unresolved::shown(&word::Word::new(&*text, at, 0));
    let mut problem = command::unresolved::unknown(key, &shown, at);
    let name = word::identifier(rest.trim_start_matches('{'));
    if !name.is_empty() {
        problem.help =
            format!("give the variable beside the script, `evenkeel plan SCRIPT {name}=VALUE`");
    }
    reading.diagnostics.push(problem);
    true
}

/// The launcher's settings: an accelerate config (from `--accelerate` or the command), the options of
/// `accelerate launch` over it, or the number of processes of another launcher. The command's settings
/// override the recipe's. `None`: a file is unreadable.
fn launched(
    request: &Request,
    command: Option<&Command>,
    by_recipe: Stated,
    reading: &mut Reading,
) -> Option<Option<Node>> {
    let typed = command
        .map(|command| command.accelerate.clone())
        .unwrap_or_default();
    refuse_two_configs(&typed, &by_recipe, reading);
    let requested = request.accelerate.clone();
    let mut config = requested
        .map(|path| accelerate::Config::File(path, None))
        .or(typed.config)
        .or(by_recipe.config);
    if config.is_none()
        && let Some(options) = &typed.options
    {
        config = default_config(options, reading);
    }
    if typed.options.is_some() || by_recipe.options.is_some() {
        let options = [by_recipe.options, typed.options].into_iter().flatten();
        reading.accelerate = Some(AccelerateLaunch {
            options: options.flatten().collect(),
            kind: "MULTI_GPU".to_owned(),
            ..Default::default()
        });
    }
    let options = overlaid(by_recipe.tree, typed.tree);
    if let Some(accelerate::Config::File(path, Some(at))) = &config
        && refuse_unresolved_path("config_file", path, *at, reading)
    {
        return None;
    }
    let mut launched = None;
    if config.is_some() || options.is_some() {
        launched = Some(accelerate::load(
            config.as_ref(),
            options.as_ref(),
            reading,
        )?);
    }
    let world = command.and_then(|command| command.launch.world.as_ref());
    let world = world.map(|processes| {
        let mut tree = Tree::new(processes.span);
        tree.plain("batch.gpus", processes);
        tree.into_node()
    });
    Some(overlaid(launched, world))
}

/// A tree with the values of another one over its own.
fn overlaid(under: Option<Node>, over: Option<Node>) -> Option<Node> {
    match (under, over) {
        (Some(mut under), Some(over)) => {
            under.overlay(over);
            Some(under)
        }
        (under, over) => over.or(under),
    }
}

/// The config that `accelerate launch` reads by default, unless its options have `--cpu`.
///
/// Source: accelerate 1.15.0 `commands/config/config_args.py` (`default_config_file`).
fn default_config(options: &[Opt], reading: &Reading) -> Option<accelerate::Config> {
    if options.iter().any(|option| option.name == "cpu") {
        return None;
    }
    let variable = |name: &str| {
        let value = reading.environment.get(name);
        value.filter(|value| !value.is_empty()).map(PathBuf::from)
    };
    let cache = || Some(variable("HOME")?.join(".cache"));
    let in_cache = || {
        Some(
            variable("XDG_CACHE_HOME")
                .or_else(cache)?
                .join("huggingface"),
        )
    };
    let home = variable("HF_HOME").or_else(in_cache)?;
    let path = home.join("accelerate/default_config.yaml");
    let exists = reading.origin.is_file(&path);
    exists.then_some(accelerate::Config::File(path, None))
}

/// Refuses an `accelerate_config` in both recipe and command. TRL's command line takes the recipe's, and
/// accelerate fails on the second one (TRL f2cd577, `cli/accelerate_config.py`).
fn refuse_two_configs(typed: &Stated, by_recipe: &Stated, reading: &mut Reading) {
    use accelerate::Config::FileOrShipped;
    if let (Some(FileOrShipped(typed)), Some(FileOrShipped(first))) =
        (&typed.config, &by_recipe.config)
    {
        reading.error(
            "unsupported-value",
            Some(typed.span),
            format!(
                "`{}` is `{}` here and `{}` in the recipe, and `accelerate launch` refuses the second",
                typed.key, typed.value, first.value
            ),
            "remove one of the two",
        );
    }
}
