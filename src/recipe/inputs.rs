//! Gathers the parts of one job: the recipe's file, the command that starts it, and the configs that either
//! names. Upstream, several programs read them. Here they become one tree with the trainer's keys and one
//! native tree with the launcher's settings. As upstream, arguments override files.

use std::path::{Path, PathBuf};

use crate::recipe::dialects::command::{self, Command, Launch};
use crate::recipe::dialects::{
    accelerate, handbook, hydra, llama_factory, programs, projects, readers, transformers,
};
use crate::recipe::schema::dialect::{Dialect, RESERVED};
use crate::recipe::schema::launch;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::request::Request;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::shell;
use crate::recipe::syntax::source::FileId;

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
}

/// Reads every file of a job. `text`: the recipe's text, if the caller has it.
pub(crate) fn gather(
    request: &Request,
    text: Option<String>,
    reading: &mut Reading,
) -> Option<Job> {
    let mut recipe = None;
    let mut command = None;
    if text.is_some() || !request.path.as_os_str().is_empty() {
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
            let read = read_command(&path, &text, file, reading)?;
            reading.files.command = Some((file, read.end));
            command = Some(read);
        } else {
            recipe = Some((path, reading.tree(file)?));
        }
    }
    if !request.command.is_empty() {
        let (read, file) = read_words(&request.command, reading)?;
        reading.files.command = Some((file, read.end));
        command = Some(read);
    }
    let Some(mut command) = command else {
        let (path, mut root) = recipe?;
        if take_unread_config(&mut root, request, reading)? {
            return Some(Job::without_batch(path, root, None));
        }
        let by_launcher = match request.launcher.is_empty() {
            true => None,
            false => Some(read_words(&request.launcher, reading)?.0),
        };
        if by_launcher.as_ref().is_some_and(|command| command.by_trl) {
            command::refuse_switches(&root, reading);
        }
        // LLaMA-Factory has keys with the names of accelerate's options.
        let by_recipe = match llama_factory::detect(&root) {
            Some(_) => Launch::default(),
            None => launch_of_recipe(&mut root),
        };
        let launched = launcher(request, by_launcher.as_ref(), by_recipe, reading)?;
        return Some(Job::of(path, root, launched));
    };
    if let Some(project) = &command.project {
        let stated = request.states_batch();
        if !project
            .value
            .refuse("this command", project.span, stated, reading)
        {
            return None;
        }
        let launched = launcher(request, Some(&command), Launch::default(), reading)?;
        let root = Node::mapping(command.arguments.span);
        return Some(Job::without_batch(request.path.clone(), root, launched));
    }
    let arguments_file = take_arguments_file(&mut command, request, reading);
    refuse_tied_config(&command, reading);
    if let (None, Some(call)) = (&recipe, &command.hydra)
        && !request.origin.is_file(&call.root)
    {
        let root = call.root.display();
        reading.error(
            "config-missing",
            Some(call.span),
            format!("the Hydra config tree has no root file `{root}`"),
            "run evenkeel in the directory from which you train, or give the tree before `--`",
        );
        return None;
    }
    let tree = command.hydra.as_ref().map(|call| (&call.root, call.span));
    let config = command.config.as_ref();
    let named = tree.or(config.map(|config| (&config.value, config.span)));
    if let (None, Some((path, named))) = (&recipe, named) {
        let (file, root) = reading.open(path, Some(named))?;
        reading.files.recipe = Some(file);
        recipe = Some((path.clone(), root));
    }
    if let Some((path, root)) = &mut recipe
        && take_unread_config(root, request, reading)?
    {
        let launched = launcher(request, Some(&command), Launch::default(), reading)?;
        return Some(Job::without_batch(path.clone(), root.clone(), launched));
    }
    // An accelerate config given as the recipe is the launcher's config.
    if let (Some((_, root)), Some(options)) = (&mut recipe, &command.launch)
        && accelerate::looks_like_one(root)
    {
        accelerate::lay_options(root, options, reading);
        command.launch = None;
    }
    let by_recipe = match &mut recipe {
        Some((_, root)) if command.by_trl => {
            command::refuse_switches(root, reading);
            launch_of_recipe(root)
        }
        _ => Launch::default(),
    };
    let launched = launcher(request, Some(&command), by_recipe, reading)?;
    compare_with_slurm(launched.as_ref(), reading);
    let alone = recipe.is_none();
    let script = command.script.as_ref();
    // Upstream scripts named `*no_trainer` have a custom loop, which does not compare the two configs.
    let stem = script.and_then(|script| script.value.file_stem()?.to_str());
    if let (Some(true), Some(plugin)) = (
        stem.map(|s| s.ends_with("no_trainer")),
        &mut reading.deepspeed_plugin,
    ) {
        plugin.file = None;
    }
    let (path, mut root) = recipe.unwrap_or_else(|| {
        let path = script.map_or_else(|| request.path.clone(), |script| script.value.clone());
        (path, Node::mapping(command.arguments.span))
    });
    reading.by_trl = command.by_trl;
    reading.of_trl = command.by_trl || script.is_some_and(|script| is_of_trl(&script.value));
    let mut dialect = None;
    let overrides = command.hydra.take().map(|call| call.overrides);
    if command.deepspeed {
        let reason = "the command names it with `--deepspeed_config`".to_owned();
        dialect = Some((Dialect::Deepspeed, reason));
    } else if overrides.is_none() {
        if let (None, Some(script)) = (request.dialect, script)
            && handbook::refuse_unsupported(&script.value, Some(script.span), reading)
        {
            return None;
        }
        // The command's arguments do not make another project's file a trainer's: its own keys decide.
        let known = alone || reading.of_trl || request.dialect.is_some();
        if !known && !readers::detects(&root, &path, &request.origin) {
            return Some(Job::of(path, root, launched));
        }
        let judged = !alone && readers::is_trainers(&root, &path, &request.origin);
        dialect = dialect_of(&mut root, &command, judged, alone, reading);
        root.overlay(command.arguments);
        if let (None, Some(script)) = (request.dialect, script) {
            programs::refuse(&script.value, script.span, &root, reading);
        }
    }
    if let (Some((_, reason)), Some(file)) = (&mut dialect, arguments_file) {
        let file = file.display();
        *reason = format!("{reason}; `{file}` is read before its arguments, as upstream");
    }
    Some(Job {
        dialect,
        overrides: overrides.unwrap_or_default(),
        ..Job::of(path, root, launched)
    })
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
        }
    }

    /// A job whose batch the user gives, since its config or command is not read.
    fn without_batch(path: PathBuf, root: Node, launched: Option<Node>) -> Job {
        let reason = "only its launcher is read".to_owned();
        Job {
            dialect: Some((Dialect::Transformers, reason)),
            ..Job::of(path, root, launched)
        }
    }
}

