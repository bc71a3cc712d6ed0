"""One replica group of one rank under torchft: the model of recovery.py, torchft's DDP and optimiser over gloo. A killed
replica that is started again takes the state of a peer; nothing is written to disk. The replica with participating rank 0
writes a step's record into the file that is the first argument; the second is the lighthouse's address, the third the
replica's number."""
import json, pathlib, socket, sys, time

# torchft announces its servers under the host's name. Everything here is on loopback.
socket.gethostname = lambda: "localhost"
from datetime import timedelta
import torch, torch.nn as nn
import torch.distributed as dist
import peer_model
import torchft

log, lighthouse, number = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
model = peer_model.model()
adam = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def state():
    return dict(model=model.state_dict(), optimiser=adam.state_dict())


def take(given):
    model.load_state_dict(given["model"])
    adam.load_state_dict(given["optimiser"])


class DistributedDataParallel(torchft.DistributedDataParallel):
    """With torchft 0.2.0's own hook, all survivors of a killed replica end with `assert fut._fut` (ddp.py): gloo raises in
    `wait`, before the future is there. The run would begin at step 0 again after every fault."""

    @staticmethod
    def _comm_hook(state, bucket):
        state.allreduce(bucket.buffer()).wait()
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
manager = torchft.Manager(
    # The timeout of torchft's own example: a survivor may wait so long for another one.
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)), load_state_dict=take, state_dict=state, min_replica_size=1,
    timeout=timedelta(seconds=30), rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
    lighthouse_addr=lighthouse, replica_id=f"replica_{number}", hostname="localhost")
# As under torchrun, the batch of a step shrinks with the world. Only what was committed counts.
micro = peer_model.GLOBAL // 3
ddp = DistributedDataParallel(manager, model)
optimiser = torchft.Optimizer(manager, adam)
while True:
    optimiser.zero_grad()
    peer_model.loss(ddp, micro, manager.current_step() * 1000 + number).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = manager.current_step()
    optimiser.step()
    if manager.current_step() > before and manager.participating_rank() == 0:
        with log.open("a") as out:
            out.write(json.dumps(dict(step=manager.current_step(), world=manager.num_participants(),
                                      samples=micro * manager.batches_committed(), time=time.time())) + "\n")
