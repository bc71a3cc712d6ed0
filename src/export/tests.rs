use proptest::prelude::*;

use super::*;
use crate::recipe::read;
use crate::recipe::schema::overrides::Setting;
use crate::recipe::schema::request::Request;

/// A job: files, the first of which is the recipe, and a command, in which `@` is the folder of the
/// files.
pub(super) struct Job {
    pub folder: tempfile::TempDir,
    request: Request,
}

impl Job {
    pub fn new(files: &[(&str, &str)], command: &str) -> Job {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        let here = folder.path().to_str().unwrap();
        let words = command.split_whitespace();
        let request = Request {
            path: files
                .first()
                .map_or_else(Default::default, |(name, _)| folder.path().join(name)),
            command: words.map(|word| word.replace('@', here)).collect(),
            ..Request::default()
        };
        Job { folder, request }
    }

    pub fn recipe(&self, gpus: Option<u64>) -> Recipe {
        let setting = gpus.map(|gpus| Setting {
            flag: "--recipe-gpus",
            path: "batch.gpus",
            value: gpus.to_string(),
        });
        let request = Request {
            settings: setting.into_iter().collect(),
            ..self.request.clone()
        };
        read(&request).unwrap_or_else(|error| panic!("{error}"))
    }

    /// The text in a form, with the folder replaced by `@` again.
    pub fn emitted(&self, gpus: Option<u64>, numbers: &BatchNumbers, form: Form) -> String {
        let emitted = emit(&self.recipe(gpus), numbers, form);
        let emitted = emitted.unwrap_or_else(|error| panic!("{error}"));
        let here = self.folder.path().to_str().unwrap();
        let remarks = emitted.remarks.iter().map(|remark| format!("# {remark}\n"));
        let text = emitted.text + &remarks.collect::<String>();
        text.replace(here, "@")
    }
}

/// The numbers for `ranks` × `per_device_batch_size` × `accumulation`.
pub(super) fn numbers(ranks: u64, per_device_batch_size: u64, accumulation: u64) -> BatchNumbers {
    BatchNumbers {
        world: ranks,
        nodes: None,
        data_parallel: ranks,
        global: ranks * per_device_batch_size * accumulation,
        per_device_batch_size,
        accumulation,
        steps_per_generation: None,
    }
}

const SFT: &str = "# one model\nmodel_name_or_path: m # why\nper_device_train_batch_size: 16\n\
                   learning_rate: 2.0e-05\ndataset_name: d\ndataset_text_field: text\n";

#[test]
fn only_the_numbers_of_a_recipe_change() {
    let job = Job::new(&[("config.yaml", SFT)], "");
    let same = job.emitted(Some(8), &numbers(8, 16, 1), Form::Recipe);
    assert_eq!(same, SFT);
    let half = job.emitted(Some(8), &numbers(4, 16, 2), Form::Recipe);
    assert_eq!(
        half,
        SFT.replace("16\n", "16\ngradient_accumulation_steps: 2\n")
    );
    let many = job.emitted(Some(8), &numbers(64, 2, 1), Form::Recipe);
    assert_eq!(many, SFT.replace("16\n", "2\n"));
}

#[test]
fn a_native_recipe_changes_only_stated_numbers() {
    let text = "apiVersion: evenkeel.dev/v1alpha1\nkind: Recipe\nspec:\n  batch: {global: 128, per_device_batch_size: 16} # b\n";
    let job = Job::new(&[("r.yaml", text)], "");
    let written = job.emitted(None, &numbers(64, 2, 1), Form::Recipe);
    assert_eq!(written, text.replace("16", "2"));
    let stated = text.replace("16", "16, accumulation: 1, gpus: 8");
    let job = Job::new(&[("r.yaml", &stated)], "");
    let written = job.emitted(None, &numbers(4, 16, 2), Form::Recipe);
    assert_eq!(
        written,
        stated.replace("accumulation: 1, gpus: 8", "accumulation: 2, gpus: 4")
    );
}

