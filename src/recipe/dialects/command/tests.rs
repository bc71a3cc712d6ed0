use super::*;
use crate::recipe::syntax::diagnostic::Severity;
use crate::recipe::syntax::scalar::{Resolved, Schema};
use crate::recipe::syntax::shell;
use crate::recipe::syntax::source::Sources;

/// The parsed command with everything that is said of it.
fn parsed(text: &str) -> (Option<Command>, Vec<Diagnostic>) {
    let mut sources = Sources::default();
    let file = sources.add(shell::COMMAND, text);
    let mut diagnostics = Vec::new();
    let path = Path::new("run.sh");
    let command = parse(path, text, file, &BTreeMap::new(), &mut diagnostics);
    (command, diagnostics)
}

/// The parsed command, or the message of the first error.
pub(crate) fn understood(text: &str) -> Result<Command, String> {
    let (command, diagnostics) = parsed(text);
    match diagnostics.iter().find(|d| d.severity == Severity::Error) {
        Some(error) => Err(error.message.clone()),
        None => Ok(command.unwrap()),
    }
}

pub(crate) fn gpus(text: &str) -> Option<String> {
    let world = understood(text).unwrap().launch.world?;
    Some(world.value.to_string())
}

pub(crate) fn argument(text: &str, key: &str) -> Option<String> {
    let command = understood(text).unwrap();
    Some(command.arguments.get(key)?.text()?.to_owned())
}

/// Whether a wrapper's nodes multiply the processes of its command only the wrapper knows.
#[test]
fn a_wrapper_on_several_nodes_is_refused() {
    let train = "train.py --per_device_train_batch_size 4";
    for before in [
        "python x.py --nodes 4 -- torchrun --nproc_per_node 8",
        "sky launch --num-nodes 4 -- torchrun --nproc_per_node 8",
        "submit --nnodes=2 python",
        "python mason.py --num_nodes 2 -- torchrun --nproc_per_node 8",
    ] {
        let message = refused(&format!("{before} {train}")).unwrap_or_default();
        assert!(
            message.contains("multiplies the processes"),
            "{before}: {message}"
        );
    }
    for before in [
        "sky launch --num-nodes 1 -- torchrun --nproc_per_node 8",
        "sky launch --num-nodes 4 -- torchrun --nnodes 4 --nproc_per_node 8",
        "torchrun --nnodes 2 --nproc_per_node 8",
        "srun --nodes 2 torchrun --nnodes 2 --nproc_per_node 8",
        "deepspeed --num_nodes 2 --num_gpus 8",
    ] {
        assert_eq!(refused(&format!("{before} {train}")), None, "{before}");
    }
    assert_eq!(refused("--nodes 4 --per_device_train_batch_size 4"), None);
}

/// A task of Slurm or MPI is a process; one task states nothing, since it may use every GPU.
#[test]
fn tasks_and_variables_set_the_number_of_processes() {
    let train = "python train.py --per_device_train_batch_size 4";
    for (text, expected) in [
        ("srun --ntasks=16 --gres=gpu:8", Some("16")),
        ("srun -N 2 --ntasks-per-node 8", Some("16")),
        ("srun -n4", Some("4")),
        ("srun -n 1", None),
        ("srun --ntasks=$N", None),
        (
            "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun",
            Some("8"),
        ),
        (
            "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\nsrun -N 1",
            Some("4"),
        ),
        ("#SBATCH --ntasks=8\n", None),
        ("mpirun -np 8 -H a:4,b:4", Some("8")),
        ("mpiexec -n 2", Some("2")),
        ("NPROC_PER_NODE=4", None),
    ] {
        let text = format!("{text} {train}");
        assert_eq!(gpus(&text).as_deref(), expected, "{text}");
    }
    let swift = "swift sft --model m --per_device_train_batch_size 2";
    for (before, expected) in [
        ("NPROC_PER_NODE=4 ", Some("4")),
        ("NNODES=2 NPROC_PER_NODE=4 ", Some("8")),
        ("export NPROC_PER_NODE=4\n", Some("4")),
        ("export NPROC_PER_NODE=4\nexport NPROC_PER_NODE=8\n", None),
        ("if x; then export NPROC_PER_NODE=4; fi\n", None),
        ("NPROC_PER_NODE=4\n", None),
        ("NPROC_PER_NODE=4 NNODES=$N ", None),
        ("", None),
    ] {
        let text = format!("{before}{swift}");
        assert_eq!(gpus(&text).as_deref(), expected, "{text}");
    }
}

