//! Training projects whose configs and commands are recognised but not read. Their keys resemble those of
//! `TrainingArguments` with another meaning, so a reader that accepts them plans a wrong batch.
//!
//! Sources: axolotl 067b021 (`utils/schemas/config.py`), torchtune bd2a0fc (`recipes/configs/`), NeMo-RL
//! 54bec9d (`examples/configs/`), verl b178a3c (`trainer/config/`), OpenRLHF 3c3be62 (`cli/`), Megatron-LM
//! d98e8a6 (`training/arguments.py`), ms-swift 3602360 (`swift/arguments/`, `swift/megatron/`), torchtitan
//! 6404b93 (`torchtitan/config/job_config.py`), GPT-NeoX 28443c6 (`configs/125M.yml`).

use crate::recipe::dialects::command::launcher::word_positions;
use crate::recipe::schema::deepspeed::is_config;
use crate::recipe::schema::dialect::RESERVED;
use crate::recipe::schema::reading::Reading;
use crate::recipe::schema::tree::Given;
use crate::recipe::syntax::node::{Entry, Node};
use crate::recipe::syntax::shell::word::Word;
use crate::recipe::syntax::source::Span;
use crate::recipe::syntax::words::Words;

/// A project that is recognised but not read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Project {
    name: &'static str,
    /// The numbers that make its global batch, for the user to look up.
    batch: &'static str,
}

static AXOLOTL: Project = Project {
    name: "axolotl",
    batch: "`micro_batch_size` × `gradient_accumulation_steps` × data-parallel ranks",
};
static TORCHTUNE: Project = Project {
    name: "torchtune",
    batch: "`batch_size` × `gradient_accumulation_steps` × data-parallel ranks",
};
static TORCHTITAN: Project = Project {
    name: "torchtitan",
    batch: "`global_batch_size`, or `local_batch_size` × data-parallel ranks",
};
static GPT_NEOX: Project = Project {
    name: "GPT-NeoX",
    batch: "`train_batch_size`, or `train_micro_batch_size_per_gpu` × `gradient_accumulation_steps` × GPUs / \
            (`pipe_parallel_size` × `model_parallel_size`)",
};
static IN_TOML: Project = Project {
    name: "a program with a TOML config",
    batch: "micro-batch × accumulation × data-parallel ranks",
};
static LLAMA_FACTORY_V1: Project = Project {
    name: "LLaMA-Factory v1",
    batch: "`global_batch_size`",
};
static NEMO: Project = Project {
    name: "NeMo",
    batch: "`model.global_batch_size`",
};
static NEMO_RL: Project = Project {
    name: "NeMo-RL",
    batch: "`policy.train_global_batch_size`",
};
static VERL: Project = Project {
    name: "verl",
    batch: "`data.train_batch_size` of SFT, `actor.ppo_mini_batch_size` × `rollout.n` of RL",
};
static OPENRLHF: Project = Project {
    name: "OpenRLHF",
    batch: "`--train_batch_size`, `--train.batch_size` in later versions",
};
static MEGATRON: Project = Project {
    name: "Megatron-LM",
    batch: "`--global-batch-size`",
};
static SWIFT_MEGATRON: Project = Project {
    name: "ms-swift's Megatron",
    batch: "`global_batch_size`",
};
static SWIFT: Project = Project {
    name: "ms-swift",
    batch: "`per_device_train_batch_size` × `gradient_accumulation_steps` × data-parallel ranks",
};

impl Project {
    /// Refuses its config or command.
    pub(crate) fn refuse(&self, subject: &str, at: Span, reading: &mut Reading) {
        let Project { name, batch } = self;
        reading.batch_unknown(
            "unknown-dialect",
            Some(at),
            format!("{subject} is {name}'s, which is not read"),
            format!("its samples of a step are {batch}"),
        );
    }
}