#[test]
fn a_command_gets_its_numbers_and_its_processes() {
    let line = "torchrun --nproc_per_node 4 train.py --per_device_train_batch_size=8 --seed 1";
    let job = Job::new(&[], line);
    assert_eq!(
        job.emitted(None, &numbers(2, 8, 2), Form::Recipe),
        "torchrun --nproc_per_node 2 train.py --per_device_train_batch_size=8 --seed 1 \
         --gradient_accumulation_steps 2\n"
    );
    let nodes = Job::new(
        &[],
        "torchrun --nnodes 2 --nproc_per_node 4 train.py --per_device_train_batch_size 8",
    );
    let written = nodes.emitted(None, &numbers(4, 8, 2), Form::Recipe);
    assert!(
        written.contains("--nnodes 2 --nproc_per_node 2 "),
        "{written}"
    );
    let alone = Job::new(
        &[],
        "python -m torch.distributed.run --nnodes 2 run_clm.py --do_train",
    );
    assert_eq!(
        alone.emitted(None, &numbers(8, 8, 1), Form::Recipe),
        "python -m torch.distributed.run --nproc_per_node 4 --nnodes 2 run_clm.py --do_train\n"
    );
    let dashes = Job::new(&[], "torchrun run_clm.py --do_train -- rest");
    assert_eq!(
        dashes.emitted(None, &numbers(4, 5, 2), Form::Recipe),
        "torchrun --nproc_per_node 4 run_clm.py --do_train --per_device_train_batch_size 5 \
         --gradient_accumulation_steps 2 -- rest\n"
    );
    let unnamed = Job::new(&[], "train 4 --");
    assert_eq!(
        unnamed.emitted(None, &numbers(4, 5, 2), Form::Recipe),
        "train 4 --per_device_train_batch_size 5 --gradient_accumulation_steps 2 --\n"
    );
    let line = "torchrun run_clm.py --output_dir o --do_train>log\n";
    let logged = Job::new(&[("run.sh", line)], "");
    assert_eq!(
        logged.emitted(None, &numbers(4, 5, 2), Form::Recipe),
        "torchrun --nproc_per_node 4 run_clm.py --output_dir o --do_train --per_device_train_batch_size 5 \
         --gradient_accumulation_steps 2 >log\n"
    );
    let bare = Job::new(
        &[],
        "torchrun --max_steps=5 --per_device_train_batch_size=8",
    );
    let refused = emit(&bare.recipe(Some(4)), &numbers(4, 5, 2), Form::Recipe).unwrap_err();
    assert!(
        refused.to_string().contains("names no program"),
        "{refused}"
    );
    // sbatch takes the next word as its option's value.
    let wrap = Job::new(&[], "sbatch train.py --output_dir o --wrap");
    let refused = emit(&wrap.recipe(Some(4)), &numbers(4, 5, 2), Form::Recipe).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains("another part of the command's meaning (--per_device_train_batch_size 5 "),
        "{refused}"
    );
    let odd = emit(&nodes.recipe(None), &numbers(1, 8, 8), Form::Recipe).unwrap_err();
    assert!(
        odd.to_string()
            .starts_with("1 processes cannot be divided evenly over the command's 2 nodes")
    );
}

#[test]
fn a_shipped_config_gets_its_processes_beside_it() {
    let line = "trl sft --accelerate_config zero2 --per_device_train_batch_size 8 --dataset_name d";
    let job = Job::new(&[], line);
    assert_eq!(
        job.emitted(None, &numbers(4, 8, 2), Form::Recipe),
        "trl sft --accelerate_config zero2 --num_processes 4 --per_device_train_batch_size 8 \
         --dataset_name d --gradient_accumulation_steps 2\n"
    );
    let text = format!("{SFT}accelerate_config: zero2\n");
    let job = Job::new(&[("config.yaml", &text)], "");
    let written = job.emitted(None, &numbers(4, 16, 2), Form::Recipe);
    let expected = text.replace(
        "16\n",
        "16\nnum_processes: 4\ngradient_accumulation_steps: 2\n",
    );
    assert_eq!(written, expected);
}

