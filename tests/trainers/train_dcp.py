"""A training script that shards its model with FSDP 2 and saves with torch's distributed checkpoint (DCP): every rank
writes its shards, and a world of another size loads them. It knows nothing of Evenkeel but the form of its records.

    python train_dcp.py --per-device-batch-size 6 --gradient-accumulation-steps 1 --checkpoints DIR --record FED
"""
import argparse
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

p = argparse.ArgumentParser()
p.add_argument("--per-device-batch-size", type=int, required=True)
p.add_argument("--gradient-accumulation-steps", type=int, required=True)
p.add_argument("--checkpoints", required=True)
p.add_argument("--resume")
p.add_argument("--steps", type=int, default=1000)
p.add_argument("--save-every", type=int, default=20)
p.add_argument("--record", required=True)
a = p.parse_args()

leaving = False


def leave(*_):
    global leaving
    leaving = True


signal.signal(signal.SIGTERM, leave)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
micro, passes = a.per_device_batch_size, a.gradient_accumulation_steps

VOCABULARY, LENGTH, SAMPLES = 32, 16, 600
torch.manual_seed(7)
# Sizes that no world divides: shards have unequal lengths.
model = nn.Sequential(nn.Embedding(VOCABULARY, 30), nn.Linear(30, 65), nn.GELU(), nn.Linear(65, VOCABULARY))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)


def state(step):
    weights, moments = get_state_dict(model, optimiser)
    return dict(model=weights, optimiser=moments, step=step)


step = 0
if a.resume:
    loaded = state(0)
    dcp.load(loaded, checkpoint_id=a.resume)
    set_state_dict(model, optimiser, model_state_dict=loaded["model"], optim_state_dict=loaded["optimiser"])
    step = loaded["step"]


def save():
    path = os.path.join(a.checkpoints, f"step-{step}")
    dcp.save(state(step), checkpoint_id=path + ".tmp")
    dist.barrier()
    if rank == 0:
        os.rename(path + ".tmp", path)


def text(index):
    return (torch.arange(LENGTH + 1) * (1 + index % 5) + index) % VOCABULARY


os.makedirs(a.record, exist_ok=True)
name = f"generation-{os.environ.get('EVENKEEL_GENERATION', '1')}-rank-{rank}.jsonl"
record = open(os.path.join(a.record, name), "w", buffering=1)

while step < a.steps:
    time.sleep(0.05)  # a fast machine would train to the end before a test disturbs it
    fed, total = [], 0.0
    for i in range(passes):
        start = step * micro * passes * world + (i * world + rank) * micro
        indices = [position * 7 % SAMPLES for position in range(start, start + micro)]
        rows = torch.stack([text(index) for index in indices])
        model.set_requires_gradient_sync(i == passes - 1)
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        (loss / passes).backward()
        fed += indices
        total += loss.item() / passes
    record.write(json.dumps(dict(step=step + 1, samples=fed)) + "\n")
    optimiser.step()
    optimiser.zero_grad()
    step += 1
    news = torch.tensor([total / world, float(leaving)])
    dist.all_reduce(news)
    record.write(json.dumps(dict(step=step, loss=news[0].item())) + "\n")
    drain = news[1].item() > 0
    if drain or step % a.save_every == 0 or step == a.steps:
        save()
    if drain:
        sys.exit(143)
dist.destroy_process_group()
