use proptest::prelude::*;

use crate::recipe::emit::tests::{Job, numbers};
use crate::recipe::emit::{Form, Numbers, emit};
use crate::recipe::{Request, read};

const TRAINER: &str = "t.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2";

/// `launcher` rewritten for the plan, without the trainer's arguments; or the refusal.
fn written(launcher: &str, plan: &Numbers) -> String {
    let job = Job::new(&[], &format!("{launcher} {TRAINER}"));
    match emit(&job.recipe(None), plan, Form::Recipe) {
        Ok(emitted) => emitted.text.split(" t.py").next().unwrap().to_owned(),
        Err(error) => error.to_string(),
    }
}

fn on(nodes: u64, plan: Numbers) -> Numbers {
    Numbers {
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
    let eight = Numbers {
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
    let none = Numbers {
        world: 2,
        ..numbers(1, 4, 4)
    };
    let refused = written(split, &none);
    assert!(refused.contains("nothing to shard"), "{refused}");
    let cpu = written("accelerate launch --cpu", &numbers(4, 4, 1));
    assert!(cpu.starts_with("`--cpu` starts one process"), "{cpu}");
    let line = "trl sft --accelerate_config zero1 --per_device_train_batch_size 8 --dataset_name d";
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
        dialect: Some(crate::recipe::Dialect::HandbookTrl),
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
    let written = |command: &str, plan: &Numbers| {
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
    let config = |text: &str, plan: &Numbers| {
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
    let none = Numbers {
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
        (micro, accumulation) in (1..9_u64, 1..9_u64),
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
        let plan = Numbers {
            world: ranks * tensor,
            nodes: asked.then_some(nodes),
            ..numbers(ranks, micro, accumulation)
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
        let read = (batch.gpus, batch.micro, batch.accumulation);
        prop_assert_eq!(read, (Some(plan.world), Some(micro), Some(accumulation)), "{}", emitted.text);
        let parallel = &again.spec.parallel;
        if let (Some(shards), Some(replicas)) = (parallel.data_shard, parallel.data_replicate) {
            prop_assert_eq!(shards * replicas, ranks, "{}", emitted.text);
        }
        prop_assert_eq!(&emit(&again, &plan, Form::Recipe).unwrap().text, &emitted.text);
    }
}

#[test]
fn spawn_scripts_get_the_processes_of_the_plan() {
    for (launcher, expected) in [
        (
            "gaudi_spawn.py --use_mpi --world_size 8",
            "gaudi_spawn.py --use_mpi --world_size 4",
        ),
        ("xla_spawn.py --num_cores=8", "xla_spawn.py --num_cores=4"),
        ("xla_spawn.py", "xla_spawn.py"),
    ] {
        let launcher = format!("python {launcher}");
        let expected = format!("python {expected}");
        assert_eq!(written(&launcher, &numbers(4, 4, 2)), expected);
    }
    let two = on(2, numbers(16, 4, 1));
    let refused = written("python gaudi_spawn.py --world_size 8", &two);
    assert!(
        refused.starts_with("the command's launcher starts processes of one machine"),
        "{refused}"
    );
}

#[test]
fn a_wrapped_command_is_rewritten_inside_its_wrapper() {
    let launcher = "python mason.py --gpus 8 -- torchrun --nproc_per_node 8";
    let expected = "python mason.py --gpus 8 -- torchrun --nproc_per_node 4";
    assert_eq!(written(launcher, &numbers(4, 4, 2)), expected);
}