/// Refuses the config of a project that is not read, or empties it if the user gives the batch. Returns
/// whether it emptied it; `None`: it refused.
fn take_unread_config(root: &mut Node, request: &Request, reading: &mut Reading) -> Option<bool> {
    let found = projects::of_config(root).filter(|_| request.dialect.is_none());
    let Some(project) = found else {
        return Some(false);
    };
    let key = format!("`{}`", project.key);
    let stated = request.states_batch();
    if !project.value.refuse(&key, project.span, stated, reading) {
        return None;
    }
    *root = Node::mapping(root.span);
    Some(true)
}

fn read_command(path: &Path, text: &str, file: FileId, reading: &mut Reading) -> Option<Command> {
    reading.converted.push(file);
    let diagnostics = &mut reading.diagnostics;
    command::parse(path, text, file, handbook::is_switch, diagnostics)
}

/// Reads the words of a command, which become a virtual file.
fn read_words(words: &[String], reading: &mut Reading) -> Option<(Command, FileId)> {
    let text = shell::join(words);
    let path = Path::new(shell::COMMAND);
    let file = reading.sources.add(path, format!("{text}\n"));
    let command = read_command(path, &text, file, reading)?;
    Some((command, file))
}

/// Whether a program is one of TRL's scripts, by its folder.
fn is_of_trl(script: &Path) -> bool {
    let folder = script.parent();
    folder.is_some_and(|folder| folder.ends_with("trl/scripts"))
}

