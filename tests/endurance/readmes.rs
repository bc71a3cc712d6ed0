//! The commands of upstream's READMEs, unchanged but for a tiny model, local data and the CPU: launched by evenkeel,
//! resized, robbed of a rank, and compared step by step with an undisturbed run. Upstream's scripts are not changed:
//! a module on PYTHONPATH records their samples and losses.
//!
//! The tests need a Python with torch, transformers, accelerate, trl and deepspeed: `EVENKEEL_PYTHON`, or `python3`.
//! Programs that no package has are read below the folder `EVENKEEL_UPSTREAM` (see [`upstream`]).

use std::path::{Path, PathBuf};
use std::process::Command;

use super::support::{Launched, Run, evenkeel, stderr};
use super::trainers::{BATCH, Fed, Trainer, grown_and_shrunk, own_file, python, same_samples};

/// A command of a README.
#[derive(Clone, Copy)]
struct Readme {
    /// Options of `evenkeel launch` for what the command does not state.
    options: &'static str,
    command: &'static str,
    /// Rows of token ids a sample: a pair has two.
    rows: usize,
    /// Upper limit of the relative difference between losses.
    apart: f64,
}

/// Losses that differ in rounding only.
const ROUNDING: f64 = 1e-3;

/// Losses after a universal checkpoint of ZeRO-3 with torch's AdamW.
const ZERO_3: f64 = 0.5;

/// Long enough to be disturbed before it ends.
const STEPS: u64 = 300;

/// Added to every command: the machine has no GPU and no hub, and a short run must change its loss.
const COMMON: &str = "--use_cpu true --bf16 false --report_to none --disable_tqdm true --learning_rate 1e-3 \
                      --save_steps 20 --logging_steps 1";

