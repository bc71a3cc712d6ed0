use crate::recipe::schema::dialect::Dialect;
use crate::recipe::schema::request::Request;
use crate::recipe::schema::spec::{ElasticVersion, Precision, Strategy};
use crate::recipe::{ReadError, Recipe, read, read_text};

fn config(text: &str) -> Result<Recipe, ReadError> {
    let request = Request {
        path: "ds_config.json".into(),
        ..Request::default()
    };
    read_text(&request, text.to_owned())
}

fn problems(text: &str) -> String {
    let diagnostics = match config(text) {
        Ok(recipe) => recipe.diagnostics,
        Err(error) => error.diagnostics,
    };
    let lines = diagnostics
        .iter()
        .map(|d| format!("{}[{}] {} ({})", d.severity, d.rule, d.message, d.help));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_config_alone_is_a_recipe() {
    let recipe = config(
        "{\"train_batch_size\": 64, \"train_micro_batch_size_per_gpu\": 4, \
         \"gradient_accumulation_steps\": 2, \"zero_optimization\": {\"stage\": 3}, \
         \"bf16\": {\"enabled\": true}, \"gradient_clipping\": 0.5, \
         \"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": 3e-5, \"eps\": 1e-8}}}",
    )
    .unwrap();
    assert_eq!(recipe.dialect, Dialect::Deepspeed);
    let batch = &recipe.spec.batch;
    assert_eq!(
        (
            batch.global,
            batch.per_device_batch_size,
            batch.accumulation
        ),
        (Some(64), Some(4), Some(2))
    );
    assert_eq!(batch.gpus, Some(8), "the whole triple implies its world");
    assert_eq!(recipe.spec.parallel.strategy, Strategy::Fsdp);
    assert_eq!(recipe.spec.model.precision, Precision::Bf16);
    assert_eq!(recipe.spec.optimizer.gradient_clip, Some(0.5));
    assert_eq!(recipe.spec.learning_rate.peak, 3e-5);
    assert_eq!(recipe.diagnostics, []);
}

#[test]
fn elasticity_is_read_with_upstreams_defaults() {
    let recipe = config(
        "{\"train_batch_size\": 7, \"elasticity\": {\"enabled\": true, \"max_train_batch_size\": 128, \
         \"micro_batch_sizes\": [1, 2], \"version\": 0.1, \"ignore_non_elastic_batch_info\": true}}",
    )
    .unwrap();
    let elastic = recipe.spec.batch.elastic.unwrap();
    assert_eq!(
        (elastic.max_batch, elastic.micro_batches),
        (128, vec![1, 2])
    );
    assert_eq!((elastic.min_gpus, elastic.max_gpus), (1, 10_000));
    assert_eq!(elastic.version, ElasticVersion::V01);
    assert_eq!(
        recipe.spec.batch.global, None,
        "the triple beside elasticity is ignored"
    );
    let off = config("{\"train_batch_size\": 8, \"elasticity\": {\"enabled\": false}}").unwrap();
    assert_eq!(
        (off.spec.batch.global, off.spec.batch.elastic),
        (Some(8), None)
    );
}

#[test]
fn configs_that_deepspeed_refuses_are_refused() {
    let cases = [
        "{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 5, \"gradient_accumulation_steps\": 3}",
        "{\"train_batch_size\": 0}",
        "{\"zero_optimization\": {}, \"gradient_accumulation_steps\": 2}",
        "{\"train_batch_size\": \"32\"}",
        "{\"train_batch_size\": 32, \"zero_optimization\": {\"stage\": 4}}",
        "{\"train_batch_size\": 32, \"train_micro_batchsize_per_gpu\": 4}",
        "{\"train_batch_size\": 32, \"elasticity\": {\"enabled\": true, \"max_train_batch_size\": 64, \"micro_batch_sizes\": [2]}}",
        "{\"zero_optimization\": {}, \"elasticity\": {\"enabled\": true, \"micro_batch_sizes\": []}}",
        "{\"zero_optimization\": {}, \"elasticity\": {\"enabled\": true, \"max_train_batch_size\": 64, \"micro_batch_sizes\": [2], \"version\": 0.3, \"min_gpus\": 9, \"max_gpus\": 8}}",
        "{\"zero_optimization\": {}, \"elasticity\": {\"enabled\": true, \"max_train_batch_size\": 64, \"micro_batch_sizes\": [2], \"version\": 0.1, \"model_parallel_size\": 2}}",
    ];
    let found: Vec<String> = cases
        .iter()
        .map(|c| format!("{c}\n{}\n", problems(c)))
        .collect();
    insta::assert_snapshot!(found.join("\n"));
}

#[test]
fn the_config_of_a_custom_program_is_found_in_its_command() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ds.json");
    std::fs::write(
        &path,
        "{\"train_batch_size\": 96, \"train_micro_batch_size_per_gpu\": 8}",
    )
    .unwrap();
    let line = format!(
        "deepspeed --num_gpus 4 train.py --deepspeed --deepspeed_config {} --output_dir out",
        path.display()
    );
    let recipe = crate::recipe::read(&Request {
        command: line.split(' ').map(str::to_owned).collect(),
        ..Request::default()
    })
    .unwrap();
    assert_eq!(recipe.dialect, Dialect::Deepspeed);
    let batch = &recipe.spec.batch;
    assert_eq!(
        (batch.global, batch.per_device_batch_size, batch.gpus),
        (Some(96), Some(8), Some(4))
    );
}

