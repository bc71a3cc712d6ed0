use super::nodes;
use crate::recipe::dialects::command::tests::{argument, gpus, refused, understood};
use crate::recipe::tests::script;

const TRAINER: &str = "train.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2";

#[test]
fn names_may_be_abbreviated_where_the_launchers_parser_allows_it() {
    for (launcher, expected) in [
        ("torchrun --nnode 1 --nproc_per_node 4", Some("4")),
        ("torchrun --nno 4 --nproc_per_n 2", Some("8")),
        ("torchrun --nproc-per 4 --standalone", Some("4")),
        ("torchrun --nproc-per=4 --stand", Some("4")),
        (
            "torchrun --nno=2 --master_a h --nproc_per_node 4",
            Some("8"),
        ),
        ("torchrun -r3 -t 3 --nproc_per_node 4", Some("4")),
        ("torchrun -r=3 --nproc_per_node=4", Some("4")),
        ("torchrun --nproc_per_node 4 --", Some("4")),
        (
            "python -m torch.distributed.launch --use_env --nproc_per_node 4",
            Some("4"),
        ),
        (
            "python -mtorch.distributed.run --nproc_per_node 4",
            Some("4"),
        ),
        ("deepspeed --num_g 4 --num_no 2", Some("8")),
        ("deepspeed --num_accelerators 4", Some("4")),
        ("deepspeed --inc localhost:0,1", Some("2")),
        ("deepspeed -ilocalhost:0,1", Some("2")),
        (
            "deepspeed --enable_each_rank_log logs --num_gpus 4",
            Some("4"),
        ),
    ] {
        let script = format!("{launcher} {TRAINER}");
        assert_eq!(gpus(&script).as_deref(), expected, "{script}");
        let size = argument(&script, "per_device_train_batch_size");
        assert_eq!(size.as_deref(), Some("4"), "{script}");
    }
    let accelerate = "accelerate launch -q --num-processes=4 --gpu_ids 0,1,2,3 -t3";
    let command = understood(&format!("{accelerate} {TRAINER}")).unwrap();
    let launch = command.accelerate.tree.unwrap();
    assert_eq!(launch.get("num_processes").unwrap().text(), Some("4"));
}

#[test]
fn options_that_a_launcher_refuses_are_refused() {
    for (launcher, expected) in [
        ("torchrun --bogus 4", "torchrun has no option `--bogus`"),
        (
            "torchrun --per_device_train_batch_size 8",
            "torchrun has no option `--per_device_train_batch_size`",
        ),
        ("torchrun --use_env", "torchrun has no option `--use_env`"),
        (
            "torchrun --nproc-per_node 4",
            "no option `--nproc-per_node`",
        ),
        ("torchrun -n 4", "no option `-n`"),
        (
            "torchrun --nproc 4",
            "torchrun has no option `--nproc`, or several",
        ),
        ("torchrun --no 4", "no option `--no`, or several"),
        (
            "torchrun --nnodes --nproc_per_node 4",
            "`--nnodes` of torchrun takes a value, but has none",
        ),
        ("torchrun --standalone=1", "takes no value"),
        ("deepspeed --num 4", "no option `--num`, or several"),
        (
            "deepspeed --num-gpus 4",
            "DeepSpeed has no option `--num-gpus`",
        ),
        ("deepspeed -m", "DeepSpeed has no option `-m`"),
        (
            "accelerate launch --num_process 4",
            "accelerate launch has no option `--num_process`",
        ),
        ("accelerate launch --bogus --num_processes 4", "`--bogus`"),
    ] {
        let script = format!("{launcher} {TRAINER}");
        let message = refused(&script).unwrap_or_default();
        assert!(message.contains(expected), "{script}: {message}");
    }
    for program in ["xla_spawn.py --num_cores 8", "../gaudi_spawn.py --use_mpi"] {
        let message = refused(&format!("python {program} {TRAINER}")).unwrap_or_default();
        let expected = "starts the program in several processes, and its options are not read";
        assert!(message.contains(expected), "{program}: {message}");
    }
    for script in [
        "trl sft --model_name_or_path m --num_processes",
        "trl sft --num_processes --model_name_or_path m",
    ] {
        let message = refused(script).unwrap_or_default();
        let expected = "`--num_processes` of accelerate launch takes a value";
        assert!(message.contains(expected), "{script}: {message}");
    }
}

#[test]
fn a_launcher_is_found_after_a_wrapper() {
    for before in [
        "uv run --with trl",
        "uv run --extra deepspeed --with accelerate",
        "conda run --no-capture-output -n trl",
        "srun -J deepspeed --exclusive",
        "python /opt/conda/bin/",
        "time -p",
    ] {
        let space = if before.ends_with('/') { "" } else { " " };
        let script = format!("{before}{space}torchrun --nproc_per_node 2 {TRAINER}");
        assert_eq!(gpus(&script).as_deref(), Some("2"), "{script}");
        let size = argument(&script, "per_device_train_batch_size");
        assert_eq!(size.as_deref(), Some("4"), "{script}");
    }
    let trl = "python -m trl sft --model_name_or_path x --num_processes 4";
    let launch = understood(trl).unwrap().accelerate.tree.unwrap();
    assert_eq!(launch.get("num_processes").unwrap().text(), Some("4"));
}

#[test]
fn a_node_range_with_equal_ends_is_a_number() {
    for (text, expected) in [
        ("2", Some(2)),
        ("2:2", Some(2)),
        ("1:4", None),
        ("2:", None),
        ("$N", None),
        ("2:2:2", None),
    ] {
        assert_eq!(nodes(text), expected, "{text}");
    }
    let script = format!("torchrun --nnodes 2:2 --nproc_per_node 2 {TRAINER}");
    assert_eq!(gpus(&script).as_deref(), Some("4"));
}

/// `scripts/train/debug/oc_sft_multinode.sh` of open-instruct, shortened.
#[test]
fn a_program_that_forwards_a_command_is_not_the_trainer() {
    let recipe = script(
        "uv run python mason.py --num_nodes 2 --gpus 8 --env A=1 --env B=2 --seed 7 \\\n  \
         -- torchrun --nnodes=2 --nproc_per_node=8 train.py --per_device_train_batch_size 1 \\\n  \
         --gradient_accumulation_steps 4 --output_dir out\n",
    )
    .unwrap_or_else(|e| panic!("{:?}", e.diagnostics));
    let batch = &recipe.spec.batch;
    let numbers = (batch.per_device_batch_size, batch.accumulation, batch.gpus);
    assert_eq!(numbers, (Some(1), Some(4), Some(16)));
    assert_eq!(recipe.spec.seed, 42, "`--seed` belongs to mason.py");
    assert_eq!(recipe.diagnostics, []);
}

#[test]
fn forwarded_commands_are_separated() {
    let training = "python train.py --per_device_train_batch_size 2";
    let one = format!("python mason.py -- source setup.sh \\&\\& {training}\n");
    assert_eq!(
        script(&one).unwrap().spec.batch.per_device_batch_size,
        Some(2)
    );
    let two = format!("python mason.py -- python convert.py \\&\\& {training}\n");
    let error = script(&two).unwrap_err();
    let problem = &error.diagnostics[0];
    assert_eq!(problem.rule, "global-batch-unknown");
    assert!(problem.message.starts_with("`mason.py` forwards several"));
}

#[test]
fn a_double_dash_that_forwards_nothing_keeps_the_command() {
    let recipe = script("python train.py --per_device_train_batch_size 2 --x y -- z\n").unwrap();
    assert_eq!(recipe.spec.batch.per_device_batch_size, Some(2));
}
