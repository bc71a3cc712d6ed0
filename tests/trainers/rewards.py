"""The mean rewards of a trained model over pairs, by transformers.

    rewards.py START TRAINED ROWS BETA [ended]

START and TRAINED are folders of models; ROWS is JSONL with `prompt`, or without it, `chosen` and `rejected`: texts or messages.
`ended`: the end-of-sequence token follows each completion. Prints JSON: the means of β · log-ratio of both, and the share of
pairs whose chosen completion has the larger one.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def rendered(tokenizer, row, name):
    prompt, completion = row.get("prompt"), row[name]
    if isinstance(completion, str):
        return prompt, completion
    if prompt is None:
        prompt, completion = completion[:-1], completion[-1:]
    prefix = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(prompt + completion, tokenize=False)
    assert whole.startswith(prefix)
    return prefix, whole[len(prefix) :]


def log_probability(model, prompt, completion):
    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    of_tokens = logits.gather(1, ids[0, 1:, None])[:, 0]
    return of_tokens[len(prompt) - 1 :].sum().item()


def main():
    start, trained, rows, beta, *ended = sys.argv[1:]
    tokenizer = AutoTokenizer.from_pretrained(trained)
    models = []
    for path in (start, trained):
        model, loading = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
        assert not any(loading.values()), f"{path}: {loading}"
        models.append(model)
    rewards = []
    for line in open(rows):
        pair = []
        for name in ("chosen", "rejected"):
            texts = rendered(tokenizer, json.loads(line), name)
            prompt, completion = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
            completion += [tokenizer.eos_token_id] * len(ended)
            before, after = (log_probability(model, prompt, completion) for model in models)
            pair.append(float(beta) * (after - before))
        rewards.append(pair)
    chosen, rejected = (sum(side) / len(rewards) for side in zip(*rewards))
    right = sum(a > b for a, b in rewards) / len(rewards)
    print(json.dumps(dict(reward_chosen=chosen, reward_rejected=rejected, accuracy=right)))


main()