#[test]
fn a_script_and_a_file_of_arguments_keep_their_form() {
    let script = "#!/bin/bash\n# run\ntorchrun --nproc_per_node \"8\" \\\n  t.py \\\n  --per_device_train_batch_size '16' \\\n  --seed 1 # end\n";
    let job = Job::new(&[("run.sh", script)], "");
    let written = job.emitted(None, &numbers(4, 16, 2), Form::Recipe);
    let expected = script
        .replace("\"8\"", "\"4\"")
        .replace("--seed 1", "--seed 1 --gradient_accumulation_steps 2");
    assert_eq!(written, expected);
    let arguments = "--per_device_train_batch_size 16\n--seed 1\n";
    let job = Job::new(&[("t.args", arguments)], "");
    let written = job.emitted(Some(8), &numbers(4, 16, 2), Form::Recipe);
    assert_eq!(
        written,
        "--per_device_train_batch_size 16\n--seed 1\n--gradient_accumulation_steps 2\n"
    );
}

#[test]
fn variables_are_replaced_by_numbers_where_they_are_used() {
    let script = "N=8\nB=16\nA=\"--gradient_accumulation_steps 1 --seed 1\"\n\
                  torchrun --nproc_per_node $N t.py --per_device_train_batch_size \"${B}\" $A > log\n";
    let job = Job::new(&[("run.sh", script)], "");
    let written = job.emitted(None, &numbers(4, 8, 4), Form::Recipe);
    let expected = script
        .replace("per_node $N", "per_node 4")
        .replace("\"${B}\"", "\"8\"")
        .replace("$A >", "$A --gradient_accumulation_steps 4 >");
    assert_eq!(written, expected);
    let launched = "A=\"--nproc_per_node 8\"\ntorchrun $A t.py --per_device_train_batch_size 16\n";
    let job = Job::new(&[("run.sh", launched)], "");
    let refused = emit(&job.recipe(None), &numbers(4, 16, 2), Form::Recipe).unwrap_err();
    assert!(
        refused.to_string().starts_with("`$A` holds more"),
        "{refused}"
    );
    let variable = "export PET_NPROC_PER_NODE=8\ntorchrun t.py --per_device_train_batch_size 16\n";
    let job = Job::new(&[("run.sh", variable)], "");
    let written = job.emitted(None, &numbers(4, 16, 2), Form::Recipe);
    let option = "export PET_NPROC_PER_NODE=8\ntorchrun --nproc_per_node 4 t.py";
    assert!(written.starts_with(option), "{written}");
    // The environment may state the nodes of the command.
    let nodes = "PET_NNODES=2 torchrun --nproc_per_node 4 t.py --per_device_train_batch_size 8\n";
    let job = Job::new(&[("run.sh", nodes)], "");
    let written = job.emitted(None, &numbers(4, 8, 2), Form::Recipe);
    assert!(
        written.starts_with("PET_NNODES=2 torchrun --nproc_per_node 2 t.py"),
        "{written}"
    );
    let tied = "A=\"--nproc_per_node=8\"\ntorchrun $A t.py --per_device_train_batch_size 16\n";
    let job = Job::new(&[("run.sh", tied)], "");
    let refused = emit(&job.recipe(None), &numbers(4, 16, 2), Form::Recipe).unwrap_err();
    assert!(refused.to_string().starts_with("`$A` holds more"));
}

