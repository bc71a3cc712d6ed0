"""The command line and the checkpoints of HALOs' `launch.py` (4831988), around a tiny model under DDP: Hydra's overrides,
`step-N` after N samples, `model.from_checkpoint`. HALOs itself needs accelerate 0.33, and its FSDP needs GPUs. Unlike
HALOs it restores its optimiser and counts the samples of every start.
"""
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# Overrides without the tree below `config`; `+` and `++` add keys.
config = dict(word.lstrip("+").partition("=")[::2] for word in sys.argv[1:])
batch, passes = int(config["model.batch_size"]), int(config.get("model.gradient_accumulation_steps", 1))
total, every = int(config["n_examples"]), int(config["eval_every"])
folder = os.path.join(config["cache_dir"], config["exp_name"])

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
# HALOs' batch is global.
micro, left = divmod(batch, world * passes)
assert left == 0, f"{batch} samples over {world} x {passes}"

VOCABULARY, LENGTH, SAMPLES = 32, 16, 480
torch.manual_seed(1)
model = DDP(nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, VOCABULARY)))
optimiser = torch.optim.AdamW(model.parameters(), lr=float(config["lr"]))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: min(1.0, (step + 1) / 10))
counted = 0
if source := config.get("model.from_checkpoint"):
    for name, part in [("policy", model.module), ("optimizer", optimiser), ("scheduler", scheduler)]:
        part.load_state_dict(torch.load(os.path.join(source, name + ".pt"), weights_only=True))
    with open(os.path.join(source, "metrics.json")) as file:
        counted = json.load(file)["counter"]


def save():
    path = os.path.join(folder, f"step-{counted}")
    os.makedirs(path + ".tmp")
    for name, part in [("policy", model.module), ("optimizer", optimiser), ("scheduler", scheduler)]:
        torch.save(part.state_dict(), os.path.join(path + ".tmp", name + ".pt"))
    # HALOs saves its model with a `config.json`.
    for name, values in [("metrics", {"counter": counted}), ("config", {})]:
        with open(os.path.join(path + ".tmp", name + ".json"), "w") as file:
            json.dump(values, file)
    os.rename(path + ".tmp", path)


record = os.environ["RECORD"]
os.makedirs(record, exist_ok=True)
name = f"generation-{os.environ['EVENKEEL_GENERATION']}-rank-{rank}.jsonl"
record = open(os.path.join(record, name), "w", buffering=1)

while counted < total:
    step, fed, loss_of_step = counted // batch + 1, [], 0.0
    for i in range(passes):
        start = counted + (i * world + rank) * micro
        indices = [position * 7 % SAMPLES for position in range(start, start + micro)]
        rows = torch.stack([(torch.arange(LENGTH + 1) * (1 + index % 5) + index) % VOCABULARY for index in indices])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        # Gradients of all passes are averaged over the ranks: no pass needs `no_sync`.
        (loss / passes).backward()
        fed += indices
        loss_of_step += loss.item() / passes
    record.write(json.dumps(dict(step=step, samples=fed)) + "\n")
    optimiser.step()
    scheduler.step()
    optimiser.zero_grad()
    counted += batch
    mean = torch.tensor(loss_of_step / world)
    dist.all_reduce(mean)
    record.write(json.dumps(dict(step=step, loss=mean.item())) + "\n")
    if rank == 0 and counted % every == 0:
        save()
dist.destroy_process_group()
