//! Programs that no reader knows, with a global batch from the user: what is read of their scripts and configs.

use super::trees::at;
use crate::recipe::{ReadError, Recipe, Request, Setting, read};

/// Reads a script beside other files, with a global batch of 512 samples if `given`, and with overrides.
fn script(
    text: &str,
    files: &[(&str, &str)],
    given: bool,
    overrides: &[&str],
) -> Result<Recipe, ReadError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.sh");
    for (name, text) in files.iter().chain(&[("run.sh", text)]) {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    let batch = given.then(|| Setting {
        flag: "--global-batch-size",
        path: "batch.global",
        value: "512".to_owned(),
    });
    read(&Request {
        path,
        overrides: overrides.iter().map(|text| (*text).to_owned()).collect(),
        settings: batch.into_iter().collect(),
        ..Request::default()
    })
}

fn formula(recipe: &Recipe) -> String {
    at(recipe, 32).split.unwrap().formula()
}

/// Scripts whose arguments a reader cannot follow, with the native axes that these state.
const AXES: &[(&str, &[&str])] = &[
    (
        "O=\"--tensor-model-parallel-size $1 --pipeline-model-parallel-size 2\"\nC=\"deepspeed pretrain_gpt.py $O $@\"\n\
         eval ${C}\n",
        &["tensor=N", "pipeline=2"],
    ),
    (
        "read -r -d '' C <<EOF\nopenrlhf.cli.train_dpo \\\n  --train_batch_size 256 \\\n  --ring_attn_size 2\nEOF\n\
         deepspeed --module $C\n",
        &["context=2"],
    ),
    (
        "torchrun --nproc_per_node 8 train.py model.global_batch_size=4 exp_manager.name=a\n\
         torchrun --nproc_per_node 8 distil.py \\\n  ++model.pipeline_model_parallel_size=4\n",
        &["pipeline=4"],
    ),
    (
        "ARGS=\"--tensor-model-parallel-size 4 --micro-batch-size 4\"\nsrun bash -c \"$LAUNCHER pretrain_gpt.py $ARGS\"\n",
        &["tensor=4"],
    ),
    (
        "python3 -m verl.trainer.main_ppo data.train_batch_size=64 \
         actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 actor_rollout_ref.rollout.tensor_model_parallel_size=4\n",
        &["sequence=2"],
    ),
];

#[test]
fn the_axes_of_a_command_in_a_variable_or_a_text_are_asked_for() {
    for (text, axes) in AXES {
        let axes: Vec<String> = axes
            .iter()
            .map(|axis| format!("evenkeel.parallel.{axis}"))
            .collect();
        let error = script(text, &[], false, &[]).unwrap_err();
        let help = &error.diagnostics[0].help;
        let proposed = format!("--global-batch-size B {}`", axes.join(" "));
        assert!(help.contains(&proposed), "{text}\n{help}");
        let refused = script(text, &[], true, &[]).unwrap_err();
        let errors = refused.diagnostics.iter().filter(|found| found.is_error());
        assert_eq!(errors.count(), axes.len(), "{text}");
        let stated: Vec<String> = axes.iter().map(|axis| axis.replace('N', "2")).collect();
        let stated: Vec<&str> = stated.iter().map(String::as_str).collect();
        let recipe = script(text, &[], true, &stated).unwrap_or_else(|e| panic!("{text}: {e}"));
        let ranks = 32
            / stated
                .iter()
                .map(|axis| axis.split_once('=').unwrap().1.parse::<u64>().unwrap())
                .product::<u64>();
        assert!(
            formula(&recipe).starts_with(&format!("{ranks} × ")),
            "{text}"
        );
    }
    // The words of a variable have one place.
    let text =
        "ARGS=\"--num_generations 4 --sp_size 4\"\ntorchrun --nproc_per_node 8 train.py $ARGS\n";
    let refused = script(text, &[], true, &[]).unwrap_err();
    assert!(refused.diagnostics[0].message.starts_with("`sp_size` is 4"));
    // A comment, a server and a shell's variable size nothing.
    let text = "# train.py --tp_size 2\nTP=4\nvllm serve m --tensor-parallel-size 8 &\n\
                read -r -d '' C <<EOF\nx.py --micro-batch-size 4\nEOF\ntorchrun --nproc_per_node 8 $C\n";
    let recipe = script(text, &[], true, &[]).unwrap();
    assert_eq!(formula(&recipe), "32 × 4 × 4 = 512");
}

#[test]
fn the_configs_that_an_unknown_program_names_are_searched_for_axes() {
    let text = "torchrun --nproc_per_node 8 run.py --config-file model.yaml\n";
    let refused = |config: &str| {
        let read = script(text, &[("model.yaml", config)], true, &[]);
        let errors = read.err().into_iter().flat_map(|error| error.diagnostics);
        errors
            .filter(|found| found.is_error())
            .map(|found| found.message)
            .collect::<Vec<_>>()
    };
    let divided = refused("parallelism:\n  tp: 2\n  dp: 4\n");
    assert_eq!(divided.len(), 1, "{divided:?}");
    assert!(
        divided[0].contains("`model.yaml.parallelism.tp` is 2"),
        "{divided:?}"
    );
    for other in ["parallelism:\n  tp: 1\n", "not: [a, config\n"] {
        assert_eq!(refused(other), [""; 0], "{other}");
    }
}

#[test]
fn a_given_batch_leads_past_what_is_read_of_the_arguments_only() {
    let trainer = "accelerate launch --num_processes 8 train.py --per_device_train_batch_size 4";
    for (text, rule, help) in [
        // The script makes its config, or it lies elsewhere.
        (
            "cat <<EOT > made.yaml\na: 1\nEOT\naccelerate launch scripts/run_sft.py made.yaml\n"
                .to_owned(),
            "unreadable-file",
            "--global-batch-size B",
        ),
        (
            format!(
                "accelerate launch --config_file absent.yaml {}",
                &trainer["accelerate launch ".len()..]
            ),
            "unreadable-file",
            "--global-batch-size B",
        ),
        (
            format!("L=\"$1\"\n{trainer} --model_max_length $L\n"),
            "wrong-type",
            " L=VALUE`; or give the samples",
        ),
        (
            format!("M=\"model name or path\"\n{trainer} --model_name_or_path $M\n"),
            "wrong-type",
            "--global-batch-size B",
        ),
    ] {
        let error = script(&text, &[], false, &[]).unwrap_err();
        let found = error.diagnostics.iter().find(|found| found.rule == rule);
        let found = found.unwrap_or_else(|| panic!("{text}: {:?}", error.diagnostics));
        assert!(found.help.contains(help), "{text}: {}", found.help);
        let recipe = script(&text, &[], true, &[]).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(at(&recipe, 32).global_batch_size, Some(512), "{text}");
    }
}
