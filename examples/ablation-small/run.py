#!/usr/bin/env python3
"""Runs the small ablation with several seeds per setting and plots the results.

    cargo build --release
    python3 examples/ablation-small/run.py runs/ablation-small

Finished runs are skipped. The plot goes to docs/img/ablation.svg, the table to
standard output, as Markdown. Python's standard library is enough.
"""

import argparse
import collections
import json
import math
import pathlib
import statistics
import subprocess

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent

# Axis of the ablation, name in the table, recipe, overrides.
GRID = [
    ("eta", "η 0.4", "norm-test", ["schedule.eta=0.4"]),
    ("eta", "η 0.5", "norm-test", ["schedule.eta=0.5"]),
    ("eta", "η 0.6", "norm-test", []),
    ("eta", "η 0.7", "norm-test", ["schedule.eta=0.7"]),
    ("eta", "η 0.8", "norm-test", ["schedule.eta=0.8"]),
    ("interval", "interval 4", "norm-test", ["schedule.interval=4"]),
    ("interval", "interval 16", "norm-test", ["schedule.interval=16"]),
    ("maximum", "maximum 128", "norm-test", ["schedule.max_batch=128"]),
    ("maximum", "maximum 256", "norm-test", ["schedule.max_batch=256"]),
    (
        "guards",
        "no guards",
        "norm-test",
        ["schedule.ema=0", "schedule.growth_cap=null", "schedule.after_warmup=false"],
    ),
    ("constant", "constant 16", "constant", ["batch.global=16"]),
    ("constant", "constant 64", "constant", []),
    ("constant", "constant 128", "constant", ["batch.global=128"]),
    ("constant", "constant 256", "constant", ["batch.global=256"]),
    ("constant", "constant 512", "constant", ["batch.global=512"]),
    ("stage-wise", "stage-wise", "stage-wise", []),
]

# The language's entropy: every word has four successors with weights 1, 1/2, 1/3, 1/4.
WEIGHTS = [1 / k for k in range(1, 5)]
ENTROPY = -sum(w / sum(WEIGHTS) * math.log(w / sum(WEIGHTS)) for w in WEIGHTS)

Result = collections.namedtuple("Result", "axis name seed steps evaluations")