/// What the runs of one trainer share.
struct Place {
    /// The tiny model and data, and configs.
    data: tempfile::TempDir,
    python: PathBuf,
    /// Files below the working directory by the names that the commands have for them.
    files: Vec<(&'static str, PathBuf)>,
    /// Folders of Python modules.
    modules: Vec<PathBuf>,
    /// Arguments that only this trainer needs or knows.
    arguments: &'static str,
}

impl Place {
    /// `named`: what the commands call the parts of the tiny model's folder.
    fn new(python: PathBuf, named: &[(&'static str, &str)], arguments: &'static str) -> Place {
        let data = tempfile::tempdir().unwrap();
        let made = Command::new(&python)
            .arg(own_file("tests/trainers/tiny_model.py"))
            .arg(data.path())
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        let files = named
            .iter()
            .map(|(name, part)| (*name, data.path().join(part)));
        Place {
            files: files.collect(),
            data,
            python,
            modules: vec![own_file("tests/trainers/recorder").into()],
            arguments,
        }
    }

    fn start(&self, readme: &Readme) -> (Trainer, Launched) {
        let run = Run::of_command();
        let folder = run.scratch().join("work");
        for (name, file) in &self.files {
            let link = folder.join(name);
            std::fs::create_dir_all(link.parent().unwrap()).unwrap();
            std::os::unix::fs::symlink(file, link).unwrap();
        }
        let command = [readme.command, COMMON, self.arguments].join(" ");
        let words = command.split_whitespace().map(str::to_owned);
        let words = words.chain(["--max_steps".to_owned(), STEPS.to_string()]);
        let trainer = Trainer::new(run, words.collect());
        let first = format!(
            "cd '{}'; export RECORD='{}' PYTHONPATH='{}' PATH='{}':\"$PATH\" HF_HUB_OFFLINE=1",
            folder.display(),
            trainer.record.display(),
            std::env::join_paths(&self.modules).unwrap().display(),
            self.python.parent().unwrap_or(Path::new("")).display(),
        );
        let mut arguments: Vec<&str> = readme.options.split_whitespace().collect();
        arguments.extend(["--procs", "2", "--"]);
        arguments.extend(trainer.command.iter().map(String::as_str));
        let launched = trainer.run.start_in_shell(&first, &arguments);
        (trainer, launched)
    }

    /// 2 → 4 processes, one of the four killed, finished by the three others.
    fn disturbed(&self, readme: &Readme) -> Trainer {
        let (trainer, launched) = self.start(readme);
        trainer.grow_and_lose_a_rank(launched);
        trainer
    }

    /// The steps of an undisturbed run.
    fn undisturbed(&self, readme: &Readme) -> Fed {
        let (trainer, launched) = self.start(readme);
        assert!(launched.wait().success(), "{}", trainer.run.log());
        trainer.committed()
    }

    /// Disturbs a run of every command, and compares each with an undisturbed run of the first.
    fn compare(&self, readmes: &[Readme]) {
        self.compare_with(&self.undisturbed(&readmes[0]), readmes);
    }

    fn compare_with(&self, expected: &Fed, readmes: &[Readme]) {
        for readme in readmes {
            let disturbed = self.disturbed(readme);
            let rows = BATCH * readme.rows;
            let apart = same_samples(&disturbed.committed(), expected, STEPS, rows).unwrap();
            println!(
                "2 → 4 → 3, {STEPS} steps of {BATCH} samples as undisturbed, losses apart by {apart:.1e}: {}",
                readme.command
            );
            assert!(apart < readme.apart, "{}: {apart}", readme.command);
        }
    }
}

/// The corpus of upstream's recipes.
fn recipes() -> PathBuf {
    std::env::var_os("EVENKEEL_RECIPES")
        .map_or_else(|| own_file("../shared/recipes").into(), PathBuf::from)
}

/// A checkout and its Python: `EVENKEEL_UPSTREAM/NAME`, and `EVENKEEL_UPSTREAM/NAME.venv` or else
/// `EVENKEEL_PYTHON`. `None` and a message if one is missing.
fn upstream(name: &str, modules: &str) -> Option<(PathBuf, PathBuf)> {
    let folder = std::env::var_os("EVENKEEL_UPSTREAM").map(PathBuf::from);
    let Some(checkout) = folder
        .map(|folder| folder.join(name))
        .filter(|path| path.is_dir())
    else {
        println!("SKIPPED: no checkout of {name} (set EVENKEEL_UPSTREAM to its parent)");
        return None;
    };
    let own = checkout.with_extension("venv").join("bin/python");
    let python = if own.is_file() { own } else { python(modules)? };
    Some((checkout, python))
}

const SFT: Readme = Readme {
    options: "--recipe-gpus 2",
    command: "trl sft --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara \
              --output_dir Qwen2.5-0.5B-SFT --per_device_train_batch_size 6",
    rows: 1,
    apart: ROUNDING,
};

const DPO: Readme = Readme {
    options: "--recipe-gpus 2",
    command: "trl dpo --model_name_or_path Qwen/Qwen2.5-0.5B-Instruct --dataset_name argilla/Capybara-Preferences \
              --output_dir Qwen2.5-0.5B-DPO --per_device_train_batch_size 6",
    rows: 2,
    apart: ROUNDING,
};

fn trl() -> Option<Place> {
    let python = python("torch, transformers, accelerate, trl")?;
    let named = [
        ("Qwen/Qwen2.5-0.5B", "model"),
        ("Qwen/Qwen2.5-0.5B-Instruct", "model"),
        ("trl-lib/Capybara", "sft"),
        ("argilla/Capybara-Preferences", "preferences"),
    ];
    Some(Place::new(python, &named, "--enable_jit_checkpoint true"))
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn the_sft_command_of_trl_s_readme_keeps_its_samples_despite_a_lost_process() {
    if let Some(place) = trl() {
        place.compare(&[SFT]);
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn the_dpo_command_of_trl_s_readme_keeps_its_samples_despite_a_lost_process() {
    if let Some(place) = trl() {
        place.compare(&[DPO]);
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn accelerate_launch_and_torchrun_give_trl_the_samples_of_its_own_command() {
    let Some(place) = trl() else {
        return;
    };
    let by = |command| Readme {
        options: "",
        command,
        rows: 1,
        apart: ROUNDING,
    };
    place.compare(&[
        SFT,
        by("accelerate launch --num_processes 2 -m trl.scripts.sft --model_name_or_path Qwen/Qwen2.5-0.5B \
            --dataset_name trl-lib/Capybara --output_dir out --per_device_train_batch_size 6"),
        by("torchrun --nproc_per_node 2 -m trl.scripts.sft --model_name_or_path Qwen/Qwen2.5-0.5B \
            --dataset_name trl-lib/Capybara --output_dir out --per_device_train_batch_size 6"),
    ]);
}

/// Configs of accelerate with the keys of the alignment-handbook's, for two processes in full precision.
const FSDP_2: &str = "distributed_type: FSDP
mixed_precision: 'no'
num_machines: 1
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_cpu_ram_efficient_loading: false
";
const ZERO: &str = "distributed_type: DEEPSPEED
mixed_precision: 'no'
num_machines: 1
num_processes: 2
deepspeed_config:
  deepspeed_multinode_launcher: standard
  offload_optimizer_device: none
  offload_param_device: none
";

/// Compares TRL's SFT in accelerate's configs, by name, with its run without sharding.
fn compare_sharded(configs: &[(&str, String)], apart: f64) {
    let Some(mut place) = python("deepspeed").and_then(|_| trl()) else {
        return;
    };
    let expected = place.undisturbed(&SFT);
    for (name, text) in configs {
        let file = place.data.path().join(name);
        std::fs::write(&file, text).unwrap();
        place.files.push(("accelerate.yaml", file));
        // DeepSpeed steps within the backward pass, and transformers' checkpoint on a signal is taken after it: it
        // would hold the weights of one step more than it states.
        if text.starts_with(ZERO) {
            place.arguments = "";
        }
        println!("{name}:");
        let readme = Readme {
            options: "",
            command: "accelerate launch --config_file accelerate.yaml -m trl.scripts.sft \
                      --model_name_or_path Qwen/Qwen2.5-0.5B --dataset_name trl-lib/Capybara --output_dir out \
                      --per_device_train_batch_size 6",
            rows: 1,
            apart,
        };
        place.compare_with(&expected, &[readme]);
        place.files.pop();
    }
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn checkpoints_of_fsdp_2_move_to_other_worlds() {
    compare_sharded(&[("FSDP 2", FSDP_2.to_owned())], ROUNDING);
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn full_checkpoints_of_fsdp_2_move_to_other_worlds() {
    let full = FSDP_2.replace("SHARDED_STATE_DICT", "FULL_STATE_DICT");
    compare_sharded(&[("FSDP 2, full state dicts", full)], ROUNDING);
}

#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn checkpoints_of_zero_1_move_to_other_worlds() {
    let zero_1 = format!("{ZERO}  zero3_init_flag: false\n  zero_stage: 1\n");
    compare_sharded(&[("ZeRO-1", zero_1)], ROUNDING);
}

/// After DeepSpeed has loaded a universal checkpoint of ZeRO-3, the step count of torch's AdamW grows too fast: losses
/// differ, samples do not.
#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn checkpoints_of_zero_3_move_to_other_worlds() {
    let zero_3 =
        format!("{ZERO}  zero3_init_flag: true\n  zero3_save_16bit_model: true\n  zero_stage: 3\n");
    compare_sharded(&[("ZeRO-3", zero_3)], ZERO_3);
}

/// The README's command with the handbook's recipe and config. TRL 1.16 reads the recipe instead of the
/// handbook's script, which needs TRL 0.19.
#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn the_handbook_s_recipe_keeps_its_samples_with_zero_3() {
    let recipes = recipes().join("huggingface__alignment-handbook/925acdfe4b/recipes");
    if !recipes.is_dir() {
        println!("SKIPPED: no handbook recipes at {}", recipes.display());
        return;
    }
    let Some(python) = python("torch, transformers, accelerate, trl, deepspeed") else {
        return;
    };
    let named = [
        ("mistralai/Mistral-7B-v0.1", "model"),
        ("HuggingFaceH4/ultrachat_200k", "splits"),
    ];
    // The recipe's evaluation of 1000 samples an epoch takes longer than its training here.
    let arguments = "--attn_implementation eager --dtype float32 --push_to_hub false --eval_strategy no \
                     --dataset_num_proc 1";
    let mut place = Place::new(python, &named, arguments);
    place.files.push(("recipes", recipes));
    let scripts = own_file("tests/trainers/handbook/scripts");
    place.files.push(("scripts", scripts.into()));
    place.compare(&[Readme {
        options: "",
        command: "ACCELERATE_LOG_LEVEL=info accelerate launch --config_file recipes/accelerate_configs/zero3.yaml \
                  --num_processes=2 --mixed_precision no scripts/sft.py \
                  --config recipes/zephyr-7b-beta/sft/config_full.yaml --per_device_train_batch_size=6",
        rows: 1,
        apart: ZERO_3,
    }]);
}

#[test]
#[ignore = "needs a checkout: scripts/nightly.sh"]
fn the_handbook_s_command_keeps_its_samples_despite_a_lost_process() {
    let modules = "torch, transformers, accelerate, trl";
    let Some((checkout, python)) = upstream("alignment-handbook", modules) else {
        return;
    };
    let named = [
        ("mistralai/Mistral-7B-v0.1", "model"),
        ("HuggingFaceH4/ultrachat_200k", "splits"),
    ];
    let arguments = "--attn_implementation eager --torch_dtype float32 --push_to_hub false";
    let mut place = Place::new(python, &named, arguments);
    place.files.push(("recipes", checkout.join("recipes")));
    place.files.push(("scripts", checkout.join("scripts")));
    place.modules.push(checkout.join("src"));
    place.compare(&[Readme {
        options: "",
        command: "ACCELERATE_LOG_LEVEL=info accelerate launch --config_file recipes/accelerate_configs/ddp.yaml \
                  --num_processes=2 --mixed_precision no scripts/sft.py --config recipes/zephyr-7b-beta/sft/config_full.yaml \
                  --per_device_train_batch_size=6",
        rows: 1,
        apart: ROUNDING,
    }]);
}

#[test]
#[ignore = "needs a checkout: scripts/nightly.sh"]
fn commands_of_transformers_examples_keep_their_samples_despite_a_lost_process() {
    let modules = "torch, transformers, accelerate, evaluate, sklearn";
    let Some((checkout, python)) = upstream("transformers", modules) else {
        return;
    };
    let named = [
        ("openai-community/gpt2", "model"),
        ("google-bert/bert-base-cased", "bert"),
        ("text.txt", "text.txt"),
        ("pairs.csv", "pairs.csv"),
        ("accuracy", "accuracy"),
    ];
    let mut place = Place::new(python, &named, "");
    for (name, folder) in [
        ("run_clm.py", "language-modeling"),
        ("run_glue.py", "text-classification"),
    ] {
        let file = checkout.join("examples/pytorch").join(folder).join(name);
        place.files.push((name, file));
    }
    // 480 samples: an incomplete last step differs between worlds.
    place.compare(&[Readme {
        options: "--recipe-gpus 2",
        command: "python run_clm.py --model_name_or_path openai-community/gpt2 --train_file text.txt \
                  --validation_file text.txt --per_device_train_batch_size 6 --do_train --output_dir test-clm \
                  --block_size 16 --max_train_samples 480",
        rows: 1,
        apart: ROUNDING,
    }]);
    place.compare(&[Readme {
        options: "",
        command: "torchrun --nproc_per_node 2 run_glue.py --model_name_or_path google-bert/bert-base-cased \
                  --train_file pairs.csv --validation_file pairs.csv --do_train --max_seq_length 128 \
                  --per_device_train_batch_size 6 --output_dir mrpc",
        rows: 1,
        apart: ROUNDING,
    }]);
}

/// HALOs' README with its own config tree and accelerate config. Our own script replaces `launch.py`.
#[test]
#[ignore = "takes minutes: scripts/nightly.sh"]
fn the_command_of_halos_readme_keeps_its_samples_despite_a_lost_process() {
    let tree = recipes().join("ContextualAI__HALOs/4831988636");
    let Some(python) = python("torch").filter(|_| tree.is_dir()) else {
        println!(
            "SKIPPED: needs PyTorch, and HALOs' configs at {}",
            tree.display()
        );
        return;
    };
    grown_and_shrunk("HALOs", STEPS, || {
        let run = Run::of_command();
        let folder = run.scratch().join("work");
        std::fs::create_dir(&folder).unwrap();
        for (name, file) in [
            ("config", tree.join("config")),
            ("accelerate_config", tree.join("accelerate_config")),
            (
                "launch.py",
                own_file("tests/trainers/halos/launch.py").into(),
            ),
        ] {
            std::os::unix::fs::symlink(file, folder.join(name)).unwrap();
        }
        let command = "accelerate launch --config_file accelerate_config/fsdp_2gpu.yaml --main_process_port 29500 \
                       launch.py loss=sft model=llama train_datasets=[ultrabin] test_datasets=[ultrabin] \
                       exp_name=llama_sft ++cache_dir=cache ++model.name_or_path=meta-llama/Meta-Llama-3-8B \
                       ++lr=1e-3 ++intermediate_checkpoints=true ++n_epochs=null ++n_examples=3600 ++eval_every=240 \
                       ++model.batch_size=12 ++model.eval_batch_size=12";
        let words = command.split_whitespace().map(str::to_owned).collect();
        let mut trainer = Trainer::new(run, words);
        trainer.named = BATCH as u64;
        let first = format!(
            "cd '{}'; export RECORD='{}' PATH='{}':\"$PATH\"",
            folder.display(),
            trainer.record.display(),
            python.parent().unwrap_or(Path::new("")).display(),
        );
        let mut arguments = vec!["--procs", "2", "--"];
        arguments.extend(trainer.command.iter().map(String::as_str));
        let launched = trainer.run.start_in_shell(&first, &arguments);
        (trainer, launched)
    });
}

/// The refusal of a README's command in a folder with these files: its exit code and its messages. No rank starts.
fn refused(files: &[(&str, &str)], command: &str) -> (Option<i32>, String) {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let file = folder.path().join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }
    let output = evenkeel()
        .current_dir(folder.path())
        .args(["launch", "--procs", "2", "--"])
        .args(command.split_whitespace())
        .output()
        .unwrap();
    assert!(!folder.path().join("runs").exists(), "{}", stderr(&output));
    (output.status.code(), stderr(&output))
}

#[test]
fn commands_of_accelerate_s_examples_are_refused_since_the_script_sets_its_batch() {
    // Reduced from accelerate 16cb6eb, `examples/nlp_example.py`.
    let program = "import argparse\nfrom accelerate import Accelerator\nMAX_GPU_BATCH_SIZE = 16\n\
                   parser = argparse.ArgumentParser()\nparser.add_argument('--mixed_precision')\n\
                   config = {'lr': 2e-5, 'num_epochs': 3, 'seed': 42, 'batch_size': 16}\n";
    for name in ["nlp_example.py", "complete_nlp_example.py"] {
        let command = format!("torchrun --nproc_per_node 2 {name}");
        let (exit, message) = refused(&[(name, program)], &command);
        assert_eq!(exit, Some(1), "{message}");
        let expected = "error[global-batch-unknown]: no key that is read states the batch";
        assert!(message.contains(expected), "{message}");
        assert!(message.contains("--global-batch-size B"), "{message}");
    }
}

#[test]
fn the_command_of_direct_preference_optimization_is_refused_since_it_cannot_resume() {
    // Reduced from direct-preference-optimization f8b8c0f, `config`.
    let config = "seed: 0\nexp_name: ???\nbatch_size: 4\neval_batch_size: 16\nfsdp_port: null\ndatasets:\n- hh\n\
                  sample_during_eval: true\nlr: 5e-7\ngradient_accumulation_steps: 1\nmax_length: 512\n\
                  max_prompt_length: 256\nn_epochs: 1\ntrainer: BasicTrainer\noptimizer: RMSprop\n\
                  defaults:\n- _self_\n- model: blank_model\n- loss: sft\n";
    let blank = "name_or_path: ???\narchive: null\npolicy_dtype: float32\nfsdp_policy_mp: null\n";
    let pythia = "defaults:\n- blank_model\n- _self_\nname_or_path: EleutherAI/pythia-2.8b\n";
    let files = [
        ("train.py", ""),
        ("config/config.yaml", config),
        ("config/model/blank_model.yaml", blank),
        ("config/model/pythia28.yaml", pythia),
        ("config/loss/sft.yaml", "name: sft\n"),
    ];
    let command = "python -u train.py model=pythia28 datasets=[hh] loss=sft exp_name=anthropic_dpo_pythia28 \
                   gradient_accumulation_steps=2 batch_size=64 eval_batch_size=32 trainer=FSDPTrainer \
                   sample_during_eval=false model.fsdp_policy_mp=bfloat16";
    let (exit, message) = refused(&files, command);
    assert_eq!(exit, Some(1), "{message}");
    let expected = "error[checkpoint-portable]: direct-preference-optimization cannot continue from its checkpoints";
    assert!(message.contains(expected), "{message}");
}
