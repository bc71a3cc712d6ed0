#!/usr/bin/env python3
"""Time and bandwidth by kernel, the slowest first, and by the groups of the prediction in docs/gpu.md, from ncu's raw
CSV in base units: slowest.py MODEL FILE"""
import collections, csv, json, sys

GROUPS = {"attention": "attention", "adamw": "AdamW", "squared_norm": "norm test", "add_gradient": "norm test",
          "sum_partials": "norm test", "nvjet": "matrix products", "cublas": "matrix products", "gemm": "matrix products"}


def group(kernel):
    return next((group for part, group in GROUPS.items() if part in kernel.lower()), "other kernels")


model, path = sys.argv[1:]
times, moved, launches = collections.Counter(), collections.Counter(), collections.Counter()
of_groups = collections.Counter()
lines = [line for line in open(path, errors="replace") if line.startswith('"')]
for row in csv.DictReader(lines):
    name = row.get("Kernel Name")
    # The second line has the units.
    if not name:
        continue
    kind = group(name)
    name = name.split("(")[0].split("<")[0][:60]
    time = float(row["gpu__time_duration.sum"].replace(",", "")) / 1e9
    times[name] += time
    of_groups[kind] += time
    moved[name] += float(row["dram__bytes.sum"].replace(",", ""))
    launches[name] += 1
total = sum(times.values())
if not total:
    sys.exit("no kernel in ncu's output")
for name, time in times.most_common(20):
    print(json.dumps(dict(result="slowest", model=model, kernel=name, launches=launches[name], milliseconds=1e3 * time,
                          percent=100 * time / total, gigabytes_per_second=moved[name] / time / 1e9)))
for name, time in of_groups.most_common():
    print(json.dumps(dict(result="group", model=model, group=name, milliseconds=1e3 * time, percent=100 * time / total)))