#[test]
fn every_file_of_a_job_is_written_or_named() {
    let ds =
        "{\n  \"gradient_accumulation_steps\": 1,\n  \"zero_optimization\": {\"stage\": 3}\n}\n";
    let accelerate = "distributed_type: FSDP # s\nnum_processes: 8\nnum_machines: 2\n";
    let recipe = format!("{SFT}deepspeed: ds.json\n");
    let files = [
        ("config.yaml", recipe.as_str()),
        ("fsdp.yaml", accelerate),
        ("ds.json", ds),
    ];
    let job = Job::new(&files, "accelerate launch --config_file @/fsdp.yaml sft.py");
    let plan = numbers(3, 16, 2);
    let forms = [
        Form::Recipe,
        Form::Args,
        Form::Env,
        Form::Accelerate,
        Form::Deepspeed,
    ];
    let written = forms.map(|form| format!("== {form:?}\n{}", job.emitted(None, &plan, form)));
    insta::assert_snapshot!(written.concat());
}

#[test]
fn a_deepspeed_config_states_numbers_that_would_not_be_derived() {
    let by_micro = "{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 2}";
    let job = Job::new(&[("ds.json", by_micro)], "");
    assert_eq!(job.emitted(None, &numbers(4, 2, 4), Form::Recipe), by_micro);
    assert_eq!(
        job.emitted(None, &numbers(32, 1, 1), Form::Recipe),
        by_micro.replace("gpu\": 2", "gpu\": 1")
    );
    let alone = "{\n  \"train_batch_size\": 32\n}\n";
    let job = Job::new(&[("ds.json", alone)], "");
    assert_eq!(job.emitted(None, &numbers(4, 8, 1), Form::Recipe), alone);
    assert_eq!(
        job.emitted(None, &numbers(4, 4, 2), Form::Recipe),
        "{\n  \"train_batch_size\": 32,\n  \"train_micro_batch_size_per_gpu\": 4,\n  \"gradient_accumulation_steps\": 2\n}\n"
    );
    let elastic = "{\"zero_optimization\": {}, \"elasticity\": {\"enabled\": true, \"max_train_batch_size\": 128, \"micro_batch_sizes\": [1, 2, 4], \"version\": 0.1}}";
    let job = Job::new(&[("ds.json", elastic)], "");
    let written = job.emitted(None, &numbers(6, 4, 5), Form::Recipe);
    assert!(written.contains("\"enabled\": false"), "{written}");
    assert!(written.contains("\"train_batch_size\": 120"), "{written}");
}

#[test]
fn a_deepspeed_config_keeps_its_comments() {
    let text = "{\n  // as in the paper\n  \"train_batch_size\": 32, // global\n  \
                \"train_micro_batch_size_per_gpu\": 2, /* fits */\n}\n";
    let job = Job::new(&[("ds.json", text)], "");
    let written = job.emitted(None, &numbers(32, 1, 1), Form::Recipe);
    assert_eq!(written, text.replace("gpu\": 2", "gpu\": 1"));
}

#[test]
fn an_accelerate_config_changes_where_it_depends_on_the_world() {
    let text = "distributed_type: FSDP\nnum_processes: 8 # all\nfsdp_config:\n  fsdp_version: 2\nparallelism_config:\n  \
                parallelism_config_tp_size: 2\n  parallelism_config_dp_shard_size: 2\n  \
                parallelism_config_dp_replicate_size: 2\n";
    let job = Job::new(&[("a.yaml", text)], "");
    let plan = BatchNumbers {
        world: 4,
        data_parallel: 2,
        ..numbers(2, 1, 1)
    };
    let written = job.emitted(None, &plan, Form::Accelerate);
    assert_eq!(
        written,
        text.replace("8 # all", "4 # all")
            .replace("replicate_size: 2", "replicate_size: 1")
    );
    let none = Job::new(
        &[(
            "a.yaml",
            "distributed_type: \"NO\"\nmixed_precision: \"bf16\"\n",
        )],
        "",
    );
    assert_eq!(
        none.emitted(None, &numbers(4, 1, 1), Form::Accelerate),
        "distributed_type: \"MULTI_GPU\"\nmixed_precision: \"bf16\"\nnum_processes: 4\n"
    );
}

