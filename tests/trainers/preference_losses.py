"""The losses of TRL's trainers over preferences, step by step, on one process.

    preference_losses.py MODEL PAIRS LABELLED

Prints one line of JSON: by case the losses, the rewards of the chosen and of the rejected completions, and KTO's KL.
"""

import json
import sys

from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from transformers import AutoModelForCausalLM, AutoTokenizer

COMMON = dict(
    per_device_train_batch_size=8,
    max_steps=20,
    # Large, so that a wrong gradient shows in the next loss.
    learning_rate=1e-3,
    lr_scheduler_type="constant",
    train_sampling_strategy="sequential",
    bf16=False,
    weight_decay=0.0,
    use_cpu=True,
    report_to="none",
    logging_steps=1,
    save_strategy="no",
    gradient_checkpointing=False,
    output_dir="out",
)
CASES = dict(
    sigmoid=(DPOTrainer, DPOConfig, dict(beta=0.3)),
    robust=(DPOTrainer, DPOConfig, dict(loss_type=["robust"], label_smoothing=0.2)),
    hinge=(DPOTrainer, DPOConfig, dict(loss_type=["hinge"], beta=0.5)),
    ipo=(DPOTrainer, DPOConfig, dict(loss_type=["ipo"])),
    orpo=(ORPOTrainer, ORPOConfig, dict(beta=0.2)),
    simpo=(CPOTrainer, CPOConfig, dict(loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=0.5)),
    cpo=(CPOTrainer, CPOConfig, dict(loss_type="sigmoid", cpo_alpha=0.7, beta=0.1)),
    kto=(KTOTrainer, KTOConfig, dict(beta=0.3, desirable_weight=0.7, undesirable_weight=1.4)),
    kto_accumulated=(
        KTOTrainer,
        KTOConfig,
        dict(beta=0.3, per_device_train_batch_size=4, gradient_accumulation_steps=2),
    ),
)


def main():
    model_path, pairs, labelled = sys.argv[1:]
    found = {}
    for name, (trainer_class, config_class, settings) in CASES.items():
        rows = labelled if trainer_class is KTOTrainer else pairs
        arguments = config_class(**COMMON | settings)
        trainer = trainer_class(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype="float32"),
            args=arguments,
            train_dataset=load_dataset("json", data_files=rows, split="train"),
            processing_class=AutoTokenizer.from_pretrained(model_path),
        )
        trainer.train()
        steps = [entry for entry in trainer.state.log_history if "rewards/chosen" in entry]
        keys = ["loss", "rewards/chosen", "rewards/rejected"] + ["kl"] * (rows == labelled)
        found[name] = {key: [step[key] for step in steps] for key in keys}
    print(json.dumps(found))


main()
