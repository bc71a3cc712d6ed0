"""The losses of TRL's SFT on one process, step by step, for recipes that the built-in trainer runs too.

    sft_losses.py RECIPE…

Prints one line of JSON, a list of losses for each recipe. `dataset_name` is a file.
"""

import json
import sys

import yaml
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer


def train(path):
    """The losses, and the trainer."""
    with open(path) as file:
        recipe = yaml.safe_load(file)
    model, data = recipe.pop("model_name_or_path"), recipe.pop("dataset_name")
    arguments = SFTConfig(
        **recipe,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        model_init_kwargs={"dtype": "float32"},
    )
    rows = load_dataset("json", data_files=data, split="train")
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=rows)
    # GPT-2's class is not among those for which transformers 5.24 leaves the first token of a row out of the mean.
    trainer._loss_shifts_labels = True
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


if __name__ == "__main__":
    print(json.dumps([train(path)[0] for path in sys.argv[1:]]))
