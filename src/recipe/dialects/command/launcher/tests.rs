use super::nodes;
use crate::recipe::dialects::command::tests::{argument, gpus, refused, understood};

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
    let launch = command.launch.unwrap();
    assert_eq!(launch.get("num_processes").unwrap().text(), Some("4"));
}

#[test]
fn the_program_may_be_missing() {
    for between in ["=", " "] {
        let script = format!("torchrun --nproc_per_node 4 --per_device_train_batch_size{between}8");
        assert_eq!(gpus(&script).as_deref(), Some("4"), "{script}");
        let size = argument(&script, "per_device_train_batch_size");
        assert_eq!(size.as_deref(), Some("8"), "{script}");
    }
    let message = refused("accelerate launch --num_proces -").unwrap();
    assert!(message.contains("no option `--num_proces`"), "{message}");
}

#[test]
fn options_that_a_launcher_refuses_are_refused() {
    for (launcher, expected) in [
        ("torchrun --bogus 4", "torchrun has no option `--bogus`"),
        ("torchrun --use_env", "torchrun has no option `--use_env`"),
        (
            "torchrun --nproc-per_node 4",
            "no option `--nproc-per_node`",
        ),
        ("torchrun -n 4", "no option `-n`"),
        (
            "torchrun --nproc 4",
            "`--nproc` may be `--nproc_per_node` or `--nproc-per-node`",
        ),
        ("torchrun --no 4", "`--no` may be"),
        (
            "torchrun --nnodes --nproc_per_node 4",
            "`--nnodes` of torchrun takes a value, but has none",
        ),
        ("torchrun --standalone=1", "takes no value"),
        ("deepspeed --num 4", "`--num` may be"),
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
    let launch = understood(trl).unwrap().launch.unwrap();
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
