"""A tiny model of each family by transformers, with sizes that are no powers of two, and what TRL makes of it.

    families.py train FOLDER STEPS   writes FOLDER/NAME, FOLDER/NAME.yaml and FOLDER/sft, trains each by TRL, and prints the
                                     losses by family as one line of JSON
    families.py compare FOLDER PATH  loads each FOLDER/NAME/PATH in transformers, and prints by family the largest difference
                                     of its logits from those of TRL's model, relative to the largest logit. Also compares
                                     what lies beside the weights with FOLDER/NAME
    families.py generate FOLDER PATH prints by family the ids of PROMPT and those with which each FOLDER/NAME/PATH continues
                                     it greedily, up to 40 and without the one that ends it
    families.py pickle FOLDER NAME   replaces the weights of FOLDER/NAME by the same in pytorch_model.bin
"""

import json
import sys
from pathlib import Path

import torch
import yaml
from sft_losses import train
from tiny_model import make_data, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=64)
SIZES = dict(hidden_size=36, intermediate_size=50, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
             max_position_embeddings=256)
FAMILIES = dict(
    llama=dict(rope_parameters=LLAMA3, tie_word_embeddings=True),
    mistral=dict(head_dim=10, sliding_window=20),
    # The embedding of padding has no gradient; this one is a letter.
    qwen2=dict(tie_word_embeddings=True, num_key_value_heads=3, pad_token_id=70),
    qwen3=dict(head_dim=14, num_key_value_heads=1),
    smollm3=dict(rope_parameters=dict(rope_type="linear", rope_theta=2e6, factor=2.0), no_rope_layers=[1, 1, 0]),
    gemma=dict(head_dim=14, num_key_value_heads=1),
    # Heads of 12, of which 4 elements rotate.
    gpt_neox=dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.34)),
    gpt2=dict(n_embd=36, n_inner=50, n_layer=3, n_head=6, n_positions=256, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
    starcoder2=dict(sliding_window=20, num_key_value_heads=3),
)
PROMPT = "hello, Grüße and"
# Sizes that a family does not have by these names.
OTHERS = dict(gpt2=SIZES, gpt_neox=["num_key_value_heads"])
RECIPE = dict(per_device_train_batch_size=8, learning_rate=1e-3, lr_scheduler_type="constant", bf16=False,
              train_sampling_strategy="sequential", weight_decay=0.01, dataset_name="sft/train.jsonl", max_length=48)


def make(folder, name, family, tokenizer):
    torch.manual_seed(0)
    ids = dict(vocab_size=len(tokenizer), pad_token_id=None, bos_token_id=tokenizer.bos_token_id,
               eos_token_id=tokenizer.eos_token_id)
    sizes = {key: size for key, size in SIZES.items() if key not in OTHERS.get(name, ())}
    if name == "gpt_neox":
        sizes |= dict(num_attention_heads=3)
    config = AutoConfig.for_model(name, **sizes | ids | family)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Biases begin at zero, and norms at one, where mistakes do not show.
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.generation_config.update(do_sample=True, temperature=0.3)
    # Several files with an index.
    model.save_pretrained(folder / name, max_shard_size="60KB")
    tokenizer.save_pretrained(folder / name)


def logits(path):
    model, loading = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), f"{path}: {loading}"
    tokens = torch.arange(3 * 40).reshape(3, 40) % model.config.vocab_size
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def generated(path):
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    greedy = GenerationConfig(do_sample=False, max_new_tokens=40, eos_token_id=model.config.eos_token_id, pad_token_id=0)
    ids = model.generate(**prompt, generation_config=greedy)[0].tolist()
    length = prompt["input_ids"].shape[1]
    tokens = ids[length:]
    return [ids[:length], tokens[:-1] if tokens[-1] == model.config.eos_token_id else tokens]


def compare_files_beside_weights(written, source):
    texts = ["<s>user: Grüße,\n\n  \U0001f600</s>", "hello world"]
    chat = [dict(role="user", content="hello"), dict(role="assistant", content="world")]
    ids, rendered, generation = [], [], []
    for path in (written, source):
        tokenizer = AutoTokenizer.from_pretrained(path)
        ids.append(tokenizer(texts)["input_ids"])
        rendered.append(tokenizer.apply_chat_template(chat, tokenize=False))
        generation.append(GenerationConfig.from_pretrained(path).to_dict())
    for values in (ids, rendered, generation):
        assert values[0] == values[1], f"{written}: {values}"
    assert generation[0]["temperature"] == 0.3
    config = AutoConfig.from_pretrained(written)
    assert config.eos_token_id == AutoConfig.from_pretrained(source).eos_token_id is not None


def main():
    command, folder, argument = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if command == "pickle":
        weights = AutoModelForCausalLM.from_pretrained(folder / argument).state_dict()
        for file in (folder / argument).glob("model*"):
            file.unlink()
        torch.save(weights, folder / argument / "pytorch_model.bin")
        return
    found = {}
    if command == "train":
        tokenizer = make_tokenizer()
        make_data(folder)
    for name, family in FAMILIES.items():
        theirs = folder / f"{name}-trl"
        if command == "train":
            make(folder, name, family, tokenizer)
            recipe = RECIPE | dict(model_name_or_path=name, max_steps=int(argument), output_dir=str(theirs))
            (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
            found[name], trainer = train(folder / f"{name}.yaml")
            trainer.save_model(theirs)
        elif command == "generate":
            found[name] = generated(folder / f"{name}-run" / argument)
        else:
            expected, written = logits(theirs), folder / f"{name}-run" / argument
            difference = (logits(written) - expected).abs().max() / expected.abs().max()
            compare_files_beside_weights(written, folder / name)
            found[name] = difference.item()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
