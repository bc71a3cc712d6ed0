//! Rewrites the options of a command's launcher for the world of a plan: processes, nodes, and the
//! options that the launcher would otherwise refuse.
//!
//! Sources: torch 2.9 `distributed/run.py`; accelerate 16cb6eb `commands/launch.py`, `utils/launch.py`;
//! DeepSpeed edaa722 `launcher/runner.py`; TRL f2cd577 `cli/main.py`.

use super::accelerate::{lists_devices, refuse_cpu, shards};
use super::{BatchNumbers, EmitError, edit, refuse, standing, text_of};
use crate::recipe::Recipe;
use crate::recipe::dialects::accelerate::{fixes_accumulation, too_few_devices};
use crate::recipe::dialects::command::{self, Launch, Launcher};
use crate::recipe::dialects::deepspeed::hosts;
use crate::recipe::schema::launch::Opt;
use crate::recipe::syntax::shell::word::Word;
use crate::recipe::syntax::source::FileId;

/// Byte ranges of a text and their new text.
pub(super) type Edits = Vec<(usize, usize, String)>;

/// The changes of a command's launcher, and remarks for the user.
#[derive(Default)]
pub(super) struct Relaunched {
    pub edits: Edits,
    pub remarks: Vec<String>,
    /// New options, each with a leading space.
    pub added: String,
}

/// Whether the command starts through a launcher of several processes.
pub(super) fn starts_processes(recipe: &Recipe) -> bool {
    let launch = recipe.launch.as_ref();
    launch.is_some_and(|launch| launch.launcher != Launcher::Python)
}

/// Refuses another accumulation where the recipe itself names one of TRL's configs that fixes it.
/// Only TRL's command line reads that key.
pub(super) fn refuse_fixed(
    recipe: &Recipe,
    numbers: &BatchNumbers,
    file: FileId,
) -> Result<(), EmitError> {
    let read = recipe.launch.as_ref().is_none_or(Launch::is_trl);
    match edit::text(text_of(recipe, file), "accelerate_config") {
        // A file of that name takes precedence.
        Some(name) if read && recipe.files.accelerate.is_none() => refuse_config(&name, numbers),
        _ => Ok(()),
    }
}

/// Refuses another accumulation than 1 for one of TRL's configs that fixes it.
fn refuse_config(name: &str, numbers: &BatchNumbers) -> Result<(), EmitError> {
    let accumulation = numbers.accumulation;
    if accumulation == 1 || !fixes_accumulation(name) {
        return Ok(());
    }
    refuse(format!(
        "TRL's config `{name}` fixes accumulation at 1, and the plan has {accumulation} (launch with the config that `--emit accelerate` writes)"
    ))
}

/// The options of the command's launcher, rewritten for the numbers of a plan.
pub(super) fn relaunch(
    recipe: &Recipe,
    numbers: &BatchNumbers,
    file: FileId,
) -> Result<Relaunched, EmitError> {
    let text = text_of(recipe, file);
    let Some(launch) = &recipe.launch else {
        return Ok(Relaunched::default());
    };
    if launch.launcher != Launcher::Python && launch.program.is_none() {
        return refuse("the command names no program to start (add its path to the command)");
    }
    let mut rewrite = Rewrite {
        recipe,
        numbers,
        file,
        launch,
        new: Relaunched::default(),
    };
    match launch.launcher {
        Launcher::Python => {}
        Launcher::Torchrun => rewrite.torchrun()?,
        Launcher::Deepspeed => rewrite.deepspeed()?,
        Launcher::Accelerate | Launcher::Trl => rewrite.accelerate()?,
    }
    let mut new = rewrite.new;
    let relaunches = !new.edits.is_empty() || !new.added.is_empty();
    if let Some(word) = launch.hidden.as_ref().filter(|_| relaunches) {
        return refuse(format!(
            "`{}` is unresolved and may set the number of processes again (write its words out in the command)",
            word.text
        ));
    }
    for (start, end, with) in &mut new.edits {
        let before = text.get(*start..*end).unwrap_or_default();
        // A variable may hold more than the value.
        let mut values = launch
            .options
            .iter()
            .filter_map(|option| option.value.as_ref());
        if let Some(value) = values.find(|value| value.span.start == *start)
            && standing(recipe, value.span).as_deref() != Some(&value.text)
        {
            return refuse(format!(
                "`{before}` holds more than the number to change (write its words out in the command)"
            ));
        }
        *with = edit::in_quotes_of(before, with);
        // A removed option takes the space after it along.
        let blank = with.is_empty() && text[*end..].starts_with(' ');
        *end += usize::from(blank);
    }
    if !new.added.is_empty() {
        new.edits
            .push((launch.room, launch.room, new.added.clone()));
    }
    Ok(new)
}

