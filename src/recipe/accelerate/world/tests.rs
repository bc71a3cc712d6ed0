use crate::recipe::{ReadError, Recipe, Request, Setting, read};

const TRAINER: &str = "train.py --per_device_train_batch_size 4 --gradient_accumulation_steps 2";

/// Reads a command; `@` is the path of a config with the given text.
fn job(config: &str, launcher: &str) -> Result<Recipe, ReadError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.yaml");
    std::fs::write(&path, config).unwrap();
    for (name, text) in [
        (
            "auto.json",
            r#"{"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "zero_optimization": {"stage": 2}}"#,
        ),
        (
            "none.json",
            r#"{"train_batch_size": "auto", "gradient_accumulation_steps": "auto"}"#,
        ),
    ] {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let here = folder.path().display().to_string();
    let line = format!("{launcher} {TRAINER}").replace('@', &path.display().to_string());
    let line = line.replace('%', &here);
    read(&Request {
        command: line.split_whitespace().map(str::to_owned).collect(),
        ..Request::default()
    })
}

/// The processes of a job, and its findings: rule and line.
fn findings(config: &str, launcher: &str) -> (Option<u64>, Vec<String>) {
    let (gpus, diagnostics) = match job(config, launcher) {
        Ok(recipe) => (recipe.spec.batch.gpus, recipe.diagnostics),
        Err(error) => (Some(0), error.diagnostics),
    };
    let line = |d: &crate::recipe::Diagnostic| {
        let line = d.span.map_or(0, |span| span.line);
        format!("{line}: {}[{}]", d.severity, d.rule)
    };
    (gpus, diagnostics.iter().map(line).collect())
}

const LAUNCH: &str = "accelerate launch --config_file @";
const EIGHT: &str = "distributed_type: MULTI_GPU\nnum_processes: 8\n";

#[test]
fn one_process_starts_without_a_multi_process_type() {
    let cpu = "distributed_type: MULTI_CPU\nnum_processes: 4\nuse_cpu: true\n";
    let warned = |line: u32| vec![format!("{line}: warning[unsupported-value]")];
    assert_eq!(findings(cpu, LAUNCH), (Some(1), warned(2)));
    let by_mpirun = format!("{cpu}mpirun_config: {{mpirun_hostfile: hosts}}\n");
    assert_eq!(findings(&by_mpirun, LAUNCH), (Some(4), vec![]));
    assert_eq!(findings(EIGHT, LAUNCH), (Some(8), vec![]));
    assert_eq!(
        findings(EIGHT, &format!("{LAUNCH} --cpu")),
        (Some(1), warned(2))
    );
    let typed = "accelerate launch --cpu --num_processes 4";
    assert_eq!(findings("", typed), (Some(1), warned(1)));
}

#[test]
fn tpus_are_refused_by_name() {
    let xla = "distributed_type: XLA\nnum_processes: 8\n";
    let refused = |line: u32| (Some(0), vec![format!("{line}: error[unsupported-value]")]);
    assert_eq!(findings(xla, LAUNCH), refused(1));
    assert_eq!(findings(EIGHT, &format!("{LAUNCH} --tpu")), refused(1));
    assert_eq!(
        findings("", "accelerate launch --tpu --num_processes 8"),
        refused(1)
    );
    // The command line overrides it.
    assert_eq!(
        findings(xla, &format!("{LAUNCH} --multi_gpu")),
        (Some(8), vec![])
    );
}

#[test]
fn on_several_machines_a_deepspeed_filter_gives_the_processes() {
    let config = |more: &str| {
        format!(
            "distributed_type: DEEPSPEED\nnum_processes: 16\nnum_machines: 2\n\
             deepspeed_config:\n  zero_stage: 2\n{more}"
        )
    };
    let included = config("  deepspeed_inclusion_filter: \"a:0,1@b:0,1\"\n");
    assert_eq!(findings(&included, LAUNCH), (Some(4), vec![]));
    let standard = format!("{included}  deepspeed_multinode_launcher: standard\n");
    assert_eq!(findings(&standard, LAUNCH), (Some(16), vec![]));
    let alone = included.replace("num_machines: 2", "num_machines: 1");
    assert_eq!(findings(&alone, LAUNCH), (Some(16), vec![]));
    for unknown in ["inclusion_filter: \"a@b:0\"", "exclusion_filter: \"a:0\""] {
        let config = config(&format!("  deepspeed_{unknown}\n"));
        let warned = vec!["6: warning[unsupported-value]".to_owned()];
        assert_eq!(findings(&config, LAUNCH), (None, warned), "{unknown}");
    }
}

