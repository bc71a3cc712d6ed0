#!/usr/bin/env python3
"""Evenkeel's trainer and PyTorch on the same shapes, A B A B …, and the ratio of their tokens/s.

    python3 benches/paired.py --python VENV/bin/python --peer ../shared/bench/pytorch_llama.py --size 8m --pairs 5
    … --size 46m            … --processes 2 --parallel ddp            … --processes 2 --parallel fsdp

Every pair runs both once, back to back, so that a machine that drifts drifts for both. Quote the
median ratio.
"""
import argparse, json, pathlib, statistics, subprocess, sys

here = pathlib.Path(__file__).resolve().parent
p = argparse.ArgumentParser()
p.add_argument("--peer", default=str(here.parent.parent / "shared/bench/pytorch_llama.py"))
p.add_argument("--python", default=sys.executable, help="the Python that has torch")
p.add_argument("--size", choices=["8m", "46m"], default="8m")
p.add_argument("--processes", type=int, default=1)
p.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
p.add_argument("--pairs", type=int, default=5)
p.add_argument("--steps", type=int, default=20)
a = p.parse_args()

shape = {"8m": dict(layers=8, width=256, heads=8, ff=688, vocab=4096, seq=256),
         "46m": dict(layers=12, width=512, heads=8, ff=1376, vocab=8192, seq=512)}[a.size]
shape |= {"steps": a.steps, "micro-batch": 4}
if a.processes > 1:
    shape |= {"processes": a.processes, "parallel": a.parallel}
arguments = [word for key, value in shape.items() for word in (f"--{key}", str(value))]


def measure(command):
    output = subprocess.run(command, capture_output=True, text=True, cwd=here.parent)
    lines = [line for line in output.stdout.splitlines() if line.startswith("{")]
    if not lines:
        raise SystemExit(f"{command}: {output.stderr[-2000:]}")
    return json.loads(lines[-1])


subprocess.run(["cargo", "bench", "--bench", "trainer", "--no-run"], cwd=here.parent, check=True)
ratios, memory = [], []
for pair in range(a.pairs):
    own = measure(["cargo", "bench", "-q", "--bench", "trainer", "--", *arguments])
    peer = measure([a.python, a.peer, *arguments])
    assert own["parameters"] == peer["parameters"], (own, peer)
    ratios.append(own["tokens_per_second"] / peer["tokens_per_second"])
    memory.append(own["peak_rss_mb"] / peer["peak_rss_mb"])
    print(json.dumps(dict(pair=pair + 1, evenkeel=own["tokens_per_second"], pytorch=peer["tokens_per_second"],
                          ratio=round(ratios[-1], 3), evenkeel_rss_mb=own["peak_rss_mb"],
                          pytorch_rss_mb=peer["peak_rss_mb"])), flush=True)
print(json.dumps(dict(size=a.size, processes=a.processes, parallel=a.parallel if a.processes > 1 else None,
                      median_ratio=round(statistics.median(ratios), 3), lowest=round(min(ratios), 3),
                      highest=round(max(ratios), 3), memory_ratio=round(statistics.median(memory), 3))))
