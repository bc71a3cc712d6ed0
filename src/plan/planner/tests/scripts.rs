//! HALOs' scripts, reduced to the parts that a batch depends on, over the trees and configs of the corpus.

use std::path::Path;

use super::trees::{at, found, per_device_batch_size};
use crate::recipe::{Diagnostic, ReadError, Recipe, Request, corpus, read};

const HALOS: &str = "ContextualAI__HALOs/4831988636";

/// Reads a script in which `@` is upstream's tree.
fn script(root: &Path, text: &str) -> Result<Recipe, ReadError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("launch.sh");
    let here = root.join(HALOS).display().to_string();
    std::fs::write(&path, text.replace('@', &here)).unwrap();
    read(&Request {
        path,
        ..Request::default()
    })
}

fn message<'d>(found: &'d [Diagnostic], rule: &str) -> &'d Diagnostic {
    let first = found.iter().find(|d| d.rule == rule);
    first.unwrap_or_else(|| panic!("no {rule}: {found:?}"))
}

const DATA: &str = "train_datasets=[ultrabin] test_datasets=[ultrabin] exp_name=run";

#[test]
fn gpus_requested_from_slurm_must_be_those_of_the_launcher() {
    let Some(root) = corpus::root() else { return };
    // scripts/launch_llama_ppo_online.sh:6,130-160
    let ppo = |gpus: u64| {
        format!(
            "#!/bin/bash\n#SBATCH --nodes=1\n#SBATCH --gres=gpu:{gpus}\n\
             accelerate launch --config_file @/accelerate_config/fsdp_4gpu.yaml @/launch.py loss=ppo \
             model=llama {DATA} ++model.batch_size=8 ++model.gradient_accumulation_steps=8 \
             ++model.eval_batch_size=32\n"
        )
    };
    let recipe = script(&root, &ppo(8)).unwrap();
    let warning = message(&recipe.diagnostics, "gpu-count-conflict");
    assert!(
        warning
            .message
            .contains("8 GPUs from Slurm (`--gres=gpu:8`)"),
        "{warning:?}"
    );
    assert!(
        warning.message.contains("starts 4 processes"),
        "{warning:?}"
    );
    assert_eq!(warning.span.map(|span| span.line), Some(3));
    let draft = at(&recipe, 4);
    let error = message(&draft.findings, "batch-divisible");
    assert!(error.message.ends_with("8 % (4 × 8) = 8"), "{error:?}");
    assert_eq!(script(&root, &ppo(4)).unwrap().diagnostics, []);
    // scripts/launch_multinode_interactive.sh:3,38-46
    let simpo = script(
        &root,
        &format!(
            "#!/bin/bash\n# salloc --nodes=2 -c 8 --mem=40G --time=23:55:00 --gres=gpu:4 --partition=p\n\
             srun --nodes=$N bash -c \"accelerate launch --config_file @/accelerate_config/fsdp_2x2gpu.yaml \
             --machine_rank \\$SLURM_PROCID @/launch.py loss=simpo model=llama {DATA} \
             ++model.batch_size=16 ++model.gradient_accumulation_steps=2 ++model.eval_batch_size=16\"\n"
        ),
    )
    .unwrap();
    let warning = message(&simpo.diagnostics, "gpu-count-conflict");
    assert!(
        warning
            .message
            .contains("8 GPUs from Slurm (`--gres=gpu:4` on each of 2 nodes)"),
        "{warning:?}"
    );
    assert!(
        warning.message.contains("starts 4 processes"),
        "{warning:?}"
    );
    assert_eq!(warning.span.map(|span| span.line), Some(2));
    assert_eq!(per_device_batch_size(&at(&simpo, 4)), (Some(2), Some(2)));
}

/// scripts/launch_llama_instruct_kto_online.sh: rounds of sampling, labelling and training.
#[test]
fn a_sampler_and_a_labeller_are_not_trainings() {
    let Some(root) = corpus::root() else { return };
    let recipe = script(
        &root,
        &format!(
            "srun bash -c \"\nwhile [ \\$ROUND -le 2 ]; do\n\
             python -m train.sample \\$CKPT --gpu_count 2 --batch_size 16 --output_file s.json\n\
             accelerate launch --config_file @/accelerate_config/fsdp_4gpu.yaml -m train.label s.json d.json \
             --feedback_type binary --batch_size 16\n\
             accelerate launch --config_file @/accelerate_config/fsdp_4gpu.yaml @/launch.py loss=kto \
             model=llama {} ++model.batch_size=64 ++model.gradient_accumulation_steps=2 \
             ++model.eval_batch_size=64\ndone\n\"\n",
            DATA.replace("=run", "=\\$EXP_NAME")
        ),
    )
    .unwrap_or_else(|error| panic!("{error}"));
    let draft = at(&recipe, 4);
    assert_eq!(per_device_batch_size(&draft), (Some(8), Some(2)));
    assert_eq!(found(&draft), []);
}

/// scripts/interactive_ppo.sh ends in a variable that nothing in it sets.
#[test]
fn a_variable_that_may_contain_overrides_is_named() {
    let Some(root) = corpus::root() else { return };
    let with = |end: &str| {
        script(
            &root,
            &format!(
                "accelerate launch --config_file @/accelerate_config/fsdp_4gpu.yaml @/launch.py loss=ppo \
                 model=llama {DATA} ++model.batch_size=32 ++model.gradient_accumulation_steps=1 {end}\n"
            ),
        )
    };
    let error = with("$MODEL_LOAD_ARG 2>&1 | tee x.log").unwrap_err();
    assert_eq!(error.diagnostics.len(), 1, "{:?}", error.diagnostics);
    let finding = message(&error.diagnostics, "global-batch-unknown");
    assert!(
        finding
            .message
            .starts_with("`$MODEL_LOAD_ARG` is unresolved"),
        "{finding:?}"
    );
    let numbers = "overrides of `batch_size` and `gradient_accumulation_steps`";
    assert!(finding.help.contains(numbers), "{finding:?}");
    let settled = "$MODEL_LOAD_ARG ++model.batch_size=32 ++model.gradient_accumulation_steps=2";
    let batch = with(settled).unwrap().spec.batch;
    assert_eq!((batch.global, batch.accumulation), (Some(32), Some(2)));
}