#[test]
fn llama_factory_starts_a_process_for_each_visible_device() {
    for (before, expected) in [
        ("CUDA_VISIBLE_DEVICES=4,5,6,7", Some("4")),
        ("NNODES=2 CUDA_VISIBLE_DEVICES=0,1", Some("4")),
        ("NPROC_PER_NODE=2 CUDA_VISIBLE_DEVICES=0,1,2,3", Some("2")),
        ("NPROC_PER_NODE=$N CUDA_VISIBLE_DEVICES=0,1,2,3", None),
        ("CUDA_VISIBLE_DEVICES=$GPUS", None),
        ("export CUDA_VISIBLE_DEVICES=0,1\n", Some("2")),
        ("", None),
    ] {
        let train = "llamafactory-cli train --do_train --per_device_train_batch_size 2";
        let text = format!("{before} {train}");
        assert_eq!(gpus(&text).as_deref(), expected, "{text}");
    }
    // ms-swift spreads one process over them.
    let swift = "CUDA_VISIBLE_DEVICES=0,1 swift sft --model m --per_device_train_batch_size 2";
    assert_eq!(gpus(swift), None);
}

#[test]
fn a_hook_of_the_shell_starts_no_training() {
    for hook in ["eval \"$(conda shell.bash hook)\"", "eval $(opam env)"] {
        let message = refused(&format!("{hook}\nconda activate a\nls\n")).unwrap();
        assert_eq!(message, "no command here starts a training", "{hook}");
    }
}

#[test]
fn mason_multiplies_the_processes_by_its_nodes() {
    let own = "accelerate launch --num_processes 8 open_instruct/finetune.py --seed 1";
    let processes = |before: &str| {
        let command = understood(&format!("{before} -- {own}")).unwrap();
        let value = command.launch.value(&["num_processes"]).cloned();
        value.map(|word| word.text)
    };
    assert_eq!(
        processes("python mason.py --num_nodes 4 --gpus 8").as_deref(),
        Some("32")
    );
    assert_eq!(
        processes("python mason.py --num_nodes=2").as_deref(),
        Some("16")
    );
    assert_eq!(
        processes("python other.py --num_nodes 1").as_deref(),
        Some("8")
    );
}

#[test]
fn launchers_set_the_number_of_processes() {
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
    assert!(
        matches!(call.accelerate.config, Some(Config::File(file, _)) if file == Path::new("fsdp.yaml"))
    );
    assert_eq!(call.config.unwrap().value, Path::new("recipe.yaml"));
    assert_eq!(
        call.launch.script().unwrap().value,
        Path::new("scripts/dpo.py")
    );
    let launch = call.accelerate.tree.unwrap();
    let launch_value = |path: &str| {
        launch
            .get_path(path)
            .and_then(Node::text)
            .map(str::to_owned)
    };
    assert_eq!(launch_value("num_processes").as_deref(), Some("4"));
    assert_eq!(
        launch_value("deepspeed_config.zero_stage").as_deref(),
        Some("3")
    );
    assert_eq!(launch_value("--multi_gpu").as_deref(), Some("true"));
    assert_eq!(
        call.arguments.entries().unwrap().len(),
        1,
        "{:?}",
        call.arguments
    );
}

