//! transformers' `TrainingArguments`: the arguments of its example scripts and of other scripts
//! around `Trainer`, as YAML, as JSON or as a command line.
//!
//! Scripts define further arguments. Those of transformers' example scripts are read where they
//! concern the run. All others are ignored, unless they look like a misspelled field.
//! Sources: transformers 5.23.0 `training_args.py` (fields, defaults), `hf_argparser.py`,
//! `trainer.py` (`get_total_train_batch_size`); `examples/pytorch` of 4.57 and 5.23.

use std::path::Path;

use super::handbook::abbreviation::{Meant, meant};
use super::handbook::keys;
use super::handbook::values::Values;
use super::handbook::{self, effects, settings, versions};
use super::llama_factory;
use crate::recipe::schema::axes;
use crate::recipe::schema::deepspeed::is_config;
use crate::recipe::schema::dialect::{Dialect, RESERVED};
use crate::recipe::schema::origin::Origin;
use crate::recipe::schema::program::{Program, ProgramText};
use crate::recipe::schema::reader::{
    Confidence, Detected, ReadAs, ReadOptions, Reader, Resume, Translated, others,
};
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::spec::Objective;
use crate::recipe::schema::tree::Tree;
use crate::recipe::syntax::node::Node;
use crate::recipe::syntax::words::Words;
use crate::util::suggest::{self, short};

/// Reads the keys of `TrainingArguments`.
pub struct Transformers;

/// Keys of those scripts that neither TRL nor the handbook has.
const DISTINCTIVE: Words = Words(
    "block_size config_name dataset_config_name do_predict do_train max_source_length \
     overwrite_cache overwrite_output_dir task_name tokenizer_name train_file use_fast_tokenizer \
     validation_file",
);

/// Fields that nearly every file of `TrainingArguments` has.
const COMMON: &[&str] = &[
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_train_epochs",
    "max_steps",
    "learning_rate",
    "output_dir",
];

const BATCH: &[&str] = &["per_device_train_batch_size", "per_gpu_train_batch_size"];

impl Reader for Transformers {
    fn dialect(&self) -> Dialect {
        Dialect::Transformers
    }

    fn detect(&self, root: &Node, path: &Path, _origin: &Origin) -> Option<Detected> {
        let has = |key: &&str| root.get(key).is_some();
        if let Some(detected) = llama_factory::detect(root) {
            return Some(detected);
        }
        let mut entries = root.entries().unwrap_or_default().iter();
        if others(root).is_some()
            || is_config(root)
            || has(&RESERVED)
            || !COMMON.iter().any(has)
            || entries.any(|entry| handbook::only_trl_has(&entry.name))
        {
            return None;
        }
        let json = path.extension().is_some_and(|e| e == "json");
        let reason = match DISTINCTIVE.iter().find(has) {
            Some(key) => format!("it has the key `{key}` and none of TRL's"),
            None if json => {
                "it is JSON with `TrainingArguments`' keys and none of TRL's".to_owned()
            }
            None => return None,
        };
        Some(Confidence::Likely.because(reason))
    }

    fn read(&self, mut root: Node, asked: &ReadOptions<'_>, reading: &mut Reading) -> Translated {
        asked.put_into(&mut root, str::to_owned, reading);
        let llama_factory = llama_factory::detect(&root).is_some();
        if refuse_no_training(&root, reading)
            || (llama_factory && llama_factory::refuse(&root, reading))
        {
            let native = Node::mapping(root.span);
            return Translated::whole(root, native);
        }
        take_switch(&mut root, reading);
        let trainer = is_for_a_trainer(&root);
        if !trainer && let Some(plugin) = &mut reading.deepspeed_plugin {
            plugin.leave_to_program();
        }
        if trainer && reading.program.is_strange() {
            refuse_other_batch(&root, reading);
        }
        let (mut native, version) = translate(&root, asked, reading);
        // What does not state its micro-batch most often has its own default; another program than a trainer's has.
        let states = |keys: &[&str]| keys.iter().any(|key| root.get(key).is_some());
        let unread = matches!(reading.program, Program::Unread) && !states(BATCH);
        // The program computes it.
        let own = MUST_BE_TYPED.map(|key| !states(&[key]) && reading.program.sets(key));
        if !trainer || unread || own[0] {
            native.remove_path("batch.per_device_batch_size");
        }
        if !trainer || (unread && !states(&MUST_BE_TYPED[1..])) || own[1] {
            native.remove_path("batch.accumulation");
        }
        let upstreams = |keys: &[&str]| trainer && reading.program.has_upstreams_defaults(keys);
        handbook::remove_defaults(&root, &mut native, upstreams);
        Translated {
            version: trainer.then_some(version),
            ..Translated::whole(root, native)
        }
    }

