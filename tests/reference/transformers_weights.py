#!/usr/bin/env python3
"""Weights that go from transformers to Evenkeel and back, with the loss that either computes from them.

  python tests/reference/transformers_weights.py save
      writes the directories `transformers_*` beside itself: what `save_pretrained` makes of small models, and
      expected.json with tokens, targets and the summed loss. The tests of src/train/weights.rs read them.

  EVENKEEL_REFERENCE=DIR cargo test --lib checkpoint_for_transformers -- --ignored
  python tests/reference/transformers_weights.py load DIR/gen-1/step-0000002
      loads a checkpoint that Evenkeel wrote and compares every tensor and the loss of Evenkeel's engine.

Written with torch 2.15.0, transformers 5.23.0.
"""
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
COMMON = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, vocab_size=24, max_position_embeddings=64,
              rms_norm_eps=1e-5, rope_theta=10000.0, initializer_range=0.3, bos_token_id=1, eos_token_id=2)
CASES = dict(
    sharded_bf16=dict(model=dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6, tie_word_embeddings=False),
                      dtype=torch.bfloat16, max_shard_size="4KB"),
    single_f16_tied=dict(model=dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
                         dtype=torch.float16, max_shard_size="1GB"),
)


def summed_loss(model, tokens, targets):
    """Summed cross-entropy over all positions; `targets` are those of the same position."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(tokens)).logits.double()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(),
                                             reduction="sum").item()


def save():
    for name, case in CASES.items():
        torch.manual_seed(7)
        model = LlamaForCausalLM(LlamaConfig(**COMMON, **case["model"]))
        for parameter in model.parameters():
            if parameter.dim() == 1:  # else all norms would be ones
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        model = model.to(case["dtype"])
        directory = HERE / f"transformers_{name}"
        model.save_pretrained(directory, max_shard_size=case["max_shard_size"])
        tokens = torch.randint(COMMON["vocab_size"], (3, 17)).tolist()
        inputs, targets = [row[:-1] for row in tokens], [row[1:] for row in tokens]
        exact = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)
        expected = dict(tokens=inputs, targets=targets, loss=summed_loss(exact, inputs, targets))
        (directory / "expected.json").write_text(json.dumps(expected) + "\n")
        print(directory, expected["loss"])


def load(directory):
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    for kind, names in info.items():
        assert not names, f"{kind}: {names}"
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    state = model.state_dict()
    tied = model.config.tie_word_embeddings
    found = set()
    for file in sorted(directory.glob("model-*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                assert torch.equal(state[name], tensors.get_tensor(name)), name
                found.add(name)
    assert found == set(state) - ({"lm_head.weight"} if tied else set()), set(state) ^ found
    expected = json.loads((directory / "state.json").read_text())
    loss = summed_loss(model, expected["tokens"], expected["targets"])
    relative = abs(loss - expected["loss"]) / expected["loss"]
    print(f"{len(found)} tensors equal; loss {loss:.7f} by transformers, {expected['loss']:.7f} by Evenkeel, "
          f"relative difference {relative:.1e}")
    assert relative < 1e-6


if __name__ == "__main__":
    if sys.argv[1:] == ["save"]:
        save()
    elif len(sys.argv) == 3 and sys.argv[1] == "load":
        load(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
