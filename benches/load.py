#!/usr/bin/env python3
"""The time and the peak memory of loading a checkpoint as f32: Evenkeel's and transformers', A B A B …

    python3 benches/load.py --python VENV/bin/python --pairs 5          # 2 GB of bf16 in a temporary folder

Each process loads once. Its time begins after it has started and imported what it needs. Every pair runs both with the
files out of the page cache, then both with the files in it. Peak memory includes the program: `before` is what a Python
with transformers has before it loads. `--engine` loads into Evenkeel's CPU engine, with gradients and AdamW's moments.
"""
import argparse, json, os, pathlib, statistics, subprocess, sys, tempfile

here = pathlib.Path(__file__).resolve().parent
SHAPE = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, vocab_size=32000,
             num_hidden_layers=14, max_position_embeddings=2048)
MAKE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, LlamaConfig
torch.set_default_dtype(torch.bfloat16)
model = AutoModelForCausalLM.from_config(LlamaConfig(**json.loads(sys.argv[2])))
model.save_pretrained(sys.argv[1], max_shard_size="1GB")
"""
PEER = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
def memory(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) >> 10
before, began = memory("VmRSS"), time.perf_counter()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
seconds = time.perf_counter() - began
print(json.dumps(dict(seconds=seconds, parameters=model.num_parameters(), peak_rss_mb=memory("VmHWM"), before=before)))
"""
p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
p.add_argument("--python", default=sys.executable, help="the Python that has transformers")
p.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
p.add_argument("--pairs", type=int, default=5)
p.add_argument("--engine", action="store_true")
a = p.parse_args()


def measure(command):
    output = subprocess.run(command, capture_output=True, text=True, cwd=here.parent, env=os.environ | dict(HF_HUB_OFFLINE="1"))
    lines = [line for line in output.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{command}: {output.stderr[-2000:]}")
    return json.loads(lines[-1])


def forget(folder):
    """Takes the files out of the page cache; they are on the disk already."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


subprocess.run(["cargo", "bench", "--bench", "load", "--no-run"], cwd=here.parent, check=True)
with tempfile.TemporaryDirectory() as folder:
    shape = json.dumps(SHAPE | dict(num_hidden_layers=a.layers))
    subprocess.run([a.python, "-c", MAKE, folder, shape], check=True, capture_output=True)
    size = sum(path.stat().st_size for path in pathlib.Path(folder).glob("*.safetensors"))
    print(json.dumps(dict(bytes=size, files=len(list(pathlib.Path(folder).glob("*.safetensors"))))), flush=True)
    ours = ["cargo", "bench", "-q", "--bench", "load", "--", folder] + ["--engine"] * a.engine
    theirs = [a.python, "-c", PEER, folder]
    times, memory = dict(cold=[], warm=[]), []
    for pair in range(a.pairs):
        for cache in times:
            found = []
            for command in (ours, theirs):
                if cache == "cold":
                    forget(pathlib.Path(folder))
                found.append(measure(command))
            own, peer = found
            assert own["parameters"] == peer["parameters"], found
            times[cache].append(own["seconds"] / peer["seconds"])
            memory.append(own["peak_rss_mb"] / peer["peak_rss_mb"])
            print(json.dumps(dict(pair=pair + 1, cache=cache, evenkeel=own, transformers=peer,
                                  ratio=round(times[cache][-1], 3))), flush=True)
    print(json.dumps(dict(median_ratio={cache: round(statistics.median(values), 3) for cache, values in times.items()},
                          lowest={cache: round(min(values), 3) for cache, values in times.items()},
                          highest={cache: round(max(values), 3) for cache, values in times.items()},
                          memory_ratio=round(statistics.median(memory), 3))))
