"""The losses of TRL's SFT on one process, step by step, for recipes that the built-in trainer runs too.

    sft_losses.py RECIPE…

Prints one line of JSON, a list of losses for each recipe. `dataset_name` is a file. Beside each recipe,
NAME.gradients.safetensors gets the gradients of the first step.
"""

import json
import sys
from pathlib import Path

import yaml
from datasets import load_dataset
from first_gradients import FirstGradients
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer


def quantise(model, is_nested):
    """Gives the linear layers but the head the weights that bitsandbytes makes of its NF4 codes, with scales in 8 bits if
    nested. TRL would train adapters over Linear4bit in bf16."""
    import bitsandbytes.functional as four_bits
    import torch

    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and layer is not model.get_output_embeddings():
            codes, state = four_bits.quantize_4bit(layer.weight.data, compress_statistics=is_nested, quant_type="nf4")
            layer.weight.data = four_bits.dequantize_4bit(codes, state)


def model_of(path, in_4_bits=False, is_nested=False):
    """The model of a folder, or its adapter over a model, to be trained on, and the tokenizer of the model."""
    below = path
    is_adapter = (Path(path) / "adapter_config.json").exists()
    if is_adapter:
        from peft import PeftConfig, PeftModel

        below = PeftConfig.from_pretrained(path).base_model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(below, dtype="float32")
    if in_4_bits:
        quantise(model, is_nested)
    if is_adapter:
        model = PeftModel.from_pretrained(model, path, is_trainable=True)
    return model, AutoTokenizer.from_pretrained(below)


def train(path):
    """The losses, and the trainer."""
    with open(path) as file:
        recipe = yaml.safe_load(file)
    name, data = recipe.pop("model_name_or_path"), recipe.pop("dataset_name")
    model, tokenizer = model_of(name, recipe.pop("load_in_4bit", False), recipe.pop("use_bnb_nested_quant", False))
    arguments = SFTConfig(**recipe, use_cpu=True, report_to="none", logging_steps=1, save_strategy="no")
    rows = load_dataset("json", data_files=data, split="train")
    gradients = FirstGradients(Path(path).with_suffix(".gradients.safetensors"))
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer, callbacks=[gradients])
    # GPT-2's class is not among those for which transformers 5.24 leaves the first token of a row out of the mean.
    trainer._loss_shifts_labels = True
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer


if __name__ == "__main__":
    print(json.dumps([train(path)[0] for path in sys.argv[1:]]))
