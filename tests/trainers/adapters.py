"""Adapters of tiny models by PEFT, and what TRL makes of them.

    adapters.py train FOLDER STEPS   writes the models FOLDER/NAME, adapters of them FOLDER/NAME-adapter whose matrices are
                                     both random, and whose modules that are trained whole are not the model's, recipes FOLDER/NAME-sft.yaml and, for some, FOLDER/NAME-dpo.yaml, trains
                                     each by TRL, and prints the losses by recipe as one line of JSON
    adapters.py compare FOLDER PATH  loads each FOLDER/RECIPE-run/PATH in PEFT, and prints by recipe the largest difference of
                                     its logits from those of TRL's adapter, relative to the largest logit
    adapters.py merged FOLDER PATH   merges each FOLDER/RECIPE-run/PATH in PEFT, and prints by recipe the largest difference of
                                     a weight from FOLDER/RECIPE-merged, where there is one, relative to the tensor's largest
"""

import json
import sys
from pathlib import Path

import torch
import yaml
from families import FAMILIES, RECIPE, make
from peft import LoraConfig, PeftModel, get_peft_model
from preference_losses import train as train_preferences
from sft_losses import quantise, train
from tiny_model import make_data, make_tokenizer
from transformers import AutoModelForCausalLM

# The layers of the adapters, the modules that are trained whole, and other settings.
ADAPTERS = dict(
    llama=dict(target_modules="all-linear", r=5, lora_alpha=7, modules_to_save=["norm"]),
    qwen3=dict(target_modules=["q_proj", "v_proj", "down_proj"], r=4, lora_alpha=8, use_rslora=True,
               modules_to_save=["embed_tokens", "lm_head", "norm", "o_proj"]),
    gpt_neox=dict(target_modules=["query_key_value", "dense"], r=3, lora_alpha=3,
                  modules_to_save=["final_layer_norm"]),
    gpt2=dict(target_modules=["c_attn", "c_fc"], r=3, lora_alpha=6, fan_in_fan_out=True, modules_to_save=["wpe"]),
)
# Whose weights are also in 4 bits, and whether their scales are in 8 bits.
IN_4_BITS = dict(llama=True, gpt_neox=False)
# The queries of a head are whole blocks of 64 weights in 4 bits.
SIZES = dict(gpt_neox=dict(hidden_size=32, num_attention_heads=4))
PREFERENCES = dict(per_device_train_batch_size=4, learning_rate=1e-3, lr_scheduler_type="constant", bf16=False,
                   train_sampling_strategy="sequential", weight_decay=0.01, dataset_name="preferences", max_length=64)
# Whose preferences are trained too.
WITH_PREFERENCES = ["llama"]


def make_adapter(folder, name):
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    config = LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, lora_dropout=0.0, **ADAPTERS[name])
    model = get_peft_model(base, config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.mul_(0.3)
            if "modules_to_save" in parameter_name:
                parameter.mul_(1.1)
    model.save_pretrained(folder / f"{name}-adapter")


def recipes():
    for name in ADAPTERS:
        yield f"{name}-sft", name, RECIPE | dict(learning_rate=3e-3), train
        if name in IN_4_BITS:
            in_4_bits = dict(load_in_4bit=True, use_bnb_nested_quant=IN_4_BITS[name])
            yield f"{name}-nf4-sft", name, RECIPE | dict(learning_rate=3e-3) | in_4_bits, train
        if name in WITH_PREFERENCES:
            yield f"{name}-dpo", name, PREFERENCES, train_preferences


def logits(name, path, settings):
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    if settings.get("load_in_4bit"):
        quantise(base, settings["use_bnb_nested_quant"])
    tokens = torch.arange(3 * 40).reshape(3, 40) % base.config.vocab_size
    model = PeftModel.from_pretrained(base, path)
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def merged(name, path, ours):
    base = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    expected = PeftModel.from_pretrained(base, path).merge_and_unload().state_dict()
    found = AutoModelForCausalLM.from_pretrained(ours, dtype=torch.float32).state_dict()
    assert expected.keys() == found.keys()
    apart = [(expected[key] - found[key]).abs().max() / expected[key].abs().max() for key in expected]
    return max(apart).item()


def main():
    command, folder = sys.argv[1], Path(sys.argv[2])
    found = {}
    if command == "train":
        make_data(folder)
        tokenizer = make_tokenizer()
        for name in ADAPTERS:
            make(folder, name, FAMILIES[name] | SIZES.get(name, {}), tokenizer)
            make_adapter(folder, name)
    for recipe, name, settings, trains in recipes():
        theirs = folder / f"{recipe}-trl"
        if command == "train":
            settings = settings | dict(model_name_or_path=f"{name}-adapter", max_steps=int(sys.argv[3]),
                                       output_dir=str(theirs))
            (folder / f"{recipe}.yaml").write_text(yaml.safe_dump(settings))
            found[recipe], trainer = trains(folder / f"{recipe}.yaml")
            trainer.save_model(theirs)
        elif command == "merged":
            ours = folder / f"{recipe}-merged"
            if ours.exists():
                found[recipe] = merged(name, folder / f"{recipe}-run" / sys.argv[3], ours)
        else:
            expected, written = logits(name, theirs, settings), folder / f"{recipe}-run" / sys.argv[3]
            found[recipe] = ((logits(name, written, settings) - expected).abs().max() / expected.abs().max()).item()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
