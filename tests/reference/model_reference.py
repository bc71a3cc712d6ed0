#!/usr/bin/env python3
"""Gradients and losses of tiny models of each family by PyTorch and transformers, which the engines are tested against.

Writes beside itself, for each case, NAME.json (config.json's keys, the micro-batch's shape, what the optimiser was
told, the summed loss, the same and each gradient's relative L2 error under autocast to bf16, ten mean losses) and
NAME.safetensors (tokens, targets, the logits of the first row, the gradient of the summed loss of every parameter by its
Hugging Face name). The weights come from a formula over integers that the test repeats.

  python tests/reference/model_reference.py [CASE…]     (written with torch 2.15.0, transformers 5.23.0 and 5.24.0)

The model runs in f64 (transformers computes RMSNorm and RoPE's angles in f32 all the same), so that the numbers are
nearer the truth than the f32 that they judge.
"""
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModelForCausalLM

HERE = Path(__file__).parent
IGNORE = -100
COMMON = dict(hidden_size=16, intermediate_size=20, num_hidden_layers=2, vocab_size=24, max_position_embeddings=128,
              rms_norm_eps=1e-5, rope_theta=10000.0, initializer_range=0.02)
# Wide enough that the errors of bf16 are not chance.
FAMILY = dict(hidden_size=32, intermediate_size=36)
# Common keys that a family does not have by these names.
OTHER_NAMES = dict(
    gpt_neox=("rms_norm_eps", "rope_theta"), starcoder2=("rms_norm_eps",),
    gpt2=("hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "rope_theta"))
NEOX = dict(model_type="gpt_neox", hidden_size=40, intermediate_size=52, num_attention_heads=4, rotary_pct=0.4,
            layer_norm_eps=1e-4, tie_word_embeddings=False)
CASES = dict(
    untied_grouped=dict(num_attention_heads=4, num_key_value_heads=2, head_dim=6, tie_word_embeddings=False),
    tied=dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True),
    wider=dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
               tie_word_embeddings=False),
    llama3=FAMILY | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True,
                         rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                           original_max_position_embeddings=32)),
    linear=FAMILY | dict(num_attention_heads=2, num_key_value_heads=2, head_dim=10, tie_word_embeddings=False,
                         rope_scaling=dict(rope_type="linear", factor=3.0)),
    qwen2=FAMILY | dict(model_type="qwen2", num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True),
    qwen3=FAMILY | dict(model_type="qwen3", num_attention_heads=4, num_key_value_heads=2, head_dim=10,
                        tie_word_embeddings=False),
    smollm3=FAMILY | dict(model_type="smollm3", num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=3,
                          no_rope_layers=[1, 0, 1], tie_word_embeddings=True, pad_token_id=None),
    # The windows end within rows of the batch.
    windows=FAMILY | dict(model_type="smollm3", num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3,
                          no_rope_layers=[1, 0, 1], use_sliding_window=True, sliding_window=9, tie_word_embeddings=True,
                          layer_types=["full_attention", "sliding_attention", "sliding_attention"], pad_token_id=None),
    # Its token 0 is padding, which is among the tokens.
    gemma=FAMILY | dict(model_type="gemma", num_attention_heads=4, num_key_value_heads=1, head_dim=10,
                        tie_word_embeddings=True),
    # Heads of 10, of which 4 elements rotate.
    gpt_neox=NEOX,
    gpt_neox_sequential=NEOX | dict(use_parallel_residual=False, attention_bias=False, tie_word_embeddings=True),
    gpt2=dict(model_type="gpt2", n_embd=32, n_head=4, n_layer=2, n_inner=44, n_positions=80, layer_norm_epsilon=1e-4,
              resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    starcoder2=FAMILY | dict(model_type="starcoder2", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, norm_epsilon=1e-4,
                             sliding_window=9, tie_word_embeddings=True),
    # Every bias that Llama may have, and the third activation.
    biased_llama=FAMILY | dict(num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True,
                               hidden_act="gelu", tie_word_embeddings=False),
)
BATCH, SEQ_LEN = 3, 70
OPTIMIZER = dict(learning_rate=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, max_grad_norm=0.5)


def mix(x):
    """A permutation of 32-bit integers (Ettinger's triple32, its first two rounds)."""
    x = x.astype(np.uint32)
    with np.errstate(over="ignore"):
        x ^= x >> np.uint32(17)
        x *= np.uint32(0xED5AD4BB)
        x ^= x >> np.uint32(11)
        x *= np.uint32(0xAC4C1B51)
        x ^= x >> np.uint32(15)
    return x


def hash_name(name):
    """FNV-1a, 32 bits."""
    h = 0x811C9DC5
    for byte in name.encode():
        h = ((h ^ byte) * 0x01000193) & 0xFFFFFFFF
    return h


