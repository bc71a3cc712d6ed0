"""A typical PyTorch training script: DistributedDataParallel, gradient accumulation, checkpoints.
It does not depend on Evenkeel. Three habits, marked below, keep a run exact while its world changes:

1. the samples of a step depend on a position in one global order, not on the rank;
2. on SIGTERM the ranks agree on a step, rank 0 saves, and all exit with 143;
3. a checkpoint is written atomically and stores the number of consumed samples.

    evenkeel launch examples/pytorch/recipe.yaml --procs 2 -- python examples/pytorch/train_ddp.py \
      --per-device-batch-size {per_device_batch_size} \
      --gradient-accumulation-steps {gradient_accumulation_steps} \
      --checkpoints {checkpoint_dir} {resume_args}
"""
import argparse
import json
import os
import signal
import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

p = argparse.ArgumentParser()
p.add_argument("--per-device-batch-size", type=int, required=True)
p.add_argument("--gradient-accumulation-steps", type=int, required=True)
p.add_argument("--checkpoints", required=True, help="checkpoint directory")
p.add_argument("--resume", help="checkpoint to resume from")
p.add_argument("--steps", type=int, default=1000)
p.add_argument("--save-every", type=int, default=50, help="steps")
p.add_argument("--samples", type=int, default=1200, help="length of the data")
p.add_argument("--seed", type=int, default=7)
p.add_argument("--record", help="directory in which to record the samples of every step")
a = p.parse_args()

leaving = False


def leave(*_):
    global leaving
    leaving = True


signal.signal(signal.SIGTERM, leave)
gpu = torch.cuda.is_available()
dist.init_process_group("nccl" if gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
micro, passes = a.per_device_batch_size, a.gradient_accumulation_steps
batch = micro * passes * world

VOCABULARY, LENGTH = 32, 16
torch.manual_seed(a.seed)
model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY))
model = DDP(model.to(device), device_ids=[device.index] if gpu else None)
optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
step = samples = 0
if a.resume:
    state = torch.load(a.resume, map_location=device, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    step, samples = state["step"], state["samples"]
if rank == 0:
    print(f"world {world}: {world} x {micro} x {passes} = {batch}, from step {step}", flush=True)


def text(index):
    """A sample: a walk over the vocabulary, determined by its index."""
    walk = torch.arange(LENGTH + 1) * (1 + index % 5) + index
    return walk % VOCABULARY


def order(epoch):
    return torch.randperm(a.samples, generator=torch.Generator().manual_seed(a.seed + epoch))


def at(position):
    """The sample at a position of the global order (habit 1)."""
    epoch, place = divmod(position, a.samples)
    if epoch not in at.orders:
        at.orders = {epoch: order(epoch)}
    return int(at.orders[epoch][place])


at.orders = {}


def save():
    """Writes a checkpoint atomically (habit 3)."""
    path = os.path.join(a.checkpoints, f"step-{step:07}.pt")
    torch.save(dict(model=model.module.state_dict(), optimiser=optimiser.state_dict(), step=step, samples=samples),
               path + ".tmp")
    os.replace(path + ".tmp", path)


record = None
if a.record:
    os.makedirs(a.record, exist_ok=True)
    name = f"generation-{os.environ['EVENKEEL_GENERATION']}-rank-{rank}.jsonl"
    record = open(os.path.join(a.record, name), "w", buffering=1)

while step < a.steps:
    fed, total = [], 0.0
    for i in range(passes):
        start = samples + (i * world + rank) * micro
        indices = [at(position) for position in range(start, start + micro)]
        rows = torch.stack([text(index) for index in indices]).to(device)
        with nullcontext() if i == passes - 1 else model.no_sync():
            loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            # Equal micro-batches: the mean of their means is the mean of the global batch.
            (loss / passes).backward()
        fed += indices
        total += loss.item() / passes
    optimiser.step()
    optimiser.zero_grad()
    step, samples = step + 1, samples + batch
    if record:
        # Before the exchange: once it succeeds, rank 0 may save this step even if this process dies.
        record.write(json.dumps(dict(step=step, samples=fed)) + "\n")
    # One small all-reduce: the loss to print, and whether a rank received SIGTERM (habit 2).
    news = torch.tensor([total / world, float(leaving)], device=device)
    dist.all_reduce(news)
    if record:
        record.write(json.dumps(dict(step=step, loss=news[0].item())) + "\n")
    drain = news[1].item() > 0
    if rank == 0:
        if step % 100 == 0:
            print(f"step {step} loss {news[0].item():.4f}", flush=True)
        if drain or step % a.save_every == 0 or step == a.steps:
            save()
    if drain:
        sys.exit(143)
dist.destroy_process_group()
