#!/usr/bin/env python3
"""Time and bandwidth by kernel, the slowest first, from ncu's raw CSV in base units: slowest.py FILE"""
import collections, csv, json, sys

times, moved, launches = collections.Counter(), collections.Counter(), collections.Counter()
lines = [line for line in open(sys.argv[1], errors="replace") if line.startswith('"')]
for row in csv.DictReader(lines):
    name = row.get("Kernel Name")
    # The second line has the units.
    if not name:
        continue
    name = name.split("(")[0].split("<")[0][:60]
    times[name] += float(row["gpu__time_duration.sum"].replace(",", "")) / 1e9
    moved[name] += float(row["dram__bytes.sum"].replace(",", ""))
    launches[name] += 1
total = sum(times.values())
if not total:
    sys.exit("no kernel in ncu's output")
for name, time in times.most_common(20):
    print(json.dumps(dict(result="slowest", kernel=name, launches=launches[name], milliseconds=1e3 * time,
                          percent=100 * time / total, gigabytes_per_second=moved[name] / time / 1e9)))