/// With DeepSpeed's micro-batch alone a plan would be a part of the trainer's batch.
#[test]
fn an_accumulation_that_a_trainer_gives_leaves_the_batch_unknown() {
    let text = |accumulation: &str| {
        format!(
            "{{\"train_micro_batch_size_per_gpu\": 2, \"zero_optimization\": {{\"stage\": 2}}{accumulation}}}"
        )
    };
    let auto = config(&text(", \"gradient_accumulation_steps\": \"auto\"")).unwrap();
    assert_eq!(auto.spec.batch.per_device_batch_size, None);
    let help = &auto.diagnostics[0].help;
    assert!(help.contains("the micro-batch is 2"), "{help}");
    // Without the key DeepSpeed takes 1.
    let batch = config(&text("")).unwrap().spec.batch;
    assert_eq!(
        (batch.per_device_batch_size, batch.accumulation),
        (Some(2), None)
    );
}

#[test]
fn comments_are_read_where_deepspeed_reads_the_file() {
    let text = "{\n  // global\n  \"train_batch_size\": 64, /* 8 × 8 */\n  \
                \"train_micro_batch_size_per_gpu\": 4, # one\n  \"zero_optimization\": {\"stage\": 2}\n}\n";
    let recipe = config(text).unwrap();
    assert_eq!(recipe.dialect, Dialect::Deepspeed);
    assert_eq!(
        (
            recipe.spec.batch.global,
            recipe.spec.batch.per_device_batch_size
        ),
        (Some(64), Some(4))
    );
    assert_eq!(recipe.spec.parallel.strategy, Strategy::Zero2);
    let place = &recipe.value_sources["batch.per_device_batch_size"];
    assert_eq!((place.span.line, place.span.column), (4, 37));
    // The file's name does not matter.
    let request = Request {
        path: "recipe.yaml".into(),
        ..Request::default()
    };
    assert_eq!(read_text(&request, text.to_owned()).unwrap().spec, {
        let mut spec = recipe.spec.clone();
        spec.name = "recipe".to_owned();
        spec
    });
    // Its JSON hook refuses duplicate keys.
    let twice = "{\"train_batch_size\": 8, \"train_batch_size\": 8}";
    assert!(
        problems(twice).starts_with("error[duplicate-key]"),
        "{}",
        problems(twice)
    );
    let twice = "{\"train_batch_size\": 8, # a\n \"train_batch_size\": 8\n}";
    assert!(
        problems(twice).starts_with("error[duplicate-key]"),
        "{}",
        problems(twice)
    );
}

#[test]
fn a_trainer_reads_plain_json_only() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("ds.json");
    let line = format!(
        "deepspeed --num_gpus 2 t.py --deepspeed {} --per_device_train_batch_size 4",
        file.display()
    );
    let job = |text: &str| {
        std::fs::write(&file, text).unwrap();
        read(&Request {
            command: line.split(' ').map(str::to_owned).collect(),
            ..Request::default()
        })
    };
    let plain =
        "{\n  \"train_batch_size\": \"auto\",\n  \"zero_optimization\": {\"stage\": 2}\n}\n";
    assert_eq!(job(plain).unwrap().spec.parallel.strategy, Strategy::Zero2);
    for comment in ["// no", "# no", "/* no */"] {
        let text = plain.replace("2}", &format!("2}} {comment}"));
        let error = job(&text).unwrap_err();
        let problem = &error.diagnostics[0];
        assert!(
            problem.message.contains("plain JSON"),
            "{}",
            problem.message
        );
        assert_eq!(problem.span.unwrap().line, 3, "{comment}");
    }
}

#[test]
fn a_stage_without_a_trainer_is_a_number() {
    for stage in ["\"auto\"", "null", "4"] {
        let text =
            format!("{{\"train_batch_size\": 8, \"zero_optimization\": {{\"stage\": {stage}}}}}");
        let found = problems(&text);
        assert!(found.starts_with("error[out-of-range]"), "{stage}: {found}");
    }
}

#[test]
fn hjson_that_is_not_json_with_comments_is_refused_with_its_line() {
    for text in [
        "{\n  train_batch_size: 8 // samples\n}",
        "{\n  \"train_batch_size\": 8,,\n}",
        "{\n  \"train_batch_size\": 8 # samples\n  \"zero_optimization\": {}\n}",
        "train_batch_size: 8\n",
        "{\"train_batch_size\": 8, \"note\": 'x'}",
        // YAML alone would read `// ZeRO "zero_optimization"` as one key.
        "{\n  \"train_batch_size\": 8,\n  // ZeRO\n  \"zero_optimization\": {\"stage\": 2},\n  'url': 'http://x'\n}",
        "{\n  // batch\n  \"train_batch_size\": 8,\n  \"url\": http://x\n}",
        "{\"train_batch_size\": 8, \"note\": \'\'\'\n one\n \'\'\'}",
    ] {
        let found = problems(text);
        assert!(found.starts_with("error[yaml-syntax]"), "{text}: {found}");
    }
    let text = "{\n  \"train_batch_size\": 8, // samples\n  zero_optimization: {}\n}";
    insta::assert_snapshot!(
        problems(text),
        @"error[yaml-syntax] of Hjson only JSON with comments is supported: key must be a string at line 3 column 3 (put names and texts into double quotes, with commas between them; comments may stay)"
    );
}