#[test]
fn arguments_are_parsed_as_by_argparse() {
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
fn a_command_file_is_recognized_by_its_name_or_text() {
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
fn arguments_on_several_lines_need_a_backslash() {
    let continued = "--per_device_train_batch_size 4 \\\n  --seed 7 # the seed\n";
    assert_eq!(argument(continued, "seed").as_deref(), Some("7"));
    let refused = understood("--per_device_train_batch_size 4\n--seed 7\n").unwrap_err();
    assert_eq!(
        refused,
        "these arguments continue on another line without a `\\` before it"
    );
}

#[test]
fn the_training_command_is_found_among_others() {
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
        "the script cannot be parsed here: a quote or bracket is not closed, a word is out of place, or the nesting is too deep"
    );
}

#[test]
fn trls_command_line_is_split_between_launcher_and_trainer() {
    let line =
        "trl sft --config r.yaml --num_processes 4 --accelerate_config zero2.yaml --lora_r 8";
    let command = understood(line).unwrap();
    assert_eq!(command.launch.script().unwrap().value, Path::new("sft"));
    let Some(Config::FileOrShipped(config)) = &command.accelerate.config else {
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
fn trls_launcher_options_come_from_the_command_and_the_recipe() {
    let line = "trl dpo --use_deepspeed --zero_stage 3 --config_file own.yaml --num_processes=2 --beta 0.2";
    let command = understood(line).unwrap();
    assert!(
        matches!(command.accelerate.config, Some(Config::File(file, _)) if file == Path::new("own.yaml"))
    );
    let keys = command.arguments.entries().unwrap().iter();
    assert_eq!(keys.map(|e| e.name.as_str()).collect::<Vec<_>>(), ["beta"]);
    let launch = command.accelerate.tree.unwrap();
    let launch_value = |path: &str| launch.get_path(path).and_then(Node::text);
    assert_eq!(launch_value("--use_deepspeed"), Some("true"));
    assert_eq!(launch_value("deepspeed_config.zero_stage"), Some("3"));

    let mut sources = Sources::default();
    let file = sources.add("sft.yaml", "");
    let text = "accelerate_config: zero2\nnum_processes: 4\nlearning_rate: 1e-5\n";
    let mut root = crate::recipe::syntax::yaml::parse(text, file, &mut Vec::new()).unwrap();
    let launch = take_launch(&mut root);
    assert!(matches!(launch.config, Some(Config::FileOrShipped(name)) if name.value == "zero2"));
    let processes = launch.tree.unwrap().get("num_processes").cloned().unwrap();
    assert_eq!((processes.text(), processes.span.line), (Some("4"), 2));
    let left = root.entries().unwrap().iter();
    assert_eq!(
        left.map(|e| e.name.as_str()).collect::<Vec<_>>(),
        ["learning_rate"]
    );
}

/// The message of the first error, if the script is refused.
pub(crate) fn refused(script: &str) -> Option<String> {
    understood(script).err()
}

#[test]
fn unresolved_words_that_may_hold_a_batch_are_refused() {
    let batch = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4";
    for arguments in [
        "$ARGS",
        "${ARGS}",
        "\"$@\"",
        "$*",
        "\"${A[@]}\"",
        "$(cat train.args)",
        "`cat train.args`",
        "\"$1\"",
        "--output_dir $OUT $ARGS",
        "--bf16 $ARGS",
        "--bf16 \"$ARGS\"",
        "--$KEY 8",
        "--per_device_${WHICH}_batch_size=8",
        "--report_to wandb $ARGS",
        "--output_dir o \"$@\"",
        "--output_dir \"$@\"",
        "--accelerator_config $CONFIG",
    ] {
        for script in [
            format!("torchrun --nproc_per_node 4 train.py {arguments}"),
            format!("torchrun --nproc_per_node 4 train.py {batch} {arguments}"),
        ] {
            let message = refused(&script).unwrap_or_default();
            assert!(
                message.contains("may hold further arguments"),
                "{script}: {message}"
            );
        }
        // The last value counts.
        let script = format!("torchrun --nproc_per_node 4 train.py {arguments} {batch}");
        assert_eq!(refused(&script), None, "{script}");
    }
    let message = refused("accelerate launch $LAUNCH train.py --seed 1").unwrap();
    assert!(message.contains("further launcher options"), "{message}");
    let half = "train.py $ARGS --per_device_train_batch_size 2";
    assert!(refused(half).is_some());
    let unknown = "train.py --my_own $ARGS";
    assert!(refused(unknown).is_some());
    assert_eq!(refused(&format!("{unknown} --seed 1 {batch}")), None);
    let before = format!("train.py {batch} --my_own $ARGS");
    assert_eq!(refused(&before), None, "most likely its value");
}

#[test]
fn a_value_may_be_unresolved_where_no_batch_depends_on_it() {
    for arguments in [
        "--output_dir $OUT",
        "--output_dir=$OUT",
        "--output_dir $OUT/x --seed 1",
        "--model_name_or_path \"$MODEL\"",
        "--my_own_option \"$X\"",
        "--my_own_option=$X",
        "--my_own_option $DIR/x",
        "--run_name run-$(date +%s)",
    ] {
        let script = format!("torchrun --nproc_per_node 4 train.py {arguments}");
        assert_eq!(refused(&script), None, "{script}");
    }
}

#[test]
fn variables_that_the_script_assigns_are_expanded() {
    let script = "#!/bin/bash\nGPUS=8\nBS=4\nOUT=out/$BS\n\
                  ARGS=\"--gradient_accumulation_steps 2 --output_dir $OUT\"\n\
                  LAUNCH=\"--nnodes 2 --nproc_per_node $GPUS\"\n\
                  torchrun $LAUNCH train.py $ARGS --per_device_train_batch_size \"${BS}\"\n";
    assert_eq!(gpus(script).as_deref(), Some("16"));
    for (key, expected) in [
        ("gradient_accumulation_steps", "2"),
        ("per_device_train_batch_size", "4"),
        ("output_dir", "out/4"),
    ] {
        assert_eq!(argument(script, key).as_deref(), Some(expected), "{key}");
    }
    let array = "ARGS=(\n  --seed 1 # the seed\n  --bf16\n)\npython train.py \"${ARGS[@]}\"";
    assert_eq!(argument(array, "seed").as_deref(), Some("1"));
    assert_eq!(gpus("torchrun --nproc_per_node $N train.py --seed 1"), None);
    let program = "torchrun --nproc_per_node 4 $PROGRAM --seed 1";
    assert_eq!(gpus(program).as_deref(), Some("4"));
    assert_eq!(gpus("torchrun $LAUNCH train.py --seed 1"), None);
    assert_eq!(gpus("deepspeed $LAUNCH train.py --seed 1"), None);
}

#[test]
fn torchruns_defaults_come_from_its_environment() {
    for (script, expected) in [
        ("PET_NPROC_PER_NODE=8 torchrun t.py --seed 1", Some("8")),
        (
            "PET_NPROC_PER_NODE=2 python -m torch.distributed.run t.py",
            Some("2"),
        ),
        ("env PET_NNODES=2 torchrun t.py", Some("2")),
        // The script's environment is not followed.
        ("export PET_NPROC_PER_NODE=8\ntorchrun t.py --seed 1", None),
        (
            "PET_NNODES=2\nexport PET_NNODES\ntorchrun --nproc_per_node 4 t.py",
            None,
        ),
        (
            "export PET_NPROC_PER_NODE=8\ntorchrun --nnodes 1 --nproc_per_node 4 t.py",
            Some("4"),
        ),
        ("PET_NPROC_PER_NODE=$N torchrun t.py --seed 1", None),
        ("export PET_NNODES=1:4\ntorchrun t.py --seed 1", None),
    ] {
        assert_eq!(gpus(script).as_deref(), expected, "{script}");
    }
}

#[test]
fn commands_that_are_only_printed_or_written_are_ignored() {
    let train = "torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 8";
    for before in [
        "echo torchrun --nproc_per_node 2 train.py --per_device_train_batch_size 2",
        "cat > job.sh <<X\ntorchrun t.py --per_device_train_batch_size 2\nX",
        "pip install trl deepspeed",
        "f() { kill -TERM -- \"-${PID}\"; }",
        "accelerate launch -m lm_eval --model hf --batch_size 1",
        "python -m lm_eval.run --model hf --batch_size 1 --seed 1",
        "python eval.py --model x",
        "wget --quiet https://x/train.py",
        "torchrun eval.py --metric x",
    ] {
        let script = format!("{before}\n{train} > train.log 2>&1 &\n");
        assert_eq!(gpus(&script).as_deref(), Some("4"), "{script}");
        let value = argument(&script, "per_device_train_batch_size");
        assert_eq!(value.as_deref(), Some("8"), "{script}");
    }
}

#[test]
fn a_script_with_several_trainings_is_refused() {
    let one = "torchrun --nproc_per_node 4 a.py --per_device_train_batch_size 8";
    for other in [
        "torchrun --nproc_per_node 4 a.py --per_device_train_batch_size 2",
        "torchrun --nproc_per_node 2 a.py --per_device_train_batch_size 8",
    ] {
        for script in [
            format!("set -e\n{one}\n\n{other}"),
            format!("if [ $1 = big ]; then\n  {one}\nelse\n  {other}\nfi"),
        ] {
            let message = refused(&script).unwrap();
            let expected =
                "2 commands here start a training, at lines 2, 4: each has its own batch";
            assert_eq!(message, expected, "{script}");
        }
    }
    assert_eq!(refused("python prepare.py\npython train.py"), None);
}

#[test]
fn scripts_are_bounded() {
    let long = "# x\n".repeat(20_000);
    assert_eq!(
        refused(&long).as_deref(),
        Some("the script has 78.1 KiB, the limit is 64.0 KiB")
    );
}

#[test]
fn very_long_commands_parse_in_linear_time() {
    let mut script = "torchrun --nproc_per_node 4 train.py".to_owned();
    for key in 0..4_000 {
        script += &format!(" --key{key} {key}");
    }
    let command = understood(&script).unwrap();
    assert_eq!(command.arguments.entries().unwrap().len(), 4_000);
    let nested = "(( ".repeat(4_000) + "case -p in ".repeat(4_000).as_str();
    let words = "uv run ".to_owned() + "-p x ".repeat(12_000).as_str();
    assert!(refused(&nested).is_some() && refused(&words).is_some());
}

#[test]
fn case_patterns_are_not_commands() {
    let train = "torchrun --nproc_per_node 4 train.py --per_device_train_batch_size 8";
    for case in [
        "case \"$1\" in\n  --config) CFG=$2; shift ;;\nesac",
        "while [[ $# -gt 0 ]]; do\n  case $1 in\n    --deepspeed)\n      D=\"$2\"\n      shift 2\n      ;;\n    \
         --gradient_accumulation_steps | -g)\n      G=$2\n      ;;\n    *)\n      exit 1\n  esac\ndone",
        "case x in (--config) a ;& --deepspeed) b ;;& *) c;; esac",
        "case $1 in --config) case $2 in --deepspeed) a;; esac;; esac",
        "if x; then case $1 in --config) a;; esac; fi",
    ] {
        let script = format!("{case}\n{train}\n");
        assert_eq!(gpus(&script).as_deref(), Some("4"), "{script}");
        let size = argument(&script, "per_device_train_batch_size");
        assert_eq!(size.as_deref(), Some("8"), "{script}");
    }
    // The commands after a pattern count.
    let inside = format!("case $1 in\n  --small) {train} ;;\n  *) {train}0 ;;\nesac");
    let message = refused(&inside).unwrap();
    assert!(message.contains("at lines 2, 3"), "{message}");
}

#[test]
fn an_unresolved_number_is_refused_where_the_batch_depends_on_it() {
    let train = "torchrun --nproc_per_node 4 train.py";
    for value in ["${SIZE}", "$((SIZE / GPUS))", "$(cat size)", "$1"] {
        for name in ["per_device_train_batch_size", "max_steps"] {
            for script in [
                format!("{train} --{name} {value} --seed 1"),
                format!("SIZE=$(cat size)\n{train} --seed 1 --{name}={value}"),
            ] {
                let message = refused(&script).unwrap_or_default();
                let expected = format!(
                    "`{name}` is unresolved: only the shell or its environment knows `{value}`"
                );
                assert!(message.starts_with(&expected), "{script}: {message}");
            }
        }
        let batch = "--per_device_train_batch_size 2 --gradient_accumulation_steps 4";
        for argument in ["--seed", "--learning_rate", "--trust_remote_code"] {
            let script = format!("{train} {argument} {value} {batch}");
            let command = understood(&script).unwrap();
            assert_eq!(command.arguments.get(&argument[2..]), None, "{script}");
        }
    }
    // The last value of a repeated key counts.
    let twice = format!("{train} --per_device_train_batch_size $N --per_device_train_batch_size 2");
    assert_eq!(refused(&twice), None);
}

#[test]
fn the_handbooks_older_parser_takes_keys_without_dashes_after_a_file() {
    let text = "accelerate launch --num_processes 8 scripts/run_dpo.py recipe.yaml learning_rate=$LR \
                gradient_accumulation_steps=4 output_dir=x";
    assert_eq!(
        argument(text, "gradient_accumulation_steps").as_deref(),
        Some("4")
    );
    assert_eq!(argument(text, "output_dir").as_deref(), Some("x"));
}

#[test]
fn numbers_are_decimal() {
    let key = "per_device_train_batch_size";
    for typed in ["-8", "0"] {
        let text = format!("torchrun --nproc_per_node 4 train.py --{key} {typed}");
        assert_eq!(argument(&text, key).as_deref(), Some(typed));
    }
    for typed in ["0x10", "0b10", "1:30", "016", "1_6", "+8"] {
        let text = format!("torchrun --nproc_per_node 4 train.py --{key}={typed}");
        let command = understood(&text).unwrap();
        let value = command.arguments.get(key).unwrap().resolve(Schema::PyYaml);
        assert_eq!(value, Some(Resolved::Str(typed.into())));
    }
    let launched = |text: &str| {
        let options = understood(text).unwrap().accelerate.tree.unwrap();
        options
            .get("num_processes")
            .and_then(Node::text)
            .map(str::to_owned)
    };
    let rest = "train.py --per_device_train_batch_size 8";
    let typed = launched(&format!("accelerate launch --num_processes 10 {rest}"));
    assert_eq!(typed.as_deref(), Some("10"));
    let hex = understood(&format!("accelerate launch --num_processes 0x4 {rest}"));
    let hex = hex.unwrap().accelerate.tree.unwrap();
    let read = hex.get("num_processes").unwrap().resolve(Schema::PyYaml);
    assert_eq!(read, Some(Resolved::Str("0x4".into())));
    // An unresolved number stays unset; `--recipe-gpus` gives it.
    for unknown in ["$N", "${NUM_GPUS}", "$(($SLURM_NNODES * 8))"] {
        let text =
            format!("accelerate launch --mixed_precision bf16 --num_processes {unknown} {rest}");
        assert_eq!(launched(&text), None, "{unknown}");
    }
}

/// `slurm/train.slurm` of open-r1, shortened.
#[test]
fn a_server_in_a_slurm_script_is_not_the_training() {
    let script = "#!/bin/bash\n#SBATCH --gres=gpu:8\nLAUNCHER=$1\n\
                  srun --nodes=1 --nodelist=$NODE trl vllm-serve --model $MODEL --tensor_parallel_size $TP &\n\
                  srun --nodes=2 bash -c \"$LAUNCHER $CMD\"\n";
    assert_eq!(
        refused(script).as_deref(),
        Some("`$LAUNCHER` is unresolved and may start the training")
    );
}

/// Upstream's parsers refuse the word: `--config` takes one file.
#[test]
fn a_word_after_the_config_is_refused() {
    for line in [
        "python grpo.py --config real.yaml x=1",
        "trl sft --config real.yaml more.yaml",
        "deepspeed --num_gpus 2 t.py --deepspeed_config ds.json x=1",
    ] {
        let message = refused(line).unwrap_or_default();
        assert!(
            message.contains("which takes one file"),
            "{line}: {message}"
        );
    }
}

#[test]
fn a_text_with_a_bracket_is_text() {
    let line = "python t.py --per_device_train_batch_size 4";
    for (option, key, text) in [
        ("--run_name '[dpo] a'", "run_name", "[dpo] a"),
        ("--output_dir '{x}'", "output_dir", "{x}"),
        ("--my_own '[a] b'", "my_own", "[a] b"),
    ] {
        let line = format!("{line} {option}");
        assert_eq!(argument(&line, key).as_deref(), Some(text), "{option}");
    }
    let list = understood(&format!("{line} --report_to '[\"wandb\"]'")).unwrap();
    assert_eq!(list.arguments.get("report_to").unwrap().kind(), "a list");
}

const CALL: &str = "torchrun --nproc_per_node 2 train.py --per_device_train_batch_size 4";

#[test]
fn a_script_with_carriage_returns_is_refused() {
    for script in [
        format!("#!/bin/bash\r\n{CALL}\r\n"),
        CALL.replace(" train", " \\\r\n  train"),
        format!("#!/bin/bash\n{CALL} \\\r\n  --seed 1\n"),
    ] {
        let message = refused(&script).unwrap_or_default();
        assert!(message.contains("carriage return"), "{script:?}: {message}");
    }
}

#[test]
fn white_space_that_does_not_separate_words_is_refused() {
    for blank in ['\u{a0}', '\u{2003}', '\u{3000}', '\u{b}', '\r'] {
        for script in [
            CALL.replace("size 4", &format!("size{blank}4")),
            CALL.replace("node 2", &format!("node{blank}2")),
            CALL.replace("size 4", &format!("size 4{blank}--seed 1")),
        ] {
            let message = refused(&script).unwrap_or_default();
            let number = format!("U+{:04X}", u32::from(blank));
            assert!(
                message.contains(&number) || message.contains("no option"),
                "{script:?}: {message}"
            );
        }
    }
    let meant = format!("{CALL} --run_name 'a\u{a0}b'");
    assert_eq!(argument(&meant, "run_name").as_deref(), Some("a\u{a0}b"));
}

mod inline {
    use crate::export::{Form, emit};
    use crate::plan::{PlanRequest, plan};
    use crate::recipe::schema::request::Request;
    use crate::recipe::tests::script;
    use crate::recipe::{ReadError, Recipe, read};

    const TRAINER: &str =
        "train.py --per_device_train_batch_size 8 --gradient_accumulation_steps 2";

    fn typed(words: &[&str]) -> Result<Recipe, ReadError> {
        read(&Request {
            command: words.iter().map(|word| (*word).to_owned()).collect(),
            ..Request::default()
        })
    }

    /// Processes, micro-batch and accumulation.
    fn batch(recipe: Result<Recipe, ReadError>, from: &str) -> [Option<u64>; 3] {
        let batch = recipe
            .unwrap_or_else(|error| panic!("{from}: {error}"))
            .spec
            .batch;
        [batch.gpus, batch.per_device_batch_size, batch.accumulation]
    }

    fn for_two(recipe: &Recipe) -> String {
        let plan = plan(recipe, &PlanRequest::gpus(2)).unwrap();
        let emitted = emit(recipe, &plan.numbers(recipe), Form::Recipe);
        emitted.unwrap_or_else(|error| panic!("{error}")).text
    }

    #[test]
    fn an_inline_script_is_read_as_commands() {
        let call = format!("torchrun --nproc_per_node 4 {TRAINER}");
        for text in [
            format!("bash -c \"{call}\""),
            format!("sh -c '{call}'\n"),
            format!("/bin/bash -lc '. env.sh && {call}'"),
            format!("set -e\nsrun --nodes 1 bash -eo pipefail -c \"cd x; exec {call}\" > log 2>&1"),
            format!("nohup bash -c '{}' &", call.replace(" --", " \\\n  --")),
            format!("bash -c \"{}\"", call.replace(" --", " \\\n  --")),
            format!("N=4\nbash -c \"{}\"", call.replace(" 4", " $N")),
            format!("bash -c \"{call} --host \\$HOSTNAME --name 'a b'\""),
            format!("CMD=\"{call}\"\nbash -c \"$CMD\""),
            format!("bash -c 'sh -c \"{call}\"'"),
            format!("PET_NPROC_PER_NODE=4 bash -c 'torchrun {TRAINER}'"),
            format!("sbatch --gres=gpu:4 --wrap=\"{call}\""),
            format!("sbatch --wrap '{call}' --gres gpu:4"),
            format!("echo bash -c 'torchrun --nproc_per_node 8 {TRAINER}'\n{call}"),
        ] {
            let expected = [Some(4), Some(8), Some(2)];
            assert_eq!(batch(script(&text), &text), expected, "{text}");
        }
        let name = format!("{call} --name 'a b'");
        for word in [&call, &name] {
            let expected = [Some(4), Some(8), Some(2)];
            assert_eq!(
                batch(typed(&["srun", "bash", "-c", word.as_str()]), word),
                expected
            );
        }
    }

    /// HALOs' Slurm scripts (4831988) hold a double-quoted inline script with escaped quotes inside.
    #[test]
    fn escapes_in_an_inline_script_are_read_as_the_inner_shell_reads_them() {
        let call = format!("torchrun --nproc_per_node 4 {TRAINER}");
        for text in [
            format!("bash -c \"{call} --name \\\"a b\\\"\""),
            format!(
                "bash -c \"if [ ! -d \\\"\\$DIR\\\" ]; then\n  mkdir \\\"\\$DIR\\\"\nfi\n{call}\n\""
            ),
            format!("bash -c \"A=\\`date\\`; echo \\\"é \\\\\\\" )\\\"; {call}\""),
            format!("bash -c \"bash -c \\\"echo \\\\\\\"x\\\\\\\"; {call}\\\"\""),
            format!(
                "N=4\nbash -c \"echo \\\"go\\\"; {}\"",
                call.replace(" 4", " \\\"$N\\\"")
            ),
        ] {
            let expected = [Some(4), Some(8), Some(2)];
            assert_eq!(batch(script(&text), &text), expected, "{text}");
            // A plan replaces the numbers in place.
            let written = for_two(&script(&text).unwrap());
            let expected = if text.starts_with("N=4") {
                text.replace("\\\"$N\\\"", "2")
            } else {
                text.replace("node 4", "node 2")
            };
            assert_eq!(written.trim_end(), expected.replace("steps 2", "steps 4"));
        }
        let kept =
            format!("N=4\nbash -c \"echo \\\"x\\\"; torchrun --nproc_per_node \\$N {TRAINER}\"");
        assert_eq!(batch(script(&kept), &kept)[0], None);
        // Places refer to the whole text.
        let slip = "bash -c \"echo \\\"é\\\"\n  echo \\\"x\\\"; torchrun t.py --per_device_train_batch_size 2.5\"";
        let error = script(slip).unwrap_err();
        let span = error.diagnostics[0].span.unwrap();
        assert_eq!(&slip[span.start..span.end], "2.5");
        assert_eq!((span.line, span.column), (2, 59));
    }

    #[test]
    fn a_plan_is_written_into_the_inline_script() {
        let text =
            format!("#!/bin/bash\nsrun bash -c \"torchrun --nproc_per_node 4 {TRAINER}\" # go\n");
        let written = for_two(&script(&text).unwrap());
        let expected = text
            .replace("node 4", "node 2")
            .replace("steps 2", "steps 4");
        assert_eq!(written, expected);
        // A missing argument is added.
        let short = text.replace(" --gradient_accumulation_steps 2", "");
        let written = for_two(&script(&short).unwrap());
        assert_eq!(written, text.replace("node 4", "node 2"));
    }

    #[test]
    fn variables_between_single_quotes_belong_to_the_inner_shell() {
        let text = format!("N=4\nbash -c 'torchrun --nproc_per_node $N {TRAINER}'");
        assert_eq!(batch(script(&text), &text)[0], None);
        // The script does not export `N`.
        let kept = format!("N=4\nbash -c \"torchrun --nproc_per_node \\$N {TRAINER}\"");
        assert_eq!(batch(script(&kept), &kept)[0], None);
        let inner = format!("bash -c 'N=4; torchrun --nproc_per_node $N {TRAINER}'");
        assert_eq!(batch(script(&inner), &inner)[0], None);
    }

    #[test]
    fn an_inline_script_in_several_quotes_is_read() {
        let call = format!("torchrun --nproc_per_node 4 {TRAINER}");
        let expected = [Some(4), Some(8), Some(2)];
        for text in [
            format!("bash -c 'cd x; '\"{call}\""),
            format!("bash -c \"echo \"x\"; {call}\""),
            format!("python prepare.py --seed 1\nbash -c 'cd x; '\"{call}\""),
        ] {
            assert_eq!(batch(script(&text), &text), expected, "{text}");
            // A plan replaces the numbers in place.
            let written = for_two(&script(&text).unwrap());
            let planned = text
                .replace("node 4", "node 2")
                .replace("steps 2", "steps 4");
            assert_eq!(written.trim_end(), planned);
        }
        let both = format!("{call} --name 'a b' --x \"$HOME\"");
        assert_eq!(batch(typed(&["bash", "-c", &both]), &both), expected);
    }

    #[test]
    fn an_inline_script_with_unsupported_quoting_is_refused() {
        let call = format!("torchrun --nproc_per_node 4 {TRAINER}");
        for text in [
            format!("bash -c $'echo \\n; {call}'"),
            format!("bash -c $'{call}'"),
            format!("bash -c 'cd '$DIR\"; {call}\""),
            format!("bash -c \"echo 'x; {call}\""),
            // Another command would be taken for the training.
            format!("python prepare.py --seed 1\nbash -c 'cd '$DIR\"; {call}\""),
        ] {
            let error = script(&text).unwrap_err();
            let problem = &error.diagnostics[0];
            assert_eq!(problem.rule, "unknown-dialect", "{text}");
            assert!(problem.message.contains("this inline script"), "{text}");
        }
        // An inline script that starts no training is ignored.
        let text = format!("bash -c \"echo 'x\"\n{call}");
        assert_eq!(batch(script(&text), &text)[0], Some(4));
    }

    #[test]
    fn a_hydra_program_in_an_inline_script_is_read() {
        let Some(root) = crate::recipe::corpus::root() else {
            return;
        };
        let program = root.join("ContextualAI__HALOs/4831988636/launch.py");
        let program = program.display();
        let call = |overrides: &str| {
            format!(
                "BETA=$1\nLR=$2\nsrun --nodes=1 bash -c \"\nexport CKPT=o/dpo-${{BETA}}\n\
             accelerate launch --num_processes 4 --machine_rank \\$SLURM_PROCID \\\n  {program} \
             loss=dpo model=llama train_datasets=[ultrabin] test_datasets=[ultrabin] \
             exp_name=dpo-${{BETA}}-${{LR}} ++lr=${{LR}} ++loss.beta=${{BETA}} \\\n  \
             ++model.batch_size=32 ++model.gradient_accumulation_steps=1 {overrides}\n\n\
             python -m train.sample \\$CKPT --gpu_count 2\n\"\n"
            )
        };
        let text = call("");
        let recipe = script(&text).unwrap_or_else(|error| panic!("{error}"));
        let batch = &recipe.spec.batch;
        assert_eq!((batch.global, batch.gpus), (Some(32), Some(4)), "{batch:?}");
        let warned = recipe.diagnostics.iter();
        let warned = warned.filter(|d| d.message.contains("is unresolved"));
        let warned: Vec<&str> = warned.map(|d| d.message.as_str()).collect();
        assert_eq!(warned.len(), 2, "{warned:?}");
        for unresolved in ["++model.batch_size=$SIZE", "loss=$LOSS"] {
            let error = script(&call(unresolved)).unwrap_err();
            let message = &error.diagnostics[0].message;
            assert!(message.contains("is unresolved"), "{message}");
        }
    }
}

/// bash ends a command at a comment between continued lines, and tries to run the rest.
#[test]
fn arguments_after_a_comment_between_continued_lines_are_not_the_commands() {
    let torn = "torchrun --nproc_per_node 4 train.py \\\n  --per_device_train_batch_size 2 \\\n  # --bf16 \\\n  \
                --gradient_accumulation_steps 8\n";
    let (command, diagnostics) = parsed(torn);
    let command = command.unwrap();
    assert!(
        command
            .arguments
            .get("gradient_accumulation_steps")
            .is_none()
    );
    let messages: Vec<&str> = diagnostics.iter().map(|d| &*d.message).collect();
    assert_eq!(
        messages,
        [
            "this line begins with `--gradient_accumulation_steps`: the command before it has ended, without it and what follows"
        ]
    );
    let whole = torn.replace("  # --bf16 \\\n", "");
    assert_eq!(
        argument(&whole, "gradient_accumulation_steps").as_deref(),
        Some("8")
    );
}

#[test]
fn a_script_that_runs_another_one_names_it() {
    for text in [
        "cd code\nbash scripts/train.sh --gradient_accumulation_steps 4\n",
        "sbatch --nodes=2 slurm/train.slurm --task sft --config x.yaml\n",
        "srun --ntasks 1 singularity exec image.sif bash -x ./train.sh\n",
        "./scripts/train.sh --per_device_train_batch_size 4\n",
    ] {
        let error = understood(text).unwrap_err();
        assert!(
            error.ends_with("is another script, which is not read from here"),
            "{text}: {error}"
        );
    }
    // One that prepares the shell is none.
    let prepared =
        "source setup.sh\ntorchrun --nproc_per_node 2 train.py --per_device_train_batch_size 4\n";
    assert_eq!(gpus(prepared).as_deref(), Some("2"));
}

#[test]
fn an_unresolved_word_that_eval_runs_is_named() {
    let error =
        understood("cmd=\"torchrun train.py --cache $HOME_CACHE\"\neval $cmd\n").unwrap_err();
    assert_eq!(error, "`$cmd` is unresolved and may start the training");
}

#[test]
fn a_group_runs_in_the_shell_of_its_script() {
    let group = "{\n  bs=8\n  torchrun --nproc_per_node 2 train.py --per_device_train_batch_size ${bs}\n}\n";
    assert_eq!(
        argument(group, "per_device_train_batch_size").as_deref(),
        Some("8")
    );
    // A function may run later, or never.
    let function = group.replacen('{', "train() {", 1);
    assert!(understood(&function).is_err());
}

#[test]
fn evaluations_and_inline_python_are_no_trainings() {
    for text in [
        "python -m lighteval --model_args x --batch_size 1\n",
        "python3 -c 'import json' --batch_size 1\n",
    ] {
        assert_eq!(
            understood(text).unwrap_err(),
            "no command here starts a training",
            "{text}"
        );
    }
}

/// As in the handbook's `launch.slurm`.
#[test]
fn a_line_end_at_the_end_of_an_inline_script_is_none() {
    let script = "CMD=\"train.py --per_device_train_batch_size 4\n\"\nsrun bash -c \"torchrun --nproc_per_node 8 $CMD\"\n";
    assert_eq!(
        argument(script, "per_device_train_batch_size").as_deref(),
        Some("4")
    );
}