    fn has_versions(&self) -> bool {
        true
    }

    fn batch_keys(&self) -> &'static [(&'static str, &'static str)] {
        settings::BATCH_KEYS
    }

    fn resume(&self) -> Option<Resume> {
        Some(Resume::TRANSFORMERS)
    }

    fn argument(&self, key: &str, value: &str) -> Vec<String> {
        vec![format!("--{key}"), value.to_owned()]
    }
}

/// Whether a program takes `Trainer`'s batch arguments, or any other argument that only `Trainer`
/// has. A program without them, or with a batch under another name, may be another training loop.
pub(crate) fn is_for_a_trainer(root: &Node) -> bool {
    let entries = root.entries().unwrap_or_default();
    let any = |test: &dyn Fn(&str) -> bool| entries.iter().any(|entry| test(&entry.name));
    let other_batch = |name: &str| {
        let batch = name.ends_with("batch_size") && !name.contains("eval");
        batch && keys::kind_in_training(name).is_none()
    };
    any(&|name| BATCH.contains(&name)) || (any(&keys::only_trainer_has) && !any(&other_batch))
}

/// Refuses a `batch_size` beside a trainer's own, by which the program may multiply it: each item of its data set may hold
/// this number of samples (InternLM/InternLM-XComposer 0f70c3e `finetune/data_mix.py`).
fn refuse_other_batch(root: &Node, reading: &mut Reading) {
    let other = root.get("batch_size").filter(|size| {
        let size = size.text().map(str::parse::<u64>);
        size.is_some_and(|size| size != Ok(1))
    });
    // ms-swift's old name of the micro-batch is put beside it.
    if let (Some(other), Some(own)) = (other, root.get(BATCH[0]))
        && own.text() != other.text()
    {
        reading.batch_unknown(
            "unsupported-value",
            Some(other.span),
            format!(
                "`batch_size` is {} beside `{}`: the program may multiply one by the other, and no reader knows it",
                short(other.shown()),
                BATCH[0]
            ),
            "remove it if the program ignores it",
        );
    }
}

/// Refuses arguments that evaluate or predict only. Returns whether it did.
fn refuse_no_training(root: &Node, reading: &mut Reading) -> bool {
    let stated = |key: &str| {
        let node = root.get(key)?;
        let on = ["true", "1", "yes"].contains(&node.text()?.to_lowercase().as_str());
        Some((on, node.span))
    };
    // TRL's scripts train without `do_train`, with or without `do_eval`.
    let program = match &reading.program {
        Program::Text(program) => Some(program),
        _ => None,
    };
    let asks = program.is_some_and(|program| program.asks_for("do_train"));
    if program.is_some_and(ProgramText::only_evaluates) {
        reading.batch_unknown(
            "unsupported-value",
            Some(root.span),
            "the program of this command calls `evaluate` or `predict`, and nothing that trains",
            "give the command or the file that trains",
        );
        return true;
    }
    let (cause, span) = match (stated("do_train"), stated("do_predict"), stated("do_eval")) {
        (Some((false, span)), ..) => ("`do_train` is false", span),
        (None, Some((true, span)), _) => ("`do_predict` without `do_train`", span),
        (None, _, Some((true, span))) if asks => ("`do_eval` without `do_train`", span),
        _ => return false,
    };
    let message = format!("{cause}: this command trains nothing");
    let help = "give the command or the file that trains; if this program trains by default, add `do_train=true`";
    reading.error("unsupported-value", Some(span), message, help);
    true
}