/// Whether the job's accelerate config leaves the number of processes to the command line. Where
/// another key decides it (one process, a DeepSpeed filter), that key is the number's place.
pub(super) fn leaves_processes(recipe: &Recipe) -> bool {
    let Some(file) = recipe.files.accelerate else {
        return false;
    };
    let settled = recipe.value_sources.get("batch.gpus");
    edit::number(text_of(recipe, file), "num_processes").is_none()
        && settled.is_none_or(|place| place.span.file != file)
}

/// A launcher on its way to another world.
struct Rewrite<'a> {
    recipe: &'a Recipe,
    numbers: &'a BatchNumbers,
    file: FileId,
    launch: &'a Launch,
    new: Relaunched,
}

impl Rewrite<'_> {
    fn has(&self, option: &str) -> bool {
        self.launch.option(&[option]).is_some()
    }

    /// Sets an option: replaces its value, or appends the option unless its default is the value.
    fn set(&mut self, option: &str, value: u64, default: u64) {
        match self.launch.value(&[option]) {
            Some(word) if word.text.parse() == Ok(value) => {}
            Some(Word { span, .. }) => {
                let edit = (span.start, span.end, value.to_string());
                self.new.edits.push(edit);
            }
            None if value == default => {}
            None => self.new.added += &format!(" --{option} {value}"),
        }
    }

    /// The number of an option, also as a range of one (`2:2`); an error for anything else (`gpu`,
    /// `1:4`, `$N`).
    fn stated(&self, option: &str) -> Result<Option<u64>, ()> {
        match self.launch.value(&[option]) {
            None => Ok(None),
            Some(word) => command::nodes(&word.text).map(Some).ok_or(()),
        }
    }

    /// The requested nodes, or else the command's; `None` where only the shell knows them.
    fn nodes(&self, option: &str) -> Option<u64> {
        let stated = || Some(self.stated(option).ok()?.unwrap_or(1));
        self.numbers.nodes.or_else(stated)
    }

    /// Processes per node. The launcher starts the same number on every node.
    fn each(&self, nodes: u64, option: &str) -> Result<u64, EmitError> {
        let world = self.numbers.world;
        if !world.is_multiple_of(nodes.max(1)) {
            return refuse(format!(
                "{world} processes cannot be divided evenly over the command's {nodes} nodes (change `--{option}` first)"
            ));
        }
        Ok(world / nodes.max(1))
    }

    fn torchrun(&mut self) -> Result<(), EmitError> {
        let Some(nodes) = self.nodes("nnodes") else {
            return Ok(());
        };
        // The launcher starts one process per device of the node.
        if self.numbers.nodes.is_none() && self.stated("nproc_per_node").is_err() {
            return Ok(());
        }
        let each = self.each(nodes, "nnodes")?;
        if nodes > 1 && self.has("standalone") {
            return refuse(format!(
                "with `--standalone` each of {nodes} nodes trains by itself (replace it by `--rdzv_backend c10d --rdzv_endpoint HOST:PORT`)"
            ));
        }
        self.set("nnodes", nodes, 1);
        self.set("nproc_per_node", each, 1);
        let meets = self.has("rdzv_endpoint") || (self.has("master_addr") && self.has("node_rank"));
        // A command with the same number of nodes already has a rendezvous.
        if nodes > 1 && self.stated("nnodes") != Ok(Some(nodes)) && !meets {
            self.new.remarks.push(format!(
                "{nodes} nodes need a rendezvous: start the command on each with `--rdzv_backend c10d --rdzv_endpoint HOST:PORT` (HOST is one of them)"
            ));
        }
        Ok(())
    }

    fn deepspeed(&mut self) -> Result<(), EmitError> {
        if let Some(Word { text, .. }) = self.launch.value(&["include", "i", "exclude", "e"]) {
            let machines = text.split('@').count() as u64;
            let same = hosts::device_count(text) == Some(self.numbers.world)
                && self.numbers.nodes.is_none_or(|nodes| nodes == machines);
            return if same {
                Ok(())
            } else {
                refuse(lists_devices(text))
            };
        }
        let Some(nodes) = self.nodes("num_nodes") else {
            return Ok(());
        };
        // DeepSpeed takes all devices of the hostfile, or of this machine.
        if self.numbers.nodes.is_none() && !matches!(self.stated("num_gpus"), Ok(Some(_))) {
            return Ok(());
        }
        let each = self.each(nodes, "num_nodes")?;
        self.set("num_nodes", nodes, 1);
        self.set("num_gpus", each, 0);
        let stated = self.stated("num_nodes") == Ok(Some(nodes));
        if nodes > 1 && !stated && self.launch.option(&["hostfile", "H"]).is_none() {
            self.new.remarks.push(format!(
                "DeepSpeed reads {nodes} nodes from a hostfile: add `--hostfile FILE`, unless it is /job/hostfile"
            ));
        }
        Ok(())
    }

    fn accelerate(&mut self) -> Result<(), EmitError> {
        let (recipe, world) = (self.recipe, self.numbers.world);
        if self.has("cpu") {
            return refuse_cpu(world);
        }
        let config = recipe.files.accelerate;
        let config = config.map(|config| text_of(recipe, config));
        // A number of machines that only the shell knows (`$N`) stays, unless the plan asks for
        // another.
        let typed = self.stated("num_machines");
        if typed.is_err() && self.numbers.nodes.is_none() {
            return Ok(());
        }
        let configured = || edit::number(config?, "num_machines");
        let stated_machines = typed.unwrap_or(None).or_else(configured);
        let machines = self.numbers.nodes.or(stated_machines).unwrap_or(1);
        // `--emit accelerate` writes the processes of a config file. The command line overrides a
        // config that TRL ships, and a missing one. A recipe may state the processes as well.
        let place = recipe.value_sources.get("batch.gpus");
        let elsewhere = place.is_some_and(|place| {
            place.span.file != self.file && recipe.files.recipe == Some(place.span.file)
        });
        let left = leaves_processes(recipe);
        let states_world =
            self.has_value("num_processes") || left || (config.is_none() && !elsewhere);
        let known = left || recipe.spec.batch.gpus.is_some() || self.numbers.nodes.is_some();
        if states_world && known {
            let each = self.each(machines, "num_machines")?;
            let same = recipe.spec.batch.gpus == Some(world) && self.numbers.nodes <= Some(1);
            let default = if left || !same { 0 } else { world };
            self.set("num_processes", world, default);
            self.set("num_machines", machines, stated_machines.unwrap_or(1));
            self.devices(each);
            self.one_process(config.is_some())?;
        }
        let meets = |key: &str| {
            let stated = config.and_then(|text| edit::text(text, key));
            stated.is_some() || self.has(key)
        };
        if machines > 1 && stated_machines != Some(machines) && !meets("main_process_ip") {
            self.new.remarks.push(format!(
                "{machines} machines need a rendezvous: start the command on each with its own `--machine_rank` and `--main_process_ip HOST --main_process_port PORT` (HOST is the first)"
            ));
        }
        // The accumulation for DeepSpeed must equal the trainer's.
        let key = "gradient_accumulation_steps";
        if self.launch.launcher == Launcher::Accelerate
            && let Some(word) = self.launch.value(&[key])
            && word.text != "auto"
        {
            self.set(key, self.numbers.accumulation, 0);
        }
        if let Some(name) = self.launch.value(&["accelerate_config"]) {
            refuse_config(&name.text, self.numbers)?;
        }
        self.sizes()
    }

    fn has_value(&self, option: &str) -> bool {
        self.launch.value(&[option]).is_some()
    }

    /// Replaces a `--gpu_ids` with too few devices for the processes of a machine.
    fn devices(&mut self, each: u64) {
        if let Some(Word { text, span, .. }) = self.launch.value(&["gpu_ids"])
            && too_few_devices(text, each).is_some()
        {
            self.new.remarks.push(format!(
                "`--gpu_ids {text}` names too few devices for {each} processes; it is now `all` (name {each} devices to restrict it)"
            ));
            let edit = (span.start, span.end, "all".to_owned());
            self.new.edits.push(edit);
        }
    }

    /// Removes `--multi_gpu` for one process: accelerate refuses it. Without a config the option has no
    /// other effect; with one it overrides the config's type.
    fn one_process(&mut self, has_config: bool) -> Result<(), EmitError> {
        let world = self.numbers.world;
        let multi = self.launch.option(&["multi_gpu"]);
        let Some(Opt { at: span, .. }) = multi.filter(|_| world == 1) else {
            return Ok(());
        };
        if has_config || self.has("accelerate_config") {
            return refuse(
                "accelerate refuses `--multi_gpu` for one process (remove it, and set the config's `distributed_type`)",
            );
        }
        self.new.edits.push((span.start, span.end, String::new()));
        Ok(())
    }

    /// Sets shards and replicas where the command states axis sizes that accelerate reads.
    fn sizes(&mut self) -> Result<(), EmitError> {
        let parallel = &self.recipe.spec.parallel;
        let typed = |axis: &&str| {
            let place = self.recipe.value_sources.get(&format!("parallel.{axis}"));
            place.is_some_and(|place| {
                place.span.file == self.file && place.key.starts_with("parallelism_config")
            })
        };
        let axes = [
            "tensor",
            "context",
            "sequence",
            "data_shard",
            "data_replicate",
        ];
        // DeepSpeed makes the groups of its sequence parallelism itself.
        if parallel.sequence > 1 || !axes.iter().any(typed) {
            return Ok(());
        }
        let [shards, replicas] = shards(parallel, self.numbers, self.has("use_fsdp"))?;
        self.set("parallelism_config_dp_shard_size", shards, 1);
        self.set("parallelism_config_dp_replicate_size", replicas, 1);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::export::tests::{Job, numbers};
    use crate::export::{BatchNumbers, Form, emit};
    use crate::recipe::schema::request::Request;
    use crate::recipe::{Setting, read};

    const TRAINER: &str = "t.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2";

    /// `launcher` rewritten for the plan, without the trainer's arguments; or the refusal.
    fn written(launcher: &str, plan: &BatchNumbers) -> String {
        let job = Job::new(&[], &format!("{launcher} {TRAINER}"));
        match emit(&job.recipe(None), plan, Form::Recipe) {
            Ok(emitted) => emitted.text.split(" t.py").next().unwrap().to_owned(),
            Err(error) => error.to_string(),
        }
    }

    fn on(nodes: u64, plan: BatchNumbers) -> BatchNumbers {
        BatchNumbers {
            nodes: Some(nodes),
            ..plan
        }
    }

    #[test]
    fn a_command_starts_the_nodes_of_the_plan() {
        let (two, one) = (on(2, numbers(16, 4, 1)), on(1, numbers(8, 4, 2)));
        for (launcher, plan, expected) in [
            (
                "torchrun --nproc_per_node 8",
                &two,
                "torchrun --nnodes 2 --nproc_per_node 8",
            ),
            (
                "torchrun --nnodes=4 --nproc-per-node=4",
                &two,
                "torchrun --nnodes=2 --nproc-per-node=8",
            ),
            (
                "torchrun --nnodes 2 --nproc_per_node 4",
                &one,
                "torchrun --nnodes 1 --nproc_per_node 8",
            ),
            (
                "torchrun --nnodes 1:4 --nproc_per_node gpu",
                &two,
                "torchrun --nnodes 2 --nproc_per_node 8",
            ),
            (
                "deepspeed --num_gpus 8",
                &two,
                "deepspeed --num_nodes 2 --num_gpus 8",
            ),
            ("deepspeed", &two, "deepspeed --num_nodes 2 --num_gpus 8"),
            (
                "deepspeed --num_nodes 2 --num_gpus 8",
                &one,
                "deepspeed --num_nodes 1 --num_gpus 8",
            ),
            (
                "accelerate launch --num_processes 8",
                &two,
                "accelerate launch --num_machines 2 --num_processes 16",
            ),
            (
                "accelerate launch --num_machines 2 --num_processes 16",
                &one,
                "accelerate launch --num_machines 1 --num_processes 8",
            ),
        ] {
            assert_eq!(written(launcher, plan), expected, "{launcher}");
        }
        let alone = written("torchrun --standalone --nproc_per_node 8", &two);
        assert!(
            alone.starts_with("with `--standalone` each of 2 nodes"),
            "{alone}"
        );
        let named = written("deepspeed --include localhost:0,1", &two);
        assert!(named.starts_with("`localhost:0,1` lists"), "{named}");
    }

    #[test]
    fn a_variable_that_may_set_the_processes_again_is_refused() {
        for launcher in [
            "torchrun --nproc_per_node 8 $EXTRA",
            "torchrun $EXTRA --nproc_per_node 8",
            "deepspeed --num_gpus 8 $EXTRA",
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("run.sh");
            std::fs::write(&path, format!("{launcher} {TRAINER}\n")).unwrap();
            let gpus = Setting {
                flag: "--recipe-gpus",
                path: "batch.gpus",
                value: "8".to_owned(),
            };
            let recipe = read(&Request {
                path,
                settings: vec![gpus],
                ..Request::default()
            });
            let error = emit(&recipe.unwrap(), &numbers(4, 4, 4), Form::Recipe).unwrap_err();
            let expected = "`$EXTRA` is unresolved and may set the number of processes again";
            assert!(error.to_string().starts_with(expected), "{error}");
        }
    }

    #[test]
    fn a_plan_for_several_nodes_names_the_missing_rendezvous() {
        let two = on(2, numbers(16, 4, 1));
        let remarks = |launcher: &str| {
            let job = Job::new(&[], &format!("{launcher} {TRAINER}"));
            emit(&job.recipe(None), &two, Form::Recipe).unwrap().remarks
        };
        for (launcher, enough) in [
            ("torchrun --nproc_per_node 8", "--rdzv_endpoint h:1"),
            ("deepspeed --num_gpus 8", "--hostfile h"),
            ("accelerate launch --num_processes 8", "--main_process_ip h"),
        ] {
            assert_eq!(remarks(launcher).len(), 1, "{launcher}");
            assert_eq!(remarks(&format!("{launcher} {enough}")), [] as [&str; 0]);
        }
    }

    #[test]
    fn options_that_the_launcher_would_refuse_change_with_the_plan() {
        let eight = BatchNumbers {
            world: 8,
            ..numbers(4, 4, 1)
        };
        for (launcher, plan, expected) in [
            (
                "accelerate launch --use_deepspeed --num_processes 8 --gradient_accumulation_steps 2",
                &numbers(4, 4, 4),
                "accelerate launch --use_deepspeed --num_processes 4 --gradient_accumulation_steps 4",
            ),
            (
                "accelerate launch --multi_gpu --num_processes 8",
                &numbers(1, 4, 16),
                "accelerate launch --num_processes 1",
            ),
            (
                "accelerate launch --num_processes 2 --gpu_ids 0,1",
                &numbers(4, 4, 1),
                "accelerate launch --num_processes 4 --gpu_ids all",
            ),
            (
                "accelerate launch --use_fsdp --fsdp_version 2 --use_parallelism_config --num_processes 4 \
             --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 2",
                &eight,
                "accelerate launch --use_fsdp --fsdp_version 2 --use_parallelism_config --num_processes 8 \
             --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 4",
            ),
        ] {
            assert_eq!(written(launcher, plan), expected, "{launcher}");
        }
        let split = "accelerate launch --use_fsdp --fsdp_version 2 --use_parallelism_config \
                 --num_processes 4 --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 2";
        let none = BatchNumbers {
            world: 2,
            ..numbers(1, 4, 4)
        };
        let refused = written(split, &none);
        assert!(refused.contains("nothing to shard"), "{refused}");
        let cpu = written("accelerate launch --cpu", &numbers(4, 4, 1));
        assert!(cpu.starts_with("`--cpu` starts one process"), "{cpu}");
        let line =
            "trl sft --accelerate_config zero1 --per_device_train_batch_size 8 --dataset_name d";
        let job = Job::new(&[], line);
        let refused = emit(&job.recipe(None), &numbers(4, 8, 2), Form::Recipe).unwrap_err();
        assert!(
            refused.to_string().contains("`zero1` fixes accumulation"),
            "{refused}"
        );
    }

    /// A config with the type alone, which accelerate starts only with `--num_processes`.
    #[test]
    fn processes_that_the_config_leaves_to_the_command_are_typed() {
        for config in [
            "distributed_type: FSDP\nnum_processes: -1\nfsdp_config: {}\n",
            "distributed_type: MULTI_GPU\nnum_machines: 1\n",
        ] {
            let launch = "accelerate launch --config_file @/a.yaml";
            let job = Job::new(&[], &format!("{launch} {TRAINER}"));
            std::fs::write(job.folder.path().join("a.yaml"), config).unwrap();
            for (plan, recipe_gpus) in [(numbers(4, 4, 4), 8), (numbers(8, 4, 2), 8)] {
                let world = plan.world;
                let written = job.emitted(Some(recipe_gpus), &plan, Form::Recipe);
                let accumulation = plan.accumulation;
                assert_eq!(
                    written,
                    format!("{launch} {TRAINER}\n")
                        .replace("launch", &format!("launch --num_processes {world}"))
                        .replace("steps 2", &format!("steps {accumulation}"))
                );
                let again = Job::new(&[], written.trim_end());
                std::fs::write(again.folder.path().join("a.yaml"), config).unwrap();
                let again = again.recipe(None);
                assert_eq!(again.spec.batch.gpus, Some(world));
                assert_eq!(again.diagnostics, []);
            }
        }
    }

    #[test]
    fn a_config_without_processes_yields_a_remark_with_num_processes() {
        let config = "distributed_type: MULTI_GPU\nnum_processes: -1\n";
        let recipe = "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 4\n";
        let remarks = |command: &str| {
            let job = Job::new(&[("sft.yaml", recipe), ("a.yaml", config)], command);
            let written = job.emitted(Some(8), &numbers(4, 4, 2), Form::Recipe);
            let remarks: Vec<String> = written
                .lines()
                .filter_map(|line| line.strip_prefix("# ").map(str::to_owned))
                .collect();
            remarks
        };
        assert_eq!(
            remarks("accelerate launch --config_file @/a.yaml sft.py --config @/sft.yaml"),
            ["add `--num_processes 4` to the command"]
        );
        let job = Job::new(&[("sft.yaml", recipe), ("a.yaml", config)], "");
        let alone = read(&Request {
            path: job.folder.path().join("sft.yaml"),
            accelerate: Some(job.folder.path().join("a.yaml")),
            dialect: Some(crate::recipe::schema::dialect::Dialect::HandbookTrl),
            ..Request::default()
        });
        let remarks = emit(&alone.unwrap(), &numbers(4, 4, 2), Form::Recipe).unwrap();
        let remark = &remarks.remarks[0];
        assert!(
            remark.ends_with("start the command with `--num_processes 4`"),
            "{remark}"
        );
    }

    #[test]
    fn a_recipe_cannot_change_the_accumulation_of_its_trl_config() {
        let text = "model_name_or_path: m\ndataset_name: d\nper_device_train_batch_size: 8\n\
                accelerate_config: zero1\n";
        let written = |command: &str, plan: &BatchNumbers| {
            let job = Job::new(&[("sft.yaml", text)], command);
            emit(&job.recipe(None), plan, Form::Recipe).map(|emitted| emitted.text)
        };
        for command in ["", "trl sft --config @/sft.yaml"] {
            let refused = written(command, &numbers(4, 8, 2)).unwrap_err();
            assert!(
                refused.to_string().contains("`zero1` fixes accumulation"),
                "{refused}"
            );
            assert!(written(command, &numbers(4, 16, 1)).is_ok(), "{command}");
        }
        // No other launcher reads that key.
        let other = "accelerate launch --num_processes 8 sft.py --config @/sft.yaml";
        assert!(written(other, &numbers(4, 8, 2)).is_ok());
    }

    #[test]
    fn an_accelerate_config_takes_the_machines_of_the_plan() {
        let config = |text: &str, plan: &BatchNumbers| {
            let job = Job::new(&[("a.yaml", text)], "");
            job.emitted(None, plan, Form::Accelerate)
        };
        let text =
            "distributed_type: MULTI_GPU\nnum_machines: 1\nnum_processes: 8\nmain_process_ip: h\n";
        assert_eq!(
            config(text, &on(2, numbers(16, 4, 1))),
            text.replace("machines: 1", "machines: 2")
                .replace("processes: 8", "processes: 16")
        );
        let two = text.replace("machines: 1", "machines: 2");
        assert_eq!(config(&two, &on(1, numbers(8, 4, 1))), text);
        let ids = format!("{text}gpu_ids: 0,1,2,3,4,5,6,7\n");
        let more = config(&ids, &numbers(16, 4, 1));
        assert!(more.contains("gpu_ids: all\n# `gpu_ids: 0,1"), "{more}");
        let sizes = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_version: 2\n\
                 parallelism_config:\n  parallelism_config_tp_size: 2\n  \
                 parallelism_config_dp_shard_size: 4\n";
        let job = Job::new(&[("a.yaml", sizes)], "");
        let none = BatchNumbers {
            world: 2,
            ..numbers(1, 4, 1)
        };
        let refused = emit(&job.recipe(None), &none, Form::Accelerate).unwrap_err();
        assert!(
            refused.to_string().contains("nothing to shard"),
            "{refused}"
        );
        let cpu = Job::new(
            &[("a.yaml", "distributed_type: MULTI_CPU\nnum_processes: 4\n")],
            "",
        );
        assert!(emit(&cpu.recipe(None), &numbers(4, 1, 1), Form::Accelerate).is_err());
        // A new config states the machines too.
        let made = Job::new(&[], &format!("torchrun --nproc_per_node 8 {TRAINER}"));
        let made = made.emitted(None, &on(2, numbers(16, 4, 1)), Form::Accelerate);
        assert!(
            made.contains("num_machines: 2\nnum_processes: 16\n"),
            "{made}"
        );
    }

    proptest! {
        /// For every launcher the written command reads back as the plan's world, batch and axes, and
        /// writing it again changes nothing.
        #[test]
        fn a_written_launcher_reads_back_as_the_plan(
            launcher in 0..8_usize,
            (nodes, each, tensor) in (1..4_u64, 1..9_u64, 1..3_u64),
            (per_device_batch_size, accumulation) in (1..9_u64, 1..9_u64),
            asked: bool,
        ) {
            let launchers = [
                "torchrun --nproc_per_node 4",
                "torchrun --nnodes 2 --nproc_per_node=2 --rdzv_endpoint h:1",
                "deepspeed --num_gpus 4",
                "deepspeed --num_nodes 2 --num_gpus 2",
                "accelerate launch --num_processes 4",
                "accelerate launch --multi_gpu --num_machines 2 --num_processes 4 --gpu_ids 0,1",
                "accelerate launch --use_deepspeed --num_processes 4 --gradient_accumulation_steps 2",
                "accelerate launch --use_fsdp --fsdp_version 2 --use_parallelism_config --num_processes 4 \
                 --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 2",
            ];
            let tensor = if launcher == 7 { tensor.max(2) } else { 1 };
            let ranks = nodes * each;
            let plan = BatchNumbers {
                world: ranks * tensor,
                nodes: asked.then_some(nodes),
                ..numbers(ranks, per_device_batch_size, accumulation)
            };
            let job = Job::new(&[], &format!("{} {TRAINER}", launchers[launcher]));
            let Ok(emitted) = emit(&job.recipe(None), &plan, Form::Recipe) else {
                return Ok(());
            };
            let path = job.folder.path().join("again.sh");
            std::fs::write(&path, &emitted.text).unwrap();
            let again = crate::recipe::read(&Request { path, ..Request::default() });
            let again = again.unwrap_or_else(|error| panic!("{}: {error}", emitted.text));
            let batch = &again.spec.batch;
            let read = (batch.gpus, batch.per_device_batch_size, batch.accumulation);
            prop_assert_eq!(read, (Some(plan.world), Some(per_device_batch_size), Some(accumulation)), "{}", emitted.text);
            let parallel = &again.spec.parallel;
            if let (Some(shards), Some(replicas)) = (parallel.data_shard, parallel.data_replicate) {
                prop_assert_eq!(shards * replicas, ranks, "{}", emitted.text);
            }
            prop_assert_eq!(&emit(&again, &plan, Form::Recipe).unwrap().text, &emitted.text);
        }
    }

    #[test]
    fn a_wrapped_command_is_rewritten_inside_its_wrapper() {
        let launcher = "python mason.py --gpus 8 -- torchrun --nproc_per_node 8";
        let expected = "python mason.py --gpus 8 -- torchrun --nproc_per_node 4";
        assert_eq!(written(launcher, &numbers(4, 4, 2)), expected);
    }
}
