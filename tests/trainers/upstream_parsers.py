"""Reads files with upstream's own parsers, for comparison with Evenkeel's readers.

Reads a JSON list of paths from standard input and prints one JSON object a line: the file and the numbers
that upstream reads, or `error` if upstream refuses the file.

- A recipe: its keys become the defaults of transformers' `HfArgumentParser`, as in TRL's `TrlParser`
  (f2cd577 `scripts/utils.py`, `set_defaults_with_config`).
- An accelerate config: `load_config_from_file`.
- A shell script: bash runs it with nothing but stand-ins for the launchers in PATH. Each prints its words,
  which upstream's parsers then read.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from accelerate.commands.config.config_args import load_config_from_file
from torch.distributed.run import get_args_parser
from transformers import HfArgumentParser, TrainingArguments

NUMBERS = {
    "per_device_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
STAND_IN = '#!/bin/bash -p\nprintf "%s\\0" "${0##*/}" "$@" >> "$CALLS"; printf "\\n\\0" >> "$CALLS"\n'
LAUNCHERS = ["accelerate", "deepspeed", "python", "python3", "torchrun"]


def numbers(arguments):
    return {ours: getattr(arguments, theirs) for ours, theirs in NUMBERS.items()}


def recipe(path):
    parser = HfArgumentParser(TrainingArguments)
    for action in parser._actions:
        action.required = False
    parser.set_defaults(**yaml.safe_load(path.read_text()))
    return numbers(parser.parse_args([]))


def accelerate_config(path):
    config = load_config_from_file(str(path))
    return {"processes": config.num_processes}


def calls(path):
    """The words of each launcher that a script starts."""
    with tempfile.TemporaryDirectory() as folder:
        for name in LAUNCHERS:
            stand_in = Path(folder, name)
            stand_in.write_text(STAND_IN)
            stand_in.chmod(0o755)
        found = Path(folder, "calls")
        found.touch()
        environment = {"PATH": folder, "CALLS": str(found), "HOME": folder}
        subprocess.run(
            ["/bin/bash", "--noprofile", str(path)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=20,
            check=False,
        )
        text = found.read_text()
    return [call.split("\0")[:-1] for call in text.split("\n\0") if call]


def script(path):
    trainings = [call for call in calls(path) if any("per_device_train" in word for word in call)]
    if len(trainings) != 1:
        return {"error": f"{len(trainings)} commands with a per-device batch"}
    name, *words = trainings[0]
    result = {}
    if name == "torchrun":
        launch = get_args_parser().parse_args(words)
        words = launch.training_script_args
        counts = (launch.nnodes, launch.nproc_per_node)
        if all(count.isdecimal() for count in counts):
            result["processes"] = int(counts[0]) * int(counts[1])
    parser = HfArgumentParser(TrainingArguments)
    for action in parser._actions:
        action.required = False
    arguments, _ = parser.parse_known_args([word for word in words if word])
    return result | numbers(arguments)


def read(path):
    if path.suffix == ".sh":
        return script(path)
    keys = yaml.safe_load(path.read_text())
    if not isinstance(keys, dict):
        return {"error": "no mapping"}
    if "distributed_type" in keys:
        return accelerate_config(path)
    return recipe(path) if NUMBERS["per_device_batch_size"] in keys else {"error": "no recipe"}


for name in json.load(sys.stdin):
    try:
        result = read(Path(name))
    except (Exception, SystemExit) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"file": name} | result), flush=True)