fn translate(root: &Node, asked: &ReadOptions<'_>, reading: &mut Reading) -> (Node, ReadAs) {
    let path = asked.path;
    warn_unknown(root, reading);
    let (versions, read_as) = versions::choose(root, None, asked.version, reading);
    let of_trainer = is_for_a_trainer(root);
    if of_trainer {
        handbook::refuse_of_other_versions(root, None, versions, reading);
    }
    let kind_of = |key: &str| {
        let kind = keys::kind_in_training(key).or_else(|| keys::example(key));
        kind.filter(|_| !of_trainer || versions.takes(key, None))
    };
    let objective = Objective::LanguageModelling;
    effects::find(
        root,
        objective,
        versions,
        |key| kind_of(key).is_some(),
        reading,
    );
    let values = Values::check(root, "", kind_of, reading);
    let mut tree = Tree::new(root.span);
    tree.default("objective", "language-modelling");
    settings::name(&values, path, &mut tree, reading);
    tree.default("budget.epochs", 3);
    tree.default("seed", 42);
    let evaluates = handbook::training_arguments(&values, path, versions, &mut tree, reading);
    tree.text_if("tokenizer.path", values.text("tokenizer_name"));
    for key in [
        "cutoff_len",
        "model_max_length",
        "max_length",
        "max_seq_length",
        "block_size",
    ] {
        tree.plain_if("data.sequence_length", values.int(key));
    }
    if let Some(given) = settings::adapters(root) {
        tree.plain("model.adapters", &given);
    }
    settings::adapter_sizes(root, &mut tree);
    llama_factory::translate(root, &mut tree);
    data(&values, evaluates, &mut tree);
    (tree.into_node(), read_as)
}

/// Batch numbers whose defaults are those of `TrainingArguments` only.
pub(crate) const MUST_BE_TYPED: [&str; 2] =
    ["per_device_train_batch_size", "gradient_accumulation_steps"];

/// Removes DeepSpeed's own switch. Its program does not hand its arguments to `TrainingArguments`,
/// so their defaults are unknown.
fn take_switch(root: &mut Node, reading: &mut Reading) {
    let Some(switch) = handbook::deepspeed::switch(root) else {
        return;
    };
    let span = switch.span;
    root.remove_path("deepspeed");
    for key in MUST_BE_TYPED {
        if root.get(key).is_none() {
            let message = format!(
                "`--deepspeed` without a value is DeepSpeed's switch, not the field of `TrainingArguments`: the program's default of `{key}` is unknown"
            );
            let help = format!(
                "add `--{key} N`, or name a DeepSpeed config that states the batch with `--deepspeed_config FILE`"
            );
            reading.batch_unknown("mandatory-missing", Some(span), message, help);
        }
    }
}

/// Reports keys that look like a misspelled field, which the script refuses or ignores, and
/// abbreviated options. An abbreviation means a field only if the script has no option with that
/// prefix, which is unknown here, so it is not expanded.
fn warn_unknown(root: &Node, reading: &mut Reading) {
    let command = reading.files.command.map(|(file, _)| file);
    for entry in root.entries().unwrap_or_default() {
        let name = entry.name.as_str();
        let known = keys::kind_in_training(name).is_some() || keys::example(name).is_some();
        let other = llama_factory::is_no_typo(name) || axes::is_size(name);
        if known || other || name == RESERVED || name.len() < 6 || name.len() > 80 {
            continue;
        }
        let typed = Some(entry.name_span.file) == command;
        let (message, help) = match meant(name, keys::training()) {
            Meant::One(field) if typed => (
                format!(
                    "`--{name}` is ignored: argparse reads it as `--{field}` only if the script has no option with this prefix"
                ),
                format!("write `--{field}` in full if you mean it"),
            ),
            _ => match suggest::within(name, keys::training(), 2) {
                Some(field) => (
                    format!("`TrainingArguments` has no field `{name}`"),
                    format!("did you mean `{field}`? Keep it if the script defines it"),
                ),
                None => continue,
            },
        };
        reading.warning("unknown-key", Some(entry.name_span), message, help);
    }
}

/// `train_file` and `validation_file`, or a data set's name.
fn data(values: &Values, evaluates: bool, tree: &mut Tree) {
    let named = values.text("dataset_name");
    for (key, path, split, wanted) in [
        ("train_file", "data.train", "train", true),
        (
            "validation_file",
            "data.evaluation",
            "validation",
            evaluates,
        ),
    ] {
        let file = values.text(key);
        let Some(given) = file.as_ref().or(named.as_ref()).filter(|_| wanted) else {
            continue;
        };
        let mut source = Tree::new(given.span);
        source.text("path", given);
        if file.is_none() {
            source.text_if("config", values.text("dataset_config_name"));
            source.default("split", split);
        }
        tree.push(path, source);
    }
}

#[cfg(test)]
mod tests {
    use crate::recipe::schema::dialect::Dialect;
    use crate::recipe::schema::request::Request;
    use crate::recipe::schema::spec::{LearningRateShape, Objective, Precision, Strategy};
    use crate::recipe::{Origin, ReadError, Recipe, read};