def run(binary, out, axis, name, recipe, overrides, seed):
    """Trains a run unless it has finished before, and reads its metrics."""
    slug = name.replace("η", "eta").replace(" ", "-")
    directory = out / f"{slug}-seed-{seed}"
    done = directory / "done"
    if not done.exists():
        command = [binary, "launch", HERE / f"{recipe}.yaml", "--procs", "1", "--quiet"]
        command += ["--out", directory, f"seed={seed}", *overrides]
        subprocess.run([str(part) for part in command], check=True)
        done.touch()
    lines = []
    for path in sorted(directory.glob("gen-*/metrics.jsonl")):
        lines += [json.loads(line) for line in path.read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    return Result(axis, name, seed, steps, evaluations)


def excess(result):
    """Final evaluation loss above the entropy, nats per token."""
    return result.evaluations[-1]["loss"] - ENTROPY


def table(results):
    print("| schedule | steps | mean batch | largest batch | loss above the entropy |")
    print("|---|---:|---:|---:|---:|")
    for axis, name, _, _ in GRID:
        same = [r for r in results if r.name == name]
        steps = statistics.mean(len(r.steps) for r in same)
        mean = statistics.mean(r.steps[-1]["samples"] / len(r.steps) for r in same)
        largest = statistics.mean(max(s["batch"] for s in r.steps) for r in same)
        above = [excess(r) for r in same]
        spread = f"{statistics.mean(above):.4f} ({min(above):.4f}–{max(above):.4f})"
        print(f"| {name} | {steps:.0f} | {mean:.0f} | {largest:.0f} | {spread} |")


class Panel:
    """A plot with logarithmic axes on request, as SVG."""

    def __init__(self, box, title, x, y):
        self.left, self.top, self.width, self.height = box
        self.x, self.y = x, y  # (label, low, high, ticks, logarithmic)
        self.parts = []
        self.text(self.left, self.top - 12, title, "title")
        for tick in x[3]:
            at = self.place(tick, y[1])[0]
            self.line([(at, self.top), (at, self.top + self.height)], "grid")
            self.text(at, self.top + self.height + 16, f"{tick:g}", "tick middle")
        for tick in y[3]:
            at = self.place(x[1], tick)[1]
            self.line([(self.left, at), (self.left + self.width, at)], "grid")
            self.text(self.left - 6, at + 4, f"{tick:g}", "tick end")
        self.text(self.left + self.width / 2, self.top + self.height + 34, x[0], "tick middle")
        self.text(self.left, self.top + 14, y[0], "tick", dx=6)

    def place(self, x, y):
        def share(value, axis):
            _, low, high, _, logarithmic = axis
            if logarithmic:
                value, low, high = math.log(max(value, low)), math.log(low), math.log(high)
            return (value - low) / (high - low)

        return (
            self.left + self.width * share(x, self.x),
            self.top + self.height * (1 - share(y, self.y)),
        )

    def text(self, x, y, text, css, dx=0):
        self.parts.append(f'<text x="{x + dx:.1f}" y="{y:.1f}" class="{css}">{text}</text>')

    def line(self, points, css, colour=None):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        stroke = f' style="stroke:{colour}"' if colour else ""
        self.parts.append(f'<polyline points="{path}" class="{css}"{stroke}/>')

    def curve(self, points, colour, css="curve"):
        self.line([self.place(x, y) for x, y in points], css, colour)

    def dot(self, x, y, colour):
        x, y = self.place(x, y)
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill:{colour}"/>')


COLOURS = {
    "η 0.4": "#0b3c5d",
    "η 0.5": "#1f6f9f",
    "η 0.6": "#3a9bdc",
    "η 0.7": "#5fbf9f",
    "η 0.8": "#8fcf5f",
    "constant 16": "#b0413e",
    "constant 64": "#c8663a",
    "constant 128": "#d98b3a",
    "constant 256": "#e5ae4a",
    "constant 512": "#efcf6a",
    "stage-wise": "#7a4fa3",
}
OF_AXIS = {"interval": "#808080", "maximum": "#303030", "guards": "#d63e9a"}
STYLE = """
  svg { background: #ffffff; font-family: system-ui, sans-serif; }
  text { fill: #222222; } .title { font-size: 15px; font-weight: 600; }
  .tick { font-size: 12px; } .middle { text-anchor: middle; } .end { text-anchor: end; }
  .grid { fill: none; stroke: #e4e4e4; } .curve { fill: none; stroke-width: 1.8; }
  .dashed { fill: none; stroke-width: 1.8; stroke-dasharray: 5 4; }
"""


def colour(result):
    return COLOURS.get(result.name) or OF_AXIS[result.axis]


def draw(results):
    budget = max(r.steps[-1]["samples"] for r in results)
    thousand = [0, 10_000, 20_000, 30_000]
    losses = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2]
    first = [r for r in results if r.seed == 1]
    batches = Panel(
        (60, 50, 380, 300),
        "The batch, by the norm test (seed 1)",
        ("samples consumed", 0, budget, thousand, False),
        ("global batch", 12, 700, [16, 32, 64, 128, 256, 512], True),
    )
    curves = Panel(
        (520, 50, 380, 300),
        "Evaluation loss above the entropy (seed 1)",
        ("samples consumed", 0, budget, thousand, False),
        ("nats per token", 0.005, 3, losses, True),
    )
    for result in first:
        if result.axis == "eta":
            points = [(s["samples"] - s["batch"], s["batch"]) for s in result.steps]
            batches.curve(points, colour(result))
        if result.axis in ("eta", "constant", "stage-wise"):
            points = [(e["samples"], e["loss"] - ENTROPY) for e in result.evaluations]
            css = "curve" if result.axis == "eta" else "dashed"
            curves.curve(points, colour(result), css)
    frontier = Panel(
        (60, 450, 620, 360),
        "What it cost and what it gave, every run",
        ("optimiser steps", 50, 2200, [50, 100, 200, 500, 1000, 2000], True),
        ("loss above the entropy at the end", 0.005, 0.6, losses[:7], True),
    )
    for result in results:
        frontier.dot(len(result.steps), excess(result), colour(result))
    legend = Panel((720, 450, 0, 0), "", ("", 0, 1, [], False), ("", 0, 1, [], False))
    names = list(COLOURS.items())
    names += [(axis, shade) for axis, shade in OF_AXIS.items()]
    words = {"interval": "interval 4, 16 (η 0.6)", "maximum": "maximum 128, 256 (η 0.6)"}
    words["guards"] = "no guards (η 0.6)"
    for i, (name, shade) in enumerate(names):
        y = 470 + 24 * i
        legend.parts.append(f'<circle cx="726" cy="{y - 4}" r="5" style="fill:{shade}"/>')
        legend.text(740, y, words.get(name, name), "tick")
    parts = [part for p in (batches, curves, frontier, legend) for part in p.parts]
    size = 'viewBox="0 0 940 870" width="940" height="870"'
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>\n'
    svg += '<rect width="940" height="870" style="fill:#ffffff"/>\n'
    svg += "\n".join(parts) + "\n</svg>\n"
    target = ROOT / "docs" / "img" / "ablation.svg"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(svg)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=pathlib.Path, help="directory of the runs")
    parser.add_argument("--binary", default=ROOT / "target/release/evenkeel")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 1 to this one (3)")
    arguments = parser.parse_args()
    seeds = range(1, arguments.seeds + 1)
    results = [run(arguments.binary, arguments.out, *row, seed) for seed in seeds for row in GRID]
    table(results)
    draw(results)


if __name__ == "__main__":
    main()