/// The project of a config file, by keys that only it has, and the place of such a key.
pub(crate) fn of_config(root: &Node) -> Option<Given<&'static Project>> {
    if root.get("apiVersion").is_some() || root.get(RESERVED).is_some() {
        return None;
    }
    let entries = root.entries()?;
    let has = |key: &str| root.get(key).is_some();
    let any = |keys: &[&str]| keys.iter().any(|key| has(key));
    let nested = |key: &str| root.get(key).is_some_and(|node| node.entries().is_some());
    let text = |key: &str| root.get(key).is_some_and(|node| node.text().is_some());
    let found = |key: &str, project| {
        let entry = entries.iter().find(|entry| entry.name == key)?;
        Some(Given::new(key, project, entry.name_span))
    };
    let component = |node: &Node| node.get("_component_").is_some();
    if let Some(entry) = entries.iter().find(|entry| component(&entry.value)) {
        return found(&entry.name, &TORCHTUNE);
    }
    let target = root.get("_target_").and_then(Node::text);
    if target.is_some_and(|target| target.starts_with("verl.")) {
        return found("_target_", &VERL);
    }
    if has("actor_rollout_ref") {
        return found("actor_rollout_ref", &VERL);
    }
    if has("train_files") && (has("prompt_key") || has("train_batch_size")) {
        return found("train_files", &VERL);
    }
    let paths = ["data.train_files", "data.train_batch_size"];
    if nested("trainer") && paths.iter().any(|path| root.get_path(path).is_some()) {
        return found("data", &VERL);
    }
    const ALGORITHMS: Words = Words("checkpointing cluster distillation dpo grpo loss_fn rm sft");
    let policy = root.get_path("policy.train_global_batch_size").is_some();
    if nested("policy") && (policy || ALGORITHMS.iter().any(&nested)) {
        return found("policy", &NEMO_RL);
    }
    if nested("trainer")
        && (has("exp_manager") || root.get_path("model.global_batch_size").is_some())
    {
        return found("trainer", &NEMO);
    }
    const OF_AXOLOTL: Words = Words(
        "dataset_prepared_path micro_batch_size model_type pad_to_sequence_len rl sample_packing \
         sequence_len special_tokens val_set_size",
    );
    if text("base_model") && any(&OF_AXOLOTL.iter().collect::<Vec<_>>()) {
        return found("base_model", &AXOLOTL);
    }
    if has("model_class") && any(&["dist_config", "kernel_config", "train_dataset"]) {
        return found("model_class", &LLAMA_FACTORY_V1);
    }
    if text("model") && any(&["tuner_type", "train_type", "rlhf_type"]) {
        let megatron = any(&["micro_batch_size", "tensor_model_parallel_size"]);
        return found("model", if megatron { &SWIFT_MEGATRON } else { &SWIFT });
    }
    // GPT-NeoX's configs write their keys with either mark.
    const OF_NEOX: Words = Words("model_parallel_size pipe_parallel_size");
    let of_neox = |entry: &&Entry| OF_NEOX.has(&entry.name.replace('-', "_"));
    // DeepSpeed's own config holds no model; GPT-NeoX hands its whole config to DeepSpeed.
    const OF_A_MODEL: Words =
        Words("hidden_size max_position_embeddings num_attention_heads num_layers seq_length");
    let of_model =
        |entry: &&Entry| OF_A_MODEL.has(&entry.name.replace('-', "_")) && is_config(root);
    let mut all = entries.iter();
    let found_key = all.clone().find(of_neox).or_else(|| all.find(of_model));
    if let Some(entry) = found_key {
        return found(&entry.name, &GPT_NEOX);
    }
    if nested("MODEL_ARGS") {
        return found("MODEL_ARGS", &MEGATRON);
    }
    None
}

/// The project of a TOML file. No trainer whose config is read has one.
pub(crate) fn of_toml(tables: &Node) -> Given<&'static Project> {
    const OF_TORCHTITAN: Words = Words("activation_checkpoint parallelism training");
    let entries = tables.entries().unwrap_or_default();
    let known = entries.iter().find(|entry| OF_TORCHTITAN.has(&entry.name));
    match known {
        Some(entry) => Given::new(&entry.name, &TORCHTITAN, entry.name_span),
        None => {
            let first = entries.first();
            let name = first.map_or("this file", |entry| &entry.name);
            let at = first.map_or(tables.span, |entry| entry.name_span);
            Given::new(name, &IN_TOML, at)
        }
    }
}