/// Lays a command's arguments over those of `train.args` beside `train.py`. `HfArgumentParser` reads this file
/// by default, beside `sys.argv[0]` (transformers 5.23.0 `hf_argparser.py`,
/// `parse_args_into_dataclasses`). Returns the file's path if there is one.
fn take_arguments_file(
    command: &mut Command,
    request: &Request,
    reading: &mut Reading,
) -> Option<PathBuf> {
    // TRL's command line looks for the file beside its installed script.
    let others = command.by_trl || command.deepspeed || command.hydra.is_some();
    if others || command.only_config {
        return None;
    }
    let script = &command.script.as_ref()?.value;
    let file = match command.module {
        true => module_file(script.to_str()?, |path| {
            reading.beside(&request.path, path.to_str()?)
        })?,
        false => script.clone(),
    };
    if file.extension().is_some_and(|extension| extension != "py") {
        return None;
    }
    let name = file.with_extension("args");
    let path = reading.beside(&request.path, name.to_str()?)?;
    let text = reading.text(&path, None)?;
    let file = reading.sources.add(&path, text.as_str());
    reading.converted.push(file);
    let diagnostics = &mut reading.diagnostics;
    let mut under = command::arguments_of(&text, file, handbook::is_switch, diagnostics)?;
    let typed = Node::mapping(command.arguments.span);
    under.overlay(std::mem::replace(&mut command.arguments, typed));
    command.arguments = under;
    Some(path)
}

/// The file of a module, the `sys.argv[0]` of `python -m`. `__main__.py` of a package comes before the module
/// file, which comes before `__main__.py` of a folder without `__init__.py`. `beside` finds a file. Installed
/// modules are not searched.
fn module_file(name: &str, beside: impl Fn(&Path) -> Option<PathBuf>) -> Option<PathBuf> {
    let folder = PathBuf::from(name.replace('.', "/"));
    let (main, module) = (folder.join("__main__.py"), folder.with_extension("py"));
    let order = match beside(&folder.join("__init__.py")) {
        Some(_) => [main, module],
        None => [module, main],
    };
    order.iter().find_map(|path| beside(path))
}

/// Warns if a script requests another number of GPUs from Slurm than it starts processes.
fn compare_with_slurm(launched: Option<&Node>, reading: &mut Reading) {
    let world = launched.and_then(|launched| launched.get_path("batch.gpus"));
    let (Some(world), Some((file, _))) = (world, reading.files.command) else {
        return;
    };
    let Some(processes) = world.text().and_then(|text| text.parse::<u64>().ok()) else {
        return;
    };
    let source = reading.sources.get(file);
    let asked = source.map(|source| command::slurm_gpu_requests(&source.text, file));
    for asked in asked.unwrap_or_default() {
        if asked.gpus == processes {
            continue;
        }
        let on = match asked.nodes {
            1 => String::new(),
            nodes => format!(" on each of {nodes} nodes"),
        };
        reading.warning(
            "gpu-count-conflict",
            Some(asked.span),
            format!(
                "the script requests {} GPUs from Slurm (`{}`{on}), but its launcher starts {processes} processes",
                asked.gpus, asked.option
            ),
            format!("the plan uses {processes}: change the launcher's config or the Slurm request so that they agree"),
        );
    }
}

/// Refuses `--config=FILE` for TRL. Its parser expects `--config` as a separate word (f2cd577,
/// `scripts/utils.py`, `parse_args_and_config`) and treats `--config=FILE` as an unknown argument.
fn refuse_tied_config(command: &Command, reading: &mut Reading) {
    let script = command.script.as_ref();
    let trainer = script.and_then(|script| handbook::trainer_of(&script.value));
    if let (Some(config), Some(_)) = (&command.tied_config, trainer) {
        let file = &config.value;
        reading.error(
            "unknown-key",
            Some(config.span),
            format!("TRL refuses `--config={file}` as an unknown argument"),
            format!("write it as two words, `--config {file}`"),
        );
    }
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
    let script = command.script.as_ref();
    let llama_factory = [&*root, &command.arguments]
        .into_iter()
        .find_map(llama_factory::detect);
    if let Some(detected) = llama_factory {
        return Some((Dialect::Transformers, detected.reason));
    }
    if let Some(script) = script
        && let Some(objective) = handbook::trainer_of(&script.value)
    {
        // Another project's program may have the same name. Its file is judged as if given alone.
        if !(alone || judged || reading.of_trl) {
            return None;
        }
        let arguments = &command.arguments;
        let parsed = transformers::is_for_a_trainer(arguments)
            || handbook::trl_argument(arguments).is_some();
        reading.only_by_name = alone && !reading.of_trl && !parsed;
        let path = format!("{RESERVED}.objective");
        if root.get_path(&path).is_none() {
            root.set_path(&path, Node::string(objective, script.span));
        }
        let reason = format!("the command starts `{}`", script.value.display());
        return Some((Dialect::HandbookTrl, reason));
    }
    // A named recipe file is detected by its keys.
    if !alone {
        return None;
    }
    let swift = script.is_some_and(|script| programs::is_swift(&script.value));
    if !swift
        && handbook::deepspeed::switch(&command.arguments).is_none()
        && let Some(name) = handbook::trl_argument(&command.arguments)
    {
        let reason = format!("the command has TRL's argument `--{name}`");
        return Some((Dialect::HandbookTrl, reason));
    }
    let reason = "the command has a trainer's arguments".to_owned();
    Some((Dialect::Transformers, reason))
}

