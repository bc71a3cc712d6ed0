"""Print what the real `accelerate launch` gives to a rank: one JSON object a line, for every accelerate config below
a directory, and for generated configs and options that cover every key and every option.

    accelerate_launch.py RECIPES EVERY      every EVERY-th of these cases

accelerate parses the words and builds the environment. Replaced are the questions about hardware, packages and
ports, and the calls that start processes. The options come from accelerate's own parser.
"""

import contextlib
import importlib.machinery
import io
import json
import os
import random
import subprocess
import sys
import tempfile
import types
import warnings

import torch
import torch.distributed.run
import yaml

SURROUNDING = {"PATH": "/usr/bin:/bin", "HOME": "/home/user"}
SCRIPT = ["train.py", "--learning_rate", "1e-5"]
SEED = 21

# A valid config for each kind of launch.
BASES = {
    "one": {"distributed_type": "NO"},
    "cpu": {"distributed_type": "MULTI_CPU", "num_processes": 1, "use_cpu": True},
    "gpus": {"distributed_type": "MULTI_GPU", "num_processes": 4},
    "hosts": {
        "distributed_type": "MULTI_GPU",
        "num_processes": 8,
        "num_machines": 2,
        "machine_rank": 1,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29501,
    },
    "fsdp1": {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 1}},
    "fsdp2": {"distributed_type": "FSDP", "num_processes": 4, "fsdp_config": {"fsdp_version": 2}},
    "parallel": {
        "distributed_type": "FSDP",
        "num_processes": 8,
        "fsdp_config": {"fsdp_version": 2},
        "parallelism_config": {"parallelism_config_dp_shard_size": 4, "parallelism_config_tp_size": 2},
    },
    "deepspeed": {"distributed_type": "DEEPSPEED", "num_processes": 4, "deepspeed_config": {"zero_stage": 2}},
    "megatron": {
        "distributed_type": "MEGATRON_LM",
        "num_processes": 4,
        "megatron_lm_config": {"megatron_lm_tp_degree": 2},
    },
    "fp8": {"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "fp8"},
    "dynamo": {"distributed_type": "MULTI_GPU", "num_processes": 4, "dynamo_config": {"backend": "INDUCTOR"}},
}

