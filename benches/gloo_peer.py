"""PyTorch's Gloo, measured as benches/collective.rs measures this crate.

usage: python benches/gloo_peer.py [world] [elements]; 2 ranks and 33.7 MB by default.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROUNDS = 15


def measure(rank, world, elements, port):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    data = torch.ones(elements)
    shard = torch.ones(elements // world)
    operations = {
        "all-reduce": lambda: dist.all_reduce(data),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(shard, data),
        "all-gather": lambda: dist.all_gather_into_tensor(data, shard),
    }
    for name, operation in operations.items():
        times = []
        for _ in range(ROUNDS):
            data.fill_(1.0)
            dist.barrier()
            begun = time.perf_counter()
            operation()
            times.append((time.perf_counter() - begun) * 1e3)
        times.sort()
        if rank == 0:
            print(
                f"{name:15} {4e-6 * elements:.1f} MB, {world} processes: "
                f"best {times[0]:.1f} ms, median {times[len(times) // 2]:.1f} ms"
            )
    dist.destroy_process_group()


def free_port():
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


if __name__ == "__main__":
    world = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    elements = int(sys.argv[2]) if len(sys.argv) > 2 else 8_425_728
    elements -= elements % world
    mp.spawn(measure, (world, elements, free_port()), nprocs=world)