#[test]
fn combinations_that_accelerate_or_deepspeed_refuse_are_refused() {
    let deepspeed = |more: &str| {
        format!(
            "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  \
             deepspeed_config_file: {more}"
        )
    };
    for (config, launcher, expected) in [
        (
            "compute_environment: LOCAL_MACHINE\nnum_processes: 4\n",
            LAUNCH,
            "1: error[mandatory-missing]",
        ),
        (
            "distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: \"0\"\n",
            LAUNCH,
            "3: error[parallelism-product]",
        ),
        (
            EIGHT,
            "accelerate launch --config_file @ --gpu_ids 0,1",
            "1: error[parallelism-product]",
        ),
        (
            "",
            "accelerate launch --use_fsdp --cpu",
            "1: error[unsupported-value]",
        ),
        (
            "",
            "accelerate launch --multi_gpu --num_processes 1",
            "1: error[unsupported-value]",
        ),
        (
            "",
            "deepspeed --num_gpus 8 --include localhost:0,1",
            "1: error[unsupported-value]",
        ),
        (
            "",
            "deepspeed --num_nodes 2 --exclude other:0",
            "1: error[unsupported-value]",
        ),
        (
            &deepspeed("auto.json\n  gradient_accumulation_steps: 2\n"),
            LAUNCH,
            "5: error[unsupported-value]",
        ),
        (
            &deepspeed("auto.json\nmixed_precision: bf16\n"),
            LAUNCH,
            "5: error[unsupported-value]",
        ),
        (
            &deepspeed("none.json\n"),
            LAUNCH,
            "1: error[mandatory-missing]",
        ),
    ] {
        let (gpus, found) = findings(config, launcher);
        assert_eq!(
            (gpus, found),
            (Some(0), vec![expected.to_owned()]),
            "{config}{launcher}"
        );
    }
    let file = deepspeed("auto.json\n");
    assert_eq!(findings(&file, LAUNCH), (Some(8), vec![]));
    let typed = format!("{LAUNCH} --mixed_precision bf16");
    assert_eq!(findings(&file, &typed), (Some(8), vec![]));
    let ids = "distributed_type: MULTI_GPU\nnum_processes: 4\ngpu_ids: 0,1,2,3\n";
    assert_eq!(findings(ids, LAUNCH), (Some(4), vec![]));
}

#[test]
fn a_flag_that_differs_from_the_launcher_is_a_warning() {
    let line = format!("accelerate launch --num_processes 8 {TRAINER}");
    let with = |gpus: &str| {
        let recipe = read(&Request {
            command: line.split_whitespace().map(str::to_owned).collect(),
            settings: vec![Setting {
                flag: "--recipe-gpus",
                path: "batch.gpus",
                value: gpus.to_owned(),
            }],
            ..Request::default()
        });
        recipe.unwrap()
    };
    assert_eq!(with("8").diagnostics, []);
    let four = with("4");
    assert_eq!(four.spec.batch.gpus, Some(4));
    assert_eq!(four.diagnostics[0].rule, "gpu-count-conflict");
    assert_eq!(
        four.diagnostics[0].message,
        "`num_processes` gives a world of 8, but `--recipe-gpus` is 4"
    );
}