def uniform(name, count):
    """`count` numbers in [-1, 1), exact in f32: 24 bits of mix(index + hash of the name)."""
    index = (np.arange(count, dtype=np.uint64) + hash_name(name)) & 0xFFFFFFFF
    return (mix(index) >> np.uint32(8)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)


def weights(name, shape, model_type):
    """The factors of norms are near one, all others near zero."""
    values = np.float32(0.25) * uniform(name, int(np.prod(shape))).reshape(shape)
    is_factor = len(shape) == 1 and name.endswith("weight") and model_type != "gemma"
    return np.float32(1) + values if is_factor else values


def file_name(name, model_type):
    """Of a parameter: transformers 5 has another name for GPT-NeoX's head than its files."""
    return name.replace("lm_head.", "embed_out.") if model_type == "gpt_neox" else name


def parameters_of(model):
    return {file_name(n, model.config.model_type): p for n, p in model.named_parameters()}


def batch():
    """Random tokens; the targets are the next ones, without the first of every row and the padding at the end."""
    tokens = (mix(np.arange(BATCH * SEQ_LEN, dtype=np.uint64) + 7) % COMMON["vocab_size"]).reshape(BATCH, SEQ_LEN)
    targets = np.full_like(tokens, 0).astype(np.int64) + IGNORE
    for row, length in enumerate([SEQ_LEN, 41, 2]):
        tokens[row, length:] = 0
        targets[row, 1:length - 1] = tokens[row, 2:length]
    return tokens.astype(np.int64), targets


def logits_of(model, tokens):
    return model(input_ids=torch.tensor(tokens), use_cache=False).logits


def summed_loss(model, tokens, targets):
    logits = logits_of(model, tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(targets).flatten(), ignore_index=IGNORE,
                                             reduction="sum")


def rounded_gradients(model, tokens, targets):
    """Loss and gradients under autocast to bf16, with f32 weights."""
    model = model.float()
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = summed_loss(model, tokens, targets)
    loss.backward()
    gradients = {n: p.grad.numpy().astype(np.float64) for n, p in parameters_of(model).items()}
    model.zero_grad()
    model.double()
    return loss.item(), gradients


def relative(got, expected):
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def run(name, case):
    model_type = case.get("model_type", "llama")
    keys = {k: v for k, v in COMMON.items() if not (model_type in OTHER_NAMES and k in OTHER_NAMES[model_type])} | case
    settings = {k: v for k, v in keys.items() if k not in ("rope_theta", "rope_scaling", "model_type", "rotary_pct")}
    if model_type != "gpt2":
        rope = dict(rope_type="default") | keys.get("rope_scaling", {}) | dict(rope_theta=keys.get("rope_theta", 10000.0))
        if "rotary_pct" in keys:
            rope |= dict(partial_rotary_factor=keys["rotary_pct"])
        settings |= dict(rope_parameters=rope)
    config = AutoConfig.for_model(model_type, **settings)
    config._attn_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config).double().train()
    parameters = parameters_of(model)
    with torch.no_grad():
        for parameter_name, parameter in parameters.items():
            parameter.copy_(torch.tensor(weights(parameter_name, tuple(parameter.shape), model_type)).double())
    tokens, targets = batch()
    count = int((targets != IGNORE).sum())

    with torch.no_grad():
        logits = logits_of(model, tokens[:1])[0].float().numpy()
    loss = summed_loss(model, tokens, targets)
    loss.backward()
    gradients = {n: p.grad.float().numpy().copy() for n, p in parameters.items()}
    rounded_loss, rounded = rounded_gradients(model, tokens, targets)
    autocast = dict(summed_loss=rounded_loss, relative_errors={n: relative(rounded[n], g) for n, g in gradients.items()})

    o = OPTIMIZER
    matrices, norms = [p for p in parameters.values() if p.dim() > 1], [p for p in parameters.values() if p.dim() == 1]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=o["weight_decay"]), dict(params=norms, weight_decay=0.0)],
                                  lr=o["learning_rate"], betas=(o["beta1"], o["beta2"]), eps=o["epsilon"])
    losses, norms_seen = [], []
    for _ in range(10):
        optimizer.zero_grad()
        mean = summed_loss(model, tokens, targets) / count
        mean.backward()
        norms_seen.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), o["max_grad_norm"])))
        optimizer.step()
        losses.append(mean.item())
    assert norms_seen[0] > o["max_grad_norm"], "clipping is not exercised"

    record = dict(config=keys, batch=BATCH, seq_len=SEQ_LEN, optimizer=o, summed_loss=loss.item(), targets=count,
                  autocast=autocast, losses=losses, gradient_norms=norms_seen, torch=torch.__version__.split("+")[0])
    (HERE / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    save_file(gradients | dict(tokens=tokens.astype(np.int32), targets=targets.astype(np.int32), logits=logits),
              HERE / f"{name}.safetensors")
    print(name, count, "targets", [round(x, 4) for x in losses], [round(x, 3) for x in norms_seen])


for name in sys.argv[1:] or CASES:
    run(name, CASES[name])
