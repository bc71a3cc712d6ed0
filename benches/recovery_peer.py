"""One rank under torchrun's elastic agent: the model of recovery.py, DDP over gloo, a checkpoint
every five steps, a step's record in the file that is the only argument."""
import json, os, pathlib, sys, time
import torch, torch.nn as nn
import torch.distributed as dist
import peer_model

log = pathlib.Path(sys.argv[1])
saved = log.with_suffix(".pt")
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


model = peer_model.model()
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
step = 0
if saved.exists():
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    step = state["step"]
# torchrun keeps the per-device batch: what the recipe meant by its global batch shrinks with the world.
micro = peer_model.GLOBAL // 3
ddp = nn.parallel.DistributedDataParallel(model)
while step < 100000:
    loss = peer_model.loss(ddp, micro, step * 1000 + rank)
    optimiser.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    step += 1
    if rank == 0:
        with log.open("a") as out:
            out.write(json.dumps(dict(step=step, world=world, batch=micro * world, time=time.time())) + "\n")
        if step % 5 == 0:
            torch.save(dict(model=model.state_dict(), optimiser=optimiser.state_dict(), step=step), saved.with_suffix(".new"))
            os.replace(saved.with_suffix(".new"), saved)