#[test]
fn a_form_that_the_job_lacks_is_refused() {
    let ds = Job::new(&[("ds.json", "{\"train_batch_size\": 32}")], "");
    let error = emit(&ds.recipe(None), &numbers(4, 8, 1), Form::Args).unwrap_err();
    assert!(error.to_string().contains("deepspeed arguments"), "{error}");
    let sft = Job::new(&[("config.yaml", SFT)], "");
    let error = emit(&sft.recipe(Some(8)), &numbers(4, 8, 1), Form::Deepspeed).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the job names no DeepSpeed config (`--emit args` writes the trainer's arguments)"
    );
}

proptest! {
    /// For all numbers the text reads back as exactly these, and nothing else changes.
    #[test]
    fn a_written_recipe_reads_back_with_its_numbers(
        (ranks, per_device_batch_size, accumulation) in (1..9_u64, 1..65_u64, 1..33_u64),
        keys: [bool; 2], json: bool,
    ) {
        let mut lines = vec![("model_name_or_path", "\"m\""), ("do_train", "true"), ("max_steps", "9")];
        if keys[0] {
            lines.push(("per_device_train_batch_size", "4"));
        }
        if keys[1] {
            lines.insert(1, ("gradient_accumulation_steps", "3"));
        }
        lines.push(("seed", "7"));
        let joined = |sep: &str, quote: &str| {
            let lines = lines.iter().map(|(key, value)| format!("{quote}{key}{quote}: {value}"));
            lines.collect::<Vec<_>>().join(sep)
        };
        let (name, text) = if json {("a.json", format!("{{\n  {}\n}}\n", joined(",\n  ", "\"")))} else {("a.yaml", joined("\n", "") + "\n")};
        let job = Job::new(&[(name, &text)], "");
        let plan = numbers(ranks, per_device_batch_size, accumulation);
        let before = job.recipe(Some(8));
        let written = emit(&before, &plan, Form::Recipe).unwrap().text;
        let after = Job::new(&[(name, &written)], "").recipe(Some(ranks));
        let mut expected = before.spec.clone();
        expected.batch.per_device_batch_size = Some(per_device_batch_size);
        expected.batch.accumulation = Some(accumulation);
        expected.batch.gpus = Some(ranks);
        prop_assert_eq!(&after.spec, &expected);
        // Writing the same again changes nothing.
        let again = emit(&after, &plan, Form::Recipe).unwrap().text;
        prop_assert_eq!(again, written);
    }
}

#[test]
fn a_command_with_another_number_of_processes_yields_a_remark() {
    for command in [
        "trl sft --config @/config.yaml --accelerate_config zero2",
        "torchrun --nproc_per_node 8 sft.py --config @/config.yaml",
    ] {
        let job = Job::new(&[("config.yaml", SFT)], command);
        let written = job.emitted(None, &numbers(4, 16, 2), Form::Recipe);
        let remark = "# the command starts 8 processes: start 4 instead\n";
        assert!(written.ends_with(remark), "{written}");
    }
}

#[test]
fn another_number_of_processes_yields_a_remark() {
    let rest = "train.py --output_dir o --per_device_train_batch_size 8";
    let typed = Job::new(&[], &format!("accelerate launch --num_processes 8 {rest}"));
    let args = typed.emitted(None, &numbers(4, 8, 2), Form::Args);
    assert!(args.ends_with("the job starts 8: start 4\n"), "{args}");
    let same = typed.emitted(None, &numbers(8, 8, 1), Form::Args);
    assert!(!same.contains('#'), "{same}");

    let script = format!("torchrun --nproc_per_node=${{NUM_GPUS}} {rest}\n");
    let script = Job::new(&[("run.sh", &script)], "");
    let written = script.emitted(Some(8), &numbers(4, 8, 2), Form::Recipe);
    assert!(written.ends_with("start 4 of them\n"), "{written}");
}