    /// Reads files; the first one is the recipe unless the command names it.
    fn job(files: &[(&str, &str)], command: &str) -> Result<Recipe, ReadError> {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let here = folder.path().to_str().unwrap();
        let path = files
            .first()
            .map_or_else(Default::default, |(name, _)| folder.path().join(name));
        let words = command.split_whitespace();
        read(&Request {
            path,
            command: words.map(|word| word.replace('@', here)).collect(),
            ..Request::default()
        })
    }

    fn command(line: &str) -> Recipe {
        job(&[], line).unwrap_or_else(|e| panic!("{:?}", e.diagnostics))
    }

    /// The rules of all diagnostics of a job.
    fn rules(result: Result<Recipe, ReadError>) -> Vec<String> {
        let diagnostics = match result {
            Ok(recipe) => recipe.diagnostics,
            Err(error) => error.diagnostics,
        };
        diagnostics.into_iter().map(|d| d.rule).collect()
    }

    #[test]
    fn a_command_line_is_read_as_upstream_reads_it() {
        let recipe = command(
            "torchrun --nproc_per_node 4 run_clm.py --per_device_train_batch_size=8 \
         --gradient_accumulation_steps 2 --learning_rate 1e-5 --bf16 --block_size 512 \
         --lr_scheduler_type cosine --output_dir out/My_Run --max_steps 100",
        );
        assert_eq!(recipe.dialect, Dialect::Transformers);
        let spec = &recipe.spec;
        let batch = &spec.batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.accumulation, batch.gpus),
            (Some(8), Some(2), Some(4))
        );
        assert_eq!(spec.learning_rate.peak, 1e-5);
        assert_eq!(spec.learning_rate.shape, LearningRateShape::Cosine);
        assert_eq!(spec.model.precision, Precision::Bf16);
        assert_eq!(spec.data.sequence_length, 512);
        assert_eq!(spec.budget.steps, Some(100));
        assert_eq!(spec.name, "my-run");
        assert_eq!(
            recipe.value_sources["batch.per_device_batch_size"].key,
            "per_device_train_batch_size"
        );
        // argparse converts arguments, so `1e-5` needs no warning.
        let rules: Vec<&str> = recipe.diagnostics.iter().map(|d| d.rule.as_str()).collect();
        assert_eq!(rules, ["run-name"]);
    }

    #[test]
    fn defaults_are_those_of_transformers() {
        let spec = command("python run_clm.py --output_dir out --do_train").spec;
        assert_eq!(
            (spec.batch.per_device_batch_size, spec.batch.accumulation),
            (Some(8), Some(1))
        );
        assert_eq!(spec.learning_rate.peak, 5e-5);
        // Only a positive norm is clipped to.
        let unclipped = command("python run_clm.py --do_train --max_grad_norm -1").spec;
        assert_eq!(
            unclipped.optimizer.gradient_clip,
            command("python run_clm.py --do_train --max_grad_norm 0")
                .spec
                .optimizer
                .gradient_clip
        );
        assert_eq!(spec.model.precision, Precision::F32);
        assert!(!spec.model.activation_checkpointing);
        assert_eq!(spec.objective, Objective::LanguageModelling);
        assert_eq!((spec.budget.epochs, spec.seed), (Some(3.0), 42));
    }

    /// Reads a command whose program `@` has this text.
    fn program(text: &str, line: &str) -> Result<Recipe, ReadError> {
        let files = vec![("train_rm.py".into(), text.to_owned())];
        let words = line.split_whitespace();
        read(&Request {
            origin: Origin::snapshot(files).unwrap(),
            command: words.map(|word| word.replace('@', "train_rm.py")).collect(),
            ..Request::default()
        })
    }

    #[test]
    fn defaults_that_a_program_sets_itself_are_its_own() {
        let line = "torchrun --nproc_per_node 4 @ --do_train --model_name m --output_dir x";
        let own = "class Args:\n    per_device_train_batch_size: Optional[int] = field(default=1)\n    \
                   gradient_accumulation_steps: Optional[int] = field(default=32)\n    \
                   model_name: str = 'm'\n    save_steps: int = 999999\nTrainer(model).train()\n";
        let recipe = program(own, line).unwrap();
        assert_eq!(recipe.dialect, Dialect::Transformers);
        let batch = &recipe.spec.batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.accumulation),
            (Some(1), Some(32))
        );
        assert_eq!(recipe.spec.checkpoint.every_steps, None);
        assert_eq!(recipe.spec.budget.epochs, Some(3.0));
        let notes: Vec<&str> = recipe.diagnostics.iter().map(|d| &*d.message).collect();
        assert!(
            notes
                .contains(&"`gradient_accumulation_steps` is not given: the program sets it to 32"),
            "{notes:?}"
        );
        // What is typed counts.
        let typed = program(own, &format!("{line} --gradient_accumulation_steps 2")).unwrap();
        assert_eq!(typed.spec.batch.accumulation, Some(2));
        // A default that the text does not state.
        let unknown = "parser.add_argument('--per_device_train_batch_size', type=int)\n";
        let error = program(unknown, line).unwrap_err();
        assert_eq!(error.diagnostics[0].rule, "mandatory-missing");
        // It sets neither, so the defaults are those of the class that it parses.
        let plain = "parser = HfArgumentParser(TrainingArguments)\n";
        let batch = program(plain, line).unwrap().spec.batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.accumulation),
            (Some(8), Some(1))
        );
        // An argument that the program has renamed.
        let renamed = "TrainingArguments(\n  per_device_train_batch_size=args.batch,\n  gradient_accumulation_steps=4)\n";
        let batch = program(renamed, &line.replace("--do_train", "--batch 2"))
            .unwrap()
            .spec
            .batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.accumulation),
            (Some(2), Some(4))
        );
        let trl = program("from trl import RewardTrainer\n", line).unwrap();
        assert_eq!(trl.dialect, Dialect::HandbookTrl);
    }

    #[test]
    fn json_and_yaml_are_read_too() {
        let json =
            "{\"per_device_train_batch_size\": 4, \"learning_rate\": 2e-5, \"do_train\": true}";
        let recipe = job(&[("args.json", json)], "").unwrap();
        assert_eq!(recipe.dialect, Dialect::Transformers);
        assert_eq!(
            (
                recipe.spec.batch.per_device_batch_size,
                recipe.spec.learning_rate.peak
            ),
            (Some(4), 2e-5)
        );
        assert_eq!(recipe.diagnostics, [], "JSON's numbers need no dot");
        let yaml = "per_device_train_batch_size: 4\ntrain_file: a.json\nlearning_rate: 2e-5\n";
        let recipe = job(&[("args.yaml", yaml)], "").unwrap();
        assert_eq!(recipe.dialect, Dialect::Transformers);
        assert_eq!(recipe.spec.data.train[0].path, "a.json");
        assert_eq!(recipe.diagnostics[0].rule, "scalar-type");
    }

    #[test]
    fn a_recipe_without_keys_of_example_scripts_is_trls() {
        let text = "per_device_train_batch_size: 4\nmodel_name_or_path: m\nbeta: 0.1\n";
        let recipe = job(&[("config.yaml", text)], "").unwrap();
        assert_eq!(recipe.dialect, Dialect::HandbookTrl);
    }

    #[test]
    fn arguments_override_files_and_every_file_is_read() {
        let files = [
            (
                "recipe.yaml",
                "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\nmodel_name_or_path: m\n",
            ),
            ("fsdp.yaml", "distributed_type: FSDP\nnum_processes: 8\n"),
        ];
        let line = "accelerate launch --config_file @/fsdp.yaml --num_processes 4 scripts/dpo.py \
                --gradient_accumulation_steps 8 --beta 0.05";
        let recipe = job(&files, line).unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
        assert_eq!(recipe.dialect, Dialect::HandbookTrl);
        assert_eq!(recipe.spec.objective, Objective::Dpo);
        let batch = &recipe.spec.batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.accumulation, batch.gpus),
            (Some(4), Some(8), Some(4))
        );
        assert_eq!(recipe.spec.parallel.strategy, Strategy::Fsdp);
        let conflict = &recipe.diagnostics[0];
        assert_eq!(conflict.rule, "gpu-count-conflict");
        assert_eq!(
            conflict.message,
            "the config states 8 processes, the command 4"
        );
        // The job is the same when only the command names its files.
        let config = "--config @/recipe.yaml";
        let whole = job(&files, &format!("{line} {config}")).unwrap();
        assert_eq!(whole.spec.batch, recipe.spec.batch);
    }

    #[test]
    fn a_number_of_processes_that_only_the_shell_knows_is_unknown() {
        let files = [
            (
                "m.yaml",
                "per_device_train_batch_size: 4\nmodel_name_or_path: m\n",
            ),
            ("fsdp.yaml", "distributed_type: FSDP\nnum_processes: 8\n"),
        ];
        let line = "accelerate launch --config_file @/fsdp.yaml --num_processes $N scripts/dpo.py \
                --config @/m.yaml --beta 0.05";
        let recipe = job(&files, line).unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
        assert_eq!(recipe.spec.batch.gpus, None);
        let found = recipe
            .diagnostics
            .iter()
            .filter(|d| d.message.contains("num_processes"));
        let messages: Vec<&str> = found.map(|d| d.message.as_str()).collect();
        assert_eq!(
            messages,
            [
                "`--num_processes $N` overrides the config's 8 processes, and only the shell knows its value"
            ]
        );
    }

    /// Reduced from NeMo-RL's and other projects' commands: their programs have names of TRL's trainers.
    #[test]
    fn a_file_that_a_command_names_is_judged_as_if_given_alone() {
        for (text, expected) in [
            (
                "train:\n  steps: 100\n",
                "no supported dialect has these keys",
            ),
            (
                "policy:\n  train_global_batch_size: 512\ngrpo: {}\n",
                "`policy` is NeMo-RL's, which is not read",
            ),
        ] {
            for typed in ["", " --per_device_train_batch_size 4"] {
                let command = format!("python run_grpo.py --config @/c.yaml{typed}");
                let folder = tempfile::tempdir().unwrap();
                std::fs::write(folder.path().join("c.yaml"), text).unwrap();
                let here = folder.path().to_str().unwrap();
                let words = command.split_whitespace();
                let error = read(&Request {
                    command: words.map(|word| word.replace('@', here)).collect(),
                    ..Request::default()
                });
                let messages: Vec<String> = error
                    .unwrap_err()
                    .diagnostics
                    .into_iter()
                    .map(|d| d.message)
                    .collect();
                assert_eq!(messages, [expected], "{command}");
            }
        }
    }

    #[test]
    fn a_deepspeed_config_with_other_numbers_is_refused() {
        let ds = "{\"gradient_accumulation_steps\": 1, \"zero_optimization\": {\"stage\": 2}}";
        let line =
            "deepspeed --num_gpus 4 train.py --deepspeed @/ds.json --per_device_train_batch_size 8";
        let files = [("none.args", "--seed 1"), ("ds.json", ds)];
        let agreed = job(&files, line).unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
        assert_eq!(agreed.spec.parallel.strategy, Strategy::Zero2);
        let conflict = format!("{line} --gradient_accumulation_steps 2");
        assert_eq!(rules(job(&files, &conflict)), ["accumulation-conflict"]);
        let elastic = "{\"zero_optimization\": {}, \"elasticity\": {\"enabled\": true, \"max_train_batch_size\": 128, \"micro_batch_sizes\": [1]}}";
        let files = [("none.args", "--seed 1"), ("ds.json", elastic)];
        assert_eq!(rules(job(&files, line)), ["deepspeed-elastic-batch"]);
    }

    #[test]
    fn a_misspelled_field_is_reported_and_an_argument_of_the_script_is_not() {
        let line = "python t.py --per_device_train_batchsize 8 --my_own_argument 3 --seed 1";
        let recipe = command(line);
        let messages: Vec<&str> = recipe.diagnostics.iter().map(|d| d.help.as_str()).collect();
        assert_eq!(
            messages,
            ["did you mean `per_device_train_batch_size`? Keep it if the script defines it"]
        );
    }

    #[test]
    fn an_abbreviated_option_of_an_unknown_script_is_reported() {
        let recipe = command(
            "torchrun --nproc_per_node 2 t.py --per_device_train_b 4 --gradient_acc 2 --max_ 3 \
         --auto_find_batch_size --my_own 1",
        );
        assert_eq!(
            (
                recipe.spec.batch.per_device_batch_size,
                recipe.spec.batch.accumulation
            ),
            (None, None)
        );
        assert!(recipe.spec.batch.auto_find);
        let helps: Vec<&str> = recipe.diagnostics.iter().map(|d| d.help.as_str()).collect();
        assert_eq!(
            helps,
            [
                "write `--per_device_train_batch_size` in full if you mean it",
                "write `--gradient_accumulation_steps` in full if you mean it"
            ]
        );
    }

    #[test]
    fn another_batch_size_beside_a_trainers_own_is_refused() {
        let line = "torchrun --nproc_per_node 8 train.py --per_device_train_batch_size 1";
        assert!(job(&[], line).is_ok());
        assert!(job(&[], &format!("{line} --batch_size 1")).is_ok());
        let error = job(&[], &format!("{line} --batch_size 2")).unwrap_err();
        assert!(error.diagnostics[0].hides_batch);
        let message = &error.diagnostics[0].message;
        assert!(message.starts_with("`batch_size` is 2 beside"), "{message}");
    }

    #[test]
    fn a_command_of_a_hydra_program_is_refused() {
        for (line, rule, help) in [
            (
                "python train.py -m model=pythia28 loss=sft,dpo",
                "config-missing",
                "give the tree before `--`",
            ),
            (
                "accelerate launch launch.py loss=dpo --learning_rate 1",
                "unknown-dialect",
                "evenkeel plan config ",
            ),
        ] {
            let error = job(&[], line).unwrap_err();
            let problem = &error.diagnostics[0];
            assert_eq!(problem.rule, rule, "{line}");
            assert!(problem.help.contains(help), "{}", problem.help);
        }
    }

    #[test]
    fn a_shell_variable_is_no_number() {
        let refused = job(
            &[],
            "torchrun --nproc_per_node $N t.py --per_device_train_batch_size $B",
        );
        let error = refused.unwrap_err();
        assert!(
            error
                .to_string()
                .contains("only the shell or its environment knows `$B`"),
            "{error}"
        );
    }

    /// FastChat, LLaVA and LMFlow have arguments that TRL has too.
    #[test]
    fn adapter_arguments_alone_do_not_mean_trl() {
        let recipe = command(
            "deepspeed --num_gpus 4 fastchat/train/train_lora.py --model_name_or_path m --lora_r 8 \
         --lora_alpha 16 --data_path d --per_device_train_batch_size 2 --q_lora False",
        );
        assert_eq!(recipe.dialect, Dialect::Transformers);
        assert_eq!(
            (
                recipe.spec.batch.per_device_batch_size,
                recipe.spec.batch.gpus
            ),
            (Some(2), Some(4))
        );
        // A key of TRL, beside arguments that TRL does not know.
        let line = "python t.py --num_generations 4 --data_path d --version v1";
        assert_eq!(command(line).dialect, Dialect::Transformers);
        let all = "python t.py --num_generations 4 --lora_r 8 --per_device_train_b 4";
        assert_eq!(command(all).dialect, Dialect::HandbookTrl);
    }

    #[test]
    fn the_deepspeed_switch_is_no_config() {
        let line = "deepspeed --num_gpus 4 main.py --deepspeed --per_device_train_batch_size 4";
        let recipe = command(&format!(
            "{line} --gradient_accumulation_steps 2 --zero_stage 2"
        ));
        let batch = &recipe.spec.batch;
        assert_eq!(
            (batch.per_device_batch_size, batch.accumulation, batch.gpus),
            (Some(4), Some(2), Some(4))
        );
        // The program's defaults are not those of `TrainingArguments`.
        let error = job(&[], line).unwrap_err();
        assert_eq!(error.diagnostics[0].rule, "mandatory-missing");
        let default = "default of `gradient_accumulation_steps` is unknown";
        assert!(error.diagnostics[0].message.contains(default), "{error}");
    }

    #[test]
    fn a_program_without_trainer_arguments_has_no_default_batch() {
        for line in [
            "torchrun --standalone --nproc_per_node=4 train.py config/train_gpt2.py",
            "deepspeed --num_gpus 2 cifar10_deepspeed.py --deepspeed_x --moe --top-k 1",
            "torchrun --nproc_per_node 4 train.py --batch_size=12 --block_size=1024",
            "torchrun --nproc_per_node 4 train.py --batch_size=12 --learning_rate=6e-4",
            "python tests/test_invariant.py",
            // Its own default is most likely another.
            "torchrun --nproc_per_node 4 t.py --output_dir x --eval_strategy no",
            // accelerate's `nd_parallel.py`, and the arguments of diffusers' training loops.
            "accelerate launch --num-processes 8 nd_parallel.py --dp-shard-size 2 --tp-size 2",
            "accelerate launch --num_processes 4 train_x.py --output_dir o --learning_rate 1e-4 \
         --num_train_epochs 3 --gradient_accumulation_steps 4 --max_grad_norm 1 --seed 0",
        ] {
            let recipe = command(line);
            assert_eq!(recipe.dialect, Dialect::Transformers, "{line}");
            let batch = &recipe.spec.batch;
            assert_eq!(
                (batch.per_device_batch_size, batch.accumulation),
                (None, None),
                "{line}"
            );
        }
        for line in [
            "python run_clm.py --output_dir x --do_train",
            "torchrun --nproc_per_node 4 run_glue.py --output_dir x --eval_strategy no",
        ] {
            assert_eq!(
                command(line).spec.batch.per_device_batch_size,
                Some(8),
                "{line}"
            );
        }
        // TRL's `sft_gemma3.py`, `rloo.py` and `grpo_2048.py` set their batch themselves.
        for line in [
            "accelerate launch examples/scripts/rloo.py",
            "python examples/scripts/sft_gemma3.py --model_name_or_path m",
            "python examples/scripts/grpo_2048.py --learning_rate 1e-5",
            "uv run examples/run_grpo.py",
        ] {
            let batch = command(line).spec.batch;
            let numbers = (batch.per_device_batch_size, batch.accumulation);
            assert_eq!(numbers, (None, None), "{line}");
        }
        for line in [
            "trl sft --model_name_or_path m --dataset_name d",
            "python trl/scripts/sft.py --model_name_or_path m --dataset_name d",
            "python sft.py --model_name_or_path m --packing true",
        ] {
            assert_eq!(
                command(line).spec.batch.per_device_batch_size,
                Some(8),
                "{line}"
            );
        }
    }

    #[test]
    fn an_arguments_file_beside_the_program_is_refused() {
        let script = "torchrun --nproc_per_node 4 train.py --gradient_accumulation_steps 3\n";
        let arguments = "--per_device_train_batch_size 4\n--gradient_accumulation_steps 2 --bf16\n";
        let refused = |recipe: Result<Recipe, ReadError>| {
            let message = recipe.unwrap_err().diagnostics[0].message.clone();
            let expected = "before the command's arguments, which evenkeel does not";
            assert!(message.ends_with(expected), "{message}");
        };
        refused(job(&[("run.sh", script), ("train.args", arguments)], ""));
        // A program whose only argument is a file reads that file.
        let json = "{\"per_device_train_batch_size\": 2, \"do_train\": true}";
        let files = [
            ("none.args", "--seed 1"),
            ("train.args", arguments),
            ("args.json", json),
        ];
        let recipe = job(&files, "torchrun --nproc_per_node 4 @/train.py @/args.json").unwrap();
        assert_eq!(recipe.spec.batch.per_device_batch_size, Some(2));
        refused(job(
            &files,
            "torchrun --nproc_per_node 4 @/train.py --seed 1",
        ));
        // That of a module is beside its file.
        for (call, name) in [
            ("python -m pkg.train --bf16", "pkg/train.args"),
            (
                "torchrun --nproc_per_node 4 -m pkg.train --bf16",
                "pkg/train.args",
            ),
            (
                "accelerate launch --num_processes 4 --module train --bf16",
                "train.args",
            ),
            ("python -m pkg --bf16", "pkg/__main__.args"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, arguments).unwrap();
            let path = folder.path().join("run.sh");
            std::fs::write(&path, call).unwrap();
            refused(read(&Request {
                path,
                ..Request::default()
            }));
        }
    }

    #[test]
    fn trls_parser_takes_config_only_as_two_words() {
        let files = [(
            "sft.yaml",
            "per_device_train_batch_size: 4\nmodel_name_or_path: m\n",
        )];
        let one = job(
            &files,
            "accelerate launch --num_processes 8 sft.py --config=@/sft.yaml",
        );
        let error = one.unwrap_err();
        let problem = &error.diagnostics[0];
        assert!(
            problem.message.ends_with("as an unknown argument"),
            "{}",
            problem.message
        );
        assert!(
            job(
                &files,
                "accelerate launch --num_processes 8 sft.py --config @/sft.yaml"
            )
            .is_ok()
        );
    }

    #[test]
    fn nan_and_infinity_are_refused_as_such() {
        let text = "per_device_train_batch_size: 4\ntrain_file: a.json\nnum_train_epochs: .nan\nlearning_rate: .inf\n";
        let error = job(&[("args.yaml", text)], "").unwrap_err();
        let found: Vec<&str> = error
            .diagnostics
            .iter()
            .map(|d| d.message.as_str())
            .collect();
        assert_eq!(
            found,
            [
                "`num_train_epochs` is .nan, not a number",
                "`learning_rate` is .inf, infinite"
            ]
        );
    }
}
