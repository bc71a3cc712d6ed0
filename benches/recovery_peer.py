"""One rank under torchrun's elastic agent: the model of recovery.py, DDP over gloo, a checkpoint
every five steps, a step's record in the file that is the only argument."""
import json, os, pathlib, sys, time
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist

WIDTH, HEADS, LAYERS, FF, VOCAB, SEQ, GLOBAL = 256, 8, 8, 688, 4096, 64, 12
log = pathlib.Path(sys.argv[1])
saved = log.with_suffix(".pt")
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, FF, bias=False), nn.Linear(WIDTH, FF, bias=False)
        self.down = nn.Linear(FF, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.o(y)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


model = nn.Sequential(nn.Embedding(VOCAB, WIDTH), *[Block() for _ in range(LAYERS)], nn.RMSNorm(WIDTH),
                      nn.Linear(WIDTH, VOCAB, bias=False))
optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
step = 0
if saved.exists():
    state = torch.load(saved, weights_only=True)
    model.load_state_dict(state["model"])
    optimiser.load_state_dict(state["optimiser"])
    step = state["step"]
# torchrun keeps the per-device batch: what the recipe meant by its global batch shrinks with the world.
micro = GLOBAL // 3
ddp = nn.parallel.DistributedDataParallel(model)
while step < 100000:
    torch.manual_seed(step * 1000 + rank)
    x = torch.randint(VOCAB, (micro, SEQ + 1))
    loss = F.cross_entropy(ddp(x[:, :-1]).reshape(-1, VOCAB), x[:, 1:].reshape(-1))
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
