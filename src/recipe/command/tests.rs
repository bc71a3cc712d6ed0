use super::*;
use crate::recipe::handbook;
use crate::recipe::source::Sources;

/// What is understood of a line, or the words that refuse it.
fn understood(text: &str) -> Result<Command, String> {
    let mut sources = Sources::default();
    let file = sources.add(COMMAND, text);
    let mut diagnostics = Vec::new();
    let command = parse(text, file, handbook::is_switch, &mut diagnostics);
    command.ok_or_else(|| diagnostics[0].message.clone())
}

fn gpus(text: &str) -> Option<String> {
    let world = understood(text).unwrap().world?;
    Some(world.get_path("batch.gpus")?.text()?.to_owned())
}

fn argument(text: &str, key: &str) -> Option<String> {
    let command = understood(text).unwrap();
    Some(command.arguments.get(key)?.text()?.to_owned())
}

#[test]
fn launchers_say_how_many_processes_there_are() {
    for (text, expected) in [
        ("torchrun --nproc_per_node 4 train.py", Some("4")),
        (
            "torchrun --nproc-per-node=8 --nnodes=2 train.py --x 1",
            Some("16"),
        ),
        ("torchrun train.py --seed 1", Some("1")),
        ("torchrun --standalone --nproc_per_node=gpu train.py", None),
        ("torchrun --nnodes 1:4 --nproc_per_node 8 train.py", None),
        (
            "python3.11 -m torch.distributed.run --nproc_per_node 2 -m pkg.train",
            Some("2"),
        ),
        (
            "deepspeed --num_gpus=8 --num_nodes 2 train.py --deepspeed ds.json",
            Some("16"),
        ),
        ("deepspeed --include localhost:0,1,3 train.py", Some("3")),
        ("CUDA_VISIBLE_DEVICES=0 python train.py --x 1", None),
        (
            "srun --nodes 2 torchrun --nproc_per_node 4 train.py",
            Some("4"),
        ),
    ] {
        assert_eq!(gpus(text).as_deref(), expected, "{text}");
    }
    let call = understood(
        "accelerate launch --config_file fsdp.yaml --num_processes=4 --mixed_precision bf16 \
         --zero_stage 3 --multi_gpu scripts/dpo.py --config recipe.yaml --beta 0.1",
    )
    .unwrap();
    assert_eq!(call.accelerate, Some(Config::File("fsdp.yaml".into())));
    assert_eq!(call.config, Some("recipe.yaml".into()));
    assert_eq!(call.script.unwrap().value, PathBuf::from("scripts/dpo.py"));
    let launch = call.launch.unwrap();
    let said = |path: &str| {
        launch
            .get_path(path)
            .and_then(Node::text)
            .map(str::to_owned)
    };
    assert_eq!(said("num_processes").as_deref(), Some("4"));
    assert_eq!(said("deepspeed_config.zero_stage").as_deref(), Some("3"));
    assert_eq!(said("distributed_type").as_deref(), Some("MULTI_GPU"));
    assert_eq!(
        call.arguments.entries().unwrap().len(),
        1,
        "{:?}",
        call.arguments
    );
}

#[test]
fn arguments_are_read_as_argparse_does() {
    let line = "python train.py --per-device-train-batch-size 8 --learning_rate=-1 --bf16 \
                --no_dataloader_pin_memory --report_to wandb tensorboard --seed 1 --seed 2 \
                --lr_scheduler_kwargs '{\"min_lr\": 1e-6}' --no_cuda";
    for (key, expected) in [
        ("per_device_train_batch_size", Some("8")),
        ("learning_rate", Some("-1")),
        ("bf16", Some("true")),
        ("dataloader_pin_memory", Some("false")),
        ("no_cuda", Some("true")),
        ("seed", Some("2")),
    ] {
        assert_eq!(argument(line, key).as_deref(), expected, "{key}");
    }
    let command = understood(line).unwrap();
    let list = command.arguments.get("report_to").unwrap();
    assert_eq!(list.items().unwrap().len(), 2);
    let kwargs = command
        .arguments
        .get_path("lr_scheduler_kwargs.min_lr")
        .unwrap();
    assert_eq!(kwargs.text(), Some("1e-6"));
}