/// Modules of the projects, by the start of their names.
static MODULES: [(&str, &Project); 8] = [
    ("axolotl.cli.train", &AXOLOTL),
    ("llamafactory.v1", &LLAMA_FACTORY_V1),
    ("openrlhf.cli.train", &OPENRLHF),
    ("swift.cli._megatron", &SWIFT_MEGATRON),
    ("verl.experimental", &VERL),
    ("verl.trainer", &VERL),
    ("recipe.dapo.main", &VERL),
    ("megatron.training", &MEGATRON),
];

/// The start of Hydra overrides of the projects.
static OVERRIDES: [(&str, &Project); 12] = [
    ("actor_rollout_ref.", &VERL),
    ("cluster.gpus_per_node=", &NEMO_RL),
    ("cluster.num_nodes=", &NEMO_RL),
    ("data.train_batch_size=", &VERL),
    ("data.train_files=", &VERL),
    ("dpo.max_num_steps=", &NEMO_RL),
    ("exp_manager.", &NEMO),
    ("grpo.max_num_steps=", &NEMO_RL),
    ("grpo.num_prompts_per_step=", &NEMO_RL),
    ("model.global_batch_size=", &NEMO),
    ("policy.", &NEMO_RL),
    ("sft.max_num_steps=", &NEMO_RL),
];

/// The project of a command, by its program, its module or an argument that only it has.
pub(crate) fn of_command(words: &[Word]) -> Option<Given<&'static Project>> {
    let given = |word: &Word, project: &'static Project| Given::new("command", project, word.span);
    for (at, word) in words.iter().enumerate() {
        let next = words.get(at + 1).map(|next| next.text.as_str());
        let name = word.file_name();
        let trains = |commands: Words| next.is_some_and(|next| commands.has(next));
        let program = TRAINING.iter().find(|(p, c, _)| *p == name && trains(*c));
        if let Some((.., Some(project))) = program {
            return Some(given(word, project));
        }
        let module = word.text.strip_suffix(".py").unwrap_or(&word.text);
        let module = module.replace('/', ".");
        let starts = |part: &str| {
            let at = module.find(part);
            at.is_some_and(|at| at == 0 || module.as_bytes()[at - 1] == b'.')
        };
        if !word.text.starts_with('-')
            && let Some((_, project)) = MODULES.iter().find(|(part, _)| starts(part))
        {
            return Some(given(word, project));
        }
        let text = word.text.trim_start_matches('+');
        let assigns = text.contains('=');
        if let Some((_, project)) = OVERRIDES
            .iter()
            .find(|(start, _)| assigns && text.starts_with(start))
        {
            return Some(given(word, project));
        }
        // Megatron-LM spells its options with dashes; trainers with these fields use underscores.
        const OPTIONS: [&str; 3] = [
            "--global-batch-size",
            "--pipeline-model-parallel-size",
            "--tensor-model-parallel-size",
        ];
        let option = word.text.split('=').next().unwrap_or_default();
        if OPTIONS.contains(&option) {
            return Some(given(word, &MEGATRON));
        }
    }
    None
}

/// The project of a script whose training command is in a variable. OpenRLHF's examples assemble it in a
/// here-document.
pub(crate) fn of_script(text: &str) -> Option<&'static Project> {
    text.contains("openrlhf.cli.train").then_some(&OPENRLHF)
}

/// Programs with their commands that train, and the project whose arguments are not read.
static TRAINING: [(&str, Words, Option<&Project>); 7] = [
    ("axolotl", Words("train"), Some(&AXOLOTL)),
    ("llamafactory-cli", Words("train"), None),
    ("lmf", Words("train"), None),
    ("megatron", Words("pt rlhf sft"), Some(&SWIFT_MEGATRON)),
    ("swift", Words("pt rlhf sft"), None),
    (
        "trl",
        Words("bco cpo dpo grpo kto orpo ppo reward rloo sft"),
        None,
    ),
    ("tune", Words("run"), Some(&TORCHTUNE)),
];

/// Modules that evaluate or generate.
const OTHERS: Words =
    Words("lighteval lm_eval pytest sglang.launch_server vllm.entrypoints.openai.api_server");