/// Removes from the recipe the settings for TRL's launcher and returns them. A launcher's config has the same
/// keys and stays unchanged.
fn launch_of_recipe(root: &mut Node) -> Launch {
    match accelerate::looks_like_one(root) {
        true => Launch::default(),
        false => command::take_launch(root),
    }
}

/// The launcher's settings: an accelerate config (from `--accelerate` or the command), the options of
/// `accelerate launch` over it, or the number of processes of another launcher. The command's settings
/// override the recipe's. `None`: a file is unreadable.
fn launcher(
    request: &Request,
    command: Option<&Command>,
    by_recipe: Launch,
    reading: &mut Reading,
) -> Option<Option<Node>> {
    refuse_two_configs(command, &by_recipe, reading);
    let requested = request
        .accelerate
        .clone()
        .map(|path| accelerate::Config::File(path, None));
    let named = command.and_then(|command| command.accelerate.clone());
    let typed = command.and_then(|command| command.options.clone());
    let config = requested.or(named).or(by_recipe.config);
    let config = config.or_else(|| default_config(typed.as_deref()?, reading));
    if typed.is_some() || !by_recipe.words.is_empty() {
        let mut options = by_recipe.words;
        options.extend(typed.into_iter().flatten());
        reading.launch = Some(launch::Launch {
            options,
            kind: "MULTI_GPU".to_owned(),
            ..Default::default()
        });
    }
    let mut options = by_recipe.options;
    if let Some(typed) = command.and_then(|command| command.launch.clone()) {
        match &mut options {
            Some(options) => options.overlay(typed),
            None => options = Some(typed),
        }
    }
    let mut launched = match (config, options) {
        (None, None) => None,
        (config, options) => Some(accelerate::load(
            config.as_ref(),
            options.as_ref(),
            reading,
        )?),
    };
    if let Some(world) = command.and_then(|command| command.world.clone()) {
        match &mut launched {
            Some(launched) => launched.overlay(world),
            None => launched = Some(world),
        }
    }
    Some(launched)
}

/// The config that `accelerate launch` reads by default, unless its options have `--cpu`.
///
/// Source: accelerate 1.15.0 `commands/config/config_args.py` (`default_config_file`).
fn default_config(
    options: &[Given<Option<String>>],
    reading: &Reading,
) -> Option<accelerate::Config> {
    if options.iter().any(|option| option.key == "cpu") {
        return None;
    }
    let variable = |name: &str| {
        reading
            .environment
            .get(name)
            .filter(|value| !value.is_empty())
    };
    let cache = || match variable("XDG_CACHE_HOME") {
        Some(cache) => Some(PathBuf::from(cache)),
        None => Some(Path::new(variable("HOME")?).join(".cache")),
    };
    let home = match variable("HF_HOME") {
        Some(home) => PathBuf::from(home),
        None => cache()?.join("huggingface"),
    };
    let path = home.join("accelerate/default_config.yaml");
    let exists = reading.origin.is_file(&path);
    exists.then_some(accelerate::Config::File(path, None))
}

/// Refuses an `accelerate_config` in both recipe and command. TRL's command line takes the recipe's, and
/// accelerate fails on the second one (TRL f2cd577, `cli/accelerate_config.py`).
fn refuse_two_configs(command: Option<&Command>, by_recipe: &Launch, reading: &mut Reading) {
    use accelerate::Config::FileOrShipped;
    let named = command.and_then(|command| command.accelerate.as_ref());
    if let (Some(FileOrShipped(typed)), Some(FileOrShipped(first))) = (named, &by_recipe.config) {
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