#[test]
fn a_file_is_a_command_when_it_looks_like_one() {
    for (path, text, expected) in [
        ("train.args", "--a 1", true),
        ("run.sh", "echo", true),
        ("run", "#!/usr/bin/env bash\nx", true),
        (
            "line.txt",
            "# comment\n--per_device_train_batch_size 8\n",
            true,
        ),
        ("line.txt", "torchrun --nproc_per_node 4 t.py", true),
        ("recipe.yaml", "--a: 1", false),
        ("recipe", "---\na: 1\n", false),
        ("recipe", "a: 1\n", false),
    ] {
        assert_eq!(is_one(Path::new(path), text), expected, "{path} {text:?}");
    }
}

#[test]
fn the_call_in_a_script_is_found_and_others_are_not_taken_for_it() {
    let script = "#!/bin/bash\nset -e\ncd /x && export N=4\n\
                  torchrun --nproc_per_node 2 \\\n  train.py \\\n  --seed 7 # the seed\necho done\n";
    let command = understood(script).unwrap();
    assert_eq!(command.arguments.get("seed").unwrap().text(), Some("7"));
    assert_eq!(&script[command.end - 1..command.end], "7");
    let refused = understood("make all\n").unwrap_err();
    assert_eq!(refused, "no command here starts a training");
    assert!(understood("").is_err());
    let open =
        understood("echo \"it's\"; torchrun --nproc_per_node \"8 t.py --seed 1").unwrap_err();
    assert_eq!(
        open,
        "a quote of the command is not closed, or a backslash ends it"
    );
}

#[test]
fn trls_own_command_line_is_split_between_launcher_and_trainer() {
    let line =
        "trl sft --config r.yaml --num_processes 4 --accelerate_config zero2.yaml --lora_r 8";
    let command = understood(line).unwrap();
    assert_eq!(command.script.as_ref().unwrap().value, PathBuf::from("sft"));
    let Some(Config::FileOrShipped(config)) = &command.accelerate else {
        panic!("{command:?}");
    };
    assert_eq!(config.value, "zero2.yaml");
    let keys = command
        .arguments
        .entries()
        .unwrap()
        .iter()
        .map(|e| e.name.as_str());
    assert_eq!(keys.collect::<Vec<_>>(), ["lora_r"]);
}

#[test]
fn what_trl_hands_to_its_launcher_is_taken_from_words_and_from_the_recipe() {
    let line = "trl dpo --use_deepspeed --zero_stage 3 --config_file own.yaml --num_processes=2 --beta 0.2";
    let command = understood(line).unwrap();
    assert_eq!(command.accelerate, Some(Config::File("own.yaml".into())));
    let keys = command.arguments.entries().unwrap().iter();
    assert_eq!(keys.map(|e| e.name.as_str()).collect::<Vec<_>>(), ["beta"]);
    let launch = command.launch.unwrap();
    let said = |path: &str| launch.get_path(path).and_then(Node::text);
    assert_eq!(said("distributed_type"), Some("DEEPSPEED"));
    assert_eq!(said("deepspeed_config.zero_stage"), Some("3"));

    let mut sources = Sources::default();
    let file = sources.add("sft.yaml", "");
    let text = "accelerate_config: zero2\nnum_processes: 4\nlearning_rate: 1e-5\n";
    let mut root = crate::recipe::yaml::parse(text, file, &mut Vec::new()).unwrap();
    let launch = take_launch(&mut root);
    assert!(matches!(launch.config, Some(Config::FileOrShipped(name)) if name.value == "zero2"));
    let processes = launch
        .options
        .unwrap()
        .get("num_processes")
        .cloned()
        .unwrap();
    assert_eq!((processes.text(), processes.span.line), (Some("4"), 2));
    let left = root.entries().unwrap().iter();
    assert_eq!(
        left.map(|e| e.name.as_str()).collect::<Vec<_>>(),
        ["learning_rate"]
    );
}
