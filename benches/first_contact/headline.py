#!/usr/bin/env python3
"""The headline of a phase, from the JSON lines of its log: headline.py PHASE LOG"""
import json, sys

phase, path = sys.argv[1:]
text = open(path, errors="replace").read().splitlines()
lines = []
for line in text:
    if line.startswith("{"):
        try:
            lines.append(json.loads(line))
        except ValueError:
            pass


def of(result):
    return [line for line in lines if line.get("result") == result]


def failures(result):
    return sum(line.get("ok") is False for line in of(result))


def launches():
    exact = sum(line["exact"] and "ok" in line for line in of("launch"))
    compared = sum("ok" in line for line in of("launch"))
    failed = sum(line.startswith("test ") and line.endswith("FAILED") for line in text)
    return f"{exact} kernels bitwise, {compared - exact} within bounds, " \
        f'{failures("launch")} differ, {failed} tests failed'


def gradients():
    worst = {}
    for line in of("gradients"):
        error = line["worst_relative_error"]
        worst[line["precision"]] = max(worst.get(line["precision"], 0), float("inf") if error is None else error)
    losses = [f'{line["precision"]} losses {line["worst_relative_error"]:.0e}' for line in of("losses")]
    same = f'same bits {sum(line["ok"] for line in of("same-bits"))} of {len(of("same-bits"))}'
    return [*(f"{name} gradients {error:.0e}" for name, error in worst.items()), *losses, same]


def fastest():
    best = {}
    for line in of("speed") + of("peer"):
        rate = line.get("tokens_per_second")
        if rate and rate > best.get(line["model"], (0, 0))[0]:
            best[line["model"]] = rate, line["micro_batch"]
    return [f"{model} {rate / 1e3:.1f} k tokens/s at {batch}" for model, (rate, batch) in best.items()]


def generations():
    return [f'generation {line["generation"]}: {line["tokens_per_second"] / 1e3:.1f} k tokens/s, loss '
            f'{line["last_loss"]:.3f}, batch {line["last_batch"]}' for line in of("generation")]


def memory(line):
    return f', memory {line["memory_ratio"]:.2f} ×' if line["memory_ratio"] else ""


def ratios():
    return [f'{line["model"]} at {line["seq"]} {line["median_ratio"]:.3f} × the peer{memory(line)}'
            for line in of("ratio")]


HEADLINES = {
    "device": lambda: [f'{line["name"]}, {line["total_bytes"] / 2**30:.1f} GiB, CUDA {line["cuda"]}'
                       for line in of("device")],
    "ceilings": lambda: [f'copy {line["gigabytes_per_second"]:.0f} GB/s' for line in of("copy")] +
                        [f'{line["model"]} products {line["tflops"]:.0f} TFLOP/s, {line["fastest_tflops"]:.0f} by the '
                         f'fastest algorithms' for line in of("products")],
    "conformance": lambda: [launches()],
    "kernels": lambda: [launches()],
    "parity": gradients,
    "nccl": lambda: [f'{sum(line.get("ok") is True for line in of("nccl"))} of 4 right'],
    "launch": generations,
    "train": generations,
    "oom": lambda: [f'{sum(line["ok"] for line in of("out-of-memory"))} of 3 recovered'],
    "norm-test": lambda: [f'{line["model"]} {line["measure"]} {100 * line["cost"]:+.1f} %' for line in of("norm-test")],
    "sanitizer": lambda: [f'{sum(" SUMMARY: 0 " in line for line in text)} of 10 runs without an error'],
    "sweep": fastest,
    "peer": fastest,
    "speed": ratios,
    "long": ratios,
    "profile": lambda: [f'{line["model"]} {line["group"]} {line["milliseconds"]:.1f} ms' for line in of("group")],
}

skipped = [line.removeprefix("SKIPPED: ") for line in text if line.startswith("SKIPPED: ")]
try:
    print(", ".join(skipped or HEADLINES[phase]()) or "no result")
except (KeyError, TypeError) as error:
    print(f"unreadable log: {error!r}")
