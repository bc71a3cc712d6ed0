#!/usr/bin/env python3
"""Tokens/s, losses and batches of each generation of a run, from its metrics: rates.py RUN"""
import json, pathlib, statistics, sys

run = pathlib.Path(sys.argv[1])
for metrics in sorted(run.glob("gen-*/metrics.jsonl"), key=lambda path: int(path.parent.name[4:])):
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    if not steps:
        continue
    # The first steps load kernels and capture graphs.
    settled = steps[len(steps) // 2:]
    print(json.dumps({
        "result": "generation", "run": run.name, "generation": steps[0]["generation"], "steps": len(steps),
        "tokens_per_second": statistics.median(line["tokens"] / line["seconds"] for line in settled),
        "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"], "first_batch": steps[0]["batch"],
        "last_batch": steps[-1]["batch"], "samples": steps[-1]["samples"],
    }))
