"""Reads files with upstream's own parsers, for comparison with Evenkeel's readers.

Reads a JSON list of [path, trainer] from standard input and prints one JSON object a line: the file and the values
that upstream reads, or `error` if upstream refuses the file. `trainer` is the objective of one of TRL's trainers;
null: transformers' `Trainer`.

- A recipe of TRL, and a command of one of its scripts: TRL's `TrlParser` with the trainer's config.
- Another recipe: its keys become the defaults of transformers' `HfArgumentParser`.
- An accelerate config: `load_config_from_file`.
- A shell script: bash runs it with nothing but stand-ins for the launchers in PATH. Each prints its words,
  which upstream's parsers then read.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import trl
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from torch.distributed.run import get_args_parser
from transformers import HfArgumentParser, TrainingArguments
from trl.experimental.cpo import CPOConfig
from trl.experimental.orpo import ORPOConfig

STAND_IN = '#!/bin/bash -p\nprintf "%s\\0" "${0##*/}" "$@" >> "$CALLS"; printf "\\n\\0" >> "$CALLS"\n'
LAUNCHERS = ["accelerate", "deepspeed", "python", "python3", "torchrun"]
CONFIGS = {
    "dpo": trl.DPOConfig,
    "grpo": trl.GRPOConfig,
    "kto": trl.KTOConfig,
    "language-modelling": trl.SFTConfig,
    "orpo": ORPOConfig,
    "reward": trl.RewardConfig,
    "rloo": trl.RLOOConfig,
    "sft": trl.SFTConfig,
    "simpo": CPOConfig,
}
# A config checks these for the machine; none of them is compared.
OF_THE_MACHINE = ["bf16", "fp16", "tf32", "bf16_full_eval", "fp16_full_eval"]


@dataclass
class Former:
    """Keys that the installed versions lack, with their types in the versions that had them."""

    # transformers 5.0
    warmup_ratio: float = 0.0
    # TRL 0.19, 0.29
    max_seq_length: int | None = None
    max_prompt_length: int | None = None


def values(arguments, former):
    """The values by the names that the Rust side has for them."""
    steps = max(arguments.max_steps, 0)
    read = {
        "per_device_batch_size": arguments.per_device_train_batch_size,
        "gradient_accumulation_steps": arguments.gradient_accumulation_steps,
        "learning_rate": arguments.learning_rate,
        "warmup": arguments.warmup_steps or former.warmup_ratio,
        "steps": steps,
        # Not counted beside steps.
        "epochs": 0 if steps else arguments.num_train_epochs,
        "seed": arguments.seed,
    }
    # Evenkeel refuses warm-up of a schedule that has none.
    if arguments.lr_scheduler_type == "constant":
        read["warmup"] = 0
    if hasattr(arguments, "num_generations"):
        # TRL's last default of the prompts, before it dropped the key.
        read["sequence_length"] = (former.max_prompt_length or 512) + arguments.max_completion_length
    elif hasattr(arguments, "max_length"):
        read["sequence_length"] = former.max_seq_length or arguments.max_length
    return read


def of_trl(words, trainer):
    """What `TrlParser` reads. It hands on the words that only the script or another version knows."""
    parser = trl.TrlParser([CONFIGS[trainer], Former])
    words = [*words, "--use_cpu", "true", "--report_to", "none"]
    for key in OF_THE_MACHINE:
        words += [f"--{key}", "false"]
    if "--output_dir" not in words:
        words += ["--output_dir", "out"]
    arguments, former, *_ = parser.parse_args_and_config(words, return_remaining_strings=True)
    return values(arguments, former)


def of_transformers(keys, words):
    parser = HfArgumentParser([TrainingArguments, Former])
    for action in parser._actions:
        action.required = False
    parser.set_defaults(**keys)
    # Without an object of the class, which would check the machine.
    arguments, _ = parser.parse_known_args(words)
    return values(arguments, arguments)


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


def script(path, trainer):
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
    words = [word for word in words if word]
    # A launcher's own options are among the words that the parsers do not know.
    return result | (of_trl(words, trainer) if trainer else of_transformers({}, words))


def read(path, trainer):
    if path.suffix == ".sh":
        return script(path, trainer)
    keys = yaml.safe_load(path.read_text())
    if not isinstance(keys, dict):
        return {"error": "no mapping"}
    if "distributed_type" in keys:
        return accelerate_config(path)
    if "per_device_train_batch_size" not in keys:
        return {"error": "no recipe"}
    return of_trl(["--config", str(path)], trainer) if trainer else of_transformers(keys, [])


for name, trainer in json.load(sys.stdin):
    try:
        result = read(Path(name), trainer)
    except (Exception, SystemExit) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"file": name} | result), flush=True)