FIELDS = {
    "distributed_type": ["MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "DEEPSPEED", "FSDP", "MEGATRON_LM", "TP", "no"],
    "mixed_precision": ["no", "fp16", "bf16", "fp8", "BF16", "fp32", None],
    "fp16": [True, False],
    "use_cpu": [True, False],
    "debug": [True, False],
    "num_processes": [1, 2, 16],
    "num_machines": [1],
    "machine_rank": [0],
    "main_process_ip": ["10.0.0.9", None],
    "main_process_port": [29600, None],
    "gpu_ids": ["all", "0,1,2,3,4,5,6,7", 0, None],
    "rdzv_backend": ["static", "c10d"],
    "same_network": [True, False],
    "main_training_function": ["main"],
    "enable_cpu_affinity": [True, False],
    "downcast_bf16": ["no", True],
    "tpu_env": [[]],
    "tpu_use_cluster": [False],
    "tpu_use_sudo": [False],
    "dynamo_backend": ["NO", "INDUCTOR", "eager"],
    "unknown": [1],
}

# The options that a section holds, the bases that read it, and keys that are no options.
SECTIONS = {
    "deepspeed_config": (("zero", "offload_", "gradient_", "deepspeed_"), ["deepspeed"], ["unknown", "num_processes"]),
    "fsdp_config": (("fsdp_",), ["fsdp1", "fsdp2"], ["fsdp_ignored_modules", "offload_params", "version", "unknown"]),
    "megatron_lm_config": (("megatron_lm_",), ["megatron"], ["megatron_lm_unknown"]),
    "fp8_config": (("fp8_",), ["fp8"], ["backend", "margin", "amax_history_length", "use_mxfp8_block_scaling"]),
    "parallelism_config": (("parallelism_config_",), ["parallel"], ["tp_size"]),
    "dynamo_config": (("dynamo_",), ["gpus", "one"], ["backend", "use_dynamic", "unknown"]),
}

VALUES = {
    "fsdp_sharding_strategy": ["FULL_SHARD", "SHARD_GRAD_OP"],
    "fsdp_reshard_after_forward": ["true", "False"],
    "fsdp_min_num_params": ["0", "2000"],
    "zero_stage": ["0", "1", "3"],
    "gradient_clipping": ["1.0", "1e-5", "1e16"],
    "gpu_ids": ["all", "0,1,2,3,4,5,6,7"],
    "num_processes": ["1", "2", "6"],
    "num_machines": ["1"],
    "tee": ["3"],
    "rdzv_conf": ["timeout=60"],
    "deepspeed_multinode_launcher": ["standard"],
    "fp8_override_linear_precision": ["true,false,true", "maybe"],
}


class Started(Exception):
    """The launcher reached the point at which it starts the ranks."""


def parser_options():
    """Every option of `accelerate launch` with a value or as a switch: name, string, type, choices."""
    from accelerate.commands.launch import launch_command_parser

    for action in launch_command_parser()._actions:
        if action.option_strings and action.dest not in ("help", "config_file"):
            kind = "switch" if action.nargs == 0 else getattr(action.type, "__name__", None) or "str"
            for string in action.option_strings:
                yield string.lstrip("-").replace("-", "_"), string, kind, action.choices


def values(name, kind, choices):
    if name in VALUES:
        return VALUES[name]
    if choices:
        return [*map(str, choices), "nonsense"]
    kinds = {"int": ["2", "x"], "float": ["0.5", "x"], "bool": ["True", ""], "str_to_bool": ["true", "no", "maybe"]}
    return kinds.get(kind, ["true", "Some Text"])


def patch():
    """Makes every question about the machine a constant, and every start of a process an exception."""
    import psutil

    import accelerate.commands.config.config_args as config_args
    import accelerate.commands.launch as launch
    import accelerate.utils.launch as utils

    torch.cuda.device_count = lambda: 8
    torch.cuda.is_available = lambda: True
    psutil.cpu_count = os.cpu_count = lambda *_, **__: 8
    for name in ("deepspeed", "deepspeed.launcher", "deepspeed.launcher.runner"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules["deepspeed.launcher.runner"].DEEPSPEED_ENVIRONMENT_NAME = ".deepspeed_env"
    answers = {f"is_{name}_available": False for name in "xpu mlu sdaa musa npu hpu neuron torch_xla sagemaker".split()}
    answers |= {f"is_{name}_available": True for name in ("bf16", "fp8", "deepspeed")}
    answers |= {"check_cuda_p2p_ib_support": True, "is_port_in_use": False, "get_free_port": 29555}
    for module in (launch, utils):
        for name, value in answers.items():
            if hasattr(module, name):
                setattr(module, name, lambda *_, value=value, **__: value)
    launch.default_config_file = config_args.default_config_file = "/nonexistent/default_config.yaml"

    def popen(command, env=None, **_):
        for word in [*command, *(env or {}).values()]:
            os.fsencode(word)  # the real call refuses anything but text
        raise Started(list(command), dict(os.environ if env is None else env), 1)

    class ElasticLaunch:
        def __init__(self, config, entrypoint):
            self.config, self.entrypoint = config, entrypoint

        def __call__(self, *arguments):
            world = self.config.nproc_per_node * self.config.max_nodes
            raise Started([self.entrypoint, *arguments], dict(os.environ), world)

    subprocess.Popen = popen
    torch.distributed.run.elastic_launch = ElasticLaunch
    sys.executable = "python"


def launched(words):
    """The environment, the command and the number of ranks, or the error."""
    from accelerate.commands.accelerate_cli import main

    os.environ.clear()
    os.environ.update(SURROUNDING)
    sys.argv = words
    error, command, environment, world = None, [], {}, None
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            main()
        error = "no process was started"
    except Started as started:
        command, environment, world = started.args
    except SystemExit:
        error = (output.getvalue().strip().splitlines() or ["exit"])[-1]
    except Exception as failure:  # noqa: BLE001 (every error of the launcher is a result)
        error = f"{type(failure).__name__}: {failure}"
    added = {name: value for name, value in environment.items() if SURROUNDING.get(name) != value}
    added.pop("TORCHINDUCTOR_CACHE_DIR", None)  # set by an import
    return {"environment": added, "command": command, "world": world, "error": error}


def with_key(base, section, key, value):
    config = json.loads(json.dumps(BASES[base]))
    (config if section is None else config.setdefault(section, {}))[key] = value
    return config


def cases(recipes):
    """Name, options, and the config's text with its suffix, or none."""
    options = list(parser_options())
    for root, _, names in sorted(os.walk(recipes)):
        for name in sorted(names):
            path = os.path.join(root, name)
            if name.endswith((".yaml", ".yml")):
                with open(path) as file:
                    text = file.read()
                if "distributed_type" in text:
                    for words in ([], ["--num_processes", "4"], ["--mixed_precision", "bf16", "--num_processes", "2"]):
                        yield f"{os.path.relpath(path, recipes)} {words}", words, (text, ".yaml")

    def dumped(config, suffix=".yaml"):
        return (yaml.safe_dump(config, sort_keys=False) if suffix == ".yaml" else json.dumps(config), suffix)

    for base, config in BASES.items():
        yield f"{base} as JSON", [], dumped(config, ".json")
        for key, found in FIELDS.items():
            for value in found:
                yield f"{base} {key}={value!r}", [], dumped(with_key(base, None, key, value))
        for name, string, kind, choices in options:
            for value in [None] if kind == "switch" else values(name, kind, choices):
                words = [string] if value is None else [string, value]
                yield f"{base} {words}", words, dumped(config)
    for section, (begins, bases, more) in SECTIONS.items():
        keys = {name: values(name, kind, choices) for name, _, kind, choices in options if name.startswith(begins)}
        for key, texts in [*keys.items(), *((key, ["true"]) for key in more)]:
            for value in [*(yaml.safe_load(text) for text in texts if text), True, False, None]:
                for base in [*bases, "hosts"]:
                    yield f"{base} {section}.{key}={value!r}", [], dumped(with_key(base, section, key, value))
    paths = {
        "fsdp_": ["--use_fsdp"],
        "deepspeed_": ["--use_deepspeed"],
        "zero": ["--use_deepspeed"],
        "offload_": ["--use_deepspeed"],
        "gradient_": ["--use_deepspeed"],
        "megatron_lm_": ["--use_megatron_lm"],
        "fp8_": ["--multi_gpu", "--mixed_precision", "fp8"],
        "parallelism_config_": ["--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config"],
    }
    for name, string, kind, choices in options:
        for begin, path in [*paths.items(), ("", ["--multi_gpu"]), ("", ["--cpu"])]:
            if name.startswith(begin):
                for value in [None] if kind == "switch" else values(name, kind, choices):
                    words = [*path, "--num_processes", "4", *([string] if value is None else [f"{string}={value}"])]
                    yield f"{words}", words, None
    yield from mixed(options, dumped)


def mixed(options, dumped, count=400):
    """Seeded combinations of a base, keys of its sections, and options."""
    rng = random.Random(SEED)
    for number in range(count):
        base = rng.choice(sorted(BASES))
        config = json.loads(json.dumps(BASES[base]))
        for section, (begins, bases, _) in SECTIONS.items():
            if base in bases:
                found = sorted({name: (kind, choices) for name, _, kind, choices in options if name.startswith(begins)}.items())
                for name, (kind, choices) in rng.sample(found, rng.randint(0, min(5, len(found)))):
                    config.setdefault(section, {})[name] = yaml.safe_load(values(name, kind, choices)[0])
        words = []
        for name, string, kind, choices in rng.sample(options, rng.randint(0, 4)):
            words += [string] if kind == "switch" else [string, values(name, kind, choices)[0]]
        yield f"mixed {number} {base} {words}", words, dumped(config, rng.choice([".yaml", ".json"]))


def main():
    patch()
    found = list(cases(sys.argv[1]))[:: int(sys.argv[2])]
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        tempfile.tempdir = directory  # torchrun makes a directory for logs before it starts anything
        for name, words, config in found:
            given = []
            if config is not None:
                given = ["--config_file", "config" + config[1]]
                with open(given[1], "w") as file:
                    file.write(config[0])
            expected = launched(["accelerate", "launch", *given, *words, *SCRIPT])
            if config is not None:
                given[1], config = "{config}", {"text": config[0], "suffix": config[1]}
            line = {"name": name, "words": ["accelerate", "launch", *given, *words, *SCRIPT], "config": config}
            print(json.dumps({**line, "expected": expected}))


if __name__ == "__main__":
    main()