/// Whether a command calls one of these programs for something else: `swift infer`, `trl vllm-serve`.
pub(crate) fn trains_nothing(words: &[Word]) -> bool {
    let text = |at: usize| words.get(at).map(|word| word.text.as_str());
    let is_python = |word: &Word| word.file_name().starts_with("python");
    if let Some(at) = words.iter().position(is_python) {
        let module = (text(at + 1) == Some("-m")).then(|| text(at + 2)).flatten();
        if text(at + 1) == Some("-c") || module.is_some_and(|module| OTHERS.has(module)) {
            return true;
        }
    }
    word_positions(words).any(|at| {
        let name = words[at].file_name();
        let mut programs = TRAINING.iter();
        let found = programs.find(|(program, ..)| *program == name);
        let next = text(at + 1).unwrap_or_default();
        let named = next.starts_with(|c: char| c.is_ascii_lowercase());
        found.is_some_and(|(_, trains, _)| named && !trains.has(next))
    })
}

#[cfg(test)]
mod tests {
    use crate::recipe::schema::request::Request;
    use crate::recipe::tests::{read_command, script};
    use crate::recipe::{ReadError, Recipe, Setting, read_text};

    /// Reads a config, with a given global batch where `batch` is set.
    fn config(text: &str, batch: Option<u64>) -> Result<Recipe, ReadError> {
        let setting = |batch: u64| Setting {
            flag: "--global-batch-size",
            path: "batch.global",
            value: batch.to_string(),
        };
        let request = Request {
            path: "config.yaml".into(),
            settings: batch.map(setting).into_iter().collect(),
            ..Request::default()
        };
        read_text(&request, text.to_owned())
    }

    /// The only problem of a refused recipe.
    fn problem(result: Result<Recipe, ReadError>) -> String {
        let problems = result.expect_err("it is read").diagnostics;
        let messages: Vec<&str> = problems.iter().map(|d| d.message.as_str()).collect();
        messages.join("; ")
    }

    /// Reduced from files of each project.
    const CONFIGS: [(&str, &str); 10] = [
        (
            "base_model: m\ndatasets:\n  - path: d\n    type: alpaca\nmicro_batch_size: 2\n\
             gradient_accumulation_steps: 4\nnum_epochs: 1\nlearning_rate: 0.0002\n",
            "`base_model` is axolotl's",
        ),
        (
            "tokenizer:\n  _component_: torchtune.models.llama3.llama3_tokenizer\nbatch_size: 2\n\
             gradient_accumulation_steps: 8\ndataset:\n  packed: false\n",
            "`tokenizer` is torchtune's",
        ),
        (
            "grpo:\n  num_prompts_per_step: 32\npolicy:\n  train_global_batch_size: 512\n",
            "`policy` is NeMo-RL's",
        ),
        (
            "trainer:\n  devices: 8\nexp_manager:\n  name: x\nmodel:\n  global_batch_size: 8\n",
            "`trainer` is NeMo's",
        ),
        (
            "actor_rollout_ref:\n  actor:\n    ppo_mini_batch_size: 256\ndata:\n  train_batch_size: 1024\n",
            "`actor_rollout_ref` is verl's",
        ),
        // verl's `legacy_data.yaml`.
        (
            "train_files: ~/data/train.parquet\nprompt_key: prompt\ntrain_batch_size: 1024\n",
            "`train_files` is verl's",
        ),
        (
            "model: m\nmodel_class: llm\ndist_config:\n  name: fsdp2\nmicro_batch_size: 1\n",
            "`model_class` is LLaMA-Factory v1's",
        ),
        (
            "model: m\ntuner_type: lora\nmicro_batch_size: 1\nglobal_batch_size: 4\n",
            "`model` is ms-swift's Megatron's",
        ),
        (
            "model: m\ntuner_type: lora\nper_device_train_batch_size: 1\n",
            "`model` is ms-swift's",
        ),
        (
            "MODEL_ARGS:\n  --micro-batch-size: 4\n",
            "`MODEL_ARGS` is Megatron-LM's",
        ),
    ];