#[test]
fn a_second_trl_config_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("sft.yaml");
    let text = "model_name_or_path: m\ndataset_name: d\naccelerate_config: zero2\n";
    std::fs::write(&path, text).unwrap();
    let line = format!(
        "trl sft --config {} --accelerate_config multi_gpu",
        path.display()
    );
    let refused = read(&Request {
        command: line.split_whitespace().map(str::to_owned).collect(),
        ..Request::default()
    });
    let found = refused.unwrap_err().diagnostics;
    assert!(found[0].message.contains("refuses the second"), "{found:?}");
}

#[test]
fn sizes_count_only_where_accelerate_passes_them_on() {
    let sized = |kind: &str, sizes: &str| {
        format!("distributed_type: {kind}\nnum_processes: 8\nparallelism_config: {{{sizes}}}\n")
    };
    let own = "parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 4";
    let fsdp2 = format!("{}fsdp_config: {{fsdp_version: 2}}\n", sized("FSDP", own));
    let by_hand = "accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 \
                   --parallelism_config_tp_size 2 --parallelism_config_dp_shard_size 4";
    for (config, launcher, tensor, expected) in [
        (sized("MULTI_GPU", own), LAUNCH.to_owned(), 2, None),
        (fsdp2.clone(), LAUNCH.to_owned(), 2, None),
        (
            String::new(),
            format!("{by_hand} --use_parallelism_config"),
            2,
            None,
        ),
        (
            String::new(),
            by_hand.to_owned(),
            1,
            Some("1: warning[unsupported-value]"),
        ),
        (
            fsdp2.clone(),
            format!("{LAUNCH} --use_fsdp"),
            1,
            Some("3: warning[unsupported-value]"),
        ),
        (
            fsdp2,
            format!("{LAUNCH} --use_fsdp --fsdp_version 2 --use_parallelism_config"),
            2,
            None,
        ),
        (
            sized("MULTI_GPU", "tp_size: 2, dp_shard_size: 4"),
            LAUNCH.to_owned(),
            1,
            Some("3: warning[unsupported-value]"),
        ),
        (
            EIGHT.to_owned(),
            format!("{LAUNCH} --parallelism_config_tp_size 2"),
            1,
            Some("1: warning[unsupported-value]"),
        ),
    ] {
        let recipe = job(&config, &launcher);
        let recipe = recipe.unwrap_or_else(|error| panic!("{config}{launcher}: {error}"));
        assert_eq!(recipe.spec.parallel.tensor, tensor, "{config}{launcher}");
        let (_, found) = findings(&config, &launcher);
        let expected: Vec<String> = expected.into_iter().map(str::to_owned).collect();
        assert_eq!(found, expected, "{config}{launcher}");
    }
}

#[test]
fn parallelism_that_accelerate_refuses_is_refused() {
    let sized = |kind: &str, more: &str| {
        format!(
            "distributed_type: {kind}\nnum_processes: 2\nparallelism_config:\n  \
             parallelism_config_tp_size: 2\n{more}"
        )
    };
    let typed = "accelerate launch --num_processes 8 --parallelism_config_tp_size 2 \
                 --parallelism_config_dp_shard_size 4 --use_parallelism_config";
    for (config, launcher) in [
        (
            sized("FSDP", "  parallelism_config_dp_shard_size: 1\n"),
            LAUNCH.to_owned(),
        ),
        (
            sized("FSDP", "fsdp_config: {fsdp_version: 2}\n"),
            LAUNCH.to_owned(),
        ),
        (sized("MEGATRON_LM", ""), LAUNCH.to_owned()),
        (String::new(), typed.to_owned()),
        (String::new(), format!("{typed} --use_fsdp")),
    ] {
        let error = job(&config, &launcher).unwrap_err();
        let rules: Vec<&str> = error.diagnostics.iter().map(|d| d.rule.as_str()).collect();
        assert_eq!(rules, ["parallelism-product"], "{config}{launcher}");
    }
    // Unstated sizes are 1, and the planner checks the product.
    let recipe = job(&sized("MULTI_GPU", ""), LAUNCH).unwrap();
    let parallel = recipe.spec.parallel;
    assert_eq!(
        (parallel.data_replicate, parallel.data_shard),
        (Some(1), Some(1))
    );
}
