"""The norm test of a DPO run, replayed by PyTorch from its recipe alone.

    norm_replay.py MODEL ROWS BETA RATE ETA BATCH MICRO_BATCH QUANTUM MOST STEPS

ROWS is JSONL of texts, read in order, of which BATCH are the first step, and at most MOST a step. Prints JSON: of each step its batch, r, B_simple and
the next batch, as docs/norm-test.md defines them, without smoothing, a growth cap of 2.
"""

import json
import math
import sys

import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, AutoTokenizer


def log_probability(model, tokenizer, prompt, completion):
    prompt = tokenizer(prompt)["input_ids"]
    completion = tokenizer(completion, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, :-1].log_softmax(-1)
    of_tokens = logits.gather(1, torch.tensor(prompt[1:] + completion)[:, None])[:, 0]
    return of_tokens[len(prompt) - 1 :].sum()


def main():
    path, rows, *numbers = sys.argv[1:]
    beta, rate, eta = map(float, numbers[:3])
    batch, micro_batch, quantum, most, steps = map(int, numbers[3:])
    tokenizer = AutoTokenizer.from_pretrained(path)
    model, reference = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for _ in range(2))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    samples = iter([json.loads(line) for line in open(rows)])
    found = []
    for _ in range(steps):
        total, a = [torch.zeros_like(p) for p in parameters], 0.0
        groups = batch // micro_batch
        for _ in range(groups):
            loss = 0
            for row in (next(samples) for _ in range(micro_batch)):
                sides = []
                for name in ("chosen", "rejected"):
                    texts = row["prompt"], row[name]
                    with torch.no_grad():
                        before = log_probability(reference, tokenizer, *texts)
                    sides.append(log_probability(model, tokenizer, *texts) - before)
                loss = loss - logsigmoid(beta * (sides[0] - sides[1])) / batch
            gradient = torch.autograd.grad(loss, parameters)
            a += groups * sum(g.double().square().sum().item() for g in gradient)
            total = [t + g for t, g in zip(total, gradient)]
        c = sum(t.double().square().sum().item() for t in total)
        variance = batch * (a - c) / (groups - 1)
        squared = (groups * c - a) / (groups - 1)
        r = variance / (batch * squared + variance) if squared > 0 else 1.0
        target = batch * r / eta**2
        after = min(max(batch, math.ceil(target / quantum) * quantum), 2 * batch, most)
        found.append(dict(batch=batch, ratio=r, noise_scale=variance / squared if squared > 0 else None, next_batch=after))
        for p, t in zip(parameters, total):
            p.grad = t / max(1.0, math.sqrt(c))
        optimizer.step()
        batch = after
    print(json.dumps(found))


main()