    #[test]
    fn a_config_of_a_known_project_is_refused_by_its_name() {
        for (text, expected) in CONFIGS {
            let expected = format!("{expected}, which is not read");
            assert_eq!(problem(config(text, None)), expected, "{text}");
        }
    }

    #[test]
    fn a_given_global_batch_replaces_a_config_that_is_not_read() {
        for (text, _) in CONFIGS {
            let recipe = config(text, Some(64)).unwrap_or_else(|e| panic!("{text}: {e:?}"));
            let batch = &recipe.spec.batch;
            assert_eq!(
                (batch.global, batch.accumulation),
                (Some(64), None),
                "{text}"
            );
            // The micro-batch has the same meaning everywhere.
            let size = |name: &str| {
                let (_, rest) = text.split_once(&format!("{name}: "))?;
                rest.split_whitespace().next()?.parse().ok()
            };
            let names = [
                "micro_batch_size",
                "micro-batch-size",
                "per_device_train_batch_size",
            ];
            let stated = names.into_iter().find_map(size);
            assert_eq!(batch.per_device_batch_size, stated, "{text}");
            let rules: Vec<&str> = recipe.diagnostics.iter().map(|d| d.rule.as_str()).collect();
            assert_eq!(rules, ["unknown-dialect"], "{text}");
        }
    }

    #[test]
    fn a_command_of_a_known_project_is_refused_by_its_name() {
        for (line, project) in [
            ("axolotl train examples/llama-3/lora.yml", "axolotl"),
            (
                "accelerate launch -m axolotl.cli.train a.yml --micro_batch_size 2",
                "axolotl",
            ),
            (
                "tune run --nproc_per_node 4 lora_finetune --config l batch_size=2",
                "torchtune",
            ),
            (
                "torchrun --nproc_per_node 8 -m verl.trainer.fsdp_sft_trainer",
                "verl",
            ),
            (
                "python3 -m verl.trainer.main_ppo data.train_batch_size=1024",
                "verl",
            ),
            (
                "python my/main.py actor_rollout_ref.rollout.n=5 trainer.nnodes=1",
                "verl",
            ),
            (
                "python examples/run_grpo_math.py policy.model_name=m cluster.gpus_per_node=8",
                "NeMo-RL",
            ),
            (
                "python megatron_gpt_pretraining.py trainer.devices=8 model.global_batch_size=8",
                "NeMo",
            ),
            (
                "deepspeed --module openrlhf.cli.train_sft --train_batch_size 128",
                "OpenRLHF",
            ),
            (
                "ray job submit -- python3 -m openrlhf.cli.train_ppo_ray --train_batch_size 128",
                "OpenRLHF",
            ),
            (
                "torchrun --nproc_per_node 8 pretrain_gpt.py --tensor-model-parallel-size 2 \
                 --micro-batch-size 1 --global-batch-size 16",
                "Megatron-LM",
            ),
            (
                "megatron sft --model m --micro_batch_size 1",
                "ms-swift's Megatron",
            ),
        ] {
            let expected = format!("this command is {project}'s, which is not read");
            assert_eq!(problem(read_command(line)), expected, "{line}");
        }
    }

    /// Reduced from OpenRLHF's `examples/scripts/train_sft.sh`.
    #[test]
    fn a_command_in_a_here_document_is_recognised() {
        let text = "read -r -d '' training_commands <<EOF\nopenrlhf.cli.train_sft \\\n   \
                    --train_batch_size 256\nEOF\ndeepspeed --module $training_commands\n";
        let expected = "this command is OpenRLHF's, which is not read";
        assert_eq!(problem(script(text)), expected);
    }

    #[test]
    fn commands_that_train_nothing_are_not_the_training() {
        for line in [
            "swift infer --model m --per_device_train_batch_size 1",
            "axolotl merge-lora a.yml --x 1",
            "llamafactory-cli export a.yaml --x 1",
            "trl vllm-serve --model m --per_device_train_batch_size 1",
            "srun --nodes=1 --nodelist=n trl vllm-serve --model m --tensor_parallel_size 2",
        ] {
            assert_eq!(
                problem(read_command(line)),
                "no command here starts a training",
                "{line}"
            );
        }
    }
}
