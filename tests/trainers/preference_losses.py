"""The losses of TRL's trainers over preferences, step by step, on one process.

    preference_losses.py TRAINER_CASE.yaml …

Reads recipes of TRL. Prints one line of JSON: by the recipe's name the losses, the rewards of the chosen and of the rejected
completions, and KTO's KL. Beside each recipe, NAME.gradients.safetensors gets the gradients of the first step.
"""

import json
import sys
from pathlib import Path

import yaml
from datasets import load_dataset
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from first_gradients import FirstGradients
from sft_losses import model_of

TRAINERS = dict(
    dpo=(DPOTrainer, DPOConfig),
    kto=(KTOTrainer, KTOConfig),
    orpo=(ORPOTrainer, ORPOConfig),
    cpo=(CPOTrainer, CPOConfig),
)


def train(recipe):
    """The losses, and the trainer."""
    found, trainer = steps_of(Path(recipe), "dpo")
    return found["loss"], trainer


def steps_of(recipe, kind):
    settings = yaml.safe_load(recipe.read_text())
    name, data = settings.pop("model_name_or_path"), settings.pop("dataset_name")
    trainer_class, config_class = TRAINERS[kind]
    # `logging_steps`: every step is printed. The others do not change the losses.
    observed = dict(logging_steps=1, report_to="none", save_strategy="no", use_cpu=True)
    model, tokenizer = model_of(name)
    trainer = trainer_class(
        model=model,
        args=config_class(**settings | observed),
        train_dataset=load_dataset(data, split="train"),
        processing_class=tokenizer,
        callbacks=[FirstGradients(recipe.with_suffix(".gradients.safetensors"))],
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "rewards/chosen" in entry]
    keys = ["loss", "rewards/chosen", "rewards/rejected"] + ["kl"] * (trainer_class is KTOTrainer)
    return {key: [step[key] for step in steps] for key in keys}, trainer


def main():
    found = {}
    for recipe in map(Path, sys.argv[1:]):
        found[recipe.stem], _ = steps_of(recipe, recipe.stem.split("_")[0])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
